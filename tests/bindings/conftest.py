"""Shared by the binding tests: a server that answers as the policies do, commands of the framework, and broken graders."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests"))  # for the stand-in server
sys.path.append(str(ROOT))  # which reads its policies from the checkout; verify_gym is the installed wheel


@pytest.fixture
def command(tmp_path):
    """Run a command of the framework in an empty folder; `start` is Python that runs before it."""

    def run(name: str, *words: object, start: str = "") -> subprocess.CompletedProcess[str]:
        hook = tmp_path / "hook"
        hook.mkdir(exist_ok=True)
        (hook / "sitecustomize.py").write_text(start)
        env = {**os.environ, "PYTHONPATH": str(hook), "STAND_IN_KEY": "none", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}
        program = Path(sys.executable).with_name(name)
        call = [sys.executable, str(program), *map(str, words)]
        return subprocess.run(call, capture_output=True, text=True, env=env, cwd=tmp_path, timeout=240)

    return run
