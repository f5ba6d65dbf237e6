"""What a program needs, in one place: tasks, prompts, grades, the gate, policies and rollout logs."""

from __future__ import annotations

from .answer import FAMILIES, VERDICTS, Answer, Grade, Malformed, Task, grade, parse_answer
from .curriculum import curriculum, curriculum_sha256, find_task, heldout, pool_task, train, validation
from .exact import RowError, VerifyGymError
from .families import prompt, read_prompt
from .gate import GateError, GateReport, require_green, run_gate
from .policies import POLICIES, run_policy, score_card, score_table
from .rollouts import RolloutLog, read_log, recheck

__all__ = [
    "FAMILIES",
    "POLICIES",
    "VERDICTS",
    "Answer",
    "GateError",
    "GateReport",
    "Grade",
    "Malformed",
    "RolloutLog",
    "RowError",
    "Task",
    "VerifyGymError",
    "curriculum",
    "curriculum_sha256",
    "find_task",
    "grade",
    "heldout",
    "parse_answer",
    "pool_task",
    "prompt",
    "read_log",
    "read_prompt",
    "recheck",
    "require_green",
    "run_gate",
    "run_policy",
    "score_card",
    "score_table",
    "train",
    "validation",
]
