"""Divergences against a second, plain-Python opinion, and the properties that define them."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miniverl.core import ConfigError
from miniverl.losses.divergences import (
    LossSpec,
    as_log_probs,
    divergence,
    entropy,
    forward_kl,
    jsd,
    log1mexp,
    reverse_kl,
)
from miniverl.schemas.config import LossSection

logit = st.floats(-30, 30, allow_nan=False)
pairs = st.integers(2, 12).flatmap(lambda n: st.tuples(*[st.lists(logit, min_size=n, max_size=n)] * 2))
betas = st.floats(0.05, 0.95)


def both(pair, dtype=torch.float64):
    return [as_log_probs(torch.tensor(z, dtype=dtype)) for z in pair]


def slow_softmax(logits):
    top = max(logits)
    parts = [math.exp(z - top) for z in logits]
    return [x / math.fsum(parts) for x in parts]


def slow_kl(p, q):
    return math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


@settings(max_examples=30, deadline=None)
@given(pairs, betas)
def test_second_opinion(pair, beta):
    p, q = (slow_softmax(z) for z in pair)
    teacher, student = both(pair)
    middle = [beta * a + (1 - beta) * b for a, b in zip(p, q, strict=True)]
    close = dict(rel=1e-9, abs=1e-12)
    assert forward_kl(teacher, student).item() == pytest.approx(slow_kl(p, q), **close)
    assert reverse_kl(teacher, student).item() == pytest.approx(slow_kl(q, p), **close)
    assert jsd(teacher, student, beta).item() == pytest.approx(
        beta * slow_kl(p, middle) + (1 - beta) * slow_kl(q, middle), **close
    )
    assert entropy(teacher).item() == pytest.approx(-math.fsum(a * math.log(a) for a in p if a > 0), **close)


@settings(max_examples=30, deadline=None)
@given(pairs, betas)
def test_bounds_and_self_divergence(pair, beta):
    teacher, student = both(pair, torch.float32)
    coin = -beta * math.log(beta) - (1 - beta) * math.log1p(-beta)
    for value in (forward_kl(teacher, student), reverse_kl(teacher, student), jsd(teacher, student, beta)):
        assert torch.isfinite(value) and value > -1e-5
    assert jsd(teacher, student, beta) <= coin + 1e-5
    for rule in (forward_kl, reverse_kl, jsd):
        assert abs(rule(teacher, teacher).item()) < 1e-6
    assert -1e-6 <= entropy(teacher) <= math.log(len(pair[0])) + 1e-5


@settings(max_examples=40, deadline=None)
@given(pairs, betas, st.floats(-50, 50))
def test_symmetry_and_shift(pair, beta, shift):
    teacher, student = both(pair)
    moved = as_log_probs(torch.tensor(pair[1], dtype=torch.float64) + shift)
    assert forward_kl(teacher, moved).item() == pytest.approx(forward_kl(teacher, student).item(), rel=1e-9, abs=1e-10)
    assert jsd(teacher, student, beta).item() == pytest.approx(
        jsd(student, teacher, 1 - beta).item(), rel=1e-9, abs=1e-12
    )
    assert forward_kl(teacher, student).item() == reverse_kl(student, teacher).item()


@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl", "jsd"])
def test_excluded_categories_stay_finite(name):
    teacher = torch.tensor([[0.0, -math.inf, -math.inf], [0.5, 0.5, -math.inf]], dtype=torch.float64)
    logits = torch.tensor([[-math.inf, 2.0, -math.inf], [1.0, 2.0, 3.0]], dtype=torch.float64, requires_grad=True)
    value = divergence(LossSpec(divergence=name), as_log_probs(teacher), as_log_probs(logits))
    value.sum().backward()
    assert torch.isfinite(value).all() and torch.isfinite(logits.grad).all()


@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_gradcheck(name, temperature):
    z = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    spec = LossSpec(divergence=name, temperature=temperature, jsd_beta=0.3)
    teacher = as_log_probs(z[0], temperature)
    assert torch.autograd.gradcheck(
        lambda s: divergence(spec, teacher, as_log_probs(s, temperature)), z[1].requires_grad_()
    )


def test_half_precision_is_lifted():
    z = torch.randn(2, 50, generator=torch.Generator().manual_seed(2))
    for half in (torch.float16, torch.bfloat16):
        got = forward_kl(*as_log_probs(z.to(half)))
        assert got.dtype == torch.float32 and torch.equal(got, forward_kl(*as_log_probs(z.to(half).float())))


@settings(max_examples=50, deadline=None)
@given(st.floats(-700, -1e-15))
def test_log1mexp_second_opinion(x):
    expected = math.log(-math.expm1(x)) if x > -math.log(2) else math.log1p(-math.exp(x))
    assert log1mexp(torch.tensor(x, dtype=torch.float64)).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log1mexp_is_clamped_with_finite_gradients(dtype):
    x = torch.tensor([0.0, 1.0, -1e-30, -math.log(2), -1e30, -math.inf], dtype=dtype, requires_grad=True)
    value = log1mexp(x)
    value.sum().backward()
    assert value.min().item() == pytest.approx(math.log(torch.finfo(dtype).eps), rel=1e-6)
    assert torch.isfinite(value).all() and torch.isfinite(x.grad).all() and (x.grad[:3] == 0).all()


def test_factor_only_when_asked_and_tempered():
    assert LossSpec(temperature=1.0).factor == 1
    assert LossSpec(temperature=3.0).factor == 9
    assert LossSpec(temperature=3.0, scale_by_temperature_squared=False).factor == 1


@pytest.mark.parametrize(
    "change",
    [
        {"divergence": "KL"},
        {"temperature": -1.0},
        {"temperature": math.inf},
        {"temperature": math.nan},
        {"nll_weight": -0.1},
        {"tail_epsilon": 0.0},
        {"jsd_beta": 0.0, "divergence": "jsd"},
    ],
)
def test_refusals(change):
    with pytest.raises(ConfigError) as caught:
        LossSpec(**change)
    assert caught.value.hint


def test_spec_from_a_section():
    section = LossSection(
        mode="bucketed_topk_tail",
        divergence="jsd",
        temperature=2.0,
        scale_by_temperature_squared=False,
        jsd_beta=0.2,
        tail_epsilon=1e-6,
        sampled_token_nll_weight=0.1,
        top_k=3,
    )
    assert LossSpec.from_section(section) == LossSpec("bucketed_topk_tail", "jsd", 2.0, False, 0.2, 1e-6, 0.1)
    assert (
        LossSpec.from_section(LossSection(jsd_beta=0.0)).divergence == "reverse_kl"
    )  # a weight that is not used is not judged
