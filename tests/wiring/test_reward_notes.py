"""Reasons and metrics that reward functions return: in the log, the files, the pages and the search."""

import io
import json
import logging
from pathlib import Path

import pytest
from rich.console import Console

from headrace import wiring
from headrace.errors import ConfigError
from headrace.observe.rollouts.files import load_trajectories
from headrace.observe.rollouts.records import iter_lines
from headrace.observe.viewer.query import ViewQuery, view, write_page
from headrace.wiring.checked_config import load_checked
from headrace.wiring.commands.recredit import RecreditRequest, recredit

RUN = """
[model]
path = "tiny"
tiny = { width = 32, layers = 1, heads = 2, kv_heads = 1, context = 160 }

[rl]
steps = 1
groups = 1
group_size = 2
max_turns = 2
max_prompt_tokens = 64
max_episode_tokens = 128
tasks = { type = "env", name = "key_door", size = 4 }
rewards = [{ fn = "judge.py:judge", name = "referee" }]
sampling = { max_tokens = 3 }

[run]
tensorboard = false
"""
JUDGE = """
from reward_kit import EvaluateResult, MetricResult, StepOutput, reward_function

@reward_function
def judge(messages, ground_truth=None, **kwargs):
    places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    return EvaluateResult(
        score=0.5,
        reason="the door stayed shut",
        metrics={"calm": MetricResult(score=0.25, reason="no shouting", is_score_valid=True)},
        step_outputs=[
            StepOutput(step_index=place, base_reward=0.5 * number, reason=f"move {number} <b>",
                       metrics={"distance": 3 - number})
            for number, place in enumerate(places)
        ],
    )
judge.step_index = "message"
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("notes")
    (folder / "run.toml").write_text(RUN)
    (folder / "judge.py").write_text(JUDGE)
    where = f"run.folder={json.dumps(str(folder / 'runs'))}"
    config = load_checked(folder / "run.toml", [where], command="train")
    logger = logging.getLogger("headrace")
    level = logger.level
    logger.setLevel(logging.DEBUG)
    try:
        return wiring.train(config, config_text_path=folder / "run.toml", resume=None).folder
    finally:
        logger.setLevel(level)


def shown(query: ViewQuery) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    for part in view(query, width=200, colour=False):
        console.print(part)
    return console.export_text()


def test_they_are_in_the_rollout_files_and_load_back_equal(run: Path, tmp_path: Path) -> None:
    file = run / "rollouts" / "step_000001.jsonl"
    line = next(iter_lines(file))
    assert [(note.term, note.step, note.reason, note.metrics) for note in line.reward.notes] == [
        ("referee", None, "the door stayed shut", {"calm": {"reason": "no shouting"}}),
        ("referee", 0, "move 0 <b>", {"distance": 3}),
        ("referee", 1, "move 1 <b>", {"distance": 2}),
    ]
    assert line.reward.parts == {"referee": 0.5, "referee/calm": 0.25}
    again = recredit(RecreditRequest(path=file, method="grpo", out=tmp_path / "again.jsonl")).out
    for before, after in zip(load_trajectories(file), load_trajectories(again), strict=True):
        assert before.scored.reward == after.scored.reward  # type: ignore[union-attr]


def test_they_are_in_the_log_with_what_the_aligner_made_of_them(run: Path) -> None:
    log = (run / "log.txt").read_text(encoding="utf-8")
    line = next(line for line in log.splitlines() if "DEBUG headrace.reward.alignment" in line)
    assert line.endswith(
        "reward referee of episode 0/0: score 0.5, metrics calm 0.25, step outputs 1: 0, 3: 0.5 -> r_t 0 0.5"
    )
    assert "reward referee of episode 0/0: reason 'the door stayed shut', metrics {'calm': {'reason': 'no sh" in log
    assert "reward referee of episode 0/0, step 1: reason 'move 1 <b>', metrics {'distance': 2}" in log


def test_they_are_shown_and_can_be_searched(run: Path, tmp_path: Path) -> None:
    text = shown(ViewQuery(path=run, episode="0/0"))
    assert 'referee: the door stayed shut; calm {"reason": "no shouting"}' in text
    assert "referee, step 1: move 1 <b>; distance 2" in text
    found = shown(ViewQuery(path=run, search="DISTANCE 2"))
    assert "episode 0/0," in found
    assert "episode 0/1," in found
    assert write_page(ViewQuery(path=run, search="no shouting"), tmp_path / "page.html") == 2
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "referee: move 1 &lt;b&gt;; distance 2" in page
    assert "the door stayed shut" in page
    with pytest.raises(ConfigError, match=r"no episode of .* has 'nothing like it' in its messages"):
        shown(ViewQuery(path=run, search="nothing like it"))


def test_they_are_in_the_report(run: Path) -> None:
    report = (run / "report.html").read_text(encoding="utf-8")
    assert "referee: the door stayed shut" in report
    assert "referee: move 1 &lt;b&gt;; distance 2" in report
