"""Runs that end because something is used up, evaluations that are repeated, and what is refused before all that."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import textwrap

import pytest
from crash import KILLED, killed_at
from training_helpers import lines, tiny, tree

from miniverl.core import MiniVerlError, StoreError, TrainingError
from miniverl.store import RunDir, read_journal
from miniverl.training.accounting import PhaseClock
from miniverl.training.checkpoints import verify_checkpoint
from miniverl.training.setup import check_supported
from miniverl.training.trainer import OPDTrainer

MODES = ("sft", "offline_kd", "opd")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One folder for all runs of this file, so that each toy teacher is fitted once."""
    return tmp_path_factory.mktemp("runs")


def recipe(folder, name, mode="opd", **train):
    return tiny(folder, name, run={"mode": mode}, train={"cycles": 4, **train}, eval={"enabled": False})


def trained(config, **options):
    with OPDTrainer(config, **options) as trainer:
        return trainer.train(), trainer.run


def cycles_of(run):
    return [r for r in lines(run.metrics) if r["phase"].endswith("_cycle")]


@pytest.fixture(scope="module")
def free(runs):
    """A run of each mode that no limit ends, with its selected tokens summed up cycle by cycle."""
    out = {}
    for mode in MODES:
        result, run = trained(recipe(runs, f"free-{mode}", mode))
        assert result.stopped_by == "cycles" and result.cycles_completed == 4
        made = cycles_of(run)
        out[mode] = made, list(itertools.accumulate(r["selection"]["selected_model_tokens"] for r in made))
    return out


@pytest.mark.parametrize("mode", MODES)
def test_tokens_end_a_run_with_the_cycle_that_reaches_them(runs, free, mode):
    whole, used = free[mode]
    warmup = len(whole) - 4
    for made, limit in ((warmup + 2, used[warmup + 1]), (warmup + 3, used[warmup + 1] + 1), (1, 1)):
        result, run = trained(recipe(runs, f"{mode}-{limit}", mode, max_selected_training_tokens=limit))
        assert cycles_of(run) == whole[:made], "the same cycles as without a limit, and no more"
        assert result.stopped_by == "selected_training_tokens" and result.cycles_completed == max(0, made - warmup)
        assert result.accounting["selected_training_tokens_total"] == used[made - 1] >= limit
        assert made == 1 or used[made - 2] < limit, "the cycle before did not reach it"
        manifest = json.loads(run.manifest.read_text())
        assert manifest["status"] == "completed" and manifest["result"]["stopped_by"] == result.stopped_by
        told = [e for e in read_journal(run.events) if e["event"] == "stopped_by_budget"]
        assert [(e["budget"], e["selected_training_tokens"]) for e in told] == [(result.stopped_by, used[made - 1])]
        verify_checkpoint(run.checkpoints / "final")


def test_a_limit_out_of_reach_changes_nothing_and_one_that_the_last_cycle_reaches_is_named(runs, free):
    whole, used = free["sft"]
    for limit, by in ((used[-1] + 1, "cycles"), (used[-1], "selected_training_tokens")):
        result, run = trained(recipe(runs, f"last-{limit}", "sft", max_selected_training_tokens=limit))
        assert cycles_of(run) == whole and result.stopped_by == by
        assert "stopped_by_budget" not in [e["event"] for e in read_journal(run.events)]


def test_no_cycle_uses_nothing_up(runs):
    zero = {"cycles": 0, "sft_warmup_cycles": 0, "max_selected_training_tokens": 1, "max_train_seconds": 1e-9}
    result, _ = trained(recipe(runs, "zero", **zero))
    assert result.stopped_by == "cycles" and result.global_step == 0


def test_a_warm_up_that_uses_everything_up_is_evaluated_at_its_end(runs):
    config = tiny(runs, "warm", train={"max_selected_training_tokens": 1, "eval_every_cycles": 1})
    result, run = trained(config)
    assert (result.global_step, result.cycles_completed, result.stopped_by) == (1, 0, "selected_training_tokens")
    assert result.eval["tag"] == "final" and result.eval_history == []
    assert not run.trajectories.exists() or not run.trajectories.stat().st_size


def test_what_is_due_at_the_end_is_final_and_what_the_recipe_asks_for(runs, free):
    used = free["opd"][1]
    train = {"cycles": 4, "max_selected_training_tokens": used[3], "eval_every_cycles": 1, "save_every_cycles": 1}
    result, run = trained(tiny(runs, "due", train=train))
    tags = [r["tag"] for r in read_journal(run.metrics) if r["phase"] == "eval"]
    assert tags == ["baseline", "cold-start", "cycle1", "final"] and result.cycles_completed == 2
    assert sorted(p.name for p in run.checkpoints.iterdir()) == ["final", "step-000003", "step-000004"]


def test_a_schedule_is_cut_and_not_squeezed(runs, free):
    used, schedule = free["sft"][1], {"lr_schedule": "linear", "learning_rate": 1e-3}
    _, plain = trained(recipe(runs, "line", "sft", **schedule))
    _, short = trained(recipe(runs, "short-line", "sft", **schedule, max_selected_training_tokens=used[1]))
    rates = [[r["lr"] for r in read_journal(run.metrics) if "lr" in r] for run in (plain, short)]
    assert len(rates[1]) == 2 and rates[1] == rates[0][:2] and len(set(rates[0])) == 4


def seconds_by_hand(trainer, step=1.0):
    """Give the run a clock on which every measured phase takes `step` seconds."""
    ticks, ctx = itertools.count(0.0, step), trainer.context
    clock = PhaseClock(wall=lambda: next(ticks), cpu=lambda: 0.0)
    clock.wall_seconds, ctx.clock = ctx.clock.wall_seconds, clock


def test_seconds_end_a_run_and_only_those_of_training_count(runs):
    lengths = {}
    for mode in MODES:
        train = {"cycles": 9, "sft_warmup_cycles": 0, "max_train_seconds": 14.0, "eval_every_cycles": 1}
        with OPDTrainer(tiny(runs, f"time-{mode}", run={"mode": mode}, train=train)) as trainer:
            seconds_by_hand(trainer)
            result, run = trainer.train(), trainer.run
        spent = [r["seconds"] for r in read_journal(run.metrics) if r["phase"].endswith("_cycle")]
        before = result.train_seconds - sum(spent)  # the offline set is scored before the first cycle
        assert result.stopped_by == "wall_time" and result.train_seconds >= 14.0 > before + sum(spent[:-1])
        assert (before > 0) == (mode == "offline_kd") and result.evaluation_seconds > 0
        lengths[mode] = len(spent)
    assert lengths == {"sft": 5, "offline_kd": 5, "opd": 3}, "phases of a cycle: 3, 2 (and 4 for the set) and 5"


def test_time_before_an_interruption_counts_after_it(runs):
    def stop(phase, done, total, info):
        if phase == "cycle" and done == 3:
            raise KeyboardInterrupt

    made = []
    for name, progress in (("steady", None), ("broken", stop)):
        config = recipe(runs, name, "sft", cycles=9, max_train_seconds=14.0)
        try:
            with OPDTrainer(config, rolling_every=1, on_progress=progress) as trainer:
                seconds_by_hand(trainer)
                trainer.train()
        except KeyboardInterrupt:
            with OPDTrainer.resume(trainer.run.path, rolling_every=1) as trainer:
                assert trainer.context.clock.wall_seconds["update"] == 2.0
                seconds_by_hand(trainer)
                trainer.train()
        made.append((trainer.result.global_step, trainer.result.stopped_by, trainer.result.train_seconds))
    assert made == [(5, "wall_time", 15.0)] * 2


def budgeted(folder, mode, limit):
    config = recipe(folder, "run", mode, max_selected_training_tokens=limit, save_every_cycles=2)
    run = RunDir(folder / "run")
    if run.is_run():
        with OPDTrainer.resume(run.path, rolling_every=1) as trainer:
            trainer.train()
    else:
        trained(config, rolling_every=1)
    return run


def learned(run):
    final, result = run.checkpoints / "final", json.loads(run.eval.read_text())
    return {
        "content": verify_checkpoint(final).content_digest,
        "metrics": lines(run.metrics),
        "trajectories": run.trajectories.read_bytes(),
        "accounting": result["accounting"],
        "stopped_by": (result["stopped_by"], result["cycles_completed"], result["global_step"]),
        "checkpoints": sorted(p.name for p in run.checkpoints.iterdir()),
        "stops": [e["event"] for e in read_journal(run.events)].count("stopped_by_budget"),
    }


def killed_everywhere(tmp_path, mode, limit, numbers):
    (tmp_path / "whole").mkdir()
    code, _, calls = killed_at(None, lambda _: budgeted(tmp_path / "whole", mode, limit))
    expected = learned(RunDir(tmp_path / "whole" / "run"))
    assert code == 0 and expected["stops"] == 1
    for number in numbers(calls):
        folder = tmp_path / f"at-{number}"
        folder.mkdir()
        assert killed_at(number, lambda _, f=folder: budgeted(f, mode, limit))[0] == KILLED
        assert learned(budgeted(folder, mode, limit)) == expected, f"killed before call {number} of {calls}"


@pytest.mark.parametrize("mode", MODES)
def test_a_killed_run_ends_where_the_other_does(tmp_path, free, mode):
    killed_everywhere(tmp_path, mode, free[mode][1][-3], lambda calls: (calls // 2, calls - 30, calls - 6))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_run_killed_anywhere_ends_where_the_other_does(tmp_path, free, mode):
    killed_everywhere(tmp_path, mode, free[mode][1][-3], lambda calls: range(1, calls + 1, 3))


def test_an_evaluation_of_a_complete_run_can_be_repeated(tmp_path):
    _, run = trained(tiny(tmp_path, "again"))

    def evaluate(_=None, truncate=None):
        with OPDTrainer.resume(run.path) as trainer:
            if truncate is not None:
                trainer.truncate_journals(truncate)
            return trainer.journal_positions(), trainer.evaluate("test", tag="benchmark-x")

    before = {p: p.read_bytes() for p in (run.metrics, run.events, run.trajectories, run.eval_trajectories)}
    noted, first = evaluate()
    once = {p: lines(p) for p in before}
    assert lines(run.metrics)[-1]["tag"] == "benchmark-x"
    for number in (1, 4, 7):
        assert killed_at(number, lambda say: evaluate(truncate=noted))[0] == KILLED
    _, again = evaluate(truncate=noted)
    assert again["success_rate"] == first["success_rate"] and {p: lines(p) for p in before} == once
    assert all(p.read_bytes().startswith(data) for p, data in before.items()), "what training wrote is untouched"
    with OPDTrainer.resume(run.path) as trainer:
        for wrong in (dict.fromkeys(noted, 0), {**noted, "events": noted["events"] - 1}, {"metrics": 0}):
            with pytest.raises(TrainingError, match="would lose records of its training"):
                trainer.truncate_journals(wrong)
        with pytest.raises(StoreError):
            trainer.truncate_journals({**noted, "metrics": noted["metrics"] + 3})
    assert {p: lines(p) for p in before} == once


def test_journals_of_an_unfinished_run_are_not_cut(tmp_path):
    with OPDTrainer(tiny(tmp_path)) as trainer:
        with pytest.raises(TrainingError, match="not complete"):
            trainer.truncate_journals(trainer.journal_positions())


MISSING = {"model_id": "nobody/no-such-model"}
REFUSED = {
    "swap": ({"memory": {"strategy": "swap"}}, "swap"),
    "privileged teacher": ({"models": {"teacher": {"mode": "privileged_context"}}}, "privileged_context"),
    "8-bit optimizer": ({"train": {"optimizer": "adamw8bit"}}, "adamw8bit"),
    "quantised student": ({"models": {"student": {"quantization": "nf4"}}}, "nf4"),
    "quantised teacher": ({"models": {"teacher": {"quantization": "int8"}}}, "int8"),
    "adapter": ({"models": {"teacher": {"adapter": {"path": "nobody/no-adapter"}}}}, "adapters"),
}


def large(folder, sections):
    """A recipe whose models are nowhere, so that loading one would fail in other words."""
    asked = sections.get("models", {})
    models = {"backend": "hf"} | {role: {**MISSING, **asked.get(role, {})} for role in ("student", "teacher")}
    return tiny(folder, **{**sections, "models": models})


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_built_is_refused_from_the_recipe_alone(tmp_path, name):
    sections, word = REFUSED[name]
    for refuse in (check_supported, OPDTrainer):
        with pytest.raises(MiniVerlError, match=word) as caught:
            refuse(large(tmp_path / "out", sections))
        assert "not built yet" in caught.value.message and caught.value.hint and list(tmp_path.iterdir()) == []
    check_supported(large(tmp_path, {}))


def test_it_is_refused_without_the_libraries_of_the_large_models():
    recipes = [large("out", sections).to_mapping() for sections, _ in REFUSED.values()]
    code = f"""
        import json, sys
        from miniverl.core import MiniVerlError
        from miniverl.schemas.config import RunConfig
        from miniverl.training.setup import check_supported
        for recipe in json.loads({json.dumps(recipes)!r}):
            try:
                check_supported(RunConfig.from_mapping(recipe))
            except MiniVerlError:
                continue
            sys.exit("not refused")
        sys.exit(sum(name in sys.modules for name in ("transformers", "peft", "accelerate")))
    """
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(code)]).returncode == 0


def test_a_teacher_that_is_never_asked_may_be_anything(tmp_path):
    unused = {"run": {"mode": "sft"}, "models": REFUSED["adapter"][0]["models"]}
    check_supported(large(tmp_path, unused))
    assert tree(tmp_path) == {}
