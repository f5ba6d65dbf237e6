"""The commands of the edit bench, as commands: exit codes, two-line errors, strict JSON, no torch where nothing is scored."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import campaign_fakes as fakes
import pytest
from sealed_campaign import write_config
from test_cli import assert_error, names, run, run_json
from test_imports import BLOCK, RUN, python

from miniverl.campaign import controller, gate, grading, manifest
from miniverl.campaign import verify as verifying
from miniverl.campaign.controls import Control
from miniverl.campaign.manifest import open_campaign
from miniverl.core import loads_strict

COMMANDS = ("fixture", "preflight", "prepare", "run", "status", "report", "regrade", "verify", "power", "gate")
AGENT = "0003-agent-suffix-01"


@pytest.fixture(scope="module")
def sealed(tmp_path_factory):
    return fakes.small(tmp_path_factory.mktemp("cli"), agent=["set 2.5"]).layout.root


@pytest.fixture
def campaign(sealed, tmp_path, monkeypatch):
    """A sealed campaign whose controller and grader are stand-ins."""
    sha = json.loads((sealed / "manifest.json").read_text())["provenance"]["package_sha256"]
    for module in (manifest, verifying):
        monkeypatch.setattr(module, "package_digest", lambda *_: sha)
    monkeypatch.setattr(controller, "backend_of", lambda *_: fakes.FakeBackend(programs={"agent": "set 2.5"}))
    stand_in(monkeypatch, fakes.FakeGrader())
    return Path(shutil.copytree(sealed, tmp_path / "campaign"))


def stand_in(monkeypatch, grader) -> None:
    class Client:
        def __init__(self, *_): ...

        def __enter__(self):
            return grader

        def __exit__(self, *_): ...

    for module in (controller, grading):
        monkeypatch.setattr(module, "GraderClient", Client)


@pytest.fixture
def config(tmp_path):
    return write_config(tmp_path / "source")


# --- what they all share ----------------------------------------------------------------------------------------------


def test_help_says_that_the_bench_is_experimental():
    code, out, err = run("campaign", "--help")
    assert code == 0 and err == "" and "Experimental" in out and "Experimental" in run("--help")[1]
    for command in COMMANDS:
        assert command in out
        code, out_one, _ = run("campaign", command, "--help")
        assert code == 0 and "--json" in out_one


@pytest.mark.parametrize("command", ["run", "status", "report", "regrade", "verify"])
def test_a_folder_that_is_no_campaign(command, tmp_path):
    for place in (tmp_path, tmp_path / "nowhere", Path(__file__)):
        assert_error(run("campaign", command, place), 1, "is not a prepared campaign")
        assert_error(run("campaign", command, place, "--json"), 1, "is not a prepared campaign")
    assert names(tmp_path) == []
    assert_error(run("campaign", command), 2, "CAMPAIGN")


@pytest.mark.parametrize("words", [("preflight",), ("prepare", "--out", "x"), ("power",)])
def test_a_configuration_that_is_none(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.json").write_text('{"format": "wsm.benchmark.v1"}')
    command, *rest = words
    assert_error(run("campaign", command, "bad.json", *rest), 1, "bad.json", "name")
    assert_error(run("campaign", command, "none.json", *rest), 1, "none.json")
    assert names(tmp_path) == ["bad.json"]


def test_reading_needs_no_torch(sealed, tmp_path):
    root, config = tmp_path / "campaign", write_config(tmp_path / "source")
    shutil.copytree(sealed, root)
    code = (BLOCK + RUN) + (
        "import os\n"
        "root, config, out = sys.argv[1:]\n"
        "real, sys.stdout = sys.stdout, open(os.devnull, 'w')\n"
        "codes = [run('campaign', '--help'), *(run('campaign', word, root) for word in ('status', 'verify', 'report')),\n"
        "         run('campaign', 'preflight', config), run('campaign', 'power', config, '--campaigns', '100', '--out', out)]\n"
        "print(codes, sorted({'torch', 'transformers', 'pandas'} & set(sys.modules)), file=real)\n"
    )
    done = python(code, root, config, tmp_path / "power.json")
    assert done.stdout.strip() == "[0, 0, 0, 0, 0, 0] []", done.stderr


# --- before the first trial -------------------------------------------------------------------------------------------


def test_preflight_tells_coverage_and_writes_nothing(config, tmp_path):
    before = names(tmp_path)
    code, out, err = run("campaign", "preflight", config)
    assert code == 0 and err == "" and "label: exploratory" in out and "does not establish statistical power" in out
    found = run_json("campaign", "preflight", config)
    assert found["label"] == "exploratory" and found["counts"]["trials"]["total"] == 9
    assert names(tmp_path) == before


def test_prepare_seals_once(config, tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "probe_environment", lambda *_: fakes.ENVIRONMENT)
    found = run_json("campaign", "prepare", config, "--out", tmp_path / "one")
    assert found["trials"] == 9 and open_campaign(tmp_path / "one").manifest_sha256 == found["manifest_sha256"]
    code, out, _ = run("campaign", "prepare", config, "--out", tmp_path / "two")
    assert code == 0 and "9 trials sealed, exploratory" in out and f"campaign run {tmp_path / 'two'}" in out
    assert_error(run("campaign", "prepare", config, "--out", tmp_path / "two"), 1, "exists already")
    assert_error(run("campaign", "prepare", config), 2, "--out")


def test_power_writes_a_record_once(config, tmp_path):
    out = tmp_path / "power.json"
    words = ("campaign", "power", config, "--campaigns", "200", "--gain", "0.3", "--out", out)
    code, text, err = run(*words)
    assert code == 0 and err == "" and "200 simulated campaigns" in text
    record = loads_strict(out.read_text())
    assert (
        record["assumptions"]["gain"] == record["assumptions"]["gain_over_script"] == 0.3 and record["campaigns"] == 200
    )
    assert_error(run(*words), 1, "cannot be written")
    assert_error(run("campaign", "power", config, "--out", tmp_path / "no" / "x.json"), 1, "cannot be written")
    assert_error(run("campaign", "power", config, "--task-sd", "-1"), 1, "task_sd")
    assert_error(run("campaign", "power", config, "--campaigns", "5"), 2, "--campaigns")
    assert run_json("campaign", "power", config, "--campaigns", "200", "--gain", "0.3") == record


def test_fixture_is_complete_and_does_not_overwrite(tmp_path):
    found = run_json("campaign", "fixture", tmp_path / "fixture")
    assert run("campaign", "preflight", found["config"])[0] == 0
    assert_error(run("campaign", "fixture", tmp_path / "fixture"), 1, "no empty folder")
    assert_error(run("campaign", "fixture", tmp_path / "third", "--seed", "-1"), 2, "--seed")


# --- running and after ------------------------------------------------------------------------------------------------


def test_a_campaign_from_run_to_verify(campaign):
    code, out, err = run("campaign", "run", campaign)
    assert code == 0 and "stand-in: 3 completed" in out and err.startswith("trials 0/3")
    status = run_json("campaign", "status", campaign)
    assert (
        status["finished"]
        and not status["stopped"]
        and [row["status"] for row in status["trials"]] == ["completed"] * 3
    )
    again = run("campaign", "run", campaign, "--json")
    assert again[0] == 0 and loads_strict(again[1]) == status, "a finished campaign has nothing to run"
    assert run_json("campaign", "regrade", campaign, "--trial", AGENT)["trials"][0]["verdict"] == "equal"
    report = run_json("campaign", "report", campaign)
    assert Path(report["report"], "report.md").is_file() and report["summary"]["statuses"]["agent"]["completed"] == 1
    code, out, _ = run("campaign", "report", campaign)
    assert code == 0 and report["report"] in out and "inconclusive (exploratory)" in out
    found = run_json("campaign", "verify", campaign)
    assert found["ok"] and {row["verdict"] for row in found["findings"]} == {"holds", "unknown"}
    assert run("campaign", "verify", campaign, "--expect", found["evidence_sha256"])[0] == 0
    assert run("campaign", "verify", campaign, "--expect", "0" * 64)[0] == 1


def test_verify_names_a_damaged_file(campaign):
    run("campaign", "run", campaign)
    path = campaign / "trials" / AGENT / "final.safetensors"
    path.write_text("2.25")
    code, out, err = run("campaign", "verify", campaign)
    assert code == 1 and err == "" and f"trials/{AGENT}/final.safetensors" in out and "does not stand" in out
    code, out, err = run("campaign", "verify", campaign, "--json")
    assert code == 1 and err == "" and not loads_strict(out)["ok"]
    assert_error(run("campaign", "report", campaign), 1, "final.safetensors")
    assert_error(run("campaign", "regrade", campaign), 1, "final.safetensors")


def test_a_regrading_that_does_not_agree(campaign, monkeypatch):
    run("campaign", "run", campaign)
    stand_in(monkeypatch, fakes.FakeGrader(offset=0.25))
    code, out, err = run("campaign", "regrade", campaign)
    assert code == 1 and err == "" and "mismatch" in out and "private.equal" in out
    stand_in(monkeypatch, fakes.FakeGrader(offset=0.25, environment={**fakes.ENVIRONMENT, "threads": 2}))
    code, out, _ = run("campaign", "regrade", campaign)
    assert code == 1 and "environment differs" in out and "threads: 1 before, 2 now" in out
    stand_in(monkeypatch, fakes.FakeGrader())
    assert run("campaign", "regrade", campaign)[0] == 0 and run("campaign", "verify", campaign)[0] == 1
    assert_error(run("campaign", "regrade", campaign, "--trial", "none"), 1, "no trial")


def test_a_campaign_that_stops(campaign, monkeypatch):
    stand_in(monkeypatch, fakes.FakeGrader(drift=1.0))
    code, out, _ = run("campaign", "run", campaign)
    assert code == 1 and "2 not run" in out and "stopped" in out
    assert run("campaign", "status", campaign)[0] == 0


def test_an_interrupt_is_two_lines(campaign, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(fakes.FakeEditor, "python", interrupted)
    code, out, err = run("campaign", "run", campaign)
    lines = err.splitlines()[-2:]
    assert code == 1 and out == "" and lines[0] == "error: interrupted" and "outcome_unknown" in lines[1]
    monkeypatch.undo()
    row = run_json("campaign", "status", campaign)["trials"][1]
    assert row["status"] == "outcome_unknown" and row["evidence"] == "dispatch"


def test_a_damaged_campaign_is_refused_by_all(campaign):
    path = campaign / "manifest.json"
    path.write_text(path.read_text().replace("stand-in", "stand_in"))
    for command in ("run", "status", "report", "regrade"):
        assert_error(run("campaign", command, campaign), 1, "manifest.json")
    assert run("campaign", "verify", campaign)[0] == 1


def test_the_gate_tells_by_its_exit_code(monkeypatch, tmp_path):
    calls = []

    def play(folder, *, on_progress, **options):
        calls.append({"folder": folder, **options})
        on_progress(controller.TrialRow("0001-x", "agent", "f", "t", 1, "completed", "graded", "outcome"))
        came = "other" if options["quick"] else "known"
        return gate.GateReport(2, (gate.judge("tape", Control("control", "try", "known"), came, 2),))

    monkeypatch.setattr(gate, "run_control_tapes", play)
    code, out, err = run("campaign", "gate", "--at-most", "2", "--keep", tmp_path / "kept")
    assert code == 0 and "GATE GREEN" in out and "as expected" in out and "trial 0001-x" in err
    code, out, _ = run("campaign", "gate", "--quick", "--json")
    assert code == 1 and loads_strict(out)["green"] is False
    code, out, _ = run("campaign", "gate", "--quick")
    assert code == 1 and "GATE RED" in out and "unexpected: tape, control: known must come" in out
    assert calls[0] == {"folder": tmp_path / "kept", "quick": False, "at_most": 2} and calls[1]["folder"] is None
    assert_error(run("campaign", "gate", "--at-most", "4"), 2, "--at-most")


@pytest.mark.slow
def test_the_example_from_the_command_line(tmp_path):
    code = RUN + (
        "import sys\n"
        "folder = sys.argv[1]\n"
        "words = [('fixture', folder + '/f'), ('prepare', folder + '/f/config.json', '--out', folder + '/c'), ('run', folder + '/c'),\n"
        "         ('regrade', folder + '/c'), ('report', folder + '/c'), ('verify', folder + '/c')]\n"
        "print([run('campaign', *w) for w in words], file=sys.stderr)\n"
    )
    done = python(code, tmp_path)
    assert done.stderr.strip().endswith("[0, 0, 0, 0, 0, 0]"), done.stdout + done.stderr
    assert "every check that could be made holds" in done.stdout and "next: miniverl campaign prepare" in done.stdout
