"""Fifteen defects of an earlier implementation of segment-wise asynchronous PPO, each as a test that it is not here.

D1   an accepted group is handed to a scorer that cannot take it:
     test_d1_d3_segment_wise_rollouts_run_from_end_to_end
D2   an exception on the way out leaks a running slot:
     test_d2_whatever_a_group_ends_with_its_slot_is_free
D3   nothing ever fills the next-version log-probs:
     test_d1_d3_segment_wise_rollouts_run_from_end_to_end
D4   a number that the loss reads is not in the configuration:
     test_d4_every_key_reaches_what_it_is_for
D5   a filtered group is credited twice: capacity inflates:
     test_d5_filtered_groups_do_not_inflate_capacity
D6   a limit is added after the minimum: concurrency is exceeded:
     test_d6_a_limit_never_raises_what_another_allows
D7   a purged group is not credited: capacity leaks to deadlock:
     test_d7_any_number_of_stale_drops_leaves_capacity_whole
D8   scoring walks wrappers, and its errors are swallowed:
     test_d8_a_scorer_that_fails_ends_the_run_with_its_error
D9   version 0 is taken for "never":
     test_d9_version_zero_is_scored_and_judged_like_any_other
D10  only the first member of a group is looked at:
     test_d10_a_group_is_as_old_as_its_oldest_member
D11  the version is read once, before a long wait:
     test_d11_the_bound_is_that_of_the_moment_a_batch_is_taken
D12  at lag 1 the weight is 1 in place of proximal / sampler:
     test_d12_at_lag_one_the_weight_leads_to_the_proximal_policy
D13  after a second interruption nothing is scored any more:
     test_d13_every_segment_of_a_sequence_is_scored
D14  putting back into a bounded queue loses groups:
     test_d14_a_sweep_keeps_every_group_it_does_not_drop
D17  importing changes the event loop; capacity is scaled twice:
     test_d17_an_import_changes_nothing,
     test_d17_capacity_does_not_depend_on_samplers
"""

import asyncio
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.algo import correction
from headrace.algo.correction import BehaviourCorrection, BoundRule, MissingRule, behaviour_weights
from headrace.algo.staleness import HeadBound, LiveCounts, SegmentWise, Verdict
from headrace.config import AsyncConfig, load_config
from headrace.errors import RolloutError, SamplerError
from headrace.loops.step_batch import CorrectionSettings
from headrace.rollout.executor.admission import Admission
from headrace.rollout.executor.ready_buffer import ReadyBuffer
from headrace.rollout.executor.settings import StaleAction
from headrace.rollout.filters import reward_spread
from headrace.rollout.next_logprobs import NextVersionScorer
from headrace.rollout.publisher import Interrupt, Publisher
from headrace.testing import FakeSampler
from headrace.types import Datum, FloatArray, Group, IntArray, Task, float_array, int_array
from headrace.wiring.build import loss
from headrace.wiring.build.loss import make_correction, make_loss
from headrace.wiring.build.rollout_executor import make_settings
from support.async_rollouts import HANDLE, HandSampler, executor_of, ids, turns
from support.rollout_groups import group
from support.scripted_groups import ScriptedGroups, scripted_executor


async def test_d1_d3_segment_wise_rollouts_run_from_end_to_end() -> None:
    """At eta = 3 every token that is trained two or more versions after it was sampled has its next log-prob."""
    sampler = HandSampler()
    executor = executor_of(
        sampler,
        max_staleness=3,
        next_logprobs=True,
        names=["long", "a", "b"],
        tokens=lambda t: (12,) if t.id == "long" else (2,),
    )
    old = 0
    async with executor:
        for _ in range(12):
            taking = asyncio.create_task(executor.take_batch())
            while not taking.done():
                await sampler.step()
            for taken in taking.result():
                for scored in taken.episodes:
                    for step in scored.episode.steps:
                        made = step.completion
                        lags = executor.version - made.versions
                        known = np.full(len(lags), np.nan) if made.next_logprobs is None else made.next_logprobs
                        assert not np.isnan(known[lags >= 2]).any()
                        np.testing.assert_array_equal(known[lags >= 2], -2.0 - made.versions[lags >= 2])
                        old += int((lags >= 2).sum())
            executor.done(taking.result())
            await sampler.step(2)
            await executor.publish(HANDLE)
    assert old > 0


@pytest.mark.parametrize("ending", ["raises", "is cancelled", "takes too long", "is filtered", "fails"])
async def test_d2_whatever_a_group_ends_with_its_slot_is_free(ending: str) -> None:
    """30 groups end badly where two may run: the 31st and 32nd can only run if every slot came back."""

    async def play(task: Task, group_id: int) -> Group:
        if group_id < 30:
            match ending:
                case "raises":
                    raise ValueError("bad world")
                case "is cancelled":
                    current = asyncio.current_task()
                    assert current is not None
                    current.cancel()
                    await asyncio.sleep(0)
                case "takes too long":
                    await asyncio.Event().wait()
                case "is filtered":
                    return group(group_id, rewards=(1.0, 1.0))
                case "fails":
                    return group(group_id, rewards=(), num_failed=2)
        return group(group_id)

    executor = scripted_executor(play, batch=2, max_running=2, drops=99, timeout_s=0.005, filters=(reward_spread(),))
    async with executor:
        assert ids(await executor.take_batch()) == [30, 31]


# a value that is not the default, and what the executor's settings or the weights of stale tokens make of it
SETTINGS = {
    "max_staleness": (3, 3),
    "max_running": (7, 7),
    "stale_action": ("mask", StaleAction.MASK),
    "interrupt": ("drain", Interrupt.DRAIN),
    "drain_s": (1.5, 1.5),
    "oversampling": (1.25, 1.25),
    "replay_groups": (2, 2),
    "slow_wait_s": (2.5, 2.5),
    "task_timeout_s": (3.5, 3.5),
    "max_consecutive_drops": (9, 9),
    "lockstep_tokens": (4, 4),
}
WEIGHTS = {
    "behaviour_weight": ("one_step", "behaviour", BehaviourCorrection.ONE_STEP),
    "weight_cap": (3.0, "cap", 3.0),
    "weight_floor": (0.25, "floor", 0.25),
    "cap_action": ("clamp", "bound", BoundRule.CLAMP),
}
SELECTION = ("select", "select_score", "limits")  # of groups, not of tokens: test_selection.py, test_parts.py


def test_d4_every_key_reaches_what_it_is_for() -> None:
    text = '[rl]\nsteps = 5\nloss = "decoupled_ppo"\ntasks = { type = "env", name = "key_door" }'
    rl = load_config(text, file="run.toml").rl
    assert rl is not None
    assert {*SETTINGS, *WEIGHTS, *SELECTION} == {field.name for field in fields(AsyncConfig)}
    for key, (written, meant) in SETTINGS.items():
        made = make_settings(AsyncConfig(**{key: written}))
        assert getattr(made, key) == meant != getattr(make_settings(AsyncConfig()), key), key
    for key, (written, name, meant) in WEIGHTS.items():
        asked, unasked = (
            replace(rl, asynchronous=AsyncConfig(**{key: written})),
            replace(rl, asynchronous=AsyncConfig()),
        )
        weights = [getattr(make_correction(c, make_loss(c)), name) for c in (asked, unasked)]
        assert weights[0] == meant != weights[1], key


async def test_d5_filtered_groups_do_not_inflate_capacity() -> None:
    """B = 2, eta = 1: never more than four are live, however many were rejected."""
    script = ScriptedGroups()
    async with scripted_executor(script.play, batch=2, eta=1, drops=999, filters=(reward_spread(),)) as executor:
        taking = asyncio.create_task(executor.take_batch())
        for _ in range(20):
            await turns()
            open_ids = [id for id in script.started if not script.endings[id].done()]
            assert len(open_ids) == 4
            script.end(open_ids[-1], rewards=(1.0, 1.0))
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)


@given(st.integers(0, 9), st.integers(0, 9), st.lists(st.integers(-3, 50), max_size=4))
def test_d6_a_limit_never_raises_what_another_allows(running: int, ready: int, values: list[int]) -> None:
    limits = tuple((lambda counts, value=value: value) for value in values)
    counts = LiveCounts(running=running, ready=ready)
    free = Admission(batch_groups=3, max_staleness=2, max_running=5).capacity(counts, batch_open=True)
    got = Admission(batch_groups=3, max_staleness=2, max_running=5, limits=limits).capacity(counts, batch_open=True)
    assert got == max(0, min([free, *values]))
    assert running + got <= max(5, running)


async def test_d7_any_number_of_stale_drops_leaves_capacity_whole() -> None:
    """eta = 2, B = 8: ten times as many are purged as once made a deadlock, and there is a batch all the same."""
    script = ScriptedGroups()
    async with scripted_executor(script.play, batch=8, eta=2, drops=999) as executor:
        for _ in range(10):
            taking = asyncio.create_task(executor.take_batch())
            await turns()
            taking.cancel()
            await asyncio.gather(taking, return_exceptions=True)
            for id in [id for id in script.started if not script.endings[id].done()]:
                script.end(id, version=executor.version)
            await turns()
            for _ in range(3):
                await executor.publish(HANDLE)
        assert executor.metrics()["rollout/dropped_stale"] >= 170
        taking = asyncio.create_task(executor.take_batch())
        await turns()
        open_ids = [id for id in script.started if not script.endings[id].done()]
        assert len(open_ids) == 24
        for id in open_ids[:8]:
            script.end(id, version=executor.version)
        assert len(await taking) == 8


async def test_d8_a_scorer_that_fails_ends_the_run_with_its_error() -> None:
    class Dead(FakeSampler):
        async def score(self, sequences: list[IntArray], temperature: float = 1.0) -> tuple[FloatArray, ...]:  # type: ignore[override]
            raise SamplerError("out of memory")

    async with executor_of(Dead(), max_staleness=2, next_logprobs=True) as executor:
        executor.done(await executor.take_batch())
        await executor.publish(HANDLE)
        executor.done(await executor.take_batch())
        with pytest.raises(RolloutError, match="out of memory"):
            await executor.publish(HANDLE)
        with pytest.raises(RolloutError, match="out of memory"):
            await executor.take_batch()


async def test_d9_version_zero_is_scored_and_judged_like_any_other() -> None:
    sampler = HandSampler()
    async with executor_of(sampler, max_staleness=2, next_logprobs=True, tokens=lambda task: (1,)) as executor:
        taking = asyncio.create_task(executor.take_batch())
        await turns()
        await sampler.step(2)
        executor.done(await taking)
        await executor.publish(HANDLE)
        executor.done(await executor.take_batch())
        await executor.publish(HANDLE)
        [waited] = await executor.take_batch()
        made = waited.episodes[0].episode.steps[0].completion
        assert made.versions.tolist() == [0]
        np.testing.assert_array_equal(made.next_logprobs, np.float32([-2]))


def test_d10_a_group_is_as_old_as_its_oldest_member() -> None:
    young, old = group(0, versions=(4, 4), rewards=(0.0,)), group(0, versions=(1, 4), rewards=(1.0,))
    mixed = Group(id=0, task=young.task, episodes=(*young.episodes, *old.episodes), started_version=1)
    assert HeadBound(2).verdict(mixed, version=4) is Verdict.DROP
    assert SegmentWise(2).verdict(mixed, version=4) is Verdict.MASK


async def test_d11_the_bound_is_that_of_the_moment_a_batch_is_taken() -> None:
    """A group that was fresh when the wait before began is stale when the next batch is asked for."""
    script = ScriptedGroups()
    async with scripted_executor(script.play, batch=1, eta=1, max_running=2) as executor:
        taking = asyncio.create_task(executor.take_batch())
        await turns()
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        script.end(0)
        await turns()
        await executor.publish(HANDLE)
        assert executor.metrics()["rollout/ready"] == 1  # lag 1
        await executor.publish(HANDLE)
        taking = asyncio.create_task(executor.take_batch())
        await turns()
        script.end(1)  # of version 0, at version 2
        await turns()
        assert not taking.done()
        script.end(script.started[-1], version=2)
        assert (await taking)[0].head_version == 2


@pytest.mark.parametrize("known", [np.nan, -9.0])
def test_d12_at_lag_one_the_weight_leads_to_the_proximal_policy(known: float) -> None:
    """b = exp(-0.5 - -1.0) = e^0.5, whether or not something was recorded for the next version."""
    arrays = {
        "weights": float_array([1.0]),
        "versions": float_array([6.0]),
        "sampler_logprobs": float_array([-1.0]),
        "proximal_logprobs": float_array([-0.5]),
        "next_logprobs": float_array([known]),
    }
    datum = Datum(inputs=int_array([1]), targets=int_array([2]), arrays=arrays)
    out = behaviour_weights([datum], version=7, behaviour=BehaviourCorrection.ONE_STEP, missing=MissingRule.MASK)
    assert out.data[0].arrays["behaviour_weights"][0] == pytest.approx(np.exp(0.5))


async def test_d13_every_segment_of_a_sequence_is_scored() -> None:
    """Four updates inside one sequence: each segment has the log-prob of its own next version."""
    sampler = HandSampler()
    async with executor_of(
        sampler, max_staleness=9, max_running=1, next_logprobs=True, tokens=lambda t: (14,)
    ) as executor:
        for _ in range(4):
            taking = asyncio.create_task(executor.take_batch())
            await turns()
            await sampler.step(2)
            taking.cancel()
            await asyncio.gather(taking, return_exceptions=True)
            await executor.publish(HANDLE)
        taking = asyncio.create_task(executor.take_batch())
        await sampler.step(14)
        [taken] = await taking
    made = taken.episodes[0].episode.steps[0].completion
    assert set(made.versions.tolist()) == {0, 1, 2, 3, 4}
    assert made.next_logprobs is not None
    expected = np.where(made.versions == 4, np.nan, -2.0 - made.versions)
    np.testing.assert_array_equal(made.next_logprobs, np.float32(expected))


@settings(max_examples=50)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.integers(5, 9), st.integers(0, 4))
def test_d14_a_sweep_keeps_every_group_it_does_not_drop(heads: list[int], version: int, eta: int) -> None:
    buffer = ReadyBuffer(max_groups=len(heads))  # as full as it may be
    for id, head in enumerate(heads):
        buffer.put(group(id, versions=(head, head), started_version=head))
    dropped = buffer.sweep(lambda one: HeadBound(eta).verdict(one, version=version))
    assert sorted([*ids(dropped), *ids(list(buffer))]) == list(range(len(heads)))
    assert all(version - heads[one.id] > eta for one in dropped)
    assert all(version - heads[one.id] <= eta for one in buffer)


def test_d17_an_import_changes_nothing() -> None:
    code = (
        "import asyncio; before = asyncio.get_event_loop_policy().__class__; "
        "import headrace.rollout.executor.build, sys; "
        "assert asyncio.get_event_loop_policy().__class__ is before; assert 'uvloop' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("num_samplers", [1, 4])
async def test_d17_capacity_does_not_depend_on_samplers(num_samplers: int) -> None:
    script = ScriptedGroups()
    publisher = Publisher([FakeSampler() for _ in range(num_samplers)])
    async with scripted_executor(script.play, batch=2, eta=1, publisher=publisher) as executor:
        taking = asyncio.create_task(executor.take_batch())
        await turns()
        assert script.started == [0, 1, 2, 3]
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)


# --- three of these defects planted, each noticed by its test --------------------------------------------------------


async def errors_of_scoring_are_swallowed(
    self: NextVersionScorer, index: int, sequences: Any, temperature: float
) -> Any:
    try:
        return await SCORE_ON(self, index, sequences, temperature)
    except RolloutError:
        return [float_array(np.full(len(sequence), np.nan)) for sequence in sequences]


def one_at_lag_one(datum: Datum, version: int, behaviour: Any, missing: Any) -> Any:
    """The sampler's own log-prob stands where the next version is the proximal policy."""
    log_weights, unknown = LOG_WEIGHTS(datum, version, behaviour, missing)
    return np.where(version - datum.arrays["versions"] == 1, 0.0, log_weights), unknown


def without_a_floor(**more: Any) -> CorrectionSettings:
    return CorrectionSettings(**{**more, "floor": 0.0})


SCORE_ON, LOG_WEIGHTS = NextVersionScorer._score_on, correction._log_weights
D4, D8, D12 = (
    test_d4_every_key_reaches_what_it_is_for,
    test_d8_a_scorer_that_fails_ends_the_run_with_its_error,
    partial(test_d12_at_lag_one_the_weight_leads_to_the_proximal_policy, np.nan),
)
PLANTED: dict[str, tuple[object, str, object, Callable[[], Any]]] = {
    "a number of the file does not reach the weights": (loss, "CorrectionSettings", without_a_floor, D4),
    "errors of scoring are swallowed": (NextVersionScorer, "_score_on", errors_of_scoring_are_swallowed, D8),
    "at a lag of one nothing is corrected": (correction, "_log_weights", one_at_lag_one, D12),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_single_test_catches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, attribute, fault, check = PLANTED[name]
    _run(check)  # passes without the fault
    monkeypatch.setattr(target, attribute, fault)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        _run(check)


def _run(check: Callable[[], Any]) -> None:
    if (made := check()) is not None:
        asyncio.run(made)
