"""Teacher scoring and the fitted toy teacher, together with the cache and across processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from miniverl.agent.episode import oracle_trajectory
from miniverl.cache.store import TeacherCache, validate_cache
from miniverl.core import StaleCacheError
from miniverl.environments.calculator import Calculator
from miniverl.models.tokenizers import ToyTokenizer
from miniverl.models.toy import ToyBackend
from miniverl.schemas.cache import CacheIdentity
from miniverl.schemas.config import RunConfig, SelectionSection, ToyShape
from miniverl.selection.selectors import select
from miniverl.teachers.scoring import score_trajectories
from miniverl.teachers.toy import fit_toy_teacher

SHAPE = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "intermediate_size": 32}


@pytest.fixture(scope="module")
def world():
    calculator, tokenizer = Calculator({"prompt_style": "compact"}), ToyTokenizer()
    levels = ("easy", "medium", "hard")
    tasks = [calculator.generate_task(i, 11, levels[i % 3], "train") for i in range(9)]
    traces = [
        oracle_trajectory(calculator, t, tokenizer, trajectory_id=f"{t.task_id}:v5", policy_version=5) for t in tasks
    ]
    return traces, ToyBackend.build(ToyShape(**SHAPE), tokenizer, seed=2)


def identity(teacher, **changes) -> CacheIdentity:
    base = {
        "teacher_model_id": "toy",
        "tokenizer_fingerprint": teacher.tokenizer.fingerprint,
        "vocab_size": teacher.vocab_size,
        "top_k": 16,
        "temperature": 1.5,
    }
    return CacheIdentity(**(base | changes))


def config(**teacher) -> RunConfig:
    fit = {"model_id": "toy", "toy": SHAPE, "toy_pretrain_steps": 4, "toy_pretrain_batch": 4}
    return RunConfig.from_mapping(
        {
            "run": {"name": "t", "mode": "opd"},
            "environment": {"name": "calculator"},
            "models": {"device": "cpu", "student": {"model_id": "toy"}, "teacher": fit | teacher},
        }
    )


def test_what_is_scored_is_what_the_cache_gives_back(world, tmp_path):
    traces, teacher = world
    chosen = [select(t, SelectionSection(selector="hybrid", ratio=0.6, critical_weight=2.0), 1) for t in traces]
    scored = score_trajectories(teacher, traces, chosen, top_k=16, temperature=1.5)
    with TeacherCache.open(tmp_path, identity(teacher), entries_per_shard=4) as cache:
        cache.write(scored)
        cache.flush()
        for record in scored:
            assert cache.read(record.trajectory_id, expected_policy_version=5).equals(record)
            with pytest.raises(StaleCacheError):
                cache.read(record.trajectory_id, expected_policy_version=6)
        stats = cache.stats()
    assert validate_cache(tmp_path) == []
    assert (stats.num_trajectories, stats.num_selected_positions) == (9, sum(map(len, chosen)))
    assert stats.theoretical_full_logit_bytes == stats.num_selected_positions * teacher.vocab_size * 2
    assert stats.bytes_per_selected_position <= 150


def test_every_row_is_scored_as_if_alone(world):
    traces, teacher = world
    chosen = [select(t, SelectionSection(selector="all_model_tokens"), 1) for t in traces]
    alone = {
        t.trajectory_id: score_trajectories(teacher, [t], [s], top_k=8, temperature=1.0)[0]
        for t, s in zip(traces, chosen, strict=True)
    }
    rng = np.random.default_rng(0)
    for batch in (2, 3, 9, 16):
        order = rng.permutation(len(traces))[: rng.integers(2, 10)]
        got = score_trajectories(
            teacher, [traces[i] for i in order], [chosen[i] for i in order], top_k=8, temperature=1.0, batch_size=batch
        )
        assert [r.trajectory_id for r in got] == [traces[i].trajectory_id for i in order]
        for record in got:
            want = alone[record.trajectory_id]
            assert (
                np.allclose(record.topk_log_probs, want.topk_log_probs, atol=1e-5)
                and (record.topk_indices == want.topk_indices).all()
            )


def test_the_future_does_not_reach_a_scored_position(world):
    traces, teacher = world
    trace = max(traces, key=lambda t: len(t.token_ids))
    full = select(trace, SelectionSection(selector="all_model_tokens"), 1)
    cut = len(full) // 2
    half = type(full)(
        **{
            **full.__dict__,
            "positions": full.positions[:cut],
            "weights": full.weights[:cut],
            "span_types": full.span_types[:cut],
        }
    )
    ends = list(trace.token_ids)
    ends[full.positions[cut - 1] :] = [(t + 1) % teacher.vocab_size for t in ends[full.positions[cut - 1] :]]
    changed = trace.model_copy(update={"token_ids": tuple(ends)})
    a = score_trajectories(teacher, [trace], [half], top_k=8, temperature=1.0)[0]
    b = score_trajectories(teacher, [changed], [half], top_k=8, temperature=1.0)[0]
    assert np.array_equal(a.topk_log_probs, b.topk_log_probs) and a.target_token_ids[-1] != b.target_token_ids[-1]


def test_a_second_process_finds_the_teacher_on_the_shelf(tmp_path):
    calculator = Calculator({"prompt_style": "compact"})
    tasks = [calculator.generate_task(i, 11, "easy", "train") for i in range(8)]
    here = fit_toy_teacher(config(), tasks, calculator, store_dir=tmp_path)
    code = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch; torch.set_num_threads(1)
from test_teachers import *
calculator = Calculator({{"prompt_style": "compact"}})
tasks = [calculator.generate_task(i, 11, "easy", "train") for i in range(8)]
kept = fit_toy_teacher(config(), tasks, calculator, store_dir={str(tmp_path)!r})
fresh = fit_toy_teacher(config(), tasks, calculator)
assert kept.from_store and not fresh.from_store and kept.digest == fresh.digest
assert all(torch.equal(a, b) for a, b in zip(kept.backend.module.parameters(), fresh.backend.module.parameters()))
print(kept.digest)
"""
    out = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=Path(__file__).parents[1]
    )
    assert out.stdout.strip() == here.digest


def test_an_interrupted_save_is_fitted_again(tmp_path, monkeypatch):
    import miniverl.teachers.toy as module

    calculator = Calculator({"prompt_style": "compact"})
    tasks = [calculator.generate_task(i, 11, "easy", "train") for i in range(8)]
    real, calls = module.write_atomic, []

    def die_on_second(path, data):
        calls.append(path)
        if len(calls) == 2:
            raise KeyboardInterrupt
        real(path, data)

    monkeypatch.setattr(module, "write_atomic", die_on_second)
    with pytest.raises(KeyboardInterrupt):
        fit_toy_teacher(config(), tasks, calculator, store_dir=tmp_path)
    monkeypatch.setattr(module, "write_atomic", real)
    assert not fit_toy_teacher(config(), tasks, calculator, store_dir=tmp_path).from_store
    again = fit_toy_teacher(config(), tasks, calculator, store_dir=tmp_path)
    assert again.from_store and all(torch.isfinite(p).all() for p in again.backend.module.parameters())
