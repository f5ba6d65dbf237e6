"""Try verify-gym against real installs of the verifiers framework, each in a virtual environment of its own.

    python tools/verify_bindings.py               0.3.1 and 0.4.0
    python tools/verify_bindings.py --only 031    one of them; 020, for the oldest version, only runs when it's named
    python tools/verify_bindings.py --ready       only where the environment exists already; never downloads the framework

An environment is made when it's missing: `.venv-vf031` and `.venv-vf040` beside the repository's own, 700 MB each. The wheel of
`environments/verify_gym` is built and installed anew each time, so what is tried is what a user gets.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("pytest>=8", "setuptools>=77", "wheel")
TESTS = ("test_v0.py", "test_v1.py")
PARTS = ("environments/verify_gym", "miniverl/verify_gym")
LEFT_OVER = shutil.ignore_patterns("build", "dist", "*.egg-info", "__pycache__")
PROBE = "import importlib.metadata as m; print(m.version('verifiers'), m.version('pytest'))"


@dataclass(frozen=True)
class Framework:
    """One version of the framework: what is installed, and whether it belongs to a run that names none."""

    name: str
    version: str
    packages: tuple[str, ...]
    usual: bool = True

    @property
    def python(self) -> Path:
        return ROOT / f".venv-vf{self.name}" / ("Scripts" if os.name == "nt" else "bin") / "python"

    @property
    def ready(self) -> bool:
        if not self.python.exists():
            return False
        found = subprocess.run([self.python, "-c", PROBE], capture_output=True, text=True)
        return found.returncode == 0 and found.stdout.split()[0] == self.version


FRAMEWORKS = (
    Framework("020", "0.2.0", ("verifiers==0.2.0", "datasets"), usual=False),
    Framework("031", "0.3.1", ("verifiers==0.3.1", "datasets")),
    Framework("040", "0.4.0", ("verifiers==0.4.0",)),
)


def call(*words: str | Path, **options: object) -> None:
    done = subprocess.run([str(word) for word in words], **options)  # type: ignore[call-overload]
    if done.returncode:
        raise SystemExit(f"error: {' '.join(map(str, words[:6]))} ... ended with {done.returncode}")


def make(framework: Framework) -> None:
    print(f"making {framework.python.parents[1].name} with {', '.join(framework.packages)}", flush=True)
    venv.create(framework.python.parents[1], with_pip=True, clear=True)
    call(framework.python, "-m", "pip", "install", "-q", *framework.packages, *TOOLS)


def install_wheel(framework: Framework) -> None:
    """Build from a copy, so that nothing left over from an earlier build gets in."""
    pip = (framework.python, "-m", "pip")
    with tempfile.TemporaryDirectory() as folder:
        for place in PARTS:
            shutil.copytree(ROOT / place, Path(folder, place), ignore=LEFT_OVER)
        call(*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, Path(folder, PARTS[0]))
        call(*pip, "install", "-q", "--no-deps", "--force-reinstall", *Path(folder).glob("*.whl"))


def run_tests(framework: Framework, words: list[str]) -> int:
    """pytest without the repository's own options, which belong to the repository's own environment."""
    folder = ROOT / "tests" / "bindings"
    options = ["-q", "-ra", "-p", "no:cacheprovider", "-c", os.devnull, f"--rootdir={folder}", f"--confcutdir={folder}"]
    files = [folder / name for name in TESTS]
    print(f"verifiers {framework.version}", flush=True)
    done = subprocess.run([str(framework.python), "-m", "pytest", *options, *map(str, files), *words], cwd=folder)
    return done.returncode


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=[framework.name for framework in FRAMEWORKS])
    parser.add_argument("--ready", action="store_true", help="skip a version whose environment isn't there")
    args, words = parser.parse_known_args(argv)
    codes = []
    for framework in FRAMEWORKS:
        if args.only != framework.name and not (args.only is None and framework.usual):
            continue
        if not framework.ready:
            if args.ready:
                print(f"skipped: no environment with verifiers {framework.version}")
                continue
            make(framework)
        install_wheel(framework)
        codes.append(run_tests(framework, words))
    return max(codes, default=0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
