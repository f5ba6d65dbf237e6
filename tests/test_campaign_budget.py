"""What a trial may cost at most, and that it is charged before it can cost anything."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import pytest
from crash import KILLED, killed_at
from hypothesis import given
from hypothesis import strategies as st
from sealed_campaign import SECRETS, sealed

from miniverl.campaign.budget import BYTES_PER_ACTION, Ledger, budget_summary, reservation_for
from miniverl.campaign.manifest import TrialSpec, open_campaign
from miniverl.campaign.records import Layout, Outcome, Schema, derived_status, outcome_body, write_record
from miniverl.core import DataError

RATES = {"build_usd": "0.05", "sandbox_hourly_usd": "0.30", "egress_per_gib": "0.09", "teacher_request_usd": "0.02"}


def spec(arm: str, index: int = 1) -> TrialSpec:
    return TrialSpec(index, f"{index:04d}-{arm}-t-01", arm, "f", "t", 1)


def design(rates=RATES, *, turns=8, wall=1800, backend="modal", policy=True, actions=1, limit="10", prior="0"):
    """The parts of a manifest on which money depends."""
    return {
        "backend": backend,
        "policy": {"kind": "responses"} if policy else None,
        "limits": {"turns": turns, "wall_seconds": wall},
        "budget": {
            "max_usd": limit,
            "prior_reserved_usd": prior,
            "price_checked_on": "2026-11-30",
            "rates": dict(rates),
        },
        "tasks": [{"id": "t", "script": {"actions": actions}}],
    }


def campaign_of(root: Path, trials, **changes):
    return SimpleNamespace(
        layout=Layout(root), manifest=design(**changes), manifest_sha256="m" * 64, schedule=tuple(trials)
    )


# ---------------------------------------------------------------- amounts


def test_golden_amounts():
    assert BYTES_PER_ACTION == 637_534_209
    assert reservation_for(design(), spec("agent")).amount == Decimal("0.787501")
    assert reservation_for(design(), spec("scripted")).amount == Decimal("0.253438")
    assert reservation_for(design(), spec("unchanged")).amount == 0


@pytest.mark.parametrize("arm", ["unchanged", "scripted", "agent"])
def test_unchanged_and_trusted_local_arms_reserve_nothing(arm):
    found = reservation_for(design(backend="local", policy=False), spec(arm))
    assert (found.amount, found.kind, found.components) == (0, "none", {})
    assert reservation_for(design(), spec("unchanged")).kind == "none"


def test_requests_are_reserved_for_a_live_policy_only_and_wherever_it_plays():
    assert reservation_for(design(), spec("agent")).requests == 8
    assert reservation_for(design(), spec("scripted")).requests == 0
    assert reservation_for(design(policy=False), spec("agent")).requests == 0
    local = reservation_for(design(backend="local"), spec("agent"))
    assert (local.amount, local.kind) == (Decimal("0.16"), "live")


@pytest.mark.parametrize("turns, actions, counted", [(8, 1, 1), (8, 8, 8), (3, 8, 3), (8, 0, 0)])
def test_a_script_counts_its_actions_and_no_more_than_the_turns(turns, actions, counted):
    found = reservation_for(design(turns=turns, actions=actions), spec("scripted"))
    assert found.actions == counted


money = st.decimals(min_value=0, max_value=1000, places=6, allow_nan=False)


@given(st.tuples(money, money, money, money), st.integers(1, 100), st.integers(1, 10**6))
def test_an_amount_is_the_exact_sum_rounded_up_to_a_millionth(prices, turns, wall):
    build, hourly, egress, request = map(Fraction, prices)
    exact = build + hourly * wall / 3600 + egress * turns * BYTES_PER_ACTION / 2**30 + request * turns
    found = reservation_for(
        design(dict(zip(RATES, map(str, prices), strict=True)), turns=turns, wall=wall), spec("agent")
    )
    assert 0 <= Fraction(found.amount) - exact < Fraction(1, 10**6)
    assert found.amount == found.amount.quantize(Decimal("0.000001"))
    assert 0 <= sum(map(Fraction, found.components.values())) - exact < Fraction(4, 10**9)


def test_ten_tenths_are_one(tmp_path):
    tenth = {"build_usd": 0.1, "sandbox_hourly_usd": 0, "egress_per_gib": 0, "teacher_request_usd": 0}
    trials = [spec("agent", n) for n in range(1, 12)]
    ledger = Ledger(campaign_of(tmp_path, trials, rates=tenth, limit="1.0"))
    reserved = [ledger.reserve(trial) is not None for trial in trials]
    assert reserved == [True] * 10 + [False] and ledger.charged == 1
    assert ledger.charged == Ledger(ledger.campaign).charged


# ---------------------------------------------------------------- the ledger


@pytest.mark.parametrize("limit, fits", [("0.787501", True), ("0.787500", False), ("0", False)])
def test_equality_fits(tmp_path, limit, fits):
    campaign = campaign_of(tmp_path, [spec("agent")], limit=limit)
    assert (Ledger(campaign).reserve(spec("agent")) is not None) == fits
    assert campaign.layout.trial(spec("agent").id).reservation.exists() == fits


def test_what_was_reserved_before_counts(tmp_path):
    one = campaign_of(tmp_path / "a", [spec("agent")], limit="1", prior="0.212499")
    two = campaign_of(tmp_path / "b", [spec("agent")], limit="1", prior="0.212500")
    assert Ledger(one).reserve(spec("agent")) and not Ledger(two).reserve(spec("agent"))


def test_a_blocked_trial_leaves_nothing_and_does_not_stop_a_free_one(tmp_path):
    trials = [spec("agent", 1), spec("scripted", 2), spec("unchanged", 3)]
    campaign = campaign_of(tmp_path, trials, limit="0.1", prior="5")
    ledger = Ledger(campaign)
    assert [ledger.reserve(trial) is not None for trial in trials] == [False, False, True]
    assert not any(campaign.layout.trial(trial.id).root.exists() for trial in trials[:2])
    paths = campaign.layout.trial(trials[0].id)
    body = outcome_body(Outcome.BUDGET_BLOCKED, "budget_exceeded")
    write_record(paths.outcome, Schema.OUTCOME, campaign.manifest_sha256, trials[0].id, body)
    assert derived_status(campaign.layout, trials[0].id) == (Outcome.BUDGET_BLOCKED, "outcome")
    assert not paths.dispatch.exists() and Ledger(campaign).charged == 0


@pytest.mark.parametrize("status", ["failed", "timed_out", "invalid_artifact", "outcome_unknown", None])
def test_a_reservation_stays_charged_whatever_happens(tmp_path, status):
    trials = [spec("agent", 1), spec("agent", 2)]
    campaign = campaign_of(tmp_path, trials)
    record = Ledger(campaign).reserve(trials[0])
    paths = campaign.layout.trial(trials[0].id)
    dispatch = write_record(paths.dispatch, Schema.DISPATCH, campaign.manifest_sha256, trials[0].id, {}, record)
    if status:
        body = outcome_body(status, "interrupted")
        write_record(paths.outcome, Schema.OUTCOME, campaign.manifest_sha256, trials[0].id, body, dispatch)
    again = Ledger(campaign)
    assert again.charged == Decimal("0.787501") and not derived_status(campaign.layout, trials[0].id).may_run
    assert again.reserve(trials[1])["running_total_after_usd"] == "1.575002"


def test_a_reservation_that_was_left_behind_is_used_and_not_charged_twice(tmp_path):
    campaign = campaign_of(tmp_path, [spec("agent")], limit="0.8")
    first = Ledger(campaign).reserve(spec("agent"))
    again = Ledger(campaign)
    assert again.reserve(spec("agent")) == first and again.charged == Decimal("0.787501")
    assert derived_status(campaign.layout, spec("agent").id).may_run


def test_the_reservation_is_durable_before_the_call_returns(tmp_path):
    """Killed at any call, a ledger that said that it reserved has reserved."""
    for n in range(1, 30):
        campaign = campaign_of(tmp_path / str(n), [spec("agent")])

        def work(say, campaign=campaign):
            Ledger(campaign).reserve(spec("agent"))
            say("reserved")
            os.mkdir(campaign.layout.root / "dispatched")

        status, said, _ = killed_at(n, work)
        assert status in (0, KILLED)
        charged = Ledger(campaign).charged
        assert charged == (Decimal("0.787501") if said else charged) and charged in (0, Decimal("0.787501"))
        assert not (campaign.layout.root / "dispatched").exists() or charged
        if status == 0:
            return
    raise AssertionError("the work never ended")


@pytest.mark.parametrize("change", ["amount", "campaign", "trial", "torn", "prices"])
def test_an_edited_reservation_is_not_counted(tmp_path, change):
    campaign = campaign_of(tmp_path, [spec("agent")])
    Ledger(campaign).reserve(spec("agent"))
    path = campaign.layout.trial(spec("agent").id).reservation
    text = path.read_text()
    match change:
        case "amount":
            path.write_text(text.replace('"amount_usd": "0.787501"', '"amount_usd": "0"'))
        case "campaign":
            campaign.manifest_sha256 = "n" * 64
        case "trial":
            path.write_text(text.replace(spec("agent").id, "0002-agent-t-01"))
        case "torn":
            path.write_text(text[:-3])
        case "prices":
            campaign.manifest["budget"]["rates"]["build_usd"] = "9"
    with pytest.raises(DataError):
        Ledger(campaign)


# ---------------------------------------------------------------- with a sealed campaign


def test_a_local_campaign_with_a_live_policy(tmp_path, monkeypatch):
    monkeypatch.setenv("WSM_TEST_MODEL", "m")
    monkeypatch.setenv("WSM_TEST_KEY", "k")
    policy = {"endpoint": SECRETS["endpoint"], "model_env": "WSM_TEST_MODEL", "credential_env": "WSM_TEST_KEY"}
    runtime = {"backend": "local", "grader_python": sys.executable, "policy": policy}
    campaign = sealed(tmp_path, runtime=runtime)
    ledger = Ledger(campaign)
    amounts = {trial.id: Decimal(ledger.reserve(trial)["amount_usd"]) for trial in campaign.schedule}
    assert {amount for name, amount in amounts.items() if "-agent-" in name} == {Decimal("0.08")}
    assert {amount for name, amount in amounts.items() if "-agent-" not in name} == {Decimal(0)}
    told = budget_summary(open_campaign(campaign.layout.root))
    assert told["reserved_usd"] == told["reserved_by_arm_usd"]["agent"] == "0.320000"
    assert told["actual_billing"] == "unknown and unreconciled" and told["actual_usd"] is None


def test_a_trial_that_the_manifest_does_not_know_is_told(tmp_path):
    trial = replace(spec("scripted"), task="other")
    with pytest.raises(DataError, match="other"):
        reservation_for(design(), trial)
    assert asdict(trial)["task"] == "other"
