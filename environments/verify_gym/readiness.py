"""GO or NO-GO: is a model in reach of the reward, before a training step is paid for?

    python readiness.py --dry-run mix
    python readiness.py --endpoint http://HOST:PORT/v1 --model ID --max-tokens N --out RUN      (costs money)

The first 100 tasks of the validation rotation, 8 samples each, graded by both deciders. GO if rewards differ within at least
30 % of the groups and the mean reward is from 0.02 to 0.80. Every reply is recorded in RUN/rollouts.jsonl, the verdict in
RUN/readiness.json. A failed call ends the run with no verdict, and the same command goes on where it stopped.

Exit status: 0 GO, 3 NO-GO, 1 no verdict, 2 a command that can't be read.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from bridge import SecondDecider
from live import collect_run, endpoint_options, prepare, run_facts, write_result
from verify_gym.cli import run_safely, say
from verify_gym.endpoint import make_plan
from verify_gym.readiness import DRY_RUNS, SAMPLES, Readiness, assess, dry_samples, readiness_tasks

NO_GO = 3


def facts(found: Readiness) -> dict[str, Any]:
    """A verdict as JSON; the mean is exact."""
    return {
        "verdict": "GO" if found.go else "NO-GO",
        "reasons": list(found.reasons),
        "groups": found.groups,
        "differing": found.differing,
        "replies": found.samples,
        "mean": f"{found.mean.numerator}/{found.mean.denominator}",
    }


def dry(name: str) -> int:
    """The verdict on reference policies."""
    prepare()
    plan = make_plan(readiness_tasks(), SAMPLES)
    with SecondDecider() as second:
        found = assess(plan, dry_samples(name, plan), second.decide)
    say(f"dry run {name} · {found.line()}")
    return 0 if found.go else NO_GO


def live(options: argparse.Namespace) -> int:
    """The verdict on a model."""
    gate, tasks, result = prepare(), readiness_tasks(), options.out / "readiness.json"
    result.unlink(missing_ok=True)  # while calls are missing there is no verdict
    samples = collect_run(options, "validation", tasks, SAMPLES)
    with SecondDecider() as second:
        found = assess(make_plan(tasks, SAMPLES), samples, second.decide)
    write_result(result, {**run_facts(options.out, gate), **facts(found)})
    say(f"{options.model} · {found.line()}")
    return 0 if found.go else NO_GO


def read_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options, which name either a dry run or all of a model."""
    parser = argparse.ArgumentParser(description="GO or NO-GO before a training run.")
    parser.add_argument("--dry-run", choices=DRY_RUNS, help="no model: replies of reference policies")
    options = endpoint_options(parser, required=False).parse_args(argv)
    given = [bool(value) for value in (options.endpoint, options.model, options.max_tokens, options.out)]
    if options.dry_run and any(given):
        parser.error("a dry run asks no model: leave out --endpoint, --model, --max-tokens and --out")
    if not options.dry_run and not all(given):
        parser.error("give --dry-run NAME, or all of --endpoint, --model, --max-tokens and --out")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    options = read_options(argv)
    return run_safely(lambda: dry(options.dry_run) if options.dry_run else live(options))


if __name__ == "__main__":
    sys.exit(main())
