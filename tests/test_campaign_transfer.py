"""One file out of a sandbox, or nothing: the exporter's refusals, the receiver's limits, and what a crash leaves."""

from __future__ import annotations

import hashlib
import io
import json
import os
import stat
import subprocess
import sys
import threading
import time
import tracemalloc
from pathlib import Path

import pytest
from crash import KILLED, killed_at
from hypothesis import given, settings
from hypothesis import strategies as st

from miniverl.campaign import transfer
from miniverl.campaign.records import ReasonCode
from miniverl.campaign.transfer import Diagnostics, ExportRejected, TransferError, receive, send
from miniverl.core import StoreError


class Process:
    """A producer that is a plain process; `stop` kills it."""

    def __init__(self, program: str, *arguments: str) -> None:
        line = [sys.executable, "-I", "-S", "-c", program, *arguments]
        self.process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)

    def blocks(self):
        return iter(lambda: os.read(self.process.stdout.fileno(), 1 << 18), b"")

    def diagnostics(self):
        return iter(lambda: os.read(self.process.stderr.fileno(), 1 << 18), b"")

    def exit_code(self):
        return self.process.wait(30)

    def stop(self):
        self.process.kill()


class Lists:
    """A producer made of lists."""

    def __init__(self, blocks, said, code=0):
        self.payload, self.said, self.code, self.stops = blocks, said, code, 0

    def blocks(self):
        return iter(self.payload)

    def diagnostics(self):
        return iter(self.said)

    def exit_code(self):
        return self.code

    def stop(self):
        self.stops += 1


def receipt_for(data: bytes, **other) -> bytes:
    record = {"receipt": transfer.RECEIPT, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest(), **other}
    return json.dumps(record).encode() + b"\n"


def exported(path: Path, cap: int) -> tuple[int, bytes, dict]:
    out, said = io.BytesIO(), io.BytesIO()
    code = send(str(path), cap, out, said)
    return code, out.getvalue(), json.loads(said.getvalue() or b"{}")


def test_a_sparse_file_above_the_limit_is_refused_before_a_byte(tmp_path):
    path = tmp_path / "weights"
    path.touch()
    os.truncate(path, 601 * 2**20)
    assert exported(path, transfer.PAYLOAD_BYTES) == (3, b"", {"refused": "too_large"})
    os.truncate(path, 10)
    assert exported(path, 10)[0] == 0 and exported(path, 9)[0] == 3


def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path):
    (tmp_path / "real").write_bytes(b"x")
    os.symlink(tmp_path / "real", tmp_path / "link")
    os.mkfifo(tmp_path / "fifo")
    started = time.monotonic()
    for path in (tmp_path / "link", tmp_path / "fifo", tmp_path, Path("/dev/zero"), Path("/dev/null")):
        assert exported(path, 10) == (3, b"", {"refused": "not_regular"}), path
    assert exported(tmp_path / "absent", 10)[2] == {"refused": "unreadable"}
    assert time.monotonic() - started < 2


def test_a_file_that_shrinks_or_grows_meanwhile(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(b"x" * 2**20)

    class Shrinks(io.BytesIO):
        def write(self, data):
            os.truncate(path, 2**18)
            return super().write(data)

    said = io.BytesIO()
    assert send(str(path), 2**21, Shrinks(), said) == 1 and said.getvalue() == b"", "no receipt"

    class Grows(io.BytesIO):
        def write(self, data):
            with path.open("ab") as stream:
                stream.write(b"more" * 1000)
            return super().write(data)

    path.write_bytes(b"x" * 100)
    assert send(str(path), 100, out := Grows(), said) == 0 and out.getvalue() == b"x" * 100


def test_an_oversized_producer_is_ended_and_leaves_nothing(tmp_path):
    producer = Process("import os\nwhile True: os.write(1, b'x' * 65536)")
    with pytest.raises(TransferError) as caught:
        receive(producer, tmp_path / "final", cap=10**6)
    assert caught.value.reason == ReasonCode.TRANSFER_OVERFLOW and not isinstance(caught.value, ExportRejected)
    assert producer.process.wait(10) == -9 and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("extra", [0, 1])
def test_the_limit_is_exact(tmp_path, extra):
    data = b"x" * (1000 + extra)
    if extra:
        with pytest.raises(TransferError):
            receive(Lists([data], [receipt_for(data)]), tmp_path / "final", cap=1000)
    else:
        assert receive(Lists([data], [receipt_for(data)]), tmp_path / "final", cap=1000).bytes == 1000


def test_a_flood_of_diagnostics_is_cut_off_in_bounded_memory(tmp_path):
    program = "import os\nos.write(1, b'weights'); os.close(1)\nwhile True: os.write(2, b'x' * 65536)"
    tracemalloc.start()
    with pytest.raises(TransferError, match="diagnostics") as caught:
        receive(Process(program), tmp_path / "final")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert caught.value.reason == ReasonCode.TRANSFER_OVERFLOW and peak < 4 * 2**20 and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("end", ["while True: time.sleep(1)", "os._exit(1)", "os.kill(os.getpid(), 9)", "os._exit(3)"])
def test_a_good_receipt_needs_a_successful_end(tmp_path, end):
    program = (
        "import os, sys, time\nos.write(1, b'weights'); os.close(1); os.write(2, sys.argv[1].encode()); os.close(2)\n"
        + end
    )
    with pytest.raises(TransferError) as caught:
        receive(Process(program, receipt_for(b"weights").decode()), tmp_path / "final", seconds=1.0)
    assert not isinstance(caught.value, ExportRejected) and list(tmp_path.iterdir()) == []


def test_a_producer_that_says_nothing_is_ended_at_the_deadline(tmp_path):
    started, before = time.monotonic(), threading.active_count()
    with pytest.raises(TransferError, match="within 0.3 s"):
        receive(Process("import time; time.sleep(60)"), tmp_path / "final", seconds=0.3)
    assert time.monotonic() - started < 5 and list(tmp_path.iterdir()) == []
    time.sleep(0.1)
    assert threading.active_count() <= before


def test_an_end_of_file_proves_nothing(tmp_path):
    """A service's client shows a time-out as an ordinary end, with exit code 0."""
    for blocks in ([b"weig"], [b"weights"], []):
        with pytest.raises(TransferError, match="0 receipts") as caught:
            receive(Lists(blocks, []), tmp_path / "final")
        assert caught.value.reason == ReasonCode.TRANSFER_INCOMPLETE


def test_a_client_that_breaks_is_an_incomplete_transfer(tmp_path):
    def broken():
        yield b"wei"
        raise ConnectionError("CANARY address")

    producer = Lists([], [receipt_for(b"wei")])
    producer.blocks = broken
    with pytest.raises(TransferError) as caught:
        receive(producer, tmp_path / "final")
    assert "CANARY" not in caught.value.message and "CANARY" in caught.value.detail and producer.stops


def test_a_refusal_counts_only_if_everything_agrees(tmp_path):
    refusal = b'{"refused": "too_large"}\n'
    with pytest.raises(ExportRejected) as caught:
        receive(Lists([], [refusal], 3), tmp_path / "final")
    assert caught.value.reason == ReasonCode.ARTIFACT_TOO_LARGE
    for producer in (
        Lists([b"x"], [refusal], 3),
        Lists([], [refusal], 0),
        Lists([], [refusal, refusal], 3),
        Lists([], [], 3),
    ):
        with pytest.raises(TransferError) as caught:
            receive(producer, tmp_path / "final")
        assert not isinstance(caught.value, ExportRejected)


def test_an_existing_destination_is_never_overwritten(tmp_path):
    final = tmp_path / "final"
    final.write_bytes(b"first")
    producer = Lists([b"second"], [receipt_for(b"second")])
    with pytest.raises(StoreError):
        receive(producer, final)
    assert final.read_bytes() == b"first" and os.listdir(tmp_path) == ["final"] and producer.stops


def test_the_artifact_is_for_its_owner_only(tmp_path):
    before = os.umask(0)
    try:
        receive(Lists([b"x"], [receipt_for(b"x")]), tmp_path / "final")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "final").stat().st_mode) == 0o600


def test_a_crash_leaves_the_whole_artifact_or_none(tmp_path):
    limit, complete = 1, False
    while not complete:
        folder = tmp_path / str(limit)
        folder.mkdir()
        status, _, _ = killed_at(
            limit, lambda _, f=folder: receive(Lists([b"weights"], [receipt_for(b"weights")]), f / "final")
        )
        assert status in (0, KILLED)
        assert not (folder / "final").exists() or (folder / "final").read_bytes() == b"weights"
        assert all(name == "final" or name.startswith(".tmp-") for name in os.listdir(folder))
        complete, limit = status == 0, limit + 1
    assert limit > 4


@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=64), change=st.data())
def test_no_damaged_transfer_is_accepted(tmp_path_factory, data, change):
    said, sent = receipt_for(data), data
    kind = change.draw(st.sampled_from(["bytes", "receipt", "cut", "longer"]))
    if kind == "bytes" and data:
        at = change.draw(st.integers(0, len(data) - 1))
        sent = data[:at] + bytes([data[at] ^ (1 << change.draw(st.integers(0, 7)))]) + data[at + 1 :]
    elif kind == "cut" and data:
        sent = data[: change.draw(st.integers(0, len(data) - 1))]
    elif kind == "receipt":
        said = said[: change.draw(st.integers(0, len(said) - 1))]
    else:
        sent = data + change.draw(st.binary(min_size=1, max_size=8))
    final = tmp_path_factory.getbasetemp() / f"final-{os.urandom(8).hex()}"
    with pytest.raises(TransferError):
        receive(Lists([sent], [said]), final)
    assert not final.exists()


@pytest.mark.parametrize(
    "other", [{"bytes": 7.0}, {"bytes": True}, {"extra": 1}, {"sha256": "0" * 64}, {"receipt": "wsm.export.v2"}]
)
def test_a_receipt_is_exact(tmp_path, other):
    with pytest.raises(TransferError):
        receive(Lists([b"weights"], [receipt_for(b"weights", **other)]), tmp_path / "final")


@pytest.mark.parametrize("after", [b"done", b"done\n", b"\n", b"y" * 70_000])
def test_nothing_may_follow_the_receipt(tmp_path, after):
    with pytest.raises(TransferError):
        receive(Lists([b"weights"], [receipt_for(b"weights"), after]), tmp_path / "final")
    receive(Lists([b"weights"], [b"before\n", receipt_for(b"weights")]), tmp_path / "final")


def test_diagnostics_are_read_the_same_however_they_are_cut():
    text = b"noise\n" + b"y" * 70_000 + b"\n" + receipt_for(b"a") + b"tail"
    whole = Diagnostics()
    whole.feed(text)
    for size in (1, 7, 65_536):
        parts = Diagnostics()
        for start in range(0, len(text), size):
            parts.feed(text[start : start + size])
        assert parts == whole
    assert len(whole.found) == 1 and whole.tail() == "tail" and not whole.ends_with_record
