"""Rewards, credit and rows as a run file says them, in a real run of a tiny model; and set-ups that end one."""

import json
from pathlib import Path
from typing import Any

import pytest

from headrace import wiring
from headrace.errors import ConfigError, DataError, RolloutError
from headrace.observe.rollouts.files import load_trajectories
from headrace.observe.run_folder import RunFolder
from headrace.types import CreditedEpisode
from headrace.wiring.checked_config import load_checked

RUN = """
[model]
path = "tiny"
tiny = { width = 32, layers = 1, heads = 2, kv_heads = 1, context = 160 }

[sft]
steps = 10
batch_size = 8
max_tokens = 128
sources = [{ type = "env", name = "frozen_lake", size = 20, options = { side = 3, holes = 1, mistake_rate = 0.5 } }]
optimizer = { learning_rate = 1e-2 }

[rl]
steps = 2
groups = 4
group_size = 4
max_turns = 4
max_prompt_tokens = 32
max_episode_tokens = 128
credit = "gigpo"
credit_params = { gamma = 0.9, omega = 0.5, norm = "none" }
tasks = { type = "env", name = "frozen_lake", size = 20, options = { side = 3, holes = 1, min_optimal = 1 } }
sampling = { max_tokens = 3 }

[run]
folder = "runs"
tensorboard = false
"""
MINE = """
def row(step, episode):
    return step.state.split(",")[0]

def start(step, episode):
    return episode.steps[0].state

def broken(messages, **kwargs):
    raise ValueError("no idea")

def turns(messages, **kwargs):
    return len([message for message in messages if message["role"] == "assistant"]) / 10
"""


def train(folder: Path, *overrides: str) -> tuple[list[dict[str, Any]], Path]:
    """The metrics of every training step, and the run folder."""
    (folder / "run.toml").write_text(RUN)
    (folder / "mine.py").write_text(MINE)
    where = f"run.folder={json.dumps(str(folder / 'runs'))}"
    config = load_checked(folder / "run.toml", [where, *overrides], command="train")
    result = wiring.train(config, config_text_path=folder / "run.toml", resume=None)
    run = RunFolder.open(result.folder)
    records = [json.loads(line) for line in run.metrics.read_text(encoding="utf-8").splitlines()]
    return [record for record in records if "reward/mean" in record], result.folder


def credited(folder: Path) -> list[CreditedEpisode]:
    episodes = load_trajectories(RunFolder.open(folder).step_rollouts(1))
    return [episode for episode in episodes if isinstance(episode, CreditedEpisode)]


def test_rewards_are_summed_by_weight_and_each_has_its_curve(tmp_path: Path) -> None:
    steps, folder = train(
        tmp_path,
        'rl.rewards=[{fn="mine.py:turns", weight=2.0}, {fn="length", weight=0.5, kwargs={max_tokens=12, margin=12}}, '
        '{fn="format", weight=0.0, kwargs={pattern="go .*", turns="all"}}, {fn="valid_actions", weight=0.25}]',
        'rl.reward_source="sum"',
        'rl.reward_runner.fork="group"',
    )
    for values in steps:
        weighted = 2.0 * values["reward/turns"] + 0.5 * values["reward/length"] + 0.25 * values["reward/valid_actions"]
        assert values["reward/mean"] == pytest.approx(weighted + values["reward/env"])
        assert -1.0 <= values["reward/length"] < 0.0
        assert 0.0 <= values["reward/format"] <= 1.0
    assert "Rewards by term" in (folder / "report.html").read_text(encoding="utf-8")


def test_a_users_anchor_and_rows_of_steps(tmp_path: Path) -> None:
    steps, folder = train(tmp_path, 'rl.anchor="mine.py:row"', 'rl.sequence_unit="step"')
    parts = [part for episode in credited(folder) for part in episode.parts or ()]
    assert {part.anchor for part in parts} <= {"0", "1", "2"}
    assert all(values["credit/anchored_step_share"] == 1.0 for values in steps)
    for episode in credited(folder):
        for advantage, part in zip(episode.advantages, episode.parts or (), strict=True):
            assert advantage == pytest.approx(part.episode + 0.5 * part.step)


def test_rows_of_steps_and_of_episodes_make_the_same_update(tmp_path: Path) -> None:
    """Every token has the same context and advantage, so the first loss and gradient are equal but for rounding."""
    (whole, *_), _ = train(tmp_path, "rl.steps=1")
    (parts, *_), _ = train(tmp_path, "rl.steps=1", 'rl.sequence_unit="step"')
    assert parts["loss/total"] == pytest.approx(whole["loss/total"], abs=1e-6)
    assert parts["train/grad_norm"] == pytest.approx(whole["train/grad_norm"], rel=1e-4)
    assert whole["train/grad_norm"] > 0


@pytest.mark.parametrize(("rule", "low", "high"), [("keep", 0.0, 1.0), ("penalty", -2.0, 1.0)])
def test_episodes_that_a_limit_cut_off_cost_what_the_file_says(
    tmp_path: Path, rule: str, low: float, high: float
) -> None:
    penalty = ["rl.truncated_penalty=2.0"] if rule == "penalty" else []
    _, folder = train(tmp_path, "rl.steps=1", f'rl.truncated_reward="{rule}"', *penalty)
    totals = {(e.scored.episode.truncated, e.scored.reward.total) for e in credited(folder)}
    assert (True, low) in totals
    assert {total for truncated, total in totals if not truncated} <= {0.0, high}


def test_an_anchor_that_is_the_start_ends_the_run_whose_last_rollouts_can_be_looked_at(tmp_path: Path) -> None:
    with pytest.raises(RolloutError, match="one and the same state within its group"):
        train(tmp_path, 'rl.anchor="mine.py:start"', "rl.steps=20")
    (folder,) = (tmp_path / "runs").iterdir()
    run = RunFolder.open(folder)
    done = [json.loads(line) for line in run.metrics.read_text(encoding="utf-8").splitlines()]
    stopped_in = 1 + sum("reward/mean" in record for record in done)
    saved = load_trajectories(run.step_rollouts(stopped_in))
    assert {part.anchor for one in saved if isinstance(one, CreditedEpisode) for part in one.parts or ()}
    assert not run.step_rollouts(stopped_in + 1).exists()


def test_a_reward_function_that_always_fails_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(
        RolloutError, match=r"of the last \d+ episodes have no reward.*ValueError: no idea.*Correct the"
    ):
        train(tmp_path, 'rl.rewards=[{fn="mine.py:broken"}]', 'rl.reward_runner.type="inprocess"')


LATER = """
def none():
    return []

def numbers():
    return [1, 2]

def lost():
    raise KeyError("gone")

def score(messages, **kwargs):
    return 1.0

def torn(rewards, groups, *, gamma=1.0, omega=1.0, norm="std"):
    return [0.0]

unfit = 3
"""
PYTHON = '{{ type = "python", path = "later.py:{}", env = "later.py:score" }}'
LAKE = '{ type = "env", name = "frozen_lake", size = 20, options = { side = 1 } }'
ELSEWHERE = "import nowhere_at_all\n\ndef score(messages, **kwargs):\n    return 1.0\n"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (f"rl.tasks={LAKE}", "a side is 2 to 10 long"),
        (f"eval.source={LAKE}", "a side is 2 to 10 long"),
        (f"rl.tasks={PYTHON.format('none')}", "has no rows"),
        (f"rl.tasks={PYTHON.format('lost')}", "KeyError: 'gone'"),
        (f"rl.tasks={PYTHON.format('unfit')}", "unfit is not a function"),
        (f"eval.source={PYTHON.format('numbers')}", "a row must be a dict"),
        (
            f"reward_model={{ steps = 1, max_tokens = 64, sources = [{PYTHON.format('numbers')}] }}",
            "a row must be a dict",
        ),
        ('rl.generate_fn="later.py:unfit"', "unfit is not a function"),
        ('rl.filters=[{ fn = "later.py:unfit" }]', "unfit is not a function"),
        ('rl.anchor="later.py:unfit"', "unfit is not a function"),
        ('rl.save.which="later.py:unfit"', "unfit is not a function"),
        (
            'rl.async={ select = "best", max_staleness = 1, oversampling = 2.0, select_score = "later.py:unfit" }',
            "unfit is not",
        ),
        ('rl.credit="later.py:unfit"', "unfit is not a function"),
        ('rl.credit="later.py:score"', r"takes \(messages\): write it as function\(rewards, groups\)"),
        ('rl.credit="later.py:torn"', r"credit .*later\.py:torn returned a list of 1 numbers for 4 episodes"),
        ('rl.async.limits=["later.py:unfit"]', "unfit is not a function"),
        ('rl.async.limits=["later.py:none"]', r"none cannot be called as function\(counts\)"),
        ('rl.rewards=[{ fn = "elsewhere.py:score" }]', "nowhere_at_all"),
    ],
)
def test_what_later_stages_need_is_looked_at_before_the_first_is_trained(
    tmp_path: Path, override: str, said: str
) -> None:
    (tmp_path / "later.py").write_text(LATER)
    (tmp_path / "elsewhere.py").write_text(ELSEWHERE)
    with pytest.raises((ConfigError, DataError), match=said):
        train(tmp_path, override, 'rl.reward_runner.type="inprocess"')
    assert not list((tmp_path / "runs").glob("*")), "a start that failed leaves no run folder"


LIMITS = """
def two(counts):
    with open("told.txt", "a") as file:
        file.write(f"{counts.running} {counts.ready} {counts.training}\\n")
    return 2 - counts.running

def full(counts):
    raise OSError("no space left")
"""


def test_limits_of_the_file_are_asked_and_only_lower_what_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "limits.py").write_text(LIMITS)
    monkeypatch.chdir(tmp_path)
    steps, _ = train(tmp_path, 'rl.async={ max_staleness = 1, limits = ["limits.py:two"] }', "rl.credit_params={}")
    assert len(steps) == 2
    told = [tuple(map(int, line.split())) for line in (tmp_path / "told.txt").read_text().splitlines()]
    assert told[0] == (0, 0, 0)
    assert max(running for running, _, _ in told) == 2, "without the limit, eight groups would run"


def test_a_limit_that_raises_ends_the_run_and_is_named(tmp_path: Path) -> None:
    (tmp_path / "limits.py").write_text(LIMITS)
    with pytest.raises(
        RolloutError, match=r"the limit .*limits\.py:full failed with 0 groups running: OSError: no space"
    ):
        train(tmp_path, 'rl.async.limits=["limits.py:full"]')


CREDIT = """
def leave_last(table, *, scale=1.0):
    return scale * table.reward_S * table.last_S
"""


def test_a_credit_method_of_the_file_gives_the_advantages_that_are_trained(tmp_path: Path) -> None:
    (tmp_path / "credit.py").write_text(CREDIT)
    _, folder = train(
        tmp_path, 'rl.credit="credit.py:leave_last"', "rl.credit_params={ scale = 4.0 }", "rl.anchor=state"
    )
    episodes = credited(folder)
    for episode in episodes:
        *before, last = episode.advantages
        assert before == [0.0] * (len(episode.advantages) - 1)
        assert last == 4.0 * episode.scored.reward.total
    assert any(episode.advantages[-1] for episode in episodes)


def test_a_scalar_baseline_is_taken_off_rewards_and_needs_no_group(tmp_path: Path) -> None:
    _, folder = train(tmp_path, "rl.credit=reinforce", "rl.credit_params={ baseline = 0.25 }", "rl.group_size=1")
    for episode in credited(folder):
        assert set(episode.advantages) == {episode.scored.reward.total - 0.25}
