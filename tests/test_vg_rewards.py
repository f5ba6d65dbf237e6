"""The passage from completions to floats: every shape, any text, any order, threads, groups; nothing before a green gate."""

from __future__ import annotations

import asyncio
import random
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miniverl.verify_gym import adapters_v0, answer, gate, rewards
from miniverl.verify_gym.answer import FAMILIES, grade
from miniverl.verify_gym.controls import controls
from miniverl.verify_gym.curriculum import heldout
from miniverl.verify_gym.exact import VerifyGymError
from miniverl.verify_gym.gate import GateError
from miniverl.verify_gym.policies import POLICIES, run_policy
from miniverl.verify_gym.rewards import (
    METRICS,
    group_report,
    outcome,
    reply_text,
    reward_fn,
    select_tasks,
    training_rows,
)

ROWS = heldout()[:12]
PAIRS = [(task, reply) for name in POLICIES for task, reply in zip(ROWS, run_policy(name, ROWS), strict=True)]


@pytest.fixture
def closed_gate():
    """A process that has made no reward yet."""
    rewards.open_gate.cache_clear()
    yield
    rewards.open_gate.cache_clear()


def paid(pairs, **columns):
    tasks, replies = zip(*pairs, strict=True)
    return reward_fn(replies, task_id=[task.task_id for task in tasks], **columns)


def test_rewards_are_progress_over_the_cap_exactly():
    for (task, reply), reward in zip(PAIRS, paid(PAIRS), strict=True):
        got = grade(task, reply)
        assert reward * got.cap == got.progress and got.cap == FAMILIES[task.family].cap


def test_equal_progress_is_equal_reward_and_more_is_more():
    for cap in {family.cap for family in FAMILIES.values()}:
        floats = [rewards.reward_of(answer.Grade("CERTIFIED", None, None, None, n, cap, "")) for n in range(cap + 1)]
        assert floats == sorted(set(floats)) and (floats[0], floats[-1]) == (0.0, 1.0)


def test_the_order_of_a_batch_does_not_matter():
    shuffled = random.Random(3).sample(range(len(PAIRS)), len(PAIRS))
    straight = paid(PAIRS)
    assert paid([PAIRS[at] for at in shuffled]) == [straight[at] for at in shuffled]


def test_threads_and_an_event_loop_give_the_same_rewards():
    straight = paid(PAIRS)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda pair: paid([pair])[0], PAIRS)) == straight

    async def all_at_once():
        return await asyncio.gather(*(asyncio.to_thread(paid, [pair]) for pair in PAIRS * 4))

    assert [one for (one,) in asyncio.run(all_at_once())] == straight * 4


def test_no_forgery_of_any_row_is_paid():
    planted = [item for item in controls(ROWS) if item.group == "forgery"]
    assert set(paid([(item.task, item.planted.reply) for item in planted])) == {0.0} and len(planted) > 200


@given(st.text(max_size=200))
def test_any_text_has_a_reward(reply):
    (reward,) = reward_fn([reply], task=[ROWS[0]])
    assert 0.0 <= reward <= 1.0


message = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool"]), "content": st.none() | st.text(max_size=20)}
)


@given(st.lists(message, max_size=5))
def test_only_the_assistant_is_read(messages):
    spoken = [turn["content"] or "" for turn in messages if turn["role"] == "assistant"]
    assert reply_text(messages) == (spoken[-1] if spoken else "")
    assert reply_text([SimpleNamespace(**turn) for turn in messages]) == reply_text(messages)


def test_the_example_in_the_prompt_is_no_answer():
    """The prompt holds an answer tag; a conversation without a reply is not paid for it."""
    for row in training_rows(ROWS):
        assert "<answer>" in row["prompt"][0]["content"]
        assert reward_fn([row["prompt"]], task_id=[row["task_id"]]) == [0.0]


def test_a_large_reply_is_refused_within_bounded_memory():
    reply = [{"role": "assistant", "content": "<answer>" * 1_250_000}]
    tracemalloc.start()
    assert reward_fn([reply], task=[ROWS[0]]) == [0.0]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


def test_truncated_pays_nothing_whatever_the_reply():
    assert set(paid(PAIRS, truncated=[True] * len(PAIRS))) == {0.0}
    assert paid(PAIRS, truncated=[False] * len(PAIRS)) == paid(PAIRS)


def test_no_reward_before_a_green_gate(closed_gate, monkeypatch):
    calls = []
    monkeypatch.setattr(rewards, "require_green", lambda: calls.append(1) or gate.run_gate(ROWS[:1]))
    assert paid(PAIRS[-3:]) == paid(PAIRS[-3:]) and len(calls) == 1


def test_a_red_gate_pays_nobody_and_is_asked_again(closed_gate, monkeypatch):
    with monkeypatch.context() as broken:
        broken.setattr(answer, "_word", lambda side, wanted: "CERTIFIED")
        for _ in range(2):
            with pytest.raises(GateError, match="GATE RED"):
                paid(PAIRS[-1:])
        assert outcome(lambda: ROWS[0], PAIRS[-1][1]).metric("grader_error") == 1.0
    assert paid(PAIRS[-1:])[0] > 0


def test_a_raising_grader_stops_a_trainer(monkeypatch):
    monkeypatch.setattr(rewards, "grade", lambda *words, **more: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        paid(PAIRS[:1])


def test_a_grader_that_fails_now_and_then_is_never_taken_for_a_zero(monkeypatch):
    """Whichever call fails, reward and metric of one rollout tell the same story."""
    sound, dice = rewards.grade, random.Random(5)

    def shaky(*words, **more):
        if dice.random() < 0.5:
            raise RuntimeError("now and then")
        return sound(*words, **more)

    monkeypatch.setattr(rewards, "grade", shaky)
    seen = set()
    for task, reply in PAIRS[-12:]:
        completion, info, state = [{"role": "assistant", "content": reply}], {"task_id": task.task_id}, {}
        got = {one.__name__: one(completion=completion, info=info, state=state) for one in adapters_v0.FUNCTIONS}
        assert sum(got[name] for name in METRICS) == 1.0
        assert (got["reward"] > 0) == (got["certified"] == 1.0) and got["malformed"] == 0
        seen.add(got["grader_error"])
    assert seen == {0.0, 1.0}


@given(st.lists(st.sampled_from([0.0, 0.25, 1.0]), max_size=24), st.integers(2, 4))
def test_every_group_is_counted_once(values, size):
    values = values[: len(values) // size * size]
    report = group_report(values, size)
    groups = [values[at : at + size] for at in range(0, len(values), size)]
    assert report.groups == len(groups)
    assert report.varied == sum(min(group) != max(group) for group in groups)
    assert report.at_zero == groups.count([0.0] * size) and report.at_one == groups.count([1.0] * size)


def test_splits_do_not_overlap():
    ids = [{task.task_id for task in select_tasks(split, 60)} for split in ("train", "validation", "heldout")]
    assert [len(one) for one in ids] == [60] * 3 and not ids[0] & ids[1] | ids[0] & ids[2] | ids[1] & ids[2]


def test_check_run_wants_rollouts():
    with pytest.raises(VerifyGymError, match="nothing was rolled out"):
        adapters_v0.check_run({"outputs": []})
