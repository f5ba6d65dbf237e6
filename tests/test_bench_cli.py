"""The commands about benchmarks, as commands: plan, run, resume, export, schema; two-line errors that leave nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from benchmark_tiny import OPD, SFT, ZERO, mapping, timeless, tiny_benchmark
from test_cli import assert_error, names, run
from test_imports import BLOCK, RUN, python

import miniverl.evaluation.benchmark as harness
from miniverl.core import MissingDependencyError, StoreError, loads_strict
from miniverl.evaluation.benchmark import run_benchmark
from miniverl.evaluation.design import SINGLE_SEED
from miniverl.evaluation.schema import BenchmarkResult, schema_text
from miniverl.reporting.benchmarks import render_benchmark_markdown

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ("torch", "ray", "matplotlib", "pandas", "transformers", "numpy")


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A benchmark file in the working directory, two arms and a reference on two seeds."""
    monkeypatch.chdir(tmp_path)
    return write(tmp_path / "tiny.yaml", seeds=[5, 6], arms=[ZERO, SFT, OPD], output_dir="runs")


def write(path, **over):
    path.write_text(yaml.safe_dump(mapping(**over)))
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The result of one small benchmark."""
    return run_benchmark(tiny_benchmark(), output=tmp_path_factory.mktemp("finished"))


@pytest.fixture
def pretended(monkeypatch, finished):
    """`run_benchmark` replaced by something that remembers how it was called."""
    calls = []

    def pretend(spec, **options):
        calls.append({"name": spec.name, **options})
        options["on_progress"]("units", 1, 2, {"unit": "tiny-sft-s5"})
        return finished

    monkeypatch.setattr(harness, "run_benchmark", pretend)
    return calls


@pytest.mark.parametrize("command", ["benchmark", "export-benchmark", "schema"])
def test_help(command):
    code, out, err = run(command, "--help")
    assert code == 0 and err == "" and "--out" in out and command in run("--help")[1]


def test_plan_needs_no_torch_and_creates_nothing(tmp_path):
    write(tmp_path / "tiny.yaml", output_dir=str(tmp_path / "runs"))
    code = (
        BLOCK
        + RUN
        + (
            "import os, time\n"
            f"shipped = {str(ROOT / 'recipes' / 'benchmark_calc.yaml')!r}\n"
            "out, sys.stdout = sys.stdout, open(os.devnull, 'w')\n"
            "codes = [run('benchmark', sys.argv[1], '--plan'), run('benchmark', shipped, '--plan', '--json')]\n"
            f"print(codes, sorted(set({HEAVY!r}) & set(sys.modules)), time.process_time() < 1.0, file=out)\n"
        )
    )
    done = python(code, tmp_path / "tiny.yaml")
    assert done.stdout.strip() == "[0, 0] [] True", done
    assert names(tmp_path) == ["tiny.yaml"]


def test_plan_prints_the_budgets(config):
    code, out, err = run("benchmark", config, "--plan")
    assert code == 0 and err == ""
    rows = {line.split("  ")[0]: line.split() for line in out.splitlines()}
    assert rows["start"][-2:] == ["0", "2"] and rows["sft"][-2:] == ["2", "1"] and rows["opd"][-2:] == ["2", "0"]
    assert rows["(shared cold start)"][-2:] == ["2", "-"]
    assert "3 arms, 2 seeds (5, 6), 8 runs" in out and SINGLE_SEED not in out
    part = run("benchmark", config, "--plan", "--seeds", "6", "--arms", "opd,start")[1]
    assert "2 arms, 1 seed (6), 3 runs" in part and SINGLE_SEED in part and "\nsft " not in part


def test_plan_as_json(config):
    code, out, err = run("benchmark", config, "--plan", "--json", "--seeds", "6")
    data = loads_strict(out)
    assert code == 0 and err == "" and data["seeds"] == [6] and data["arms"] == ["start", "sft", "opd"]
    assert [unit["optimizer_steps"] for unit in data["units"]] == [0, 2, 2]


def test_every_option_arrives(config, pretended):
    words = ["benchmark", config, "--output", "o", "--notes", "a try", "--offline", "--resume", "--jobs", "3"]
    words += ["--seeds", "6,5", "--arms", "opd,sft", "--engine", "ray"]
    assert run(*words)[0] == 0
    [call] = pretended
    assert callable(call.pop("on_progress"))
    assert call == {
        "name": "tiny",
        "output": Path("o"),
        "notes": "a try",
        "offline": True,
        "resume": True,
        "jobs": 3,
        "engine": "ray",
        "seeds": [6, 5],
        "arms": ["opd", "sft"],
        "invocation": ["miniverl", *map(str, words)],
    }


def test_defaults_leave_the_choice_to_the_configuration(config, pretended):
    assert run("benchmark", config)[0] == 0
    call = pretended[0]
    assert [call[k] for k in ("output", "seeds", "arms", "jobs", "engine", "notes")] == [
        None,
        None,
        None,
        1,
        "process",
        "",
    ]
    assert call["resume"] is False and call["offline"] is False


def test_table_caveats_and_files(config, pretended, finished, monkeypatch):
    code, out, err = run("benchmark", config)
    assert code == 0 and "units 1/2" in err and "units" not in out
    lines = out.splitlines()
    assert lines[0].split()[:2] == ["arm", "seeds"] and lines[2].split()[:2] == ["sft", "1"]
    assert SINGLE_SEED in lines and lines[-2:] == ["runs/tiny.json", "runs/tiny.md"]
    assert run("benchmark", config, "--output", "else")[1].splitlines()[-1] == "else/tiny.md"

    budget = {**finished.controlled["budget"], "violations": ["sft took 2 steps, opd 3"]}
    declared = {"declared_seeds": [5, 7], "declared_arms": ["sft", "opd", "kd"]}
    other = finished.model_copy(update={"controlled": {**finished.controlled, "budget": budget, **declared}})
    monkeypatch.setattr(harness, "run_benchmark", lambda spec, **options: other)
    out = run("benchmark", config)[1]
    assert "budget not kept: sft took 2 steps, opd 3" in out
    assert "declared seeds that were not run: 7" in out and "declared arms that were not run: kd" in out


def test_json_is_the_whole_result_and_nothing_else(config, pretended, finished):
    code, out, err = run("benchmark", config, "--json")
    assert code == 0 and out == finished.to_json() and f"note: {SINGLE_SEED}" in err


def test_an_interrupt_says_how_to_go_on(config, monkeypatch):
    def interrupted(spec, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(harness, "run_benchmark", interrupted)
    assert_error(run("benchmark", config), 1, "interrupted", "--resume")


@pytest.mark.parametrize(
    "over,needles",
    [
        ({"eval_split": "dev"}, ["eval_split", "dev"]),
        ({"arms": [SFT, SFT]}, ["arms", "sft"]),
        ({"arms": [{"name": "x" * 81}]}, ["arms", "80"]),
        ({"name": "n" * 81}, ["name", "80"]),
        ({"base": "gone.yaml"}, ["gone.yaml"]),
        ({"arms": [OPD, {"name": "b", "overrides": {"train": {"learning_rate": 1.0}}}]}, ["train.learning_rate"]),
        ({"arms": [{"name": "k", "overrides": {"loss": {"mode": "exact_full_vocab", "top_k": 4}}}]}, ["top_k"]),
        ({"schema_version": 1}, ["schema_version"]),
    ],
)
@pytest.mark.parametrize("plan", [["--plan"], []])
def test_a_wrong_design_is_two_lines_and_leaves_nothing(config, over, needles, plan):
    write(config, output_dir="runs", **over)
    before = names(config.parent)
    assert_error(run("benchmark", config, *plan), 1, *needles)
    assert names(config.parent) == before


def test_undeclared_differences_are_listed_up_to_twelve(config):
    sizes = {"max_turns": 3, "max_new_tokens_per_turn": 7, "max_total_tokens": 201, "batch_size": 2}
    steps = {"cycles": 3, "learning_rate": 1e-3, "rollouts_per_cycle": 1, "gradient_accumulation_steps": 1}
    tasks = {"eval_tasks": 3, "test_tasks": 3, "train_tasks": 7}
    over = {"rollout": sizes, "train": steps, "environment": tasks, "loss": {"top_k": 3}, "eval": {"tasks": 1}}
    write(config, arms=[OPD, {"name": "b", "overrides": over}], allowed_differences=[])
    answer = run("benchmark", config)
    assert_error(answer, 1, "environment.eval_tasks", "validation before model loading", "1 more")
    assert answer[2].count("b: ") == 12
    assert names(config.parent) == ["tiny.yaml"]


@pytest.mark.parametrize("text", ["a: [", "- 1\n- 2\n", "", "\x00"])
def test_malformed_yaml(config, text):
    config.write_text(text)
    assert_error(run("benchmark", config, "--plan"), 1, "tiny.yaml")


@pytest.mark.parametrize(
    "words,code,needle",
    [
        (["--jobs", "0"], 2, "--jobs"),
        (["--engine", "threads"], 2, "threads"),
        (["--seeds", "five"], 2, "five"),
        (["--seeds", ","], 2, "--seeds"),
        (["--arms", ""], 2, "--arms"),
        (["--seeds", "7"], 2, "7"),
        (["--arms", "sft,kd"], 2, "kd"),
        (["--arms", "sft", "--plan", "--seeds", "5,99"], 2, "99"),
    ],
)
def test_options_that_mean_nothing(config, words, code, needle):
    before = names(config.parent)
    assert_error(run("benchmark", config, *words), code, needle)
    assert names(config.parent) == before


def test_missing_extras_name_the_install_line(config, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    before = names(config.parent)
    assert_error(run("benchmark", config, "--engine", "ray"), 1, "ray is not installed", '".[scale]"')
    assert names(config.parent) == before

    import miniverl.commands.bench as bench

    def missing():
        raise MissingDependencyError("torch is not installed", hint='pip install -e ".[train]"')

    monkeypatch.setattr(bench, "need_training", missing)
    assert_error(run("benchmark", config), 1, '".[train]"')


def test_run_collide_resume_export(config, tmp_path):
    code, out, err = run("benchmark", config, "--arms", "sft", "--seeds", "5")
    assert code == 0, err
    assert "declared arms that were not run: start, opd" in out and SINGLE_SEED in out
    result = BenchmarkResult.read(tmp_path / "runs/tiny.json")
    assert result.invocation == ["miniverl", "benchmark", str(config), "--arms", "sft", "--seeds", "5"]
    before = {p: p.read_bytes() for p in (tmp_path / "runs").rglob("*") if p.is_file()}
    assert_error(run("benchmark", config, "--arms", "sft", "--seeds", "5"), 1, "--resume")
    assert_error(run("benchmark", config, "--resume"), 1)  # another part is another question
    code, again, _ = run("benchmark", config, "--arms", "sft", "--seeds", "5", "--resume")
    assert code == 0 and again == out
    assert {p: p.read_bytes() for p in (tmp_path / "runs").rglob("*") if p.is_file()} == before

    run_dir = tmp_path / "runs/tiny-sft-s5"
    code, out, err = run("export-benchmark", run_dir, "--notes", "mine", "--out", "mine.json")
    assert code == 0 and err == "" and out.splitlines()[-1] == "mine.json"
    exported = BenchmarkResult.read(tmp_path / "mine.json")
    assert exported.notes == "mine" and exported.arms[0].success_rate == result.arms[0].success_rate
    colds = {row["seed"]: row["checkpoint_digest"] for row in result.cold_start["checkpoints"]}
    assert exported.controlled["initial_checkpoint_digest"] == colds[exported.seeds[0]], "it did not begin from nothing"
    assert "weights of another run's checkpoint" in render_benchmark_markdown(exported)
    assert str(tmp_path) not in (tmp_path / "mine.json").read_text()
    assert_error(run("export-benchmark", run_dir, "--out", "mine.json"), 1, "mine.json", "--overwrite")
    code, out, _ = run("export-benchmark", run_dir, "--out", "mine.json", "--overwrite", "--json")
    data = loads_strict(out)
    assert (
        code == 0 and data["result"] == json.loads((tmp_path / "mine.json").read_text()) and data["file"] == "mine.json"
    )


def test_export_refuses_what_is_no_finished_run(tmp_path):
    assert_error(run("export-benchmark", tmp_path / "no"), 1, "no")
    (tmp_path / "empty").mkdir()
    assert_error(run("export-benchmark", tmp_path / "empty"), 1, "empty")
    assert_error(run("export-benchmark"), 2)


def test_schema_is_the_same_everywhere(tmp_path):
    code, out, err = run("schema")
    assert code == 0 and err == "" and out == schema_text()
    committed = ROOT / "benchmarks/schema/benchmark-result.schema.json"
    assert committed.read_bytes() == out.encode()
    path = tmp_path / "s.json"
    assert run("schema", "--out", path) == (0, f"{path}\n", "") and path.read_bytes() == out.encode()
    path.write_text('{"$schema": "older"}')
    assert run("schema", "--out", path)[0] == 0 and path.read_bytes() == out.encode()
    path.write_text("something else")
    assert_error(run("schema", "--out", path), 1, "s.json")
    assert path.read_text() == "something else"
    assert_error(run("schema", "--out", tmp_path / "no" / "s.json"), 1, "s.json")


def test_a_collision_is_found_before_anything_is_created(config, tmp_path):
    (tmp_path / "runs/tiny-opd-s6").mkdir(parents=True)
    assert_error(run("benchmark", config), 1, "tiny-opd-s6")
    assert names(tmp_path / "runs") == ["tiny-opd-s6"]


def test_an_error_of_the_harness_is_two_lines(config, monkeypatch):
    def refuse(spec, **options):
        raise StoreError("the disk is full", hint="make room")

    monkeypatch.setattr(harness, "run_benchmark", refuse)
    assert_error(run("benchmark", config), 1, "the disk is full", "make room")


@pytest.mark.slow
def test_interrupted_in_two_processes_and_resumed(config, tmp_path):
    """Ctrl-C while two workers run: two lines, no worker left; the resumed benchmark is the undisturbed one."""
    command = [sys.executable, "-c", "from miniverl.cli import main; main()", "benchmark", str(config), "--jobs", "2"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, start_new_session=True, env=env, **pipes) as program:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("runs/tiny.benchmark/units/tiny-*.json")):
            assert time.monotonic() < deadline and program.poll() is None
            time.sleep(0.01)
        os.killpg(program.pid, signal.SIGINT)
        out, err = program.communicate(timeout=60)
    assert program.returncode == 1 and out == "" and "Traceback" not in err
    assert err.splitlines()[-2] == "error: interrupted" and "--resume" in err.splitlines()[-1]
    assert not (tmp_path / "runs/tiny.json").exists()
    assert run("benchmark", config, "--jobs", "2", "--resume")[0] == 0
    assert run("benchmark", config, "--output", "whole")[0] == 0
    found = [timeless(tmp_path / folder / "tiny.json") for folder in ("runs", "whole")]
    for one in found:  # what was typed, and a commit that may be made meanwhile
        assert one.pop("invocation")[1] == "benchmark" and one.pop("git_commit", None) is not None
    assert found[0] == found[1]
