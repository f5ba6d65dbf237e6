"""Write conformance.jsonl, the suite of cases that any grader can be aimed at.

python make_conformance.py [--out FILE]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from verify_gym.cli import run_safely, say
from verify_gym.conformance import conformance_lines, lines_sha256

SUITE = Path(__file__).resolve().with_name("conformance.jsonl")


def deliver(out: Path) -> int:
    """Write the file and print its digest."""
    lines = list(conformance_lines())
    out.write_text("".join(lines), encoding="ascii", newline="\n")
    say(f"{len(lines)} lines, sha256 {lines_sha256(lines)}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Write the conformance suite.")
    parser.add_argument(
        "--out", type=Path, default=SUITE, help="the file (default: conformance.jsonl beside this program)"
    )
    options = parser.parse_args(argv)
    return run_safely(lambda: deliver(options.out))


if __name__ == "__main__":
    sys.exit(main())
