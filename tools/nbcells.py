"""Run the cells of a notebook in this process: one executor for the tests, for `make save` and for the freshness check.

Exported cells are compiled under the file name and line of the exported module, so that tracebacks and coverage point into
`miniverl/`; every other cell is compiled under a name of its own that `linecache` can show.
"""

from __future__ import annotations
import __future__

import ast
import json
import linecache
import os
import re
import signal
import sys
import types
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SKIP_FLAGS = ("slow", "gpu")
CELL_MARK = re.compile(r"^# %% .*#(\S+)\s*$")


def source_of(cell: dict) -> str:
    src = cell["source"]
    return src if isinstance(src, str) else "".join(src)


def directives(source: str) -> set[str]:
    """The `#| word` directives at the top of a cell; `eval: false` is kept as one word."""
    found = set()
    for line in source.splitlines():
        if not line.startswith("#|"):
            break
        found.add(re.sub(r"\s+", " ", line[2:].strip()))
    return found


def is_exported(marks: set[str]) -> bool:
    return any(m.split()[0] in ("export", "exporti", "exports") for m in marks if m)


def skipped(marks: set[str], flags: set[str]) -> bool:
    return "eval: false" in marks or any(f in marks and f not in flags for f in SKIP_FLAGS)


def module_path(cells: list[dict]) -> Path | None:
    for cell in cells:
        for mark in directives(source_of(cell)):
            if mark.startswith("default_exp "):
                return ROOT / "miniverl" / (mark.split()[1].replace(".", "/") + ".py")
    return None


def exported_lines(module: Path | None) -> dict[str, int]:
    """Cell id -> line of the exported module at which that cell's text starts."""
    if module is None or not module.exists():
        return {}
    lines = module.read_text(encoding="utf-8").splitlines()
    return {m.group(1): n + 2 for n, line in enumerate(lines) if (m := CELL_MARK.match(line))}


def _future_flags(tree: ast.Module) -> int:
    """Compiler flags of the `from __future__` imports of a cell; as in Jupyter they hold for the cells after it."""
    names = [
        a.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module == "__future__"
        for a in node.names
    ]
    return sum(getattr(__future__, name).compiler_flag for name in names)


def _compile(source: str, filename: str, line: int, rewrite: bool, future: int) -> tuple[Any, Any, int]:
    """Code of the statements; if the last one is an expression without `;`, code of its value; the compiler flags so far."""
    tree = ast.parse(source, filename)
    if rewrite:
        from _pytest.assertion.rewrite import rewrite_asserts

        rewrite_asserts(tree, source.encode())
    ast.increment_lineno(tree, line - 1)
    last = None
    if tree.body and isinstance(tree.body[-1], ast.Expr) and not source.rstrip().endswith(";"):
        last = ast.Expression(tree.body.pop().value)
    future |= _future_flags(tree)
    run = compile(tree, filename, "exec", flags=future, dont_inherit=True)
    return run, compile(last, filename, "eval", flags=future, dont_inherit=True) if last is not None else None, future


@contextmanager
def time_limit(seconds: int, what: str):
    if not hasattr(signal, "SIGALRM") or seconds <= 0:
        yield
        return

    def expired(signum, frame):
        raise TimeoutError(f"{what} ran longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, expired)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def _bundle(data: dict) -> dict:
    return {key: _lines(value) if isinstance(value, str) else value for key, value in sorted(data.items())}


def _outputs(captured, value: Any, shell) -> list[dict]:
    out = []
    if captured.stdout:
        out.append({"name": "stdout", "output_type": "stream", "text": _lines(captured.stdout)})
    for shown in captured.outputs:
        out.append({"data": _bundle(shown.data), "metadata": {}, "output_type": "display_data"})
    if value is not None:
        data, _ = shell.display_formatter.format(value)
        out.append({"data": _bundle(data), "execution_count": None, "metadata": {}, "output_type": "execute_result"})
    return out


def _plain(outputs: list[dict]) -> list[dict]:
    """Outputs without what never matters: object texts beside a richer form."""
    clean = json.loads(json.dumps(outputs))
    for out in clean:
        data = out.get("data", {})
        if any(key != "text/plain" for key in data):
            data.pop("text/plain", None)
    return clean


class Notebook:
    """A notebook file and the outputs that a run of its cells gives."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.raw = json.loads(self.path.read_text(encoding="utf-8"))
        self.cells = self.raw["cells"]

    def run(self, *, flags: set[str] = frozenset(), limit: int = 60, rewrite: bool = True) -> dict[str, list[dict]]:
        """Execute the cells in order; returns cell id -> outputs for the cells that ran."""
        from IPython.core.interactiveshell import InteractiveShell
        from IPython.utils.capture import capture_output

        shell = InteractiveShell.instance()
        home = types.ModuleType("notebook_" + re.sub(r"\W", "_", self.path.stem))
        sys.modules[home.__name__] = home  # pydantic and dataclasses look names up in the module of a class
        space, future = vars(home), 0
        lines = exported_lines(module := module_path(self.cells))
        done = {}
        for number, cell in enumerate(self.cells):
            source = source_of(cell)
            if cell["cell_type"] != "code" or skipped(marks := directives(source), flags):
                continue
            name, line = self._place(cell, number, source, marks, module, lines)
            try:
                with time_limit(limit, f"cell {number} (#{cell.get('id')})"), capture_output() as captured:
                    run, value_of, future = _compile(source, name, line, rewrite, future)
                    exec(run, space)
                    value = eval(value_of, space) if value_of is not None else None
                done[cell["id"]] = _outputs(captured, value, shell)
            except BaseException as err:
                err.add_note(f"in {self.path.name}, cell {number} (#{cell.get('id')})")
                raise
        return done

    def _place(self, cell, number, source, marks, module, lines) -> tuple[str, int]:
        if module is not None and is_exported(marks) and cell.get("id") in lines:
            text = source.splitlines()
            dropped = next((i for i, row in enumerate(text) if not row.startswith("#|")), len(text))
            while dropped < len(text) and not text[dropped].strip():
                dropped += 1
            return str(module), lines[cell["id"]] - dropped
        name = f"<{self.path.name} #{cell.get('id', number)}>"
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        return name, 1

    def stale(self, outputs: dict[str, list[dict]]) -> list[str]:
        """Ids of the cells whose stored outputs differ from `outputs`; `#| volatile` cells are exempt."""
        wrong = []
        for cell in self.cells:
            if cell["cell_type"] == "code" and cell["id"] in outputs and "volatile" not in directives(source_of(cell)):
                if _plain(cell["outputs"]) != _plain(outputs[cell["id"]]):
                    wrong.append(cell["id"])
        return wrong

    def store(self, outputs: dict[str, list[dict]]) -> None:
        for cell in self.cells:
            if cell["cell_type"] == "code" and cell["id"] in outputs:
                cell["outputs"] = outputs[cell["id"]]
        write_notebook(self.path, self.raw)


def write_notebook(path: Path, raw: dict) -> None:
    text = json.dumps(raw, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8")


@contextmanager
def clean_state():
    """Put back what a notebook may change: folder, environment, figures, torch's seed, threads and default dtype."""
    where, env, path = os.getcwd(), dict(os.environ), list(sys.path)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
    try:
        yield
    finally:
        os.chdir(where)
        sys.path[:] = path
        os.environ.clear()
        os.environ.update(env)
        if plt := sys.modules.get("matplotlib.pyplot"):
            plt.close("all")
        if torch := sys.modules.get("torch"):
            torch.set_default_dtype(torch.float32)
            torch.use_deterministic_algorithms(False)
            torch.set_num_threads(1)
