"""The gate is green with real editors, red when one leaks, and its record is the one that is kept."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import campaign_fakes as fakes
import pytest

from miniverl.campaign.controls import QUICK, Traps, control_tapes
from miniverl.campaign.gate import GateReport, run_control_tapes, survivors
from miniverl.campaign.grading import Grade
from miniverl.campaign.launch import Closure
from miniverl.campaign.records import publish_copy
from miniverl.campaign.transfer import Export
from miniverl.core import StoreError, read_json, sha256_file

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="local editors need Linux")
ROOT = Path(__file__).resolve().parents[1]


# --- real editors and a real grader -----------------------------------------------------------------------------------


@linux
def test_the_tapes_with_the_most_controls_come_out_as_they_must(tmp_path):
    rows = []
    report = run_control_tapes(tmp_path / "gate", quick=True, on_progress=rows.append)
    assert report.green, report.table()
    assert {finding.tape for finding in report.findings} == {"scripted", *QUICK}
    assert [row.arm for row in rows] == ["unchanged", "scripted", *["agent"] * len(QUICK)]
    if report.level >= 2:
        assert report.count("open") == 0
    public = tmp_path / "gate" / "campaign" / "trials"
    beside = {path.name for path in (public / rows[3].trial).iterdir()}
    assert {"config.json", "tokenizer.json", "torch.py", "final.safetensors"} <= beside, "the neighbours were there"


@linux
@pytest.mark.slow
def test_both_whole_gates_are_the_ones_that_are_kept():
    sys.path.insert(0, str(ROOT))
    try:
        from benchmarks.campaign_gate import KEPT, measure
    finally:
        sys.path.remove(str(ROOT))
    assert measure() == read_json(KEPT)


# --- a machine that leaks ---------------------------------------------------------------------------------------------


@dataclass
class Leaky:
    """Editors that print what they please and hand out the original weights."""

    said: str
    attests: bool = True
    programs: list[str] = field(default_factory=list)

    def open(self, spec):
        def python(source, seconds):
            self.programs.append(source)
            return fakes.Answer(stdout=self.said)

        def export(final):
            source = next(Path(spec.snapshot).glob("*.safetensors"))
            return Export(sha256_file(source), publish_copy(source, final, sha256_file(source)))

        return SimpleNamespace(
            python=python, evaluate=lambda seconds: {"equal": 3.5}, export=export, close=lambda: Closure(self.attests)
        )


class Indifferent:
    """A grader that finds the same loss everywhere."""

    def grade(self, artifact, sha256, task, seconds):
        return Grade(fakes.score(3.0), fakes.score(1.0), {})

    def pristine(self, task, seconds):
        return self.grade(None, "", task, seconds)


def came(report: GateReport) -> dict[str, str]:
    return {finding.control: finding.came for finding in report.findings if finding.verdict != "as expected"}


def test_an_editor_that_leaks_makes_the_gate_red():
    backend = Leaky("read")
    report = run_control_tapes(quick=True, backend=backend, grader=Indifferent())
    assert not report.green and report.line().endswith("GATE RED")
    wrong = came(report)
    assert wrong["private-file probe"] == "ok: read" and wrong["forged score"] == "ok: loss 3.5"
    assert wrong["memory"] == "ok: read" and wrong["oversize export"] == "completed, original weights, equal loss"
    assert wrong["known-good edit"] == "completed, original weights, equal loss", "an edit that never arrived"
    assert "no-op" not in wrong and "hostile files" not in wrong
    assert any("auto_map" not in source and "/restricted/inputs/" in source for source in backend.programs)
    assert GateReport.from_record(json.loads(json.dumps(report.to_record()))) == report


def test_editors_whose_end_nobody_attests_make_the_gate_red():
    report = run_control_tapes(quick=True, backend=Leaky("denied", attests=False), grader=Indifferent())
    assert not report.green and came(report)["no-op"] == "outcome_unknown: closure_not_attested"


# --- the rest ---------------------------------------------------------------------------------------------------------


def test_a_folder_that_holds_something_is_refused(tmp_path):
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "mine").touch()
    with pytest.raises(StoreError, match="no empty folder"):
        run_control_tapes(tmp_path)
    assert [path.name for path in tmp_path.rglob("*")] == ["source", "mine"]


def test_every_tape_fits_into_the_allowance_of_an_action():
    long = tuple(f"/some/folder/that/has/a/long/name/{'x' * 80}/{n}" for n in range(3))
    for tape in control_tapes(Traps(long, 65535, "9" * 12)):
        assert all(len(action.get("source", "").encode()) <= 4 * 1024 for action in tape.actions)


@linux
def test_survivors_are_found_by_their_mark():
    mark = "300.271828182845"
    with subprocess.Popen(["/bin/sleep", mark]) as process:
        try:
            deadline = time.monotonic() + 10
            while not survivors(mark) and time.monotonic() < deadline:
                time.sleep(0.01)  # its arguments appear a moment after it does
            assert survivors(mark) == 1
        finally:
            process.kill()
    assert survivors(mark) == 0
