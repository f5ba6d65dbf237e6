"""What is published leads back to run directories: an edited file or record is refused, nothing of the machine survives."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from benchmark_tiny import OPD, SFT, ZERO, tiny_benchmark
from training_helpers import tree

from miniverl.core import DataError, StoreError, UsageError, canonical_json, digest, sha256_file
from miniverl.evaluation.benchmark import run_benchmark
from miniverl.evaluation.publish import publish, redacted_result, verified_result, with_driver
from miniverl.evaluation.schema import BenchmarkResult
from miniverl.portable import REDACTED
from miniverl.schemas.config import RunConfig

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "publish_benchmark_artifacts.py"
SECRET = "hf_CanaryCanaryCanary0123456789"
HOME = "/home/canaryuser/canaryproject"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A finished benchmark whose recipe, notes and command name a home directory and a token."""
    folder = tmp_path_factory.mktemp("made") / "canaryfolder"
    base = tiny_benchmark().base_mapping()
    base["run"] = {**base["run"], "output_dir": f"{HOME}/runs"}
    spec = tiny_benchmark(base=base, arms=[ZERO, OPD], description=f"see {HOME}/notes.txt")
    words = [f"{HOME}/.venv/bin/miniverl", "benchmark", r"C:\Users\canaryuser\b.yaml", "--output", str(folder)]
    run_benchmark(spec, output=folder, notes=f"token={SECRET} in {HOME}", invocation=words)
    return folder


@pytest.fixture
def bench(made, tmp_path) -> Path:
    """A copy that a test may change; the path of its JSON file."""
    shutil.copytree(made, tmp_path / "bench")
    return tmp_path / "bench" / "tiny.json"


def place(folder: Path, **more) -> dict:
    return {"results_dir": folder / "results", "svg": folder / "docs" / "tiny.svg", **more}


def edit(path: Path, change) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(canonical_json(data))


def refused(bench: Path, tmp_path: Path, kind=DataError) -> str:
    with pytest.raises(kind) as told:
        publish(bench, **place(tmp_path / "out"))
    assert told.value.hint and not (tmp_path / "out").exists(), "nothing was written"
    return told.value.message


def test_three_files_and_nothing_else_changes(bench, tmp_path):
    before = tree(bench.parent)
    told = publish(bench, **place(tmp_path / "a"))
    assert tree(bench.parent) == before
    assert sorted(tree(tmp_path / "a")) == ["docs/tiny.svg", "results/tiny.json", "results/tiny.md"]
    assert told["sha256"] == sha256_file(told["json"]) and told["sha256"][:16] in Path(told["svg"]).read_text()
    result = BenchmarkResult.read(told["json"])
    rows = [dict(n.attrib) for n in ElementTree.parse(told["svg"]).iter() if "data-arm" in n.attrib]
    assert [row["data-arm"] for row in rows] == ["start", "opd"] == [row["name"] for row in result.aggregate()]
    assert [float(row["data-success-mean"]) for row in rows] == [r["success_rate_mean"] for r in result.aggregate()]
    assert "kept by every arm" in Path(told["markdown"]).read_text()


def test_publishing_again_gives_the_same_bytes_and_touches_nothing(bench, tmp_path):
    publish(bench, **place(tmp_path / "a"))
    first = tree(tmp_path / "a")
    publish(bench, **place(tmp_path / "a"))
    publish(bench, **place(tmp_path / "b"))
    assert first == tree(tmp_path / "a") == tree(tmp_path / "b")


def test_no_path_no_user_and_no_token_survives(bench, tmp_path):
    assert "canaryuser" in bench.read_text() and SECRET in bench.read_text()
    publish(bench, **place(tmp_path / "a"))
    for name, data in tree(tmp_path / "a").items():
        text = data.decode()
        for word in ("canaryuser", "Canary", "canaryproject/", "/home", "Users", str(tmp_path), "/tmp/", os.getcwd()):
            assert word not in text, f"{word} in {name}"
        assert "<local>" in text or "&lt;local&gt;" in text or name.endswith(".svg")


def test_digests_keep_their_meaning_after_redaction(bench, tmp_path):
    told = publish(bench, **place(tmp_path / "a"))
    given, public = json.loads(bench.read_text()), json.loads(Path(told["json"]).read_text())
    assert public["common_declared_config"] != given["common_declared_config"], "the output folder was a home directory"
    assert public["common_declared_config"] == public["common_resolved_config"]
    assert digest(public["common_declared_config"]) == public["common_declared_config_digest"]
    assert public["common_declared_config_digest"] == public["common_resolved_config_digest"]
    assert public["controlled"]["digest"] == public["common_declared_config_digest"]
    assert digest(public["cold_start"]["resolved_config"]) == public["cold_start"]["resolved_config_digest"]
    for arm in public["arms"]:
        run = bench.parent / arm["run_dir"]
        declared, resolved = (RunConfig.from_yaml(run / f"config.{kind}.yaml") for kind in ("original", "resolved"))
        assert arm["declared_config_digest"] == arm["resolved_config_digest"] == declared.digest
        assert arm["runtime_resolved_config_digest"] == resolved.digest != declared.digest
    assert [arm["measurement_status"] for arm in public["arms"]] == [arm["measurement_status"] for arm in given["arms"]]


def test_redaction_applied_twice_changes_nothing_more(bench):
    once = redacted_result(BenchmarkResult.read(bench))
    assert redacted_result(once) == once


def test_names_of_ours_are_no_secrets_and_secrets_in_differences_are(bench):
    result = BenchmarkResult.read(bench)
    row = {"path": "environment.params.api_key", "common": None, "arm": "plainlooking", "change": "added"}
    path = {"path": "run.output_dir", "common": "/home/someone/x", "arm": "/srv/y", "change": "changed"}
    arm = result.arms[0].model_copy(update={"structured_diff": [row, path]})
    controlled = {**result.controlled, "arms_differ_in": {"token-budget": ["loss.top_k"]}}
    clean = redacted_result(result.model_copy(update={"arms": [arm], "controlled": controlled}))
    found = clean.arms[0].structured_diff
    assert found is not None and found[0]["arm"] == REDACTED and found[1]["common"] == "<local>/x"
    assert clean.controlled["arms_differ_in"] == {"token-budget": ["loss.top_k"]}
    assert REDACTED not in str(clean.arms[0].measurement_status)


def set_rate(data):
    arm = data["arms"][1]
    arm["solved"] = arm["tasks"]
    arm["success_rate"] = arm["strict_task_success_rate"] = 1.0


CHANGES = {
    "success": (set_rate, "arm 'opd', seed 5: solved is 2 in the result and 0 in tiny-opd-s5; success_rate, strict"),
    "seconds": (lambda d: d["arms"][1].update(train_seconds=0.001), "train_seconds is 0.001"),
    "lenient": (lambda d: d["arms"][1].update(lenient_diagnostic_success_rate=1.0), "lenient_diagnostic_success_rate"),
    "row": (lambda d: d["arms"].pop(0), "arms of the result is not what plan.json says"),
    "notes": (lambda d: d.update(notes="better"), "notes of the result"),
    "date": (lambda d: d.update(created_at="2020-01-01T00:00:00Z"), "created_at of the result"),
    "hardware": (lambda d: d["hardware"].update(cpu_count=4096), "hardware of the result"),
    "declared seeds": (lambda d: d["controlled"].update(declared_seeds=[5, 6]), "controlled.declared_seeds"),
    "budget": (lambda d: d["controlled"]["budget"].update(violations=["x"]), "controlled.budget.violations"),
    "differences": (lambda d: d["controlled"]["arms_differ_in"].update(start=[]), "controlled.arms_differ_in"),
    "cold start": (
        lambda d: d["cold_start"]["checkpoints"][0].update(checkpoint_digest="0" * 64),
        "cold start of seed 5",
    ),
    "common": (lambda d: d["common_declared_config"]["loss"].update(top_k=3), "alias"),
    "both common": (
        lambda d: [d[f"common_{k}_config"]["loss"].update(top_k=3) for k in ("declared", "resolved")],
        "common_declared_config_digest",
    ),
    "description of an arm": (lambda d: d["arms"][0].update(declared_config_digest=None), "declared_config_digest"),
    "teachers": (lambda d: d.update(teacher_preparation=[]), "teacher_preparation"),
    "format": (lambda d: d.update(schema_version=1), "format 1"),
    "name": (lambda d: d.update(name="../x"), "cannot name a file"),
}


@pytest.mark.parametrize("change, told", CHANGES.values(), ids=CHANGES)
def test_an_edited_result_is_refused(bench, tmp_path, change, told):
    edit(bench, change)
    assert told in refused(bench, tmp_path)


def overwrite_line(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


RUN = "tiny-opd-s5"
RECORDS = {
    "evaluation": (f"{RUN}/eval.benchmark-opd.json", '"solved": 0', '"solved": 2'),
    "episodes": (f"{RUN}/eval_trajectories.jsonl", '"assistant_turns":2', '"assistant_turns":1'),
    "metrics": (f"{RUN}/metrics.jsonl", '"selected_model_tokens":24', '"selected_model_tokens":25'),
    "declared recipe": (f"{RUN}/config.original.yaml", "top_k: 4", "top_k: 5"),
    "resolved recipe": (f"{RUN}/config.resolved.yaml", "top_k: 4", "top_k: 5"),
    "result": (f"{RUN}/eval.json", '\n  "global_step": 2', '\n  "global_step": 3'),
    "cold load": (f"{RUN}/events.jsonl", "benchmark_cold_start_loaded", "checkpoint_loaded"),
    "cold recipe": ("tiny-coldstart-s5/config.original.yaml", "seed: 5", "seed: 6"),
    "plan": ("tiny.benchmark/plan.json", '"notes": "token', '"notes": "taken'),
}


@pytest.mark.parametrize("name, old, new", RECORDS.values(), ids=RECORDS)
def test_an_edited_record_is_refused(bench, tmp_path, name, old, new):
    overwrite_line(bench.parent / name, old, new)
    refused(bench, tmp_path)


@pytest.mark.parametrize(
    "name", ["tiny.benchmark/plan.json", f"{RUN}/eval.benchmark-opd.json", f"{RUN}/eval.json", f"{RUN}/manifest.json"]
)
@pytest.mark.parametrize("text", ["[]", '{"question": {"seeds": 3}, "final_checkpoint": {}}'])
def test_a_record_of_another_form_is_refused(bench, tmp_path, name, text):
    (bench.parent / name).write_text(text)
    refused(bench, tmp_path)


@pytest.mark.parametrize("run", [RUN, "tiny-coldstart-s5"])
def test_other_weights_are_noticed(bench, tmp_path, run):
    weights = bench.parent / run / "checkpoints" / "final" / "adapter.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert "are not the weights" in refused(bench, tmp_path)


def test_missing_directories_are_all_named(bench, tmp_path):
    for name in ("tiny-coldstart-s5", "tiny-opd-s5"):
        shutil.rmtree(bench.parent / name)
    told = refused(bench, tmp_path, StoreError)
    assert "'tiny-coldstart-s5', 'tiny-opd-s5' beside" in told
    shutil.move(bench, tmp_path / "alone.json")
    assert "no run directory" in refused(tmp_path / "alone.json", tmp_path, StoreError)


def test_a_plan_and_a_file_are_needed(bench, tmp_path):
    (bench.parent / "tiny.benchmark" / "plan.json").unlink()
    assert "plan.json is missing" in refused(bench, tmp_path, StoreError)
    refused(tmp_path / "nothing.json", tmp_path)
    refused(ROOT / "benchmarks" / "results" / "published" / "cpu-toy-calc-matched.json", tmp_path)


def test_another_file_is_not_replaced_unless_asked(bench, tmp_path):
    where = place(tmp_path / "out")
    where["results_dir"].mkdir(parents=True)
    (where["results_dir"] / "tiny.md").write_text("mine")
    before = tree(tmp_path / "out")
    with pytest.raises(StoreError, match="holds something else"):
        publish(bench, **where)
    assert tree(tmp_path / "out") == before
    publish(bench, **where, overwrite=True)
    assert len(tree(tmp_path / "out")) == 3


def test_places_that_cannot_be_written(bench, tmp_path):
    (tmp_path / "file").write_text("x")
    before = sorted(p.name for p in tmp_path.iterdir())
    with pytest.raises(StoreError):
        publish(bench, results_dir=tmp_path / "file", svg=tmp_path / "a.svg")
    with pytest.raises(StoreError):
        publish(bench, results_dir=tmp_path / "r", svg=tmp_path)
    with pytest.raises(UsageError):
        publish(bench, results_dir=tmp_path / "r", svg=tmp_path / "r" / "tiny.md")
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_a_limited_benchmark_without_cold_start_can_be_published(tmp_path):
    limit = {"budget_axis": "selected_training_tokens", "budget": 30, "cold_start_cycles": 0}
    run_benchmark(tiny_benchmark(arms=[SFT], **limit), output=tmp_path / "bench")
    told = publish(tmp_path / "bench" / "tiny.json", **place(tmp_path / "out"))
    page = Path(told["markdown"]).read_text()
    assert "budget: `selected_training_tokens` up to 30, kept by every arm" in page
    assert "every arm starts from freshly initialised weights" in page and "share no trained starting point" in page


def test_a_driver_version_belongs_to_a_gpu(bench):
    result = verified_result(bench)
    assert with_driver(result, None) is result
    with pytest.raises(UsageError, match="without a GPU"):
        with_driver(result.model_copy(update={"hardware": {"gpu": {"available": False}}}), "596.49")
    gpu = result.model_copy(update={"hardware": {"gpu": {"name": "A GPU", "driver_version": None}}})
    assert with_driver(gpu, "596.49").hardware["gpu"]["driver_version"] == "596.49"
    with pytest.raises(UsageError, match="records driver 1.0"):
        with_driver(result.model_copy(update={"hardware": {"gpu": {"name": "x", "driver_version": "1.0"}}}), "2.0")


def script(*words: object) -> int:
    """Exit code of the script, run in this process."""
    spec = importlib.util.spec_from_file_location("publish_script", SCRIPT)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    try:
        return loaded.main([str(word) for word in words])
    except SystemExit as end:
        return int(end.code or 0)


def test_the_script_prints_paths_and_sha_and_never_a_traceback(bench, tmp_path, capsys):
    options = ("--results-dir", tmp_path / "r", "--svg", tmp_path / "p.svg")
    assert script(bench, *options) == 0
    told = capsys.readouterr()
    paths = [str(tmp_path / "r" / "tiny.json"), str(tmp_path / "r" / "tiny.md"), str(tmp_path / "p.svg")]
    assert told.err == "" and told.out.split()[1::2] == [*paths, sha256_file(paths[0])]
    edit(bench, set_rate)
    for words, code in (((bench, *options), 1), ((bench,), 2), ((bench, *options, "--driver-version"), 2)):
        assert script(*words) == code
        told = capsys.readouterr()
        lines = told.err.splitlines()
        assert told.out == "" and [line.partition(":")[0] for line in lines] == ["error", "hint"], told.err


def test_publishing_needs_no_torch(bench, tmp_path):
    code = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('torch', 'safetensors', 'transformers', 'ray'):\n"
        "            raise ModuleNotFoundError(name, name=name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "from miniverl.evaluation.publish import publish\n"
        "publish(sys.argv[1], results_dir=sys.argv[2], svg=sys.argv[2] + '/x.svg')"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code, str(bench), str(tmp_path / "o")], capture_output=True, env=env)
    assert done.returncode == 0, done.stderr.decode()
    assert len(tree(tmp_path / "o")) == 3


def test_the_name_of_an_arm_is_no_secret(tmp_path):
    arms = [{"name": "secret-sauce", "overrides": {"run": {"mode": "sft"}}}, {"name": "token-diet"}]
    run_benchmark(tiny_benchmark(arms=arms, cold_start_cycles=0), output=tmp_path / "bench")
    told = publish(tmp_path / "bench" / "tiny.json", **place(tmp_path / "out"))
    shown = json.loads(Path(told["json"]).read_text())
    assert shown["controlled"]["arms_differ_in"] == {"secret-sauce": ["run.mode"], "token-diet": []}
    assert shown["controlled"]["budget"]["measured"] == {"secret-sauce": {"5": 2}, "token-diet": {"5": 2}}
    assert shown["arms"][0]["measurement_status"]["protocol_token_accuracy"].startswith("not_applicable")
