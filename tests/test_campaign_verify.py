"""Verification: a finished campaign holds wholly, and no file of it can be damaged without being named."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import campaign_fakes as fakes
import pytest

from miniverl.campaign import manifest
from miniverl.campaign import verify as module
from miniverl.campaign.audit import Tree
from miniverl.campaign.controller import run_campaign
from miniverl.campaign.fixture import write_fixture
from miniverl.campaign.grading import GraderTimeout, regrade
from miniverl.campaign.manifest import open_campaign, prepare
from miniverl.campaign.records import controller_lock, record_sha256
from miniverl.campaign.report import render, write_report
from miniverl.campaign.verify import VerifyReport, evidence_digest, verify
from miniverl.core import LockError, StoreError, canonical_json

UNCHANGED, AGENT = "0001-unchanged-suffix-01", "0003-agent-suffix-01"


@pytest.fixture(autouse=True, scope="module")
def steady():
    """The package may be edited while tests run, so its digest stands still; a page is drawn once for each summary."""
    pages: dict[str, dict[str, str]] = {}

    def once(summary):
        key = canonical_json({**summary, "order": [*summary["contrasts"], *summary["statuses"]]})
        if key not in pages:
            pages[key] = render(summary)
        return pages[key]

    with pytest.MonkeyPatch.context() as patch:
        for where in (manifest, module):
            patch.setattr(where, "package_digest", lambda *_: "d" * 64)
        patch.setattr(module, "render", once)
        yield


@pytest.fixture(scope="module")
def whole(steady, tmp_path_factory):
    """Three trials, all completed, one turn of the agent failed; graded again and reported."""
    campaign = fakes.small(tmp_path_factory.mktemp("whole"), agent=["set 2.75", "raise", "set 2.5"])
    root = campaign.layout.root
    run_campaign(root, backend=fakes.FakeBackend(), grader=fakes.FakeGrader())
    regrade(campaign, client=fakes.FakeGrader())
    write_report(root)
    return root


@pytest.fixture(scope="module")
def sealed(steady, tmp_path_factory):
    """Three trials that nobody ran yet."""
    return fakes.small(tmp_path_factory.mktemp("sealed"), agent=["set 2.5"]).layout.root


@pytest.fixture
def fresh(sealed, tmp_path):
    return Path(shutil.copytree(sealed, tmp_path / "fresh"))


@pytest.fixture
def copy(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def files_of(root: Path) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


def accused(report: VerifyReport) -> str:
    return "\n".join(f"{line.check}: {line.detail}" for line in report.of("fails"))


def edited(path: Path, change: Callable[[dict], object]) -> None:
    record = json.loads(path.read_text())
    change(record)
    path.write_text(canonical_json(record))


# --- what holds -------------------------------------------------------------------------------------------------------


def test_a_finished_campaign_holds_and_says_what_is_not_shown(whole):
    before = {name: (whole / name).stat().st_mtime_ns for name in files_of(whole)}
    report = verify(whole)
    assert report.ok and report.name == "stand-in", accused(report)
    counts = report.counts()
    assert counts["outcome"] == counts["chain"] == {"holds": 3, "fails": 0, "unknown": 0}
    assert counts["score"]["holds"] == counts["regrading"]["holds"] == 3 and counts["figures"]["holds"] == 1
    assert {line.subject for line in report.of("unknown")} == {"owner", "last words", "isolation", "billing"}
    assert "authenticate nobody" in next(line.detail for line in report.findings if line.subject == "owner")
    assert {name: (whole / name).stat().st_mtime_ns for name in files_of(whole)} == before, "it only reads"


def test_no_line_quotes_a_private_text(whole, copy):
    for name in files_of(copy):
        if name.startswith(("trials/", "restricted/")) and name.endswith(".json"):
            (copy / name).write_bytes((copy / name).read_bytes().replace(b"wsm.", b"canary.", 1))
    for report in (verify(whole), verify(copy)):
        text = canonical_json(report.to_record())
        assert all(word not in text for word in (*fakes_secrets(), "CANARY", str(whole), str(copy)))


def fakes_secrets() -> list[str]:
    from sealed_campaign import SECRETS

    return [*SECRETS.values(), "/canary/store/of/artifacts"]


# --- every file, damaged in turn --------------------------------------------------------------------------------------


def flip(path: Path) -> bool:
    data = bytearray(path.read_bytes())
    if data:
        data[len(data) // 2] ^= 1
        os.unlink(path)  # inputs have two names; only this one is damaged
        path.write_bytes(data)
    return bool(data)


def delete(path: Path) -> bool:
    path.unlink()
    return True


def swap(path: Path) -> bool:
    """Put the file of the same name from another place here; False where there is none with other bytes."""
    root = next(parent for parent in path.parents if parent.name == "copy")
    beside = [*root.rglob(path.name), *path.parent.iterdir()]
    other = next((p for p in beside if p.is_file() and p.read_bytes() != path.read_bytes()), None)
    if other is not None:
        data = other.read_bytes()
        path.unlink()
        path.write_bytes(data)
    return other is not None


UNBOUND = {  # what a single damage leaves as good as new: no other record names the last word
    ("flip", "error.json"): "its text; nothing else was derived from it",
    ("delete", "error.json"): "a failed program need not have left a message; a rejected artifact must, see below",
    ("delete", "regrade"): "the last regrading of a trial may never have been made",
}


def damaged_in_turn(whole: Path, copy: Path, damages: list[Callable[[Path], bool]]) -> int:
    """Damage each file with each of the damages, see it named, and put it back; returns how many were named."""
    named = 0
    for name in files_of(whole):
        for damage in damages:
            path = copy / name
            if damage(path):
                what = "regrade" if "/regrade/" in name else path.name
                if (damage.__name__, what) not in UNBOUND:
                    found = accused(verify(copy))
                    assert name in found, f"{damage.__name__} of {name}: {found or 'nothing fails'}"
                    named += 1
            path.unlink(missing_ok=True)
            shutil.copy2(whole / name, path)
    assert verify(copy).ok
    return named


@pytest.mark.slow
@pytest.mark.parametrize("damage", [flip, delete, swap])
def test_every_single_file_that_is_damaged_is_named(whole, copy, damage):
    assert damaged_in_turn(whole, copy, [damage]) > len(files_of(whole)) - 6


def test_files_of_every_kind_that_are_damaged_are_named(whole, copy):
    """Each file in one of the three ways, where the slow test takes all of them."""
    turn = itertools.cycle((flip, delete, swap))

    def any_of(path: Path) -> bool:
        chosen = next(turn)
        any_of.__name__ = chosen.__name__
        return chosen(path)

    assert damaged_in_turn(whole, copy, [any_of]) > len(files_of(whole)) - 8


def test_the_expected_digest_finds_the_rest(whole, copy):
    kept = verify(whole).evidence_sha256
    assert verify(copy, expected=kept).ok
    for name in files_of(copy):
        if name != ".lock" and not name.startswith("reports/") and "/regrade/" not in name:
            data = (copy / name).read_bytes()
            (copy / name).write_bytes(data[:-2] + bytes([data[-2] ^ 1]) + data[-1:])
            assert evidence_digest(Tree(copy)) != kept, name
            (copy / name).write_bytes(data)
    edited(copy / "restricted" / AGENT / "error.json", lambda r: r.update(detail="another story"))
    assert verify(copy).ok and "evidence digest is not the expected one" in accused(verify(copy, expected=kept))


def test_of_an_outcome_only_the_time_can_be_changed_unseen(whole, copy):
    """Every byte of the last record of a trial, one at a time; the expected digest covers the rest."""
    path = copy / "trials" / AGENT / "outcome.json"
    data = path.read_bytes()
    times = range(data.index(b'"written_at"'), data.index(b'"written_at"') + 40)
    rest = [at for at in range(0, len(data), 31) if at not in times]
    for at in rest:
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        assert path.relative_to(copy).as_posix() in accused(verify(copy)), f"byte {at}"


# --- lies that are well-formed ----------------------------------------------------------------------------------------


def rechain(root: Path, trial: str, short: str, change: Callable[[dict], object]) -> None:
    """Edit a record and write all that follow it anew, as the owner of the host could."""
    public, private = root / "trials" / trial, root / "restricted" / trial
    names = [public / "reservation.json", public / "dispatch.json"]
    steps = sorted(public.glob("checkpoints/*.json")) + sorted(public.glob("history/*.json"))
    records = {
        path: json.loads(path.read_text())
        for path in [*names, *steps, public / "closure.json", private / "grade.json", public / "outcome.json"]
    }
    sha = {path: record_sha256(record) for path, record in records.items()}
    by_link = {record["previous_sha256"]: path for path, record in records.items()}
    path, link, new = by_link[None], None, None
    while True:
        record, old = records[path], sha[path]
        if path.stem == short or f"{path.parent.name}/{path.stem}" == short:
            change(record)
        record["previous_sha256"] = new
        if path.name == "outcome.json":
            record["grade_sha256"] = new
            edited(private / "error.json", lambda r, last=new: r.update(previous_sha256=last))
        new, link = record_sha256(record), old
        path.write_text(canonical_json(record))
        if link not in by_link:
            return
        path = by_link[link]


@pytest.mark.parametrize(
    ("short", "change", "words"),
    [
        ("reservation", lambda r: r.update(amount_usd="1.000000"), "is not what the manifest implies"),
        ("reservation", lambda r: r.update(running_total_after_usd="5"), "is not what the manifest implies"),
        ("dispatch", lambda r: r["inputs"].update(public="0" * 64), "is not the intent of this trial"),
        ("dispatch", lambda r: r.update(deadline_unix_time=r["deadline_unix_time"] + 60), "is not the intent"),
        ("history/0001", lambda r: r.update(source="set 9", source_sha256=None), "digest of the program"),
        ("history/0003", lambda r: r.update(kind="submit"), "is not the action that was sealed"),
        ("history/0002", lambda r: r.update(evaluations_left=1), "evaluations is left"),
        ("checkpoints/0001", lambda r: r.update(parent="0" * 64), "is not the checkpoint of turn 1"),
        ("closure", lambda r: r.update(closed=False), "do not follow from"),
        ("closure", lambda r: r.update(reason="wall_timeout", final_sha256=None), "is not the artifact"),
        ("closure", lambda r: r.update(evaluations=1), "counts other evaluations"),
        ("closure", lambda r: r.pop("bytes"), "lacks a field"),
        ("grade", lambda r: r["private"].update(equal=1.0), "do not follow from its cases"),
        ("grade", lambda r: r.update(private=fakes.score(0.1)), "knows something else"),
        ("grade", lambda r: r.update(artifact_sha256="0" * 64), "does not grade"),
        ("outcome", lambda r: r.update(status="failed", reason="grader_crash"), "grade.json"),
        ("outcome", lambda r: r.update(reason="because"), "do not follow from"),
        ("history/0001", lambda r: r.update(source=7), "another kind"),
    ],
)  # fmt: skip
def test_a_lie_with_a_perfect_chain_is_found_where_the_files_contradict_it(copy, short, change, words):
    trial = AGENT
    rechain(copy, trial, short, change)
    report = verify(copy)
    found = accused(report)
    assert words in found and not any(line.check == "chain" and line.subject == trial for line in report.of("fails")), (
        found
    )


def test_a_rewritten_grade_without_report_or_regrading_is_what_cannot_be_shown(copy):
    """The honest limit: a consistent rewriting holds, unless somebody kept the digest, and the text says so."""
    kept = verify(copy).evidence_sha256
    for folder in [copy / "reports", *copy.glob("restricted/*/regrade")]:
        shutil.rmtree(folder)
    trial = AGENT
    rechain(copy, trial, "grade", lambda r: r.update(private=fakes.score(0.1)))
    report = verify(copy)
    assert report.ok and [line for line in report.of("unknown") if line.check == "measurement"]
    assert not verify(copy, expected=kept).ok


def test_a_removed_outcome_looks_like_an_interruption_unless_something_remembers_it(copy):
    trial = AGENT
    (copy / "trials" / trial / "outcome.json").unlink()
    report = verify(copy)
    assert f"trials/{trial}/" in accused(report) and "figures" in {line.check for line in report.of("fails")}
    shutil.rmtree(copy / "reports")
    shutil.rmtree(copy / "restricted" / trial / "regrade")
    report = verify(copy)
    [line] = [line for line in report.of("unknown") if line.subject == trial]
    assert report.ok and "outcome.json was removed" in line.detail and "outcome_unknown" in line.detail


# --- the campaign as a whole ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "note.txt",
        "trials/note.txt",
        "restricted/inputs/x",
        "restricted/model/x.bin",
        "reports/x/y",
        f"trials/{UNCHANGED}/x.json",
    ],
)
def test_a_foreign_file_is_named(copy, name):
    (copy / name).parent.mkdir(parents=True, exist_ok=True)
    (copy / name).write_text("x")
    assert name in accused(verify(copy))


def test_a_link_is_no_file(copy, tmp_path):
    path = copy / "trials" / AGENT / "final.safetensors"
    shutil.move(path, tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert f"{path.relative_to(copy).as_posix()} is no regular file" in accused(verify(copy))
    path.unlink()
    shutil.move(tmp_path / "elsewhere", path)
    (copy / "trials" / "linked").symlink_to(tmp_path)
    assert "trials/linked is no regular file" in accused(verify(copy))


def test_open_rights_and_a_clock_set_back_are_doubts(copy):
    (copy / "manifest.json").chmod(0o644)
    trial = AGENT
    rechain(copy, trial, "dispatch", lambda r: r.update(written_at="2020-01-01T00:00:00Z"))
    for folder in [copy / "reports", *copy.glob("restricted/*/regrade")]:
        shutil.rmtree(folder)
    report = verify(copy)
    assert report.ok and {"rights", "campaign"} <= {
        line.subject for line in report.of("unknown") if line.check in ("files", "times")
    }


def test_other_source_is_a_doubt(copy, monkeypatch):
    monkeypatch.setattr(module, "package_digest", lambda *_: "e" * 64)
    report = verify(copy)
    assert report.ok and any("not the source" in line.detail for line in report.of("unknown"))
    picture = next(copy.rglob("effects.svg"))
    picture.write_text("<svg/>")
    assert picture.relative_to(copy).as_posix() in accused(verify(copy))


def test_what_was_never_prepared_and_what_moves_is_refused(copy, tmp_path):
    for place in (tmp_path / "nothing", tmp_path):
        with pytest.raises(StoreError, match="not a prepared campaign"):
            verify(place)
    with controller_lock(copy), pytest.raises(LockError, match="a controller works"):
        verify(copy)
    (copy / "manifest.json").unlink()
    assert accused(verify(copy)) == "seal: manifest.json is missing"


@pytest.mark.parametrize("trials", [0, 1, 2])
def test_an_unfinished_campaign_holds_with_doubts(fresh, trials):
    class Enough(Exception):
        pass

    seen: list = []

    def stop(row):
        seen.append(row)
        if len(seen) == trials:
            raise Enough

    if trials:
        with pytest.raises(Enough):
            run_campaign(fresh, backend=fakes.FakeBackend(), grader=fakes.FakeGrader(), on_progress=stop)
    report = verify(fresh)
    assert report.ok, accused(report)
    assert sum("not begun" in line.detail for line in report.of("unknown")) == 3 - trials


def late(artifact: Path) -> None:
    raise GraderTimeout("late")


@pytest.mark.parametrize(
    ("backend", "grader"),
    [
        ({"programs": {"agent": "die"}}, {}),
        ({"programs": {"agent": "hang"}}, {}),
        ({"programs": {"agent": "raise"}}, {}),
        ({"attests": False}, {}),
        ({"on_open": TimeoutError("x")}, {}),
        ({"on_export": TimeoutError("x")}, {}),
        ({"on_close": RuntimeError("x")}, {}),
        ({"programs": {"scripted": "raise"}}, {}),
        ({}, {"instead": late}),
        ({}, {"drift": 2.0**-40}),
        ({}, {"environment": {"threads": 2}}),
    ],
)
def test_every_way_to_fail_leaves_a_campaign_that_holds(fresh, backend, grader):
    run_campaign(fresh, backend=fakes.FakeBackend(**backend), grader=fakes.FakeGrader(**grader))
    report = verify(fresh)
    assert report.ok, accused(report)


def test_what_was_rejected_has_its_reason(fresh):
    run_campaign(fresh, backend=fakes.FakeBackend(programs={"agent": "set invalid"}), grader=fakes.FakeGrader())
    assert verify(fresh).ok
    (fresh / "restricted" / AGENT / "error.json").unlink()
    assert f"restricted/{AGENT}/error.json is missing" in accused(verify(fresh))


def test_a_blocked_trial_holds_and_a_wrongly_blocked_one_does_not(tmp_path, monkeypatch):
    for name in ("W8_MODEL", "W8_KEY"):
        monkeypatch.setenv(name, "x")
    policy = {"endpoint": "https://canary-endpoint.example/v1", "model_env": "W8_MODEL", "credential_env": "W8_KEY"}
    rates = {"build_usd": 0, "sandbox_hourly_usd": 0, "egress_per_gib": 0, "teacher_request_usd": 0.02}
    budget = {"max_usd": 0.07, "prior_reserved_usd": 0, "price_checked_on": "2026-11-30", "rates": rates}
    campaign = fakes.small(
        tmp_path, budget=budget, runtime={"backend": "local", "grader_python": sys.executable, "policy": policy}
    )
    root = campaign.layout.root
    run_campaign(root, backend=fakes.FakeBackend(), grader=fakes.FakeGrader())
    report = verify(root)
    assert report.ok and any("budget_blocked" in line.detail for line in report.findings), accused(report)
    edited(
        root / "trials" / "0002-scripted-suffix-01" / "outcome.json",
        lambda r: r.update(status="budget_blocked", reason="budget_exceeded", artifact_sha256=None, grade_sha256=None),
    )
    assert "the budget allowed this trial" in accused(verify(root)) and "was blocked before it" in accused(verify(root))


# --- the real thing ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_example_campaign_verifies_wholly(tmp_path):
    root = prepare(write_fixture(tmp_path / "fixture"), tmp_path / "campaign").root
    run_campaign(root)
    regrade(open_campaign(root))
    write_report(root)
    report = verify(root)
    assert report.ok and not [line for line in report.of("unknown") if line.check != "not shown"], accused(report)
