"""The project around the package: two names for one module in a checkout, a wheel that stands alone, generated pages."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from vg_second import PROJECT

ROOT = PROJECT.parents[1]
BODY = ROOT / "miniverl" / "verify_gym"
BESIDE = {
    "bridge",
    "check",
    "crosscheck",
    "endpoint",
    "live",
    "make_readme",
    "modelrow",
    "readiness",
    "recheck",
    "scorecard",
}


def python(*arguments, executable=sys.executable, cwd=PROJECT, **environment):
    return subprocess.run(
        [executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        encoding="utf-8",
        cwd=cwd,
        env={**os.environ, "PYTHONIOENCODING": "utf-8", **environment},
        timeout=300,
    )


# ---- in a checkout


def test_both_names_are_one_module():
    code = """
import pkgutil, sys
import verify_gym, verify_gym.exact, miniverl.verify_gym
from verify_gym import curriculum
import verify_gym.gate as gate
import miniverl.verify_gym.gate, miniverl.verify_gym.exact
assert verify_gym.exact is miniverl.verify_gym.exact and gate is miniverl.verify_gym.gate
assert gate.__spec__.name == gate.__name__ == "miniverl.verify_gym.gate" and gate.__spec__.loader is gate.__loader__
assert sys.modules["verify_gym.curriculum"] is sys.modules["miniverl.verify_gym.curriculum"] is curriculum
try:
    gate.run_policy
except AttributeError:
    pass
try:
    raise miniverl.verify_gym.exact.RowError("x", "y")
except verify_gym.exact.VerifyGymError:
    print("caught")
for missing in ("verify_gym.nothing", "verify_gym.exact.nothing", "verify_gym._nothing"):
    try:
        __import__(missing)
    except ModuleNotFoundError as error:
        assert error.name == missing, error
print(*sorted(set(verify_gym.__all__) & set(dir(verify_gym))))
"""
    run = python("-c", code)
    assert run.returncode == 0, run.stderr
    assert {"caught", "VerifyGymHarness", "VerifyGymTaskset", "load_environment"} <= set(run.stdout.split())


WANTED = (
    "train validation heldout find_task prompt grade reward_fn explain check_certificate run_gate require_green recheck"
)


def test_the_api_names_what_it_says():
    code = """
import sys, verify_gym
api = verify_gym.api  # nothing else was imported
task = api.train(2)
reply = api.POLICIES["cf"](api.prompt(task))
made = api.explain(task, reply)
api.check_certificate(task.to_row(), made)
print(api.reward_fn([reply], task=[task]) == [made["progress"] / made["cap"]], api.run_gate([task]).green)
print(set(sys.argv[1].split()) <= set(api.__all__), sorted(api.__all__) == api.__all__ or set(api.__all__) == set(dict.fromkeys(api.__all__)))
"""
    run = python("-c", code, WANTED)
    assert run.stdout.split() == ["True"] * 4, run.stderr
    run = python(
        "-c", "from verify_gym import api; print([n for n in api.__all__ if not hasattr(api, n)], len(api.heldout()))"
    )
    assert run.stdout.split() == ["[]", "120"], run.stderr
    run = python("-c", "import verify_gym; verify_gym.nothing")
    assert run.returncode == 1 and "has no attribute 'nothing'" in run.stderr


def test_neither_wheel_nor_checkout_is_said():
    """The thin package alone, without its modules."""
    code = """
import sys
sys.path = [p for p in sys.path if not p.endswith("main")] + [sys.argv[1]]
sys.modules["miniverl"] = None
import verify_gym
"""
    run = python("-c", code, PROJECT, cwd="/")
    assert run.returncode == 1 and "install the wheel, or the checkout" in run.stderr.splitlines()[-1]


# ---- the command line


def cli(*arguments, **environment):
    return python("-m", "verify_gym.cli", *arguments, **environment)


def test_gate_command():
    run = cli("gate")
    first, second = run.stdout.splitlines()
    assert run.returncode == 0 and not run.stderr
    assert first == "2240 forgeries planted on 120 rows · 0 leaked · 0 misfiled · 240 green controls · GATE GREEN"
    assert " 0 wrong " in second


def test_baseline_command_prints_the_numbers_of_the_score_card():
    import json

    run, card = cli("baseline", "--json"), json.loads((PROJECT / "scorecard.json").read_text(encoding="utf-8"))
    assert run.returncode == 0 and json.loads(run.stdout)["policies"] == card["policies"]


def test_tasks_command():
    run = cli("tasks", "3", "--prompts")
    assert run.returncode == 0 and run.stdout.count("--- ") == 3 and run.stdout.count("<answer>lo, hi</answer>") == 3


@pytest.mark.parametrize(
    "arguments", [(), ("tasks",), ("tasks", "0"), ("tasks", "-1"), ("tasks", "x"), ("tasks", "9" * 30), ("bake",)]
)
def test_what_cannot_be_read_is_a_usage_error(arguments):
    run = cli(*arguments)
    assert (run.returncode, run.stdout) == (2, "") and "usage:" in run.stderr and "Traceback" not in run.stderr


def test_a_reader_that_leaves_is_no_error():
    command = f"'{sys.executable}' -m verify_gym.cli tasks 4000 | head -1; echo ${{PIPESTATUS[0]}}"
    run = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=PROJECT, timeout=120)
    assert run.stdout.splitlines()[1:] == ["0"] and not run.stderr


RED = """
import sys
from verify_gym import cli, curriculum, gate
{change}
sys.exit(cli.main(sys.argv[1:]))
"""
PAYS = """
from verify_gym.answer import Grade
gate.run_gate.__defaults__ = (None, lambda *_, **__: Grade("CERTIFIED", "CERTIFIED", "CERTIFIED", 30, 8, 8, ""), 60.0)
"""
EDITED = """
right = curriculum.data_bytes
curriculum.data_bytes = lambda name: right(name).replace(b'{old}', b'{new}', 1)
"""
CHANGES = {
    "a grader that pays everything": (PAYS, "GATE RED"),
    "a changed held-out file": (
        EDITED.format(old='"name":"heldout-v0"', new='"name":"heldout-v1"'),
        "heldout-v0.json has sha256",
    ),
    "a changed curriculum": (EDITED.format(old='"cap":8', new='"cap":9'), "family/xx was changed"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("command", [("gate",), ("baseline",), ("tasks", "2")])
def test_nothing_is_handed_out_when_something_is_wrong(change, command):
    code, said = CHANGES[change]
    run = python("-c", RED.format(change=code), *command)
    assert run.returncode == 1 and "Traceback" not in run.stderr, run.stderr
    if command == ("gate",) and said == "GATE RED":
        assert said in run.stdout and "leaked: prose" in run.stdout and not run.stderr
    else:
        assert not run.stdout and len(run.stderr.splitlines()) == 2 and said in run.stderr


# ---- the wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, so that a checkout stays as it is."""
    root = tmp_path_factory.mktemp("checkout")
    skipped = shutil.ignore_patterns("build", "*.egg-info", "__pycache__", "RUN", "dist")
    shutil.copytree(PROJECT, root / "environments" / "verify_gym", ignore=skipped)
    shutil.copytree(BODY, root / "miniverl" / "verify_gym", ignore=skipped)
    stale = root / "environments" / "verify_gym" / "build" / "lib" / "verify_gym"
    stale.mkdir(parents=True)
    (stale / "gone.py").write_text("an earlier build's module")
    out = tmp_path_factory.mktemp("wheel")
    build = ["-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "-w", out]
    run = python(*build, root / "environments" / "verify_gym")
    assert run.returncode == 0, run.stderr
    [path] = out.iterdir()
    return path


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_the_wheel_holds_the_package_and_nothing_beside_it(wheel):
    names = names_in(wheel)
    assert {name.split("/")[0] for name in names} == {"verify_gym"}
    held = {name.removeprefix("verify_gym/").removesuffix(".py") for name in names if name.endswith(".py")}
    own = {"__init__", "api"}
    assert held == {path.stem for path in BODY.glob("*.py")} - {"endpoint", "readiness"} | own
    assert held >= {
        "exact",
        "answer",
        "families",
        "curriculum",
        "gate",
        "policies",
        "rollouts",
        "adapters_v0",
        "adapters_v1",
    }
    assert not held & BESIDE
    data = {name for name in names if not name.endswith(".py")}
    assert data == {"verify_gym/data/curriculum.json", "verify_gym/data/heldout-v0.json"}
    with zipfile.ZipFile(wheel) as archive:
        for name in data | {"verify_gym/exact.py"}:
            assert archive.read(name) == (BODY / name.removeprefix("verify_gym/")).read_bytes()


def test_the_wheel_says_what_it_is(wheel):
    with zipfile.ZipFile(wheel) as archive:
        info = next(name for name in archive.namelist() if name.endswith("METADATA"))
        fields = email.message_from_string(archive.read(info).decode())
        assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())
    assert (fields["Name"], fields["License-Expression"]) == ("verify-gym", "MIT")
    assert all("extra ==" in needs for needs in fields.get_all("Requires-Dist"))
    assert fields.get_payload().startswith("# verify-gym")


ALONE = """
import sys

class OnlyStandard:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in {*sys.stdlib_module_names, "verify_gym"}:
            raise ModuleNotFoundError(f"blocked: {name}")

sys.meta_path.insert(0, OnlyStandard())
sys.path.insert(0, sys.argv.pop(1))
import verify_gym.api as api
from verify_gym import cli
assert api.Task.__module__ == "verify_gym.answer" and "miniverl" not in sys.modules
task = api.train(0)
print(api.grade(task, api.POLICIES["cf"](api.prompt(task))).verdict)
sys.exit(cli.main(["gate"]))
"""


def test_the_wheel_works_on_the_standard_library_alone(wheel, tmp_path):
    """Imported from the archive itself, every other package blocked."""
    run = python("-I", "-c", ALONE, wheel, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    certified, gate, _ = run.stdout.splitlines()
    assert certified == "CERTIFIED" and gate.endswith("GATE GREEN")


@pytest.mark.slow
def test_the_wheel_in_a_clean_environment(wheel, tmp_path):
    home = tmp_path / "clean"
    venv.create(home, with_pip=False)
    clean = home / "bin" / "python"
    target = next((home / "lib").glob("python*")) / "site-packages"
    install = [
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--target",
        target,
    ]
    assert python(*install, wheel).returncode == 0
    for arguments in (("gate",), ("baseline",), ("tasks", "2", "--prompts")):
        run = python("-m", "verify_gym.cli", *arguments, executable=clean, cwd=tmp_path)
        assert run.returncode == 0 and run.stdout, run.stderr
    run = python("-c", "import miniverl", executable=clean, cwd=tmp_path)
    assert "No module named 'miniverl'" in run.stderr


@pytest.mark.slow
def test_a_source_archive_builds_the_same_wheel(wheel, tmp_path):
    copy, out = tmp_path / "environments" / "verify_gym", tmp_path / "out"
    skipped = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
    shutil.copytree(PROJECT, copy, ignore=skipped)
    shutil.copytree(BODY, tmp_path / "miniverl" / "verify_gym", ignore=skipped)
    made = python("-c", "from setuptools.build_meta import build_sdist; build_sdist('out')", cwd=copy)
    assert made.returncode == 0, made.stderr
    shutil.unpack_archive(next((copy / "out").glob("*.tar.gz")), tmp_path / "unpacked")
    [source] = (tmp_path / "unpacked").iterdir()
    build = ["-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "-w", out]
    assert python(*build, source).returncode == 0
    assert names_in(next(out.iterdir())) == names_in(wheel)


# ---- pages and metadata


def test_the_readme_is_the_generated_one():
    run = python(PROJECT / "make_readme.py", "--check")
    assert run.returncode == 0, run.stderr


@pytest.fixture
def copy(tmp_path):
    """The project's folder, to be damaged."""
    place = tmp_path / "environments" / "verify_gym"
    shutil.copytree(PROJECT, place, ignore=shutil.ignore_patterns("build", "__pycache__", "*.egg-info"))
    return place


TAMPERED = {
    "a better mean": ("scorecard.json", lambda text: text.replace('"mean": 0.977', '"mean": 0.997', 1)),
    "fewer refuted": ("scorecard.json", lambda text: text.replace('"refuted": 28', '"refuted": 27', 1)),
    "another gate line": ("scorecard.json", lambda text: text.replace("0 misfiled", "1 misfiled", 1)),
    "differences": ("scorecard.json", lambda text: text.replace('"differences": 0', '"differences": 1', 1)),
    "half a card": ("scorecard.json", lambda text: text[:200]),
    "an empty card": ("scorecard.json", lambda text: "{}"),
    "no card": ("scorecard.json", lambda text: None),
    "another battery's matrix": ("kill-matrix.json", lambda text: text.replace("2240 forgeries", "2241 forgeries", 1)),
    "a list": ("kill-matrix.json", lambda text: "[]"),
    "rows that are none": ("kill-matrix.json", lambda text: text[: text.index('"rows"')] + '"rows": [1]}'),
}


@pytest.mark.parametrize("name", TAMPERED)
def test_no_readme_is_made_from_an_edited_card_or_matrix(name, copy):
    file, change = TAMPERED[name]
    before, text = (copy / "README.md").read_bytes(), (copy / file).read_text(encoding="utf-8")
    changed = change(text)
    assert changed != text
    if changed is None:
        (copy / file).unlink()
    else:
        (copy / file).write_text(changed, encoding="utf-8")
    run = python(copy / "make_readme.py", PYTHONPATH=str(ROOT))
    assert run.returncode == 1 and len(run.stderr.splitlines()) == 2 and file in run.stderr, run.stderr
    assert (copy / "README.md").read_bytes() == before


@pytest.mark.parametrize(
    "words", [("make_conformance.py", "--out", "none/x"), ("recheck.py", "none/x"), ("recheck.py", ".")]
)
def test_a_file_that_cannot_be_is_two_lines(words, tmp_path):
    run = python(PROJECT / words[0], *words[1:], cwd=tmp_path)
    assert run.returncode == 1 and not run.stdout and len(run.stderr.splitlines()) == 2, run.stderr


def test_an_edited_readme_is_seen(copy):
    readme = copy / "README.md"
    readme.write_text(readme.read_text(encoding="utf-8").replace("0 leaked", "1 leaked", 1), encoding="utf-8")
    run = python(copy / "make_readme.py", "--check", PYTHONPATH=str(ROOT))
    assert run.returncode == 1 and len(run.stderr.splitlines()) == 2


def test_every_number_in_the_template_is_a_placeholder_or_a_name():
    """What a measurement could change isn't typed: no number of three digits and no decimal fraction."""
    text = (PROJECT / "README.template.md").read_text(encoding="utf-8")
    prose = re.sub(r"```.*?```|`[^`]*`|\{\{\w+\}\}|\]\([^)]*\)", "", text, flags=re.DOTALL)
    assert re.findall(r"\d{3,}|\d+\.\d+", prose.replace("`verifiers` 0.4", "")) in ([], ["0.4"])


def test_files_that_the_readme_names_exist():
    text = (PROJECT / "README.md").read_text(encoding="utf-8")
    linked = re.findall(r"blob/main/environments/verify_gym/([\w.-]+)", text)
    scripts = re.findall(r"`(\w+\.(?:py|js))`", text)
    assert linked and scripts
    assert not [name for name in {*linked, *scripts} if not (PROJECT / name).exists()]


def test_one_version_everywhere():
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    code = "import verify_gym; print(verify_gym.__version__)"
    assert python("-c", code).stdout.strip() == project["version"]
    assert project["dependencies"] == [] and set(project["optional-dependencies"]) == {"v0", "v1"}
