"""Notebook -> Markdown for the site, and links between files of the repository -> links between pages."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath

from nbcells import ROOT, directives, is_exported, source_of

CODE_OR_LINK = re.compile(
    r"(?P<code>^(?P<fence>`{3,}|~{3,}).*?^(?P=fence)|(?P<tick>`+)(?!`).+?(?P=tick)(?!`))"
    r"|(?P<image>!?)\[(?P<text>(?:`[^`]*`|[^\]`])*)\]\((?P<to>[^)\s]+)\)",
    re.DOTALL | re.MULTILINE,
)
HEADING = re.compile(r"^#{1,6} +(.*)$", re.MULTILINE)
ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
SHOWN_AS_TEXT = {"", ".yaml", ".yml", ".toml", ".ini", ".py", ".jsonl"}


def render(raw: dict, pictures: dict[str, str], folder: str) -> list[str]:
    """Markdown blocks of a notebook; `pictures` receives the SVG texts under their paths beside the page."""
    blocks = []
    for cell in raw["cells"]:
        source = source_of(cell).strip()
        if cell["cell_type"] == "markdown":
            blocks.append(source)
            continue
        marks = directives(source)
        if "hide" in marks:
            continue
        code = "\n".join(line for line in source.splitlines() if not line.startswith("#|")).strip("\n")
        if code and "echo: false" not in marks:
            blocks.append(fence(code, ".python .exported" if is_exported(marks) else ".python"))
        for n, out in enumerate(cell["outputs"]):
            blocks.append(_output(out, pictures, f"{folder}/{cell['id']}-{n}.svg"))
    return [block for block in blocks if block]


def fence(text: str, classes: str) -> str:
    """A fenced block, with more backticks than any run of them in the text."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    ticks = "`" * max(3, longest + 1)
    return f"{ticks} {{ {classes} }}\n{text}\n{ticks}"


def _output(out: dict, pictures: dict[str, str], picture: str) -> str:
    data = {kind: "".join(value) for kind, value in out.get("data", {}).items()}
    if "image/svg+xml" in data:
        pictures[picture] = data["image/svg+xml"]
        return _boxed(f"![what the cell above draws]({picture})")
    if "text/markdown" in data:
        return _boxed(_shown(data["text/markdown"].strip()))
    text = ANSI.sub("", data.get("text/plain", "".join(out.get("text", [])))).rstrip()
    return fence(text, ".text .output") if text.strip() else ""


def _boxed(markdown: str) -> str:
    return f'<div class="output" markdown="1">\n\n{markdown}\n\n</div>'


def _shown(markdown: str) -> str:
    """Markdown that is a result: its headings, links and pictures are not those of the chapter."""
    return HEADING.sub(r"**\1**", unlinked(markdown))


def unlinked(markdown: str) -> str:
    """The text with every link and picture replaced by its words."""
    return _outside_code(markdown, lambda m: m["text"])


def _outside_code(markdown: str, change: Callable[[re.Match], str]) -> str:
    return CODE_OR_LINK.sub(lambda m: m[0] if m["code"] else change(m), markdown)


@dataclass
class Links:
    """Where each file of the repository lies in the site.

    `pages` maps paths of the repository to staged ones. Another file that a page links to is copied beside the site and
    noted in `copied`; a link to a folder becomes plain text; a link to nothing stays, and the strict build refuses it.
    """

    pages: dict[str, str]
    root: Path = ROOT
    copied: dict[str, Path] = field(default_factory=dict)

    def fix(self, markdown: str, base: str, page: str) -> str:
        """Rewrite the links of a text that lies in folder `base` of the repository and becomes `page`."""
        return _outside_code(markdown, partial(self._change, base, page))

    def _change(self, base: str, page: str, m: re.Match) -> str:
        path, _, anchor = m["to"].partition("#")
        if not path or re.match(r"[a-z]+:", path):
            return m[0]
        name = os.path.normpath(os.path.join(base, path)).replace(os.sep, "/")
        if (self.root / name).is_dir():
            return m["text"]
        target = self._target(name)
        if target is None:
            return m[0]
        link = os.path.relpath(target, PurePosixPath(page).parent).replace(os.sep, "/")
        return f"{m['image']}[{m['text']}]({link}{'#' + anchor if anchor else ''})"

    def _target(self, name: str) -> str | None:
        if name in self.pages:
            return self.pages[name]
        if name.startswith("..") or not (self.root / name).is_file():
            return None
        suffix = ".txt" if PurePosixPath(name).suffix in SHOWN_AS_TEXT else ""
        self.copied[f"files/{name}{suffix}"] = self.root / name
        return f"files/{name}{suffix}"
