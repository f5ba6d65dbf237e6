"""A stand-in for an OpenAI-compatible endpoint, on 127.0.0.1: replies come from a reference policy, and calls fail on request.

with StandIn("cf", fail={5}) as server:
    ...                          # server.url is http://127.0.0.1:PORT/v1; server.requests is what was asked
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = Callable[[str], str]


@dataclass
class Seen:
    """One request for a completion: its number from 0, the parsed body, the headers, and the status that it got."""

    number: int
    body: dict[str, Any]
    headers: dict[str, str]
    status: int = 200

    @property
    def prompt(self) -> str:
        """The text of the last message."""
        content = self.body["messages"][-1]["content"]
        return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


@dataclass
class StandIn:
    """The server, as a context manager.

    Parameters
    ----------
    policy : a name of `POLICIES`, or prompt -> reply; None takes the policy that the request's `model` names
    fail : numbers of the requests that get `status`, or all of them from `fail_from` on
    truncate : numbers of the requests that end with finish_reason "length", or True for all
    override : request number -> a whole response body (bytes), sent with status 200
    """

    policy: str | Reply | None = None
    fail: Collection[int] = ()
    fail_from: int | None = None
    status: int = 500
    truncate: Collection[int] | bool = ()
    override: dict[int, bytes] = field(default_factory=dict)
    requests: list[Seen] = field(default_factory=list)

    def __enter__(self) -> StandIn:
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    @property
    def answered(self) -> list[Seen]:
        """The requests that got a completion."""
        return [seen for seen in self.requests if seen.status == 200]

    def _reply(self, seen: Seen) -> str:
        from miniverl.verify_gym.policies import POLICIES

        policy = seen.body.get("model", "") if self.policy is None else self.policy
        return (POLICIES[policy] if isinstance(policy, str) else policy)(seen.prompt)

    def _complete(self, seen: Seen) -> tuple[int, bytes]:
        if seen.number in self.fail or (self.fail_from is not None and seen.number >= self.fail_from):
            return self.status, json.dumps({"error": {"message": "the stand-in was told to fail"}}).encode()
        if seen.number in self.override:
            return 200, self.override[seen.number]
        cut = self.truncate if isinstance(self.truncate, bool) else seen.number in self.truncate
        message = {"role": "assistant", "content": self._reply(seen)}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "length" if cut else "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        head = {"id": f"stand-in-{seen.number}", "object": "chat.completion", "created": 0}
        body = {**head, "model": seen.body.get("model", ""), "choices": [choice], "usage": usage}
        return 200, json.dumps(body).encode()

    def answer(self, body: dict[str, Any], headers: dict[str, str]) -> tuple[int, bytes]:
        """Record one request and make its response."""
        with self._lock:
            seen = Seen(len(self.requests), body, headers)
            self.requests.append(seen)
        try:
            seen.status, data = self._complete(seen)
        except Exception as error:  # a test that asks a policy something else sees why
            seen.status, data = 400, json.dumps({"error": {"message": f"{type(error).__name__}: {error}"}}).encode()
        return seen.status, data

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers.get("Content-Length", "0")))
                if not self.path.endswith("/v1/chat/completions"):
                    return self._send(404, b'{"error": {"message": "no such path"}}')
                self._send(*stand_in.answer(json.loads(data), dict(self.headers)))

            def do_GET(self) -> None:
                self._send(200, b'{"object": "list", "data": [{"id": "stand-in", "object": "model"}]}')

            def _send(self, status: int, data: bytes) -> None:
                try:
                    self.send_response(status)
                    self.send_header("Content-Type", "application/json")
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)
                except OSError:  # the client went away
                    self.close_connection = True

            def log_message(self, *_: object) -> None:
                pass

        return Handler
