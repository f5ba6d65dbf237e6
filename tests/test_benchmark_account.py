"""Every number of an arm's row, recomputed by brute force from the files of the run."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import pytest
from account_runs import MODES, made, row_of
from hypothesis import given
from hypothesis import strategies as st

from miniverl.core import DataError, MiniVerlError
from miniverl.evaluation.account import (
    budget_report,
    diff_views,
    evaluation_trajectories,
    largest_cycle,
    lenient_rate,
    lenient_success,
    peak_memory,
    teacher_preparation,
)
from miniverl.evaluation.design import HARNESS_PATHS
from miniverl.schemas.config import RunConfig, deep_merge
from miniverl.schemas.trajectory import VerificationRecord
from miniverl.store import RunDir, read_journal


def raw(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def model_tokens(record):
    kinds = ("assistant_text", "assistant_tool_call", "assistant_final")
    return sum(span["end"] - span["start"] for span in record["spans"] if span["span_type"] in kinds)


@pytest.fixture(params=list(MODES))
def item(request):
    return made()[request.param]


@pytest.fixture
def copy(tmp_path):
    """A run that a test may damage."""

    def copied(name):
        shutil.copytree(made()[name].run.path, tmp_path / name)
        return RunDir(tmp_path / name)

    return copied


def test_totals_are_sums_over_all_cycles(item):
    row, records = row_of(item), raw(item.run.metrics)
    cycles = [record for record in records if record["phase"].endswith("_cycle")]
    assert len(cycles) == item.declared.train.cycles + item.declared.train.sft_warmup_cycles
    selected = sum(c["selection"]["selected_model_tokens"] for c in cycles)
    whole = sum(c["selection"]["total_model_tokens"] for c in cycles)
    assert (row.selected_training_tokens_total, row.model_generated_training_tokens_total) == (selected, whole)
    assert row.selected_position_ratio == (selected / whole if whole else None)
    assert row.total_trajectories == sum(c["rollouts"]["rollouts"] for c in cycles)
    assert row.optimizer_steps == row.policy_version == row.parameter_version == len(cycles)
    played = raw(item.run.trajectories) if item.run.trajectories.exists() else []
    assert row.generated_training_tokens_total == sum(model_tokens(record) for record in played)
    taught = [c for c in cycles if c["phase"] in ("opd_cycle", "offline_kd_cycle")]
    if not taught:
        assert row.teacher_queried_positions_total is row.teacher_queried_position_ratio is None
    else:
        asked = sum(c["selection"]["selected_model_tokens"] for c in taught)
        assert row.teacher_queried_positions_total == asked
        assert row.teacher_queried_position_ratio == asked / sum(c["selection"]["total_model_tokens"] for c in taught)


def test_a_ratio_is_no_mean_of_ratios():
    item = made()["opd"]
    cycles = [c["selection"] for c in raw(item.run.metrics) if c["phase"].endswith("_cycle")]
    shares = [c["selected_model_tokens"] / c["total_model_tokens"] for c in cycles]
    assert len(set(shares)) > 1
    assert row_of(item).selected_position_ratio != pytest.approx(sum(shares) / len(shares), abs=1e-6)


def test_scores_are_those_of_the_episodes(item):
    row, tag = row_of(item), f":benchmark-{item.run.path.name}:"
    episodes = [record for record in raw(item.run.eval_trajectories) if tag in record["trajectory_id"]]
    assert row.tasks == row.rollouts == len(episodes) == 2
    solved = sum(bool((e.get("verification") or {}).get("solved")) for e in episodes)
    assert row.solved == solved and row.success_rate == row.strict_task_success_rate == solved / 2
    assert row.generated_tokens == sum(map(model_tokens, episodes))
    assert row.generated_tokens_per_task == row.generated_tokens / 2
    assert row.assistant_turns == sum(len(e["turns"]) for e in episodes) and row.avg_turns == row.assistant_turns / 2
    assert row.termination_reasons == {
        reason: sum(e["termination_reason"] == reason for e in episodes)
        for reason in {e["termination_reason"] for e in episodes}
    }
    assert row.lenient_diagnostic_success_rate == lenient_rate(evaluation_trajectories(item.run, item.evaluation))
    assert row.lenient_diagnostic_success_rate >= row.success_rate
    assert row.protocol_token_accuracy is row.baseline_success_rate is None
    calls = row.emitted_tool_calls
    assert (
        row.valid_tool_call_rate == row.parse_valid_tool_call_rate == (row.parsed_tool_calls / calls if calls else None)
    )
    assert row.tokens_per_solved_task == (row.generated_tokens / solved if solved else None)


def test_the_cache_is_what_lies_on_disk(item):
    row, folder = row_of(item), item.run.teacher_cache
    cycles = [r for r in raw(item.run.metrics) if r["phase"].endswith("_cycle")]
    if row.mode == "sft" or row.loss_mode == "exact_full_vocab":
        assert row.cache_current_bytes is row.cache_bytes_written_total is row.cache_compression_ratio is None
        assert row.measurement_status["cache"] == "not_applicable"
        return
    on_disk = sum(path.stat().st_size for path in folder.iterdir())
    assert row.cache_current_bytes == on_disk <= row.cache_bytes_written_total
    assert row.cache_bytes_written_total >= cycles[-1]["cache_bytes_written_total"]
    cache = json.loads(item.run.eval.read_text())["cache"]
    assert row.cache_compression_ratio == cache["num_selected_positions"] * cache["vocab_size"] * 2 / on_disk
    assert row.measurement_status["cache"] == "measured"


def test_time_is_told_in_phases_and_encloses_them(item):
    row, records = row_of(item), raw(item.run.metrics)
    cycles = sum(sum(r["phase_seconds"].values()) for r in records if r["phase"].endswith("_cycle"))
    evaluations = sum(r["seconds"] for r in records if r["phase"] == "eval")
    # making the offline set is scoring and belongs to no cycle
    assert row.train_seconds >= cycles - 1e-9
    if item.run.path.name != "offline":
        assert row.train_seconds == pytest.approx(cycles, rel=0.2, abs=0.02)
    assert row.evaluation_seconds == pytest.approx(evaluations)
    assert row.wall_seconds >= row.train_seconds + row.evaluation_seconds + row.teacher_prep_seconds - 1e-9
    assert (row.teacher_prep_seconds > 0) == (row.mode != "sft")


def test_an_evaluation_that_training_made_is_not_counted_twice():
    item = made()["opd"]
    result = json.loads(item.run.eval.read_text())
    inside = row_of(item, evaluation=result["eval"])
    assert inside.evaluation_seconds == result["evaluation_seconds"] and inside.wall_seconds == result["wall_seconds"]
    assert row_of(item).evaluation_seconds == pytest.approx(inside.evaluation_seconds + item.evaluation["seconds"])


@pytest.mark.parametrize(
    ("name", "objective", "divergence", "top_k"),
    [
        ("sft", "sft_cross_entropy", None, None),
        ("zero", "sft_cross_entropy", None, None),
        ("offline", "offline_knowledge_distillation", "reverse_kl", 4),
        ("opd", "on_policy_distillation", "reverse_kl", 4),
        ("exact", "on_policy_distillation", "reverse_kl", 156),
    ],
)
def test_objective_by_mode(name, objective, divergence, top_k):
    item = made()[name]
    row, taught = row_of(item), divergence is not None
    assert (row.objective, row.divergence, row.top_k) == (objective, divergence, top_k)
    assert row.selector == "all_model_tokens" and row.opd_freshness == ("strict" if row.mode == "opd" else None)
    assert (row.teacher_model_id, row.teacher_context_mode) == (("toy-teacher", "standard") if taught else (None, None))
    assert (row.teacher_digest is not None) == taught and row.student_model_id == "toy-student"
    if name == "exact":
        manifest = json.loads(item.run.manifest.read_text())
        assert row.top_k == manifest["models"]["student_lm_head_vocab_size"] and item.declared.loss.top_k == 1


def test_a_zero_step_arm_ends_with_the_weights_it_began_with():
    zero, sft = row_of(made()["zero"]), row_of(made()["sft"])
    assert zero.optimizer_steps == zero.total_trajectories == zero.selected_training_tokens_total == 0
    assert zero.selected_position_ratio is zero.teacher_queried_positions_total is None
    assert zero.initial_weights_digest == zero.final_weights_digest == sft.final_weights_digest
    assert sft.initial_weights_digest is None and len(sft.final_content_digest) == 64
    assert zero.train_seconds == 0 and zero.tasks == 2


def test_status_says_what_was_measured(item):
    status = row_of(item).measurement_status
    assert sorted(status) == sorted(
        "train_time evaluation_time wall_time peak_vram cache strict_task_success_rate lenient_diagnostic_success_rate"
        " protocol_token_accuracy valid_tool_call_rate final_answer_format_validity_rate simulated_results".split()
    )
    assert status["simulated_results"] == "none" and status["peak_vram"] == "not_measured"
    assert row_of(item).peak_allocated_bytes is row_of(item).peak_reserved_bytes is None
    assert (status["valid_tool_call_rate"] == "measured") == (row_of(item).valid_tool_call_rate is not None)


def test_peak_memory_is_the_largest_of_the_records_with_a_device(copy):
    run, item = copy("sft"), made()["sft"]
    lines = raw(run.metrics)
    for number, line in enumerate(lines):
        line["memory"] = {
            "cuda_available": number % 2 == 0,
            "peak_allocated_bytes": 100 - number,
            "peak_reserved_bytes": 10 * number,
        }
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    last = 10 * max(number for number in range(len(lines)) if number % 2 == 0)
    row = row_of(item, run=run)
    assert (row.peak_allocated_bytes, row.peak_reserved_bytes) == (100, last)
    assert row.measurement_status["peak_vram"] == "measured"
    assert peak_memory(({"memory": None}, {"memory": {}}, {})) == (None, None)


def test_views_share_no_path_and_digests_are_of_the_three_configurations(item):
    row = row_of(item)
    views = [row.scientific_config_diff, row.harness_config_diff, row.runtime_resolution_diff]
    paths = [{r["path"] for r in view} for view in views]
    assert sum(map(len, paths)) == len(set.union(*paths)) == sum(map(len, views))
    assert paths[1] <= HARNESS_PATHS and not paths[0] & HARNESS_PATHS and {"run.name", "run.run_id"} <= paths[1]
    declared = {r["path"] for r in row.structured_diff}
    assert declared == paths[0] | (paths[1] - {"run.run_id"}) and "memory.strategy" in paths[2]
    resolved = RunConfig.from_yaml(item.run.config_resolved)
    assert row.declared_config_digest == row.resolved_config_digest == item.declared.digest
    assert row.runtime_resolved_config_digest == resolved.digest


def test_views_put_the_common_configuration_back_together(item):
    """Undoing every row of the views turns the resolved configuration into the common one."""
    resolved = RunConfig.from_yaml(item.run.config_resolved).to_mapping()
    views = diff_views(item.common, item.declared, RunConfig.from_mapping(resolved))
    for row in [r for name in views if name != "structured_diff" for r in views[name]]:
        *above, last = row["path"].split(".")
        place = resolved
        for key in above:
            place = place[key]
        assert place[last] == row["arm"]
        place[last] = row["common"]
    assert resolved == item.common.to_mapping()


def test_a_setting_that_was_declared_and_then_bounded_stays_a_treatment():
    common = made()["opd"].common
    declared = RunConfig.from_mapping(deep_merge(common.to_mapping(), {"loss": {"top_k": 4096}}))
    resolved = RunConfig.from_mapping(deep_merge(declared.to_mapping(), {"loss": {"top_k": 156}}))
    views = diff_views(common, declared, resolved)
    assert [(r["path"], r["arm"]) for r in views["scientific_config_diff"]] == [("loss.top_k", 4096)]
    assert views["runtime_resolution_diff"] == []


def test_records_that_contradict_each_other_are_refused(copy):
    item = made()["opd"]
    run = copy("opd")
    with pytest.raises(DataError, match="declared differences"):
        row_of(item, diff=[])
    with pytest.raises(DataError, match="disagree with its result in solved"):
        row_of(item, evaluation={**item.evaluation, "solved": 1})
    with pytest.raises(DataError, match="disagree"):
        row_of(item, evaluation={**item.evaluation, "tag": "benchmark-other"})
    lines = run.metrics.read_text().splitlines(keepends=True)
    kept = [line for line in lines if '"opd_cycle"' not in line]
    run.metrics.write_text("".join(kept))
    with pytest.raises(DataError, match="metrics.jsonl, eval.json and manifest.json disagree in"):
        row_of(item, run=run)
    run.metrics.write_text("".join(lines))
    run.config_resolved.write_text(run.config_resolved.read_text().replace("seed: 5", "seed: 6"))
    with pytest.raises(DataError, match="not the configuration that the manifest records"):
        row_of(item, run=run)
    run.eval.unlink()
    with pytest.raises(DataError, match="no result yet"):
        row_of(item, run=run)


@pytest.mark.parametrize("name", ["global_step", "parameter_version", "train_seconds", "wall_seconds", "stopped_by"])
def test_a_number_that_stands_in_two_places_cannot_be_edited_in_one(copy, name):
    run = copy("opd")
    data = json.loads(run.eval.read_text())
    other = "wall_time" if name == "stopped_by" else data[name] + 1
    run.eval.write_text(json.dumps({**data, name: other}))
    with pytest.raises(DataError, match="disagree in"):
        row_of(made()["opd"], run=run)


def test_a_repeated_evaluation_counts_once(copy):
    """A benchmark that was killed between its evaluation and its record plays the same episodes again."""
    run, item = copy("sft"), made()["sft"]
    mark = ":benchmark-sft:"
    again = [line for line in run.eval_trajectories.read_text().splitlines(keepends=True) if mark in line]
    with open(run.eval_trajectories, "a") as stream:
        stream.writelines(again)
    assert len(evaluation_trajectories(run, item.evaluation)) == 2
    assert row_of(item, run=run).lenient_diagnostic_success_rate == row_of(item).lenient_diagnostic_success_rate


def test_a_lenient_rate_in_the_payload_is_taken_as_it_is():
    item = made()["sft"]
    assert (
        row_of(
            item, evaluation={**item.evaluation, "lenient_diagnostic_success_rate": 0.5}
        ).lenient_diagnostic_success_rate
        == 0.5
    )


def answer(predicted, expected, solved=False):
    verdict = VerificationRecord(
        solved=solved, predicted=predicted, expected=expected, failure_category="solved" if solved else "wrong_answer"
    )
    return SimpleNamespace(verification=verdict)


@given(st.text(max_size=40), st.text(max_size=40), st.booleans())
def test_lenient_reading_never_raises_and_never_loses_a_solved_task(predicted, expected, solved):
    plain = lenient_success(answer(predicted, expected, solved))
    assert isinstance(plain, bool) and (plain or not solved)
    if "answer" not in predicted.casefold():
        assert lenient_success(answer(f"<answer>\n{predicted}</answer>", expected, solved)) == plain


@given(st.floats(-1e6, 1e6), st.floats(-3, 3))
def test_lenient_numbers_lie_within_the_tolerance(expected, steps):
    shift = steps * 1e-3 * max(1.0, abs(expected))
    given_text, expected_text = f"{expected + shift:.9f}", f"{expected:.9f}"
    right = lenient_success(answer(given_text, expected_text))
    if abs(steps) > 1.01:
        assert not right
    elif abs(steps) < 0.99 and not float(expected_text).is_integer():
        assert right


@pytest.mark.parametrize(
    ("given_text", "right"), [("1000000", True), ("1000001", False), ("999999", False), ("1000000.4", True)]
)
def test_a_neighbouring_integer_is_another_answer(given_text, right):
    assert lenient_success(answer(given_text, "1000000")) is right


def test_budget_in_steps():
    rows = {name: row_of(item) for name, item in made().items()}
    exact, offline = rows["exact"], rows["offline"]
    report = budget_report("optimizer_steps", None, [exact, offline, rows["zero"]])
    assert report["violations"] == [] and report["zero_step_arms"] == ["zero"] and report["limit"] is None
    assert report["measured"] == {"exact": {"5": 3}, "offline": {"5": 3}, "zero": {"5": 0}}
    (told,) = budget_report("optimizer_steps", None, [exact, rows["opd"]])["violations"]
    assert "3: exact (seed 5)" in told and "4: opd (seed 5)" in told
    stuck = exact.model_copy(update={"optimizer_steps": 0})
    assert (
        "exact made no optimizer step at seed 5"
        in budget_report("optimizer_steps", None, [stuck, offline])["violations"][0]
    )
    other = exact.model_copy(update={"seed": 6, "optimizer_steps": 2})
    assert "exact (seed 6)" in budget_report("optimizer_steps", None, [exact, other])["violations"][0]


def test_budget_with_a_limit():
    item = made()["opd"]
    row = row_of(item)
    used = row.selected_training_tokens_total
    cycle = largest_cycle(item.run, "selected_training_tokens")
    most = max(r["selection"]["selected_model_tokens"] for r in raw(item.run.metrics) if r["phase"].endswith("_cycle"))
    assert cycle == most and largest_cycle(made()["zero"].run, "wall_time") is None
    largest = {"opd": {"5": cycle}}

    def told(limit):
        return budget_report("selected_training_tokens", limit, [row], largest=largest)["violations"]

    assert told(used) == told(used - cycle + 1) == []
    assert "ran out of cycles" in told(used + 1)[0] and "beyond" in told(used - cycle)[0]
    assert budget_report("wall_time", row.train_seconds / 2, [row])["violations"] == []
    assert budget_report("wall_time", 1e9, [row])["violations"]
    for axis, limit in (("steps", None), ("wall_time", None), ("optimizer_steps", 5)):
        with pytest.raises(MiniVerlError):
            budget_report(axis, limit, [row])


def test_time_before_the_first_cycle_is_counted_with_it():
    """The offline set is made before the first cycle, so a short limit is passed by that much, lawfully."""
    item = made()["offline"]
    row, first = row_of(item), [r["seconds"] for r in raw(item.run.metrics) if r["phase"].endswith("_cycle")]
    most = largest_cycle(item.run, "wall_time")
    assert max(first) <= most <= row.train_seconds and most >= row.train_seconds - sum(first[1:]) - 1e-9
    one = row.model_copy(update={"train_seconds": row.train_seconds - sum(first[1:])})
    assert budget_report("wall_time", 1e-6, [one], largest={"offline": {"5": most}})["violations"] == []


def test_a_fitted_teacher_is_told_once():
    runs = made()
    told = teacher_preparation(item.run for item in runs.values())
    digests = {
        e["digest"]
        for item in runs.values()
        for e in read_journal(item.run.events)
        if e["event"] == "toy_teacher_fitted"
    }
    assert {entry["digest"] for entry in told} == digests and len(told) == len(digests) == 1
    assert sorted(told[0]) == ["digest", "final_loss", "fit_seconds"] and told[0]["fit_seconds"] > 0
    assert teacher_preparation([runs["sft"].run]) == []
