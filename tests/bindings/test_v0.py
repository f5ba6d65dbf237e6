"""The older form of the framework, `load_environment`: versions 0.2 and 0.3, and what a newer version is told."""

from __future__ import annotations

import asyncio
import json
import os
from importlib.metadata import version

import pytest

verifiers = pytest.importorskip("verifiers", reason="verifiers isn't installed here: python tools/verify_bindings.py")

import broken  # noqa: E402
from stand_in_server import StandIn  # noqa: E402
from verify_gym import answer, rewards  # noqa: E402
from verify_gym.adapters_v0 import check_run, load_environment  # noqa: E402
from verify_gym.answer import grade  # noqa: E402
from verify_gym.curriculum import find_task, heldout  # noqa: E402
from verify_gym.exact import VerifyGymError  # noqa: E402
from verify_gym.families import prompt  # noqa: E402
from verify_gym.policies import POLICIES  # noqa: E402

OLD = version("verifiers").startswith(("0.2", "0.3"))
old_form = pytest.mark.skipif(not OLD, reason="this version of verifiers has no load_environment")


@pytest.fixture
def red_gate():
    sound = answer._word
    rewards.open_gate.cache_clear()
    answer._word = lambda side, wanted: "CERTIFIED"
    yield
    answer._word = sound
    rewards.open_gate.cache_clear()


def evaluate(env, server, examples=3, rollouts=1, **sampling):
    from verifiers.types import ClientConfig

    os.environ["STAND_IN_KEY"] = "none"
    client = ClientConfig(api_base_url=server.url, api_key_var="STAND_IN_KEY")
    call = env.evaluate(
        client=client, model="x", num_examples=examples, rollouts_per_example=rollouts, sampling_args=sampling
    )
    return asyncio.run(call)


@pytest.mark.skipif(OLD, reason="this version of verifiers has the older form")
def test_a_newer_version_is_told_the_task_set():
    with pytest.raises(ImportError, match="verify_gym.VerifyGymTaskset"):
        load_environment()
    import verify_gym

    assert verify_gym.load_environment is load_environment  # looking at the name asks for nothing


@old_form
@pytest.mark.parametrize("name", ["verify-gym", "verify_gym", "owner/verify-gym"])
def test_it_loads_under_its_names(name):
    env = verifiers.load_environment(name, num_train=6, num_eval=6)
    assert isinstance(env, verifiers.SingleTurnEnv)
    assert [row["task_id"] for row in env.get_dataset()["info"]][:3] == ["xx/train/0", "kroot/train/0", "poly/train/0"]


@old_form
def test_evaluation_is_on_the_frozen_set_unless_asked_otherwise():
    frozen = verifiers.load_environment("verify-gym", num_train=1).get_eval_dataset()
    assert [row["task_id"] for row in frozen["info"]] == [task.task_id for task in heldout()]
    assert set(frozen["answer"]) == {""}
    stream = verifiers.load_environment("verify-gym", num_train=1, eval_split="val", num_eval=4).get_eval_dataset()
    assert [row["task_id"] for row in stream["info"]] == [f"{f}/validation/0" for f in ("xx", "kroot", "poly")] + [
        "xx/validation/1"
    ]


@old_form
@pytest.mark.parametrize("words", [{"eval_split": "test"}, {"eval_split": "train"}, {"num_eval": -1}])
def test_unknown_settings_are_refused_with_the_reason(words):
    with pytest.raises(RuntimeError, match="split|pool|count"):
        verifiers.load_environment("verify-gym", **{"num_train": 1, **words})


@old_form
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_rewards_are_those_of_the_core(policy):
    env = verifiers.load_environment("verify-gym", num_train=1)
    with StandIn(policy) as server:
        results = evaluate(env, server, examples=30)
    check_run(results)
    assert len(results["outputs"]) == 30
    for output in results["outputs"]:
        task = find_task(output["info"]["task_id"])
        got = grade(task, POLICIES[policy](prompt(task)))
        assert output["reward"] == got.progress / got.cap
        assert [name for name in ("certified", "refuted", "refused", "malformed") if output["metrics"][name]] == [
            got.verdict.lower()
        ]


@old_form
def test_a_truncated_reply_is_paid_nothing():
    env = verifiers.load_environment("verify-gym", num_train=1)
    with StandIn("cf", truncate=True) as server:
        results = evaluate(env, server, examples=6, rollouts=2)
    assert [output["reward"] for output in results["outputs"]] == [0.0] * 12
    assert all(output["is_truncated"] and output["metrics"]["malformed"] for output in results["outputs"])
    check_run(results)


@old_form
def test_a_raising_grader_is_seen(monkeypatch):
    env = verifiers.load_environment("verify-gym", num_train=1)
    monkeypatch.setattr(rewards, "grade", lambda *words, **more: 1 // 0)
    with StandIn("cf") as server:
        results = evaluate(env, server)
    for output in results["outputs"]:
        assert (output["reward"], output["metrics"]["grader_error"], output["metrics"]["malformed"]) == (0.0, 1.0, 0.0)
    with pytest.raises(VerifyGymError, match="3 of 3 rollouts are void; rollout 0: the grader failed"):
        check_run(results)


@old_form
def test_a_failed_call_voids_the_run():
    env = verifiers.load_environment("verify-gym", num_train=1)
    with StandIn("cf", fail_from=0, status=400) as server:
        results = evaluate(env, server, examples=1)
    assert results["outputs"][0]["reward"] == 0.0  # as the framework has it
    with pytest.raises(VerifyGymError, match="the call to the model failed"):
        check_run(results)


@old_form
def test_a_red_gate_hands_out_nothing(red_gate):
    with pytest.raises(RuntimeError, match="GATE RED"):
        verifiers.load_environment("verify-gym")


@old_form
def test_a_reply_in_thinking_only_is_paid_nothing():
    env = verifiers.load_environment("verify-gym", num_train=1)
    with StandIn(lambda text: f"<think>{POLICIES['cf'](text)}") as server:
        results = evaluate(env, server)
    assert [output["reward"] for output in results["outputs"]] == [0.0] * 3


@old_form
def test_on_the_command_line(command, tmp_path):
    words = ("-n", 3, "-r", 2, "-k", "STAND_IN_KEY", "-d", "-s", "-o", tmp_path / "out")
    with StandIn() as server:
        done = command(
            "vf-eval", "verify-gym", "-m", "cf", "-b", server.url, *words, "-a", '{"num_eval": 6, "num_train": 3}'
        )
    assert done.returncode == 0, done.stderr
    lines = next((tmp_path / "out").rglob("results.jsonl")).read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["reward"] for record in records] == [1.0] * 6 and {record["grader_error"] for record in records} == {
        0.0
    }
    assert len(server.requests) == 6


@old_form
def test_a_red_gate_on_the_command_line(command):
    done = command(
        "vf-eval", "verify-gym", "-m", "cf", "-b", "http://127.0.0.1:9/v1", "-n", 3, "-d", start=broken.FALSE
    )
    assert done.returncode != 0 and "GATE RED" in done.stdout + done.stderr
