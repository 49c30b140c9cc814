"""Oldest first, whole groups, nothing lost, and a state that survives JSON bit for bit."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.algo.staleness import Verdict
from headrace.rollout.executor.ready_buffer import ReadyBuffer
from headrace.rollout.group_json import group_from_json, group_to_json
from headrace.types import Group, float_array
from support.rollout_groups import completion, group


@given(st.permutations(range(6)), st.lists(st.integers(0, 2), min_size=6, max_size=6), st.integers(0, 6))
def test_take_ignores_the_order_of_completion(order: list[int], versions: list[int], n: int) -> None:
    buffer = ReadyBuffer(max_groups=6)
    for id in order:
        buffer.put(group(id, started_version=versions[id]))
    by_age = sorted(range(6), key=lambda id: (versions[id], id))
    assert [taken.id for taken in buffer.take(by_age[:n])] == by_age[:n]
    assert [left.id for left in buffer] == by_age[n:]


def test_sweep_removes_what_is_dropped_and_only_that() -> None:
    buffer = ReadyBuffer(max_groups=4)
    for id in range(4):
        buffer.put(group(id))
    dropped = buffer.sweep(lambda group: Verdict.DROP if group.id % 2 else Verdict.KEEP)
    assert [group.id for group in dropped] == [1, 3]
    assert [group.id for group in buffer] == [0, 2]


def test_full_buffer_and_double_put_are_our_bugs() -> None:
    buffer = ReadyBuffer(max_groups=1)
    buffer.put(group(0))
    with pytest.raises(AssertionError, match="already here"):
        buffer.put(group(0))
    with pytest.raises(AssertionError, match="more groups"):
        buffer.put(group(1))


def test_state_round_trip() -> None:
    buffer = ReadyBuffer(max_groups=2)
    buffer.put(group(1, versions=(0, 1, 1), started_version=1, num_failed=1))
    buffer.put(group(0))
    state = json.loads(json.dumps(buffer.snapshot()()))
    restored = ReadyBuffer(max_groups=2)
    restored.load_state_dict(state)
    assert restored.snapshot()() == buffer.snapshot()()
    assert [taken.id for taken in restored.take([0, 1])] == [0, 1]


@given(st.lists(st.floats(-50, 0, width=32), min_size=1, max_size=4))
def test_group_survives_json_bit_for_bit(logprobs: list[float]) -> None:
    made = completion(range(len(logprobs)))
    sampled = replace(
        made,
        sampler_logprobs=float_array(logprobs),
        raw_logprobs=float_array(logprobs[::-1]),
        next_logprobs=float_array([np.nan, *logprobs[1:]]),
    )
    plain = group(4, num_failed=2)
    step = replace(plain.episodes[0].episode.steps[0], completion=sampled)
    episode = replace(plain.episodes[0], episode=replace(plain.episodes[0].episode, steps=(step, step)))
    before = replace(plain, episodes=(episode, plain.episodes[1]))
    after = group_from_json(json.loads(json.dumps(group_to_json(before), allow_nan=False)))
    assert isinstance(after, Group)
    for old, new in zip(before.episodes, after.episodes, strict=True):
        assert old.reward == new.reward
        assert (old.episode.messages, old.episode.temperature) == (new.episode.messages, new.episode.temperature)
        for a, b in zip(old.episode.steps, new.episode.steps, strict=True):
            for name in ("tokens", "sampler_logprobs", "raw_logprobs", "versions"):
                left, right = getattr(a.completion, name), getattr(b.completion, name)
                assert left.dtype == right.dtype
                assert np.array_equal(left, right)
                assert not right.flags.writeable
            known, back = a.completion.next_logprobs, b.completion.next_logprobs
            assert (known is None) == (back is None)
            assert known is None or np.array_equal(known, back, equal_nan=True)
            assert a.completion.stop is b.completion.stop
    assert (after.id, after.task, after.failed) == (before.id, before.task, before.failed)


def test_group_with_a_missing_field_is_refused() -> None:
    encoded = group_to_json(group(0))
    del encoded["task"]
    with pytest.raises(KeyError):
        group_from_json(encoded)


def test_a_group_of_a_version_that_did_not_write_a_field_yet_has_its_default() -> None:
    saved = group_to_json(group(4))
    for episode in saved["episodes"]:
        del episode["reward"]["notes"], episode["reward"]["printed"]
    assert group_from_json(saved).episodes[0].reward == group(4).episodes[0].reward
    del saved["episodes"][0]["reward"]["total"]
    with pytest.raises(KeyError, match="total"):
        group_from_json(saved)
