"""Log-probs under the next version: scored once, under exactly that version, wherever the token is by then."""

import asyncio

import numpy as np
import pytest

from headrace.errors import RolloutError, SamplerError
from headrace.rollout.next_logprobs import NextVersionScorer, SampledSteps, fill_missing, missing_mask
from headrace.rollout.publisher import Interrupt, Publisher
from headrace.testing import FakeSampler
from headrace.types import Completion, FloatArray, IntArray, SampleRequest, Step, StopReason, float_array, int_array
from support.async_rollouts import HANDLE, HandSampler, executor_of, turns


def completion(versions: list[int], known: list[float] | None = None) -> Completion:
    logprobs = float_array([-0.5] * len(versions))
    return Completion(
        tokens=int_array(range(10, 10 + len(versions))),
        sampler_logprobs=logprobs,
        raw_logprobs=logprobs,
        versions=int_array(versions),
        stop=StopReason.STOP,
        next_logprobs=None if known is None else float_array(known),
    )


def step(prompt: list[int], made: Completion) -> Step:
    return Step(prompt=int_array(prompt), completion=made, action="")


def test_only_tokens_of_the_version_before_are_lacking_and_only_once() -> None:
    made = completion([5, 5, 6, 7], [-1.0, np.nan, np.nan, np.nan])
    assert missing_mask(made, version=6).tolist() == [False, True, False, False]
    assert missing_mask(made, version=7).tolist() == [False, False, True, False]
    assert missing_mask(completion([0, 1]), version=1).tolist() == [
        True,
        False,
    ]  # version 0 is like any other


def test_what_is_known_is_never_written_over() -> None:
    made = completion([5, 5, 6], [-1.0, np.nan, np.nan])
    after = fill_missing(made, float_array([-8.0, -8.0, -8.0]), version=6)
    np.testing.assert_array_equal(after.next_logprobs, np.float32([-1.0, -8.0, np.nan]))
    assert fill_missing(after, float_array([-9.0, -9.0, -9.0]), version=6) is after


async def test_the_worked_example() -> None:
    """a b c of version 5, d e of 6, f of 7: each is scored under its next version, and by no later one."""
    made = completion([5, 5, 5, 6, 6, 7])
    for version in (6, 7, 8, 9):
        sampler = HandSampler()
        await sampler.load(HANDLE, version)
        episode = SampledSteps(steps=(step([1, 2], made),), temperature=1.0)
        [[made]] = await NextVersionScorer([sampler]).fill([episode], version=version)
        if version == 9:
            assert sampler.scored == []
    np.testing.assert_array_equal(made.next_logprobs, np.float32([-7, -7, -7, -8, -8, -9]))


async def test_turns_of_one_conversation_are_scored_as_the_model_saw_them() -> None:
    """The second prompt goes on from the first turn: one sequence is scored, the longest, and both turns are in it."""
    first, second = completion([0, 0]), completion([0])
    rewritten = step([1, 2, 99], completion([0]))
    steps = (step([1, 2], first), step([1, 2, 10, 11, 5], second), rewritten)
    sampler = HandSampler()
    await sampler.load(HANDLE, 1)
    [made] = await NextVersionScorer([sampler]).fill([SampledSteps(steps=steps, temperature=1.0)], version=1)
    assert sampler.scored == [(1, [1, 2, 10, 11, 5, 10]), (1, [1, 2, 99, 10])]
    assert [one.next_logprobs.tolist() for one in made if one.next_logprobs is not None] == [[-2, -2], [-2], [-2]]


async def test_scores_are_of_the_temperature_the_tokens_were_sampled_with() -> None:
    class Tempered(FakeSampler):
        async def score(self, sequences: list[IntArray], temperature: float = 1.0) -> tuple[FloatArray, ...]:  # type: ignore[override]
            return tuple(float_array([np.nan, *[-temperature] * (len(one) - 1)]) for one in sequences)

    episodes = [SampledSteps(steps=(step([1], completion([0])),), temperature=t) for t in (0.5, 2.0, 0.5)]
    made = await NextVersionScorer([Tempered(), Tempered()]).fill(episodes, version=1)
    assert [float(one.next_logprobs[0]) for [one] in made if one.next_logprobs is not None] == [-0.5, -2.0, -0.5]


async def test_a_failing_score_leaves_everything_as_it_was_and_is_named() -> None:
    class Dead(FakeSampler):
        async def score(self, sequences: list[IntArray], temperature: float = 1.0) -> tuple[FloatArray, ...]:  # type: ignore[override]
            raise SamplerError("out of memory")

    with pytest.raises(RolloutError, match="sampler 0 could not score 1 sequences under the next version: out of mem"):
        await NextVersionScorer([Dead()]).fill(
            [SampledSteps(steps=(step([1], completion([0])),), temperature=1.0)], version=1
        )


async def test_a_score_that_does_not_come_is_named() -> None:
    class Deaf(FakeSampler):
        async def score(self, sequences: list[IntArray], temperature: float = 1.0) -> tuple[FloatArray, ...]:  # type: ignore[override]
            return await asyncio.Event().wait()  # type: ignore[return-value]

    with pytest.raises(RolloutError, match=r"sampler 0 could not score 1 sequences .* within 0\.01 s"):
        await NextVersionScorer([Deaf()], timeout_s=0.01).fill(
            [SampledSteps(steps=(step([1], completion([0])),), temperature=1.0)], version=1
        )


# --- in the executor -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interrupt", [Interrupt.ABORT, Interrupt.INFLIGHT])
async def test_ready_and_running_groups_are_scored_while_their_next_version_is_loaded(interrupt: Interrupt) -> None:
    """eta = 3, B = 1. Short tasks wait in the buffer, the long one runs on, across three updates."""
    sampler = HandSampler()
    executor = executor_of(
        sampler,
        max_staleness=3,
        next_logprobs=True,
        names=["a", "b", "c", "long"],
        publisher=Publisher([sampler], interrupt=interrupt),
        reads=interrupt is Interrupt.ABORT,
        tokens=lambda t: (9,) if t.id == "long" else (2,),
    )
    async with executor:
        taking = asyncio.create_task(executor.take_batch())
        await turns()
        await sampler.step(3)
        batch = await taking
        assert [group.task.id for group in batch] == ["a"]
        assert batch[0].episodes[0].episode.steps[0].completion.next_logprobs is None
        executor.done(batch)
        await executor.publish(HANDLE)  # b and c are ready, "long" has some tokens: all of version 0
        assert sampler.scored == []
        await sampler.step(2)
        batch = await executor.take_batch()
        assert [group.task.id for group in batch] == ["b"]
        young = batch[0].episodes[1].episode.steps[0].completion
        assert (young.versions.tolist(), young.next_logprobs) == ([0, 0], None)  # one version old: it needs none
        executor.done(batch)
        await executor.publish(HANDLE)
        await sampler.step(2)
        batch = await executor.take_batch()
        assert [group.task.id for group in batch] == ["c"]
        waited = batch[0].episodes[1].episode.steps[0].completion
        assert waited.versions.tolist() == [0, 0]
        np.testing.assert_array_equal(waited.next_logprobs, np.float32([-2, -2]))
        executor.done(batch)
        await executor.publish(HANDLE)
        await sampler.step(12)
        [group] = await executor.take_batch()
        assert group.task.id == "long"
        # read off when it went on, a token is scored under the version after it; by calls, when one more comes
        newest = 2 if interrupt is Interrupt.ABORT else 1
        for scored in group.episodes:
            made = scored.episode.steps[0].completion
            assert set(made.versions.tolist()) == {0, 1, 2, 3}
            assert made.next_logprobs is not None
            expected = np.where(made.versions > newest, np.nan, -2.0 - made.versions)
            np.testing.assert_array_equal(made.next_logprobs, np.float32(expected))
    asked = [(version, len(tokens)) for version, tokens in sampler.scored]
    waiting, running = [(1, 4)] * 2, [pair for pair in asked if pair[1] > 4]  # both episodes of c: 2 + 2 tokens
    assert [pair for pair in asked if pair[1] == 4] == waiting
    assert [version for version, _ in running] == ([] if interrupt is Interrupt.ABORT else [1, 1, 2, 2])


async def test_turns_that_ended_before_an_update_are_scored_with_the_one_that_is_open() -> None:
    sampler = HandSampler()
    executor = executor_of(sampler, max_staleness=2, next_logprobs=True, max_running=1, tokens=lambda task: (2, 5))
    async with executor:
        taking = asyncio.create_task(executor.take_batch())
        await turns()
        await sampler.step(4)  # the first turn has ended, two tokens of the second
        await executor_publish(executor, taking)
        taking = asyncio.create_task(executor.take_batch())
        await sampler.step(8)
        [group] = await taking
        first, second = (step.completion for step in group.episodes[0].episode.steps)
        assert first.versions.tolist() == [0, 0]
        np.testing.assert_array_equal(first.next_logprobs, np.float32([-2, -2]))
        assert second.versions.tolist()[:2] == [0, 0]
        known = second.next_logprobs
        assert known is not None
        np.testing.assert_array_equal(known, np.where(second.versions == 0, np.float32(-2), np.float32(np.nan)))
    assert sampler.scored == [], "all of it was read again when it went on"


async def executor_publish(executor: object, taking: "asyncio.Task[object]") -> None:
    """Publish in the middle of waiting: the batch is given up and asked for again."""
    taking.cancel()
    await asyncio.gather(taking, return_exceptions=True)
    await executor.publish(HANDLE)  # type: ignore[attr-defined]


async def test_nothing_is_scored_unless_asked_for() -> None:
    sampler = HandSampler()
    async with executor_of(sampler, max_staleness=2, tokens=lambda task: (1,)) as executor:
        for _ in range(3):
            taking = asyncio.create_task(executor.take_batch())
            await turns()
            await sampler.step(2)
            executor.done(await taking)
            await executor.publish(HANDLE)
    assert sampler.scored == []


async def test_what_was_cut_off_and_is_still_on_its_way_back_is_waited_for() -> None:
    """A sampler elsewhere says that it has stopped before its replies are here."""

    class Late(HandSampler):
        async def sample(self, request: SampleRequest) -> Completion:
            made = await super().sample(request)
            await turns(200)
            return made

    sampler = Late()
    async with executor_of(
        sampler, max_staleness=2, next_logprobs=True, reads=False, tokens=lambda task: (50,)
    ) as executor:
        for _ in range(2):
            taking = asyncio.create_task(executor.take_batch())
            await turns()
            await sampler.step(3)
            await executor_publish(executor, taking)
        saved = [
            turn["completion"]
            for episodes in executor.state_dict()["journals"].values()
            for episode in episodes
            for turn in episode["turns"]
        ]
    assert saved
    for one in saved:
        assert sorted(set(one["versions"])) == [0, 1]
        assert one["next_logprobs"] == [-2.0 if version == 0 else None for version in one["versions"]]
