"""Work functions that another process can import; the engines' tests and chapters hand them out."""

from __future__ import annotations

import os
import time
from pathlib import Path

from miniverl.core import TrainingError


def double(payload):
    return {"twice": 2 * payload["x"]}


def fail(payload):
    raise TrainingError(payload["say"], hint="look at the log")


def wait_or_die(payload):
    """Double `x`, or fail with the words `say`, or die of `signal` or with `exit`."""
    if "signal" in payload:
        os.kill(os.getpid(), payload["signal"])
    if "exit" in payload:
        os._exit(payload["exit"])
    return fail(payload) if "say" in payload else double(payload)


def meet(payload):
    """`wait_or_die`, after writing the file `touch` or half a second after somebody wrote the file `until`."""
    if "touch" in payload:
        Path(payload["touch"]).touch()
    while "until" in payload and not Path(payload["until"]).exists():
        time.sleep(0.01)
    time.sleep(0.5 if "until" in payload else 0)
    return wait_or_die(payload)


class Unsendable(Exception):
    """Pickles, but cannot be made again from its message alone."""

    def __init__(self, left, right):
        super().__init__(f"{left} {right}")


def raise_unsendable(payload):
    raise Unsendable("left", "right")


def divide(payload):
    return {"quotient": 1 / payload["x"]}


def surroundings(payload):
    """Where a worker finds itself."""
    return {"pid": os.getpid(), "threads": os.environ.get("OMP_NUM_THREADS"), "folder": os.getcwd()}


def linger(payload):
    """Write a file when started and another when interrupted; end when the file `go` appears."""
    folder = Path(payload["folder"])
    (folder / f"{payload['name']}.started").write_text(str(os.getpid()))
    try:
        for _ in range(3000):
            time.sleep(0.01)
            if (folder / "go").exists():
                return {"name": payload["name"]}
    except KeyboardInterrupt:
        (folder / f"{payload['name']}.interrupted").write_text("")
        raise
    raise TrainingError("nobody came")


def meet_or_linger(payload):
    return linger(payload) if "folder" in payload else meet(payload)
