"""Preflight: what can be known before a campaign is looked at, nothing is written, and no text of a private case is repeated."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miniverl.campaign import preflight as module
from miniverl.campaign.config import load_config, model_identity
from miniverl.campaign.config_sections import MODAL_MODEL
from miniverl.campaign.fixture import write_fixture
from miniverl.campaign.preflight import FLOORS, Coverage, label_of, normalized, preflight
from miniverl.campaign.probe import PACKAGES, probe_grader
from miniverl.core import ConfigError, canonical_json, package_versions, sha256_bytes

CANARY = "canary-4711"
SITE = next(path for path in sys.path if path.endswith("site-packages"))


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return write_fixture(tmp_path_factory.mktemp("fixture") / "demo").parent


class Campaign:
    """A copy of the example whose parts can be replaced; digests follow."""

    def __init__(self, original: Path, folder: Path) -> None:
        self.folder = Path(shutil.copytree(original, folder))
        self.data = json.loads((folder / "config.json").read_text())
        self.environ: dict[str, str] = {}

    def write(self, ref: dict, content: object) -> None:
        text = content if isinstance(content, str) else json.dumps(content)
        (self.folder / ref["path"]).write_text(text)
        ref["sha256"] = sha256_bytes(text)

    def pin_model(self) -> None:
        self.data["model"]["sha256"] = model_identity(self.folder / "model")[0]

    def check(self, **options):
        (self.folder / "config.json").write_text(canonical_json(self.data))
        named = {"isolation": lambda: 0, "environ": self.environ} | options
        return preflight(load_config(self.folder / "config.json"), **named)

    def refused(self, *words: str, **options) -> str:
        (self.folder / "config.json").write_text(canonical_json(self.data))
        before = snapshot(self.folder)
        with pytest.raises(ConfigError) as caught:
            self.check(**options)
        told = caught.value.render()
        assert len(told.splitlines()) == 2 and all(word in told for word in words), told
        assert snapshot(self.folder) == before and CANARY not in told
        return told


def snapshot(folder: Path) -> dict[str, bytes]:
    files = (
        path
        for path in sorted(folder.rglob("*"))
        if not path.is_dir() and not path.is_fifo() and path.name != "config.json"
    )
    return {str(path): path.read_bytes() if path.exists() else b"" for path in files}  # fmt: skip


@pytest.fixture
def campaign(original, tmp_path):
    return Campaign(original, tmp_path / "demo")


def case(prompt: str, target: str = "x") -> dict[str, str]:
    return {"prompt": prompt, "target": target}


def test_the_example_passes_offline_without_torch_and_writes_nothing(original, tmp_path):
    before = snapshot(original)
    program = f"""
import socket, sys
def refuse(*_, **__): raise AssertionError("a provider was called")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
from miniverl.campaign.config import load_config
from miniverl.campaign.preflight import preflight
report = preflight(load_config({os.path.relpath(original / "config.json", tmp_path)!r}), isolation=lambda: 2)
print([name for name in ("torch", "transformers") if name in sys.modules], report.label, report.counts["trials"]["total"], report.isolation["level"])
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] exploratory 9 2"
    assert snapshot(original) == before and not list(tmp_path.iterdir())


def test_the_report_has_counts_versions_and_no_path_or_text(campaign):
    report = campaign.check()
    told = canonical_json(report.to_record()) + report.to_markdown()
    assert str(campaign.folder) not in told and "bbbbb" not in told and "The sky" not in told
    assert report.counts["private"] == {"echo-letters": 8, "cycle-abc": 9} and report.counts["regression"] == 6
    assert report.grader["versions"] == package_versions(PACKAGES)
    assert report.model_files == model_identity(campaign.folder / "model")[1]
    assert "does not establish statistical power" in told and "private data is not shown" in told


@pytest.mark.parametrize(
    "path",
    ["tasks.0.public", "tasks.1.private", "tasks.0.script", "regression", "runtime.actions", "provenance.dependency_lock"],
)  # fmt: skip
def test_a_file_must_have_its_digest_and_be_a_file(campaign, path):
    ref = campaign.data
    for part in path.split("."):
        ref = ref[int(part)] if part.isdigit() else ref[part]
    file = campaign.folder / ref["path"]
    file.write_bytes(file.read_bytes() + b"\n")
    campaign.refused(f"{path}.sha256", ref["sha256"])
    file.unlink()
    campaign.refused(f"{path}.path")
    file.mkdir()
    campaign.refused(f"{path}.path", "no regular file")
    file.rmdir()
    os.mkfifo(file)
    campaign.refused(f"{path}.path", "no regular file")


def test_the_model_must_be_the_one_that_was_named(campaign):
    (campaign.folder / "model" / "extra").write_text("")
    campaign.refused("model.sha256")
    campaign.pin_model()
    campaign.check()
    config = campaign.folder / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"auto_map": {"AutoModel": "x.Y"}}))
    campaign.pin_model()
    campaign.refused("model.path", "auto_map")
    config.write_text("[1")
    campaign.pin_model()
    campaign.refused("model.path", "config.json")
    config.unlink()
    campaign.pin_model()
    campaign.refused("model.path", "no config.json")
    shutil.rmtree(campaign.folder / "model")
    campaign.refused("model.path", "no folder")


@pytest.mark.parametrize(
    "bad", [[], {}, [{"prompt": "p"}], [case("p", "")], [case("p") | {"note": CANARY}], f'["{CANARY}"', [CANARY]]
)
@pytest.mark.parametrize("where", ["public", "private", "regression"])
def test_a_case_file_that_is_none(campaign, where, bad):
    ref, name = (
        (campaign.data["regression"], where)
        if where == "regression"
        else (campaign.data["tasks"][1][where], f"tasks.1.{where}")
    )
    campaign.write(ref, bad)
    campaign.refused(f"error: {name}")


def test_a_script_must_be_python(campaign):
    for bad in ("def f(:\n", " ", "x = '\0'", "return\x00"):
        campaign.write(campaign.data["tasks"][1]["script"], bad)
        campaign.refused("tasks.1.script")


def test_a_tape_must_fit_the_tasks(campaign):
    ref = campaign.data["runtime"]["actions"]
    tape = json.loads((campaign.folder / ref["path"]).read_text())
    tape["trials"]["cycle-abc"][0] += [{"kind": "evaluate"}] * 9
    campaign.write(ref, tape)
    assert any("tape of cycle-abc" in text for text in campaign.check().warnings)
    tape["trials"]["cycle-abc"].pop()
    campaign.write(ref, tape)
    campaign.refused("runtime.actions", "trials.cycle-abc")
    tape["trials"]["cycle-abc"].append([{"kind": "python", "source": "#" * (4 * 512 + 1)}])
    campaign.write(ref, tape)
    campaign.refused("runtime.actions", "exceed the allowance of 2048")


TWINS = ["cafe\u0301", " café", "café\u00a0", "\u3000café\n", "\tcaf\u0065\u0301 "]


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize(
    ("first", "second"), [("public", "private"), ("public", "regression"), ("private", "regression")]
)
def test_a_prompt_belongs_to_one_partition_whatever_its_task_and_target(campaign, first, second, twin):
    echo, cycle = campaign.data["tasks"]
    campaign.write(echo[first], [case("other"), case("café", "one")])
    campaign.write(campaign.data["regression"] if second == "regression" else cycle[second], [case(twin, "two")])
    told = campaign.refused(f"tasks.0.{first}[1]", f"{'' if second == 'regression' else 'tasks.1.'}{second}[0]")
    assert "caf" not in told


def test_what_is_no_duplicate(campaign):
    echo, cycle = campaign.data["tasks"]
    campaign.write(echo["public"], [case("a b", "x"), case("a b", "y"), case("A B")])
    campaign.write(cycle["private"], [case("a  b"), case("a\nb"), case("ab")])
    campaign.check()


def test_a_pair_occurs_once_in_a_file(campaign):
    for ref, name in (
        (campaign.data["tasks"][0]["private"], "tasks.0.private"),
        (campaign.data["regression"], "regression"),
    ):
        before = (campaign.folder / ref["path"]).read_text()
        campaign.write(ref, [case("p", "t"), case("q"), case(" p ", "t\n")])
        campaign.refused(f"{name}[2] repeats {name}[0]")
        campaign.write(ref, before)


def test_private_cases_of_two_tasks_are_no_two_evidences(campaign):
    echo, cycle = campaign.data["tasks"]
    shutil.copy(campaign.folder / echo["private"]["path"], campaign.folder / cycle["private"]["path"])
    cycle["private"]["sha256"] = echo["private"]["sha256"]
    report = campaign.check()
    assert report.coverage.shared_private == 8 and any("no independent evidence" in text for text in report.warnings)
    assert "8 private cases belong to more than one task" in report.reasons
    cycle["private"] = dict(echo["private"])
    assert campaign.check().coverage.shared_private == 8


@given(st.text())
def test_normal_forms_are_stable(text):
    once = normalized(text)
    assert normalized(once) == once == normalized(f" \u00a0{text}\n")


def inside_model(campaign, private):
    shutil.move(private, campaign.folder / "model" / "kept.json")
    campaign.data["tasks"][0]["private"]["path"] = "model/kept.json"


def link_to_model(campaign, private):
    shutil.move(private, campaign.folder / "model" / "kept.json")
    private.symlink_to(campaign.folder / "model" / "kept.json")


def folder_link_to_model(campaign, private):
    shutil.move(private, campaign.folder / "model" / "kept.json")
    (campaign.folder / "alias").symlink_to(campaign.folder / "model")
    campaign.data["tasks"][0]["private"]["path"] = "alias/kept.json"


def model_behind_link(campaign, private):
    (campaign.folder / "model").rename(campaign.folder / "real")
    (campaign.folder / "model").symlink_to("real")
    shutil.move(private, campaign.folder / "real" / "kept.json")
    campaign.data["tasks"][0]["private"]["path"] = "real/kept.json"


def hard_link(campaign, private):
    os.link(private, campaign.folder / "model" / "kept.json")


def copied(campaign, private):
    shutil.copy(private, campaign.folder / "model" / "kept.json")


@pytest.mark.parametrize(
    "arrange", [inside_model, link_to_model, folder_link_to_model, model_behind_link, hard_link, copied]
)
def test_a_private_file_within_the_editors_reach(campaign, arrange):
    campaign.check()
    arrange(campaign, campaign.folder / campaign.data["tasks"][0]["private"]["path"])
    campaign.pin_model()
    campaign.refused("tasks.0.private", "model")


def test_a_link_in_the_model_that_leads_to_a_private_file(campaign):
    (campaign.folder / "model" / "notes").symlink_to(campaign.folder / campaign.data["regression"]["path"])
    campaign.refused("model.path", "'notes'")


def in_package(package, private, ref):
    ref["path"] = os.path.relpath(shutil.move(private, package / "kept.json"), private.parents[1])


def link_in_package(package, private, ref):
    (package / "deep").mkdir()
    (package / "deep" / "data.json").symlink_to(private)


def folder_link_in_package(package, private, ref):
    (package / "data").symlink_to(private.parent)


@pytest.mark.parametrize("arrange", [in_package, link_in_package, folder_link_in_package])
def test_a_private_file_within_the_image(campaign, tmp_path, monkeypatch, arrange):
    package = tmp_path / "package"
    package.mkdir()
    (package / "loop").symlink_to(package)
    monkeypatch.setattr(module, "_package_folder", lambda: package)
    campaign.check()
    ref = campaign.data["regression"]
    arrange(package, campaign.folder / ref["path"], ref)
    campaign.refused("the package", ".path")


def test_the_lock_file_is_no_place_for_cases(campaign):
    campaign.data["provenance"]["dependency_lock"] = dict(campaign.data["regression"])
    campaign.refused("regression.path", "dependency_lock")


def test_a_live_agent_needs_its_variables(campaign):
    campaign.data["runtime"] |= {
        "policy": {
            "endpoint": f"https://{CANARY}.example/v1",
            "model_env": "AGENT_MODEL",
            "credential_env": "AGENT_KEY",
        }
    }
    del campaign.data["runtime"]["actions"]
    both = {"AGENT_MODEL": "m", "AGENT_KEY": CANARY}
    for name, field in (("AGENT_MODEL", "model_env"), ("AGENT_KEY", "credential_env")):
        for value in (None, "", " \n"):
            campaign.environ = {key: text for key, text in (both | {name: value}).items() if text is not None}
            campaign.refused(f"runtime.policy.{field}", name)
    campaign.environ = both
    assert CANARY not in canonical_json(campaign.check().to_record())


def test_no_provider_is_called(campaign, monkeypatch):
    def refuse(*_: object, **__: object):
        raise AssertionError("a provider was called")

    for name in ("connect", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setitem(sys.modules, "modal", None)
    revision = MODAL_MODEL[1]
    (campaign.folder / "snapshots").mkdir()
    (campaign.folder / "model").rename(campaign.folder / "snapshots" / revision)
    campaign.data["model"] |= {"id": MODAL_MODEL[0], "revision": revision, "path": f"snapshots/{revision}"}
    campaign.data["runtime"]["backend"] = "modal"
    campaign.data["budget"]["rates"] = dict.fromkeys(campaign.data["budget"]["rates"], "0.01")
    report = campaign.check(isolation=refuse)
    assert report.isolation == {"backend": "modal", "level": None, "required": None}
    assert any("no agent is measured" in text for text in report.warnings)


def test_isolation_is_required_or_refused(campaign):
    campaign.data["runtime"]["require_isolation"] = 2
    campaign.refused("runtime.require_isolation = 2", isolation=lambda: 1)
    assert campaign.check(isolation=lambda: 3).isolation["level"] == 3


def test_a_case_needs_tokens_and_room(campaign):
    ref = campaign.data["tasks"][1]["private"]
    campaign.write(ref, [case("p", "t"), case("a" * 500, "é" * 6)])
    campaign.check()
    campaign.write(ref, [case("p", "t"), case("a" * 500, "é" * 6 + "a")])
    campaign.refused("tasks.1.private[1] has 513 tokens, the model reads 512")
    tokenizer = campaign.folder / "model" / "tokenizer.json"
    strip = {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}}
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()) | strip))
    campaign.pin_model()
    campaign.write(ref, [case("p", " \n")])
    campaign.refused("tasks.1.private[0].target has no token")
    tokenizer.unlink()
    campaign.pin_model()
    assert any("not counted" in text for text in campaign.check().warnings)
    tokenizer.write_text("{}")
    campaign.pin_model()
    campaign.refused("runtime.grader_python")


def test_lengths_are_those_of_the_grader(original):
    from miniverl.wsm.model import WeightModel
    from miniverl.wsm.scoring import encode

    tokenizer = WeightModel.load(original / "model").tokenizer
    texts = ["The capital", " Paris.", "<|end|>", "a<|end|>b", "é\u0301\n", " ", "\0", "日本"]
    told = probe_grader(sys.executable, tokenizer=original / "model" / "tokenizer.json", texts=texts)
    assert told["lengths"] == [len(encode(tokenizer, text)) for text in texts] and told["lengths"][2] == len("<|end|>")


def environment(folder: Path) -> Path:
    """An interpreter of its own that borrows this one's packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (folder / "bin" / "python").chmod(0o755)
    return next((folder / "lib").glob("python*/site-packages"))


def test_versions_come_from_the_graders_own_interpreter(campaign, tmp_path):
    site = environment(tmp_path / "venv")
    campaign.data["runtime"]["grader_python"] = "../venv/bin/python"
    campaign.refused("runtime.grader_python", "lacks safetensors, torch, transformers")
    (site / "borrowed.pth").write_text(SITE)
    own = site / "numpy-9.9.9.dist-info"
    own.mkdir()
    (own / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 9.9.9\n")
    versions = campaign.check().grader["versions"]
    assert versions["numpy"] == "9.9.9" != package_versions(["numpy"])["numpy"]
    assert versions["torch"] == package_versions(["torch"])["torch"]


def test_the_probe_sees_no_environment_and_no_planted_module(campaign, tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("raise SystemExit('planted')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONSTARTUP", str(tmp_path / "json.py"))
    campaign.check()
    shell = tmp_path / "shell"
    shell.write_text("#!/bin/sh\nenv >&2; exit 1\n")
    shell.chmod(0o755)
    monkeypatch.setenv("AGENT_KEY", CANARY)
    campaign.data["runtime"]["grader_python"] = str(shell)
    campaign.refused("runtime.grader_python")


@pytest.mark.parametrize(
    "text", ["exit 3", "echo hello", "sleep 60", "kill -9 $$", "echo '[]'", "head -c 99999 /dev/zero"]
)
def test_a_grader_that_is_no_python(tmp_path, text):
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    with pytest.raises(ConfigError, match=r"runtime\.grader_python"):
        probe_grader(str(path), seconds=0.5)


def test_a_grader_that_cannot_be_started(tmp_path):
    (tmp_path / "file").write_text("text")
    for path in (tmp_path / "gone", tmp_path, tmp_path / "file", "no-such-command-here", "a\0b"):
        with pytest.raises(ConfigError, match=r"runtime\.grader_python"):
            probe_grader(str(path))


@pytest.mark.slow
def test_the_model_is_really_loaded(campaign):
    assert campaign.check(load=True).grader["loads"][1] == "LlamaForCausalLM"
    path = campaign.folder / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    campaign.pin_model()
    campaign.check()
    campaign.refused("runtime.grader_python", load=True)


ENOUGH = Coverage(families=2, tasks_per_family=4, public=20, private=50, regression=100, repetitions=5)


@pytest.fixture(scope="module")
def complete(original):
    config = load_config(original / "config.json")
    review = config.review.model_copy(update={"power": True, "private_artifact_store": "vault"})
    return config.model_copy(update={"review": review})


def test_a_complete_campaign_is_confirmatory_and_never_a_local_one(complete):
    assert label_of(complete, ENOUGH, "modal") == ("confirmatory", ())
    assert label_of(complete, ENOUGH) == ("exploratory", ("the backend is local",))


def test_each_missing_decision_makes_it_exploratory(complete):
    gaps = [({"thresholds": None}, "thresholds are missing")]
    for name, value, word in (
        ("data_rights", False, "false"), ("semantic_overlap", False, "false"), ("power", False, "false"),
        ("owner", None, "missing"), ("private_artifact_store", None, "missing"),
    ):  # fmt: skip
        gaps.append(({"review": complete.review.model_copy(update={name: value})}, f"review.{name} is {word}"))
    for update, reason in gaps:
        assert label_of(complete.model_copy(update=update), ENOUGH, "modal") == ("exploratory", (reason,))


@pytest.mark.parametrize("name", FLOORS)
def test_each_floor_counts_and_is_reached_by_equality(complete, name):
    label, reasons = label_of(complete, replace(ENOUGH, **{name: FLOORS[name] - 1}), "modal")
    assert (
        label == "exploratory"
        and reasons[0] == f"coverage of {name} is {FLOORS[name] - 1}, the floor is {FLOORS[name]}"
    )
    rows = {row[0]: row[3] for row in Coverage(*FLOORS.values()).rows()}
    assert all(rows.values()) and len(rows) == 6


def test_three_tasks_reach_the_floor_and_are_not_enough(complete):
    label, reasons = label_of(complete, replace(ENOUGH, tasks_per_family=3), "modal")
    assert (label, reasons) == ("exploratory", ("a family has 3 of at least 4 tasks",))


JUNK = [
    "",
    "{}",
    "null",
    "1e999",
    "[" * 20_000,
    '"\\ud800"',
    "\ufeff[]",
    "(" * 3_000,
    '[{"prompt": "p", "target": "t"}]',
]


@pytest.mark.parametrize("text", JUNK, ids=range(len(JUNK)))
def test_junk_in_any_file_is_refused_or_read_and_never_a_traceback(campaign, text):
    echo = campaign.data["tasks"][0]
    for ref in (
        echo["public"],
        echo["private"],
        campaign.data["regression"],
        campaign.data["runtime"]["actions"],
        echo["script"],
    ):
        before = (campaign.folder / ref["path"]).read_text()
        campaign.write(ref, text)
        try:
            campaign.check()
        except ConfigError as error:
            assert len(error.render().splitlines()) == 2
        campaign.write(ref, before)
    for name, field in (("config.json", "model.path"), ("tokenizer.json", "runtime.grader_python")):
        path = campaign.folder / "model" / name
        before = path.read_text()
        path.write_text(text)
        campaign.pin_model()
        if (name, text) == ("config.json", "{}"):
            campaign.check()  # names no limit of the context; loading it is another stage
        else:
            campaign.refused(field)
        path.write_text(before)
