"""Settings to an executor with its parts: the one place that knows which part a setting asks for."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from headrace.errors import ConfigError
from headrace.protocols import Sampler
from headrace.rollout.executor import Play, RolloutExecutor
from headrace.rollout.filters import Filter
from headrace.rollout.journal import Journals
from headrace.rollout.keep import Keep
from headrace.rollout.publish import Publisher
from headrace.rollout.settings import AsyncSettings, Interrupt
from headrace.types import Group, Task


class Source(Protocol):
    """Where tasks come from (`rollout.tasks.TaskSource`)."""

    def next(self) -> Task: ...

    def state_dict(self) -> Mapping[str, Any]: ...


def build_executor(
    settings: AsyncSettings,
    *,
    batch_groups: int,
    samplers: Sequence[Sampler],
    play: Callable[..., Awaitable[Group]],
    source: Source,
    filters: Sequence[Filter] = (),
    keep: Keep | None = None,
    around: Callable[[Play], Play] = lambda play: play,
) -> RolloutExecutor:
    """An executor over `play(task, group_id, journals=..., timeout_s=...)`, such as `rollout.group.play_group`.

    `around` wraps what plays. Raises ConfigError when a sampler cannot do what `interrupt` asks for.
    """
    if settings.lockstep_tokens and settings.interrupt is Interrupt.INFLIGHT:
        raise ConfigError(
            "rl.async.lockstep_tokens repeats a run exactly and kept keys and values cannot be repeated: "
            'write rl.async.interrupt = "abort"'
        )
    reads_again = settings.interrupt is not Interrupt.INFLIGHT
    journals = Journals(lockstep_tokens=settings.lockstep_tokens, next_logprobs=settings.next_logprobs and reads_again)
    if settings.lockstep_tokens:
        play = partial(play, timeout_s=settings.group_limit_s)
    return RolloutExecutor(
        play=around(partial(play, journals=journals)),
        next_task=source.next,
        batch_groups=batch_groups,
        settings=settings,
        publisher=Publisher(samplers, interrupt=settings.interrupt, drain_s=settings.drain_s),
        filters=filters,
        keep=keep,
        journals=journals,
        cursor=source.state_dict,
    )
