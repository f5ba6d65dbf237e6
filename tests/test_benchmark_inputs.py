"""Benchmarks that cannot be run: two lines on standard error, the right exit code, and nothing written."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from benchmark_tiny import BASE, OPD, SFT, mapping
from typer.testing import CliRunner

from miniverl.cli import app
from miniverl.evaluation import benchmark


def run(*words):
    """Exit code, standard output, standard error."""
    result = CliRunner().invoke(app, [str(w) for w in words], catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


def everything(folder: Path) -> dict[str, object]:
    """Every path below a folder, files with their bytes and when they were last written."""
    return {
        str(p.relative_to(folder)): (p.read_bytes(), p.stat().st_mtime_ns) if p.is_file() else None
        for p in folder.rglob("*")
    }


def refused(folder: Path, code: int, *words: object, say: tuple[str, ...] = ()) -> str:
    """Run a command that must end in exactly two lines and leave `folder` as it is; returns what it said."""
    before = everything(folder)
    got, out, err = run(*words)
    assert everything(folder) == before, "something was written"
    lines = err.splitlines()
    assert (got, out, len(lines)) == (code, "", 2), (got, out, err)
    assert re.fullmatch("error: .+", lines[0]) and re.fullmatch("hint: .+", lines[1]), err
    for words_of_it in say:
        assert words_of_it in err, err
    return err


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty working directory, in which no model may be loaded and no unit begun."""
    monkeypatch.chdir(tmp_path)

    def never(*args, **kwargs):
        raise AssertionError("the preflight came too late")

    monkeypatch.setattr("miniverl.training.setup.load_backend", never)
    monkeypatch.setattr(benchmark, "run_units", never)
    return tmp_path


def write(folder: Path, data: object = None, **over: object) -> Path:
    """A benchmark file: the text of `data`, or the tiny benchmark with `over`."""
    path = folder / "bench.yaml"
    text = data if isinstance(data, str) else yaml.safe_dump(mapping(**over), sort_keys=False)
    path.write_text(text, encoding="utf-8")
    return path


def based(**sections: dict) -> dict:
    """The tiny base recipe with other values in some sections."""
    return {**BASE, **{name: {**BASE.get(name, {}), **values} for name, values in sections.items()}}


LONG = "a" * 81
MANY = {
    "train": {"rollouts_per_cycle": 4, "gradient_accumulation_steps": 4, "learning_rate": 1e-4, "warmup_steps": 1},
    "rollout": {"max_turns": 3, "temperature": 0.5, "top_p": 0.5, "top_k": 3, "max_parse_errors": 1},
    "loss": {"divergence": "forward_kl", "chunk_size": 16, "temperature": 2.0},
    "selection": {"ratio": 0.2, "critical_weight": 2.0},
}
EXACT = {"name": "exact", "overrides": {"loss": {"mode": "exact_full_vocab", "top_k": 4}}}
PRIVILEGED = {"name": "seer", "overrides": {"models": {"teacher": {"mode": "privileged_context"}}}}
REUSING = {"name": "stale", "overrides": {"cache": {"reuse_across_policy_versions": True}}}
FREE = {"allowed_differences": ["loss.*", "models.*", "cache.*", "run.mode"]}
BAD_FIELDS = {
    "unknown split": ({"eval_split": "validation"}, ("eval_split", "validation")),
    "duplicate arm names": ({"arms": [SFT, {**OPD, "name": "sft"}]}, ("arms.1.name",)),
    "81 characters in a name": ({"name": LONG}, ("name", "80")),
    "81 characters in an arm's name": ({"arms": [{"name": LONG}]}, ("arms.0.name", "80")),
    "a name that leaves the folder": ({"name": "../up"}, ("name", "../up")),
    "an arm's name with a slash": ({"arms": [{"name": "a/b"}]}, ("arms.0.name", "a/b")),
    "missing base file": ({"base": "nowhere.yaml"}, ("nowhere.yaml",)),
    "base is a folder": ({"base": "."}, ("base",)),
    "base is no recipe": ({"base": {"models": 3}}, ("models",)),
    "base is a list": ({"base": [1]}, ("base",)),
    "no arms": ({"arms": []}, ("arms",)),
    "no seeds": ({"seeds": []}, ("seeds",)),
    "a seed twice": ({"seeds": [1, 1]}, ("seeds",)),
    "a negative seed": ({"seeds": [-1]}, ("seeds",)),
    "an unknown field": ({"repeats": 3}, ("repeats",)),
    "an older format": ({"schema_version": 1}, ("schema_version",)),
    "an unknown axis": ({"budget_axis": "flops"}, ("budget_axis", "flops")),
    "an axis without its limit": ({"budget_axis": "wall_time"}, ("budget", "limit")),
    "a limit without its axis": ({"budget": 100}, ("budget", "optimizer_steps")),
    "half a position": ({"budget_axis": "selected_training_tokens", "budget": 0.5}, ("budget",)),
    "a limit of nothing": ({"budget_axis": "wall_time", "budget": 0}, ("budget",)),
    "a negative cold start": ({"cold_start_cycles": -1}, ("cold_start_cycles",)),
    "an override of nothing": ({"common_overrides": {"train": {"cylces": 3}}}, ("cylces",)),
    "an arm's override of nothing": ({"arms": [{"name": "a", "overrides": {"trian": {}}}]}, ("trian", "arm a")),
    "overrides that are no mapping": ({"arms": [{"name": "a", "overrides": 3}]}, ("arms.0.overrides",)),
    "a section that is no mapping": ({"arms": [{"name": "a", "overrides": {"train": 3}}]}, ("arm a", "train")),
    "an arm that moves its output": (
        {"arms": [{"name": "a", "overrides": {"run": {"output_dir": "x"}}}]},
        ("run.output_dir", "before model loading"),
    ),
    "top_k on an exact arm": ({"arms": [EXACT], **FREE}, ("top_k", "exact")),
    "a contradictory arm": ({"arms": [REUSING], **FREE}, ("stale", "reuse_across_policy_versions")),
    "an arm that is not built": ({"arms": [PRIVILEGED], **FREE}, ("seer", "privileged_context")),
    "an empty split": ({"base": based(environment={"test_tasks": 0})}, ("test",)),
    "an environment that is nowhere": ({"base": based(environment={"name": "nosuch.module:Game"})}, ("nosuch",)),
    "one undeclared difference": ({"allowed_differences": []}, ("run.mode", "before model loading")),
}


@pytest.mark.parametrize("name", BAD_FIELDS)
def test_a_bad_file_is_refused(place, name):
    over, say = BAD_FIELDS[name]
    refused(place, 1, "benchmark", write(place, **over), "--output", place / "out", say=say)


@pytest.mark.parametrize("name", [name for name in BAD_FIELDS if name != "an arm that is not built"])
def test_and_so_is_its_plan(place, name):
    over, say = BAD_FIELDS[name]
    refused(place, 1, "benchmark", write(place, **over), "--plan", say=say)


TEXTS = {
    "malformed YAML": ("name: [unclosed\nseeds: 1\n", ("line",)),
    "no mapping": ("- 1\n- 2\n", ()),
    "an empty file": ("", ()),
    "a key twice": ("schema_version: 2\nname: a\nname: b\n", ("name",)),
    "not a number": ("schema_version: 2\nname: a\nbudget: .nan\n", ()),
}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("option", ("--json", "--plan"))
def test_text_that_is_no_benchmark(place, name, option):
    text, say = TEXTS[name]
    refused(place, 1, "benchmark", write(place, text), option, say=("bench.yaml", *say))


def test_files_that_cannot_be_read(place):
    (place / "binary.yaml").write_bytes(b"name: \xff\xfe\n")
    for name in ("nowhere.yaml", "binary.yaml", "."):
        refused(place, 1, "benchmark", place / name, say=(str(place / name),))
    (place / "recipe.yaml").write_text("models: [\n", encoding="utf-8")
    refused(place, 1, "benchmark", write(place, base="recipe.yaml"), say=("recipe.yaml",))


def test_of_many_undeclared_differences_the_first_twelve_are_named(place):
    path = write(place, arms=[SFT, {"name": "many", "overrides": MANY}])
    for words in ((), ("--plan",)):
        told = refused(place, 1, "benchmark", path, *words, say=("before model loading", "and 2 more"))
        named = re.findall(r"many: ([a-z_.]+) ", told)
        assert len(named) == 12 and named == sorted(named), told
        assert named[0] == "loss.chunk_size" and named[-1] == "train.learning_rate"


USAGE = {
    "an unknown seed": (("--seeds", "7"), ("7",)),
    "a seed that is no number": (("--seeds", "5,x"), ("x",)),
    "a seed beyond all numbers": (("--seeds", "9" * 30), ("999",)),
    "no seed": (("--seeds", ""), ()),
    "an unknown arm": (("--arms", "sft,nosuch"), ("nosuch",)),
    "no job": (("--jobs", "0"), ("jobs",)),
    "a negative number of jobs": (("--jobs", "-2"), ("jobs",)),
    "an unknown engine": (("--engine", "nosuch"), ("nosuch",)),
    "an unknown option": (("--fast",), ("--fast",)),
}


@pytest.mark.parametrize("name", USAGE)
def test_wrong_usage(place, name):
    words, say = USAGE[name]
    refused(place, 2, "benchmark", write(place), "--output", place / "out", *words, say=say)
    refused(place, 2, "benchmark", say=("CONFIG",))


def test_an_output_that_is_a_file(place):
    (place / "file").write_text("mine")
    for output in (place / "file", place / "file" / "below"):
        refused(place, 1, "benchmark", write(place), "--output", output, say=(str(place / "file"),))
        refused(place, 1, "benchmark", write(place), "--output", output, "--resume", say=(str(place / "file"),))


TAKEN = ("tiny-opd-s5", "tiny-coldstart-s5", "tiny.benchmark", "tiny.json", "tiny.md")


@pytest.mark.parametrize("name", TAKEN)
def test_whatever_is_in_the_way_is_found_before_anything_is_made(place, name):
    taken = place / "out" / name
    taken.mkdir(parents=True)
    told = refused(place, 1, "benchmark", write(place), "--output", place / "out", say=(str(taken), "--resume"))
    assert "tiny-sft-s5" not in told
    taken.rmdir()
    taken.symlink_to(place / "nowhere")
    refused(place, 1, "benchmark", write(place), "--output", place / "out", say=(str(taken),))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A tiny benchmark that was run to its end with a base recipe in a file of its own."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "base.yaml").write_text(yaml.safe_dump(BASE), encoding="utf-8")
    path = write(folder, base="base.yaml")
    code, _, err = run("benchmark", path, "--output", folder / "out", "--json")
    assert code == 0, err
    return folder


@pytest.fixture
def begun(finished, place):
    """A copy of that benchmark as a killed process may leave it: the last arm trained, and no result yet."""
    shutil.copytree(finished, place / "copy")
    for name in ("tiny.json", "tiny.md"):
        (place / "copy" / "out" / name).unlink()
    return place / "copy"


EDITS = {
    "another split": ({"eval_split": "eval"}, "eval_split"),
    "one more seed": ({"seeds": [5, 6]}, "seeds"),
    "another arm": ({"arms": [SFT, {**OPD, "name": "opd-2"}]}, "arms"),
    "another budget": ({"common_overrides": {"train": {"cycles": 3}}}, "cycles"),
    "a longer cold start": ({"cold_start_cycles": 3}, "cold_start_cycles"),
    "another description": ({"description": "afterthought"}, "description"),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_file_does_not_continue_a_benchmark(begun, name):
    over, what = EDITS[name]
    path = write(begun, **{"base": "base.yaml", **over})
    refused(begun, 1, "benchmark", path, "--output", begun / "out", "--resume", say=(what,))


def test_nor_does_an_edited_recipe_or_another_choice(begun):
    base, words = begun / "base.yaml", ("benchmark", begun / "bench.yaml", "--output", begun / "out", "--resume")
    refused(begun, 1, *words, "--seeds", "5", "--arms", "opd", say=("arms",))
    base.write_text(yaml.safe_dump(based(train={"learning_rate": 1e-4})), encoding="utf-8")
    refused(begun, 1, *words, say=("learning_rate",))
    base.unlink()
    refused(begun, 1, *words, say=("base.yaml",))


def test_a_damaged_plan_is_no_plan(begun):
    words = ("benchmark", begun / "bench.yaml", "--output", begun / "out", "--resume")
    plan = begun / "out" / "tiny.benchmark" / "plan.json"
    for text in ("{", "[]", json.dumps({"schema_version": 1}), ""):
        plan.write_text(text, encoding="utf-8")
        refused(begun, 1, *words, say=("plan.json",))


def test_a_finished_benchmark_is_not_run_again(finished, place):
    shutil.copytree(finished, place / "copy")
    refused(place, 1, "benchmark", place / "copy" / "bench.yaml", "--output", place / "copy" / "out", say=("--resume",))


def test_exports_and_schemas_of_nothing(place):
    (place / "empty").mkdir()
    for run_dir in (place / "empty", place / "nowhere"):
        refused(place, 1, "export-benchmark", run_dir, say=(str(run_dir),))
    refused(place, 1, "schema", "--out", place, say=(str(place),))
    refused(place, 2, "export-benchmark", say=("RUN",))
