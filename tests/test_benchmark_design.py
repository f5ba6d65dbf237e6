"""Benchmark files: the shipped ones, the faults that must be found on plain data, and what a difference is."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from miniverl.core import ConfigError, MiniVerlError, UsageError, read_json
from miniverl.evaluation.design import (
    HARNESS_PATHS,
    is_declared,
    leaf_diff,
    plan_notes,
    plan_record,
    plan_rows,
    resolve_benchmark_configs,
    resolve_design,
)
from miniverl.evaluation.spec import BenchmarkConfig
from miniverl.schemas.config import RunConfig, deep_merge

ROOT = Path(__file__).resolve().parents[1]
RECIPES, CONFIGS = ROOT / "recipes", ROOT / "benchmarks" / "configs"
PUBLISHED = ROOT / "benchmarks" / "results" / "published" / "gpu-calc-hard-equal-update-v2.json"
FILES = sorted([*RECIPES.glob("*.yaml"), *CONFIGS.glob("*.yaml")])
SMALL = {
    "schema_version": 2,
    "name": "small",
    "base": {"models": {"student": {}, "teacher": {}}},
    "cold_start_cycles": 3,
    "allowed_differences": ["run.mode", "train.cycles"],
    "seeds": [1, 2],
    "arms": [{"name": "start", "overrides": {"run": {"mode": "sft"}, "train": {"cycles": 0}}}, {"name": "opd"}],
}


def small(**changes: object) -> dict:
    return {**copy.deepcopy(SMALL), **changes}


def arm(overrides: dict, name: str = "odd") -> dict:
    return {"name": name, "overrides": overrides}


def refused(data: dict) -> MiniVerlError:
    with pytest.raises(ConfigError) as caught:
        resolve_design(BenchmarkConfig.from_mapping(data, source="bench.yaml"))
    text = caught.value.render()
    assert text.count("\n") == 1 and text.startswith("error: ") and "\nhint: " in text
    return caught.value


def script(code: str, *words: object) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# the files that come with the repository


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_shipped_file_is_valid(path):
    """Recipes validate, benchmarks resolve for every seed with every arm, and tasks exist for all of them."""
    if "arms" in yaml.safe_load(path.read_text(encoding="utf-8")):
        spec = BenchmarkConfig.from_yaml(path)
        design = resolve_design(spec)
        assert len(design.units) == len(spec.seeds) * len(spec.arms) and json.loads(json.dumps(plan_record(design)))
        assert len({len(plan_rows(design)[0])} | set(map(len, plan_rows(design)[1]))) == 1
        assert all(item.description for item in spec.arms) and spec.description
    else:
        RunConfig.from_yaml(path)


def test_the_files_that_are_promised_exist():
    recipes = ["debug", "toy_cpu", "toy_exact_full_vocab", "benchmark_calc"]
    recipes += ["qwen_consumer_gpu_calc", "qwen_consumer_gpu_calc_raw_teacher"]
    assert {f"{name}.yaml" for name in recipes} <= {path.name for path in RECIPES.iterdir()}
    configs = {"cpu_toy_calc.yaml", "gpu_calc_hard.yaml", "gpu_calc_hard_local_adapter.yaml"}
    assert configs <= {path.name for path in CONFIGS.iterdir()}


TABLE = """
(shared cold start)     | sft        | -                  | -          | -  | all_model_tokens | 450
cold-start-only         | sft        | -                  | -          | -  | all_model_tokens | 0
sft-continued           | sft        | -                  | -          | -  | all_model_tokens | 60
offline-kd              | offline_kd | bucketed_topk_tail | reverse_kl | 16 | all_model_tokens | 60
opd-bucketed-k16        | opd        | bucketed_topk_tail | reverse_kl | 16 | all_model_tokens | 60
opd-exact               | opd        | exact_full_vocab   | reverse_kl | 1  | all_model_tokens | 60
opd-bucketed-forward-kl | opd        | bucketed_topk_tail | forward_kl | 16 | all_model_tokens | 60
opd-tool-and-final      | opd        | bucketed_topk_tail | reverse_kl | 16 | tool_and_final   | 60
"""


def test_the_example_benchmark_has_the_promised_budgets():
    spec = BenchmarkConfig.from_yaml(RECIPES / "benchmark_calc.yaml")
    expected = [[cell.strip() for cell in line.split("|")] for line in TABLE.strip().splitlines()]
    assert spec.name == "cpu-toy-calc-equal-update-v2" and spec.seeds == (1234, 20260727)
    assert spec.eval_split == "test" and spec.output_dir == "runs/benchmarks"
    for seed in spec.seeds:
        header, rows = plan_rows(resolve_design(spec, seeds=[seed]))
        assert header[:7] == ("arm", "mode", "loss mode", "divergence", "top_k", "selector", "optimizer steps")
        assert [row[:7] for row in rows] == expected
    common, cold, _ = resolve_benchmark_configs(spec)
    assert common.steps_per_cycle == cold.steps_per_cycle == 1
    assert (common.train.rollouts_per_cycle, common.train.gradient_accumulation_steps) == (8, 8)


SNIPPET = """
from miniverl.evaluation.benchmark import resolve_benchmark_configs
from miniverl.evaluation.schema import BenchmarkConfig

spec = BenchmarkConfig.from_yaml("recipes/benchmark_calc.yaml")
_, cold, arms = resolve_benchmark_configs(spec)
print("cold", cold.environment.difficulty, cold.train.cycles)
for arm, cfg, diff in arms:
    accum = cfg.train.gradient_accumulation_steps
    per_cycle = max(1, (cfg.train.rollouts_per_cycle + accum - 1) // accum)
    total = per_cycle * (cfg.train.cycles + cfg.train.sft_warmup_cycles)
    print(f"{arm.name:26s} {cfg.run.mode.value:11s} steps={total} diff={len(diff)}")
"""


def test_budgets_can_be_worked_out_from_the_public_names():
    lines = script(SNIPPET).splitlines()
    assert lines[0] == "cold easy 450"
    assert lines[1] == "cold-start-only            sft         steps=0 diff=4", "mode, cycles, name and report"
    assert [line.split()[0] for line in lines[1:]] == [
        line.split("|")[0].strip() for line in TABLE.strip().splitlines()
    ][1:]


def test_a_plan_needs_no_torch():
    code = (
        "import sys\n"
        "from miniverl.evaluation.spec import BenchmarkConfig\n"
        "from miniverl.evaluation.design import plan_record, resolve_design\n"
        "plan_record(resolve_design(BenchmarkConfig.from_yaml(sys.argv[1])))\n"
        "print(sorted({'torch', 'transformers', 'pandas', 'matplotlib'} & set(sys.modules)))\n"
    )
    assert script(code, RECIPES / "benchmark_calc.yaml").strip() == "[]"


# the GPU benchmark and its published result


def treatments(rows: list[dict]) -> list[dict]:
    """The declared differences alone: without the harness's bookkeeping and without what the machine decided."""
    decided = HARNESS_PATHS | {"models.device", "memory.strategy"}
    return [
        {key: row[key] for key in ("path", "common", "arm", "change")} for row in rows if row["path"] not in decided
    ]


def shared_leaves(old: dict, new: dict) -> list[str]:
    """Paths that both recipes have and in which they differ."""
    return [row["path"] for row in leaf_diff(old, new) if row["change"] == "changed"]


@pytest.mark.parametrize("name", ["gpu_calc_hard", "gpu_calc_hard_local_adapter"])
def test_the_gpu_benchmark_declares_what_the_published_one_did(name):
    published = read_json(PUBLISHED)
    spec = BenchmarkConfig.from_yaml(CONFIGS / f"{name}.yaml")
    design = resolve_design(spec)
    assert list(spec.seeds) == published["seeds"] and spec.name == published["name"]
    assert list(spec.allowed_differences) == published["controlled"]["allowed_differences"]
    assert [unit.arm.name for unit in design.units] == [row["name"] for row in published["arms"]]
    assert not set(shared_leaves(published["common_resolved_config"], design.common.to_mapping())) - {
        "run.name", "run.tags"
    }  # fmt: skip
    cold = shared_leaves(published["cold_start"]["resolved_config"], design.cold[1234].to_mapping())
    assert not set(cold) - {"run.tags"}
    for row in published["arms"]:
        unit = design.unit(row["name"], row["seed"])
        ours, theirs = treatments(unit.diff), treatments(row["structured_diff"])
        assert [item["path"] for item in ours] == [item["path"] for item in theirs] == unit.treatments
        for mine, old in zip(ours, theirs, strict=True):
            if mine["path"] != "models.teacher.adapter":
                assert mine == old
            elif name == "gpu_calc_hard_local_adapter":
                assert {**mine["arm"], "path": ""} == {**old["arm"], "path": ""}, "only the folder is another"
            else:
                assert mine["arm"]["revision"] == "23323751318135484c06c043b1f9b9e7016dd89f"
        assert unit.config.total_steps == row["optimizer_steps"]


def test_the_two_gpu_benchmarks_differ_only_in_where_the_adapter_lies():
    hub, local = (
        {unit.run_name: unit.config.to_mapping() for unit in resolve_design(BenchmarkConfig.from_yaml(path)).units}
        for path in (CONFIGS / "gpu_calc_hard.yaml", CONFIGS / "gpu_calc_hard_local_adapter.yaml")
    )
    place = {f"models.teacher.adapter.{key}" for key in ("source", "path", "revision")}
    for name, config in hub.items():
        found = {row["path"] for row in leaf_diff(config, local[name])}
        assert found == (place if "protocol" in name else set())


def test_the_two_gpu_recipes_differ_only_in_the_adapter():
    one, other = (
        RunConfig.from_yaml(RECIPES / f"qwen_consumer_gpu_calc{end}.yaml").to_mapping() for end in ("", "_raw_teacher")
    )
    assert [row["path"] for row in leaf_diff(other, one)] == ["models.teacher.adapter", "run.name"]
    assert one["environment"]["difficulty"] == "medium" and one["models"]["student"]["quantization"] == "nf4"


# faults


def test_undeclared_differences_are_listed_and_nothing_was_loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    many = {name: 2 for name in ("warmup_steps", "save_every_cycles", "eval_every_cycles", "log_every_steps")}
    arms = [arm({"train": many, "environment": {"difficulty": "hard"}}, name) for name in ("a", "b", "c")]
    error = refused(small(arms=arms))
    assert error.message.startswith("15 undeclared differences") and error.message.count(" -> ") == 12
    assert "and 3 more" in error.message and "before model loading" in error.message
    assert 'a: environment.difficulty "easy" -> "hard"' in error.message and "allowed_differences" in error.hint
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "path", ["train.cycles", "train.rollouts_per_cycle", "environment.difficulty", "rollout.top_p"]
)
def test_no_leaf_may_differ_silently(path):
    section, name = path.split(".")
    value = {"cycles": 5, "rollouts_per_cycle": 4, "difficulty": "hard", "top_p": 0.5}[name]
    data = small(allowed_differences=[], arms=[arm({section: {name: value}})])
    assert f"odd: {path} " in refused(data).message
    for allowed in (path, f"{section}.*"):
        design = resolve_design(BenchmarkConfig.from_mapping({**data, "allowed_differences": [allowed]}))
        assert design.units[0].treatments == [path]
    assert "undeclared" in refused({**data, "allowed_differences": [section, f"{path}.*"[1:], "run.*"]}).message


def test_the_harness_names_and_seeds_the_runs():
    """What an arm says about its own name, seed and report is overruled, and never counts as a treatment."""
    own = arm({"run": {"name": "mine", "seed": 9, "run_id": "mine"}, "report": {"enabled": True}})
    design = resolve_design(BenchmarkConfig.from_mapping(small(arms=[own])))
    assert [unit.config.run.name for unit in design.units] == ["small-odd-s1", "small-odd-s2"]
    assert [unit.config.run.seed for unit in design.units] == [1, 2] and not design.units[0].config.report.enabled
    assert all(unit.treatments == [] and unit.config.run.run_id is None for unit in design.units)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"arms": [arm({"cache": {"reuse_across_policy_versions": True}})]}, "arm odd: cache.reuse_across_policy"),
        ({"arms": [arm({"loss": {"mode": "exact_full_vocab", "top_k": 16}})]}, "top_k 16 means nothing"),
        ({"arms": [arm({"loss": {"mode": "exact_full_vocab"}, "cache": {"dtype": "float16"}})]}, "exact targets need"),
        ({"arms": [arm({"trian": {}})]}, "arm odd: trian is unknown"),
        ({"arms": [arm({"loss": {"divergence": "jsd", "jsd_beta": 1.0}})]}, "arm odd: loss.jsd_beta"),
        ({"eval_split": "dev"}, "eval_split = \"dev\" should be 'train', 'eval' or 'test'"),
        ({"common_overrides": {"environment": {"test_tasks": 0}}}, "split 'test' is empty"),
        ({"common_overrides": {"environment": {"train_tasks": 10**6}}}, "distinct easy prompts"),
        ({"common_overrides": {"environment": {"name": "chess"}}}, "common recipe: environment.name"),
        ({"cold_start_overrides": {"environment": {"params": {"nosuch": 1}}}}, "cold start: environment.params.nosuch"),
        ({"cold_start_overrides": {"train": {"adam_eps": "x"}}}, "cold start: train.adam_eps"),
        ({"cold_start_overrides": {"models": {"student": {"toy": {"num_layers": 1}}}}}, "weights would not fit"),
        ({"base": {"models": {"student": {}}}}, "common recipe: models.teacher is missing"),
        ({"base": "nosuch.yaml"}, "nosuch.yaml: No such file"),
        ({"base": ""}, "base: is the path of a recipe"),
        ({"base": 3}, "base: is the path of a recipe"),
        ({"base": str(RECIPES)}, "Is a directory"),
        ({"arms": [arm({}, "same"), arm({}, "Same")]}, "arms.1.name"),
        ({"arms": [arm({}, "ColdStart")]}, "the cold start has this name"),
        ({"arms": [arm({}, "a" * 81)]}, "at most 80 characters"),
        ({"arms": [arm({}, "a/b")]}, "cannot be a file name"),
        ({"arms": [arm({}, "")]}, "at least 1 character"),
        ({"arms": []}, "arms"),
        ({"arms": [{"name": "a", "override": {}}]}, "arms.0.override is unknown"),
        ({"arms": [{"name": "a", "overrides": None}]}, "arms.0.overrides = null"),
        ({"arms": [{"name": "a", "overrides": {"run": {"notes": float("nan")}}}]}, "JSON cannot hold"),
        ({"name": "n" * 81}, "at most 80 characters"),
        ({"name": ".hidden"}, "cannot be a file name"),
        ({"seeds": []}, "seeds"),
        ({"seeds": [1, 1]}, "seeds.1 = 1"),
        ({"seeds": [-1]}, "seeds.0 = -1"),
        ({"seeds": [2**32]}, "seeds.0"),
        ({"seeds": [True]}, "seeds.0 = true"),
        ({"arms": [{"name": 3}]}, "arms.0.name = 3 should be a string"),
        ({"seeds": ["1"]}, "seeds.0"),
        ({"schema_version": 1}, "schema_version = 1 should be 2"),
        ({"cold_start_cycles": -1}, "cold_start_cycles = -1"),
        ({"budget": 5}, "leave it out"),
        ({"budget_axis": "wall_time"}, "wall_time needs a limit"),
        ({"budget_axis": "selected_training_tokens", "budget": 1.5}, "whole number"),
        ({"budget_axis": "wall_time", "budget": 0}, "budget: 0 is no limit"),
        ({"budget_axis": "wall_time", "budget": True}, "budget: True is no limit"),
        ({"budget_axis": "gpu_hours"}, "budget_axis = \"gpu_hours\" should be"),
        ({"allowed_differences": ["*"]}, "allowed_differences.0"),
        ({"allowed_differences": ["train.*.cycles"]}, "allowed_differences.0"),
        ({"allowed_differences": "train.cycles"}, "allowed_differences"),
        ({"allowed_diffs": []}, "allowed_diffs = [] is unknown"),
    ],
)  # fmt: skip
def test_bad_benchmarks_are_refused_in_two_lines(changes, says):
    if "arms" in changes and any("loss" in str(item) for item in changes["arms"]):
        changes = {**changes, "allowed_differences": ["loss.*", "cache.*"]}
    said = refused(small(**changes)).message
    assert says in said and ("at least 1 item" in said) == (changes in ({"arms": []}, {"seeds": []})), (
        "one fault, told once"
    )


@pytest.mark.parametrize(
    "text", ["", "- a\n", "name: [\n", "name: a\nname: b\n", "1: x\n", "\x00", "name: 2020-01-01\n"]
)
def test_text_that_is_no_benchmark_is_refused(text, tmp_path):
    path = tmp_path / "bench.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        BenchmarkConfig.from_yaml(path)
    assert "bench.yaml" in caught.value.message and caught.value.render().count("\n") == 1


def test_a_fault_in_the_base_is_reported_where_it_stands(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("models: {student: {}, teacher: {}}\ntrain:\n  cycles: -3\n")
    (tmp_path / "bench.yaml").write_text(yaml.safe_dump(small(base="recipe.yaml")))
    with pytest.raises(ConfigError, match="base: train.cycles = -3.*recipe.yaml, line 3"):
        resolve_design(BenchmarkConfig.from_yaml(tmp_path / "bench.yaml"))
    recipe.unlink()
    with pytest.raises(ConfigError, match="base: .*recipe.yaml: No such file"):
        BenchmarkConfig.from_yaml(tmp_path / "bench.yaml")


def test_a_recipe_that_is_incomplete_alone_may_be_completed_by_the_benchmark():
    data = small(base={"train": {"cycles": 7}}, common_overrides={"models": {"student": {}, "teacher": {}}})
    assert resolve_design(BenchmarkConfig.from_mapping(data)).common.train.cycles == 7


# layers, digests, choices


def test_layers_are_laid_in_order_and_the_cold_start_is_forced():
    data = small(
        common_overrides={
            "environment": {"difficulty": "hard"},
            "eval": {"tasks": 5},
            "train": {"save_every_cycles": 2},
        },
        cold_start_overrides={"environment": {"difficulty": "medium"}, "train": {"cycles": 99}, "run": {"mode": "opd"}},
    )
    design = resolve_design(BenchmarkConfig.from_mapping(data))
    cold = design.cold[2]
    assert (cold.environment.difficulty, design.common.environment.difficulty) == ("medium", "hard")
    assert cold.run.mode == "sft" and cold.train.cycles == 3 and cold.run.seed == 2 and cold.eval.tasks == 5
    assert cold.run.name == "small-coldstart" and not cold.eval.enabled and not cold.report.enabled
    assert cold.train.save_every_cycles == cold.train.eval_every_cycles == cold.train.sft_warmup_cycles == 0
    assert cold.cache.strict_policy_version and not cold.cache.reuse_across_policy_versions
    assert design.common.train.save_every_cycles == 2


@pytest.mark.parametrize(
    ("axis", "budget", "field"),
    [("selected_training_tokens", 500, "max_selected_training_tokens"), ("wall_time", 2.5, "max_train_seconds")],
)
def test_a_limit_belongs_to_every_arm_and_not_to_the_cold_start(axis, budget, field):
    data = small(budget_axis=axis, budget=budget)
    design = resolve_design(BenchmarkConfig.from_mapping(data))
    assert {getattr(unit.config.train, field) for unit in design.units} == {budget}
    assert getattr(design.common.train, field) == budget and getattr(design.cold[1].train, field) is None
    assert any(str(budget) in note for note in plan_notes(design))
    longer = small(budget_axis=axis, budget=budget, arms=[arm({"train": {field: 10 * budget}})])
    assert f"train.{field}" in refused(longer).message, "no arm takes more than its share undeclared"
    for own in (10 * budget, None):
        data = small(
            budget_axis=axis, budget=budget, arms=[arm({"train": {field: own}})], allowed_differences=["train.*"]
        )
        assert f"arm odd: train.{field} is the budget" in refused(data).message, "nor by declaring it"


def test_a_plan_says_where_a_limit_may_end_an_arm():
    data = small(
        common_overrides={"train": {"max_train_seconds": 9.0}}, arms=[arm({}), arm({"train": {"cycles": 0}}, "still")]
    )
    design = resolve_design(BenchmarkConfig.from_mapping(data))
    assert [row[6] for row in plan_rows(design)[1]] == ["at most 3", "at most 4", "0"]


def test_the_notes_name_what_a_reader_should_know():
    data = small(
        seeds=[1],
        cold_start_cycles=0,
        eval_split="train",
        arms=[
            arm({"train": {"cycles": 9}}, "long"),
            arm({}, "one"),
            arm({}, "two"),
            arm({"train": {"cycles": 0}}, "none"),
            arm({"environment": {"difficulty": "hard"}, "eval": {"tasks": 3}}, "harder"),
        ],
        allowed_differences=["run.mode", "train.cycles", "environment.difficulty", "eval.*"],
    )
    notes = plan_notes(resolve_design(BenchmarkConfig.from_mapping(data)))
    for says in ("no optimizer step: none", "long 9, one 4, two 4, harder 4", "single seed - no statistical significance",
                 "harder is measured on other tasks or under other rules than the common recipe: environment.difficulty, eval.tasks",
                 "no cold start", "nothing about unseen tasks", "one and two are the same training",
                 "allowed but not used: run.mode"):  # fmt: skip
        assert any(says in note for note in notes), (says, notes)


def test_a_choice_leaves_units_out_but_checks_the_whole_file():
    spec = BenchmarkConfig.from_mapping(small())
    design = resolve_design(spec, seeds=[2], arms=["opd"])
    assert [unit.run_name for unit in design.units] == ["small-opd-s2"] and list(design.cold) == [2]
    assert design.unit("opd", 2).config == resolve_design(spec).unit("opd", 2).config
    for choice in ({"seeds": [3]}, {"arms": ["nosuch"]}, {"seeds": []}, {"arms": []}):
        with pytest.raises(UsageError):
            resolve_design(spec, **choice)
    with pytest.raises(UsageError):
        design.unit("start", 2)
    broken = BenchmarkConfig.from_mapping(small(arms=[*SMALL["arms"], arm({"train": {"warmup_steps": 1}})]))
    with pytest.raises(ConfigError, match="undeclared"):
        resolve_design(broken, arms=["opd"])


@pytest.mark.parametrize(
    "change",
    [{"name": "other"}, {"seeds": [2, 1]}, {"cold_start_cycles": 4}, {"eval_split": "eval"}, {"description": "x"},
     {"base": {"models": {"student": {}, "teacher": {}}, "loss": {"top_k": 3}}}, {"arms": SMALL["arms"][:1]},
     {"budget_axis": "wall_time", "budget": 3}, {"common_overrides": {"run": {}}}],
)  # fmt: skip
def test_the_digest_names_the_whole_comparison(change):
    one = BenchmarkConfig.from_mapping(small())
    assert one.digest != BenchmarkConfig.from_mapping(small(**change)).digest
    assert one == BenchmarkConfig.from_mapping(one.to_mapping())
    assert one.digest == BenchmarkConfig.from_mapping(one.to_mapping()).digest == BenchmarkConfig(**small()).digest


def test_a_recipe_in_a_file_and_in_place_are_one_comparison(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "recipe.yaml").write_text(yaml.safe_dump(SMALL["base"]))
    (tmp_path / "a" / "bench.yaml").write_text(yaml.safe_dump(small(base="recipe.yaml")))
    monkeypatch.chdir(tmp_path)
    spec = BenchmarkConfig.from_yaml("a/bench.yaml")
    assert spec.digest == BenchmarkConfig.from_mapping(small()).digest
    (tmp_path / "a" / "recipe.yaml").write_text("nonsense")
    assert resolve_design(spec).common == resolve_design(BenchmarkConfig.from_mapping(small())).common, "read once"


# differences

LEAF = st.one_of(st.none(), st.booleans(), st.integers(-3, 3), st.sampled_from(["a", "b"]), st.lists(st.integers(0, 1)))
TREE = st.recursive(LEAF, lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3), max_leaves=8)
MAPPING = st.dictionaries(st.sampled_from("abc"), TREE, max_size=3)


def put(data: dict, row: dict) -> None:
    *above, last = row["path"].split(".")
    for part in above:
        data = data.setdefault(part, {})
    if row["change"] == "removed":
        data.pop(last)
    else:
        data[last] = copy.deepcopy(row["arm"])


def prune(data: object) -> object:
    """Without mappings that hold nothing: removing every leaf of one leaves an empty one behind."""
    if not isinstance(data, dict):
        return data
    kept = {key: prune(value) for key, value in data.items()}
    return {key: value for key, value in kept.items() if value != {}}


@settings(max_examples=60)
@given(MAPPING, MAPPING)
def test_a_difference_says_everything_and_nothing_twice(one, other):
    rows = leaf_diff(one, other)
    assert (rows == []) == (json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True))
    assert [row["path"] for row in rows] == sorted({row["path"] for row in rows})
    rebuilt = copy.deepcopy(one)
    for row in rows:
        put(rebuilt, row)
    assert prune(rebuilt) == prune(other)
    swap = {"added": "removed", "removed": "added", "changed": "changed"}
    back = [{**row, "common": row["arm"], "arm": row["common"], "change": swap[row["change"]]} for row in rows]
    assert leaf_diff(other, one) == back


@settings(max_examples=60)
@given(MAPPING, MAPPING)
def test_an_override_differs_only_where_it_says(common, over):
    """What a merge changes lies at or below the paths that the override writes."""
    written = {row["path"] for row in leaf_diff({}, over)}
    for row in leaf_diff(common, deep_merge(common, over)):
        assert any(f"{row['path']}.".startswith(f"{path}.") or path.startswith(row["path"]) for path in written)


@pytest.mark.parametrize(
    ("path", "allowed", "answer"),
    [
        ("train.cycles", ["train.cycles"], True),
        ("train.cycles", ["train.*"], True),
        ("train.cycles", ["train"], False),
        ("train.cycles", ["train.cycle"], False),
        ("train.cycles", ["train.cycles.*"], True),
        ("train.cycles_more", ["train.cycles.*"], False),
        ("trainer.cycles", ["train.*"], False),
        ("models.teacher.adapter.path", ["models.*"], True),
        ("models.teacher.adapter.path", ["models.teacher.adapter"], False),
        ("train.cycles", [], False),
        *((path, [], True) for path in sorted(HARNESS_PATHS)),
    ],
)
def test_declared_paths(path, allowed, answer):
    assert is_declared(path, allowed) is answer
