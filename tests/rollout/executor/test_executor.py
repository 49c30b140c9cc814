"""The executor with scripted groups and the fake sampler: batches do not depend on order, every drop is counted."""

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.algo.staleness import HeadBound, Verdict
from headrace.errors import CheckpointError, DataError, RolloutError
from headrace.rollout.executor import ExecutorParts, RolloutExecutor
from headrace.rollout.filters import reward_spread
from headrace.rollout.partial_rollout import PartialEpisode
from headrace.rollout.publisher import Publisher
from headrace.testing import FakeSampler
from headrace.types import (
    Episode,
    Group,
    Message,
    Reward,
    SampleRequest,
    SamplingParams,
    ScoredEpisode,
    Step,
    Task,
    WeightsHandle,
    int_array,
)
from support.async_rollouts import HANDLE, ids, turns
from support.rollout_groups import group
from support.scripted_groups import ScriptedGroups, scripted_executor

# --- eta = 0 ---------------------------------------------------------------------------------------------------------


async def test_batch_is_in_start_order_whatever_ends_first() -> None:
    script = ScriptedGroups()
    async with scripted_executor(script.play) as executor:
        taking = asyncio.create_task(executor.take_batch())
        await turns()
        assert script.started == [0, 1, 2]
        for id in (2, 0, 1):
            script.end(id)
            await turns()
        groups = await taking
        assert ids(groups) == [0, 1, 2]
        assert [group.task.id for group in groups] == ["t0", "t1", "t2"]


async def test_nothing_starts_without_a_batch_that_wants_it() -> None:
    script = ScriptedGroups()
    async with scripted_executor(script.play, batch=2) as executor:
        await turns()
        assert script.started == []
        for step in range(3):
            taking = asyncio.create_task(executor.take_batch())
            await turns()
            wanted = [2 * step, 2 * step + 1]
            assert script.started[2 * step :] == wanted
            for id in wanted:
                script.end(id, version=step)
            groups = await taking
            await turns()
            executor.done(groups)
            await turns()
            assert len(script.started) == 2 * (step + 1)  # not while training, nor between done and publish
            await executor.publish(HANDLE)
            await turns()
            assert len(script.started) == 2 * (step + 1)
            counts = executor.metrics()
            assert (counts["rollout/running"], counts["rollout/ready"]) == (0, 0)
            assert (counts["rollout/consumed"], counts["rollout/version"]) == (2, step + 1)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.booleans(), min_size=30, max_size=30), st.integers(1, 4), st.integers(1, 5), st.randoms())
def test_draws_and_batches_depend_on_rewards_alone(
    useful: list[bool], batch: int, running: int, random: object
) -> None:
    """The n-th task is useful or not; whatever ends first, the batch is the first `batch` useful ones in order."""
    useful = [*useful, True, True, True, True]
    expected = [id for id, good in enumerate(useful) if good][:batch]

    async def run() -> None:
        script = ScriptedGroups()
        executor = scripted_executor(
            script.play, batch=batch, max_running=running, drops=99, filters=(reward_spread(),)
        )
        async with executor:
            taking = asyncio.create_task(executor.take_batch())
            await turns()
            while not taking.done():
                running_now = [id for id in script.started if not script.endings[id].done()]
                assert len(running_now) <= running
                id = random.choice(running_now)  # type: ignore[attr-defined]
                script.end(id, rewards=(0.0, 1.0) if useful[id] else (1.0, 1.0))
                await turns()
            assert ids(taking.result()) == expected
            assert script.started == list(range(expected[-1] + 1)), "one draw per rejected group, none beyond the batch"
            assert executor.metrics()["rollout/started"] == expected[-1] + 1

    asyncio.run(run())


async def test_two_batches_of_one_version() -> None:
    """Weights need not be published after every training step."""

    async def play(task: Task, group_id: int) -> Group:
        return group(group_id)

    async with scripted_executor(play, batch=2) as executor:
        first = await executor.take_batch()
        executor.done(first)
        second = await executor.take_batch()
        executor.done(second)
        assert ids(first) + ids(second) == [0, 1, 2, 3]


# --- drops -----------------------------------------------------------------------------------------------------------


async def test_every_drop_is_counted_once_with_its_reason() -> None:
    hang = asyncio.Event()

    async def play(task: Task, group_id: int) -> Group:
        match group_id:
            case 0:
                raise ValueError("bad world")
            case 1:
                await hang.wait()
            case 2:
                return group(2, rewards=(1.0, 1.0))
            case 3:
                return group(3, rewards=(1.0,), num_failed=1)  # one valid episode of two cannot be compared
            case 4:
                return group(4, rewards=(), num_failed=2)
            case 5:
                current = asyncio.current_task()
                assert current is not None
                current.cancel()
                await hang.wait()
        return group(group_id, num_failed=group_id == 6)

    async with scripted_executor(play, timeout_s=0.02, filters=(reward_spread(),)) as executor:
        groups = await executor.take_batch()
        assert ids(groups) == [6, 7, 8]
        counts = executor.metrics()
        assert {name: value for name, value in counts.items() if value and name.startswith("rollout/")} == {
            "rollout/started": 9,
            "rollout/dropped_failed": 3,
            "rollout/dropped_timeout": 1,
            "rollout/dropped_cancelled": 1,
            "rollout/filtered_reward_spread": 1,
            "rollout/failed_episodes": 4,
        }
        again = executor.metrics()
        assert again["rollout/dropped_failed"] == 0  # since the last call
        assert again["rollout/filtered_reward_spread"] == 0
        executor.done(groups)
        assert executor.metrics()["rollout/consumed"] == 3


async def test_group_of_one_needs_only_that_one() -> None:
    async def play(task: Task, group_id: int) -> Group:
        return group(group_id, rewards=(0.5,))

    async with scripted_executor(play, batch=2) as executor:
        assert ids(await executor.take_batch()) == [0, 1]


async def test_filter_that_rejects_everything_ends_in_a_clear_error() -> None:
    async def play(task: Task, group_id: int) -> Group:
        return group(group_id, rewards=(1.0, 1.0))

    async with scripted_executor(play, drops=5, filters=(reward_spread(),)) as executor:
        with pytest.raises(RolloutError, match=r"5 groups in a row .*filtered_reward_spread 5 times.*or raise"):
            await executor.take_batch()
        assert executor.metrics()["rollout/filtered_reward_spread"] == 6  # all of the second three that had started
        with pytest.raises(RolloutError, match="5 groups in a row"):  # and it stays over
            await executor.take_batch()


async def test_failures_in_a_row_name_the_most_frequent_reason_and_the_last_error() -> None:
    async def play(task: Task, group_id: int) -> Group:
        if group_id % 3 == 0:
            return group(group_id, rewards=(1.0, 1.0))
        raise OSError(f"port {group_id} is closed")

    async with scripted_executor(play, batch=1, drops=6, filters=(reward_spread(),)) as executor:
        with pytest.raises(RolloutError) as caught:
            await executor.take_batch()
    assert "(failed 4 times, filtered_reward_spread 2 times)" in str(caught.value)
    assert "the last error was: group 5: OSError: port 5 is closed" in str(caught.value)


async def test_a_useful_group_starts_the_count_of_failures_anew() -> None:
    async def play(task: Task, group_id: int) -> Group:
        if group_id % 4:
            raise OSError("closed")
        return group(group_id)

    async with scripted_executor(play, batch=5, max_running=1, drops=4) as executor:
        assert ids(await executor.take_batch()) == [0, 4, 8, 12, 16]  # never more than three failures in a row


async def test_failing_filter_ends_the_run() -> None:
    async def play(task: Task, group_id: int) -> Group:
        return group(group_id)

    def broken(group: Group) -> bool:
        raise KeyError("answer")

    async with scripted_executor(play, filters=(broken,)) as executor:
        with pytest.raises(RolloutError, match="filter broken failed on group 0: KeyError"):
            await executor.take_batch()


async def test_what_playing_more_groups_cannot_mend_ends_the_run_at_once() -> None:
    """A reward function that fails too often, say: the first such error is the run's, not the 64th."""
    played = []

    async def play(task: Task, group_id: int) -> Group:
        played.append(group_id)
        raise RolloutError("30 of the last 50 episodes have no reward")

    async with scripted_executor(play, batch=1, drops=64) as executor:
        with pytest.raises(RolloutError, match=r"^30 of the last 50 episodes have no reward$"):
            await executor.take_batch()
    assert played == [0]


async def test_source_that_ends_is_an_error_only_when_its_tasks_are_used_up() -> None:
    source = iter([Task(id="a"), Task(id="b"), Task(id="c")])

    async def play(task: Task, group_id: int) -> Group:
        return group(group_id, versions=())

    async with scripted_executor(play, batch=2, eta=1, next_task=lambda: next(source)) as executor:
        first = await executor.take_batch()
        assert ids(first) == [0, 1]
        executor.done(first)
        with pytest.raises(DataError, match="no further task"):
            await executor.take_batch()


async def test_our_own_bug_wakes_the_trainer_at_once() -> None:
    async def play(task: Task, group_id: int) -> Group:
        return group(group_id + 1)

    async def train() -> None:
        async with scripted_executor(play, timeout_s=600.0) as executor:
            async with asyncio.timeout(100):
                await executor.take_batch()

    with pytest.raises(AssertionError, match="group 0 came back as 1"):
        await train()


async def test_group_that_ignores_its_timeout_is_named_instead_of_waited_for() -> None:
    release = asyncio.Event()

    async def play(task: Task, group_id: int) -> Group:
        if group_id == 0:
            return group(0)
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        return group(group_id)

    async with scripted_executor(play, batch=2, timeout_s=0.01, grace_s=0.01) as executor:
        with pytest.raises(RolloutError, match=r"1 of 2 groups are ready.*still running: group 1 of task t1"):
            await executor.take_batch()
    release.set()
    await turns()


async def test_leaving_cancels_and_counts_everything() -> None:
    script = ScriptedGroups()
    executor = scripted_executor(script.play, batch=4, eta=1, max_running=5)
    async with executor:
        taking = asyncio.create_task(executor.take_batch())
        await turns()
        for id in range(5):
            script.end(id)
        groups = await taking  # 4 in training, 1 ready, 3 running
        await turns()
        gauges = executor.metrics()
        assert (gauges["rollout/running"], gauges["rollout/ready"]) == (3, 1)
    assert [script.endings[id].cancelled() for id in (5, 6, 7)] == [True, True, True]
    counts = executor.metrics()
    assert counts["rollout/dropped_shutdown"] == len(groups) + 1 + 3
    assert (counts["rollout/running"], counts["rollout/ready"]) == (0, 0)


async def test_errors_of_the_body_pass_through_as_they_are() -> None:
    script = ScriptedGroups()

    async def train() -> None:
        async with scripted_executor(script.play) as executor:
            taking = asyncio.create_task(executor.take_batch())
            await turns()
            taking.cancel()
            raise ValueError("trainer")

    with pytest.raises(ValueError, match="trainer"):
        await train()
    assert len(script.endings) == 3
    assert all(ending.cancelled() for ending in script.endings.values())


async def test_cancelled_take_leaves_the_groups_for_the_next_one() -> None:
    script = ScriptedGroups()
    async with scripted_executor(script.play, batch=2) as executor:
        taking = asyncio.create_task(executor.take_batch())
        await turns()
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        for id in (0, 1):
            script.end(id)
        assert ids(await executor.take_batch()) == [0, 1]
        assert script.started == [0, 1]


# --- eta > 0 ---------------------------------------------------------------------------------------------------------


async def test_generation_goes_on_while_training_within_the_bound() -> None:
    script = ScriptedGroups()
    async with scripted_executor(script.play, batch=2, eta=1) as executor:
        taking = asyncio.create_task(executor.take_batch())
        await turns()
        assert script.started == [0, 1, 2, 3]  # (1 + 1) * 2
        script.end(1)
        script.end(3)
        groups = await taking
        assert ids(groups) == [1, 3]  # the oldest that are ready
        await turns()
        assert script.started == [0, 1, 2, 3]  # 2 in training, 2 running: full
        executor.done(groups)
        await executor.publish(HANDLE)
        taking = asyncio.create_task(executor.take_batch())
        await turns()
        assert script.started == [0, 1, 2, 3, 4, 5]
        script.end(5, version=1)
        script.end(0)
        groups = await taking
        assert [(group.id, group.started_version) for group in groups] == [(0, 0), (5, 1)]
        metrics = executor.metrics()
        # group 0: 4 tokens of version 0 at version 1; group 5: 4 tokens of lag 0; group 1 and 3: 8 tokens of lag 0
        assert metrics["rollout/lag_mean"] == pytest.approx(4 / 16)
        assert metrics["rollout/lag_max"] == 1


async def test_overtaken_group_is_dropped_at_publish_and_frees_its_slot() -> None:
    script = ScriptedGroups()
    async with scripted_executor(script.play, batch=1, eta=1) as executor:
        taking = asyncio.create_task(executor.take_batch())
        await turns()
        script.end(1)
        executor.done(await taking)
        await executor.publish(HANDLE)  # version 1
        await turns()
        script.end(0)  # ready at version 1, lag 1: still fresh
        await turns()
        assert executor.metrics()["rollout/ready"] == 1
        await executor.publish(HANDLE)  # version 2
        counts = executor.metrics()
        assert counts["rollout/dropped_stale"] == 1
        assert counts["rollout/ready"] == 0
        taking = asyncio.create_task(executor.take_batch())
        await turns()
        assert script.started == [0, 1, 2, 3]
        script.end(2)  # sampled at version 0, ends at version 2: refused when it ends
        await turns()
        assert executor.metrics()["rollout/dropped_stale"] == 1
        script.end(3, version=2)
        assert ids(await taking) == [3]


async def test_failed_group_is_replaced_while_the_trainer_works() -> None:
    script = ScriptedGroups()
    async with scripted_executor(script.play, batch=2, eta=1) as executor:
        taking = asyncio.create_task(executor.take_batch())
        await turns()
        script.end(0)
        script.end(1)
        groups = await taking
        script.endings[2].set_exception(OSError("gone"))
        await turns()
        assert script.started == [0, 1, 2, 3, 4]  # 2 in training, 1 running: (1 + 1) * 2 - 3 = 1
        with pytest.raises(AssertionError, match="as a whole"):
            executor.done(groups[:1])


async def test_stale_groups_do_not_count_as_failures() -> None:
    """While a batch is waited for the version stands still, so fresh groups follow the stale ones."""
    script = ScriptedGroups()
    async with scripted_executor(script.play, batch=1, eta=2, drops=2) as executor:
        taking = asyncio.create_task(executor.take_batch())
        await turns()
        script.end(0)
        executor.done(await taking)
        for _ in range(3):
            await executor.publish(HANDLE)
        taking = asyncio.create_task(executor.take_batch())
        await turns()
        for id in (1, 2):
            script.end(id)
        await turns()
        assert executor.metrics()["rollout/dropped_stale"] == 2
        script.end(3, version=executor.version)
        assert ids(await taking) == [3]


async def test_pause_starts_nothing_but_collects() -> None:
    script = ScriptedGroups()
    async with scripted_executor(script.play, batch=2, max_running=1) as executor:
        taking = asyncio.create_task(executor.take_batch())
        await turns()
        executor.pause()
        script.end(0)
        await turns()
        assert script.started == [0]
        assert executor.metrics()["rollout/ready"] == 1
        executor.resume()
        await turns()
        script.end(1)
        assert ids(await taking) == [0, 1]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(0, 2),
    st.lists(st.sampled_from(["good", "good", "good", "bad", "fail", "train"]), min_size=20, max_size=60),
    st.randoms(),
)
def test_no_schedule_breaks_the_bound_or_loses_a_group(batch: int, eta: int, events: list[str], random: object) -> None:
    async def run() -> None:
        script = ScriptedGroups()
        began: dict[int, int] = {}
        trained: list[int] = []
        totals: Counter[str] = Counter()
        executor = scripted_executor(script.play, batch=batch, eta=eta, drops=999, filters=(reward_spread(),))
        async with executor:
            taking: asyncio.Task[tuple[Group, ...]] = asyncio.create_task(executor.take_batch())
            for event in events:
                await turns()
                for id in script.started:
                    began.setdefault(id, executor.version)
                open_ids = [id for id in script.started if not script.endings[id].done()]
                if event == "train" and taking.done():
                    groups = taking.result()
                    assert ids(groups) == sorted(ids(groups), key=lambda id: (began[id], id))
                    assert len(groups) == batch
                    for taken in groups:
                        assert executor.version - taken.head_version <= eta
                    trained += ids(groups)
                    executor.done(groups)
                    await executor.publish(HANDLE)
                    taking = asyncio.create_task(executor.take_batch())
                elif open_ids and event in ("good", "bad"):
                    id = random.choice(open_ids)  # type: ignore[attr-defined]
                    script.end(id, rewards=(0.0, 1.0) if event == "good" else (0.0, 0.0), version=began[id])
                elif open_ids and event == "fail":
                    script.endings[random.choice(open_ids)].set_exception(OSError("x"))  # type: ignore[attr-defined]
                await turns()
                seen = executor.metrics()
                totals.update(seen)
                training = batch if taking.done() else 0
                assert seen["rollout/running"] + seen["rollout/ready"] + training <= (eta + 1) * batch
            taking.cancel()
            await asyncio.gather(taking, return_exceptions=True)
        assert len(trained) == len(set(trained))
        totals.update(executor.metrics())
        dropped = sum(n for name, n in totals.items() if name.startswith(("rollout/dropped", "rollout/filtered")))
        assert totals["rollout/started"] == totals["rollout/consumed"] + dropped == len(script.started)
        assert totals["rollout/consumed"] == len(trained)

    asyncio.run(run())


# --- versions --------------------------------------------------------------------------------------------------------


def sampling_play(sampler: FakeSampler, max_tokens: int = 4) -> Callable[[Task, int], Awaitable[Group]]:
    async def episode(task: Task, id: str, reward: float) -> ScoredEpisode:
        request = SampleRequest(prompt=int_array([1]), params=SamplingParams(max_tokens=max_tokens))
        step = Step(prompt=request.prompt, completion=await PartialEpisode().sample(sampler, request), action="")
        messages = (Message(role="user", content="x"),)
        played = Episode(id=id, task=task, seed=0, steps=(step,), messages=messages, temperature=1.0)
        return ScoredEpisode(episode=played, reward=Reward(total=reward))

    async def play(task: Task, group_id: int) -> Group:
        episodes = await asyncio.gather(*(episode(task, f"{group_id}.{n}", float(n)) for n in range(2)))
        return Group(id=group_id, task=task, episodes=tuple(episodes))

    return play


async def test_synchronous_training_sees_only_tokens_of_the_present_version() -> None:
    sampler = FakeSampler()
    async with scripted_executor(sampling_play(sampler), batch=2, publisher=Publisher([sampler])) as executor:
        for version in range(3):
            groups = await executor.take_batch()
            for taken in groups:
                assert taken.started_version == version
                for scored in taken.episodes:
                    tokens = scored.episode.steps[0].completion.tokens.tolist()
                    assert tokens == [version * 1000 + n for n in range(4)]
            executor.done(groups)
            await executor.publish(HANDLE)
        assert executor.metrics()["rollout/lag_max"] == 0
        assert sampler.version == executor.version == 3


async def test_sequence_that_spans_an_update_carries_both_versions() -> None:
    ticks: asyncio.Queue[None] = asyncio.Queue()
    sampler = FakeSampler(tick=ticks.get)
    executor = scripted_executor(sampling_play(sampler), batch=1, eta=1, publisher=Publisher([sampler]))
    async with executor:
        taking = asyncio.create_task(executor.take_batch())
        await turns()  # two groups of two episodes; every sequence has one token
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        publishing = asyncio.create_task(executor.publish(HANDLE))
        await turns()
        assert not publishing.done()  # waits for the samplers to acknowledge
        for _ in range(4):
            ticks.put_nowait(None)
        await publishing
        for _ in range(12):
            ticks.put_nowait(None)
        (taken,) = await executor.take_batch()
        completion = taken.episodes[0].episode.steps[0].completion
        assert completion.tokens.tolist() == [0, 1001, 1002, 1003]
        assert completion.versions.tolist() == [0, 1, 1, 1]
        assert (taken.head_version, taken.started_version) == (0, 0)


async def test_nothing_starts_while_weights_are_loaded() -> None:
    """A group that started then would be labelled with the version before its first token's."""
    loading, loaded = asyncio.Event(), asyncio.Event()

    class Slow(FakeSampler):
        async def load(self, handle: WeightsHandle, version: int) -> str:
            loading.set()
            await loaded.wait()
            return await super().load(handle, version)

    script = ScriptedGroups()
    async with scripted_executor(script.play, batch=1, eta=1, publisher=Publisher([Slow()])) as executor:
        taking = asyncio.create_task(executor.take_batch())
        await turns()
        script.end(0)
        groups = await taking
        publishing = asyncio.create_task(executor.publish(HANDLE))
        await loading.wait()
        executor.done(groups)
        script.endings[1].set_exception(OSError("gone"))
        await turns()
        assert script.started == [0, 1]
        assert executor.metrics()["rollout/dropped_failed"] == 1  # what ends is collected all the same
        loaded.set()
        await publishing
        await turns()
        assert script.started == [0, 1, 2]
        script.end(2, version=1)
        (taken,) = await executor.take_batch()
        assert (taken.id, taken.started_version) == (2, 1)


async def test_fingerprint_mismatch_ends_the_run() -> None:
    class Corrupting(FakeSampler):
        async def load(self, handle: WeightsHandle, version: int) -> str:
            await super().load(handle, version)
            return "xyz"

    sampler = Corrupting()
    async with scripted_executor(sampling_play(sampler), batch=1, publisher=Publisher([sampler])) as executor:
        executor.done(await executor.take_batch())
        with pytest.raises(RolloutError, match=r"sampler 0 \(Corrupting\)"):
            await executor.publish(HANDLE)
        assert executor.version == 0
        with pytest.raises(RolloutError):
            await executor.take_batch()


async def test_failed_publish_allows_no_further_batch() -> None:
    class Hanging(FakeSampler):
        async def pause(self, *, interrupt: bool) -> None:
            await asyncio.Event().wait()

    sampler = Hanging()
    publisher = Publisher([sampler], timeout_s=0.01)
    async with scripted_executor(sampling_play(sampler), batch=1, publisher=publisher) as executor:
        executor.done(await executor.take_batch())
        with pytest.raises(RolloutError, match="did not pause"):
            await executor.publish(HANDLE)
        with pytest.raises(RolloutError, match="did not pause"):
            await executor.take_batch()


# --- checkpoint ------------------------------------------------------------------------------------------------------


async def test_resumed_run_goes_on_where_it_was() -> None:
    """At eta = 0 the batches, ids and counts after a restart are those of the run that was not stopped."""

    async def run(executor: RolloutExecutor, steps: int) -> list[tuple[list[int], dict[str, float]]]:
        seen = []
        for _ in range(steps):
            groups = await executor.take_batch()
            executor.done(groups)
            await executor.publish(HANDLE)
            seen.append((ids(groups), executor.metrics()))
        return seen

    def build(drawn: Iterator[int]) -> RolloutExecutor:
        sampler = FakeSampler()
        play = sampling_play(sampler)

        def odd_ones(group: Group) -> bool:
            return group.id % 3 != 1

        return scripted_executor(
            play,
            batch=2,
            filters=(odd_ones,),
            publisher=Publisher([sampler]),
            next_task=lambda: Task(id=f"t{next(drawn)}"),
        )

    async with build(count()) as executor:
        whole = await run(executor, 4)
    cursor = count()
    async with build(cursor) as executor:
        first = await run(executor, 2)
        state = json.loads(json.dumps(executor.state_dict()))
    second_executor = build(cursor)
    second_executor.load_state_dict(state)
    async with second_executor:
        with pytest.raises(RolloutError, match="load_current"):
            await second_executor.take_batch()
        await second_executor.load_current(HANDLE)
        second = await run(second_executor, 2)
    assert first + second == whole
    assert [batch for batch, _ in whole] == [[0, 2], [3, 5], [6, 8], [9, 11]]


async def test_ready_groups_survive_and_running_ones_are_counted() -> None:
    script = ScriptedGroups()
    async with scripted_executor(script.play, batch=2, eta=1) as executor:
        taking = asyncio.create_task(executor.take_batch())
        await turns()
        for id in (0, 1, 2):
            script.end(id)
        executor.done(await taking)
        await executor.publish(HANDLE)
        await turns()
        assert executor.metrics()["rollout/ready"] == 1  # group 2; group 3 still runs
        state = json.loads(json.dumps(executor.state_dict()))
    again = ScriptedGroups()
    restored = scripted_executor(again.play, batch=2, eta=1)
    restored.load_state_dict(state)
    assert restored.version == 1
    async with restored:
        assert restored.metrics()["rollout/dropped_resume"] == 1
        taking = asyncio.create_task(restored.take_batch())
        await turns()
        assert again.started == [4, 5, 6]  # ids go on; (1 + 1) * 2 - 1 ready
        again.end(4, version=1)
        assert ids(await taking) == [2, 4]


async def test_bound_lowered_at_a_restart_holds_for_what_was_ready() -> None:
    script = ScriptedGroups()
    async with scripted_executor(script.play, batch=2, eta=1) as executor:
        taking = asyncio.create_task(executor.take_batch())
        await turns()
        for id in range(4):
            script.end(id)
        executor.done(await taking)
        await executor.publish(HANDLE)
        state = executor.state_dict()
    again = ScriptedGroups()
    restored = scripted_executor(again.play, batch=2, eta=0)
    restored.load_state_dict(state)  # groups 2 and 3 are ready, of version 0, and the run is at version 1
    async with restored:
        taking = asyncio.create_task(restored.take_batch())
        await turns()
        assert again.started == [4, 5]
        for id in (4, 5):
            again.end(id, version=1)
        assert ids(await taking) == [4, 5]
        assert restored.metrics()["rollout/dropped_stale"] == 2


async def test_damaged_state_is_refused() -> None:
    script = ScriptedGroups()
    state = scripted_executor(script.play).state_dict()
    with pytest.raises(CheckpointError, match="KeyError: 'ledger'"):
        scripted_executor(script.play).load_state_dict({"version": 1})
    live = {"id": 0, "task_id": "t", "started_version": 0, "state": "ready"}
    ledger = {"started": 1, "consumed": 0, "dropped": {}, "live": [live]}
    with pytest.raises(CheckpointError, match=r"ready groups \[0\]"):
        scripted_executor(script.play).load_state_dict({**state, "ledger": ledger})


class CountingBound(HeadBound):
    """A bound that counts how often it is asked."""

    asked = 0

    def verdict(self, group: Group, *, version: int) -> Verdict:
        CountingBound.asked += 1
        return super().verdict(group, version=version)


async def test_a_group_is_judged_when_it_ends_and_when_it_is_taken_not_each_time_another_ends() -> None:
    CountingBound.asked = 0
    script, batch = ScriptedGroups(), 20
    async with scripted_executor(
        script.play, batch=batch, eta=1, parts=ExecutorParts(policy=CountingBound(1))
    ) as executor:
        taking = asyncio.create_task(executor.take_batch())
        await turns()
        for id in range(batch):
            script.end(id)
            await turns()
        await taking
    assert CountingBound.asked == 2 * batch
