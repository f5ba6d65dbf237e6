"""The calculator: bounded arithmetic, total tools and verifiers, an oracle that is always right, disjoint splits."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miniverl.core import ConfigError
from miniverl.environments.base import check_task, make_environment, make_splits
from miniverl.environments.calculator import (
    DIFFICULTIES,
    EXAMPLE,
    UNITS,
    Calculator,
    ExpressionError,
    evaluate,
    format_number,
)
from miniverl.schemas.config import EnvironmentSection
from miniverl.schemas.trajectory import FailureCategory

few = settings(max_examples=100, deadline=None)
TOY = Calculator({"prompt_style": "compact"})


def section(**changes):
    return EnvironmentSection(
        **{
            "name": "calculator",
            "train_tasks": 64,
            "eval_tasks": 24,
            "test_tasks": 24,
            "split_seed": 7,
            "difficulty": "easy",
            **changes,
        }
    )


@few
@given(st.text(st.sampled_from("0123456789+-*/%(). eE"), max_size=40) | st.text(max_size=20))
def test_any_expression_gives_a_bounded_number_or_an_error(text):
    try:
        value = evaluate(text)
    except ExpressionError as error:
        assert str(error).isascii() and len(str(error)) < 30
    else:
        assert abs(value) <= 10**12
        float(format_number(value))


json_values = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.just(10**120)
    | st.floats()
    | st.text(max_size=8)
    | st.lists(st.integers(), max_size=2)
)
arguments = st.dictionaries(
    st.sampled_from(["expression", "value", "from_unit", "to_unit", "x"]),
    json_values | st.sampled_from(sorted(UNITS)),
    max_size=4,
)


@few
@given(st.sampled_from(["calculator", "convert", "lookup", ""]), arguments)
def test_a_session_survives_any_arguments(name, given_arguments):
    step = TOY.begin(TOY.generate_task(0, 7, "easy", "train")).step(name, given_arguments)
    assert (step.result is not None) == step.ok and (step.error is None) == step.ok
    if not step.ok:
        assert step.failure_category in (
            FailureCategory.INVALID_TOOL_CALL,
            FailureCategory.TOOL_ERROR,
            FailureCategory.UNKNOWN_TOOL,
        )


@few
@given(
    st.text(max_size=30)
    | st.text(st.sampled_from("0123456789.eE+- kmi"), max_size=20)
    | st.just("9" * 5000)
    | st.just("\ud800"),
    st.sampled_from(["v1", "v2"]),
    st.sampled_from(DIFFICULTIES),
)
def test_the_verifier_is_total(text, version, difficulty):
    env = Calculator({"verifier_version": version})
    verdict = env.verify(env.generate_task(3, 7, difficulty, "test"), text)
    assert verdict.failure_category in (
        FailureCategory.SOLVED,
        FailureCategory.WRONG_ANSWER,
        FailureCategory.MALFORMED_ANSWER,
    )
    assert verdict.solved == (verdict.failure_category == FailureCategory.SOLVED) == (verdict.reward == 1.0)


@pytest.mark.parametrize("difficulty", DIFFICULTIES)
@pytest.mark.parametrize(
    "params", [{"prompt_style": "compact"}, {"protocol_version": "v1"}, {"protocol_version": "v2"}]
)
def test_every_task_accepts_its_own_gold_answer(params, difficulty):
    env = Calculator(params)
    tasks = [env.generate_task(index, 7, difficulty, "train") for index in range(400)]
    assert all(check_task(env, task).solved for task in tasks)
    assert len({task.task_id for task in tasks}) == 400
    if difficulty == "hard":
        assert {len(env.oracle_actions(task)) for task in tasks} == {2, 3}


def test_answers_of_other_tasks_do_not_pass():
    """A verifier that accepts everything would pass the gold test; this one rejects nearly all foreign answers."""
    tasks = [TOY.generate_task(index, 7, "hard", "train") for index in range(100)]
    answers = [TOY.oracle_actions(task)[-1].final for task in tasks]
    passed = sum(TOY.verify(task, answer).solved for task in tasks for answer in answers)
    assert 100 <= passed < 300


@pytest.mark.parametrize(
    ("name", "given_arguments", "reply"),
    [
        ("calculator", {"expression": "12 * 7"}, "84"),
        ("calculator", {"expression": "3 - 9"}, "-6"),
        ("calculator", {"expression": "(3 + 4) * 5 - 6"}, "29"),
        ("calculator", {"expression": "7 / 3"}, "2.3333"),
        ("convert", {"value": 12, "from_unit": "km", "to_unit": "mi"}, "7.4565"),
        ("convert", {"value": 499, "from_unit": "oz", "to_unit": "g"}, "14146.412"),
        ("convert", {"value": 212, "from_unit": "f", "to_unit": "c"}, "100"),
        ("convert", {"value": 2.5, "from_unit": "m", "to_unit": "ft"}, "8.2021"),
    ],
)
def test_replies_byte_for_byte(name, given_arguments, reply):
    step = TOY.begin(TOY.generate_task(0, 7, "easy", "train")).step(name, given_arguments)
    assert step.ok and step.result == reply


def test_compact_prompts_are_built_from_fixed_pieces():
    for difficulty in DIFFICULTIES:
        for index in range(200):
            prompt = TOY.generate_task(index, 7, difficulty, "train").prompt
            assert prompt.isascii() and len(prompt) < 40
            assert (prompt.startswith("What is ") and prompt.endswith("?")) or (
                prompt.startswith("Convert ") and prompt.endswith(".")
            )
    assert TOY.system_prompt() == "Use the tools."


def test_no_task_asks_the_example():
    prompts = {Calculator().generate_task(index, 7, "easy", "train").prompt for index in range(12_000)}
    assert EXAMPLE[0] not in prompts and len(prompts) == 684


def test_tasks_do_not_depend_on_the_process():
    code = "from miniverl.environments.calculator import Calculator as C; print([C().generate_task(i, 7, d, 'eval').prompt for d in ('easy', 'medium', 'hard') for i in range(20)])"
    other = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": "3", "PATH": ""},
    )
    assert other.stdout.strip() == str(
        [Calculator().generate_task(i, 7, d, "eval").prompt for d in DIFFICULTIES for i in range(20)]
    )


def test_splits_are_disjoint_and_bounded():
    splits = make_splits(TOY, section(train_tasks=500, eval_tasks=100, test_tasks=84))
    prompts = [task.prompt for split in ("train", "eval", "test") for task in splits.get(split)]
    assert len(set(prompts)) == len(prompts) == 684
    assert {task.index // 1_000_000 for task in splits.eval} == {1} and {
        task.index // 1_000_000 for task in splits.test
    } == {2}
    with pytest.raises(ConfigError, match="684 distinct easy prompts"):
        make_splits(TOY, section(train_tasks=600, eval_tasks=100))
    with pytest.raises(ConfigError, match="empty"):
        make_splits(TOY, section(test_tasks=0)).get("test")
    with pytest.raises(ConfigError, match="nosuch"):
        splits.get("nosuch")
    with pytest.raises(ConfigError, match="extreme"):
        TOY.generate_task(0, 7, "extreme", "train")


def test_the_registry_builds_it_with_parameters():
    env = make_environment(section(params={"prompt_style": "compact", "protocol_version": "v1"}))
    assert isinstance(env, Calculator) and env.provenance()["versions"] == {
        "generator": 1,
        "protocol": "v1",
        "verifier": "v1",
    }
