"""`recipes/debug_hf.yaml` trains two on-policy cycles with transformers models, without a network."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from miniverl.models.loading import load_backend
from miniverl.schemas.config import RunConfig
from miniverl.schemas.trajectory import read_trajectories
from miniverl.training.trainer import OPDTrainer

RECIPE = Path(__file__).parents[1] / "recipes" / "debug_hf.yaml"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    place = tmp_path_factory.mktemp("debug-hf")
    config = RunConfig.from_yaml(RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "create_connection", lambda *a, **k: pytest.fail("a connection was attempted"))
        with OPDTrainer(config, run_dir=place / "run", offline=True) as trainer:
            result = trainer.train()
    return config, place / "run", result


def test_two_cycles_two_steps(trained):
    config, run, result = trained
    assert config.is_on_policy and (result.global_step, result.cycles_completed) == (2, 2)
    played = list(read_trajectories(run / "trajectories.jsonl"))
    assert [t.policy_version for t in played] == [0] * 4 + [1] * 4
    assert all(t.model_id == "debug:tiny-llama?seed=1" and t.metadata.batch_size == 4 for t in played)


def test_every_generated_token_was_scored_by_the_teacher(trained):
    _, run, result = trained
    generated = sum(t.generated_token_count for t in read_trajectories(run / "trajectories.jsonl"))
    assert result.accounting["teacher_scored_positions_total"] == generated > 0
    assert result.cache["vocab_size"] == 384, "the width of the head, not of the tokenizer"


def test_only_lora_factors_are_saved_and_they_moved(trained):
    config, run, _ = trained
    saved = load_file(run / "checkpoints" / "final" / "adapter.safetensors")
    start = load_backend(config.models, "student", seed=config.run.seed, offline=True).trainable_parameters()
    assert saved.keys() == start.keys() and all("lora_" in name for name in saved)
    assert any(not torch.equal(saved[name], p.detach()) for name, p in start.items())


def test_the_run_names_no_place(trained):
    _, run, _ = trained
    manifest = json.loads((run / "manifest.json").read_text())
    assert str(run) not in json.dumps(manifest.get("models", {})) and "debug:tiny-llama?seed=2" in json.dumps(manifest)
