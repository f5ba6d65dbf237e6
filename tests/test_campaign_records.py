"""Records of a campaign: durable, private, written once, chained; and what is left when their writer is killed."""

from __future__ import annotations

import ast
import os
import signal
import stat
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
from crash import KILLED, killed_at
from hypothesis import given, settings
from hypothesis import strategies as st

from miniverl.campaign import records
from miniverl.campaign.evidence import chain_head, completed_evidence, read_grade, verify_chain
from miniverl.campaign.records import (
    OUTCOMES,
    STAGES,
    Layout,
    Outcome,
    ReasonCode,
    Schema,
    controller_lock,
    derived_status,
    outcome_body,
    private_dir,
    publish,
    publish_copy,
    read_canonical,
    record_sha256,
    remove_strays,
    write_record,
)
from miniverl.core import DataError, LockError, MiniVerlError, StoreError, sha256_bytes, sha256_file

PACKAGE = Path(records.__file__).parent
SEALED, TRIAL = "m" * 64, "0001-agent-a-01"


def write_trial(layout: Layout, trial: str = TRIAL, say=lambda text: None, stop: str = "outcome") -> None:
    """Write every file of a completed trial in order, naming each stage once it is durable; end after `stop`."""
    paths = layout.trial(trial)
    last, artifact = None, sha256_bytes(b"tensors")

    def record(path, schema, body):
        nonlocal last
        last = write_record(path, schema, SEALED, trial, body, last)

    steps = {
        "nothing": lambda: None,
        "reservation": lambda: record(paths.reservation, Schema.RESERVATION, {"amount_usd": "0"}),
        "dispatch": lambda: record(paths.dispatch, Schema.DISPATCH, {}),
        "history": lambda: (
            record(paths.history / "0001.json", Schema.HISTORY, {}),
            record(paths.checkpoints / "0001.json", Schema.CHECKPOINT, {}),
            record(paths.history / "0002.json", Schema.HISTORY, {}),
        ),
        "final": lambda: publish(paths.final, b"tensors"),
        "closure": lambda: record(paths.closure, Schema.CLOSURE, {"final_sha256": artifact}),
        "grade": lambda: record(layout.grade(trial), Schema.GRADE, {"artifact_sha256": artifact}),
        "outcome": lambda: record(
            paths.outcome,
            Schema.OUTCOME,
            outcome_body("completed", "graded", artifact_sha256=artifact, grade_sha256=record_sha256(last)),
        ),
    }
    for name, step in steps.items():
        step()
        say(f"{name}\n")
        if name == stop:
            return


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("umask", [0o000, 0o777, 0o022])
def test_everything_is_owner_only_under_any_umask(tmp_path, umask):
    old = os.umask(umask)
    try:
        write_trial(Layout(tmp_path / "c"))
        publish_copy(Layout(tmp_path / "c").trial(TRIAL).final, tmp_path / "c" / "copy", sha256_bytes(b"tensors"))
        with controller_lock(tmp_path / "c"):
            pass
    finally:
        os.umask(old)
    seen = {
        (path.is_dir(), stat.S_IMODE(path.stat().st_mode)) for path in [tmp_path / "c", *(tmp_path / "c").rglob("*")]
    }
    assert seen == {(True, 0o700), (False, 0o600)}


def test_existing_folders_keep_their_rights(tmp_path):
    tmp_path.chmod(0o755)
    private_dir(tmp_path / "a" / "b")
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError):
        private_dir(tmp_path / "file" / "below")
    with pytest.raises(StoreError):
        private_dir(tmp_path / "file")


@pytest.mark.parametrize("kind", ["file", "dangling link", "folder", "fifo"])
def test_nothing_is_overwritten(tmp_path, kind):
    final = tmp_path / "final.safetensors"
    {
        "file": lambda: final.write_bytes(b"old"),
        "dangling link": lambda: final.symlink_to(tmp_path / "absent"),
        "folder": final.mkdir,
        "fifo": lambda: os.mkfifo(final),
    }[kind]()
    with pytest.raises(StoreError, match="exists already"):
        publish(final, b"new")
    assert os.listdir(tmp_path) == ["final.safetensors"] and not (tmp_path / "absent").exists()
    assert kind != "file" or final.read_bytes() == b"old"


def test_one_writer_wins_a_name(tmp_path):
    start, go = os.pipe()
    children = []
    for mark in range(4):
        if (child := os.fork()) == 0:
            os.close(go)
            os.read(start, 1)
            won = 0
            for n in range(20):
                try:
                    publish(tmp_path / "c" / f"{n}.json", f"{mark}" * 3000)
                    won += 1
                except StoreError:
                    pass
            os._exit(won)
        children.append(child)
    os.close(start), os.close(go)
    assert sum(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children) == 20
    texts = [path.read_text() for path in (tmp_path / "c").iterdir()]
    assert len(texts) == 20 and all(len(text) == 3000 and len(set(text)) == 1 for text in texts)


def test_durable_calls_come_in_order(tmp_path, monkeypatch):
    """Data before the name, the name before the call returns; and a new folder's name before what is in it."""
    seen = []

    def spy(name):
        real = getattr(os, name)

        def call(*args, **kwargs):
            folder = name == "fsync" and stat.S_ISDIR(os.fstat(args[0]).st_mode)
            seen.append(name + (" folder" if folder else ""))
            return real(*args, **kwargs)

        monkeypatch.setattr(os, name, call)

    for name in ("fsync", "link", "unlink", "mkdir"):
        spy(name)
    publish(tmp_path / "new" / "record.json", "{}\n")
    assert seen == ["mkdir", "fsync folder", "fsync", "link", "unlink", "fsync folder"]


def test_a_kill_at_any_call_leaves_a_record_absent_or_whole(tmp_path):
    states = []
    for n in range(1, 20):
        path = tmp_path / str(n) / "record.json"
        status, _, _ = killed_at(n, lambda say, path=path: publish(path, "{}\n" * 5000))
        states.append(path.exists())
        assert status in (0, KILLED) and (not path.exists() or path.read_text() == "{}\n" * 5000)
        if path.parent.exists():
            remove_strays(tmp_path / str(n))
            assert os.listdir(path.parent) == (["record.json"] if states[-1] else [])
        if status == 0:
            break
        if not states[-1]:
            publish(path, "again")
    assert states == sorted(states) and states[-1] and not states[0] and len(states) >= 6


def test_a_copy_that_is_not_the_pinned_one_leaves_nothing(tmp_path):
    (tmp_path / "source").write_bytes(b"x" * 3_000_000)
    for sha256, source in ((sha256_bytes(b"y"), "source"), ("0" * 64, "absent")):
        with pytest.raises(DataError):
            publish_copy(tmp_path / source, tmp_path / "out" / "copy", sha256)
    assert not list((tmp_path / "out").glob("*"))
    assert publish_copy(tmp_path / "source", tmp_path / "out" / "copy", sha256_bytes(b"x" * 3_000_000)) == 3_000_000


# ---------------------------------------------------------------- lock


def test_the_lock_excludes_another_process_and_dies_with_it(tmp_path):
    told, tell = os.pipe()
    if (child := os.fork()) == 0:
        with controller_lock(tmp_path):
            os.write(tell, b"x")
            signal.pause()
    os.read(told, 1)
    try:
        with pytest.raises(LockError, match="another controller"), controller_lock(tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    with controller_lock(tmp_path):
        assert (tmp_path / ".lock").exists()
    os.close(told), os.close(tell)


def test_an_error_inside_the_lock_is_not_taken_for_a_held_lock(tmp_path):
    with pytest.raises(BlockingIOError), controller_lock(tmp_path):
        raise BlockingIOError("from the work")
    with pytest.raises(StoreError), controller_lock(tmp_path / "absent"):
        pass


def test_only_temporary_names_are_removed(tmp_path):
    layout = Layout(tmp_path)
    write_trial(layout)
    kept = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    (tmp_path / "reports" / ".tmp-folder").mkdir(parents=True)
    (tmp_path / "reports" / ".tmp-folder" / "x").write_text("x")
    (layout.trial(TRIAL).history / ".tmp-z").symlink_to(tmp_path)
    assert remove_strays(tmp_path) == ["reports/.tmp-folder", f"trials/{TRIAL}/history/.tmp-z"]
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == kept


# ---------------------------------------------------------------- records


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]\n",
        b'{"a":1}',
        b'{\n  "a": 1\n}',
        b'{\n  "a": 1,\n  "a": 1\n}\n',
        b'{\n  "a": NaN\n}\n',
        b'\xff{\n  "a": 1\n}\n',
        b'\xef\xbb\xbf{\n  "a": 1\n}\n',
        b'{\n  "a": 1\n}\n\n',
    ],
)
def test_what_is_no_canonical_record_is_refused(tmp_path, data):
    (tmp_path / "r.json").write_bytes(data)
    with pytest.raises(DataError, match="r.json"):
        read_canonical(tmp_path / "r.json")


def test_reading_follows_no_link_and_waits_for_nobody(tmp_path):
    publish(tmp_path / "r.json", '{\n  "a": 1\n}\n')
    assert read_canonical(tmp_path / "r.json") == {"a": 1}
    (tmp_path / "link").symlink_to("r.json")
    os.mkfifo(tmp_path / "fifo")
    for name in ("link", "fifo", "absent", "."):
        with pytest.raises(DataError):
            read_canonical(tmp_path / name)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Layout:
    """A completed trial; tests give back what they take."""
    layout = Layout(tmp_path_factory.mktemp("finished"))
    write_trial(layout)
    return layout


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_no_byte_of_a_finished_trial_can_change_unnoticed(finished, data):
    """The outcome is the last link: what it says of itself is bound by nothing but its own form."""
    files = sorted(path for path in finished.root.rglob("*") if path.is_file() and path.name != "outcome.json")
    path = data.draw(st.sampled_from(files))
    whole = path.read_bytes()
    raw = bytearray(whole)
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(bytes(raw))
    try:
        with pytest.raises(DataError):
            verify_chain(finished, SEALED, TRIAL)
            completed_evidence(finished, SEALED, TRIAL)
    finally:
        path.write_bytes(whole)


@pytest.mark.parametrize("removed", ["reservation.json", "dispatch.json", "history/0001.json", "checkpoints/0001.json"])
def test_a_dropped_record_breaks_the_chain(tmp_path, removed):
    layout = Layout(tmp_path)
    write_trial(layout)
    (layout.trial(TRIAL).root / removed).unlink()
    with pytest.raises(DataError, match="follow"):
        verify_chain(layout, SEALED, TRIAL)


def test_a_chain_follows_the_links_not_the_names(tmp_path):
    layout = Layout(tmp_path)
    write_trial(layout)
    order = verify_chain(layout, SEALED, TRIAL)
    assert order[2:5] == ["history/0001.json", "checkpoints/0001.json", "history/0002.json"]
    assert chain_head(layout, SEALED, TRIAL) == sha256_file(layout.trial(TRIAL).outcome)
    assert chain_head(layout, SEALED, "0002-agent-a-02") is None
    first = layout.trial(TRIAL).reservation
    write_record(layout.trial(TRIAL).history / "0009.json", Schema.HISTORY, SEALED, TRIAL, {}, sha256_file(first))
    with pytest.raises(DataError, match="follow the same record"):
        verify_chain(layout, SEALED, TRIAL)


@pytest.mark.parametrize("field", ["manifest_sha256", "trial", "artifact_sha256"])
def test_a_receipt_is_bound_to_campaign_trial_and_artifact(tmp_path, field):
    layout, artifact = Layout(tmp_path), sha256_bytes(b"tensors")
    write_trial(layout)
    assert read_grade(layout, SEALED, TRIAL, artifact)["artifact_sha256"] == artifact
    envelope = {"manifest_sha256": SEALED, "trial": TRIAL, "artifact_sha256": artifact} | {field: "0" * 64}
    layout.grade(TRIAL).unlink()
    body = {"artifact_sha256": envelope.pop("artifact_sha256")}
    write_record(layout.grade(TRIAL), Schema.GRADE, envelope["manifest_sha256"], envelope["trial"], body)
    with pytest.raises(DataError):
        read_grade(layout, SEALED, TRIAL, artifact)
    with pytest.raises(DataError):
        completed_evidence(layout, SEALED, TRIAL)


def test_another_intact_receipt_does_not_back_a_score(tmp_path):
    """Same campaign, trial and artifact, but not the receipt that the outcome names."""
    layout = Layout(tmp_path)
    write_trial(layout)
    layout.grade(TRIAL).unlink()
    body = {"artifact_sha256": sha256_bytes(b"tensors"), "private": {"equal": 0.0}}
    write_record(layout.grade(TRIAL), Schema.GRADE, SEALED, TRIAL, body)
    with pytest.raises(DataError, match="not the receipt"):
        completed_evidence(layout, SEALED, TRIAL)


def test_the_artifact_must_be_a_file_of_its_own(tmp_path):
    layout = Layout(tmp_path / "c")
    write_trial(layout)
    final = layout.trial(TRIAL).final
    (tmp_path / "elsewhere").write_bytes(final.read_bytes())
    final.unlink()
    final.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="no regular file"):
        completed_evidence(layout, SEALED, TRIAL)


def test_a_record_costs_little_beside_the_disk(tmp_path):
    """Processor time only: how long the disk needs to make two things durable is not ours."""
    spent, last = [], None
    for n in range(40):
        start = time.process_time()
        last = write_record(tmp_path / "h" / f"{n}.json", Schema.HISTORY, SEALED, TRIAL, {"text": "x" * 500}, last)
        spent.append(time.process_time() - start)
    assert statistics.median(spent) < 0.002


# ---------------------------------------------------------------- outcomes and the crash matrix


def test_there_are_six_statuses_and_closed_reasons():
    assert set(OUTCOMES) == {
        "completed",
        "invalid_artifact",
        "failed",
        "timed_out",
        "budget_blocked",
        "outcome_unknown",
    }
    assert len(OUTCOMES) == 6 and all(code.islower() and " " not in code for code in ReasonCode)
    for status in OUTCOMES:
        for reason in ("RuntimeError: CANARY", "", "Graded"):
            with pytest.raises(DataError):
                outcome_body(status, reason)


MATRIX = {
    "nothing": (Outcome.FAILED, True, False),
    "reservation": (Outcome.FAILED, True, False),
    "dispatch": (Outcome.OUTCOME_UNKNOWN, False, False),
    "history": (Outcome.OUTCOME_UNKNOWN, False, False),
    "final": (Outcome.OUTCOME_UNKNOWN, False, True),
    "closure": (Outcome.OUTCOME_UNKNOWN, False, True),
    "grade": (Outcome.OUTCOME_UNKNOWN, False, True),
    "outcome": (Outcome.COMPLETED, False, False),
}


@pytest.mark.parametrize("stage", STAGES)
def test_status_after_each_stage(tmp_path, stage):
    layout = Layout(tmp_path)
    write_trial(layout, stop=stage)
    found = derived_status(layout, TRIAL)
    assert (found.status, found.may_run, found.inspection_only) == MATRIX[stage] and found.evidence == stage
    (layout.root / "trials" / TRIAL).mkdir(parents=True, exist_ok=True)
    (layout.root / "trials" / TRIAL / ".tmp-torn").write_text('{"schema": "wsm.outcome.v1", "status": "comp')
    assert derived_status(layout, TRIAL) == found, "a torn temporary file says nothing"


def test_a_kill_around_any_name_gives_a_status_of_the_matrix(tmp_path):
    """The status on disk is that of the last stage that was reported, or of the next one, whose name was just made."""
    n, seen = 0, []
    while True:
        n += 1
        layout = Layout(tmp_path / str(n))
        status, said, _ = killed_at(n, lambda say, layout=layout: write_trial(layout, say=say), ("link", "unlink"))
        found = derived_status(layout, TRIAL)
        reached = len(said.split())
        assert found.evidence in STAGES[max(reached - 1, 0) : reached + 1], (n, said, found)
        assert (found.status, found.may_run, found.inspection_only) == MATRIX[found.evidence]
        seen.append(found.evidence)
        if found.status == Outcome.COMPLETED:
            completed_evidence(layout, SEALED, TRIAL)
        else:
            with pytest.raises(MiniVerlError):
                completed_evidence(layout, SEALED, TRIAL)
        if status == 0:
            break
    assert [stage for stage in STAGES if stage in seen] == list(STAGES) and n == 19
    assert seen == sorted(seen, key=STAGES.index)


@pytest.mark.parametrize("status", [s for s in OUTCOMES if s != "completed"])
def test_other_outcomes_are_taken_as_written(tmp_path, status):
    layout = Layout(tmp_path)
    write_trial(layout, stop="nothing" if status == "budget_blocked" else "grade")
    write_record(
        layout.trial(TRIAL).outcome, Schema.OUTCOME, SEALED, TRIAL, outcome_body(status, ReasonCode.INTERRUPTED)
    )
    found = derived_status(layout, TRIAL)
    assert found == (status, "outcome") and not found.may_run
    with pytest.raises(DataError, match="not completed"):
        completed_evidence(layout, SEALED, TRIAL)


def test_a_damaged_outcome_is_an_error_not_a_status(tmp_path):
    layout = Layout(tmp_path)
    write_trial(layout)
    outcome = layout.trial(TRIAL).outcome
    whole = outcome.read_text()
    for damaged in (whole[:-2], whole.replace("completed", "perfected"), whole.replace(TRIAL, "0002-agent-a-02")):
        outcome.write_text(damaged)
        with pytest.raises(DataError):
            derived_status(layout, TRIAL)


# ---------------------------------------------------------------- the package


def calls_of(path: Path) -> set[str]:
    """Dotted names of everything that a module imports or looks up."""
    tree, found = ast.parse(path.read_text()), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            found.add(ast.unparse(node))
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{name.name}" for name in node.names}
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*.py")), ids=lambda path: path.name)
def test_no_module_of_the_package_can_overwrite(path):
    """Renaming replaces in silence. Records are linked to their names."""
    names = calls_of(path)
    ours = ("store.write_atomic", "store.replace_dir", "store.publish_dir", "store.RunDir")
    for name in names:
        assert name not in ("os.rename", "os.replace", "os.renames", "shutil.move"), name
        assert not name.endswith((".rename", *ours)), name
        assert not {"training", "evaluation"} & set(name.split(".")[:-1]), f"{name}: a higher floor, or a trainer"


def test_modules_that_only_read_do_without_torch():
    code = (
        "import sys, miniverl.campaign.records, miniverl.campaign.evidence, miniverl.campaign.manifest, miniverl.campaign.budget\n"
        "print(sorted({'torch', 'transformers', 'safetensors'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
