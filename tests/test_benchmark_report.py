"""A result file is untrusted text: whatever it holds, the picture is XML, the tables keep their columns, the caveats stay."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from miniverl.commands.bench import caveats
from miniverl.core import sha256_bytes
from miniverl.evaluation.schema import BenchmarkResult
from miniverl.reporting.benchmarks import SINGLE_SEED_MARK, render_benchmark_markdown
from miniverl.reporting.comparison import benchmark_svg, bytes_text, escape_markdown, fit_label, one_line

ROOT = Path(__file__).resolve().parents[1]
PUBLISHED = ROOT / "benchmarks" / "results" / "published"
GPU = BenchmarkResult.read(PUBLISHED / "gpu-calc-hard-equal-update-v2.json")
TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=90)


def with_arms(names, seeds=(1234,), **over) -> BenchmarkResult:
    arms = [GPU.arms[i % 5].model_copy(update={"name": n, "seed": s}) for s in seeds for i, n in enumerate(names)]
    return GPU.model_copy(update={"arms": arms, "seeds": list(seeds), **over})


def pipes(line: str) -> int:
    """Cell borders of a table row: pipes behind an even number of backslashes."""
    return len(re.findall(r"(?<!\\)(?:\\\\)*\|", line))


def tables(page: str) -> list[list[str]]:
    found: list[list[str]] = [[]]
    for line in page.splitlines():
        if line.startswith("| ") or line.startswith("|-"):
            found[-1].append(line)
        elif found[-1]:
            found.append([])
    return [rows for rows in found if rows]


@settings(max_examples=30, deadline=None)
@given(names=st.lists(TEXT, min_size=1, max_size=3, unique=True), title=TEXT, notes=TEXT)
@example(names=["|", "\\|", "a\\"], title="# x", notes="\n\n# heading\n| a | b |")
@example(names=["`x`", "<b>", "$\\frac$"], title="]]>", notes="\u202e\x00")
@example(names=["0"], title="0", notes="\r")
@example(names=["\x85", " ", "\u2028"], title="-->", notes="--- \\")
def test_any_name_leaves_tables_whole(names, title, notes):
    page = render_benchmark_markdown(with_arms(names, name=title, notes=notes, description=notes))
    found = tables(page)
    assert [len(rows) for rows in found] == [2 + len(names)] * 4, "one row for each arm, in each table"
    for rows in found:
        assert {pipes(row) for row in rows} == {pipes(rows[0])}
        assert "\ufffe" not in "".join(rows) and all(row.isprintable() for row in rows)
    headings = [line for line in page.splitlines() if line.startswith("#")]
    assert len(headings) == 5 + bool(one_line(notes)) and [h for h in headings if h.startswith("# ")] == headings[:1]
    assert not re.search(r"<(?!/)", page), "no tag"


@settings(max_examples=12, deadline=None)
@given(names=st.lists(TEXT, min_size=1, max_size=2, unique=True), title=TEXT)
@example(names=["$\\frac$", "$$", " "], title="$x")
@example(names=["a\"b'c", "\x00\x1b\ufffe"], title="<!-- ]]> &amp;")
@example(names=['<g id="arm-1">', "arm-0"], title='"')
def test_any_name_gives_well_formed_xml(names, title):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        svg = benchmark_svg(with_arms(names, name=title), source_sha256="ab" * 32)
    told = [node.get("data-arm") for node in ElementTree.fromstring(svg).iter() if "data-arm" in node.attrib]
    assert told == [one_line(name) for name in names], "every arm's data stands at its own label"


@given(TEXT)
def test_escaped_text_is_one_line_without_markup(text):
    shown = escape_markdown(text)
    assert shown == escape_markdown(one_line(text)) and shown.isprintable()
    assert not re.search(r"(?<!\\)(?:\\\\)*[|`*_\[\]#$~]", shown) and "<" not in shown
    assert len(fit_label(text)) <= 31


@pytest.mark.parametrize("seeds", [(1,), (1, 2), tuple(range(12))])
def test_the_single_seed_mark_stands_in_the_header_line_and_only_there(seeds):
    result = with_arms(["a", "b"], seeds)
    page = render_benchmark_markdown(result)
    marked = [line for line in page.splitlines() if SINGLE_SEED_MARK in line]
    assert len(marked) == (len(seeds) == 1) and all(line.startswith("miniverl 0.2.0; commit") for line in marked)
    assert ("no significance is claimed" in benchmark_svg(result, source_sha256="0" * 64)) == (len(seeds) == 1)


def test_table_and_picture_show_the_aggregate():
    result = with_arms(["a", "b"], (1, 2, 3))
    rates = iter([0.5, 1.0, 0.25, 1.0, 0.75, 0.125])
    arms = [arm.model_copy(update={"success_rate": next(rates), "train_seconds": 2.0}) for arm in result.arms]
    result = result.model_copy(update={"arms": arms})
    page, svg = render_benchmark_markdown(result), benchmark_svg(result, source_sha256="0" * 64)
    assert "| a | 3 | 50 % | 25 % | 75 % | 0 | no |" in page and "| b | 3 | 70.8 % | 12.5 % | 100 % | 12 | no |" in page
    nodes = [dict(n.attrib) for n in ElementTree.fromstring(svg).iter() if "data-arm" in n.attrib]
    assert [(n["data-success-mean"], n["data-train-seconds-mean"]) for n in nodes] == [("0.5", "2"), ("0.708333", "2")]
    assert svg.count(">70.8 %<") == 1 and svg.count("2.0 s") == 2


def test_what_was_not_measured_is_said_and_never_zero():
    gone = {name: None for name in ("train_seconds", "evaluation_seconds", "wall_seconds", "peak_allocated_bytes")}
    arms = [arm.model_copy(update=gone) for arm in GPU.arms]
    page = render_benchmark_markdown(GPU.model_copy(update={"arms": arms}))
    assert page.count("| not measured | not measured | not measured | not measured |") == len(arms)
    svg = benchmark_svg(GPU.model_copy(update={"arms": arms}), source_sha256="0" * 64)
    assert svg.count("not measured") == 5 and svg.count('data-train-seconds-mean="null"') == 5


def test_one_unmeasured_seed_leaves_no_mean_of_the_others():
    arms = [a.model_copy(update={"train_seconds": None}) if a.seed == 1234 else a for a in GPU.arms]
    assert benchmark_svg(GPU.model_copy(update={"arms": arms}), source_sha256="0" * 64).count(">not measured<") == 5


def test_left_out_arms_and_seeds_are_named():
    controlled = {**GPU.controlled, "declared_seeds": [1234, 20260727, 3], "declared_arms": ["cold-start-only", "x|y"]}
    page = render_benchmark_markdown(GPU.model_copy(update={"controlled": controlled}))
    assert "**Only a part of the declared comparison was run**; left out: seed 3; arm x\\|y." in page
    assert "Only a part" not in render_benchmark_markdown(GPU)


SAYS_LITTLE = [
    {},
    {"budget": None},
    {"budget": [], "allowed_differences": 3},
    {"budget": {}},
    {"declared_seeds": [[1], {}], "declared_arms": 3, "budget": {"violations": 3}},
]


@pytest.mark.parametrize("controlled", SAYS_LITTLE)
def test_controls_that_say_little_still_render(controlled):
    assert isinstance(caveats(GPU.model_copy(update={"controlled": controlled})), list)
    page = render_benchmark_markdown(GPU.model_copy(update={"controlled": controlled, "cold_start": None}))
    assert "## Controls" in page and "Measured, not matched" in page


def test_bytes_do_not_depend_on_process_style_or_locale():
    code = (
        "import sys, hashlib, matplotlib; from miniverl.evaluation.schema import BenchmarkResult\n"
        "from miniverl.reporting.benchmarks import benchmark_svg, render_benchmark_markdown\n"
        "matplotlib.rcParams.update({'font.size': 31, 'axes.facecolor': 'red', 'svg.fonttype': 'path'})\n"
        "r = BenchmarkResult.read(sys.argv[1])\n"
        "text = benchmark_svg(r, source_sha256='ab' * 32) + render_benchmark_markdown(r)\n"
        "print(hashlib.sha256(text.encode()).hexdigest())"
    )
    here = sha256_bytes(benchmark_svg(GPU, source_sha256="ab" * 32) + render_benchmark_markdown(GPU))
    path = str(PUBLISHED / "gpu-calc-hard-equal-update-v2.json")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "77", "LC_ALL": "C", "TZ": "Asia/Tokyo"}
    there = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, env=env, check=True)
    assert there.stdout.strip() == here


def test_rendering_a_page_imports_neither_torch_nor_matplotlib():
    code = (
        "import sys; from miniverl.evaluation.schema import BenchmarkResult\n"
        "from miniverl.reporting.benchmarks import render_benchmark_markdown\n"
        "render_benchmark_markdown(BenchmarkResult.read(sys.argv[1]))\n"
        "print(sorted({'torch', 'matplotlib', 'ray', 'pandas'} & set(sys.modules)))"
    )
    path = str(PUBLISHED / "cpu-toy-calc-matched.json")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, env=env)
    assert done.stdout.strip() == "[]", done.stderr


def test_sizes_for_people():
    assert [bytes_text(n) for n in (0, 1023, 1024, 5 * 2**40)] == ["0 B", "1,023 B", "1.0 KiB", "5,120.0 GiB"]
