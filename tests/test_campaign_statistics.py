"""Intervals and decisions against independent oracles: enumeration, scipy, arch, and properties of any data."""

from __future__ import annotations

import itertools
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miniverl.campaign.intervals import (
    bca_interval,
    bootstrap_ci,
    exact_ci,
    exact_law,
    grand_mean,
    left_out,
    path_count,
    percentile_ci,
    replicates,
    resample_weights,
    shape_of,
    t_interval,
    t_quantile,
)
from miniverl.campaign.statistics import CONTRASTS, completed, decide, effect_of, pairs, success, summarise

ROOT = Path(__file__).resolve().parents[1]

finite = st.floats(-5, 5, allow_nan=False, width=32)
values = st.dictionaries(
    st.sampled_from("ABC"),
    st.dictionaries(st.sampled_from("pqrs"), st.lists(finite, min_size=1, max_size=4), min_size=1, max_size=4),
    min_size=1,
    max_size=3,
)
holed = st.dictionaries(
    st.sampled_from("AB"),
    st.dictionaries(st.sampled_from("pqr"), st.lists(st.none() | finite, min_size=1, max_size=4), min_size=1),
    min_size=1,
)


@settings(max_examples=30, deadline=None)
@given(values, st.integers(0, 2**40), st.integers(1, 400))
def test_replicates_do_not_depend_on_pieces_or_on_the_order_of_families(x, seed, piece):
    drawn = replicates(x, seed, 120)
    assert np.array_equal(drawn, replicates(dict(reversed(x.items())), seed, 120, piece))
    low, high = percentile_ci(drawn)
    flat = [v for tasks in x.values() for own in tasks.values() for v in own]
    assert bootstrap_ci(x, seed, 120) == (low, high) and min(flat) - 1e-9 <= low <= high <= max(flat) + 1e-9


@settings(max_examples=20, deadline=None)
@given(values, st.integers(0, 99))
def test_a_replicate_is_a_weighted_sum_and_moves_with_a_constant(x, seed):
    weights = resample_weights(shape_of(x), seed, 100)
    flat = np.array([v for family in sorted(x) for own in x[family].values() for v in own])
    assert np.allclose(weights.sum(axis=1), 1) and (weights >= 0).all()
    assert np.allclose(weights @ flat, replicates(x, seed, 100), rtol=0, atol=1e-9)
    moved = {f: {t: [v + 1 for v in own] for t, own in tasks.items()} for f, tasks in x.items()}
    assert np.allclose(replicates(moved, seed, 100), replicates(x, seed, 100) + 1, rtol=0, atol=1e-9)


@settings(max_examples=40, deadline=None)
@given(values)
def test_the_exact_law_has_the_estimate_as_its_mean_and_total_one(x):
    if path_count(shape_of(x)) > 3000:
        return
    law = exact_law(x)
    assert sum(weight for _, weight in law) == 1
    assert math.isclose(sum(value * float(weight) for value, weight in law), grand_mean(x), abs_tol=1e-9)
    found = exact_ci(x)
    assert math.isclose(found.mean, grand_mean(x), abs_tol=1e-9) and found.low <= found.high


@pytest.mark.parametrize("seed", range(4))
def test_seeded_frequencies_are_the_exact_probabilities(seed):
    made = np.random.default_rng(seed)
    x = {f: {t: list(made.normal(size=made.integers(1, 3))) for t in range(2)} for f in "AB"}
    drawn, total = replicates(x, seed, 20000), 0.0
    for value, weight in exact_law(x):
        total += float(weight)
        share = np.mean(drawn <= value + 1e-9)
        assert abs(share - total) < 5 * math.sqrt(total * (1 - total) / 20000) + 1e-9


def test_other_seeds_give_other_intervals_and_the_same_seed_the_same():
    x = {"A": {"a": [0.1, 0.5, 0.2], "b": [0.7, 0.9]}, "B": {"c": [0.4, 0.3, 0.8]}}
    assert bootstrap_ci(x, 3, 500) == bootstrap_ci(x, 3, 500)
    assert len({bootstrap_ci(x, seed, 500) for seed in range(8)}) > 6


def test_repeating_the_same_values_is_no_new_evidence():
    """Four times the repetitions leave the spread that tasks cause as it is, and the estimate too."""
    once = {f: {f"{f}{t}": [float(t)] for t in range(4)} for f in "AB"}
    often = {f: {t: own * 5 for t, own in tasks.items()} for f, tasks in once.items()}
    a, b = replicates(once, 1, 20000), replicates(often, 1, 20000)
    assert grand_mean(once) == grand_mean(often)
    assert abs(a.std() / b.std() - 1) < 0.02
    assert abs(a.std() - math.sqrt(1.25 / 4 / 2)) < 0.01


def test_weights_of_families_and_tasks_survive_uneven_counts():
    x = {"A": {"a": [0.0] * 9, "b": [1.0]}, "B": {"c": [10.0]}}
    assert grand_mean(x) == 5.25
    assert set(np.round(replicates(x, 0, 2000), 9)) == {5.0, 5.25, 5.5}


def test_one_repetition_is_the_stratified_bootstrap_of_scipy():
    stats = pytest.importorskip("scipy.stats")
    made = np.random.default_rng(3)
    x = {f: {str(t): [float(made.normal(0.3, 0.2))] for t in range(n)} for f, n in (("A", 6), ("B", 9))}
    families = [[own[0] for own in tasks.values()] for tasks in x.values()]
    theirs = stats.bootstrap(
        families,
        lambda a, b, axis: (a.mean(axis) + b.mean(axis)) / 2,
        n_resamples=20000,
        method="percentile",
        vectorized=True,
        rng=np.random.default_rng(0),
    )
    drawn = replicates(x, 5, 20000)
    ours, spread = percentile_ci(drawn), drawn.std()
    assert abs(spread / theirs.standard_error - 1) < 0.03
    assert np.allclose(ours, theirs.confidence_interval, atol=0.06 * spread)
    corrected = stats.bootstrap(
        families,
        lambda a, b, axis: (a.mean(axis) + b.mean(axis)) / 2,
        n_resamples=20000,
        method="BCa",
        vectorized=True,
        rng=np.random.default_rng(0),
    )
    assert np.allclose(bca_interval(x, drawn), corrected.confidence_interval, atol=0.08 * spread)


def test_two_levels_agree_with_arch():
    bootstrap = pytest.importorskip("arch.bootstrap")
    made = np.random.default_rng(8)
    tables = [made.normal(0.2, 0.05, (n, 5)) + made.normal(0, 0.1, (n, 1)) for n in (3, 4)]
    inner = np.random.default_rng(1)

    def statistic(*families):
        means = [
            np.take_along_axis(rows, inner.integers(0, rows.shape[1], rows.shape), axis=1).mean() for rows in families
        ]
        return np.mean(means)

    theirs = bootstrap.IndependentSamplesBootstrap(*tables, seed=2).apply(statistic, 1500)[:, 0]
    x = {f: {str(t): list(row) for t, row in enumerate(rows)} for f, rows in zip("AB", tables, strict=True)}
    ours = replicates(x, 4, 20000)
    assert abs(ours.std() / theirs.std() - 1) < 0.08
    assert np.allclose(percentile_ci(ours), percentile_ci(theirs), atol=0.15 * ours.std())


def test_the_quantile_of_student_is_that_of_scipy():
    stats = pytest.importorskip("scipy.stats")
    for df, tail in itertools.product((1, 2, 3, 5, 8, 13, 40, 250, 4000), (0.4, 0.1, 0.025, 0.001)):
        assert math.isclose(t_quantile(df, tail), stats.t.isf(tail, df), rel_tol=1e-9), (df, tail)


def test_the_t_interval_of_one_family_is_the_textbook_one():
    stats = pytest.importorskip("scipy.stats")
    means = [0.3, 0.1, 0.6, 0.2]
    x = {"A": {str(t): [m - 0.1, m + 0.1] for t, m in enumerate(means)}}
    theirs = stats.t.interval(0.95, 3, loc=np.mean(means), scale=stats.sem(means))
    assert np.allclose(t_interval(x), theirs)
    assert left_out(x)["A"]["2"] == pytest.approx(0.2)


@settings(max_examples=40, deadline=None)
@given(holed)
def test_a_missing_pair_never_enters_a_figure(x):
    found, present = summarise(x), completed(x)
    flat = [v for tasks in x.values() for own in tasks.values() for v in own]
    known = [v for v in flat if v is not None]
    assert (found.scheduled, found.completed_pairs) == (len(flat), len(known))
    assert found.pstdev == (statistics.pstdev(known) if known else None)
    assert found.mean == (pytest.approx(grand_mean(present)) if known else None)
    assert sorted(found.dropped) == sorted(t for f in x for t in x[f] if all(v is None for v in x[f][t]))
    effect = effect_of(x, 1, 100)
    assert (effect.interval is None) == (not known)


def test_the_success_rate_counts_what_was_scheduled():
    contrasts = {"vs_unchanged": {"A": {"a": [1.0, None, 0.1]}}, "regression": {"A": {"a": [0.0, None, 0.0]}}}
    found = success(contrasts, {"improvement": 0.5, "regression": 0.0})
    assert (found.successes, found.scheduled) == (1, 3)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(finite, finite), min_size=3, max_size=3),
    st.floats(0, 2, width=32),
    st.floats(0, 2, width=32),
    st.booleans(),
)
def test_a_decision_follows_its_definition(bounds, tau, rho, complete):
    u, s, g = (tuple(sorted(pair)) for pair in bounds)
    found = decide(
        dict(zip(CONTRASTS, (u, s, g), strict=True)), {"improvement": tau, "regression": rho}, complete
    ).decision
    positive = complete and u[0] > tau and s[0] > tau and g[1] <= rho
    negative = u[1] <= tau or s[1] <= tau or g[0] > rho
    assert not (positive and negative)
    assert found == ("positive" if positive else "negative" if negative else "inconclusive")


def test_a_shared_script_result_pairs_with_every_repetition():
    rows = [
        {"id": f"{arm}{r}", "arm": arm, "family": "A", "task": "a", "repetition": r}
        for arm, n in (("unchanged", 1), ("scripted", 1), ("agent", 3))
        for r in range(1, n + 1)
    ]
    grade = {"unchanged1": 3.0, "scripted1": 2.0, "agent1": 1.0, "agent2": 0.5, "agent3": 0.25}
    grades = {name: {kind: {"equal_hex": v.hex()} for kind in ("private", "regression")} for name, v in grade.items()}
    manifest = {"schedule": rows, "tasks": [{"id": "a", "stochastic": False}]}
    found = pairs(manifest, dict.fromkeys(grade, "completed"), grades)
    assert found["vs_scripted"]["A"]["a"] == [1.0, 1.5, 1.75] and found["regression"]["A"]["a"] == [-2.0, -2.5, -2.75]
    lost = pairs(manifest, {**dict.fromkeys(grade, "completed"), "scripted1": "failed"}, grades)
    assert lost["vs_scripted"]["A"]["a"] == [None] * 3 and lost["vs_unchanged"]["A"]["a"] == [2.0, 2.5, 2.75]


def test_none_of_it_imports_torch():
    names = "intervals statistics power summary figures report".split()
    code = (
        f"import sys\nfor name in {names!r}: __import__('miniverl.campaign.' + name)\n"
        "heavy = {'torch', 'transformers', 'safetensors', 'matplotlib', 'scipy'} & set(sys.modules)\n"
        "assert not heavy and not [m for m in sys.modules if m.startswith(('miniverl.training', 'miniverl.evaluation'))]"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode == 0, done.stderr
