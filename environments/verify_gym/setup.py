"""The build step that pyproject.toml can't state: a wheel carries the modules of `miniverl/verify_gym` as its own.

In a checkout they are two folders up; in a source archive `sdist` has put them into the package already. Left out is what
spends money or needs a second decider: that stays beside the package.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

HERE = Path(__file__).resolve().parent
THIN = HERE / "verify_gym"
HOME = HERE.parents[1] / "miniverl" / "verify_gym"
STAYS_OUT = {"__init__.py", "_checkout.py", "endpoint.py", "readiness.py"}


def body() -> list[Path]:
    """The package's modules and data files."""
    home = THIN if (THIN / "exact.py").exists() else HOME
    found = [*sorted(home.glob("*.py")), *sorted(home.glob("data/*.json"))]
    if home / "exact.py" not in found:
        raise SystemExit("the modules of verify_gym are neither in the package nor in ../../miniverl/verify_gym")
    return [path for path in found if path.name not in STAYS_OUT]


def copy_body(target: Path) -> None:
    """Put the modules into a package folder; its own `__init__.py` stays."""
    for path in body():
        place = target / "data" / path.name if path.parent.name == "data" else target / path.name
        place.parent.mkdir(parents=True, exist_ok=True)
        if place.resolve() != path.resolve():
            shutil.copyfile(path, place)
    (target / "_checkout.py").unlink(missing_ok=True)


class BuildWithBody(build_py):
    def run(self) -> None:
        if self.editable_mode:
            return super().run()
        target = Path(self.build_lib) / "verify_gym"
        shutil.rmtree(target, ignore_errors=True)  # an earlier build may hold modules that are gone
        super().run()
        copy_body(target)


class SourceWithBody(sdist):
    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        copy_body(Path(base_dir) / "verify_gym")


setup(cmdclass={"build_py": BuildWithBody, "sdist": SourceWithBody})
