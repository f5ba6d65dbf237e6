"""Kill a process between any two durable calls of the store, then look at what a reader finds."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from miniverl import store
from miniverl.core import LockError, StoreError

if not hasattr(os, "fork"):
    pytest.skip("needs fork", allow_module_level=True)

DURABLE = ("fsync", "replace", "link", "rename", "unlink", "write", "ftruncate")
KILLED = 137


class MortalOs:
    """The os module, except that the process dies just before the n-th durable call; a write tears in the middle."""

    def __init__(self, fatal: int) -> None:
        self.fatal, self.calls = fatal, 0

    def __getattr__(self, name: str):
        real = getattr(os, name)
        return self.counted(name, real) if name in DURABLE else real

    def counted(self, name: str, real: Callable) -> Callable:
        def call(*args, **kwargs):
            self.calls += 1
            if self.calls == self.fatal:
                if name == "write":
                    real(args[0], bytes(args[1])[: len(args[1]) // 2])
                os._exit(KILLED)
            return real(*args, **kwargs)

        return call


class MortalShutil:
    """A recursive deletion that dies when half of the tree is gone."""

    def __init__(self, mortal: MortalOs) -> None:
        self.mortal = mortal

    def rmtree(self, path, **kwargs) -> None:
        self.mortal.calls += 1
        if self.mortal.calls == self.mortal.fatal:
            next(file for file in Path(path).iterdir() if file.is_file()).unlink()
            os._exit(KILLED)
        shutil.rmtree(path, **kwargs)


def dies_at(fatal: int, action: Callable[[], object]) -> bool:
    """Run `action` in a child that dies at its n-th durable call; False if it ended before that."""
    child = os.fork()
    if child == 0:
        try:
            store.os = MortalOs(fatal)
            store.shutil = MortalShutil(store.os)
            action()
            os._exit(0)
        except BaseException:
            os._exit(99)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, KILLED), f"the child failed with {status}"
    return status == KILLED


@dataclass
class Case:
    """Something to do in a folder, and how to tell what a reader finds there: `old`, `new`, or an error."""

    prepare: Callable[[Path], object]
    action: Callable[[Path], object]
    state: Callable[[Path], str]
    least: int  # durable calls that there must be at least


def make_dir(path: Path, text: str) -> None:
    path.mkdir()
    for name in ("a", "b"):
        (path / name).write_text(text * 2000)


def state_of_dir(path: Path) -> str:
    if not path.exists():
        return "old"
    texts = {(path / name).read_text() for name in ("a", "b")}
    assert len(texts) == 1, "a mixture"
    return {"o": "old", "n": "new"}[texts.pop()[0]]


def state_of_file(path: Path) -> str:
    return path.read_text()[:3] if path.exists() else "old"


def replaced(folder: Path) -> str:
    seen = state_of_dir(store.readable_dir(folder / "final"))
    store.recover_dir(folder / "final")
    assert state_of_dir(folder / "final") == seen, "reader and writer disagree"
    return seen


def state_of_run(folder: Path) -> str:
    config = store.RunDir(folder / "run").config_validated
    return "old" if config.exists() and config.read_text() == "old" else "new"


def state_of_journal(folder: Path) -> str:
    seen = store.read_journal(folder / "j")
    with store.Journal(folder / "j") as journal:
        end = journal.position()
        journal.append({"n": len(seen)})
        assert store.read_journal(folder / "j") == [*seen, {"n": len(seen)}], "the torn line was not cut"
        journal.truncate(end)
    assert [row["n"] for row in seen] == list(range(len(seen))), "not a prefix of what was written"
    return f"{len(seen)} records"


def append_three(folder: Path) -> None:
    with store.Journal(folder / "j") as journal:
        for n in (1, 2, 3):
            journal.append({"n": n, "text": "x" * 50})
            journal.sync()


def journal_of(count: int) -> Callable[[Path], None]:
    return lambda folder: (folder / "j").write_text("".join(f'{{"n":{n}}}\n' for n in range(count)))


def cut_to_one(folder: Path) -> None:
    with store.Journal(folder / "j") as journal:
        journal.truncate(8)


BIG = "new" + "x" * 100_000
CASES = {
    "write_atomic over a file": Case(
        lambda f: (f / "file").write_text("old"),
        lambda f: store.write_atomic(f / "file", BIG),
        lambda f: state_of_file(f / "file"),
        4,
    ),
    "write_atomic of a first file": Case(
        lambda f: None, lambda f: store.write_atomic(f / "file", BIG), lambda f: state_of_file(f / "file"), 4
    ),
    "publish_new": Case(
        lambda f: None, lambda f: store.publish_new(f / "file", BIG), lambda f: state_of_file(f / "file"), 5
    ),
    "publish_dir": Case(
        lambda f: make_dir(f / ".tmp-stage", "n"),
        lambda f: store.publish_dir(f / ".tmp-stage", f / "final"),
        lambda f: state_of_dir(f / "final"),
        5,
    ),
    "replace_dir": Case(
        lambda f: (make_dir(f / "final", "o"), make_dir(f / ".tmp-stage", "n")),
        lambda f: store.replace_dir(f / ".tmp-stage", f / "final"),
        replaced,
        8,
    ),
    "recover_dir": Case(
        lambda f: (make_dir(f / ".bak-final", "o"), make_dir(f / "final", "n")),
        lambda f: store.recover_dir(f / "final"),
        replaced,
        3,
    ),
    "discarding a run": Case(
        lambda f: ((f / "run").mkdir(), store.write_atomic(store.RunDir(f / "run").config_validated, "old")),
        lambda f: store.RunDir(f / "run").discard(),
        state_of_run,
        3,
    ),
    "Journal.append": Case(journal_of(1), append_three, state_of_journal, 8),
    "Journal.truncate": Case(journal_of(5), cut_to_one, state_of_journal, 4),
}


@pytest.mark.parametrize("name", CASES)
def test_a_kill_between_any_two_durable_calls_leaves_old_or_new(name, tmp_path):
    case, states, n = CASES[name], [], 0
    while True:
        n += 1
        folder = tmp_path / str(n)
        folder.mkdir()
        case.prepare(folder)
        killed = dies_at(n, partial(case.action, folder))
        states.append(case.state(folder))
        if not killed:
            break
        if "Journal" not in name:
            store.remove_temps(folder)
            assert not list(folder.glob(".tmp-*"))
    assert n > case.least, f"only {n - 1} durable calls"
    if "Journal" in name:
        counts = [int(state.split()[0]) for state in states]
        assert counts in (sorted(counts), sorted(counts, reverse=True)) and len(set(counts)) > 1
        return
    assert set(states) <= {"old", "new"} and states[-1] == "new", states
    assert states == sorted(states, key=["old", "new"].index), "a later kill undid what an earlier one left"


@pytest.mark.parametrize("name", [n for n in CASES if "Journal" not in n and n not in ("publish_dir", "recover_dir")])
def test_the_same_call_succeeds_after_any_kill(name, tmp_path):
    case, n, killed = CASES[name], 0, True
    while killed:
        n += 1
        folder = tmp_path / str(n)
        folder.mkdir()
        case.prepare(folder)
        killed = dies_at(n, partial(case.action, folder))
        if case.state(folder) == "new":
            continue
        if name == "replace_dir" and not (folder / ".tmp-stage").exists():
            make_dir(folder / ".tmp-stage", "n")
        case.action(folder)
        assert case.state(folder) == "new"


def test_durable_calls_come_in_order(tmp_path, monkeypatch):
    """The data is synced before the name, and the name before the call returns."""
    seen = []

    class Recorder:
        def __getattr__(self, name):
            real = getattr(os, name)
            if name not in DURABLE or name == "unlink":
                return real

            def call(*args, **kwargs):
                kind = (
                    name
                    if name != "fsync"
                    else "fsync " + ("dir" if os.path.isdir(f"/proc/self/fd/{args[0]}") else "file")
                )
                seen.append(kind)
                return real(*args, **kwargs)

            return call

    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("needs /proc")
    monkeypatch.setattr(store, "os", Recorder())
    store.write_atomic(tmp_path / "a", "x")
    assert seen == ["write", "fsync file", "replace", "fsync dir"]
    seen.clear()
    store.publish_new(tmp_path / "b", "x")
    assert seen == ["write", "fsync file", "link", "fsync dir"]
    seen.clear()
    make_dir(tmp_path / "stage", "n")
    store.publish_dir(tmp_path / "stage", tmp_path / "final")
    assert seen[:4] == ["fsync file", "fsync file", "fsync dir", "rename"] and set(seen[4:]) == {"fsync dir"}
    seen.clear()
    journal = store.Journal(tmp_path / "j")
    assert seen[-1] == "fsync dir", "the name of a new journal is durable before its first record"
    seen.clear()
    journal.append({"n": 1})
    journal.position()
    assert seen == ["write", "fsync file"]
    journal.close()


def test_publish_new_has_one_winner(tmp_path):
    """Six processes publish the same 25 names; every name has one winner, and its content whole."""
    start, go = os.pipe()
    names = [f"record-{i}" for i in range(25)]
    children = []
    for mark in range(6):
        child = os.fork()
        if child == 0:
            os.close(go)
            os.read(start, 1)
            won = []
            for name in names:
                try:
                    store.publish_new(tmp_path / name, f"{mark}" * 5000)
                    won.append(name)
                except StoreError:
                    pass
            (tmp_path / f"won-{mark}").write_text("\n".join(won))
            os._exit(0)
        children.append(child)
    os.close(start)
    os.close(go)  # end of file starts all at once
    assert all(os.waitpid(child, 0)[1] == 0 for child in children)
    won = {mark: (tmp_path / f"won-{mark}").read_text().split() for mark in range(6)}
    assert sorted(name for found in won.values() for name in found) == sorted(names)
    assert all((tmp_path / name).read_text() == f"{mark}" * 5000 for mark, found in won.items() for name in found)
    assert not list(tmp_path.glob(".tmp-*"))


def test_a_lock_excludes_another_process_and_dies_with_it(tmp_path):
    run = tmp_path / "runs" / "one"
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        with store.run_lock(run):
            os.write(tell, b"x")
            signal.pause()
    os.read(told, 1)
    try:
        with pytest.raises(LockError, match=f"in use by process {child} "):
            with store.run_lock(run):
                pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    with store.run_lock(run):
        assert (run.parent / ".miniverl-locks" / "one.lock").exists()
    os.close(told)
    os.close(tell)


def test_reading_leaves_no_trace(tmp_path):
    for look in (lambda: store.RunDir.open(tmp_path / "none"), lambda: store.readable_dir(tmp_path / "none")):
        try:
            look()
        except StoreError:
            pass
    assert store.read_journal(tmp_path / "none.jsonl") == [] and list(tmp_path.iterdir()) == []
