"""Runs of every mode, what they record, and how they end."""

from __future__ import annotations

import json
import random
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from training_helpers import lines, tiny, tree

from miniverl.core import (
    BackendError,
    ConfigError,
    LockError,
    MiniVerlError,
    StaleCacheError,
    StoreError,
    TrainingError,
)
from miniverl.schemas.trajectory import read_trajectories
from miniverl.store import read_journal, run_lock
from miniverl.training import phases, update
from miniverl.training.accounting import restore_totals, totals_of, totals_state
from miniverl.training.checkpoints import load_checkpoint, save_checkpoint, verify_checkpoint
from miniverl.training.manifest import observed_status
from miniverl.training.optim import AdamW
from miniverl.training.result import TrainResult
from miniverl.training.trainer import OPDTrainer


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One folder for all runs of this file, so that each toy teacher is fitted once."""
    return tmp_path_factory.mktemp("runs")


def trained(config, **options):
    with OPDTrainer(config, **options) as trainer:
        return trainer.train(), trainer.run


SELECTORS = ("all_model_tokens", "tool_and_final", "uniform_ratio", "hybrid")
KINDS = [
    *[({"run": {"mode": mode}, "selection": {"selector": s}}) for mode in ("sft", "offline_kd") for s in SELECTORS],
    *[
        (
            {
                "loss": {"divergence": d, "mode": m, "top_k": 1 if m == "exact_full_vocab" else 4},
                "selection": {"selector": "uniform_ratio"},
            }
        )
        for d in ("forward_kl", "reverse_kl", "jsd")
        for m in ("bucketed_topk_tail", "exact_full_vocab")
    ],
    {"run": {"mode": "offline_kd"}, "loss": {"mode": "exact_full_vocab", "top_k": 1}},
    {
        "selection": {"selector": "hybrid"},
        "loss": {"reduction": "token_mean", "sampled_token_nll_weight": 0.3, "temperature": 2.0},
    },
    {"train": {"opd_freshness": "replay", "gradient_accumulation_steps": 2, "optimizer": "adamw", "update_batch": 1}},
    {"cache": {"dtype": "float16", "keep_cycles": 2, "entries_per_shard": 2}},
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: json.dumps(k, separators=(",", ":")).replace('"', "")[:90])
def test_every_kind_of_run_trains_and_says_what_it_was(runs, kind, request):
    config = tiny(runs, f"kind-{request.node.callspec.indices['kind']}", **kind)
    config = config.model_copy(update={"eval": config.eval.model_copy(update={"enabled": False})})
    with OPDTrainer(config, rolling_every=99) as trainer:
        before = {n: p.detach().clone() for n, p in trainer.student.trainable_parameters().items()}
        result = trainer.train()
        moved = {n: not torch.equal(p, before[n]) for n, p in trainer.student.trainable_parameters().items()}
        run = trainer.run
    manifest = json.loads(run.manifest.read_text())
    assert (
        manifest["status"] == "completed" and manifest["objective"]["name"] == config.objective_name == result.objective
    )
    assert all(moved.values()) and result.parameter_version == result.global_step > 0
    assert result.eval is None and result.baseline_eval is None
    rows = read_journal(run.metrics)
    cycles = [r for r in rows if r["phase"].endswith("_cycle")]
    steps = [r for r in rows if "grad_norm" in r]
    assert len(cycles) == config.train.cycles + config.train.sft_warmup_cycles and len(steps) == result.global_step
    assert [r["step"] for r in steps] == list(range(1, result.global_step + 1))
    assert [r["cycle"] for r in cycles] == list(range(-config.train.sft_warmup_cycles, config.train.cycles))
    stored = (run.path / "teacher-cache").exists()
    assert stored == ("teacher-cache" in manifest["expected_artifacts"]) == (result.cache is not None)
    assert all((run.path / name).exists() for name in manifest["expected_artifacts"])
    verify_checkpoint(run.checkpoints / "final")


def test_supervised_span_losses_are_cross_entropies_and_nothing_of_a_teacher_is_claimed(runs):
    result, run = trained(tiny(runs, "sft", run={"mode": "sft"}))
    steps = [r for r in read_journal(run.metrics) if r["phase"] == "sft"]
    assert len(steps) == 3 and all(min(r["loss_by_span_type"].values()) > 0.5 for r in steps)
    assert all(
        r["divergence_loss"] is None
        and r["teacher_entropy_mean"] is None
        and r["oracle_ce_loss"] == pytest.approx(r["loss"], rel=1e-5)
        for r in steps
    )
    assert (
        result.accounting["teacher_queried_positions_total"] is None
        and result.teacher is None
        and result.teacher_prep_seconds == 0
    )
    assert "toy_teacher_fitted" not in [e["event"] for e in read_journal(run.events)]


def test_one_recipe_gives_the_same_bits_twice_and_leaves_the_process_as_it_was(runs):
    random.seed(11), np.random.seed(11), torch.manual_seed(11)
    torch.set_num_threads(2)
    expected = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state())
    pair = []
    for folder in ("a", "b"):
        (runs / folder).mkdir()
        _, run = trained(tiny(runs / folder))
        pair.append(run)
    assert (
        random.getstate() == expected[0]
        and np.random.get_state()[1].tolist() == expected[1]
        and torch.equal(torch.get_rng_state(), expected[2])
    )
    assert torch.get_num_threads() == 2 and not torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    a, b = pair
    assert (a.checkpoints / "final" / "adapter.safetensors").read_bytes() == (
        b.checkpoints / "final" / "adapter.safetensors"
    ).read_bytes()
    assert lines(a.metrics) == lines(b.metrics) and a.trajectories.read_bytes() == b.trajectories.read_bytes()
    assert (
        verify_checkpoint(a.checkpoints / "final").content_digest
        == verify_checkpoint(b.checkpoints / "final").content_digest
    )
    assert json.loads(a.environment.read_text())["torch_threads"] == 1


def test_the_order_of_a_run(runs):
    seen = []
    config = tiny(runs, "order", train={"eval_every_cycles": 1, "save_every_cycles": 2})
    result, run = trained(config, on_progress=lambda phase, done, total, info: seen.append((phase, done, total)))
    events = [e["event"] for e in read_journal(run.events)]
    assert events[:4] == ["run_start", "toy_teacher_fitted", "oracle_traces_not_logged", "eval"] and events[-3:] == [
        "eval",
        "checkpoint_saved",
        "run_end",
    ]
    tags = [r["tag"] for r in read_journal(run.metrics) if r["phase"] == "eval"]
    assert tags == ["baseline", "cold-start", "cycle1", "cycle2", "final"]
    assert [e["tag"] for e in result.eval_history] == tags[1:-1]
    assert sorted(p.name for p in run.checkpoints.iterdir()) == ["final", "step-000004"], (
        "the rolling one is gone at the end"
    )
    assert [s for s in seen if s[0] == "cycle"] == [("cycle", i, 5) for i in range(1, 6)]
    assert {s[0] for s in seen} - {"teacher_prep"} == {"rollout", "update", "eval", "cycle"}
    assert len(list(read_trajectories(run.trajectories))) == 9, "only the student's own episodes are logged"


def test_totals_and_seconds_come_from_the_records(runs):
    result, run = trained(tiny(runs, "books"))
    rows = read_journal(run.metrics)
    totals = totals_of(rows)
    assert {k: v for k, v in result.accounting.items() if not k.endswith("ratio")} == totals_state(totals)
    assert restore_totals(totals_state(totals)) == totals and totals.optimizer_steps == result.global_step
    wall = result.phase_seconds["wall"]
    assert result.train_seconds == pytest.approx(wall["rollout"] + wall["score"] + wall["update"])
    assert result.evaluation_seconds == wall["eval"] > 0 and result.teacher_prep_seconds == wall["teacher_prep"] > 0
    assert result.wall_seconds >= sum(wall.values())
    by_cycle = sum(r["seconds"] for r in rows if r["phase"].endswith("_cycle"))
    assert by_cycle == pytest.approx(result.train_seconds, rel=1e-6), "every second of training belongs to a cycle"
    played = list(read_trajectories(run.trajectories))
    assert result.accounting["generated_tokens"] == sum(t.generated_token_count for t in played)
    assert result.cache["policy_versions"] == [4], "keep_cycles 1: only the last version's targets stay"


def test_a_cycle_without_selected_positions_changes_nothing(runs, monkeypatch):
    monkeypatch.setattr(phases, "select", lambda t, section, seed: _empty(t, section, seed))
    result, run = trained(tiny(runs, "empty", train={"sft_warmup_cycles": 0}))
    assert result.global_step == result.parameter_version == 0 and result.accounting["cycles_skipped"] == 3
    assert [e["event"] for e in read_journal(run.events)].count("cycle_skipped_no_selected_positions") == 3
    rows = [r for r in read_journal(run.metrics) if r["phase"] == "opd_cycle"]
    assert all(
        r["selection"]["total_model_tokens"] > 0 and r["selection"]["teacher_queried_position_ratio"] == 0 for r in rows
    )
    assert {t.policy_version for t in read_trajectories(run.trajectories)} == {0}


def _empty(trajectory, section, seed):
    from miniverl.selection.selectors import select

    return replace(
        select(trajectory, section, seed), positions=(), weights=(), span_types=(), selected_critical_tokens=0
    )


def test_more_trajectories_than_tasks_get_names_of_their_own(runs):
    for mode in ("offline_kd", "opd", "sft"):
        accumulate = {"rollouts_per_cycle": 9, "gradient_accumulation_steps": 9}
        result, run = trained(
            tiny(runs, f"many-{mode}", run={"mode": mode}, environment={"train_tasks": 4}, train=accumulate)
        )
        assert result.accounting["trajectories"] == 27 + (18 if mode != "sft" else 0)
    ids = [t.trajectory_id for t in read_trajectories(runs / "many-opd" / "trajectories.jsonl")]
    assert len(set(ids)) == len(ids) == 27
    names = [
        t.trajectory_id for t in read_trajectories(runs / "many-offline_kd" / "offline-dataset" / "trajectories.jsonl")
    ]
    assert len(set(names)) == 4


def test_offline_distillation_scores_once_and_walks_through_its_set(runs):
    result, run = trained(
        tiny(runs, "offline", run={"mode": "offline_kd"}, train={"offline_trajectories": 5, "sft_warmup_cycles": 0})
    )
    made = json.loads((run.offline_dataset / "manifest.json").read_text())
    assert made["trajectories"] == 5 and made["positions"] == result.accounting["teacher_scored_positions_total"]
    assert result.accounting["teacher_queried_positions_total"] > made["positions"]
    assert result.cache["num_trajectories"] == 5 and result.cache["policy_versions"] == [0]
    assert not run.trajectories.exists() or run.trajectories.stat().st_size == 0


def test_on_policy_refuses_targets_of_another_version(runs, monkeypatch):
    ask = phases.Score.ask

    def late(self, samples, *, version):
        out = ask(self, samples, version=version)
        self.context.counters.parameter_version += 1
        return out

    monkeypatch.setattr(phases.Score, "ask", late)
    for number, loss in enumerate(({"mode": "bucketed_topk_tail"}, {"mode": "exact_full_vocab", "top_k": 1})):
        with (
            OPDTrainer(tiny(runs, f"stale-{number}", loss=loss)) as trainer,
            pytest.raises(StaleCacheError, match="is about to be updated"),
        ):
            trainer.train()
        assert json.loads(trainer.run.manifest.read_text())["status"] == "failed"
    monkeypatch.setattr(phases.Score, "ask", ask)
    replay = tiny(runs, "replay", train={"opd_freshness": "replay", "gradient_accumulation_steps": 1})
    result, run = trained(replay)
    assert result.objective == "online_distillation_with_replay" and result.global_step == 15
    lags = [r["policy_version_lag"] for r in read_journal(run.metrics) if r["phase"] == "opd"]
    assert lags == [0, 1, 2] * 3


def test_the_cache_itself_refuses_too(runs, monkeypatch):
    def old(*args, **kwargs):
        return [replace(t, policy_version=t.policy_version + 7) for t in score(*args, **kwargs)]

    score = phases.score_trajectories
    monkeypatch.setattr(phases, "score_trajectories", old)
    with OPDTrainer(tiny(runs, "stale-cache")) as trainer, pytest.raises(StaleCacheError):
        trainer.train()


def test_running_out_of_memory_is_retried_before_the_step_and_never_in_it(runs, monkeypatch):
    real, calls = update.chunked_loss, []

    def short(*args, chunk_size, **kwargs):
        calls.append(chunk_size)
        if chunk_size > 100:
            raise RuntimeError("CUDA out of memory")
        return real(*args, chunk_size=chunk_size, **kwargs)

    plain, plain_run = trained(tiny(runs, "roomy", loss={"chunk_size": 64}, train={"update_batch": 4}))
    monkeypatch.setattr(update, "chunked_loss", short)
    config = tiny(runs, "short", loss={"chunk_size": 256}, train={"update_batch": 16})
    result, run = trained(config)
    assert result.global_step == plain.global_step == 5 and calls[:3] == [256, 128, 64]
    assert [e["chunk_size"] for e in read_journal(run.events) if e["event"] == "oom_chunk_retry"] == [128, 64]
    assert json.loads(run.manifest.read_text())["memory"]["oom_retries_used"] == 2
    for a, b in zip(lines(run.metrics), lines(plain_run.metrics), strict=True):
        if "grad_norm" in a:
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-4), "a retried step is the same step"
    monkeypatch.setattr(update, "chunked_loss", real)
    steps = []

    def full(self, lr):
        steps.append(lr)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(AdamW, "step", full)
    with OPDTrainer(tiny(runs, "no-room")) as trainer, pytest.raises(torch.OutOfMemoryError):
        trainer.train()
    assert len(steps) == 1


def test_evaluation_is_greedy_seeded_logged_and_refuses_what_is_not_there(runs):
    config = tiny(runs, "eval", eval={"seed": 40}, environment={"test_tasks": 0})
    with OPDTrainer(config) as trainer:
        first = trainer.evaluate("eval", tag="one")
        again = trainer.evaluate("eval", tag="one")
        other = trainer.evaluate("train", 5, tag="two")
        for split in ("nosuch", "test", ""):
            if split:
                with pytest.raises(MiniVerlError):
                    trainer.evaluate(split)
        run = trainer.run
    drop = ("seconds", "rollout_tokens_per_second")
    assert {k: v for k, v in first.items() if k not in drop} == {k: v for k, v in again.items() if k not in drop}
    assert (
        first["tasks"] == 2
        and other["tasks"] == 5
        and first["temperature"] == 0.0
        and set(first["success_by_difficulty"]) == {"easy"}
    )
    played = list(read_trajectories(run.eval_trajectories))
    assert len(played) == 9 and [t.metadata.seed for t in played[:2]] == [40, 41]
    assert played[0].trajectory_id.endswith(":one:v0")
    assert json.loads(run.manifest.read_text())["status"] == "closed_before_training"


def test_no_evaluation_means_none_at_all(runs):
    config = tiny(runs, "no-eval", eval={"enabled": False}, train={"eval_every_cycles": 1})
    result, run = trained(config)
    assert result.eval is None and not [r for r in read_journal(run.metrics) if r["phase"] == "eval"]
    assert not run.eval_trajectories.exists() or not run.eval_trajectories.stat().st_size


def test_a_run_of_zero_cycles_has_a_result(runs):
    result, run = trained(tiny(runs, "zero", train={"cycles": 0, "sft_warmup_cycles": 0}))
    assert result.global_step == 0 and result.eval["success_rate"] == result.baseline_eval["success_rate"]
    assert result.train_seconds == 0 and result.teacher_prep_seconds == 0, "no teacher is fitted for nothing"
    assert result.accounting["selected_position_ratio"] is None


def test_training_happens_once(runs):
    with OPDTrainer(tiny(runs, "once")) as trainer:
        result = trainer.train()
        assert trainer.train() == result, "a finished trainer returns its result"
    with pytest.raises(TrainingError, match="closed"):
        trainer.train()
    trainer.close()
    with pytest.raises(StoreError, match="exists already"):
        OPDTrainer(tiny(runs, "once"))
    second, _ = trained(tiny(runs, "once"), overwrite=True)
    assert second.final_checkpoint["weights_digest"] == result.final_checkpoint["weights_digest"]


def test_overwriting_spares_a_folder_that_is_no_run(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("precious")
    with pytest.raises(StoreError, match="exists already"):
        OPDTrainer(tiny(tmp_path, "thesis"), overwrite=True)
    assert (tmp_path / "thesis" / "chapter.txt").read_text() == "precious"


def test_two_threads_exclude_each_other(runs, monkeypatch):
    inside, go = threading.Event(), threading.Event()

    def wait(phase, done, total, info):
        inside.set()
        go.wait(10)

    with OPDTrainer(tiny(runs, "threads"), on_progress=wait) as trainer:
        worker = threading.Thread(target=trainer.train)
        worker.start()
        assert inside.wait(30)
        for call in (trainer.train, trainer.evaluate, trainer.close, lambda: trainer.load_weights("nowhere")):
            with pytest.raises(TrainingError, match="while train is running"):
                call()
        go.set()
        worker.join(60)
        assert trainer.result is not None and trainer.result.global_step == 5


@pytest.mark.parametrize("error, status", [(ValueError("boom"), "failed"), (KeyboardInterrupt(), "interrupted")])
def test_however_it_ends_the_manifest_says_so_and_the_error_is_the_original(runs, error, status):
    def fail(phase, done, total, info):
        if phase == "cycle" and done == 3:
            raise error

    with pytest.raises(type(error)) as caught, OPDTrainer(tiny(runs, status), on_progress=fail) as trainer:
        trainer.train()
    assert caught.value is error
    manifest = json.loads(trainer.run.manifest.read_text())
    assert manifest["status"] == status == observed_status(trainer.run) and type(error).__name__ in manifest["error"]
    assert read_journal(trainer.run.events)[-1]["event"] == f"run_{status}"
    with OPDTrainer.resume(trainer.run.path) as again:
        assert again.train().global_step == 5
    assert json.loads(trainer.run.manifest.read_text())["error"] is None


def test_a_failing_close_does_not_hide_the_error(runs, monkeypatch):
    with pytest.raises(ValueError, match="first") as caught:
        with OPDTrainer(tiny(runs, "close")) as trainer:
            monkeypatch.setattr(trainer.context.log, "close", lambda: (_ for _ in ()).throw(OSError("disk gone")))
            raise ValueError("first")
    assert "disk gone" in "".join(caught.value.__notes__)
    with run_lock(trainer.run.path):
        pass


def test_two_trainers_cannot_work_on_one_run(runs):
    with OPDTrainer(tiny(runs, "locked")) as trainer:
        with pytest.raises(LockError):
            OPDTrainer.resume(trainer.run.path)
        with pytest.raises(LockError):
            OPDTrainer(tiny(runs, "locked"), overwrite=True)
        assert trainer.run.manifest.exists(), "overwriting did not touch a run in use"


BAD = [
    ({"memory": {"strategy": "swap"}}, ConfigError),
    ({"models": {"teacher": {"model_id": "t", "mode": "privileged_context"}}}, ConfigError),
    ({"train": {"optimizer": "adamw8bit"}}, ConfigError),
    ({"environment": {"name": "nowhere.nothing:Missing"}}, MiniVerlError),
    ({"eval": {"split": "test"}, "environment": {"test_tasks": 0}}, MiniVerlError),
]
if not torch.cuda.is_available():
    BAD.append(({"models": {"device": "cuda"}}, BackendError))


@pytest.mark.parametrize("sections, kind", BAD)
def test_what_cannot_be_built_leaves_nothing_behind(tmp_path, sections, kind):
    base = tiny(tmp_path / "out").to_mapping()
    config = tiny(tmp_path / "out", **{k: {**base[k], **v} for k, v in sections.items()})
    with pytest.raises(kind) as caught:
        OPDTrainer(config)
    assert caught.value.hint and list(tmp_path.iterdir()) == []


def test_a_failure_while_the_directory_is_made_leaves_no_directory(tmp_path, monkeypatch):
    import miniverl.training.setup as setup

    monkeypatch.setattr(setup, "publish_dir", lambda a, b: (_ for _ in ()).throw(StoreError("no space")))
    with pytest.raises(StoreError, match="no space"):
        OPDTrainer(tiny(tmp_path))
    assert [p.name for p in tmp_path.iterdir() if p.name != ".miniverl-locks"] == []
    with run_lock(tmp_path / "run"):
        pass


def test_the_submitted_recipe_is_kept_byte_for_byte(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_bytes(b"\xef\xbb\xbf# mine\r\n" + tiny(tmp_path).to_yaml().encode())
    with OPDTrainer(tiny(tmp_path), recipe=recipe) as trainer:
        assert trainer.run.config_submitted.read_bytes() == recipe.read_bytes()
        names = [p.name for p in trainer.run.path.iterdir()]
    assert {
        "config.validated.yaml",
        "config.original.yaml",
        "config.resolved.yaml",
        "environment.json",
        "manifest.start.json",
    } <= set(names)


def test_foreign_weights_go_only_under_a_run_that_has_not_begun(runs):
    cold, cold_run = trained(tiny(runs, "cold", run={"mode": "sft"}, eval={"enabled": False}))
    with OPDTrainer(tiny(runs, "warm")) as trainer:
        found = trainer.load_weights(
            cold_run.checkpoints / "final", event="benchmark_cold_start_loaded", note="weights only"
        )
        assert (
            found.weights_digest == cold.final_checkpoint["weights_digest"]
            and trainer.optimizer.steps == 0
            and trainer.is_fresh
        )
        trainer.train()
        with pytest.raises(TrainingError, match="trained already"):
            trainer.load_weights(cold_run.checkpoints / "final")
    event = read_journal(trainer.run.events)[0]
    assert event["event"] == "benchmark_cold_start_loaded" and event["note"] == "weights only"
    with OPDTrainer.resume(trainer.run.path) as again:
        assert not again.is_fresh
        with pytest.raises(TrainingError):
            again.load_weights(cold_run.checkpoints / "final")


def test_saving_the_same_state_again_gives_the_same_digest(runs, tmp_path):
    _, run = trained(tiny(runs, "digest", eval={"enabled": False}))
    found = verify_checkpoint(run.checkpoints / "final")
    with OPDTrainer.resume(run.path) as trainer:
        loaded = load_checkpoint(found.path, backend=trainer.student, optimizer=trainer.optimizer)
        state = {k: v for k, v in loaded.state.items() if k not in ("rng", "optimizer_steps")}
        again = save_checkpoint(tmp_path, "copy", backend=trainer.student, optimizer=trainer.optimizer, state=state)
    assert (
        again.content_digest == found.content_digest
        and TrainResult.read(run.eval).final_checkpoint["content_digest"] == found.content_digest
    )


def test_the_first_manifest_never_changes_and_records_are_strict_json(runs):
    config = tiny(runs, "files")
    with OPDTrainer(config) as trainer:
        start = trainer.run.manifest_start.read_bytes()
        trainer.train()
    assert trainer.run.manifest_start.read_bytes() == start
    for name, data in tree(trainer.run.path).items():
        if name.endswith((".json", ".jsonl")):
            text = data.decode("utf-8")
            assert "\r" not in text and "NaN" not in text and "Infinity" not in text
            for part in text.splitlines() if name.endswith(".jsonl") else [text]:
                json.loads(part)
    manifest = json.loads(trainer.run.manifest.read_text())
    assert manifest["measurement_status"] == {
        "cpu_metrics": "measured",
        "cuda_metrics": "not_measured",
        "simulated_results": "none",
    }
    assert manifest["models"]["tokenizer_vocab_size"] <= manifest["models"]["student_lm_head_vocab_size"]
