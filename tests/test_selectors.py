"""Selectors under random episodes: only the model's tokens, sizes as declared, the same choice in every process."""

from __future__ import annotations

import math
import subprocess
import sys
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miniverl.schemas.config import SelectionSection
from miniverl.schemas.trajectory import MODEL_SPANS, SpanType, Trajectory
from miniverl.selection.selectors import aggregate_selection_stats, select

few = settings(max_examples=100, deadline=None)
SELECTORS = ("all_model_tokens", "tool_and_final", "uniform_ratio", "hybrid")
shapes = st.lists(st.tuples(st.sampled_from(list(SpanType)), st.integers(1, 9)), min_size=1, max_size=8)


def episode(shape, trajectory_id="t:v0:s1"):
    spans, at = [], 0
    for turn, (kind, length) in enumerate(shape):
        spans.append({"span_type": str(kind), "start": at, "end": at + length, "turn_id": turn})
        at += length
    return Trajectory.parse(
        {
            "trajectory_id": trajectory_id,
            "task_id": "t",
            "environment": "calculator",
            "token_ids": list(range(at)),
            "spans": spans,
            "turns": [{"turn_id": turn} for turn in range(len(shape))],
            "termination_reason": "max_turns",
            "generated_token_count": sum(length for kind, length in shape if kind in MODEL_SPANS),
            "metadata": {"source": "policy"},
        }
    )


@few
@given(
    shapes,
    st.sampled_from(SELECTORS),
    st.sampled_from([0.05, 0.35, 0.5, 1.0]),
    st.none() | st.integers(1, 12),
    st.integers(0, 9),
)
def test_choices_are_legal_complete_and_capped(shape, selector, ratio, cap, seed):
    trajectory = episode(shape)
    section = SelectionSection(
        selector=selector, ratio=ratio, max_positions_per_trajectory=cap, critical_weight=2.0, other_weight=0.5
    )
    chosen = select(trajectory, section, seed)
    own = trajectory.model_positions()
    critical = [j for j in own if trajectory.critical_mask[j]]
    assert (
        0 not in chosen.positions
        and set(chosen.positions) <= set(own)
        and list(chosen.positions) == sorted(set(chosen.positions))
    )
    quota = math.ceil(Fraction(str(ratio)) * len(own))
    wanted = {
        "all_model_tokens": len(own),
        "tool_and_final": len(critical),
        "uniform_ratio": quota,
        "hybrid": max(quota, len(critical)),
    }[selector]
    assert len(chosen) == (wanted if cap is None else min(wanted, cap))
    if selector in ("all_model_tokens", "hybrid", "tool_and_final"):
        assert chosen.selected_critical_tokens == min(len(critical), len(chosen))
    assert chosen.weights == tuple(2.0 if trajectory.critical_mask[j] else 0.5 for j in chosen.positions)
    assert chosen.span_types == tuple(trajectory.span_at(j).span_type for j in chosen.positions)
    assert (chosen.total_model_tokens, chosen.total_critical_tokens) == (len(own), len(critical))
    assert chosen == select(trajectory, section, seed)


def test_a_cap_keeps_the_final_answer():
    trajectory = episode([(SpanType.USER, 5), (SpanType.ASSISTANT_TEXT, 40), (SpanType.ASSISTANT_FINAL, 4)])
    for selector in ("all_model_tokens", "hybrid"):
        chosen = select(trajectory, SelectionSection(selector=selector, ratio=0.9, max_positions_per_trajectory=10), 1)
        assert {45, 46, 47, 48} <= set(chosen.positions) and len(chosen) == 10


@pytest.mark.parametrize("selector", ["uniform_ratio", "hybrid"])
def test_the_choice_is_the_same_in_another_process(selector):
    code = (
        "import tests.test_selectors as t; from miniverl.schemas.config import SelectionSection as S;"
        f"print(t.select(t.episode(t.SAMPLE), S(selector={selector!r}), 1234).positions)"
    )
    other = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": "7", "PATH": "", "PYTHONPATH": ROOT},
        cwd=ROOT,
    )
    assert other.stdout.strip() == str(select(episode(SAMPLE), SelectionSection(selector=selector), 1234).positions)


SAMPLE = [
    (SpanType.USER, 5),
    (SpanType.ASSISTANT_TEXT, 30),
    (SpanType.ASSISTANT_TOOL_CALL, 6),
    (SpanType.TOOL_RESULT, 7),
    (SpanType.ASSISTANT_FINAL, 5),
]
ROOT = __file__.rsplit("/", 2)[0]


def test_episodes_without_a_selection_stay_in_the_denominator():
    section = SelectionSection(selector="tool_and_final")
    items = [
        (t, select(t, section, 1))
        for t in (episode(SAMPLE), episode([(SpanType.ASSISTANT_TEXT, 21)]), episode([(SpanType.USER, 3)]))
    ]
    stats = aggregate_selection_stats(items)
    assert stats == {
        "trajectories": 3,
        "total_model_tokens": 41 + 20,
        "selected_model_tokens": 11,
        "teacher_queried_position_ratio": 11 / 61,
        "total_critical_tokens": 11,
        "selected_critical_tokens": 11,
        "selected_by_span_type": {"assistant_final": 5, "assistant_tool_call": 6},
    }
    empty = aggregate_selection_stats(items[2:])
    assert empty["teacher_queried_position_ratio"] is None and empty["selected_by_span_type"] == {}
