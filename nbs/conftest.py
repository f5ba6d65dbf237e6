"""Collect every `nbs/*.ipynb` as one test item: the cells run in this process and the stored outputs must be what they give."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from nbcells import Notebook, clean_state  # noqa: E402


def pytest_collect_file(file_path, parent):
    if file_path.suffix == ".ipynb" and ".ipynb_checkpoints" not in file_path.parts:
        return NotebookFile.from_parent(parent, path=file_path)
    return None


class NotebookFile(pytest.File):
    def collect(self):
        yield NotebookItem.from_parent(self, name=self.path.stem)


class NotebookItem(pytest.Item):
    def runtest(self):
        flags = set(self.config.getoption("--nb-flags").split())
        book = Notebook(self.path)
        with clean_state():
            outputs = book.run(flags=flags)
        if stale := book.stale(outputs):
            raise StaleOutput(
                f"{self.path.name}: stored outputs differ from this run: {', '.join(stale)} (run `make save`)"
            )

    def reportinfo(self):
        return self.path, 0, f"notebook {self.name}"

    def repr_failure(self, excinfo, style=None):
        if excinfo.errisinstance(StaleOutput):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)


class StaleOutput(AssertionError):
    """A committed output is not what the cell gives today."""
