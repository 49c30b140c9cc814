"""A loss that diverged and a policy that collapsed are told once; a policy that learned is left alone."""

import logging
from collections.abc import Callable, Mapping

import pytest

from headrace.observe.sinks.training_health import TrainingHealth


def told(
    caplog: pytest.LogCaptureFixture, stage: str, values: Callable[[int], Mapping[str, float]], steps: int = 60
) -> list[str]:
    caplog.clear()
    health = TrainingHealth(stage)
    with caplog.at_level(logging.WARNING):
        for step in range(1, steps + 1):
            health.log(step, {"train/grad_norm": 1.0, **values(step)})
    health.close()
    return [record.getMessage() for record in caplog.records]


def test_a_loss_that_explodes_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """As a run with a learning rate of 100: 5.86, then a million, then 5.86 for ever."""
    losses = {1: 5.86, 2: 1212179.0}
    assert told(caplog, "sft", lambda step: {"loss/total": losses.get(step, 5.86)}) == [
        "sft: the loss of step 2 is 1.212e+06; the best was 5.86: lower the learning rate, or look at the data"
    ]


def test_a_loss_that_rises_and_stays_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    # the best mean: (2/20 + ... + 2/29) / 10 = 0.0828; at 33, (2/24 + ... + 2/29 + 4 * 3) / 10 = 1.245 > 2 * 0.0828 + 1
    [said] = told(caplog, "sft", lambda step: {"loss/total": 2.0 / step if step < 30 else 3.0})
    assert said.startswith("sft: the loss was 1.245 ")
    assert said.endswith("over 10 steps up to 33; the best was 0.08278: lower the learning rate, or look at the data")


@pytest.mark.parametrize("loss", [lambda step: 2.0 / step, lambda step: 1.0 + step % 2, lambda step: 0.01 * step % 0.5])
def test_a_loss_that_falls_or_is_noisy_is_not_told(
    caplog: pytest.LogCaptureFixture, loss: Callable[[int], float]
) -> None:
    assert told(caplog, "sft", lambda step: {"loss/total": loss(step)}) == []
    assert told(caplog, "rl", lambda step: {"loss/total": 100.0 * step, "reward/mean": 0.0}) == [], (
        "of no meaning in rl"
    )


def policy(step: int, *, reward: float, left: float) -> Mapping[str, float]:
    """Numbers that fall to `left` of what they were after step 20."""
    share = 1.0 if step <= 20 else left
    return {"reward/mean": reward, "rollout/entropy": 1.2 * share, "rollout/length_mean": 200 * share}


def test_a_policy_that_collapses_is_told_once_for_each_sign(caplog: pytest.LogCaptureFixture) -> None:
    entropy, length = told(caplog, "rl", lambda step: policy(step, reward=0.3, left=0.01))
    assert entropy.startswith("rl: the policy has collapsed: the mean entropy of its answers fell from 1.2 to 0.")
    assert length.startswith("rl: the policy has collapsed: the mean length of its answers fell from 200 to ")
    assert told(caplog, "rl", lambda step: policy(step, reward=0.3, left=0.3)) == []
    assert told(caplog, "rl", lambda step: policy(step, reward=0.1 * step, left=0.01)) == [], "it has learned"


def test_one_answer_to_everything_and_answers_without_an_end_are_told(caplog: pytest.LogCaptureFixture) -> None:
    same = told(caplog, "rl", lambda step: {"reward/mean": 0.0, "rollout/same_answer": 0.95 if step > 30 else 0.2})
    assert same == [
        "rl: the policy has collapsed: 95% of the episodes have one and the same answer to different tasks, for 10 "
        "steps up to 40: lower the learning rate, raise the temperature, or add a KL term or an entropy bonus"
    ]
    [cut] = told(caplog, "rl", lambda step: {"reward/mean": 0.0, "rollout/ended_max_tokens": 1.0})
    assert cut.startswith("rl: 100% of the episodes ran into a limit of tokens, for 10 steps up to 10")
