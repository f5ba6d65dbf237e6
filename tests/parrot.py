"""A backend for tests of generation and rollouts: it says what it is told to say."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from miniverl.schemas.trajectory import Trajectory


class ParrotSlots:
    """Slots that hold the tokens themselves, Long[B, capacity + 1]."""

    def __init__(self, batch: int, capacity: int) -> None:
        self.ids, self.capacity = torch.zeros(batch, capacity + 1, dtype=torch.long), capacity

    def copy_prefix_from(self, other: ParrotSlots, length: int) -> None:
        self.ids[:, :length] = other.ids[:1, :length]


class Parrot:
    """Continues every prefix as `say(ids) -> token` tells it to; the hidden state is the next token, one-hot."""

    name, device, max_positions = "parrot", torch.device("cpu"), 4096

    def __init__(self, say: Callable[[list[int]], int], tokenizer) -> None:
        self.say, self.tokenizer, self.vocab_size = say, tokenizer, tokenizer.vocab_size
        self.hidden_size, self.module, self.steps = tokenizer.vocab_size, torch.nn.Module(), 0

    def identity(self) -> dict:
        return {"backend": self.name, "model_id": self.name, "revision": "1"}

    def new_cache(self, batch: int, capacity: int) -> ParrotSlots:
        return ParrotSlots(batch, capacity)

    def step(self, token_ids, positions, cache: ParrotSlots):
        self.steps += 1
        cache.ids.scatter_(1, positions, token_ids)
        hidden = torch.zeros(*token_ids.shape, self.vocab_size)
        for row, column in (positions < cache.capacity).nonzero().tolist():
            hidden[row, column, self.say(cache.ids[row, : positions[row, column] + 1].tolist())] = 1.0
        return hidden

    def project(self, hidden):
        return hidden

    def train(self) -> None:
        self.module.train()

    def eval(self) -> None:
        self.module.eval()


def recite(traces: Iterable[Trajectory]) -> Callable[[list[int]], int]:
    """A rule that continues any prefix of these traces as they go on."""
    following = {t.token_ids[:j]: t.token_ids[j] for t in traces for j in t.model_positions()}
    return lambda ids: following.get(tuple(ids), 0)


def scripted(tokenizer, scripts: dict[str, list[str]]) -> Callable[[list[int]], int]:
    """A rule that answers the question `key` with its lines, one a turn; "$" at the end of a line is the end token."""
    header = tokenizer.encode("<|im_start|>assistant\n", special=True)

    def line_ids(line: str) -> list[int]:
        return tokenizer.encode(line.removesuffix("$"), special=True) + [tokenizer.eos_id] * line.endswith("$")

    lines = {key: [line_ids(line) for line in script] for key, script in scripts.items()}

    def say(ids: list[int]) -> int:
        starts = [n + len(header) for n in range(len(ids)) if ids[n : n + len(header)] == header]
        text = tokenizer.decode(ids)
        script = next((lines[key] for key in lines if f"user\n{key}<|im_end|>" in text), None)
        if script is None or not starts or len(starts) > len(script):
            return 0
        said = len(ids) - starts[-1]
        return script[len(starts) - 1][said] if said < len(script[len(starts) - 1]) else 0

    return say
