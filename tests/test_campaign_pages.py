"""The page about campaigns says what must not be misunderstood, and knows the fields and statuses that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from miniverl.campaign.config_sections import Limits
from miniverl.campaign.records import OUTCOMES
from miniverl.campaign.sandbox import LEVELS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "editing.md"
TEXT = " ".join(PAGE.read_text(encoding="utf-8").split()).replace("**", "")
MUST_SAY = [
    "hashes detect inconsistency; they do not authenticate evidence against a malicious owner of the host",
    "Actual billing is unknown and unreconciled",
    "Zero local reservations do not imply a free hosted service",
    "SDK framing, in-flight network buffers and provider billing are not hard-capped",
    "Live provisioning, proxy requests, provider cleanup, data suitability and efficacy are separate verification steps"
    " that require an explicitly funded pilot",
    "Evaluations inside a program are not counted",
    "Preflight does not prove that a script is deterministic",
    "cannot establish that private data stayed private",
    "Reaching the floors says nothing about statistical power",
    "The commands are experimental",
]


@pytest.mark.parametrize("sentence", MUST_SAY)
def test_the_page_says_what_must_not_be_misunderstood(sentence):
    assert sentence in TEXT


def test_the_page_lists_every_status_and_level_and_no_other():
    page = PAGE.read_text(encoding="utf-8")
    assert re.findall(r"(?m)^\| `(\w+)` \|", page) == list(OUTCOMES)
    assert re.findall(r"(?m)^\| (\d) \| (\w+) \|", page) == [(str(i), name) for i, name in enumerate(LEVELS)]
    assert {"turns", "evaluations", "command_seconds", "wall_seconds"} <= set(Limits.model_fields)


def test_links_lead_to_chapters():
    for name in re.findall(r"\]\(\.\./(nbs/[^)]+)\)", PAGE.read_text(encoding="utf-8")):
        assert (PAGE.parents[1] / name).is_file(), name
