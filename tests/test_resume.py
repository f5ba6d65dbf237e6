"""A run that was killed and continued is the run that was never killed, bit for bit."""

from __future__ import annotations

import json
import shutil

import pytest
from crash import KILLED, killed_at
from training_helpers import lines, tiny, tree

from miniverl.core import CheckpointError, ConfigError, DataError, LockError, MiniVerlError, StoreError
from miniverl.store import RunDir, read_journal
from miniverl.training.accounting import without_time
from miniverl.training.checkpoints import verify_checkpoint
from miniverl.training.manifest import observed_status
from miniverl.training.trainer import OPDTrainer

EVERY = {"train": {"eval_every_cycles": 2, "save_every_cycles": 2}, "cache": {"keep_cycles": 2, "entries_per_shard": 2}}
OFFLINE = {"run": {"mode": "offline_kd"}, "train": {"save_every_cycles": 2, "sft_warmup_cycles": 1}}


def run_once(folder, sections, name="run"):
    with OPDTrainer(tiny(folder, name, **sections), rolling_every=1) as trainer:
        trainer.train()
    return trainer.run


def finish(folder, sections):
    """Continue a killed run, or start it if it never came into being."""
    run = RunDir(folder / "run")
    if not run.is_run():
        return run_once(folder, sections)
    assert observed_status(run) in ("interrupted", "completed")
    with OPDTrainer.resume(run.path, rolling_every=1) as trainer:
        trainer.train()
    return trainer.run


def learned(run) -> dict:
    """Everything of a run that must not depend on whether it was interrupted."""
    final, result = run.checkpoints / "final", json.loads(run.eval.read_text())
    return {
        "weights": (final / "adapter.safetensors").read_bytes(),
        "moments": (final / "optimizer.safetensors").read_bytes(),
        "content": verify_checkpoint(final).content_digest,
        "metrics": lines(run.metrics),
        "trajectories": run.trajectories.read_bytes(),
        "eval_trajectories": run.eval_trajectories.read_bytes(),
        "cache": tree(run.teacher_cache) if run.teacher_cache.exists() else None,
        "dataset": tree(run.offline_dataset) if run.offline_dataset.exists() else None,
        "result": {k: v for k, v in _timeless(result).items() if not k.endswith("_seconds")},
        "checkpoints": sorted(p.name for p in run.checkpoints.iterdir()),
    }


def _timeless(value):
    if isinstance(value, dict):
        return {k: _timeless(v) for k, v in without_time(value).items()}
    return [_timeless(v) for v in value] if isinstance(value, list) else value


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Uninterrupted runs, the number of their durable calls, and the folder of toy teachers they share."""
    root = tmp_path_factory.mktemp("whole")
    out = {}
    for name, sections in (("opd", EVERY), ("offline", OFFLINE)):
        folder = root / name
        folder.mkdir()
        run_once(folder, sections, "first")
        code, _, calls = killed_at(None, lambda _, f=folder, s=sections: run_once(f, s))
        assert code == 0
        out[name] = (sections, learned(RunDir(folder / "run")), calls, folder / ".toy-teachers")
    return out


def crash_and_compare(whole, name, tmp_path, numbers):
    sections, expected, calls, teachers = whole[name]
    for n in numbers:
        folder = tmp_path / f"{name}-{n}"
        folder.mkdir()
        shutil.copytree(teachers, folder / ".toy-teachers")
        code, _, _ = killed_at(n, lambda _, f=folder: run_once(f, sections))
        assert code == KILLED, f"call {n} of {calls}"
        got = learned(finish(folder, sections))
        for key, value in expected.items():
            assert got[key] == value, f"killed at durable call {n} of {calls}: {key} differs"
        shutil.rmtree(folder)


def test_a_kill_at_any_durable_write_of_an_on_policy_run(whole, tmp_path):
    calls = whole["opd"][2]
    assert calls > 60
    crash_and_compare(whole, "opd", tmp_path, sorted({1 + round(i * (calls - 1) / 9) for i in range(10)}))


def test_a_kill_at_any_durable_write_of_an_offline_run(whole, tmp_path):
    calls = whole["offline"][2]
    crash_and_compare(whole, "offline", tmp_path, sorted({2 + round(i * (calls - 2) / 4) for i in range(5)}))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["opd", "offline"])
def test_a_kill_at_every_durable_write(whole, tmp_path, name):
    crash_and_compare(whole, name, tmp_path, range(1, whole[name][2] + 1))


def test_killed_twice(whole, tmp_path):
    sections, expected, calls, teachers = whole["opd"]
    shutil.copytree(teachers, tmp_path / ".toy-teachers")
    assert killed_at(calls // 2, lambda _: run_once(tmp_path, sections))[0] == KILLED
    for n in (9, 30):
        assert killed_at(n, lambda _: finish(tmp_path, sections))[0] == KILLED
    assert learned(finish(tmp_path, sections)) == expected


def test_stopped_in_the_middle_of_a_cycle_by_an_error(whole, tmp_path):
    sections, expected, _, teachers = whole["opd"]
    shutil.copytree(teachers, tmp_path / ".toy-teachers")

    def stop(phase, done, total, info):
        if phase == "update" and info["step"] == 4:
            raise KeyboardInterrupt

    with (
        pytest.raises(KeyboardInterrupt),
        OPDTrainer(tiny(tmp_path, **sections), on_progress=stop, rolling_every=1) as trainer,
    ):
        trainer.train()
    events = [e["event"] for e in read_journal(trainer.run.events)]
    assert events[-1] == "run_interrupted"
    assert learned(finish(tmp_path, sections)) == expected
    assert "resumed" in [e["event"] for e in read_journal(trainer.run.events)]


def test_without_a_checkpoint_the_run_starts_again_in_its_directory(whole, tmp_path):
    sections, expected, _, teachers = whole["offline"]
    shutil.copytree(teachers, tmp_path / ".toy-teachers")
    with (
        pytest.raises(ZeroDivisionError),
        OPDTrainer(tiny(tmp_path, **sections), on_progress=lambda p, *_: p == "update" and 1 / 0) as trainer,
    ):
        trainer.train()
    assert not trainer.run.checkpoints.exists() and trainer.run.metrics.stat().st_size > 0
    with OPDTrainer.resume(trainer.run.path, rolling_every=1) as again:
        assert "starts again from the beginning" in again.notice and again.is_fresh
        again.train()
    assert learned(again.run) == expected
    assert [e["event"] for e in read_journal(again.run.events)].count("run_start") == 1


def test_resuming_a_completed_run_changes_nothing_and_says_so(whole, tmp_path):
    sections, _, _, teachers = whole["opd"]
    shutil.copytree(teachers, tmp_path / ".toy-teachers")
    run = run_once(tmp_path, sections)
    before, at = tree(run.path), {p: p.stat().st_mtime_ns for p in run.path.rglob("*")}
    with OPDTrainer.resume(run.path) as trainer:
        result = trainer.train()
        assert "is complete" in trainer.notice and result.baseline_eval is not None and result.global_step == 5
    assert tree(run.path) == before and {p: p.stat().st_mtime_ns for p in run.path.rglob("*")} == at
    with OPDTrainer.resume(run.path) as trainer:
        payload = trainer.evaluate("test", tag="later")
        assert payload["global_step"] == 5 and payload["parameter_version"] == 5, "the trained weights are evaluated"
    rows = read_journal(run.metrics)
    assert [r["tag"] for r in rows if r["phase"] == "eval"][-1] == "later" and json.loads(
        run.eval.read_text()
    ) == result.to_dict()


@pytest.fixture
def stopped(whole, tmp_path):
    """A run with a rolling checkpoint and a step checkpoint that was interrupted."""
    sections, _, _, teachers = whole["opd"]
    shutil.copytree(teachers, tmp_path / ".toy-teachers")

    def stop(phase, done, total, info):
        if phase == "cycle" and done == 5:
            raise KeyboardInterrupt

    with (
        pytest.raises(KeyboardInterrupt),
        OPDTrainer(tiny(tmp_path, **sections), on_progress=stop, rolling_every=1) as trainer,
    ):
        trainer.train()
    assert sorted(p.name for p in trainer.run.checkpoints.iterdir()) == ["rolling", "step-000004"]
    return trainer.run, sections


def test_another_recipe_is_refused_with_the_place_that_differs(stopped, tmp_path):
    run, sections = stopped
    other = tiny(tmp_path, **{**sections, "train": {**sections["train"], "learning_rate": 1e-2}})
    with pytest.raises(ConfigError, match="train.learning_rate"):
        OPDTrainer.resume(run.path, other)
    same_elsewhere = tiny(tmp_path / "elsewhere", "another-name", **sections)
    with OPDTrainer.resume(run.path, same_elsewhere) as trainer:
        assert trainer.context.counters.global_step == 4
    run.config_original.write_text(run.config_original.read_text().replace("seed: 5", "seed: 6"))
    with pytest.raises(ConfigError, match="not the recipe that this run was started with"):
        OPDTrainer.resume(run.path)


def test_a_damaged_checkpoint_is_refused_and_an_earlier_one_can_be_used(stopped, whole):
    run, sections = stopped
    shutil.rmtree(run.checkpoints / "rolling")
    path = run.checkpoints / "step-000004" / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match="optimizer.safetensors is damaged") as caught:
        OPDTrainer.resume(run.path)
    assert "delete this directory" in caught.value.hint
    shutil.rmtree(run.checkpoints / "step-000004")
    with OPDTrainer.resume(run.path, rolling_every=1) as trainer:
        trainer.train()
    assert learned(run)["weights"] == whole["opd"][1]["weights"]


def test_a_shortened_journal_is_refused(stopped):
    run, _ = stopped
    run.metrics.write_bytes(run.metrics.read_bytes()[:100])
    with pytest.raises(StoreError, match="fewer than the recorded"):
        OPDTrainer.resume(run.path)


def test_a_changed_offline_set_is_refused(whole, tmp_path):
    sections, _, _, teachers = whole["offline"]
    shutil.copytree(teachers, tmp_path / ".toy-teachers")
    with (
        pytest.raises(KeyboardInterrupt),
        OPDTrainer(tiny(tmp_path, **sections), on_progress=_stop_at(3), rolling_every=1) as trainer,
    ):
        trainer.train()
    traces = trainer.run.offline_dataset / "trajectories.jsonl"
    traces.write_text(traces.read_text().replace("easy", "hard", 1))
    with pytest.raises(DataError, match="not what its manifest recorded"), OPDTrainer.resume(trainer.run.path) as again:
        again.train()


def _stop_at(cycle):
    def stop(phase, done, total, info):
        if phase == "cycle" and done == cycle:
            raise KeyboardInterrupt

    return stop


def test_one_process_at_a_time(stopped):
    run, _ = stopped
    with OPDTrainer.resume(run.path) as first:
        with pytest.raises(LockError):
            OPDTrainer.resume(run.path)
        assert killed_at(None, lambda _: OPDTrainer.resume(run.path))[0] == 1, "nor from another process"
        first.train()


def test_what_is_no_run_cannot_be_resumed(tmp_path):
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(MiniVerlError):
            OPDTrainer.resume(path)
    assert list(tmp_path.iterdir()) == [], "looking leaves nothing behind"
