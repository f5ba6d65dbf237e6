"""The boundary to the hosted service: which calls are made, that they exist there, and how little is concluded from them."""

from __future__ import annotations

import importlib.util
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
from modal_fake import FakeModal

from miniverl.campaign.modal_backend import ModalBackend, close_sandbox
from miniverl.campaign.records import ReasonCode
from miniverl.campaign.transfer import ExportRejected, TransferError
from miniverl.campaign.wire import EditorFailed, EditorSpec, EditorTimeout, Resources, WorkerLost
from miniverl.core import ConfigError, MissingDependencyError
from miniverl.wsm.files import TensorFile, tensor_bytes
from miniverl.wsm.tiny import tiny_snapshot

# parameters, as in modal 1.6.4, of what is called; compared with the installed package where there is one
SIGNATURES = {
    "Image.debian_slim": {"python_version", "force_build"},
    "Image.pip_install": {"packages", "find_links", "index_url", "extra_index_url", "pre", "extra_options", "force_build", "env", "secrets", "gpu"},
    "Image.add_local_python_source": {"modules", "copy", "ignore"},
    "Image.add_local_dir": {"local_path", "remote_path", "copy", "ignore"},
    "Image.add_local_file": {"local_path", "remote_path", "copy"},
    "App.lookup": {"name", "client", "environment_name", "create_if_missing"},
    "Sandbox.create": {"args", "app", "image", "env", "secrets", "timeout", "workdir", "cpu", "memory", "block_network", "outbound_cidr_allowlist"},
    "Sandbox.exec": {"args", "stdout", "stderr", "timeout", "workdir", "env", "secrets", "text", "bufsize", "pty"},
    "Sandbox.terminate": {"wait"},
    "Sandbox.poll": set(),
}  # fmt: skip


@pytest.fixture
def place(tmp_path) -> Path:
    tiny_snapshot(tmp_path / "model")
    (tmp_path / "public.json").write_text('[{"prompt": "a", "target": "b"}]')
    for name in ("scratch", "inside"):
        (tmp_path / name).mkdir()
    return tmp_path


def spec_for(place: Path, **more) -> EditorSpec:
    limits = {"wall_seconds": 1800}
    return EditorSpec("0001-agent", place / "model", place / "public.json", place / "scratch", limits, **more)


def write_checkpoint(path: Path, place: Path, factor: float) -> None:
    """The final norm of the tiny model, scaled, as a checkpoint."""
    tensor = TensorFile(place / "model" / "model.safetensors").tensor("model.norm.weight") * factor
    header = {
        "model.norm.weight": {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [0, tensor.numel() * 4]}
    }
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(tensor_bytes(tensor)))


def worker(place: Path):
    """Answers like a real worker; a program `scale X` writes a checkpoint, `silent` never answers, `cut` ends the stream."""
    made = []

    def answer(request: dict) -> bytes | None:
        word, _, value = request.get("source", "").partition(" ")
        if word in ("silent", "cut"):
            return b"" if word == "silent" else None
        more = {"score": {"equal": 1.0}} if request["op"] == "evaluate" else {}
        if word == "scale":
            made.append(value)
            name = f"checkpoint-{len(made):04d}.safetensors"
            write_checkpoint(place / "inside" / name, place, float(value))
            more = {"file": name, "changed": {"model.norm.weight": 32}}
        if word == "claim":
            more = {"file": value}
        return json.dumps({"id": request["id"], "ok": True, **more}).encode() + b"\n"

    return answer


@pytest.fixture
def sdk(place) -> FakeModal:
    return FakeModal(place / "inside", worker(place))


def test_a_trial_on_the_service(place, sdk):
    editor = ModalBackend(sdk).open(spec_for(place))
    assert editor.python("scale 2", 10).checkpoint["index"] == 1
    assert editor.python("scale 3", 10).checkpoint["index"] == 2 and editor.evaluate(10) == {"equal": 1.0}
    export = editor.export(place / "final.safetensors")
    final, source = (TensorFile(path) for path in (place / "final.safetensors", place / "model" / "model.safetensors"))
    assert final.header.raw == source.header.raw and export.bytes == final.path.stat().st_size
    assert (final.tensor("model.norm.weight") == source.tensor("model.norm.weight") * 3).all()
    closure = editor.close()
    assert (
        closure.closed
        and closure.exit == 137
        and sdk.calls[-2:] == [("Sandbox.terminate", (), {"wait": True}), ("Sandbox.poll", (), {})]
    )


def test_every_call_exists_in_the_service_package(place, sdk):
    editor = ModalBackend(sdk).open(spec_for(place))
    editor.python("scale 2", 10)
    editor.close()
    made = {name for name, _, _ in sdk.calls if not name.startswith(("stdin", "process"))}
    assert made == set(SIGNATURES)
    for name, _, kwargs in sdk.calls:
        assert set(kwargs) <= SIGNATURES.get(name, set()), name
    if not importlib.util.find_spec("modal"):
        pytest.skip("modal is not installed: compared with the signatures of 1.6.4 only")
    import modal

    for name, args, kwargs in sdk.calls:
        if name in SIGNATURES:
            owner, method = name.split(".")
            known = inspect.signature(getattr(getattr(modal, owner), method))
            assert SIGNATURES[name] <= set(known.parameters) - {"self"} | {"args"}, name
            known.bind(*(([None] if "self" in known.parameters else []) + list(args)), **kwargs)


def test_no_secret_and_no_network_reach_the_sandbox(place, sdk, monkeypatch):
    monkeypatch.setenv("PROXY_KEY", "CANARY")
    monkeypatch.setenv("MODAL_TOKEN_SECRET", "CANARY")
    ModalBackend(sdk).open(spec_for(place)).python("scale 2", 10)
    assert "CANARY" not in repr(sdk.calls)
    for name, _, kwargs in sdk.calls:
        if name in ("Sandbox.create", "Sandbox.exec"):
            assert kwargs["secrets"] == []
        if name == "Sandbox.create":
            assert (
                kwargs["block_network"] is True
                and kwargs["timeout"] == 1800
                and "outbound_cidr_allowlist" not in kwargs
            )


def test_named_networks_are_the_only_ones(place, sdk):
    ModalBackend(sdk).open(spec_for(place, egress=("203.0.113.7/32",)))
    (create,) = (kwargs for name, _, kwargs in sdk.calls if name == "Sandbox.create")
    assert create["outbound_cidr_allowlist"] == ["203.0.113.7/32"] and "block_network" not in create


@pytest.mark.parametrize("program, error", [("silent", EditorTimeout), ("cut", WorkerLost)])
def test_a_failure_is_an_exception_and_nothing_is_repeated(place, sdk, program, error):
    editor = ModalBackend(sdk).open(spec_for(place))
    with pytest.raises(error):
        editor.python(program, 0.2)
    executed = [args for name, args, _ in sdk.calls if name == "Sandbox.exec"]
    assert len(executed) == 1 and sum(name == "Sandbox.create" for name, _, _ in sdk.calls) == 1


def test_a_checkpoint_the_exporter_refuses_ends_the_trial(place, sdk):
    editor = ModalBackend(sdk).open(spec_for(place, resources=Resources(payload_bytes=100)))
    with pytest.raises(ExportRejected) as caught:
        editor.python("scale 2", 10)
    assert caught.value.reason == ReasonCode.ARTIFACT_TOO_LARGE and editor.fault is caught.value
    with pytest.raises(ExportRejected):
        editor.export(place / "final")
    assert not (place / "final").exists()


def test_a_claimed_file_that_is_not_there(place, sdk):
    editor = ModalBackend(sdk).open(spec_for(place))
    with pytest.raises(TransferError):
        editor.python("claim ../../etc/passwd", 10)
    (args,) = (args for name, args, _ in sdk.calls if name == "Sandbox.exec" and "transfer" in args[5])
    assert args[6] == "/w/work/passwd", "only a name in the work folder is ever asked for"


def test_an_end_that_is_not_confirmed_is_not_attested(place):
    sdk = FakeModal(place / "inside", worker(place), ends=False)
    editor = ModalBackend(sdk).open(spec_for(place))
    assert not editor.close().closed

    class Broken:
        def terminate(self, *, wait):
            raise ConnectionError("no route")

    assert not close_sandbox(Broken()).closed


def test_an_editor_that_cannot_be_opened_says_whether_it_is_gone(place):
    refusing = FakeModal(
        place / "inside",
        lambda request: json.dumps({"id": request["id"], "ok": False, "error": "CANARY"}).encode() + b"\n",
    )
    with pytest.raises(EditorFailed) as caught:
        ModalBackend(refusing).open(spec_for(place))
    assert caught.value.closed and "CANARY" in caught.value.detail and "CANARY" not in caught.value.message


def test_a_window_is_needed_before_anything_is_created(place, sdk):
    with pytest.raises(ConfigError, match="wall_seconds"):
        ModalBackend(sdk).open(EditorSpec("x", place / "model", place / "public.json", place / "scratch", limits={}))
    assert sdk.calls == []


def test_the_service_package_is_imported_by_no_module():
    """Neither preflight nor reports nor regrading can reach the service: the package is asked for when an editor is opened."""
    program = (
        "import sys\nsys.modules['modal'] = None\n"
        "import miniverl.campaign.modal_backend, miniverl.campaign.preflight, miniverl.campaign.backends\nprint('torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert ran.returncode == 0 and ran.stdout == "False\n", ran.stderr


def test_without_the_package_the_hint_names_the_extra(place, monkeypatch):
    monkeypatch.setitem(sys.modules, "modal", None)
    with pytest.raises(MissingDependencyError) as caught:
        ModalBackend().open(spec_for(place))
    assert "[modal]" in caught.value.hint
