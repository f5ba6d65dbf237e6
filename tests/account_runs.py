"""Finished runs of every mode, each a fraction of a second, made once for all tests that account for them."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training_helpers import tiny

from miniverl.evaluation.account import arm_result
from miniverl.evaluation.design import leaf_diff
from miniverl.evaluation.schema import ArmResult, ArmSpec
from miniverl.schemas.config import RunConfig, deep_merge
from miniverl.store import RunDir
from miniverl.training.checkpoints import latest_checkpoint
from miniverl.training.trainer import OPDTrainer

MODES: dict[str, dict[str, Any]] = {
    "sft": {"run": {"mode": "sft"}},
    "offline": {"run": {"mode": "offline_kd"}, "cache": {"reuse_across_policy_versions": True}},
    "opd": {"train": {"sft_warmup_cycles": 1}},
    "exact": {
        "loss": {"mode": "exact_full_vocab", "top_k": 1},
        "cache": {"dtype": "float32"},
        "eval": {"enabled": False},
    },
    "zero": {"run": {"mode": "sft"}, "train": {"cycles": 0}, "eval": {"enabled": False}},
}


@dataclass(frozen=True)
class Made:
    """A finished run, the two configurations of its arm, its evaluation, and the checkpoint it started from."""

    run: RunDir
    common: RunConfig
    declared: RunConfig
    evaluation: dict[str, Any]
    initial: dict[str, Any] | None


@functools.cache
def made() -> dict[str, Made]:
    """All runs; those of `zero` start from the weights of `sft`."""
    folder = Path(tempfile.mkdtemp(prefix="account-"))
    plain = {
        "run": {"run_id": None},
        "train": {"sft_warmup_cycles": 0},
        "selection": {"max_positions_per_trajectory": 9},
    }
    common = RunConfig.from_mapping(deep_merge(tiny(folder).to_mapping(), plain))
    return {name: _make(folder, name, common, over) for name, over in MODES.items()}


def _make(folder: Path, name: str, common: RunConfig, over: dict[str, Any]) -> Made:
    forced = {"run": {"name": f"bench-{name}-s5"}, "report": {"enabled": False}}
    declared = RunConfig.from_mapping(deep_merge(deep_merge(common.to_mapping(), over), forced))
    initial = None
    with OPDTrainer(declared, run_dir=folder / name) as trainer:
        if name == "zero":
            found = latest_checkpoint(folder / "sft" / "checkpoints")
            assert found is not None
            initial = trainer.load_weights(found.path).to_record()
        trainer.train()
        evaluation = trainer.evaluate("test", None, f"benchmark-{name}")
    return Made(RunDir(folder / name), common, declared, evaluation, initial)


def row_of(item: Made, **changes: Any) -> ArmResult:
    """The row of a finished run."""
    given: dict[str, Any] = {
        "arm": ArmSpec(name=item.run.path.name, description="an arm"),
        "seed": 5,
        "common": item.common,
        "declared": item.declared,
        "diff": leaf_diff(item.common.to_mapping(), item.declared.to_mapping()),
        "evaluation": item.evaluation,
        "initial": item.initial,
    }
    return arm_result(changes.pop("run", item.run), **{**given, **changes})
