"""The score of a model: golden arithmetic, one formula against another, and bits that do not move."""

from __future__ import annotations

import ast
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from miniverl.core import DataError, canonical_json
from miniverl.wsm.model import WeightModel
from miniverl.wsm.scoring import (
    CaseScore,
    Score,
    case_score,
    encode,
    environment_fingerprint,
    fingerprint_diff,
    score_cases,
    token_losses,
)
from miniverl.wsm.tiny import byte_tokenizer, tiny_snapshot

ROOT = Path(__file__).resolve().parents[1]
CASES = [
    {"prompt": "The capital of France is", "target": " Paris."},
    {"prompt": "2 + 2 =", "target": " 4"},
    {"prompt": "é", "target": "日本 <|end|>"},
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return tiny_snapshot(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def model(tiny) -> WeightModel:
    return WeightModel.load(tiny)


losses = st.lists(st.floats(0, 50, allow_nan=False), min_size=1, max_size=6)


@given(st.lists(losses, min_size=1, max_size=6), st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_means_follow_from_the_losses_and_survive_the_file(rows, random):
    score = Score(tuple(map(case_score, rows)))
    assert score.tokens == sum(map(len, rows))
    assert score.equal == pytest.approx(sum(sum(r) / len(r) for r in rows) / len(rows), abs=1e-12)
    assert score.token_weighted == pytest.approx(sum(map(sum, rows)) / score.tokens, abs=1e-12)
    assert Score.from_record(json.loads(canonical_json(score.to_record()))) == score
    shuffled = random.sample(score.cases, len(score.cases))
    assert Score(tuple(shuffled)).equal == score.equal, "the order of the cases changed a bit"


@pytest.mark.parametrize(
    "case",
    [
        {"nll": 1.0, "nll_hex": "0x1.0000000000001p+0", "tokens": 1},
        {"nll": 1.0, "nll_hex": (1.0).hex(), "tokens": 0},
        {"nll": 1.0, "nll_hex": (1.0).hex(), "tokens": True},
        {"nll": 1.0, "nll_hex": (1.0).hex(), "tokens": 1, "text": "extra"},
        {"nll": math.inf, "nll_hex": "inf", "tokens": 1},
        {"nll": math.nan, "nll_hex": "nan", "tokens": 1},
        {"nll_hex": (1.0).hex(), "tokens": 1},
        "1.0",
    ],
)
def test_a_damaged_case_is_no_score(case):
    sound = Score((CaseScore(1.0, 1),)).to_record()
    with pytest.raises(DataError, match="damaged"):
        Score.from_record(sound | {"cases": [case]})


def test_the_losses_are_those_of_the_whole_sequence(tiny, model):
    """The same losses from all logits of a model that the library loads on its own."""
    other = transformers.LlamaForCausalLM.from_pretrained(tiny, local_files_only=True)
    for case, scored in zip(CASES, model.evaluate(CASES).cases, strict=True):
        prompt, target = (list(case[part].encode()) for part in ("prompt", "target"))
        with torch.no_grad():
            logits = other(torch.tensor([prompt + target])).logits[0].double()
        wanted = torch.nn.functional.cross_entropy(logits[len(prompt) - 1 : -1], torch.tensor(target))
        assert scored.nll == pytest.approx(wanted.item(), abs=1e-5) and scored.tokens == len(target)


def test_prompt_and_target_are_tokenized_apart_and_without_special_tokens(model):
    assert encode(model.tokenizer, "<|end|>") == list(b"<|end|>"), "text was read as a special token"
    seen = []

    class Spy:
        def __call__(self, text, **settings):
            seen.append((text, settings))
            return model.tokenizer(text, **settings)

    score_cases(model.module, Spy(), CASES[:1], max_positions=64)
    assert [text for text, _ in seen] == ["The capital of France is", " Paris."]
    assert all(s["add_special_tokens"] is False and s["split_special_tokens"] is True for _, s in seen)


def test_the_caller_cannot_change_a_bit(model):
    """Neither its threads nor the company of other cases; and the threads are put back."""
    first = model.evaluate(CASES)
    torch.set_num_threads(2)
    try:
        assert model.evaluate(CASES) == first and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert model.evaluate(CASES[::-1]).cases == first.cases[::-1]
    assert all(model.evaluate([case]).cases[0] == alone for case, alone in zip(CASES, first.cases, strict=True))


def test_no_gradient_is_recorded_even_if_the_caller_wants_some(model):
    seen = []
    hook = model.module.lm_head.register_forward_hook(
        lambda _, __, out: seen.append((torch.is_grad_enabled(), out.requires_grad, out.shape[1]))
    )
    with torch.enable_grad():
        model.evaluate(CASES[:1])
    hook.remove()
    assert seen == [(False, False, 8)], "only the rows that predict the target are computed: 7 and the one after"


def test_broken_weights_are_told_not_scored(tiny):
    model = WeightModel.load(tiny)
    model.weights["model.norm.weight"][0] = float("nan")
    with pytest.raises(DataError, match="NaN or infinity"):
        model.evaluate(CASES)


def test_the_longest_case_that_fits(model):
    fits = {"prompt": "a" * 500, "target": "b" * 12}
    assert model.evaluate([fits]).tokens == 12
    with pytest.raises(DataError, match="case 1 has 513 tokens, the model reads 512"):
        model.evaluate([{**fits, "target": "b" * 13}])


def test_the_fingerprint_has_what_moves_bits_and_no_path(model):
    facts = model.fingerprint()
    wanted = {"python", "torch", "transformers", "threads", "cpu_capability", "attention", "compute_dtype", "mkl"}
    assert wanted | {"onednn", "batch_size"} <= set(facts)
    assert (facts["attention"], facts["compute_dtype"], facts["threads"], facts["batch_size"]) == (
        "sdpa",
        "float32",
        1,
        1,
    )
    text = canonical_json(facts)
    assert str(ROOT) not in text and os.path.expanduser("~") not in text
    eager = transformers.LlamaForCausalLM.from_pretrained(model.path, attn_implementation="eager", dtype="bfloat16")
    assert fingerprint_diff(facts, environment_fingerprint(eager)) == [
        "attention: 'sdpa' before, 'eager' now",
        "compute_dtype: 'float32' before, 'bfloat16' now",
    ]


def test_a_switch_of_the_environment_shows(model, monkeypatch):
    before = model.fingerprint()
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    assert fingerprint_diff(before, model.fingerprint()) == ["switches: '' before, 'MKL_CBWR=COMPATIBLE' now"]


AGAIN = """
import json, sys
from miniverl.wsm.model import WeightModel
model = WeightModel.load(sys.argv[1])
print(json.dumps([model.evaluate(json.loads(sys.argv[2])).to_record(), model.fingerprint()]))
"""


def elsewhere(folder: Path, **environment: str) -> tuple[Score, dict]:
    """Score and fingerprint from a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", AGAIN, str(folder), json.dumps(CASES)],
        env={**os.environ, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    record, facts = json.loads(done.stdout)
    return Score.from_record(record), facts


@pytest.mark.slow
def test_a_fresh_process_gives_the_same_bits_and_another_path_says_so(tiny, model):
    score, facts = elsewhere(tiny)
    assert score == model.evaluate(CASES) and fingerprint_diff(model.fingerprint(), facts) == []
    score, facts = elsewhere(tiny, ATEN_CPU_CAPABILITY="default")
    assert {line.split(":")[0] for line in fingerprint_diff(model.fingerprint(), facts)} >= {"switches"}
    assert score.equal == pytest.approx(model.evaluate(CASES).equal, abs=1e-4)


def test_padding_a_case_would_move_its_bits_or_its_value(model):
    """Why a batch holds one case: the loss of a padded case agrees only to rounding."""
    alone = token_losses(model.module, list(b"2 + 2 ="), list(b" 4"))
    ids = torch.tensor([list(b"2 + 2 = 4") + [256] * 20, list(b"The capital of France is Lyon")])
    with torch.no_grad():
        rows = model.module(ids, attention_mask=(ids != 256).long()).logits[0, 6:8].double().log_softmax(-1)
    assert alone == pytest.approx([-rows[0, 32].item(), -rows[1, 52].item()], abs=1e-4)


def test_nothing_in_the_package_trains_or_unpickles():
    forbidden = {"backward", "optim", "enable_grad", "pickle", "Adam", "SGD"}
    for path in sorted((ROOT / "miniverl" / "wsm").glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        names |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        names |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        assert not names & forbidden, path.name
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            told = ast.unparse(call)
            assert "torch.load(" not in told and "requires_grad_(True" not in told, f"{path.name}: {told}"


def test_the_byte_tokenizer_is_exact():
    tokenizer = byte_tokenizer()

    @given(st.text(max_size=30).filter(lambda t: t.encode("utf-8", "ignore").decode() == t))
    @settings(max_examples=50)
    def check(text):
        assert encode(tokenizer, text) == list(text.encode()) and tokenizer.decode(encode(tokenizer, text)) == text

    check()
