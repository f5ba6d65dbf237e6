"""A stand-in for an endpoint of the OpenAI Responses kind, on 127.0.0.1.

It answers each request with the next text of a script, and can fail, cut its answer, dribble or say nothing at chosen requests.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Seen:
    """One request: its number from 0, path, headers and parsed body."""

    number: int
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    size: int


@dataclass
class Server:
    """The server, as a context manager.

    Parameters
    ----------
    replies : texts of the assistant, one a request; the last one is repeated
    fail : requests that get `status`
    cut : requests whose answer ends before its announced length
    silent, dribble : requests that get no answer, or one byte after the other, until the server is closed
    incomplete : requests whose reply is marked as cut off at its allowance
    override : request number -> a whole response body, sent with status 200
    location : where a failing request is redirected
    """

    replies: Sequence[str]
    fail: Collection[int] = ()
    status: int = 500
    cut: Collection[int] = ()
    silent: Collection[int] = ()
    dribble: Collection[int] = ()
    incomplete: Collection[int] = ()
    override: dict[int, bytes] = field(default_factory=dict)
    location: str = ""
    requests: list[Seen] = field(default_factory=list)

    def __enter__(self) -> Server:
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1/responses"
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def response(self, number: int) -> bytes:
        """The body of the answer to a request."""
        if number in self.override:
            return self.override[number]
        text = self.replies[min(number, len(self.replies) - 1)]
        message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
        return json.dumps(
            {
                "id": f"resp_{number}",
                "object": "response",
                "status": "incomplete" if number in self.incomplete else "completed",
                "output": [{"type": "reasoning", "summary": []}, message],
                "usage": {"input_tokens": 7, "output_tokens": 5, "total_tokens": 12},
            }
        ).encode()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers.get("Content-Length", "0")))
                with stand_in._lock:
                    number = len(stand_in.requests)
                    stand_in.requests.append(
                        Seen(number, self.path, dict(self.headers), json.loads(data or b"{}"), len(data))
                    )
                self.close_connection = True
                try:
                    self._answer(number)
                except OSError:
                    pass  # the client went away

            def _answer(self, number: int) -> None:
                if number in stand_in.silent:
                    stand_in._closing.wait()
                    return
                failing = number in stand_in.fail
                said = json.dumps({"error": "told to fail", "asked": self.headers["Authorization"]}).encode()
                data = said if failing else stand_in.response(number)
                self.send_response(stand_in.status if failing else 200)
                if failing and stand_in.location:
                    self.send_header("Location", stand_in.location)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                if number in stand_in.dribble:
                    for byte in data:
                        self.wfile.write(bytes([byte]))
                        if stand_in._closing.wait(0.02):
                            return
                else:
                    self.wfile.write(data[: len(data) // 2] if number in stand_in.cut else data)

            do_GET = do_POST

            def log_message(self, *_: object) -> None:
                pass

        return Handler
