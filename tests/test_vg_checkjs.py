"""check.js decides as the package does, by other means; and what happens where it can't be asked."""

from __future__ import annotations

import json
import random
import re
import subprocess
from fractions import Fraction
from math import isqrt

import pytest
from vg_second import PROJECT, bridge, needs_node

from miniverl.verify_gym.answer import Task, grade
from miniverl.verify_gym.conformance import grade_parts
from miniverl.verify_gym.exact import RowError, VerifyGymError, lowest

Question, SecondDecider = bridge.Question, bridge.SecondDecider
CHECK = PROJECT / "check.js"


def task(family, low, high, **params):
    return Task(family, "t", 0, params, lowest(*low), lowest(*high))


def answer(*ends):
    return "<answer>" + ", ".join(str(end) for end in ends) + "</answer>"


XX5 = task("xx", (2, 1), (3, 1), n=5)
ROOT2 = task("kroot", (1, 1), (2, 1), n=2, k=2)
CUBIC = task("poly", (0, 1), (2, 1), coefficients=(-119, 184, -72, 8))  # 8(x - 1)(x - 3)(x - 5) + 1


@pytest.fixture(scope="module")
def second():
    with SecondDecider() as running:
        yield running


@pytest.fixture(scope="module")
def agree(second):
    def check(questions):
        questions = list(questions)
        for question, found in zip(questions, second.decide(questions), strict=True):
            mine = grade(question.task, question.reply, truncated=question.truncated)
            assert grade_parts(mine) == found, question.reply[:200]
        return len(questions)

    return check


def test_it_shares_no_method_with_the_package():
    text = CHECK.read_text(encoding="utf-8")
    code = re.sub(r"//.*", "", re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL))
    assert not re.search(r"moebius|möbius|descartes|binomial", code, re.IGNORECASE)
    assert "sturmChain" in code
    assert not re.search(r"\beval\b|Function\(|parseFloat|Math\.(log|pow)|require\((?!\"fs\"\))", code)


GRAMMAR = [
    "",
    "no answer",
    answer(2, 3),
    answer("14/10", "1.5"),
    answer("  1.4\t", "\r\n1.5 "),
    answer("\f1.4", "1.5"),
    answer("\u00a01.4", "1.5"),
    answer("1.4", "1.5", ""),
    answer("1.4"),
    answer("1.4", "1.5", "1.6"),
    answer("+1.4", "1.5"),
    answer("-1.4", "1.5"),
    answer("--1.4", "1.5"),
    answer("- 1.4", "1.5"),
    answer("1e0", "2"),
    answer("1_0/10", "2"),
    answer("٣/2", "2"),
    answer("１", "２"),
    answer("NaN", "Infinity"),
    answer("1/0", "2"),
    answer("0/0", "2"),
    answer("1/-2", "2"),
    answer(".5", "2"),
    answer("1.", "2"),
    answer("1/", "2"),
    answer("1/2/3", "2"),
    answer("1.2/3", "2"),
    answer("1/2.5", "2"),
    answer("1 / 2", "2"),
    answer("1 1/2", "2"),
    answer("[1.4", "1.5]"),
    answer("1.5", "1.4"),
    answer("1.5", "15/10"),
    answer("-0", "2"),
    answer("007/5", "003/2"),
    answer("0" * 79 + "1", "2"),
    answer("0" * 80 + "1", "2"),
    answer("1." + "0" * 78 + "1", "2"),
    answer("1." + "0" * 79 + "1", "2"),
    answer("1." + "0" * 80, "2"),
    answer("1", "2/" + "1" * 81),
    answer(10**30, 10**30 + 1),
    answer(10**30 - 1, 10**30),
    answer("1", f"{10**30 * 2}/{10**30}"),
    answer("200000/100000", "3"),
    answer("100001/50000", "3"),
    answer("2", "300001/100000"),
    " " * 300 + answer(" " * 390 + "1", " 2"),
    answer(" " * 395 + "1", "2"),
    answer(" " * 396 + "1", "2"),
    answer(" " * 397 + "1", "2"),
    answer("x" * 401),
    answer("😀" * 201, "2"),
    answer("\ud800", "2"),
    answer("1.4\0", "2"),
    answer("1\u20282", "2"),
    answer(1, 2) + " " * 10**5,
    answer(1, 2) + answer("1.6", "1.7"),
    answer(1, 2) + "<answer>1, 2",
    "<answer>1, 2",
    "1, 2</answer>",
    "<answer><answer>1, 2</answer></answer>",
    "<answer>1, 2</answer></answer>",
    "<ANSWER>1, 2</ANSWER>",
    "<answer >1, 2</answer >",
    "<think>" + answer(1, 2),
    "<think>x</think>" + answer(1, 2),
    "<think>" + answer(1, 2) + "</think>",
    answer(1, 2) + "</think>",
    "</think>" + answer(1, 2) + "<think>",
    "<think></think><think>" + answer(1, 2),
    "<think><think></think>" + answer(1, 2),
    "<answer></think>1, 2</answer>",
    "</think></think>" + answer(1, 2),
    answer('__import__("os").getpid()', "2"),
    answer("5^(5^(5^5))", "2"),
    answer("9" * 5000, "2"),
]


@needs_node
def test_both_read_the_same_grammar(agree):
    assert agree(Question(row, reply) for row in (XX5, ROOT2, CUBIC) for reply in GRAMMAR) == 3 * len(GRAMMAR)
    agree(Question(row, answer(1, 2), True) for row in (XX5, ROOT2, CUBIC))


@needs_node
def test_bars_on_the_root_and_outside_the_domain(agree):
    four = task("xx", (1, 1), (3, 1), n=4)
    cube = task("kroot", (2, 1), (4, 1), n=27, k=3)
    half = task("poly", (0, 1), (1, 1), coefficients=(-5, 9, 2))  # (2x - 1)(x + 5)
    cases = [(four, 2, 3), (four, 1, 2), (four, "1/2", 3), (four, "99999/100000", "2"), (four, -1, 0)]
    cases += [(cube, 3, 4), (cube, 2, 3), (cube, 0, 4), (cube, -1, 3), (cube, "5/2", "7/2")]
    cases += [(half, "1/2", 1), (half, 0, "1/2"), (half, -5, 1), (half, 0, 2), (half, "-1/10", "11/10")]
    cases += [(CUBIC, "4.984", "4.985"), (CUBIC, "4.98", "4.99"), (CUBIC, 0, 2), (CUBIC, "0.9", "0.99")]
    agree(Question(row, answer(lo, hi)) for row, lo, hi in cases)


@needs_node
@pytest.mark.parametrize("exponent", [1, 3, 20, 29])
def test_widths_at_powers_of_ten(agree, exponent):
    unit = 10**exponent
    lo = isqrt(2 * unit * unit)
    agree([Question(ROOT2, answer(f"{lo}/{unit}", f"{lo + step}/{unit}")) for step in (1, 2, 9, 10, 11)])


def near(n, rng):
    """A fraction within the limit close to the root of x**x = n: bisection on exact powers of a small denominator."""
    q = rng.randrange(2, 1500)
    low, high = q, q * n.bit_length()
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if middle**middle < n**q * q**middle else (low, middle)
    return Fraction(low, q), Fraction(high, q)


@needs_node
def test_logarithms_agree_with_whole_powers_next_to_the_root(agree):
    rng = random.Random(11)
    questions = []
    for _ in range(20):
        n = rng.randrange(5, 10**6)
        lo, hi = near(n, rng)
        row = task("xx", (1, 1), (30, 1), n=n)
        questions += [Question(row, answer(lo, hi)), Question(row, answer(hi, hi + 1)), Question(row, answer(1, lo))]
    agree(questions)
    with SecondDecider(exact=True) as exact:
        assert exact.decide(questions) == [grade_parts(grade(q.task, q.reply)) for q in questions]


@needs_node
def test_the_worst_corner_is_within_the_time_of_a_reply(agree):
    corner = task("xx", (1, 1), (2, 1), n=10**6)
    assert agree([Question(corner, answer("100000/99999", "99999/99998"))]) == 1


BAD_ROWS = [
    task("poly", (0, 1), (3, 1), coefficients=(2, -3, 1)),  # two roots
    task("poly", (0, 1), (6, 1), coefficients=(-119, 184, -72, 8)),  # three
    task("poly", (0, 1), (2, 1), coefficients=(1, 0, 1)),  # none
    task("poly", (0, 1), (2, 1), coefficients=(1, -2, 1)),  # a double one
    task("poly", (0, 1), (2, 1), coefficients=(-1, 3, -3, 1)),  # a triple one: opposite signs, one distinct root
    task("poly", (1, 1), (2, 1), coefficients=(-1, 0, 1)),  # an end is a root
    task("poly", (0, 1), (2, 1), coefficients=(5,)),
    task("poly", (0, 1), (2, 1), coefficients=(-1, 1, 0)),
    task("kroot", (2, 1), (1, 1), n=2, k=2),
    task("kroot", (1, 1), (1, 1), n=2, k=2),
    task("kroot", (1, 1), (2, 1), n=0, k=2),
    task("kroot", (1, 1), (2, 1), n=2, k=1),
    task("xx", (1, 1), (2, 1), n=1),
    task("xx", (1, 1), (2, 1), n=10**12 + 1),
    task("xx", (1, 1), (2, 1), m=5),
    task("yy", (1, 1), (2, 1), n=5),
    task("toString", (1, 1), (2, 1), n=5),
]


@needs_node
def test_a_bad_row_is_a_fault_in_both_and_no_verdict(second):
    for row, found in zip(BAD_ROWS, second.decide([Question(row, answer(1, 2)) for row in BAD_ROWS]), strict=True):
        assert set(found) == {"error"}, row
        with pytest.raises(RowError):
            grade(row, answer(1, 2))


@needs_node
def test_descartes_is_the_stricter_of_the_two(second):
    # (x - 1)(10000(x - 1)**2 + 1): one real root, but a close complex pair gives three sign variations.
    row = task("poly", (0, 1), (2, 1), coefficients=(-10001, 30001, -30000, 10000))
    with pytest.raises(RowError, match="3 sign variations"):
        grade(row, answer("0.9", "1.1"))
    assert second.decide([Question(row, answer("0.9", "1.1"))])[0]["verdict"] == "CERTIFIED"


@needs_node
def test_random_polynomials_never_admitted_by_one_isolation_alone_unless_descartes_is_stricter(second):
    rng = random.Random(5)
    rows = []
    for _ in range(600):
        degree = rng.randrange(2, 6)
        low = rng.randrange(-4, 4)
        params = (*(rng.randrange(-9, 10) for _ in range(degree)), rng.randrange(1, 6))
        rows.append(task("poly", (low, 1), (low + rng.randrange(1, 4), 1), coefficients=params))
    questions = [Question(row, answer(row.low[0], Fraction(2 * row.low[0] + 1, 2))) for row in rows]
    admitted = only_sturm = 0
    for question, found in zip(questions, second.decide(questions), strict=True):
        try:
            mine = grade_parts(grade(*question[:2]))
        except RowError:
            only_sturm += "error" not in found
            continue
        admitted += 1
        assert mine == found
    assert admitted > 100 and only_sturm < 20


def run(*lines, args=()):
    text = "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    done = subprocess.run(["node", str(CHECK), *args], input=text, capture_output=True, text=True, timeout=60)
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


@needs_node
def test_the_protocol_line_by_line():
    item = {"id": "a", "task": ROOT2.to_row(), "reply": answer("1.414", "1.415"), "truncated": False}
    good = {"id": "a", "verdict": "CERTIFIED", "lo": "CERTIFIED", "hi": "CERTIFIED", "decimals": 3, "progress": 3}
    code, found = run(item, "\n", "not json\n", "[]\n", {**item, "id": 7, "task": None}, json.dumps({**item, "id": 2}))
    assert code == 0
    assert found[0] == good and found[4] == {**good, "id": 2}  # the last line has no line break
    assert found[1] == {"id": None, "error": "no JSON object"}
    assert found[2]["error"] and found[3] == {"id": 7, "error": "no such family"}
    texts = [{**item, "reply": reply} for reply in (None, 5, ["<answer>1, 2</answer>"])]
    assert [line["verdict"] for line in run(*texts)[1]] == ["MALFORMED"] * 3
    params = [
        {"n": 2, "k": 2},
        {"n": "2", "k": "02"},
        {"n": "2", "k": "2", "x": "1"},
        {"n": "2.0", "k": "2"},
        {"n": ["2"]},
    ]
    params += [{"n": ["2"], "k": "2"}, [], None, {"n": None, "k": "2"}]
    rows = [{**item["task"], "params": value} for value in params]
    rows += [
        {**item["task"], "low": low} for low in ("2/2", "1/1", "1/0", "1/-1", "1.0", " 1", "1/2/3", 1, "3/2/", None)
    ]
    found = run(*({**item, "task": row} for row in rows))[1]
    assert [set(line) for line in found] == [{"id", "error"}] * len(rows), found
    assert subprocess.run(["node", str(CHECK), "x"], capture_output=True).returncode == 2


@needs_node
def test_a_huge_reply_is_refused(second):
    huge = [Question(ROOT2, "<answer>" + "9" * 10**7 + ", 2</answer>"), Question(ROOT2, "<answer>" * 10**5)]
    assert [found["verdict"] for found in second.decide(huge)] == ["MALFORMED", "MALFORMED"]


def test_without_node_the_bridge_says_so_and_stops(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(VerifyGymError) as caught:
        SecondDecider()
    assert "Node.js" in caught.value.message and "install" in caught.value.hint


@needs_node
@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("throw new Error('broken today')", "broken today"),
        ("", "it ended"),
        ("process.stdin.on('data', () => console.log('{\"id\": 5}'))", "id"),
        ("process.stdin.on('data', () => console.log('hello'))", "hello"),
    ],
)
def test_a_decider_that_fails_is_an_error_and_no_opinion(tmp_path, program, reason):
    (tmp_path / "other.js").write_text(program)
    with SecondDecider(program=tmp_path / "other.js") as broken, pytest.raises(VerifyGymError, match=reason):
        broken.decide([Question(ROOT2, answer(1, 2))])


@needs_node
def test_one_process_answers_many_calls_and_more_than_a_pipe_holds(second):
    question = Question(ROOT2, "x" * 3000 + answer("1.414", "1.415"))
    for _ in range(3):
        assert {found["progress"] for found in second.decide([question] * 200)} == {3}
    assert second.decide([]) == []
    assert bridge.CHECK == CHECK
