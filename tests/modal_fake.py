"""A stand-in for the `modal` package: records every call, and runs the exporter of a checkpoint for real."""

from __future__ import annotations

import io
import json
import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from miniverl.campaign import transfer


class Stream:
    """Blocks that can be iterated once, until None."""

    def __init__(self) -> None:
        self.blocks: queue.Queue[bytes | None] = queue.Queue()

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.blocks.get, None)


class Process:
    """A process in the stand-in sandbox; `answer` gets each request and returns bytes, or None to end the stream."""

    def __init__(self, sdk: FakeModal, answer: Callable[[dict], bytes | None] | None = None) -> None:
        self.sdk, self.answer, self.code = sdk, answer, 0
        self.stdout, self.stderr, self.stdin = Stream(), Stream(), self

    def write(self, data: bytes) -> None:
        self.sdk.record("stdin.write", (data,), {})
        reply = self.answer(json.loads(data)) if self.answer else None
        if reply != b"":
            self.stdout.blocks.put(reply)

    def drain(self) -> None:
        self.sdk.record("stdin.drain", (), {})

    def wait(self) -> int:
        self.sdk.record("process.wait", (), {})
        return self.code


class FakeModal:
    """The names of the package that the backend uses."""

    def __init__(self, folder: Path, answer: Callable[[dict], bytes | None], *, ends: bool = True) -> None:
        self.calls: list[tuple[str, tuple, dict]] = []
        self.folder, self.answer, self.ends, self.ended = folder, answer, ends, False
        self.Image = self.App = self.Sandbox = self

    def record(self, name: str, args: tuple, kwargs: dict) -> FakeModal:
        self.calls.append((name, args, kwargs))
        return self

    def __getattr__(self, name: str) -> Any:
        owners = {"debian_slim": "Image", "lookup": "App", "create": "Sandbox"}
        if name in owners or name.startswith(("pip_", "add_local_")):
            return lambda *args, **kwargs: self.record(f"{owners.get(name, 'Image')}.{name}", args, kwargs)
        raise AttributeError(name)

    def exec(self, *args: str, **kwargs: Any) -> Process:
        self.record("Sandbox.exec", args, kwargs)
        if "campaign.transfer" not in args[5]:
            return Process(self, self.answer)
        process, out, said = Process(self), io.BytesIO(), io.BytesIO()
        process.code = transfer.send(str(self.folder / Path(args[6]).name), int(args[7]), out, said)
        for stream, text in ((process.stdout, out.getvalue()), (process.stderr, said.getvalue())):
            for block in (text, None):
                if block != b"":
                    stream.blocks.put(block)
        return process

    def terminate(self, *, wait: bool = False) -> int | None:
        self.record("Sandbox.terminate", (), {"wait": wait})
        self.ended = self.ends
        return None

    def poll(self) -> int | None:
        self.record("Sandbox.poll", (), {})
        return 137 if self.ended else None
