"""Reports are pure functions of the records: the same bytes in any process, nothing written but the pages."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest
from run_fixture import episode, held_out, make_run

from miniverl.core import DataError, StoreError
from miniverl.reporting import charts
from miniverl.reporting.inspect import transcript_text
from miniverl.reporting.pages import choose_examples, render, write_report
from miniverl.reporting.records import RunRecords, describe_change, eval_points, load_run, success_change
from miniverl.schemas.trajectory import MODEL_SPANS, SPAN_COLOURS, Span


def tree(folder):
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


def test_every_picture_is_well_formed_and_points_nowhere(tmp_path):
    pages = render(load_run(make_run(tmp_path).path), [episode("t1:final:v4")])
    for name, text in pages.items():
        if name.endswith(".svg"):
            root = ET.fromstring(text)
            assert root.tag.endswith("svg") and root.get("viewBox")
            links = [v for node in root.iter() for k, v in node.attrib.items() if k.endswith("href")]
            assert all(link.startswith("#") for link in links), "a picture must not need anything from outside"


def test_bytes_do_not_depend_on_process_style_or_locale(tmp_path):
    run = make_run(tmp_path).path
    code = (
        "import sys, hashlib, matplotlib; from miniverl.reporting.pages import render; from miniverl.reporting.records import load_run\n"
        "matplotlib.rcParams.update({'font.size': 31, 'axes.facecolor': 'red', 'svg.fonttype': 'path'})\n"
        "pages = render(load_run(sys.argv[1]))\n"
        "print(hashlib.sha256(repr(sorted(pages.items())).encode()).hexdigest())"
    )
    here = hashlib.sha256(repr(sorted(render(load_run(run)).items())).encode()).hexdigest()
    env = {**os.environ, "PYTHONHASHSEED": "77", "LC_ALL": "C", "TZ": "Asia/Tokyo"}
    there = subprocess.run(
        [sys.executable, "-c", code, str(run)], capture_output=True, text=True, env=env, check=True
    ).stdout.strip()
    assert there == here


def test_report_is_the_same_when_written_twice_and_leaves_the_records_alone(tmp_path):
    run = make_run(tmp_path / "runs").path
    before = tree(tmp_path)
    first = {p.name: p.read_bytes() for p in write_report(run, tmp_path / "a")}
    assert {k: v for k, v in tree(tmp_path).items() if not k.startswith("a")} == before, "no lock, no change in the run"
    assert first == {p.name: p.read_bytes() for p in write_report(run, tmp_path / "b")}
    write_report(run)
    again = {p.name: p.read_bytes() for p in write_report(run)}
    assert again == first, "a report in the run directory is not part of what it reports"


def test_numbers_of_the_page(tmp_path):
    page = render(load_run(make_run(tmp_path).path))["report.md"]
    assert "rose from 25 % (1 of 4) after the cold start to 75 % (3 of 4) after on-policy distillation" in page
    assert "| positions trained on | 80 |" in page and "| share of the model's positions | 90.9 % |" in page
    assert "| tool call | 60 | 75 % |" in page
    assert "| generated tokens per solved task | - | 120 | 40 |" in page, "no solved task means no ratio, not zero"
    assert "not measured" in page, "a CPU run has no GPU memory, whatever machine it ran on"


@pytest.mark.parametrize("after,verb", [(3, "rose"), (2, "did not change"), (1, "fell")])
def test_words_follow_the_numbers(after, verb):
    records = RunRecords("r", metrics=[held_out("baseline", 0, 2), held_out("final", 5, after)])
    assert success_change(records).verb == verb and verb in describe_change(success_change(records))


def test_cold_start_gain_is_not_credited_to_the_method(tmp_path):
    records = load_run(make_run(tmp_path).path)
    without = RunRecords("r", metrics=[r for r in records.metrics if r.get("tag") != "cold-start"])
    assert success_change(without) is None and "not measured" in describe_change(None)


def test_foreign_evaluations_stay_off_the_curve(tmp_path):
    records = load_run(make_run(tmp_path).path)
    foreign = [
        held_out("standalone", 9, 4),
        held_out("benchmark-opd", 9, 4),
        {**held_out("cycle7", 7, 4), "split": "test"},
    ]
    more = RunRecords("r", config=records.config, metrics=[*records.metrics, *foreign])
    assert eval_points(more) == eval_points(records)


def test_unfinished_run_is_said_to_be_unfinished(tmp_path):
    page = render(load_run(make_run(tmp_path, finished=False).path))["report.md"]
    assert "not complete: its status is `interrupted`" in page and "not recorded" in page


def test_torn_last_line_is_tolerated_and_torn_middle_is_not(tmp_path):
    run = make_run(tmp_path)
    whole = run.metrics.read_text()
    run.metrics.write_text(whole + '{"phase": "op')
    assert len(load_run(run.path).metrics) == len(whole.splitlines())
    run.metrics.write_text('{"phase": "op\n' + whole)
    with pytest.raises(DataError, match="line 1"):
        load_run(run.path)


def test_a_folder_that_is_no_run_is_refused_and_not_created(tmp_path):
    for target in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(StoreError):
            write_report(target)
    assert list(tmp_path.iterdir()) == []


def test_hostile_text_cannot_break_page_or_terminal(tmp_path):
    bad = episode("t|<b>:final:v1", answer="```\n# owned\n\x1b[31m | <script>", solved=False)
    page = render(RunRecords("r"), [bad])["report.md"]
    section = page.split("## Episodes")[1].split("## Provenance")[0]
    assert "\x1b" not in page and "\x1b" not in transcript_text(bad)
    assert section.count("````") == 2, "the fence is longer than any run of ticks inside"
    assert "### t\\|&lt;b>" in section


def test_examples_show_failures_but_not_only():
    pool = [episode(f"s{i}") for i in range(3)] + [episode(f"f{i}", solved=False, answer="8") for i in range(9)]
    chosen = [t.trajectory_id[0] for t in choose_examples(pool, 5)]
    assert chosen == ["f", "f", "f", "s", "s"]


def test_strip_marks_what_the_model_wrote():
    spans = [
        Span(span_type=kind, start=start, end=end, turn_id=0)
        for kind, start, end in (("system", 0, 4), ("assistant_final", 4, 6))
    ]
    cells = charts.strip_cells(spans)
    assert (
        cells[4:] == [SPAN_COLOURS["assistant_final"]] * 2
        and len(set(cells[:4])) == 1
        and cells[0] != SPAN_COLOURS["system"]
    )


def test_palette_stays_apart_for_common_colour_blindness():
    """Machado et al. (2009) matrices at full severity; solid colours must stay 20 units apart in Lab."""

    def linear(hex_colour):
        parts = [int(hex_colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]

    def lab(rgb):
        xyz = [
            sum(w * c for w, c in zip(row, rgb, strict=True))
            for row in ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
        ]
        f = [v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in (xyz[0] / 0.9505, xyz[1], xyz[2] / 1.089)]
        return 116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])

    views = {
        "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
        "protan": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
        "deutan": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
        "tritan": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
    }
    solid = [SPAN_COLOURS[kind] for kind in MODEL_SPANS]
    for name, matrix in views.items():
        seen = [
            lab([min(max(sum(w * c for w, c in zip(row, linear(colour), strict=True)), 0), 1) for row in matrix])
            for colour in solid
        ]
        for i, a in enumerate(seen):
            for b in seen[:i]:
                assert sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) ** 0.5 > 20, name
