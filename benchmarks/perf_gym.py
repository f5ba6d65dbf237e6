"""How fast verify-gym decides: whole answers, the worst side, the gate, both deciders, and a reply that is too long."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

from miniverl.verify_gym.answer import grade
from miniverl.verify_gym.curriculum import heldout
from miniverl.verify_gym.exact import cmp_xx
from miniverl.verify_gym.policies import run_policy

ROOT = Path(__file__).resolve().parents[1]
PROJECT = ROOT / "environments" / "verify_gym"


def best(work: Callable[[], object], tries: int = 5) -> float:
    """Least CPU seconds of a few tries."""
    spent = []
    for _ in range(tries):
        start = time.process_time()
        work()
        spent.append(time.process_time() - start)
    return min(spent)


def answers_per_second(family: str) -> float:
    """Whole answers (read, both sides, decimals, progress) of the tightest policy on the held-out rows of a family."""
    tasks = [task for task in heldout() if task.family == family]
    replies = run_policy("cf", tasks)
    rounds = 20

    def work() -> None:
        for _ in range(rounds):
            for task, reply in zip(tasks, replies, strict=True):
                grade(task, reply)

    return rounds * len(tasks) / best(work)


def worst_side() -> tuple[float, float]:
    """Seconds of a side at the largest bar with the largest N: the fast path, and the powers written out."""
    bar = (99_999, 99_998)
    fast = best(lambda: [cmp_xx(10**6, bar) for _ in range(200)]) / 200
    return fast, best(lambda: cmp_xx(10**6, bar, exact=True), 2)


def long_reply() -> tuple[float, int]:
    """Seconds to refuse a reply of 10 MB, and the peak of what was allocated for it."""
    task, reply = heldout()[0], "<answer>" + "9" * 10_000_000 + ", 2</answer>"
    spent = best(lambda: grade(task, reply))
    tracemalloc.start()
    grade(task, reply)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return spent, peak


def run(*words: str) -> tuple[float, float, str]:
    """CPU seconds (children included), wall seconds and what a command of the project printed."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    path = os.pathsep.join((str(PROJECT), str(ROOT)))
    done = subprocess.run(
        [sys.executable, *words],
        cwd=PROJECT,
        env=os.environ | {"PYTHONPATH": path},
        check=True,
        capture_output=True,
        text=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return spent, time.perf_counter() - start, done.stdout.strip()


def measure() -> dict[str, tuple[str, str]]:
    """What was measured: work -> (floor, ours)."""
    rates = {family: answers_per_second(family) for family in ("xx", "kroot", "poly")}
    fast, powers = worst_side()
    seconds, peak = long_reply()
    gate, _, told = run("-m", "verify_gym.cli", "gate")
    logs, exact = run("crosscheck.py"), run("crosscheck.py", "--exact")
    return {
        "answers": ("-", ", ".join(f"{family} {rate:,.0f}/s" for family, rate in rates.items())),
        "side": (f"{powers * 1e3:,.0f} ms (the powers written out)", f"{fast * 1e3:.3f} ms"),
        "gate": ("-", f"{gate:.2f} CPU s, interpreter included: {told.splitlines()[0]}"),
        "crosscheck": (
            f"{exact[1]:.1f} s wall, {exact[0]:.1f} CPU s with whole powers",
            f"{logs[1]:.1f} s wall, {logs[0]:.1f} CPU s: {logs[2].splitlines()[-1]}",
        ),
        "long": ("-", f"{seconds * 1e3:.1f} ms, peak {peak / 1e3:,.0f} kB"),
    }
