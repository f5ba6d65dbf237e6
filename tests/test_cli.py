"""Every command as a command: exit codes, two-line errors, strict JSON on standard output, no traces left by readers."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout

import pytest
from run_fixture import RECIPE, episode, make_run
from typer.testing import CliRunner

import miniverl
from miniverl.cli import app, main
from miniverl.core import loads_strict


def run(*words):
    """Exit code, standard output, standard error."""
    result = CliRunner().invoke(app, [str(w) for w in words], catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


def run_json(*words):
    code, out, err = run(*words, "--json")
    assert code == 0, err
    assert err == ""
    return loads_strict(out)


def assert_error(answer, code, *needles):
    assert answer[0] == code and answer[1] == "", answer
    lines = answer[2].splitlines()
    assert (
        len(lines) == 2 and lines[0].startswith("error: ") and lines[1].startswith("hint: ") and lines[1] != "hint: "
    ), answer[2]
    for needle in needles:
        assert needle in answer[2], answer[2]


def names(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


def test_version_and_help():
    assert run("--version") == (0, f"miniverl {miniverl.__version__}\n", "")
    code, out, _ = run("--help")
    assert code == 0 and all(
        name in out for name in ("doctor", "demo", "validate", "train", "eval", "inspect", "report", "cache")
    )
    for command in (
        "doctor",
        "demo",
        "validate",
        "train",
        "eval",
        "inspect",
        "report",
        "cache stats",
        "cache validate",
    ):
        code, out, err = run(*command.split(), "--help")
        assert code == 0 and "--json" in out and err == "", command


@pytest.mark.parametrize(
    "words",
    [
        ["--nope"],
        ["nope"],
        ["train", "--nope"],
        ["inspect"],
        ["eval"],
        ["inspect", "x", "--limit", "-1"],
        ["eval", "--run", "x", "--tasks", "0"],
        ["cache", "stats"],
    ],
)
def test_usage_errors_are_two_lines_and_code_2(words):
    assert_error(run(*words), 2)


def test_no_arguments_shows_help_and_is_a_usage_error():
    code, out, err = run()
    assert code == 2 and "Usage: miniverl" in out + err


def test_validate_prints_the_plan(recipe):
    code, out, err = run("validate", recipe)
    assert code == 0 and err == "" and out.startswith(f"{recipe}: valid\n") and "on_policy_distillation" in out
    data = run_json("validate", recipe)
    assert (
        data["valid"] is True
        and data["planned_optimizer_steps"] == 4
        and data["is_on_policy"] is True
        and data["warnings"] == []
    )
    recipe.write_text(
        RECIPE.replace("gradient_accumulation_steps: 4", "gradient_accumulation_steps: 2, opd_freshness: replay")
    )
    data = run_json("validate", recipe)
    assert data["is_on_policy"] is False and data["objective"] == "online_distillation_with_replay" and data["warnings"]


@pytest.mark.parametrize(
    "change,needle",
    [
        (("cycles: 2", "cycles: -2"), "train.cycles"),
        (("cycles: 2", "cycels: 2"), "train.cycels"),
        (("schema_version: 1", "schema_version: 9"), "schema_version"),
        (("run: {", "run: {{"), "recipe.yaml"),
    ],
)
def test_invalid_recipe_is_code_1_and_names_the_place(recipe, change, needle):
    recipe.write_text(RECIPE.replace(*change))
    assert_error(run("validate", recipe), 1, needle)


def test_validate_of_a_missing_or_binary_file(tmp_path):
    assert_error(run("validate", tmp_path / "no.yaml"), 1, "no.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert_error(run("validate", tmp_path / "binary.yaml"), 1, "binary.yaml")
    assert_error(run("validate", tmp_path), 1)


def test_long_paths_are_not_wrapped(tmp_path):
    folder = tmp_path / ("x" * 120) / ("y" * 120)
    folder.mkdir(parents=True)
    path = folder / "recipe.yaml"
    path.write_text(RECIPE)
    assert run("validate", path)[1].splitlines()[0] == f"{path}: valid"
    path.write_text("a: [")
    assert str(path) in run("validate", path)[2].splitlines()[0]


def test_install_hint_keeps_its_brackets(monkeypatch, recipe):
    import miniverl.commands.work as work
    from miniverl.core import MissingDependencyError

    def missing(module, extra):
        raise MissingDependencyError(f"{module} is not installed", hint=f'pip install -e ".[{extra}]"')

    monkeypatch.setattr(work, "require", missing)
    for words in (["train", recipe], ["demo"], ["eval", "--run", "x"]):
        answer = run(*words)
        assert_error(answer, 1, "torch is not installed")
        assert answer[2].splitlines()[1] == 'hint: pip install -e ".[train]"'


def test_dry_run_creates_nothing_and_needs_no_torch(recipe, tmp_path):
    before = names(tmp_path)
    code, out, err = run("train", recipe, "--dry-run", "--output", tmp_path / "runs", "--run-id", "a b")
    assert code == 0 and err == "" and f"run directory: {tmp_path / 'runs' / 'a-b'}" in out
    data = run_json("train", recipe, "--dry-run", "--output", tmp_path / "runs")
    assert data["dry_run"] is True and data["run_dir"] is None and data["planned_optimizer_steps"] == 4
    assert names(tmp_path) == before


def test_dry_run_warns_of_a_taken_directory(recipe, tmp_path):
    make_run(tmp_path / "runs", "tiny")
    data = run_json("train", recipe, "--dry-run", "--output", tmp_path / "runs", "--run-id", "tiny")
    assert data["run_dir_exists"] is True
    assert "--overwrite" in run("train", recipe, "--dry-run", "--output", tmp_path / "runs", "--run-id", "tiny")[1]


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["R", "--resume", "D"],
        ["--resume", "D", "--overwrite"],
        ["--resume", "D", "--run-id", "x"],
        ["--resume", "D", "--output", "o"],
        ["--resume", "D", "--dry-run"],
    ],
)
def test_train_options_that_exclude_each_other(words, recipe, tmp_path):
    words = [recipe if w == "R" else tmp_path / "d" if w == "D" else w for w in words]
    assert_error(run("train", *words), 2)
    assert not (tmp_path / "d").exists()


def test_inspect_text_json_and_spans(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text("".join(episode(f"t{i}:v0:s{i}").to_line() + "\n" for i in range(7)))
    code, out, err = run("inspect", path, "--limit", "1")
    assert (
        code == 0
        and err == ""
        and "trajectories" in out
        and out.count("tool call    |") == 1
        and "final answer |" in out
    )
    data = run_json("inspect", path, "--spans")
    assert (
        data["summary"]["trajectories"] == 7
        and data["summary"]["rollouts"]["solved"] == 7
        and len(data["trajectories"]) == 5
    )
    assert sum(row["tokens"] for row in data["trajectories"][0]["spans"]) == data["trajectories"][0]["tokens"]
    one = run_json("inspect", path, "--trajectory", "t6:v0:s6")
    assert [t["trajectory_id"] for t in one["trajectories"]] == ["t6:v0:s6"] and one["summary"]["trajectories"] == 1
    assert_error(run("inspect", path, "--trajectory", "nope"), 2, "nope")


def test_inspect_of_damaged_and_missing_files(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text(episode("a").to_line() + "\n{\n")
    assert_error(run("inspect", path), 1, "t.jsonl")
    assert_error(run("inspect", tmp_path / "no.jsonl"), 1, "no.jsonl")
    tampered = json.loads(episode("a").to_line())
    tampered["model_generated_mask"] = [True] * len(tampered["token_ids"])
    path.write_text(json.dumps(tampered) + "\n")
    assert_error(run("inspect", path), 1, "model_generated_mask")


def test_inspect_of_an_empty_file_and_of_a_run(tmp_path):
    (tmp_path / "e.jsonl").write_text("")
    assert run_json("inspect", tmp_path / "e.jsonl")["summary"]["rollouts"]["tokens_per_solved_task"] is None
    assert run("inspect", tmp_path / "e.jsonl")[0] == 0
    assert run_json("inspect", make_run(tmp_path / "r").path)["trajectories"][0]["trajectory_id"] == "t3:v0:s7"


def test_report_writes_pages_where_asked(tmp_path):
    run_dir = make_run(tmp_path / "runs").path
    data = run_json("report", run_dir, "--out", tmp_path / "pages", "--max-trajectories", "1")
    assert data["change"] == "rose" and names(tmp_path / "pages") == [
        "report-loss.svg",
        "report-time.svg",
        "report-tokens-1.svg",
        "report.md",
        "report.svg",
    ]
    code, out, err = run("report", run_dir)
    assert code == 0 and err == "" and out.splitlines()[-1] == str(run_dir / "report.md")


def test_read_only_commands_leave_no_trace(tmp_path):
    for words in (
        ["report", tmp_path / "no"],
        ["inspect", tmp_path / "no"],
        ["cache", "stats", tmp_path / "no"],
        ["cache", "validate", tmp_path / "no"],
        ["eval", "--run", tmp_path / "no"],
    ):
        code, out, err = run(*words)
        assert code in (1, 2) and out == "" and len(err.splitlines()) == 2, words
    assert names(tmp_path) == [], "a reader creates no lock folder beside a run that does not exist"
    run_dir = make_run(tmp_path / "runs").path
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    for words in (["inspect", run_dir], ["report", run_dir, "--out", tmp_path / "out"], ["cache", "validate", run_dir]):
        run(*words)
    after = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file() and "out" not in p.parts}
    assert after == before and not list(tmp_path.rglob(".miniverl-locks"))


def test_doctor_json_has_checks_and_verdict(tmp_path):
    data = run_json("doctor", "--output", tmp_path / "not" / "there")
    assert {c["status"] for c in data["checks"]} <= {"ok", "warn", "missing", "fail"}
    assert data["verdict"]["core_commands"] is True and set(data["verdict"]) == {
        "core_commands",
        "cpu_training",
        "gpu_training",
        "qlora_4bit",
    }
    assert not (tmp_path / "not").exists()
    code, out, err = run("doctor", "--output", tmp_path)
    assert code == 0 and "core commands" in out and err == ""


def test_log_level_is_checked_and_not_reset(monkeypatch):
    import logging

    assert_error(run("--log-level", "loud", "doctor"), 2, "loud")
    monkeypatch.setenv("MINIVERL_LOG_LEVEL", "DEBUG")
    assert run("validate", "nowhere.yaml")[0] == 1
    assert logging.getLogger("miniverl").level == logging.DEBUG
    monkeypatch.delenv("MINIVERL_LOG_LEVEL")
    run("validate", "nowhere.yaml")


@pytest.mark.parametrize(
    "error,code,text",
    [(KeyboardInterrupt(), 1, "interrupted"), (OSError(28, "No space left on device", "x"), 1, "No space left")],
)
def test_interrupts_and_system_errors_are_two_lines(monkeypatch, recipe, error, code, text):
    from miniverl.schemas.config import RunConfig

    def fail(path):
        raise error

    monkeypatch.setattr(RunConfig, "from_yaml", fail)
    assert_error(run("validate", recipe), code, text)


def test_a_defect_keeps_its_traceback(monkeypatch, recipe):
    from miniverl.schemas.config import RunConfig

    monkeypatch.setattr(RunConfig, "from_yaml", lambda path: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run("validate", recipe)


def test_nan_never_reaches_standard_output(monkeypatch, recipe):
    import miniverl.commands.read as read

    monkeypatch.setattr(read, "plan", lambda config: {"loss": float("nan")})
    assert_error(run("validate", recipe, "--json"), 1)


def test_closed_pipe_is_quiet(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text("".join(episode(f"t{i}", system="long " * 2000).to_line() + "\n" for i in range(40)))
    code = "import sys; from miniverl.cli import main; main(['inspect', sys.argv[1], '--limit', '40'])"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait() == 1


def test_main_is_the_console_script():
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as end:
        main(["cache", "validate", "nowhere"])
    assert end.value.code == 2 and out.getvalue() == "" and len(err.getvalue().splitlines()) == 2
