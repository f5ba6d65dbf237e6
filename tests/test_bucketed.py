"""Top-k + tail: what bucketing may change, and what it must not."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miniverl.core import ConfigError, DataError
from miniverl.losses.bucketed import (
    BucketedTargets,
    bucket_log_probs,
    bucketed_divergence,
    bucketed_entropy,
    check_bucketed,
    topk_targets,
)
from miniverl.losses.divergences import LossSpec, as_log_probs, divergence, entropy

NAMES = ("forward_kl", "reverse_kl", "jsd")
seeds = st.integers(0, 10_000)


def logits(seed, rows=3, vocab=12, scale=2.0, dtype=torch.float64):
    return scale * torch.randn(2, rows, vocab, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def slow(teacher, student, k, name, beta=0.5):
    """One row, in plain Python: choose, merge, compare."""
    p, q = (torch.softmax(z, -1).tolist() for z in (teacher, student))
    kept = sorted(range(len(p)), key=lambda v: -p[v])[:k]
    merged = [[x[v] for v in kept] + [math.fsum(x[v] for v in range(len(x)) if v not in kept)] for x in (p, q)]
    p, q = ([x for x in m if k < teacher.numel() or x is not m[-1]] for m in merged)

    def kl(a, b):
        return math.fsum(x * math.log(x / y) for x, y in zip(a, b, strict=True))

    middle = [beta * a + (1 - beta) * b for a, b in zip(p, q, strict=True)]
    return {"forward_kl": kl(p, q), "reverse_kl": kl(q, p), "jsd": beta * kl(p, middle) + (1 - beta) * kl(q, middle)}[
        name
    ]


@settings(max_examples=25, deadline=None)
@given(seeds, st.integers(1, 11), st.sampled_from(NAMES), st.floats(0.1, 0.9))
def test_second_opinion(seed, k, name, beta):
    teacher, student = logits(seed)
    got = bucketed_divergence(
        student, BucketedTargets.from_logits(teacher, k), LossSpec(divergence=name, jsd_beta=beta)
    )
    for row in range(3):
        assert got[row].item() == pytest.approx(slow(teacher[row], student[row], k, name, beta), rel=1e-7, abs=1e-9)


@settings(max_examples=25, deadline=None)
@given(seeds, st.integers(1, 12), st.floats(0.5, 4))
def test_mass_is_complete(seed, k, temperature):
    teacher, _ = logits(seed)
    ids, log_probs, tail = topk_targets(teacher, k, temperature)
    torch.testing.assert_close(log_probs.exp().sum(1) + tail.exp(), torch.ones(3, dtype=torch.float64))
    torch.testing.assert_close(log_probs, as_log_probs(teacher, temperature).gather(1, ids))
    assert (log_probs.diff(dim=1) <= 0).all() and bool(torch.isneginf(tail).all()) == (k == 12)


@settings(max_examples=25, deadline=None)
@given(seeds, st.sampled_from(NAMES), st.floats(0.5, 3))
def test_never_more_than_exact_and_monotone(seed, name, temperature):
    teacher, student = logits(seed)
    spec = LossSpec(divergence=name, temperature=temperature, tail_epsilon=1e-300)
    exact = divergence(spec, as_log_probs(teacher, temperature), as_log_probs(student, temperature))
    values = torch.stack(
        [bucketed_divergence(student, BucketedTargets.from_logits(teacher, k, temperature), spec) for k in range(1, 13)]
    )
    assert (values <= exact + 1e-9).all() and (values.diff(dim=0) >= -1e-9).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", [1.0, 40.0])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_whole_vocabulary_is_exact_in_value_and_gradient(name, scale, temperature):
    """No floor may apply: with one, a spread of 40 would make the two differ."""
    teacher, student = logits(5, scale=scale)
    spec = LossSpec(divergence=name, temperature=temperature, tail_epsilon=1e-3)
    leaf = student.clone().requires_grad_()
    whole = BucketedTargets.from_logits(teacher, 12, temperature)
    got = bucketed_divergence(leaf, whole, spec)
    want = divergence(spec, as_log_probs(teacher, temperature), as_log_probs(leaf, temperature))
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    for a, b in zip(*(torch.autograd.grad(x.sum(), leaf, retain_graph=True) for x in (got, want)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(
        bucketed_entropy(whole, 1e-3, torch.float64), entropy(as_log_probs(teacher, temperature))
    )


def test_exact_zero_tail_survives_a_stored_placeholder():
    """A file cannot hold minus infinity as such: whatever number stands in the tail, the flag decides."""
    teacher, student = logits(6)
    whole = BucketedTargets.from_logits(teacher, 12)
    stored = BucketedTargets.from_arrays(
        whole.topk_indices.int().numpy(), whole.topk_log_probs.numpy(), [-1e4] * 3, True
    )
    assert torch.equal(
        bucketed_divergence(student, stored, LossSpec()), bucketed_divergence(student, whole, LossSpec())
    )


def test_coarse_entropy_is_a_lower_bound():
    teacher, _ = logits(7, rows=50)
    for k in (1, 3, 8):
        assert (
            bucketed_entropy(BucketedTargets.from_logits(teacher, k), 1e-9, torch.float64)
            <= entropy(as_log_probs(teacher)) + 1e-9
        ).all()


def test_the_tail_matters():
    """Same kept tokens, other tail: a loss that forgets the tail could not tell these students apart from the teacher."""
    teacher = torch.tensor([[0.4, 0.1, 0.3, 0.2]], dtype=torch.float64).log()
    student = torch.tensor([[0.4, 0.1, 0.3, 0.2]], dtype=torch.float64).log()
    student[0, 2:] += 2.0  # raises only the tail tokens
    targets = BucketedTargets.from_logits(teacher[:, [0, 1, 2, 3]], 1)
    leaf = student.requires_grad_()
    for name in NAMES:
        value = bucketed_divergence(leaf, targets, LossSpec(divergence=name))
        (g,) = torch.autograd.grad(value.sum(), leaf)
        assert value > 0.05 and g[0, 0] < 0 and (g[0, 1:] > 0).all()


def test_a_floor_is_paid_for_by_renormalising():
    """Floored at 0.1, a tail of zero becomes 0.1 / 1.1: both sides stay distributions, so the divergence stays one."""
    kept, nothing = (
        torch.tensor([[0.75, 0.25]], dtype=torch.float64).log(),
        torch.tensor([-math.inf], dtype=torch.float64),
    )
    floored = bucket_log_probs(kept, nothing, torch.tensor([False]), 0.1).exp()
    torch.testing.assert_close(floored, torch.tensor([[0.75, 0.25, 0.1]], dtype=torch.float64) / 1.1)
    absent = bucket_log_probs(kept, nothing, torch.tensor([True]), 0.1).exp()
    torch.testing.assert_close(absent, torch.tensor([[0.75, 0.25, 0.0]], dtype=torch.float64), rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("margin", [20.0, 100.0, 1e4, -1e4])
def test_saturated_students_have_finite_gradients(name, margin):
    teacher, student = logits(8, dtype=torch.float32)
    leaf = student.clone()
    leaf[:, 0] += margin
    leaf.requires_grad_()
    value = bucketed_divergence(leaf, BucketedTargets.from_logits(teacher, 4), LossSpec(divergence=name))
    value.sum().backward()
    assert torch.isfinite(value).all() and torch.isfinite(leaf.grad).all()


def test_float32_tail_bound():
    """A certain float32 student: its tail is 1.19e-7, so a teacher that is all tail costs 15.94 nats and not ln(1/epsilon)."""
    sure = torch.tensor([[90.0, 0.0, 0.0]])
    all_tail = BucketedTargets.from_arrays([[0]], [[-1e4]], [0.0], False)
    assert bucketed_divergence(sure, all_tail, LossSpec(divergence="forward_kl")).item() == pytest.approx(
        15.942, abs=1e-3
    )
    no_tail = BucketedTargets.from_arrays([[0]], [[0.0]], [-1e4], False)
    lost = torch.tensor([[-90.0, 0.0, 0.0]])
    assert bucketed_divergence(lost, no_tail, LossSpec(tail_epsilon=1e-4)).item() == pytest.approx(
        math.log(1e4), rel=1e-4
    )


def test_half_precision_cache_values_are_lifted():
    teacher, student = logits(9, dtype=torch.float32)
    full = BucketedTargets.from_logits(teacher, 4)
    half = BucketedTargets(
        full.topk_indices, full.topk_log_probs.half(), full.tail_log_prob.half(), full.tail_is_exact_zero
    )
    got = bucketed_divergence(student, half, LossSpec())
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, bucketed_divergence(student, full, LossSpec()), rtol=1e-2, atol=1e-2)


def test_refusals():
    teacher, student = logits(1)
    targets = BucketedTargets.from_logits(teacher, 4)
    for k in (0, 13, -1):
        with pytest.raises(ConfigError):
            topk_targets(teacher, k)
    with pytest.raises(DataError, match="positions"):
        bucketed_divergence(student[:2], targets, LossSpec())
    with pytest.raises(DataError, match="vocabulary of 3"):
        bucketed_divergence(student[:, :3], targets, LossSpec())
    negative = BucketedTargets(
        targets.topk_indices - 12, targets.topk_log_probs, targets.tail_log_prob, targets.tail_is_exact_zero
    )
    with pytest.raises(DataError, match="do not fit"):
        check_bucketed(negative, 3, 12)
    wide = BucketedTargets(
        targets.topk_indices, targets.topk_log_probs[:, :2], targets.tail_log_prob, targets.tail_is_exact_zero
    )
    with pytest.raises(DataError, match="shapes"):
        check_bucketed(wide, 3, 12)
