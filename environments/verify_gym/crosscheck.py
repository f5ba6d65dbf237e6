"""Decide every held-out answer twice, and say where the two deciders differ.

    python crosscheck.py [--exact] [--decider FILE.js]

The answers: every reference policy on the frozen held-out set, every forgery and green control planted there, and the extra
control rows. Compared: the verdict, the word of each side, the decimals and the progress. One difference is exit status 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bridge import CHECK, Question, SecondDecider
from verify_gym.answer import grade
from verify_gym.cli import run_safely, say
from verify_gym.conformance import conformance_cases, judged
from verify_gym.curriculum import heldout
from verify_gym.exact import VerifyGymError
from verify_gym.policies import POLICIES, run_policy


class Asked(NamedTuple):
    """A named question."""

    name: str
    question: Question


class Difference(NamedTuple):
    """A question that the deciders answer differently."""

    name: str
    package: dict[str, Any]
    second: dict[str, Any]


def policy_answers() -> list[Asked]:
    """What the reference policies reply on the held-out set."""
    rows = heldout()
    return [
        Asked(f"policy/{name}/{task.task_id}", Question(task, reply))
        for name in POLICIES
        for task, reply in zip(rows, run_policy(name, rows), strict=True)
    ]


def control_answers() -> list[Asked]:
    """What the gate plants: the cases of the conformance suite."""
    cases = conformance_cases()
    return [
        Asked(case.name, Question(case.control.task, case.control.planted.reply, case.control.truncated))
        for case in cases
    ]


def differences(asked: Iterable[Asked], second: SecondDecider) -> list[Difference]:
    """Ask both deciders; a row fault is the same in both whatever its reason."""
    listed = list(asked)
    found = []
    for (name, question), answer in zip(listed, second.decide(item.question for item in listed), strict=True):
        mine = judged(*question, grade)
        other = {"error": True} if "error" in answer else answer
        if mine != other:
            found.append(Difference(name, mine, other))
    return found


class Crosscheck(NamedTuple):
    """The outcome: how many answers of each kind were decided twice, and where that gave two grades."""

    policies: int
    controls: int
    differences: list[Difference]

    def line(self) -> str:
        """One line for people."""
        kinds = f"{self.policies} of policies, {self.controls} of the gate"
        return f"{self.policies + self.controls} answers decided twice ({kinds}) · {len(self.differences)} differences"


def crosscheck(*, exact: bool = False, program: Path = CHECK) -> Crosscheck:
    """Decide every held-out answer twice."""
    policies, controls = policy_answers(), control_answers()
    with SecondDecider(exact=exact, program=program) as second:
        return Crosscheck(len(policies), len(controls), differences([*policies, *controls], second))


def require_agreement(found: Crosscheck) -> Crosscheck:
    """Return a crosscheck without differences, or refuse to go on."""
    if found.differences:
        name, mine, other = found.differences[0]
        raise VerifyGymError(
            f"{found.line()}: no number is reported", f"{name}: the package says {mine}, the second {other}"
        )
    return found


def arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Which second decider is asked, and how."""
    parser.add_argument("--exact", action="store_true", help="whole powers instead of fixed-point logarithms for xx")
    parser.add_argument("--decider", type=Path, default=CHECK, help="another program that speaks the same protocol")
    return parser


def check(exact: bool, program: Path) -> int:
    """Print the outcome, if it's one without differences."""
    say(require_agreement(crosscheck(exact=exact, program=program)).line())
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    chosen = arguments(argparse.ArgumentParser(description="Decide every held-out answer twice.")).parse_args(argv)
    return run_safely(lambda: check(chosen.exact, chosen.decider))


if __name__ == "__main__":
    sys.exit(main())
