"""Faults that others have had, planted one by one: each is noticed by the machines, or they are not worth having.

Most are defects of published systems: slots that leak or are credited twice, bounds that are checked too early, version
labels that are off. A mutant is "caught" when the machine that passes without it fails with it.
"""

import asyncio
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from headrace.algo import datum as datum_module
from headrace.algo.staleness import HeadBound, LiveCounts, Verdict
from headrace.rollout import next_logprobs
from headrace.rollout.executor import RolloutExecutor, state
from headrace.rollout.executor import executor as executor_module
from headrace.rollout.executor.admission import Admission
from headrace.rollout.executor.ledger import Drop, Ledger
from headrace.rollout.executor.ready_buffer import ReadyBuffer
from headrace.rollout.executor.selection import TakeFirst
from headrace.rollout.executor.task_runner import TaskRunner
from headrace.rollout.next_logprobs import NextVersionScorer
from headrace.rollout.partial_rollout import PartialEpisode, PartialRollouts
from headrace.testing import FakeSampler
from headrace.types import Completion, Datum, Group, SampleRequest, float_array, int_array
from support.executor_sim import ExecutorSim, trials
from support.ledger_machine import LedgerMachine

Patch = Callable[[pytest.MonkeyPatch], None]
SEARCH = settings(
    max_examples=200,
    stateful_step_count=25,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],  # one failure is enough, its smallest form is of no interest
    suppress_health_check=list(HealthCheck),
    print_blob=False,
)


def patched(target: object, name: str, value: object) -> Patch:
    return lambda monkeypatch: monkeypatch.setattr(target, name, value)


# --- counts ----------------------------------------------------------------------------------------------------------


class LeakOnCancel(Ledger):
    """A cancelled group keeps its slot."""

    def drop(self, id: int, reason: str) -> None:
        if reason != Drop.CANCELLED:
            super().drop(id, reason)


class CreditTwice(Admission):
    """Every group that was given up adds to the room for good."""

    extra = 0
    before = LiveCounts()

    def capacity(self, counts: LiveCounts, *, batch_open: bool, waiting: bool = True) -> int:
        self.extra += max(0, self.before.live - counts.live)
        self.before = counts
        return super().capacity(counts, batch_open=batch_open, waiting=waiting) + self.extra


class ModifierAfterMin(Admission):
    """What a user's limit would add is added to the bound instead of being one more bound."""

    def capacity(self, counts: LiveCounts, *, batch_open: bool, waiting: bool = True) -> int:
        limits, self._limits = self._limits, ()
        try:
            bound = super().capacity(counts, batch_open=batch_open, waiting=waiting)
        finally:
            self._limits = limits
        return bound + sum(limit(counts) > 0 for limit in limits)


class ForgetsTraining(Admission):
    """Groups in training are not live."""

    def capacity(self, counts: LiveCounts, *, batch_open: bool, waiting: bool = True) -> int:
        return super().capacity(replace(counts, training=0), batch_open=batch_open, waiting=waiting)


class LifetimeCounts(Admission):
    """Room follows from how many were ever accepted, a count that a restart loses."""

    accepted = seen = 0

    def capacity(self, counts: LiveCounts, *, batch_open: bool, waiting: bool = True) -> int:
        self.accepted += max(0, counts.ready + counts.training - self.seen)
        self.seen = counts.ready + counts.training
        room = (self._max_staleness + 1) * self._batch_groups - self.accepted - counts.running
        return max(0, min(self._max_running - counts.running, room))


class ForgetsReady(Ledger):
    """What waited when the checkpoint was written is not live when it is loaded."""

    def load_state_dict(self, state: Any) -> None:
        kept = [entry for entry in state["live"] if entry["state"] != "ready"]
        lost = len(state["live"]) - len(kept)
        super().load_state_dict({**state, "live": kept, "started": state["started"] - lost})


class MovesTwice(Ledger):
    """A group that was consumed may be dropped afterwards."""

    def drop(self, id: int, reason: str) -> None:
        if id in self._live:
            super().drop(id, reason)


LEDGER_MUTANTS: dict[str, dict[str, type]] = {
    "a cancelled group keeps its slot": {"ledger_class": LeakOnCancel},
    "a group that was given up is credited twice": {"admission_class": CreditTwice},
    "a modifier is added after the minimum": {"admission_class": ModifierAfterMin},
    "groups in training are not live": {"admission_class": ForgetsTraining},
    "room follows from lifetime counts": {"admission_class": LifetimeCounts},
    "a restart forgets what is ready": {"ledger_class": ForgetsReady},
    "a group ends twice": {"ledger_class": MovesTwice},
}


@pytest.mark.parametrize("name", LEDGER_MUTANTS)
def test_the_ledgers_machine_catches(name: str) -> None:
    machine = type("Mutant", (LedgerMachine,), LEDGER_MUTANTS[name])
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        run_state_machine_as_test(machine, settings=SEARCH)


# --- the executor ----------------------------------------------------------------------------------------------------


def cancellation_is_not_counted(self: TaskRunner, id: int, task: "asyncio.Task[Any]") -> None:
    if task.cancelled():
        del self._tasks[id]  # and nobody hears of it
        return
    FINISHED(self, id, task)


FINISHED = TaskRunner._finished
PUBLISH = RolloutExecutor.publish


def sweep_without_credit(self: RolloutExecutor) -> None:
    self._state._ready.sweep(self._decide)


async def publish_wakes_nobody(self: RolloutExecutor, handle: Any) -> None:
    admit, self._admit = self._admit, lambda: None  # type: ignore[method-assign]
    try:
        await PUBLISH(self, handle)
    finally:
        self._admit = admit  # type: ignore[method-assign]


def version_of_before(self: RolloutExecutor, group: Group) -> Verdict:
    """The version was read once, before the wait."""
    return self._policy.verdict(group, version=max(group.head_version, self.version - 1))


def zero_is_no_version(self: HeadBound, group: Group, *, version: int) -> Verdict:
    head = group.head_version or version
    return Verdict.KEEP if version - head <= self.max_staleness else Verdict.DROP


def first_member_only(self: HeadBound, group: Group, *, version: int) -> Verdict:
    head = group.episodes[0].episode.head_version
    return Verdict.KEEP if version - head <= self.max_staleness else Verdict.DROP


def put_that_loses(self: ReadyBuffer, group: Group) -> None:
    if group.id % 5 != 3:
        self._groups[group.id] = group


def shuffled(self: ReadyBuffer) -> Iterator[Group]:
    groups = list(self._groups.values())
    random.Random(len(groups)).shuffle(groups)
    return iter(groups)


def any_that_are_ready(self: TakeFirst, groups: Any, n: int, *, before: Any = ()) -> tuple[Group, ...]:
    return tuple(groups[-n:])


async def nothing_is_scored(self: NextVersionScorer, episodes: Any, *, version: int) -> list[tuple[Completion, ...]]:
    return [tuple(step.completion for step in episode.steps) for episode in episodes]


def first_segment_only(completion: Completion, *, version: int) -> Any:
    missing = MISSING_MASK(completion, version=version)
    return missing & (completion.versions == completion.versions[:1])


def last_segment_of_any_version(completion: Completion, *, version: int) -> Any:
    return np.ones(len(completion.tokens), dtype=bool)


def sampler_stands_in(completion: Completion, logprobs: Any, *, version: int) -> Completion:
    return FILL_MISSING(completion, completion.sampler_logprobs, version=version)


def asks_and_forgets(
    self: PartialEpisode, request: Any, completion: Completion, *, start: int, version: int
) -> Completion:
    """The log-probs of the prefix are dropped, and the sampler's own are called known."""
    before = completion.sampler_logprobs if completion.next_logprobs is None else completion.next_logprobs
    return replace(completion, prefix_logprobs=None, next_logprobs=before)


MISSING_MASK, FILL_MISSING = next_logprobs.missing_mask, next_logprobs.fill_missing


async def collects_only(self: RolloutExecutor) -> None:
    """Nothing is scored before the next version is loaded."""
    await self._partial_rollouts.wait_until_returned(timeout_s=1.0)  # type: ignore[union-attr]


def no_such_method(self: PartialRollouts, group: Group) -> Group:
    raise AttributeError("'PartialRollouts' has no attribute 'add_proximal_logprobs'")


def versions_are_not_shifted(tokens: Any, arrays: Any, **more: Any) -> Datum:
    made = SHIFTED(tokens, arrays, **more)
    return replace(made, arrays={**made.arrays, "versions": float_array(arrays["versions"][:-1])})


SHIFTED = datum_module.shift


class LabelsAtTheEnd(ExecutorSim.sampler_class):  # type: ignore[misc]
    """The version is read when the reply is there."""

    async def sample(self, request: SampleRequest) -> Completion:
        made = await super().sample(request)
        return replace(made, versions=int_array([self.version] * len(made.tokens)))


class LosesWhatWasCut(ExecutorSim.sampler_class):  # type: ignore[misc]
    """A continued sequence starts again without its beginning."""

    async def sample(self, request: SampleRequest) -> Completion:
        done = request.continue_from
        if done is None or len(done.tokens) < 2:
            return await FakeSampler.sample(self, request)
        short = replace(
            done,
            tokens=done.tokens[1:],
            sampler_logprobs=done.sampler_logprobs[1:],
            raw_logprobs=done.raw_logprobs[1:],
            versions=done.versions[1:],
            next_logprobs=None if done.next_logprobs is None else done.next_logprobs[1:],
        )
        return await FakeSampler.sample(self, replace(request, continue_from=short))


EXECUTOR_MUTANTS: dict[str, Patch] = {
    "cancellation is not counted": patched(TaskRunner, "_finished", cancellation_is_not_counted),
    "a purge gives no room back": patched(RolloutExecutor, "_sweep", sweep_without_credit),
    "the bound is not enforced where it counts": patched(RolloutExecutor, "_decide", lambda self, group: Verdict.KEEP),
    "new weights wake nobody": patched(RolloutExecutor, "publish", publish_wakes_nobody),
    "the version was read before the wait": patched(RolloutExecutor, "_decide", version_of_before),
    "version 0 is taken for none": patched(HeadBound, "verdict", zero_is_no_version),
    "only the first of a group is looked at": patched(HeadBound, "verdict", first_member_only),
    "putting back loses a group": patched(ReadyBuffer, "put", put_that_loses),
    "shuffled before it is chosen": patched(ReadyBuffer, "__iter__", shuffled),
    "the newest are taken first": patched(TakeFirst, "choose", any_that_are_ready),
    "nothing is scored under the next version": patched(NextVersionScorer, "fill", nothing_is_scored),
    "only the first segment is scored": patched(next_logprobs, "missing_mask", first_segment_only),
    "a later version writes over the next": patched(next_logprobs, "missing_mask", last_segment_of_any_version),
    "the sampler's log-prob stands for the next": patched(next_logprobs, "fill_missing", sampler_stands_in),
    "what was read off is lost": patched(PartialEpisode, "_store_prefix_logprobs", asks_and_forgets),
    "scores are asked for when the version is gone": patched(RolloutExecutor, "_score_before_load", collects_only),
    "settling calls what is not there": patched(PartialRollouts, "refreshed", no_such_method),
    "versions are off by one token": patched(datum_module, "shift", versions_are_not_shifted),
    "the version is read after the reply": patched(ExecutorSim, "sampler_class", LabelsAtTheEnd),
    "a continued sequence loses its beginning": patched(ExecutorSim, "sampler_class", LosesWhatWasCut),
    "a modifier is added after the minimum": patched(executor_module, "Admission", ModifierAfterMin),
    "groups in training are not live": patched(executor_module, "Admission", ForgetsTraining),
    "a restart forgets what is ready": patched(state, "Ledger", ForgetsReady),
    "pausing does not stop admission": patched(RolloutExecutor, "pause", lambda self: None),
}


BY_ATTRIBUTE = ("settling calls what is not there",)  # the fault is an AttributeError


@pytest.mark.parametrize("name", EXECUTOR_MUTANTS)
def test_the_executors_checks_catch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    EXECUTOR_MUTANTS[name](monkeypatch)
    with pytest.raises(Exception) as caught:  # an assertion of ours, or what the fault itself breaks
        trials()
    broken = TypeError | NameError if name in BY_ATTRIBUTE else TypeError | NameError | AttributeError
    assert not isinstance(caught.value, broken), "the mutant itself is broken"


def test_the_ledgers_machine_passes_without_a_fault() -> None:
    """With the search that the mutants get: otherwise they would prove nothing."""
    run_state_machine_as_test(LedgerMachine, settings=SEARCH)
