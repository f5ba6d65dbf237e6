"""A backend and a grader in this process, whose model is one number; for tests of the controller."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sealed_campaign import ENVIRONMENT, pinned, sealed, task, write_config

from miniverl.campaign.attempt import Desk
from miniverl.campaign.budget import Ledger
from miniverl.campaign.config import model_identity
from miniverl.campaign.grader import InvalidArtifact
from miniverl.campaign.grading import Grade
from miniverl.campaign.manifest import Campaign, open_campaign, prepare
from miniverl.campaign.policy import TapePolicy
from miniverl.campaign.records import publish
from miniverl.campaign.sandbox import Closure
from miniverl.campaign.transfer import Export
from miniverl.core import sha256_bytes, sha256_file
from miniverl.wsm.scoring import Score, case_score

__all__ = ["ENVIRONMENT", "Campaign", "Grade", "open_campaign", "sealed"]

ORIGINAL = "not really tensors"
Say = Callable[[str], object]


@dataclass
class Answer:
    """What the stand-in editor says of a program."""

    ok: bool = True
    stdout: str = ""
    error_type: str | None = None
    error: str | None = None
    changed: Mapping[str, int] = field(default_factory=dict)
    timed_out: bool = False
    checkpoint: Mapping[str, Any] | None = None


class FakeEditor:
    """Holds one number; a program, which the backend may put in the place of the real one, is `set X`, `raise`, `die` (the editor fails) or `hang` (the backend times out)."""

    def __init__(self, backend: FakeBackend, trial: str) -> None:
        self.backend, self.trial, self.value = backend, trial, ORIGINAL

    def python(self, source: str, seconds: float) -> Answer:
        self.backend.say(f"python {self.trial}")
        word, _, value = self.backend.programs.get(self.trial.split("-")[1], source).partition(" ")
        if word == "raise":
            return Answer(False, error_type="ValueError", error="CANARY message of a program")
        if word in ("die", "hang"):
            raise {"die": RuntimeError, "hang": TimeoutError}[word]("CANARY of an editor")
        if word == "set":
            self.value = value.strip()
            kept = {"sha256": sha256_bytes(self.value), "bytes": len(self.value)}
            return Answer(changed={"w": 1}, checkpoint=kept, stdout="CANARY output")
        return Answer()

    def evaluate(self, seconds: float) -> dict[str, Any]:
        return {"equal": 1.0}

    def export(self, final: Path) -> Export:
        self.backend.say(f"export {self.trial}")
        if self.backend.on_export:
            raise self.backend.on_export
        publish(final, self.value)
        return Export(sha256_bytes(self.value), len(self.value))

    def close(self) -> Closure:
        self.backend.say(f"close {self.trial}")
        if self.backend.on_close:
            raise self.backend.on_close
        return Closure(self.backend.attests, 0, 1)


@dataclass
class FakeBackend:
    """Opens stand-in editors and says so."""

    say: Say = lambda text: None
    programs: Mapping[str, str] = field(default_factory=dict)
    attests: bool = True
    on_open: Exception | None = None
    on_export: Exception | None = None
    on_close: Exception | None = None
    specs: list[Any] = field(default_factory=list)

    def open(self, spec: Any) -> FakeEditor:
        self.say(f"open {spec.trial_id}")
        self.specs.append(spec)
        if self.on_open:
            raise self.on_open
        return FakeEditor(self, spec.trial_id)


def score(value: float) -> dict[str, Any]:
    return Score((case_score([value]), case_score([value + 1]))).to_record()


@dataclass
class FakeGrader:
    """The private loss is the number in the artifact; `invalid` is refused; anything callable in `instead` is called first."""

    say: Say = lambda text: None
    instead: Callable[[Path], None] | None = None
    drift: float = 0.0
    offset: float = 0.0
    wander: Mapping[str, float] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=lambda: dict(ENVIRONMENT))

    def _grade(self, value: float, task: str = "") -> Grade:
        return Grade(score(value), score(1.5 + self.wander.get(task, 0.0)), dict(self.environment))

    def grade(self, artifact: Path, sha256: str, task: str, seconds: float) -> Grade:
        self.say(f"grade {artifact.parent.name}")
        assert sha256_file(artifact) == sha256
        if self.instead:
            self.instead(artifact)
        text = artifact.read_text()
        if text == "invalid":
            raise InvalidArtifact("not_finite", "CANARY of an artifact")
        return self._grade((3.0 if text == ORIGINAL else float(text)) + self.offset, task)

    def pristine(self, task: str, seconds: float) -> Grade:
        self.say(f"pristine {task}")
        return self._grade(3.0 + self.drift, task)


def small(folder: Path, agent: Sequence[str] | None = None, **changes: Any) -> Campaign:
    """A sealed campaign of three trials: unchanged, scripted, and an agent that runs the given programs and submits."""
    source = folder / "source"
    if agent is not None:
        tape = [*({"kind": "python", "source": program} for program in agent), {"kind": "submit"}]
        reference = pinned(source, "agent.json", {"format": "wsm.actions.v1", "trials": {"suffix": [tape]}})
        changes["runtime"] = {"backend": "local", "grader_python": sys.executable, "actions": reference}
    environment = changes.pop("environment", ENVIRONMENT)
    one = task(source, "suffix", "spelling", False)
    config = write_config(source, **{"tasks": [one], "repetitions": 1, **changes})
    return open_campaign(prepare(config, folder / "campaign", environment=environment, isolation=lambda: 0).root)


def desk(campaign: Campaign, backend: FakeBackend, grader: FakeGrader) -> Desk:
    """A desk whose editors need no place and whose agents play one program."""
    script = {"kind": "python", "source": "x = 1"}
    place = lambda spec: nullcontext(SimpleNamespace(trial_id=spec.id))  # noqa: E731
    return Desk(campaign, backend, grader, place, lambda spec: TapePolicy([script, {"kind": "submit"}]))


def reserve(campaign: Campaign, spec: Any) -> dict[str, Any]:
    found = Ledger(campaign).reserve(spec)
    assert found is not None
    return found


def tiny(folder: Path, **changes: Any) -> Campaign:
    """A sealed campaign of three trials on the tiny model, for a real grader."""
    from miniverl.wsm.tiny import tiny_snapshot

    model = tiny_snapshot(folder / "source" / "tiny")
    reference = {"path": "tiny", "id": "tests/tiny", "revision": "0", "sha256": model_identity(model)[0]}
    return small(folder, **{"model": reference, "environment": {}, **changes})
