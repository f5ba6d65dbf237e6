"""Write the score card of the reference policies, if the gate is green and the two deciders agree on everything.

    python scorecard.py [--check] [--fast] [--out FILE]

The same bytes come out every time. With --check nothing is written: the file must already hold them. A red gate or one
difference between the deciders refuses the card, and a card that was there before stays as it was.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bridge import CHECK
from crosscheck import Crosscheck, crosscheck, require_agreement
from verify_gym.cli import run_safely, say
from verify_gym.curriculum import curriculum_sha256, entry
from verify_gym.exact import VerifyGymError
from verify_gym.gate import require_green
from verify_gym.policies import score_card, score_table

CARD = Path(__file__).resolve().with_name("scorecard.json")


def make_card(found: Crosscheck) -> dict[str, Any]:
    """The card: what was checked first, then the numbers."""
    gate = require_green()
    return {
        "format": "verify-gym scorecard 1",
        "curriculum_sha256": curriculum_sha256(),
        "heldout_sha256": entry("heldout/v0").body["sha256"],
        "gate": [gate.line(), gate.extra_line()],
        "decided_twice": {
            "policies": found.policies,
            "controls": found.controls,
            "differences": len(found.differences),
        },
        **score_card(),
    }


def card_text(card: dict[str, Any]) -> str:
    """The file's one spelling."""
    return json.dumps(card, indent=1, ensure_ascii=False) + "\n"


def deliver(out: Path, check: bool, exact: bool, program: Path) -> int:
    """Make the card and write it, or compare it with the file."""
    found = require_agreement(crosscheck(exact=exact, program=program))
    card = make_card(found)
    text = card_text(card)
    if check and (not out.exists() or out.read_text(encoding="utf-8") != text):
        raise VerifyGymError(
            f"{out.name} isn't the score card of this code", "run scorecard.py and look at what changed"
        )
    if not check:
        out.write_text(text, encoding="utf-8")
    say("\n".join([*card["gate"], found.line(), "", score_table(card)]))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Write the score card of the reference policies.")
    parser.add_argument("--check", action="store_true", help="write nothing, compare with the file")
    parser.add_argument(
        "--fast", action="store_true", help="fixed-point logarithms in the second decider, not whole powers"
    )
    parser.add_argument("--out", type=Path, default=CARD, help="the file (default: scorecard.json beside this program)")
    parser.add_argument("--decider", type=Path, default=CHECK, help="another second decider with the same protocol")
    chosen = parser.parse_args(argv)
    return run_safely(lambda: deliver(chosen.out, chosen.check, not chosen.fast, chosen.decider))


if __name__ == "__main__":
    sys.exit(main())
