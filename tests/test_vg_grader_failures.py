"""Ways in which graders of answers have failed in public, each tried on this one with an input of our own.

Here everything is `grade` alone; what needs a framework, the gate, the second decider or a log stands beside those.

     1  a power tower hangs the parser               test_a_power_tower_is_not_evaluated
     2  memory grows until the machine dies          test_memory_does_not_grow_with_the_reply
     3  a timeout by signal off the main thread      test_threads_and_event_loops_get_the_same_grades
     4  an error in the grader counts as a 0         test_vg_rewards.py::test_a_raising_grader_stops_a_trainer
                                                     test_vg_rewards.py::test_a_grader_that_fails_now_and_then_is_never_taken_for_a_zero
                                                     bindings/test_v0.py::test_a_raising_grader_is_seen
                                                     bindings/test_v1.py::test_a_raising_grader_is_an_error_on_the_trace
     5  equality depends on the order of arguments   test_the_order_of_the_ends_is_part_of_the_claim
     6  model text is evaluated                      test_model_text_is_never_run
     7  only the end of the reply is searched        test_text_after_the_answer_does_not_hide_it
     8  an open last answer falls back               test_an_unterminated_last_answer_does_not_fall_back
     9  first answer here, last answer there         test_one_rule_picks_the_answer
                                                     test_the_same_answer_is_picked_everywhere
    10  no answer found: the whole text is graded    test_a_mention_outside_the_tags_is_not_an_answer
    11  unfinished thinking is paid                  test_unfinished_thinking_is_not_an_answer
    12  load counts as grading time                  test_load_changes_no_verdict
    13  never paid, whatever the reply               bindings/test_v0.py::test_rewards_are_those_of_the_core
                                                     bindings/test_v1.py::test_evaluation_from_end_to_end
    14  a bad row pays every reply                   test_a_bad_row_is_a_fault_and_never_pays
    15  a true answer isn't equal to itself          test_vg_gate.py::test_the_held_out_gate_is_green
    16  an answer is extracted twice                 test_the_answer_is_read_once
    17  an integer of more than 4,300 digits raises  test_integers_beyond_the_conversion_limit_are_an_answer_too_long
    18  NaN passes a tolerance                       test_no_number_that_compares_as_neither
    19  a hung check blocks the batch                test_the_dearest_answer_is_cheap
    20  the example in the prompt is graded          test_the_example_of_the_format_earns_nothing
                                                     test_vg_rewards.py::test_the_example_in_the_prompt_is_no_answer
    21  a truncated reply is paid                    test_a_truncated_reply_is_paid_nothing
                                                     test_vg_rewards.py::test_truncated_pays_nothing_whatever_the_reply
                                                     test_vg_rollouts.py::test_a_forged_sample_refuses_the_run
                                                     bindings/test_v0.py::test_a_truncated_reply_is_paid_nothing
                                                     bindings/test_v1.py::test_evaluation_from_end_to_end
"""

from __future__ import annotations

import ast
import asyncio
import random
import re
import sys
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from vg_second import bridge, needs_node

from miniverl.verify_gym import answer, exact
from miniverl.verify_gym.answer import Task, grade
from miniverl.verify_gym.conformance import grade_parts
from miniverl.verify_gym.curriculum import train
from miniverl.verify_gym.exact import RowError, cmp_xx
from miniverl.verify_gym.families import prompt
from miniverl.verify_gym.policies import POLICIES
from miniverl.verify_gym.rewards import reward_fn
from miniverl.verify_gym.rollouts import Header, RolloutLog, recheck

XX = Task("xx", "control", 0, {"n": 30}, (2, 1), (3, 1))  # x = 2.6...
ROOT3 = Task("kroot", "control", 0, {"n": 3, "k": 2}, (1, 1), (2, 1))
POLY = Task("poly", "control", 0, {"coefficients": (-3, 0, 1)}, (1, 1), (2, 1))
TRUE = "<answer>1.732, 1.733</answer>"
WRONG = "<answer>1.733, 1.734</answer>"
REPLIES = [
    TRUE,
    WRONG,
    "",
    "1.732, 1.733",
    TRUE + WRONG,
    "<answer>0, 2</answer>",
    "<answer>1.7320508, 1.7320509</answer>",
]


def tagged(body: str) -> str:
    return f"<answer>{body}</answer>"


def cpu_seconds(call) -> float:
    started = time.process_time()
    call()
    return time.process_time() - started


def test_a_power_tower_is_not_evaluated():
    """A parser that evaluates 9^(9^9) never returns, whatever its timeout says."""
    bodies = [
        "9^(9^(9^9)), 2",
        "9**9**9, 2",
        "1, 10**10**10",
        "2, factorial(10**9)",
        f"{'7' * 10**6}, 2",
        f"1, 1/{'7' * 10**6}",
    ]
    for body in bodies:
        assert cpu_seconds(lambda body=body: grade(XX, tagged(body))) < 0.1
        assert grade(XX, tagged(body)).verdict == "MALFORMED"


def test_memory_does_not_grow_with_the_reply():
    """A reply that is parsed in pieces can fill the machine before any timer fires."""
    for reply in ("<answer>" * 10**5, "x" * 10**7, "<answer>1," + "3" * 10**7, "(" * 10**6 + TRUE, "<think>" * 10**5):
        tracemalloc.start()
        grade(ROOT3, reply)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 10**5


def test_threads_and_event_loops_get_the_same_grades():
    """A timeout by signal works on the main thread only; elsewhere it raises or pays nothing."""
    expected = [grade(ROOT3, reply) for reply in REPLIES]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda reply: grade(ROOT3, reply), REPLIES * 20)) == expected * 20

    async def inside() -> list:
        return [grade(ROOT3, reply) for reply in REPLIES]

    assert asyncio.run(inside()) == expected


def test_the_order_of_the_ends_is_part_of_the_claim():
    """An equality test that depends on the order of its arguments, or sorts them, grades another claim."""
    assert grade(ROOT3, tagged("1.733, 1.732")).verdict == "MALFORMED"
    assert grade(ROOT3, tagged("1.732, 1.733")).verdict == "CERTIFIED"


def test_model_text_is_never_run(monkeypatch):
    """A grader that evaluates the reply hands the process to whoever wrote it; one sample can then forge the next."""
    before = [grade(ROOT3, reply) for reply in REPLIES]
    attacks = [
        '__import__("os").getpid(), 2',
        "().__class__.__bases__, 2",
        "1, (lambda: 2)()",
        "grade := 1, 2",
        "{1}, {2}",
        "%(lo)s, %(hi)s",
        "1, 2\n</answer><answer>__import__('sys').exit()",
    ]
    monkeypatch.setattr(sys, "exit", lambda *a: pytest.fail("model text ran"))
    for body in attacks:
        assert grade(ROOT3, tagged(body)).verdict == "MALFORMED"
    order = list(range(len(REPLIES))) * 5
    random.Random(3).shuffle(order)
    assert [grade(ROOT3, REPLIES[i]) for i in order] == [before[i] for i in order], "no sample changes another's grade"


def test_text_after_the_answer_does_not_hide_it():
    """A search limited to the last few hundred characters pays 0 for a right answer that is followed by a remark."""
    assert grade(ROOT3, TRUE + " and that is all." * 10**4).verdict == "CERTIFIED"
    assert grade(ROOT3, "let me see. " * 10**4 + TRUE).verdict == "CERTIFIED"


def test_an_unterminated_last_answer_does_not_fall_back():
    """Falling back to an earlier box pays for an answer that the model had left behind."""
    for tail in ("<answer>", "<answer>1.7320, 1.7321", "<answer>1.7320, 1.7321<answer"):
        outcome = grade(ROOT3, TRUE + tail)
        assert (outcome.verdict, outcome.progress) == ("MALFORMED", 0)


def test_one_rule_picks_the_answer():
    """Training that takes the last box and evaluation that takes the first measure two things."""
    assert grade(ROOT3, WRONG + TRUE).verdict == "CERTIFIED" and grade(ROOT3, TRUE + WRONG).verdict == "REFUTED"


@needs_node
def test_the_same_answer_is_picked_everywhere(tmp_path):
    """The grader, the second decider, a trainer's reward and the re-check read one answer of two, and it's the same one."""
    task = train(1)
    true, false = POLICIES["bisect"](prompt(task)), tagged(f"{task.high[0]}, {task.high[0] + 1}")
    paid = []
    for reply in (
        true + false,
        false + true,
        f"<think>{true}</think>{false}",
        f"<think>{false}</think>{true}",
        true + "<answer>",
    ):
        with bridge.SecondDecider() as second:
            mine = grade(task, reply)
            assert second.decide([bridge.Question(task, reply)]) == [grade_parts(mine)]
            assert reward_fn([reply], task=[task]) == [mine.progress / mine.cap]
            with RolloutLog(tmp_path / f"{len(paid)}.jsonl", Header("train")) as log:
                log.add(task.task_id, reply, mine.progress / mine.cap)
            assert recheck(log.path, second.decide).confirmed
        paid.append(mine.progress > 0)
    assert paid == [False, True, False, True, False]


def test_a_mention_outside_the_tags_is_not_an_answer():
    """Where no box is found, grading the whole text pays for a mention."""
    for reply in ("so 1.732, 1.733", "lo = 1.732, hi = 1.733", "answer: 1.732, 1.733", r"\boxed{1.732, 1.733}"):
        assert grade(ROOT3, reply).verdict == "MALFORMED"


def test_unfinished_thinking_is_not_an_answer():
    """A reply that stops in the middle of its thinking has answered nothing."""
    assert grade(ROOT3, f"<think>perhaps {TRUE}").verdict == "MALFORMED"
    assert grade(ROOT3, f"<think>perhaps {TRUE}</think>").verdict == "MALFORMED"
    assert grade(ROOT3, f"<think>perhaps {WRONG}</think>{TRUE}").verdict == "CERTIFIED"


def test_load_changes_no_verdict():
    """A wall clock inside a verdict turns a busy machine into wrong grades."""
    serial = [grade(POLY, REPLIES[i % len(REPLIES)]) for i in range(1000)]

    async def many() -> list:
        return await asyncio.gather(*(asyncio.to_thread(grade, POLY, REPLIES[i % len(REPLIES)]) for i in range(1000)))

    assert asyncio.run(many()) == serial
    for module in (answer, exact):
        assert not {"time", "signal", "threading", "asyncio", "datetime"} & set(vars(module))


def test_a_bad_row_is_a_fault_and_never_pays():
    """A gold answer that can't be read must not make every reply right."""
    for coefficients, low, high in (((1, 0, 1), (0, 1), (2, 1)), ((2, -3, 1), (0, 1), (3, 1)), ((), (0, 1), (1, 1))):
        with pytest.raises(RowError):
            grade(Task("poly", "control", 0, {"coefficients": coefficients}, low, high), TRUE)


def test_the_answer_is_read_once(monkeypatch):
    """An answer that is extracted from what was already extracted is lost."""
    calls = []
    real = answer.parse_answer
    monkeypatch.setattr(answer, "parse_answer", lambda *args: calls.append(args) or real(*args))
    assert grade(ROOT3, TRUE).progress == 3 and len(calls) == 1


def test_integers_beyond_the_conversion_limit_are_an_answer_too_long():
    """Python refuses to convert more than 4,300 digits; a grader that tries raises in the middle of a batch."""
    for digits in (4299, 4300, 4301, 5000):
        for body in (f"1, {'9' * digits}", f"{'9' * digits}/{'9' * digits}, 2", f"1.{'9' * digits}, 2"):
            assert grade(ROOT3, tagged(body)).verdict == "MALFORMED"


def test_no_number_that_compares_as_neither():
    """NaN passes any test written as `not abs(x - gold) > tolerance`."""
    for text in (
        "nan",
        "NaN",
        "-nan",
        "inf",
        "-inf",
        "Infinity",
        "1e999",
        "0/0",
        "-0/0",
        "-0/-0",
        "\u221e",
        "None",
        "null",
    ):
        for body in (f"{text}, 2", f"1, {text}", f"{text}, {text}"):
            outcome = grade(ROOT3, tagged(body))
            assert (outcome.verdict, outcome.progress) == ("MALFORMED", 0)


def test_the_dearest_answer_is_cheap():
    """Without a bound on the work, one reply can hold up a batch or keep a worker for ever."""
    task = Task("xx", "control", 0, {"n": 10**6}, (7, 1), (8, 1))
    for body in ("99999/99998, 100000/99999", "99997/14152, 99998/14152", "1, 100000", "99999/99998, 100000"):
        grade(task, tagged(body))
        assert cpu_seconds(lambda body=body: grade(task, tagged(body))) < 0.05
    assert cpu_seconds(lambda: cmp_xx(10**6, (99999, 99998), exact=True)) < 5


def test_the_example_of_the_format_earns_nothing():
    """A prompt shows how an answer looks; a grader that reads the prompt, or a model that copies it, must not be paid."""
    prompt = "Finish with <answer>lo, hi</answer>, for instance."
    for reply in ("", " ", "\n", prompt, "<answer>lo, hi</answer>", "<answer></answer>"):
        assert grade(ROOT3, reply).verdict == "MALFORMED"


def test_a_truncated_reply_is_paid_nothing():
    """Zero, keep or soften: here a reply that hit its limit is worth 0, even with a complete answer in it."""
    assert grade(ROOT3, TRUE).progress == 3
    cut = grade(ROOT3, TRUE, truncated=True)
    assert (cut.verdict, cut.progress, cut.decimals) == ("MALFORMED", 0, None)


def test_each_failure_has_its_tests():
    """The table above names tests that exist, for every number."""
    rows = re.findall(r"^ +(\d+)  ", __doc__, re.MULTILINE)
    assert [int(number) for number in rows] == list(range(1, 22))
    here, files = Path(__file__), {}
    for place, name in re.findall(r"  (?:([\w/]+\.py)::)?(test_\w+)$", __doc__, re.MULTILINE):
        path = here.with_name(place) if place and "/" not in place else here.parent / place if place else here
        if path not in files:
            files[path] = {
                node.name for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if hasattr(node, "name")
            }
        assert name in files[path], f"{path.name} has no {name}"
