"""The report in a real browser: what a reader gets, not what we meant to write."""

import os
import re
import shutil
import struct
import subprocess
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.observe.report.run_report import write_report

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="no chromium binary is installed (Debian: apt install chromium)"
)


def browse(page: Path, profile: Path, *options: str) -> str:
    """Open the page in a fresh headless browser and return what it prints."""
    assert BROWSER is not None
    flags = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--hide-scrollbars",
        f"--user-data-dir={profile}",
    )
    command = [BROWSER, *flags, *options, page.as_uri()]
    home = {**os.environ, "HOME": str(profile), "XDG_CONFIG_HOME": str(profile), "XDG_CACHE_HOME": str(profile)}
    done = subprocess.run(command, capture_output=True, timeout=90, check=True, env=home)
    return done.stdout.decode()


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


def decode_png(data: bytes) -> tuple[tuple[int, int], list[tuple[int, int, int]]]:
    """Size and RGB pixels of an 8-bit PNG that is not interlaced."""
    at, chunks = 8, b""
    width = height = channels = 0
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        if kind == b"IHDR":
            width, height, depth, colour, _, _, interlaced = struct.unpack(">IIBBBBB", body)
            assert (depth, interlaced) == (8, 0)
            channels = {2: 3, 6: 4}[colour]
        elif kind == b"IDAT":
            chunks += body
        at += 12 + length
    raw, stride = zlib.decompress(chunks), width * channels
    before = bytearray(stride)
    pixels: list[tuple[int, int, int]] = []
    for row in range(height):
        start = row * (stride + 1)
        line = _unfilter(raw[start], bytearray(raw[start + 1 : start + 1 + stride]), before, channels)
        pixels += [(line[x], line[x + 1], line[x + 2]) for x in range(0, stride, channels)]
        before = line
    return (width, height), pixels


def _unfilter(kind: int, line: bytearray, above: bytearray, channels: int) -> bytearray:
    for x in range(len(line)):
        left = line[x - channels] if x >= channels else 0
        corner = above[x - channels] if x >= channels else 0
        up = above[x]
        if kind == 1:
            guess = left
        elif kind == 2:
            guess = up
        elif kind == 3:
            guess = (left + up) // 2
        elif kind == 4:
            ahead = left + up - corner
            guess = min((left, up, corner), key=lambda value: abs(ahead - value))
        else:
            break
        line[x] = (line[x] + guess) & 255
    return line
