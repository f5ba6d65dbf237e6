"""The example campaign: complete, the same bytes again, and an agent that does improve the model."""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path

import pytest

from miniverl.campaign.config import CampaignConfig, load_config
from miniverl.campaign.config_sections import Policy
from miniverl.campaign.fixture import write_fixture
from miniverl.campaign.preflight import preflight, read_inputs
from miniverl.core import StoreError
from miniverl.schemas.config_sections import field_rows
from miniverl.schemas.yamlio import dump_yaml
from miniverl.wsm.model import WeightModel
from miniverl.wsm.program import execute_program


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_fixture(tmp_path_factory.mktemp("fixture") / "new" / "demo").parent


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_same_seed_writes_the_same_bytes_and_another_seed_another_model(folder, tmp_path):
    again, other = write_fixture(tmp_path / "a").parent, write_fixture(tmp_path / "b", seed=1).parent
    assert contents(again) == contents(folder)
    changed = {name for name, data in contents(other).items() if data != contents(folder)[name]}
    assert changed == {"model/model.safetensors", "actions.json", "config.json"}


def test_its_files_are_for_their_owner_under_any_umask(tmp_path):
    before = os.umask(0)
    try:
        made = write_fixture(tmp_path / "demo").parent
    finally:
        os.umask(before)
    assert stat.S_IMODE(made.stat().st_mode) == stat.S_IMODE((made / "private").stat().st_mode) == 0o700
    ours = [path for path in made.rglob("*") if path.is_file() and path.parent.name != "model"]
    assert len(ours) == 10 and {stat.S_IMODE(path.stat().st_mode) for path in ours} == {0o600}


def test_every_field_of_the_format_is_there(folder):
    data = json.loads((folder / "config.json").read_text())

    def has(data: object, path: str) -> bool:
        for part in path.split("."):
            data = data[0] if isinstance(data, list) else data
            if not isinstance(data, dict) or part not in data:
                return False
            data = data[part]
        return True

    missing = [row.path for row in field_rows(CampaignConfig) if not has(data, row.path)]
    optional = {
        "runtime.policy",
        "runtime.require_isolation",
        "thresholds",
        *(f"runtime.policy.{n}" for n in Policy.model_fields),
    }
    assert set(missing) <= optional and data["thresholds"]


def test_preflight_accepts_it_from_anywhere_as_json_and_as_yaml(folder, tmp_path, monkeypatch):
    moved = Path(shutil.copytree(folder, tmp_path / "moved"))
    (moved / "config.yaml").write_text(dump_yaml(json.loads((moved / "config.json").read_text())))
    monkeypatch.chdir(tmp_path)
    first, second = (preflight(load_config(Path("moved", name))) for name in ("config.json", "config.yaml"))
    assert first.to_record() == second.to_record()
    assert first.label == "exploratory" and first.counts["trials"] == {
        "unchanged": 2,
        "scripted": 3,
        "agent": 4,
        "total": 9,
    }
    assert 0 <= first.isolation["level"] <= 3 and first.warnings == second.warnings and len(first.warnings) == 1


def test_nothing_is_written_into_a_folder_that_holds_something(folder, tmp_path):
    before = contents(folder)
    with pytest.raises(StoreError, match="no empty folder"):
        write_fixture(folder)
    assert contents(folder) == before
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="no empty folder"):
        write_fixture(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    assert write_fixture(tmp_path / "empty", grader_python="python3").exists()
    assert load_config(tmp_path / "empty" / "config.json").runtime.grader_python == "python3"


def losses(config: CampaignConfig, task, sources: list[str]) -> list[float]:
    inputs = read_inputs(config)
    model = WeightModel.load(config.resolved(config.model.path))
    for source in sources:
        assert execute_program(model, source).ok
    return [
        model.evaluate(cases).equal for cases in (inputs.public[task.id], inputs.private[task.id], inputs.regression)
    ]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_agent_beats_both_baselines_on_cases_that_it_never_saw(folder, tmp_path, seed):
    config = load_config(folder / "config.json" if seed == 0 else write_fixture(tmp_path / "x", seed=seed))
    tape = read_inputs(config).tape
    for task in config.tasks:
        unchanged, scripted = losses(config, task, []), losses(config, task, [read_inputs(config).scripts[task.id]])
        for run in tape[task.id]:
            assert [action["kind"] for action in run if action["kind"] != "python"] == [
                "evaluate",
                "evaluate",
                "submit",
            ]
            agent = losses(config, task, [action["source"] for action in run if action["kind"] == "python"])
            for kind in (0, 1):
                assert agent[kind] + 0.5 < scripted[kind] < unchanged[kind], (task.id, kind, agent, scripted, unchanged)
            assert agent[2] - unchanged[2] <= config.thresholds.regression


def test_the_declared_stochastic_script_is_one(folder):
    config = load_config(folder / "config.json")
    cycle = next(task for task in config.tasks if task.scripted_stochastic)
    source = read_inputs(config).scripts[cycle.id]
    assert losses(config, cycle, [source]) != losses(config, cycle, [source])
