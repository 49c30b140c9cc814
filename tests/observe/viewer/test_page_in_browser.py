"""The page of rollouts in a real browser: what is in sight, what keys do, what a hostile episode achieves (nothing)."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.observe.viewer.query import ViewQuery, write_page
from support import rollout_files
from support.chromium import Tab, chromium, decode_png, needs_chromium

pytestmark = needs_chromium
SEEN = "[...document.querySelectorAll('%s')].filter((e) => e.getClientRects().length).map((e) => e.id)"


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with chromium(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture
def page(tmp_path: Path) -> Path:
    write_page(ViewQuery(path=rollout_files.save(tmp_path / "a.jsonl")), tmp_path / "page.html")
    return tmp_path / "page.html"


def seen(tab: Tab, selector: str) -> list[str]:
    """Ids of what a reader can see."""
    found: list[str] = tab.ask(SEEN % selector)
    return found


def test_one_group_one_view_and_one_episode_are_in_sight(tab: Tab, page: Path) -> None:
    tab.open(page)
    assert seen(tab, ".group") == ["g-0"]
    assert seen(tab, ".episode") == ["e-0-0"]
    assert seen(tab, ".step") == ["e-0-0-0", "e-0-0-1", "e-0-0-2"]
    assert seen(tab, ".anchor") == []
    assert tab.ask("document.querySelectorAll('.canvas svg')[0].getClientRects().length") == 0


def test_keys_go_through_groups_episodes_steps_and_views(tab: Tab, page: Path) -> None:
    tab.open(page)
    for key, group, episode in (
        ("j", "g-0", "e-0-1"),
        ("j", "g-0", "e-0-2"),
        ("j", "g-0", "e-0-2"),
        ("k", "g-0", "e-0-1"),
    ):
        tab.press(key)
        assert (seen(tab, ".group"), seen(tab, ".episode")) == ([group], [episode])
    tab.press("n")
    assert (seen(tab, ".group"), seen(tab, ".episode")) == (["g-1"], ["e-1-0"])
    tab.press("p")
    assert seen(tab, ".episode") == ["e-0-1"], "a group remembers its episode"
    for key, opened in (("ArrowRight", 0), ("ArrowRight", 1), ("ArrowLeft", 0), ("ArrowLeft", 0)):
        tab.press(key)
        assert seen(tab, ".step[open]") == [f"e-0-1-{opened}"]
        assert tab.ask("document.querySelector('.cell.at-step a').hash") == f"#e-0-1-{opened}"
    tab.press("o")
    assert len(seen(tab, ".step[open]")) == 4
    tab.press("o")
    assert seen(tab, ".step[open]") == []
    tab.press("3")
    assert seen(tab, ".anchor") == ["a-0-0", "a-0-1", "a-0-2"]
    tab.press("2")
    assert seen(tab, ".anchor") == []
    assert tab.ask("document.querySelectorAll('.canvas svg')[0].getClientRects().length") == 1
    tab.press("?")
    assert tab.ask("document.getElementById('keys').open") is True
    tab.press("Escape")
    assert tab.ask("document.getElementById('keys').open") is False


def test_tokens_change_colour_with_c_and_with_the_buttons(tab: Tab, page: Path) -> None:
    tab.open(page)
    tab.press("o")
    colour = "getComputedStyle(document.querySelector('#e-0-0-0 .tokens b.%s')).backgroundColor"
    shown = "getComputedStyle(document.querySelector('#e-0-0-0 .tokens b.m0')).display"
    assert tab.ask(colour % "a1") == "rgb(221, 243, 230)"
    assert tab.ask(shown) == "none"
    tab.press("c")
    assert tab.ask("document.documentElement.dataset.by") == "mask"
    assert tab.ask(shown) == "inline"
    tab.press("c")
    assert tab.ask(colour % "v4") == "rgb(248, 220, 236)"
    tab.press("c")
    assert tab.ask(colour % "l3") == "rgb(248, 199, 155)", "a log-prob of -2"
    tab.ask("document.querySelector('[data-colour=advantage]').click()")
    assert tab.ask(colour % "a1") == "rgb(221, 243, 230)"
    legends = "[...document.querySelectorAll('.legend')].filter((e) => e.offsetParent).map((e) => e.dataset.legend)"
    assert tab.ask(legends) == ["advantage"]


def test_cells_show_the_advantage_or_the_steps_own(tab: Tab, page: Path) -> None:
    tab.open(page)
    cell = "document.querySelector('tr[data-episode=e-0-2] .cell')"  # A = -2/3 - 1/8, A_S = -1/8
    look = f"[getComputedStyle({cell}).backgroundColor, {cell}.innerText.split('\\n')[1]]"
    assert tab.ask(look) == ["rgb(249, 203, 197)", "-0.792"]
    tab.press("a")
    assert tab.ask(look) == ["rgb(253, 231, 228)", "-0.125"]
    tab.ask("document.querySelector('.group.on [data-cells=A]').click()")
    assert tab.ask(look) == ["rgb(249, 203, 197)", "-0.792"]


def test_a_tool_call_is_read_in_its_cell_where_few_steps_leave_room(tab: Tab, page: Path) -> None:
    tab.open(page)
    act, last = "document.querySelector('.cell .act')", "document.querySelector('.matrix .at:last-child')"
    tab.ask(f"""{act}.textContent = 'calculator(expression="19+3") -> 22'""")
    assert tab.ask(f"{act}.clientWidth") < 150, "four steps stay in sight together"
    tab.ask(f"{last}.remove()")  # three are left
    assert tab.ask(f"{act}.scrollWidth <= {act}.clientWidth")


def test_an_address_brings_its_step_or_state_into_sight(tab: Tab, page: Path) -> None:
    tab.open(page, address="#e-1-1-0")
    assert (seen(tab, ".group"), seen(tab, ".episode"), seen(tab, ".step[open]")) == (["g-1"], ["e-1-1"], ["e-1-1-0"])
    settle = "new Promise((done) => setTimeout(done, 50))"
    tab.ask("document.querySelector('.step[open] .inside .note a').click()")
    tab.call("Runtime.evaluate", expression=settle, awaitPromise=True)
    assert seen(tab, ".anchor") == ["a-1-0"], "every action taken in this state"
    dots = "[...document.querySelectorAll('.group.on .anchor .returns a')].map((e) => e.getAttribute('href'))"
    assert tab.ask(dots) == ["#e-1-0-0", "#e-1-1-0", "#e-1-0-1"], "in the order of their steps"
    tab.ask("location.hash = '#e-0-2-1'")
    tab.call("Runtime.evaluate", expression=settle, awaitPromise=True)
    assert seen(tab, ".step[open]") == ["e-0-2-1"]


def test_everything_can_be_reached_with_the_tab_key(tab: Tab, page: Path) -> None:
    tab.open(page)
    reached = []
    for _ in range(24):
        tab.press("Tab")
        reached.append(tab.ask("document.activeElement.id || document.activeElement.textContent.trim().slice(0, 12)"))
    for name in ("Episodes", "State graph", "7/0", "7/2", "logprob", "version"):
        assert any(name in each for each in reached), (name, reached)
    tab.ask("document.querySelector('#e-0-0-1 summary').focus()")
    tab.press("Enter")
    assert seen(tab, ".step[open]") == ["e-0-0-1"]


def type_text(tab: Tab, text: str) -> None:
    for letter in text:
        tab.press(letter)


def test_a_search_leaves_the_episodes_with_the_text(tab: Tab, page: Path) -> None:
    tab.open(page)
    rows, links = "tr[data-episode]:not([hidden])", ".groups a:not([hidden])"
    told = "document.querySelector('.search output').textContent"
    count = "document.querySelectorAll('%s').length"

    def search(text: str) -> list[object]:
        tab.press("/")
        assert tab.ask("document.activeElement.id") == "search"
        tab.ask("document.activeElement.select()")
        type_text(tab, text)
        return [tab.ask(told), tab.ask(count % rows), tab.ask(count % links), seen(tab, ".episode")]

    assert search("TIME  is up") == ["3 of 6 episodes", 3, 2, ["e-0-2"]], "said to three of them; case is no matter"
    for opened in (["e-0-2"], ["e-1-0"], ["e-1-1"], ["e-0-2"]):
        tab.press("Enter")
        assert seen(tab, ".episode") == opened
    tab.press("Escape")
    assert [tab.ask(told), tab.ask(count % rows), tab.ask(count % links)] == ["", 6, 2]
    assert search("the world ended") == ["1 of 6 episodes", 1, 1, ["e-1-2"]], "why an episode failed"
    assert search("corridor") == ["3 of 6 episodes", 3, 1, ["e-0-2"]], "the task; a group remembers its episode"
    assert search("back") == ["1 of 6 episodes", 1, 1, ["e-0-2"]], "an action"
    tab.press("Enter")
    assert seen(tab, ".step[open]") == ["e-0-2-1"]
    tab.ask("document.activeElement.blur()")
    tab.press("n")
    assert seen(tab, ".group") == ["g-0"], "the other group has nothing of it"
    assert search("a needle") == ["0 of 6 episodes", 0, 0, []]
    tab.ask("location.hash = '#e-1-0-0'")
    tab.call("Runtime.evaluate", expression="new Promise((done) => setTimeout(done, 50))", awaitPromise=True)
    assert (seen(tab, ".episode"), tab.ask(told)) == (["e-1-0"], ""), "an address shows what it names"


def test_without_the_script_everything_is_shown(tab: Tab, page: Path, tmp_path: Path) -> None:
    text = page.read_text(encoding="utf-8")
    bare = tmp_path / "bare.html"
    marked = text[: text.index("<script>")] + "<script>document.documentElement.dataset.ready='yes'</script>"
    bare.write_text(marked.replace("script-src 'sha256-", "script-src 'unsafe-inline' 'x"))
    tab.open(bare)
    assert seen(tab, ".group") == ["g-0", "g-1"]
    assert len(seen(tab, ".episode")) == 6
    assert len(seen(tab, ".anchor")) == 4


@pytest.mark.parametrize("width", [1400, 390])
@pytest.mark.parametrize("dark", [False, True])
def test_a_picture_has_the_colours_and_nothing_hangs_over_the_edge(
    tab: Tab, page: Path, tmp_path: Path, width: int, dark: bool
) -> None:
    tab.open(page, width=width, height=900, dark=dark)
    size, pixels = decode_png(tab.picture(tmp_path / "page.png").read_bytes())
    assert size == (width, 900)
    colours = Counter(pixels)
    better, worse, background = (
        [(0x17, 0x33, 0x2A), (0x5F, 0x27, 0x23), (0x0C, 0x13, 0x17)]
        if dark
        else [(0xDD, 0xF3, 0xE6), (0xF9, 0xCB, 0xC5), (0xF3, 0xF6, 0xF7)]
    )
    assert colours[better] > 500, "cells of steps that were better than their peers"
    assert colours[worse] > 500
    assert colours[background] > 0.1 * len(pixels)
    for key in ("1", "2", "3"):
        tab.press(key)
        assert tab.ask("document.documentElement.scrollWidth") <= width, "only tables and graphs scroll sideways"


def test_a_hostile_episode_gets_nowhere(tab: Tab, tmp_path: Path, outside: tuple[str, list[str]]) -> None:
    url, asked = outside
    attack = f"<script>document.title='owned';fetch('{url}/fetched')</script><img src='{url}/seen' onerror='alert(1)'>"
    quoted = f"\"'><img src={url}/seen>{attack}"
    path = rollout_files.save(tmp_path / "a.jsonl", note=attack + quoted)
    write_page(ViewQuery(path=path), tmp_path / "page.html")
    tab.open(tmp_path / "page.html")
    tab.press("o")
    assert "owned" not in tab.ask("document.title").replace(attack, "")
    assert tab.ask("document.images.length") == 0
    assert tab.ask("document.scripts.length") == 1
    assert asked == []
    assert attack in tab.ask("document.querySelector('.said .text').textContent")


def test_an_attack_would_be_noticed(tab: Tab, page: Path, tmp_path: Path, outside: tuple[str, list[str]]) -> None:
    """The same picture on a page without escaping or policy reaches the server, so the test above can fail."""
    url, asked = outside
    text = page.read_text(encoding="utf-8").replace("<main>", f"<main><img src='{url}/seen'>")
    start = text.index('<meta http-equiv="Content-Security-Policy"')
    weak = tmp_path / "weak.html"
    weak.write_text(text[:start] + text[text.index(">", start) + 1 :])
    tab.open(weak)
    assert tab.ask("document.images.length") == 1
    assert asked == ["/seen"]
