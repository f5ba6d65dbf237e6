"""What may not be imported when, and that a base install without torch still does everything that reads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from run_fixture import RECIPE, make_run

ROOT = Path(__file__).resolve().parents[1]
BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in ('torch', 'safetensors', 'transformers', 'peft', 'accelerate'):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Block())
"""
RUN = """
from miniverl.cli import main
def run(*words):
    try:
        main(list(words))
    except SystemExit as end:
        return end.code
"""


def python(code: str, *argv: object) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, argv)], capture_output=True, text=True, env=env, timeout=120
    )


def test_reading_commands_never_import_torch(tmp_path):
    run_dir = make_run(tmp_path / "runs").path
    (tmp_path / "r.yaml").write_text(RECIPE)
    code = RUN + (
        "import sys, os\n"
        "folder, run_dir = sys.argv[1], sys.argv[2]\n"
        "sys.stdout = open(os.devnull, 'w')\n"
        "codes = [run('--help'), run('validate', folder + '/r.yaml'), run('train', folder + '/r.yaml', '--dry-run'), run('inspect', run_dir),\n"
        "         run('report', run_dir, '--out', folder + '/out'), run('cache', 'stats', folder, '--no-verify'), run('cache', 'validate', folder)]\n"
        "print(codes, sorted({'torch', 'transformers', 'pandas'} & set(sys.modules)), file=sys.__stdout__)\n"
    )
    done = python(code, tmp_path, run_dir)
    assert done.stdout.strip() == "[0, 0, 0, 0, 0, 1, 1] []", done.stderr


def test_help_is_quick_to_import():
    code = "import sys, miniverl.cli; print(*sorted({'torch', 'matplotlib', 'pandas', 'pydantic', 'rich', 'yaml', 'numpy'} & set(sys.modules)))"
    assert python(code).stdout.strip() == ""


@pytest.mark.parametrize(
    "words", [("train", "{}/r.yaml"), ("demo", "--output", "{}/demo"), ("eval", "--run", "{}/runs/tiny")]
)
def test_training_without_torch_names_the_install_line(tmp_path, words):
    make_run(tmp_path / "runs")
    (tmp_path / "r.yaml").write_text(RECIPE)
    done = python(BLOCK + RUN + "sys.exit(run(*sys.argv[1:]))", *(w.format(tmp_path) for w in words))
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.splitlines() == ["error: torch is not installed", 'hint: pip install -e ".[train]"']
    assert sorted(p.name for p in tmp_path.iterdir()) == ["r.yaml", "runs"]


def test_everything_that_reads_works_without_the_training_extra(tmp_path):
    make_run(tmp_path / "runs")
    (tmp_path / "r.yaml").write_text(RECIPE)
    code = (
        BLOCK
        + RUN
        + (
            "import os\n"
            "folder = sys.argv[1]; sys.stdout = open(os.devnull, 'w')\n"
            "codes = [run('doctor', '--json'), run('validate', folder + '/r.yaml'), run('inspect', folder + '/runs/tiny'), run('report', folder + '/runs/tiny')]\n"
            "print(codes, file=sys.__stdout__)\n"
        )
    )
    done = python(code, tmp_path)
    assert done.stdout.strip() == "[0, 0, 0, 0]", done.stderr


def test_public_names_without_torch():
    code = BLOCK + (
        "import miniverl\n"
        "print(miniverl.RunConfig.__name__)\n"
        "try:\n    miniverl.OPDTrainer\n"
        "except miniverl.MiniVerlError as error:\n    print(type(error).__name__, error.hint)\n"
    )
    assert python(code).stdout.splitlines() == ["RunConfig", 'MissingDependencyError pip install -e ".[train]"']


def test_floors_that_must_not_need_torch():
    """Importing every module of the torch-free floors, one after the other, never loads torch."""
    free = [
        "core",
        "store",
        "console",
        "doctor",
        "cli",
        "demo",
        "commands",
        "schemas",
        "environments",
        "selection",
        "reporting",
        "cache",
        "agent/protocol.py",
        "agent/stats.py",
    ]
    modules = []
    for name in free:
        place = ROOT / "miniverl" / name
        files = (
            [place]
            if place.suffix == ".py"
            else sorted(place.glob("*.py"))
            if place.is_dir()
            else [place.with_suffix(".py")]
        )
        modules += [
            f"miniverl.{f.relative_to(ROOT / 'miniverl').with_suffix('').as_posix().replace('/', '.')}"
            for f in files
            if f.stem != "__init__"
        ]
    code = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\n    assert 'torch' not in sys.modules, name\nprint(len(sys.argv) - 1)"
    done = python(code, *modules)
    assert done.stdout.strip() == str(len(modules)) and len(modules) > 20, done.stderr
