"""A benchmark that was killed and continued is the benchmark that was never killed."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from benchmark_tiny import little_garbage, mapping, timeless, tiny_benchmark
from crash import KILLED, killed_at
from training_helpers import lines, tree

from miniverl.core import BackendError, CheckpointError, ConfigError, DataError, LockError, StoreError
from miniverl.evaluation import benchmark, units
from miniverl.evaluation.benchmark import run_benchmark
from miniverl.evaluation.spec import BenchmarkConfig
from miniverl.store import run_lock


@pytest.fixture(autouse=True, scope="module")
def quick():
    """Cheap collections; commits and edits that happen while the tests run are none of their business."""
    with little_garbage(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmark, "git_commit", lambda path: None)
        patch.setattr(benchmark, "source_digest", lambda: "0" * 64)
        yield


def run(folder, **options):
    return run_benchmark(tiny_benchmark(), output=folder / "out", resume=True, notes="n", **options)


def learned(out: Path) -> dict:
    """Everything of a benchmark that must not depend on how often it was killed."""
    found = {"result": timeless(out / "tiny.json")}
    for run_dir in sorted(out.glob("tiny-*")):
        final = run_dir / "checkpoints" / "final"
        found[run_dir.name] = {
            "weights": hashlib.sha256((final / "adapter.safetensors").read_bytes()).hexdigest(),
            "metrics": lines(run_dir / "metrics.jsonl"),
            "played": (run_dir / "eval_trajectories.jsonl").read_bytes(),
            "files": sorted(str(p.relative_to(run_dir)) for p in run_dir.rglob("*")),
        }
    found["files"] = sorted(p.name for p in out.iterdir() if p.name != ".miniverl-locks")
    found["units"] = sorted(p.name for p in (out / "tiny.benchmark" / "units").iterdir())
    return found


def trained(out: Path) -> dict[str, str]:
    """Weights file and its SHA-256, for every unit whose state says that it is trained."""
    found = {}
    for path in (out / "tiny.benchmark" / "units").glob("*.json"):
        record = json.loads(path.read_text())
        if record["state"] in ("trained", "evaluated") and record["kind"] != "teacher":
            weights = out / record["unit"] / "checkpoints" / "final" / "adapter.safetensors"
            found[str(weights)] = hashlib.sha256(weights.read_bytes()).hexdigest()
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory, quick):
    """What an undisturbed benchmark leaves, the number of its durable calls, and its output folder."""
    folder, counted = (tmp_path_factory.mktemp(name) for name in ("whole", "counted"))
    run(folder)
    code, _, calls = killed_at(None, lambda _: run(counted))
    assert code == 0 and learned(counted / "out") == learned(folder / "out")
    return learned(folder / "out"), calls, folder / "out"


def kill_and_compare(whole, tmp_path, numbers):
    expected, calls, _ = whole
    for n in numbers:
        folder = tmp_path / str(n)
        folder.mkdir()
        code, _, _ = killed_at(n, lambda _, f=folder: run(f))
        assert code == KILLED, f"call {n} of {calls}"
        weights = trained(folder / "out")
        run(folder)
        got = learned(folder / "out")
        for key, value in expected.items():
            assert got[key] == value, f"killed at durable call {n} of {calls}: {key} differs"
        assert weights.items() <= trained(folder / "out").items(), f"call {n}: trained weights were written again"
        shutil.rmtree(folder)


def test_a_kill_at_some_durable_calls(whole, tmp_path):
    calls = whole[1]
    assert calls > 100
    kill_and_compare(whole, tmp_path, sorted({1 + round(i * (calls - 1) / 7) for i in range(8)}))


@pytest.mark.slow
def test_a_kill_at_every_durable_call(whole, tmp_path):
    kill_and_compare(whole, tmp_path, range(1, whole[1] + 1))


def test_killed_again_and_again(whole, tmp_path):
    expected, calls, _ = whole
    for n in (calls // 3, 20, 40, 60):
        assert killed_at(n, lambda _: run(tmp_path))[0] == KILLED
    run(tmp_path)
    assert learned(tmp_path / "out") == expected


def test_stopped_in_the_evaluation(whole, tmp_path):
    def stop(phase, done, total, info):
        if phase == "eval" and done == total:
            raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, on_progress=stop)
        states = {p.stem: json.loads(p.read_text())["state"] for p in (tmp_path / "out/tiny.benchmark/units").iterdir()}
        assert states == {"toy-teacher-1": "trained", "tiny-coldstart-s5": "trained", "tiny-sft-s5": "trained"}
    run(tmp_path)
    assert learned(tmp_path / "out") == whole[0]


@pytest.fixture
def finished(whole, tmp_path):
    return Path(shutil.copytree(whole[2], tmp_path / "out"))


def test_continuing_a_finished_benchmark_changes_no_byte(finished, monkeypatch):
    before, at = tree(finished), {p: p.stat().st_mtime_ns for p in finished.rglob("*") if p.is_file()}
    monkeypatch.setattr(units, "OPDTrainer", None)
    result = run(finished.parent)
    assert tree(finished) == before and len(result.arms) == 2
    assert at == {p: p.stat().st_mtime_ns for p in finished.rglob("*") if p.is_file()}
    (finished / "tiny.md").unlink()
    run(finished.parent)
    assert tree(finished) == before, "what is missing is written again"


def test_killed_while_the_answer_was_written(finished, whole):
    state, run_dir = finished / "tiny.benchmark" / "units" / "tiny-opd-s5.json", finished / "tiny-opd-s5"
    record = json.loads(state.read_text())
    state.write_text(json.dumps({**record, "state": "trained", "evaluation": None}))
    answer = run_dir / "eval.benchmark-opd.json"
    answer.rename(run_dir / ".tmp-eval.benchmark-opd.json-1-00000000")
    for name in ("tiny.json", "tiny.md"):
        (finished / name).rename(finished / f".tmp-{name}-1-00000000")
    run(finished.parent)
    assert learned(finished) == whole[0]


def test_without_resume_a_finished_benchmark_is_a_collision(finished):
    before = tree(finished)
    with pytest.raises(StoreError, match="exist already") as caught:
        run_benchmark(tiny_benchmark(), output=finished)
    assert "--resume" in caught.value.hint and tree(finished) == before


def test_an_edited_result_is_not_replaced(finished):
    path = finished / "tiny.json"
    path.write_text(path.read_text().replace('"notes": "n"', '"notes": "better"'))
    before = tree(finished)
    with pytest.raises(StoreError, match="not what the run directories say"):
        run(finished.parent)
    assert tree(finished) == before


def test_another_question_is_refused_by_name(finished, monkeypatch):
    before, out = tree(finished), finished

    def refused(text, spec=None, **options):
        with pytest.raises(ConfigError, match=text) as caught:
            run_benchmark(spec or tiny_benchmark(), output=out, resume=True, **options)
        assert "--output" in caught.value.hint and tree(out) == before

    faster = {**mapping()["base"], "train": {**mapping()["base"]["train"], "learning_rate": 1e-2}}
    refused("benchmark.base.train.learning_rate", tiny_benchmark(base=faster))
    refused("benchmark.seeds", tiny_benchmark(seeds=[5, 6]))
    refused("arms", arms=["sft"])
    refused("notes", notes="other")
    with monkeypatch.context() as patch:
        patch.setattr(benchmark.miniverl, "__version__", "99.0")
        refused("miniverl_version .*99.0")
    with monkeypatch.context() as patch:
        told = benchmark.software_summary()
        packages = {**told["packages"], "torch": "0.1"}
        patch.setattr(benchmark, "software_summary", lambda: {**told, "packages": packages})
        refused("software.packages.torch")
    with monkeypatch.context() as patch:
        patch.setattr(benchmark, "source_digest", lambda: "1" * 64)
        refused("source .*000.*now 111")
    with monkeypatch.context() as patch:
        patch.setattr(benchmark, "git_commit", lambda path: "0" * 40)
        assert run_benchmark(tiny_benchmark(), output=out, resume=True).git_commit is None, "where it was begun"
    assert tree(out) == before


def test_an_edited_base_file_is_noticed(tmp_path):
    from miniverl.schemas.yamlio import dump_yaml

    recipe, config = tmp_path / "base.yaml", tmp_path / "bench.yaml"
    recipe.write_text(dump_yaml(mapping()["base"]))
    config.write_text(dump_yaml({**mapping(), "base": "base.yaml", "arms": [mapping()["arms"][0]]}))
    run_benchmark(BenchmarkConfig.from_yaml(config), output=tmp_path / "out")
    recipe.write_text(recipe.read_text().replace("learning_rate: 0.003", "learning_rate: 0.004"))
    with pytest.raises(ConfigError, match="benchmark.base.train.learning_rate .*0.003, now 0.004"):
        run_benchmark(BenchmarkConfig.from_yaml(config), output=tmp_path / "out", resume=True)


def test_files_changed_by_hand_are_refused(finished):
    def refused(kind, text):
        with pytest.raises(kind, match=text):
            run(finished.parent)

    weights = finished / "tiny-opd-s5" / "checkpoints" / "final" / "adapter.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-1] + b"x")
    refused(CheckpointError, "adapter.safetensors is damaged")
    weights.write_bytes(data)
    answer = finished / "tiny-opd-s5" / "eval.benchmark-opd.json"
    text = answer.read_text()
    answer.write_text(text.replace('"solved"', '"solve"'))
    refused(DataError, "not the evaluation that was recorded")
    answer.write_text(text)
    state = finished / "tiny.benchmark" / "units" / "tiny-opd-s5.json"
    kept = state.read_text()
    state.write_text("{}")
    refused(DataError, "not the record of a unit")
    state.write_text(kept)
    plan = finished / "tiny.benchmark" / "plan.json"
    kept = plan.read_text()
    plan.write_text("[]")
    refused(StoreError, "not the plan")
    plan.write_text(kept)
    (finished / "tiny-coldstart-s5").rename(finished / "away")
    refused(StoreError, "tiny-coldstart-s5 is missing")
    (finished / "away").rename(finished / "tiny-coldstart-s5")
    page = finished / "tiny.md"
    page.write_text(page.read_text() + "and it is significant")
    refused(StoreError, "tiny.md is not what the run directories say")


@pytest.mark.parametrize(
    "field, value",
    [
        ("state", ["trained"]),
        ("kind", ["arm"]),
        ("journals", [1]),
        ("journals", {"metrics": "x"}),
        ("final_checkpoint", 5),
        ("final_checkpoint", None),
        ("initial_checkpoint", {}),
        ("evaluation", {"file": 1}),
        ("evaluation", None),
    ],
)
def test_a_record_that_does_not_keep_its_states_promise_is_refused(finished, field, value):
    state = finished / "tiny.benchmark" / "units" / "tiny-opd-s5.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), field: value}))
    before = tree(finished)
    with pytest.raises(DataError, match="not the record of a unit"):
        run(finished.parent)
    assert tree(finished) == before


def test_an_arm_whose_beginning_is_unknown_is_not_taken_into_the_result(finished, whole):
    state = finished / "tiny.benchmark" / "units" / "tiny-opd-s5.json"
    text = state.read_text()
    for name in ("tiny.json", "tiny.md"):
        (finished / name).unlink()
    state.write_text(text.replace(json.loads(text)["initial_checkpoint"]["weights_digest"], "0" * 64))
    with pytest.raises(DataError, match="tiny-opd-s5 does not begin with the checkpoint"):
        run(finished.parent)
    state.unlink()
    with pytest.raises(StoreError, match="does not say from which weights"):
        run(finished.parent)
    shutil.rmtree(finished / "tiny-opd-s5")
    run(finished.parent)
    assert learned(finished) == whole[0]


def test_a_lost_record_does_not_double_an_evaluation(tmp_path):
    def go():
        return run_benchmark(tiny_benchmark(cold_start_cycles=0), output=tmp_path, resume=True)

    first, kept = go(), (tmp_path / "tiny-sft-s5" / "eval_trajectories.jsonl").read_bytes()
    (tmp_path / "tiny.benchmark" / "units" / "tiny-sft-s5.json").unlink()
    for name in ("tiny.json", "tiny.md"):
        (tmp_path / name).unlink()
    assert timeless(go()) == timeless(first)
    assert (tmp_path / "tiny-sft-s5" / "eval_trajectories.jsonl").read_bytes() == kept


def test_directories_without_a_plan_are_not_taken_over(finished):
    shutil.rmtree(finished / "tiny.benchmark")
    before = tree(finished)
    with pytest.raises(StoreError, match="exist already"):
        run(finished.parent)
    assert tree(finished) == before


def test_a_plan_of_which_nothing_was_begun_is_in_nobodys_way(tmp_path, monkeypatch):
    def absent(self, *args, **kwargs):
        raise BackendError("the model is not there")

    out = tmp_path / "out"
    other = tiny_benchmark(cold_start_cycles=0, arms=[mapping()["arms"][0]])
    with monkeypatch.context() as patch:
        patch.setattr(units.OPDTrainer, "__init__", absent)
        with pytest.raises(BackendError, match="tiny-sft-s5"):
            run_benchmark(tiny_benchmark(cold_start_cycles=0), output=out, notes="first", arms=["sft"])
    assert sorted(p.name for p in out.iterdir() if p.name != ".miniverl-locks") == ["tiny.benchmark"]
    assert run_benchmark(other, output=out, notes="second").notes == "second"
    with pytest.raises(StoreError, match="exist already"):
        run_benchmark(other, output=out)


def test_a_running_benchmark_is_not_continued_by_another_process(finished):
    with run_lock(finished / "tiny.benchmark"):
        with pytest.raises(LockError):
            run(finished.parent)
        assert killed_at(None, lambda _: run(finished.parent))[0] == 1
