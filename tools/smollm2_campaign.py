"""A small campaign on a real model: two families of completions, and edits that were computed, not learned.

    python tools/smollm2_campaign.py MODEL OUT              write, seal, run and report the campaign in OUT (three minutes on two free cores)
    python tools/smollm2_campaign.py MODEL OUT --publish    and keep its report in benchmarks/results/campaign-smollm2/
    python tools/smollm2_campaign.py --render               make the kept pages again from the kept summary.json

MODEL is the folder that tools/convert_smollm2.py makes. The agent is a tape: it looks at the public cases, writes a closed-form
update into the last feed-forward matrix, and looks again; its second repetition takes a second, smaller step. The scripted baseline
of each family scales weights and knows no case. With one task in a family the campaign is exploratory, whatever it finds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from miniverl.campaign.config import TAPE_FORMAT, Case, model_identity
from miniverl.campaign.config_sections import FORMAT
from miniverl.campaign.controller import CampaignStatus, TrialRow, run_campaign
from miniverl.campaign.manifest import prepare
from miniverl.campaign.report import render, write_report
from miniverl.core import MiniVerlError, StoreError, canonical_json, git_commit, read_json, sha256_bytes
from miniverl.store import publish_new

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "benchmarks" / "results" / "campaign-smollm2"

# --- the cases ----------------------------------------------------------------------------------------------------------------

TEMPLATES = {"capitals": "The capital of {} is", "opposites": "The opposite of {} is"}
PUBLIC = {
    "capitals": "France Paris|Germany Berlin|Italy Rome|Spain Madrid|Poland Warsaw|Greece Athens|Japan Tokyo|China Beijing|Egypt Cairo|Kenya Nairobi|"
    "Peru Lima|Chile Santiago|Cuba Havana|Norway Oslo|Finland Helsinki|Ireland Dublin|Turkey Ankara|Iraq Baghdad|Vietnam Hanoi|Canada Ottawa",
    "opposites": "hot cold|big small|up down|day night|black white|fast slow|old young|rich poor|hard soft|full empty|"
    "early late|long short|high low|good bad|left right|wet dry|strong weak|open closed|happy sad|thick thin",
}
PRIVATE = {
    "capitals": "Portugal Lisbon|Austria Vienna|Hungary Budapest|Sweden Stockholm|Denmark Copenhagen|Russia Moscow|Iran Tehran|Thailand Bangkok|"
    "Argentina Buenos Aires|Belgium Brussels",
    "opposites": "light dark|loud quiet|clean dirty|wide narrow|deep shallow|first last|true false|near far|sweet sour|inside outside",
}
REGRESSION = [
    ("The sky is", " blue."),
    ("Once upon a time, there was a", " little girl"),
    ("def add(a, b):\n    return", " a + b"),
    ("She opened the door and walked into the", " room."),
    ("Water is made of hydrogen and", " oxygen."),
    ("Two plus two equals", " four."),
    ("The cat sat on the", " mat."),
    ("Thank you very", " much"),
    ("In the morning I drink a cup of", " coffee"),
    ("My brother plays the guitar and my sister plays the", " piano"),
]


def cases(family: str, pairs: str) -> list[Case]:
    """The cases of a family from pairs of words; the answer is everything after the first space."""
    split = [pair.partition(" ") for pair in pairs.split("|")]
    return [{"prompt": TEMPLATES[family].format(word), "target": f" {answer}."} for word, _, answer in split]


# --- the edits ----------------------------------------------------------------------------------------------------------------

# One closed-form step. The last feed-forward matrix W adds W k to the residual stream r at a place where it is fed k. To first order the
# loss of the token y falls fastest when r moves along d = g * (E_y - sum_v p_v E_v) / rms(r), with embeddings E, norm weights g and
# predictions p. Ridge regression gives the update that moves every such place along its own d and leaves other text where it is.
STEP = """import torch

CASES = {cases}
OTHER = {other}

last = len(model.module.model.layers) - 1
table, norm = model.weights["model.embed_tokens.weight"], model.weights["model.norm.weight"]
matrix = model.weights[f"model.layers.{{last}}.mlp.down_proj.weight"]
seen = {{}}
model.module.model.layers[last].mlp.down_proj.register_forward_pre_hook(lambda _, given: seen.update(keys=given[0][0].clone()))
model.module.model.norm.register_forward_pre_hook(lambda _, given: seen.update(states=given[0][0].clone()))


def tokens(text):
    return model.tokenizer(text, add_special_tokens=False)["input_ids"]


def read(ids):
    with torch.no_grad():
        return model.module(input_ids=torch.tensor([ids])).logits[0]


keys, moves = [], []
for prompt, target in CASES:
    before, ids = len(tokens(prompt)), tokens(prompt) + tokens(target)
    wrong = read(ids).softmax(-1)
    for place in range(before - 1, len(ids) - 1):
        wrong[place, ids[place + 1]] -= 1
        keys.append(seen["keys"][place])
        moves.append(-norm * (wrong[place] @ table) / seen["states"][place].pow(2).mean().sqrt())
for text in OTHER:
    read(tokens(text))
    keys += list(seen["keys"])
    moves += [torch.zeros_like(norm)] * len(seen["keys"])
keys, moves = torch.stack(keys), torch.stack(moves)
square = keys @ keys.T
square += square.diagonal().mean() * torch.eye(len(keys))
matrix += {strength} * torch.linalg.solve(square, moves).T @ keys
print(f"moved {{len(moves)}} places")
"""

OTHER = [
    "It was a cold evening and nobody was in the street.",
    "To make bread you need flour, water, salt and yeast.",
    "for name in names:\n    print(name)",
    "He said that he would come back on Monday, but he did not.",
    "The train leaves at nine and arrives in the afternoon.",
]
SCRIPTS = {
    "capitals": 'model.weights["model.norm.weight"][:] *= 1.1\nprint("logits scaled by 1.1")\n',
    "opposites": "last = len(model.module.model.layers) - 1\n"
    'model.weights[f"model.layers.{last}.mlp.down_proj.weight"][:] *= 0.8\nprint("the last layer writes less")\n',
}


def step(family: str, strength: float) -> dict[str, str]:
    """The action that takes one step on the public cases of a family."""
    shown = [(case["prompt"], case["target"]) for case in cases(family, PUBLIC[family])]
    return {"kind": "python", "source": STEP.format(cases=shown, other=OTHER, strength=strength)}


def tape(strengths: Sequence[float] = (300.0, 150.0)) -> dict[str, Any]:
    """What the agent plays: one step in its first repetition, two in the second."""
    look = {"kind": "evaluate"}

    def played(family: str, count: int) -> list[dict[str, str]]:
        steps = [part for strength in strengths[:count] for part in (step(family, strength), look)]
        return [look, *steps, {"kind": "submit"}]

    return {"format": TAPE_FORMAT, "trials": {family: [played(family, 1), played(family, 2)] for family in TEMPLATES}}


# --- the campaign -------------------------------------------------------------------------------------------------------------


def settings(model: Path, refs: dict[str, dict[str, str]]) -> dict[str, Any]:
    """The configuration as plain data."""
    card = model / "miniverl_model.json"
    named = read_json(card) if card.is_file() else {"model_id": model.name, "revision": "local"}
    rates = dict.fromkeys(("build_usd", "sandbox_hourly_usd", "egress_per_gib", "teacher_request_usd"), "0")
    return {
        "format": FORMAT,
        "name": "smollm2-completions",
        "model": {"path": str(model.resolve()), "id": named["model_id"], "revision": named["revision"], "sha256": model_identity(model)[0]},
        "provenance": {"code_revision": git_commit(ROOT) or "0" * 40, "dependency_lock": refs["lock"]},
        "runtime": {"backend": "local", "grader_python": sys.executable, "actions": refs["actions"]},
        "limits": {"turns": 8, "evaluations": 3, "output_tokens": 2048, "wall_seconds": 1800, "command_seconds": 600, "grader_seconds": 600},
        "budget": {"max_usd": "0", "prior_reserved_usd": "0", "price_checked_on": "2026-11-30", "rates": rates},
        "statistics": {"seed": 20261130, "bootstrap_samples": 10_000},
        "thresholds": {"improvement": 0.1, "regression": 0.1, "numeric_tolerance": 0.0},
        "review": {"data_rights": True, "semantic_overlap": False, "power": False, "owner": "miniverl", "private_artifact_store": None},
        "regression": refs["regression"],
        "tasks": [
            {"id": family, "family": family, "instruction": f"Make the model complete: {template.format('...')}", "scripted_stochastic": False,
             **{kind: refs[f"{family}.{kind}"] for kind in ("public", "private", "script")}}
            for family, template in TEMPLATES.items()
        ],
        "repetitions": 2,
    }  # fmt: skip


def write_campaign(model: Path, folder: Path) -> Path:
    """Write the inputs of the campaign into a new folder; returns the path of its configuration."""
    if folder.exists():
        raise StoreError(f"{folder} exists already", hint="choose a new folder; nothing was written")
    texts = {"actions": canonical_json(tape()), "lock": (ROOT / "constraints.txt").read_text(encoding="utf-8")}
    texts["regression"] = canonical_json([{"prompt": prompt, "target": target} for prompt, target in REGRESSION])
    for family in TEMPLATES:
        texts[f"{family}.public"] = canonical_json(cases(family, PUBLIC[family]))
        texts[f"{family}.private"] = canonical_json(cases(family, PRIVATE[family]))
        texts[f"{family}.script"] = SCRIPTS[family]
    folder.mkdir(parents=True, mode=0o700)
    for name, text in texts.items():
        publish_new(folder / name, text)
    refs = {name: {"path": name, "sha256": sha256_bytes(text)} for name, text in texts.items()}
    publish_new(folder / "config.json", canonical_json(settings(model, refs)))
    return folder / "config.json"


def run(model: Path, out: Path) -> CampaignStatus:
    """Write, seal and run the campaign below `out`, with a line on standard error for each trial."""

    def told(row: TrialRow) -> None:
        print(f"{row.trial}  {row.status}  {row.reason}", file=sys.stderr, flush=True)

    config = write_campaign(model, out / "source")
    return run_campaign(prepare(config, out / "campaign").root, on_progress=told)


def keep(files: dict[str, str]) -> None:
    """Put the files of a report where the repository keeps them."""
    KEPT.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (KEPT / name).write_text(text, encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", help="the folder that tools/convert_smollm2.py made")
    parser.add_argument("out", type=Path, nargs="?", help="a new folder for the campaign")
    parser.add_argument("--publish", action="store_true", help="keep the report in the repository")
    parser.add_argument(
        "--render", action="store_true", help="only make the kept pages again from the kept summary.json"
    )
    options = parser.parse_args(arguments)
    if not options.render and options.out is None:
        parser.error("name the model and a new folder, or give --render")
    try:
        if options.render:
            keep(render(read_json(KEPT / "summary.json")))
            return 0
        run(options.model, options.out)
        report = write_report(options.out / "campaign")
        if options.publish:
            keep({path.name: path.read_text(encoding="utf-8") for path in report.iterdir()})
    except MiniVerlError as error:
        print(f"error {error.message}\nhint  {error.hint}", file=sys.stderr)
        return 1
    print(report / "report.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
