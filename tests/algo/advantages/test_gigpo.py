"""Step-level credit: the worked example of GiGPO, and every method against a slow one written from its formula."""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import replace
from inspect import signature

import numpy as np
import pytest
from hypothesis import given
from hypothesis.strategies import booleans, composite, integers, lists, permutations, sampled_from

from headrace.algo.advantages import METHODS, StepTable, check_method, gagpo, gigpo, graphgpo, hgpo, step_advantages
from headrace.algo.advantages.anchors import EpisodeWeight, Norm
from headrace.algo.advantages.gigpo import MixMode
from headrace.algo.advantages.graphgpo import next_distances
from headrace.errors import ConfigError
from headrace.metrics import metric_values
from headrace.names import BASELINE_CREDITS
from support.credit_examples import E1, A, B, Plain, S, table

NONE_TRAJECTORY = [0.84375, 0.9375, -0.65625, -0.5, -1.0625, 0.46875, 0.1875, 0.5, 0.9375, -0.65625, -0.5]
NONE_STEP = [
    *(0.79829545, 0.89204545, -0.70170455, -0.54545455, -1.10795455, 0.42329545, 0.14204545, 0.45454545),
    *(0.89204545, -0.70170455, -0.54545455),
]
STD_TRAJECTORY = [
    *(2.31876176, 1.71489694, -1.52635929, -0.86602390, -1.95743210, 0.73395683, 0.25968602, 0.86602390),
    *(1.71489694, -1.52635929, -0.86602390),
]
STD_STEP = [
    *(2.32312447, 1.71925965, -1.70479932, -1.04446394, -2.13587213, 0.73831954, 0.26404873, 0.87038661),
    *(1.71925965, -1.70479932, -1.04446394),
]


@pytest.mark.parametrize(
    ("norm", "weight", "expected"),
    [
        (Norm.NONE, EpisodeWeight.TRAJECTORY, NONE_TRAJECTORY),
        (Norm.NONE, EpisodeWeight.STEP, NONE_STEP),
        (Norm.STD, EpisodeWeight.TRAJECTORY, STD_TRAJECTORY),
        (Norm.STD, EpisodeWeight.STEP, STD_STEP),
    ],
)
def test_example_one(norm: Norm, weight: EpisodeWeight, expected: list[float]) -> None:
    out = gigpo(table(E1), gamma=0.5, norm=norm, episode_weight=weight)
    np.testing.assert_allclose(out.values, expected, atol=5e-9)


def test_example_one_health() -> None:
    values = metric_values(gigpo(table(E1), gamma=0.5, norm=Norm.NONE).health)
    assert values["credit/anchor_count"] == 4
    assert values["credit/anchor_size_mean"] == 11 / 4
    assert values["credit/anchor_size_max"] == 4
    assert values["credit/anchor_singleton_share"] == 1 / 4
    assert values["credit/anchor_zero_variance_share"] == 2 / 4
    assert values["credit/episode_abs"] == 0.5
    # t3's first S (-0.03125) and first A (-0.3125) in a successful episode: 2 of 11
    assert values["credit/sign_disagreement_share"] == pytest.approx(2 / 11)
    assert values["credit/anchor_inert_share"] == 0.0
    assert values["credit/zero_variance_share"] == 0.0
    assert values["credit/reward_mean"] == 0.5


def test_convex_mix() -> None:
    out = gigpo(table(E1), gamma=0.5, omega=0.5, norm=Norm.NONE, mix=MixMode.CONVEX)
    np.testing.assert_allclose(out.values, np.array(NONE_TRAJECTORY) / 2)
    assert (out.values[0], out.values[4]) == (0.421875, -0.53125)


def test_invalid_penalty_is_discounted_like_any_reward() -> None:
    # two episodes S B, the second step of the first invalid: r = (0, -0.5) so G(S) = -0.25, G(B) = -0.5 against 0, 0
    episodes: list[Plain] = [(0, [S, B], [0, 0], False), (0, [S, B], [0, 0], False)]
    out = gigpo(table(episodes, [True, False, True, True]), gamma=0.5, norm=Norm.NONE, invalid_penalty=0.5)
    # A_E = -0.25, +0.25; A_S(S) = -0.125, +0.125; A_S(B) = -0.25, +0.25
    np.testing.assert_allclose(out.values, [-0.375, -0.5, 0.375, 0.5])


def test_same_state_in_another_task_is_no_peer() -> None:
    episodes: list[Plain] = [(0, [S], [1], True), (1, [S], [0], False)]
    for method in ("gigpo", "hgpo", "graphgpo", "gagpo"):
        assert step_advantages(table(episodes), method=method).values.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("method", sorted(set(METHODS) - set(BASELINE_CREDITS)))
@pytest.mark.parametrize("length", [1, 3])
def test_a_lone_episode_and_equal_episodes_teach_nothing(method: str, length: int) -> None:
    # one trajectory of return 0.7: implementations exist that give 0.7 to every step
    row: Plain = (0, list(range(length)), [0.0] * (length - 1) + [0.7], True)
    assert step_advantages(table([row]), method=method).values.tolist() == [0.0] * length
    assert step_advantages(table([row] * 7), method=method).values.tolist() == [0.0] * 7 * length


def test_equal_returns_of_unequal_length_still_teach() -> None:
    episodes: list[Plain] = [(0, [S, A], [0, 1], True), (0, [S, B, A], [0, 0, 1], True)]
    out = gigpo(table(episodes), gamma=0.5, norm=Norm.NONE)
    np.testing.assert_allclose(out.values, [0.125, 0.0, -0.125, 0.0, 0.0])


def test_steps_without_a_state_have_no_step_advantage() -> None:
    episodes: list[Plain] = [(0, [None, S], [0, 1], True), (0, [None, S], [0, 0], False)]
    out = gigpo(table(episodes), gamma=1.0, norm=Norm.NONE)
    np.testing.assert_allclose(out.values, [0.5, 1.0, -0.5, -1.0])
    assert metric_values(out.health)["credit/anchored_step_share"] == 0.5


@pytest.mark.parametrize("states", [[[S, S], [S, S]], [[0, 1], [2, 3]], [[None, None], [None, None]]])
def test_an_inert_anchor_is_reported(states: list[list[int | None]]) -> None:
    episodes: list[Plain] = [(0, row, [0, float(index)], bool(index)) for index, row in enumerate(states)]
    health = metric_values(gigpo(table(episodes)).health)
    assert health["credit/anchor_inert_share"] == 1.0


def test_a_group_with_nothing_to_compare_is_not_called_inert() -> None:
    episodes: list[Plain] = [(0, [S], [1], True), (1, [S, A], [0, 1], True), (1, [S, B], [0, 0], False)]
    assert metric_values(gigpo(table(episodes)).health)["credit/anchor_inert_share"] == 0.0


# --- the others by hand ----------------------------------------------------------------------------------------------


def test_graphgpo_by_hand() -> None:
    # edges of E1: S->A, A->WIN, S->B, B->A, A->D, D->A; d(A) = 1, d(S) = d(B) = d(D) = 2
    # next distances: t1 S->A 1, A->WIN 0; t2 S->B 2, B->A 1, A->end unreachable 3; t3 S->A 1, A->D 2, D->A 1, A->WIN 0;
    # t4 S->B 2, B->end 3
    assert next_distances(table(E1)).tolist() == [1, 0, 2, 1, 3, 1, 2, 1, 0, 2, 3]
    out = graphgpo(table(E1), decay=0.5, success_value=8.0, norm=Norm.NONE)
    # q: S {4, 2, 4, 2} mean 3; A {8, 1, 2, 8} mean 4.75; B {4, 1} mean 2.5; D {4}
    graph = [1, 3.25, -1, 1.5, -3.75, 1, -2.75, 0, 3.25, -1, -1.5]
    episode = [0.5] * 2 + [-0.5] * 3 + [0.5] * 4 + [-0.5] * 2
    np.testing.assert_allclose(out.values, np.array(graph) + episode)


def test_graphgpo_without_success_is_the_episode_term() -> None:
    episodes: list[Plain] = [(0, [S, A], [0, 0.2], False), (0, [S, B], [0, 0], False)]
    out = graphgpo(table(episodes), norm=Norm.NONE)
    np.testing.assert_allclose(out.values, [0.1, 0.1, -0.1, -0.1])


def test_hgpo_by_hand() -> None:
    # gamma = 1. Episodes: S A (1), S A (0), B A (1).  G: 1 1 | 0 0 | 1 1
    # k = 1: S {1, 0} -> 1, -1 (population std 0.5); A {1, 0, 1}: mean 2/3, std sqrt 2 / 3 -> 1/root, -root, 1/root
    # k = 2: (S, A) {1, 0} -> +1, -1; (B, A) alone -> 0.   w_1 = 2, w_2 = 3 where both count
    episodes: list[Plain] = [(0, [S, A], [0, 1], True), (0, [S, A], [0, 0], False), (0, [B, A], [0, 1], True)]
    out = hgpo(table(episodes), gamma=1.0, depth=1, std_eps=0.0)
    root = np.sqrt(2)
    expected = [1, (2 / root + 3) / 5, -1, (-2 * root - 3) / 5, 0, 1 / root]
    np.testing.assert_allclose(out.values, expected, atol=1e-12)


def test_gagpo_by_hand() -> None:
    # gamma = 1, lam = 0.5. Episodes S A (1) and S B (0): V(S) = 0.5, V(A) = 1, V(B) = 0
    # deltas: 1 - 0.5 = 0.5, 1 - 1 = 0 | 0 - 0.5 = -0.5, 0;  A: 0.5, 0 | -0.5, 0; mean 0
    episodes: list[Plain] = [(0, [S, A], [0, 1], True), (0, [S, B], [0, 0], False)]
    out = gagpo(table(episodes), gamma=1.0, lam=0.5, norm=Norm.NONE)
    assert out.values.tolist() == [0.5, 0.0, -0.5, 0.0]


# --- slow versions of the formulas -----------------------------------------------------------------------------------


def slow_groups(keys: list[Hashable | None], values: list[float], *, std: bool, ddof: int, eps: float) -> list[float]:
    members = defaultdict(list)
    for key, value in zip(keys, values, strict=True):
        members[key].append(value)
    out = []
    for key, value in zip(keys, values, strict=True):
        peers = members[key]
        if key is None or math.isclose(max(peers), min(peers), rel_tol=1e-13):
            out.append(0.0)
            continue
        mean = sum(peers) / len(peers)
        scale = (sum((peer - mean) ** 2 for peer in peers) / (len(peers) - ddof)) ** 0.5 + eps if std else 1.0
        out.append((value - mean) / scale)
    return out


def slow_returns(rewards: list[float], gamma: float) -> list[float]:
    return [sum(gamma ** (k - t) * rewards[k] for k in range(t, len(rewards))) for t in range(len(rewards))]


def slow_episode(episodes: list[Plain], std: bool) -> list[float]:
    per = slow_groups([g for g, *_ in episodes], [sum(r) for _, _, r, _ in episodes], std=std, ddof=1, eps=1e-6)
    return [value for value, (_, states, _, _) in zip(per, episodes, strict=True) for _ in states]


def anchors(episodes: list[Plain]) -> list[Hashable | None]:
    return [None if state is None else (group, state) for group, states, _, _ in episodes for state in states]


def slow_gigpo(episodes: list[Plain]) -> list[float]:
    returns = [value for _, _, rewards, _ in episodes for value in slow_returns(rewards, 0.9)]
    steps = slow_groups(anchors(episodes), returns, std=True, ddof=1, eps=1e-6)
    return [a + b for a, b in zip(slow_episode(episodes, True), steps, strict=True)]


def slow_hgpo(episodes: list[Plain]) -> list[float]:
    returns = [value for _, _, rewards, _ in episodes for value in slow_returns(rewards, 0.9)]
    levels = []
    for k in (1, 2, 3):
        keys: list[Hashable | None] = []
        for group, states, _, _ in episodes:
            for t in range(len(states)):
                past = tuple(states[t - k + 1 : t + 1]) if t >= k - 1 else (None,)
                keys.append(None if None in past else (group, past))
        levels.append(slow_groups(keys, returns, std=True, ddof=0, eps=1e-6))
    out = []
    for row in zip(*levels, strict=True):
        weights = [(k + 1) if value else 0 for k, value in enumerate(row, start=1)]
        out.append(sum(w * v for w, v in zip(weights, row, strict=True)) / (sum(weights) or 1))
    return out


def slow_graphgpo(episodes: list[Plain]) -> list[float]:
    values = []
    for group, states, _, success in episodes:
        peers = [episode for episode in episodes if episode[0] == group]
        edges = set()
        for _, row, _, won in peers:
            edges |= {(a, b) for a, b in itertools.pairwise(row) if a is not None and b is not None}
            if won and row and row[-1] is not None:
                edges.add((row[-1], "win"))
        distance: dict[Hashable, int] = {"win": 0}
        for _ in range(len(edges) + 1):
            for a, b in edges:
                if b in distance and distance[b] + 1 < distance.get(a, 10**9):
                    distance[a] = distance[b] + 1
        far = max(distance.values()) + 1
        for t in range(len(states)):
            following = states[t + 1] if t + 1 < len(states) else ("win" if success else None)
            values.append(10 * 0.2 ** (distance.get(following, far) if following is not None else far))
    steps = slow_groups(anchors(episodes), values, std=False, ddof=1, eps=0)
    return [a + b for a, b in zip(slow_episode(episodes, False), steps, strict=True)]


def slow_gagpo(episodes: list[Plain]) -> list[float]:
    returns = [value for _, _, rewards, _ in episodes for value in slow_returns(rewards, 0.9)]
    keys = [key if key is not None else ("alone", index) for index, key in enumerate(anchors(episodes))]
    members = defaultdict(list)
    for key, value in zip(keys, returns, strict=True):
        members[key].append(value)
    state_values = iter([sum(members[key]) / len(members[key]) for key in keys])
    raw, groups = [], []
    for group, states, rewards, _ in episodes:
        v = [next(state_values) for _ in states] + [0.0]
        deltas = [rewards[t] + 0.9 * v[t + 1] - v[t] for t in range(len(states))]
        raw += slow_returns(deltas, 0.9 * 0.8)
        groups += [group] * len(states)
    return slow_groups(list(groups), raw, std=False, ddof=1, eps=0)


FAST: dict[str, Callable[[StepTable], np.ndarray]] = {
    "gigpo": lambda steps: gigpo(steps, gamma=0.9).values,
    "hgpo": lambda steps: hgpo(steps, gamma=0.9).values,
    "graphgpo": lambda steps: graphgpo(steps, norm=Norm.NONE).values,
    "gagpo": lambda steps: gagpo(steps, gamma=0.9, lam=0.8, norm=Norm.NONE).values,
}
SLOW = {"gigpo": slow_gigpo, "hgpo": slow_hgpo, "graphgpo": slow_graphgpo, "gagpo": slow_gagpo}


@composite
def batches(draw: Callable) -> list[Plain]:  # type: ignore[type-arg]
    episodes: list[Plain] = []
    for _ in range(draw(integers(1, 6))):
        states = draw(lists(sampled_from([0, 1, 2, 3, None]), min_size=1, max_size=5))
        rewards = [draw(integers(-2, 2)) / 2 for _ in states]
        episodes.append((draw(integers(0, 1)), states, rewards, draw(booleans())))
    return episodes


@given(batches(), sampled_from(sorted(SLOW)))
def test_against_the_slow_formula(episodes: list[Plain], method: str) -> None:
    np.testing.assert_allclose(FAST[method](table(episodes)), SLOW[method](episodes), atol=1e-9)


@given(batches(), sampled_from(sorted(METHODS)), integers(0, 2**20))
def test_order_of_episodes_does_not_matter(episodes: list[Plain], method: str, seed: int) -> None:
    order = np.random.default_rng(seed).permutation(len(episodes))
    values = step_advantages(table(episodes), method=method).values
    pieces = np.split(values, np.cumsum([len(states) for _, states, _, _ in episodes])[:-1])
    shuffled = step_advantages(table([episodes[index] for index in order]), method=method).values
    assert shuffled.tolist() == np.concatenate([pieces[index] for index in order]).tolist()


@given(batches(), permutations([0, 1, 2, 3]), sampled_from(sorted(SLOW)))
def test_states_are_only_names(episodes: list[Plain], names: list[int], method: str) -> None:
    renamed = [
        (group, [None if state is None else names[state] * 10**6 for state in states], rewards, success)
        for group, states, rewards, success in episodes
    ]
    np.testing.assert_allclose(FAST[method](table(renamed)), FAST[method](table(episodes)), atol=1e-12)


@given(batches(), sampled_from([0.125, 0.5, 4.0, 64.0]))
def test_the_std_form_ignores_the_scale_of_rewards(episodes: list[Plain], scale: float) -> None:
    scaled = [(group, states, [scale * r for r in rewards], success) for group, states, rewards, success in episodes]
    np.testing.assert_allclose(
        gigpo(table(scaled), std_eps=0.0).values, gigpo(table(episodes), std_eps=0.0).values, atol=1e-12
    )


def test_rewards_summed_in_another_order_are_equal() -> None:
    episodes: list[Plain] = [(0, [S, A, B], [0.1, 0.2, 0.3], True), (0, [S, A, B], [0.3, 0.2, 0.1], True)]
    one, other = 0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1  # 0.6000000000000001 and 0.6; `sum` of Python 3.12 has 0.6 for both
    assert one != other
    rewarded = replace(table(episodes), total_E=np.array([one, other]))
    assert step_advantages(rewarded, method="grpo").values.tolist() == [0.0] * 6


def test_parameters_are_checked_by_name_and_kind() -> None:
    assert check_method("gigpo", {"norm": "none", "gamma": 0.5}) == {"norm": Norm.NONE, "gamma": 0.5}
    with pytest.raises(ConfigError, match="must be one of std, none, not 'mean'"):
        check_method("gigpo", {"norm": "mean"})
    with pytest.raises(ConfigError, match="no parameter 'gama': did you mean 'gamma'"):
        check_method("gigpo", {"gama": 0.5})
    with pytest.raises(ConfigError, match="finite number"):
        check_method("gigpo", {"gamma": "high"})


@pytest.mark.parametrize(
    ("method", "name", "value", "sentence"),
    [
        ("gigpo", "gamma", 1.01, "parameter 'gamma' of 'gigpo' must be a number from 0 to 1, not 1.01"),
        ("gagpo", "lam", -0.1, "parameter 'lam' of 'gagpo' must be a number from 0 to 1, not -0.1"),
        ("graphgpo", "decay", 2, "parameter 'decay' of 'graphgpo' must be a number from 0 to 1, not 2"),
        ("hgpo", "depth", 1.5, "parameter 'depth' of 'hgpo' must be a whole number of 0 or more, not 1.5"),
        ("hgpo", "depth", -1, "parameter 'depth' of 'hgpo' must be a whole number of 0 or more, not -1"),
        ("gigpo", "omega", -1.0, "parameter 'omega' of 'gigpo' must be a number of 0 or more, not -1"),
        ("gigpo", "invalid_penalty", -0.5, "parameter 'invalid_penalty' of 'gigpo' must be a number of 0 or more"),
        ("grpo", "std_eps", -1e-6, "parameter 'std_eps' of 'grpo' must be a number of 0 or more"),
    ],
)
def test_numbers_that_would_train_something_else_are_refused(
    method: str, name: str, value: float, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_method(method, {name: value})


@pytest.mark.parametrize("name", sorted(METHODS))
def test_defaults_and_the_ends_of_ranges_are_allowed(name: str) -> None:
    for end in (0, 1):
        params = dict.fromkeys(("gamma", "lam", "decay", "depth", "omega", "std_eps"), end)
        known = signature(METHODS[name]).parameters
        check_method(name, {each: value for each, value in params.items() if each in known})


def test_hgpo_without_histories_and_std_is_the_step_term_of_gigpo() -> None:
    out = hgpo(table(E1), gamma=0.5, depth=0, norm=Norm.NONE)
    expected = [0.34375, 0.4375, -0.15625, 0, -0.5625, -0.03125, -0.3125, 0, 0.4375, -0.15625, 0]
    np.testing.assert_allclose(out.values, expected, atol=1e-12)


def test_gagpo_can_have_an_episode_term() -> None:
    alone, both = (gagpo(table(E1), gamma=0.5, norm=Norm.NONE, episode_coef=coef).values for coef in (0.0, 2.0))
    # A_E is +0.5 in the two successful episodes (2 and 4 steps) and -0.5 in the others (3 and 2)
    np.testing.assert_allclose(both - alone, [1.0] * 2 + [-1.0] * 3 + [1.0] * 4 + [-1.0] * 2, atol=1e-12)
