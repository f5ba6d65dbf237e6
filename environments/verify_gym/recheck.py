"""Decide every paid sample of a rollout log again, by the decider that the trainer didn't use.

    python recheck.py RUN/rollouts.jsonl [--exact]

One paid reward that the second decider doesn't give refuses the run: exit status 1, and a line for each such sample.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bridge import SecondDecider
from verify_gym.cli import run_safely, say
from verify_gym.rollouts import Recheck, recheck

SHOWN = 20


def report_text(report: Recheck) -> str:
    """The outcome, the log's digest, and what was refused."""
    lines = [report.line(), f"pool {report.header.pool} · log sha256 {report.sha256}"]
    lines += [f"sample {number}, {task_id}: {reason}" for number, task_id, reason in report.refusals[:SHOWN]]
    if len(report.refusals) > SHOWN:
        lines.append(f"... and {len(report.refusals) - SHOWN} more")
    return "\n".join(lines)


def check(log: Path, exact: bool) -> int:
    """Re-check a log and print the outcome."""
    with SecondDecider(exact=exact) as second:
        report = recheck(log, second.decide)
    say(report_text(report))
    return 0 if report.confirmed else 1


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Decide every paid sample of a rollout log again.")
    parser.add_argument("log", type=Path, help="a log written with verify_gym.rollouts")
    parser.add_argument("--exact", action="store_true", help="whole powers instead of fixed-point logarithms for xx")
    options = parser.parse_args(argv)
    return run_safely(lambda: check(options.log, options.exact))


if __name__ == "__main__":
    sys.exit(main())
