"""What the scripts share that ask a model: their options, the folder of a run, and the order of the steps.

Before the first call everything is tried that could refuse the result afterwards: the gate, and the second decider.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from bridge import SecondDecider
from verify_gym.answer import Task
from verify_gym.curriculum import curriculum_sha256
from verify_gym.endpoint import CallError, Endpoint, ask, collect, make_plan
from verify_gym.exact import VerifyGymError
from verify_gym.gate import require_green
from verify_gym.rollouts import Header, Sample, read_log

LOG = "rollouts.jsonl"


def whole_number(text: str) -> int:
    """A positive whole number, as an argument."""
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and int(text)):
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is no positive whole number")
    return int(text)


def temperature(text: str) -> float:
    """A temperature, as an argument."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 100:
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is no temperature")
    return value


def endpoint_options(parser: argparse.ArgumentParser, *, required: bool) -> argparse.ArgumentParser:
    """Which model is asked, and how."""
    group = parser.add_argument_group("the model (costs money)")
    group.add_argument("--endpoint", required=required, metavar="URL", help="http://HOST:PORT/v1, OpenAI-compatible")
    group.add_argument("--model", required=required, metavar="ID", help="the id that the server knows")
    group.add_argument("--max-tokens", type=whole_number, required=required, metavar="N", help="the token limit")
    group.add_argument("--out", type=Path, required=required, metavar="RUN", help="the folder of this run")
    group.add_argument("--temperature", type=temperature, metavar="T", help="left to the server unless given")
    group.add_argument("--api-key-var", default="OPENAI_API_KEY", metavar="VAR", help="the variable that holds the key")
    group.add_argument("--workers", type=whole_number, default=8, metavar="N", help="calls at the same time (8)")
    return parser


def endpoint_of(options: argparse.Namespace) -> Endpoint:
    """The endpoint that the options name; the key comes from the environment."""
    key = os.environ.get(options.api_key_var) or None
    return Endpoint(options.endpoint, options.model, options.max_tokens, options.temperature, key)


def make_header(log: Path, pool: str, about: dict[str, Any]) -> Header:
    """The header of a run: a run that is continued keeps the date on which it was begun."""
    date = datetime.date.today().isoformat()
    if log.exists() and b"\n" in log.read_bytes():
        begun = next(read_log(log))
        date = begun.about.get("date", date)
    return Header(pool, {**about, "date": date})


def collect_run(options: argparse.Namespace, pool: str, tasks: Sequence[Task], samples: int) -> list[Sample]:
    """Ask for what the run's folder lacks, and return all of it.

    Raises
    ------
    VerifyGymError : a call failed; says how many replies are recorded
    """
    endpoint, log = endpoint_of(options), options.out / LOG
    header, plan = make_header(log, pool, {**endpoint.about(), "samples": samples}), make_plan(tasks, samples)
    try:
        return collect(log, header, plan, lambda text: ask(endpoint, text), options.workers)
    except CallError as error:
        have = sum(isinstance(line, Sample) for line in read_log(log))
        hint = f"no result: {have} of {len(plan)} replies are recorded; the same command makes the missing calls"
        raise VerifyGymError(error.message, hint) from None


def prepare() -> list[str]:
    """Refuse now what would be refused afterwards: a red gate, a second decider that can't be asked."""
    report = require_green()
    with SecondDecider() as second:
        second.decide([])
    return [report.line(), report.extra_line()]


def run_facts(out: Path, gate: Sequence[str]) -> dict[str, Any]:
    """What every result says of the run it comes from."""
    log = out / LOG
    header = next(read_log(log))
    return {
        **{key: header.about[key] for key in ("model", "date", "max_tokens", "temperature", "samples")},
        "pool": header.pool,
        "curriculum_sha256": curriculum_sha256(),
        "log": LOG,
        "log_sha256": sha256(log.read_bytes()).hexdigest(),
        "gate": list(gate),
    }


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write a result in one step."""
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    os.replace(fresh, path)
