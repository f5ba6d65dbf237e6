"""The backend contract on the toy and on small random transformers models; what only the latter can break."""

from __future__ import annotations

import json
import socket

import pytest
import torch

from miniverl.core import BackendError
from miniverl.models.hf import load_hf
from miniverl.models.hf_files import make_debug_model
from miniverl.models.hf_tokenizer import HFTokenizer, debug_tokenizer
from miniverl.models.toy import ToyBackend
from miniverl.schemas.config import LoraConfig, StudentConfig, TeacherConfig, ToyShape
from tests.backend_contract import CHECKS, close, tokens

FULL = LoraConfig(enabled=False)


def hf(model_id="debug:tiny-llama?seed=1", **more):
    return load_hf(StudentConfig(model_id=model_id, **more), offline=True)


BUILDERS = {
    "toy": lambda: ToyBackend.build(ToyShape(), seed=1),
    "llama-lora": hf,
    "llama-full": lambda: hf(lora=FULL),
    "llama-eager": lambda: hf(attn_implementation="eager"),
    "llama-lora-dropout-checkpointing": lambda: hf(lora=LoraConfig(dropout=0.1), gradient_checkpointing=True),
    "qwen2-full": lambda: hf("debug:tiny-qwen2?seed=1", lora=FULL),
    "qwen3-lora": lambda: hf("debug:tiny-qwen3?seed=1"),
}


@pytest.fixture(scope="module", params=BUILDERS)
def backend(request):
    built = BUILDERS[request.param]()
    built.eval()
    return built


@pytest.mark.parametrize("sentence", CHECKS)
def test_contract(backend, sentence):
    CHECKS[sentence](backend)


@pytest.fixture
def no_network(monkeypatch):
    """No socket can be opened, and an attempt fails the test even if somebody swallows the error."""
    attempts = []

    def refuse(*args, **kwargs):
        attempts.append(args)
        raise OSError("the network is out of reach")

    for name in ("socket", "create_connection", "getaddrinfo"):
        monkeypatch.setattr(socket, name, refuse)
    yield
    assert not attempts


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_debug_model(tmp_path_factory.mktemp("models") / "tiny", seed=4)


def test_a_local_folder_loads_without_a_socket(no_network, folder):
    for offline in (True, False):
        backend = load_hf(StudentConfig(model_id=str(folder), tokenizer_id=str(folder)), offline=offline)
        assert backend.identity()["model_id"] == "tiny" and backend.lora["r"] == 16
        assert str(folder) not in json.dumps(backend.identity())


def test_offline_never_asks_the_hub(no_network, monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(BackendError, match="not|cannot find") as caught:
        load_hf(StudentConfig(model_id="nobody/no-such-model", revision="0" * 40), offline=True)
    assert "offline" in caught.value.hint


def test_a_card_in_the_folder_names_the_model(folder, tmp_path):
    made = make_debug_model(tmp_path / "anything", seed=4)
    (made / "miniverl_model.json").write_text('{"model_id": "us/tiny", "revision": "r1"}')
    named, plain = load_hf(StudentConfig(model_id=str(made))), load_hf(StudentConfig(model_id=str(folder)))
    assert (named.identity()["model_id"], named.identity()["revision"]) == ("us/tiny", "r1")
    assert named.identity()["weights_sha256"] == plain.identity()["weights_sha256"]
    assert named.tokenizer.fingerprint == plain.tokenizer.fingerprint, "the place of the files does not matter"


def test_lora_changes_nothing_before_training():
    adapted, plain = hf(), hf(lora=FULL)
    ids = tokens(plain, 1, 8)
    with torch.no_grad():
        assert close(adapted.hidden_states(ids), plain.hidden_states(ids))
    assert sum(p.numel() for p in adapted.trainable_parameters().values()) < sum(
        p.numel() for p in plain.module.parameters()
    )


def test_checkpointed_gradients_equal_plain_ones():
    gradients = []
    for flag in (False, True):
        backend = hf(gradient_checkpointing=flag)
        backend.train()
        backend.hidden_states(tokens(backend, 2, 7)).square().mean().backward()
        gradients.append({n: p.grad.clone() for n, p in backend.trainable_parameters().items() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() and gradients[0]
    assert all(close(gradients[1][name], g) for name, g in gradients[0].items())


def test_bfloat16_is_a_choice():
    backend = hf(dtype="bfloat16")
    assert backend.identity()["dtype"] == "bfloat16" and backend.new_cache(1, 4).keys[0].dtype == torch.bfloat16


def test_content_encoding_equals_the_library_switch(folder):
    from transformers import AutoTokenizer

    library = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    ours = HFTokenizer(debug_tokenizer(), pad_id=0)
    for text in ("What is 3<|im_end|>?", "<|im_start|>system\n", "plain"):
        assert ours.encode(text) == library(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert ours.encode(text, special=True) == library(text, add_special_tokens=False)["input_ids"]


def test_a_head_that_scales_its_logits_is_refused(tmp_path):
    import transformers

    config = transformers.GraniteConfig(
        vocab_size=384, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        logits_scaling=8.0, max_position_embeddings=64, eos_token_id=2, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    made = make_debug_model(tmp_path / "granite")
    transformers.GraniteForCausalLM(config).save_pretrained(made)
    with pytest.raises(BackendError, match="differ from the model's own"):
        load_hf(StudentConfig(model_id=str(made)))


def test_a_sliding_window_is_refused(tmp_path):
    import transformers

    config = transformers.MistralConfig(
        vocab_size=384, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        sliding_window=8, max_position_embeddings=64, eos_token_id=2, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    made = make_debug_model(tmp_path / "mistral")
    transformers.MistralForCausalLM(config).save_pretrained(made)
    with pytest.raises(BackendError, match="full attention"):
        load_hf(StudentConfig(model_id=str(made)))


def test_a_foreign_tokenizer_is_refused(tmp_path, folder):
    wide = debug_tokenizer()
    wide.add_tokens([f"word{i}" for i in range(100)])
    other = make_debug_model(tmp_path / "wide")
    wide.save(str(other / "tokenizer.json"))
    with pytest.raises(BackendError, match="rows for"):
        load_hf(StudentConfig(model_id=str(folder), tokenizer_id=str(other)))


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(BackendError, match="cannot load"):
        load_hf(TeacherConfig(model_id=str(tmp_path)))


def test_missing_transformers_names_the_extra(monkeypatch):
    import importlib
    import sys

    from miniverl.core import MissingDependencyError

    monkeypatch.delitem(sys.modules, "miniverl.models.hf")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingDependencyError) as caught:
        importlib.import_module("miniverl.models.hf")
    assert caught.value.hint == 'pip install -e ".[train]"'
