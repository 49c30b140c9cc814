"""Credit in the log."""

import logging

import pytest

from headrace.algo.advantages.credit import credit
from headrace.loops.credit_log import log_credit
from headrace.types import (
    Completion,
    CreditedEpisode,
    EndReason,
    Episode,
    FailedEpisode,
    Group,
    Reward,
    ScoredEpisode,
    Step,
    StopReason,
    Task,
    float_array,
    int_array,
)


def groups() -> list[Group]:
    logprobs = float_array([-0.5])
    completion = Completion(
        tokens=int_array([1]),
        sampler_logprobs=logprobs,
        raw_logprobs=logprobs,
        versions=int_array([0]),
        stop=StopReason.STOP,
    )
    task = Task(id="t\n1")

    def episode(id: str, states: str, total: float) -> ScoredEpisode:
        steps = tuple(Step(prompt=int_array([0]), completion=completion, action="a", state=state) for state in states)
        ended = EndReason.DONE if total else None  # None: a rollout of the user's own did not say
        played = Episode(id=id, task=task, seed=0, steps=steps, messages=(), temperature=1.0, ended=ended)
        return ScoredEpisode(episode=played, reward=Reward(total=total))

    lost = FailedEpisode(id="3/2", task=task, reason="the world ended")
    return [Group(id=3, task=task, episodes=(episode("3/0", "SA", 1.0), episode("3/1", "S", 0.0)), failed=(lost,))]


def told(caplog: pytest.LogCaptureFixture, level: int, episodes: tuple[CreditedEpisode, ...]) -> list[tuple[str, str]]:
    with caplog.at_level(level, logger="headrace.loops.credit_log"):
        log_credit(groups(), episodes)
    return [(record.levelname, record.getMessage()) for record in caplog.records]


def test_a_group_is_one_line_at_info(caplog: pytest.LogCaptureFixture) -> None:
    credited = credit(groups(), method="gigpo", params={"gamma": 0.5, "norm": "none"}).episodes
    assert told(caplog, logging.INFO, credited) == [
        ("INFO", r"group 3, task 't\n1': R 1 0, lengths 2 1, ended done -, A_E +0.5 -0.5, 1 failed")
    ]


def test_debug_says_how_every_advantage_came_to_be(caplog: pytest.LogCaptureFixture) -> None:
    # G of 3/0 is 0.5, 1; of 3/1 it is 0. S: {0.5, 0}, A: {1}
    credited = credit(groups(), method="gigpo", params={"gamma": 0.5, "norm": "none"}).episodes
    assert told(caplog, logging.DEBUG, credited)[1:] == [
        ("DEBUG", "episode 3/0: 2 steps, 2 tokens, ended by done, final score 1, no verdict"),
        ("DEBUG", "episode 3/0, step 0: A +0.75 = A_E +0.5 with A_S +0.25: G 0.5, anchor 'S', 2 peers"),
        ("DEBUG", "episode 3/0, step 1: A +0.5 = A_E +0.5 with A_S +0: G 1, anchor 'A', 1 peers"),
        ("DEBUG", "episode 3/1: 1 steps, 1 tokens, ended by -, final score 0, no verdict"),
        ("DEBUG", "episode 3/1, step 0: A -0.75 = A_E -0.5 with A_S -0.25: G 0, anchor 'S', 2 peers"),
    ]


def test_advantages_of_a_critic_have_no_parts(caplog: pytest.LogCaptureFixture) -> None:
    (group,) = groups()
    episodes = tuple(
        CreditedEpisode(scored=scored, group_id=3, advantages=(0.5,) * n, values=(0.25,) * n)
        for scored in group.episodes
        for n in (len(scored.episode.steps),)
    )
    lines = told(caplog, logging.DEBUG, episodes)
    assert lines[0] == ("INFO", r"group 3, task 't\n1': R 1 0, lengths 2 1, ended done -, 1 failed")
    assert lines[2] == ("DEBUG", "episode 3/0, step 0: A +0.5, V 0.25")


def test_nothing_is_said_where_nobody_listens(caplog: pytest.LogCaptureFixture) -> None:
    assert told(caplog, logging.WARNING, credit(groups(), method="grpo").episodes) == []
