"""The chunked loss is the dense loss: same numbers, same gradients, less memory."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from miniverl.losses.bucketed import BucketedTargets
from miniverl.losses.chunked import ExactTargets, chunked_loss, dense_loss
from miniverl.losses.divergences import LossSpec

NAMES = ("forward_kl", "reverse_kl", "jsd")
KINDS = ("bucketed", "whole", "exact", "nll")
ROWS = 37


def problem(kind, spec=None, *, rows=ROWS, vocab=23, width=8, k=5, dtype=torch.float64, seed=0, bias=True, scale=1.0):
    spec = spec or LossSpec()
    g = torch.Generator().manual_seed(seed)
    hidden, weight, head_bias = (
        scale * torch.randn(*shape, generator=g, dtype=torch.float64)
        for shape in ((rows, width), (vocab, width), (vocab,))
    )
    exact = ExactTargets(
        scale * torch.randn(rows, 6, generator=g, dtype=torch.float64),
        torch.randn(vocab, 6, generator=g, dtype=torch.float64),
    )
    coefficients = torch.rand(rows, generator=g, dtype=torch.float64) / max(rows, 1)
    coefficients[1::5] = 0
    token_ids = torch.randint(0, vocab, (rows,), generator=g)
    exact = ExactTargets(exact.hidden.to(dtype), exact.head_weight.to(dtype))
    buckets = BucketedTargets.from_logits(exact.logits(), vocab if kind == "whole" else k, spec.temperature)
    leaves = [x.to(dtype).requires_grad_() for x in (hidden, weight, head_bias)]
    if not bias:
        leaves[2] = None
    targets = {"exact": exact, "nll": None}.get(kind, buckets)
    return leaves, dict(target_token_ids=token_ids, coefficients=coefficients.to(dtype), targets=targets, spec=spec)


def run(rule, leaves, **options):
    result = rule(*leaves, **options)
    return result, torch.autograd.grad(result.loss, [x for x in leaves if x is not None and x.requires_grad])


def assert_same(got, want, **tolerance):
    (a, a_grads), (b, b_grads) = got, want
    torch.testing.assert_close(a.loss, b.loss, **tolerance)
    for name in ("per_position", "divergence", "nll", "teacher_entropy"):
        assert (getattr(a, name) is None) == (getattr(b, name) is None)
        if getattr(a, name) is not None:
            assert not getattr(a, name).requires_grad
            torch.testing.assert_close(getattr(a, name), getattr(b, name), **tolerance)
    for x, y in zip(a_grads, b_grads, strict=True):
        assert torch.isfinite(x).all()
        torch.testing.assert_close(x, y, **tolerance)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("temperature", "nll_weight"), [(1.0, 0.0), (1.0, 0.3), (2.0, 0.0), (0.7, 0.3), (2.0, 1.0)])
def test_equals_dense(kind, name, temperature, nll_weight):
    spec = LossSpec(divergence=name, temperature=temperature, nll_weight=nll_weight, jsd_beta=0.3)
    leaves, options = problem(kind, spec)
    want = run(dense_loss, leaves, **options)
    for chunk_size in (1, 5, 37, 1000):
        assert_same(run(chunked_loss, leaves, chunk_size=chunk_size, **options), want, rtol=1e-10, atol=1e-13)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(KINDS),
    st.sampled_from(NAMES),
    st.integers(1, 12),
    st.integers(2, 30),
    st.integers(1, 14),
    st.integers(0, 999),
    st.sampled_from([0.5, 1.0, 3.0]),
    st.sampled_from([0.0, 0.5]),
    st.booleans(),
    st.sampled_from([0.3, 1.0, 6.0]),
)
def test_equals_dense_anywhere(kind, name, rows, vocab, chunk_size, seed, temperature, nll_weight, bias, scale):
    # A student tail of 1e-12 has four correct digits in float64 by either road, so small tails are compared elsewhere.
    scale = min(scale, 0.4) if kind == "bucketed" else scale
    spec = LossSpec(divergence=name, temperature=temperature, nll_weight=nll_weight)
    leaves, options = problem(kind, spec, rows=rows, vocab=vocab, k=1 + seed % vocab, seed=seed, bias=bias, scale=scale)
    assert_same(
        run(chunked_loss, leaves, chunk_size=chunk_size, **options),
        run(dense_loss, leaves, **options),
        rtol=1e-8,
        atol=1e-11,
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_gradcheck(kind, name):
    spec = LossSpec(divergence=name, temperature=1.5, nll_weight=0.2)
    leaves, options = problem(kind, spec, rows=5, vocab=7, width=3, k=3)
    assert torch.autograd.gradcheck(lambda *x: chunked_loss(*x, chunk_size=2, **options).loss, leaves)


@pytest.mark.parametrize("kind", KINDS)
def test_second_opinion(kind):
    """The definition once more, in plain Python: reverse KL at temperature 2 with its factor, likelihood untempered."""
    spec = LossSpec(temperature=2.0, nll_weight=0.25)
    leaves, options = problem(kind, spec, rows=6, vocab=5, k=2)
    hidden, weight, bias = leaves
    student = (hidden @ weight.t() + bias).tolist()
    _, exact = problem("exact", spec, rows=6, vocab=5, k=2)
    teacher = exact["targets"].logits().tolist()

    def softmax(z, tau):
        parts = [math.exp(x / tau) for x in z]
        return [x / sum(parts) for x in parts]

    total = 0.0
    for z, t, y, c in zip(
        student, teacher, options["target_token_ids"].tolist(), options["coefficients"].tolist(), strict=True
    ):
        nll, p, q = -math.log(softmax(z, 1.0)[y]), softmax(t, 2.0), softmax(z, 2.0)
        if kind == "bucketed":
            best = sorted(range(5), key=lambda v: -p[v])[:2]
            p, q = ([x[v] for v in best] + [1 - sum(x[v] for v in best)] for x in (p, q))
        divergence = 4 * sum(b * math.log(b / a) for a, b in zip(p, q, strict=True))
        total += c * (nll if kind == "nll" else 0.75 * divergence + 0.25 * nll)
    assert chunked_loss(*leaves, chunk_size=4, **options).loss.item() == pytest.approx(total, rel=1e-7)


def test_direction_tail_and_temperature_by_hand():
    """Fixed numbers that each of the classical slips would miss."""
    eye = torch.eye(4, dtype=torch.float64)
    teacher = torch.tensor([[1 / 2, 1 / 4, 1 / 8, 1 / 8]], dtype=torch.float64).log()
    common = dict(target_token_ids=torch.tensor([2]), coefficients=torch.ones(1), chunk_size=1)
    ln2, ln3 = math.log(2), math.log(3)

    def value(student, targets, **spec):
        hidden = torch.tensor([student], dtype=torch.float64).log()
        return chunked_loss(hidden, eye, None, targets=targets, spec=LossSpec(**spec), **common).loss.item()

    close = dict(rel=1e-9)
    buckets, student = BucketedTargets.from_logits(teacher, 2), [1 / 8, 1 / 8, 1 / 2, 1 / 4]
    assert value(student, buckets, divergence="forward_kl") == pytest.approx(1.25 * ln2 - ln3 / 4, **close)
    assert value(student, buckets, divergence="reverse_kl") == pytest.approx(0.75 * ln3 - 3 * ln2 / 8, **close)
    exact, student = ExactTargets(teacher, eye), [1 / 8, 1 / 2, 1 / 8, 1 / 4]
    assert value(student, exact, divergence="forward_kl") == pytest.approx(5 * ln2 / 8, **close)
    assert value(student, exact, divergence="reverse_kl") == pytest.approx(ln2 / 2, **close)
    tempered = dict(temperature=2.0, nll_weight=1.0)
    for targets in (exact, buckets, None):
        assert value(student, targets, **tempered) == pytest.approx(3 * ln2, **close)  # the NLL is not tempered


def test_temperature_factor_reaches_the_loss():
    for kind in ("bucketed", "exact"):
        leaves, options = problem(kind, LossSpec(temperature=3.0))
        plain = options | {"spec": replace(options["spec"], scale_by_temperature_squared=False)}
        scaled, bare = (run(chunked_loss, leaves, chunk_size=8, **o) for o in (options, plain))
        torch.testing.assert_close(scaled[0].loss, 9 * bare[0].loss)
        torch.testing.assert_close(scaled[1][0], 9 * bare[1][0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk_size", [1, 7, 64])
def test_float32_and_saturation(kind, chunk_size):
    """Logits in the hundreds: clamps and floors are active, and must act on the gradient as autograd makes them act."""
    for name in NAMES:
        leaves, options = problem(
            kind, LossSpec(divergence=name, nll_weight=0.1, tail_epsilon=1e-3), dtype=torch.float32, scale=8.0
        )
        assert_same(
            run(chunked_loss, leaves, chunk_size=chunk_size, **options),
            run(dense_loss, leaves, **options),
            rtol=1e-3,
            atol=1e-5,
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_masked_vocabulary(kind, name):
    """A bias of minus infinity takes tokens away from the student, also tokens that the teacher keeps."""
    leaves, options = problem(kind, LossSpec(divergence=name, nll_weight=0.1))
    masked = torch.tensor([0, 3, 11])
    leaves[2] = leaves[2].detach().index_fill(0, masked, -math.inf).requires_grad_()
    options["target_token_ids"] = torch.full((ROWS,), 5)
    assert_same(
        run(chunked_loss, leaves, chunk_size=8, **options), run(dense_loss, leaves, **options), rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_scored_in_float32(kind):
    leaves, options = problem(kind, LossSpec(), dtype=torch.bfloat16)
    got, want = run(chunked_loss, leaves, chunk_size=64, **options), run(dense_loss, leaves, **options)
    assert got[0].loss.dtype == torch.float32 and [g.dtype for g in got[1]] == [torch.bfloat16] * 3
    torch.testing.assert_close(got[0].per_position, want[0].per_position, rtol=1e-4, atol=1e-5)
    for a, b in zip(got[1], want[1], strict=True):
        torch.testing.assert_close(a, b, rtol=3e-2, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spoil", [math.nan, math.inf, 1e30])
def test_ignored_rows_contribute_nothing(kind, spoil):
    for temperature in (1.0, 2.0):
        leaves, options = problem(kind, LossSpec(temperature=temperature, nll_weight=0.2))
        clean = run(chunked_loss, leaves, chunk_size=8, **options)
        rows = (options["coefficients"] == 0).nonzero().flatten()
        assert len(rows)
        spoiled = [leaves[0].detach().index_fill(0, rows, spoil).requires_grad_(), *leaves[1:]]
        loss, grads = run(chunked_loss, spoiled, chunk_size=8, **options)
        assert torch.equal(loss.loss, clean[0].loss)
        for a, b in zip(grads, clean[1], strict=True):
            assert torch.equal(a, b)
        assert (grads[0][rows] == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_all_ignored_or_empty(kind):
    leaves, options = problem(kind)
    _, grads = run(chunked_loss, leaves, chunk_size=8, **options | {"coefficients": torch.zeros(ROWS)})
    assert all((g == 0).all() for g in grads)
    leaves, options = problem(kind, rows=0)
    result, grads = run(chunked_loss, leaves, chunk_size=8, **options)
    assert result.loss == 0 and result.nll.shape == (0,) and grads[0].shape == (0, 8)
    assert (result.divergence is None) == (result.teacher_entropy is None) == (kind == "nll")


def test_who_gets_a_gradient():
    leaves, options = problem("exact")
    teacher = options["targets"]
    teacher.head_weight.requires_grad_()
    teacher.hidden.requires_grad_()
    hidden, weight, bias = leaves[0], leaves[1].detach(), leaves[2].detach()
    chunked_loss(hidden, weight, bias, chunk_size=8, **options).loss.backward()
    assert (
        hidden.grad is not None
        and weight.grad is None
        and teacher.head_weight.grad is None
        and teacher.hidden.grad is None
    )
    chunked_loss(hidden.detach(), leaves[1], bias, chunk_size=8, **options).loss.backward()
    assert leaves[1].grad is not None and leaves[2].grad is None
    with torch.no_grad():
        assert not chunked_loss(*leaves, chunk_size=8, **options).loss.requires_grad
    assert not chunked_loss(hidden.detach(), weight, bias, chunk_size=8, **options).loss.requires_grad


def test_gradients_flow_on_and_scale():
    """The loss sits in a larger graph: scaled, added up, and with a network below."""
    leaves, options = problem("bucketed")
    layer = torch.nn.Linear(8, 8, dtype=torch.float64)
    inputs = leaves[0].detach()
    grads = []
    for rule, extra in ((chunked_loss, {"chunk_size": 5}), (dense_loss, {})):
        layer.zero_grad()
        (3 * rule(torch.tanh(layer(inputs)), *leaves[1:], **options, **extra).loss + layer.bias.sum()).backward()
        grads.append(layer.weight.grad.clone())
    torch.testing.assert_close(*grads)
    result = chunked_loss(*leaves, chunk_size=5, **options)
    first, again = (torch.autograd.grad(result.loss, leaves[:1], retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, again)


def test_splitting_a_batch_adds_up():
    """Micro-batches whose coefficients come from the whole group give the loss and gradient of the group."""
    leaves, options = problem("bucketed")
    whole, grads = run(chunked_loss, leaves, chunk_size=8, **options)
    loss, gathered = 0.0, []
    for rows in (slice(0, 20), slice(20, ROWS)):
        part = (
            options
            | {k: options[k][rows] for k in ("target_token_ids", "coefficients")}
            | {"targets": options["targets"].rows(rows)}
        )
        result, (g, *_) = run(chunked_loss, [leaves[0][rows], *leaves[1:]], chunk_size=8, **part)
        loss += result.loss
        gathered.append(g)
    torch.testing.assert_close(loss, whole.loss)
    torch.testing.assert_close(torch.cat(gathered), grads[0])


class Allocations(TorchDispatchMode):
    """Sizes (elements of the storage) of every tensor that an operation returns, storages of `known` aside."""

    def __init__(self, known):
        super().__init__()
        self.known, self.sizes = {x.untyped_storage().data_ptr() for x in known}, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in self.known:
                self.sizes.append(x.untyped_storage().nbytes() // x.element_size())
        return out


@pytest.mark.parametrize("kind", ["bucketed", "exact", "nll"])
@pytest.mark.parametrize("chunk_size", [1, 8])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_nothing_is_larger_than_a_chunk(kind, chunk_size, temperature):
    vocab = 700
    leaves, options = problem(kind, LossSpec(temperature=temperature, nll_weight=0.1), rows=24, vocab=vocab, width=4)
    leaves = [leaves[0], leaves[1].detach(), leaves[2].detach()]
    known = leaves + ([options["targets"].head_weight] if kind == "exact" else [])
    with Allocations(known) as seen:
        chunked_loss(*leaves, chunk_size=chunk_size, **options).loss.backward()
    assert max(seen.sizes) <= max(chunk_size * vocab, 24 * 6)
    with Allocations(known) as seen:
        dense_loss(*leaves, **options).loss.backward()
    assert max(seen.sizes) == 24 * vocab


def test_bucketed_writes_the_vocabulary_once():
    """One buffer for the logits of all chunks, and nothing else of that width: exponentials and gradient live in it too."""
    vocab = 700
    leaves, options = problem("bucketed", LossSpec(nll_weight=0.1), rows=96, vocab=vocab, width=4)
    leaves = [leaves[0], leaves[1].detach(), None]
    owners = set()

    class Owners(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if (
                isinstance(out, torch.Tensor)
                and out.shape[-1:] == (vocab,)
                and out.untyped_storage().data_ptr() != leaves[1].data_ptr()
            ):
                owners.add(out.untyped_storage().data_ptr())
            return out

    with Owners():
        chunked_loss(*leaves, chunk_size=16, **options).loss.backward()
    assert len(owners) == 1


@pytest.mark.parametrize(("kind", "temperature"), [("exact", 1.0), ("exact", 2.0), ("bucketed", 2.0), ("nll", 1.0)])
def test_many_blocks_of_rows(kind, temperature):
    """A vocabulary so wide that one chunk is walked in several blocks of rows."""
    leaves, options = problem(kind, LossSpec(temperature=temperature), rows=7, vocab=100_000, width=2)
    want = run(dense_loss, leaves, **options)
    for chunk_size in (3, 7):
        assert_same(run(chunked_loss, leaves, chunk_size=chunk_size, **options), want, rtol=1e-8, atol=1e-12)


def test_nothing_is_differentiated_without_need():
    """Evaluating a loss costs one product a chunk; the second product belongs to the gradient."""

    class Products(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.count += "mm" in function.name()
            return function(*args, **(kwargs or {}))

    leaves, options = problem("bucketed")
    with torch.no_grad(), Products() as seen:
        chunked_loss(*leaves, chunk_size=10, **options)
    assert seen.count == 4
    with Products() as seen:
        chunked_loss(leaves[0], leaves[1].detach(), leaves[2].detach(), chunk_size=10, **options)
    assert seen.count == 8
