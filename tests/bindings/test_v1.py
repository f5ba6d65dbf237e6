"""The newer form of the framework, tasks and task sets: version 0.2 and later."""

from __future__ import annotations

import asyncio
import json
from importlib.metadata import version
from types import SimpleNamespace

import pytest

pytest.importorskip("verifiers", reason="verifiers isn't installed here: python tools/verify_bindings.py")

import broken  # noqa: E402
import verifiers.v1 as vf  # noqa: E402
import verify_gym  # noqa: E402
from stand_in_server import StandIn  # noqa: E402
from verify_gym import adapters_v1, answer, rewards  # noqa: E402
from verify_gym.answer import grade  # noqa: E402
from verify_gym.curriculum import find_task, heldout  # noqa: E402
from verify_gym.families import prompt  # noqa: E402
from verify_gym.gate import GateError  # noqa: E402
from verify_gym.policies import POLICIES  # noqa: E402

NEW = not version("verifiers").startswith(("0.2", "0.3"))
EVAL, VALIDATE = ("vf-eval", "vf-validate") if NEW else ("eval", "validate")


@pytest.fixture
def false_grader():
    sound = answer._word
    rewards.open_gate.cache_clear()
    answer._word = lambda side, wanted: "CERTIFIED"
    yield
    answer._word = sound
    rewards.open_gate.cache_clear()


def taskset(**settings):
    config = vf.taskset_config_type("verify-gym")(id="verify-gym", **settings)
    return vf.load_taskset(config)


@pytest.mark.parametrize("name", ["verify-gym", "verify_gym", "owner/verify-gym", "verify-gym@0.1.0", "Verify-Gym"])
def test_names_lead_to_the_task_set_and_to_our_harness(name):
    assert vf.taskset_config_type(name) is adapters_v1.VerifyGymConfig
    assert vf.harness_config_type(vf.default_harness_id(name)) is adapters_v1.VerifyGymHarnessConfig
    assert vf.environment_class(name) is verify_gym.VerifyGymEnv


def test_the_harness_gives_the_model_no_tools():
    harness = adapters_v1.VerifyGymHarness
    assert not (harness.EXECUTES_CODE or harness.SUPPORTS_MCP or harness.NEEDS_CONTAINER)


def test_the_default_place_is_this_machine():
    config = vf.resolve_env_config({"taskset": {"id": "verify-gym"}})
    assert config.agent.runtime.type == "subprocess"
    other = vf.resolve_env_config({"taskset": {"id": "verify-gym"}, "agent": {"runtime": {"type": "docker"}}})
    assert other.agent.runtime.type == "docker"


def test_splits():
    assert [task.key for task in taskset(split="heldout").load()] == [task.task_id for task in heldout()]
    assert [task.key for task in taskset(count=2, start=1).load()] == ["kroot/train/0", "poly/train/0"]
    assert [task.key for task in taskset(split="val", count=1)] == ["xx/validation/0"]
    with pytest.raises(ValueError):
        taskset(split="test")


def test_data_survives_the_wire():
    first = next(iter(taskset(split="heldout")))
    again = type(first.data).model_validate_json(first.data.model_dump_json())
    assert again == first.data and adapters_v1.VerifyGymTask(again).row == heldout()[0]


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("cut", [False, True])
def test_rewards_are_those_of_the_core(policy, cut):
    for task in taskset(split="heldout", count=30):
        reply = POLICIES[policy](task.data.prompt)
        trace = SimpleNamespace(last_reply=reply, is_truncated=cut)
        got = grade(find_task(task.key), reply, truncated=cut)
        assert asyncio.run(task.certified_decimals(trace)) == got.progress / got.cap
        assert asyncio.run(task.verdict(trace))[got.verdict.lower()] == 1.0


def test_a_red_gate_hands_out_nothing(false_grader):
    with pytest.raises(GateError, match="GATE RED"):
        list(taskset(split="heldout"))


def test_a_task_checks_itself(false_grader):
    task = adapters_v1.VerifyGymTask(adapters_v1.data_of(heldout()[0], 0))
    with pytest.raises(GateError, match="leaked"):
        asyncio.run(task.validate(None))


def run_eval(command, folder, url, *words, start=""):
    """The traces of an evaluation on the held-out set, by task."""
    model = ("-m", "cf", "--client.base-url", url, "--client.api-key-var", "STAND_IN_KEY")
    where = ("--env.taskset.split", "heldout", "--no-rich", "--no-push", "-o", folder)
    done = command(EVAL, "verify-gym", *model, *where, *words, start=start)
    files = list(folder.rglob("traces.jsonl"))
    traces = [trace for file in files for line in file.read_text().splitlines() for trace in json.loads(line)["traces"]]
    return done, {trace["task"]["data"]["name"]: trace for trace in traces}


def test_evaluation_from_end_to_end(command, tmp_path):
    """One call a task, no tools in it; a truncated reply is paid nothing; a failed call has no reward at all."""
    first, second = heldout()[:2]

    def reply(text):
        if text == prompt(second):
            raise RuntimeError("no answer from this model")
        return POLICIES["cf"](text)

    with StandIn(reply) as server:
        sound = server.answer

        def answer_cut(body, headers):
            status, data = sound(body, headers)
            if body["messages"][-1]["content"] == prompt(first):
                data = data.replace(b'"finish_reason": "stop"', b'"finish_reason": "length"')
            return status, data

        server.answer = answer_cut
        done, traces = run_eval(command, tmp_path / "out", server.url, "-n", 6)
    assert len(traces) == 6, done.stderr
    paid = {key: trace["rewards"].get("certified_decimals") for key, trace in traces.items()}
    assert paid.pop(first.task_id) == {"score": 0.0, "weight": 1.0}
    assert traces[first.task_id]["metrics"]["malformed"] == 1.0
    assert not paid.pop(second.task_id) and traces[second.task_id]["errors"][0]["type"] == "ProviderError"
    assert len(paid) == 4
    for key, reward in paid.items():
        got = grade(find_task(key), POLICIES["cf"](prompt(find_task(key))))
        assert reward["score"] == got.progress / got.cap > 0.5 and not traces[key]["errors"]
    for seen in server.requests:
        assert [message["role"] for message in seen.body["messages"]] == ["user"] and not seen.body.get("tools")
    assert len({seen.prompt for seen in server.requests}) == 6


def test_a_raising_grader_is_an_error_on_the_trace(command, tmp_path):
    with StandIn() as server:
        _, traces = run_eval(command, tmp_path / "out", server.url, "-n", 1, start=broken.RAISING)
    (trace,) = traces.values()
    assert trace["errors"][0]["type"] == "TaskError" and not trace["rewards"].get("certified_decimals")
    assert "ZeroDivisionError" in json.dumps(trace["errors"])


def test_a_red_gate_stops_an_evaluation(command, tmp_path):
    with StandIn() as server:
        done, traces = run_eval(command, tmp_path / "out", server.url, "-n", 1, start=broken.FALSE)
    assert done.returncode != 0 and not traces and not server.requests
    assert "GATE RED" in done.stdout + done.stderr


def test_validation_plants_the_forgeries(command, tmp_path):
    words = ("-n", 3, "--taskset.split", "heldout", "--runtime.type", "subprocess", "--no-rich", "-o", tmp_path / "out")
    done = command(VALIDATE, "verify-gym", *words)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in next((tmp_path / "out").rglob("results.jsonl")).read_text().splitlines()]
    assert [row["valid"] for row in rows] == [True] * 3


def test_validation_names_a_forgery_that_leaked(command, tmp_path):
    """A grader that breaks after the gate was green: the task's own check sees it."""
    words = ("-n", 1, "--taskset.split", "heldout", "--runtime.type", "subprocess", "--no-rich", "-o", tmp_path / "out")
    command(VALIDATE, "verify-gym", *words, start=broken.FALSE_AFTER_THE_GATE)
    (row,) = [json.loads(line) for line in next((tmp_path / "out").rglob("results.jsonl")).read_text().splitlines()]
    assert not row["valid"] and "leaked" in row["error"] and "GateError" in row["error_type"]
