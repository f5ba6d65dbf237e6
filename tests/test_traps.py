"""Mistakes that projects of this kind have really made, one test each, on runs that take a fraction of a second."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from run_fixture import episode, make_run
from setuptools import find_packages
from test_cli import assert_error, names, run
from training_helpers import SHAPE, tiny, tree

from miniverl.agent.protocol import ParseFailure, parse_generation, render_final
from miniverl.agent.stats import RolloutStats
from miniverl.cache.store import TeacherCache
from miniverl.core import DataError, MiniVerlError, StoreError, TrainingError, loads_strict, sha256_file
from miniverl.environments.calculator import Calculator
from miniverl.evaluation.evaluator import evaluate_run
from miniverl.models.tokenizers import ToyTokenizer
from miniverl.reporting.pages import selected_by_span
from miniverl.reporting.records import load_run
from miniverl.schemas.config import RunConfig
from miniverl.schemas.trajectory import read_trajectories
from miniverl.store import RunDir, read_journal, write_atomic
from miniverl.training import phases, setup, update
from miniverl.training.accounting import metric_record
from miniverl.training.checkpoints import latest_checkpoint
from miniverl.training.optim import learning_rate
from miniverl.training.trainer import OPDTrainer

ROOT = Path(__file__).resolve().parents[1]
WARM = {"save_every_cycles": 2, "eval_every_cycles": 2}


def trained(config, **options):
    with OPDTrainer(config, **options) as trainer:
        return trainer.train(), trainer.run


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A finished run and its result; tests look at it or work on copies."""
    folder = tmp_path_factory.mktemp("made")
    result, run_dir = trained(tiny(folder, train=WARM))
    return result, run_dir


@pytest.fixture
def copy(made, tmp_path):
    """A copy of the finished run beside a copy of its toy teacher."""
    shutil.copytree(made[1].path.parent, tmp_path / "runs", ignore=shutil.ignore_patterns(".miniverl-locks"))
    return RunDir(tmp_path / "runs" / "run")


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(tiny("runs").to_yaml())
    return path


# ---------------------------------------------------------------- names and formulae of the records

STATISTICS = """rollouts solved success_rate assistant_turns emitted_tool_calls parsed_tool_calls tool_execution_successes
tool_execution_errors unknown_tool_calls parse_errors repeated_call_terminations final_answers_emitted final_answers_format_valid
final_answers_verified parse_valid_tool_call_rate tool_execution_success_rate tool_execution_error_rate
final_answer_format_validity_rate avg_turns avg_tool_calls generated_tokens generated_tokens_per_task tokens_per_solved_task
termination_reasons failure_categories tool_call_count valid_tool_call_rate invalid_tool_call_rate""".split()
EVALUATION = """tag split tasks parameter_version policy_version global_optimizer_step global_step rollout_policy_version temperature
seconds rollout_tokens_per_second success_by_difficulty memory""".split()
SELECTION = """total_model_tokens selected_model_tokens teacher_queried_position_ratio total_critical_tokens selected_critical_tokens
selected_by_span_type""".split()
CACHE = """num_trajectories num_selected_positions top_k vocab_size actual_bytes theoretical_full_logit_bytes bytes_per_selected_position
compression_ratio dtype_bytes_assumed policy_versions""".split()
MEMORY = "cuda_available allocated_bytes reserved_bytes peak_allocated_bytes peak_reserved_bytes".split()
STEP = """phase cycle step parameter_version rollout_policy_version loss divergence_loss sampled_token_nll_loss oracle_ce_loss
loss_by_span_type teacher_entropy_mean selected_positions trajectories_in_step grad_norm lr seconds train_selected_tokens_per_second
projection_chunk_size memory ts""".split()
FILES = """config.original.yaml config.resolved.yaml config.validated.yaml manifest.start.json manifest.json environment.json
metrics.jsonl events.jsonl trajectories.jsonl eval_trajectories.jsonl teacher-cache checkpoints eval.json""".split()


def test_rollout_statistics_have_every_name_and_alias():
    assert set(RolloutStats().to_dict()) == set(STATISTICS)


def test_a_rate_without_an_observation_is_null_and_a_mean_over_nothing_is_zero():
    empty = RolloutStats().to_dict()
    nothing = {name for name, value in empty.items() if value is None}
    assert nothing == {
        "parse_valid_tool_call_rate",
        "tool_execution_success_rate",
        "tool_execution_error_rate",
        "valid_tool_call_rate",
        "final_answer_format_validity_rate",
        "tokens_per_solved_task",
    }
    assert (
        empty["success_rate"]
        == empty["avg_turns"]
        == empty["avg_tool_calls"]
        == empty["generated_tokens_per_task"]
        == 0
    )


def test_rates_and_aliases_divide_by_what_their_names_say():
    counts = {
        "assistant_turns": 4,
        "emitted_tool_calls": 3,
        "parsed_tool_calls": 2,
        "tool_execution_successes": 1,
        "tool_execution_errors": 1,
        "unknown_tool_calls": 1,
        "final_answers_emitted": 1,
        "final_answers_format_valid": 1,
    }
    unsolved = episode("a", solved=False).model_copy(update=counts)
    nameless = episode("b").model_copy(update={"verification": None, "assistant_turns": 1})
    stats = RolloutStats.from_trajectories([unsolved, nameless]).to_dict()
    assert stats["solved"] == 0 and stats["tokens_per_solved_task"] is None
    assert (stats["tool_call_count"], stats["valid_tool_call_rate"], stats["invalid_tool_call_rate"]) == (
        3,
        2 / 3,
        1 / 3,
    )
    assert stats["parse_valid_tool_call_rate"] == 2 / 3 and stats["tool_execution_error_rate"] == 0.5
    assert (
        stats["avg_turns"] == 2.5
        and stats["avg_tool_calls"] == 1.0
        and stats["final_answer_format_validity_rate"] == 1.0
    )
    assert stats["failure_categories"] == {"no_final_answer": 1, "wrong_answer": 1}, (
        "an episode without a verdict has a category too"
    )


def test_records_of_evaluation_step_and_cycle_have_every_name(made):
    result, run_dir = made
    rows = read_journal(run_dir.metrics)
    evals = [r for r in rows if r["phase"] == "eval"]
    assert all(set(STATISTICS + EVALUATION) <= set(r) for r in [*evals, result.eval, result.baseline_eval])
    assert all(set(MEMORY) <= set(r["memory"]) for r in rows)
    steps = [r for r in rows if "grad_norm" in r]
    assert steps and all(set(STEP) <= set(r) for r in steps)
    cycles = [r for r in rows if r["phase"] == "opd_cycle"]
    assert cycles and all(set(SELECTION) <= set(r["selection"]) and set(CACHE) == set(r["cache"]) for r in cycles)
    assert all(set(STATISTICS) == set(r["rollouts"]) for r in cycles)


def test_derived_figures_of_an_evaluation_follow_from_its_counts(made):
    for payload in (made[0].eval, made[0].baseline_eval):
        assert payload["rollout_tokens_per_second"] == pytest.approx(payload["generated_tokens"] / payload["seconds"])
        assert (
            payload["success_rate"] == payload["solved"] / payload["tasks"] and payload["tasks"] == payload["rollouts"]
        )
        assert (
            payload["policy_version"] == payload["parameter_version"]
            and payload["global_step"] == payload["global_optimizer_step"]
        )
    assert made[0].eval["rollout_policy_version"] == made[0].eval["parameter_version"] - 1, (
        "the last batch was played before the last step"
    )


def test_cache_figures_compare_with_selected_positions_only(made):
    result, run_dir = made
    stats, width = result.cache, json.loads(run_dir.manifest.read_text())["models"]["student_lm_head_vocab_size"]
    played = [t for t in read_trajectories(run_dir.trajectories) if t.policy_version in stats["policy_versions"]]
    assert stats["num_selected_positions"] == sum(len(t.model_positions()) for t in played)
    assert (
        stats["theoretical_full_logit_bytes"] == stats["num_selected_positions"] * width * stats["dtype_bytes_assumed"]
    )
    assert stats["compression_ratio"] == stats["theoretical_full_logit_bytes"] / stats["actual_bytes"]
    assert stats["actual_bytes"] == sum(len(data) for data in tree(run_dir.teacher_cache).values())


def test_a_finished_run_has_every_file_and_no_leftover(made):
    found = names(made[1].path)
    assert set(FILES) <= set(found) and "checkpoints/final/checkpoint.json" in found
    assert not [name for name in found if ".tmp-" in name or ".bak-" in name or name.endswith("rolling")]


def test_an_episode_without_a_selected_position_stays_in_the_denominator_of_its_cycle(tmp_path, monkeypatch):
    real = phases.select

    def every_other(trajectory, section, seed):
        chosen = real(trajectory, section, seed)
        drop = trajectory.metadata.seed % 2 == 0
        return replace(chosen, positions=(), weights=(), span_types=(), selected_critical_tokens=0) if drop else chosen

    monkeypatch.setattr(phases, "select", every_other)
    result, run_dir = trained(tiny(tmp_path, train={"sft_warmup_cycles": 0}, eval={"enabled": False}))
    played = list(read_trajectories(run_dir.trajectories))
    whole, kept = (
        sum(t.generated_token_count for t in some) for some in (played, [t for t in played if t.metadata.seed % 2])
    )
    assert 0 < kept < whole
    assert result.accounting["model_generated_training_tokens_total"] == whole
    assert result.accounting["teacher_queried_position_ratio"] == kept / whole
    rows = [r for r in read_journal(run_dir.metrics) if r["phase"] == "opd_cycle"]
    assert sum(r["selection"]["total_model_tokens"] for r in rows) == whole


def test_the_report_sums_selected_tokens_over_all_cycles(made):
    result, run_dir = made
    counts = [
        int(row.split("|")[2].replace(",", "")) for row in selected_by_span(load_run(run_dir.path)).splitlines()[2:]
    ]
    assert sum(counts) == result.accounting["selected_training_tokens_total"] > 0


# ---------------------------------------------------------------- time, randomness, schedules


def test_neither_fitting_a_teacher_nor_evaluating_is_training_time(tmp_path, monkeypatch):
    real, play = setup.fit_toy_teacher, phases.RolloutRunner.run

    def slow_play(self, episodes, **how):
        if episodes[0].task.split == "eval":
            time.sleep(0.1)
        return play(self, episodes, **how)

    monkeypatch.setattr(setup, "fit_toy_teacher", lambda *a, **k: time.sleep(0.2) or real(*a, **k))
    monkeypatch.setattr(phases.RolloutRunner, "run", slow_play)
    result, _ = trained(tiny(tmp_path))
    assert result.teacher_prep_seconds >= 0.2 and result.evaluation_seconds >= 0.3, "three evaluations"
    assert 0 < result.train_seconds <= result.wall_seconds - result.teacher_prep_seconds - result.evaluation_seconds


def test_a_teacher_from_the_shelf_gives_the_run_of_a_teacher_that_was_just_fitted(tmp_path):
    first, one = trained(tiny(tmp_path, "first"))
    second, two = trained(tiny(tmp_path, "second"))
    fits = [next(e for e in read_journal(r.events) if e["event"] == "toy_teacher_fitted") for r in (one, two)]
    assert [fit["from_store"] for fit in fits] == [False, True] and fits[0]["digest"] == fits[1]["digest"]
    assert first.final_checkpoint["weights_digest"] == second.final_checkpoint["weights_digest"]


def test_a_continued_run_goes_on_with_the_learning_rate_where_it_was(tmp_path):
    schedule = {"lr_schedule": "cosine", "warmup_steps": 2, "cycles": 4}

    def stop(phase, done, total, info):
        if phase == "cycle" and done == 3:
            raise KeyboardInterrupt

    config = tiny(tmp_path, train=schedule, eval={"enabled": False})
    with pytest.raises(KeyboardInterrupt), OPDTrainer(config, on_progress=stop, rolling_every=1) as trainer:
        trainer.train()
    with OPDTrainer.resume(trainer.run.path) as again:
        again.train()
    rates = [r["lr"] for r in read_journal(again.run.metrics) if "grad_norm" in r]
    wanted = [learning_rate(s, base=3e-3, schedule="cosine", warmup_steps=2, total_steps=6) for s in range(6)]
    assert rates == wanted and wanted[-1] < 0.2 * wanted[2], (
        "one schedule over the cold start and all cycles, never restarted"
    )


def test_the_newest_checkpoint_is_found_by_its_step_and_not_by_its_name(copy):
    shutil.rmtree(copy.checkpoints / "final")
    older = next(copy.checkpoints.glob("step-*"))
    result, newer = trained(tiny(copy.path.parent, "longer", train={**WARM, "cycles": 4, "save_every_cycles": 4}))
    shutil.copytree(newer.checkpoints / "final", copy.checkpoints / "a-newer-one")
    os.rename(older, copy.checkpoints / "step-999999")
    assert latest_checkpoint(copy.checkpoints).global_step == result.global_step == 6


# ---------------------------------------------------------------- what was learned is never lost


def test_continuing_a_finished_run_keeps_its_weights_and_its_result(copy):
    before = tree(copy.path)
    data = run_json_of_resume(copy)
    assert (
        tree(copy.path) == before and data["result"]["global_step"] == 5 and data["result"]["baseline_eval"] is not None
    )
    with OPDTrainer.resume(copy.path) as trainer:
        with pytest.raises(TrainingError, match="trained already"):
            trainer.load_weights(copy.checkpoints / "final")
    assert tree(copy.path) == before


def run_json_of_resume(run_dir):
    code, out, err = run("train", "--resume", run_dir.path, "--no-report", "--json")
    assert code == 0 and "nothing was changed" in err
    return loads_strict(out)


@pytest.mark.parametrize(
    "name", ["eval.json", "metrics.jsonl", "manifest.json", "checkpoints/final/adapter.safetensors", "new.json"]
)
def test_an_evaluation_cannot_be_written_over_what_training_wrote(copy, name):
    before = tree(copy.path)
    assert_error(run("eval", "--run", copy.path, "--out", copy.path / name, "--overwrite"), 2, "belong to training")
    assert tree(copy.path) == before


def test_an_evaluation_that_cannot_be_written_is_not_played(copy, tmp_path):
    (tmp_path / "file").write_text("x")
    before = tree(tmp_path)
    for out in (tmp_path / "no" / "a.json", tmp_path / "file" / "a.json", tmp_path):
        assert_error(run("eval", "--run", copy.path, "--out", out, "--overwrite"), 1, "cannot be written")
    after = {name: data for name, data in tree(tmp_path).items() if ".miniverl-locks" not in name}
    assert after == before, "no record is left in the journals"


def test_a_tag_is_a_name_and_not_a_path(copy):
    result = evaluate_run(copy.path, tag="../../[b]x y")
    assert result["tag"] == "b-x-y" and Path(result["file"]) == copy.path / "eval.b-x-y.json"
    assert_error(run("eval", "--run", copy.path, "--tag", "./final"), 2, "belongs to training")


def test_a_write_that_fails_leaves_no_temporary_file(tmp_path):
    (tmp_path / "taken").mkdir()
    with pytest.raises(StoreError):
        write_atomic(tmp_path / "taken", "text")
    assert names(tmp_path) == ["taken"]


def test_overwriting_through_a_link_leaves_the_other_run_alone(copy, tmp_path):
    link, before = tmp_path / "runs" / "link", tree(copy.path)
    link.symlink_to(copy.path)
    trained(tiny(tmp_path / "runs", "link", train={"cycles": 0, "sft_warmup_cycles": 0}), overwrite=True)
    assert tree(copy.path) == before and not link.is_symlink()
    assert sorted(p.name for p in link.parent.iterdir() if not p.name.startswith((".miniverl", ".toy"))) == [
        "link",
        "run",
    ]


def test_a_gradient_that_is_not_finite_changes_nothing_and_says_so(tmp_path, monkeypatch):
    real = update.chunked_loss

    def broken(*args, **kwargs):
        found = real(*args, **kwargs)
        return replace(found, loss=found.loss * float("nan"))

    monkeypatch.setattr(update, "chunked_loss", broken)
    with OPDTrainer(tiny(tmp_path, eval={"enabled": False})) as trainer:
        before = {name: p.detach().clone() for name, p in trainer.student.trainable_parameters().items()}
        with pytest.raises(TrainingError, match="not finite"):
            trainer.train()
        assert all(torch.equal(p, before[name]) for name, p in trainer.student.trainable_parameters().items())
        assert trainer.context.counters.parameter_version == trainer.context.counters.global_step == 0
    assert json.loads(trainer.run.manifest.read_text())["status"] == "failed"


def test_no_record_can_hold_a_bare_nan(tmp_path):
    record = metric_record("opd", loss=float("nan"), nested={"a": [float("inf"), 1.0]})
    assert record["loss"] is None and record["nested"] == {"a": [None, 1.0]}


# ---------------------------------------------------------------- bounds of an episode


def test_a_recipe_that_allows_more_tokens_than_the_student_has_positions_ends_episodes_early(tmp_path):
    small = {**SHAPE, "max_position_embeddings": 40}
    models = tiny(tmp_path).to_mapping()["models"]
    models = {**models, "student": {**models["student"], "toy": small}}
    result, run_dir = trained(tiny(tmp_path, models=models, train={"sft_warmup_cycles": 0}))
    played = list(read_trajectories(run_dir.trajectories))
    assert result.global_step == 3 and max(len(t.token_ids) for t in played) <= 40
    assert {str(t.termination_reason) for t in played} & {"max_tokens"}


@pytest.mark.parametrize(
    "text", ["<final>\na</final>b\n</final>", "<final>a<final>b</final>", "<final>a</final><tool_call>"]
)
def test_an_answer_with_a_closing_tag_inside_is_refused_and_never_cut(text):
    assert isinstance(parse_generation(text), ParseFailure)
    with pytest.raises(DataError):
        render_final("a</final>b")


# ---------------------------------------------------------------- configuration


class Twin(Calculator):
    """An environment from outside the package."""

    name = "twin"


def test_an_environment_of_somebody_else_is_named_by_its_import_path(tmp_path):
    _, run_dir = trained(tiny(tmp_path, environment={"name": f"{__name__}:Twin"}, eval={"enabled": False}))
    assert json.loads(run_dir.manifest.read_text())["environment"]["provenance"]["name"] == "twin"
    assert {t.environment for t in read_trajectories(run_dir.trajectories)} == {"twin"}


def test_the_resolved_configuration_of_an_exact_run_can_be_read_again(tmp_path):
    loss = {key: value for key, value in tiny(tmp_path).to_mapping()["loss"].items() if key != "top_k"}
    mapping = {**tiny(tmp_path).to_mapping(), "loss": {**loss, "mode": "exact_full_vocab"}}
    config = RunConfig.from_mapping({**mapping, "train": {**mapping["train"], "cycles": 1}})
    _, run_dir = trained(config)
    manifest = json.loads(run_dir.manifest.read_text())
    assert RunConfig.from_yaml(run_dir.config_resolved).digest == manifest["config_digests"]["resolved"]
    assert manifest["objective"]["top_k"] == manifest["models"]["student_lm_head_vocab_size"]
    assert evaluate_run(run_dir.path)["global_step"] == 3 and not run_dir.teacher_cache.exists()


HOSTILE = {
    "empty": "", "list": "- a", "two documents": "a: 1\n---\nb: 2\n", "tab": "\ta: 1", "deep": "a: " + "[" * 1200, "itself": "a: &a [*a]\n",
    "python object": 'a: !!python/object/apply:os.system ["true"]', "key of another type": "1: 2", "control character": "a: \x1b[2J",
    "twice": ("seed: 5", "seed: 5\n  seed: 6"), "nan": ("learning_rate: 0.003", "learning_rate: .nan"), "infinite": ("learning_rate: 0.003", "learning_rate: 1e999"),
    "text for a number": ("cycles: 3", 'cycles: "3"'), "truth for a number": ("cycles: 3", "cycles: true"), "half a cycle": ("cycles: 3", "cycles: 2.5"),
    "65 bits": ("chunk_size: 256", "chunk_size: " + "9" * 30), "ten thousand digits": ("seed: 5", "seed: " + "9" * 10_000),
    "nul in a folder": ("dir: null", 'dir: "a\\0b"'), "nul in a name": ("name: tiny", 'name: "t\\0y"'), "name of a run without a letter": ("run_id: run", 'run_id: "///"'),
    "unknown parameter": ("prompt_style: compact", "prompt_stile: compact"), "wrong parameter": ("prompt_style: compact", "tolerance: 1e400"),
    "unknown environment": ("name: calculator", "name: abacus"), "environment that is none": ("name: calculator", 'name: "json:JSONDecoder"'),
    "environment without methods": ("name: calculator", 'name: "miniverl.environments.base:Environment"'),
    "environment that cannot be imported": ("name: calculator", 'name: "no_such_module:Thing"'),
    "more tasks than questions": ("train_tasks: 6", "train_tasks: 100000"), "evaluation on an empty split": ("test_tasks: 2", "test_tasks: 0"),
}  # fmt: skip


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_recipe_is_two_lines_and_leaves_nothing(recipe, tmp_path, change):
    text = tiny("runs", eval={"split": "test"}).to_yaml()
    if isinstance(change, tuple):
        assert change[0] in text
        text = text.replace(*change)
    recipe.write_text(text if isinstance(change, tuple) else change)
    for words in (
        ["validate", recipe],
        ["train", recipe, "--dry-run"],
        ["train", recipe, "--output", tmp_path / "out"],
    ):
        code, out, err = run(*words)
        assert_error((code, out, err), code, "recipe.yaml" if isinstance(change, str) else "")
        assert code in (1, 2) and "\x1b" not in err
    assert names(tmp_path) == ["recipe.yaml"]


@pytest.mark.parametrize(
    "data", [b"\xff\xfe\x00", b"\x1f\x8b\x08\x00", bytes(range(256)) * 8, tiny("runs").to_yaml().encode("utf-16")]
)
def test_a_recipe_of_bytes_is_two_lines(recipe, data):
    recipe.write_bytes(data)
    assert_error(run("validate", recipe), 1, "recipe.yaml")


def test_byte_order_mark_line_ends_and_brackets_are_harmless(tmp_path):
    folder = tmp_path / "a [train] b" / "[/red]"
    folder.mkdir(parents=True)
    path = folder / "r [bold].yaml"
    path.write_bytes(
        b"\xef\xbb\xbf"
        + tiny("runs", train={"cycles": 0, "sft_warmup_cycles": 1}).to_yaml().replace("\n", "\r\n").encode()
    )
    assert run("validate", path)[1].splitlines()[0] == f"{path}: valid"
    code, out, err = run("train", path, "--output", folder, "--run-id", "[x] y", "--json")
    assert code == 0, err
    made_run = RunDir(folder / "x-y")
    assert (
        loads_strict(out)["run_dir"] == str(made_run.path)
        and made_run.config_submitted.read_bytes() == path.read_bytes()
    )
    assert b"\r" not in b"".join(
        data for name, data in tree(made_run.path).items() if name.endswith((".json", ".jsonl", ".md"))
    )
    for words in (
        ["inspect", made_run.eval_trajectories],
        ["report", made_run.path],
        ["eval", "--run", made_run.path],
        ["train", "--resume", made_run.path],
    ):
        assert run(*words)[0] == 0, words


# ---------------------------------------------------------------- damaged and foreign files

BYTES = {"nothing": b"\n{", "zeros": b"\0" * 300 + b"\n", "random": bytes(range(256)) * 8 + b"\n", "deep": b"[" * 50_000 + b"\n", "digits": b'{"a":' + b"9" * 9999 + b"}\n",
         "nan": b'{"a":NaN}\n', "twice": b'{"a":1,"a":2}\n', "no utf-8": b'{"a":"\xff"}\n', "surrogate": b'{"a":"\\ud800"}\n', "list": b"[1]\n", "null": b"null\n"}  # fmt: skip


@pytest.mark.parametrize("data", BYTES.values(), ids=BYTES)
def test_bytes_that_are_no_trajectories_are_two_lines(tmp_path, data):
    path = tmp_path / "t [train].jsonl"
    path.write_bytes(data)
    assert_error(run("inspect", path), 1, "t [train].jsonl")


def damaged(run_dir, name, key, value):
    """Put `value` (or nothing: `...`) under `key` of a JSON file, or of the last record of a journal that has the key."""
    path = run_dir.path / name
    lines = path.read_text().splitlines() if name.endswith(".jsonl") else [path.read_text()]
    at = max(i for i, line in enumerate(lines) if key in json.loads(line))
    record = json.loads(lines[at])
    record = {k: v for k, v in record.items() if k != key} if value is ... else {**record, key: value}
    path.write_text("\n".join([*lines[:at], json.dumps(record), *lines[at + 1 :]]) + "\n")


FOREIGN = [
    (key, value)
    for key in ("success_rate", "tasks", "global_step", "grad_norm step", "selection")
    for value in (..., "x", [], {}, True)
]
FOREIGN += [
    ("optimizer_steps", ...),
    ("optimizer_steps", "x"),
    ("failure_categories", "x"),
    ("failure_categories", {"solved": "x"}),
]


@pytest.mark.parametrize("key, value", FOREIGN, ids=str)
def test_a_record_of_another_version_is_two_lines_in_a_report(copy, tmp_path, key, value):
    first, _, second = key.partition(" ")
    rows = read_journal(copy.metrics)
    copy.metrics.write_text(
        "".join(json.dumps(r) + "\n" for r in [*(r for r in rows if first not in r), *(r for r in rows if first in r)])
    )
    damaged(copy, "metrics.jsonl", second or first, value)
    assert_error(run("report", copy.path, "--out", tmp_path / "out"), 1, "another version")
    assert not (tmp_path / "out" / "report.md").exists()


@pytest.mark.parametrize("data", ["[]", "1", "null", '"x"', "{}", '{"config_digests": []}', "{", ""])
def test_an_evaluation_needs_a_manifest_that_vouches_for_the_configuration(copy, data):
    copy.manifest.write_text(data)
    copy.manifest_start.write_text(data)
    before = tree(copy.path)
    assert_error(run("eval", "--run", copy.path), 1, "manifest")
    assert tree(copy.path) == before


@pytest.mark.parametrize("text", ["a: [", "- x", "a: " + "[" * 1200, "a: " + "9" * 9999, "\x00", "a: 1\na: 2\n"])
def test_a_damaged_configuration_is_two_lines_in_a_report(tmp_path, text):
    made_run = make_run(tmp_path / "runs")
    made_run.config_resolved.write_text(text)
    assert_error(run("report", made_run.path, "--out", tmp_path / "out"), 1, "config.resolved.yaml")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("cut", [0, 7, 200])
def test_a_truncated_cache_is_told_and_never_read(copy, cut):
    shard = sorted(copy.teacher_cache.glob("*.safetensors"))[-1]
    shard.write_bytes(shard.read_bytes()[:cut])
    code, out, err = run("cache", "validate", copy.path, "--json")
    assert code == 1 and err == "" and shard.name in loads_strict(out)["problems"][0]
    assert run("cache", "stats", copy.path)[0] == 1
    (copy.teacher_cache / "index.jsonl").write_bytes(b"\0" * 50)
    assert_error(run("cache", "stats", copy.path, "--no-verify"), 1, "no teacher cache")


def test_a_cache_keeps_its_layout_when_it_is_opened_without_saying_it(made, tmp_path):
    identity = TeacherCache.open(made[1].teacher_cache).identity
    with TeacherCache.open(tmp_path / "c", identity, entries_per_shard=2):
        pass
    with TeacherCache.open(tmp_path / "c", identity) as cache:
        assert cache.entries_per_shard == 2


# ---------------------------------------------------------------- terminals, pipes, signals


def command(*words, **options):
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); from miniverl.cli import main; main(sys.argv[1:])"
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, words)],
        cwd=ROOT,
        text=True,
        stderr=subprocess.PIPE,
        **{"stdout": subprocess.PIPE, **options},
    )


def test_control_characters_of_a_file_do_not_reach_the_terminal(recipe, tmp_path):
    recipe.write_text(recipe.read_text().replace("name: tiny", 'name: "\\e[2Jtiny"'))
    code, out, _ = run("validate", recipe)
    assert code == 0 and "\x1b" not in out and "\\x1b[2Jtiny" in out
    recipe.write_text('"\\e[2J": 1\n')
    code, out, err = run("validate", recipe)
    assert code == 1 and "\x1b" not in err
    assert "\x1b" not in run("validate", tmp_path / "\x1b[2J.yaml")[2]


def test_a_file_name_that_is_no_text_is_no_traceback(recipe, tmp_path):
    path = os.path.join(os.fsencode(tmp_path), b"caf\xe9.yaml")
    Path(os.fsdecode(path)).write_text(recipe.read_text())
    code, out, _ = run("validate", os.fsdecode(path))
    assert code == 0 and "caf\\udce9.yaml: valid" in out
    assert_error(run("validate", os.fsdecode(path), "--json"), 1, "surrogate")


def test_an_ascii_terminal_gets_escapes_and_strict_json(recipe, tmp_path):
    path = tmp_path / "r\u00e9\U0001f600.yaml"
    path.write_text(recipe.read_text())
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    out, err = command("validate", path, "--json", env=env).communicate(timeout=60)
    assert out.isascii() and loads_strict(out)["recipe"] == str(path), err
    out, err = command("validate", path, env=env).communicate(timeout=60)
    assert "r\\xe9\\U0001f600.yaml: valid" in out.splitlines()[0] and err == ""


def test_output_that_cannot_be_written_is_no_traceback(recipe):
    with open("/dev/full", "w") as full:
        processes = [command(*words, stdout=full) for words in (["--help"], ["validate", recipe])]
        ends = [(p.communicate(timeout=60)[1], p.returncode) for p in processes]
    assert all(
        code == 1 and err.splitlines()[0] == "error: No space left on device" and "Traceback" not in err
        for err, code in ends
    )
    process = command("validate", recipe, stdout=None, preexec_fn=lambda: os.close(1))
    assert process.communicate(timeout=60)[1] == "" and process.returncode == 0
    process = command("--help")
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait(60) == 1


def test_control_c_ends_a_training_in_two_lines_and_it_can_be_continued(recipe, tmp_path):
    recipe.write_text(recipe.read_text().replace("cycles: 3\n", "cycles: 5000\n", 1))
    assert "cycles: 5000" in recipe.read_text()
    process = command("train", recipe, "--output", tmp_path / "runs", "--run-id", "r")
    for line in process.stderr:
        if line.startswith("cycle"):
            break
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (
        process.returncode == 1
        and out == ""
        and [line.split(":")[0] for line in err.splitlines()[-2:]] == ["error", "hint"]
    ), err
    made_run = RunDir(tmp_path / "runs" / "r")
    assert json.loads(made_run.manifest.read_text())["status"] == "interrupted" and not list(
        made_run.path.rglob(".tmp-*")
    )
    with OPDTrainer.resume(made_run.path) as trainer:
        assert trainer.result is None


# ---------------------------------------------------------------- what may be published, what is shipped


def test_the_records_of_a_run_name_no_place_and_no_person(made):
    run_dir = made[1]
    data = b"".join(content for name, content in tree(run_dir.path).items() if name.endswith((".json", ".jsonl")))
    secrets = [str(run_dir.path.parent), str(ROOT), str(Path.home()), socket.gethostname()]
    secrets += [getpass.getuser()] if len(getpass.getuser()) > 4 else []
    assert not [word for word in secrets if len(word) > 6 and word.encode() in data]


def test_a_fingerprint_sees_every_piece_of_a_tokenizer():
    own, other = ToyTokenizer(), ToyTokenizer()
    other.pieces = (*own.pieces[:-1], "\x0b")
    assert own.fingerprint != other.fingerprint and own.fingerprint == ToyTokenizer().fingerprint


def test_no_source_is_ignored_by_git_and_every_package_is_shipped():
    folders = [p.parent.relative_to(ROOT).as_posix() for p in (ROOT / "miniverl").rglob("*.py")]
    assert {f.replace("/", ".") for f in folders} == set(find_packages(str(ROOT), include=["miniverl", "miniverl.*"]))
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    sources = [
        str(p.relative_to(ROOT))
        for folder in ("miniverl", "nbs", "tests", "recipes", "tools", "benchmarks")
        for p in (ROOT / folder).rglob("*")
    ]
    sources = [s for s in sources if s.endswith((".py", ".ipynb", ".yaml")) and ".ipynb_checkpoints" not in s]
    found = subprocess.run(
        ["git", "check-ignore", "--no-index", "--stdin"],
        cwd=ROOT,
        input="\n".join(sources),
        capture_output=True,
        text=True,
    )
    assert found.stdout == "" and len(sources) > 100


def test_weights_on_disk_are_what_the_manifest_names(made):
    result, run_dir = made
    weights = run_dir.checkpoints / "final" / "adapter.safetensors"
    recorded = json.loads(run_dir.manifest.read_text())["final_checkpoint"]["weights_digest"]
    assert sha256_file(weights) == result.final_checkpoint["weights_digest"] == recorded


def test_a_new_run_never_deletes_what_lies_where_its_cache_would_be(tmp_path):
    elsewhere = {"dir": str(tmp_path / "home")}
    (tmp_path / "home" / "run").mkdir(parents=True)
    (tmp_path / "home" / "run" / "thesis.txt").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(StoreError, match="exists already"):
            OPDTrainer(tiny(tmp_path / "runs", cache=elsewhere), overwrite=overwrite)
    assert names(tmp_path) == ["home", "home/run", "home/run/thesis.txt"]


def test_two_runs_of_one_name_do_not_share_a_cache(tmp_path):
    elsewhere = {"dir": str(tmp_path / "caches")}
    trained(tiny(tmp_path / "a", cache=elsewhere))
    before = tree(tmp_path / "caches")
    for overwrite in (False, True):
        with pytest.raises(StoreError, match="exists already"):
            OPDTrainer(tiny(tmp_path / "b", cache=elsewhere), overwrite=overwrite)
    assert tree(tmp_path / "caches") == before and not (tmp_path / "b").exists()
    trained(tiny(tmp_path / "a", cache=elsewhere), overwrite=True)
    assert tree(tmp_path / "caches") == before, "the run that is overwritten gives its cache up"


@pytest.mark.parametrize("data", ["[]", "1", "null", '"x"', "{}", '{"config_digests": []}', "{", ""])
def test_continuing_needs_a_manifest_that_vouches_for_the_recipe(copy, data):
    copy.manifest_start.write_text(data)
    before = tree(copy.path)
    assert_error(run("train", "--resume", copy.path), 1)
    assert tree(copy.path) == before


def test_a_trace_that_no_model_can_hold_is_refused_before_anything_exists(tmp_path):
    with pytest.raises(MiniVerlError, match="longest oracle trace has .* positions") as caught:
        OPDTrainer(
            tiny(tmp_path, environment={"name": "calculator", "train_tasks": 6, "params": {"prompt_style": "full"}})
        )
    assert "max_position_embeddings" in caught.value.hint and names(tmp_path) == []


def test_no_number_of_tasks_below_one_is_evaluated(tmp_path):
    with OPDTrainer(tiny(tmp_path)) as trainer:
        for tasks in (0, -3):
            with pytest.raises(MiniVerlError, match="cannot be evaluated"):
                trainer.evaluate("eval", tasks)
