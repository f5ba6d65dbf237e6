"""One row of the score table for one model: the frozen held-out set, every reply stored, every answer decided twice.

    python modelrow.py --endpoint http://HOST:PORT/v1 --model ID --max-tokens N --out RUN      (costs money)

Writes RUN/rollouts.jsonl with every reply and RUN/row.json with the row: the model's id, the sampling, the date, the digest of
the log and the numbers. A failed call ends the run without a row, and the same command goes on where it stopped. A row made
with tools, or with other prompts, would be another row: this program has neither.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from bridge import SecondDecider
from live import collect_run, endpoint_options, prepare, run_facts, whole_number, write_result
from verify_gym.answer import Task, grade
from verify_gym.cli import run_safely, say
from verify_gym.curriculum import entry, heldout
from verify_gym.endpoint import make_plan
from verify_gym.policies import score_grades, score_table
from verify_gym.readiness import decide_twice
from verify_gym.rollouts import Sample

HELDOUT = "v0"


def score(plan: Sequence[Task], samples: Sequence[Sample]) -> dict[str, Any]:
    """The numbers of a row, refused where the two deciders differ on an answer."""
    with SecondDecider() as second:
        decide_twice(plan, samples, second.decide)
    return score_grades(plan, [grade(t, s.reply, truncated=s.truncated) for t, s in zip(plan, samples, strict=True)])


def make_row(options: argparse.Namespace) -> int:
    """Collect the replies, score them, write the row."""
    gate, tasks, result = prepare(), heldout(HELDOUT), options.out / "row.json"
    result.unlink(missing_ok=True)
    samples = collect_run(options, f"heldout-{HELDOUT}", tasks, options.samples)
    numbers = score(make_plan(tasks, options.samples), samples)
    row = {
        "format": "verify-gym model row 1",
        **run_facts(options.out, gate),
        "heldout_sha256": entry(f"heldout/{HELDOUT}").body["sha256"],
        "truncated": sum(sample.truncated for sample in samples),
        **numbers,
    }
    write_result(result, row)
    say(score_table({"policies": {options.model: numbers}}))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="One row of the score table for one model.")
    parser.add_argument("--samples", type=whole_number, default=1, metavar="N", help="replies a task (1)")
    options = endpoint_options(parser, required=True).parse_args(argv)
    return run_safely(lambda: make_row(options))


if __name__ == "__main__":
    sys.exit(main())
