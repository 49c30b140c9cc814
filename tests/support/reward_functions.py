"""Reward functions that the contract of reward runners calls, in this process or in another."""

from headrace.errors import RewardError
from headrace.types import Episode


def quarters(episode: Episode) -> float:
    return float(episode.task.data["answer"]) / 4


def unknown_for_the_second(episode: Episode) -> float:
    if episode.id == "0/1":
        raise RewardError("the judge is out")
    return 0.0


def from_the_world(episode: Episode) -> float:
    return episode.env_reward
