"""Render nbs/index.ipynb to README.md: prose as it stands, Markdown outputs as text, code that is shown in fences.

python tools/readme.py           write README.md
python tools/readme.py --check   exit 1 if README.md is not what the notebook gives
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from nbcells import ROOT, directives, source_of

LINK = re.compile(r"\]\((?![a-z]+:|#|/)([^)]+)\)")


def relink(text: str) -> str:
    """Links that hold in nbs/ as links that hold one folder up."""
    return LINK.sub(lambda m: f"]({m[1].removeprefix('../') if m[1].startswith('../') else 'nbs/' + m[1]})", text)


def render(raw: dict) -> str:
    """Markdown of the front page; a code cell marked `#| echo: false` shows only its output."""
    parts = ["<!-- generated from nbs/index.ipynb by tools/readme.py: edit the notebook -->"]
    for cell in raw["cells"]:
        source = source_of(cell).strip()
        if cell["cell_type"] == "markdown":
            parts.append(relink(source))
            continue
        marks = directives(source)
        if "hide" in marks:
            continue
        code = "\n".join(line for line in source.splitlines() if not line.startswith("#|")).strip()
        if "echo: false" not in marks:
            parts.append(f"```python\n{code}\n```")
        parts.extend(filter(None, map(_output, cell["outputs"])))
    return "\n\n".join(parts) + "\n"


def _output(out: dict) -> str:
    data = out.get("data", {})
    if "text/markdown" in data:
        return relink("".join(data["text/markdown"]).strip())
    text = "".join(data.get("text/plain", out.get("text", []))).strip()
    return f"```\n{text}\n```" if text else ""


def main(argv: list[str]) -> None:
    text = render(json.loads((ROOT / "nbs" / "index.ipynb").read_text(encoding="utf-8")))
    target = Path(ROOT / "README.md")
    if argv == ["--check"]:
        sys.exit(target.read_text(encoding="utf-8") != text)
    target.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
