"""What the chunked bucketed loss costs beside the matrix products that no loss can avoid.

    python -m benchmarks.perf_loss

The floor is logits = H W^T and dH = dz W, nothing else; both sides run on one torch thread and are repeated alternately, in CPU
seconds. Peak memory is the growth of the resident set in a fresh process, so that it includes the libraries' own workspaces.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from miniverl.losses.bucketed import BucketedTargets
from miniverl.losses.chunked import chunked_loss
from miniverl.losses.divergences import LossSpec

VOCAB, TOP_K, POSITIONS = 151_936, 64, 64
SPECS = {
    "reverse_kl": LossSpec(),
    "reverse_kl, tau 2, nll 0.1": LossSpec(temperature=2.0, nll_weight=0.1),
    "nll only": None,
}


def _inputs(hidden_size: int, rows: int, spec: LossSpec | None) -> tuple[torch.Tensor, torch.Tensor, dict]:
    g = torch.Generator().manual_seed(0)
    weight = torch.empty(VOCAB, hidden_size).normal_(std=hidden_size**-0.5, generator=g)
    hidden = torch.randn(rows, hidden_size, generator=g)
    ids = torch.stack([torch.randperm(VOCAB, generator=g)[:TOP_K] for _ in range(rows)])
    kept = torch.log_softmax(4 * torch.randn(rows, TOP_K, generator=g), -1) - 0.05
    tail = torch.log1p(-kept.exp().sum(1))
    targets = None if spec is None else BucketedTargets(ids, kept, tail, torch.zeros(rows, dtype=torch.bool))
    options = {
        "target_token_ids": ids[:, 0],
        "coefficients": torch.full((rows,), 1 / rows),
        "targets": targets,
        "spec": spec or LossSpec(),
    }
    return hidden, weight, options


def _floor(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (hidden @ weight.t()) @ weight


def _ours(hidden: torch.Tensor, weight: torch.Tensor, options: dict, chunk_size: int) -> torch.Tensor | None:
    leaf = hidden.detach().requires_grad_()
    chunked_loss(leaf, weight, None, chunk_size=chunk_size, **options).loss.backward()
    return leaf.grad


def _seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def _peak_bytes(side: str, hidden_size: int, rows: int, chunk_size: int, spec_name: str) -> int | None:
    """Growth of the resident set by one run of one side, in a fresh process; None where the system does not tell."""
    if not Path("/proc/self/clear_refs").exists():
        return None
    call = [sys.executable, "-m", "benchmarks.perf_loss", side, str(hidden_size), str(rows), str(chunk_size), spec_name]
    return int(subprocess.run(call, check=True, capture_output=True, text=True).stdout)


def _resident(field: str) -> int:
    """VmRSS (now) or VmHWM (highest since the last reset) of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field + ":")).split()[1])


def _report_peak(side: str, hidden_size: int, rows: int, chunk_size: int, spec_name: str) -> None:
    torch.set_num_threads(1)
    hidden, weight, options = _inputs(hidden_size, rows, SPECS[spec_name])
    small = options | {
        "targets": None,
        "target_token_ids": torch.zeros(1, dtype=torch.long),
        "coefficients": torch.ones(1),
    }
    _ours(hidden[:1], weight[:64], small, 1)  # load what is loaded once
    Path("/proc/self/clear_refs").write_text("5")  # forget the high-water mark
    before = _resident("VmRSS")
    if side == "floor":
        _floor(hidden, weight)
    else:
        _ours(hidden, weight, options, chunk_size)
    print(_resident("VmHWM") - before)


def measure(repeats: int = 5, *, memory: bool = True) -> list[dict]:
    """Time and peak memory of each case against its floor, with inputs already in memory and a frozen head.

    Returns
    -------
    list[dict]
        `work`, `floor_s` and `ours_s` (fastest of the repeats, CPU seconds), `ratio` of these, `median_ratio` of the medians,
        `floor_peak_bytes`, `peak_bytes`, `chunk_bytes` (one float32 chunk of logits).
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    cases = [
        (1024, 256, "reverse_kl"),
        (896, 256, "reverse_kl"),
        (1024, 16, "reverse_kl"),
        (1024, 256, "reverse_kl, tau 2, nll 0.1"),
        (1024, 256, "nll only"),
    ]
    try:
        return [_measure_one(*case, repeats=repeats, memory=memory) for case in cases]
    finally:
        torch.set_num_threads(threads)


def _measure_one(hidden_size: int, chunk_size: int, spec_name: str, *, repeats: int, memory: bool) -> dict:
    hidden, weight, options = _inputs(hidden_size, POSITIONS, SPECS[spec_name])
    # A chunk smaller than the batch reads the head once per chunk, and so does its floor.
    pieces = hidden.split(chunk_size)
    floor: list[float] = []
    ours: list[float] = []
    for repeat in range(repeats + 1):
        pair = (
            _seconds(lambda: [_floor(piece, weight) for piece in pieces]),
            _seconds(lambda: _ours(hidden, weight, options, chunk_size)),
        )
        if repeat:  # the first pair warms up
            floor.append(pair[0])
            ours.append(pair[1])
    rows = min(chunk_size, POSITIONS)
    row = {
        "work": f"V={VOCAB:,} K={TOP_K} N={POSITIONS} H={hidden_size} chunk={rows}: {spec_name}",
        "floor_s": min(floor),
        "ours_s": min(ours),
        "ratio": min(ours) / min(floor),
        "median_ratio": statistics.median(ours) / statistics.median(floor),
        "chunk_bytes": rows * VOCAB * 4,
    }
    if memory:
        row["floor_peak_bytes"] = _peak_bytes("floor", hidden_size, POSITIONS, chunk_size, spec_name)
        row["peak_bytes"] = _peak_bytes("ours", hidden_size, POSITIONS, chunk_size, spec_name)
    return row


if __name__ == "__main__":
    if sys.argv[1:]:
        _report_peak(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
    else:
        for result in measure():
            print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in result.items()}))
