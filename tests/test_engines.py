"""Units in other processes and on a local Ray cluster: order, errors, dead workers, interrupts, nothing left behind."""

from __future__ import annotations

import importlib.util
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import engine_work
import pytest
from benchmark_tiny import timeless, tiny_benchmark

from miniverl import core
from miniverl.core import MiniVerlError, TrainingError, UsageError
from miniverl.evaluation.benchmark import run_benchmark
from miniverl.evaluation.engines import Unit, run_units
from miniverl.evaluation.workers import attempt, named, parcel

ROOT = Path(__file__).resolve().parents[1]


def alive(pid: int) -> bool:
    """Whether a process runs; one that ended and was not collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def errors(cls=MiniVerlError):
    return [cls, *(found for below in cls.__subclasses__() for found in errors(below))]


@pytest.mark.parametrize("cls", [c for c in errors() if c.__module__ == core.__name__])
def test_every_error_of_ours_survives_the_journey_with_its_hint(cls):
    def work(payload):
        raise cls("what is wrong", hint="what to do")

    there = pickle.loads(pickle.dumps(parcel(attempt(work, {})))).error
    assert type(there) is cls and (there.message, there.hint) == ("what is wrong", "what to do")
    assert named(there, "arm").render() == "error: arm: what is wrong\nhint: what to do"
    assert str(there) == "arm: what is wrong" and named(there, "arm").message == "arm: what is wrong"


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_foreign_exception_keeps_its_type_and_its_traceback(jobs):
    with pytest.raises(ZeroDivisionError) as caught:
        run_units([Unit("a", payload={"x": 0}), Unit("b", payload={"x": 1})], engine_work.divide, jobs=jobs)
    shown = "".join(getattr(caught.value, "__notes__", [])) + str(caught.getrepr())
    assert "divide" in shown and "engine_work.py" in shown


def test_one_job_runs_any_callable_in_the_given_order_and_stops_at_the_first_error():
    seen = []

    def work(payload):
        seen.append(payload["n"])
        if payload["n"] == 2:
            raise TrainingError("enough", hint="stop")
        return {}

    with pytest.raises(TrainingError, match="u2: enough"):
        run_units([Unit(f"u{n}", payload={"n": n}) for n in range(5)], work)
    assert seen == [0, 1, 2]


def test_an_interrupt_in_this_process_is_passed_on():
    def work(payload):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_units([Unit("a")], work)


def test_an_unimportable_function_is_refused_for_several_processes():
    with pytest.raises(UsageError, match="importable"):
        run_units([Unit("a"), Unit("b")], lambda payload: {}, jobs=2)


def test_workers_are_used_again_and_no_more_are_started_than_needed():
    graph = [Unit(f"u{n}", after=(f"u{n - 1}",) if n else ()) for n in range(4)]
    found = run_units(graph, engine_work.surroundings, jobs=3)
    assert len({answer["pid"] for answer in found.values()}) == 1
    assert not any(alive(answer["pid"]) for answer in found.values())


def test_independent_units_run_at_the_same_time(tmp_path):
    """Each of two units ends only after both have started."""

    def release():
        until(lambda: len(list(tmp_path.glob("*.started"))) == 2)
        (tmp_path / "go").touch()

    helper = threading.Thread(target=release)
    helper.start()
    units = [Unit(name, payload={"name": name, "folder": str(tmp_path)}) for name in ("a", "b")]
    assert run_units(units, engine_work.linger, jobs=2) == {"a": {"name": "a"}, "b": {"name": "b"}}
    helper.join()


def test_a_worker_that_exits_is_named():
    with pytest.raises(TrainingError) as caught:
        run_units([Unit("a", payload={"exit": 3}), Unit("b", after=("a",))], engine_work.wait_or_die, jobs=2)
    assert caught.value.message == "the worker of a ended before its work was done (exit code 3)"
    assert "--resume" in caught.value.hint


SCRIPT = """
import sys
from miniverl.core import canonical_json
from miniverl.evaluation.engines import Unit, run_units
sys.path.insert(0, sys.argv[2])
import engine_work
if __name__ == "__main__":
    try:
        run_units([Unit(n, payload={"name": n, "folder": sys.argv[1]}) for n in ("a", "b")], engine_work.linger, jobs=2)
    except KeyboardInterrupt:
        print("interrupted")
"""


@pytest.fixture
def lingering(tmp_path):
    """A program of its own session with two units that run, its folder, and the workers' process ids."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(tmp_path), str(ROOT / "tests")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, start_new_session=True, env=env, **pipes) as program:
        started = [tmp_path / f"{name}.started" for name in "ab"]
        until(lambda: all(p.exists() and p.read_text() for p in started))
        yield program, tmp_path, [int(p.read_text()) for p in started]
        program.kill()


def pressed(program, tries: int = 3) -> tuple[str, str]:
    """What a program says after Ctrl-C; pressed again where Python lost it, which it does inside a finaliser."""
    for left in reversed(range(tries)):
        os.killpg(program.pid, signal.SIGINT)  # what a terminal does
        try:
            return program.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            if not left:
                raise
    raise AssertionError("never pressed")


def test_ctrl_c_reaches_every_unit_once_and_leaves_no_worker(lingering):
    program, folder, pids = lingering
    out, err = pressed(program)
    assert (out, err) == ("interrupted\n", "")
    assert sorted(p.name for p in folder.glob("*.interrupted")) == ["a.interrupted", "b.interrupted"]
    assert not any(map(alive, pids))


def test_workers_do_not_outlive_a_killed_parent(lingering):
    program, _, pids = lingering
    os.kill(program.pid, signal.SIGKILL)
    until(lambda: not any(map(alive, pids)))


def test_ray_that_is_not_installed_names_the_install_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(core.MissingDependencyError) as caught:
        run_units([Unit("a", payload={"x": 1})], engine_work.double, engine="ray")
    assert "ray is not installed" in caught.value.message and 'pip install -e ".[scale]"' in caught.value.hint


class FakeRay:
    """As much of Ray as the engine touches, in this process: tasks run when they are waited for."""

    class exceptions:
        class RayError(Exception):
            pass

    def __init__(self, *, cluster=False, gpus=0):
        self.log, self.cluster, self.gpus, self.tasks = [], cluster, gpus, {}

    def is_initialized(self):
        return False

    def init(self, address, **options):
        self.log.append((address, options.get("num_cpus")))
        assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0" and options["log_to_driver"] is False
        if address == "auto" and not self.cluster:
            raise ConnectionError("nobody there")

    def cluster_resources(self):
        return {"CPU": 2.0, **({"GPU": float(self.gpus)} if self.gpus else {})}

    def remote(self, **options):
        assert options == {"num_cpus": 1, "max_retries": 0}  # a second try would be a second run of the unit
        ray = self

        class Task:
            def __init__(self, body):
                self.body = body

            def options(self, num_gpus):
                ray.log.append(f"gpus {num_gpus:g}")
                return self

            def remote(self, *args):
                ref = object()
                ray.tasks[ref] = (self.body, args)
                return ref

        return Task

    def wait(self, refs, num_returns, timeout=None):
        return refs[:num_returns], refs[num_returns:]

    def get(self, ref):
        body, args = self.tasks[ref]
        if args[1].get("lost"):
            noise = threading.Thread(target=lambda: print("(raylet) a worker died"))  # as Ray does, to standard output
            noise.start()
            noise.join()
            raise self.exceptions.RayError("gone")
        return body(*args)

    def cancel(self, ref):
        self.log.append(f"cancel {self.tasks[ref][1][1]}")

    def shutdown(self):
        self.log.append("down")


def test_ray_session_is_ours_only_if_we_started_it(monkeypatch):
    units = [Unit("a", payload={"x": 1}), Unit("b", ("a",), {"x": 2}, gpus=0)]
    for fake, wanted in (
        (FakeRay(), [("auto", None), ("local", 2), "gpus 0", "gpus 0", "down"]),
        (FakeRay(cluster=True, gpus=4), [("auto", None), "gpus 1", "gpus 0", "down"]),
    ):
        monkeypatch.setitem(sys.modules, "ray", fake)
        assert run_units(units, engine_work.double, engine="ray", jobs=2) == {"a": {"twice": 2}, "b": {"twice": 4}}
        assert fake.log == wanted
    monkeypatch.setattr(fake, "is_initialized", lambda: True)
    fake.log.clear()
    run_units(units, engine_work.double, engine="ray")
    assert fake.log == ["gpus 1", "gpus 0"]


def test_ray_address_that_does_not_answer(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", FakeRay())
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with pytest.raises(TrainingError, match="no Ray cluster answers at RAY_ADDRESS=10.0.0.1:6379"):
        run_units([Unit("a")], engine_work.double, engine="ray")


def test_ray_cancels_what_runs_after_the_first_error(monkeypatch, capsys):
    fake = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", fake)
    units = [Unit("a", payload={"lost": True}), Unit("b", payload={"x": 2}), Unit("c", payload={"x": 3})]
    with pytest.raises(TrainingError, match="the worker of a ended before its work was done"):
        run_units(units, engine_work.wait_or_die, engine="ray", jobs=2)
    assert fake.log.count("cancel {'x': 2}") >= 1 and "cancel {'x': 3}" not in fake.log and fake.log[-1] == "down"
    assert capsys.readouterr().out == ""


@pytest.fixture(scope="module")
def cluster():
    """A local Ray cluster with two workers; its files are in a folder with a short name, as its sockets demand."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip('ray is not installed: pip install -e ".[scale]"')
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray

    quiet = {"log_to_driver": False, "logging_level": "ERROR", "include_dashboard": False}
    where = tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True)
    with where as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{ROOT / 'tests'}")
        ray.init(address="local", num_cpus=2, _temp_dir=folder, **quiet)
        yield ray
        ray.shutdown()


@pytest.mark.slow
def test_on_a_local_cluster_of_two_workers(cluster, tmp_path, monkeypatch):
    """Same results as in one process, at the same time, in the caller's folder; errors and dead workers as with processes."""
    graph = [Unit(f"u{n}", after=(f"u{n - 2}",) if n > 1 else (), payload={"x": n}) for n in range(6)]
    done = []
    options = {"engine": "ray", "jobs": 2}
    found = run_units(graph, engine_work.double, **options, on_done=lambda *what: done.append(what[:3]))
    assert found == run_units(graph, engine_work.double) and list(found) == [u.name for u in graph]
    assert [what[1:] for what in done] == [(n + 1, 6) for n in range(6)]

    monkeypatch.chdir(tmp_path)
    place = run_units([Unit("a")], engine_work.surroundings, **options)["a"]
    assert place["folder"] == str(tmp_path) and place["threads"] == "1" and place["pid"] != os.getpid()

    helper = threading.Thread(
        target=lambda: (until(lambda: len(list(tmp_path.glob("*.started"))) == 2), (tmp_path / "go").touch())
    )
    helper.start()
    units = [Unit(name, payload={"name": name, "folder": str(tmp_path)}) for name in ("a", "b")]
    assert run_units(units, engine_work.linger, **options) == {"a": {"name": "a"}, "b": {"name": "b"}}
    helper.join()

    with pytest.raises(TrainingError, match="a: the loss is not finite") as caught:
        run_units([Unit("a", payload={"say": "the loss is not finite"})], engine_work.wait_or_die, **options)
    assert caught.value.hint == "look at the log"
    with pytest.raises(ZeroDivisionError) as foreign:
        run_units([Unit("a", payload={"x": 0})], engine_work.divide, **options)
    assert "engine_work.py" in foreign.value.__notes__[0]
    with pytest.raises(TrainingError, match="the worker of a ended before its work was done"):
        run_units([Unit("a", payload={"exit": 3})], engine_work.wait_or_die, **options)
    (tmp_path / "go").unlink()
    units = [Unit("b", payload={"name": "b", "folder": str(tmp_path)})]
    units += [Unit("a", payload={"until": str(tmp_path / "b.started"), "say": "first"})]
    (tmp_path / "b.started").unlink()
    with pytest.raises(TrainingError, match="a: first"):
        run_units(units, engine_work.meet_or_linger, **options)
    assert (tmp_path / "b.interrupted").exists()  # what ran beside it was cancelled, not killed
    assert cluster.is_initialized()  # a session that was there before is left alone


@pytest.mark.slow
def test_a_benchmark_on_the_cluster_is_the_benchmark_of_one_process(cluster, tmp_path):
    spec = tiny_benchmark(seeds=[5, 6])
    here = timeless(run_benchmark(spec, output=tmp_path / "here"))
    there = timeless(run_benchmark(spec, output=tmp_path / "there", engine="ray", jobs=2))
    assert {**there, "git_commit": None} == {**here, "git_commit": None}  # a commit may be made meanwhile
