"""The site builds without a broken link, is complete, searches without a network, and has an llms.txt that leads on."""

import doctest
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.chromium import chromium, needs_chromium
from support.examples import load
from support.paths import DOCS, ROOT
from support.site_blocks import site_hooks, site_pages

pytest.importorskip("material", reason="pip install 'headrace[docs]'")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build(folder)
    return folder


def build(folder: Path, config: Path = ROOT / "mkdocs.yml") -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={"NO_MKDOCS_2_WARNING": "1"})
    assert done.returncode == 0, done.stderr


def test_every_page_is_built_and_can_be_searched(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    searched = {entry["location"].partition("#")[0] for entry in index["docs"]}
    for page in site_pages():
        html = "index.html" if page == "README.md" else str(Path(page).with_suffix(".html"))
        assert (site / html).is_file()
        assert html in searched | {"index.html"}, page
    assert not list(site.rglob("*.py"))


def test_the_site_loads_nothing_from_other_hosts(site: Path) -> None:
    for file in site.rglob("*.html"):
        text = file.read_text(encoding="utf-8")
        assert not re.findall(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=\"https?://[^\"]+", text), file


def test_the_first_page_shows_a_report_and_the_four_kinds(site: Path) -> None:
    first = (site / "index.html").read_text(encoding="utf-8")
    assert 'src="demo-report.png"' in first
    assert re.findall(r'<h2 id="[^"]*">([^<]+)<', first) == ["Start", "How to", "Reference", "Why"]


def test_llms_txt_has_every_page_with_a_sentence(site: Path) -> None:
    """The form of llmstxt.org: a title, a quoted summary, then lists of links with a sentence behind each."""
    lines = (site / "llms.txt").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "# Headrace"
    assert lines[2].startswith("> Headrace trains language-model agents")
    assert [line for line in lines if line.startswith("## ")] == ["## Start", "## How to", "## Reference", "## Why"]
    rest = [line for line in lines[3:] if line and not line.startswith("## ")]
    links = [re.fullmatch(r"- \[([^\]]+)\]\(([^)]+)\): (.+)", line) for line in rest]
    assert all(links)
    found = {link[2]: link[3] for link in links if link is not None}
    assert ["README.md", *found] == site_pages()
    for path, sentence in found.items():
        assert len(sentence) > 10
        assert (site / path).read_bytes() == (DOCS / path).read_bytes()


def test_the_page_of_commands_is_that_of_the_parser() -> None:
    written = (DOCS / "reference" / "commands.md").read_text(encoding="utf-8")
    assert written == load(DOCS / "make_commands.py").render(), "run `make docs`"
    assert written.count("\n## headrace ") > 15
    assert "## headrace cluster plan" in written


def test_examples_of_the_hooks_run() -> None:
    results = doctest.testmod(site_hooks())
    assert results.attempted
    assert not results.failed


@pytest.mark.slow
def test_a_broken_link_or_a_page_that_is_not_listed_fails_the_build(tmp_path: Path) -> None:
    shutil.copytree(DOCS, tmp_path / "docs")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    build(tmp_path / "site", tmp_path / "mkdocs.yml")
    page = tmp_path / "docs" / "how-to" / "sft.md"
    page.write_text(page.read_text() + "\n[gone](nowhere.md)\n")
    with pytest.raises(AssertionError, match=r"nowhere\.md"):
        build(tmp_path / "site", tmp_path / "mkdocs.yml")
    page.write_text((DOCS / "how-to" / "sft.md").read_text())
    (tmp_path / "docs" / "how-to" / "lost.md").write_text("# Lost\n")
    with pytest.raises(AssertionError, match=r"lost\.md"):
        build(tmp_path / "site", tmp_path / "mkdocs.yml")


@needs_chromium
@pytest.mark.slow
def test_the_search_finds_pages_that_lie_on_disk(site: Path, tmp_path: Path) -> None:
    box = "document.querySelector('[data-md-component=search-query]')"
    found = "document.querySelectorAll('.md-search-result__link[href*=\"how-to/grpo.html\"]').length"
    with chromium(tmp_path / "profile") as tab:
        tab.call("Page.navigate", url=(site / "index.html").as_uri())
        while not tab.ask(f"document.readyState == 'complete' && !!{box}"):
            time.sleep(0.1)
        tab.ask(f"{box}.focus(), {box}.value = 'gsm8k', 1")
        deadline = time.monotonic() + 60
        while not tab.ask(f"{box}.dispatchEvent(new Event('keyup', {{ bubbles: true }})), {found}"):
            assert time.monotonic() < deadline, "the search has no answer"
            time.sleep(0.2)


@needs_chromium
@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1400])
def test_names_in_tables_are_not_broken_and_no_page_is_wider_than_the_window(
    site: Path, tmp_path: Path, width: int
) -> None:
    broken = (
        "[...document.querySelectorAll('td code')].filter((code) => !code.textContent.includes(' ') && "
        "code.getClientRects().length > 1).map((code) => code.textContent)"
    )
    with chromium(tmp_path / "profile") as tab:
        tab.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        for page in ("index.html", "names.html", "configuration.html", "how-to/grpo.html"):
            tab.call("Page.navigate", url="about:blank")
            tab.call("Page.navigate", url=(site / page).as_uri())
            while not tab.ask("document.readyState == 'complete' && document.querySelectorAll('td').length > 3"):
                time.sleep(0.1)
            assert tab.ask(broken) == [], page
            assert tab.ask("document.documentElement.scrollWidth") <= width, page
