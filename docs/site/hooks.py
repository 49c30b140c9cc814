"""Make the navigation and llms.txt of the site from the tables of docs/README.md.

docs/README.md lists every page once: its title, its path and one sentence, under the heading of its kind. mkdocs calls
the functions whose names begin with `on_`.
"""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent.parent
INDEX = "README.md"
KINDS = ("Start", "How to", "Reference", "Why")
_HEADING = re.compile(r"^## (.+)$")
_ROW = re.compile(r"^\| \[(?P<title>[^\]]+)\]\((?P<path>[^)]+\.md)\) \| (?P<sentence>.+) \|$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A page of the site as docs/README.md lists it."""

    kind: str
    title: str
    path: str  # in docs/
    sentence: str


def listed_pages(index: str) -> list[Page]:
    """Read the pages of the four kinds from the text of docs/README.md."""
    pages, kind = [], ""
    for line in index.splitlines():
        if heading := _HEADING.match(line):
            kind = heading[1]
        elif (row := _ROW.match(line)) and kind in KINDS:
            pages.append(Page(kind=kind, title=row["title"], path=row["path"], sentence=row["sentence"]))
    return pages


def summary(index: str) -> str:
    """Return the paragraph under the title of docs/README.md as one line."""
    return " ".join(index.partition("\n\n")[2].partition("\n\n")[0].split())


def navigation(pages: list[Page]) -> list[dict[str, Any]]:
    """Return the navigation: the home page, then a list for each kind."""
    home: dict[str, Any] = {"Home": INDEX}
    return [home, *({kind: [{page.title: page.path} for page in pages if page.kind == kind]} for kind in KINDS)]


def llms_txt(index: str) -> str:
    """Return llms.txt (llmstxt.org): title, summary, and a link with a sentence for every page, in Markdown.

    The links are relative to the file, which lies beside the pages, so that they lead on from wherever the site is.
    """
    lines = ["# Headrace", "", f"> {_plain(summary(index))}"]
    pages = listed_pages(index)
    for kind in KINDS:
        lines += ["", f"## {kind}", ""]
        lines += [f"- [{p.title}]({p.path}): {_plain(p.sentence)}" for p in pages if p.kind == kind]
    return "\n".join(lines) + "\n"


def _plain(text: str) -> str:
    """Replace links by their words: their paths are those of docs/README.md.

    >>> _plain("read [the tour](tour.md) first")
    'read the tour first'
    """
    return re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", text)


def on_config(config: Any) -> Any:
    """Set the navigation."""
    config.nav = navigation(listed_pages((DOCS / INDEX).read_text(encoding="utf-8")))
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> None:
    """Show the first page without the columns at its sides, which would hold its own title and headings again."""
    if page.file.src_uri == INDEX:
        page.meta["hide"] = ["navigation", "toc"]


def on_post_build(config: Any) -> None:
    """Write llms.txt at the root of the site, and the Markdown of every page beside its HTML."""
    index, site = (DOCS / INDEX).read_text(encoding="utf-8"), Path(config.site_dir)
    (site / "llms.txt").write_text(llms_txt(index), encoding="utf-8")
    for path in (INDEX, *(page.path for page in listed_pages(index))):
        target = site / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(DOCS / path, target)
