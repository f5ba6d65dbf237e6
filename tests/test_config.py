"""Every field of RunConfig: default, range, and every rule between fields."""

from __future__ import annotations

import copy
import json
import subprocess
import sys

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from miniverl.core import ConfigError, loads_strict
from miniverl.schemas.config import ENVIRONMENTS, RunConfig, deep_merge, field_rows
from miniverl.schemas.yamlio import dump_yaml, read_yaml

MINIMAL = {"models": {"student": {}, "teacher": {}}}
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TOY = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "intermediate_size": 128, "max_position_embeddings": 1024}
MODEL = {
    "model_id": "toy", "revision": None, "tokenizer_id": None, "tokenizer_revision": None, "dtype": "auto", "quantization": "none",
    "attn_implementation": "sdpa", "toy": TOY, "trust_remote_code": False,
}  # fmt: skip
LORA = {"enabled": True, "r": 16, "alpha": 32, "dropout": 0.0, "target_modules": PROJECTIONS, "bias": "none"}
DEFAULTS = {
    "schema_version": 1,
    "run": {"name": "miniverl-run", "mode": "opd", "seed": 1234, "output_dir": "runs", "run_id": None, "deterministic": True, "notes": "",
            "tags": []},
    "models": {
        "backend": "toy", "device": "auto", "threads": None,
        "student": {**MODEL, "gradient_checkpointing": False, "lora": LORA},
        "teacher": {**MODEL, "mode": "standard", "toy_teacher_seed": 99, "toy_pretrain_steps": 120, "toy_pretrain_lr": 3e-3,
                    "toy_pretrain_batch": 32, "adapter": None},
    },
    "environment": {"name": "calculator", "params": {}, "train_tasks": 64, "eval_tasks": 32, "test_tasks": 32, "split_seed": 7,
                    "difficulty": "easy"},
    "rollout": {"max_turns": 4, "max_new_tokens_per_turn": 64, "max_total_tokens": 768, "temperature": 1.0, "top_p": 1.0, "top_k": 0,
                "max_parse_errors": 2, "max_repeated_calls": 2, "batch_size": 32},
    "selection": {"selector": "all_model_tokens", "ratio": 0.35, "max_positions_per_trajectory": None, "critical_weight": 1.0,
                  "other_weight": 1.0},
    "loss": {"mode": "bucketed_topk_tail", "divergence": "reverse_kl", "temperature": 1.0, "scale_by_temperature_squared": True, "top_k": 64,
             "jsd_beta": 0.5, "tail_epsilon": 1e-9, "chunk_size": 256, "exact_max_vocab": 8192, "allow_large_exact": False,
             "sampled_token_nll_weight": 0.0, "reduction": "trajectory_mean"},
    "train": {"cycles": 4, "rollouts_per_cycle": 8, "gradient_accumulation_steps": 8, "update_batch": 16, "offline_trajectories": None,
              "max_selected_training_tokens": None, "max_train_seconds": None,
              "opd_freshness": "strict", "learning_rate": 1e-4, "weight_decay": 0.0, "max_grad_norm": 1.0, "warmup_steps": 0,
              "lr_schedule": "constant", "optimizer": "adamw", "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-8,
              "save_every_cycles": 0, "eval_every_cycles": 0, "sft_warmup_cycles": 0, "log_every_steps": 1},
    "memory": {"strategy": "auto", "oom_retries": 3, "min_chunk_size": 8, "empty_cache_between_phases": True,
               "reset_peak_stats_each_cycle": True, "auto_swap_vram_headroom_gb": 2.0},
    "cache": {"dir": None, "entries_per_shard": 32, "dtype": "float32", "strict_policy_version": True, "reuse_across_policy_versions": False,
              "keep_cycles": 1, "verify_checksums_on_load": True},
    "eval": {"enabled": True, "tasks": None, "split": "eval", "temperature": 0.0, "max_turns": None, "seed": 0},
    "report": {"enabled": True, "max_trajectories": 5, "max_tokens_per_trajectory": 400},
}  # fmt: skip
ADAPTER = {"path": "adapters/one", "source": "local", "revision": None, "base_model_revision": None, "tokenizer_fingerprint": None,
           "require_policy_evaluation": False, "minimum_strict_success_rate": None}  # fmt: skip


def at(path: str, value: object) -> dict:
    """Nested mappings that hold `value` under a dotted path."""
    for part in reversed(path.split(".")):
        value = {part: value}
    return value


def made(*changes: dict) -> RunConfig:
    data = copy.deepcopy(MINIMAL)
    for change in changes:
        data = deep_merge(data, change)
    return RunConfig.from_mapping(data)


def flat(data: dict, prefix: str = "") -> dict:
    found = {}
    for key, value in data.items():
        inner = flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
        found.update(inner)
    return found


def test_every_default():
    assert made().to_mapping() == DEFAULTS
    assert set(flat(made().to_mapping())) <= {row.path for row in field_rows(RunConfig)}
    assert all(row.meaning for row in field_rows(RunConfig)), "a field without a description"


OFF, KD, SFT = (
    {},
    [at("run.mode", "offline_kd"), at("cache.reuse_across_policy_versions", True)],
    [at("run.mode", "sft")],
)
HF = {"models": {"backend": "hf", "student": {"model_id": "s"}, "teacher": {"model_id": "t"}}}
SEED = ([0, 2**32 - 1], [-1, 2**32, 1.0, True, "1"])
COUNT = ([1, 100], [0, -1, 1.0, True, "1", None])
NATURAL = ([0, 5], [-1, 1.5, None])
FLAG = ([True, False], [1, 0, "yes", None])
POSITIVE = ([1e-12, 1, 2.5], [0, -1.0, float("inf"), float("nan"), True, "1"])
WEIGHT = ([0, 0.5, 3], [-0.1, float("nan")])
RANGES = {
    "run.name": (["a", "x" * 120], ["", "x" * 121, 5]),
    "run.mode": ([], ["rl", "OPD", None]),
    "run.seed": SEED,
    "run.output_dir": (["runs/x"], ["", None]),
    "run.run_id": ([None, "x"], ["", 3]),
    "run.deterministic": FLAG,
    "run.notes": (["", "many words"], [None, 3]),
    "run.tags": ([[], ["a", "b"]], ["a", [1], None]),
    "models.backend": (["toy"], ["vllm"]),
    "models.device": (["auto", "cpu", "cuda"], ["tpu", "cuda:0"]),
    "models.threads": ([None, 1, 8], [0, "auto"]),
    **{f"models.{role}.{name}": ([None, "a"], ["", 3]) for role in ("student", "teacher")
       for name in ("revision", "tokenizer_id", "tokenizer_revision")},
    **{f"models.{role}.model_id": (["a"], ["", None, 3]) for role in ("student", "teacher")},
    "models.student.dtype": (["auto", "float32", "bfloat16", "float16"], ["fp16"]),
    "models.teacher.dtype": (["auto", "float32", "bfloat16", "float16"], ["fp16"]),
    "models.student.quantization": (["none"], ["nf5", None]),
    "models.teacher.quantization": (["none"], ["int4"]),
    "models.student.attn_implementation": (["sdpa", "eager"], ["flash"]),
    "models.student.trust_remote_code": FLAG,
    "models.student.gradient_checkpointing": FLAG,
    "models.student.lora.enabled": FLAG,
    "models.student.lora.r": COUNT,
    "models.student.lora.alpha": COUNT,
    "models.student.lora.dropout": ([0, 0.99], [1.0, -0.1]),
    "models.student.lora.target_modules": ([["q"]], [[], "q_proj", [1]]),
    "models.student.lora.bias": (["none", "all", "lora_only"], ["some"]),
    "models.student.toy.hidden_size": ([8, 512], [7, 4, 516, 520, 10]),
    "models.student.toy.num_layers": ([1, 8], [0, 9]),
    "models.student.toy.num_heads": ([1, 16], [0, 17, 3]),
    "models.teacher.toy.num_heads": ([1, 16], [0, 17, 3]),
    "models.student.toy.intermediate_size": ([8, 320], [0]),
    "models.student.toy.max_position_embeddings": ([16, 1024], [0, 15]),
    "models.teacher.mode": (["standard", "privileged_context"], ["oracle"]),
    "models.teacher.toy_teacher_seed": SEED,
    "models.teacher.toy_pretrain_steps": NATURAL,
    "models.teacher.toy_pretrain_lr": POSITIVE,
    "models.teacher.toy_pretrain_batch": COUNT,
    "environment.name": (["calculator", "my_lab.envs:Maze"], ["calc", "", "a b:C", "x:", ":C", "os.system", "a/b:C"]),
    "environment.params": ([{}, {"prompt_style": "compact", "n": [1, None]}], [[], None, {"x": float("nan")}, {"x": {1: 2}}]),
    "environment.train_tasks": COUNT,
    "environment.eval_tasks": COUNT,
    "environment.test_tasks": NATURAL,
    "environment.split_seed": SEED,
    "environment.difficulty": (["easy", "medium", "hard"], ["trivial"]),
    "rollout.max_turns": ([1, 64], [0, 65]),
    "rollout.max_new_tokens_per_turn": ([1, 767], [0]),
    "rollout.max_total_tokens": ([65, 131072], [15, 131073]),
    "rollout.temperature": ([0, 5], [-0.1, 5.1]),
    "rollout.top_p": ([0.01, 1], [0, 1.01]),
    "rollout.top_k": NATURAL,
    "rollout.max_parse_errors": ([0, 32], [-1, 33]),
    "rollout.max_repeated_calls": ([1, 32], [0, 33]),
    "rollout.batch_size": ([1, 512], [0, 513]),
    "selection.selector": (["all_model_tokens", "tool_and_final", "uniform_ratio", "hybrid"], ["all"]),
    "selection.ratio": ([0.001, 1], [0, 1.1]),
    "selection.max_positions_per_trajectory": ([None, 1], [0]),
    "selection.critical_weight": WEIGHT,
    "selection.other_weight": WEIGHT,
    "loss.mode": (["bucketed_topk_tail", "exact_full_vocab"], ["exact"]),
    "loss.divergence": (["reverse_kl", "forward_kl", "jsd"], ["kl"]),
    "loss.temperature": ([0.01, 20], [0, 20.1]),
    "loss.scale_by_temperature_squared": FLAG,
    "loss.top_k": COUNT,
    "loss.jsd_beta": ([0, 0.5, 1], [-0.1, 1.1]),
    "loss.tail_epsilon": ([1e-12, 0.0099], [0, 1e-2]),
    "loss.chunk_size": COUNT,
    "loss.exact_max_vocab": COUNT,
    "loss.allow_large_exact": FLAG,
    "loss.sampled_token_nll_weight": ([0, 0.5, 1], [-0.1, 1.1]),
    "loss.reduction": (["trajectory_mean", "token_mean"], ["sum"]),
    "train.cycles": NATURAL,
    "train.rollouts_per_cycle": ([1, 8], [0]),
    "train.gradient_accumulation_steps": ([8, 64], [0]),
    "train.update_batch": COUNT,
    "train.offline_trajectories": ([None, 1, 64], [0, 65]),
    "train.max_selected_training_tokens": ([None, 1, 10**9], [0, -1, 1.5]),
    "train.max_train_seconds": ([None, 60, 0.5], [0, -1.0]),
    "train.opd_freshness": (["strict", "replay"], ["stale"]),
    "train.learning_rate": POSITIVE,
    "train.weight_decay": WEIGHT,
    "train.max_grad_norm": POSITIVE,
    "train.warmup_steps": NATURAL,
    "train.lr_schedule": (["constant", "linear", "cosine"], ["step"]),
    "train.optimizer": (["adamw", "adamw8bit"], ["sgd"]),
    "train.adam_beta1": ([0, 0.999], [1.0, -0.1]),
    "train.adam_beta2": ([0, 0.999], [1.0, -0.1]),
    "train.adam_eps": POSITIVE,
    "train.save_every_cycles": NATURAL,
    "train.eval_every_cycles": NATURAL,
    "train.sft_warmup_cycles": NATURAL,
    "train.log_every_steps": COUNT,
    "memory.strategy": (["auto", "resident", "swap"], ["offload"]),
    "memory.oom_retries": ([0, 10], [-1, 11]),
    "memory.min_chunk_size": COUNT,
    "memory.empty_cache_between_phases": FLAG,
    "memory.reset_peak_stats_each_cycle": FLAG,
    "memory.auto_swap_vram_headroom_gb": WEIGHT,
    "cache.dir": ([None, "cache"], [""]),
    "cache.entries_per_shard": COUNT,
    "cache.dtype": (["float32", "float16"], ["bfloat16"]),
    "cache.strict_policy_version": ([True], [None, 1]),
    "cache.reuse_across_policy_versions": ([False], [None]),
    "cache.keep_cycles": COUNT,
    "cache.verify_checksums_on_load": FLAG,
    "eval.enabled": FLAG,
    "eval.tasks": ([None, 1], [0]),
    "eval.split": (["train", "eval", "test"], ["dev", "nosuch"]),
    "eval.temperature": ([0, 5], [5.1]),
    "eval.max_turns": ([None, 1, 16], [0, 17]),
    "eval.seed": SEED,
    "report.enabled": FLAG,
    "report.max_trajectories": NATURAL,
    "report.max_tokens_per_trajectory": COUNT,
}  # fmt: skip


@pytest.mark.parametrize("path", RANGES)
def test_range(path):
    good, bad = RANGES[path]
    for value in good:
        config = made(at(path, value))
        assert flat(config.to_mapping()).get(path, value) == value
        assert RunConfig.from_mapping(config.to_mapping()) == config
    for value in bad:
        with pytest.raises(ConfigError) as caught:
            made(at(path, value))
        assert path.rpartition(".")[0] in caught.value.message, (value, caught.value.message)


def test_no_field_is_untested():
    skipped = {"schema_version"} | {
        p for p in flat(DEFAULTS) if p.startswith(("models.teacher.toy.", "models.teacher."))
    }
    assert set(flat(DEFAULTS)) - skipped <= set(RANGES)


REJECTED = [
    ("opd reuses targets", [at("cache.reuse_across_policy_versions", True)], "cache.reuse_across_policy_versions"),
    ("opd without the version check", [at("cache.strict_policy_version", False)], "cache.strict_policy_version"),
    ("offline_kd without reuse", [at("run.mode", "offline_kd")], "cache.reuse_across_policy_versions"),
    ("jsd, beta 0", [at("loss", {"divergence": "jsd", "jsd_beta": 0})], "loss.jsd_beta"),
    ("jsd, beta 1", [at("loss", {"divergence": "jsd", "jsd_beta": 1.0})], "loss.jsd_beta"),
    ("exact in float16", [at("loss.mode", "exact_full_vocab"), at("cache.dtype", "float16")], "cache.dtype"),
    ("exact with top_k", [at("loss", {"mode": "exact_full_vocab", "top_k": 64})], "loss"),
    ("old weight in opd", [at("loss.ce_weight", 0.1)], "loss.ce_weight"),
    ("old weight in offline_kd", [*KD, at("loss.ce_weight", 1)], "loss.ce_weight"),
    ("both names", [at("loss", {"ce_weight": 0, "sampled_token_nll_weight": 0})], "loss"),
    ("sft with a fraction", [*SFT, at("loss.sampled_token_nll_weight", 0.5)], "loss.sampled_token_nll_weight"),
    ("sft with a fraction, old name", [*SFT, at("loss.ce_weight", 0.5)], "loss.sampled_token_nll_weight"),
    ("two steps in strict opd", [at("train", {"rollouts_per_cycle": 9})], "train.gradient_accumulation_steps"),
    ("warm-up in sft", [*SFT, at("train.sft_warmup_cycles", 1)], "train.sft_warmup_cycles"),
    ("quantised toy student", [at("models.student.quantization", "nf4")], "models.student.quantization"),
    ("quantised toy teacher", [at("models.teacher.quantization", "int8")], "models.teacher.quantization"),
    ("toy teacher with adapter", [at("models.teacher.adapter.path", "a")], "models.teacher.adapter"),
    ("quantised without LoRA", [HF, at("models.student", {"quantization": "nf4", "lora": {"enabled": False}})], "models.student.lora.enabled"),
    ("Hub adapter, no revision", [HF, at("models.teacher.adapter", {"path": "a/b", "source": "hub"})], "models.teacher.adapter.revision"),
    ("minimum, no requirement", [HF, at("models.teacher.adapter", {"path": "a", "minimum_strict_success_rate": 0.5})],
     "models.teacher.adapter.minimum_strict_success_rate"),
    ("no room for a second turn", [at("rollout", {"max_total_tokens": 64, "max_new_tokens_per_turn": 64})], "rollout.max_total_tokens"),
    ("eval much longer", [at("rollout.max_turns", 2), at("eval.max_turns", 9)], "eval.max_turns"),
    ("heads do not divide", [at("models.student.toy", {"hidden_size": 66})], "models.student.toy"),
    ("odd head", [at("models.student.toy", {"hidden_size": 12})], "models.student.toy"),
    ("unknown environment", [at("environment.name", "jsonnaw")], "environment.name"),
    ("version 2", [at("schema_version", 2)], "schema_version"),
    ("version 1 as text", [at("schema_version", "1")], "schema_version"),
    ("hf without a model", [at("models.backend", "hf")], "models.student.model_id"),
    ("more offline traces than tasks", [*KD, at("train.offline_trajectories", 65)], "train.offline_trajectories"),
    ("adapter without a path", [HF, at("models.teacher.adapter", {"source": "local"})], "models.teacher.adapter.path"),
    ("adapter's rate", [HF, at("models.teacher.adapter", {"path": "a", "require_policy_evaluation": True, "minimum_strict_success_rate": 1.5})],
     "models.teacher.adapter.minimum_strict_success_rate"),
    ("unknown section", [at("optimizer", {})], "optimizer"),
    ("unknown field", [at("train.lr", 1)], "train.lr"),
    ("unknown deep field", [at("models.student.lora.rank", 1)], "models.student.lora.rank"),
    ("section is a list", [at("train", [])], "train"),
    ("section is null", [at("train", None)], "train"),
]  # fmt: skip
ACCEPTED = [
    ("jsd inside", [at("loss", {"divergence": "jsd", "jsd_beta": 0.9})]),
    ("beta 0 without jsd", [at("loss.jsd_beta", 0)]),
    ("exact with top_k 1", [at("loss", {"mode": "exact_full_vocab", "top_k": 1})]),
    ("old weight zero in opd", [at("loss.ce_weight", 0.0)]),
    ("old weight one in sft", [*SFT, at("loss.ce_weight", 1)]),
    ("mixing in opd", [at("loss.sampled_token_nll_weight", 0.25)]),
    ("replay", [at("train", {"rollouts_per_cycle": 9, "opd_freshness": "replay"})]),
    ("many steps in sft", [*SFT, at("train.rollouts_per_cycle", 80)]),
    ("many steps in offline_kd", [*KD, at("train.rollouts_per_cycle", 80)]),
    ("a float16 cache", [at("cache.dtype", "float16")]),
    ("quantised with LoRA", [HF, at("models.student.quantization", "nf4")]),
    ("quantised teacher", [HF, at("models.teacher.quantization", "int8")]),
    ("pinned Hub adapter", [HF, at("models.teacher.adapter", {"path": "a/b", "source": "hub", "revision": "abc"})]),
    ("gated adapter", [HF, at("models.teacher.adapter", {**ADAPTER, "require_policy_evaluation": True, "minimum_strict_success_rate": 1})]),
    ("swap", [at("memory.strategy", "swap")]),
    ("no cycles", [at("train.cycles", 0)]),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "path"), [case[1:] for case in REJECTED], ids=[case[0] for case in REJECTED])
def test_rejected(changes, path):
    with pytest.raises(ConfigError) as caught:
        made(*changes)
    assert caught.value.message.startswith(path) and caught.value.hint


@pytest.mark.parametrize("changes", [case[1] for case in ACCEPTED], ids=[case[0] for case in ACCEPTED])
def test_accepted_and_reloads(changes):
    config = made(*changes)
    assert RunConfig.from_mapping(config.to_mapping()) == config == RunConfig.from_text(config.to_yaml())


def test_all_faults_are_told_at_once():
    with pytest.raises(ConfigError) as caught:
        made(at("train.cycles", -1), at("eval.split", "dev"), at("report.enabeld", True))
    message = caught.value.message
    assert (
        all(part in message for part in ("train.cycles = -1", 'eval.split = "dev"', "report.enabeld"))
        and "enabled" in caught.value.hint
    )
    with pytest.raises(ConfigError) as caught:
        made(at("run.mode", "offline_kd"), at("environment.name", "nothing"), at("eval.max_turns", 99))
    assert caught.value.message.count("; ") == 2 and list(ENVIRONMENTS)[0] in caught.value.message


def test_an_error_names_file_and_line(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("models:\n  student: {}\n  teacher:\n    toy:\n      num_heads: 5\ntrain:\n  learning_rate: fast\n")
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_yaml(path)
    assert f'train.learning_rate = "fast" should be a number ({path}, line 7)' in caught.value.message
    assert f"num_heads 5 ({path}, line 4)" in caught.value.message
    for missing in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(ConfigError, match=str(missing)):
            RunConfig.from_yaml(missing)
    path.write_bytes(b"run: {name: \xff}")
    with pytest.raises(ConfigError, match="byte 12 is no UTF-8"):
        RunConfig.from_yaml(path)


def test_published_key_set_loads():
    """All keys that recipes of this format use, with values of our own."""
    older = copy.deepcopy(DEFAULTS)
    for path in ("models.threads", "models.teacher.toy_pretrain_batch", "rollout.batch_size", "loss.reduction", "train.update_batch",
                 "train.offline_trajectories", "train.max_selected_training_tokens", "train.max_train_seconds"):  # fmt: skip
        *above, name = path.split(".")
        section = older
        for part in above:
            section = section[part]
        del section[name]
    older["models"].update(
        backend="hf",
        student={**older["models"]["student"], "model_id": "org/small", "revision": "f00", "quantization": "nf4"},
    )
    older["models"]["teacher"].update(model_id="org/large", revision="ba4", adapter=ADAPTER)
    older["environment"]["params"] = {"prompt_style": "full"}
    older["cache"]["dtype"] = "float16"
    config = RunConfig.from_mapping(older)
    assert (
        config.models.teacher.adapter.path == "adapters/one"
        and config.rollout.batch_size == 32
        and config.warnings() == []
    )
    assert RunConfig.from_text(yaml.safe_dump(older)) == config


TEXTS = st.text(max_size=40)
PARAMS = st.dictionaries(st.text(min_size=1, max_size=12), st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=6), max_size=4)  # fmt: skip


@settings(max_examples=50, deadline=None)
@given(
    name=st.text(min_size=1, max_size=60).filter(lambda text: "\0" not in text),
    notes=TEXTS.filter(lambda text: "\0" not in text),
    tags=st.lists(TEXTS, max_size=3),
    params=PARAMS,
    rate=st.floats(1e-12, 1e3),
)
def test_any_text_survives_yaml(name, notes, tags, params, rate):
    config = made(
        {
            "run": {"name": name, "notes": notes, "tags": tags},
            "environment": {"params": params},
            "train": {"learning_rate": rate},
        }
    )
    assert RunConfig.from_text(config.to_yaml()) == config == RunConfig.from_mapping(config.to_mapping())


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=80) | st.text(alphabet="ab:{}[]-#&*!|>'\"%@` \n\t,?0.e<", max_size=60))
def test_reading_any_text_gives_a_mapping_or_a_config_error(text):
    try:
        data, lines = read_yaml(text)
    except ConfigError as error:
        assert error.message and error.hint
        return
    assert isinstance(data, dict) and all(1 <= line <= len(text.splitlines()) + 1 for line in lines.values())


@settings(max_examples=100, deadline=None)
@given(PARAMS)
def test_dump_is_read_back(params):
    assert read_yaml(dump_yaml({"params": params}))[0] == {"params": params}


def test_digest_is_stable_and_sees_every_field():
    base = made()
    assert base.digest == made().digest and len(base.digest) == 64
    changed = [at("train.learning_rate", 2e-4), at("run.seed", 5), at("environment.params", {"tolerance": 1e-3}), at("loss.top_k", 3),
               at("rollout.max_new_tokens_per_turn", 10), at("models.student.tokenizer_id", "x")]  # fmt: skip
    assert len({base.digest, *(made(change).digest for change in changed)}) == len(changed) + 1
    assert loads_strict(json.dumps(base.to_mapping())) == base.to_mapping()


def test_a_config_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        made().train.cycles = 5


def test_config_needs_no_torch():
    code = "import sys, miniverl.schemas.config, miniverl.store; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


WARNED = [
    ([at("train", {"rollouts_per_cycle": 9, "opd_freshness": "replay"})], "2 steps use the same episodes"),
    ([HF], "models.student.revision is not pinned"),
    ([at("models.teacher.trust_remote_code", True)], "models.teacher.trust_remote_code runs code"),
    ([at("models.student.toy.max_position_embeddings", 512)], "below rollout.max_total_tokens"),
    ([at("rollout.temperature", 0)], "nothing is explored"),
    ([at("eval.split", "train")], "unseen tasks"),
    ([at("train", {"lr_schedule": "linear", "max_train_seconds": 9.0})], "a limit ends earlier"),
    ([at("eval.tasks", 33)], "more than the eval split holds"),
    ([at("run.deterministic", False)], "may differ"),
]


@pytest.mark.parametrize(("changes", "words"), WARNED)
def test_warned(changes, words):
    assert made().warnings() == [] and any(words in line for line in made(*changes).warnings())
