"""What a campaign costs beside the work of its editors and graders: records, the controller, the example, intervals, scoring.

Nothing here is a model's speed except the last figure, which needs the folder that `tools/convert_smollm2.py` makes, named by
MINIVERL_SMOLLM2.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from miniverl.campaign.controller import run_campaign
from miniverl.campaign.fixture import write_fixture
from miniverl.campaign.intervals import bootstrap_ci
from miniverl.campaign.manifest import prepare
from miniverl.campaign.records import Schema, write_record
from miniverl.core import canonical_json
from miniverl.store import fsync_dir

ROOT = Path(__file__).resolve().parents[1]
CASES = [
    ("The capital of Portugal is", " Lisbon."),
    ("In the morning I drink a cup of", " coffee with milk and sugar"),
    ("def add(a, b):\n    return", " a + b"),
    ("She opened the door and walked into the", " room."),
]  # fmt: skip


def quantiles(seconds: list[float]) -> str:
    """Median and 95th percentile in milliseconds."""
    return f"{1000 * statistics.median(seconds):.2f} ms, p95 {1000 * statistics.quantiles(seconds, n=20)[-1]:.2f} ms"


def each(work: Callable[[int], object], times: int) -> list[float]:
    """Wall seconds of every one of so many calls."""
    spent = []
    for number in range(times):
        start = time.perf_counter()
        work(number)
        spent.append(time.perf_counter() - start)
    return spent


def durable_record(times: int = 200) -> tuple[str, str]:
    """One record of a trial, and the system calls that no durable record can do without: write, fsync, link, unlink, fsync."""
    body = {"status": "ok", "result": {"stdout": "x" * 400}, "index": 1}

    with tempfile.TemporaryDirectory() as place:
        text = canonical_json(body).encode()

        def bare(number: int) -> None:
            handle, temp = tempfile.mkstemp(dir=place)
            os.write(handle, text)
            os.fsync(handle)
            os.close(handle)
            os.link(temp, f"{place}/bare-{number}")
            os.unlink(temp)
            fsync_dir(place)

        def record(number: int) -> None:
            write_record(f"{place}/{number}.json", Schema.HISTORY, "0" * 64, "trial", body)

        bare(-1), record(-1)
        both = [(each(lambda _: bare(n), 1), each(lambda _: record(n), 1)) for n in range(times)]  # noqa: B023
    floor, ours = ([one for pair in both for one in pair[column]] for column in (0, 1))
    return quantiles(floor), quantiles(ours)


def controller_overhead() -> str:
    """Wall milliseconds for each trial of nine, when editors and graders take no time."""
    sys.path.insert(0, str(ROOT / "tests"))
    try:
        import campaign_fakes as fakes

        spent = []
        for _ in range(5):
            with tempfile.TemporaryDirectory() as place:
                root = fakes.sealed(Path(place)).layout.root
                start = time.perf_counter()
                status = run_campaign(root, backend=fakes.FakeBackend(), grader=fakes.FakeGrader())
                spent.append((time.perf_counter() - start) / len(status.rows))
    finally:
        sys.path.pop(0)
    return f"{1000 * min(spent):.0f} ms (median of 5: {1000 * statistics.median(spent):.0f} ms)"


def example() -> str:
    """Wall seconds of the example campaign, real editors and a real grader."""
    with tempfile.TemporaryDirectory() as place:
        config = write_fixture(Path(place, "fixture"))
        marks = [time.perf_counter()]
        root = prepare(config, Path(place, "campaign")).root
        marks.append(time.perf_counter())
        status = run_campaign(root)
        marks.append(time.perf_counter())
    if status.counts != {"completed": 9}:
        raise SystemExit(f"the example campaign did not complete: {status.counts}")
    return f"{marks[2] - marks[1]:.0f} s wall to run, {marks[1] - marks[0]:.0f} s to prepare; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"


def bootstrap() -> str:
    """Seconds of the three intervals' one, at the smallest design that is no less than the floors."""
    stream = random.Random(0)
    values = {
        f: {f"{f}{t}": [stream.gauss(0.2, 0.1) for _ in range(5)] for t in range(3)} for f in ("a", "b")
    }  # fmt: skip
    return f"{min(each(lambda _: bootstrap_ci(values, 20261130, 100_000), 5)):.2f} s"


def scoring() -> tuple[str, str]:
    """CPU seconds for a case: the bare forward passes, and the scores of the grader."""
    folder = os.environ.get("MINIVERL_SMOLLM2", "")
    if not Path(folder, "model.safetensors").is_file():
        return "-", "not measured (MINIVERL_SMOLLM2 names no converted folder)"
    import torch

    from miniverl.wsm.model import WeightModel
    from miniverl.wsm.scoring import encode

    model, cases = WeightModel.load(folder), [{"prompt": prompt, "target": target} for prompt, target in CASES]
    rows = [torch.tensor([encode(model.tokenizer, p) + encode(model.tokenizer, t)]) for p, t in CASES]

    @torch.no_grad()
    def forward() -> None:
        for ids in rows:
            model.module(input_ids=ids)

    def cpu(work: Callable[[], object]) -> float:
        start = time.process_time()
        work()
        return time.process_time() - start

    forward()
    pairs = [(cpu(forward) / len(cases), cpu(lambda: model.evaluate(cases)) / len(cases)) for _ in range(9)]
    floor, ours = (statistics.median(column) for column in zip(*pairs, strict=True))
    return f"{1000 * floor:.0f} ms (bare forward)", f"{1000 * ours:.0f} ms = {ours / floor:.2f} x"


def measure() -> dict[str, tuple[str, str]]:
    """Floor and own figure of every line."""
    return {
        "record": durable_record(),
        "controller": ("-", controller_overhead()),
        "example": ("-", example()),
        "bootstrap": ("-", bootstrap()),
        "scoring": scoring(),
    }
