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

FIRST = version("verifiers").startswith("0.2")  # the first version of this form differs in names and flags
EVAL, VALIDATE = ("eval", "validate") if version("verifiers").startswith(("0.2", "0.3")) else ("vf-eval", "vf-validate")
NAMES = ("verify-gym", "verify_gym", "Verify-Gym", *(() if FIRST else ("owner/verify-gym", "verify-gym@0.1.0")))
QUIET = ("--rich", "False") if FIRST else ("--no-rich",)


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


@pytest.mark.parametrize("name", NAMES)
def test_names_lead_to_the_task_set_and_to_our_harness(name):
    assert vf.taskset_config_type(name) is adapters_v1.VerifyGymConfig
    assert vf.harness_config_type(vf.default_harness_id(name)) is adapters_v1.VerifyGymHarnessConfig
    assert FIRST or vf.environment_class(name) is verify_gym.VerifyGymEnv


def test_the_harness_gives_the_model_no_tools():
    harness = adapters_v1.VerifyGymHarness
    assert not (harness.EXECUTES_CODE or harness.SUPPORTS_MCP or harness.NEEDS_CONTAINER)


@pytest.mark.skipif(FIRST, reason="this version runs a harness on this machine anyway")
def test_the_default_place_is_this_machine():
    config = vf.resolve_env_config({"taskset": {"id": "verify-gym"}})
    assert config.agent.runtime.type == "subprocess"
    other = vf.resolve_env_config({"taskset": {"id": "verify-gym"}, "agent": {"runtime": {"type": "docker"}}})
    assert other.agent.runtime.type == "docker"


def test_splits():
    assert [task.key for task in taskset(split="heldout").load()] == [task.task_id for task in heldout()]
    assert [task.key for task in taskset(count=2, start=1).load()] == ["kroot/train/0", "poly/train/0"]
    assert [task.key for task in taskset(split="val", count=1).load()] == ["xx/validation/0"]
    with pytest.raises(ValueError):
        taskset(split="test")


def test_data_survives_the_wire():
    first = taskset(split="heldout").load()[0]
    again = type(first.data).model_validate_json(first.data.model_dump_json())
    assert again == first.data and adapters_v1.VerifyGymTask(again).row == heldout()[0]


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("cut", [False, True])
def test_rewards_are_those_of_the_core(policy, cut):
    for task in taskset(split="heldout", count=30).load():
        reply = POLICIES[policy](task.data.prompt)
        trace = SimpleNamespace(last_reply=reply, is_truncated=cut)
        got = grade(find_task(task.key), reply, truncated=cut)
        assert asyncio.run(task.certified_decimals(trace)) == got.progress / got.cap
        assert asyncio.run(task.verdict(trace))[got.verdict.lower()] == 1.0


def test_a_red_gate_hands_out_nothing(false_grader):
    with pytest.raises(GateError, match="GATE RED"):
        taskset(split="heldout").load()


def test_a_task_checks_itself(false_grader):
    task = adapters_v1.VerifyGymTask(adapters_v1.data_of(heldout()[0], 0))
    with pytest.raises(GateError, match="leaked"):
        asyncio.run(task.validate(None))


def run_eval(command, folder, url, *words, start=""):
    """The traces of an evaluation on the held-out set, by task."""
    model = ("-m", "cf", "--client.base-url", url, "--client.api-key-var", "STAND_IN_KEY")
    split, push = ("--taskset.split", ("--push", "False")) if FIRST else ("--env.taskset.split", ("--no-push",))
    done = command(EVAL, "verify-gym", *model, split, "heldout", *QUIET, *push, "-o", folder, *words, start=start)
    lines = [line for file in folder.rglob("traces.jsonl") for line in file.read_text().splitlines()]
    traces = [trace for line in lines for trace in (json.loads(line).get("traces") or [json.loads(line)])]
    return done, {trace["task"]["data"]["name"]: trace for trace in traces}


def reward_in(trace):
    """The recorded reward, None where there is none."""
    found = trace["rewards"].get("certified_decimals")
    return found["score"] if isinstance(found, dict) else found


def validated(command, folder, count, start=""):
    """Whether each task was found valid, and what the framework says of all of them."""
    where = () if FIRST else ("-o", folder)
    words = ("-n", count, "--taskset.split", "heldout", "--runtime.type", "subprocess", *QUIET, *where)
    done = command(VALIDATE, "verify-gym", *words, start=start)
    said = done.stdout + done.stderr + "".join(file.read_text() for file in folder.rglob("results.jsonl"))
    return done.returncode, said


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
    paid = {key: reward_in(trace) for key, trace in traces.items()}
    assert paid.pop(first.task_id) == 0.0
    assert traces[first.task_id]["metrics"]["malformed"] == 1.0
    assert paid.pop(second.task_id) is None and traces[second.task_id]["errors"][0]["type"] == "ProviderError"
    assert len(paid) == 4
    for key, reward in paid.items():
        got = grade(find_task(key), POLICIES["cf"](prompt(find_task(key))))
        assert reward == got.progress / got.cap > 0.5 and not traces[key]["errors"]
    for seen in server.requests:
        assert [message["role"] for message in seen.body["messages"]] == ["user"] and not seen.body.get("tools")
    assert len({seen.prompt for seen in server.requests}) == 6


def test_a_raising_grader_is_an_error_on_the_trace(command, tmp_path):
    with StandIn() as server:
        _, traces = run_eval(command, tmp_path / "out", server.url, "-n", 1, start=broken.RAISING)
    (trace,) = traces.values()
    assert trace["errors"][0]["type"] == "TaskError" and reward_in(trace) is None
    assert "ZeroDivisionError" in json.dumps(trace["errors"])


def test_a_red_gate_stops_an_evaluation(command, tmp_path):
    with StandIn() as server:
        done, traces = run_eval(command, tmp_path / "out", server.url, "-n", 1, start=broken.FALSE)
    assert done.returncode != 0 and not traces and not server.requests
    assert "GATE RED" in done.stdout + done.stderr


def test_validation_plants_the_forgeries(command, tmp_path):
    code, said = validated(command, tmp_path / "out", 3)
    assert code == 0, said
    assert said.count("valid=True" if FIRST else '"reason":"valid"') >= 3


def test_validation_names_a_forgery_that_leaked(command, tmp_path):
    """A grader that breaks after the gate was green: the task's own check sees it."""
    _, said = validated(command, tmp_path / "out", 1, start=broken.FALSE_AFTER_THE_GATE)
    assert "leaked" in said and "GATE RED" in said
    assert ("valid=False" if FIRST else '"valid":false') in said
