"""The harness as a whole: what it runs, what it refuses beforehand, what it reports."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmark_tiny import ALLOWED, OPD, SFT, ZERO, little_garbage, mapping, timeless, tiny_benchmark

from miniverl.core import ConfigError, LockError, StoreError, UsageError
from miniverl.evaluation import benchmark, units
from miniverl.evaluation.benchmark import benchmark_units, run_benchmark
from miniverl.evaluation.design import resolve_design
from miniverl.evaluation.schema import BenchmarkResult
from miniverl.models.backend import Backend
from miniverl.store import RunDir, read_journal, run_lock
from miniverl.training.accounting import totals_of
from miniverl.training.checkpoints import verify_checkpoint


@pytest.fixture(autouse=True, scope="module")
def quick():
    """Cheap collections; commits and edits that happen while the tests run are none of their business."""
    with little_garbage(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmark, "git_commit", lambda path: None)
        patch.setattr(benchmark, "source_digest", lambda: "0" * 64)
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory, quick):
    """Three arms, two seeds, run once in this process."""
    folder, told = tmp_path_factory.mktemp("whole") / "out", []
    spec = tiny_benchmark(arms=[ZERO, SFT, OPD], seeds=[5, 6])
    result = run_benchmark(
        spec, output=folder, notes="n", invocation=["miniverl", "x"], on_progress=lambda *what: told.append(what)
    )
    return spec, folder, result, told


def test_files_and_rows(whole):
    spec, folder, result, told = whole
    assert sorted(p.name for p in folder.iterdir() if not p.name.startswith(".")) == sorted(
        [f"tiny-{arm}-s{seed}" for arm in ("coldstart", "start", "sft", "opd") for seed in (5, 6)]
        + ["tiny.benchmark", "tiny.json", "tiny.md"]
    )
    assert not list(folder.glob(".tmp*"))
    assert [(row.name, row.seed) for row in result.arms] == [(a, s) for s in (5, 6) for a in ("start", "sft", "opd")]
    assert BenchmarkResult.read(folder / "tiny.json") == result
    assert result.to_json() == (folder / "tiny.json").read_text()
    assert (result.notes, result.invocation, result.seeds) == ("n", ["miniverl", "x"], [5, 6])
    assert [(done, total) for phase, done, total, _ in told if phase == "units"] == [(i, 9) for i in range(1, 10)]


def test_every_arm_begins_with_the_cold_start_of_its_seed(whole):
    _, folder, result, _ = whole
    colds = {row["seed"]: row for row in result.cold_start["checkpoints"]}
    assert set(colds) == {5, 6} and colds[5]["checkpoint_digest"] != colds[6]["checkpoint_digest"]
    for row in result.arms:
        cold = verify_checkpoint(folder / f"tiny-coldstart-s{row.seed}" / "checkpoints" / "final")
        assert cold.content_digest == colds[row.seed]["checkpoint_digest"] and cold.global_step == 2
        assert row.initial_weights_digest == cold.weights_digest
        (event,) = [e for e in read_journal(folder / row.run_dir / "events.jsonl") if e["event"] == units.COLD_EVENT]
        assert event["note"] == "weights only; optimizer state and RNG intentionally not restored"
        assert event["content_digest"] == cold.content_digest
        assert (row.final_weights_digest == cold.weights_digest) == (row.name == "start")


def test_moments_and_random_state_of_the_cold_start_stay_behind(whole, monkeypatch, tmp_path):
    seen = []

    class Watched(units.OPDTrainer):
        def load_weights(self, *args, **kwargs):
            before = torch.get_rng_state()
            found = super().load_weights(*args, **kwargs)
            seen.append((self.optimizer.steps, torch.equal(before, torch.get_rng_state())))
            return found

    monkeypatch.setattr(units, "OPDTrainer", Watched)
    run_benchmark(tiny_benchmark(arms=[SFT]), output=tmp_path / "out")
    assert seen == [(0, True)]


def test_numbers_come_from_the_records(whole):
    _, folder, result, _ = whole
    for row in result.arms:
        run = RunDir(folder / row.run_dir)
        totals = totals_of(read_journal(run.metrics))
        assert row.optimizer_steps == totals.optimizer_steps == (0 if row.name == "start" else 2)
        assert row.selected_training_tokens_total == totals.selected_training_tokens_total
        answer = json.loads(run.eval_tagged(f"benchmark-{row.name}").read_text())
        assert row.success_rate == answer["success_rate"] and row.tasks == answer["tasks"] == 2
        assert answer["checkpoint"]["weights_digest"] == row.final_weights_digest
        assert answer["split"] == "test" and answer["tag"] == f"benchmark-{row.name}"


def test_controls(whole):
    _, _, result, _ = whole
    said = result.controlled
    assert said["shared_initial_checkpoint"] is True and said["eval_split"] == "test"
    assert said["arms_differ_in"] == {"start": ["run.mode", "train.cycles"], "sft": ["run.mode"], "opd": []}
    assert said["digest"] == result.common_declared_config_digest == result.common_resolved_config_digest
    assert said["allowed_differences"] == ALLOWED and said["budget"]["violations"] == []
    assert said["declared_seeds"] == [5, 6] and said["declared_arms"] == ["start", "sft", "opd"]
    assert result.digest_faults() == []


def test_one_toy_teacher_is_fitted_for_all(whole):
    _, folder, result, _ = whole
    assert len(result.teacher_preparation) == 1 and len(list((folder / ".toy-teachers").glob("*.json"))) == 1
    digest = result.teacher_preparation[0]["digest"]
    assert {row.teacher_digest for row in result.arms if row.mode == "opd"} == {digest}


def test_two_processes_at_a_time_give_the_same_result(whole, tmp_path):
    spec, _, result, _ = whole
    again = run_benchmark(spec, output=tmp_path / "out", notes="n", invocation=["miniverl", "x"], jobs=2)
    assert timeless(again) == timeless(result)


def test_nothing_of_an_arm_is_alive_when_the_next_one_begins(monkeypatch, tmp_path):
    left = []

    class Watched(units.OPDTrainer):
        def __init__(self, *args, **kwargs):
            gc.collect()
            kinds = [type(o) for o in gc.get_objects()]
            left.append(sum(issubclass(kind, (torch.nn.Module, torch.Tensor, Backend)) for kind in kinds))
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(units, "OPDTrainer", Watched)
    gc.collect()
    gc.freeze()
    run_benchmark(tiny_benchmark(arms=[OPD, SFT]), output=tmp_path / "out")
    assert left == [0, 0, 0], "cold start, on-policy arm, supervised arm: each begins with no model in memory"


@pytest.mark.parametrize("last", ["tiny-opd-s6", "tiny.benchmark", "tiny.json", "tiny.md"])
def test_a_collision_is_found_before_anything_exists(tmp_path, last):
    out = tmp_path / "out"
    (out / last).mkdir(parents=True)
    with pytest.raises(StoreError, match=f"{last} exists already"):
        run_benchmark(tiny_benchmark(seeds=[5, 6]), output=out)
    assert sorted(p.name for p in tmp_path.rglob("*")) == sorted(["out", last])


def test_a_cache_folder_elsewhere_is_looked_at_too(tmp_path):
    base = {**mapping()["base"], "cache": {"dir": str(tmp_path / "cache")}}
    (tmp_path / "cache" / "tiny-opd-s5").mkdir(parents=True)
    with pytest.raises(StoreError, match="cache/tiny-opd-s5 exists already"):
        run_benchmark(tiny_benchmark(base=base), output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_refused_beforehand_leaves_nothing(tmp_path):
    out = tmp_path / "out"
    swap = {"name": "swap", "overrides": {"memory": {"strategy": "swap"}}}
    cases = [
        (ConfigError, "tiny-swap-s5", {"arms": [SFT, swap], "allowed_differences": [*ALLOWED, "memory.*"]}, {}),
        (
            ConfigError,
            "train.learning_rate",
            {"arms": [{"name": "a", "overrides": {"train": {"learning_rate": 1}}}]},
            {},
        ),
        (UsageError, "seeds", {}, {"seeds": [7]}),
        (UsageError, "arms", {}, {"arms": ["nosuch"]}),
        (UsageError, "jobs", {}, {"jobs": 0}),
        (UsageError, "nosuch", {}, {"engine": "nosuch"}),
    ]
    for kind, text, over, options in cases:
        with pytest.raises(kind, match=text):
            run_benchmark(tiny_benchmark(**over), output=out, **options)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StoreError, match="no folder"):
            run_benchmark(tiny_benchmark(), output=place)


def test_without_a_cold_start(tmp_path):
    result = run_benchmark(tiny_benchmark(cold_start_cycles=0, arms=[ZERO, SFT]), output=tmp_path)
    assert result.controlled["shared_initial_checkpoint"] is False
    assert result.cold_start["cycles"] == 0 and result.cold_start["checkpoints"] == []
    assert not list(tmp_path.glob("*coldstart*"))
    assert [row.optimizer_steps for row in result.arms] == [0, 2]
    events = [e["event"] for e in read_journal(tmp_path / "tiny-sft-s5" / "events.jsonl")]
    assert units.COLD_EVENT not in events


def test_unequal_steps_are_declared_and_still_reported(tmp_path):
    more = {"name": "more", "overrides": {"run": {"mode": "sft"}, "train": {"cycles": 3}}}
    result = run_benchmark(tiny_benchmark(cold_start_cycles=0, arms=[ZERO, SFT, more]), output=tmp_path)
    (violation,) = result.controlled["budget"]["violations"]
    assert "2: sft (seed 5)" in violation and "3: more (seed 5)" in violation
    assert result.controlled["budget"]["zero_step_arms"] == ["start"]
    assert violation.replace("_", "\\_") in (tmp_path / "tiny.md").read_text()


def test_a_budget_of_selected_tokens(tmp_path):
    spec = tiny_benchmark(
        budget_axis="selected_training_tokens",
        budget=60,
        base={**mapping()["base"], "train": {**mapping()["base"]["train"], "cycles": 40}},
    )
    result = run_benchmark(spec, output=tmp_path)
    assert result.controlled["budget"]["violations"] == []
    assert {row.stopped_by for row in result.arms} == {"selected_training_tokens"}
    assert all(row.selected_training_tokens_total >= 60 for row in result.arms)
    assert result.cold_start["checkpoints"][0]["global_step"] == 2


def test_a_part_of_a_benchmark_says_that_it_is_a_part(tmp_path):
    result = run_benchmark(tiny_benchmark(seeds=[5, 6, 7]), output=tmp_path, seeds=[6], arms=["sft"])
    assert [(row.name, row.seed) for row in result.arms] == [("sft", 6)] and result.seeds == [6]
    assert result.controlled["declared_seeds"] == [5, 6, 7] and result.controlled["declared_arms"] == ["sft", "opd"]
    assert "single seed" in (tmp_path / "tiny.md").read_text()
    assert sorted(p.name for p in tmp_path.glob("tiny-*")) == ["tiny-coldstart-s6", "tiny-sft-s6"]


def test_one_process_at_a_time_on_one_output(tmp_path):
    spec = tiny_benchmark()
    with run_lock(tmp_path / "tiny.benchmark"):
        with pytest.raises(LockError):
            run_benchmark(spec, output=tmp_path)
    assert not list(tmp_path.glob("tiny*"))


def test_order_of_the_units():
    design = resolve_design(tiny_benchmark(arms=[ZERO, SFT, OPD], seeds=[5, 6]))
    after = {unit.name: unit.after for unit in benchmark_units(design, Path("out"))}
    assert list(after) == ["toy-teacher-1"] + [
        f"tiny-{a}-s{s}" for s in (5, 6) for a in ("coldstart", "start", "sft", "opd")
    ]
    assert after["tiny-opd-s6"] == ("tiny-coldstart-s6", "toy-teacher-1") and after["tiny-sft-s5"] == (
        "tiny-coldstart-s5",
    )
    assert after["tiny-coldstart-s5"] == () == after["toy-teacher-1"]
    json.dumps([dict(unit.payload) for unit in benchmark_units(design, Path("out"))])


def test_two_teachers_are_fitted_one_after_the_other():
    other = {"name": "other", "overrides": {"models": {"teacher": {"toy_teacher_seed": 1}}}}
    design = resolve_design(tiny_benchmark(arms=[OPD, other], allowed_differences=["models.teacher.*"]))
    after = {unit.name: unit.after for unit in benchmark_units(design, Path("out"))}
    assert after["toy-teacher-2"] == ("toy-teacher-1",)
    assert after["tiny-other-s5"] == ("tiny-coldstart-s5", "toy-teacher-2")


def test_an_error_names_its_unit_and_the_benchmark_goes_on_later(tmp_path, monkeypatch):
    spec = tiny_benchmark()

    def broken(self, *args, **kwargs):
        raise StoreError("the disk is full", hint="make room")

    with monkeypatch.context() as patch:
        patch.setattr(units.OPDTrainer, "evaluate", broken)
        with pytest.raises(StoreError, match="tiny-sft-s5: the disk is full"):
            run_benchmark(spec, output=tmp_path)
    assert not (tmp_path / "tiny.json").exists() and not (tmp_path / "tiny-opd-s5").exists()
    weights = (tmp_path / "tiny-sft-s5" / "checkpoints" / "final" / "adapter.safetensors").stat()
    result = run_benchmark(spec, output=tmp_path, resume=True)
    assert len(result.arms) == 2
    after = (tmp_path / "tiny-sft-s5" / "checkpoints" / "final" / "adapter.safetensors").stat()
    assert (weights.st_mtime_ns, weights.st_ino) == (after.st_mtime_ns, after.st_ino)


def test_the_digest_of_the_source_covers_what_a_benchmark_imports_and_nothing_beside_it():
    code = (
        "import sys, miniverl.evaluation.benchmark, miniverl.models.hf, miniverl.environments.base as base\n"
        "from miniverl.schemas.config_sections import EnvironmentSection\n"
        "base.make_environment(EnvironmentSection(name='calculator'))\n"
        "print(*sorted({m.split('.')[1] for m in sys.modules if m.startswith('miniverl.')}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) <= benchmark.PARTS and not benchmark.PARTS & {"cli", "commands", "verify_gym"}
