"""Optimiser properties that must hold for every schedule and every gradient."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miniverl.training.optim import AdamW, clip_gradients, learning_rate


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(["constant", "linear", "cosine"]), st.integers(0, 50), st.integers(0, 200), st.integers(0, 400))
def test_the_rate_rises_then_never_rises_again_and_stays_in_range(schedule, warmup, total, step):
    def rate(s):
        return learning_rate(s, base=0.5, schedule=schedule, warmup_steps=warmup, total_steps=total)

    assert 0.0 <= rate(step) <= 0.5
    if step + 1 < warmup:
        assert rate(step) < rate(step + 1)
    if step >= warmup:
        assert rate(step + 1) <= rate(step)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=6), st.floats(1e-3, 1e3))
def test_clipped_gradients_keep_direction_and_respect_the_norm(values, limit):
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in values]
    for weight, value in zip(weights, values, strict=True):
        weight.grad = torch.tensor([float(value)])
    before = float(clip_gradients(weights, limit))
    after = torch.tensor([float(w.grad) for w in weights])
    assert before == pytest.approx(float(torch.tensor(values, dtype=torch.float32).norm()), rel=1e-4, abs=1e-6)
    assert float(after.norm()) <= limit * (1 + 1e-4)
    assert all(a * v >= 0 for a, v in zip(after.tolist(), values, strict=True))


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_a_parameter_without_a_gradient_is_left_alone(decay):
    moving, resting = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    optimizer = AdamW({"moving": moving, "resting": resting}, weight_decay=decay)
    moving.grad = torch.ones(3)
    optimizer.step(1e-2)
    assert torch.equal(resting, torch.ones(3)) and not torch.equal(moving, torch.ones(3))
    assert not optimizer.first["resting"].any()


def test_half_precision_parameters_keep_float32_moments():
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = AdamW({"w": weight})
    weight.grad = torch.full((4,), 1e-3, dtype=torch.bfloat16)
    optimizer.step(0.1)
    assert optimizer.second["w"].dtype == torch.float32 and weight.dtype == torch.bfloat16
    assert float(weight.detach().float().mean()) < 1.0
