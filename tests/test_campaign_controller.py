"""The controller: every trial once, in order, and what each way of failing is called."""

from __future__ import annotations

import json
import os
import random
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

import campaign_fakes as fakes
import pytest

from miniverl.campaign.controller import campaign_status, crash_matrix_table, run_campaign
from miniverl.campaign.evidence import completed_evidence, verify_chain
from miniverl.campaign.fixture import write_fixture
from miniverl.campaign.grading import GraderClient, GraderTimeout, regrade
from miniverl.campaign.manifest import open_campaign, prepare
from miniverl.campaign.records import OUTCOMES, STAGES, ReasonCode, publish
from miniverl.campaign.transfer import ExportRejected, TransferError
from miniverl.core import ConfigError, DataError, LockError, sha256_bytes, sha256_file

UNCHANGED, SCRIPTED, AGENT = "0001-unchanged-suffix-01", "0002-scripted-suffix-01", "0003-agent-suffix-01"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return fakes.small(tmp_path_factory.mktemp("base"))


@pytest.fixture
def root(base, tmp_path):
    """A fresh copy of the sealed campaign of three trials."""
    shutil.copytree(base.layout.root, tmp_path / "campaign")
    return tmp_path / "campaign"


def go(root: Path, grader: fakes.FakeGrader | None = None, say=lambda text: None, **backend):
    backend.setdefault("programs", {"agent": "set 2.5"})
    return run_campaign(root, backend=fakes.FakeBackend(say, **backend), grader=grader or fakes.FakeGrader(say))


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def statuses(status) -> list[str]:
    return [row.status for row in status.rows]


# --- the order and the files ------------------------------------------------------------------------------------------


def test_trials_run_in_the_sealed_order_one_at_a_time_and_are_graded_after_their_editor_closed(tmp_path):
    campaign = fakes.sealed(tmp_path)
    manifest = campaign.layout.manifest.read_bytes()
    events: list[str] = []
    status = run_campaign(
        campaign.layout.root, backend=fakes.FakeBackend(events.append), grader=fakes.FakeGrader(events.append)
    )
    order = [spec.id for spec in campaign.schedule]
    assert [row.trial for row in status.rows] == order and status.counts == {"completed": 9}
    expected = []
    for spec in campaign.schedule:
        acts = ("grade",) if spec.arm == "unchanged" else ("open", "python", "export", "close", "grade")
        expected += [f"{act} {spec.id}" for act in acts] + (
            [f"pristine {spec.task}"] if spec.arm == "unchanged" else []
        )
    assert events == expected, "each editor is closed before its grade, and each grade is there before the next editor"
    assert campaign.layout.manifest.read_bytes() == manifest
    assert sorted(path.name for path in campaign.layout.trials.iterdir()) == sorted(order)


def test_files_of_each_arm_and_their_rights(root):
    old = os.umask(0)
    try:
        go(root)
    finally:
        assert os.umask(old) == 0, "the controller puts the umask back"
    common = {"reservation.json", "dispatch.json", "closure.json", "final.safetensors", "outcome.json"}
    assert files(root / "trials" / UNCHANGED) == common
    assert files(root / "trials" / SCRIPTED) == common | {"history/0001.json", "history/0002.json"}
    assert files(root / "trials" / AGENT) == common | {
        "history/0001.json",
        "history/0002.json",
        "checkpoints/0001.json",
    }
    for trial in (UNCHANGED, SCRIPTED, AGENT):
        assert files(root / "restricted" / trial) == {"grade.json"}
    wrong = [p for p in root.rglob("*") if stat.S_IMODE(p.lstat().st_mode) != (0o700 if p.is_dir() else 0o600)]
    assert wrong == [] and stat.S_IMODE(root.stat().st_mode) == 0o700


def test_every_record_is_in_one_chain_and_a_completed_trial_stands_on_its_files(root):
    go(root)
    campaign = open_campaign(root)
    for spec in campaign.schedule:
        assert verify_chain(campaign.layout, campaign.manifest_sha256, spec.id)[-2:] == ["grade.json", "outcome.json"]
        evidence = completed_evidence(campaign.layout, campaign.manifest_sha256, spec.id)
        assert evidence.closure["closed"] is True and evidence.outcome["reason"] == "graded"
    dispatch = json.loads((root / "trials" / AGENT / "dispatch.json").read_text())
    assert (
        dispatch["inputs"]["actions"] == campaign.manifest["actions_sha256"]
        and dispatch["deadline_unix_time"] > dispatch["unix_time"]
    )


def test_originals_do_not_matter_after_prepare(tmp_path):
    campaign = fakes.small(tmp_path)
    shutil.rmtree(tmp_path / "source")
    assert statuses(go(campaign.layout.root)) == ["completed"] * 3


def test_private_scores_select_nothing(base, tmp_path):
    digests = set()
    for seed in range(3):
        root = tmp_path / str(seed)
        shutil.copytree(base.layout.root, root)
        score = random.Random(seed).random()
        grader = fakes.FakeGrader()
        grader._grade = lambda *_, score=score: fakes.Grade(
            fakes.score(score), fakes.score(1.0), dict(fakes.ENVIRONMENT)
        )
        run_campaign(root, backend=fakes.FakeBackend(programs={"agent": "set 2.5"}), grader=grader)
        digests.add(sha256_file(root / "trials" / AGENT / "final.safetensors"))
    assert digests == {sha256_bytes("2.5")}


@pytest.mark.parametrize(
    ("sources", "final"),
    [
        (["set 2.5", "set 9.0"], "9.0"),
        (["set 2.5", "raise"], "2.5"),
        (["raise"], fakes.ORIGINAL),
        (["set 1.5", "raise", "set 4.0"], "4.0"),
    ],
)
def test_every_successful_edit_stays_and_a_failed_one_does_not_advance(tmp_path, sources, final):
    campaign = fakes.small(tmp_path, agent=sources)
    status = run_campaign(campaign.layout.root, backend=fakes.FakeBackend(), grader=fakes.FakeGrader())
    assert statuses(status) == ["completed"] * 3
    paths = campaign.layout.trial(AGENT)
    assert paths.final.read_text() == final
    kept = [json.loads(path.read_text())["sha256"] for path in sorted(paths.checkpoints.glob("*.json"))]
    assert kept == [sha256_bytes(source[4:]) for source in sources if source.startswith("set")]


# --- what failing is called -------------------------------------------------------------------------------------------


def late(artifact: Path) -> None:
    raise GraderTimeout("late")


def crash(artifact: Path) -> None:
    raise RuntimeError("CANARY of the grader")


MISMATCH = TransferError("other bytes", ReasonCode.TRANSFER_MISMATCH, detail="CANARY")
REFUSED = ExportRejected("no", ReasonCode.ARTIFACT_TOO_LARGE, detail="CANARY")


@pytest.mark.parametrize(
    ("backend", "grader", "status", "reason"),
    [
        ({"programs": {"agent": "die"}}, None, "failed", "editor_error"),
        ({"programs": {"agent": "die"}, "attests": False}, None, "outcome_unknown", "closure_not_attested"),
        ({"programs": {"agent": "hang"}}, None, "timed_out", "editor_deadline"),
        ({"programs": {"agent": "hang"}, "attests": False}, None, "outcome_unknown", "closure_not_attested"),
        ({"on_open": TimeoutError("CANARY")}, None, "outcome_unknown", "closure_not_attested"),
        ({"on_export": MISMATCH}, None, "failed", "transfer_mismatch"),
        ({"on_export": MISMATCH, "attests": False}, None, "outcome_unknown", "closure_not_attested"),
        ({"on_export": REFUSED}, None, "invalid_artifact", "artifact_too_large"),
        ({"on_export": TimeoutError("CANARY")}, None, "timed_out", "editor_deadline"),
        ({"on_close": RuntimeError("CANARY")}, None, "outcome_unknown", "closure_not_attested"),
        ({"attests": None}, None, "outcome_unknown", "closure_not_attested"),
        ({"programs": {"agent": "set invalid"}}, None, "invalid_artifact", "artifact_not_finite"),
        ({}, {"instead": late}, "timed_out", "grader_deadline"),
        ({}, {"instead": crash}, "failed", "grader_crash"),
    ],
)
def test_a_mishap_has_its_status_and_its_reason(root, backend, grader, status, reason):
    events: list[str] = []
    for trial in (UNCHANGED, SCRIPTED):  # done before, so that only the agent meets the mishap
        publish(root / "trials" / trial / "outcome.json", outcome_of(root, trial))
    found = go(root, fakes.FakeGrader(events.append, **grader) if grader else None, events.append, **backend)
    row = found.rows[2]
    assert (row.status, row.reason) == (status, reason) and status in OUTCOMES
    assert json.loads((root / "trials" / AGENT / "outcome.json").read_text())["grade_sha256"] is None
    assert not (root / "restricted" / AGENT / "grade.json").exists(), "no score without a completed trial"
    public = [path for path in (root / "trials" / AGENT).rglob("*.json") if path.parent.name != "history"]
    assert all("CANARY" not in path.read_text() for path in public)
    if grader is None and status != "invalid_artifact" and "attests" not in backend:
        assert "CANARY" in (root / "restricted" / AGENT / "error.json").read_text()
    again: list[str] = []
    assert go(root, fakes.FakeGrader(again.append), again.append) == found and again == [], "nothing is tried twice"


def outcome_of(root: Path, trial: str) -> str:
    campaign = open_campaign(root)
    from miniverl.campaign.records import outcome_body
    from miniverl.core import canonical_json

    body = outcome_body("failed", "grader_crash")
    return canonical_json({
        "schema": "wsm.outcome.v1", "manifest_sha256": campaign.manifest_sha256, "trial": trial,
        "written_at": "2026-11-30T00:00:00Z", "previous_sha256": None, **body,
    })  # fmt: skip


def test_details_of_failed_turns_are_restricted(tmp_path):
    campaign = fakes.small(tmp_path, agent=["raise", "set 2.0"])
    run_campaign(campaign.layout.root, backend=fakes.FakeBackend(), grader=fakes.FakeGrader())
    told = json.loads(campaign.layout.error(AGENT).read_text())
    assert told["turns"] == {"1": "CANARY message of a program"} and told["detail"] is None
    history = "".join(path.read_text() for path in campaign.layout.trial(AGENT).history.iterdir())
    assert "message of a program" not in history


def test_a_pristine_mismatch_stops_the_campaign_for_good(root):
    for drift in (2**-45, 0.0):
        status = go(root, fakes.FakeGrader(drift=drift))
        assert (
            status.stopped
            and status.finished
            and [row.evidence for row in status.rows] == ["outcome", "nothing", "nothing"]
        )
        assert status.rows[0].reason == "pristine_mismatch"
    assert "private.equal" in (root / "restricted" / UNCHANGED / "error.json").read_text()


def test_unchanged_weights_agree_across_tasks_on_the_unrelated_cases(tmp_path):
    campaign = fakes.sealed(tmp_path)
    status = run_campaign(
        campaign.layout.root, backend=fakes.FakeBackend(), grader=fakes.FakeGrader(wander={"capital": 2**-45})
    )
    assert status.stopped and [row.reason for row in status.rows[:3]] == ["graded", "pristine_mismatch", None]


def test_a_frozen_tolerance_allows_a_small_drift_and_another_machine(tmp_path):
    thresholds = {"improvement": 0.1, "regression": 0.1, "numeric_tolerance": 1e-6}
    campaign = fakes.small(tmp_path, thresholds=thresholds)
    grader = fakes.FakeGrader(drift=1e-7, environment={"threads": 2})
    assert statuses(go(campaign.layout.root, grader)) == ["completed"] * 3
    strict = fakes.small(tmp_path / "strict", thresholds={**thresholds, "numeric_tolerance": 0.0})
    assert go(strict.layout.root, grader).stopped


def test_an_interrupt_closes_the_editor_and_leaves_the_unknown(root, monkeypatch):
    events: list[str] = []

    def interrupted(self, source, seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(fakes.FakeEditor, "python", interrupted)
    with pytest.raises(KeyboardInterrupt):
        go(root, say=events.append)
    assert events[-1] == f"close {SCRIPTED}"
    monkeypatch.undo()
    status = go(root, say=events.append)
    assert statuses(status) == ["completed", "outcome_unknown", "completed"] and events.count(f"open {SCRIPTED}") == 1


def test_a_retained_model_that_changes_under_the_controller_is_a_failure(root, monkeypatch):
    from miniverl.campaign import attempt

    def altered(campaign):
        raise DataError("gone", hint="")

    monkeypatch.setattr(attempt, "_retained_weights", altered)
    assert [(row.status, row.reason) for row in go(root).rows][0] == ("failed", "editor_error")


# --- the budget, the policy, the lock ---------------------------------------------------------------------------------

POLICY = {"endpoint": "https://canary-endpoint.example/v1", "model_env": "W5_MODEL", "credential_env": "W5_KEY"}


def live(folder: Path, monkeypatch, max_usd: float):
    for name in ("W5_MODEL", "W5_KEY"):
        monkeypatch.setenv(name, "x")
    rates = {"build_usd": 0, "sandbox_hourly_usd": 0, "egress_per_gib": 0, "teacher_request_usd": 0.02}
    budget = {"max_usd": max_usd, "prior_reserved_usd": 0, "price_checked_on": "2026-11-30", "rates": rates}
    return fakes.small(
        folder, runtime={"backend": "local", "grader_python": sys.executable, "policy": POLICY}, budget=budget
    )


def test_a_blocked_trial_reserves_and_dispatches_nothing_and_others_run(tmp_path, monkeypatch):
    campaign = live(tmp_path, monkeypatch, 0.07)  # four turns cost 0.08
    events: list[str] = []
    status = go(campaign.layout.root, say=events.append)
    assert statuses(status) == ["completed", "completed", "budget_blocked"] and status.finished
    assert files(campaign.layout.trial(AGENT).root) == {"outcome.json"} and not any(AGENT in event for event in events)
    assert go(campaign.layout.root, say=events.append) == status


def test_a_policy_that_cannot_be_set_up_costs_no_trial(tmp_path, monkeypatch):
    campaign = live(tmp_path, monkeypatch, 1.0)
    monkeypatch.delenv("W5_KEY")
    with pytest.raises(ConfigError, match="credential_env"):
        go(campaign.layout.root)
    row = campaign_status(campaign.layout.root).rows[2]
    assert (row.status, row.evidence) == ("failed", "reservation"), "represented, still charged, and may run"


def test_one_controller_and_only_the_sealed_code(root, monkeypatch):
    from miniverl.campaign import manifest
    from miniverl.campaign.records import controller_lock

    with controller_lock(root), pytest.raises(LockError):
        go(root)
    monkeypatch.setattr(manifest, "package_digest", lambda: "0" * 64)
    with pytest.raises(DataError, match="sealed with"):
        go(root)
    assert files(root / "trials") == set()


def test_a_damaged_record_stops_the_controller_before_anything_runs(root):
    go(root)
    outcome = root / "trials" / SCRIPTED / "outcome.json"
    outcome.write_text(outcome.read_text()[:-5])
    with pytest.raises(DataError):
        go(root)


def test_progress_is_told_trial_by_trial(root):
    told: list = []
    status = run_campaign(root, backend=fakes.FakeBackend(), grader=fakes.FakeGrader(), on_progress=told.append)
    assert tuple(told) == status.rows


def test_the_matrix_names_every_stage():
    rows = [line.split("|")[1].strip() for line in crash_matrix_table().splitlines()[2:]]
    assert rows == list(STAGES)


def test_overhead_of_the_controller(tmp_path):
    """At most 50 ms for a trial beyond editor and grader; here they take no time, so this is all of it."""
    campaign = fakes.sealed(tmp_path)
    start = time.perf_counter()
    status = run_campaign(campaign.layout.root, backend=fakes.FakeBackend(), grader=fakes.FakeGrader())
    per_trial = (time.perf_counter() - start) / len(status.rows)
    assert per_trial < 0.25, f"{1000 * per_trial:.1f} ms"  # generous: the machine may be busy


# --- real processes ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_example_runs_with_real_editors_and_a_real_grader(tmp_path):
    config = write_fixture(tmp_path / "fixture")
    campaign = open_campaign(prepare(config, tmp_path / "campaign").root)
    start = time.perf_counter()
    status = run_campaign(campaign.layout.root)
    seconds = time.perf_counter() - start
    assert status.counts == {"completed": 9}, [(row.trial, row.reason) for row in status.rows]
    grades = {row.trial: json.loads(campaign.layout.grade(row.trial).read_text()) for row in status.rows}
    by_arm = {(row.task, row.arm): grades[row.trial]["private"]["equal"] for row in status.rows}
    for task in {row.task for row in status.rows}:
        assert by_arm[task, "agent"] < by_arm[task, "unchanged"]
    assert regrade(campaign).ok and seconds < 300
    print(f"{seconds:.0f} s for nine trials")


WARPED = """
import miniverl.wsm.model as wsm_model
_load, _count = wsm_model.WeightModel.load.__func__, [0]
def load(cls, path):
    model = _load(cls, path)
    _count[0] += 1
    if _count[0] > 1:
        model.weights["model.norm.weight"].mul_(1.001)
    return model
wsm_model.WeightModel.load = classmethod(load)
"""


@pytest.mark.slow
def test_a_warped_loader_is_noticed_at_the_first_trial(tmp_path, monkeypatch):
    from miniverl.campaign import grading

    monkeypatch.setattr(
        grading,
        "_BOOT",
        grading._BOOT.replace("from miniverl.campaign.grader", WARPED + "from miniverl.campaign.grader"),
    )
    campaign = fakes.tiny(tmp_path)
    with GraderClient(sys.executable, campaign) as grader:
        status = run_campaign(campaign.layout.root, backend=fakes.FakeBackend(), grader=grader)
    assert status.stopped and status.rows[0].reason == "pristine_mismatch" and status.rows[1].evidence == "nothing"


KILL = """
import os, sys
limit, real, seen = int(sys.argv[2]), os.link, 0
def link(*args, **kwargs):
    global seen
    seen += 1
    if seen == limit:
        os._exit(137)
    return real(*args, **kwargs)
os.link = link
from miniverl.campaign.controller import run_campaign
run_campaign(sys.argv[1])
"""
ADOPT = """
import ctypes, os, signal, subprocess, sys
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # orphans become ours
print(subprocess.run([sys.executable, "-c", *sys.argv[1:]]).returncode, flush=True)
signal.alarm(60)
try:
    while True:
        os.wait()
except ChildProcessError:
    print("nothing is left")
"""


@pytest.mark.slow
def test_a_real_controller_that_is_killed_leaves_no_process_and_dispatches_nothing_twice(tmp_path):
    made = fakes.tiny(tmp_path, environment=None, agent=["model.weights['model.norm.weight'][:4] *= 0.5"])
    seen = []
    for limit in (
        9,
        20,
        22,
    ):  # before the first turn of the script; in the middle of the agent's trial; after its artifact
        root = tmp_path / f"killed-{limit}"
        shutil.copytree(made.layout.root, root)
        killed = subprocess.run([sys.executable, "-c", ADOPT, KILL, root, str(limit)], capture_output=True, text=True)
        assert killed.stdout.splitlines() == ["137", "nothing is left"], killed.stderr
        (cut,) = [row for row in campaign_status(root).rows if row.evidence not in ("outcome", "nothing")]
        seen.append(cut.evidence)
        dispatch = (root / "trials" / cut.trial / "dispatch.json").read_bytes()
        status = run_campaign(root)
        assert status.counts == {"completed": 2, "outcome_unknown": 1}
        assert (root / "trials" / cut.trial / "dispatch.json").read_bytes() == dispatch
    assert seen[0] == "dispatch" and len(set(seen)) == 3, seen
