"""Rollout logs before the second decider: honest ones pass, forged and edited ones are refused, each for its reason."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from fractions import Fraction
from math import nextafter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vg_second import PROJECT, bridge, needs_node

from miniverl.verify_gym.answer import Task, grade
from miniverl.verify_gym.curriculum import curriculum_sha256, heldout, train, validation
from miniverl.verify_gym.exact import VerifyGymError
from miniverl.verify_gym.families import prompt
from miniverl.verify_gym.policies import POLICIES
from miniverl.verify_gym.rollouts import (
    FORMAT,
    Header,
    RolloutLog,
    Sample,
    first_decider,
    line_bytes,
    paid_progress,
    read_log,
    recheck,
    require_confirmed,
)


def answer(policy: str, task: Task) -> str:
    return POLICIES[policy](prompt(task))


def honest_line(number: int, task: Task, policy: str, truncated: bool = False) -> Sample:
    reply = answer(policy, task)
    got = grade(task, reply, truncated=truncated)
    return Sample(number, task.task_id, reply, got.progress / got.cap, truncated)


def write(path, lines, pool="train"):
    path.unlink(missing_ok=True)
    with RolloutLog(path, Header(pool)) as log:
        for line in lines:
            log.add(*line[1:4], truncated=line.truncated, sample=line.sample)
    return path


def write_raw(path, lines, header=None):
    """Lines as they are, without what the writer checks."""
    head = header or {"format": FORMAT, "curriculum": curriculum_sha256(), "pool": "train", "about": {}}
    path.write_bytes(b"".join(line if isinstance(line, bytes) else line_bytes(line) for line in [head, *lines]))
    return path


@pytest.fixture
def log(tmp_path):
    return tmp_path / "rollouts.jsonl"


@pytest.fixture(scope="module")
def second():
    with bridge.SecondDecider() as running:
        yield running.decide


POLICY_LINES = [
    (policy, index, cut)
    for index in range(12)
    for policy in POLICIES
    for cut in ([False, True] if index < 3 else [False])
]


@needs_node
def test_an_honest_log_is_confirmed_and_its_mean_is_exact(log, second):
    lines = [honest_line(n, train(index), policy, cut) for n, (policy, index, cut) in enumerate(POLICY_LINES)]
    report = recheck(write(log, lines), second)
    assert report.confirmed and report.samples == len(lines) and report.truncated == 15
    assert report.paid == sum(line.reward > 0 for line in lines) > 20
    grades = [grade(train(i), answer(p, train(i)), truncated=c) for p, i, c in POLICY_LINES]
    assert report.total == sum((Fraction(*got.reward_pair) for got in grades), Fraction(0))
    assert require_confirmed(report) is report


def one_more(task: Task) -> float:
    got = grade(task, answer("bisect", task))
    assert 0 < got.progress < got.cap
    return (got.progress + 1) / got.cap


XX, KROOT, POLY = train(0), train(1), train(2)
FORGED = {
    "refuted, paid 1": (
        KROOT,
        "<answer>1, 2</answer>",
        1.0,
        False,
        "paid 20/20, and the second decider says REFUTED, 0/20",
    ),
    "one step too many": (KROOT, answer("bisect", KROOT), one_more(KROOT), False, "says CERTIFIED"),
    "one step too many, x^x": (XX, answer("bisect", XX), one_more(XX), False, "says CERTIFIED"),
    "one step too many, poly": (POLY, answer("bisect", POLY), one_more(POLY), False, "says CERTIFIED"),
    "no answer can earn it": (XX, answer("cf", XX), 0.95, False, "no multiple of 1/8"),
    "no answer": (POLY, "It lies in between.", 1.0, False, "finds no answer in the reply"),
    "cut off": (XX, answer("cf", XX), 0.5, True, "cut off"),
    "held out": (heldout()[0], "no answer", 0.0, False, "a held-out task in a log of the pool train"),
    "validation task": (validation(0), "no answer", 0.0, False, "a validation task in a log of the pool train"),
    "a side outside the reduction": (XX, "<answer>1/2, 100</answer>", 0.125, False, "says REFUSED"),
    "paid less than it earned": (XX, answer("cf", XX), 0.125, False, "says CERTIFIED"),
}


@needs_node
@pytest.mark.parametrize("name", FORGED)
def test_a_forged_sample_refuses_the_run(name, log, second):
    task, reply, reward, cut, reason = FORGED[name]
    around = [honest_line(n, train(n), "cf") for n in (0, 1)]
    lines = [*around, Sample(2, task.task_id, reply, reward, cut), honest_line(3, train(3), "bisect")]
    report = recheck(write(log, lines), second)
    assert not report.confirmed
    assert [refusal[:2] for refusal in report.refusals] == [(2, task.task_id)] and reason in report.refusals[0].reason
    with pytest.raises(VerifyGymError) as error:
        require_confirmed(report)
    assert "RUN REFUSED" in error.value.message and reason in error.value.hint


def good(**changes):
    return {"sample": 0, "task_id": "xx/train/0", "reply": "none", "reward": 0.0, "truncated": False, **changes}


TWICE = b'{"sample":0,"task_id":"xx/train/0","reply":"a","reward":0.0,"reward":1.0,"truncated":false}\n'
BAD_LINES = {
    "no JSON": (b"{nothing}\n", "line 2"),
    "no object": (b"[1]\n", "no JSON object"),
    "empty line": (b"\n", "line 2"),
    "not UTF-8": (b'{"sample":"\xff"}\n', "line 2"),
    "nested": (b"[" * 100_000 + b"\n", "nested too deeply"),
    "cut off": (line_bytes(good())[:-1], "cut off"),
    "a key twice": (TWICE, "twice"),
    "a key missing": ({k: v for k, v in good().items() if k != "truncated"}, "its keys are"),
    "a key too many": (good(note=1), "its keys are"),
    "reward NaN": (b'{"sample":0,"task_id":"xx/train/0","reply":"a","reward":NaN,"truncated":false}\n', "NaN"),
    "reward true": (good(reward=True), "reward is 'True', a bool"),
    "reward text": (good(reward="1"), "reward is '1', a str"),
    "reward null": (good(reward=None), "reward is 'None'"),
    "reply null": (good(reply=None), "reply is 'None'"),
    "truncated 0": (good(truncated=0), "truncated is '0', a int"),
    "sample text": (good(sample="0"), "sample is '0'"),
    "sample negative": (good(sample=-1), "sample is -1"),
    "a huge integer": (b'{"sample":' + b"9" * 5000 + b"}\n", "line 2"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_line_that_is_none_is_refused(name, log):
    line, reason = BAD_LINES[name]
    with pytest.raises(VerifyGymError) as error:
        recheck(write_raw(log, [line]), first_decider)
    assert reason in error.value.message and "rollouts.jsonl, line 2" in error.value.message


def test_a_line_written_twice_is_refused(log):
    with pytest.raises(VerifyGymError, match="line 4: sample 0 stands there twice"):
        recheck(write_raw(log, [good(), good(sample=1), good()]), first_decider)
    assert (
        recheck(write_raw(log, [good(), good(sample=1)]), first_decider).samples == 2
    )  # the same reply twice is honest


@pytest.mark.parametrize(
    ("task_id", "reward", "reason"),
    [
        ("xx/train/-1", 0.0, "no task"),
        ("xx/train/00", 0.0, "no task"),
        ("zeta/train/0", 0.0, "no task"),
        ("xx/heldout-v9/0", 0.0, "heldout-v9.json is missing"),
        ("xx/heldout-v0/40", 0.0, "no task"),
        ("xx/train/0\n", 0.0, "no task"),
        ("\x1b[31m" * 50, 0.0, "no task"),
        ("xx/train/0", 1e999, "a reward of inf"),
        ("xx/train/0", -0.125, "no multiple"),
        ("xx/train/0", 0.12500001, "no multiple"),
        ("xx/train/0", 10**400, "no multiple"),
        ("xx/train/0", 5e-324, "no multiple"),
    ],
)
def test_an_impossible_claim_is_refused_without_asking(task_id, reward, reason, log):
    def unasked(questions):
        assert not questions
        return []

    line = json.dumps(good(task_id=task_id, reward=reward)).replace("Infinity", "1e999").encode() + b"\n"
    report = recheck(write_raw(log, [line]), unasked)
    assert len(report.refusals) == 1 and reason in report.refusals[0].reason


@pytest.mark.parametrize("gone", [0, 1, 3])
def test_a_log_from_which_a_line_was_taken_is_refused(gone, log):
    """Without its unpaid samples a run would have a better mean."""
    lines = [good(sample=number) for number in (0, 2, 3, 1)]
    assert recheck(write_raw(log, lines), first_decider).samples == 4
    del lines[gone]
    with pytest.raises(VerifyGymError, match="some are missing"):
        recheck(write_raw(log, lines), first_decider)


def test_only_the_curriculum_of_this_package_is_rechecked(log):
    other = {"format": FORMAT, "curriculum": "0" * 64, "pool": "train", "about": {}}
    with pytest.raises(VerifyGymError, match="of the curriculum 000000000000"):
        recheck(write_raw(log, [good()], other), first_decider)


@pytest.mark.parametrize(
    "content",
    [b"", b"\n", line_bytes(good()), line_bytes({"format": "verify-gym-rollouts/2"}), b"\x00" * 40, b"\xff\n"],
)
def test_a_file_without_a_header_is_no_log(content, log):
    log.write_bytes(content)
    with pytest.raises(VerifyGymError):
        recheck(log, first_decider)


def test_an_unpaid_sample_costs_no_question(log):
    lines = [Sample(0, "xx/train/0", answer("cf", XX), 0.0), honest_line(1, KROOT, "cf")]
    asked = []

    def spy(questions):
        asked.extend(questions)
        return first_decider(questions)

    assert recheck(write(log, lines), spy).confirmed and [task.task_id for task, _, _ in asked] == [KROOT.task_id]


def test_a_long_log_is_asked_about_in_batches(log):
    line = honest_line(0, KROOT, "cf")
    sizes = []

    def spy(questions):
        sizes.append(len(questions))
        return [{"verdict": "CERTIFIED", "progress": 20}] * len(questions)

    write_raw(log, [line._replace(sample=n)._asdict() for n in range(2500)])
    report = recheck(log, spy)
    assert sizes == [1000, 1000, 500] and report.total == 2500


@given(
    reply=st.text(max_size=60),
    odd=st.sampled_from(["", "\ud800", "\x00", "\u2028", "\r\n", "\x85", "é" * 3, "\udfff\ud800"]),
)
def test_any_reply_comes_back_as_it_was(tmp_path_factory, reply, odd):
    path = tmp_path_factory.mktemp("log") / "rollouts.jsonl"
    with RolloutLog(path, Header("train", {"note": odd})) as log:
        made = log.add("xx/train/0", odd + reply + odd, 0.0)
    header, found = read_log(path)
    # JSON can't tell two surrogates side by side from the character that they make up
    same = made.reply.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    assert found == made._replace(reply=same) and header.about == {"note": odd} and path.read_bytes().isascii()


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), 10**400, -0.125, 1.0001, "1", None, True])
def test_the_writer_takes_nothing_that_a_reader_refuses(reward, log):
    with RolloutLog(log, Header("train")) as writer:
        with pytest.raises(VerifyGymError, match="no sample of a log"):
            writer.add("xx/train/0", "x", reward)
        writer.add("xx/train/0", "x", 0)
        with pytest.raises(VerifyGymError, match="in the log already"):
            writer.add("xx/train/0", "x", 0.0, sample=0)
    assert [line.reward for line in list(read_log(log))[1:]] == [0]


def test_a_log_can_be_continued_at_any_byte_it_was_cut(log):
    lines = [honest_line(n, train(n), "bisect") for n in range(3)]
    whole = write(log, lines).read_bytes()
    for cut in [*range(0, len(whole), 17), len(whole)]:
        log.write_bytes(whole[:cut])
        with RolloutLog(log, Header("train")) as again:
            for line in lines:
                if line.sample not in again.samples:
                    again.add(*line[1:4], sample=line.sample)
        assert log.read_bytes() == whole


@pytest.mark.parametrize(
    "content", [b"my thesis", b"chapter 1\nchapter 2", b'{"format":"other"}\n{"a', b'{"note":', b"\n"]
)
def test_a_file_that_is_no_log_is_refused_and_left_as_it_was(content, log):
    """Only the cut-off end of a log of this run may be removed."""
    log.write_bytes(content)
    with pytest.raises(VerifyGymError):
        RolloutLog(log, Header("validation", {"model": "m"}))
    assert log.read_bytes() == content
    other = write(log, [honest_line(0, train(0), "cf")]).read_bytes() + b'{"sample":1,"ta'
    log.write_bytes(other)
    with pytest.raises(VerifyGymError, match="another run"):
        RolloutLog(log, Header("validation"))
    assert log.read_bytes() == other


def test_every_step_of_every_cap_is_a_reward_and_its_neighbours_are_none():
    for cap in (8, 20):
        for progress in range(cap + 1):
            assert paid_progress(progress / cap, cap) == progress
            for direction in (-1.0, 2.0):
                assert paid_progress(nextafter(progress / cap, direction), cap) is None


def script(*arguments, **environment):
    return subprocess.run(
        [sys.executable, PROJECT / "recheck.py", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=120,
    )


@needs_node
def test_the_script_confirms_and_refuses(log):
    run = script(write(log, [honest_line(n, train(n), "cf") for n in range(6)]))
    assert run.returncode == 0 and "6 samples · 6 paid · 0 refused" in run.stdout and "CONFIRMED" in run.stdout, run
    write(log, [Sample(0, KROOT.task_id, "<answer>1, 2</answer>", 1.0, False)])
    run = script(log, "--exact", PYTHONIOENCODING="ascii")
    assert run.returncode == 1 and "RUN REFUSED" in run.stdout and "REFUTED" in run.stdout
    run = script(write_raw(log, [good(reward=True)]))
    assert (run.returncode, run.stdout) == (1, "") and len(run.stderr.splitlines()) == 2


def test_the_script_says_so_where_node_is_missing(log):
    run = script(write(log, [honest_line(0, KROOT, "cf")]), PATH="/nonexistent")
    assert (run.returncode, run.stdout) == (1, "") and "Node.js isn't on PATH" in run.stderr
    assert len(run.stderr.splitlines()) == 2
