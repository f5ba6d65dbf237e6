"""A small campaign configuration with a stand-in model, and the campaign prepared from it; no torch needed."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from miniverl.campaign.config import model_identity
from miniverl.campaign.manifest import Campaign, open_campaign, prepare

ENVIRONMENT = {"threads": 1, "cpu_capability": "NONE", "attention": "sdpa", "compute_dtype": "float32", "batch_size": 1}
SECRETS = {
    "endpoint": "https://canary-endpoint.example/v1",
    "private": "canary private prompt",
    "public": "canary public prompt",
    "regression": "canary regression prompt",
    "script": "canary_script = 1",
}


def pinned(folder: Path, name: str, data: Any) -> dict[str, str]:
    """Write a file and return the reference to it."""
    raw = data.encode() if isinstance(data, str) else json.dumps(data).encode()
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(raw)
    return {"path": name, "sha256": hashlib.sha256(raw).hexdigest()}


def cases(text: str, count: int = 2) -> list[dict[str, str]]:
    return [{"prompt": f"{text} {n}", "target": f" {n}"} for n in range(count)]


def task(folder: Path, name: str, family: str, stochastic: bool) -> dict[str, Any]:
    return {
        "id": name,
        "family": family,
        "instruction": f"improve {name}",
        "scripted_stochastic": stochastic,
        "public": pinned(folder, f"{name}.public.json", cases(f"{SECRETS['public']} of {name}", 3)),
        "private": pinned(folder, f"{name}.private.json", cases(f"{SECRETS['private']} of {name}")),
        "script": pinned(folder, f"{family}.py", f"{SECRETS['script']}  # {family}\n"),
    }


def stand_in_model(folder: Path) -> dict[str, str]:
    """A folder that looks like a snapshot; nothing loads it."""
    pinned(folder, "config.json", {"model_type": "llama", "max_position_embeddings": 512})
    pinned(folder, "model.safetensors", "not really tensors")
    pinned(folder, "sub/extra.txt", "a file below a folder")
    return {"path": "model", "id": "tests/stand-in", "revision": "1", "sha256": model_identity(folder)[0]}


def write_config(folder: Path, **changes: Any) -> Path:
    """Write a configuration with two tasks and everything that it points to; returns its path."""
    lines = [
        {"kind": "python", "source": "x = 1"},
        {"kind": "submit"},
    ]
    data = {
        "format": "wsm.benchmark.v1",
        "name": "stand-in",
        "model": stand_in_model(folder / "model"),
        "provenance": {"code_revision": "a" * 40, "dependency_lock": pinned(folder, "lock.txt", "torch==2\n")},
        "runtime": {"backend": "local", "grader_python": sys.executable},
        "limits": {
            "turns": 4,
            "evaluations": 2,
            "output_tokens": 64,
            "wall_seconds": 60,
            "command_seconds": 10,
            "grader_seconds": 30,
        },
        "budget": {
            "max_usd": 1,
            "prior_reserved_usd": 0,
            "price_checked_on": "2026-11-30",
            "rates": {
                "build_usd": 0.05,
                "sandbox_hourly_usd": 0.3,
                "egress_per_gib": 0.09,
                "teacher_request_usd": 0.02,
            },
        },
        "statistics": {"seed": 7, "bootstrap_samples": 100},
        "thresholds": None,
        "review": {
            "data_rights": True,
            "semantic_overlap": False,
            "power": False,
            "owner": None,
            "private_artifact_store": "/canary/store/of/artifacts",
        },
        "regression": pinned(folder, "regression.json", cases(SECRETS["regression"])),
        "tasks": [task(folder, "suffix", "spelling", False), task(folder, "capital", "facts", True)],
        "repetitions": 2,
        **changes,
    }
    if "policy" not in data["runtime"]:
        runs = {entry["id"]: [lines] * data["repetitions"] for entry in data["tasks"]}
        tape = pinned(folder, "tape.json", {"format": "wsm.actions.v1", "trials": runs})
        data["runtime"] = {"actions": tape, **data["runtime"]}
    path = folder / "config.json"
    path.write_text(json.dumps(data))
    return path


def sealed(folder: Path, **changes: Any) -> Campaign:
    """Write, prepare and open a campaign in `folder`."""
    config = write_config(folder / "source", **changes)
    return open_campaign(prepare(config, folder / "campaign", environment=ENVIRONMENT, isolation=lambda: 0).root)
