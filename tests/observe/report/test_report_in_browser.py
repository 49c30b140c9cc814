"""The report in a real browser: what a reader gets, not what we meant to write."""

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.observe.report.run_report import write_report
from support.chromium import browse, decode_png, needs_chromium

pytestmark = needs_chromium


def test_the_browser_shows_every_part_and_runs_only_our_script(
    synthetic_run: Callable[..., Path], tmp_path: Path, outside: tuple[str, list[str]]
) -> None:
    url, asked = outside
    attack = f"<script>document.title='owned';fetch('{url}/fetched')</script><img src='{url}/seen' onerror='alert(1)'>"
    report = write_report(synthetic_run(attack), {"seconds": 214.0})
    dom = browse(report, tmp_path / "profile", "--dump-dom")

    assert 'data-ready="yes"' in dom, "our own script ran under the content security policy"
    assert "<title>demo · Headrace report</title>" in dom
    assert asked == []
    assert "&lt;script&gt;document.title='owned'" in dom

    headings = re.findall(r"<h[12][^>]*>([^<]+)<", dom)
    assert headings == ["demo", "The result", "How it got there", "Episodes, before and after"]
    assert dom.count('<svg class="chart"') == 14  # thirteen named charts and one more metric
    drawn = Counter(re.findall(r'<polyline class="curve (raw )?', dom))
    assert drawn[""] >= 14
    assert drawn["raw "] >= 5
    assert "<title>RL step" not in dom, "the script has taken over from the SVG titles"


def test_an_attack_would_be_noticed(tmp_path: Path, outside: tuple[str, list[str]]) -> None:
    """The same attack on a page without escaping or policy reaches the server, so the test above can fail."""
    url, asked = outside
    page = tmp_path / "page.html"
    page.write_text(f"<!doctype html><title>fine</title><img src='{url}/seen'><script>document.title='owned'</script>")
    dom = browse(page, tmp_path / "profile", "--dump-dom")
    assert "<title>owned</title>" in dom
    assert asked == ["/seen"]


@pytest.mark.parametrize("width", [1200, 500])
def test_a_screenshot_has_the_colours_of_both_stages_and_no_sideways_scrolling(
    synthetic_run: Callable[..., Path], tmp_path: Path, width: int
) -> None:
    report = write_report(synthetic_run())
    picture = tmp_path / "report.png"
    browse(report, tmp_path / "profile", f"--screenshot={picture}", f"--window-size={width},900")
    size, pixels = decode_png(picture.read_bytes())
    assert size == (width, 900)
    colours = Counter(pixels)
    assert colours[(0xB7, 0x66, 0x0B)] > 200, "the bar after SFT"
    assert colours[(0x0A, 0x74, 0x89)] > 200, "the bar after RL"
    edge = Counter(pixels[width - 1 :: width])
    assert set(edge) == {(0xF3, 0xF6, 0xF7)}, "nothing reaches over the right margin of the page"
