"""What an advantage was made of comes along with it: G, A_E, A_S, the anchor and its size."""

from dataclasses import replace

import numpy as np
import pytest

from headrace.algo.advantages import METHODS, credit
from headrace.types import (
    Completion,
    Episode,
    Group,
    Reward,
    ScoredEpisode,
    Step,
    StepCredit,
    StopReason,
    Task,
    float_array,
    int_array,
)


def episode(id: str, states: list[str | None], total: float, success: bool) -> ScoredEpisode:
    logprobs = float_array([-0.5])
    completion = Completion(
        tokens=int_array([1]),
        sampler_logprobs=logprobs,
        raw_logprobs=logprobs,
        versions=int_array([0]),
        stop=StopReason.STOP,
    )
    steps = tuple(Step(prompt=int_array([0]), completion=completion, action="a", state=state) for state in states)
    played = Episode(id=id, task=Task(id="t"), seed=0, steps=steps, messages=(), temperature=1.0, success=success)
    return ScoredEpisode(episode=played, reward=Reward(total=total))


def groups() -> list[Group]:
    mine = (episode("0/0", ["S", "A"], 1.0, True), episode("0/1", ["S", None, "A"], 0.0, False))
    return [Group(id=7, task=Task(id="t"), episodes=mine), Group(id=8, task=Task(id="u"), episodes=mine[:1])]


def test_parts_of_gigpo_by_hand() -> None:
    # gamma 0.5, mean only: G of 0/0 is 0.5, 1; of 0/1 it is 0. A_E = +-0.5. S: {0.5, 0}, A: {1, 0}; None is alone.
    # The second group has one episode and shares no anchor with the first, though its states have the same names.
    out = credit(groups(), method="gigpo", params={"gamma": 0.5, "norm": "none"})
    assert out.episodes[0].parts == (
        StepCredit(returns=0.5, episode=0.5, step=0.25, peers=2, anchor="S"),
        StepCredit(returns=1.0, episode=0.5, step=0.5, peers=2, anchor="A"),
    )
    assert out.episodes[1].parts == (
        StepCredit(returns=0.0, episode=-0.5, step=-0.25, peers=2, anchor="S"),
        StepCredit(returns=0.0, episode=-0.5, step=0.0, peers=0),
        StepCredit(returns=0.0, episode=-0.5, step=-0.5, peers=2, anchor="A"),
    )
    assert out.episodes[2].parts == (
        StepCredit(returns=0.5, episode=0.0, step=0.0, peers=1, anchor="S"),
        StepCredit(returns=1.0, episode=0.0, step=0.0, peers=1, anchor="A"),
    )


@pytest.mark.parametrize("method", [name for name in METHODS if name not in ("hgpo", "gagpo")])
def test_advantages_are_the_sum_of_their_parts(method: str) -> None:
    for credited in credit(groups(), method=method).episodes:
        assert credited.parts is not None
        sums = [part.episode + part.step for part in credited.parts]
        np.testing.assert_allclose(sums, credited.advantages, atol=1e-12)


def test_an_episode_level_method_has_returns_and_peers_too() -> None:
    first = credit(groups(), method="dr_grpo").episodes[0]
    both = StepCredit(returns=1.0, episode=0.5, step=0.0, peers=2)
    assert first.parts == (replace(both, anchor="S"), replace(both, anchor="A"))
