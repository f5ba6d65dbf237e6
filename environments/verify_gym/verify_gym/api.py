"""What a program needs, in one place.

Tasks: `train`, `validation`, `heldout`, `find_task`, `prompt`. Grading: `grade`, `reward_fn`, `group_report`. Evidence:
`explain`, `check_certificate`. Trust: `run_gate`, `require_green`, `run_conformance`, `check_registry`. Reference points:
`POLICIES`, `score_card`. Records: `RolloutLog`, `recheck`.
"""

from __future__ import annotations

from .answer import FAMILIES, VERDICTS, Answer, Grade, Malformed, Task, grade, parse_answer
from .certificate import CertificateError, check_certificate, explain
from .conformance import ConformanceReport, conformance_lines, run_conformance
from .curriculum import check_registry, curriculum, curriculum_sha256, find_task, heldout, pool_task, train, validation
from .exact import RowError, VerifyGymError
from .families import prompt, read_prompt
from .gate import GateError, GateReport, require_green, run_gate
from .policies import POLICIES, run_policy, score_card, score_table
from .rewards import GroupReport, group_report, reward_fn, reward_of, training_rows
from .rollouts import Header, RolloutLog, Sample, read_log, recheck, require_confirmed

__all__ = [
    "FAMILIES",
    "POLICIES",
    "VERDICTS",
    "Answer",
    "CertificateError",
    "ConformanceReport",
    "GateError",
    "GateReport",
    "Grade",
    "GroupReport",
    "Header",
    "Malformed",
    "RolloutLog",
    "RowError",
    "Sample",
    "Task",
    "VerifyGymError",
    "check_certificate",
    "check_registry",
    "conformance_lines",
    "curriculum",
    "curriculum_sha256",
    "explain",
    "find_task",
    "grade",
    "group_report",
    "heldout",
    "parse_answer",
    "pool_task",
    "prompt",
    "read_log",
    "read_prompt",
    "recheck",
    "require_confirmed",
    "require_green",
    "reward_fn",
    "reward_of",
    "run_conformance",
    "run_gate",
    "run_policy",
    "score_card",
    "score_table",
    "train",
    "training_rows",
    "validation",
]
