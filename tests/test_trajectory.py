"""Trajectory records under random tilings and random edits; alignment with a shifted view; files."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miniverl.core import DataError, compact_json, loads_strict
from miniverl.schemas.alignment import align_by_segments, identity_alignment
from miniverl.schemas.trajectory import CRITICAL_SPANS, MODEL_SPANS, SpanType, Trajectory, read_trajectories

few = settings(max_examples=60, deadline=None)
segments = st.lists(
    st.tuples(st.sampled_from(list(SpanType)), st.lists(st.integers(0, 50), min_size=1, max_size=6)),
    min_size=1,
    max_size=8,
)


def record(parts, source="policy", **changes):
    """Plain data of a trajectory whose segment i is `parts[i]`, in turn i."""
    spans, ids = [], []
    for turn, (kind, tokens) in enumerate(parts):
        key = f"gen:{turn}:block" if kind in MODEL_SPANS else f"obs:{turn}"
        spans.append(
            {
                "span_type": str(kind),
                "start": len(ids),
                "end": len(ids) + len(tokens),
                "turn_id": turn,
                "segment_key": key,
            }
        )
        ids += tokens
    data = {
        "trajectory_id": "t:v0:s1",
        "task_id": "t",
        "environment": "calculator",
        "token_ids": ids,
        "spans": spans,
        "turns": [{"turn_id": turn} for turn in range(len(parts))],
        "tokenizer_fingerprint": "f",
        "termination_reason": "max_turns",
        "generated_token_count": sum(len(tokens) for kind, tokens in parts if kind in MODEL_SPANS),
        "metadata": {"source": source},
    }
    return {**data, **changes}


@few
@given(segments)
def test_masks_follow_from_spans_and_lines_round_trip(parts):
    trajectory = Trajectory.parse(record(parts))
    kinds = [kind for kind, tokens in parts for _ in tokens]
    assert trajectory.model_generated_mask == tuple(kind in MODEL_SPANS for kind in kinds)
    assert trajectory.critical_mask == tuple(kind in CRITICAL_SPANS for kind in kinds)
    assert trajectory.model_positions() == [j for j, kind in enumerate(kinds) if j > 0 and kind in MODEL_SPANS]
    assert [trajectory.span_at(j).span_type for j in range(len(kinds))] == kinds
    assert Trajectory.from_line(trajectory.to_line()) == trajectory


@few
@given(segments, st.data())
def test_a_flipped_mask_bit_is_refused(parts, data):
    trajectory = Trajectory.parse(record(parts))
    name = data.draw(st.sampled_from(["model_generated_mask", "critical_mask", "attention_mask"]))
    mask = list(getattr(trajectory, name))
    at = data.draw(st.integers(0, len(mask) - 1))
    assert Trajectory.parse(record(parts, **{name: mask})) == trajectory
    mask[at] = 1 - mask[at]
    with pytest.raises(DataError, match=name):
        Trajectory.parse(record(parts, **{name: mask}))


@few
@given(segments, st.data())
def test_an_edited_border_is_refused(parts, data):
    edited = record(parts)
    span = data.draw(st.sampled_from(edited["spans"]))
    span[data.draw(st.sampled_from(["start", "end"]))] += data.draw(st.sampled_from([-2, -1, 1, 2]))
    with pytest.raises(DataError):
        Trajectory.parse(edited)


@few
@given(segments, st.data())
def test_a_relabelled_party_is_refused(parts, data):
    """Turning context into the model's own text (or back) contradicts key and token count, even if one of them is edited too."""
    edited = record(parts)
    span = data.draw(st.sampled_from(edited["spans"]))
    was_model = span["span_type"] in {str(kind) for kind in MODEL_SPANS}
    span["span_type"] = "tool_result" if was_model else "assistant_text"
    if data.draw(st.booleans()):
        span["segment_key"] = "obs:x" if was_model else "gen:x:text"
    with pytest.raises(DataError):
        Trajectory.parse(edited)


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": [1, 2, "3"]},
        {"token_ids": [1, 2, -3]},
        {"token_ids": [1, 2, True]},
        {"token_ids": [1, 2, 3.0]},
        {"schema_version": 2},
        {"generated_token_count": 99},
        {"termination_reason": "bored"},
        {"verification": {"solved": True, "reward": float("nan"), "failure_category": "solved"}},
        {"verification": {"solved": True, "failure_category": "great"}},
        {"turns": [{"turn_id": 0}, {"turn_id": 0}]},
        {"turns": []},
        {"model_generated_mask": "yes"},
        {"surprise": 1},
    ],
)
def test_malformed_fields_are_named(change):
    parts = [(SpanType.USER, [1, 2]), (SpanType.ASSISTANT_FINAL, [3])]
    with pytest.raises(DataError):
        Trajectory.parse(record(parts, **change))
    Trajectory.parse(record(parts))


def test_a_line_is_small_and_holds_no_mask():
    trajectory = Trajectory.parse(record([(SpanType.USER, [1] * 60), (SpanType.ASSISTANT_FINAL, [2] * 60)]))
    line = trajectory.to_line()
    assert "mask" not in line and "null" not in line and len(line) < 800 and loads_strict(line)["schema_version"] == 1


def test_reading_names_file_and_line(tmp_path):
    line = Trajectory.parse(record([(SpanType.USER, [1]), (SpanType.ASSISTANT_FINAL, [2])])).to_line()
    path = tmp_path / "trajectories.jsonl"
    path.write_text("\ufeff" + line + "\r\n\n" + line + "\n", encoding="utf-8", newline="")
    assert [t.to_line() for t in read_trajectories(path)] == [line, line]
    tampered = loads_strict(line)
    tampered["spans"][0]["span_type"] = "assistant_text"
    for bad in (compact_json(tampered), '{"a":1,"a":2}', "[]", line[:-3], '{"x":NaN}'):
        path.write_text(line + "\n" + bad + "\n", encoding="utf-8")
        rows = read_trajectories(path)
        assert next(rows).to_line() == line
        with pytest.raises(DataError, match=r"trajectories.jsonl:2"):
            next(rows)
    with pytest.raises(DataError, match="cannot read"):
        list(read_trajectories(tmp_path / "missing.jsonl"))


@few
@given(segments, st.lists(st.integers(0, 50), min_size=1, max_size=9))
def test_privileged_alignment_finds_the_same_token_behind_any_prompt(parts, hint):
    student = Trajectory.parse(record(parts))
    shifted = record(parts, source="privileged_teacher_render")
    for span in shifted["spans"]:
        span["start"] += len(hint)
        span["end"] += len(hint)
    shifted["spans"].insert(
        0, {"span_type": "system", "start": 0, "end": len(hint), "turn_id": -1, "segment_key": "privileged"}
    )
    shifted["token_ids"] = hint + shifted["token_ids"]
    teacher = Trajectory.parse(shifted)
    targets = student.model_positions()
    aligned = align_by_segments(student, teacher, targets, [1.0] * len(targets))
    assert aligned.target_token_ids == tuple(teacher.token_ids[t + 1] for t in aligned.teacher_prediction_positions)
    assert (
        aligned.student_prediction_positions
        == identity_alignment(student, targets, [1.0] * len(targets)).student_prediction_positions
    )
