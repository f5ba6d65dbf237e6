"""The grammar of an answer, its limits, the four verdicts and what a bracket earns."""

from __future__ import annotations

import builtins
import random
import time
import tracemalloc
from decimal import Decimal, localcontext
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miniverl.verify_gym import answer
from miniverl.verify_gym.answer import (
    FAMILIES,
    VERDICTS,
    Answer,
    Malformed,
    Task,
    decimals,
    grade,
    parse_answer,
)
from miniverl.verify_gym.exact import RowError, VerifyGymError, cmp_xx

XX = Task("xx", "control", 0, {"n": 5}, (2, 1), (3, 1))
ROOT2 = Task("kroot", "control", 0, {"n": 2, "k": 2}, (1, 1), (2, 1))
POLY = Task("poly", "control", 0, {"coefficients": (-2, 0, 1)}, (1, 1), (2, 1))
THREE_ROOTS = Task("poly", "control", 1, {"coefficients": (-119, 184, -72, 8)}, (0, 1), (2, 1))
TASKS = (XX, ROOT2, POLY, THREE_ROOTS)
LIMIT = 10**30


def tagged(body: str) -> str:
    return f"<answer>{body}</answer>"


def read(body: str, limit: int = LIMIT):
    parsed = parse_answer(tagged(body), limit)
    return parsed.reason if isinstance(parsed, Malformed) else (parsed.lo, parsed.hi)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("1,2", ((1, 1), (2, 1))),
        (" \t\r\n1 ,\n 2 ", ((1, 1), (2, 1))),
        ("7/5, 3/2", ((7, 5), (3, 2))),
        ("1.414,1.415", ((707, 500), (283, 200))),
        ("-3/2, -1.25", ((-3, 2), (-5, 4))),
        ("-0, 00001.50", ((0, 1), (3, 2))),
        ("6/4, 200000/100000", ((3, 2), (2, 1))),
        ("0/7, 1/0003", ((0, 1), (1, 3))),
        ("1." + "0" * 79 + ", 2", ((1, 1), (2, 1))),
        ("0" * 79 + "1, 2", ((1, 1), (2, 1))),
        (" " * 397 + "1,2", ((1, 1), (2, 1))),
    ],
)
def test_what_is_read(body, expected):
    assert read(body) == expected


PLAIN = "not two plain numbers"
REFUSED_BODIES = {
    "": PLAIN,
    "1": PLAIN,
    "1, 2, 3": PLAIN,
    "1; 2": PLAIN,
    "+1, 2": PLAIN,
    "1e0, 2": PLAIN,
    "1E0, 2E0": PLAIN,
    "1_0, 20": PLAIN,
    "\u0661, \u0662": PLAIN,  # Arabic digits
    "\uff11, \uff12": PLAIN,  # full-width digits
    "\u00b2, 5": PLAIN,
    "1\u00a0, 2": PLAIN,  # a no-break space
    "1\x0b, 2": PLAIN,  # a vertical tab
    "1, 2\x00": PLAIN,
    "NaN, 2": PLAIN,
    "1, Infinity": PLAIN,
    "-inf, inf": PLAIN,
    "1/-2, 1": PLAIN,
    "--1, 2": PLAIN,
    "- 1, 2": PLAIN,
    ".5, 1": PLAIN,
    "1., 2": PLAIN,
    "1/2/3, 2": PLAIN,
    "1.5/2, 2": PLAIN,
    "1/2.5, 2": PLAIN,
    "1 1/2, 2": PLAIN,
    "1 / 2, 2": PLAIN,
    "[1, 2]": PLAIN,
    "(1, 2)": PLAIN,
    "lo=1, hi=2": PLAIN,
    r"\frac{1}{2}, 2": PLAIN,
    "2**9, 1000": PLAIN,
    "0x1, 0x2": PLAIN,
    "1, 2.": PLAIN,
    "1, 2 junk": PLAIN,
    "1/0, 2": "a denominator is 0",
    "1, 2/000": "a denominator is 0",
    "0/0, 0/0": "a denominator is 0",
    "2, 1": "lo is not below hi",
    "1, 1": "lo is not below hi",
    "1/2, 2/4": "lo is not below hi",
    "-1, -2": "lo is not below hi",
    "1, " + "1" * 81: "more than 80 digits",
    "0" * 80 + "1, 2": "more than 80 digits",
    "1." + "0" * 80 + ", 2": "more than 80 digits",
    "1/" + "3" * 81 + ", 2": "more than 80 digits",
    "1" + "0" * 89 + "/1" + "0" * 89 + ", 2": "more than 80 digits",
    " " * 398 + "1,2": "more than 400 characters",
}


@pytest.mark.parametrize("body", REFUSED_BODIES, ids=lambda body: ascii(body[:24]))
def test_what_is_not_read(body):
    assert REFUSED_BODIES[body] in str(read(body))
    outcome = grade(ROOT2, tagged(body))
    assert (outcome.verdict, outcome.progress, outcome.lo_word, outcome.decimals) == ("MALFORMED", 0, None, None)


@pytest.mark.parametrize(("family", "limit"), [("xx", 10**5), ("kroot", 10**30), ("poly", 10**30)])
def test_size_limit_is_on_lowest_terms(family, limit):
    assert FAMILIES[family].size_limit == limit
    over = "a number over the size limit"
    assert read(f"1, {limit}", limit) == ((1, 1), (limit, 1))
    assert read(f"1, {limit + 1}", limit) == over
    assert read(f"-{limit}, 1", limit) == ((-limit, 1), (1, 1)) and read(f"-{limit + 1}, 1", limit) == over
    assert read(f"1/{limit}, 1", limit) == ((1, limit), (1, 1)) and read(f"1/{limit + 1}, 1", limit) == over
    assert read(f"{3 * limit}/{3 * limit - 3}, 2", limit) == ((limit, limit - 1), (2, 1))
    assert read(f"1, {limit + 1}/{limit - 1}", limit) == (
        over if (limit + 1) % 2 else ((1, 1), ((limit + 1) // 2, (limit - 1) // 2))
    )


def test_the_last_answer_of_the_finished_text_counts():
    true, wrong = tagged("1.4, 1.5"), tagged("1.5, 1.6")
    for reply, verdict in {
        f"first {wrong} then {true} done": "CERTIFIED",
        true + wrong: "REFUTED",
        true + "<answer>1.41, 1.42": "MALFORMED",
        true + "</answer>": "CERTIFIED",
        "<answer>" + true: "CERTIFIED",
        "<answer>1.4, 1.5": "MALFORMED",
        "1.4, 1.5</answer>": "MALFORMED",
        "1.4, 1.5": "MALFORMED",
        "<ANSWER>1.4, 1.5</ANSWER>": "MALFORMED",
        "<answer >1.4, 1.5</answer>": "MALFORMED",
        "<answer>1.4, 1.5</answer >": "MALFORMED",
        f"<think>{wrong}</think>{true}": "CERTIFIED",
        f"<think>{true}</think>": "MALFORMED",
        f"<think>{true}": "MALFORMED",
        f"{true}<think>": "MALFORMED",
        f"{wrong}</think>{true}": "CERTIFIED",
        f"<think>a</think><think>{true}": "MALFORMED",
        f"<think>a<think>b</think>{true}": "CERTIFIED",
        f"<think>a</think>{wrong}</think>{true}": "CERTIFIED",
        "": "MALFORMED",
    }.items():
        assert grade(ROOT2, reply).verdict == verdict, reply


def test_text_limit_is_checked_before_conversion(monkeypatch):
    class Watched(type):
        def __instancecheck__(cls, value):
            return isinstance(value, builtins.int)

    class Int(metaclass=Watched):
        longest = 0

        def __new__(cls, text):
            assert len(text) <= 80, "an over-long part was converted"
            Int.longest = max(Int.longest, len(text))
            return builtins.int(text)

    monkeypatch.setattr(answer, "int", Int, raising=False)
    for part in ("9" * 81, "1/" + "9" * 81, "9" * 81 + "/7", "0." + "1" * 80, "9" * 399):
        for body in (f"{part}, 2", f"1, {part}", f"{part}, {part}"):
            assert grade(ROOT2, tagged(body)).verdict == "MALFORMED"
    assert grade(ROOT2, tagged("1." + "4" * 29 + ", 1.5")).verdict == "REFUTED" and 0 < Int.longest <= 80


def test_a_huge_reply_costs_little():
    size = 10**7
    replies = {
        "digits": tagged("1" * size),
        "one long part": f"<answer>1,{'1' * size}",
        "no tag": "x" * size,
        "broken tags": "<answer" * (size // 7),
        "tags": "<answer>" * (size // 8),
        "closed tags": tagged("1,2") * (size // 20) + "<answer>",
        "thinking": "<think>" * (size // 7),
        "spaces": tagged(" " * size + "1,2"),
    }
    for name, reply in replies.items():
        tracemalloc.start()
        started = time.process_time()
        verdict = grade(XX, reply).verdict
        seconds = time.process_time() - started
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert verdict == "MALFORMED", name
        assert seconds < 0.5 and peak < 100_000, f"{name}: {seconds:.3f} s, {peak} bytes"


BRACKET = tagged("{}, {}")


@pytest.mark.parametrize(
    ("task", "body", "verdict", "words", "d", "progress"),
    [
        (XX, "2, 3", "CERTIFIED", "CC", 0, 0),
        (XX, "210000/100000, 214000/100000", "CERTIFIED", "CC", 1, 1),
        (XX, "2.12, 2.13", "CERTIFIED", "CC", 2, 2),
        (XX, "2.13, 2.14", "REFUTED", "TC", 2, 0),
        (XX, "2.11, 2.12", "REFUTED", "CT", 2, 0),
        (XX, "1/2, 3", "REFUSED", "FC", 0, 0),
        (XX, "-1, 3", "REFUSED", "FC", 0, 0),
        (XX, "1/2, 2", "REFUTED", "FT", 0, 0),
        (XX, "1/3, 1/2", "REFUSED", "FF", 0, 0),
        (ROOT2, "1.414, 1.415", "CERTIFIED", "CC", 3, 3),
        (ROOT2, "0, 1.415", "REFUSED", "FC", 0, 0),
        (ROOT2, "-1, 1.415", "REFUSED", "FC", 0, 0),
        (ROOT2, "1.42, 1.43", "REFUTED", "TC", 2, 0),
        (ROOT2, "1/10, 20", "CERTIFIED", "CC", 0, 0),
        (POLY, "1.414, 1.415", "CERTIFIED", "CC", 3, 3),
        (POLY, "0.999, 1.415", "REFUSED", "FC", 0, 0),
        (POLY, "1, 2.001", "REFUSED", "CF", 0, 0),
        (POLY, "-1.415, -1.414", "REFUSED", "FF", 3, 0),
        (POLY, "1.5, 2.001", "REFUTED", "TF", 0, 0),
        (THREE_ROOTS, "4.984, 4.985", "REFUSED", "FF", 3, 0),
        (THREE_ROOTS, "4.98, 4.99", "REFUSED", "FF", 2, 0),
        (Task("xx", "control", 1, {"n": 4}, (1, 1), (3, 1)), "2, 2.5", "REFUTED", "TC", 0, 0),
        (Task("xx", "control", 1, {"n": 4}, (1, 1), (3, 1)), "1.5, 2", "REFUTED", "CT", 0, 0),
        (Task("kroot", "control", 1, {"n": 27, "k": 3}, (2, 1), (4, 1)), "3, 4", "REFUTED", "TC", 0, 0),
        (Task("poly", "control", 2, {"coefficients": (-5, 9, 2)}, (0, 1), (1, 1)), "1/2, 1", "REFUTED", "TC", 0, 0),
    ],
)
def test_verdicts(task, body, verdict, words, d, progress):
    outcome = grade(task, tagged(body))
    spelled = {"C": "CERTIFIED", "T": "REFUTED", "F": "REFUSED"}
    assert (outcome.verdict, outcome.lo_word, outcome.hi_word) == (verdict, spelled[words[0]], spelled[words[1]])
    assert (outcome.decimals, outcome.progress, outcome.cap) == (d, progress, FAMILIES[task.family].cap)
    assert outcome.reward_pair == (progress, outcome.cap) and outcome == grade(task, tagged(body), exact=True)


def test_stated_decimals_are_not_paid_again_and_the_cap_holds():
    stated = Task("kroot", "control", 2, {"n": 2, "k": 2}, (141, 100), (71, 50))
    assert grade(stated, tagged("1.41, 1.42")).progress == 0
    assert grade(stated, tagged("1.414, 1.415")).progress == 1
    assert grade(stated, tagged("1.4, 1.5")).progress == 0, "wider than stated is never below 0"
    root = 14142135623730950488016887242
    assert grade(ROOT2, tagged(f"1.4142135623730950488016887, 1.{str(root + 1)[1:]}")).progress == 20


def test_truncated_replies_earn_nothing():
    cut = grade(ROOT2, tagged("1.414, 1.415"), truncated=True)
    assert (cut.verdict, cut.progress, cut.reason) == ("MALFORMED", 0, "the reply was cut off")


@given(st.integers(0, 60), st.integers(1, 10**60), st.integers(-3, 3))
def test_decimals_by_their_definition(k, scale, nudge):
    width = Fraction(1, 10**k) + Fraction(nudge, 10**60 * scale)
    if width > 0:
        lo = Fraction(-1, 3)
        hi = lo + width
        expected = max((j for j in range(130) if width * 10**j <= 1), default=0)
        assert decimals((lo.numerator, lo.denominator), (hi.numerator, hi.denominator)) == expected


def test_decimals_at_exact_powers():
    for k in range(40):
        ten = 10**k
        assert decimals((0, 1), (1, ten)) == k
        assert decimals((0, 1), (10**60 + ten, 10**60 * ten)) == max(0, k - 1)
        assert decimals((0, 1), (10**60 - 1, 10**60 * ten)) == k
    assert decimals((0, 1), (7, 2)) == 0
    for hi in ((0, 1), (-1, 1)):
        with pytest.raises(VerifyGymError, match="no interval"):
            decimals((0, 1), hi)


def truth(task: Task) -> Fraction:
    with localcontext() as context:
        context.prec = 60
        x = Decimal(2).sqrt()
        if task is XX:
            x = Decimal(2)
            for _ in range(60):
                x = (x + Decimal(5).ln()) / (1 + x.ln())
        return Fraction(x)


@given(st.sampled_from([XX, ROOT2, POLY]), st.data())
def test_nested_true_brackets_earn_no_less(task, data):
    places = st.integers(0, 4 if task is XX else 28)
    below, above = (data.draw(st.tuples(places, places).map(sorted)) for _ in range(2))
    scaled = [10**p for p in (*below, *above)]
    root = truth(task)
    loose_lo, tight_lo = ((int(root * s), s) for s in scaled[:2])
    loose_hi, tight_hi = ((int(root * s) + 1, s) for s in scaled[2:])
    loose, tight = (
        grade(task, tagged(f"{lo[0]}/{lo[1]}, {hi[0]}/{hi[1]}"))
        for lo, hi in ((loose_lo, loose_hi), (tight_lo, tight_hi))
    )
    assert loose.verdict == tight.verdict == "CERTIFIED" and loose.progress <= tight.progress
    gained = {g.decimals: g.progress for g in (loose, tight)}
    assert len(set(gained.values())) == len({min(d, FAMILIES[task.family].cap) for d in gained})


@given(st.sampled_from(TASKS), st.integers(-3000, 9000), st.integers(1, 3000), st.integers(1, 900), st.integers(2, 90))
def test_common_factors_change_nothing(task, p, q, more, factor):
    plain, spread = (grade(task, tagged(f"{p * m}/{q * m}, {(p + more) * m}/{q * m}")) for m in (1, factor))
    assert plain == spread


ALPHABET = ("<answer>", "</answer>", "<think>", "</think>", "1.414", "1.415", "7/5", "3/2", ",", " ", "/", ".", "-")
ALPHABET += ("0", "9" * 40, "10000", "e5", "NaN", "\u0663", "\ud800", "\x00", "\n", "2", "100000/99999", "+", "0.0")


def fuzzed(count: int) -> None:
    rng, seen = random.Random(count), set()
    for _ in range(count):
        parts = rng.choices(ALPHABET, k=rng.randint(0, 9))
        reply = "".join(parts)
        if rng.random() < 0.8:
            reply = f"<answer>{rng.choice(['', '1.4,', '1/3 , '])}{reply}</answer>"
        outcome = grade(rng.choice(TASKS), reply)
        assert outcome.verdict in VERDICTS and 0 <= outcome.progress <= outcome.cap and outcome.cap in (8, 20)
        assert outcome.progress == 0 or outcome.verdict == "CERTIFIED"
        assert (outcome.decimals is None) == (outcome.verdict == "MALFORMED") and outcome.reason
        seen.add(outcome.verdict)
    assert seen == set(VERDICTS)


def test_any_reply_gets_a_verdict_and_a_reward_in_range():
    fuzzed(10**4)


@pytest.mark.slow
def test_any_reply_gets_a_verdict_and_a_reward_in_range_at_length():
    fuzzed(10**5)


@given(st.text(max_size=60), st.sampled_from(TASKS))
def test_any_text_gets_a_verdict(text, task):
    assert grade(task, text).verdict in VERDICTS and grade(task, tagged(text)).verdict in VERDICTS


def test_a_reply_that_is_no_text_is_malformed():
    for reply in (None, b"<answer>1,2</answer>", 12, ["<answer>1,2</answer>"], {}):
        assert grade(ROOT2, reply).verdict == "MALFORMED"


def test_rows_round_trip():
    for task in (*TASKS, Task("kroot", "heldout-v0", 7, {"n": 10**12, "k": 7}, (-141, 100), (71, 50))):
        row = task.to_row()
        assert Task.from_row(row) == task and Task.from_row(row).to_row() == row
        assert task.task_id == f"{task.family}/{task.split}/{task.index}"
    assert THREE_ROOTS.to_row() == {
        "family": "poly",
        "split": "control",
        "index": 1,
        "params": {"coefficients": ["-119", "184", "-72", "8"]},
        "low": "0",
        "high": "2",
    }


@pytest.mark.parametrize(
    "change",
    [
        {"family": "zeta"},
        {"family": 3},
        {"family": ["xx"]},
        {"split": "a/b"},
        {"split": ""},
        {"split": None},
        {"index": -1},
        {"index": "0"},
        {"index": True},
        {"params": {}},
        {"params": {"n": "2", "k": "2", "m": "1"}},
        {"params": {"n": 2, "k": "2"}},
        {"params": {"n": "02", "k": "2"}},
        {"params": {"n": "2 ", "k": "2"}},
        {"params": {"n": "-0", "k": "2"}},
        {"params": {"n": "9" * 401, "k": "2"}},
        {"params": ["2", "2"]},
        {"params": None},
        {"low": "2/2"},
        {"low": "1/0"},
        {"low": "1/1"},
        {"low": "1/"},
        {"low": "-1/-2"},
        {"low": "1.0"},
        {"low": 1},
        {"answer": "1.4, 1.5"},
    ],
    ids=str,
)
def test_rows_in_another_spelling_are_refused(change):
    with pytest.raises(RowError):
        Task.from_row({**ROOT2.to_row(), **change})
    with pytest.raises(RowError):
        Task.from_row(list(change))


@pytest.mark.parametrize(
    "task",
    [
        Task("zeta", "control", 0, {"n": 3}, (1, 1), (2, 1)),
        Task("xx", "control", 0, {"n": 1}, (1, 1), (2, 1)),
        Task("xx", "control", 0, {"n": "5"}, (1, 1), (2, 1)),
        Task("xx", "control", 0, {"n": True}, (1, 1), (2, 1)),
        Task("xx", "control", 0, {"n": 10**13}, (1, 1), (2, 1)),
        Task("xx", "control", 0, {"n": 5, "k": 2}, (1, 1), (2, 1)),
        Task("xx", "control", 0, {"n": 5}, (2, 1), (2, 1)),
        Task("xx", "control", 0, {"n": 5}, (3, 1), (2, 1)),
        Task("kroot", "control", 0, {"n": 0, "k": 2}, (1, 1), (2, 1)),
        Task("kroot", "control", 0, {"n": 2, "k": 1}, (1, 1), (2, 1)),
        Task("kroot", "control", 0, {"n": 2, "k": 10**9}, (1, 1), (2, 1)),
        Task("poly", "control", 0, {"coefficients": (2, -3, 1)}, (0, 1), (3, 1)),
        Task("poly", "control", 0, {"coefficients": (-119, 184, -72, 8)}, (0, 1), (6, 1)),
        Task("poly", "control", 0, {"coefficients": (-2,)}, (0, 1), (6, 1)),
        Task("poly", "control", 0, {"coefficients": "ab"}, (0, 1), (6, 1)),
        Task("poly", "control", 0, {"coefficients": 7}, (0, 1), (6, 1)),
        Task("poly", "control", 0, {"coefficients": (-1, *[0] * 60, 1)}, (0, 1), (6, 1)),
    ],
    ids=lambda task: f"{task.family}-{str(dict(task.params))[:30]}-{task.high[0]}",
)
def test_a_row_that_is_no_task_is_a_fault_whatever_the_reply(task):
    for reply in ("", tagged("1.4, 1.5"), tagged("nonsense")):
        with pytest.raises(RowError):
            grade(task, reply)
    with pytest.raises(RowError):
        grade(task, "", truncated=True)


def test_isolation_is_decided_before_any_side(monkeypatch):
    def never(row, bar):
        raise AssertionError("a side was decided")

    monkeypatch.setattr(answer, "cmp_poly", never)
    with pytest.raises(RowError):
        grade(Task("poly", "control", 0, {"coefficients": (2, -3, 1)}, (0, 1), (3, 1)), tagged("1/2, 3/2"))


def test_answers_are_values():
    assert parse_answer(tagged("1, 2"), 9) == Answer((1, 1), (2, 1))
    assert [(f.name, f.size_limit, f.cap) for f in FAMILIES.values()] == [
        ("xx", 10**5, 8),
        ("kroot", 10**30, 20),
        ("poly", 10**30, 20),
    ]


def seconds_each(call, count: int) -> float:
    started = time.process_time()
    for _ in range(count):
        call()
    return (time.process_time() - started) / count


@pytest.mark.slow
def test_rates():
    """Twenty thousand whole answers a second, the dearest side in a millisecond, ten megabytes in a twentieth of a second."""
    reply = tagged("76519/35935, 28063/13179")
    assert grade(XX, reply).progress == 8
    assert min(seconds_each(lambda: grade(XX, reply), 2000) for _ in range(5)) < 1 / 20_000
    assert min(seconds_each(lambda: cmp_xx(10**6, (99999, 99998)), 300) for _ in range(5)) < 1 / 1000
    for huge in (tagged("1" * 10**7), "<answer" * (10**7 // 7), "\u0661" * 10**7):
        assert min(seconds_each(lambda huge=huge: grade(XX, huge), 1) for _ in range(5)) < 1 / 20
