"""A single run, handed in: complete accounting, nothing private, nothing overwritten."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from account_runs import made
from training_helpers import tiny, tree

from miniverl.core import ConfigError, DataError, MiniVerlError, StoreError, digest
from miniverl.evaluation.evaluator import evaluate_run
from miniverl.evaluation.export import HARDWARE_KEYS, export_run, sanitize_hardware, submission
from miniverl.evaluation.schema import BenchmarkResult
from miniverl.portable import portable_payload
from miniverl.reporting.benchmarks import render_benchmark_markdown
from miniverl.store import RunDir
from miniverl.training.trainer import OPDTrainer

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def copy(tmp_path):
    """A run that a test may add to or damage."""

    def copied(name):
        shutil.copytree(made()[name].run.path, tmp_path / "runs" / name)
        return tmp_path / "runs" / name

    return copied


def test_the_file_is_a_valid_result_of_one_arm(copy):
    folder = copy("opd")
    result, place = export_run(folder, notes="a laptop")
    assert place == folder / "benchmark-submission.json" and BenchmarkResult.read(place) == result
    (arm,) = result.arms
    assert (result.schema_version, result.name, result.notes, result.seeds) == (2, "opd", "a laptop", [5])
    assert result.budget_axis == "optimizer_steps" and result.cold_start == {"cycles": 0, "checkpoints": []}
    assert result.invocation == ["miniverl", "export-benchmark", "opd", "--notes", "a laptop"]
    assert arm.run_dir == arm.run_id == "opd" and arm.scientific_config_diff == arm.structured_diff == []
    assert result.controlled["budget"] == {
        "axis": "optimizer_steps",
        "limit": None,
        "measured": {"opd": {"5": 4}},
        "violations": [],
        "zero_step_arms": [],
    }
    assert result.controlled["initial_checkpoint_digest"] is None
    assert {row["path"] for row in arm.runtime_resolution_diff} >= {"memory.strategy"}
    assert result.digest_faults() == [] and result.common_declared_config == result.common_resolved_config
    assert digest(result.common_declared_config) == result.common_declared_config_digest == arm.declared_config_digest


def test_all_cycles_are_counted_and_not_the_last_one(copy):
    folder = copy("opd")
    (arm,) = export_run(folder)[0].arms
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    cycles = [line["selection"]["selected_model_tokens"] for line in lines if line["phase"].endswith("_cycle")]
    assert arm.selected_training_tokens_total == sum(cycles) > cycles[-1] and arm.total_trajectories == 3 * len(cycles)
    result = json.loads((folder / "eval.json").read_text())
    assert arm.success_rate == result["eval"]["success_rate"] and arm.evaluation_seconds == result["evaluation_seconds"]
    assert arm.baseline_success_rate == result["baseline_eval"]["success_rate"]


@pytest.mark.parametrize("event", ["benchmark_cold_start_loaded", "checkpoint_loaded"])
def test_a_run_that_began_with_trained_weights_says_so(copy, event):
    folder = copy("opd")
    with open(folder / "events.jsonl", "a") as journal:
        journal.write(json.dumps({"event": event, "content_digest": "ab" * 32}) + "\n")
    result, _ = export_run(folder)
    assert result.controlled["initial_checkpoint_digest"] == "ab" * 32
    page = render_benchmark_markdown(result)
    assert "starting point: weights of another run's checkpoint `abababab" in page and "fresh" not in page
    assert "what they brought is not its gain" in page


def test_a_run_without_evaluation_is_refused_until_it_has_one(copy):
    folder = copy("exact")
    before = tree(folder)
    with pytest.raises(DataError, match="no evaluation") as caught:
        export_run(folder)
    assert f"miniverl eval --run {folder}" in caught.value.hint and "eval.enabled: true" in caught.value.hint
    assert tree(folder) == before
    evaluated = evaluate_run(folder, split="test")
    result, _ = export_run(folder)
    (arm,) = result.arms
    assert arm.success_rate == evaluated["success_rate"] and arm.tasks == evaluated["tasks"] == 2
    assert arm.baseline_success_rate is None and result.controlled["eval_split"] == "test"
    written = json.loads((folder / "eval.json").read_text())
    assert arm.evaluation_seconds == pytest.approx(written["evaluation_seconds"] + evaluated["seconds"])


def test_an_evaluation_of_earlier_weights_does_not_count(copy):
    folder = copy("exact")
    evaluate_run(folder)
    path = folder / "eval.standalone.json"
    record = json.loads(path.read_text())
    record["checkpoint"]["content_digest"] = "0" * 64
    path.write_text(json.dumps(record))
    with pytest.raises(DataError, match="no evaluation of its final weights"):
        export_run(folder)


def test_the_recipes_split_comes_first(copy):
    folder = copy("exact")
    evaluate_run(folder, split="test", tag="a")
    evaluate_run(folder, split="eval", tag="b")
    assert submission(RunDir(folder)).controlled["eval_split"] == "eval"


def test_an_unfinished_run_is_refused(tmp_path):
    config = tiny(tmp_path, "young")
    with OPDTrainer(config) as trainer:
        with pytest.raises(DataError, match="no result yet"):
            export_run(trainer.run.path)
    with pytest.raises(StoreError, match="not a run directory"):
        export_run(tmp_path)


def test_exporting_again_changes_nothing_and_another_content_is_not_overwritten(copy, tmp_path):
    folder = copy("sft")
    _, place = export_run(folder)
    first, stamp = place.read_bytes(), place.stat().st_mtime_ns
    export_run(folder)
    assert place.read_bytes() == first and place.stat().st_mtime_ns == stamp
    with pytest.raises(StoreError, match="says something else"):
        export_run(folder, notes="changed")
    assert place.read_bytes() == first
    export_run(folder, notes="changed", overwrite=True)
    assert place.read_bytes() != first
    _, other = export_run(folder, out=tmp_path / "mine.json")
    assert other.read_bytes() == first


@pytest.mark.parametrize("name", ["eval.json", "manifest.json", "checkpoints/x.json", "metrics.jsonl"])
def test_a_record_of_the_run_is_never_the_target(copy, name):
    folder = copy("sft")
    before = tree(folder)
    with pytest.raises(StoreError):
        export_run(folder, out=folder / name, overwrite=True)
    assert tree(folder) == before


def test_targets_that_cannot_be_written(copy, tmp_path):
    folder = copy("sft")
    for out in (tmp_path, tmp_path / "nowhere" / "x.json"):
        with pytest.raises(StoreError, match="cannot be written"):
            export_run(folder, out=out)


def test_edited_recipe_is_refused(copy):
    folder = copy("sft")
    path = folder / "config.original.yaml"
    path.write_text(path.read_text().replace("learning_rate: 0.003", "learning_rate: 0.3"))
    with pytest.raises(DataError, match="not the recipe"):
        export_run(folder)
    path.write_text("run: [")
    with pytest.raises(ConfigError):
        export_run(folder)


CANARIES = [
    "canary-user",
    "canary-host",
    "/home/canary",
    "hf_CanarySecret0123456789",
    "ghp_Canary0123456789abcdef",
    "C:\\Users\\canary",
    "sk-Canary0123456789abcdefghij",
]


def planted(value):
    """The canaries wherever a record could carry them."""
    return {
        **value,
        "user": CANARIES[0],
        "hostname": CANARIES[1],
        "home": CANARIES[2],
        "argv": ["--token", CANARIES[3]],
        "env": {"HF_TOKEN": CANARIES[4]},
    }


def test_no_private_word_survives(tmp_path):
    notes = f"run with {CANARIES[3]} in {CANARIES[2]}/deep/place and {CANARIES[5]}\\x, {CANARIES[6]}"
    config = tiny(
        tmp_path,
        "shown",
        run={"notes": notes, "tags": [f"{CANARIES[2]}/x", CANARIES[4]]},
        train={"cycles": 1, "sft_warmup_cycles": 0},
    )
    with OPDTrainer(config) as trainer:
        trainer.train()
    run = trainer.run
    environment, manifest = (json.loads(path.read_text()) for path in (run.environment, run.manifest))
    run.environment.write_text(json.dumps(planted(environment)))
    manifest = planted(manifest)
    manifest["hardware"] = {
        **planted(manifest["hardware"]),
        "gpu_name": f"{CANARIES[2]}/gpu",
        "os_release": {"host": CANARIES[1]},
    }
    manifest["packages"] = {**manifest["packages"], CANARIES[0]: "1.0", "torch": f"file://{CANARIES[2]}/torch.whl"}
    manifest["models"]["student"] = {
        "model_id": f"{CANARIES[2]}/models/mine",
        "revision": CANARIES[3],
        "owner": CANARIES[0],
    }
    manifest["models"]["teacher"]["adapter"] = {
        "path": f"{CANARIES[2]}/adapter",
        "api_key": CANARIES[6],
        "identity": "ok",
    }
    run.manifest.write_text(json.dumps(manifest))
    result, place = export_run(run.path, notes=f"see {CANARIES[2]}/log, token={CANARIES[4]}")
    text = place.read_text()
    for word in [*CANARIES, "canary", "Canary", str(tmp_path), socket.gethostname(), f"/{getpass.getuser()}/"]:
        assert word not in text, word
    (arm,) = result.arms
    assert arm.student_model_id == "<local>/mine" and arm.teacher_adapter["identity"] == "ok"
    assert result.hardware["gpu"]["name"].startswith("<local>") and result.hardware["os_release"] is None
    assert portable_payload(result.common_declared_config) == result.common_declared_config
    assert arm.measurement_status["protocol_token_accuracy"].startswith("not_applicable")


def test_hardware_is_copied_by_name_and_kind():
    full = {"gpu_available": True, "gpu_name": "Example 1", "gpu_total_memory_gib": 16.0, "gpu_capability": "8.9", "gpu_driver_version": "1.2", "gpu_count": 1,
            "os": "Linux", "os_release": "6.1", "machine": "x86_64", "cpu_count": 8}  # fmt: skip
    assert sanitize_hardware(full) == full and list(HARDWARE_KEYS) == list(full)
    assert sanitize_hardware({**full, "serial": "x", "mac": "y"}) == full
    wrong = {key: ["canary"] for key in full}
    assert sanitize_hardware(wrong) == dict.fromkeys(full)


def test_exporting_needs_no_torch(copy):
    folder = copy("opd")
    code = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('torch', 'safetensors', 'transformers'):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "from miniverl.evaluation.export import export_run\n"
        "print(export_run(sys.argv[1])[1].name)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, env=env, timeout=60
    )
    assert done.stdout.strip() == "benchmark-submission.json", done.stderr
    assert (folder / "benchmark-submission.json").read_text() == submission(RunDir(folder)).to_json()


def spoiled(record, depth=2):
    """Copies of a record in each of which one field is gone or holds something else."""
    for key, value in record.items():
        yield {k: v for k, v in record.items() if k != key}
        yield {**record, key: None}
        yield {**record, key: ["odd"]}
        if isinstance(value, dict) and depth > 1:
            yield from ({**record, key: below} for below in spoiled(value, depth - 1))


EVERY = [pytest.param(23, id="sample"), pytest.param(1, id="all", marks=pytest.mark.slow)]


@pytest.mark.parametrize("step", EVERY)
@pytest.mark.parametrize("name", ["eval.json", "manifest.json", "eval.standalone.json"])
def test_damaged_records_end_in_an_error_of_ours(copy, name, step):
    folder = copy("zero")
    evaluate_run(folder)
    path, refused = folder / name, 0
    whole = path.read_text()
    for record in list(spoiled(json.loads(whole)))[::step]:
        path.write_text(json.dumps(record))
        try:
            submission(RunDir(folder))
        except MiniVerlError as error:
            refused += 1
            assert "\n" not in error.message and error.hint
    assert refused > 0


@pytest.mark.parametrize("step", EVERY)
def test_damaged_cycle_records_end_in_an_error_of_ours(copy, step):
    folder = copy("sft")
    path, refused = folder / "metrics.jsonl", 0
    lines = path.read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if '"sft_cycle"' in line)
    for record in list(spoiled(json.loads(lines[at])))[::step]:
        path.write_text("".join(f"{line}\n" for line in [*lines[:at], json.dumps(record), *lines[at + 1 :]]))
        try:
            submission(RunDir(folder))
        except MiniVerlError:
            refused += 1
    assert refused > 0
