"""A recipe so small that a whole run takes a fraction of a second."""

from __future__ import annotations

import json
from pathlib import Path

from miniverl.schemas.config import RunConfig
from miniverl.training.accounting import without_time

SHAPE = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "intermediate_size": 16, "max_position_embeddings": 256}


def tiny(folder, name: str = "run", **sections) -> RunConfig:
    """Two warm-up cycles and three cycles of on-policy distillation, unless `sections` say otherwise."""
    base = {
        "run": {"name": "tiny", "output_dir": str(folder), "run_id": name, "seed": 5},
        "models": {
            "device": "cpu",
            "student": {"model_id": "toy-student", "toy": SHAPE},
            "teacher": {"model_id": "toy-teacher", "toy": SHAPE, "toy_pretrain_steps": 6, "toy_pretrain_batch": 4},
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
        "train": {
            "cycles": 3,
            "rollouts_per_cycle": 3,
            "gradient_accumulation_steps": 3,
            "sft_warmup_cycles": 2,
            "learning_rate": 3e-3,
        },
    }
    for key, values in sections.items():
        base[key] = {**base.get(key, {}), **values}
    mode = base["run"].get("mode", "opd")
    if mode == "offline_kd":
        base["cache"] = {"reuse_across_policy_versions": True, **base.get("cache", {})}
    if mode == "sft":
        base["train"]["sft_warmup_cycles"] = 0
    return RunConfig.from_mapping(base)


def lines(path: Path) -> list[dict]:
    """Records of a JSON Lines file without anything that depends on the clock."""
    return [without_time(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def tree(path: Path) -> dict[str, bytes]:
    """Every file below `path` with its bytes."""
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}
