"""A run that is cut at a publish barrier and taken up again: by the virtual clock equal in every batch, figure and
state; by the real one sound, with no accepted group lost."""

import asyncio
import json
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import CheckpointError, EpisodeError, RolloutError, SamplerError
from headrace.rollout import partial_rollout
from headrace.rollout.executor import RolloutExecutor
from headrace.rollout.group_json import group_to_json
from headrace.rollout.partial_rollout import PartialEpisode, PartialRollouts, SampledTurn, SamplingGate
from headrace.testing import FakeSampler, run_virtual
from headrace.types import Completion, SampleRequest, SamplingParams, SharedWeights, StopReason, Task, int_array
from support.async_rollouts import HANDLE, HandSampler, executor_of, ids, turns


class Scoring(FakeSampler):
    """A score is -1 - version."""

    def token_score(self) -> float:
        return -1.0 - self.version


class Cursor:
    """Tasks t0, t1, ...; its state is the next number."""

    def __init__(self) -> None:
        self.at = 0

    def next(self) -> Task:
        self.at += 1
        return Task(id=f"t{self.at - 1}")


def lengths(task: Task) -> tuple[int, ...]:
    """Between one and three turns of one to thirteen tokens, different for every task."""
    number = int(task.id[1:])
    return tuple(1 + (number * 7 + turn * 5) % 13 for turn in range(1 + number % 3))


def make(cursor: Cursor, sampler: FakeSampler, options: dict[str, Any]) -> RolloutExecutor:
    return executor_of(
        sampler, tokens=lengths, source=cursor.next, cursor=lambda: {"at": cursor.at}, next_logprobs=True, **options
    )


async def train(
    steps: range, options: dict[str, Any], state: dict[str, Any] | None
) -> tuple[list[Any], dict[str, Any]]:
    """Batches and figures of `steps`, from a state, and the state behind them."""
    cursor, sampler = Cursor(), Scoring()
    executor = make(cursor, sampler, options)
    if state is not None:
        cursor.at = state["cursor"]["at"]
        executor.load_state_dict(state)
        await executor.load_current(HANDLE)
    seen = []
    async with executor:
        for step in steps:
            groups = await executor.take_batch()
            executor.done(groups)
            await executor.publish(SharedWeights(fingerprint=str(step)))
            seen.append(([group_to_json(group) for group in groups], executor.metrics()))
        return seen, json.loads(json.dumps(executor.state_dict(), allow_nan=False))


@settings(max_examples=40, deadline=None)
@given(
    st.fixed_dictionaries(
        {
            "batch": st.integers(1, 3),
            "max_staleness": st.integers(0, 3),
            "lockstep": st.integers(1, 6),
            "oversampling": st.sampled_from([1.0, 1.5]),
            "stale_action": st.sampled_from(["drop", "mask"]),
            "replay_groups": st.integers(0, 2),
        }
    ),
    st.integers(1, 7),
)
def test_by_the_virtual_clock_a_resumed_run_is_equal(options: dict[str, Any], cut: int) -> None:
    async def run() -> None:
        whole, last = await train(range(8), options, None)
        begun, state = await train(range(cut), options, None)
        resumed, end = await train(range(cut, 8), options, state)
        assert begun + resumed == whole
        assert end == last

    asyncio.run(run())


async def test_partial_sequences_are_in_the_state_and_go_on_where_they_were() -> None:
    """Without this the property above could hold because nothing ever ran over a barrier."""
    _, state = await train(range(4), {"batch": 2, "max_staleness": 2, "lockstep": 3}, None)
    partial = [
        turn["completion"]["versions"]
        for episodes in state["journals"].values()
        for episode in episodes
        for turn in episode["turns"]
        if not turn["ended"] and turn["completion"]
    ]
    assert any(partial)
    seen, _ = await train(range(4, 10), {"batch": 2, "max_staleness": 2, "lockstep": 3}, state)
    mixed = [
        step["completion"]["versions"]
        for groups, _ in seen
        for group in groups
        for scored in group["episodes"]
        for step in scored["episode"]["steps"]
    ]
    assert any(len(set(versions)) > 1 and versions[0] < 4 for versions in mixed)


async def test_the_virtual_clock_moves_in_rounds_and_settles_in_order() -> None:
    """Tasks of 5 and 2 tokens in rounds of 2: the second ends in round 1, the first in round 3, whatever runs first."""
    sampler = FakeSampler()
    executor = executor_of(
        sampler, names=["a", "b"], tokens=lambda t: (5,) if t.id == "a" else (2,), max_staleness=1, lockstep=2
    )
    async with executor:
        first = await executor.take_batch()
        assert [(group.id, group.task.id) for group in first] == [(1, "b")]
        executor.done(first)
        await executor.publish(HANDLE)
        second = await executor.take_batch()
        assert [(group.id, group.task.id) for group in second] == [(0, "a")]
        # one round of version 0, the others of version 1
        versions = second[0].episodes[0].episode.steps[0].completion.versions.tolist()
        assert versions == [0, 0, 1, 1, 1]


# --- the real clock --------------------------------------------------------------------------------------------------


async def test_state_is_cut_at_the_publish_although_sampling_has_gone_on() -> None:
    sampler = HandSampler()
    executor = executor_of(sampler, max_staleness=2, tokens=lambda task: (8,) if task.id != "t0" else (2,))
    async with executor:
        taking = asyncio.create_task(executor.take_batch())
        await turns()
        await sampler.step(3)
        executor.done(await taking)
        await executor.publish(HANDLE)
        later, at_barrier = executor.snapshot(), executor.state_dict()
        cut = len(at_barrier["journals"]["1"][0]["turns"][0]["completion"]["tokens"])
        assert 0 < cut < 8
        assert "group 1 " in executor.pending()
        await sampler.step(9)
        assert "group 1 " not in executor.pending()  # it has ended since, and others have begun
        assert later() == at_barrier
        assert executor.state_dict() | {"window": at_barrier["window"]} == at_barrier  # figures are of now
        state = json.loads(json.dumps(at_barrier))
    sampler = HandSampler()
    executor = executor_of(sampler, max_staleness=2, tokens=lambda task: (8,))
    executor.load_state_dict(state)
    await executor.load_current(HANDLE)
    async with executor:
        taking = asyncio.create_task(executor.take_batch())
        await turns()
        await sampler.step(9)
        [group] = await taking
        assert group.id == 1
        versions = group.episodes[0].episode.steps[0].completion.versions.tolist()
        assert versions == [0] * cut + [1] * (8 - cut)
        counts = executor.metrics()
        assert counts["rollout/dropped_resume"] == 0


async def test_a_world_that_does_not_repeat_itself_is_dropped_with_that_reason() -> None:
    sampler = HandSampler()
    async with executor_of(sampler, max_staleness=1, tokens=lambda task: (8,)) as executor:
        taking = asyncio.create_task(executor.take_batch())
        await turns()
        await sampler.step(2)
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        await executor.publish(HANDLE)
        state = executor.state_dict()
    for episodes in state["journals"].values():
        episodes[1]["replayable"] = False
    fresh = executor_of(HandSampler(), max_staleness=1)
    fresh.load_state_dict(json.loads(json.dumps(state)))
    assert fresh.metrics()["rollout/dropped_resume"] == 2
    assert fresh.state_dict()["journals"] == {}


async def test_ready_groups_are_trained_after_a_restart_and_none_twice() -> None:
    trained: list[int] = []
    state: dict[str, Any] | None = None
    numbers = count()
    for _ in range(5):
        sampler = FakeSampler()
        executor = executor_of(
            sampler,
            batch=2,
            max_staleness=2,
            tokens=lambda t: (1 + int(t.id) % 5,),
            source=lambda: Task(id=str(next(numbers))),
        )
        if state is not None:
            executor.load_state_dict(state)
            await executor.load_current(HANDLE)
        async with executor:
            for _ in range(2):
                groups = await executor.take_batch()
                trained += ids(groups)
                executor.done(groups)
                await executor.publish(HANDLE)
            state = json.loads(json.dumps(executor.state_dict()))
        totals = state["ledger"]
        live = len(totals["live"])
        assert totals["started"] == totals["consumed"] + sum(totals["dropped"].values()) + live
        assert totals["dropped"] == {}
    assert len(trained) == len(set(trained)) == 20


def test_a_state_of_another_shape_is_refused() -> None:
    executor = executor_of(FakeSampler(), max_staleness=1)
    with pytest.raises(CheckpointError, match="cannot be read"):
        executor.load_state_dict({"version": 1})


# --- partial episodes ------------------------------------------------------------------------------------------------


def request(prompt: list[int], max_tokens: int = 4) -> SampleRequest:
    return SampleRequest(prompt=int_array(prompt), params=SamplingParams(max_tokens=max_tokens))


async def test_a_recorded_turn_is_played_back_and_an_open_one_goes_on() -> None:
    sampler = FakeSampler()
    first = await sampler.sample(request([1]))
    begun = await sampler.sample(request([2], 2))
    partial_episode = PartialEpisode(
        SamplingGate(),
        [
            SampledTurn(prompt=int_array([1]), temperature=1.0, completion=first, ended=True),
            SampledTurn(prompt=int_array([2]), temperature=1.0, completion=begun, ended=False),
        ],
    )
    await sampler.load(HANDLE, 3)
    assert await partial_episode.sample(sampler, request([1])) is first
    assert (await partial_episode.sample(sampler, request([2]))).tokens.tolist() == [0, 1, 3002, 3003]
    assert (await partial_episode.sample(sampler, request([5], 1))).tokens.tolist() == [3000]


async def test_an_environment_that_lied_about_repeating_itself_is_found_out() -> None:
    partial_episode = PartialEpisode(SamplingGate(), [SampledTurn(prompt=int_array([1]), temperature=1.0)])
    with pytest.raises(EpisodeError, match="does not repeat itself"):
        await partial_episode.sample(FakeSampler(), request([2]))


async def test_two_updates_inside_one_sequence() -> None:
    ticks: asyncio.Queue[None] = asyncio.Queue()
    sampler = FakeSampler(tick=ticks.get)
    sampling = asyncio.create_task(PartialEpisode().sample(sampler, request([1, 2], 6)))
    for version, tokens in ((1, 2), (2, 3)):  # 2 tokens under version 0, 3 under version 1, the last under version 2
        for _ in range(tokens - 1):
            ticks.put_nowait(None)
        for _ in range(10):
            await asyncio.sleep(0)
        pausing = asyncio.create_task(sampler.pause(interrupt=True))
        await asyncio.sleep(0)
        ticks.put_nowait(None)
        await pausing
        await sampler.load(SharedWeights(fingerprint=f"v{version}"), version)
        await sampler.resume()
    ticks.put_nowait(None)
    completion = await asyncio.wait_for(sampling, 100)
    # the fake's token is version * 1000 + position
    assert completion.tokens.tolist() == [0, 1, 1002, 1003, 1004, 2005]
    assert completion.versions.tolist() == [0, 0, 1, 1, 1, 2]
    assert completion.stop is StopReason.LENGTH


async def test_updates_that_leave_no_time_to_sample_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cut(FakeSampler):
        """Two tokens, and from then on every call is interrupted before the first."""

        async def sample(self, request: SampleRequest) -> Completion:
            begun = request.continue_from or await super().sample(replace(request, params=SamplingParams(max_tokens=2)))
            return replace(begun, stop=StopReason.INTERRUPTED)

    monkeypatch.setattr(partial_rollout, "MAX_IDLE_INTERRUPTS", 5)
    with pytest.raises(SamplerError, match="interrupted 6 times and is at 2 tokens: publish less often"):
        await PartialEpisode(SamplingGate()).sample(Cut(), request([1]))


def test_a_group_that_has_not_begun_is_taken_up_whatever_its_world() -> None:
    """A world that does not repeat itself has nothing to repeat yet; with one turn on record it would have."""
    partial_rollouts = PartialRollouts()
    begun, _ = partial_rollouts.open(0, 2)
    assert partial_rollouts.resumable(0)
    begun.turns.append(SampledTurn(prompt=int_array([1]), temperature=1.0))
    assert not partial_rollouts.resumable(0)


async def test_nothing_is_sampled_while_the_gate_is_held() -> None:
    sampler, partial_rollouts = FakeSampler(), PartialRollouts()
    (partial_episode,) = partial_rollouts.open(0, 1)
    partial_rollouts.gate.hold()
    sampling = asyncio.create_task(partial_episode.sample(sampler, request([1])))
    await turns()
    assert (partial_rollouts.gate.inside, sampling.done()) == (0, False)
    await sampler.load(HANDLE, 1)
    partial_rollouts.gate.release()
    assert (await sampling).versions.tolist() == [1] * 4


async def test_the_end_of_a_round_is_not_the_end_of_a_sequence_but_its_own_limit_is() -> None:
    sampler, partial_rollouts = FakeSampler(), PartialRollouts(lockstep_tokens=2)
    (partial_episode,) = partial_rollouts.open(0, 1)
    sampling: asyncio.Task[Completion] = asyncio.create_task(partial_episode.sample(sampler, request([1], 4)))
    for expected in (0, 2):
        await turns()
        assert partial_rollouts.all_waiting(0)
        assert partial_rollouts.num_sampled(0) == expected
        partial_rollouts.gate.next_round()
        assert not partial_rollouts.all_waiting(0)
    assert (await sampling).stop is StopReason.LENGTH
    assert partial_rollouts.head_version(0) == 0


def test_in_lockstep_the_time_a_trainer_takes_does_not_count() -> None:
    """Hours pass between two batches, more than a group may take; nothing is dropped for it."""

    async def run() -> None:
        options = {"batch": 1, "max_staleness": 2, "lockstep": 2, "task_timeout_s": 60.0}
        async with make(Cursor(), Scoring(), options) as executor:
            for _ in range(3):
                executor.done(await executor.take_batch())
                await executor.publish(HANDLE)
                assert executor.metrics()["rollout/running"] > 0
                await asyncio.sleep(3600.0)
            assert executor.metrics()["rollout/dropped_timeout"] == 0

    run_virtual(run())


async def test_a_round_in_which_nothing_moves_ends_the_run() -> None:
    sampler = HandSampler()  # nobody beats it
    async with executor_of(sampler, lockstep=2, task_timeout_s=0.02, grace_s=0.02) as executor:
        with pytest.raises(RolloutError, match=r"none ended for 0\.04 s; still running: group 0 of task t0"):
            await executor.take_batch()
