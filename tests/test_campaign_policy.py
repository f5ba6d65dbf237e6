"""Policies: tapes and their allowance, and one request to an endpoint, sent at most once whatever the endpoint does."""

from __future__ import annotations

import json
import socket
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from responses_server import Server

from miniverl.campaign import policy as module
from miniverl.campaign.config_sections import Policy
from miniverl.campaign.policy import (
    PolicyError,
    Response,
    ResponsesPolicy,
    ScriptPolicy,
    TapePolicy,
    read_response,
    reply_action,
)
from miniverl.campaign.trial import InvalidReply, PromptLimit
from miniverl.campaign.turns import Action, Turn, read_action
from miniverl.core import ConfigError, DataError

LIMITS = {"turns": 4, "evaluations": 2, "output_tokens": 64, "wall_seconds": 60, "command_seconds": 10}
ENV = {"EDIT_MODEL": "some-model", "EDIT_KEY": "sk-CANARY"}
SETTINGS = {"model_env": "EDIT_MODEL", "credential_env": "EDIT_KEY", "prompt_bytes": 4096, "request_seconds": 5}
SUBMIT = '{"kind": "submit"}'


def live(url: str, environ=ENV, instruction="Raise the score.", **settings) -> ResponsesPolicy:
    return ResponsesPolicy(
        SETTINGS | settings, url, "EDIT_KEY", instruction=instruction, limits=LIMITS, environ=environ
    )


def turn(index: int, action: Action | None = None, **result) -> Turn:
    return Turn(index, action or Action("evaluate"), "ok", result, None, 1, None)


def failure(policy: ResponsesPolicy, seconds: float = 9.0) -> PolicyError:
    with pytest.raises(PolicyError) as caught:
        policy.next([], seconds)
    assert "CANARY" not in str(caught.value) + caught.value.hint
    return caught.value


def test_a_prompt_at_the_ceiling_is_sent_and_one_byte_more_is_not():
    with Server([SUBMIT]) as server:
        assert live(server.url).next([], 9.0) == Action("submit")
        exact = server.requests[0].size
        assert live(server.url, prompt_bytes=exact).next([], 9.0) == Action("submit")
        policy = live(server.url, prompt_bytes=exact - 1)
        with pytest.raises(PromptLimit, match=f"{exact} bytes, more than {exact - 1}"):
            policy.next([], 9.0)
    assert len(server.requests) == 2 and policy.usage["requests"] == 0


def test_a_prompt_is_measured_in_bytes_and_not_in_characters():
    with Server([SUBMIT]) as server:
        live(server.url, instruction="aaaa").next([], 9.0)
        plain = server.requests[0].size
        with pytest.raises(PromptLimit):
            live(server.url, instruction="éééé", prompt_bytes=plain).next([], 9.0)
    assert len(server.requests) == 1


def test_the_body_carries_the_allowance_and_the_credential_only_its_header():
    with Server([SUBMIT]) as server:
        live(server.url).next([turn(1, equal=2.5), turn(2, Action("python", "x = 1"), stdout="hello")], 9.0)
    seen = server.requests[0]
    assert seen.path == "/v1/responses" and seen.headers["Authorization"] == "Bearer sk-CANARY"
    assert set(seen.body) == {"model", "instructions", "input", "max_output_tokens", "store", "stream"}
    assert seen.body["max_output_tokens"] == 64 and seen.body["store"] is False and seen.body["stream"] is False
    assert [m["role"] for m in seen.body["input"]] == ["user", "assistant", "user", "assistant", "user"]
    assert json.loads(seen.body["input"][3]["content"]) == {"kind": "python", "source": "x = 1"}
    assert json.loads(seen.body["input"][4]["content"])["turns_left"] == 2
    assert "hello" in seen.body["input"][4]["content"] and "CANARY" not in json.dumps(seen.body)


def test_settings_may_be_a_section_of_the_configuration():
    with Server([SUBMIT]) as server:
        section = Policy(endpoint=server.url, model_env="EDIT_MODEL", credential_env="EDIT_KEY")
        policy = ResponsesPolicy(section, section.endpoint, "EDIT_KEY", instruction="i", limits=LIMITS, environ=ENV)
        assert policy.next([], 9.0) == Action("submit")
        assert server.url not in json.dumps(section.public())


@pytest.mark.parametrize("status", [400, 401, 404, 429, 500, 503])
def test_an_error_status_is_final_and_its_text_is_cleaned(status):
    with Server([SUBMIT], fail={0}, status=status) as server:  # the stand-in repeats the credential in its error
        error = failure(live(server.url))
    assert f"answered {status}" in error.message and "Bearer <credential>" in error.message and error.sent
    assert len(server.requests) == 1


def test_a_redirect_is_not_followed():
    with Server([SUBMIT]) as other, Server([SUBMIT], fail={0}, status=307, location=other.url) as server:
        assert "answered 307" in failure(live(server.url)).message
    assert other.requests == [] and len(server.requests) == 1


def test_proxies_of_the_environment_get_nothing(monkeypatch):
    with Server([SUBMIT]) as proxy, Server([SUBMIT]) as server:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "https_proxy"):
            monkeypatch.setenv(name, proxy.url)
        assert live(server.url).next([], 9.0) == Action("submit")
    assert proxy.requests == []


@pytest.mark.parametrize("behaviour", ["silent", "dribble"])
def test_a_server_that_keeps_us_waiting_is_left(behaviour):
    with Server(["x" * 4000], **{behaviour: {0}}) as server:
        start = time.monotonic()
        error = failure(live(server.url), seconds=0.3)
        assert time.monotonic() - start < 3
    assert "no whole answer within" in error.message and error.sent and len(server.requests) == 1


def test_the_setting_bounds_a_request_also_when_the_trial_has_time():
    with Server([SUBMIT], silent={0}) as server:
        start = time.monotonic()
        failure(live(server.url, request_seconds=0.2), seconds=50.0)
        assert time.monotonic() - start < 3


def test_headers_that_never_end_are_left_too():
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        connection, _ = listener.accept()
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\nX: ")
        try:
            for _ in range(200):
                connection.sendall(b"y")
                time.sleep(0.02)
        except OSError:
            pass

    threading.Thread(target=serve, daemon=True).start()
    start = time.monotonic()
    assert failure(live(f"http://127.0.0.1:{listener.getsockname()[1]}/"), seconds=0.3).sent
    assert time.monotonic() - start < 3
    listener.close()


def test_nothing_was_sent_when_nobody_listens():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    policy = live(f"http://127.0.0.1:{port}/v1")
    error = failure(policy)
    assert error.sent is False and "no connection" in error.message and str(port) not in error.message
    assert policy.usage["requests"] == 0


def test_a_connection_that_breaks_may_have_been_answered():
    with Server([SUBMIT], cut={0}) as server:
        policy = live(server.url)
        error = failure(policy)
    assert error.sent and "bytes of the response are missing" in error.message
    assert (policy.usage["requests"], policy.usage["responses"], len(server.requests)) == (1, 0, 1)


def test_a_response_without_end_is_refused(monkeypatch):
    monkeypatch.setattr(module, "REPLY_BYTES", 2000)
    with Server(["x" * 4000]) as server:
        assert "more than 2000 bytes" in failure(live(server.url)).message


NO_RESPONSE = [
    b"",
    b"[]",
    b"\xff\xfe",
    b"<html>busy</html>",
    b'{"choices": []}',
    b'{"status": "completed"}',
    b'{"status": "completed", "output": {"type": "message"}}',
    b'{"status": "completed", "output": [], "output": []}',
    b'{"status": "queued", "output": []}',
    b'{"status": {"a": 1}, "output": []}',
    b'{"status": "completed", "output": [{"type": "message", "content": [{"type": "output_text", "text": 7}]}]}',
    b"[" * 100_000,
]


@pytest.mark.parametrize("body", NO_RESPONSE, ids=range(len(NO_RESPONSE)))
def test_a_body_that_is_no_response_is_the_providers_failure(body):
    with Server([SUBMIT], override={0: body}) as server:
        assert failure(live(server.url)).sent
    assert len(server.requests) == 1


def test_a_reply_that_was_cut_off_is_no_action_even_if_it_parses():
    with Server([SUBMIT], incomplete={0}) as server:
        policy = live(server.url)
        with pytest.raises(InvalidReply, match="cut off") as caught:
            policy.next([], 9.0)
    assert caught.value.reply == SUBMIT and policy.usage["output_tokens"] == 5


def test_tokens_are_what_the_provider_reports_or_null():
    silent = json.dumps(
        {"status": "completed", "output": [{"type": "message", "content": [{"type": "output_text", "text": SUBMIT}]}]}
    )
    with Server([SUBMIT], override={1: silent.encode()}) as server:
        policy = live(server.url)
        policy.next([], 9.0)
        assert policy.usage["input_tokens"] == 7
        policy.next([], 9.0)
    assert policy.usage == {
        "unit": "provider_tokens",
        "requests": 2,
        "responses": 2,
        "input_tokens": None,
        "output_tokens": None,
    }


@pytest.mark.parametrize("what", ["EDIT_KEY", "url", "host", "escaped"])
def test_a_reply_that_repeats_the_route_is_not_kept(what):
    with Server([""]) as server:
        secret = {"url": server.url, "host": server.url.split("/")[2]}.get(what, ENV["EDIT_KEY"])
        shown = json.dumps({"kind": "python", "source": f"# {secret}"})
        server.replies = [shown.replace(secret, f"\\u{ord(secret[0]):04x}{secret[1:]}") if what == "escaped" else shown]
        with pytest.raises(InvalidReply) as caught:
            live(server.url).next([], 9.0)
    assert caught.value.reply == "" and secret not in str(caught.value)


@pytest.mark.parametrize("name", ["EDIT_MODEL", "EDIT_KEY"])
@pytest.mark.parametrize("value", [None, "", "  ", "sk-CANARY\nX-Other: 1", "sk-CANARYé"])
def test_variables_must_be_set_and_are_never_shown(name, value):
    environ = {key: text for key, text in {**ENV, name: value}.items() if text is not None}
    with pytest.raises(ConfigError, match=f"environment variable {name} is empty or holds") as caught:
        live("http://127.0.0.1:1/", environ)
    assert "CANARY" not in caught.value.render()


def test_a_policy_shows_neither_route_nor_credential():
    policy = live("http://127.0.0.1:1/secret-path")
    shown = repr(policy) + repr(vars(policy)) + str(policy.usage)
    assert "CANARY" not in shown and "secret-path" not in shown


def test_the_environment_of_the_process_is_the_default(monkeypatch):
    for name, value in ENV.items():
        monkeypatch.setenv(name, value)
    with Server([SUBMIT]) as server:
        live(server.url, None).next([], 9.0)
    assert server.requests[0].body["model"] == "some-model"


def test_the_allowance_of_a_tape_is_counted_in_bytes_of_source():
    fits = {"kind": "python", "source": "é" * 32}
    assert TapePolicy([fits], 16).next([], 9.0).size == 64
    with pytest.raises(ConfigError, match=r"actions\.0: 66 bytes of source exceed the allowance of 64"):
        TapePolicy([fits | {"source": "é" * 33}], 16)
    tape = TapePolicy([fits, {"kind": "submit"}], 16)
    assert tape.usage == {"unit": "utf8_bytes", "actions": 0, "bytes": 0, "provider_tokens": None}
    assert tape.next([turn(1)], 9.0) == Action("submit") and tape.next([turn(1), turn(2)], 9.0) is None
    assert tape.usage == {"unit": "utf8_bytes", "actions": 2, "bytes": 64, "provider_tokens": None}


def test_a_script_is_one_program():
    with pytest.raises(DataError, match="script.source must be a program"):
        ScriptPolicy("\n")
    assert ScriptPolicy("x = 1").usage["provider_tokens"] is None


PARSED = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 9)
    | st.text(max_size=6)
    | st.sampled_from(["kind", "python", "source", "submit"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["kind", "source", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(PARSED)
def test_a_value_is_an_action_or_refused(value):
    try:
        action = read_action(value, "reply")
    except DataError:
        return
    assert action.to_record() == value and (action.kind == "python") == (action.source is not None)


@given(st.text() | PARSED.map(json.dumps))
def test_a_reply_is_an_action_or_invalid(text):
    try:
        action = reply_action(Response(text, True, None, None))
    except InvalidReply as error:
        assert error.reply == text
    else:
        assert json.loads(text) == action.to_record()


@given(st.binary(max_size=40) | PARSED.map(lambda value: json.dumps({"status": "completed", "output": value}).encode()))
def test_a_body_is_a_response_or_refused(data):
    try:
        assert isinstance(read_response(data).text, str)
    except PolicyError as error:
        assert error.sent
