"""The reference policies: digits against independent arithmetic, best fractions against brute force, one card everywhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miniverl.verify_gym.answer import FAMILIES, Answer, Task, grade, parse_answer
from miniverl.verify_gym.curriculum import heldout
from miniverl.verify_gym.exact import VerifyGymError, cmp_xx, lowest
from miniverl.verify_gym.families import generate, prompt
from miniverl.verify_gym.policies import (
    DIGITS,
    POLICIES,
    best_bracket,
    bisect,
    cf,
    decimal_text,
    estimate,
    float_policy,
    run_policy,
    score_card,
    score_table,
    tight_bracket,
)

ROOT = Path(__file__).resolve().parents[1]


def row(family, low, high, **params):
    return Task(family, "test", 0, params, low, high)


def read(task, reply):
    answer = parse_answer(reply, FAMILIES[task.family].size_limit)
    assert isinstance(answer, Answer), answer
    return Fraction(*answer.lo), Fraction(*answer.hi)


# --- digits -----------------------------------------------------------------


def above(task, x):
    """Whether the constant is above x, by Fractions alone."""
    if task.family == "kroot":
        return x ** task.params["k"] < task.params["n"]
    value = sum(a * x**i for i, a in enumerate(task.params["coefficients"]))
    at_low = sum(a * Fraction(*task.low) ** i for i, a in enumerate(task.params["coefficients"]))
    return (value > 0) == (at_low > 0)


@pytest.mark.parametrize("family", ["kroot", "poly"])
def test_the_constant_lies_within_the_last_digit_of_its_estimate(family):
    unit = Fraction(1, 10**DIGITS)
    for index in range(25):
        task = generate(family, "test", index)
        x = Fraction(*estimate(task))
        assert above(task, x) and not above(task, x + unit)


@pytest.mark.parametrize("n", [2, 5, 10, 1000, 999_983])
def test_thirty_digits_of_the_root_of_x_to_the_x_decided_exactly(n):
    p, q = estimate(row("xx", (1, 1), (8, 1), n=n))
    m = p * 10**30 // q
    assert cmp_xx(n, lowest(m, 10**30)) == 1 and cmp_xx(n, lowest(m + 1, 10**30)) == -1


def test_published_digits_of_the_root_of_x_to_the_x():
    p, q = estimate(row("xx", (1, 1), (2, 1), n=2))
    assert decimal_text(p * 10**30 // q, 30) == "1.559610469462369349970388768765"


def test_an_unknown_family_has_no_estimate():
    with pytest.raises(VerifyGymError, match="no estimate"):
        estimate(Task("zeta", "test", 0, {}, (0, 1), (1, 1)))


# --- best fractions ---------------------------------------------------------


def brute(value, top, bottom):
    """The neighbours of a value among all fractions within the limits."""
    below = max(Fraction(min(top, -(-value.numerator * q // value.denominator) - 1), q) for q in range(1, bottom + 1))
    found = []
    for q in range(1, bottom + 1):
        p = value.numerator * q // value.denominator + 1
        if p <= top:
            found.append(Fraction(p, q))
    return below, min(found, default=None)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 10**9), st.integers(1, 10**9), st.integers(1, 60), st.integers(1, 60))
def test_best_fractions_are_the_neighbours_within_the_limits(p, q, top, bottom):
    value = Fraction(p, q)
    if value.denominator <= bottom or value >= top:  # an estimate is never so short, nor beyond every answer
        return
    below, over = brute(value, top, bottom)
    lo, hi = best_bracket((value.numerator, value.denominator), (top, bottom))
    assert Fraction(*lo) == below
    assert hi == (1, 0) if over is None else Fraction(*hi) == over


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 10**30), st.integers(1, 10**30))
def test_the_mirrored_value_has_the_mirrored_bracket(p, q):
    limits = (10**12, 10**12)
    (a, b), (c, d) = best_bracket((p, q), limits)
    assert best_bracket((-p, q), limits) == ((-c, d), (-a, b))


def test_a_value_that_is_short_itself_ends_the_walk():
    lo, hi = best_bracket((1, 3), (100, 100))
    assert Fraction(*lo) < Fraction(1, 3) < Fraction(*hi)


def test_no_fraction_in_the_limit_is_tighter_than_the_tight_bracket():
    """Neighbours in the Stern-Brocot tree: cross difference 1, and the next mediant is over the limit."""
    for task in heldout():
        limit = FAMILIES[task.family].size_limit
        (p, q), (r, s) = tight_bracket(task, limit)
        assert r * q - p * s == 1
        assert max(abs(p + r), q + s) > limit


# --- policies ---------------------------------------------------------------


def test_cf_stays_in_the_limit_and_is_certified_everywhere():
    for family in FAMILIES:
        for index in range(60):
            task = generate(family, "test", index)
            got = grade(task, cf(prompt(task)))
            assert got.verdict == "CERTIFIED", task
            assert got.progress == got.cap or family == "xx"


def test_bisection_is_exact_and_counted():
    task = row("kroot", (1, 1), (2, 1), n=2, k=2)
    lo, hi = read(task, bisect(prompt(task)))
    assert hi - lo == Fraction(1, 2**20) and lo**2 < 2 < hi**2
    task = row("poly", (1, 1), (5, 1), coefficients=(-2, 0, 1))
    lo, hi = read(task, bisect(prompt(task)))
    assert hi - lo == Fraction(4, 2**20)


def test_bisection_on_xx_stops_before_the_size_limit():
    for index in range(40):
        task = generate("xx", "test", index)
        lo, hi = read(task, bisect(prompt(task)))
        assert hi - lo in {Fraction(1, 2**13), Fraction(1, 2**14)}


def test_bisection_stops_on_the_root():
    task = row("poly", (0, 1), (1, 1), coefficients=(-5, 9, 2))
    assert grade(task, bisect(prompt(task))).verdict == "CERTIFIED"


def test_float_prints_sixteen_digits_one_unit_either_way():
    for index in range(30):
        task = generate("kroot", "test", index)
        lo, hi = read(task, float_policy(prompt(task)))
        value = task.params["n"] ** (1 / task.params["k"])
        middle = Fraction((lo + hi) / 2)
        assert float(middle) == pytest.approx(value, rel=1e-15)
        assert hi - lo == 2 * Fraction(1, 10 ** (16 - len(str(int(value)))))


def test_float_on_xx_takes_neighbours_with_the_stated_bound():
    for index in range(30):
        task = generate("xx", "test", index)
        body = float_policy(prompt(task)).removeprefix("<answer>").removesuffix("</answer>")
        lo, hi = (Fraction(end) for end in body.split(", "))
        bottom = 10**5 // task.low[0]
        assert max(lo.denominator, hi.denominator) <= bottom < lo.denominator + hi.denominator
        assert hi.numerator * lo.denominator - lo.numerator * hi.denominator == 1


@pytest.mark.parametrize(
    ("m", "places", "text"),
    [(0, 3, "0.000"), (5, 3, "0.005"), (-5, 3, "-0.005"), (1234, 2, "12.34"), (7, 0, "7"), (7, -2, "700")],
)
def test_decimal_text(m, places, text):
    assert decimal_text(m, places) == text
    assert Fraction(text) == Fraction(m) / Fraction(10) ** places


def test_policies_see_prompts_and_nothing_else(monkeypatch):
    seen = []
    monkeypatch.setattr(
        "miniverl.verify_gym.policies.POLICIES", {"spy": lambda *args, **kw: seen.append((args, kw)) or "no"}
    )
    tasks = [generate("kroot", "test", 0), generate("poly", "test", 1)]
    assert run_policy("spy", tasks) == ["no", "no"]
    assert seen == [((prompt(task),), {}) for task in tasks]


def test_an_unknown_policy_is_refused_with_the_known_ones():
    with pytest.raises(VerifyGymError) as caught:
        run_policy("guess", [])
    assert "cf" in caught.value.hint


@pytest.mark.parametrize("name", ["echo", "float", "bisect", "cf"])
def test_text_that_is_no_prompt_is_refused(name):
    with pytest.raises(VerifyGymError):
        POLICIES[name]("Bracket pi.")


# --- the card ---------------------------------------------------------------

ALONE = """
import json, socket, sys

class OnlyStandard:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in sys.stdlib_module_names and name != "miniverl" and not name.startswith("miniverl.verify_gym"):
            raise ImportError(f"blocked: {name}")
        return None

def refuse(*args, **kw):
    raise OSError("no network here")

sys.meta_path.insert(0, OnlyStandard())
socket.socket = socket.create_connection = socket.getaddrinfo = refuse
from miniverl.verify_gym.policies import score_card
from miniverl.verify_gym.gate import require_green
print(require_green().line())
print(json.dumps(score_card()))
"""


def test_gate_and_card_are_the_same_in_a_process_without_packages_network_or_key():
    env = {"PATH": os.environ["PATH"], "PYTHONHASHSEED": "7"}
    done = subprocess.run(
        [sys.executable, "-c", ALONE], capture_output=True, text=True, cwd=ROOT, env=env, encoding="utf-8"
    )
    assert done.returncode == 0, done.stderr
    line, card = done.stdout.splitlines()
    assert line.endswith("GATE GREEN")
    assert card == json.dumps(score_card())


def test_the_card_counts_what_its_grader_says():
    tasks = [generate(family, "test", index) for family in FAMILIES for index in range(2)]

    def strict(task, reply):
        got = grade(task, reply)
        return grade(task, "") if task.family == "poly" else got

    card = score_card(strict, tasks)
    assert card["tasks"] == 6
    for entry in card["policies"].values():
        assert sum(entry[word] for word in ("certified", "refuted", "refused", "malformed")) == 6
        assert entry["families"]["poly"] == 0 and entry["malformed"] >= 2
    assert card["policies"]["cf"]["families"]["kroot"] == 1


def test_the_table_has_a_row_for_each_policy_and_a_column_for_each_number():
    lines = score_table(score_card()).splitlines()
    assert len(lines) == 2 + len(POLICIES)
    assert {line.count("|") for line in lines} == {10}
    assert lines[2].startswith("| `never`") and lines[-1].startswith("| `cf`")
