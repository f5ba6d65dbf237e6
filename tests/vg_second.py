"""The second decider as the tests see it: its folder on the path, and a mark for what needs Node.js."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[1] / "environments" / "verify_gym"
if str(PROJECT) not in sys.path:
    sys.path.append(str(PROJECT))

import bridge  # noqa: E402
import crosscheck  # noqa: E402
import make_conformance  # noqa: E402
import scorecard  # noqa: E402

__all__ = ["PROJECT", "bridge", "crosscheck", "make_conformance", "needs_node", "scorecard"]

needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="Node.js isn't on PATH: no second decider")
