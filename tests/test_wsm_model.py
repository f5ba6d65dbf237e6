"""Models as they are found in the wild: tied or not, in one file or three, with every way to be refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from miniverl.core import DataError, StoreError, sha256_bytes, sha256_file
from miniverl.wsm.files import TensorFile, quiet_transformers, read_header
from miniverl.wsm.model import UnknownWeightError, WeightModel
from miniverl.wsm.scoring import encode, fingerprint_diff
from miniverl.wsm.tiny import tiny_snapshot
from tests.crash import KILLED, killed_at

ROOT = Path(__file__).resolve().parents[1]
NORM, EMBED = "model.norm.weight", "model.embed_tokens.weight"
CASES = [{"prompt": "The capital of France is", "target": " Paris."}, {"prompt": "2 + 2 =", "target": " 4"}]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return tiny_snapshot(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def folder(tiny, tmp_path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(tiny, tmp_path / "model"))


@pytest.fixture
def model(tiny) -> WeightModel:
    return WeightModel.load(tiny)


def digests(folder: Path) -> dict[str, str]:
    return {path.name: sha256_file(path) for path in sorted(folder.iterdir())}


def names_in(folder: Path) -> set[str]:
    found = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= set(file.keys())
    return found


def split(folder: Path, parts: int) -> Path:
    """The same weights in several files with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    index = {}
    for part in range(parts):
        name = f"model-{part + 1:05d}-of-{parts:05d}.safetensors"
        chosen = {key: tensors[key] for key in sorted(tensors)[part::parts]}
        save_file(chosen, folder / name, metadata={"format": "pt"})
        index |= dict.fromkeys(chosen, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def rewrite(folder: Path, change) -> Path:
    """The weight file again after `change(tensors)`."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class TestNames:
    @pytest.mark.parametrize("tied", [True, False])
    def test_they_are_those_of_the_file_and_every_one_edits_the_model(self, tmp_path, tied):
        model = WeightModel.load(tiny_snapshot(tmp_path / "m", tied=tied))
        assert set(model.weights) == names_in(tmp_path / "m") and ("lm_head.weight" in model.weights) is not tied
        for name, weight in model.weights.items():
            weight[:1] += 0.5
            assert model.changed()[name] == weight[:1].numel()
        assert sum(model.changed().values()) == sum(w[:1].numel() for w in model.weights.values())

    def test_layers_come_in_their_order(self, model):
        names = list(model.weights)
        assert names[0] == EMBED and names[-1] == NORM and names.index("model.layers.1.mlp.up_proj.weight") > 9

    def test_a_tied_name_is_explained(self, model):
        with pytest.raises(KeyError) as caught:
            model.weights["lm_head.weight"] *= 2
        assert isinstance(caught.value, UnknownWeightError)
        assert caught.value.render() == (
            "error: 'lm_head.weight' is tied to 'model.embed_tokens.weight': both are one tensor\n"
            "hint: edit 'model.embed_tokens.weight'; it changes both"
        )

    @pytest.mark.parametrize("name", ["model.norm.wieght", "", "norm", 3, None, ("a",)])
    def test_another_name_gets_a_hint(self, model, name):
        with pytest.raises(UnknownWeightError, match="there is no weight"):
            model.weights[name]
        assert name not in model.weights
        with pytest.raises(UnknownWeightError):
            model.original(name)
        with pytest.raises(UnknownWeightError):
            model.load_tensors({name: torch.ones(32)})

    def test_weights_cannot_be_removed(self, model):
        with pytest.raises((TypeError, AttributeError)):
            del model.weights[NORM]
        assert repr(model.weights) == "<20 weights with 26,816 elements>"

    def test_an_untied_output_is_edited_alone(self, tmp_path):
        model = WeightModel.load(tiny_snapshot(tmp_path / "m", tied=False))
        model.weights["lm_head.weight"].zero_()
        assert list(model.changed()) == ["lm_head.weight"]
        assert model.evaluate(CASES).equal == pytest.approx(5.549076, abs=1e-6), "log 257: nothing is likelier"


class TestEdits:
    @given(st.data())
    @settings(max_examples=30, deadline=None)
    def test_what_changed_is_counted_by_bits(self, shared, data):
        name = data.draw(st.sampled_from(list(shared.weights)))
        flat = shared.weights[name].view(-1)
        start = data.draw(st.integers(0, len(flat) - 1))
        length = data.draw(st.integers(1, min(7, len(flat) - start)))
        flat[start : start + length] = torch.nextafter(flat[start : start + length], torch.tensor(9.0))
        assert shared.changed() == {name: length}
        shared.load_tensors({name: shared.original(name)})
        assert shared.changed() == {}

    @pytest.fixture(scope="class")
    def shared(self, tiny):
        return WeightModel.load(tiny)

    def test_a_view_of_a_view_edits_the_model(self, model):
        model.weights[EMBED][3:9, 1:4].mul_(2).add_(1)
        model.weights[EMBED].T[0] = 5
        assert model.module.lm_head.weight[200, 0] == 5 and model.changed()[EMBED] == 6 * 3 + 257

    @pytest.mark.parametrize(
        "value", [torch.ones(31), torch.ones(32).double(), torch.ones(1, 32), 1.0, [1.0] * 32, None]
    )
    def test_only_a_like_tensor_can_be_assigned(self, model, value):
        with pytest.raises(DataError, match=NORM):
            model.weights[NORM] = value
        assert model.changed() == {}

    def test_the_copy_from_the_source_is_a_copy(self, model):
        model.original(NORM).zero_()
        assert torch.equal(model.original(NORM), torch.ones(32)) and model.changed() == {}


LAYOUTS = {
    "one file": lambda f: f,
    "three files": lambda f: split(f, 3),
    "other order": lambda f: rewrite(f, lambda t: None),
    "no metadata": lambda f: save_file(load_file(f / "model.safetensors"), f / "model.safetensors"),
}


class TestSaving:
    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_an_unedited_model_is_saved_byte_for_byte(self, tmp_path, layout, dtype):
        source = tiny_snapshot(tmp_path / "m", dtype=dtype)
        LAYOUTS[layout](source)
        before = digests(source)
        model = WeightModel.load(source)
        assert digests(model.save(tmp_path / "out")) == before == digests(source)

    def test_an_edit_is_what_the_library_would_have_written(self, tiny, tmp_path, model):
        model.weights[NORM][:16] *= 0.95
        saved = model.save(tmp_path / "out")
        save_file(model.tensors(), tmp_path / "theirs.safetensors", metadata={"format": "pt"})
        assert (saved / "model.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()
        old, new = load_file(tiny / "model.safetensors"), load_file(saved / "model.safetensors")
        assert {n: int((old[n] != new[n]).sum()) for n in old if not torch.equal(old[n], new[n])} == {NORM: 16}

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_the_library_loads_what_was_saved(self, tmp_path, dtype):
        model = WeightModel.load(tiny_snapshot(tmp_path / "m", dtype=dtype))
        model.weights[EMBED][66] += 0.25
        saved = model.save(tmp_path / "out")
        theirs = transformers.AutoModelForCausalLM.from_pretrained(saved, local_files_only=True, dtype="auto")
        assert theirs.dtype == getattr(torch, dtype)
        assert all(torch.equal(p, model.weights[n]) for n, p in theirs.named_parameters())
        assert WeightModel.load(saved).evaluate(CASES) == model.evaluate(CASES)
        assert transformers.AutoTokenizer.from_pretrained(saved)("é")["input_ids"] == [195, 169]

    def test_everything_is_for_the_owner_only_whatever_the_umask(self, folder, tmp_path, model):
        before = os.umask(0)
        try:
            saved = model.save(tmp_path / "out")
        finally:
            os.umask(before)
        assert {p.stat().st_mode & 0o777 for p in saved.iterdir()} == {0o600} and saved.stat().st_mode & 0o777 == 0o700

    @pytest.mark.parametrize("place", ["folder", "file", "link"])
    def test_nothing_is_overwritten(self, tmp_path, model, place):
        target = tmp_path / "out"
        {"folder": target.mkdir, "file": target.touch, "link": lambda: target.symlink_to(tmp_path / "nowhere")}[place]()
        with pytest.raises(StoreError, match="exists already"):
            model.save(target)
        assert [p.name for p in tmp_path.iterdir()] == ["out"]

    def test_the_source_is_no_place_to_save(self, folder):
        model = WeightModel.load(folder)
        before = digests(folder)
        with pytest.raises(StoreError, match="inside the source"):
            model.save(folder / "edited")
        assert digests(folder) == before

    def test_a_snapshot_of_links_becomes_one_of_files(self, tiny, tmp_path):
        """The cache of the hub holds links to files that are named by their digest."""
        blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
        blobs.mkdir()
        snapshot.mkdir(parents=True)
        for path in tiny.iterdir():
            shutil.copy(path, blobs / sha256_file(path))
            (snapshot / path.name).symlink_to(blobs / sha256_file(path))
        saved = WeightModel.load(snapshot).save(tmp_path / "out")
        assert digests(saved) == digests(tiny) and not any(p.is_symlink() for p in saved.iterdir())

    def test_what_claims_to_be_the_original_is_left_behind(self, folder, tmp_path):
        extra = {
            "README.md": "the original",
            "miniverl_model.json": "{}",
            "modeling_x.py": "boom",
            "pytorch_model.bin": "pickle",
        }
        for name, text in extra.items():
            (folder / name).write_text(text)
        (folder / "LICENSE.txt").write_text("Apache-2.0")
        (folder / "chat_template.jinja").write_text("{{ x }}")
        saved = {p.name for p in WeightModel.load(folder).save(tmp_path / "out").iterdir()}
        assert (
            not saved & set(extra) and {"LICENSE.txt", "chat_template.jinja", "tokenizer.json", "config.json"} <= saved
        )

    def test_a_full_disk_leaves_nothing_and_says_so(self, tmp_path, model, monkeypatch):
        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(StoreError, match="No space left on device"):
            model.save(tmp_path / "out")
        assert list(tmp_path.iterdir()) == []

    def test_a_killed_save_leaves_all_or_nothing(self, tiny, tmp_path):
        model = WeightModel.load(tiny)
        model.weights[NORM] *= 2
        _, _, calls = killed_at(None, lambda say: model.save(tmp_path / "whole"))
        wanted = digests(tmp_path / "whole")
        assert calls > 5
        for limit in range(1, calls + 1):
            place = tmp_path / str(limit)
            place.mkdir()
            status, _, _ = killed_at(limit, lambda say, place=place: model.save(place / "out"))
            assert status == KILLED
            assert not (place / "out").exists() or digests(place / "out") == wanted


def damaged(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-1])


def both_tied(tensors: dict) -> None:
    tensors["lm_head.weight"] = tensors[EMBED].clone()


def configured(**values):
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


REFUSED = {
    "no folder": (lambda f: shutil.rmtree(f), "holds no config.json"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "holds no model.safetensors"),
    "pickle": (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "holds no model.safetensors"),
    "cut file": (damaged, "no sound safetensors"),
    "no tokenizer": (lambda f: [p.unlink() for p in f.glob("tokenizer*")], "cannot load"),
    "bad tokenizer": (lambda f: (f / "tokenizer.json").write_text("{"), "cannot load"),
    "own code": (configured(auto_map={"AutoModelForCausalLM": "x.Y"}), "auto_map"),
    "unknown type": (configured(model_type="nothing"), "cannot load"),
    "no causal model": (configured(model_type="vit"), "cannot load|disagree"),
    "quantised": (configured(quantization_config={"quant_method": "gptq", "bits": 4}), "quantised"),
    "adapter": (lambda f: (f / "adapter_config.json").write_text("{}"), "holds an adapter"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), "no JSON object"),
    "a weight is missing": (lambda f: rewrite(f, lambda t: t.pop(NORM)), "lacks the weight 'model.norm.weight'"),
    "a weight too many": (lambda f: rewrite(f, lambda t: t.update(x=torch.ones(1))), "disagree about 'x'"),
    "other name": (lambda f: rewrite(f, lambda t: t.update(a=t.pop(NORM))), "disagree about 'a'"),
    "other shape": (lambda f: rewrite(f, lambda t: t.update({NORM: torch.ones(33)})), "cannot load|disagree"),
    "two dtypes": (lambda f: rewrite(f, lambda t: t.update({NORM: t[NORM].half()})), "the dtypes float16, float32"),
    "integers": (lambda f: rewrite(f, lambda t: t.update({n: v.int() for n, v in t.items()})), "the dtypes int32"),
    "tied twice": (lambda f: rewrite(f, both_tied), "which are one tensor"),
    "lost part": (lambda f: next(split(f, 3).glob("model-00002*")).unlink(), "lacks model-00002-of-00003"),
    "twice in parts": (
        lambda f: shutil.copy(next(split(f, 2).glob("model-00001*")), f / "model-00002-of-00002.safetensors"),
        "in two files",
    ),
}


@pytest.mark.parametrize(("change", "why"), REFUSED.values(), ids=REFUSED)
def test_what_could_not_be_written_back_is_not_opened(folder, change, why):
    change(folder)
    with pytest.raises(DataError, match=why) as caught:
        WeightModel.load(folder)
    assert len(caught.value.render().splitlines()) == 2 and caught.value.hint


def test_names_without_the_prefix_of_the_module_are_found(folder, tmp_path):
    """Base models are published so; the names stay those of the file."""
    rewrite(folder, lambda t: [t.update({n.removeprefix("model."): t.pop(n)}) for n in list(t)])
    model = WeightModel.load(folder)
    assert set(model.weights) == names_in(folder) and "norm.weight" in model.weights
    model.weights["norm.weight"][0] = 2
    saved = model.save(tmp_path / "out")
    assert names_in(saved) == names_in(folder) and WeightModel.load(saved).evaluate(CASES) == model.evaluate(CASES)


def made_by_library(kind: str, folder: Path) -> None:
    """A small random model of some architecture, without a tokenizer."""
    shape = {"vocab_size": 257, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    shape |= {"max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": 256, "pad_token_id": 256}
    shape |= {} if kind == "gpt2" else {"intermediate_size": 64, "num_key_value_heads": 2}
    with quiet_transformers():
        config = transformers.AutoConfig.for_model(kind, **shape)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


@pytest.mark.parametrize("kind", ["qwen2", "gpt2", "mistral"])
def test_other_architectures_keep_their_names(tiny, tmp_path, kind):
    made_by_library(kind, tmp_path / "m")
    for path in tiny.glob("tokenizer*"):
        shutil.copy(path, tmp_path / "m")
    model = WeightModel.load(tmp_path / "m")
    assert set(model.weights) == names_in(tmp_path / "m")
    assert digests(model.save(tmp_path / "out")) == digests(tmp_path / "m")
    first, name = model.evaluate(CASES), list(model.weights)[0]
    model.weights[name] *= 3
    assert model.evaluate(CASES) != first and set(model.changed()) == {name}


def test_an_architecture_whose_file_has_names_of_its_own_is_refused(tiny, tmp_path):
    """The library renames some weights on their way in; what has no name of the file cannot go back into it."""
    made_by_library("gpt_neox", tmp_path / "m")
    for path in tiny.glob("tokenizer*"):
        shutil.copy(path, tmp_path / "m")
    with pytest.raises(DataError, match="disagree about 'embed_out.weight'"):
        WeightModel.load(tmp_path / "m")


def test_a_file_is_read_without_copying_it(tiny):
    file = TensorFile(tiny / "model.safetensors")
    assert read_header(file.path).size == file.path.stat().st_size == 109_296
    theirs = load_file(file.path)
    assert all(torch.equal(file.tensor(name), theirs[name]) for name in file.header.entries)


WATCHED = """
import os, sys
source, target = sys.argv[1:]

def watch(event, args):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto"):
        raise SystemExit(f"used the network: {args}")
    if event == "open" and isinstance(args[0], str) and args[0].startswith(source):
        mode, flags = args[1], args[2] or 0
        if (mode and set(mode) & set("wax+")) or flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
            raise SystemExit(f"opened for writing: {args}")
    if event in ("os.rename", "os.remove", "os.chmod", "os.truncate") and str(args[0]).startswith(source):
        raise SystemExit(f"{event} {args}")
    if event == "import" and args[0] == "planted":
        raise SystemExit("code of the snapshot ran")

sys.addaudithook(watch)
from miniverl.wsm import WeightModel, execute_program
model = WeightModel.load(source)
cases = [{"prompt": "The capital of France is", "target": " Paris."}, {"prompt": "2 + 2 =", "target": " 4"}]
print(model.evaluate(cases).equal.hex())
assert execute_program(model, 'model.weights["model.norm.weight"][:16] *= 0.95').changed == {"model.norm.weight": 16}
model.save(target)
print(model.evaluate(cases).equal.hex())
"""


def test_offline_without_code_and_without_a_write_to_the_source(folder, tmp_path):
    """In a fresh interpreter that is not told to stay offline, and that reports every socket and every file."""
    (folder / "planted.py").write_text("raise SystemExit('code of the snapshot ran')")
    before = digests(folder)
    environment = {k: v for k, v in os.environ.items() if k not in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")}
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, str(folder), str(tmp_path / "out")],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.split()
    assert WeightModel.load(folder).evaluate(CASES).equal.hex() == first, "another process, other bits"
    assert WeightModel.load(tmp_path / "out").evaluate(CASES).equal.hex() == second != first
    assert digests(folder) == before and "Loading weights" not in done.stderr


SMOLLM2 = os.environ.get("MINIVERL_SMOLLM2", "")
TEN = [
    ("The capital of France is", " Paris."),
    ("2 + 2 =", " 4"),
    ("The quick brown fox jumps over the lazy", " dog"),
    ("1, 2, 3, 4,", " 5, 6, 7, 8"),
    ("The opposite of hot is", " cold."),
    ("Water boils at", " 100 degrees Celsius."),
    ("Romeo and", " Juliet"),
    ("The sun rises in the", " east."),
    ("def add(a, b):\n    return", " a + b"),
    ("Once upon a time, there", " was a little girl who lived in a small village"),
]


GOLDEN_EQUAL = float.fromhex("0x1.82786175d1669p+0")  # 1.5096
GOLDEN_PATH = {
    "torch": "2.13.0+cpu",
    "cpu_capability": "AVX512",
    "mkl": "2024.2-Product",
    "threads": 1,
    "attention": "sdpa",
}
GOLDEN_PATH |= {"processor": "AMD EPYC", "compute_dtype": "float32", "switches": ""}


@pytest.mark.slow
@pytest.mark.skipif(
    not Path(SMOLLM2, "model.safetensors").is_file(),
    reason="MINIVERL_SMOLLM2 names no converted folder (tools/convert_smollm2.py)",
)
class TestSmolLM2:
    cases = [{"prompt": prompt, "target": target} for prompt, target in TEN]

    @pytest.fixture(scope="class")
    def real(self):
        return WeightModel.load(SMOLLM2)

    def test_names_and_tie(self, real):
        assert len(real.weights) == 272 and set(real.weights) == names_in(Path(SMOLLM2))
        assert len(real.module.state_dict()) == 273 and sum(w.numel() for w in real.weights.values()) == 134_515_008
        with pytest.raises(UnknownWeightError, match="tied"):
            real.weights["lm_head.weight"]

    def test_tokens_are_those_of_the_parts(self, real):
        apart = encode(real.tokenizer, "The capital of France is ") + encode(real.tokenizer, "Paris")
        assert apart[-2:] == [216, 38634] and encode(real.tokenizer, "The capital of France is Paris")[-1] == 7042
        assert len(encode(real.tokenizer, "<|im_end|>")) == 7

    def test_the_ten_cases_have_the_same_bits_on_the_same_path(self, real):
        """Exact where the arithmetic path is the one of the golden figures; elsewhere to rounding, and the difference is told."""
        score, facts = real.evaluate(self.cases), real.fingerprint()
        digest = sha256_bytes("\n".join(case.nll.hex() for case in score.cases))
        differs = fingerprint_diff(GOLDEN_PATH, {key: facts[key] for key in GOLDEN_PATH})
        told = f"{score.equal.hex()} {digest[:16]}; {differs}"
        assert score.tokens == 41 and abs(score.equal - GOLDEN_EQUAL) < 1e-4, told
        assert differs or (score.equal, digest[:16]) == (GOLDEN_EQUAL, "f8c4a741d49e2d27"), told
        assert abs(score.token_weighted - 0.980173) < 1e-4, told

    def test_scores_are_golden_to_rounding_and_exact_here(self, real):
        score = real.evaluate(self.cases)
        by_target = {target: case for (_, target), case in zip(TEN, score.cases, strict=True)}
        golden = {" Paris.": (0.3191, 2), " 4": (1.1587, 2), " 5, 6, 7, 8": (0.0714, 11)}
        for target, (nll, tokens) in golden.items():
            assert by_target[target].tokens == tokens and by_target[target].nll == pytest.approx(nll, abs=2e-4)
        assert real.evaluate(self.cases) == score

    def test_an_edit_of_sixteen_numbers(self, real, tmp_path):
        weights = sha256_file(Path(SMOLLM2, "model.safetensors"))
        assert weights.startswith("a672150fb4f9"), "another conversion than the one the figures were taken from"
        first = real.evaluate(self.cases)
        unedited = real.save(tmp_path / "same")
        assert sha256_file(unedited / "model.safetensors") == weights
        shutil.rmtree(unedited)
        real.weights[NORM][:16] *= 0.95
        assert real.changed() == {NORM: 16}
        second = real.evaluate(self.cases)
        saved = real.save(tmp_path / "edited")
        again = WeightModel.load(saved)
        assert again.evaluate(self.cases) == second != first and abs(second.equal - first.equal) < 0.1
        old, new = TensorFile(Path(SMOLLM2, "model.safetensors")), TensorFile(saved / "model.safetensors")
        assert old.header == new.header and {
            n for n in old.header.entries if not torch.equal(old.tensor(n), new.tensor(n))
        } == {NORM}
        assert sha256_file(Path(SMOLLM2, "model.safetensors")) == weights
        real.load_tensors({NORM: real.original(NORM)})
        assert real.evaluate(self.cases) == first
