"""Ask the second decider: one Node.js process a run, one JSON object a line in and one a line out.

    with SecondDecider() as second:
        second.decide([Question(task, reply)])      # -> [{"verdict": ..., "lo": ..., "hi": ..., "decimals": ..., "progress": ...}]

This file and the scripts that import it live beside the package, because they need Node.js and the package doesn't.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from verify_gym.answer import Task
from verify_gym.exact import VerifyGymError

CHECK = Path(__file__).resolve().with_name("check.js")


class Question(NamedTuple):
    """A reply to be decided."""

    task: Task
    reply: str
    truncated: bool = False


def find_node() -> str:
    """The path of Node.js, or an error that says what to install."""
    node = shutil.which("node")
    if node is None:
        raise VerifyGymError(
            "Node.js isn't on PATH, and the second decider runs on it",
            "install Node.js 18 or newer; nothing was decided",
        )
    return node


class SecondDecider:
    """A running second decider; use it as a context manager.

    Parameters
    ----------
    exact : decide `xx` by whole powers instead of fixed-point logarithms, a thousand times slower
    program : another JavaScript file that speaks the same protocol
    """

    def __init__(self, *, exact: bool = False, program: Path = CHECK) -> None:
        self._errors = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [find_node(), str(program), *(["--exact"] if exact else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )
        self._asked = 0

    def __enter__(self) -> SecondDecider:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process; closing twice is fine."""
        for pipe in (self._process.stdin, self._process.stdout):
            try:
                pipe.close()
            except OSError:
                pass
        self._process.kill()
        self._process.wait()
        self._errors.close()

    def decide(self, questions: Iterable[Question]) -> list[dict[str, Any]]:
        """The second opinion on each question, in their order; a row fault is {"error": reason}."""
        asked = list(questions)
        first = self._asked
        self._asked += len(asked)
        # Sent from a thread: with both pipes full, two processes that only write would wait for each other.
        sender = threading.Thread(target=self._send, args=(first, asked), daemon=True)
        sender.start()
        answers = [self._receive(first + offset) for offset in range(len(asked))]
        sender.join()
        return answers

    def _send(self, first: int, questions: Sequence[Question]) -> None:
        try:
            for ident, (task, reply, truncated) in enumerate(questions, first):
                item = {"id": ident, "task": task.to_row(), "reply": reply, "truncated": truncated}
                self._process.stdin.write(json.dumps(item).encode("ascii") + b"\n")
            self._process.stdin.flush()
        except (OSError, ValueError):  # the process has ended; `_receive` says so
            pass

    def _receive(self, ident: int) -> dict[str, Any]:
        line = self._process.stdout.readline()
        try:
            answer = json.loads(line)
            if answer.pop("id") != ident:
                raise ValueError("out of order")
        except (ValueError, AttributeError, KeyError) as error:
            self._errors.seek(0)
            said = self._errors.read().decode(errors="replace").splitlines()
            why = next((text for text in said if "Error" in text), line[:80].decode(errors="replace") or "it ended")
            raise VerifyGymError(
                f"no answer {ident} from the second decider: {why}", "nothing it said is used"
            ) from error
        return answer
