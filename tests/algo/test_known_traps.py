"""Mistakes that systems like this one have shipped with; each is tried here and must have no effect."""

import numpy as np
import pytest
import torch

from headrace.algo.advantages import credit, grpo, token_gae
from headrace.algo.datum import shift
from headrace.algo.loss_signature import loss_inputs
from headrace.algo.losses import LOSSES
from headrace.types import Episode, Group, Reward, ScoredEpisode, Task, float_array, int_array


@pytest.mark.parametrize("name", ["ppo", "importance_sampling", "cispo", "sapo", "dro", "cross_entropy"])
def test_one_scalar_does_not_pass_for_logprobs(name: str) -> None:
    # a mean log-prob of the sequence would broadcast over every token and train all of them alike
    fn = LOSSES[name]
    rows = {f"{array}_T": torch.ones(4) for array in loss_inputs(fn).required}
    fn(torch.zeros(4), **rows)
    for scalar in (torch.tensor(-1.0), torch.tensor([-1.0])):
        with pytest.raises(AssertionError):
            fn(scalar, **rows)


@pytest.mark.parametrize("name", [name for name in LOSSES if "advantages" in loss_inputs(LOSSES[name]).required])
def test_no_policy_loss_takes_the_reference_for_the_sampler(name: str) -> None:
    # dividing by the reference policy instead of the one that sampled is a different, biased objective
    assert "reference_logprobs" not in loss_inputs(LOSSES[name]).required


def test_values_are_not_bootstrapped_across_padding() -> None:
    # two episodes padded to 3: a recursion over the padded rows would carry 100 from padding into the first
    out = token_gae(
        np.array([1.0, 0, 0, 1, 0, 0]),
        np.array([0.5, 100, 100, 0.5, 100, 100]),
        np.array([1, 0, 0, 1, 0, 0]),
        np.array([3, 3]),
        np.zeros(2),
    )
    assert out.advantages.tolist() == [0.5, 0, 0, 0.5, 0, 0]


def scored(total: float) -> ScoredEpisode:
    episode = Episode(id="e", task=Task(id="t"), seed=0, steps=(), messages=(), temperature=1.0)
    return ScoredEpisode(episode=episode, reward=Reward(total=total))


def test_groups_are_explicit_not_every_n_rows() -> None:
    # one episode of the first group failed, so groups have 3 and 4 members; a stride of 4 would mix them
    rewards = np.array([1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0])
    groups = np.array([0, 0, 0, 1, 1, 1, 1])
    assert grpo(rewards, groups).values.tolist() == [0.0] * 7
    groups_of_episodes = [
        Group(id=number, task=Task(id="t"), episodes=tuple(scored(total) for total in totals))
        for number, totals in enumerate([(1.0, 1.0, 1.0), (0.0, 0.0, 0.0, 0.0)])
    ]
    credited = credit(groups_of_episodes, method="grpo")
    assert credited.health["credit/zero_variance_share"].value() == 1.0
    assert [episode.group_id for episode in credited.episodes] == [0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize(("value", "count"), [(6.98337, 7), (5.688, 11)])
def test_equal_rewards_in_float32_stay_equal(value: float, count: int) -> None:
    # in float32, (x - mean) / (std + 1e-6) of these gives 0.31 and 0.48
    rewards = np.full(count, value, dtype=np.float32)
    assert grpo(rewards, np.zeros(count, dtype=int)).values.tolist() == [0.0] * count


def test_labels_are_shifted_once_and_only_once() -> None:
    # position t reads tokens up to t and is asked for token t + 1, with the log-prob and the weight of that token
    tokens = int_array([11, 12, 13, 14])
    arrays = {"weights": float_array([0.0, 0.0, 1.0, 2.0]), "sampler_logprobs": float_array([9.0, 9.0, -0.3, -0.4])}
    datum = shift(tokens, arrays)
    assert (datum.inputs.tolist(), datum.targets.tolist()) == ([11, 12, 13], [12, 13, 14])
    assert datum.arrays["weights"].tolist() == [0.0, 1.0, 2.0]
    assert datum.arrays["sampler_logprobs"].tolist() == pytest.approx([9.0, -0.3, -0.4])
    # a model that knows the next token has no loss; one that repeats its input (right for unshifted labels) has
    next_token = torch.zeros(3, 20).scatter_(1, torch.tensor(datum.targets).long()[:, None], 50.0)
    same_token = torch.zeros(3, 20).scatter_(1, torch.tensor(datum.inputs).long()[:, None], 50.0)
    losses = []
    for logits in (next_token, same_token):
        picked = torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(datum.targets).long()[:, None])[:, 0]
        losses.append(float(LOSSES["cross_entropy"](picked, torch.tensor(datum.arrays["weights"])).loss))
    assert losses == [pytest.approx(0.0, abs=1e-6), pytest.approx(150.0)]
