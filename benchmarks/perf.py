"""The table of work against a reference figure and against the floor.

    python -m benchmarks.perf                     measure everything and print the table (about five minutes)
    python -m benchmarks.perf --only decode,loss  some rows
    python -m benchmarks.perf --write             also write benchmarks/results/perf.json and perf.md (with --only: these parts of them)

Everything runs on one torch thread and is given in CPU seconds of the process that did the work, the demo's wall time apart. Nothing here
asserts: the machines are shared and noisy, and a timed test would test the neighbours.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch

from benchmarks import perf_campaign, perf_gym, perf_loss, toy_learning
from miniverl.agent.loop import EpisodeSpec, RolloutRunner
from miniverl.cache.store import TeacherCache
from miniverl.core import canonical_json
from miniverl.environments.base import make_environment, make_splits
from miniverl.evaluation.schema import without_times
from miniverl.models.backend import Backend
from miniverl.models.toy import ToyBackend
from miniverl.reporting.records import eval_points, load_run
from miniverl.schemas.cache import CacheIdentity, TeacherTargets
from miniverl.schemas.config import RunConfig, ToyShape

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
Row = dict[str, str]
REFERENCE = (
    "The column `reference` holds figures of an earlier, independent implementation of the same work on another machine; "
    "they were not measured again here and are for orientation only."
)


def cpu_seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def row(work: str, reference: str, floor: str, ours: str, bar: str) -> Row:
    return {"work": work, "reference": reference, "floor": floor, "ours": ours, "bar": bar}


# --- decoding -----------------------------------------------------------------------------------------------------------------


def bare_decode(backend: Backend, steps: int, batch: int, capacity: int) -> None:
    """Nothing but `steps` batched greedy steps over a full slot cache: the floor of any runner."""
    cache = backend.new_cache(batch, capacity)
    ids = torch.zeros(batch, 1, dtype=torch.long)
    for step in range(steps):
        positions = torch.full((batch, 1), step, dtype=torch.long)
        ids = backend.project(backend.step(ids, positions, cache)).argmax(-1)


@torch.no_grad()
def decode(write: bool) -> Iterable[Row]:
    config = RunConfig.from_yaml(ROOT / "recipes" / "toy_cpu.yaml")
    environment = make_environment(config.environment)
    tasks = make_splits(environment, config.environment).train[:128]
    shape = ToyShape(hidden_size=96, num_layers=3, num_heads=4, intermediate_size=192)
    backend = ToyBackend.build(shape, seed=1)
    runner = RolloutRunner(backend, environment, config.rollout, batch_size=32)
    episodes = [EpisodeSpec(task=task, seed=i, trajectory_id=f"t{i}") for i, task in enumerate(tasks)]
    floor, ours = [], []
    for _ in range(5):
        played: list = []
        spent = cpu_seconds(lambda: played.extend(runner.run(episodes, temperature=0.0, policy_version=0)))  # noqa: B023
        ours.append(sum(t.generated_token_count for t in played) / spent)
        floor.append(32 * 80 / cpu_seconds(lambda: bare_decode(backend, 80, 32, config.rollout.max_total_tokens)))
    yield row(
        "greedy decode through the runner, 312k-parameter toy, batch 32",
        "750 tok/s one by one; 4,900 tok/s bare batched",
        f"{max(floor):,.0f} tok/s (bare steps over the same slots)",
        f"{max(ours):,.0f} tok/s (median {sorted(ours)[2]:,.0f} of 5)",
        ">= 4,000 tok/s",
    )


# --- whole runs ---------------------------------------------------------------------------------------------------------------


def recipe(write: bool) -> Iterable[Row]:
    """`recipes/toy_cpu.yaml` from nothing (teacher fitted each time); `write` keeps the record that the chapter shows."""
    record = toy_learning.measure()
    if write:
        toy_learning.write("toy_cpu", record)
    runs = record["runs"]
    spent = [run["cpu_seconds"] for run in runs]
    final = ", ".join(f"{run['curve'][-1]['success_rate']:.1%}" for run in runs)
    test = ", ".join(f"{run['test']['success_rate']:.1%}" for run in runs)
    yield row(
        f"recipes/toy_cpu.yaml from nothing, seeds {', '.join(str(run['seed']) for run in runs)}",
        "464 CPU s to 87.5 %, with a lucky seed",
        "-",
        f"{min(spent):.0f}-{max(spent):.0f} CPU s; eval split {final}; test split {test}",
        "<= 60 CPU s, >= 95 % on each seed",
    )


def demo(write: bool) -> Iterable[Row]:
    with tempfile.TemporaryDirectory() as folder:
        cpu, wall, _ = toy_learning.run_miniverl("demo", "--output", str(Path(folder, "demo")), "--json")
        points = eval_points(load_run(Path(folder, "demo")))
    curve = " -> ".join(f"{p.success:.1%} ({p.tag})" for p in points if p.tag in ("baseline", "cold-start", "final"))
    yield row(
        "miniverl demo after set-up",
        "118 CPU s, 0 % -> 0 %",
        "-",
        f"{wall:.0f} s wall, {cpu:.0f} CPU s, held-out {curve}",
        "<= 90 s wall, success rising",
    )


def benchmark(write: bool) -> Iterable[Row]:
    """The example benchmark from nothing, once, its repetition on another engine compared, and its plan."""
    config = "recipes/benchmark_calc.yaml"
    planned = min(toy_learning.run_miniverl("benchmark", config, "--plan", "--json")[0] for _ in range(3))
    with tempfile.TemporaryDirectory() as folder:
        first, wall, text = toy_learning.run_miniverl("benchmark", config, "--output", str(Path(folder, "a")), "--json")
        again, _, twin = toy_learning.run_miniverl("benchmark", config, "--output", str(Path(folder, "b")), "--json")
    results = [without_times(json.loads(told)) for told in (text, twin)]
    for result in results:
        del result["invocation"]  # it names the output folder
    same = "the same bytes" if canonical_json(results[0]) == canonical_json(results[1]) else "OTHER BYTES"
    yield row(
        f"{config}: 2 cold starts and 14 arms from nothing, teacher included",
        "1,342 CPU s a seed, about 45 CPU min in all",
        "-",
        f"{first:.0f} CPU s, {wall:.0f} s wall; repeated in {again:.0f} CPU s with {same} apart from times",
        "<= 360 CPU s, repeatable",
    )
    yield row("miniverl benchmark --plan", "no such option", "-", f"{planned:.2f} CPU s", "<= 1 s")


# --- cache bytes --------------------------------------------------------------------------------------------------------------


def made_up_targets(entries: int, positions: int, vocab: int, k: int) -> list[TeacherTargets]:
    """Valid targets of random distributions, as many and as long as a training cycle writes."""
    stream = np.random.default_rng(0)
    made = []
    for number in range(entries):
        logits = stream.normal(size=(positions, vocab)) * 3
        log_probs = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
        top = np.argsort(-log_probs, axis=1)[:, :k]
        kept = np.take_along_axis(log_probs, top, axis=1).astype(np.float32)
        tail = np.log1p(-np.minimum(np.exp(kept.astype(np.float64)).sum(1), 1 - 1e-12)).astype(np.float32)
        made.append(
            TeacherTargets(
                trajectory_id=f"calculator-easy-s7-{number}:v80:s{1234 + number}",
                policy_version=80,
                positions=np.arange(20, 20 + positions, dtype=np.int64),
                target_token_ids=stream.integers(0, vocab, positions),
                weights=np.ones(positions, dtype=np.float32),
                topk_indices=top.astype(np.int32),
                topk_log_probs=kept,
                tail_log_prob=tail,
                tail_is_exact_zero=False,
                span_types=("assistant_tool_call",) * (positions // 2)
                + ("assistant_final",) * (positions - positions // 2),
            )
        )
    return made


def cache_bytes(write: bool) -> Iterable[Row]:
    for dtype, bar in (("float16", "<= 90 B"), ("float32", "<= 150 B")):
        found = []
        for positions in (10, 20):
            with tempfile.TemporaryDirectory() as folder:
                identity = CacheIdentity(
                    teacher_model_id="toy-teacher", teacher_model_revision=None, tokenizer_fingerprint="0" * 64, tokenizer_identity={},
                    teacher_adapter_provenance=None, vocab_size=190, top_k=16, temperature=1.0, loss_mode="bucketed_topk_tail", dtype=dtype,
                )  # fmt: skip
                with TeacherCache.open(Path(folder, "c"), identity, entries_per_shard=32, dtype=dtype) as cache:
                    cache.write(made_up_targets(64, positions, 190, 16))
                    cache.flush()
                size = sum(f.stat().st_size for f in Path(folder, "c").rglob("*") if f.is_file())
                found.append(size / (64 * positions))
        yield row(
            f"cache bytes per selected position, K=16, V=190, {dtype}, index included",
            "217 B (float32)",
            f"{16 * (1 + (2 if dtype == 'float16' else 4))} B (ids and log-probs alone)",
            f"{found[1]:.0f} B at 20 positions a trajectory, {found[0]:.0f} B at 10",
            bar,
        )


# --- loss ---------------------------------------------------------------------------------------------------------------------


def loss(write: bool) -> Iterable[Row]:
    for case in perf_loss.measure():
        peak, chunk = case.get("peak_bytes"), case["chunk_bytes"]
        memory = (
            "" if peak is None else f"; peak {peak / 1e6:.0f} MB = {peak / chunk:.1f} chunks of {chunk / 1e6:.0f} MB"
        )
        yield row(
            f"chunked loss, forward + backward, {case['work']}",
            "70 ms for the loss on ready logits",
            f"{case['floor_s']:.3f} s (the two matrix products)",
            f"{case['ours_s']:.3f} s = {case['ratio']:.2f} x (median {case['median_ratio']:.2f} x){memory}",
            "<= 1.5 x, memory O(chunk x V)",
        )


# --- verify-gym -----------------------------------------------------------------------------------------------------------------


def gym(write: bool) -> Iterable[Row]:
    found = perf_gym.measure()
    works = {
        "answers": ("verify-gym, whole answers on the tightest held-out replies, one core", "xx 6.7/s with written-out powers", ">= 20,000/s for xx"),
        "side": ("verify-gym, one side of x^x at the largest bar, N = 10^6", "386 ms", "<= 1 ms"),
        "gate": ("verify-gym, forgery gate at load", "27.9 s with written-out powers", "<= 2 s"),
        "crosscheck": ("verify-gym, every held-out answer and forgery by both deciders", "14.6 s", "<= 20 s"),
        "long": ("verify-gym, a reply of 10 MB refused", "2.6 ms for 1 MB", "<= 50 ms, bounded memory"),
    }  # fmt: skip
    for key, (work, reference, bar) in works.items():
        floor, ours = found[key]
        yield row(work, reference, floor, ours, bar)


# --- campaigns ------------------------------------------------------------------------------------------------------------------


def campaign(write: bool) -> Iterable[Row]:
    found = perf_campaign.measure()
    works = {
        "record": ("campaign, one durable record", "<= 2 ms"),
        "controller": ("campaign, the controller for each trial, without editor and grader", "<= 50 ms"),
        "example": ("campaign, the example of nine trials", "<= 90 s wall on 2 cores"),
        "bootstrap": ("campaign, 100,000 bootstrap replicates, 2 families x 3 tasks x 5 repetitions", "<= 0.5 s"),
        "scoring": ("campaign, grading one case with SmolLM2-135M", "<= 1.3 x"),
    }
    for key, (work, bar) in works.items():
        floor, ours = found[key]
        yield row(work, "-", floor, ours, bar)


# --- the table ----------------------------------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[bool], Iterable[Row]]] = {
    "decode": decode,
    "cache": cache_bytes,
    "loss": loss,
    "recipe": recipe,
    "demo": demo,
    "benchmark": benchmark,
    "gym": gym,
    "campaign": campaign,
}


def table(rows: list[Row]) -> str:
    head = ["work", "reference", "floor", "ours", "bar"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(r[key] for key in head) + " |" for r in rows]) + "\n"


def machine() -> dict[str, object]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": 1,
        "cores": os.cpu_count(),
        "gpu": None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help="comma-separated parts: " + ", ".join(PARTS))
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/perf.json and perf.md")
    args = parser.parse_args()
    torch.set_num_threads(1)
    parts: dict[str, list[Row]] = {}
    for name in args.only.split(","):
        print(f"measuring {name}", file=sys.stderr)
        parts[name] = list(PARTS[name](args.write))
    print(table([row for rows in parts.values() for row in rows]))
    if args.write:
        write(parts)


def write(parts: dict[str, list[Row]]) -> None:
    """Replace the measured parts in the committed table; the others keep what was measured for them before."""
    kept = json.loads((RESULTS / "perf.json").read_text(encoding="utf-8"))["rows"]
    rows: list[Row] = []
    for name in PARTS:
        rows += (
            [{"part": name, **row} for row in parts[name]] if name in parts else [r for r in kept if r["part"] == name]
        )
    record = {"command": "python -m benchmarks.perf --write", "machine": machine(), "rows": rows}
    (RESULTS / "perf.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    facts = ", ".join(f"{key} {value}" for key, value in machine().items())
    text = f"# Performance\n\nMade by `{record['command']}` ({facts}). CPU seconds unless it says wall.\n{REFERENCE}\n\n{table(rows)}"
    (RESULTS / "perf.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
