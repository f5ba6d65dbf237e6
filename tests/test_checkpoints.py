"""A checkpoint is the old one or the new one, whenever the process dies."""

from __future__ import annotations

import pytest
import torch
from crash import KILLED, killed_at

from miniverl.core import CheckpointError
from miniverl.models.toy import ToyBackend
from miniverl.schemas.config import ToyShape
from miniverl.training.checkpoints import (
    latest_checkpoint,
    load_checkpoint,
    recover_checkpoints,
    save_checkpoint,
    verify_checkpoint,
)
from miniverl.training.optim import AdamW


def student(seed: int):
    backend = ToyBackend.build(
        ToyShape(hidden_size=8, num_layers=1, num_heads=1, intermediate_size=8, max_position_embeddings=16), seed=seed
    )
    return backend, AdamW(backend.trainable_parameters())


def state(step: int, **record) -> dict:
    return {"global_step": step, "parameter_version": step, "cycle": step, "record": record}


def test_replacing_a_checkpoint_survives_a_kill_at_every_durable_call(tmp_path):
    backend, optimizer = student(1)
    old = save_checkpoint(tmp_path, "rolling", backend=backend, optimizer=optimizer, state=state(1)).weights_digest
    with torch.no_grad():
        backend.head()[0].add_(1.0)
    seen, n = set(), 0
    while True:
        n += 1
        code, _, _ = killed_at(
            n, lambda _: save_checkpoint(tmp_path, "rolling", backend=backend, optimizer=optimizer, state=state(2))
        )
        assert code in (0, KILLED)
        reader = latest_checkpoint(tmp_path)
        recover_checkpoints(tmp_path)
        found = latest_checkpoint(tmp_path)
        assert found is not None and reader.weights_digest == found.weights_digest, (
            "readers and the next writer see the same"
        )
        assert sorted(p.name for p in tmp_path.iterdir()) == ["rolling"]
        seen.add((found.global_step, found.weights_digest == old))
        if code == 0:
            break
        fresh, fresh_optimizer = student(1)
        save_checkpoint(tmp_path, "rolling", backend=fresh, optimizer=fresh_optimizer, state=state(1))
    assert seen == {(1, True), (2, False)} and n > 8


def test_every_flipped_byte_of_the_small_files_is_noticed(tmp_path):
    backend, optimizer = student(2)
    saved = save_checkpoint(tmp_path, "final", backend=backend, optimizer=optimizer, state=state(3))
    verify_checkpoint(saved.path)
    for name in ("state.json", "checkpoint.json", "adapter.safetensors"):
        data = (saved.path / name).read_bytes()
        for at in range(0, len(data), max(1, len(data) // 60)):
            broken = bytearray(data)
            broken[at] ^= 0x08
            (saved.path / name).write_bytes(bytes(broken))
            if name == "checkpoint.json" and b"created_at" in data[max(0, at - 40) : at + 40]:
                continue
            with pytest.raises(CheckpointError):
                verify_checkpoint(saved.path)
        (saved.path / name).write_bytes(data)
    verify_checkpoint(saved.path)


def test_a_failed_load_changes_nothing(tmp_path):
    backend, optimizer = student(3)
    saved = save_checkpoint(tmp_path, "final", backend=backend, optimizer=optimizer, state=state(3))
    (saved.path / "optimizer.safetensors").write_bytes(b"")
    other, other_optimizer = student(4)
    before = {name: p.detach().clone() for name, p in other.trainable_parameters().items()}
    with pytest.raises(CheckpointError, match="optimizer.safetensors is damaged"):
        load_checkpoint(saved.path, backend=other, optimizer=other_optimizer)
    assert all(torch.equal(p, before[n]) for n, p in other.trainable_parameters().items())
