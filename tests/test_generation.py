"""Lock-step decoding: nothing a row computes or writes may depend on its neighbours, and all of it equals the naive way."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miniverl.core import BackendError, ConfigError
from miniverl.models.generation import BatchShape, LockstepDecoder, TieredSlots, TurnRequest
from miniverl.models.sampling import SamplingParams, StopRule, draw_tokens, token_probabilities, turn_seed
from miniverl.models.tokenizers import ToyTokenizer
from miniverl.models.toy import ToyBackend
from miniverl.schemas.config import ToyShape
from tests.parrot import Parrot

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def backend() -> ToyBackend:
    shape = ToyShape(hidden_size=48, num_layers=2, num_heads=2, intermediate_size=64)
    made = ToyBackend.build(shape, ToyTokenizer(), seed=11)
    made.eval()
    return made


def naive_greedy(backend, ids: list[int], steps: int) -> list[int]:
    ids = list(ids)
    for _ in range(steps):
        with torch.no_grad():
            ids.append(int(backend.project(backend.hidden_states(torch.tensor([ids]))[:, -1]).argmax()))
    return ids[-steps:]


# --- the cache ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_any_schedule_of_reads_gives_the_states_of_a_full_pass(backend, seed):
    """Rows advance by random amounts, idle at random and cross tiers at different times."""
    rng = random.Random(seed)
    rows, total = 3, 70
    ids = torch.tensor([[rng.randrange(5, backend.vocab_size) for _ in range(total)] for _ in range(rows)])
    with torch.no_grad():
        whole = backend.hidden_states(ids)
    slots, done = TieredSlots(backend, BatchShape(rows, 96, tier=16)), [0] * rows
    while min(done) < total:
        width = rng.choice([1, 1, 4, 8])
        counts = [min(rng.choice([0, 1, width]), width, total - n) for n in done]
        if not any(counts):
            continue
        tokens, positions = torch.zeros(rows, width, dtype=torch.long), np.full((rows, width), -1)
        for row, count in enumerate(counts):
            tokens[row, :count] = ids[row, done[row] : done[row] + count]
            positions[row, :count] = np.arange(done[row], done[row] + count)
        hidden = slots.step(tokens, positions)
        for row, count in enumerate(counts):
            torch.testing.assert_close(
                hidden[row, :count], whole[row, done[row] : done[row] + count], atol=2e-5, rtol=1e-4
            )
            done[row] += count


def test_tiers_double_up_to_the_capacity_and_one_tier_is_enough_for_a_large_model(backend):
    assert TieredSlots(backend, BatchShape(2, 100, tier=16)).sizes.tolist() == [16, 32, 64, 100]
    assert TieredSlots(backend, BatchShape(2, 10, tier=16)).sizes.tolist() == [10]
    few_rows = TieredSlots(backend, BatchShape(1, 1000)).sizes.tolist()
    many_rows = TieredSlots(backend, BatchShape(64, 1000)).sizes.tolist()
    assert few_rows[0] > many_rows[0] == 64 and few_rows[-1] == many_rows[-1] == 1000


def test_a_pass_needs_a_busy_row(backend):
    with pytest.raises(BackendError):
        TieredSlots(backend, BatchShape(2, 32)).step(torch.zeros(2, 1, dtype=torch.long), np.full((2, 1), -1))


# --- decoding ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix_length", [0, 1, 40])
def test_greedy_turns_equal_the_naive_loop(backend, prefix_length):
    rng = random.Random(prefix_length)
    decoder = LockstepDecoder(backend, BatchShape(4, 200, width=8, tier=32), GREEDY, [])
    prefix = [rng.randrange(5, backend.vocab_size) for _ in range(prefix_length)]
    decoder.rows.begin(prefix)
    texts = [list(prefix) for _ in range(4)]
    for _ in range(3):
        requests = []
        for row in range(4):
            context = [rng.randrange(5, backend.vocab_size) for _ in range(rng.randint(1, 20))]
            requests.append(TurnRequest(context, rng.randint(1, 9)) if rng.random() < 0.8 or row == 0 else None)
        for row, turn in enumerate(decoder.play_turn(requests)):
            if turn is None:
                continue
            texts[row] += requests[row].context
            expected = naive_greedy(backend, texts[row], requests[row].max_new)
            assert turn.ids == expected[: len(turn.ids)]
            assert turn.truncated == (len(turn.ids) == requests[row].max_new and not turn.ended_with_eos)
            texts[row] += turn.ids


def play(decoder, rows: dict[int, int], turns: int = 3) -> dict[int, list[int]]:
    """Conversation number c in row r for each (r, c); returns what each conversation wrote."""
    decoder.rows.restart()
    written: dict[int, list[int]] = {c: [] for c in rows.values()}
    for turn in range(turns):
        requests: list[TurnRequest | None] = [None] * decoder.rows.shape.rows
        for row, c in rows.items():
            rng = random.Random(100 * c + turn)
            if turn < 1 + c % turns:
                context = [rng.randrange(5, 150) for _ in range(rng.randint(1, 40))]
                requests[row] = TurnRequest(context, rng.randint(1, 14), turn_seed(c, turn))
        for row, generation in enumerate(decoder.play_turn(requests)):
            if generation is not None:
                written[rows[row]] += [*generation.ids, -1]
    return written


@pytest.mark.parametrize(
    "sampling",
    [GREEDY, SamplingParams(), SamplingParams(1.4, top_p=0.9, top_k=40)],
    ids=["greedy", "sampled", "filtered"],
)
def test_a_conversation_is_the_same_in_any_company(backend, sampling):
    decoder = LockstepDecoder(backend, BatchShape(6, 200, width=8, tier=32), sampling, ["</final>", "</tool_call>"])
    decoder.rows.begin(list(range(20, 31)))
    alone = {c: play(decoder, {0: c})[c] for c in range(9)}
    rng = random.Random(0)
    for _ in range(12):
        chosen = rng.sample(range(9), rng.randint(1, 6))
        company = dict(zip(rng.sample(range(6), len(chosen)), chosen, strict=True))
        assert play(decoder, company) == {c: alone[c] for c in chosen}
    if sampling is not GREEDY:
        assert len({tuple(ids) for ids in alone.values()}) == 9


def test_a_fresh_decoder_gives_the_same_ids(backend):
    def fresh():
        decoder = LockstepDecoder(backend, BatchShape(3, 200, width=8, tier=32), SamplingParams(), [])
        decoder.rows.begin([7, 8, 9])
        return decoder

    used = fresh()
    play(used, {0: 1, 1: 2, 2: 3})
    assert play(used, {1: 5}) == play(fresh(), {1: 5})


def test_the_head_may_be_wider_than_the_tokenizer():
    tokenizer = ToyTokenizer()

    class Wide(Parrot):
        def project(self, hidden):
            padding = torch.full((*hidden.shape[:-1], 10), 5.0)
            return torch.cat([hidden, padding], -1)

    decoder = LockstepDecoder(Wide(lambda ids: 17, tokenizer), BatchShape(2, 32), GREEDY, [])
    assert decoder.play_turn([TurnRequest([1], 4), None])[0].ids == [17] * 4


def test_the_owed_token_is_read_once_and_in_its_place():
    seen = []
    parrot = Parrot(lambda ids: seen.append(list(ids)) or 50 + len(ids), ToyTokenizer())
    decoder = LockstepDecoder(parrot, BatchShape(1, 32, width=4), GREEDY, [])
    decoder.rows.begin([1, 2])
    first = decoder.play_turn([TurnRequest([3, 4, 5], 3)])[0].ids
    decoder.play_turn([TurnRequest([6], 2)])
    assert first == [55, 56, 57]
    assert seen[-1] == [1, 2, 3, 4, 5, 55, 56, 57, 6, 59]
    assert len({len(ids) for ids in seen[2:]}) == len(seen[2:]), "each position is read once"


def test_a_step_that_is_not_needed_is_not_taken():
    parrot = Parrot(lambda ids: 30, ToyTokenizer())
    decoder = LockstepDecoder(parrot, BatchShape(2, 64, width=8), GREEDY, [])
    decoder.play_turn([TurnRequest([3] * 9, 5), TurnRequest([4], 2)])
    assert parrot.steps == 2 + 4


# --- refusals ----------------------------------------------------------------------------------------------------


def test_what_cannot_be_kept_is_refused(backend):
    with pytest.raises(ConfigError, match="positions"):
        LockstepDecoder(backend, BatchShape(1, backend.max_positions + 1), GREEDY, [])
    with pytest.raises(ConfigError, match="positive"):
        BatchShape(0, 10)
    decoder = LockstepDecoder(backend, BatchShape(1, 20), GREEDY, [])
    with pytest.raises(BackendError, match="prefix"):
        decoder.rows.begin([1] * 21)
    decoder.rows.begin([1] * 15)
    with pytest.raises(BackendError, match="capacity"):
        decoder.play_turn([TurnRequest([2], 5)])
    assert len(decoder.play_turn([TurnRequest([2], 4)])[0].ids) == 4


# --- sampling ----------------------------------------------------------------------------------------------------


def reference_probabilities(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """One row, written out."""
    z = logits.astype(np.float64) / params.temperature
    if 0 < params.top_k < len(z):
        z = np.where(z < np.sort(z)[-params.top_k], -np.inf, z)
    p = np.exp(z - z.max())
    p /= p.sum()
    if params.top_p < 1:
        order, mass = np.argsort(-p, kind="stable"), 0.0
        for v in order:
            if mass >= params.top_p:
                p[v] = 0.0
            else:
                mass += p[v]
        p /= p.sum()
    return p


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    temperature=st.floats(0.05, 5),
    top_p=st.floats(0.05, 1),
    top_k=st.integers(0, 12),
    u=st.floats(0, 1, exclude_max=True),
)
def test_filters_and_draw_agree_with_the_definition(seed, temperature, top_p, top_k, u):
    params = SamplingParams(temperature, top_p, top_k)
    logits = np.random.default_rng(seed).normal(0, 2, 10).astype(np.float32)
    got = token_probabilities(torch.from_numpy(logits)[None], params)[0].numpy()
    want = reference_probabilities(logits, params)
    boundary = np.abs(np.cumsum(np.sort(want)[::-1]) - top_p).min() < 1e-9
    if not boundary:
        np.testing.assert_allclose(got, want, atol=1e-12)
    token = int(draw_tokens(torch.from_numpy(logits)[None], torch.tensor([u], dtype=torch.float64), params))
    assert got[token] > 0
    assert got[:token].sum() <= u + 1e-12 and got[: token + 1].sum() >= u - 1e-12


def test_sampled_tokens_follow_the_distribution(backend):
    decoder = LockstepDecoder(backend, BatchShape(64, 8), SamplingParams(top_k=4), [])
    counts: dict[int, int] = {}
    for wave in range(30):
        decoder.rows.restart()
        turns = decoder.play_turn([TurnRequest([9, 30], 1, turn_seed(64 * wave + row, 0)) for row in range(64)])
        for turn in turns:
            counts[turn.ids[0]] = counts.get(turn.ids[0], 0) + 1
    with torch.no_grad():
        logits = backend.project(backend.hidden_states(torch.tensor([[9, 30]]))[:, -1])
    probs = token_probabilities(logits, SamplingParams(top_k=4))[0]
    for token in range(backend.vocab_size):
        p, n = probs[token].item(), 64 * 30
        assert abs(counts.get(token, 0) - n * p) <= 5 * (n * p * (1 - p)) ** 0.5 + 1e-9


# --- stop rules --------------------------------------------------------------------------------------------------


class Cut:
    """A tokenizer whose pieces are given; the first is the end token."""

    def __init__(self, pieces: list[str]) -> None:
        self.texts, self.eos_id, self.vocab_size = ["<eos>", *pieces], 0, len(pieces) + 1

    def decode(self, ids):
        return "".join(self.texts[i] for i in ids)


@settings(max_examples=150, deadline=None)
@given(
    pieces=st.lists(
        st.sampled_from(
            ["</", "</f", "fin", "al", "al>", ">", ">\n", "x", "</final", "</final>!", "é>", "l", "<", "/final>x"]
        ),
        min_size=1,
        max_size=8,
    ),
    turn=st.lists(st.integers(0, 100), min_size=1, max_size=40),
)
def test_the_rule_stops_where_a_full_decode_would(pieces, turn):
    tokenizer = Cut(pieces)
    ids = [1 + n % len(pieces) for n in turn]
    rule = StopRule(tokenizer, ["</final>", "</tool_call>"])
    fast = slow = None
    for n in range(1, len(ids) + 1):
        if slow is None and "</final>" in tokenizer.decode(ids[:n]):
            slow = n
        if fast is None and rule.candidates(np.array([ids[n - 1]]))[0] and rule.ends(ids[:n]):
            fast = n
    assert fast == slow
