"""The local editor, worker and all: what is kept after failures, what comes out, and that nothing survives."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest
from test_campaign_sandbox import until_gone, with_token

from miniverl.campaign import backends, sandbox
from miniverl.campaign.backends import LocalBackend
from miniverl.campaign.launch import Closure, SandboxLevel
from miniverl.campaign.records import ReasonCode
from miniverl.campaign.transfer import ExportRejected
from miniverl.campaign.trial import NotScored
from miniverl.campaign.wire import EditorFailed, EditorSpec, EditorTimeout, Resources, WorkerLost
from miniverl.core import BackendError, ConfigError, sha256_file
from miniverl.wsm.files import read_header
from miniverl.wsm.tiny import tiny_snapshot

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="local editors need Linux")
NORM = "model.weights['model.norm.weight']"
TOKEN = "4e5c0ffee-daemon"
CASES = [{"prompt": "the sea ", "target": "is wide"}, {"prompt": "two ", "target": "words"}]
DAEMON = f"""
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv('/bin/sh', ['sh', '-c', 'sleep 120; : {TOKEN}'])
    os._exit(0)
"""


@pytest.fixture(scope="module")
def level() -> SandboxLevel:
    return sandbox.probe()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    base = tmp_path_factory.mktemp("inputs")
    tiny_snapshot(base / "model")
    (base / "public.json").write_text(json.dumps(CASES))
    (base / "private.json").write_text('"CANARY"')
    (base / "private.json").chmod(0o600)
    return base


def spec_for(inputs: Path, scratch: Path, level, **resources) -> EditorSpec:
    scratch.mkdir(mode=0o700)
    return EditorSpec(
        "0001-agent",
        inputs / "model",
        inputs / "public.json",
        scratch,
        isolation=level,
        resources=Resources(**resources),
    )


@pytest.fixture(scope="module")
def story(inputs, tmp_path_factory, level):
    """One trial with all that can go wrong inside it, played once; what was seen, by name."""
    scratch = tmp_path_factory.mktemp("story") / "scratch"
    before = {path.name: sha256_file(path) for path in (inputs / "model").iterdir()}
    editor, seen = LocalBackend(level).open(spec_for(inputs, scratch, level)), {}
    seen["nothing"] = editor.python("print('hello'); import sys; print('noise', file=sys.stderr)", 60)
    seen["score"] = editor.evaluate(60)
    seen["edit"] = editor.python(f"{NORM}[:4] *= 2", 60)
    seen["same"] = editor.python("x = 1", 60)
    seen["fresh"] = editor.python("print('x' in globals())", 60)
    seen["raised"] = editor.python(f"{NORM}.zero_()\n1 / 0", 60)
    seen["private"] = editor.python(f"print(open({str(inputs / 'private.json')!r}).read())", 60)
    seen["wire"] = editor.python("import os\nfor n in (0, 1): os.write(n, b'forged\\n')", 60)
    seen["exposed"] = editor.python("import os; print(dict(os.environ))", 60)
    seen["harmful"] = editor.python(f"{NORM}[4:8] *= 50", 60)
    seen["worse"] = editor.evaluate(60)
    started = time.monotonic()
    seen["hang"] = editor.python(f"{DAEMON}\n{NORM}.zero_()\nwhile True: pass", 1.0)
    seen["hang_seconds"] = time.monotonic() - started
    seen["left_after_hang"] = with_token(TOKEN)
    seen["broken"] = editor.python(f"{NORM}[0] = float('nan')", 60)
    with pytest.raises(NotScored) as unscored:
        editor.evaluate(60)
    seen["unscored"] = str(unscored.value)
    seen["mended"] = editor.python(f"{NORM}[0] = 2 * model.original('model.norm.weight')[0]", 60)
    seen["export"] = editor.export(scratch.parent / "final.safetensors")
    seen["closure"], seen["again"] = editor.close(), editor.close()
    seen |= {
        "scratch": os.listdir(scratch),
        "final": scratch.parent / "final.safetensors",
        "diagnostics": editor.diagnostics,
    }
    seen["source_unchanged"] = before == {path.name: sha256_file(path) for path in (inputs / "model").iterdir()}
    return seen


def test_programs_are_answered(story):
    assert story["nothing"].ok and story["nothing"].stdout == "hello\n" and story["nothing"].checkpoint is None
    assert story["fresh"].stdout == "False\n", "each program begins with its own names"
    assert story["wire"].error_type in (None, "OSError"), "writing to 0 and 1 reaches nobody"


def test_every_successful_edit_is_a_sparse_checkpoint(story):
    first = story["edit"]
    assert first.ok and dict(first.changed) == {"model.norm.weight": 4}
    assert first.checkpoint["index"] == 1 and first.checkpoint["bytes"] < 1000
    assert story["same"].checkpoint == first.checkpoint, "an action that changes nothing keeps the checkpoint"
    assert story["harmful"].checkpoint["index"] == 2 and story["worse"]["equal"] > story["score"]["equal"]


def test_a_failed_action_does_not_advance(story):
    assert not story["raised"].ok and story["raised"].error_type == "ZeroDivisionError"
    assert story["raised"].checkpoint == story["edit"].checkpoint


def test_weights_that_give_no_score_do_not_end_the_trial(story):
    assert story["broken"].ok and story["unscored"].startswith("the current weights give no score: DataError")
    assert story["mended"].ok and story["mended"].checkpoint["sha256"] == story["harmful"].checkpoint["sha256"]


def test_a_command_that_takes_too_long_is_ended_with_everything_in_it(story):
    assert story["hang"].timed_out and not story["hang"].ok and story["hang"].error_type == "TimeoutError"
    assert story["hang"].checkpoint == story["harmful"].checkpoint and story["hang_seconds"] < 10
    assert story["left_after_hang"] == [] and until_gone(TOKEN) == []


def test_private_files_are_out_of_reach_where_the_level_says_so(story, level):
    assert ("CANARY" in story["private"].stdout) == (level.level < 2)


def test_nothing_of_our_environment_is_inside(story):
    assert "HF_HUB_OFFLINE" in story["exposed"].stdout
    assert not [
        name
        for name in os.environ
        if f"'{name}'" in story["exposed"].stdout and name.endswith(("KEY", "TOKEN", "SECRET"))
    ]


def test_the_artifact_is_the_last_successful_edit(story, inputs):
    final, source = story["final"], inputs / "model" / "model.safetensors"
    assert story["export"].sha256 == sha256_file(final) and story["export"].bytes == final.stat().st_size
    assert read_header(final).raw == read_header(source).raw
    entry = read_header(source).entries["model.norm.weight"]
    old, new = source.read_bytes(), final.read_bytes()
    assert old[: entry.start] == new[: entry.start] and old[entry.stop :] == new[entry.stop :]
    differ = [n for n in range(entry.start, entry.stop, 4) if old[n : n + 4] != new[n : n + 4]]
    assert differ == list(range(entry.start, entry.start + 32, 4)), (
        "eight elements: a good edit and the harmful one after it"
    )


def test_closing_is_attested_and_leaves_nothing(story):
    assert story["closure"].closed and story["again"] == story["closure"] and story["closure"].reaped >= 4
    assert story["scratch"] == [] and story["source_unchanged"]
    assert set(story["closure"].to_record()) == {"closed", "exit", "reaped"}


@pytest.fixture
def light(monkeypatch, inputs, tmp_path, level):
    """An editor whose worker is a few lines without tensor libraries; `exports` are real."""

    def opened(program: str, **resources):
        real = backends.python_command

        def line(module, *words, level=0):
            return real(module, *words, level=level) if words else [*real(module, level=level)[:5], "-c", program]

        monkeypatch.setattr(backends, "python_command", line)
        editors.append(LocalBackend(level).open(spec_for(inputs, tmp_path / "scratch", level, **resources)))
        return editors[-1]

    editors = []
    yield opened
    for editor in editors:
        editor.close()


ANSWERS = """
import json, os, sys
def answer(request, **more): print(json.dumps({"id": request["id"], "ok": True, **more}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    source = request.get("source", "")
    if request["op"] != "python": answer(request)
    else: exec(source)
"""


def test_an_oversized_checkpoint_is_refused_and_ends_the_trial(light, tmp_path):
    editor = light(ANSWERS, payload_bytes=10**6)
    huge = "open('huge', 'wb').truncate(2 * 10**6)\nanswer(request, file='huge', changed={'a': 1})"
    with pytest.raises(ExportRejected) as caught:
        editor.python(huge, 30)
    assert caught.value.reason == ReasonCode.ARTIFACT_TOO_LARGE and editor.fault is caught.value
    for call in (lambda: editor.python("", 30), lambda: editor.export(tmp_path / "final")):
        with pytest.raises(ExportRejected):
            call()
    assert editor.close().closed and not (tmp_path / "final").exists()


def test_a_checkpoint_that_is_a_link_or_a_fifo_is_refused(light):
    editor = light(ANSWERS)
    with pytest.raises(ExportRejected) as caught:
        editor.python("os.symlink('/etc/hostname', 'link'); answer(request, file='../../work/link')", 30)
    assert caught.value.reason == ReasonCode.EXPORT_REJECTED


def test_a_checkpoint_that_does_not_fit_the_model_is_refused_at_export(light, tmp_path):
    editor = light(ANSWERS)
    header = '{"other.weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'
    forged = f"h = {header!r}.encode()\nopen('c', 'wb').write(len(h).to_bytes(8, 'little') + h + bytes(4))\nanswer(request, file='c')"
    assert editor.python(forged, 30).checkpoint["index"] == 1
    with pytest.raises(ExportRejected) as caught:
        editor.export(tmp_path / "final")
    assert caught.value.reason == ReasonCode.EXPORT_REJECTED and not (tmp_path / "final").exists()


def test_an_artifact_above_the_limit_is_refused(light, tmp_path, inputs):
    size = (inputs / "model" / "model.safetensors").stat().st_size
    editor = light(ANSWERS, payload_bytes=size - 1)
    with pytest.raises(ExportRejected) as caught:
        editor.export(tmp_path / "final")
    assert caught.value.reason == ReasonCode.ARTIFACT_TOO_LARGE and os.listdir(tmp_path) == ["scratch"]


def test_an_unedited_export_is_the_source(light, tmp_path, inputs):
    editor = light(ANSWERS)
    editor.export(tmp_path / "final")
    assert (tmp_path / "final").read_bytes() == (inputs / "model" / "model.safetensors").read_bytes()
    with pytest.raises(BackendError):
        LocalBackend().open(
            EditorSpec("x", inputs / "absent", inputs / "public.json", tmp_path / "scratch", isolation=0)
        )


@pytest.mark.parametrize(
    "program",
    [
        "os._exit(0)",
        "print('text', flush=True)",
        'print(\'{"id": 99, "ok": true}\', flush=True)',
        "print('{}' * 3_000_000, flush=True)",
    ],
    ids=["ends", "text", "wrong number", "no end"],
)
def test_a_worker_that_says_nonsense_is_a_failed_action(light, program):
    editor = light(ANSWERS)
    result = editor.python(program, 30)
    assert not result.ok and result.error_type == "WorkerLost" and not result.timed_out
    assert editor.python("answer(request, stdout='back')", 30).stdout == "back", "the next action has a new worker"


def test_a_worker_that_stops_itself_holds_up_nothing(light):
    editor = light(ANSWERS)
    stops = "import signal; os.kill(os.getpid(), signal.SIGSTOP)"
    assert editor.python(f"answer(request); {stops}", 30).ok
    late = editor.python("x" * 10**6, 0.3)
    assert late.timed_out and editor.python("answer(request)", 30).ok and editor.close().closed


def test_answers_are_bounded_and_typed(light):
    editor = light(ANSWERS)
    result = editor.python(
        "answer(request, stdout=['x'] * 10**5, changed={'a': 'many', 'b': 2, 'c' * 9999: 1}, error=5)", 30
    )
    assert len(result.stdout) <= 100_000 and result.error == "5" and set(result.changed) == {"b", "c" * 512}
    with pytest.raises(EditorFailed, match="cannot score"):
        editor.evaluate(30)


def test_a_flood_on_the_diagnostic_stream_is_kept_short(light):
    editor = light(ANSWERS)
    assert editor.python("for _ in range(200): os.write(2, b'x' * 65536)\nanswer(request)", 30).ok
    editor.close()
    assert 0 < len(editor.diagnostics) <= 1 << 16


def test_a_model_that_cannot_be_opened_is_an_error_of_the_editor(light):
    editor = light(
        ANSWERS.replace(
            "answer(request)\n",
            "print(json.dumps({'id': request['id'], 'ok': False, 'error': 'CANARY'}), flush=True)\n",
            1,
        )
    )
    with pytest.raises(EditorFailed) as caught:
        editor.python("", 30)
    assert "CANARY" in caught.value.detail and "CANARY" not in caught.value.message
    assert isinstance(EditorTimeout("late"), TimeoutError) and not isinstance(WorkerLost("gone"), TimeoutError)


def test_an_unattested_end_is_never_called_closed(light):
    editor = light(ANSWERS)
    editor.worker.process.kill()
    closure = editor.close()
    assert closure.closed is False and os.listdir(editor.place.root), "the scratch folder is left for inspection"
    assert Closure(False).to_record()["closed"] is False


def test_less_isolation_than_sealed_is_refused(monkeypatch, inputs, tmp_path):
    monkeypatch.setattr(
        backends, "probe", lambda at_most: SandboxLevel(min(at_most, 1), "rlimits", notes=("no Landlock",))
    )
    with pytest.raises(ConfigError, match="sealed at isolation level 3.* gives 1") as caught:
        LocalBackend().level_for(3)
    assert "no Landlock" in caught.value.hint
    assert LocalBackend().level_for(0).level == 0, "with more than was sealed, the sealed level is used"
    with pytest.raises(ConfigError, match="reaches no network"):
        LocalBackend().open(EditorSpec("x", inputs, inputs, tmp_path, egress=("10.0.0.0/8",)))
