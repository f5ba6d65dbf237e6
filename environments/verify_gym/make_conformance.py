"""Write conformance.jsonl, the suite of cases that any grader can be aimed at.

python make_conformance.py [--out FILE]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from verify_gym.conformance import conformance_lines, lines_sha256

SUITE = Path(__file__).resolve().with_name("conformance.jsonl")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Write the conformance suite.")
    parser.add_argument(
        "--out", type=Path, default=SUITE, help="the file (default: conformance.jsonl beside this program)"
    )
    out = parser.parse_args(argv).out
    lines = list(conformance_lines())
    out.write_text("".join(lines), encoding="ascii", newline="\n")
    print(f"{len(lines)} lines, sha256 {lines_sha256(lines)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
