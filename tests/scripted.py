"""A backend that writes given lines: real tokenizer, real decoder loop, no model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from miniverl.models.backend import Backend, KVSlots


class Scripted(Backend):
    """Writes ``lines[t]`` (token ids) in assistant turn `t`, then ends the turn.

    The slots hold token ids instead of keys, and the hidden state is the next id; so the tokens that a row sees must be its own.
    """

    name = "scripted"

    def __init__(self, tokenizer, lines: Sequence[Sequence[int]], vocab_size: int | None = None) -> None:
        self.tokenizer, self.lines, self.module = tokenizer, [list(line) for line in lines], torch.nn.Module()
        self.vocab_size, self.hidden_size, self.max_positions = vocab_size or tokenizer.vocab_size, 1, 4096
        self.header = tokenizer.encode("<|im_start|>assistant\n", special=True)

    device = torch.device("cpu")

    def identity(self) -> dict:
        return {"backend": self.name, "model_id": self.name, "revision": None}

    def hidden_states(self, token_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return torch.stack([self._row(row.tolist()) for row in token_ids])

    def head(self):
        raise NotImplementedError

    def project(self, hidden: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(hidden[..., 0].long(), self.vocab_size).float()

    def new_cache(self, batch: int, capacity: int) -> KVSlots:
        return KVSlots.empty(1, batch, capacity, 1, 1, dtype=torch.float64, device=self.device)

    def step(self, token_ids: Tensor, positions: Tensor, cache: KVSlots) -> Tensor:
        ids = token_ids.double()[..., None, None]
        seen, _ = cache.write(0, positions, ids, ids)
        hidden = torch.zeros(*token_ids.shape, 1, dtype=torch.float64)
        for row, column in (positions < cache.capacity).nonzero().tolist():
            prefix = seen[row, : int(positions[row, column]) + 1, 0, 0].long().tolist()
            hidden[row, column, 0] = self._next(prefix)
        return hidden

    def _row(self, ids: list[int]) -> Tensor:
        return torch.tensor([[self._next(ids[: n + 1])] for n in range(len(ids))], dtype=torch.float64)

    def _next(self, prefix: list[int]) -> int:
        size = len(self.header)
        starts = [n + size for n in range(len(prefix) - size + 1) if prefix[n : n + size] == self.header]
        if not starts or len(starts) > len(self.lines):
            return self.tokenizer.eos_id
        line, written = self.lines[len(starts) - 1], len(prefix) - starts[-1]
        return line[written] if written < len(line) else self.tokenizer.eos_id
