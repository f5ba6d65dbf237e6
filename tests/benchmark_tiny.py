"""A benchmark so small that all of it takes about a second."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from training_helpers import SHAPE

from miniverl.evaluation.schema import BenchmarkResult, without_times
from miniverl.evaluation.spec import BenchmarkConfig

BASE: dict[str, Any] = {
    "run": {"name": "tiny", "seed": 5, "mode": "opd"},
    "models": {
        "device": "cpu",
        "student": {"model_id": "toy-student", "toy": SHAPE},
        "teacher": {"model_id": "toy-teacher", "toy": SHAPE, "toy_pretrain_steps": 4, "toy_pretrain_batch": 4},
    },
    "environment": {
        "name": "calculator",
        "train_tasks": 6,
        "eval_tasks": 2,
        "test_tasks": 2,
        "params": {"prompt_style": "compact"},
    },
    "rollout": {"max_turns": 2, "max_new_tokens_per_turn": 6, "max_total_tokens": 200, "batch_size": 4},
    "loss": {"top_k": 4},
    "eval": {"enabled": False},
    "train": {
        "cycles": 2,
        "rollouts_per_cycle": 2,
        "gradient_accumulation_steps": 2,
        "sft_warmup_cycles": 0,
        "learning_rate": 3e-3,
    },
}
ZERO = {"name": "start", "overrides": {"run": {"mode": "sft"}, "train": {"cycles": 0}}}
SFT = {"name": "sft", "overrides": {"run": {"mode": "sft"}}}
OPD = {"name": "opd", "overrides": {}}
ALLOWED = ["run.mode", "train.cycles"]


def mapping(**over: Any) -> dict[str, Any]:
    """A supervised and an on-policy arm after two supervised cycles, one seed, unless `over` says otherwise."""
    return {
        "schema_version": 2,
        "name": "tiny",
        "base": BASE,
        "cold_start_cycles": 2,
        "allowed_differences": ALLOWED,
        "seeds": [5],
        "arms": [SFT, OPD],
        **over,
    }


def tiny_benchmark(**over: Any) -> BenchmarkConfig:
    """The benchmark of `mapping`."""
    return BenchmarkConfig.from_mapping(mapping(**over))


def timeless(result: BenchmarkResult | Path) -> dict[str, Any]:
    """A result, or the file of one, without what depends on the clock."""
    data = json.loads(result.read_text()) if isinstance(result, Path) else json.loads(result.to_json())
    return without_times(data)


@contextmanager
def little_garbage() -> Iterator[None]:
    """Everything that exists now is no garbage: the collections between units, most of a tiny run's time, become cheap."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
