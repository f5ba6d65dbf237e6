"""Train two toy recipes from nothing on several seeds and keep what was seen.

    python -m benchmarks.toy_learning                 recipes/toy_cpu.yaml -> benchmarks/results/toy_cpu.json
    python -m benchmarks.toy_learning --recipe demo   the demo's recipe -> benchmarks/results/toy_demo.json
    python -m benchmarks.toy_learning --seeds 7,8     other seeds, printed only
    python -m benchmarks.toy_learning --redraw        only the front page's picture, from the committed record

`toy_cpu` has a long cold start and is meant to arrive; `demo` has a short one and leaves the learning to on-policy distillation.

Each seed is a process of its own with an empty output folder, so its CPU seconds hold everything: imports, the teacher's fit,
the cold start, the distillation and all evaluations. Afterwards the final checkpoint plays the test split, on which
nothing is trained and no checkpoint is chosen; that pass is not in the CPU seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import yaml

from miniverl.core import canonical_json, read_json, sha256_bytes
from miniverl.demo import DEMO_RECIPE
from miniverl.reporting.learning import seed_curves
from miniverl.reporting.records import cold_start_steps, eval_points, load_run, phase_seconds

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PICTURE = ROOT / "docs" / "images" / "toy-learning.svg"
SEEDS = (1, 2, 3, 4, 5)


def run_miniverl(*arguments: str) -> tuple[float, float, str]:
    """CPU seconds, wall seconds and standard output of `miniverl arguments ...`, on one thread."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", "from miniverl.cli import main; main()", *arguments],
        env=env,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return spent, time.perf_counter() - start, done.stdout


def recipe_text(name: str) -> tuple[str, str]:
    """Where a recipe is, and its text."""
    if name == "demo":
        return "miniverl.demo.DEMO_RECIPE", DEMO_RECIPE
    return "recipes/toy_cpu.yaml", (ROOT / "recipes" / "toy_cpu.yaml").read_text(encoding="utf-8")


def run_seed(text: str, seed: int) -> dict:
    """One training run; its curve, its phases and its success on the test split."""
    mapping = yaml.safe_load(text)
    mapping["run"]["seed"] = seed
    with tempfile.TemporaryDirectory() as folder:
        recipe, run = Path(folder, "recipe.yaml"), Path(folder, "run")
        recipe.write_text(yaml.safe_dump(mapping), encoding="utf-8")
        cpu, wall, _ = run_miniverl("train", str(recipe), "--output", folder, "--run-id", "run", "--no-report")
        records = load_run(run)
        _, _, text = run_miniverl("eval", "--run", str(run), "--split", "test", "--json")
    test = json.loads(text)
    points = [
        {"step": p.step, "tag": p.tag, "success_rate": round(p.success, 6), "tasks": p.tasks}
        for p in eval_points(records)
    ]
    return {
        "seed": seed,
        "cpu_seconds": round(cpu, 1),
        "wall_seconds": round(wall, 1),
        "cold_start_steps": cold_start_steps(records),
        "curve": points,
        "test": {"success_rate": round(test["success_rate"], 6), "tasks": test["tasks"]},
        "phase_seconds": {name: round(value, 2) for name, value in sorted(phase_seconds(records).items())},
    }


def measure(name: str = "toy_cpu", seeds: tuple[int, ...] = SEEDS) -> dict:
    """The record that the chapter and the front page show."""
    where, text = recipe_text(name)
    runs: list[dict] = []
    for seed in seeds:
        runs.append(run_seed(text, seed))
        last = runs[-1]
        print(
            f"seed {seed}: {last['cpu_seconds']} CPU s, eval {last['curve'][-1]['success_rate']:.1%}, test {last['test']['success_rate']:.1%}",
            file=sys.stderr,
        )
    return {
        "command": "python -m benchmarks.toy_learning" + (" --recipe demo" if name == "demo" else ""),
        "recipe": where,
        "recipe_sha256": sha256_bytes(text),
        "torch": torch.__version__,
        "threads": 1,
        "device": "cpu",
        "runs": runs,
    }


def write(name: str, record: dict) -> None:
    """The committed record; the demo's is also the picture of the front page."""
    files = {RESULTS / ("toy_demo.json" if name == "demo" else "toy_cpu.json"): canonical_json(record)}
    if name == "demo":
        files[PICTURE] = seed_curves(record)
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", choices=("toy_cpu", "demo"), default="toy_cpu")
    parser.add_argument(
        "--seeds", default="", help="comma-separated seeds; prints instead of writing the committed record"
    )
    parser.add_argument("--redraw", action="store_true", help="draw the committed record of the demo again")
    args = parser.parse_args()
    if args.redraw:
        write("demo", read_json(RESULTS / "toy_demo.json"))
    elif args.seeds:
        print(canonical_json(measure(args.recipe, tuple(int(s) for s in args.seeds.split(",")))), end="")
    else:
        write(args.recipe, measure(args.recipe))


if __name__ == "__main__":
    main()
