"""Rewards that cannot teach are told once after ten steps, with the count, and again when it is ten times that."""

import logging

import pytest

from headrace.reward.reward_health import RewardHealth, reward_findings
from headrace.types import FailedEpisode, Group, Reward, ScoredEpisode, Task
from support.reward_episodes import episode


def group(*totals: float, failed: int = 0, **parts: tuple[float, ...]) -> Group:
    task = Task(id="t")
    episodes = tuple(
        ScoredEpisode(
            episode=episode("x"), reward=Reward(total=total, parts={name: of[place] for name, of in parts.items()})
        )
        for place, total in enumerate(totals)
    )
    lost = tuple(FailedEpisode(id=f"f{number}", task=task, reason="it raised") for number in range(failed))
    return Group(id=0, task=task, episodes=episodes, failed=lost)


def test_a_step_is_described_by_what_its_rewards_lack() -> None:
    assert reward_findings([group(0.0, 1.0)]) == {}
    assert "all 4 episodes have the same reward, 0.5" in reward_findings([group(0.5, 0.5), group(0.5, 0.5)])["equal"]
    assert reward_findings([group(-1.0, -0.5)])["negative"] == "no reward of 2 episodes is above 0 (the best is -0.5)"
    assert reward_findings([group(failed=3)])["failed"].startswith("none of 3 episodes has a reward")
    mixed = reward_findings([group(0.0, 1.0, right=(0.0, 0.0), form=(0.0, 1.0))])
    assert set(mixed) == {"part right"}
    assert mixed["part right"].startswith("the reward right is 0 for all 2 episodes")


def test_a_finding_is_told_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    health = RewardHealth()
    with caplog.at_level(logging.WARNING):
        for _ in range(9):
            health.check([group(1.0, 1.0)])
        health.check([group(0.0, 1.0)])  # some contrast: counting begins again
        assert not caplog.records
        for _ in range(100):
            health.check([group(1.0, 1.0)])
    told = [record.getMessage() for record in caplog.records]
    assert [text.rpartition(", ")[2] for text in told] == [
        "in 10 training steps in a row",
        "in 100 training steps in a row",
    ]
