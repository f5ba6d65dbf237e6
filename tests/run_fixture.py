"""A small, made-up run directory with every file that the reading commands look at."""

from __future__ import annotations

import json
from pathlib import Path

from miniverl.core import compact_json
from miniverl.schemas.trajectory import Span, Trajectory
from miniverl.store import RunDir

RECIPE = """\
schema_version: 1
run: {name: tiny, mode: opd, seed: 7}
models:
  student: {model_id: toy-student}
  teacher: {model_id: toy-teacher}
environment: {name: calculator, difficulty: easy, train_tasks: 8, eval_tasks: 4, test_tasks: 0}
train: {cycles: 2, rollouts_per_cycle: 4, gradient_accumulation_steps: 4, sft_warmup_cycles: 2}
eval: {split: eval}
"""


def episode(ident: str, *, answer: str = "7", solved: bool = True, system: str = "Use the calculator.") -> Trajectory:
    """One hand-made episode: system, user, tool call, tool result, final answer; a token is three characters."""
    pieces = [
        ("system", system, -1),
        ("user", "What is 3 + 4?", -1),
        (
            "assistant_tool_call",
            '<tool_call>\n{"arguments":{"expression":"3 + 4"},"name":"calculator"}\n</tool_call>',
            0,
        ),
        ("tool_result", '<tool_result>\n{"ok":true,"result":"7"}\n</tool_result>', 0),
        ("assistant_final", f"<final>\n{answer}\n</final>", 1),
    ]
    spans, at = [], 0
    for kind, text, turn in pieces:
        spans.append(Span(span_type=kind, start=at, end=at + max(len(text) // 3, 1), turn_id=turn, text=text))
        at = spans[-1].end
    verdict = {
        "solved": solved,
        "predicted": answer,
        "expected": "7",
        "failure_category": "solved" if solved else "wrong_answer",
    }
    return Trajectory.parse(
        {
            "trajectory_id": ident,
            "task_id": ident.split(":")[0],
            "environment": "calculator",
            "token_ids": [1] * at,
            "spans": [span.model_dump() for span in spans],
            "turns": [
                {"turn_id": 0, "tool_call": {"call_id": "0", "name": "calculator"}},
                {"turn_id": 1, "is_final": True},
            ],
            "termination_reason": "final_answer",
            "generated_token_count": sum(s.end - s.start for s in spans if s.is_model),
            "verification": verdict,
            "metadata": {"source": "policy", "split": "eval", "difficulty": "easy"},
        }
    )


def held_out(tag: str, step: int, solved: int, tasks: int = 4) -> dict:
    """An evaluation record with the fields that the report reads."""
    return {
        "phase": "eval",
        "tag": tag,
        "split": "eval",
        "tasks": tasks,
        "solved": solved,
        "success_rate": solved / tasks,
        "global_step": step,
        "avg_turns": 2.0,
        "tokens_per_solved_task": None if not solved else 120 / solved,
        "failure_categories": {"solved": solved, "wrong_answer": tasks - solved},
        "termination_reasons": {"final_answer": tasks},
    }


def cycle(phase: str, index: int, teacher: bool) -> dict:
    """A cycle record: four episodes, forty positions."""
    return {
        "phase": phase,
        "cycle": index,
        "optimizer_steps": 1,
        "student_rollouts": teacher,
        "teacher": teacher,
        "scored_positions": 40 * teacher,
        "rollouts": {"rollouts": 4, "generated_tokens": 40},
        "selection": {
            "selected_model_tokens": 40,
            "total_model_tokens": 44,
            "selected_by_span_type": {"assistant_tool_call": 30, "assistant_final": 10},
        },
    }


def make_run(folder: Path, name: str = "tiny", *, finished: bool = True) -> RunDir:
    """Write the run directory `folder/name`."""
    run = RunDir(folder / name)
    run.path.mkdir(parents=True)
    manifest = {
        "schema_version": 3,
        "run_id": name,
        "mode": "opd",
        "status": "completed" if finished else "interrupted",
        "miniverl_version": "0",
    }
    run.manifest.write_text(json.dumps(manifest))
    run.config_resolved.write_text(RECIPE)
    metrics = [
        held_out("baseline", 0, 0),
        {"phase": "sft_warmup", "step": 1, "loss": 2.0},
        {"phase": "sft_warmup", "step": 2, "loss": 1.0},
        held_out("cold-start", 2, 1),
        {"phase": "opd", "step": 3, "loss": 0.5},
        cycle("opd_cycle", 0, True),
        {"phase": "opd", "step": 4, "loss": 0.25},
        cycle("opd_cycle", 1, True),
        held_out("final", 4, 3),
    ]
    run.metrics.write_text("".join(compact_json(record) + "\n" for record in metrics))
    episodes = [episode("t1:final:v4"), episode("t2:final:v4", answer="8", solved=False)]
    run.eval_trajectories.write_text("".join(item.to_line() + "\n" for item in episodes))
    run.trajectories.write_text(episode("t3:v0:s7").to_line() + "\n")
    if finished:
        result = {
            "global_step": 4,
            "baseline_eval": metrics[0],
            "eval": metrics[-1],
            "phase_seconds": {"wall": {"rollout": 2.0, "eval": 1.0}},
        }
        run.eval.write_text(json.dumps(result))
    return run
