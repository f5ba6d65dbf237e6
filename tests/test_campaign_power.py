"""The simulation against campaigns that are resampled one by one, and what it must never claim."""

from __future__ import annotations

import numpy as np
import pytest
from sealed_campaign import write_config

from miniverl.campaign.config import CampaignConfig, load_config
from miniverl.campaign.intervals import bootstrap_ci
from miniverl.campaign.power import Assumptions, Design, design_of, power_curve, power_page, simulate
from miniverl.core import canonical_json

WORLD = Assumptions(gain=0.2, gain_over_script=0.2, task_sd=0.1, repetition_sd=0.05)
LIMITS = {"improvement": 0.1, "regression": 0.05}
TABLE = {3: (0.834, 0.767, 0.073), 4: (0.870, 0.857, 0.068), 6: (0.902, 0.942, 0.048), 10: (0.930, 0.989, 0.032)}


def one_by_one(tasks: int, campaigns: int, samples: int = 1000) -> tuple[float, float, float]:
    """Coverage, power and false positives from real intervals, each campaign with a seed of its own."""
    made = np.random.default_rng(tasks)
    found = []
    for seed in range(campaigns):
        x = {
            f: {str(t): list(made.normal(0, 0.1) + made.normal(0, 0.05, 5)) for t in range(tasks)}
            for f in ("one", "two")
        }
        found.append(bootstrap_ci(x, seed, samples))
    low, high = np.array(found).T
    return float(np.mean((low <= 0) & (high >= 0))), float(np.mean(low + 0.2 > 0.1)), float(np.mean(low > 0))


def close(a: tuple[float, ...], b: tuple[float, ...], campaigns: int) -> bool:
    return all(
        abs(x - y) < 4.5 * np.sqrt(max(y * (1 - y), 0.01) * (1 / campaigns + 1 / 2000))
        for x, y in zip(a, b, strict=True)
    )


def rates(tasks: int) -> tuple[float, float, float]:
    c = simulate(Design((tasks, tasks), 5), WORLD, LIMITS)["contrasts"]["vs_unchanged"]
    return c["coverage"], c["power"], c["false_positive_at_threshold"]


def test_shared_weights_are_as_good_as_a_seed_for_every_campaign():
    assert close(one_by_one(3, 400, 300), rates(3), 400)


@pytest.mark.parametrize("tasks", TABLE)
def test_the_simulation_gives_the_published_coverage(tasks):
    assert close(rates(tasks), TABLE[tasks], 2000)


@pytest.mark.slow
@pytest.mark.parametrize("tasks", TABLE)
def test_campaigns_one_by_one_give_the_published_coverage(tasks):
    assert close(one_by_one(tasks, 2000), TABLE[tasks], 2000)


def test_power_grows_with_the_gain_and_is_the_false_positive_rate_at_the_threshold():
    gains = np.linspace(0, 0.5, 26)
    curve = power_curve(Design((4, 4), 5), WORLD, 0.1, gains)
    assert curve == sorted(curve) and curve[-1] == 1.0
    assert (
        power_curve(Design((4, 4), 5), WORLD, 0.1, np.array([0.1]))[0]
        == simulate(Design((4, 4), 5), WORLD, LIMITS)["contrasts"]["vs_unchanged"]["false_positive_at_threshold"]
    )


def test_the_margin_is_what_its_name_says():
    record = simulate(Design((4, 4), 5), WORLD, LIMITS)
    margin = record["contrasts"]["vs_unchanged"]["margin_for_80_percent"]
    assert power_curve(Design((4, 4), 5), WORLD, 0.1, np.array([0.1 + margin]))[0] == pytest.approx(0.8, abs=0.01)


def test_a_regression_at_its_tolerance_is_tolerated_too_often_as_well():
    world = Assumptions(0.5, 0.5, 0.0, 0.0, regression=0.05, regression_task_sd=0.02)
    record = simulate(Design((3, 3), 5), world, LIMITS)
    c = record["contrasts"]["regression"]
    assert 0.03 < c["power"] == c["false_positive_at_threshold"] == record["decisions"]["positive"] < 0.15


def test_the_same_seed_gives_the_same_record_and_another_seed_another():
    design = Design((3, 5), 2)
    first = canonical_json(simulate(design, WORLD, LIMITS, campaigns=300, samples=200, seed=4))
    assert first == canonical_json(simulate(design, WORLD, LIMITS, campaigns=300, samples=200, seed=4))
    assert first != canonical_json(simulate(design, WORLD, LIMITS, campaigns=300, samples=200, seed=5))


def test_a_design_comes_from_a_configuration(tmp_path):
    config = load_config(write_config(tmp_path))
    assert isinstance(config, CampaignConfig) and design_of(config) == Design((1, 1), 2)
    record = simulate(design_of(config), WORLD, None, campaigns=100, samples=100)
    page = power_page(record)
    assert "no decision" in page and "powered" not in page and "review.power" in page
