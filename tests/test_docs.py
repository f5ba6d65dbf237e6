"""The site: it builds strictly, its links lead somewhere, it needs nothing from outside, and notebooks read as chapters."""

from __future__ import annotations

import json
import re
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

pytest.importorskip("mkdocs")
pytest.importorskip("mkdocstrings")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import nb  # noqa: E402
from nbcells import directives, source_of  # noqa: E402
from nbmarkdown import Links, fence, render  # noqa: E402

import docs  # noqa: E402

MATH = re.compile(r"(?<!\\)\$[^\s$]")


class Page(HTMLParser):
    """Links, ids, what a browser would fetch, and the text of a page (code and formulas apart)."""

    def __init__(self, path: Path):
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.needs: list[str] = []
        self.tags: list[str] = []
        self.text = self.code = ""
        self.inside: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.tags.append(tag)
        self.ids |= {values[key] for key in ("id", "name") if values.get(key)}
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])
        elif tag in ("script", "img", "iframe", "link", "source"):
            self.needs += [values[key] for key in ("src", "href", "srcset") if values.get(key)]
        if tag in ("code", "math", "script", "style"):
            self.inside.append(tag)

    def handle_endtag(self, tag):
        if self.inside and self.inside[-1] == tag:
            self.inside.pop()

    def handle_data(self, data):
        if not self.inside:
            self.text += data
        elif self.inside[-1] == "code":
            self.code += data


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    docs.build(folder)  # strict: any warning of mkdocs aborts
    return folder


@pytest.fixture(scope="module")
def pages(site) -> dict[Path, Page]:
    return {path: Page(path) for path in sorted(site.rglob("*.html")) if path.name != "404.html"}


@pytest.fixture(scope="module")
def book() -> list[docs.Chapter]:
    return docs.read_book()


def test_every_notebook_is_a_chapter_and_every_module_has_a_reference(site, book):
    assert len(book) >= 40
    assert [c.page for c in book if not (site / c.page).with_suffix(".html").is_file()] == []
    wanted = {p.relative_to(ROOT).as_posix() for p in (ROOT / "miniverl").rglob("*.py")} - {"miniverl/_modidx.py"}
    empty = {name for name in wanted if name.endswith("/__init__.py") and name != "miniverl/__init__.py"}
    assert wanted - empty <= {c.source for c in book if c.exported}
    assert [c.module for c in book if c.exported and not (site / "api" / f"{c.module}.html").is_file()] == []


def test_links_and_anchors_lead_somewhere(pages, site):
    dead = []
    for path, page in pages.items():
        for link in page.links + page.needs:
            if re.match(r"[a-z]+:|//", link):
                continue
            name, _, anchor = unquote(link).partition("#")
            target = (path.parent / name).resolve() if name else path
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file() or (anchor and target in pages and anchor not in pages[target].ids):
                dead.append(f"{path.relative_to(site)}: {link}")
    assert dead == []


def test_a_browser_fetches_nothing_from_outside(pages, site):
    outside = {need for page in pages.values() for need in page.needs if re.match(r"(https?:)?//", need)}
    assert outside == set()
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*['\"]?(https?:)?//", sheet.read_text(encoding="utf-8")), sheet


def test_formulas_are_mathml_and_directives_are_gone(pages, site, book):
    for chapter in book:
        page = pages[(site / chapter.page).with_suffix(".html")]
        prose = "\n".join(source_of(c) for c in chapter.raw["cells"] if c["cell_type"] == "markdown")
        if MATH.search(re.sub(r"`[^`]*`", "", prose)):
            assert "math" in page.tags, chapter.page
        assert not MATH.search(page.text), f"{chapter.page}: {MATH.search(page.text)}"
        shown = [line for line in page.code.splitlines() if line.startswith("#|")]
        assert shown == [], chapter.page
    unread = {
        found for path in pages for found in re.findall(r"<math.*?</math>", path.read_text(encoding="utf-8"), re.S)
    }
    assert [formula for formula in unread if "\\" in formula] == [], "a command that the converter does not know"


def test_pictures_and_results_arrive(pages, site, book):
    for chapter in book:
        cells = [c for c in chapter.raw["cells"] if c["cell_type"] == "code" and "hide" not in directives(source_of(c))]
        drawn = sum("image/svg+xml" in out.get("data", {}) for c in cells for out in c["outputs"])
        needs = [n for n in pages[(site / chapter.page).with_suffix(".html")].needs if n.startswith(chapter.path.stem)]
        assert len(needs) == drawn, chapter.page


def test_navigation_follows_the_numbers(book):
    nav = docs.complete_nav([{"Home": "index.md"}], book, {"index.md": "", "extra.md": ""})
    assert [next(iter(section)) for section in nav] == ["Home", "Pages", "Chapters", "API"]
    parts = [re.findall(r"chapters/[^\"]+\.md", json.dumps(part)) for part in nav[2]["Chapters"]]
    assert all(pages == sorted(pages) for pages in parts)
    assert [part[0] for part in parts if part] == sorted(part[0] for part in parts if part)
    assert sorted(sum(parts, [])) == [c.page for c in book]
    beside = [pages for pages in parts if any("verify_gym" in page for page in pages)]
    assert all("verify_gym" in page for pages in beside for page in pages), "a house of its own"
    assert nav[1] == {"Pages": ["extra.md"]}


def test_commands_page_knows_every_command(site):
    from miniverl.cli import app

    text = (site / "commands.html").read_text(encoding="utf-8")
    import typer

    group = typer.main.get_command(app)
    assert len(group.commands) >= 7
    assert [name for name in group.commands if f"miniverl {name}" not in text] == []
    assert "--dry-run" in text and "required" in text


def test_run_directory_page_names_every_file():
    from miniverl import store

    text = (ROOT / "docs" / "run-directory.md").read_text(encoding="utf-8")
    names = [made.name for made in vars(store._RunFiles).values() if isinstance(made, store._Name)]
    assert len(names) > 15
    assert [name for name in names if f"`{name}`" not in text and f"`{name}/`" not in text] == []


NOTEBOOK = """%%%% md title
# A `small` chapter

What it [*adds*](07_other.ipynb).
%%%% code default-exp
#| default_exp small
%%%% code shown
#| export
x = "```"
%%%% code hidden
#| hide
secret = 1
%%%% code quiet
#| echo: false
quiet_code = 2
"""


def small() -> dict:
    raw = nb.from_text(NOTEBOOK)
    for cell, data in (("shown", {"image/svg+xml": ["<svg/>"]}), ("quiet", {"text/markdown": ["# Big\n\n[a](b.md)"]})):
        next(c for c in raw["cells"] if c["id"] == cell)["outputs"] = [{"output_type": "execute_result", "data": data}]
    return raw


def test_notebook_becomes_markdown():
    pictures: dict[str, str] = {}
    text = "\n\n".join(render(small(), pictures, "s"))
    assert "#|" not in text and "secret" not in text and "quiet_code" not in text
    assert '```` { .python .exported }\nx = "```"\n````' in text
    assert pictures == {"s/shown-0.svg": "<svg/>"} and "](s/shown-0.svg)" in text
    assert "**Big**\n\na" in text, "a result brings no heading and no link of its own"


def test_chapter_knows_itself(tmp_path):
    chapter = docs.Chapter(tmp_path / "07a_small.ipynb", small())
    assert (chapter.number, chapter.title, chapter.lead) == ("07a", "A small chapter", "What it *adds*.")
    assert (chapter.module, chapter.source) == ("miniverl.small", "miniverl/small.py")
    assert docs.Chapter(tmp_path / "08_x.ipynb", nb.from_text("%%%% md title\n# X\n")).exported == ""


def test_text_output_drops_colours_and_fences_hold():
    raw = nb.from_text("%%%% code a\n1\n")
    raw["cells"][0]["outputs"] = [{"output_type": "stream", "name": "stdout", "text": ["\x1b[31mred\x1b[0m\n"]}]
    assert render(raw, {}, "s")[1] == "``` { .text .output }\nred\n```"
    assert fence("a ````` b", ".text").startswith("`````` {")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("[n](01_b.ipynb#part)", "[n](01_b.md#part)"),
        ("[m](../miniverl/b.py)", "[m](../api/b.md)"),
        ("[r](../recipes/x.yaml)", "[r](../files/recipes/x.yaml.txt)"),
        ("[folder](../recipes)", "folder"),
        ("[gone](../recipes/gone.yaml)", "[gone](../recipes/gone.yaml)"),
        ("[out](../../etc/passwd)", "[out](../../etc/passwd)"),
        ("[w](https://example.org/a)", "[w](https://example.org/a)"),
        ("[here](#part)", "[here](#part)"),
        ("`[n](01_b.ipynb)` [n](01_b.ipynb)", "`[n](01_b.ipynb)` [n](01_b.md)"),
        ("```\n[n](01_b.ipynb)\n```", "```\n[n](01_b.ipynb)\n```"),
        ("[`code`](01_b.ipynb)", "[`code`](01_b.md)"),
    ],
)
def test_links(tmp_path, before, after):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "x.yaml").touch()
    links = Links({"nbs/01_b.ipynb": "chapters/01_b.md", "miniverl/b.py": "api/b.md"}, tmp_path)
    assert links.fix(before, "nbs", "chapters/00_a.md") == after
    assert set(links.copied) == ({"files/recipes/x.yaml.txt"} if "x.yaml" in before else set())


def test_reading_list_keeps_whole_sentences():
    assert docs._first_sentences("One. Two is long. Three.", limit=18) == "One. Two is long."
    assert docs._first_sentences("A very long first sentence.", limit=3) == "A very long first sentence."


def test_strict_build_refuses_a_dead_link(tmp_path):
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("*.md", "__pycache__"))
    settings = (ROOT / "docs" / "mkdocs.yml").read_text(encoding="utf-8")
    (tmp_path / "docs" / "mkdocs.yml").write_text(settings[: settings.index("\nnav:") + 1], encoding="utf-8")
    (tmp_path / "nbs").mkdir()
    (tmp_path / "README.md").write_text("# Home\n", encoding="utf-8")
    chapter = tmp_path / "nbs" / "00_a.ipynb"
    for link, refused in (("00_a.ipynb", False), ("00_gone.ipynb", True)):
        chapter.write_text(json.dumps(nb.from_text(f"%%%% md title\n# A\n\n[x]({link}) and $a_1$\n")), encoding="utf-8")
        if refused:
            with pytest.raises(BaseException, match="strict mode"):
                docs.build(tmp_path / "site", root=tmp_path)
        else:
            docs.build(tmp_path / "site", root=tmp_path)
            assert "<math" in (tmp_path / "site" / "chapters" / "00_a.html").read_text(encoding="utf-8")
