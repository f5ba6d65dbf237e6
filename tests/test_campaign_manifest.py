"""A sealed campaign: its schedule, its inputs, what is public of it, and that it opens only untouched."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from crash import KILLED, killed_at
from hypothesis import given, settings
from hypothesis import strategies as st
from sealed_campaign import ENVIRONMENT, SECRETS, sealed, write_config

import miniverl
from miniverl.campaign import manifest
from miniverl.campaign.config import load_config, model_identity
from miniverl.campaign.manifest import (
    ARMS,
    open_campaign,
    package_digest,
    prepare,
    probe_environment,
    require_same_code,
    route_fingerprint,
    schedule,
)
from miniverl.campaign.records import Layout, Schema, safe_id
from miniverl.core import ConfigError, DataError, MiniVerlError, StoreError, canonical_json, sha256_file

LIVE = {
    "backend": "local",
    "grader_python": sys.executable,
    "policy": {"endpoint": SECRETS["endpoint"], "model_env": "WSM_TEST_MODEL", "credential_env": "WSM_TEST_KEY"},
}


def freeze(config: Path, out: Path) -> Layout:
    return prepare(config, out, environment=ENVIRONMENT, isolation=lambda: 0)


@pytest.fixture(scope="module")
def campaign(tmp_path_factory):
    """One sealed campaign; tests give back what they take."""
    return sealed(tmp_path_factory.mktemp("campaign"))


# ---------------------------------------------------------------- schedule

designs = st.lists(
    st.tuples(st.from_regex(r"[a-z0-9][a-z0-9._-]{0,63}", fullmatch=True), st.booleans()),
    min_size=1,
    max_size=6,
    unique_by=lambda task: task[0],
).filter(lambda tasks: not any(".." in name for name, _ in tasks))


@given(designs, st.integers(1, 7))
def test_a_schedule_counts_what_it_should_and_is_a_function_of_the_design(tasks, repetitions):
    config = SimpleNamespace(
        tasks=[SimpleNamespace(id=name, family=f"f{s}", scripted_stochastic=s) for name, s in tasks],
        repetitions=repetitions,
    )
    trials = schedule(config)
    assert trials == schedule(config) and [trial.index for trial in trials] == list(range(1, len(trials) + 1))
    assert len(trials) == sum(1 + (repetitions if s else 1) + repetitions for _, s in tasks)
    assert len({trial.id.casefold() for trial in trials}) == len(trials) == len({safe_id(trial.id) for trial in trials})
    for name, stochastic in tasks:
        runs = {arm: [t.repetition for t in trials if (t.task, t.arm) == (name, arm)] for arm in ARMS}
        everything = list(range(1, repetitions + 1))
        assert runs == {"unchanged": [1], "scripted": everything if stochastic else [1], "agent": everything}
    assert all(re.fullmatch(rf"{t.index:04d}-{t.arm}-{re.escape(t.task)}-{t.repetition:02d}", t.id) for t in trials)


def test_unchanged_weights_come_first_and_repetitions_go_round():
    task = [SimpleNamespace(id=name, family="f", scripted_stochastic=True) for name in "ab"]
    trials = schedule(SimpleNamespace(tasks=task, repetitions=2))
    assert [t.arm for t in trials[:2]] == ["unchanged"] * 2 and "unchanged" not in {t.arm for t in trials[2:]}
    assert [t.repetition for t in trials[2:]] == [1] * 4 + [2] * 4


def test_the_whole_schedule_stands_in_the_manifest(campaign):
    assert list(campaign.schedule) == schedule(campaign.config)
    assert [row["id"] for row in campaign.manifest["schedule"]] == [trial.id for trial in campaign.schedule]
    assert len(campaign.schedule) == 9


# ---------------------------------------------------------------- what is public


def public_text(root: Path) -> str:
    return "".join(
        path.read_text(errors="replace")
        for path in root.rglob("*")
        if path.is_file() and "restricted" not in path.relative_to(root).parts
    )


def test_nothing_private_and_no_path_is_public(tmp_path, monkeypatch):
    monkeypatch.setenv("WSM_TEST_MODEL", "canary-model")
    monkeypatch.setenv("WSM_TEST_KEY", "canary-credential")
    campaign = sealed(tmp_path, runtime=LIVE)
    public = public_text(campaign.layout.root)
    for secret in (*SECRETS.values(), "canary", str(tmp_path), "/canary", sys.executable, "improve suffix"):
        assert secret not in public
    for path in campaign.layout.root.rglob("*"):
        assert not path.is_file() or "canary-credential" not in path.read_text(errors="replace")
    assert SECRETS["endpoint"] in campaign.layout.restricted_config.read_text()
    assert campaign.manifest["policy"]["prompt_bytes"] == 65536 and campaign.manifest["actions_sha256"] is None
    key = campaign.restricted["route_key"]
    assert campaign.manifest["route_fingerprint"] == route_fingerprint(SECRETS["endpoint"], key)
    assert key not in public and campaign.restricted["salt"] not in public


def test_the_route_fingerprint_follows_the_endpoint_and_the_key_of_the_campaign():
    one = route_fingerprint("https://a.example/v1", "ab" * 32)
    assert one == route_fingerprint("https://a.example/v1", "ab" * 32) and re.fullmatch("[0-9a-f]{64}", one)
    assert one not in (
        route_fingerprint("https://b.example/v1", "ab" * 32),
        route_fingerprint("https://a.example/v1", "ac" * 32),
    )


def test_two_preparations_differ_in_the_random_keys_and_in_nothing_else(tmp_path):
    config = write_config(tmp_path / "source")
    first, second = (open_campaign(freeze(config, tmp_path / name).root) for name in "ab")
    assert first.restricted["salt"] != second.restricted["salt"]
    assert first.restricted["route_key"] != second.restricted["route_key"]
    differing = {key for key in first.manifest if first.manifest[key] != second.manifest[key]}
    assert differing == {"restricted_config_sha256"}


def test_the_manifest_counts_and_names(campaign):
    found = campaign.manifest
    assert found["format"] == "wsm.benchmark.v1" and found["schema"] == Schema.MANIFEST
    assert [(task["public"]["count"], task["private"]["count"]) for task in found["tasks"]] == [(3, 2), (3, 2)]
    assert found["regression"]["count"] == 2 and found["label"] == "exploratory" and found["label_reasons"]
    assert found["provenance"]["attributed_revision"] == "a" * 40
    assert found["provenance"]["package_sha256"] == package_digest()
    assert found["environment"] == ENVIRONMENT and found["isolation"]["level"] == 0
    assert set(found["provenance"]["controller_versions"]) == set(found["provenance"]["grader_versions"])
    assert found["limits"]["synthetic_bytes_per_output_token"] == 4
    assert found["budget"]["rates"]["build_usd"] == "0.05" and found["thresholds"] is None
    assert campaign.task("suffix")["script"]["actions"] == 1
    with pytest.raises(DataError, match="no task"):
        campaign.task("other")


# ---------------------------------------------------------------- code


def test_the_package_digest_sees_what_no_commit_tells(tmp_path):
    copy = tmp_path / "miniverl"
    shutil.copytree(Path(miniverl.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    before = package_digest(copy)
    with open(copy / "core.py", "a") as stream:
        stream.write("# not committed\n")
    changed = package_digest(copy)
    (copy / "core.py").rename(copy / "core2.py")
    assert len({before, changed, package_digest(copy)}) == 3
    (copy / "__pycache__").mkdir()
    (copy / "__pycache__" / "core.cpython-311.pyc").write_bytes(b"x")
    (copy / "core2.py").rename(copy / "core.py")
    assert package_digest(copy) == changed


def test_another_source_is_refused_for_running_but_can_be_read(campaign, monkeypatch):
    monkeypatch.setattr(manifest, "package_digest", lambda: "0" * 64)
    assert open_campaign(campaign.layout.root).manifest == campaign.manifest
    with pytest.raises(DataError, match="sealed with"):
        require_same_code(campaign)


def test_versions_of_another_grader_are_recorded(tmp_path):
    """An interpreter with other packages: a wrapper that starts this one and then answers with another version."""
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\n{sys.executable} "$@" | sed s/numpy.:\\ .[0-9.]*/numpy\\":\\ \\"0.0.1/\n')
    wrapper.chmod(0o700)
    campaign = sealed(tmp_path / "c", runtime={"backend": "local", "grader_python": str(wrapper)})
    found = campaign.manifest["provenance"]
    assert found["grader_versions"]["versions"]["numpy"] == "0.0.1" != found["controller_versions"]["versions"]["numpy"]
    assert str(wrapper) not in campaign.layout.manifest.read_text()
    assert campaign.restricted["grader_python"] == str(wrapper)


def test_a_grader_that_cannot_load_the_model_is_told_in_two_lines(campaign):
    for python in ("/bin/false", "/absent/python"):
        with pytest.raises(ConfigError, match="runtime.grader_python") as caught:
            probe_environment(python, campaign.layout.snapshot)
        assert len(caught.value.render().splitlines()) == 2


# ---------------------------------------------------------------- preparing


def test_inputs_are_copies_and_the_originals_are_free(tmp_path):
    campaign = sealed(tmp_path)
    source = tmp_path / "source"
    (source / "suffix.private.json").write_text("[]")
    with open(source / "model" / "model.safetensors", "r+b") as stream:
        stream.write(b"edited in place")
    again = open_campaign(campaign.layout.root)
    assert json.loads(again.retained("tasks/suffix/private").read_text())[0]["prompt"].startswith(SECRETS["private"])
    assert (again.layout.snapshot / "model.safetensors").read_bytes() == b"not really tensors"
    shutil.rmtree(source)
    assert open_campaign(campaign.layout.root).manifest_sha256 == campaign.manifest_sha256


def test_the_retained_model_is_the_pinned_one(campaign):
    layout = campaign.layout
    assert model_identity(layout.snapshot)[0] == campaign.manifest["model"]["sha256"] == campaign.config.model.sha256
    assert (layout.snapshot / "sub" / "extra.txt").is_file()
    files = json.loads(layout.model_index.read_text())
    assert all(sha256_file(layout.inputs / sha) == sha for sha in files.values())


def test_a_prepared_campaign_is_owner_only_under_any_umask(tmp_path):
    config, old = write_config(tmp_path / "source"), os.umask(0)
    try:
        root = freeze(config, tmp_path / "campaign").root
    finally:
        os.umask(old)
    seen = {(path.is_dir(), stat.S_IMODE(path.stat().st_mode)) for path in [root, *root.rglob("*")]}
    assert seen == {(True, 0o700), (False, 0o600)}


@pytest.mark.parametrize("field", ["regression", "tape", "model"])
def test_a_failed_preflight_writes_nothing(tmp_path, field):
    config = write_config(tmp_path / "source")
    victim = {"regression": "regression.json", "tape": "tape.json", "model": "model/config.json"}[field]
    (tmp_path / "source" / victim).write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError) as caught:
        freeze(config, tmp_path / "campaign")
    assert sorted(tmp_path.rglob("*")) == before and len(caught.value.render().splitlines()) == 2


@pytest.mark.parametrize("changed", ["regression.json", "model/model.safetensors"])
def test_what_changes_between_the_check_and_the_copy_is_noticed(tmp_path, monkeypatch, changed):
    config, real = write_config(tmp_path / "source"), manifest.preflight

    def check_then_change(*args, **kwargs):
        found = real(*args, **kwargs)
        (tmp_path / "source" / changed).write_text("[]")
        return found

    monkeypatch.setattr(manifest, "preflight", check_then_change)
    with pytest.raises(MiniVerlError):
        freeze(config, tmp_path / "campaign")
    assert not (tmp_path / "campaign").exists()


def test_a_model_file_that_would_be_taken_for_a_leftover_is_refused(tmp_path):
    config = write_config(tmp_path / "source")
    (tmp_path / "source" / "model" / ".tmp-weights").write_text("x")
    data = json.loads(config.read_text())
    data["model"]["sha256"] = model_identity(tmp_path / "source" / "model")[0]
    config.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match="model.path"):
        freeze(config, tmp_path / "campaign")
    assert not (tmp_path / "campaign").exists()


@pytest.mark.parametrize("kind", ["campaign", "empty folder", "file", "dangling link"])
def test_a_campaign_is_prepared_in_a_new_folder_only(tmp_path, kind):
    config, out = write_config(tmp_path / "source"), tmp_path / "out"
    {
        "campaign": lambda: freeze(config, out),
        "empty folder": out.mkdir,
        "file": lambda: out.write_text("x"),
        "dangling link": lambda: out.symlink_to(tmp_path / "absent"),
    }[kind]()
    before = sorted(path.lstat().st_mtime_ns for path in tmp_path.rglob("*"))
    with pytest.raises(StoreError, match="exists already"):
        freeze(config, out)
    assert sorted(path.lstat().st_mtime_ns for path in tmp_path.rglob("*")) == before


def test_a_kill_while_preparing_leaves_no_campaign_until_the_seal(tmp_path, monkeypatch):
    config, n, opened = write_config(tmp_path / "source"), 0, []
    checked = manifest.preflight(load_config(config), isolation=lambda: 0)
    monkeypatch.setattr(manifest, "preflight", lambda *args, **kwargs: checked)
    while True:
        n += 1
        out = tmp_path / f"c{n}"
        status, _, _ = killed_at(n, lambda say, out=out: freeze(config, out), ("link",))
        assert status in (0, KILLED)
        try:
            open_campaign(out)
            opened.append(True)
        except StoreError as error:
            assert "no seal" in error.message
            opened.append(False)
            if out.exists():
                with pytest.raises(StoreError, match="exists already"):
                    freeze(config, out)
        if status == 0:
            break
    assert opened == [False] * (n - 1) + [True] and n > 15


def test_the_seal_is_the_last_file(tmp_path, monkeypatch):
    linked, real = [], os.link
    monkeypatch.setattr(os, "link", lambda a, b, **kw: (linked.append(Path(b).name), real(a, b, **kw))[1])
    campaign = sealed(tmp_path)
    assert linked[-3:] == ["config.json", "manifest.json", "seal.json"]
    assert campaign.seal["manifest_sha256"] == sha256_file(campaign.layout.manifest)
    digests = {campaign.seal["restricted_config_sha256"], campaign.manifest["restricted_config_sha256"]}
    assert digests == {sha256_file(campaign.layout.restricted_config)}


# ---------------------------------------------------------------- opening


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_no_byte_of_a_sealed_campaign_can_change(campaign, data):
    root = campaign.layout.root
    files = sorted(p for p in root.rglob("*") if p.is_file() and p.name != "seal.json")
    path = data.draw(st.sampled_from(files))
    whole = path.read_bytes()
    raw = bytearray(whole)
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(bytes(raw))
    try:
        with pytest.raises(DataError):
            open_campaign(root)
    finally:
        path.write_bytes(whole)


@pytest.mark.parametrize("name", ["manifest_sha256", "restricted_config_sha256", "schema", "extra", "not an object"])
def test_a_seal_of_another_form_or_for_another_campaign_is_refused(campaign, name):
    path = campaign.layout.seal
    whole = path.read_text()
    seal = json.loads(whole)
    path.write_text("[]\n" if name == "not an object" else canonical_json({**seal, name: "0" * 64}))
    try:
        with pytest.raises(DataError):
            open_campaign(campaign.layout.root)
    finally:
        path.write_text(whole)


def test_files_of_two_campaigns_do_not_mix(tmp_path):
    first, second = sealed(tmp_path / "a"), sealed(tmp_path / "b")
    for name in ("manifest", "restricted_config"):
        mine, other = getattr(first.layout, name), getattr(second.layout, name)
        whole = mine.read_bytes()
        mine.write_bytes(other.read_bytes())
        with pytest.raises(DataError):
            open_campaign(first.layout.root)
        mine.write_bytes(whole)
    assert open_campaign(first.layout.root)


@pytest.mark.parametrize(
    "what",
    ["extra input", "extra model file", "hidden model file", "link in the model", "removed input", "link as input"],
)
def test_nothing_may_be_added_removed_or_redirected(campaign, what):
    layout = campaign.layout
    blob = campaign.retained("regression")
    kept = blob.read_bytes()
    elsewhere = layout.root.parent / "elsewhere"
    elsewhere.write_bytes(kept)
    added = {
        "extra input": (layout.inputs / ("0" * 64), lambda p: p.write_text("x")),
        "extra model file": (layout.snapshot / "tokenizer.json", lambda p: p.write_text("{}")),
        "hidden model file": (layout.snapshot / ".tmp-config.json", lambda p: p.write_text("{}")),
        "link in the model": (layout.snapshot / "generation.json", lambda p: p.symlink_to(elsewhere)),
        "removed input": (blob, lambda p: p.unlink()),
        "link as input": (blob, lambda p: (p.unlink(), p.symlink_to(elsewhere))),
    }
    path, change = added[what]
    change(path)
    try:
        with pytest.raises(DataError, match="not sealed|missing or changed"):
            open_campaign(layout.root)
    finally:
        path.unlink(missing_ok=True)
        blob.exists() or blob.write_bytes(kept)
    assert open_campaign(layout.root)


def test_a_crash_leftover_beside_the_inputs_is_not_an_intrusion(campaign):
    stray = campaign.layout.inputs / ".tmp-abc"
    stray.write_text("torn")
    assert open_campaign(campaign.layout.root)
    stray.unlink()


@pytest.mark.parametrize("where", ["absent", "empty", "file"])
def test_what_is_no_campaign_is_told_in_two_lines(tmp_path, where):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="no seal") as caught:
        open_campaign(tmp_path / where)
    assert len(caught.value.render().splitlines()) == 2


def test_a_relative_configuration_is_resolved_at_its_file_and_bound_absolutely(tmp_path, monkeypatch):
    config = write_config(tmp_path / "source")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    campaign = open_campaign(freeze(Path("../source") / config.name, Path("../campaign")).root)
    assert campaign.restricted["folder"] == str(tmp_path / "source")
    assert campaign.restricted["retained"]["regression"]["source"] == str(tmp_path / "source" / "regression.json")
    assert campaign.config.model_dump() == load_config(config).model_dump()


@pytest.mark.slow
def test_the_sealed_environment_is_the_one_in_which_the_grader_computes(tmp_path):
    """The probe and the grader start the same interpreter in different ways; they must see the same numbers."""
    pytest.importorskip("torch")
    from miniverl.campaign.fixture import write_fixture
    from miniverl.campaign.grading import GraderClient

    config = write_fixture(tmp_path / "fixture")
    campaign = open_campaign(prepare(config, tmp_path / "campaign", isolation=lambda: 0).root)
    task = campaign.schedule[0].task
    with GraderClient(campaign.restricted["grader_python"], campaign) as grader:
        told = grader.pristine(task, 60).fingerprint
    assert campaign.manifest["environment"]["threads"] == 1
    assert {key: told[key] for key in campaign.manifest["environment"]} == campaign.manifest["environment"]
