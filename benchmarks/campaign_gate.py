"""Two whole gates of the campaign protocol: at the highest isolation level, and at the level that has resource limits only.

    python -m benchmarks.campaign_gate            play both (about two minutes) and compare with what is kept
    python -m benchmarks.campaign_gate --write    keep them in benchmarks/results/campaign-gate.json

The record holds no times and no paths, so it is the same wherever namespaces work.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from miniverl.campaign.controller import TrialRow
from miniverl.campaign.gate import run_control_tapes
from miniverl.core import canonical_json, read_json

KEPT = Path(__file__).resolve().parent / "results" / "campaign-gate.json"
LEVELS = (3, 1)


def _told(row: TrialRow) -> None:
    print(f"{row.trial}  {row.status}  {row.reason}", file=sys.stderr, flush=True)


def measure(levels: tuple[int, ...] = LEVELS) -> dict[str, Any]:
    """Play the control tapes at each level."""
    gates = [run_control_tapes(at_most=level, on_progress=_told).to_record() for level in levels]
    return {"command": "python -m benchmarks.campaign_gate --write", "gates": gates}


def main(arguments: list[str]) -> int:
    record = measure()
    for gate in record["gates"]:
        print(gate["line"])
    if "--write" in arguments:
        KEPT.write_text(canonical_json(record), encoding="utf-8")
    elif record != read_json(KEPT):
        print(f"this is not what {KEPT.name} keeps", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
