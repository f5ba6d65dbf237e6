"""Tasks of verify-gym: identities, bounds, irrational and isolated roots, prompts that say everything."""

import ast
import json
import statistics
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miniverl.verify_gym import answer, families
from miniverl.verify_gym.answer import FAMILIES, Task, grade, rational_text
from miniverl.verify_gym.exact import VerifyGymError, cmp_poly, isolate, lowest
from miniverl.verify_gym.families import GENERATORS, Stream, cluster_rank, generate, prompt, read_prompt

ROOT = Path(__file__).parent.parent
FEW = 400  # tasks a family in the fast suite; the slow test draws 10,000


def value(coefficients, x):
    total = Fraction(0)
    for a in reversed(coefficients):
        total = total * x + a
    return total


def remainder(dividend, divisor):
    """Of polynomials over the rationals, ascending, trailing zeros cut."""
    rest = list(dividend)
    while len(rest) >= len(divisor):
        factor = rest[-1] / divisor[-1]
        shift = len(rest) - len(divisor)
        rest = [a - factor * divisor[i - shift] if i >= shift else a for i, a in enumerate(rest)][:-1]
    while rest and rest[-1] == 0:
        rest.pop()
    return rest


def sturm_count(coefficients, low, high):
    """How many different roots lie in (low, high), by Sturm's theorem; no end may be a root."""
    chain = [[Fraction(a) for a in coefficients], [Fraction(i * a) for i, a in enumerate(coefficients)][1:]]
    while rest := remainder(chain[-2], chain[-1]):
        chain.append([-a for a in rest])
    counts = []
    for x in (Fraction(*low), Fraction(*high)):
        signs = [v > 0 for v in (value(part, x) for part in chain) if v != 0]
        counts.append(sum(one != other for one, other in zip(signs, signs[1:], strict=False)))
    return counts[0] - counts[1]


def test_sturm_counts_known_roots():
    cubic = (-15, 23, -9, 1)  # 1, 3, 5
    assert [sturm_count(cubic, (0, 1), (end, 1)) for end in (2, 4, 6)] == [1, 2, 3]
    assert sturm_count((-10001, 30001, -30000, 10000), (0, 1), (2, 1)) == 1  # (x - 1)(10000(x - 1)^2 + 1)
    assert sturm_count((2, -3, 0, 1), (0, 1), (3, 1)) == 1  # (x - 1)^2 (x + 2): a double root counts once


def check_bounds(task):
    low, high = Fraction(*task.low), Fraction(*task.high)
    if task.family == "xx":
        n = task.params["n"]
        assert 100 <= n < 10**6 and low.denominator == 1 and high == low + 1
        assert int(low) ** int(low) < n < int(high) ** int(high)
        assert len(str(n)) == 3 + task.index % 4
    elif task.family == "kroot":
        n, k = task.params["n"], task.params["k"]
        assert k == 2 + task.index % 6 and len(str(n)) == 8 + task.index % 5
        assert low**k < n < high**k and high == low + 1 and low.denominator == 1
    else:
        coefficients, (clustered, rank) = task.params["coefficients"], cluster_rank(task.index)
        assert coefficients[-1] > 0 and coefficients[0] != 0
        assert len(coefficients) == (4 if clustered else 4 + rank % 5)
        assert high - low == (1 if clustered else 1 + rank % 4)
        if not clustered:
            assert max(map(abs, coefficients)) <= 20 and abs(low) <= 21 and coefficients[-1] <= 9


def echo(task):
    return f"<answer>{rational_text(task.low)}, {rational_text(task.high)}</answer>"


def check_many(family, count, split="many"):
    for index in range(count):
        task = generate(family, split, index)
        check_bounds(task)
        verdict = grade(task, echo(task))
        assert (verdict.verdict, verdict.progress) == ("CERTIFIED", 0), task


@pytest.mark.parametrize("family", sorted(GENERATORS))
def test_draws_stay_within_the_bounds_and_echo_is_certified(family):
    check_many(family, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(GENERATORS))
def test_ten_thousand_draws(family):
    check_many(family, 10_000)


def test_sturm_agrees_that_every_poly_row_has_one_root():
    for index in range(FEW):
        task = generate("poly", "sturm", index)
        coefficients = task.params["coefficients"]
        assert sturm_count(coefficients, task.low, task.high) == 1, task
        assert value(coefficients, Fraction(*task.low)) * value(coefficients, Fraction(*task.high)) < 0


def divisors(n):
    return [d for d in range(1, abs(n) + 1) if n % d == 0]


def rational_roots(coefficients):
    """By the rational root theorem, which the generator doesn't use."""
    tops, bottoms = divisors(coefficients[0]), divisors(coefficients[-1])
    candidates = {Fraction(sign * p, q) for p in tops for q in bottoms for sign in (1, -1)}
    return [x for x in candidates if value(coefficients, x) == 0]


def test_no_root_is_rational():
    for index in range(FEW):
        task = generate("poly", "rational", index)
        low, high = Fraction(*task.low), Fraction(*task.high)
        if abs(task.params["coefficients"][0]) <= 10**3:
            assert not [x for x in rational_roots(task.params["coefficients"]) if low < x < high], task
    powers = {m**m for m in range(1, 9)}
    assert not powers & {generate("xx", "rational", index).params["n"] for index in range(4000)}


class Script:
    """A stream that draws what it is told."""

    def __init__(self, *values):
        self.values = list(values)

    def between(self, least, most):
        assert least <= self.values[0] <= most
        return self.values.pop(0)

    def below(self, n):
        return self.values.pop(0)

    def choice(self, values):
        return values[self.values.pop(0)]


def test_inadmissible_draws_are_refused():
    assert families.draw_xx(Script(256), 0) is None and families.draw_xx(Script(3125), 1) is None
    assert families.draw_xx(Script(257), 0) is not None
    assert families.draw_kroot(Script(465**3), 1) is None  # k = 3
    assert families.draw_kroot(Script(3163**2), 20) is None  # k = 4, a square: the root of a root
    assert families.draw_kroot(Script(3163**2), 15) is not None  # k = 5 of a square is of degree 5
    # (2x - 1)(x^2 + 1) = 2x^3 - x^2 + 2x - 1: the root 1/2 in (0, 1) is rational
    assert families.draw_poly(Script(-1, 2, -1, 2, 0), 1) is None


@given(st.integers(1, 10**40), st.integers(1, 12))
def test_integer_root(n, k):
    root = families.integer_root(n, k)
    assert root**k <= n < (root + 1) ** k


def test_every_forty_indices_hold_the_same_tiers():
    for start in (0, 40, 4000):
        tiers = [cluster_rank(index) for index in range(start, start + 40)]
        assert sum(clustered for clustered, _ in tiers) == 11
        spread = [rank for clustered, rank in tiers if not clustered]
        assert len(spread) == 29 and {rank % 5 for rank in spread} == set(range(5))


def rows(split="identity", count=50, names=("xx", "kroot", "poly")):
    return json.dumps([generate(name, split, index).to_row() for name in names for index in range(count)])


def test_a_fourth_family_moves_no_task(monkeypatch):
    before = rows()
    dummy = lambda stream, index: ({"n": stream.between(2, 9)}, (1, 1), (9, 1))  # noqa: E731
    monkeypatch.setattr(families, "GENERATORS", {"dummy": dummy, **GENERATORS})
    assert generate.__globals__["GENERATORS"]["dummy"] is dummy
    assert generate("dummy", "identity", 0).params["n"] in range(2, 10)
    assert rows() == before


def test_an_index_needs_no_predecessor():
    alone = generate("poly", "identity", 31)
    for index in range(31):
        generate("poly", "identity", index)
    assert generate("poly", "identity", 31) == alone
    assert generate("poly", "identity", 31, 1) != alone and generate("poly", "other", 31) != alone


def test_tasks_are_the_same_in_another_process():
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_vg_families as t; print(t.rows())"
    )
    environment = {"PYTHONHASHSEED": "7", "PATH": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == rows()


def test_the_stream_is_its_description():
    """The stream again, from the words of the chapter."""
    import hashlib

    key = b'["verify-gym",1,"poly","train",3,0]'
    data = b"".join(hashlib.sha256(key + block.to_bytes(8, "big")).digest() for block in range(40))
    at, expected = 0, []
    for n in [41, 9, 2, 256, 257, 10**12, 1, 41] * 10:
        bits = (n - 1).bit_length()
        size = -(-bits // 8)
        while True:
            number = int.from_bytes(data[at : at + size], "big") >> (8 * size - bits)
            at += size
            if number < n:
                break
        expected.append(number)
    stream = Stream("poly", "train", 3, 0)
    assert [stream.below(n) for n in [41, 9, 2, 256, 257, 10**12, 1, 41] * 10] == expected


@given(st.integers(1, 10**30), st.text(max_size=5))
def test_below_is_below(n, key):
    assert 0 <= Stream(key).below(n) < n


@given(st.integers(-(10**9), 10**9), st.integers(0, 10**9))
def test_between_includes_both_ends(least, width):
    assert least <= Stream("between", least).between(least, least + width) <= least + width


@pytest.mark.parametrize("wrong", [("other", "s", 0), ("xx", "s", -1), ("xx", "s", 0, -1)])
def test_no_such_task(wrong):
    with pytest.raises(VerifyGymError):
        generate(*wrong)


def test_a_generator_that_never_succeeds_is_named(monkeypatch):
    monkeypatch.setattr(families, "GENERATORS", {"never": lambda stream, index: None})
    with pytest.raises(VerifyGymError, match="never/s/0"):
        generate("never", "s", 0)


@pytest.mark.parametrize("family", sorted(GENERATORS))
def test_a_prompt_says_everything_and_nothing_else(family):
    for index in range(100):
        task = generate(family, "prompts", index)
        text = prompt(task)
        stated = read_prompt(text)
        assert (stated.family, dict(stated.params)) == (task.family, dict(task.params))
        assert (stated.low, stated.high) == (task.low, task.high)
        assert task.task_id not in text and f"10^{len(str(FAMILIES[family].size_limit)) - 1} " in text
        assert text.endswith("<answer>lo, hi</answer>\n") and f"1/{FAMILIES[family].cap}," in text


def test_the_example_of_a_prompt_earns_nothing():
    for family in GENERATORS:
        task = generate(family, "prompts", 0)
        assert grade(task, prompt(task)).verdict == grade(task, "").verdict == "MALFORMED"


def test_a_stated_interval_with_decimals_says_so():
    task = Task("kroot", "s", 0, MappingProxyType({"n": 2, "k": 2}), (141, 100), (71, 50))
    assert "The known bracket has d = 2;" in prompt(task)
    assert read_prompt(prompt(task)).low == (141, 100)


@given(st.lists(st.integers(-(10**40), 10**40), min_size=1, max_size=9).filter(lambda c: c[-1] != 0))
def test_polynomials_survive_the_text(coefficients):
    text = families.polynomial_text(coefficients)
    assert families.read_polynomial(text) == tuple(coefficients)
    assert eval(text.replace("^", "**"), {"x": 3}) == sum(a * 3**i for i, a in enumerate(coefficients))


@given(st.text(alphabet="Known bracket: 0123456789/<x-^.=\n()rialnume+*", max_size=200))
def test_other_text_is_no_prompt(text):
    with pytest.raises(VerifyGymError):
        read_prompt(text)


def test_a_changed_prompt_is_no_prompt():
    text = prompt(generate("poly", "prompts", 1))
    for changed in (
        text[1:],
        text + "\n",
        text.replace("d = 0", "d = 1"),
        text.replace("Known bracket: ", "Known bracket: 0"),
    ):
        with pytest.raises(VerifyGymError):
            read_prompt(changed)
    with pytest.raises(VerifyGymError):
        read_prompt(text.replace("P(x) = ", "P(x) = " + "+" * 50))


def float_root(coefficients, low, high):
    """Bisection in floats until the interval no longer shrinks."""
    lo, hi, sign = low[0] / low[1], high[0] / high[1], 1
    rising = value_float(coefficients, lo) < 0
    while lo < (middle := (lo + hi) / 2) < hi:
        sign = value_float(coefficients, middle)
        lo, hi = (middle, hi) if (sign < 0) == rising else (lo, middle)
    return lo


def value_float(coefficients, x):
    total = 0.0
    for a in reversed(coefficients):
        total = total * x + a
    return total


def test_floats_miss_clustered_roots():
    """A float root-finder is off by 1e-16 to 1e-14 in the median there, which a reward of 1e-20 tells apart."""
    errors = []
    for index in range(400):
        if not cluster_rank(index)[0]:
            continue
        task = generate("poly", "floats", index)
        row, low, high = isolate(task.params["coefficients"], task.low, task.high), task.low, task.high
        guess = Fraction(float_root(task.params["coefficients"], low, high))
        for _ in range(80):
            middle = lowest(low[0] * high[1] + high[0] * low[1], 2 * low[1] * high[1])
            low, high = (middle, high) if cmp_poly(row, middle) == 1 else (low, middle)
        errors.append(abs(guess - Fraction(*low)))
    assert len(errors) == 110
    assert Fraction(1, 10**16) < statistics.median(errors) < Fraction(1, 10**14), float(statistics.median(errors))
    assert max(errors) < Fraction(1, 10**12)


def test_generators_use_no_float():
    tree = ast.parse(Path(families.__file__).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        assert not (isinstance(node, ast.Constant) and isinstance(node.value, float))
        assert not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div))
        assert not (isinstance(node, ast.Name) and node.id in {"float", "random", "eval"})


def test_families_have_limits_a_generator_and_a_wording():
    assert list(FAMILIES) == list(GENERATORS) == list(families.WORDINGS) == ["xx", "kroot", "poly"]
    assert answer.FAMILIES is families.FAMILIES
