"""Whatever keeps failing ends in one error that names the real cause; whatever does not end is named with its group."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

import pytest

from headrace.data.task_source import TaskSource
from headrace.errors import RolloutError, SamplerError
from headrace.model.tiny import END_ID, make_tokenizer
from headrace.render import Renderer
from headrace.rollout.executor import RolloutExecutor
from headrace.rollout.executor.build import build_executor
from headrace.rollout.executor.drops import ConsecutiveDrops
from headrace.rollout.executor.settings import AsyncSettings
from headrace.rollout.filters import Filter, length
from headrace.rollout.group import GroupPlayer
from headrace.testing import FakeEnv, FakeRewardRunner, FakeSampler, run_virtual
from headrace.types import (
    Completion,
    Episode,
    FailedEpisode,
    SampleRequest,
    SamplingParams,
    ScoredEpisode,
    StepResult,
    Task,
    WeightsHandle,
)
from support.async_rollouts import HANDLE, HandSampler, executor_of, turns

TOKENIZER = make_tokenizer(("up", "count", "of", *"0123456789"))


class WordSampler(FakeSampler):
    """Ends its turn at once; after `alive` of them it is dead."""

    def __init__(self, alive: int = 10**9) -> None:
        super().__init__()
        self._left = alive

    async def sample(self, request: SampleRequest) -> Completion:
        self._left -= 1
        if self._left < 0:
            raise SamplerError("the engine is closed")
        made = await super().sample(request)
        return Completion(
            tokens=made.tokens * 0 + END_ID,
            sampler_logprobs=made.sampler_logprobs,
            raw_logprobs=made.raw_logprobs,
            versions=made.versions,
            stop=made.stop,
        )


def real(
    sampler: FakeSampler,
    *,
    env: Callable[[], FakeEnv] = FakeEnv,
    filters: tuple[Filter, ...] = (),
    eta: int = 1,
    size: int = 2,
    rewards: FakeRewardRunner | None = None,
) -> RolloutExecutor:
    player = GroupPlayer(
        group_size=size,
        make_env=env,
        sampler=sampler,
        renderer=Renderer(TOKENIZER, eos_tokens=(END_ID,)),
        reward_runner=rewards or FakeRewardRunner(),
        sampling=SamplingParams(max_tokens=1),
        max_turns=2,
        max_episode_tokens=100,
        timeout_s=100.0,
        run_seed=0,
    )
    settings = AsyncSettings(max_staleness=eta, max_consecutive_drops=6, task_timeout_s=100.0)
    source = TaskSource([Task(id="a"), Task(id="b")], 0)
    return build_executor(settings, batch_groups=2, samplers=[sampler], player=player, source=source, filters=filters)


class Broken(FakeEnv):
    def step(self, action: str) -> StepResult:
        raise ConnectionError("the simulator is gone")


async def train(executor: RolloutExecutor) -> None:
    async with executor:
        for _ in range(9):
            executor.done(await executor.take_batch())
            await executor.publish(HANDLE)


async def ends(executor: RolloutExecutor) -> str:
    with pytest.raises(RolloutError) as caught:
        await train(executor)
    return str(caught.value)


async def test_an_environment_that_always_raises() -> None:
    said = await ends(real(WordSampler(), env=Broken))
    assert "6 groups in a row were of no use (failed 6 times)" in said
    assert "ConnectionError: the simulator is gone" in said


async def test_a_filter_that_rejects_everything() -> None:
    said = await ends(real(WordSampler(), filters=(length(min_tokens=99),)))
    assert "6 groups in a row were of no use (filtered_too_short 6 times)" in said


async def test_an_engine_that_died() -> None:
    said = await ends(real(WordSampler(alive=13)))
    assert "the engine is closed" in said


def test_an_episode_that_hangs_fails_and_the_others_of_its_group_are_trained() -> None:
    class HangsOnce(WordSampler):
        """The second of every three sequences never comes back."""

        async def sample(self, request: SampleRequest) -> Completion:
            if self._left % 3 == 2:
                self._left -= 1
                await asyncio.Event().wait()
            return await super().sample(request)

    async def play() -> None:
        async with real(HangsOnce(alive=3 * 10**6), env=partial(FakeEnv, limit=1), size=3) as executor:
            for group in await executor.take_batch():
                assert [scored.episode.id for scored in group.episodes] == [f"{group.id}/0", f"{group.id}/2"]
                assert "not finished within 100 s; raise rl.async.task_timeout_s" in group.failed[0].reason
            counts = executor.metrics()
            assert counts["rollout/dropped_timeout"] == 0
            assert counts["rollout/failed_episodes"] >= 2

    run_virtual(play())


def test_scores_that_hang_cost_a_group_and_the_error_says_so() -> None:
    class Hangs(FakeRewardRunner):
        async def score(self, episodes: Sequence[Episode]) -> tuple[ScoredEpisode | FailedEpisode, ...]:
            return await asyncio.Event().wait()  # type: ignore[return-value]

    async def play() -> None:
        async with real(WordSampler(), rewards=Hangs()) as executor:
            with pytest.raises(RolloutError, match=r"timeout 6 times.*was not played and scored in 200 s"):
                await executor.take_batch()

    run_virtual(play())


async def test_an_engine_that_dies_at_a_publish() -> None:
    class Dying(WordSampler):
        async def load(self, handle: WeightsHandle, version: int) -> str:
            raise SamplerError("CUDA out of memory")

    executor = real(Dying())
    async with executor:
        executor.done(await executor.take_batch())
        with pytest.raises(RolloutError, match=r"sampler 0 .* could not load the weights: CUDA out of memory"):
            await executor.publish(HANDLE)
        with pytest.raises(RolloutError, match="CUDA out of memory"):
            await executor.take_batch()


async def test_sequences_that_do_not_come_back_after_an_interruption_are_an_error_not_a_hang() -> None:
    class Deaf(HandSampler):
        async def pause(self, *, interrupt: bool) -> None:
            return None

        async def load(self, handle: WeightsHandle, version: int) -> str:
            self._version = version
            return handle.fingerprint

    executor = executor_of(Deaf(), max_staleness=1, grace_s=0.01)
    async with executor:
        taking = asyncio.create_task(executor.take_batch())
        await turns()
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        with pytest.raises(RolloutError, match=r"4 sequences were interrupted and did not come back within 0\.01 s"):
            await executor.publish(HANDLE)


async def test_a_stall_says_what_is_pending_since_when_and_how_far_it_is() -> None:
    sampler = HandSampler()
    executor = executor_of(sampler, max_staleness=1, tokens=lambda task: (50,), size=1)
    async with executor:
        taking = asyncio.create_task(executor.take_batch())
        await turns()
        await sampler.step(3)
        assert executor.pending() == (
            "group 0 of task t0 (since version 0, 0 tokens sampled), "
            "group 1 of task t1 (since version 0, 0 tokens sampled)"
        )
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        await executor.publish(HANDLE)
        assert executor.pending().startswith("group 0 of task t0 (since version 0, 4 tokens sampled)")


def test_the_error_comes_at_the_limit_and_a_useful_group_starts_anew() -> None:
    drops = ConsecutiveDrops(limit=3)
    assert drops.add("failed", "port 1 is closed") is None
    assert drops.add("timeout", "") is None
    drops.clear()
    assert [drops.add("failed", "") for _ in range(2)] == [None, None]
    said = str(drops.add("timeout", ""))
    assert "3 groups in a row were of no use (failed 2 times, timeout 1 times)" in said
    assert "the last error was: port 1 is closed" in said
