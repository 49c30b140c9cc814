"""Group-relative advantages of episodes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis.strategies import floats, integers, lists, permutations, sampled_from, tuples

from headrace.algo.advantages import (
    Advantages,
    credit,
    dr_grpo,
    grpo,
    lite_ppo,
    opo,
    reinforce_pp,
    reinforce_pp_baseline,
    rloo,
)
from headrace.errors import ConfigError
from headrace.metrics import metric_values
from headrace.types import (
    Completion,
    Episode,
    FailedEpisode,
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

METHODS = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo, "lite_ppo": lite_ppo}
ROWS = lists(tuples(floats(-100, 100), integers(0, 3)), min_size=1, max_size=24)


def run(name: str, rows: list[tuple[float, int]]) -> Advantages:
    return METHODS[name](np.array([reward for reward, _ in rows]), np.array([group for _, group in rows]))


def test_goldens() -> None:
    # group 7: rewards 1, 0, 1, 0: mean 0.5, sample std sqrt(1/3); group 2: 3, 5: mean 4, std sqrt(2); interleaved
    rewards, groups = np.array([1.0, 3.0, 0.0, 1.0, 5.0, 0.0]), np.array([7, 2, 7, 7, 2, 7])
    half = 0.5 / (np.sqrt(1 / 3) + 1e-6)
    one = 1.0 / (np.sqrt(2.0) + 1e-6)
    assert grpo(rewards, groups).values.tolist() == pytest.approx([half, -one, -half, half, one, -half])
    assert dr_grpo(rewards, groups).values.tolist() == [0.5, -1.0, -0.5, 0.5, 1.0, -0.5]
    # the mean of the others: 1 - 1/3, 3 - 5, 0 - 2/3
    assert rloo(rewards, groups).values.tolist() == pytest.approx([2 / 3, -2, -2 / 3, 2 / 3, 2, -2 / 3])


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(("value", "count"), [(6.98337, 7), (5.688, 11), (0.1, 3), (0.7, 1)])
def test_equal_rewards_give_exactly_zero(name: str, value: float, count: int) -> None:
    # float32 with an epsilon gives 0.31 for seven times 6.98337, and the raw reward for a group of one
    out = run(name, [(value, 0)] * count)
    assert out.values.tolist() == [0.0] * count
    assert metric_values(out.health)["credit/zero_variance_share"] == 1.0


@given(ROWS, sampled_from(sorted(METHODS)), integers(0, 2**31))
def test_row_order_does_not_matter_to_the_last_bit(rows: list[tuple[float, int]], name: str, seed: int) -> None:
    order = np.random.default_rng(seed).permutation(len(rows))
    shuffled = run(name, [rows[index] for index in order]).values
    assert shuffled.tolist() == run(name, rows).values[order].tolist()


@given(ROWS, sampled_from(sorted(METHODS)), permutations([5, -1, 900, 2]))
def test_labels_are_only_names(rows: list[tuple[float, int]], name: str, names: list[int]) -> None:
    renamed = run(name, [(reward, names[group]) for reward, group in rows])
    assert renamed.values.tolist() == run(name, rows).values.tolist()


@given(
    lists(tuples(integers(-20, 20), integers(0, 3)), min_size=1, max_size=24),
    sampled_from(sorted(METHODS)),
    integers(-9, 9),
)
def test_a_constant_shift_does_not_matter(rows: list[tuple[int, int]], name: str, shift: int) -> None:
    shifted = run(name, [(reward + shift, group) for reward, group in rows]).values
    np.testing.assert_allclose(shifted, run(name, rows).values, atol=1e-9)


@given(lists(tuples(integers(-20, 20), integers(0, 3)), min_size=1, max_size=24), floats(0.1, 10))
def test_grpo_ignores_scale_and_the_others_follow_it(rows: list[tuple[int, int]], scale: float) -> None:
    scaled = [(reward * scale, group) for reward, group in rows]
    np.testing.assert_allclose(run("grpo", scaled).values, run("grpo", rows).values, atol=1e-3)
    for name in ("dr_grpo", "rloo"):
        np.testing.assert_allclose(run(name, scaled).values, run(name, rows).values * scale, atol=1e-9)


@given(ROWS, sampled_from(sorted(METHODS)))
def test_every_group_sums_to_zero(rows: list[tuple[float, int]], name: str) -> None:
    values, groups = run(name, rows).values, np.array([group for _, group in rows])
    for group in set(groups.tolist()):
        assert values[groups == group].sum() == pytest.approx(0, abs=1e-9)


def test_batch_normalised_forms_by_hand() -> None:
    # rewards 1, 3 | 0, 4: group means 2, 2; batch mean 2, sample std sqrt((1 + 1 + 4 + 4) / 3)
    rewards, groups = np.array([1.0, 3.0, 0.0, 4.0]), np.array([0, 0, 1, 1])
    scale = np.sqrt(10 / 3) + 1e-6
    expected = np.array([-1, 1, -2, 2]) / scale
    np.testing.assert_allclose(reinforce_pp(rewards, groups).values, expected)
    np.testing.assert_allclose(reinforce_pp_baseline(rewards, groups).values, expected)
    np.testing.assert_allclose(lite_ppo(rewards, groups).values, expected)
    # a shift of one group changes the batch form only: rewards 1, 3 | 10, 14
    moved = np.array([1.0, 3.0, 10.0, 14.0])
    np.testing.assert_allclose(reinforce_pp_baseline(moved, groups).values, expected)
    assert reinforce_pp(moved, groups).values[1] < 0 < reinforce_pp_baseline(moved, groups).values[1]
    for fn in (reinforce_pp, reinforce_pp_baseline, lite_ppo):
        assert fn(np.full(3, 0.7), np.zeros(3, dtype=int)).values.tolist() == [0.0] * 3


def test_opo_weighs_the_baseline_by_length() -> None:
    # rewards 1, 0 with 30 and 10 tokens: baseline 0.75; equal rewards stay exactly 0 whatever the lengths
    rewards, groups = np.array([1.0, 0.0, 0.3, 0.3]), np.array([0, 0, 1, 1])
    assert opo(rewards, groups, np.array([30, 10, 1, 7])).values.tolist() == [0.25, -0.75, 0.0, 0.0]
    np.testing.assert_allclose(opo(rewards, groups, np.array([5, 5, 5, 5])).values, dr_grpo(rewards, groups).values)


def test_opo_of_episodes_without_tokens_is_the_plain_mean() -> None:
    assert opo(np.array([1.0, 0.0]), np.zeros(2, dtype=int), np.zeros(2)).values.tolist() == [0.5, -0.5]


def test_groups_of_one_are_counted() -> None:
    # group 0 has three episodes, groups 1 and 2 one each; the first teaches
    health = metric_values(grpo(np.array([0.0, 1.0, 1.0, 3.0, 3.0]), np.array([0, 0, 0, 1, 2])).health)
    assert health["credit/single_episode_share"] == pytest.approx(2 / 3)
    assert health["credit/zero_variance_share"] == pytest.approx(2 / 3)
    assert health["credit/reward_mean"] == pytest.approx(8 / 5)
    # deviations -2/3, 1/3, 1/3 over std 1/sqrt 3: -1.1547, 0.5774, 0.5774
    assert health["credit/advantage_abs"] == pytest.approx(4 / 3 * np.sqrt(3) / 5, rel=1e-5)
    assert health["credit/advantage_std"] == pytest.approx(np.sqrt(2 / 5), rel=1e-5)


def test_no_rows() -> None:
    assert grpo(np.zeros(0), np.zeros(0, dtype=int)).values.tolist() == []


# --- credit ----------------------------------------------------------------------------------------------------------


def scored(total: float, num_steps: int) -> ScoredEpisode:
    logprobs = float_array([-1.0])
    completion = Completion(
        tokens=int_array([1]),
        sampler_logprobs=logprobs,
        raw_logprobs=logprobs,
        versions=int_array([0]),
        stop=StopReason.STOP,
    )
    step = Step(prompt=int_array([0]), completion=completion, action="a")
    episode = Episode(
        id="e",
        task=Task(id="t", messages=(Message(role="user", content="x"),)),
        seed=0,
        steps=(step,) * num_steps,
        messages=(),
        temperature=1.0,
    )
    return ScoredEpisode(episode=episode, reward=Reward(total=total))


def test_credit_broadcasts_over_steps_and_leaves_out_failures() -> None:
    task = Task(id="t")
    failed = FailedEpisode(id="f", task=task, reason="sandbox")
    groups = [
        Group(id=40, task=task, episodes=(scored(1.0, 2), scored(0.0, 1)), failed=(failed,)),
        Group(id=12, task=task, episodes=(scored(1.0, 1), scored(4.0, 3))),
    ]
    credited = credit(groups, method="dr_grpo")
    assert [episode.advantages for episode in credited.episodes] == [(0.5, 0.5), (-0.5,), (-1.5,), (1.5, 1.5, 1.5)]
    assert [episode.group_id for episode in credited.episodes] == [40, 40, 12, 12]
    assert metric_values(credited.health)["credit/reward_mean"] == 1.5


def test_credit_answers_a_wrong_name_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown credit method 'grppo': did you mean 'grpo'"):
        credit([], method="grppo")
    with pytest.raises(ConfigError, match="no parameter 'eps'"):
        credit([], method="grpo", params={"eps": 1.0})
    assert credit([], method="grpo", params={"std_eps": 1e-4}).episodes == ()
