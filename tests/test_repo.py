"""The repository keeps its own promises: package equals notebooks, notebooks clean, pages in step, metadata from one place."""

from __future__ import annotations

import ast
import filecmp
import json
import re
import shutil
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "nbs").glob("*.ipynb"))
sys.path.insert(0, str(ROOT / "tools"))

import nb  # noqa: E402
import readme  # noqa: E402
from nbcells import directives, is_exported, source_of  # noqa: E402


def load(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def settings() -> dict[str, str]:
    parser = ConfigParser(delimiters=["="])
    parser.read(ROOT / "settings.ini", encoding="utf-8")
    return dict(parser["DEFAULT"])


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """settings.ini and nbs/ alone, cleaned and exported afresh."""
    where = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "nbs", where / "nbs", ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints"))
    for name in ("settings.ini", "pyproject.toml"):
        shutil.copy(ROOT / name, where / name)
    bin_dir = Path(sys.executable).parent
    for command in ("nbdev_clean", "nbdev_export"):
        subprocess.run([bin_dir / command], cwd=where, check=True, capture_output=True)
    return where


def sources(folder: Path) -> dict[str, Path]:
    return {str(p.relative_to(folder)): p for p in folder.rglob("*.py")}


def test_package_is_exactly_what_the_notebooks_export(copy):
    fresh, committed = sources(copy / "miniverl"), sources(ROOT / "miniverl")
    assert sorted(fresh) == sorted(committed), "a module is missing or has no notebook: run `make export`"
    assert [n for n in fresh if not filecmp.cmp(fresh[n], committed[n], shallow=False)] == []


def test_nbdev_clean_changes_no_notebook(copy):
    assert [p.name for p in NOTEBOOKS if p.read_bytes() != (copy / "nbs" / p.name).read_bytes()] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_hygiene(path):
    raw = load(path)
    ids = [cell["id"] for cell in raw["cells"]]
    assert len(set(ids)) == len(ids)
    assert [i for i in ids if re.fullmatch(r"[0-9a-f]{8}|cell-\d+", i)] == [], "cell ids are names, not numbers"
    assert raw["cells"][0]["cell_type"] == "markdown" and source_of(raw["cells"][0]).startswith("# ")
    assert path.stat().st_size < 250_000
    for cell in raw["cells"]:
        if cell["cell_type"] == "code":
            check_code_cell(cell)


def check_code_cell(cell: dict) -> None:
    source, where = source_of(cell), cell["id"]
    marks = directives(source)
    tree = ast.parse(source)  # magics and shell lines do not parse
    if not is_exported(marks):
        return
    imports = [isinstance(node, ast.Import | ast.ImportFrom) for node in tree.body]
    assert all(imports) or not any(imports), f"{where}: imports share a cell with other code"
    names = {name.split(".")[0] for node in ast.walk(tree) for name in imported(node)}
    assert not names & {"nbdev", "fastcore", "IPython", "pytest", "hypothesis"}, (
        f"{where}: a development tool in exported code"
    )


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_text_round_trip(path):
    raw = load(path)
    text = nb.to_text(raw)
    assert nb.to_text(nb.from_text(text)) == text
    assert nb.from_text(text, raw)["cells"] == raw["cells"]


def test_changed_code_loses_its_output():
    raw = nb.from_text("%%%% code a\n1 + 1\n")
    raw["cells"][0]["outputs"] = [{"output_type": "stream", "name": "stdout", "text": ["2"]}]
    assert nb.from_text("%%%% code a\n1 + 1\n", raw)["cells"][0]["outputs"]
    assert not nb.from_text("%%%% code a\n1 + 2\n", raw)["cells"][0]["outputs"]
    with pytest.raises(SystemExit, match="used twice"):
        nb.from_text("%%%% code a\n1\n%%%% md a\nx\n")


def test_readme_is_the_index_notebook():
    assert (ROOT / "README.md").read_text(encoding="utf-8") == readme.render(load(ROOT / "nbs" / "index.ipynb"))


def test_version_comes_from_settings():
    import miniverl

    assert miniverl.__version__ == settings()["version"]


def test_constraints_pin_every_requirement():
    pins = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().split()
        if "==" in line
    }
    wanted = [req for key, value in settings().items() if key.endswith("requirements") for req in value.split()]
    names = {re.split(r"[\[<>=]", req)[0].lower().replace("_", "-") for req in wanted}
    assert names <= pins, names - pins


FLOORS = (
    ("core", "portable", "store"),
    ("schemas", "utils"),
    ("models", "environments"),
    ("agent", "teachers", "cache", "selection", "losses", "wsm"),
    ("training",),
    ("evaluation", "campaign", "reporting"),
    ("cli", "commands", "console", "demo", "doctor"),
)
BESIDE = {"verify_gym"}  # imports nothing of the floors, and no floor imports it
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


def rooms_imported(name: str, text: str) -> set[str]:
    """Rooms of the package that the module file `name` imports; the export writes relative imports."""
    rooms = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = ["miniverl", *name.removesuffix(".py").split("/")][: -node.level]
            targets = [
                ".".join(base + (node.module.split(".") if node.module else [alias.name])) for alias in node.names
            ]
        else:
            targets = imported(node)
        rooms |= {t.split(".")[1] for t in targets if t.startswith("miniverl.")}
    return rooms


def upward(name: str, text: str) -> list[str]:
    home = name.split("/")[0].removesuffix(".py")
    own = FLOOR.get(home)
    found = sorted(rooms_imported(name, text))
    if home in BESIDE:
        return [f"{name} imports {room}" for room in found if room != home]
    return [f"{name} imports {room}" for room in found if own is not None and FLOOR.get(room, own + 1) > own]


def test_floors_import_only_downwards():
    modules = {name: path.read_text(encoding="utf-8") for name, path in sources(ROOT / "miniverl").items()}
    assert sum(len(rooms_imported(*item)) for item in modules.items()) > 100, "imports are seen"
    assert [line for item in modules.items() for line in upward(*item)] == []


@pytest.mark.parametrize(
    "text", ["from ..training.phases import Cycle", "from .. import cli", "import miniverl.reporting.pages"]
)
def test_an_import_from_a_higher_floor_is_noticed(text):
    assert (
        len(upward("losses/chunked.py", text)) == 1 and upward("losses/chunked.py", "from ..core import digest") == []
    )
