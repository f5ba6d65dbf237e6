"""Write a notebook as text, read it back, run it.

    python tools/nb.py text nbs/X.ipynb            print the notebook as text
    python tools/nb.py build FOLDER/X.nbt          text -> nbs/X.ipynb, export its module, run its cells, store the outputs
    python tools/nb.py save [nbs/X.ipynb ...]      run (all) notebooks and store their outputs

In the text form a line `%%%% md some-id` or `%%%% code some-id` opens a cell; everything up to the next such line is the cell.
Reading the text back gives the same notebook byte for byte. A cell whose code changed loses its stored output.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

from nbcells import ROOT, Notebook, clean_state, source_of, write_notebook

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as the tests: outputs must not depend on who made them
HEAD = re.compile(r"^%%%% (md|code) ([A-Za-z0-9][A-Za-z0-9-]{0,62})$")
KERNEL = {"display_name": "python3", "language": "python", "name": "python3"}


def to_text(raw: dict) -> str:
    kind = {"markdown": "md", "code": "code"}
    return "".join(f"%%%% {kind[c['cell_type']]} {c['id']}\n{source_of(c)}\n" for c in raw["cells"])


def from_text(text: str, old: dict | None = None) -> dict:
    cells: list[tuple[str, str, list[str]]] = []
    for line in text.splitlines():
        if match := HEAD.match(line):
            cells.append((match.group(1), match.group(2), []))
        elif cells:
            cells[-1][2].append(line)
        elif line.strip():
            raise SystemExit(f"text before the first cell: {line!r}")
    ids = [cell[1] for cell in cells]
    if twice := sorted({i for i in ids if ids.count(i) > 1}):
        raise SystemExit(f"cell ids used twice: {', '.join(twice)}")
    kept = {c["id"]: c for c in (old or {"cells": []})["cells"]}
    return {
        "cells": [_cell(*cell, kept) for cell in cells],
        "metadata": {"kernelspec": KERNEL},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def _cell(kind: str, ident: str, lines: list[str], kept: dict) -> dict:
    source = "\n".join(lines).strip("\n").splitlines(keepends=True)
    if kind == "md":
        return {"cell_type": "markdown", "id": ident, "metadata": {}, "source": source}
    before = kept.get(ident)
    same = before is not None and before["cell_type"] == "code" and source_of(before) == "".join(source)
    return {
        "cell_type": "code",
        "execution_count": None,
        "id": ident,
        "metadata": {},
        "outputs": before["outputs"] if same and before else [],
        "source": source,
    }


def export(path: Path) -> None:
    from nbdev.config import add_init
    from nbdev.export import nb_export

    nb_export(path)
    add_init(ROOT / "miniverl")


def save(path: Path) -> None:
    with clean_state():
        sys.path.insert(0, str(ROOT))
        book = Notebook(path)
        book.store(book.run(limit=300))
    print(f"{path.name}: {len(book.cells)} cells, {path.stat().st_size // 1000} kB")


def build(text: Path) -> None:
    path = ROOT / "nbs" / f"{text.stem}.ipynb"
    old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    write_notebook(path, from_text(text.read_text(encoding="utf-8"), old))
    export(path)
    save(path)


def main(argv: list[str]) -> None:
    match argv:
        case ["text", path]:
            print(to_text(json.loads(Path(path).read_text(encoding="utf-8"))), end="")
        case ["build", *paths] if paths:
            for path in paths:
                build(Path(path).resolve())
        case ["save", *paths]:
            for path in [Path(p) for p in paths] or sorted((ROOT / "nbs").glob("*.ipynb")):
                save(path)
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
