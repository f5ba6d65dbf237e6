"""The executor of notebooks: what runs, what is compared, and where an error points."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import nb  # noqa: E402
from nbcells import Notebook, directives, exported_lines, is_exported, module_path, source_of, write_notebook  # noqa: E402


def book(folder: Path, text: str) -> Notebook:
    path = folder / "sample.ipynb"
    write_notebook(path, nb.from_text(text))
    return Notebook(path)


def test_outputs_are_kept_and_compared(tmp_path):
    text = "%%%% code a\nprint('hi')\n1 + 1\n%%%% code b\n#| volatile\nimport time; time.time_ns()\n%%%% code c\n3;\n"
    made = book(tmp_path, text)
    made.store(outputs := made.run())
    assert [out["output_type"] for out in outputs["a"]] == ["stream", "execute_result"] and outputs["c"] == []
    again = Notebook(made.path)
    assert again.stale(again.run()) == [], "a volatile cell may change"
    again.cells[0]["outputs"][1]["data"]["text/plain"] = ["3"]
    assert again.stale(outputs) == ["a"]


def test_an_error_names_its_cell_and_an_assert_shows_its_values(tmp_path):
    with pytest.raises(AssertionError, match="1 == 2") as caught:
        book(tmp_path, "%%%% code first\nx = 1\n%%%% code broken\nassert x == 2\n").run()
    assert caught.value.__notes__ == ["in sample.ipynb, cell 1 (#broken)"]


def test_marked_cells_are_skipped_and_a_slow_cell_is_stopped(tmp_path):
    text = "%%%% code a\n#| slow\n1/0\n%%%% code b\n#| eval: false\n1/0\n"
    assert book(tmp_path, text).run() == {}
    with pytest.raises(ZeroDivisionError):
        book(tmp_path, text).run(flags={"slow"})
    with pytest.raises(TimeoutError, match="longer than 1 s"):
        book(tmp_path, "%%%% code a\nwhile True: pass\n").run(limit=1)


def test_postponed_annotations_hold_for_later_cells(tmp_path):
    text = "%%%% code a\nfrom __future__ import annotations\n%%%% code b\nclass A:\n    def f(self) -> A: ...\n%%%% code c\nA.f.__annotations__\n"
    assert "'A'" in json.dumps(book(tmp_path, text).run()["c"])


@pytest.mark.parametrize("path", sorted((ROOT / "nbs").glob("*.ipynb")), ids=lambda p: p.stem)
def test_exported_cells_are_compiled_under_the_line_they_have_in_the_module(path):
    made = Notebook(path)
    module = module_path(made.cells)
    lines = exported_lines(module)
    for number, cell in enumerate(made.cells):
        marks = directives(source_of(cell)) if cell["cell_type"] == "code" else set()
        if not is_exported(marks) or "import " in source_of(cell):
            continue
        name, first = made._place(cell, number, source_of(cell), marks, module, lines)
        text = module.read_text(encoding="utf-8").splitlines()
        for offset, row in enumerate(source_of(cell).splitlines()):
            assert name == str(module) and (row.startswith("#|") or text[first - 1 + offset] == row), f"#{cell['id']}"
