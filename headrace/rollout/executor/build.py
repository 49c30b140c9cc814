"""Build an executor and its parts from settings: the one place that knows which part a setting asks for."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from headrace.errors import ConfigError
from headrace.protocols import Sampler
from headrace.rollout.executor.executor import OutcomeLearner, Play, RolloutExecutor
from headrace.rollout.executor.parts import OUR_PARTS, ExecutorParts
from headrace.rollout.executor.selection import GroupSelection
from headrace.rollout.executor.settings import AsyncSettings
from headrace.rollout.executor.stats import SamplerUtilization
from headrace.rollout.executor.turns import NO_TURNS, Turns
from headrace.rollout.filters import Filter
from headrace.rollout.group import GroupPlayer
from headrace.rollout.partial_rollout import PartialRollouts
from headrace.rollout.publisher import Interrupt, Publisher
from headrace.types import Task


class TaskStream(Protocol):
    """Draw one task after another (`data.task_source.TaskSource`)."""

    def next(self) -> Task: ...

    def state_dict(self) -> Mapping[str, Any]: ...


def build_executor(
    settings: AsyncSettings,
    *,
    batch_groups: int,
    samplers: Sequence[Sampler],
    player: GroupPlayer,
    source: TaskStream,
    filters: Sequence[Filter] = (),
    selection: GroupSelection | None = None,
    utilization: SamplerUtilization | None = None,
    play: Callable[[GroupPlayer], Play] = lambda player: player,
    outcomes: OutcomeLearner | None = None,
    turns: Turns = NO_TURNS,
    parts: ExecutorParts = OUR_PARTS,
) -> RolloutExecutor:
    """Build an executor whose groups are played by `player`, with partial rollouts recorded. `play` may send them to
    other processes; it gets the player as it is used here. `parts` replace ours: stores of groups, the scorer of
    next-version log-probs, the staleness rule, further limits.

    Raises ConfigError when a sampler cannot do what `interrupt` asks for.
    """
    if settings.lockstep_tokens and settings.interrupt is Interrupt.INFLIGHT:
        raise ConfigError(
            "rl.async.lockstep_tokens repeats a run exactly and kept keys and values cannot be repeated: "
            'write rl.async.interrupt = "abort"'
        )
    reads_again = settings.interrupt is not Interrupt.INFLIGHT  # only then come log-probs with a continued sequence
    partial_rollouts = PartialRollouts(
        lockstep_tokens=settings.lockstep_tokens,
        next_logprobs=settings.next_logprobs and reads_again,
        needs_tokens=settings.next_logprobs,
    )
    player = replace(player, partial_rollouts=partial_rollouts)
    if settings.lockstep_tokens:  # an episode's time is not measured on the real clock
        player = replace(player, timeout_s=settings.group_limit_s)
    return RolloutExecutor(
        play=play(player),
        next_task=source.next,
        batch_groups=batch_groups,
        settings=settings,
        publisher=Publisher(samplers, interrupt=settings.interrupt, drain_s=settings.drain_s),
        filters=filters,
        selection=selection,
        partial_rollouts=partial_rollouts,
        utilization=utilization,
        cursor=source.state_dict,
        outcomes=outcomes,
        turns=turns,
        parts=parts,
    )
