"""The conformance suite: the committed file is what the code makes, and graders in two languages are told apart by it."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from hashlib import sha256
from types import SimpleNamespace

import pytest
from vg_second import PROJECT, needs_node

from miniverl.verify_gym import conformance
from miniverl.verify_gym.answer import Task, grade
from miniverl.verify_gym.conformance import (
    CONFORMANCE_SHA256,
    GRADE,
    conformance_cases,
    conformance_lines,
    lines_sha256,
    run_conformance,
)
from miniverl.verify_gym.curriculum import heldout
from miniverl.verify_gym.exact import RowError, VerifyGymError

SUITE = PROJECT / "conformance.jsonl"


@pytest.fixture(scope="module")
def cases():
    return conformance_cases()


def test_the_committed_file_is_what_the_code_makes_today():
    data = SUITE.read_bytes()
    assert data == "".join(conformance_lines()).encode("ascii")
    assert sha256(data).hexdigest() == CONFORMANCE_SHA256


def test_a_stranger_can_read_it_with_a_json_parser_alone():
    items = [json.loads(line) for line in SUITE.read_text(encoding="ascii").splitlines()]
    head, rows, asked = items[0], {}, []
    for item in items[1:]:
        if "row" in item:
            rows[item["id"]] = item["row"]
        else:
            assert set(item) == {"id", "task", "reply", "truncated", "expect"}
            assert item["task"] in rows, "a row comes before its cases"
            asked.append(item)
    assert (head["rows"], head["cases"]) == (len(rows), len(asked))
    assert {tuple(item["expect"]) for item in asked} == {GRADE, ("error",)}
    for item in asked:
        task = Task.from_row(rows[item["task"]])
        if "error" in item["expect"]:
            with pytest.raises(RowError):
                grade(task, item["reply"], truncated=item["truncated"])
        else:
            found = grade(task, item["reply"], truncated=item["truncated"])
            assert [found.verdict, found.decimals, found.progress] == [
                item["expect"][key] for key in ("verdict", "decimals", "progress")
            ]


def test_the_suite_has_every_kind_of_outcome(cases):
    seen = {(case.expect.get("verdict"), case.expect.get("lo"), case.expect.get("hi")) for case in cases}
    words = {"CERTIFIED", "REFUTED", "REFUSED"}
    assert {verdict for verdict, *_ in seen} == {*words, "MALFORMED", None}
    assert {lo for _, lo, _ in seen} >= words and {hi for *_, hi in seen} >= {"CERTIFIED", "REFUTED"}
    assert {case.expect.get("progress") for case in cases} >= {0, 1, 2, 3, 20}
    assert any(case.control.truncated for case in cases)


@pytest.mark.parametrize("field", ["verdict", "lo_word", "hi_word", "decimals", "progress"])
def test_one_wrong_part_of_one_grade_is_a_difference(cases, field):
    target = next(case for case in cases if case.expect.get("progress", 0) > 1)

    def off(task, reply, truncated=False):
        found = grade(task, reply, truncated=truncated)
        if (task, reply) != (target.control.task, target.control.planted.reply):
            return found
        value = getattr(found, field)
        return replace(found, **{field: value - 1 if isinstance(value, int) else "REFUTED"})

    report = run_conformance(off, cases)
    assert [name for name, *_ in report.differences] == [target.name] and not report.conforms


def test_refusing_or_raising_where_a_grade_is_due_is_a_difference(cases):
    few = [case for case in cases if case.control.group == "extra"]

    def refuses(task, reply, truncated=False):
        raise RowError("no", "")

    report = run_conformance(refuses, few)
    assert len(report.differences) == sum("error" not in case.expect for case in few) < len(few)

    def breaks(task, reply, truncated=False):
        raise RuntimeError("broken")

    report = run_conformance(breaks, few)
    assert len(report.differences) == len(few) and report.differences[0][2] == {"raised": "RuntimeError: broken"}
    assert len(run_conformance(lambda *args, **kw: SimpleNamespace(), few).differences) == len(few)


def test_a_gate_and_a_grader_that_disagree_make_no_suite(monkeypatch):
    monkeypatch.setattr(
        conformance, "grade", lambda task, reply, **kw: replace(grade(task, reply, **kw), verdict="REFUSED")
    )
    with pytest.raises(VerifyGymError, match="copied"):
        conformance_cases(heldout()[:1])


def run_file(path):
    done = subprocess.run(
        ["node", str(PROJECT / "check.js"), "--conformance", str(path)], capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stdout


@needs_node
def test_the_second_decider_conforms():
    code, said = run_file(SUITE)
    cases = json.loads(SUITE.open(encoding="ascii").readline())["cases"]
    assert (code, said) == (0, f"{cases} cases · 0 judged otherwise\n")


@needs_node
def test_the_second_decider_notices_a_changed_expectation(tmp_path):
    lines = SUITE.read_text(encoding="ascii").splitlines(keepends=True)[:6]
    item = json.loads(lines[3])
    item["expect"]["decimals"] = (item["expect"]["decimals"] or 0) + 1
    (tmp_path / "changed.jsonl").write_text("".join([*lines[:3], json.dumps(item) + "\n", *lines[4:]]))
    code, said = run_file(tmp_path / "changed.jsonl")
    assert code == 1 and item["id"] in said and said.endswith("4 cases · 1 judged otherwise\n")
    (tmp_path / "empty.jsonl").write_text("")
    assert run_file(tmp_path / "empty.jsonl")[0] == 1


def test_lines_are_hashed_as_the_file(tmp_path):
    assert lines_sha256(["a\n", "b\n"]) == sha256(b"a\nb\n").hexdigest()
