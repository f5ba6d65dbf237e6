"""Who may import the verifiers framework, and the binding tests, run where its environments exist."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "tools" / "verify_bindings.py"
FOREIGN = {"verifiers", "datasets"}
ADAPTERS = {"adapters_v0.py", "adapters_v1.py"}
sys.path.insert(0, str(SCRIPT.parent))

import verify_bindings  # noqa: E402


def imports_of(source: str) -> set[str]:
    """The top names of every import, at whatever depth, and of what `import_module` and `__import__` are given as text."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").split(".")[0])
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in (
            "import_module",
            "__import__",
        ):
            found |= {word.value.split(".")[0] for word in node.args if isinstance(word, ast.Constant)}
    return found


def test_nothing_but_the_adapters_imports_the_framework():
    files = [path for folder in ("miniverl", "environments") for path in (ROOT / folder).rglob("*.py")]
    files = [path for path in files if "build" not in path.relative_to(ROOT).parts]
    using = {path.name for path in files if FOREIGN & imports_of(path.read_text(encoding="utf-8"))}
    assert len(files) > 60 and using == ADAPTERS


@pytest.mark.parametrize(
    "source",
    ["import verifiers.v1 as vf", "def f():\n    from verifiers import Rubric", "import_module('verifiers.types')"],
)
def test_the_scan_sees_an_import_of_any_form(source):
    assert "verifiers" in imports_of(source)


def test_the_older_adapter_imports_the_framework_inside_its_function_only():
    body = ast.parse((ROOT / "miniverl" / "verify_gym" / "adapters_v0.py").read_text(encoding="utf-8")).body
    outside = [node for node in body if not isinstance(node, ast.FunctionDef)]
    assert not FOREIGN & imports_of(ast.unparse(ast.Module(outside, [])))


def test_the_package_names_load_the_framework_only_when_asked_for():
    """Importing the thin package, and looking at `load_environment`, works without the framework."""
    code = (
        "import sys; sys.modules['verifiers'] = None; sys.modules['datasets'] = None\n"
        "import verify_gym\n"
        "assert verify_gym.load_environment.__name__ == 'load_environment'\n"
        "try:\n    verify_gym.VerifyGymTaskset\nexcept ImportError as error:\n    print(type(error).__name__)\n"
        "try:\n    verify_gym.load_environment()\nexcept ImportError as error:\n    print(error)\n"
    )
    paths = [str(ROOT / "environments" / "verify_gym"), str(ROOT)]
    start = f"import sys; sys.path[:0] = {paths!r}\n"
    done = subprocess.run([sys.executable, "-c", start + code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == [
        "ModuleNotFoundError",
        "the verifiers framework isn't installed: pip install 'verify-gym[v0]'",
    ], done.stderr


def test_without_its_environment_a_version_is_skipped_and_named(monkeypatch, capsys):
    monkeypatch.setattr(verify_bindings.Framework, "ready", False)
    assert verify_bindings.main(["--ready"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "skipped: no environment with verifiers 0.3.1",
        "skipped: no environment with verifiers 0.4.0",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("framework", verify_bindings.FRAMEWORKS, ids=lambda framework: framework.version)
def test_bindings(framework):
    if not framework.ready:
        pytest.skip(
            f"no environment with verifiers {framework.version}: python tools/verify_bindings.py --only {framework.name}"
        )
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--ready", "--only", framework.name], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
