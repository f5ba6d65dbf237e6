"""The gate: what it plants is what it says, it goes red for every bad grader, and the kill matrix is the committed one."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from dataclasses import replace
from fractions import Fraction
from math import gcd
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import verify_gym_mutants as mutants

from miniverl.verify_gym.answer import FAMILIES, Grade, Malformed, grade, parse_answer, side_of
from miniverl.verify_gym.controls import controls, extra_controls, forgeries, greens, scene
from miniverl.verify_gym.curriculum import heldout
from miniverl.verify_gym.exact import VerifyGymError
from miniverl.verify_gym.families import generate
from miniverl.verify_gym.gate import OUTCOMES, GateError, plant, require_green, run_gate

ROOT = Path(__file__).resolve().parents[1]
LINE = "2240 forgeries planted on 120 rows · 0 leaked · 0 misfiled · 240 green controls · GATE GREEN"


@pytest.fixture(scope="module")
def battery():
    return controls(heldout())


@pytest.fixture(scope="module")
def matrix():
    return mutants.kill_matrix()


def body(planted):
    inside = planted.reply.rsplit("<answer>", 1)[1].removesuffix("</answer>")
    return [Fraction(end) for end in inside.split(", ")]


# --- what is planted --------------------------------------------------------


def test_the_held_out_gate_is_green():
    report = require_green()
    assert report.line() == LINE
    assert report.extra_line() == f"{len(extra_controls())} extra controls · 0 wrong · 0 greens wrong · 0 errors"


def test_rows_that_nobody_chose_are_green_too():
    tasks = [generate(family, "test", index) for family in FAMILIES for index in range(150)]
    report = run_gate(tasks)
    assert report.green, report.findings[0].sentence()
    assert report.planted == 18 * 450 + 300


def test_forgeries_of_a_row_have_distinct_kinds_and_replies(battery):
    for task in heldout()[::7]:
        made = forgeries(task) + greens(task)
        assert len({planted.kind for planted in made}) == len({planted.reply for planted in made}) == len(made)


def test_an_oversized_answer_is_true_readable_but_for_its_size_and_in_lowest_terms():
    for task in heldout():
        limit = FAMILIES[task.family].size_limit
        planted = next(item for item in forgeries(task) if item.kind == "over-the-limit")
        lo, hi = planted.reply.removeprefix("<answer>").removesuffix("</answer>").split(", ")
        p, q = map(int, lo.split("/"))
        assert gcd(p, q) == 1 and q > limit and max(len(str(abs(p))), len(str(q))) <= 80
        side = side_of(task)
        assert side((p, q), False) == 1
        upper = Fraction(hi)
        assert side((upper.numerator, upper.denominator), False) == -1
        assert parse_answer(planted.reply, limit) == Malformed("a number over the size limit")
        assert not isinstance(parse_answer(planted.reply, 10**79), Malformed)


def test_one_unit_past_is_past_by_less_than_a_unit():
    for task in heldout():
        made = {item.kind: item for item in forgeries(task)}
        x, at = Fraction(*scene(task).value), scene(task)
        lo, hi = body(made["lo-one-unit-past"])[0], body(made["hi-one-unit-past"])[1]
        assert 0 < lo - x < Fraction(1, at.lo[1]) and 0 < x - hi < Fraction(1, at.hi[1])


def test_the_greens_are_a_tight_and_a_loose_bracket():
    for task in heldout():
        tight, loose = (body(item) for item in greens(task))
        assert loose[0] <= tight[0] < tight[1] <= loose[1]
        assert Fraction(*task.low) <= loose[0] and loose[1] <= Fraction(*task.high)
        assert tight[1] - tight[0] < loose[1] - loose[0]


# --- a red gate -------------------------------------------------------------


def some():
    return [heldout()[0], heldout()[40], heldout()[80]]


def pays_copies(task, reply, *, truncated=False):
    got = grade(task, reply, truncated=truncated)
    return replace(got, progress=max(1, got.progress)) if got.verdict == "CERTIFIED" else got


def decides_bad_rows(task, reply, *, truncated=False):
    try:
        return grade(task, reply, truncated=truncated)
    except VerifyGymError:
        return Grade("REFUTED", "REFUTED", "REFUTED", 1, 0, FAMILIES[task.family].cap, "")


def ignores_truncation(task, reply, *, truncated=False):
    return grade(task, reply)


def returns_nothing(task, reply, *, truncated=False):
    return None


def pays_forgeries_less_than_a_step(task, reply, *, truncated=False):
    got = grade(task, reply, truncated=truncated)
    return replace(got, progress=got.progress or 0.9)


def pays_half_a_step_more(task, reply, *, truncated=False):
    got = grade(task, reply, truncated=truncated)
    return replace(got, progress=got.progress + 0.5)


def pays_more_than_all(task, reply, *, truncated=False):
    got = grade(task, reply, truncated=truncated)
    return replace(got, progress=1000) if got.progress and task.split != "control" else got


class Anything(str):
    """Equal to every verdict."""

    __eq__ = __ne__ = lambda self, other: self is not other
    __hash__ = str.__hash__


def says_anything(task, reply, *, truncated=False):
    return replace(grade(task, reply, truncated=truncated), verdict=Anything("PAID"))


def pays_from_a_pair_of_its_own(task, reply, *, truncated=False):
    class Generous(Grade):
        reward_pair = (1, 1)

    return Generous(*vars(grade(task, reply, truncated=truncated)).values())


def ends_the_run_at_the_second_extra(task, reply, *, truncated=False):
    if task.split == "control" and reply == "<answer>1, 2</answer>":
        sys.exit()
    return grade(task, reply, truncated=truncated)


def is_interrupted(task, reply, *, truncated=False):
    if task.split == "control":
        raise KeyboardInterrupt
    return grade(task, reply, truncated=truncated)


def raises_on_one_kind(task, reply, *, truncated=False):
    return 1 // 0 if "1/0" in reply else grade(task, reply, truncated=truncated)


@pytest.mark.parametrize(
    ("grader", "outcomes"),
    [
        (pays_copies, {"leaked", "bad extra"}),
        (decides_bad_rows, {"bad extra"}),
        (ignores_truncation, {"bad extra"}),
        (returns_nothing, {"error"}),
        (pays_forgeries_less_than_a_step, {"error"}),
        (pays_half_a_step_more, {"error"}),
        (pays_more_than_all, {"bad green"}),
        (says_anything, {"error"}),
        (pays_from_a_pair_of_its_own, {"leaked", "bad green", "bad extra"}),
        (ends_the_run_at_the_second_extra, {"error"}),
        (is_interrupted, {"error"}),
        (raises_on_one_kind, {"error"}),
    ],
)
def test_a_bad_grader_turns_the_gate_red(grader, outcomes):
    report = run_gate(some(), grader)
    assert not report.green and report.line().endswith("GATE RED")
    assert {found.outcome for found in report.findings} == outcomes
    with pytest.raises(GateError) as caught:
        require_green(report)
    assert "GATE RED" in caught.value.message and caught.value.hint == report.findings[0].sentence()


def test_a_grader_that_raises_is_counted_not_a_crash():
    report = run_gate(some(), raises_on_one_kind)
    assert report.count("error") == 3 and report.planted == 56
    assert "ZeroDivisionError" in report.findings[0].sentence()


def test_a_grader_that_hangs_after_a_while_is_red_and_its_thread_ends():
    calls = []

    def hangs(task, reply, *, truncated=False):
        calls.append(reply)
        while len(calls) > 5:
            try:
                time.sleep(0.001)
            except Exception:
                continue
        return grade(task, reply, truncated=truncated)

    report = run_gate(some(), hangs, patience=0.3)
    assert not report.green and report.count("error") == 1 and report.planted == 5
    assert report.findings[-1].sentence().endswith("no grade in time")
    assert not [thread for thread in threading.enumerate() if thread.name == "verify-gym gate"]


def test_a_grader_that_comes_back_too_late_is_red_though_it_judged_everything():
    def dawdles(task, reply, *, truncated=False):
        begun = time.monotonic()
        while truncated and time.monotonic() - begun < 0.6:
            try:
                time.sleep(0.01)
            except BaseException:
                continue
        return grade(task, reply, truncated=truncated)

    report = run_gate(some(), dawdles, patience=0.4)
    assert not report.green and report.findings[-1].sentence().endswith("no grade in time")


def test_counts_are_those_of_the_findings():
    report = run_gate(some(), pays_copies)
    assert report.count("leaked") == 3 and f" {report.count('bad extra')} wrong " in report.extra_line()
    assert sum(map(report.count, OUTCOMES)) == len(report.findings)
    assert replace(report, findings=()).line().replace("GREEN", "RED") != report.line()


def test_nothing_planted_is_not_green():
    for report in (run_gate([]), plant([], grade)):
        assert not report.green
        with pytest.raises(GateError, match="GATE RED"):
            require_green(report)


def test_the_whole_gate_takes_less_than_two_seconds_of_one_core():
    code = (
        "import time; from miniverl.verify_gym.gate import require_green; require_green(); print(time.process_time())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 2


# --- mutants ----------------------------------------------------------------


def test_the_unchanged_source_passes_the_gate(battery):
    assert plant(battery, mutants.load(dict(mutants.SOURCES))).line() == LINE


def test_every_mutant_is_killed_and_by_whom(matrix):
    assert [row["name"] for row in matrix["rows"] if row["killed_by"] == "nothing"] == []
    assert matrix["first_35"] == 35 and len({row["name"] for row in matrix["rows"]}) == matrix["mutants"]
    assert matrix["first_35_killed_by"] == {"forgeries and greens": 24, "extra controls": 10, "the syntax tree": 1}


def test_float_logarithms_are_caught_by_the_syntax_tree_alone(matrix):
    row = next(row for row in matrix["rows"] if row["name"] == "x^x by float logarithms")
    assert row["killed_by"] == "the syntax tree" and "math.log" in row["syntax_tree"]
    assert not any(row["caught"].values())


def test_no_exact_mutant_is_blamed_for_a_float(matrix):
    floats = {row["name"] for row in matrix["rows"] if row["syntax_tree"]}
    assert floats == {
        "k-th root by float",
        "polynomial by float",
        "x^x by float logarithms",
        "decimals by float logarithm",
    }


def test_the_committed_kill_matrix_is_the_one_made_now(matrix):
    hint = "run `python tests/verify_gym_mutants.py`"
    assert mutants.TARGET.read_text(encoding="utf-8") == mutants.matrix_json(matrix), hint
    assert mutants.TARGET.with_suffix(".md").read_text(encoding="utf-8") == mutants.matrix_markdown(matrix), hint


def test_an_edit_that_no_longer_fits_the_source_is_named():
    lost = mutants.answer_edit("a lost line", "this line is nowhere", "")
    with pytest.raises(ValueError, match="a lost line"):
        mutants.mutated(lost)
