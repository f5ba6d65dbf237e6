"""The configuration of a campaign: every field that can be wrong is named in two lines, and nothing is repaired."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miniverl.campaign.config import (
    CampaignConfig,
    check_identifier,
    load_config,
    model_identity,
    parse_cases,
    parse_tape,
)
from miniverl.campaign.config_sections import MODAL_MODEL
from miniverl.core import ConfigError, sha256_bytes
from miniverl.schemas.yamlio import dump_yaml

SHA = "ab" * 32
REF = {"path": "x.json", "sha256": SHA}
POLICY = {"endpoint": "https://proxy.example/v1", "model_env": "AGENT_MODEL", "credential_env": "AGENT_KEY"}
RATES = {"build_usd": "0.05", "sandbox_hourly_usd": 0.3, "egress_per_gib": 0.09, "teacher_request_usd": "0.02"}
TASK = {"instruction": "Continue.", "public": REF, "private": REF, "script": REF}
GOOD = {
    "format": "wsm.benchmark.v1",
    "name": "demo",
    "model": {"path": "model", "id": "tiny", "revision": "seed-0", "sha256": SHA},
    "provenance": {"code_revision": "0f" * 20, "dependency_lock": REF},
    "runtime": {"backend": "local", "grader_python": "python3", "actions": REF},
    "limits": dict.fromkeys(
        ["turns", "evaluations", "output_tokens", "wall_seconds", "command_seconds", "grader_seconds"], 9
    ),
    "budget": {"max_usd": "1.50", "prior_reserved_usd": 0, "price_checked_on": "2026-11-01", "rates": RATES},
    "statistics": {"seed": 20261130, "bootstrap_samples": 1000},
    "thresholds": {"improvement": 0.1, "regression": 0, "numeric_tolerance": 0.0},
    "review": {
        "data_rights": True,
        "semantic_overlap": False,
        "power": False,
        "owner": "lab",
        "private_artifact_store": None,
    },
    "regression": REF,
    "tasks": [TASK | {"id": "t1", "family": "f"}, TASK | {"id": "t2", "family": "f"}],
    "repetitions": 2,
}
GOOD = json.loads(json.dumps(GOOD))  # no part is shared with another
MODAL = copy.deepcopy(GOOD)
MODAL["runtime"]["backend"] = "modal"
MODAL["model"] |= {"id": MODAL_MODEL[0], "revision": MODAL_MODEL[1], "path": f"cache/snapshots/{MODAL_MODEL[1]}"}
GONE = object()


def changed(base: dict, path: str, value: object) -> dict:
    data = copy.deepcopy(base)
    *above, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    place = data
    for part in above:
        place = place[part]
    if value is GONE:
        del place[last]
    else:
        place[last] = value
    return data


def refusal(call, *arguments, **named) -> str:
    with pytest.raises(ConfigError) as caught:
        call(*arguments, **named)
    lines = caught.value.render().splitlines()
    assert len(lines) == 2 and lines[0].startswith("error: ") and lines[1].startswith("hint: ")
    return lines[0]


def read(data: dict) -> CampaignConfig:
    return CampaignConfig.from_mapping(data, ".")


def test_the_example_is_accepted_and_kept_as_written():
    config = read(GOOD)
    assert config.review.owner == "lab" and config.review.private_artifact_store is None
    assert config.review.semantic_overlap is False and config.tasks[1].scripted_stochastic is False
    rates = config.budget.rates
    assert (rates.build_usd, rates.sandbox_hourly_usd, rates.egress_per_gib) == tuple(
        map(Decimal, ("0.05", "0.3", "0.09"))
    )
    assert sum([read(changed(GOOD, "budget.max_usd", 0.1)).budget.max_usd] * 10) == 1


COUNTS = (0, -1, 1.0, "1", True, None, 2**63, GONE)
AMOUNTS = (-1, "-0.01", float("nan"), float("inf"), "nan", "Infinity", True, None, "1,50", "", GONE)
RATE_NAMES = [f"budget.rates.{name}" for name in RATES]
HASHES = (SHA.upper(), SHA[1:], SHA + "a", "g" * 64, SHA + "\n", "", 7, None, GONE)
BAD: list[tuple[str, tuple[object, ...]]] = [
    ("format", ("wsm.benchmark.v2", "", None, GONE)),
    ("name", ("../x", "", "a b", "a\0b", "a" * 65, "A", "a..b", ".a", "a/b", None, GONE)),
    ("model.path", ("", " ", None, GONE)),
    ("model.id", ("", GONE)),
    ("model.revision", ("", GONE)),
    ("model.sha256", HASHES),
    ("provenance.code_revision", ("0f0f0f0", "0F" * 20, "0f" * 21, "main", GONE)),
    ("provenance.dependency_lock", ("x.json", None, GONE)),
    ("provenance.dependency_lock.sha256", HASHES),
    ("runtime.backend", ("cloud", None, GONE)),
    ("runtime.grader_python", ("", None, GONE)),
    ("runtime.actions", (GONE, None, "x.json")),
    ("runtime.policy", (POLICY,)),
    ("runtime.require_isolation", (-1, 4, True, "3")),
    ("runtime.isolation", (3,)),
    *((f"limits.{name}", COUNTS) for name in GOOD["limits"]),
    ("limits.tokens", (1,)),
    *((name, AMOUNTS) for name in ("budget.max_usd", "budget.prior_reserved_usd", *RATE_NAMES)),
    ("budget.price_checked_on", ("2026-13-01", "2026-1-1", "20261101", "yesterday", 20261101, None, GONE)),
    ("statistics.seed", (-1, 1.0, True, "1", GONE)),
    ("statistics.bootstrap_samples", (99, 100_001, True, 1000.0, GONE)),
    ("thresholds", (0.1, [], True, {})),
    *((f"thresholds.{name}", (-0.1, float("nan"), float("inf"), "0", None, True, GONE)) for name in GOOD["thresholds"]),
    *((f"review.{name}", (1, "true", None, GONE)) for name in ("data_rights", "semantic_overlap", "power")),
    *((f"review.{name}", ("", "  ", False, GONE)) for name in ("owner", "private_artifact_store")),
    ("regression", (GONE, None, [])),
    ("tasks", ([], {}, None, GONE)),
    ("tasks.1.id", ("t1", "../t", "T1", "", GONE)),
    ("tasks.1.family", ("F", "", GONE)),
    ("tasks.1.instruction", ("", " ", None, GONE)),
    *((f"tasks.1.{name}", (GONE, None, SHA)) for name in ("public", "private", "script")),
    *((f"tasks.1.{name}.extra", (1,)) for name in ("public", "private", "script")),
    ("tasks.0.private.path", ("", 7, GONE)),
    ("tasks.1.script.sha256", ("cd" * 32,)),
    ("tasks.1.scripted_stochastic", (True, 1, "true", None)),
    ("repetitions", (0, -1, 1.0, "1", True, None, GONE)),
    ("notes", ("free text",)),
]


@pytest.mark.parametrize(("path", "values"), BAD, ids=[path for path, _ in BAD])
def test_a_refusal_names_the_field(path, values):
    for value in values:
        told = refusal(read, changed(GOOD, path, value))
        expected = "runtime.actions" if path == "runtime.policy" else path
        assert expected in told, (value, told)


def test_bounds_that_are_accepted():
    for path, values in (
        ("statistics.bootstrap_samples", (100, 100_000)),
        ("statistics.seed", (0,)),
        ("name", ("a" * 64, "0-x_y.z")),
        ("provenance.code_revision", ("0f" * 32,)),
        ("thresholds", (None, GONE)),
        ("review.owner", (None,)),
        ("budget.max_usd", (0, "0", 1e-6, 10**9)),
        ("runtime.require_isolation", (0, 3, None)),
    ):
        for value in values:
            read(changed(GOOD, path, value))


def test_modal_is_pinned_to_one_model_and_to_positive_prices():
    read(MODAL)
    assert "model.id" in refusal(read, changed(MODAL, "model.id", "other/model"))
    assert "model.revision" in refusal(read, changed(MODAL, "model.revision", "main"))
    for path in ("model", "snapshots/other", f"snapshots/{MODAL_MODEL[1]}/model", MODAL_MODEL[1]):
        assert "model.path" in refusal(read, changed(MODAL, "model.path", path))
    for name in RATE_NAMES:
        assert name in refusal(read, changed(MODAL, name, "0.00"))
        read(changed(GOOD, name, "0.00"))


def test_a_family_agrees_about_its_script_and_other_families_need_not():
    other = changed(changed(GOOD, "tasks.1.script.sha256", "cd" * 32), "tasks.1.family", "g")
    assert read(changed(other, "tasks.1.scripted_stochastic", True)).tasks[1].scripted_stochastic
    both = changed(changed(GOOD, "tasks.0.scripted_stochastic", True), "tasks.1.scripted_stochastic", True)
    assert all(task.scripted_stochastic for task in read(both).tasks)


def test_a_policy_keeps_its_endpoint_to_itself_and_holds_no_credential():
    data = changed(changed(GOOD, "runtime.actions", GONE), "runtime.policy", POLICY)
    told = json.dumps(read(data).runtime.policy.public())
    assert "proxy.example" not in told and "AGENT_KEY" in told and "prompt_bytes" in told
    for path, values in (
        ("endpoint", ("http://proxy.example/v1", "https://me:word@proxy.example", "proxy.example", "https://", "https://p/?k=1", GONE)),
        ("credential_env", ("sk-word", "", "A B", "AGENT_MODEL", GONE)),
        ("model_env", ("1A", GONE)),
        ("prompt_bytes", (0, True)),
        ("request_seconds", (0, 1.5)),
        ("credential", ("word",)),
    ):  # fmt: skip
        for value in values:
            place = "runtime.policy"
            told = refusal(read, changed(data, f"{place}.{path}", value))
            assert place in told and ("model_env" if value == "AGENT_MODEL" else path) in told


def test_json_and_yaml_say_the_same_and_paths_start_at_the_file(tmp_path, monkeypatch):
    for name, text in (("c.json", json.dumps(GOOD)), ("c.yaml", dump_yaml(GOOD)), ("c.yml", json.dumps(GOOD))):
        (tmp_path / name).write_text(text)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    found = [load_config(Path("..", name)) for name in ("c.json", "c.yaml", "c.yml")]
    assert found[0] == found[1] == found[2] == load_config(tmp_path / "c.json")
    assert {str(config.resolved("x.json")) for config in found} == {str(tmp_path / "x.json")}
    assert found[0].resolved("/abs/x") == Path("/abs/x")
    unquoted = dump_yaml(GOOD).replace("'2026-11-01'", "2026-11-01")
    assert unquoted != dump_yaml(GOOD)
    (tmp_path / "c.yaml").write_text(unquoted)
    assert load_config(tmp_path / "c.yaml") == found[0]


def test_a_file_that_is_no_configuration(tmp_path):
    path = tmp_path / "c.json"
    assert "c.json" in refusal(load_config, path)
    for text in ("", "[]", "{", '{"name": "a", "name": "b"}', '{"repetitions": NaN}', "null", "{}"):
        path.write_text(text)
        refusal(load_config, path)
    path.write_bytes(b"\xff")
    assert "byte 0" in refusal(load_config, path)
    (tmp_path / "c.yaml").write_text(dump_yaml(changed(GOOD, "repetitions", 0)))
    assert "repetitions = 0" in refusal(load_config, tmp_path / "c.yaml")


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.just([]), st.just({}), st.just([REF])
)


def places(data: object, prefix: str = "") -> list[str]:
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [path for key, value in items for path in (f"{prefix}{key}", *places(value, f"{prefix}{key}."))]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(places(GOOD)), JUNK)
def test_junk_anywhere_is_accepted_or_named(path, value):
    try:
        read(changed(GOOD, path, value))
    except ConfigError as error:
        assert path.split(".")[0] in error.message and len(error.render().splitlines()) == 2


def test_case_files():
    assert parse_cases('[{"prompt": " ", "target": "é"}]'.encode())[0]["target"] == "é"
    good = {"prompt": "p", "target": "t"}
    for bad in (
        good | {"note": ""}, {"prompt": "p"}, {"target": "t"}, good | {"prompt": ""}, good | {"target": None}, good | {"target": 3},
        ["p", "t"], None,
    ):  # fmt: skip
        told = refusal(parse_cases, json.dumps([good, bad]).encode(), "tasks.0.public")
        assert "tasks.0.public[1]" in told
    for raw in (b"[]", b"{}", b"\xff", b"", b'[{"prompt": "\\ud800", "target": "t"}]', json.dumps(good).encode()):
        assert "regression" in refusal(parse_cases, raw, "regression")


def test_a_tape_has_bytes_and_every_task_and_repetition():
    config = read(GOOD)
    runs = {"t1": [[{"kind": "submit"}]] * 2, "t2": [[{"kind": "evaluate"}, {"kind": "python", "source": "x"}]] * 2}

    def tape(**changes: object) -> bytes:
        return json.dumps({"format": "wsm.actions.v1", "trials": runs} | changes).encode()

    assert parse_tape(config, tape()) == runs
    for name, bad in (
        ("t2", {"t1": runs["t1"]}), ("t3", runs | {"t3": runs["t1"]}), ("trials.t1", runs | {"t1": runs["t1"][:1]}),
        ("trials.t1", runs | {"t1": [[], []]}), ("trials.t1", runs | {"t1": "submit"}),
        ("trials.t2.1.0", runs | {"t2": [runs["t2"][0], [{"kind": "python", "source": "é" * 19}]]}),
        ("trials.t2.0.0", runs | {"t2": [[{"kind": "python", "source": ""}], [{"kind": "submit"}]]}),
    ):  # fmt: skip
        assert name in refusal(parse_tape, config, tape(trials=bad))
    assert "allowance of 36" in refusal(
        parse_tape, config, tape(trials=runs | {"t1": [[{"kind": "python", "source": "x" * 37}]] * 2})
    )
    assert "no tape" in refusal(parse_tape, config, tape(format="wsm.actions.v2"))


def folder_of(root: Path, **files: bytes) -> Path:
    root.mkdir(parents=True)
    for name, data in files.items():
        (root / name).write_bytes(data)
    return root


def test_a_model_is_the_names_and_bytes_of_its_files(tmp_path):
    folder = folder_of(tmp_path / "m", b=b"two", a=b"one")
    (folder / "z").mkdir()
    (folder / "z" / ".c").write_bytes(b"")
    identity, files = model_identity(folder)
    assert (
        identity == "47d5ef0ef9f48ec3906e1bc49ac6d937d72a6b92c3094a1ec0aace058302c846"
    )  # of the mapping written out by hand
    assert files["a"] == sha256_bytes(b"one")
    assert list(files) == ["a", "b", "z/.c"]
    os.utime(folder / "a", (1, 1))
    (folder / "a").chmod(0o600)
    assert model_identity(folder)[0] == identity
    (folder / "a").write_bytes(b"onf")
    assert model_identity(folder)[0] != identity
    (folder / "a").write_bytes(b"one")
    (folder / "z" / ".c").rename(folder / "z" / "c")
    assert model_identity(folder)[0] != identity


def test_links_count_only_inside_a_hub_cache(tmp_path):
    blobs = folder_of(tmp_path / "models--org--m" / "blobs", aa=b"weights")
    snapshot = folder_of(blobs.parent / "snapshots" / "1")
    (snapshot / "w").symlink_to("../../blobs/aa")
    plain = folder_of(tmp_path / "plain", w=b"weights")
    assert model_identity(snapshot) == model_identity(plain)
    outside = folder_of(tmp_path / "out", w=b"weights") / "w"
    for place in (plain, snapshot):
        for target in (outside, outside.parent, tmp_path / "gone", place / "link"):
            (place / "link").symlink_to(target)
            assert "model.path" in refusal(model_identity, place)
            (place / "link").unlink()
    (plain / "inner").symlink_to(plain / "w")
    assert "'inner'" in refusal(model_identity, plain)


def test_what_is_no_model_folder(tmp_path):
    for path in (tmp_path / "gone", tmp_path / ("x" * 300), tmp_path / "a\0b"):
        assert "no folder" in refusal(model_identity, path)
    assert "empty" in refusal(model_identity, folder_of(tmp_path / "empty"))
    os.mkfifo(folder_of(tmp_path / "pipe") / "w")
    assert "no regular file" in refusal(model_identity, tmp_path / "pipe")
    (folder_of(tmp_path / "odd") / os.fsdecode(b"\xff")).write_bytes(b"")
    assert "model.path" in refusal(model_identity, tmp_path / "odd")


def test_identifiers():
    assert check_identifier("a.b-c_0") == "a.b-c_0"
    assert "trial = 'a..b'" in refusal(check_identifier, "a..b", "trial")


def test_nothing_of_this_needs_torch():
    modules = "import miniverl.campaign.config, miniverl.campaign.preflight, miniverl.campaign.fixture, miniverl.campaign.probe"
    found = subprocess.run(
        [sys.executable, "-c", f"import sys; {modules}; print([n for n in ('torch', 'transformers', 'tokenizers') if n in sys.modules])"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert found.stdout.strip() == "[]"
