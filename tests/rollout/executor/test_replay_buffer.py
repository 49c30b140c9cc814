"""Groups that were trained on before are one more source of a batch, within the same bound."""

import asyncio
import json

import numpy as np

from headrace.algo.staleness import HeadBound
from headrace.rollout.executor.replay_buffer import ReplayBuffer
from headrace.testing import FakeSampler
from support.async_rollouts import HANDLE, HandSampler, executor_of, ids
from support.rollout_groups import group


def test_the_least_used_come_first_and_the_younger_of_two() -> None:
    buffer = ReplayBuffer(max_groups=3)
    buffer.add([group(0), group(1), group(2)])
    assert ids(buffer.draw(2)) == [1, 2]
    assert ids(buffer.draw(2)) == [0, 2]
    assert ids(buffer.draw(5)) == [0, 1, 2]


def test_the_oldest_make_room_and_the_stale_go() -> None:
    buffer = ReplayBuffer(max_groups=2)
    buffer.add([group(id, versions=(id, id)) for id in range(3)])
    assert ids(list(buffer)) == [1, 2]
    buffer.sweep(lambda one: HeadBound(1).verdict(one, version=3))
    assert ids(list(buffer)) == [2]
    assert ids(buffer.draw(2)) == [2]


def test_state_round_trip() -> None:
    buffer = ReplayBuffer(max_groups=3)
    buffer.add([group(0), group(1)])
    buffer.draw(1)
    restored = ReplayBuffer(max_groups=3)
    restored.load_state_dict(json.loads(json.dumps(buffer.snapshot()())))
    assert restored.snapshot()() == buffer.snapshot()()
    assert ids(restored.draw(1)) == [0]  # group 1 was used


async def test_a_batch_has_its_groups_and_some_of_before_within_the_bound() -> None:
    sampler = FakeSampler()
    async with executor_of(sampler, batch=2, max_staleness=3, replay_groups=1) as executor:
        seen: list[int] = []
        for step in range(4):
            groups = await executor.take_batch()
            fresh, again = groups[:2], groups[2:]
            assert not set(ids(fresh)) & set(seen)
            assert set(ids(again)) <= set(seen)
            assert len(again) == (step > 0)
            for one in groups:
                assert executor.version - one.head_version <= 3
            seen += ids(fresh)
            executor.done(groups)
            await executor.publish(HANDLE)
            counts = executor.metrics()
            assert (counts["rollout/consumed"], counts["rollout/replayed"]) == (2, len(again))


async def test_replayed_groups_keep_within_the_bound_and_are_scored_like_any_other() -> None:
    """eta = 2 and more asked for than there are: all that may be trained again is, at lags up to 2 and no further."""
    sampler = HandSampler()
    lags: set[int] = set()
    async with executor_of(
        sampler, max_staleness=2, replay_groups=9, next_logprobs=True, tokens=lambda task: (2,)
    ) as executor:
        for _ in range(7):
            taking = asyncio.create_task(executor.take_batch())
            while not taking.done():
                await sampler.step()
            groups = taking.result()
            for one in groups[1:]:
                made = one.episodes[0].episode.steps[0].completion
                lag = executor.version - made.versions
                known = np.full(2, np.nan) if made.next_logprobs is None else made.next_logprobs
                np.testing.assert_array_equal(known[lag == 2], -2.0 - made.versions[lag == 2])
                lags |= set(lag.tolist())
            executor.done(groups)
            await executor.publish(HANDLE)
    assert lags == {1, 2}
