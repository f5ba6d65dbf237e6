"""Kill the controller before every durable call of a campaign; start another one; see that nothing is invented or done twice."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import campaign_fakes as fakes
import pytest
from crash import KILLED, killed_at

from miniverl.campaign import controller
from miniverl.campaign.controller import campaign_status, crash_matrix_table, run_campaign
from miniverl.campaign.evidence import completed_evidence, verify_chain
from miniverl.campaign.grading import regrade
from miniverl.campaign.manifest import open_campaign
from miniverl.campaign.records import TEMP
from miniverl.core import StoreError, sha256_file

CALLS = ("fsync", "link", "unlink", "mkdir")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A sealed campaign of three trials, whose agent edits once."""
    made = fakes.small(tmp_path_factory.mktemp("base"), agent=["set 2.5"])
    return made.layout.root


@pytest.fixture
def place(tmp_path):
    """A folder in memory where there is one: what is killed is the process, and a sync costs nothing there."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as folder:
        yield Path(folder)


@pytest.fixture(autouse=True)
def same_code(monkeypatch):
    monkeypatch.setattr(controller, "require_same_code", lambda campaign: None)  # hashes the package at every start


@pytest.fixture(autouse=True)
def own_temp(tmp_path, monkeypatch):
    (tmp_path / "temp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temp"))


def work(root: Path):
    def run(say):
        tell = lambda text: say(text + "\n")  # noqa: E731
        run_campaign(root, backend=fakes.FakeBackend(tell), grader=fakes.FakeGrader(tell))

    return run


def digests(root: Path, pattern: str) -> dict[str, str]:
    return {path.relative_to(root).as_posix(): sha256_file(path) for path in root.rglob(pattern)}


def matrix() -> dict[str, list[str]]:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in crash_matrix_table().splitlines()[2:]]
    return {row[0]: row[1:] for row in rows}


def named(root: Path) -> dict[str, str]:
    """Every file that has its name, without what is half-written."""
    return {name: sha for name, sha in digests(root, "*.*").items() if TEMP not in name and not name.startswith(".")}


def check(root: Path, limit: int, observed: Counter) -> bool:
    """One death and one restart; False when the campaign ended before the death."""
    code, said, _ = killed_at(limit, work(root), CALLS)
    if code != KILLED:
        assert code == 0
        return False
    campaign, told, before = open_campaign(root), matrix(), named(root)
    found = campaign_status(root).rows
    reserved = digests(root, "reservation.json")
    second: list[str] = []
    after = run_campaign(root, backend=fakes.FakeBackend(second.append), grader=fakes.FakeGrader(second.append))
    for was, now in zip(found, after.rows, strict=True):
        status, charged, act = told[was.evidence]
        kept = f"trials/{was.trial}/reservation.json" in reserved
        assert was.status == (status if was.evidence != "outcome" else "completed") and kept == charged.startswith(
            "yes"
        )
        assert act.startswith("runs" if (was.evidence, was.status) != (now.evidence, now.status) else "skips")
        observed[was.evidence] += 1
    opened = [line for line in (*said.splitlines(), *second) if line.startswith("open")]
    assert len(opened) == len(set(opened)), "an editor was opened twice for one trial"
    assert after.finished and {row.status for row in after.rows} <= {"completed", "outcome_unknown"}
    assert sum(row.status == "outcome_unknown" for row in after.rows) <= 1, "one death, one unknown at most"
    now = named(root)
    assert all(now.get(name) == sha for name, sha in before.items()), "a named file was rewritten"
    for row in after.rows:
        assert (row.status == "completed") == (campaign.layout.trial(row.trial).outcome.exists())
        verify_chain(campaign.layout, campaign.manifest_sha256, row.trial)
        if row.status == "completed":
            completed_evidence(campaign.layout, campaign.manifest_sha256, row.trial)
    assert not list(root.rglob(f"{TEMP}*")) and not list(Path(tempfile.gettempdir()).iterdir())
    return True


def test_a_controller_that_is_killed_before_every_durable_call(base, place):
    observed: Counter = Counter()
    limit = 0
    while True:
        limit += 1
        root = place / "campaign"
        shutil.copytree(base, root)
        if not check(root, limit, observed):
            break
        shutil.rmtree(root)
    assert limit > 80 and set(observed) == set(matrix()), "every line of the published matrix was seen"


def test_a_second_death_changes_nothing_of_the_first(base, tmp_path):
    """Killed in one trial, and again in a later one: both stay unknown, the rest completes."""
    deaths = 0
    for first, second in ((50, 50), (60, 20), (80, 20)):
        root = tmp_path / f"{first}-{second}"
        shutil.copytree(base, root)
        events = []
        for limit in (first, second):
            code, said, _ = killed_at(limit, work(root), CALLS)
            deaths += code == KILLED
            events += [line for line in said.splitlines() if line.startswith("open")]
        status = run_campaign(root, backend=fakes.FakeBackend(events.append), grader=fakes.FakeGrader())
        opened = [line for line in events if line.startswith("open")]
        assert len(opened) == len(set(opened)) and status.finished
    assert deaths >= 4


def test_a_recovered_artifact_is_inspected_and_never_counted(base, tmp_path):
    """Killed between grade and outcome: the receipt exists, the trial stays unknown, also after a regrade."""
    root = tmp_path / "campaign"
    shutil.copytree(base, root)
    limit = killed_at(None, work(root), CALLS)[2]
    while campaign_status(root).rows[2].evidence != "grade":
        shutil.rmtree(root)
        shutil.copytree(base, root)
        assert killed_at(limit, work(root), CALLS)[0] == KILLED
        limit -= 1
    status = run_campaign(root, backend=fakes.FakeBackend(), grader=fakes.FakeGrader())
    campaign = open_campaign(root)
    before = digests(root, "outcome.json")
    report = regrade(campaign, client=fakes.FakeGrader())
    assert [line.verdict for line in report.rows] == ["equal", "equal", "inspection only"] and report.ok
    assert digests(root, "outcome.json") == before and campaign_status(root) == status
    assert status.counts == {"completed": 2, "outcome_unknown": 1}


def test_a_campaign_without_a_seal_was_never_prepared(base, tmp_path):
    root = tmp_path / "campaign"
    shutil.copytree(base, root)
    (root / "seal.json").unlink()
    with pytest.raises(StoreError, match="not a prepared campaign"):
        run_campaign(root, backend=fakes.FakeBackend(), grader=fakes.FakeGrader())
