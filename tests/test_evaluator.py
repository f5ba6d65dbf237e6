"""Standalone evaluation, and the commands that train, on a run so small that it takes a second."""

from __future__ import annotations

import json
import shutil

import pytest
from typer.testing import CliRunner

from miniverl.cli import app
from miniverl.core import CheckpointError, ConfigError, LockError, MiniVerlError, StoreError, UsageError, loads_strict
from miniverl.evaluation.evaluator import evaluate_run
from miniverl.schemas.trajectory import read_trajectories
from miniverl.store import RunDir, read_journal, run_lock
from miniverl.training.accounting import without_time

SHAPE = "{hidden_size: 16, num_layers: 1, num_heads: 2, intermediate_size: 16, max_position_embeddings: 512}"
TINY = f"""\
schema_version: 1
run: {{name: tiny, mode: opd, seed: 3}}
models:
  device: cpu
  student: {{model_id: toy-student, toy: {SHAPE}}}
  teacher: {{model_id: toy-teacher, toy: {SHAPE}, toy_pretrain_steps: 3, toy_pretrain_batch: 4}}
environment: {{name: calculator, train_tasks: 8, eval_tasks: 4, test_tasks: 0, params: {{prompt_style: compact}}}}
rollout: {{max_turns: 2, max_new_tokens_per_turn: 8, max_total_tokens: 400, batch_size: 4}}
loss: {{top_k: 4}}
train: {{cycles: 2, sft_warmup_cycles: 2, rollouts_per_cycle: 4, gradient_accumulation_steps: 4, save_every_cycles: 1}}
"""


def run(*words):
    result = CliRunner().invoke(app, [str(w) for w in words], catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


def files(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A trained run, made by the command; tests work on copies."""
    folder = tmp_path_factory.mktemp("evaluator")
    (folder / "tiny.yaml").write_text(TINY)
    code, out, err = run("train", folder / "tiny.yaml", "--output", folder / "runs", "--run-id", "tiny", "--json")
    assert code == 0, err
    return folder, loads_strict(out), err


@pytest.fixture
def tiny(trained, tmp_path):
    shutil.copytree(trained[0] / "runs" / "tiny", tmp_path / "runs" / "tiny")
    return RunDir(tmp_path / "runs" / "tiny")


def test_train_command(trained):
    folder, data, err = trained
    assert data["run_dir"] == str(folder / "runs" / "tiny") and data["result"]["global_step"] == 4
    assert "Held-out success" in data["summary"] and [p for p in data["files"] if p.endswith("report.md")]
    made = RunDir(folder / "runs" / "tiny")
    assert made.config_submitted.read_text() == TINY, "the recipe is kept byte for byte"
    assert made.report_md.is_file() and json.loads(made.manifest.read_text())["status"] == "completed"
    assert err and all(not line.startswith("{") for line in err.splitlines()), "progress goes to standard error"


def test_report_of_a_real_run_is_reproducible_and_complete(tiny, tmp_path):
    first = run("report", tiny.path, "--out", tmp_path / "a")
    assert first[0] == 0 and run("report", tiny.path, "--out", tmp_path / "b")[0] == 0
    assert files(tmp_path / "a") == files(tmp_path / "b")
    page = (tmp_path / "a" / "report.md").read_text()
    for needle in (
        "baseline (step 0)",
        "cold-start (step 2)",
        "final (step 4)",
        "n = 4 held-out",
        "reverse_kl",
        "sha256 of eval.json",
    ):
        assert needle in page + (tmp_path / "a" / "report.svg").read_text(), needle
    assert "NaN" not in page and "not recorded" not in page.replace("git commit | not recorded", "")


def test_inspect_and_cache_commands_on_a_real_run(tiny):
    code, out, _ = run("inspect", tiny.path, "--json")
    assert code == 0 and loads_strict(out)["summary"]["sources"] == {"policy": 8}
    code, out, _ = run("cache", "stats", tiny.path, "--json")
    stats = loads_strict(out)
    assert code == 0 and stats["verified"] is True and stats["num_selected_positions"] > 0 and stats["top_k"] == 4
    assert run("cache", "validate", tiny.path)[0] == 0
    shard = sorted(tiny.teacher_cache.glob("*.safetensors"))[-1]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    code, out, _ = run("cache", "validate", tiny.path, "--json")
    assert code == 1 and loads_strict(out)["valid"] is False


def test_evaluation_repeats_the_final_one(tiny):
    final = json.loads(tiny.eval.read_text())["eval"]
    again = evaluate_run(tiny.path)
    for key in (
        "success_rate",
        "generated_tokens",
        "termination_reasons",
        "global_step",
        "parameter_version",
        "split",
        "tasks",
    ):
        assert again[key] == final[key], key
    assert again["checkpoint"]["name"] == "final" and again["checkpoint"]["integrity"] == "verified"
    assert (
        again["checkpoint"]["content_digest"]
        == json.loads(tiny.manifest.read_text())["final_checkpoint"]["content_digest"]
    )
    assert json.loads(tiny.eval_tagged("standalone").read_text()) == {k: v for k, v in again.items() if k != "file"}


def test_earlier_output_is_never_replaced_unaware(tiny):
    first = evaluate_run(tiny.path)
    kept = tiny.eval_tagged("standalone").read_bytes()
    second = evaluate_run(tiny.path, tasks=2)
    assert second["tag"] == "standalone-2" and tiny.eval_tagged("standalone").read_bytes() == kept
    with pytest.raises(StoreError):
        evaluate_run(tiny.path, tag="standalone")
    assert tiny.eval_tagged("standalone").read_bytes() == kept
    third = evaluate_run(tiny.path, tag="standalone", overwrite=True, tasks=3)
    assert third["tasks"] == 3 and first["tasks"] == 4


@pytest.mark.parametrize(
    "wrong,error",
    [
        ({"split": "nosuch"}, ConfigError),
        ({"split": "test"}, MiniVerlError),
        ({"tasks": 0}, ConfigError),
        ({"tag": "final"}, UsageError),
        ({"tag": "cycle3"}, UsageError),
        ({"tag": "benchmark-opd"}, UsageError),
        ({"checkpoint": "step-000099"}, CheckpointError),
    ],
)
def test_refusals_change_nothing(tiny, wrong, error):
    before = files(tiny.path)
    with pytest.raises(error) as caught:
        evaluate_run(tiny.path, **wrong)
    assert files(tiny.path) == before and caught.value.hint


@pytest.mark.parametrize("split", ["nosuch", "test"])
def test_unknown_and_empty_splits_fail_on_the_command_line(tiny, split):
    code, out, err = run("eval", "--run", tiny.path, "--split", split)
    assert code in (1, 2) and out == "" and len(err.splitlines()) == 2 and split in err
    assert not list(tiny.path.glob("eval.standalone*"))


def test_an_earlier_checkpoint_is_another_answer_with_its_own_step(tiny):
    early = evaluate_run(tiny.path, checkpoint="step-000003")
    assert early["global_step"] == early["checkpoint"]["global_step"] == 3 and early["parameter_version"] == 3
    late = evaluate_run(tiny.path)
    assert late["global_step"] == 4 and late["checkpoint"]["weights_digest"] != early["checkpoint"]["weights_digest"]


def test_a_damaged_checkpoint_is_refused(tiny):
    weights = tiny.checkpoints / "final" / "adapter.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(CheckpointError, match="adapter.safetensors"):
        evaluate_run(tiny.path)


def test_an_edited_configuration_is_refused(tiny):
    tiny.config_resolved.write_text(tiny.config_resolved.read_text().replace("seed: 3", "seed: 4"))
    with pytest.raises(ConfigError, match="digest"):
        evaluate_run(tiny.path)


def test_only_weights_are_used(tiny, monkeypatch):
    """Neither optimizer moments nor random states of the checkpoint are read."""
    import miniverl.training.checkpoints as checkpoints

    def forbidden(*args, **kwargs):
        raise AssertionError("an evaluation continues nothing")

    monkeypatch.setattr(checkpoints, "load_state_tensors", forbidden)
    monkeypatch.setattr(checkpoints, "restore_rng", forbidden)
    assert evaluate_run(tiny.path)["tasks"] == 4


def test_the_run_is_locked_while_it_is_evaluated(tiny):
    with run_lock(tiny.path), pytest.raises(LockError):
        evaluate_run(tiny.path)
    assert not list(tiny.path.glob("eval.standalone*"))


def test_records_are_appended_and_stay_off_the_training_curve(tiny):
    from miniverl.reporting.records import eval_points, load_run

    points, before = eval_points(load_run(tiny.path)), read_journal(tiny.metrics)
    result = evaluate_run(tiny.path)
    after = read_journal(tiny.metrics)
    assert after[:-1] == before and without_time(after[-1])["tag"] == "standalone"
    assert eval_points(load_run(tiny.path)) == points
    played = [t for t in read_trajectories(tiny.eval_trajectories) if ":standalone:" in t.trajectory_id]
    assert len(played) == result["tasks"]


def test_eval_command_prints_json_and_notes_missing_tasks(tiny, tmp_path):
    out_file = tmp_path / "answer.json"
    code, out, err = run("eval", "--run", tiny.path, "--tasks", "9", "--out", out_file, "--json")
    data = loads_strict(out)
    assert code == 0 and data["tasks"] == 4 and "holds 4 tasks, fewer than 9" in err
    assert data["file"] == str(out_file) and json.loads(out_file.read_text())["tasks"] == 4
    assert run("eval", "--run", tiny.path, "--out", out_file)[0] == 1, "a file that is there is not replaced"
    code, out, err = run("eval", "--run", tiny.path)
    assert code == 0 and out.splitlines()[-1] == str(tiny.eval_tagged("standalone"))


def test_train_command_refuses_and_resumes(tiny, trained):
    recipe = trained[0] / "tiny.yaml"
    before = files(tiny.path)
    code, out, err = run("train", recipe, "--output", tiny.path.parent, "--run-id", "tiny")
    assert code == 1 and out == "" and len(err.splitlines()) == 2 and "exists" in err and files(tiny.path) == before
    code, out, err = run("train", "--resume", tiny.path, "--json", "--no-report")
    assert code == 0 and loads_strict(out)["result"]["global_step"] == 4
    assert json.loads(tiny.eval.read_text())["baseline_eval"] is not None
    assert run("train", "--resume", tiny.path.parent / "nowhere")[0] == 1


def test_fast_demo_runs_and_says_what_happened(tmp_path):
    code, out, err = run("demo", "--fast", "--output", tmp_path / "demo", "--json")
    data = loads_strict(out)
    assert code == 0 and data["change"] in ("rose", "fell", "did not change") and data["change"] in data["summary"]
    assert RunDir(tmp_path / "demo").report_md.is_file() and RunDir(tmp_path / "demo").report_svg.is_file()
    code, out, err = run("demo", "--fast", "--output", tmp_path / "demo")
    assert code == 1 and len(err.splitlines()) == 2 and "exists" in err


def test_an_interrupted_training_says_so_and_can_be_continued(tmp_path, monkeypatch):
    import miniverl.training.trainer as trainer

    (tmp_path / "tiny.yaml").write_text(TINY)
    played = []

    class Interrupted(trainer.Cycle):
        def __call__(self, cycle):
            played.append(cycle)
            if cycle == 1:
                raise KeyboardInterrupt
            return super().__call__(cycle)

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "Cycle", Interrupted)
        code, out, err = run("train", tmp_path / "tiny.yaml", "--output", tmp_path, "--run-id", "r")
    lines = [line for line in err.splitlines() if line.startswith(("error:", "hint:"))]
    assert (
        code == 1
        and out == ""
        and lines[0] == "error: interrupted"
        and "--resume" in lines[1]
        and played == [-2, -1, 0, 1]
    )
    made = RunDir(tmp_path / "r")
    assert json.loads(made.manifest.read_text())["status"] == "interrupted"
    assert "not complete: its status is `interrupted`" in (run("report", made.path) and made.report_md.read_text())
    code, out, err = run("train", "--resume", made.path, "--json")
    assert code == 0 and loads_strict(out)["result"]["global_step"] == 4 and "continues at cycle 1" in err
