"""Every held-out answer is decided twice, and one difference refuses every number."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from vg_second import PROJECT, crosscheck, make_conformance, needs_node, scorecard

FLIPS = {
    "verdict": 'out.progress === 4 ? "REFUTED" : out.verdict',
    "lo": 'out.progress === 4 ? "REFUTED" : out.lo',
    "hi": 'out.progress === 4 ? "REFUTED" : out.hi',
    "decimals": "out.progress === 4 ? out.decimals + 1 : out.decimals",
    "progress": "out.progress === 4 ? 5 : out.progress",
}


@pytest.fixture
def differing(tmp_path):
    """A second decider that is wrong in one part of its output where an answer earned exactly four decimals."""

    def program(part):
        text = (PROJECT / "check.js").read_text(encoding="utf-8")
        line = "return { verdict, lo, hi, decimals: d, progress };"
        assert text.count(line) == 1
        planted = (
            f"const out = {{ verdict, lo, hi, decimals: d, progress }}; return {{ ...out, {part}: {FLIPS[part]} }};"
        )
        (tmp_path / "other.js").write_text(text.replace(line, planted), encoding="utf-8")
        return str(tmp_path / "other.js")

    return program


@needs_node
def test_the_deciders_agree_on_every_held_out_answer(capsys):
    assert crosscheck.main([]) == 0
    said = capsys.readouterr().out
    found = crosscheck.crosscheck()
    assert found.policies == 600 and found.controls > 2480 and not found.differences
    assert said == found.line() + "\n"


@needs_node
@pytest.mark.slow
def test_the_deciders_agree_with_whole_powers(capsys):
    assert crosscheck.main(["--exact"]) == 0


@needs_node
@pytest.mark.parametrize("part", FLIPS)
def test_a_planted_difference_refuses_the_crosscheck(differing, part, capsys):
    assert crosscheck.main(["--decider", differing(part)]) == 1
    shown = capsys.readouterr()
    lines = shown.err.splitlines()
    assert not shown.out and len(lines) == 2 and "no number is reported" in lines[0]
    assert "the package says" in lines[1]


@needs_node
def test_a_planted_difference_refuses_the_score_card_and_leaves_the_old_one(differing, tmp_path, capsys):
    card = tmp_path / "card.json"
    assert scorecard.main(["--fast", "--decider", differing("progress"), "--out", str(card)]) == 1
    assert not card.exists() and not capsys.readouterr().out
    card.write_text("old")
    assert scorecard.main(["--fast", "--decider", differing("lo"), "--out", str(card)]) == 1
    assert card.read_text() == "old"


@needs_node
def test_the_committed_score_card_comes_out_again(tmp_path, capsys, monkeypatch):
    card = tmp_path / "card.json"
    assert scorecard.main(["--fast", "--out", str(card)]) == 0
    shown = capsys.readouterr().out
    assert "GATE GREEN" in shown and "0 differences" in shown and "| `cf`" in shown
    assert card.read_bytes() == scorecard.CARD.read_bytes()

    made = json.loads(card.read_text(encoding="utf-8"))
    monkeypatch.setattr(scorecard, "crosscheck", lambda **how: crosscheck.Crosscheck(600, 2530, []))
    monkeypatch.setattr(scorecard, "make_card", lambda found: made)
    check = ["--fast", "--check", "--out", str(card)]
    assert scorecard.main(check) == 0
    card.write_text(card.read_text(encoding="utf-8").replace("120", "121", 1), encoding="utf-8")
    changed = card.read_bytes()
    assert scorecard.main(check) == 1 and card.read_bytes() == changed
    assert scorecard.main([*check[:-1], str(tmp_path / "none.json")]) == 1 and not (tmp_path / "none.json").exists()


def test_the_card_has_the_shape_of_the_policies():
    card = json.loads(scorecard.CARD.read_text(encoding="utf-8"))
    rows = card["policies"]
    assert rows["never"]["malformed"] == rows["echo"]["certified"] == rows["bisect"]["certified"] == 120
    assert rows["cf"]["certified"] == 120 and rows["cf"]["mean"] > 0.95
    assert rows["never"]["mean"] == rows["echo"]["mean"] == 0
    assert rows["float"]["mean"] > rows["bisect"]["mean"] and rows["float"]["refuted"] > 12
    assert all(row["refused"] == 0 for row in rows.values())
    assert card["decided_twice"]["differences"] == 0


@needs_node
def test_a_card_that_cannot_be_written_is_two_lines(tmp_path, capsys):
    assert scorecard.main(["--fast", "--out", str(tmp_path / "none" / "card.json")]) == 1
    shown = capsys.readouterr()
    assert not shown.out and len(shown.err.splitlines()) == 2


@needs_node
def test_a_red_gate_refuses_the_score_card(monkeypatch, tmp_path, capsys):
    from miniverl.verify_gym.gate import GateError

    def red():
        raise GateError("GATE RED", "the first finding")

    monkeypatch.setattr(scorecard, "require_green", red)
    assert scorecard.main(["--fast", "--out", str(tmp_path / "card.json")]) == 1
    assert "GATE RED" in capsys.readouterr().err and not (tmp_path / "card.json").exists()


@pytest.mark.parametrize("script", ["crosscheck.py", "scorecard.py"])
def test_without_node_the_scripts_say_so_and_stop(script, tmp_path):
    environment = {"PATH": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    out = ["--out", str(tmp_path / "card.json")] if script == "scorecard.py" else []
    done = subprocess.run(
        [sys.executable, str(PROJECT / script), *out], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1 and not done.stdout and not list(tmp_path.iterdir())
    assert "Node.js" in done.stderr and len(done.stderr.splitlines()) == 2


def test_usage_is_status_two(capsys):
    for program in (crosscheck, scorecard, make_conformance):
        with pytest.raises(SystemExit) as caught:
            program.main(["--nonsense"])
        assert caught.value.code == 2
    capsys.readouterr()


def test_the_suite_is_written_as_committed(tmp_path, capsys):
    assert make_conformance.main(["--out", str(tmp_path / "suite.jsonl")]) == 0
    assert (tmp_path / "suite.jsonl").read_bytes() == make_conformance.SUITE.read_bytes()
    capsys.readouterr()
