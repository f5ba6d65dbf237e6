"""The readiness gate and the model row, live against a stand-in server: what is paid, what fails, and what a re-run does."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import subprocess
import sys
import threading
import time
from fractions import Fraction
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stand_in_server import StandIn
from vg_second import PROJECT, needs_node

from miniverl.verify_gym.answer import grade
from miniverl.verify_gym.curriculum import heldout, validation
from miniverl.verify_gym.endpoint import CallError, Endpoint, Reply, ask, collect, make_plan
from miniverl.verify_gym.exact import VerifyGymError
from miniverl.verify_gym.families import prompt
from miniverl.verify_gym.policies import POLICIES, score_card
from miniverl.verify_gym.readiness import LEAST_DIFFERING, LEAST_MEAN, MOST_MEAN, SAMPLES, TASKS, judge_groups
from miniverl.verify_gym.rollouts import Header, RolloutLog, Sample, read_log

WHOLE = TASKS * SAMPLES


def script(name, *arguments, **environment):
    """Run the main function of one of the project's scripts: its status and what it printed."""
    main = importlib.import_module(name).main
    with (
        mock.patch.dict(os.environ, {"no_proxy": "127.0.0.1", **environment}),
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as ended:
            status = ended.code
    return subprocess.CompletedProcess(arguments, status, out.getvalue(), err.getvalue())


def model(server, out, *more, name="stand-in"):
    return ("--endpoint", server.url, "--model", name, "--max-tokens", 100, "--out", out, *more)


def samples_of(log):
    return [line for line in read_log(log) if isinstance(line, Sample)]


# ---- the rule


@settings(max_examples=50)
@given(st.lists(st.lists(st.fractions(0, 1, max_denominator=40), min_size=2, max_size=5), min_size=1, max_size=12))
def test_the_verdict_is_the_rule(groups):
    found = judge_groups(groups)
    rewards = [reward for group in groups for reward in group]
    differing = [group for group in groups if any(reward != group[0] for reward in group)]
    mean = Fraction(sum(rewards), len(rewards))
    assert (found.groups, found.differing, found.samples) == (len(groups), len(differing), len(rewards))
    assert found.mean == mean
    ready = len(differing) >= LEAST_DIFFERING * len(groups) and LEAST_MEAN <= mean <= MOST_MEAN
    assert found.go == ready and found.line().endswith("GO") == ready


def test_the_constants():
    assert (TASKS, SAMPLES, LEAST_DIFFERING, LEAST_MEAN, MOST_MEAN) == (
        100,
        8,
        Fraction(3, 10),
        Fraction(1, 50),
        Fraction(4, 5),
    )


def test_no_rounding_decides():
    """Ten doubles of 0.8 sum to 8.0 only by luck; and a hair above is above."""
    groups = [[Fraction(4, 5) + Fraction(1, 10**40), Fraction(4, 5)]] + [[Fraction(4, 5)] * 2] * 2
    found = judge_groups(groups)
    assert not found.go and "above" in found.reasons[0]
    assert judge_groups([[Fraction(1), Fraction(3, 5)], *[[Fraction(4, 5)] * 2] * 2]).go


# ---- dry runs


@needs_node
@pytest.mark.parametrize(("name", "status", "word"), [("mix", 0, "GO"), ("cf", 3, "NO-GO"), ("never", 3, "NO-GO")])
def test_dry_runs(name, status, word):
    run = script("readiness", "--dry-run", name)
    assert run.returncode == status and f"· {word}" in run.stdout and not run.stderr, run


@needs_node
def test_the_script_as_a_process(tmp_path):
    """From any folder, on a terminal that shows no more than ASCII."""
    command = [sys.executable, PROJECT / "readiness.py", "--dry-run", "never"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=120)
    assert run.returncode == 3 and "NO-GO" in run.stdout and not run.stderr and not list(tmp_path.iterdir())


def test_the_scripts_say_so_where_node_is_missing(tmp_path):
    """And before a call is made."""
    with StandIn("cf") as server:
        for run in (
            script("readiness", "--dry-run", "mix", PATH="/nonexistent"),
            script("readiness", *model(server, tmp_path), PATH="/nonexistent"),
            script("modelrow", *model(server, tmp_path), PATH="/nonexistent"),
        ):
            assert (run.returncode, run.stdout) == (1, "") and "Node.js isn't on PATH" in run.stderr
            assert len(run.stderr.splitlines()) == 2
        assert not server.requests


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--dry-run", "nobody"),
        ("--dry-run", "mix", "--model", "m"),
        ("--model", "m", "--max-tokens", "10", "--out", "x"),
        ("--endpoint", "http://h/v1", "--model", "m", "--max-tokens", "0", "--out", "x"),
        ("--endpoint", "http://h/v1", "--model", "m", "--max-tokens", "10", "--out", "x", "--temperature", "nan"),
    ],
)
def test_a_command_that_cannot_be_read(arguments):
    run = script("readiness", *arguments)
    assert run.returncode == 2 and not run.stdout and "usage:" in run.stderr


def test_a_model_row_needs_an_endpoint():
    run = script("modelrow", "--model", "m")
    assert run.returncode == 2 and "--endpoint" in run.stderr


# ---- live


@needs_node
def test_a_live_run_fails_resumes_and_pays_truncated_replies_nothing(tmp_path):
    policies, count = list(POLICIES), {}

    def mixed(text):
        count[text] = count.get(text, -1) + 1
        return POLICIES[policies[count[text] % len(policies)]](text)

    out = tmp_path / "run"
    with StandIn(mixed, fail={300}, truncate=set(range(16))) as server:
        one = ("--workers", 1, "--temperature", "0.5")
        first = script("readiness", *model(server, out, *one), OPENAI_API_KEY="sk-secret")
        assert first.returncode == 1 and not first.stdout, first
        assert "the server answered 500" in first.stderr and f"300 of {WHOLE} replies are recorded" in first.stderr
        assert not (out / "readiness.json").exists() and len(samples_of(out / "rollouts.jsonl")) == 300
        assert len(server.requests) == 301

        other = script("readiness", *model(server, out, *one, name="another"))
        assert other.returncode == 1 and "the log of another run" in other.stderr and len(server.requests) == 301

        second = script("readiness", *model(server, out, *one), OPENAI_API_KEY="sk-secret")
        assert second.returncode == 0 and "· GO" in second.stdout, second
        assert len(server.requests) == WHOLE + 1 and len(server.answered) == WHOLE

        third = script("readiness", *model(server, out, *one))
        assert third.returncode == 0 and third.stdout == second.stdout and len(server.requests) == WHOLE + 1
    asked = [seen.prompt for seen in server.answered]
    assert asked == [prompt(validation(index)) for index in range(TASKS) for _ in range(SAMPLES)]
    assert {seen.headers.get("Authorization") for seen in server.requests} == {"Bearer sk-secret"}
    assert all(seen.body["temperature"] == 0.5 and seen.body["max_tokens"] == 100 for seen in server.requests)

    lines = samples_of(out / "rollouts.jsonl")
    assert [line.truncated for line in lines] == [n < 16 for n in range(WHOLE)]
    assert not any(line.reward for line in lines[:16]) and any(line.reward for line in lines[16:32])
    verdict = json.loads((out / "readiness.json").read_text())
    assert verdict["verdict"] == "GO" and verdict["differing"] == TASKS - 2 and verdict["replies"] == WHOLE
    total = sum(
        Fraction(*grade(validation(n // SAMPLES), line.reply, truncated=line.truncated).reward_pair)
        for n, line in enumerate(lines)
    )
    assert Fraction(verdict["mean"]) == total / WHOLE
    assert "sk-secret" not in "".join(path.read_text() for path in out.iterdir())

    check = script("recheck", out / "rollouts.jsonl")
    assert check.returncode == 0 and verdict["log_sha256"] in check.stdout


@needs_node
def test_a_run_that_was_killed_in_its_first_line_begins_again(tmp_path):
    live = importlib.import_module("live")
    log, about = tmp_path / "rollouts.jsonl", {"model": "m"}
    header = live.make_header(log, "validation", about)
    with RolloutLog(log, header):
        pass
    whole = log.read_bytes()
    for cut in (0, 1, 40, len(whole) - 1, len(whole)):
        log.write_bytes(whole[:cut])
        with RolloutLog(log, live.make_header(log, "validation", about)) as again:
            assert not again.samples and log.read_bytes() == whole


def test_an_edited_log_gives_no_verdict(tmp_path):
    with StandIn("never", fail_from=3) as server:
        run = script("readiness", *model(server, tmp_path, "--workers", 1))
        assert run.returncode == 1
        log = tmp_path / "rollouts.jsonl"
        log.write_text(log.read_text().replace('"reward":0.0', '"reward":1.0', 1))
        run = script("readiness", *model(server, tmp_path))
    assert run.returncode == 1 and "was written with the reward 0.0" in run.stderr and not run.stdout


@needs_node
def test_a_model_row_has_the_numbers_of_the_policy_that_answers(tmp_path):
    policy = "float"
    with StandIn(policy) as server:
        run = script("modelrow", *model(server, tmp_path, name=policy))
    assert run.returncode == 0, run
    row = json.loads((tmp_path / "row.json").read_text())
    expected = score_card(tasks=heldout())["policies"][policy]
    assert {key: row[key] for key in expected} == expected
    assert (
        row["model"] == policy and row["samples"] == 1 and len(row["date"]) == 10 and row["gate"][0].endswith("GREEN")
    )
    lines = samples_of(tmp_path / "rollouts.jsonl")
    replies = {line.task_id: line.reply for line in lines}
    assert replies == {task.task_id: POLICIES[policy](prompt(task)) for task in heldout()}
    assert script("recheck", tmp_path / "rollouts.jsonl").returncode == 0


@needs_node
def test_a_failed_call_leaves_no_row(tmp_path):
    with StandIn("echo", fail={119}) as server:
        run = script("modelrow", *model(server, tmp_path, "--workers", 1))
        assert run.returncode == 1 and "119 of 120 replies" in run.stderr and not (tmp_path / "row.json").exists()
        assert script("modelrow", *model(server, tmp_path)).returncode == 0 and len(server.requests) == 121


# ---- the client


def collected(path, server, workers=1, timeout=20.0, count=24):
    plan = make_plan([validation(index) for index in range(count // 4)], 4)
    place = Endpoint(server.url, "m", 100, timeout=timeout)
    return plan, lambda: collect(path, Header("validation"), plan, lambda text: ask(place, text), workers)


@pytest.mark.parametrize("fail_at", [0, 1, 7, 23])
def test_with_workers_nothing_that_was_answered_is_lost(fail_at, tmp_path):
    path = tmp_path / "log.jsonl"
    with StandIn("echo", fail={fail_at}) as server:
        plan, go = collected(path, server, workers=6)
        with pytest.raises(CallError):
            go()
        assert len(samples_of(path)) == len(server.answered)
        samples = go()
    assert len(server.answered) == len(plan) and [line.task_id for line in samples] == [task.task_id for task in plan]


@pytest.mark.parametrize(
    "response",
    [b"", b"<html>", b'{"error": "busy"}', b'{"choices": [{"message": {"content": "x"}, "finish_reason": null}]}'],
)
def test_a_response_without_a_reply_is_a_failed_call(response, tmp_path):
    with StandIn("echo", override={2: response}) as server:
        plan, go = collected(tmp_path / "log.jsonl", server)
        with pytest.raises(CallError):
            go()
    assert len(samples_of(tmp_path / "log.jsonl")) == 2


def test_a_server_that_is_not_there_is_a_failed_call(tmp_path):
    with StandIn("echo") as server:
        plan, go = collected(tmp_path / "log.jsonl", server)
    with pytest.raises(CallError, match="no answer from the server"):
        go()


def test_a_server_that_never_answers_is_a_failed_call(tmp_path):
    release = threading.Event()

    def slow(text):
        release.wait(10)
        return "late"

    with StandIn(slow) as server:
        plan, go = collected(tmp_path / "log.jsonl", server, timeout=0.2)
        try:
            with pytest.raises(CallError, match="timed out"):
                go()
        finally:
            release.set()


def test_a_redirect_is_not_followed():
    with StandIn("echo", fail={0}, status=302) as server:
        with pytest.raises(CallError, match="answered 302"):
            ask(Endpoint(server.url, "m", 10, api_key="sk-secret"), prompt(validation(0)))
    assert len(server.requests) == 1


@pytest.mark.parametrize("key", ["sk-\nsecret", "sk secret", "sk-secret\u2019"])
def test_a_key_that_no_header_can_hold_is_refused_and_stays_secret(key):
    with pytest.raises(VerifyGymError) as error:
        Endpoint("http://127.0.0.1:9/v1", "m", 10, api_key=key)
    assert "secret" not in error.value.message + error.value.hint


def test_two_processes_do_not_fill_one_log(tmp_path):
    pytest.importorskip("fcntl")
    path, entered, release = tmp_path / "log.jsonl", threading.Event(), threading.Event()
    plan = make_plan([validation(0)], 2)

    def waiting(text):
        entered.set()
        release.wait(10)
        return Reply("none", False)

    thread = threading.Thread(target=collect, args=(path, Header("validation"), plan, waiting))
    thread.start()
    try:
        assert entered.wait(10)
        with pytest.raises(VerifyGymError, match="another process"):
            collect(path, Header("validation"), plan, waiting)
    finally:
        release.set()
        thread.join()
    assert len(samples_of(path)) == 2


def test_after_a_failure_no_new_call_is_begun(tmp_path):
    calls = []

    def failing(text):
        calls.append(text)
        if len(calls) == 3:
            raise CallError("no", "")
        time.sleep(0.01)
        return Reply("none", False)

    plan = make_plan([validation(index) for index in range(50)], 8)
    with pytest.raises(CallError):
        collect(tmp_path / "log.jsonl", Header("validation"), plan, failing, workers=2)
    assert len(calls) <= 4 and len(samples_of(tmp_path / "log.jsonl")) == len(calls) - 1
