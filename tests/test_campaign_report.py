"""A report says what the evidence says, nothing private, and nothing at all when the evidence is damaged."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import paper_campaign as paper
import pytest
from sealed_campaign import ENVIRONMENT, SECRETS, cases, pinned, stand_in_model, task

from miniverl.campaign.config import MODAL_MODEL
from miniverl.campaign.records import OUTCOMES, Schema, controller_lock, outcome_body, write_record
from miniverl.campaign.report import build_summary, render, report_page, write_report
from miniverl.core import DataError, LockError, StoreError

ROOT = Path(__file__).resolve().parents[1]
ENDPOINT = "https://canary-endpoint.example/v1/responses"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return paper.worked(tmp_path_factory.mktemp("worked"), thresholds=paper.THRESHOLDS)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_worked_example_comes_out_of_its_records(finished):
    summary = build_summary(finished)
    found = {
        name: (e["completed_pairs"], e["scheduled"], *(round(b, 9) for b in e["interval"]))
        for name, e in summary["contrasts"].items()
    }
    assert found == {
        "vs_unchanged": (7, 8, 0.3, 0.725),
        "vs_scripted": (6, 8, 0.175, 0.6),
        "regression": (7, 8, 0.0025, 0.0325),
    }
    assert summary["decision"]["reasons"] == ["incomplete_evidence"]
    assert summary["success"]["scheduled"] == 8


def test_a_complete_positive_campaign_stays_exploratory(tmp_path):
    summary = build_summary(paper.filled(tmp_path, thresholds=paper.THRESHOLDS))
    page = report_page(summary)
    assert "**Decision: positive (exploratory).**" in page and "**Label: exploratory.**" in page
    assert summary["decision"] == {
        "decision": "positive",
        "shown": "positive (exploratory)",
        "reasons": [],
        "incomplete_evidence": False,
    }


@pytest.mark.parametrize("damage", paper.DAMAGES)
def test_damaged_evidence_stops_the_report_before_a_byte(finished, tmp_path, damage):
    copy = paper.copied(finished, tmp_path)
    paper.DAMAGES[damage](copy, copy.trial_id("agent-a1-01"))
    with pytest.raises(DataError) as caught:
        write_report(copy.layout.root)
    assert caught.value.hint and "agent-a1-01" in caught.value.message
    assert not copy.layout.reports.exists()


@pytest.mark.parametrize("name", ["manifest.json", "restricted/config.json", "restricted/model.json"])
def test_a_broken_seal_stops_the_report(finished, tmp_path, name):
    copy = paper.copied(finished, tmp_path)
    path = copy.layout.root / name
    path.write_bytes(path.read_bytes().replace(b"1", b"2", 1))
    with pytest.raises(DataError):
        write_report(copy.layout.root)
    assert not copy.layout.reports.exists()


def test_a_left_receipt_that_is_damaged_stops_the_report_too(finished, tmp_path):
    copy = paper.copied(finished, tmp_path)
    name = copy.trial_id("agent-b1-01")
    copy.layout.trial(name).outcome.unlink()
    assert build_summary(copy)["inspection_only"] == [{"trial": name, "status": "outcome_unknown", "receipts": 1}]
    paper._spoil_score(copy, name)
    with pytest.raises(DataError, match="agent-b1-01"):
        build_summary(copy)


def test_a_better_score_in_a_consistent_receipt_needs_its_outcome(finished, tmp_path):
    """Whoever rewrites a receipt so that its figures follow from its cases still has the outcome against them."""
    copy = paper.copied(finished, tmp_path)
    name = copy.trial_id("agent-a1-01")
    paper.edited(copy.layout.grade(name), private=paper.score(0.5))
    with pytest.raises(DataError):
        build_summary(copy)


def test_a_receipt_over_other_cases_than_were_sealed_is_refused(tmp_path):
    campaign = paper.design(tmp_path)
    spec = campaign.schedule[0]
    paper.play(campaign, spec, 3.0)
    assert build_summary(campaign)["trials"][0]["private"]["tokens"] == 4
    other = paper.design(tmp_path / "other")
    other.task = lambda name: {"private": {"count": 3}}  # the hand that writes believes in three cases
    paper.play(other, spec, 3.0)
    del other.__dict__["task"]
    with pytest.raises(DataError, match="has 3 private cases"):
        build_summary(other)


def test_an_inspection_changes_no_figure(finished, tmp_path):
    """A receipt of a trial that failed, and one that a second grading wrote, are counted and never averaged."""
    before, copy = build_summary(finished), paper.copied(finished, tmp_path)
    name = copy.trial_id("agent-a2-02")
    assert before["inspection_only"] == []
    body = {"artifact_sha256": "0" * 64, "kind": "inspection_only", "private": paper.score(0.1)}
    write_record(copy.layout.regrades(name) / "0001.json", Schema.REGRADE, copy.manifest_sha256, name, body)
    after = build_summary(copy)
    assert after["inspection_only"] == [{"trial": name, "status": "timed_out", "receipts": 1}]
    assert {**after, "inspection_only": []} == before
    assert name in report_page(after).partition("Inspection only")[2]


def test_every_status_is_counted_and_none_but_completed_has_a_score(tmp_path):
    campaign = paper.design(tmp_path)
    ends = dict(zip(range(5, 9), ("invalid_artifact", "failed", "timed_out", "outcome_unknown"), strict=True))
    for spec in campaign.schedule[:10]:
        paper.play(campaign, spec, None if spec.index in ends else 2.0, status=ends.get(spec.index, "failed"))
    blocked, layout = campaign.schedule[10], campaign.layout
    body = outcome_body("budget_blocked", "budget_exceeded")
    write_record(layout.trial(blocked.id).outcome, Schema.OUTCOME, campaign.manifest_sha256, blocked.id, body)
    summary = build_summary(campaign)
    total = {status: sum(found[status] for found in summary["statuses"].values()) for status in OUTCOMES}
    expected = {"completed": 6, "failed": 8, **dict.fromkeys(OUTCOMES[1:2] + OUTCOMES[3:], 1)}
    assert total == expected and sum(total.values()) == len(summary["trials"]) == 18
    assert all((row["private"] is not None) == (row["status"] == "completed") for row in summary["trials"])
    never = next(row for row in summary["trials"] if row["evidence"] == "nothing")
    assert never["status"] == "failed" and never["reason"] is None
    page = report_page(summary)
    assert "no outcome; last evidence: nothing" in page and "no outcome; last evidence: history" in page


def test_no_thresholds_no_rate_no_decision(tmp_path):
    summary = build_summary(paper.filled(tmp_path, thresholds=None))
    assert summary["success"] is None and summary["decision"]["decision"] == "inconclusive"
    page = report_page(summary)
    assert "no thresholds were set, and none is invented" in page and "no success rate is given" in page
    assert "thresholds are missing" in page


def test_a_mean_over_one_case_is_withheld(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    alone = {
        **task(source, "a1", "family-a", False),
        "private": pinned(source, "one.json", cases("the only private", 1)),
    }
    single = paper.paper(paper.sealed(tmp_path, tasks=[alone], thresholds=paper.THRESHOLDS))
    for spec in single.schedule:
        paper.play(single, spec, 2.5)
    summary = build_summary(single)
    assert all(row["private"] is None and row["regression"]["tokens"] == 4 for row in summary["trials"])
    assert summary["contrasts"]["vs_unchanged"]["completed_pairs"] == 2
    assert not re.search(r"\b2\.5000\b", report_page(summary))


def hosted(folder: Path, **changes):
    """The same design for a hosted backend with a live agent."""
    source = folder / "source"
    name = f"snapshots/{MODAL_MODEL[1]}"
    model = {**stand_in_model(source / name), "path": name, "id": MODAL_MODEL[0], "revision": MODAL_MODEL[1]}
    policy = {"endpoint": ENDPOINT, "model_env": "CANARY_MODEL", "credential_env": "CANARY_KEY"}
    runtime = {"backend": "modal", "grader_python": sys.executable, "policy": policy}
    tasks = [task(source, name, "family-a", False) for name in ("a1", "a2")]
    return paper.paper(paper.sealed(folder, tasks=tasks, model=model, runtime=runtime, **changes))


@pytest.fixture
def live(tmp_path, monkeypatch):
    monkeypatch.setenv("CANARY_MODEL", "canary-model-name")
    monkeypatch.setenv("CANARY_KEY", "canary-credential")
    rates = {
        "build_usd": "0.05",
        "sandbox_hourly_usd": "0.3",
        "egress_per_gib": "0.09",
        "teacher_request_usd": "0.02",
    }
    budget = {"max_usd": "9", "prior_reserved_usd": "0.25", "price_checked_on": "2026-11-30", "rates": rates}
    campaign = hosted(tmp_path / "live", budget=budget, thresholds=paper.THRESHOLDS)
    for spec in campaign.schedule:
        missing = spec.arm == "agent" and spec.repetition == 2
        paper.play(campaign, spec, None if missing else 2.0, status="outcome_unknown")
    return campaign


def test_reservations_stay_charged_and_bills_stay_unknown(live):
    summary = build_summary(live)
    budget = summary["budget"]
    parts = [float(amount) for amount in budget["reserved_by_arm_usd"].values()]
    assert parts[0] == 0 and all(part > 0 for part in parts[1:])
    assert sum(parts) == pytest.approx(float(budget["reserved_usd"])) and budget["actual_usd"] is None
    assert float(budget["reserved_usd"]) + 0.25 + float(budget["unreserved_usd"]) == pytest.approx(9)
    assert summary["statuses"]["agent"]["outcome_unknown"] == 2  # and the money of these two is in the sum
    page, picture = report_page(summary), render(summary)["budget.svg"]
    assert "unknown and unreconciled" in page and "unknown and unreconciled" in picture
    assert budget["reserved_usd"] in picture and "synthetic tape" not in page


def test_nothing_private_is_in_any_public_file(finished, live, tmp_path):
    """Canaries in cases, scripts, endpoint, credential, output, metadata and tracebacks, looked for everywhere."""
    private = {SECRETS["private"], SECRETS["regression"], paper.CANARY_ERROR, ENDPOINT, "canary-credential"}
    shown = {
        *private,
        SECRETS["public"],
        SECRETS["script"],
        paper.CANARY_OUTPUT,
        paper.CANARY_METADATA,
        "print(",
        "vault",
    }
    for campaign in (finished, live):
        copy = paper.copied(campaign, tmp_path / campaign.manifest["backend"])
        write_report(copy.layout.root)
        files = contents(copy.layout.root)
        reports = [name for name in files if name.startswith("reports/")]
        assert len(reports) == 6
        for name, data in files.items():
            text = data.decode("utf-8", "replace")
            looked = shown if name in reports or name in ("manifest.json", "seal.json") else private
            if not name.startswith("restricted/"):
                found = [canary for canary in looked if canary.lower() in text.lower()]
                assert not found and str(tmp_path) not in text, (name, found)
        assert any(SECRETS["private"].encode() in data for name, data in files.items())  # the canaries do sing


def test_no_score_of_a_single_case_is_in_a_report(tmp_path):
    campaign = paper.design(tmp_path)
    for spec in campaign.schedule[:2]:
        paper.play(campaign, spec, 2.123456789)
    receipt = campaign.layout.grade(campaign.schedule[0].id).read_text()
    text = "".join(render(build_summary(campaign)).values())
    assert "2.37345" in receipt and "1.87345" in receipt  # two cases around their mean
    assert "2.12345" in text and "2.3734" not in text and "1.8734" not in text and "_hex" not in text


def test_the_report_is_the_same_bytes_in_another_process(finished, tmp_path):
    copy = paper.copied(finished, tmp_path)
    made = write_report(copy.layout.root)
    before = contents(made)
    code = "import sys; from miniverl.campaign.report import write_report; print(write_report(sys.argv[1]).name)"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "77", "TZ": "Asia/Tokyo", "LC_ALL": "C"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(copy.layout.root)], capture_output=True, text=True, env=env, timeout=120
    )
    assert done.stdout.strip() == made.name, done.stderr
    assert contents(made) == before and [p.name for p in copy.layout.reports.iterdir()] == [made.name]


def test_a_report_asks_nobody_and_is_for_its_owner_under_any_umask(finished, tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a report opened a socket or started a process")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    copy, old = paper.copied(finished, tmp_path), os.umask(0)
    try:
        made = write_report(copy.layout.root)
    finally:
        os.umask(old)
    assert len(list(made.iterdir())) == 6 and {path.stat().st_mode & 0o777 for path in made.iterdir()} == {0o600}
    assert made.stat().st_mode & 0o777 == made.parent.stat().st_mode & 0o777 == 0o700


def test_a_report_waits_for_no_controller(finished, tmp_path):
    copy = paper.copied(finished, tmp_path)
    with controller_lock(copy.layout.root), pytest.raises(LockError):
        write_report(copy.layout.root)
    assert not copy.layout.reports.exists()


def test_no_campaign_no_report(tmp_path):
    with pytest.raises(StoreError):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_another_environment_of_the_grader_is_told(tmp_path, monkeypatch):
    campaign = paper.design(tmp_path)
    monkeypatch.setattr(paper, "FINGERPRINT", {**ENVIRONMENT, "threads": 2})
    for spec in campaign.schedule[:1]:
        paper.play(campaign, spec, 3.0)
    summary = build_summary(campaign)
    assert len(summary["environment_differs"]) == 1 and "threads" in summary["environment_differs"][0]
    assert "**differs**" in report_page(summary)


def test_what_a_report_must_say_and_must_not(finished, live):
    for campaign in (finished, live):
        files = render(build_summary(campaign))
        page = " ".join(files["report.md"].split())
        for phrase in (
            "do not authenticate evidence against a malicious host owner who can rewrite the entire campaign",
            "unknown and unreconciled",
            "do not imply a free hosted service",
            "does not establish statistical power",
            "not automated certifications",
            "explicitly funded pilot",
            "no fabricated score",
            "Diagnostic, not part of the decision",
            "declared by the operator",
            "not capped by the limit on payloads",
        ):
            assert phrase in page, phrase
        assert not re.search(r"\bpowered\b", "".join(files.values()), re.IGNORECASE)
        local = campaign.manifest["backend"] == "local"
        assert ("cannot establish private-data isolation" in page) == local
        assert ("do not represent token usage of a provider" in page) == local
    assert "canary-endpoint" not in page and live.manifest["route_fingerprint"][:16] in page


def test_hostile_names_do_not_reach_the_page_as_markup(finished):
    summary = build_summary(finished)
    hostile = {**summary["model"], "id": "x | <script>alert(1)</script> $a$ [b](c)"}
    page = report_page({**summary, "model": hostile})
    assert "<script>" not in page and r"\[b\](c)" in page and r"x \| " in page


def test_a_summary_holds_what_a_reader_needs(finished):
    summary = json.loads(render(build_summary(finished))["summary.json"])
    assert set(summary) == set(
        "format campaign_format manifest_sha256 name model provenance environment backend isolation policy route_fingerprint "
        "actions_sha256 limits statistics thresholds repetitions label label_reasons warnings review tasks regression_cases "
        "contrasts pairs success decision statuses trials inspection_only environment_differs budget allowance statements".split()
    )
    effect = summary["contrasts"]["vs_scripted"]
    assert set(effect) == set(
        "scheduled completed_pairs mean families tasks median low high pstdev dropped interval diagnostics".split()
    )
    assert set(summary["statuses"]) == {"unchanged", "scripted", "agent"}
    assert set(summary["statuses"]["agent"]) == set(OUTCOMES)
    assert summary["allowance"] == {"unit": "utf8_bytes", "provider_tokens": None}
    assert summary["provenance"]["attributed_revision"] != summary["provenance"]["package_sha256"]
