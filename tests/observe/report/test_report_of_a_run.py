"""The report that a real, small run of both stages leaves behind, in a real browser where there is one."""

import html
import json
import re
from pathlib import Path

import pytest

from headrace import wiring
from headrace.wiring.checked_config import load_checked
from support.chromium import browse, needs_chromium

CONFIG = """
[run]
name = "small"
tensorboard = false
[model.tiny]
width = 32
layers = 1
heads = 2
kv_heads = 1
context = 256
[engine]
max_num_seqs = 8
[sft]
steps = 3
batch_size = 4
max_tokens = 200
sources = [{ type = "env", name = "key_door", size = 12, seed = 1 }]
[rl]
steps = 2
groups = 2
group_size = 2
max_turns = 3
max_prompt_tokens = 64
max_episode_tokens = 200
tasks = { type = "env", name = "key_door", size = 12, seed = 2 }
[rl.sampling]
max_tokens = 4
[eval]
tasks = 4
source = { type = "env", name = "key_door", size = 8, seed = 3, options = { split = "held_out" } }
"""


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> wiring.RunResult:
    folder = tmp_path_factory.mktemp("run")
    (folder / "run.toml").write_text(CONFIG)
    config = load_checked(folder / "run.toml", [f"run.folder={json.dumps(str(folder / 'runs'))}"], command="train")
    return wiring.train(config, config_text_path=folder / "run.toml", resume=None)


def check_page(page: str, result: wiring.RunResult) -> None:
    """Both stages, and for a held-out task the very actions that were played before and after."""
    assert "Episodes, before and after" in page
    shown = re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", page)))
    assert "After SFT" in shown
    assert "After RL" in shown
    for label in ("sft", "rl"):
        lines = (result.folder / "rollouts" / f"eval_{label}.jsonl").read_text().splitlines()
        played = [json.loads(line) for line in lines]
        assert len(played) == 4
        assert not any(episode["success"] for episode in played), "so the first task is the one that is shown"
        for message in played[0]["messages"]:
            assert " ".join(message["content"].split()) in shown


def test_the_report_has_before_and_after(result: wiring.RunResult) -> None:
    check_page(result.report.read_text(), result)


@needs_chromium
def test_the_browser_shows_before_and_after(result: wiring.RunResult, tmp_path: Path) -> None:
    dom = browse(result.report, tmp_path / "profile", "--dump-dom")
    assert 'data-ready="yes"' in dom
    assert "<title>small · Headrace report</title>" in dom
    assert dom.count('<svg class="chart"') >= 5
    check_page(dom, result)
