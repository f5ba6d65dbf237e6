"""Build the site: pages of docs/, every notebook as a chapter, the commands, the API reference.

python tools/docs.py [FOLDER]    write the site (default: _docs/); a dead link or any other warning is an error

Nothing is fetched, neither now nor by a browser that opens the pages.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from shutil import copyfile

from nbcells import ROOT, directives, is_exported, source_of
from nbmarkdown import Links, render, unlinked

DECADES = {
    0: "Ground",
    1: "Models",
    2: "Environments",
    3: "Agent",
    4: "Selection and losses",
    5: "Teachers and cache",
    6: "Training",
    7: "Evaluation and reports",
    8: "Editing weights",
    9: "Commands and names",
}
BESIDE = {"verify_gym": "90 Exact verification"}  # a house of its own, whose chapters share a decade with the commands


@dataclass(frozen=True)
class Chapter:
    """A notebook and where it stands in the book."""

    path: Path
    raw: dict

    @classmethod
    def read(cls, path: Path) -> Chapter:
        return cls(path, json.loads(path.read_text(encoding="utf-8")))

    @property
    def number(self) -> str:
        return self.path.stem.split("_")[0]

    @property
    def page(self) -> str:
        return f"chapters/{self.path.stem}.md"

    @property
    def title(self) -> str:
        return source_of(self.raw["cells"][0]).splitlines()[0].lstrip("# ").replace("`", "")

    @property
    def lead(self) -> str:
        """The paragraph under the title, without its links."""
        body = source_of(self.raw["cells"][0]).partition("\n")[2].strip()
        return unlinked(body.split("\n\n")[0]).replace("\n", " ")

    @property
    def exported(self) -> str:
        """What `default_exp` names, when the chapter exports anything."""
        marks = [directives(source_of(cell)) for cell in self.raw["cells"] if cell["cell_type"] == "code"]
        named = [mark.split()[1] for found in marks for mark in found if mark.startswith("default_exp ")]
        return named[0] if named and any(map(is_exported, marks)) else ""

    @property
    def source(self) -> str:
        """Path of the exported module in the repository."""
        return f"miniverl/{self.exported.replace('.', '/')}.py"

    @property
    def module(self) -> str:
        return f"miniverl.{self.exported}".removesuffix(".__init__")

    @property
    def api_page(self) -> str:
        return f"api/{self.module}.md"


def read_book(root: Path = ROOT) -> list[Chapter]:
    return [Chapter.read(path) for path in sorted((root / "nbs").glob("[0-9]*.ipynb"))]


def part_of(chapter: Chapter) -> str:
    room = chapter.path.stem.split("_", 1)[1].split(".")[0]
    return BESIDE.get(room, f"{chapter.number[0]}0 {DECADES[int(chapter.number[0])]}")


def by_decade(book: list[Chapter]) -> list[tuple[str, list[Chapter]]]:
    parts: dict[str, list[Chapter]] = {}
    for chapter in book:
        parts.setdefault(part_of(chapter), []).append(chapter)
    order = sorted(parts, key=lambda part: (part[:2], part not in BESIDE.values()))
    return [(part, parts[part]) for part in order]


@dataclass
class Site:
    """What mkdocs is given: texts and copies by staged path, and the navigation."""

    texts: dict[str, str] = field(default_factory=dict)
    copies: dict[str, Path] = field(default_factory=dict)
    nav: list = field(default_factory=list)

    def write(self, folder: Path) -> None:
        for name in [*self.texts, *self.copies]:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
        for name, text in self.texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        for name, source in self.copies.items():
            copyfile(source, folder / name)


def stage(book: list[Chapter], nav: list, root: Path = ROOT) -> Site:
    """Pages of docs/, the front page, the chapters of `book`, the API reference of their modules, and `nav` completed."""
    site, docs = Site(), root / "docs"
    pages = {path.relative_to(docs).as_posix(): path for path in sorted(docs.rglob("*.md"))}
    links = Links(_places(book, list(pages)), root)
    site.texts["index.md"] = front_page(site, links)
    for name, path in pages.items():
        text = path.read_text(encoding="utf-8").replace("<!-- chapters -->", reading_list(book))
        site.texts[name] = links.fix(text, str(PurePosixPath("docs", name).parent), name)
    for chapter in book:
        site.texts[chapter.page] = links.fix(chapter_page(chapter, site), "nbs", chapter.page)
        if chapter.exported:
            site.texts[chapter.api_page] = links.fix(api_page(chapter), "nbs", chapter.api_page)
    site.texts["api/index.md"] = links.fix(api_index(book), "nbs", "api/index.md")
    site.texts["commands.md"] = commands_page()
    site.copies = links.copied | {f"assets/{path.name}": path for path in sorted((docs / "assets").iterdir())}
    site.nav = complete_nav(nav, book, site.texts)
    return site


def _places(book: list[Chapter], pages: list[str]) -> dict[str, str]:
    """Path in the repository -> staged page."""
    places = {f"docs/{name}": name for name in pages} | {"README.md": "index.md", "nbs/index.ipynb": "index.md"}
    places["docs/commands.md"] = "commands.md"
    for chapter in book:
        places[f"nbs/{chapter.path.name}"] = chapter.page
        if chapter.exported:
            places[chapter.source] = chapter.api_page
    return places


def front_page(site: Site, links: Links) -> str:
    """The index notebook; README.md where there is none."""
    notebook = links.root / "nbs" / "index.ipynb"
    if not notebook.exists():
        return links.fix((links.root / "README.md").read_text(encoding="utf-8"), ".", "index.md")
    blocks = render(json.loads(notebook.read_text(encoding="utf-8")), site.texts, "index")
    return links.fix("\n\n".join(blocks), "nbs", "index.md")


def chapter_page(chapter: Chapter, site: Site) -> str:
    pictures: dict[str, str] = {}
    first, *rest = render(chapter.raw, pictures, chapter.path.stem)
    site.texts |= {f"chapters/{name}": text for name, text in pictures.items()}
    note = f"Chapter {chapter.number}"
    if chapter.exported:
        note += f" · cells with a coloured edge are the module [`{chapter.module}`](../{chapter.source})"
    return "\n\n".join([first, f"{note}\n{{ .chapter-note }}", *rest]) + "\n"


def reading_list(book: list[Chapter]) -> str:
    """The chapters under their decades, each with the first sentences of its opening paragraph."""
    out = []
    for decade, members in by_decade(book):
        out.append(f"## {decade}")
        for c in members:
            out.append(f"[**{c.number}** {c.title}](../nbs/{c.path.name})\n: {_first_sentences(c.lead)}")
    return "\n\n".join(out)


def _first_sentences(text: str, limit: int = 330) -> str:
    """Whole sentences from the start of a paragraph, as many as fit; one at least."""
    kept = ""
    for sentence in re.split(r"(?<=[.?!])\s+", text):
        if kept and len(kept) + len(sentence) > limit:
            break
        kept = f"{kept} {sentence}".strip()
    return kept


def api_page(chapter: Chapter) -> str:
    told = f"Explained in chapter [{chapter.number} {chapter.title}]({chapter.path.name}).\n{{ .chapter-note }}"
    return f"# `{chapter.module}`\n\n{told}\n\n::: {chapter.module}\n"


def api_index(book: list[Chapter]) -> str:
    """A table of the modules."""
    rows = ["| module | chapter |", "|---|---|"]
    for c in (c for c in book if c.exported):
        rows.append(f"| [`{c.module}`]({c.module}.md) | [{c.number} {c.title}]({c.path.name}) |")
    return "# API reference\n\nThe public names of every module, from their docstrings.\n\n" + "\n".join(rows) + "\n"


def commands_page() -> str:
    """Every command with its arguments and options, as the command line declares them."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    import typer

    from miniverl.cli import app

    group = typer.main.get_command(app)
    lead = "Read from the command line's own declarations. Exit code 0: done; 1: refused or failed, with a message and a hint; 2: a wrong call."
    return "\n\n".join(["# Commands", lead, *_commands(group, "miniverl")]) + "\n"


def _commands(group, path: str) -> list[str]:
    out = []
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            out += _commands(command, f"{path} {name}")
            continue
        out += [f"## {path} {name}", (command.help or "").strip()]
        if rows := [row for row in map(_option, command.params) if row]:
            out.append("\n".join(["| option | default | meaning |", "|---|---|---|", *rows]))
    return out


def _option(param) -> str:
    """A row of the table: names, default, help."""
    if param.name == "help":
        return ""
    argument = param.param_type_name == "argument"
    names = param.metavar or param.name.upper() if argument else ", ".join([*param.opts, *param.secondary_opts])
    default = "" if param.default in (None, False, True) or param.required else f"`{param.default}`"
    return f"| `{names}` | {default or ('required' if param.required else '')} | {getattr(param, 'help', '') or ''} |"


def complete_nav(nav: list, book: list[Chapter], texts: dict[str, str]) -> list:
    """The sections of mkdocs.yml, then further pages of docs/, the chapters in decades, and the API reference."""
    listed = set(re.findall(r"[\w./-]+\.md", json.dumps(nav)))
    known = listed | {c.page for c in book} | {c.api_page for c in book}
    more = sorted(name for name in texts if name.endswith(".md") and name not in known and not name.startswith("api/"))
    decades = [{title: [{f"{c.number} {c.title}": c.page} for c in part]} for title, part in by_decade(book)]
    modules = [
        {c.module.removeprefix("miniverl."): c.api_page} for c in sorted(book, key=lambda c: c.module) if c.exported
    ]
    pages = [{"Pages": more}] if more else []
    return [*nav, *pages, {"Chapters": decades}, {"API": [{"Modules": "api/index.md"}, *modules]}]


def build(folder: Path, book: list[Chapter] | None = None, root: Path = ROOT) -> None:
    """Write the site into `folder`; mkdocs' Abort when a page gives a warning."""
    os.environ["NO_MKDOCS_2_WARNING"] = "1"
    from mkdocs.commands.build import build as mkdocs_build
    from mkdocs.config import load_config

    with tempfile.TemporaryDirectory() as where:
        config = load_config(str(root / "docs" / "mkdocs.yml"), docs_dir=where, site_dir=str(folder.resolve()))
        site = stage(read_book(root) if book is None else book, config.nav or [], root)
        site.write(Path(where))
        config.nav = site.nav
        config.plugins.on_startup(command="build", dirty=False)
        mkdocs_build(config)
        config.plugins.on_shutdown()


def main(argv: list[str]) -> None:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    folder = Path(argv[0]) if argv else ROOT / "_docs"
    build(folder)
    print(f"{folder / 'index.html'}: {sum(1 for _ in folder.rglob('*.html'))} pages")


if __name__ == "__main__":
    main(sys.argv[1:])
