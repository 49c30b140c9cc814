"""A setup that cannot learn is told from one that can."""

from dataclasses import replace

import numpy as np
import pytest

from headrace.algo.advantages.health import HealthReport, anchor_findings, group_findings
from headrace.types import Group
from support.credit_examples import E1, Plain, group, step, table, walk


def test_a_setup_that_can_learn_has_nothing_said_about_it() -> None:
    assert anchor_findings(table(E1), method="gigpo") == HealthReport()
    assert group_findings([group(walk("a"), walk("b"), rewards=(1.0, 0.0))], mixed_versions=False) == HealthReport()


INERT: list[Plain] = [(0, [5, 5], [0, 1], True), (0, [5, 5, 5], [0, 0, 0], False), (1, [6, 6], [0, 1], True)]


def test_an_anchor_that_never_leaves_the_start_is_an_error() -> None:
    # four of the seven steps are followed by another: with 46 of before they are the 50 that it takes
    found = anchor_findings(table(INERT), method="gigpo", moves_before=46)
    [error] = found.errors
    assert "each step has one and the same state within its group, after 50 valid actions" in error
    assert "rl.anchor" in error
    assert found.moves == 4


def test_a_few_actions_that_led_nowhere_may_be_the_policys_fault() -> None:
    for before, valid, moves in ((45, None, 4), (46, [False, True, True, True, True, True, True], 3)):
        found = anchor_findings(table(INERT, valid), method="gigpo", moves_before=before)
        assert (found.errors, [name for name, _ in found.warnings], found.moves) == ((), ["inert"], moves)


def test_no_anchor_at_all_is_an_error() -> None:
    [error] = anchor_findings(table([(0, [None, None], [0, 1], True)] * 2), method="hgpo").errors
    assert "but no step has a state" in error


def test_one_group_that_moves_is_enough() -> None:
    moving: list[Plain] = [(0, [5, 5], [0, 1], True), (1, [6, 7], [0, 1], True)]
    assert not anchor_findings(table(moving), method="gigpo", moves_before=100).errors


def test_episodes_of_one_step_have_nowhere_to_go() -> None:
    assert anchor_findings(table([(0, [5], [1], True), (0, [5], [0], False)]), method="gigpo") == HealthReport()


@pytest.mark.parametrize(("own", "warnings"), [(4, []), (5, ["singletons"])])
def test_states_that_nobody_meets_again_are_worth_a_warning(own: int, warnings: list[str]) -> None:
    # two episodes share their start, then each meets `own` states of its own: 8 of 9 states, or 10 of 11
    rows = [[0, *range(100 * episode, 100 * episode + own)] for episode in (1, 2)]
    found = anchor_findings(table([(0, row, [0] * len(row), False) for row in rows]), method="gigpo")
    assert [name for name, _ in found.warnings] == warnings
    assert not found.errors


def test_an_empty_batch_is_no_fault() -> None:
    assert anchor_findings(table([]), method="gigpo") == HealthReport()


def mixed() -> Group:
    old, new = walk("a"), replace(walk("a", id="0/1"), steps=(step(version=1),))
    return group(old, new, rewards=(1.0, 0.0), id=3)


def test_versions_are_not_mixed_inside_a_group_unless_that_is_wanted() -> None:
    [error] = group_findings([mixed()], mixed_versions=False).errors
    assert "1 of 1 groups have tokens of several policy versions (group 3: 0, 1)" in error
    assert group_findings([mixed()], mixed_versions=True) == HealthReport()


def test_a_step_that_was_interrupted_mixes_versions_too() -> None:
    one = walk("a")
    completion = replace(
        one.steps[0].completion,
        **{name: np.repeat(getattr(one.steps[0].completion, name), 2) for name in ("tokens", "sampler_logprobs")},
        raw_logprobs=np.repeat(one.steps[0].completion.raw_logprobs, 2),
        versions=np.array([0, 1], dtype=np.int32),
    )
    cut = replace(one, steps=(replace(one.steps[0], completion=completion),))
    assert group_findings([group(cut, rewards=(1.0,))], mixed_versions=False).errors


def test_an_episode_without_a_peer_is_worth_a_warning() -> None:
    alone = [group(walk("a"), rewards=(1.0,))]
    [(name, sentence)] = group_findings(alone, mixed_versions=False).warnings
    assert name == "single"
    assert "1 of 1 groups have one episode" in sentence
    assert group_findings(alone, mixed_versions=False, compared=False) == HealthReport()
