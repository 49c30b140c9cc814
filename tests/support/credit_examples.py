"""Episodes for the tests of credit: step tables from plain tuples, GiGPO's worked example, and walks through states."""

from collections.abc import Iterable

import numpy as np

from headrace.algo.advantages import StepTable
from headrace.types import (
    Completion,
    Episode,
    Group,
    Message,
    Reward,
    ScoredEpisode,
    Step,
    StopReason,
    Task,
    float_array,
    int_array,
)

Plain = tuple[int, list[int | None], list[float], bool]  # group, states, rewards, success


def table(episodes: Iterable[Plain], valid: list[bool] | None = None) -> StepTable:
    episodes = list(episodes)
    states = [state for _, row, _, _ in episodes for state in row]
    return StepTable(
        group_E=np.array([group for group, _, _, _ in episodes], dtype=np.int64),
        length_E=np.array([len(row) for _, row, _, _ in episodes], dtype=np.int64),
        tokens_E=np.array([len(row) for _, row, _, _ in episodes], dtype=np.int64),
        total_E=np.array([sum(rewards) for _, _, rewards, _ in episodes], dtype=np.float64),
        success_E=np.array([success for *_, success in episodes], dtype=bool),
        reward_S=np.array([reward for _, _, rewards, _ in episodes for reward in rewards], dtype=np.float64),
        state_S=np.array([-1 if state is None else state for state in states], dtype=np.int64),
        valid_S=np.array([True] * len(states) if valid is None else valid, dtype=bool),
    )


# one group, terminal reward 1 on success, gamma = 0.5:
#   t1: S A        success   G = 0.5, 1
#   t2: S B A      failure   G = 0, 0, 0
#   t3: S A D A    success   G = 0.125, 0.25, 0.5, 1
#   t4: S B        failure   G = 0, 0
# S {0.5, 0, 0.125, 0} mean 0.15625; A {1, 0, 0.25, 1} mean 0.5625; B {0, 0}; D {0.5}
S, A, B, D = range(4)


E1: list[Plain] = [
    (0, [S, A], [0, 1], True),
    (0, [S, B, A], [0, 0, 0], False),
    (0, [S, A, D, A], [0, 0, 0, 1], True),
    (0, [S, B], [0, 0], False),
]


SYSTEM = Message(role="system", content="You walk.")


def step(state: str | None = None, version: int = 0) -> Step:
    completion = Completion(
        tokens=int_array([1]),
        sampler_logprobs=float_array([-0.5]),
        raw_logprobs=float_array([-0.5]),
        versions=int_array([version]),
        stop=StopReason.STOP,
    )
    return Step(prompt=int_array([0]), completion=completion, action="a", state=state)


def walk(*shown: str, states: tuple[str | None, ...] = (), id: str = "0/0") -> Episode:
    """A conversation in which each step sees one of `shown`; the task has a system message."""
    turns = [(Message(role="user", content=text), Message(role="assistant", content="go")) for text in shown]
    return Episode(
        id=id,
        task=Task(id="t", messages=(SYSTEM,)),
        seed=0,
        steps=tuple(step(state) for state in states or (None,) * len(shown)),
        messages=(SYSTEM, *(message for turn in turns for message in turn)),
        temperature=1.0,
    )


def group(*episodes: Episode, rewards: tuple[float, ...], id: int = 0) -> Group:
    scored = (ScoredEpisode(episode=e, reward=Reward(total=r)) for e, r in zip(episodes, rewards, strict=True))
    return Group(id=id, task=Task(id="t"), episodes=tuple(scored))
