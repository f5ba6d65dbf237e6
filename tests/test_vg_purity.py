"""What the grading code may not contain, read off its syntax tree, and what it may not need, tried without it."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "miniverl" / "verify_gym"
DECIDING = [name for name in ("exact", "answer", "certificate") if (PACKAGE / f"{name}.py").exists()]
MODULES = sorted(path.stem for path in PACKAGE.glob("*.py"))
ADAPTERS = {"adapters_v0", "adapters_v1"}
CORE = [name for name in MODULES if name not in ADAPTERS]
BANNED_NAMES = {"float", "complex", "Decimal", "Fraction", "eval", "exec", "compile", "__import__", "open", "round"}
BANNED_MODULES = {"decimal", "fractions", "cmath", "pickle", "marshal", "numbers", "statistics", "random", "time"}


def tree_of(name: str) -> ast.Module:
    return ast.parse((PACKAGE / f"{name}.py").read_text(encoding="utf-8"))


def faults(tree: ast.AST) -> list[str]:
    """What makes a deciding module inexact or unsafe."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, float | complex):
            found.append(f"the literal {node.value}")
        elif isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Div):
            found.append("true division")
        elif isinstance(node, ast.Name) and node.id in BANNED_NAMES:
            found.append(node.id)
        elif isinstance(node, ast.Import):
            found += [f"import {a.name}" for a in node.names if a.name.split(".")[0] in BANNED_MODULES | {"math"}]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            if node.module in BANNED_MODULES:
                found.append(f"from {node.module}")
            found += [f"math.{a.name}" for a in node.names if node.module == "math" and a.name != "gcd"]
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow) and negative(node.right):
            found.append("a negative power")
    return found


def negative(node: ast.AST) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)


@pytest.mark.parametrize("name", DECIDING)
def test_deciding_modules_hold_no_float(name):
    assert faults(tree_of(name)) == []


@pytest.mark.parametrize(
    "source",
    [
        "x = 0.5",
        "x = 1e-9",
        "x = a / b",
        "x /= 2",
        "x = float(a)",
        "x = 2 ** -3",
        "import math",
        "from math import log",
        "from decimal import Decimal",
        "x = eval(text)",
        "exec(text)",
        "import pickle",
        "x = Fraction(text)",
        "side = p * math.log(p) < n; import math",
    ],
)
def test_the_check_sees_each_fault(source):
    assert faults(ast.parse(source))


def test_a_float_logarithm_decider_would_be_caught():
    source = textwrap.dedent(
        """
        from math import log

        def cmp_xx(n, bar):
            p, q = bar
            return 1 if p * (log(p) - log(q)) < q * log(n) else -1
        """
    )
    assert faults(ast.parse(source)) == ["math.log"]


@pytest.mark.parametrize("name", CORE)
def test_core_imports_the_standard_library_and_its_siblings(name):
    foreign = []
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.Import):
            foreign += [a.name for a in node.names if a.name.split(".")[0] not in sys.stdlib_module_names]
        elif isinstance(node, ast.ImportFrom):
            if node.level > 1 or (not node.level and (node.module or "").split(".")[0] not in sys.stdlib_module_names):
                foreign.append(f"{'.' * node.level}{node.module}")
    assert foreign == []


BLOCKED = """
import importlib
import sys

class OnlyStandard:
    def find_spec(self, name, path=None, target=None):
        top = name.split(".")[0]
        if top not in sys.stdlib_module_names and not (name + ".").startswith(("miniverl.verify_gym.",)) and name != "miniverl":
            raise ImportError(f"blocked: {name}")
        return None

sys.meta_path.insert(0, OnlyStandard())
for blocked in ("numpy", "miniverl.core"):
    try:
        importlib.import_module(blocked)
    except ImportError:
        continue
    raise SystemExit(f"{blocked} was not blocked")
for name in sys.argv[1].split(","):
    importlib.import_module(f"miniverl.verify_gym.{name}" if name != "__init__" else "miniverl.verify_gym")
from miniverl.verify_gym.answer import Task, grade
rows = [
    (Task("xx", "control", 0, {"n": 5}, (2, 1), (3, 1)), "2.12, 2.13"),
    (Task("kroot", "control", 0, {"n": 2, "k": 2}, (1, 1), (2, 1)), "1.414, 1.415"),
    (Task("poly", "control", 0, {"coefficients": (-2, 0, 1)}, (1, 1), (2, 1)), "7/5, 3/2"),
]
print(*[grade(task, f"<answer>{body}</answer>").progress for task, body in rows])
heavy = {"pydantic", "numpy", "torch", "socket", "ssl", "decimal", "fractions"} & set(sys.modules)
print("loaded", *sorted(heavy & {"pydantic", "numpy", "torch"}))
"""


def test_core_works_where_every_third_party_import_fails():
    run = subprocess.run(
        [sys.executable, "-c", BLOCKED, ",".join(CORE)],
        capture_output=True,
        text=True,
        cwd=PACKAGE.parents[1],
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == ["2 3 1", "loaded"]


def test_deciders_load_without_the_modules_that_could_tempt_them():
    """Importing the two deciding modules brings in no decimal, no fractions, no network."""
    code = (
        "import sys; before = set(sys.modules); import miniverl.verify_gym.answer; "
        "print(*sorted({'decimal', 'fractions', 'socket', 'random', 'pickle'} & (set(sys.modules) - before)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parents[1])
    assert run.returncode == 0 and run.stdout.split() == []
