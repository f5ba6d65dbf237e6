"""The grader: a process that only reads sealed inputs and one artifact, its client, and grading again."""

from __future__ import annotations

import ast
import json
import os
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

import campaign_fakes as fakes
import pytest
from sealed_campaign import ENVIRONMENT

from miniverl.campaign import grader, grading
from miniverl.campaign.controller import run_campaign
from miniverl.campaign.grading import GraderClient, GraderCrash, GraderTimeout, InvalidArtifact, regrade
from miniverl.campaign.records import publish_copy
from miniverl.core import DataError, canonical_json, sha256_bytes, sha256_file

PACKAGE = Path(grader.__file__).parents[1]
TASK = "suffix"


@pytest.fixture(scope="module")
def campaign(tmp_path_factory):
    """A sealed campaign on the tiny model, and a trial folder in which an editor left whatever it liked."""
    made = fakes.tiny(tmp_path_factory.mktemp("tiny"))
    trial = made.layout.trial(made.schedule[2].id)
    trial.root.mkdir(parents=True)
    publish_copy(
        made.layout.snapshot / "model.safetensors", trial.final, sha256_file(made.layout.snapshot / "model.safetensors")
    )
    marker = trial.root / "imported"
    for name in ("sitecustomize.py", "usercustomize.py", "torch.py", "json.py", "miniverl.py", "start.py"):
        (trial.root / name).write_text(f"open({str(marker)!r}, 'w').close()\n")
    (trial.root / "config.json").write_text(json.dumps({"auto_map": {"AutoModel": "torch.Evil"}, "vocab_size": 1}))
    (trial.root / "tokenizer.json").write_text("{}")
    return made


@pytest.fixture(scope="module")
def artifact(campaign):
    return campaign.layout.trial(campaign.schedule[2].id).final


WATCH = """
import os, sys
watched = os.open(WATCHED, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
def hook(event, arguments):
    if event in ("open", "import", "exec", "subprocess.Popen", "os.exec", "os.system", "socket.connect", "socket.bind", "ctypes.dlopen", "os.listdir"):
        os.write(watched, (event + "\\t" + repr(arguments[0]) + "\\n").encode())
sys.addaudithook(hook)
"""


@pytest.fixture(scope="module")
def client(campaign, artifact, tmp_path_factory):
    """One warm grader, started in the most hostile surroundings: wrong folder, wrong environment, everything watched."""
    watched = tmp_path_factory.mktemp("watch") / "events"
    patch = pytest.MonkeyPatch()
    patch.setattr(grading, "_BOOT", WATCH.replace("WATCHED", repr(str(watched))) + grading._BOOT)
    patch.chdir(artifact.parent)
    for name in ("PYTHONPATH", "PYTHONHOME", "HF_HOME", "HOME", "TMPDIR"):
        patch.setenv(name, str(artifact.parent))
    patch.setenv("PYTHONSTARTUP", str(artifact.parent / "start.py"))
    patch.setenv("CANARY_CREDENTIAL", "canary")
    patch.setenv("ATEN_CPU_CAPABILITY", "default")
    with GraderClient(sys.executable, campaign) as warm:
        try:
            warm.watched = watched
            warm.first = warm.grade(artifact, sha256_file(artifact), TASK, 60)
        finally:
            patch.undo()
        yield warm


def edited(campaign, folder: Path, name: str, scale: float) -> Path:
    """The model with one norm scaled, as a file."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(campaign.layout.snapshot / "model.safetensors")
    tensors["model.norm.weight"] *= scale
    save_file(tensors, folder / name, metadata={"format": "pt", "note": "CANARY"})
    return folder / name


def ask(client, path: Path):
    return client.grade(path, sha256_file(path), TASK, 60)


# --- a real process ---------------------------------------------------------------------------------------------------


def test_scores_are_those_of_the_model_in_this_process_to_the_last_bit(campaign, client):
    from miniverl.wsm.model import WeightModel

    cases = json.loads(campaign.retained(f"tasks/{TASK}/private").read_text())
    here = WeightModel.load(campaign.layout.snapshot).evaluate(cases).to_record()
    assert client.first.private == here
    assert client.pristine(TASK, 60) == client.first
    assert client.first.fingerprint["threads"] == 1 and client.first.fingerprint["switches"] == ""


def test_the_process_is_another_one_and_nothing_beside_the_artifact_was_imported(client, artifact):
    assert client._worker.process.pid != os.getpid()
    assert not (artifact.parent / "imported").exists()


def test_a_warm_grader_answers_like_a_cold_one(campaign, client, artifact, tmp_path):
    louder = edited(campaign, tmp_path, "louder.safetensors", 2.0)
    warm = [ask(client, path) for path in (louder, artifact, louder)]
    assert warm[0] == warm[2] != warm[1] == client.first
    with GraderClient(sys.executable, campaign) as cold:
        assert ask(cold, louder) == warm[0]


def test_invalid_artifacts_have_codes_and_leave_nothing_behind(campaign, client, artifact, tmp_path):
    from safetensors.torch import load_file, save_file

    tensors = load_file(artifact)
    norm = tensors["model.norm.weight"]
    broken = {
        "names": {**tensors, "lm_head.weight": norm.clone()},
        "shape": {**tensors, "model.norm.weight": norm[:-1].clone()},
        "dtype": {**tensors, "model.norm.weight": norm.double()},
        "not_finite": {**tensors, "model.norm.weight": norm * float("nan")},
    }
    for code, content in broken.items():
        save_file(content, tmp_path / code)
        with pytest.raises(InvalidArtifact) as caught:
            ask(client, tmp_path / code)
        assert caught.value.code == code
    save_file({**tensors, "model.norm.weight": norm * 1e38}, tmp_path / "overflow")
    with pytest.raises(InvalidArtifact) as caught:
        ask(client, tmp_path / "overflow")
    assert caught.value.code == "not_finite", "finite weights without a finite loss"
    (tmp_path / "link").symlink_to(artifact)
    with pytest.raises(InvalidArtifact) as caught:
        ask(client, tmp_path / "link")
    assert caught.value.code == "not_a_file"
    started = client.started
    assert ask(client, artifact) == client.first and client.started == started


def test_what_the_grader_touches_after_it_is_ready(campaign, client, artifact):
    """No editor input can reach a warm grader: it opens its sealed inputs and the artifact, and nothing else of the campaign."""
    ask(client, artifact)
    before = client.watched.read_text().count("\n")
    ask(client, artifact)
    client.pristine(TASK, 60)
    events = [line.split("\t", 1) for line in client.watched.read_text().splitlines()[before:]]
    names = {entry["sha256"] for entry in (campaign.task(TASK)["private"], campaign.manifest["regression"])}
    inside = str(campaign.layout.root)
    opened = {ast.literal_eval(what) for kind, what in events if kind == "open" and what[0] in "'b"}
    touched = {Path(os.fsdecode(path)) for path in opened if inside in os.fsdecode(path)}
    sealed = {campaign.layout.inputs / name for name in names}
    assert touched - set(campaign.layout.snapshot.rglob("*")) - {campaign.layout.snapshot} == sealed | {artifact}
    assert {kind for kind, _ in events} <= {"open", "os.listdir", "import", "exec"}, "no process, no socket, no library"
    ever = [line for line in client.watched.read_text().splitlines() if f"{inside}/trials" in line]
    assert ever and all(line.endswith(f"{artifact}'") for line in ever), "from its very start"


def test_a_request_cannot_bring_anything_in(client, artifact):
    for extra in ({"config": "x"}, {"op": "exec"}, {"tokenizer": str(artifact.parent)}, {"private": "../../trials"}):
        request = {
            "op": "grade",
            "artifact": str(artifact),
            "sha256": "0" * 64,
            "private": "0" * 64,
            "regression": "0" * 64,
        }
        answer = client._worker.ask({**request, **extra}, 60)
        assert answer["ok"] is False and answer["code"] is None


def test_a_silent_grader_is_killed_and_replaced(client, artifact):
    worker = client._worker
    os.kill(worker.process.pid, 19)  # stopped, as a hanging computation would be
    with pytest.raises(GraderTimeout, match=r"0\.2 seconds"):
        client.grade(artifact, sha256_file(artifact), TASK, 0.2)
    assert worker.process.returncode == -9 and client._worker is None


# --- a stand-in process: everything that can go wrong with one --------------------------------------------------------


def stub(folder: Path, body: str) -> str:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(stat.S_IRWXU)
    return str(path)


@pytest.fixture(scope="module")
def light(tmp_path_factory):
    return fakes.small(tmp_path_factory.mktemp("light"))


READY = "echo '{\"ready\": {}}'"


@pytest.mark.parametrize(
    ("body", "error", "detail"),
    [
        ("echo broken >&2; exit 3", GraderCrash, "broken"),
        ('echo \'{"failed": "no such model"}\'', GraderCrash, "no such model"),
        ("echo not json", DataError, ""),
        (f"{READY}; read line; echo dying >&2; exit 1", GraderCrash, "dying"),
        (
            f'{READY}; read line; echo \'{{"ok": false, "code": null, "detail": "trace"}}\'; read line',
            GraderCrash,
            "trace",
        ),
        (f"{READY}; read line; exec sleep 60", GraderTimeout, ""),
        (f"{READY}; read line; yes >&2", GraderTimeout, ""),
    ],
)
def test_a_process_that_misbehaves(light, tmp_path, body, error, detail):
    final = tmp_path / "x"
    final.write_text("x")
    with GraderClient(stub(tmp_path, body), light) as client, pytest.raises(error) as caught:
        client.grade(final, sha256_file(final), TASK, 0.3)
    assert detail in getattr(caught.value, "detail", "") and client._worker is None
    assert "trace" not in str(caught.value) and "dying" not in str(caught.value)


def test_an_interpreter_that_is_not_there(light, tmp_path):
    with GraderClient(str(tmp_path / "none"), light) as client, pytest.raises(GraderCrash, match="cannot be started"):
        client.pristine(TASK, 1)


def test_a_grader_that_never_starts_is_no_timeout_of_the_trial(light, tmp_path, monkeypatch):
    monkeypatch.setattr(grading, "START_SECONDS", 0.2)
    with (
        GraderClient(stub(tmp_path, "exec sleep 60"), light) as client,
        pytest.raises(GraderCrash, match="did not start"),
    ):
        client.pristine(TASK, 1)


def test_the_environment_and_the_command_line(light, tmp_path, monkeypatch):
    monkeypatch.setenv("CANARY", "secret")
    told = tmp_path / "told"
    with GraderClient(stub(tmp_path, f'env > {told}; pwd >> {told}; echo "$@" >> {told}'), light) as client:
        with pytest.raises(GraderCrash):
            client.pristine(TASK, 5)
    environment, _, command = told.read_text().partition("\n/\n")
    assert {line.partition("=")[0] for line in environment.splitlines()} - {"PWD", "SHLVL", "_"} == set(
        grading._ENVIRONMENT
    )
    assert command.startswith("-I -B -c")


# --- what the grader is made of ---------------------------------------------------------------------------------------


def imports_of(module: str) -> set[str]:
    code = f"import sys, {module}; print(*(m for m in sys.modules if m.partition('.')[0] in ('miniverl', 'torch', 'pydantic')))"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_the_grader_imports_nothing_of_the_editors_side():
    found = imports_of("miniverl.campaign.grader")
    assert {name for name in found if name.startswith("miniverl.campaign.")} == {"miniverl.campaign.grader"}
    assert not any(name.split(".")[0] in ("torch", "pydantic") for name in found)
    floors = {name.split(".")[1] for name in found if name.count(".")}
    assert floors <= {"core", "store", "portable", "wsm", "campaign"}
    assert "torch" not in imports_of("miniverl.campaign.grading") and "torch" not in imports_of(
        "miniverl.campaign.controller"
    )


def test_no_pickle_no_training_no_code_from_files():
    for path in (PACKAGE / "campaign" / "grader.py", *(PACKAGE / "wsm").glob("*.py")):
        tree = ast.parse(path.read_text())
        names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert not names & {"backward", "optim", "from_pickle"}, path
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr == "load" and isinstance(node.value, ast.Name):
                assert node.value.id not in ("torch", "pickle"), path


# --- grading again ----------------------------------------------------------------------------------------------------


@pytest.fixture
def finished(light, tmp_path):
    """A finished campaign: unchanged, scripted, and an agent that improved."""
    root = tmp_path / "campaign"
    shutil.copytree(light.layout.root, root)
    run_campaign(root, backend=fakes.FakeBackend(programs={"agent": "set 2.5"}), grader=fakes.FakeGrader())
    return fakes.open_campaign(root)


def outcomes(campaign) -> dict[str, str]:
    kept = [*campaign.layout.trials.rglob("*.json"), *campaign.layout.restricted.glob("*/grade.json")]
    return {str(path): sha256_file(path) for path in kept}


def test_the_same_scores_again_are_recorded_and_change_nothing(finished):
    before = outcomes(finished)
    for number in (1, 2):
        report = regrade(finished, client=fakes.FakeGrader())
        assert report.ok and [row.verdict for row in report.rows] == ["equal"] * 3
        for spec in finished.schedule:
            names = sorted(path.name for path in finished.layout.regrades(spec.id).iterdir())
            assert names == [f"{n:04d}.json" for n in range(1, number + 1)]
    assert outcomes(finished) == before


def test_a_moved_score_fails_and_says_whether_the_machine_moved(finished):
    one = finished.schedule[2].id
    drifted = regrade(finished, [one], client=fakes.FakeGrader(offset=2**-30))
    assert not drifted.ok and [row.verdict for row in drifted.rows] == ["mismatch"]
    assert "private.equal: 3.0 became" in drifted.rows[0].differences[0]
    elsewhere = regrade(
        finished, [one], client=fakes.FakeGrader(offset=2**-30, environment={**ENVIRONMENT, "cpu_capability": "AVX2"})
    )
    assert elsewhere.rows[0].verdict == "environment differs" and not elsewhere.ok
    assert elsewhere.rows[0].environment == ("cpu_capability: 'NONE' before, 'AVX2' now",)
    same = regrade(finished, [one], client=fakes.FakeGrader(environment={**ENVIRONMENT, "cpu_capability": "AVX2"}))
    assert same.ok and same.rows[0].environment


def test_a_tolerance_that_was_frozen_is_used(tmp_path):
    thresholds = {"improvement": 0.1, "regression": 0.1, "numeric_tolerance": 1e-6}
    campaign = fakes.small(tmp_path, thresholds=thresholds)
    run_campaign(campaign.layout.root, backend=fakes.FakeBackend(), grader=fakes.FakeGrader())
    assert regrade(campaign, client=fakes.FakeGrader(offset=1e-7)).ok
    assert not regrade(campaign, client=fakes.FakeGrader(offset=1e-5)).ok


def test_an_artifact_that_does_not_load_any_more_fails(finished):
    def refuse(artifact: Path) -> None:
        raise GraderTimeout("late")

    report = regrade(finished, client=fakes.FakeGrader(instead=refuse))
    assert not report.ok and {row.verdict for row in report.rows} == {"grader timeout"}


def test_inspection_never_makes_a_score(light, tmp_path):
    root = tmp_path / "campaign"
    shutil.copytree(light.layout.root, root)
    run_campaign(root, backend=fakes.FakeBackend(attests=False), grader=fakes.FakeGrader())
    campaign = fakes.open_campaign(root)
    before = outcomes(campaign)
    report = regrade(campaign, client=fakes.FakeGrader())
    assert [(row.status, row.verdict) for row in report.rows] == [
        ("completed", "equal"), ("outcome_unknown", "inspection only"), ("outcome_unknown", "inspection only"),
    ]  # fmt: skip
    assert report.ok and outcomes(campaign) == before


def test_damaged_evidence_stops_a_regrade(finished):
    one = finished.schedule[2].id
    receipt = finished.layout.grade(one)
    kept = receipt.read_bytes()
    other = json.loads(kept)
    other["private"] = fakes.score(0.5)
    for damaged in (
        kept[:-1],
        canonical_json(other).encode(),
        kept.replace(one.encode(), finished.schedule[1].id.encode()),
    ):
        receipt.write_bytes(damaged)
        with pytest.raises(DataError):
            regrade(finished, [one], client=fakes.FakeGrader())
    receipt.write_bytes(kept)
    with pytest.raises(DataError, match="no trial of this campaign"):
        regrade(finished, ["0009-agent-x-01"], client=fakes.FakeGrader())
    assert regrade(finished, [one], client=fakes.FakeGrader()).ok


def test_a_receipt_binds_campaign_trial_and_artifact(finished):
    spec = finished.schedule[2]
    record = json.loads(finished.layout.grade(spec.id).read_text())
    assert record["manifest_sha256"] == finished.manifest_sha256 and record["trial"] == spec.id
    assert record["artifact_sha256"] == sha256_file(finished.layout.trial(spec.id).final) == sha256_bytes("2.5")
    assert record["private"]["equal"] == 3.0 and record["private"]["equal_hex"] == float(3).hex()
    assert record["fingerprint"] == ENVIRONMENT


def test_a_regrade_waits_for_nobody(finished):
    from miniverl.campaign.records import controller_lock
    from miniverl.core import LockError

    with controller_lock(finished.layout.root), pytest.raises(LockError):
        regrade(finished, client=fakes.FakeGrader())


def test_grading_overhead_is_small(finished):
    start = time.perf_counter()
    regrade(finished, client=fakes.FakeGrader())
    assert time.perf_counter() - start < 1.0
