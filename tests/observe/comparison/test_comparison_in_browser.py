"""The page of a comparison in a real browser."""

import re
from pathlib import Path

from headrace.observe.comparison.arms import Arm, read_runs
from headrace.observe.comparison.compare_page import write_comparison
from headrace.observe.comparison.compared import compare_arms
from support.chromium import browse, needs_chromium
from support.made_up_run import make_run

pytestmark = needs_chromium


def test_the_browser_shows_every_part_and_runs_only_our_script(tmp_path: Path, outside: tuple[str, list[str]]) -> None:
    url, asked = outside
    attack = f"<script>document.title='owned'</script><img src='{url}/seen' onerror='alert(1)'>"
    runs = read_runs([make_run(tmp_path / name, note=attack) for name in ("a", "b", "c")])
    arms = [Arm(label="two seeds", runs=runs[:2]), Arm(label=attack, runs=runs[2:])]
    comparison = compare_arms(arms, lambda text, data: None)
    page = write_comparison(tmp_path / "compare.html", "demo", comparison)
    dom = browse(page, tmp_path / "profile", "--dump-dom")
    assert 'data-ready="yes"' in dom, "our own script ran under the content security policy"
    assert "<title>demo · Headrace comparison</title>" in dom
    assert asked == []
    headings = re.findall(r"<h[12][^>]*>([^<]+)<", dom)
    assert headings == ["demo", "Held-out tasks", "Final figures", "How they got there", "The same tasks, side by side"]
    assert {"arm0", "arm1"} <= set(re.findall(r'<polyline class="curve (arm\d)', dom))
    assert '<polygon class="area arm0"' in dom
    assert '<polygon class="area arm1"' not in dom, "a single run has no range"
