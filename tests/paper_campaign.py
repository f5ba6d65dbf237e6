"""A sealed campaign whose trials are records written by hand: all of the evidence, none of the models.

`worked` plays the worked example of chapter 89; `play` writes any scores; `DAMAGES` are ways to spoil one completed trial.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sealed_campaign import sealed, task

from miniverl.campaign.budget import Ledger
from miniverl.campaign.manifest import Campaign, TrialSpec
from miniverl.campaign.records import Layout, Schema, outcome_body, publish, record_sha256, write_record
from miniverl.core import canonical_json
from miniverl.wsm.scoring import CaseScore, Score

FINGERPRINT = {"threads": 1, "cpu_capability": "NONE", "attention": "sdpa", "compute_dtype": "float32", "batch_size": 1}
CANARY_OUTPUT = "canary worker output"
CANARY_METADATA = "canary safetensors metadata"
CANARY_ERROR = "canary traceback"

UNCHANGED = {"a1": [3.0], "a2": [2.0], "b1": [4.0], "b2": [5.0]}
SCRIPTED: dict[str, list[float | None]] = {"a1": [2.8], "a2": [2.0], "b1": [3.9, 3.7], "b2": [4.8, None]}
AGENT: dict[str, list[float | None]] = {"a1": [2.5, 2.3], "a2": [1.9, None], "b1": [3.4, 3.6], "b2": [4.0, 4.4]}
REGRESSION = {"a1": [1.52, 1.50], "a2": [1.51, 1.52], "b1": [1.49, 1.53], "b2": [1.56, 1.54]}
THRESHOLDS = {"improvement": 0.15, "regression": 0.05, "numeric_tolerance": 0.0}
SUCCESS_THRESHOLDS = {"improvement": 0.3, "regression": 0.05, "numeric_tolerance": 0.0}


class Paper(Campaign):
    """A campaign with a short way to its trials."""

    def trial_id(self, short: str) -> str:
        return next(spec.id for spec in self.schedule if spec.id.endswith(short))


def paper(campaign: Campaign) -> Paper:
    return Paper(campaign.layout, campaign.manifest, campaign.restricted, campaign.seal)


def design(folder: Path, **changes: Any) -> Paper:
    """Prepare and open the design of the worked example."""
    source = folder / "source"
    source.mkdir(parents=True)
    names = {"a1": "family-a", "a2": "family-a", "b1": "family-b", "b2": "family-b"}
    tasks = [task(source, name, family, family == "family-b") for name, family in names.items()]
    plain = {
        "tasks": tasks,
        "thresholds": SUCCESS_THRESHOLDS,
        "statistics": {"seed": 20261130, "bootstrap_samples": 10000},
    }
    return paper(sealed(folder, **{**plain, **changes}))


def score(mean: float, cases: int = 2) -> dict[str, Any]:
    """A score record of several cases around a mean, with one token in the first case and three in the others."""
    spread = [0.25 * (-1) ** n if cases % 2 == 0 or n < cases - 1 else 0.0 for n in range(cases)]
    return Score(tuple(CaseScore(mean + s, 1 if n == 0 else 3) for n, s in enumerate(spread))).to_record()


class _Chain:
    def __init__(self, campaign: Campaign, trial: str) -> None:
        self.sealed, self.trial, self.previous = campaign.manifest_sha256, trial, None

    def write(self, path: Path, schema: str, body: Mapping[str, Any]) -> str:
        record = write_record(path, schema, self.sealed, self.trial, body, self.previous)
        self.previous = record_sha256(record)
        return self.previous


def play(
    campaign: Campaign, spec: TrialSpec, private: float | None, regression: float = 1.5, status: str = "failed"
) -> None:
    """Write the records of one trial: completed with these scores, or ended with `status` if `private` is None."""
    layout: Layout = campaign.layout
    paths, chain = layout.trial(spec.id), _Chain(campaign, spec.id)
    reserved = Ledger(campaign).reserve(spec)
    assert reserved is not None
    chain.previous = record_sha256(reserved)
    chain.write(paths.dispatch, Schema.DISPATCH, {"backend": "local", "attempt": spec.id})
    if spec.arm != "unchanged":
        turn = {"kind": "python", "source": "print('canary')", "status": "ok", "result": {"stdout": CANARY_OUTPUT}}
        chain.write(paths.history / "0001.json", Schema.HISTORY, turn)
    if status == "outcome_unknown" and private is None:
        return
    artifact = publish(paths.final, f"weights of {spec.id} with {CANARY_METADATA}")
    chain.write(paths.closure, Schema.CLOSURE, {"reason": "submitted", "closed": True, "final_sha256": artifact})
    if private is None:
        write_record(layout.error(spec.id), Schema.ERROR, chain.sealed, spec.id, {"detail": CANARY_ERROR})
        reason = {"timed_out": "grader_deadline", "invalid_artifact": "artifact_not_finite"}.get(status, "grader_crash")
        chain.write(paths.outcome, Schema.OUTCOME, outcome_body(status, reason, artifact_sha256=artifact))
        return
    counts = (campaign.task(spec.task)["private"]["count"], campaign.manifest["regression"]["count"])
    scores = {"private": score(private, counts[0]), "regression": score(regression, counts[1])}
    body = {"artifact_sha256": artifact, **scores, "fingerprint": FINGERPRINT}
    grade = chain.write(layout.grade(spec.id), Schema.GRADE, body)
    chain.write(
        paths.outcome,
        Schema.OUTCOME,
        outcome_body("completed", "graded", artifact_sha256=artifact, grade_sha256=grade),
    )


def play_all(
    campaign: Campaign,
    scripted: Mapping[str, Sequence[float | None]] = SCRIPTED,
    agent: Mapping[str, Sequence[float | None]] = AGENT,
) -> None:
    """Play every trial of the worked example's design; a missing script failed, a missing agent timed out."""
    arms: dict[str, Mapping[str, Sequence[float | None]]] = {
        "unchanged": UNCHANGED,
        "scripted": scripted,
        "agent": agent,
    }
    for spec in campaign.schedule:
        place = spec.repetition - 1
        regression = REGRESSION[spec.task][place] if spec.arm == "agent" else 1.5
        status = "timed_out" if spec.arm == "agent" else "failed"
        play(campaign, spec, arms[spec.arm][spec.task][place], regression, status)


def worked(folder: Path, **changes: Any) -> Paper:
    """The worked example as a finished campaign with two holes."""
    campaign = design(folder, **changes)
    play_all(campaign)
    return campaign


def filled(folder: Path, **changes: Any) -> Paper:
    """The worked example without holes."""
    campaign = design(folder, **changes)
    play_all(campaign, {**SCRIPTED, "b2": [4.8, 4.9]}, {**AGENT, "a2": [1.9, 1.8]})
    return campaign


def copied(campaign: Campaign, folder: Path) -> Paper:
    """The same campaign in another folder, to be damaged."""
    shutil.copytree(campaign.layout.root, folder / "copy")
    return Paper(Layout(folder / "copy"), campaign.manifest, campaign.restricted, campaign.seal)


def edited(path: Path, **changes: Any) -> None:
    """Rewrite a record with other fields, in canonical form."""
    path.write_text(canonical_json({**json.loads(path.read_text()), **changes}))


def _spoil_score(campaign: Paper, trial: str) -> None:
    path = campaign.layout.grade(trial)
    private = json.loads(path.read_text())["private"]
    edited(path, private={**private, "equal": 0.0, "equal_hex": (0.0).hex()})


DAMAGES = {
    "the receipt is gone": lambda c, t: c.layout.grade(t).unlink(),
    "the receipt is cut short": lambda c, t: c.layout.grade(t).write_text(c.layout.grade(t).read_text()[:-20]),
    "a better mean in the receipt": _spoil_score,
    "the receipt names another artifact": lambda c, t: edited(c.layout.grade(t), artifact_sha256="0" * 64),
    "the receipt names another campaign": lambda c, t: edited(c.layout.grade(t), manifest_sha256="0" * 64),
    "the receipt of another trial": lambda c, t: shutil.copy(
        c.layout.grade(c.trial_id("agent-b1-01")), c.layout.grade(t)
    ),
    "the artifact is gone": lambda c, t: c.layout.trial(t).final.unlink(),
    "one byte of the artifact": lambda c, t: c.layout.trial(t).final.write_text("other weights"),
    "the closure is gone": lambda c, t: c.layout.trial(t).closure.unlink(),
    "the closure is cut short": lambda c, t: c.layout.trial(t).closure.write_text("{"),
    "the intent is gone": lambda c, t: c.layout.trial(t).dispatch.unlink(),
    "the outcome is no record": lambda c, t: c.layout.trial(t).outcome.write_text("[]"),
}
