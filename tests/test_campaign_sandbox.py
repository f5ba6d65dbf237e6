"""What a sandbox keeps out, at every level that this machine gives, and that nothing survives its end."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from miniverl.campaign import jail, launch, sandbox
from miniverl.campaign.launch import Bind, Jailed, Limits, SandboxLevel, clean_environment, python_binds, python_command
from miniverl.core import BackendError, ConfigError

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="local editors need Linux")
ROOT = Path(__file__).resolve().parents[1]
BARE = [os.path.realpath(sys.executable), "-I", "-S", "-B", "-c"]


@pytest.fixture(scope="module", params=sandbox.candidates(), ids=lambda level: f"{level.level}-{level.mechanism}")
def level(request) -> SandboxLevel:
    """Each level in turn; skipped where the machine does not give it."""
    try:
        found = sandbox.try_level(request.param)
    except BackendError as error:
        pytest.skip(f"{request.param.mechanism} does not work here: {error.message}")
    assert sandbox.breaches(found) == []
    return found


@pytest.fixture
def started(level, tmp_path):
    """Starts a program at the level, with a work folder that it can write to; ends what a test left."""
    running = []
    work = tmp_path / "work"
    work.mkdir(mode=0o700)
    launch.give(work, level)

    def start(program: str, *arguments: str, limits: Limits | None = None) -> Jailed:
        bind = Bind(work, "/w/work", write=True)
        line = [*BARE, program, *arguments]
        home = bind.inside(level)
        running.append(
            Jailed(level, line, [*python_binds(), bind], limits, environment=clean_environment(home), cwd=home)
        )
        return running[-1]

    yield start
    for process in running:
        process.end()


def said(process: Jailed) -> str:
    process.process.wait(30)
    return process.process.stdout.read().decode()


def with_token(token: str) -> list[int]:
    """Processes whose arguments hold a token."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if token.encode() in Path("/proc", name, "cmdline").read_bytes():
                found.append(int(name))
    return found


def until_gone(token: str, seconds: float = 10.0) -> list[int]:
    deadline = time.monotonic() + seconds
    while (left := with_token(token)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


# forks twice into sessions of their own, which ignore signals; TOKEN stays visible in the arguments
DAEMONS = """
import os, signal, sys, time
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGHUP, signal.SIG_IGN)
            print("up", flush=True)
            time.sleep(120)
        os._exit(0)
for _ in range(3):
    os.wait()
"""


def test_no_daemon_survives_the_end(started, level):
    token = uuid.uuid4().hex
    process = started(DAEMONS + "time.sleep(120)", token)
    for _ in range(3):
        assert process.process.stdout.readline() == b"up\n"
    assert len(with_token(token)) >= 4
    closure = process.end()
    assert closure.closed and closure.error == "" and with_token(token) == []
    assert process.end() is closure


def test_no_daemon_survives_the_exit_of_the_work(started):
    token = uuid.uuid4().hex
    process = started(DAEMONS, token)
    process.process.wait(30)
    assert until_gone(token) == [] and process.end().closed


def test_the_exit_code_is_the_one_of_the_work(started):
    process = started("import sys; sys.exit(7)")
    assert process.process.wait(30) == 7 and process.end().exit == 7


def test_a_killed_supervisor_attests_nothing(started, level):
    token = uuid.uuid4().hex
    process = started(DAEMONS + "time.sleep(120)", token)
    process.process.stdout.readline()
    process.process.kill()
    closure = process.end()
    assert not closure.closed and closure.exit is None
    if level.level >= 3:
        assert until_gone(token) == [], "the namespace dies with its supervisor"
    for pid in with_token(token):
        os.kill(pid, signal.SIGKILL)


def test_nothing_survives_a_killed_controller(level, tmp_path):
    token = uuid.uuid4().hex
    program = (
        "import os, sys; from miniverl.campaign.launch import *; import test_campaign_sandbox as t\n"
        f"j = Jailed(SandboxLevel({level.level}, {level.mechanism!r}), [*t.BARE, t.DAEMONS + 'time.sleep(120)', {token!r}], python_binds())\n"
        "print(j.process.stdout.readline(), flush=True)\nimport time; time.sleep(60)"
    )
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
    ) as controller:
        assert controller.stdout.readline() == b"b'up\\n'\n"
        assert with_token(token)
        controller.kill()
    assert until_gone(token) == []


def test_the_environment_is_made_from_nothing(started, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "CANARY")
    seen = json.loads(said(started("import json, os; print(json.dumps(dict(os.environ)))")))
    assert "CANARY" not in json.dumps(seen) and seen["HF_HUB_OFFLINE"] == "1" and seen["PYTHONHASHSEED"] == "0"
    assert set(seen) - {"LC_CTYPE"} == set(clean_environment("")) | ({"PWD"} & set(seen))


def test_the_report_cannot_be_forged(started):
    forge = 'import os\nfor n in range(3, 64):\n    try: os.write(n, b\'{"closed": true, "exit": 0, "reaped": 99, "error": ""}\')\n    except OSError: pass\nos._exit(3)'
    process = started(forge)
    process.process.wait(30)
    closure = process.end()
    assert closure.closed and closure.exit == 3 and closure.reaped < 10


def test_the_plan_is_not_visible(started, level, tmp_path):
    if level.mechanism == "bubblewrap":
        pytest.skip("bubblewrap keeps its own arguments visible")
    look = "import os, glob\nfor p in glob.glob('/proc/[0-9]*/cmdline'):\n    try: print(open(p, 'rb').read())\n    except OSError: pass"
    lines = [line for line in said(started(look)).splitlines() if "jail.py" in line and str(tmp_path) in line]
    assert lines == []


def test_limits_hold(started, level):
    if level.level < 1:
        pytest.skip("level 0 has no limits")
    hog = (
        "import os\ndef tries(f):\n    try: f(); return 'worked'\n    except (OSError, MemoryError) as e: return type(e).__name__\n"
        "print(tries(lambda: bytearray(1 << 31)), tries(lambda: open('f', 'wb').truncate(1 << 24)), tries(lambda: [open('/dev/null') for _ in range(99)]))"
    )
    text = said(started(hog, limits=Limits(address_space=1 << 30, file_size=1 << 20, open_files=32)))
    assert text.split() == ["MemoryError", "OSError", "OSError"]


def test_processes_are_limited_where_the_user_is_another(started, level):
    if level.level < 3 and os.getuid() == 0:
        pytest.skip("the process limit does not count for root")
    forks = (
        "import os, time\nmade = 0\ntry:\n    for _ in range(40):\n        if os.fork() == 0: time.sleep(30); os._exit(0)\n        made += 1\n"
        "except OSError: pass\nprint(made)"
    )
    used = int(subprocess.run(["ps", "-u", "65534", "-o", "pid="], capture_output=True, text=True).stdout.count("\n"))
    assert int(said(started(forks, limits=Limits(processes=10 + used)))) < 40


def test_only_what_is_planned_can_be_opened(level, started, tmp_path):
    if level.level < 2:
        pytest.skip("levels 0 and 1 keep nothing closed")
    look = "import sys\nfor p in sys.argv[1:]:\n    try: open(p, 'rb').read(1); print('read')\n    except OSError as e: print(type(e).__name__)"
    names = [str(ROOT / "settings.ini"), "/etc/passwd", str(Path.home() / ".bashrc"), str(Path(jail.__file__))]
    found = said(started(look, *names)).split()
    assert "read" not in found[:3]
    assert found[3] == ("FileNotFoundError" if level.level >= 3 else "read"), "the package has another name inside"


def test_new_namespaces_and_traces_are_refused(level, started):
    if level.level < 2:
        pytest.skip("levels 0 and 1 filter no calls")
    program = (
        "import ctypes, os, socket\nc = ctypes.CDLL(None, use_errno=True)\nr = []\n"
        "r.append(c.unshare(0x10000000)); r.append(c.mount(b'a', b'/tmp', b'tmpfs', 0, None)); r.append(c.ptrace(0, 0, 0, 0))\n"
        "for family in (socket.AF_INET, socket.AF_UNIX, socket.AF_NETLINK):\n    try: socket.socket(family, socket.SOCK_DGRAM); r.append(0)\n    except OSError: r.append(-1)\n"
        "print(r)\nimport threading; t = threading.Thread(target=print, args=('threads work',)); t.start(); t.join()"
    )
    assert said(started(program)).splitlines() == ["[-1, -1, -1, -1, -1, -1]", "threads work"]


def test_a_program_that_does_not_exist_is_told(level):
    process = Jailed(level, ["/nowhere/at/all"], python_binds())
    assert process.process.wait(30) == jail.SETUP_FAILED
    closure = process.end()
    assert closure.closed and ("FileNotFoundError" in closure.error or level.mechanism == "bubblewrap")


def test_our_modules_run_inside_and_nothing_beside_them(level):
    """The package is importable, the checkout that it lies in is not."""
    line = python_command("miniverl.campaign.transfer", "/nowhere", "5", level=level)
    process = Jailed(level, line, python_binds(), environment=clean_environment("/"))
    assert process.process.wait(30) == 3 and json.loads(process.process.stderr.read()) == {"refused": "unreadable"}
    assert process.end().closed


def test_probe_takes_the_highest_level_and_keeps_the_reasons(monkeypatch):
    def tried(candidate, private=None):
        if candidate.level == 3:
            raise BackendError("no right to make namespaces")
        return SandboxLevel(candidate.level, candidate.mechanism, {"udp_sent": candidate.level == 2})

    monkeypatch.setattr(sandbox, "try_level", tried)
    found = sandbox.probe()
    assert found.level == 1 and found.mechanism == "rlimits"
    assert (
        any("no right to make namespaces" in note for note in found.notes)
        and "landlock+seccomp: udp_sent" in found.notes
    )
    assert found.to_record()["name"] == "limits" and json.dumps(found.to_record())


def test_probe_sees_a_given_private_file(tmp_path):
    secret = tmp_path / "private.json"
    secret.write_text("x")
    secret.chmod(0o600)
    found = sandbox.probe(private=secret, at_most=1)
    assert found.level <= 1 and found.canary["private_file_read"] is True, (
        "level 1 keeps no file closed, and the canary says so"
    )
    if (best := sandbox.probe(private=secret)).level >= 2:
        assert best.canary["private_file_read"] is False


def test_require_refuses_instead_of_falling_back(monkeypatch):
    monkeypatch.setattr(sandbox, "probe", lambda **_: SandboxLevel(1, "rlimits", notes=("unshare: not permitted",)))
    with pytest.raises(ConfigError, match=r"runtime\.require_isolation is 3.*gives 1") as caught:
        sandbox.require(3)
    assert "not permitted" in caught.value.hint and sandbox.require(1).level == 1


def test_a_user_without_rights_gets_namespaces_too(tmp_path):
    """Where the kernel lets users make a user namespace, the jail needs no root."""
    python = shutil.which("python3", path="/usr/bin")
    if os.getuid() != 0 or not shutil.which("setpriv") or not python:
        pytest.skip("needs root, setpriv and a system Python to try it as another user")
    plan = {"level": 3, "namespaces": True, "user": 65534, "cwd": "/", "binds": [["/usr", "/usr", False]], "calls": True,
            "links": {name: os.readlink(name) for name in ("/bin", "/lib", "/lib64") if os.path.islink(name)},
            "files": {"read": ["/"], "write": ["/tmp"]}}  # fmt: skip
    copy = tmp_path / "jail.py"
    shutil.copy(jail.__file__, copy)
    for folder in (tmp_path, *tmp_path.parents[:3]):
        if folder.stat().st_uid == os.getuid() and folder != Path("/tmp"):
            folder.chmod(folder.stat().st_mode | 0o055)
    drop = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--no-new-privs"]
    look = "import os; print(os.getuid(), os.getpid(), sorted(os.listdir('/'))[:1], open('/proc/self/status').read().split('CapEff:')[1].split()[0])"
    ran = subprocess.run(
        [*drop, python, "-I", "-S", copy, json.dumps(plan), python, "-I", "-c", look], capture_output=True, text=True
    )
    if "unshare" in ran.stderr or ran.returncode == jail.SETUP_FAILED:
        pytest.skip(f"this kernel lets no user make namespaces: {ran.stderr[-200:]}")
    assert ran.stdout.split() == ["65534", "2", "['bin']", "0000000000000000"], ran.stderr
