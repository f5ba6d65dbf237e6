"""Episodes and the runner: every way to end, every category, hostile environments, and no influence between neighbours."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miniverl.agent.episode import Episode, EpisodeRules, action_ids, finish, oracle_trajectory, system_message
from miniverl.agent.loop import EpisodeSpec, RolloutRunner, RolloutStats
from miniverl.agent.protocol import render_final, render_tool_call
from miniverl.core import BackendError, ToolEnvironmentError
from miniverl.environments.base import Observation, StepResult, Task
from miniverl.environments.calculator import Calculator
from miniverl.models.tokenizers import ToyTokenizer
from miniverl.models.toy import ToyBackend
from miniverl.schemas.config import RolloutSection, ToyShape
from miniverl.schemas.trajectory import FailureCategory, TerminationReason, Trajectory, VerificationRecord
from tests.parrot import Parrot, recite, scripted

TOKENIZER = ToyTokenizer()
COMPACT = Calculator({"prompt_style": "compact"})
ROLLOUT = RolloutSection(max_turns=4, max_new_tokens_per_turn=64, max_total_tokens=320, temperature=0.0, batch_size=3)


def call(tool: str, **arguments) -> str:
    return render_tool_call(tool, arguments)


class Desk(Calculator):
    """An environment whose tools do what the test wants; the verdict is spelled by the answer."""

    opened = closed = 0

    def __init__(self) -> None:
        super().__init__({"prompt_style": "compact"})

    def begin(self, task: Task):
        if "no start" in task.prompt:
            raise ToolEnvironmentError("cannot start")
        self.opened += 1
        return _DeskSession(self, Observation(task.prompt, "desk-0"))

    def verify(self, task: Task, final_text: str) -> VerificationRecord:
        if final_text == "crash":
            raise RecursionError("verifier")
        if final_text == "nothing":
            return None
        category = FailureCategory(final_text)
        return VerificationRecord(
            solved=category == "solved", reward=float(category == "solved"), failure_category=category
        )


class _DeskSession:
    def __init__(self, desk: Desk, observation: Observation) -> None:
        self.desk, self.observation = desk, observation

    def step(self, name: str, arguments: dict) -> StepResult:
        arguments["seen"] = True  # what an environment does to its arguments stays with the environment
        match name:
            case "echo":
                return StepResult(True, "desk-1", result="x" * arguments.get("n", 1))
            case "gone":
                raise ToolEnvironmentError("gone")
            case "bug":
                raise ZeroDivisionError("bug")
            case "wrong":
                return StepResult(False, "desk-1", error="wrong", failure_category=FailureCategory.INVALID_TOOL_CALL)
            case "fails":
                return StepResult(False, "desk-1", error="fails", failure_category=FailureCategory.TOOL_ERROR)
        return StepResult(False, "desk-1", error="unknown tool", failure_category=FailureCategory.UNKNOWN_TOOL)

    def close(self) -> None:
        self.desk.closed += 1


def task(prompt: str) -> Task:
    return Task(f"task-{prompt}", "desk", prompt, "easy", "train", 0, 0)


def play(
    scripts: dict[str, list[str]], *, desk: Desk | None = None, batch_size: int = 3, **bounds
) -> dict[str, Trajectory]:
    """Each question is answered by its script, through the real decoder."""
    rollout = ROLLOUT.model_copy(update=bounds)
    runner = RolloutRunner(
        Parrot(scripted(TOKENIZER, scripts), TOKENIZER), desk or Desk(), rollout, batch_size=batch_size
    )
    specs = [EpisodeSpec(task(prompt), n, prompt) for n, prompt in enumerate(scripts)]
    return {t.trajectory_id: t for t in runner.run(specs, policy_version=3)}


ENDINGS = {
    "final_answer": ["hm " + call("echo"), render_final("solved")],
    "max_turns": [call("echo", a=1), call("echo", a=2), call("echo", a=3), call("echo", a=4)],
    "max_tokens": [call("echo", n=400)],
    "parse_error_limit": ["what", call("echo"), "<final>unclosed"],
    "repeated_call_limit": [call("echo", n=2)] * 3,
    "environment_error": [call("echo"), call("gone")],
    "eos_without_final": ["I do not know$"],
}


def test_all_seven_endings_in_one_batch():
    desk = Desk()
    played = play(ENDINGS, desk=desk, batch_size=7)
    assert [t.termination_reason for t in played.values()] == list(ENDINGS) and set(ENDINGS) == set(TerminationReason)
    assert desk.opened == desk.closed == 7
    counts = {
        key: (
            t.assistant_turns,
            t.parsed_tool_calls,
            t.tool_execution_successes,
            t.tool_execution_errors,
            t.parse_errors,
        )
        for key, t in played.items()
    }
    assert counts == {
        "final_answer": (2, 1, 1, 0, 0),
        "max_turns": (4, 4, 4, 0, 0),
        "max_tokens": (1, 1, 1, 0, 0),
        "parse_error_limit": (3, 1, 1, 0, 2),
        "repeated_call_limit": (3, 3, 2, 0, 0),
        "environment_error": (2, 2, 1, 1, 0),
        "eos_without_final": (1, 0, 0, 0, 1),
    }
    assert "gone" in played["environment_error"].metadata.environment_error
    assert [s.segment_key for s in played["final_answer"].spans][2:4] == ["gen:0:text", "gen:0:block"]


def test_the_batch_size_is_recorded_and_changes_nothing_else():
    reference = play(ENDINGS, batch_size=1)
    for size in (2, 3, 8):
        for key, trace in play(ENDINGS, batch_size=size).items():
            assert trace.metadata.batch_size == size
            same = trace.model_copy(update={"metadata": trace.metadata.model_copy(update={"batch_size": 1})})
            assert same == reference[key]


def test_statistics_of_a_mixed_batch():
    stats = RolloutStats.from_trajectories(play(ENDINGS, batch_size=7).values()).to_dict()
    assert stats["rollouts"] == 7 and stats["solved"] == 1 and stats["success_rate"] == 1 / 7
    assert stats["termination_reasons"] == {reason: 1 for reason in sorted(ENDINGS)}
    assert stats["failure_categories"] == {"no_final_answer": 6, "solved": 1}
    assert stats["repeated_call_terminations"] == 1 and stats["emitted_tool_calls"] == stats["parsed_tool_calls"] == 12
    assert stats["tool_execution_success_rate"] == 10 / 11 and stats["tool_execution_error_rate"] == 1 / 11
    assert (
        stats["final_answers_emitted"] == 2
        and stats["final_answers_format_valid"] == stats["final_answers_verified"] == 1
    )
    assert stats["parse_errors"] == 3 and stats["generated_tokens_per_task"] == stats["generated_tokens"] / 7


@pytest.mark.parametrize("category", list(FailureCategory))
def test_the_verdict_of_the_environment_is_kept(category):
    trace = play({"q": [render_final(category)]})["q"]
    assert trace.verification.failure_category == category and trace.termination_reason == "final_answer"
    stats = RolloutStats.from_trajectories([trace]).to_dict()
    assert stats["failure_categories"] == {str(category): 1} and stats["solved"] == (category == "solved")
    assert stats["final_answer_format_validity_rate"] == (0.0 if category == "malformed_answer" else 1.0)


@pytest.mark.parametrize("answer", ["crash", "nothing", "not a category"])
def test_a_broken_verifier_is_never_a_success(answer):
    trace = play({"q": [render_final(answer)]})["q"]
    assert (
        trace.verification is None
        and trace.termination_reason == "environment_error"
        and trace.final_answers_verified == 0
    )
    assert "verify" in trace.metadata.environment_error
    assert RolloutStats.from_trajectories([trace]).to_dict()["failure_categories"] == {"no_final_answer": 1}


def test_a_broken_environment_ends_its_own_episode_only():
    desk = Desk()
    played = play({"no start": ["x"], "bug": [call("bug")], "fine": [render_final("solved")]}, desk=desk)
    assert [t.termination_reason for t in played.values()] == ["environment_error", "environment_error", "final_answer"]
    assert played["no start"].assistant_turns == 0 and "cannot start" in played["no start"].metadata.environment_error
    assert "ZeroDivisionError: bug" in played["bug"].metadata.environment_error
    assert desk.opened == desk.closed == 2


@pytest.mark.parametrize(("tool", "unknown"), [("wrong", 0), ("fails", 0), ("nosuch", 1)])
def test_a_bad_call_is_counted_once(tool, unknown):
    trace = play({"q": [call(tool), render_final("solved")]})["q"]
    assert (trace.emitted_tool_calls, trace.parsed_tool_calls, trace.tool_execution_errors, trace.parse_errors) == (
        1,
        1,
        1,
        0,
    )
    assert trace.unknown_tool_calls == unknown and trace.verification.solved and trace.invalid_tool_calls == 0
    assert trace.turns[0].tool_call.arguments == {}, "an environment cannot edit the record"


def test_a_block_that_does_not_parse_is_emitted_and_executed_by_nobody():
    trace = play({"q": ["<tool_call>\n{]\n</tool_call>", render_final("solved")]})["q"]
    assert (trace.emitted_tool_calls, trace.parsed_tool_calls, trace.parse_errors, trace.invalid_tool_calls) == (
        1,
        0,
        1,
        1,
    )
    assert (
        trace.tool_execution_errors == 0 and not trace.turns[0].tool_call.valid and trace.turns[0].tool_call.parse_error
    )
    assert trace.turns[0].tool_result.error in TOKENIZER.decode(trace.token_ids)


@pytest.mark.parametrize(("limit", "stops_after"), [(0, 1), (1, 1), (2, 2), (3, 3)])
def test_the_number_of_tolerated_parse_errors(limit, stops_after):
    trace = play({"q": ["no"] * 4}, max_parse_errors=limit)["q"]
    assert (
        trace.parse_errors == trace.assistant_turns == stops_after and trace.termination_reason == "parse_error_limit"
    )


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_equal_calls_are_counted_by_meaning_and_not_in_a_row(limit):
    lines = [
        call("echo", a=1, b=2),
        '<tool_call>{"name":"echo","arguments":{"b":2,"a":1}}</tool_call>',
        call("echo"),
        call("echo", a=1, b=2),
    ]
    trace = play({"q": lines}, max_repeated_calls=limit)["q"]
    assert trace.termination_reason == ("max_turns" if limit == 3 else "repeated_call_limit")
    assert trace.tool_execution_successes == (4 if limit == 3 else limit + (limit == 2))


def test_a_sampled_end_token_stays_and_is_not_repeated():
    played = play({"q": ["no$"], "r": ["no", render_final("solved")]})
    assert played["q"].token_ids[-1] == TOKENIZER.eos_id and played["q"].spans[-1].is_model
    text = TOKENIZER.decode(played["r"].token_ids)
    assert "<|im_end|><|im_end|>" not in text and "no" in text


@pytest.mark.parametrize("capacity", range(16, 100, 3))
def test_no_row_is_longer_than_its_capacity(capacity):
    scripts = {
        "q": [call("echo", n=9), "hm", call("echo", n=30), render_final("solved")],
        "a much longer question": [render_final("solved")],
    }
    for trace in play(scripts, max_total_tokens=capacity, max_parse_errors=9).values():
        assert len(trace.token_ids) <= capacity
        assert trace.termination_reason in ("max_tokens", "final_answer")
        assert Trajectory.from_line(trace.to_line()) == trace


def test_a_long_prompt_of_the_system_ends_every_episode_at_once():
    full = Calculator()
    student = ToyBackend.build(
        ToyShape(hidden_size=16, num_layers=1, num_heads=2, intermediate_size=16), TOKENIZER, seed=0
    )
    traces = RolloutRunner(student, full, ROLLOUT).run(
        [EpisodeSpec(full.generate_task(0, 7, "easy", "train"), 0, "x")], policy_version=0
    )
    assert (
        traces[0].termination_reason == "max_tokens"
        and len(traces[0].token_ids) == 320
        and traces[0].generated_token_count == 0
    )


def test_oracle_and_policy_share_every_token():
    tasks = [COMPACT.generate_task(n, 5, level, "train") for n, level in enumerate(("easy", "medium", "hard") * 5)]
    traces = [oracle_trajectory(COMPACT, t, TOKENIZER, trajectory_id=t.task_id) for t in tasks]
    runner = RolloutRunner(Parrot(recite(traces), TOKENIZER), COMPACT, ROLLOUT, batch_size=4)
    played = runner.run([EpisodeSpec(t, t.seed, t.task_id) for t in tasks], policy_version=0)
    for ours, oracle in zip(played, traces, strict=True):
        assert ours.verification.solved and ours.termination_reason == "final_answer"
        differ = {"metadata", "model_id", "model_revision"}
        assert ours.model_dump(exclude=differ) == oracle.model_dump(exclude=differ)


def test_the_oracle_of_an_environment_that_does_not_finish_is_recorded_honestly():
    class Lazy(Calculator):
        def oracle_actions(self, task):
            return super().oracle_actions(task)[:1]

    lazy = Lazy({"prompt_style": "compact"})
    trace = oracle_trajectory(lazy, lazy.generate_task(0, 1, "easy", "train"), TOKENIZER, trajectory_id="x")
    assert trace.verification is None and trace.termination_reason == "max_turns"


@pytest.fixture(scope="module")
def student() -> ToyBackend:
    return ToyBackend.build(
        ToyShape(hidden_size=32, num_layers=2, num_heads=2, intermediate_size=48), TOKENIZER, seed=4
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_identical_bits_when_tasks_are_shuffled_dropped_or_added(student, temperature):
    """With noise as text, episodes have all lengths; the capacity spans three tiers."""
    rollout = RolloutSection(
        max_turns=3, max_new_tokens_per_turn=40, max_total_tokens=200, batch_size=5, max_parse_errors=4
    )
    runner = RolloutRunner(student, COMPACT, rollout)
    specs = [
        EpisodeSpec(COMPACT.generate_task(n, 7, ("easy", "hard")[n % 2], "train"), 40 + n, f"e{n}") for n in range(13)
    ]
    reference = {t.trajectory_id: t for t in runner.run(specs, policy_version=0, temperature=temperature)}
    assert max(len(t.token_ids) for t in reference.values()) > 64
    rng = random.Random(2)
    for size in (1, 4, 6, 11, 13):
        chosen = rng.sample(specs, size)
        for spec, trace in zip(chosen, runner.run(chosen, policy_version=0, temperature=temperature), strict=True):
            assert trace == reference[spec.trajectory_id]


def test_seed_and_turn_choose_the_stream(student):
    rollout = RolloutSection(max_turns=2, max_new_tokens_per_turn=12, max_total_tokens=128, batch_size=3)
    one = COMPACT.generate_task(0, 7, "easy", "train")
    a, b, c = RolloutRunner(student, COMPACT, rollout).run(
        [EpisodeSpec(one, s, f"s{n}") for n, s in enumerate((1, 1, 2))], policy_version=0
    )
    assert a.token_ids == b.token_ids != c.token_ids


def test_global_randomness_is_neither_used_nor_moved(student):
    rollout = RolloutSection(max_turns=1, max_new_tokens_per_turn=8, max_total_tokens=64, batch_size=2)
    specs = [EpisodeSpec(COMPACT.generate_task(0, 7, "easy", "train"), 1, "x")]
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = RolloutRunner(student, COMPACT, rollout).run(specs, policy_version=0)
    assert torch.equal(before, torch.random.get_rng_state())
    torch.manual_seed(2)
    assert RolloutRunner(student, COMPACT, rollout).run(specs, policy_version=0) == first


def test_the_mode_of_the_model_is_put_back_after_an_error(student):
    class Foreign(Calculator):
        def begin(self, task):
            session = super().begin(task)
            session.observation = Observation("caf\u00e9", "s0")
            return session

    student.train()
    with pytest.raises(BackendError):
        RolloutRunner(student, Foreign({"prompt_style": "compact"}), ROLLOUT).run(
            [EpisodeSpec(task("x"), 0, "x")], policy_version=0
        )
    assert student.module.training


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_sequence_of_tokens_breaks_an_episode(data):
    """Invariants of the counters on random token soup with protocol pieces in it."""
    pieces = st.sampled_from(
        [*range(9), *TOKENIZER.encode('\n{"arguments":{"expression":"1 + 1"},"name":"calculator"}\n7 12ab')]
    )
    rules = EpisodeRules(
        max_turns=3, capacity=data.draw(st.integers(20, 120)), max_parse_errors=3, max_new_tokens_per_turn=30
    )
    question = COMPACT.generate_task(1, 7, "easy", "train")
    episode = Episode(COMPACT, EpisodeSpec(question, 0, "x"), TOKENIZER, rules, system_message(COMPACT, TOKENIZER))
    good = action_ids(TOKENIZER, COMPACT.oracle_actions(question)[0])
    while budget := episode.budget:
        soup = data.draw(st.one_of(st.just(good), st.lists(pieces, min_size=1, max_size=30)))
        episode.take(soup[:budget])
    trace = finish(episode, source="policy", temperature=1.0, policy_version=0, model=("soup", None))
    assert len(trace.token_ids) <= rules.capacity and trace.assistant_turns == len(trace.turns)
    executed = trace.tool_execution_successes + trace.tool_execution_errors
    assert executed == trace.parsed_tool_calls - trace.repeated_call_terminations <= trace.emitted_tool_calls
    assert trace.parsed_tool_calls + trace.parse_errors + sum(t.is_final for t in trace.turns) == trace.assistant_turns
    assert trace.final_answers_format_valid <= trace.final_answers_verified <= trace.final_answers_emitted
    assert (trace.verification is not None) == (trace.termination_reason == "final_answer")
    assert Trajectory.from_line(trace.to_line()) == trace
