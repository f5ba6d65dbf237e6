"""Check a benchmark's result against its run directories and write its portable JSON, Markdown page and SVG picture.

    python scripts/publish_benchmark_artifacts.py runs/benchmarks/NAME.json --results-dir benchmarks/results --svg docs/images/NAME.svg

The run directories and the plan must lie beside the JSON file, as the benchmark left them. Prints the three paths and the
SHA-256 of the JSON. Exit codes: 0 published (or already there), 1 refused, 2 wrong usage; a refusal writes nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from miniverl.core import MiniVerlError
from miniverl.evaluation.publish import publish


class _Parser(argparse.ArgumentParser):
    """Tells a usage error in two lines, as the other commands do."""

    def error(self, message: str) -> None:  # type: ignore[override]
        self.exit(2, f"error: {message}\nhint: see {self.prog} --help\n")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    told = _Parser(description=(__doc__ or "").split("\n", 1)[0], allow_abbrev=False)
    told.add_argument("source", metavar="SOURCE", type=Path, help="the JSON file that the benchmark wrote")
    told.add_argument("--results-dir", required=True, type=Path, help="folder for NAME.json and NAME.md")
    told.add_argument("--svg", required=True, type=Path, help="file of the picture")
    told.add_argument("--driver-version", help="version of the graphics driver, if the result does not have it")
    told.add_argument("--overwrite", action="store_true", help="replace files that hold something else")
    return told


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    given = parser().parse_args(argv)
    try:
        written = publish(
            given.source,
            results_dir=given.results_dir,
            svg=given.svg,
            driver_version=given.driver_version,
            overwrite=given.overwrite,
        )
    except MiniVerlError as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code
    print(*(f"{name:9s}{path}" for name, path in written.items()), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
