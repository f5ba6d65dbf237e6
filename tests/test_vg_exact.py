"""Sides against independent arithmetic: logarithms to 60 digits, bisection in fractions, whole powers, integer roots."""

from __future__ import annotations

import random
from decimal import Decimal, localcontext
from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from miniverl.verify_gym import exact
from miniverl.verify_gym.exact import (
    Isolated,
    RowError,
    cmp_kroot,
    cmp_poly,
    cmp_xx,
    isolate,
    lowest,
    moebius,
    sign_at,
    variations,
)


def sign(value) -> int:
    return (value > 0) - (value < 0)


def fraction(bar) -> Fraction:
    return Fraction(*bar)


def xx_by_logarithms(n: int, bar) -> int | None:
    """ln n - b ln b in 60 digits; 0 is decided apart, since only a whole bar can be the root."""
    b = fraction(bar)
    if b < 1:
        return None
    if b.denominator == 1 and b.numerator < 100 and b.numerator**b.numerator == n:
        return 0
    with localcontext() as context:
        context.prec = 60
        value = Decimal(b.numerator) / b.denominator
        gap = Decimal(n).ln() - value * value.ln()
        assert abs(gap) > Decimal(10) ** -40
        return sign(gap)


def near_root_bars(n: int, limit: int, rng: random.Random) -> list:
    """The closest fractions on both sides of the root of x**x = n for a random denominator up to the limit."""
    with localcontext() as context:
        context.prec = 50
        x = Decimal(n).ln()
        for _ in range(60):  # Newton's step for x ln x = ln n
            x = (x + Decimal(n).ln()) / (1 + x.ln())
        root = Fraction(x)
    q = rng.randint(limit // 2, limit) // (int(root) + 1)
    best = root.limit_denominator(q)
    p = root.numerator * q // root.denominator
    return [lowest(best.numerator, best.denominator), lowest(p, q), lowest(p + 1, q)]


BARS = st.tuples(st.integers(-50, 2000), st.integers(1, 300)).map(lambda pq: lowest(*pq))


@given(st.integers(2, 10**6), st.integers(1, 300), st.integers(1, 300))
def test_xx_against_logarithms(n, p, q):
    bar = lowest(p, q)
    assert cmp_xx(n, bar) == xx_by_logarithms(n, bar) == cmp_xx(n, bar, exact=True)


def xx_by_bisection(n: int, bar, halvings: int = 9) -> int | None:
    """Halve [1, n + 1] around the root, each time with whole powers of a fraction, until the bar lies outside."""
    low, high = Fraction(1), Fraction(n + 1)
    for _ in range(halvings + n.bit_length()):
        if not low < fraction(bar) < high:
            break
        middle = (low + high) / 2
        above = middle**middle.numerator > Fraction(n) ** middle.denominator
        low, high = (low, middle) if above else (middle, high)
    return 1 if fraction(bar) <= low else -1 if fraction(bar) >= high else None


@settings(max_examples=60)
@given(st.integers(2, 3000), st.integers(1, 300), st.integers(1, 300))
def test_xx_against_bisection_in_fractions(n, p, q):
    bar = lowest(p, q)
    expected = xx_by_bisection(n, bar) if p >= q else None
    assume(expected is not None and cmp_xx(n, bar) != 0)
    assert cmp_xx(n, bar) == expected


def check_near_roots(samples: int, limit: int) -> None:
    rng = random.Random(samples)
    for _ in range(samples):
        n = rng.randint(2, 10 ** rng.randint(1, 6))
        for bar in near_root_bars(n, limit, rng):
            assert cmp_xx(n, bar) == cmp_xx(n, bar, exact=True), (n, bar)


def test_intervals_agree_with_whole_powers_near_the_root():
    check_near_roots(40, 3000)
    check_near_roots(2, 10**5)


@pytest.mark.slow
def test_intervals_agree_with_whole_powers_near_the_root_at_length():
    check_near_roots(700, 10**5)


def test_low_precision_may_shrug_but_never_errs():
    rng, undecided = random.Random(1), 0
    for _ in range(60):
        n = rng.randint(2, 10**6)
        for bar in near_root_bars(n, 5000, rng):
            expected = cmp_xx(n, bar)
            for bits in (2, 8, 16, 24, 32, 48):
                side = exact._cmp_xx_at(n, bar, bits)
                assert side in (None, expected)
                undecided += side is None
    assert undecided > 100


@given(st.integers(2, 10**6), st.integers(1, 10**5), st.integers(1, 10**5), st.sampled_from([4, 16, 40]))
def test_power_intervals_hold_the_powers(n, p, q, bits):
    p, q = p % 400 + q % 400 + 1, q % 400 + 1
    for (lo, hi, scale), power in zip(exact._powers(n, (p, q), bits), (p**p, n**q * q**p), strict=True):
        assert lo << scale <= power <= hi << scale and hi.bit_length() <= bits + 1


@given(st.integers(0, 2**80), st.integers(0, 90), st.integers(1, 2**80), st.integers(0, 90))
def test_scaled_comparison(a, scale_a, b, scale_b):
    assert exact._above(a, scale_a, b, scale_b) == (a << scale_a > b << scale_b)


def test_overlap_raises_the_precision_and_ends_with_whole_powers(monkeypatch):
    asked = []
    monkeypatch.setattr(exact, "_cmp_xx_at", lambda n, bar, bits: asked.append(bits))
    assert cmp_xx(5, (213, 100)) == -1 and cmp_xx(5, (212, 100)) == 1
    assert asked[:4] == [96, 384, 1536, 6144] and len(asked) == 8


def test_xx_domain_equality_and_far_bars():
    for bar in ((1, 2), (0, 1), (-1, 1), (99999, 100000), (-(10**30), 7)):
        assert cmp_xx(5, bar) is None and cmp_xx(5, bar, exact=True) is None
    for m in range(2, 12):
        assert cmp_xx(m**m, (m, 1)) == 0
        assert cmp_xx(m**m - 1, (m, 1)) == -1 and cmp_xx(m**m + 1, (m, 1)) == 1
    assert cmp_xx(4, (4, 2)) == 0, "a bar that is not in lowest terms ends in the fallback"
    assert cmp_xx(2, (1, 1)) == 1 and cmp_xx(10**6, (10**30, 1)) == -1 and cmp_xx(2, (10**30, 10**30 - 1)) == 1


@given(st.fractions(1, 9, max_denominator=12), st.fractions(1, 9, max_denominator=12))
def test_what_is_read_and_not_decided_holds_on_a_grid(s, t):
    """s**s < t**t for 1 <= s < t, by raising both to the product of the denominators."""
    assert "read, not decided" in (cmp_xx.__doc__ or "")
    a, b = s**s.numerator, t**t.numerator
    assert sign(a**t.denominator - b**s.denominator) == sign(s - t)


@given(st.integers(1, 10**12), st.integers(2, 7), BARS)
def test_kroot_against_the_integer_root(n, k, bar):
    p, q = bar
    if p <= 0:
        assert cmp_kroot(n, k, bar) is None
        return
    low, high = 0, n * q**k + 1  # floor of the k-th root of n q**k, by bisection
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if middle**k <= n * q**k else (low, middle)
    expected = sign(low - p) or sign(n * q**k - low**k)
    assert cmp_kroot(n, k, bar) == expected


@given(st.integers(1, 10**12), st.integers(2, 7), st.integers(1, 1000), BARS)
def test_kroot_scales(n, k, m, bar):
    assert cmp_kroot(n * m**k, k, lowest(m * bar[0], bar[1])) == cmp_kroot(n, k, bar)


@given(st.integers(2, 10**6), st.integers(2, 7), BARS, BARS)
def test_the_side_falls_as_the_bar_rises(n, k, one, other):
    low, high = sorted((one, other), key=fraction)
    for side in (lambda bar: cmp_xx(n, bar), lambda bar: cmp_kroot(n, k, bar)):
        below, above = side(low), side(high)
        assert below is None or below >= above


COEFFICIENTS = st.lists(st.integers(-20, 20), min_size=2, max_size=7).filter(lambda values: values[-1])
ENDS = st.tuples(st.integers(-40, 40), st.integers(1, 9)).map(lambda pq: lowest(*pq))


def value_at(coefficients, x: Fraction) -> Fraction:
    return sum((a * x**i for i, a in enumerate(coefficients)), Fraction(0))


@given(COEFFICIENTS, ENDS)
def test_sign_is_that_of_the_value(coefficients, bar):
    assert sign_at(coefficients, bar) == sign(value_at(coefficients, fraction(bar)))


@given(COEFFICIENTS, ENDS, ENDS, st.fractions(0, 50, max_denominator=40))
def test_moebius_is_the_transform(coefficients, low, high, t):
    degree = len(coefficients) - 1
    point = (fraction(low) + fraction(high) * t) / (1 + t)
    scale = (low[1] * high[1] * (1 + t)) ** degree
    assert value_at(moebius(coefficients, low, high), t) == scale * value_at(coefficients, point)


@st.composite
def isolated_rows(draw) -> Isolated:
    """A polynomial built around one simple root between two others, so that most draws are admissible."""
    a, b = draw(st.integers(-30, 30)), draw(st.integers(1, 9))
    left, right = draw(st.integers(2, 5)), draw(st.integers(2, 5))
    product = [1]
    for c, d in ((-a, b), (-(a - left * b), b), (-(a + right * b), b)):
        product = [c * x + d * y for x, y in zip([*product, 0], [0, *product], strict=True)]
    product[0] += draw(st.integers(-2, 2))
    try:
        return isolate(product, lowest(a - b, b), lowest(a + b, b))
    except RowError:
        assume(False)
        raise


def poly_by_bisection(row: Isolated, bar) -> int:
    low, high = fraction(row.low), fraction(row.high)
    value = fraction(bar)
    while low < value < high:
        middle = (low + high) / 2
        there = sign(value_at(row.coefficients, middle))
        if there == 0:
            return sign(middle - value)
        low, high = (middle, high) if there == row.sign_low else (low, middle)
    return 1 if value <= low else -1


@given(isolated_rows(), st.integers(1, 10**4), st.integers(1, 10**4))
def test_poly_against_bisection_in_fractions(row, part, rest):
    inside = fraction(row.low) + (fraction(row.high) - fraction(row.low)) * Fraction(part, part + rest)
    bar = (inside.numerator, inside.denominator)
    if sign_at(row.coefficients, bar) == 0:
        assert cmp_poly(row, bar) == 0
    else:
        assert cmp_poly(row, bar) == poly_by_bisection(row, bar)


@given(isolated_rows(), ENDS)
def test_poly_is_symmetric_under_reflection_and_sign(row, bar):
    def turned(end):
        return -end[0], end[1]

    mirrored = [a * (-1) ** i for i, a in enumerate(row.coefficients)]
    mirror = isolate(mirrored, turned(row.high), turned(row.low))
    negated = isolate([-a for a in row.coefficients], row.low, row.high)
    side = cmp_poly(row, bar)
    assert cmp_poly(mirror, turned(bar)) == (None if side is None else -side)
    assert cmp_poly(negated, bar) == side


def test_poly_domain_is_the_closed_stated_interval():
    row = isolate([-2, 0, 1], (1, 1), (2, 1))
    assert cmp_poly(row, (1, 1)) == 1 and cmp_poly(row, (2, 1)) == -1
    for bar in ((999, 1000), (2001, 1000), (-3, 2), (0, 1), (10**30, 1)):
        assert cmp_poly(row, bar) is None
    assert cmp_poly(isolate([-5, 9, 2], (0, 1), (1, 1)), (1, 2)) == 0  # (2x - 1)(x + 5)


NEAR_PAIR = [-10001, 30001, -30000, 10000]  # (x - 1)(10000 (x - 1)**2 + 1): one real root, a complex pair beside it


def sturm_count(coefficients, low: Fraction, high: Fraction) -> int:
    """Distinct real roots in (low, high], by the remainder sequence: the theorem that the module doesn't use."""
    chain = [
        [Fraction(a) for a in reversed(coefficients)],
        [Fraction(a * i) for i, a in enumerate(coefficients)][:0:-1],
    ]
    while any(chain[-1]):
        top, divisor = list(chain[-2]), chain[-1]
        while len(top) >= len(divisor):
            factor = top[0] / divisor[0]
            padded = divisor + [Fraction(0)] * (len(top) - len(divisor))
            top = [x - factor * y for x, y in zip(top, padded, strict=True)][1:]
        while top and not top[0]:
            top = top[1:]
        if not top:
            break
        chain.append([-x for x in top])
    at = [[value_at(link[::-1], x) for link in chain] for x in (low, high)]
    return variations([sign(v) for v in at[0]]) - variations([sign(v) for v in at[1]])


@given(COEFFICIENTS, ENDS, ENDS)
def test_one_variation_is_one_root_by_sturm(coefficients, low, high):
    assume(fraction(low) < fraction(high))
    try:
        isolate(coefficients, low, high)
    except RowError:
        return
    assert sturm_count(coefficients, fraction(low), fraction(high)) == 1


def test_descartes_is_one_way():
    assert sturm_count(NEAR_PAIR, Fraction(0), Fraction(2)) == 1
    assert variations(moebius(NEAR_PAIR, (0, 1), (2, 1))) == 3
    with pytest.raises(RowError, match="3 sign variations"):
        isolate(NEAR_PAIR, (0, 1), (2, 1))


@pytest.mark.parametrize(
    ("coefficients", "low", "high", "reason"),
    [
        ([1, 0, 1], (0, 1), (2, 1), "signs"),
        ([2, -3, 1], (0, 1), (3, 1), "signs"),
        ([-119, 184, -72, 8], (0, 1), (6, 1), "3 sign variations"),
        ([1, -2, 1], (0, 1), (3, 1), "signs"),
        ([-2, 5, -4, 1], (0, 1), (3, 1), "variations"),  # (x - 1)**2 (x - 2)
        ([-1, 1], (1, 1), (2, 1), "signs"),
        ([-1, 1], (0, 1), (1, 1), "signs"),
        ([-1, 1], (2, 1), (0, 1), "no interval"),
        ([-1, 1], (1, 1), (1, 1), "no interval"),
        ([3], (0, 1), (2, 1), "no polynomial"),
        ([], (0, 1), (2, 1), "no polynomial"),
        ([-1, 1, 0], (0, 1), (2, 1), "no polynomial"),
    ],
    ids=[
        "none",
        "two",
        "three",
        "double",
        "double-and-one",
        "at-low",
        "at-high",
        "swapped",
        "empty",
        "0",
        "()",
        "lead",
    ],
)
def test_rows_that_do_not_isolate_are_refused(coefficients, low, high, reason):
    with pytest.raises(RowError, match=reason) as caught:
        isolate(coefficients, low, high)
    assert caught.value.hint


@given(st.integers(-(10**9), 10**9), st.integers(-(10**9), 10**9).filter(bool))
def test_lowest(p, q):
    assert Fraction(p, q) == Fraction(*lowest(p, q)) and lowest(p, q) == (
        Fraction(p, q).numerator,
        Fraction(p, q).denominator,
    )


def test_zero_denominator_is_an_error_of_the_caller():
    with pytest.raises(exact.VerifyGymError, match="1/0"):
        lowest(1, 0)
