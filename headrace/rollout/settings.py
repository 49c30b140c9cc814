"""What an executor is told: one object, built once from [rl.async] and handed to whoever needs it."""

from dataclasses import dataclass
from enum import StrEnum

from headrace.algo.staleness import HeadBound, SegmentWise, StalenessPolicy

NO_LIMIT_S = 1e8


class StaleAction(StrEnum):
    """What becomes of a group with a token that is older than the bound."""

    DROP = "drop"
    MASK = "mask"  # its tokens that are young enough are trained


class Interrupt(StrEnum):
    """What becomes of open sequences when weights change."""

    ABORT = "abort"  # cut, and continued from keys and values computed anew
    INFLIGHT = "inflight"  # cut, and continued from the keys and values of the weights before
    DRAIN = "drain"  # waited for; what is still open at the deadline is cut


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncSettings:
    """`max_running` None: as many groups as the staleness bound admits. `next_logprobs`: score the tokens of waiting
    and running groups under the version after theirs. `drain_s`: with Interrupt.DRAIN, how long open sequences may take
    to end. `slow_wait_s`: how long a publish waits for a task that was
    dropped as stale twice. `grace_s`: how long a cancelled group may take to end, and how much later than its timeout
    the wait for it is given up. `task_timeout_s`: how long an episode may take, and again as long all that comes after
    the episodes of a group, so that one which hangs is a failed episode and not the end of its group.
    `lockstep_tokens` above 0: a virtual clock, by which every open sequence samples that many tokens and then waits for
    all others. A group's time is then not measured, for it would pass while the trainer works, and slow tasks are
    waited for to their end; a round in which nothing moves for `task_timeout_s` ends the run.
    """

    max_staleness: int = 0
    max_running: int | None = None
    stale_action: StaleAction = StaleAction.DROP
    interrupt: Interrupt = Interrupt.ABORT
    oversampling: float = 1.0
    replay_groups: int = 0
    next_logprobs: bool = False
    drain_s: float = 60.0
    slow_wait_s: float = 60.0
    task_timeout_s: float = 600.0
    max_consecutive_drops: int = 64
    grace_s: float = 30.0
    lockstep_tokens: int = 0

    def __post_init__(self) -> None:
        assert self.max_staleness >= 0
        assert self.max_running is None or self.max_running > 0
        assert self.oversampling >= 1.0
        assert self.replay_groups >= 0
        assert self.drain_s > 0
        assert self.slow_wait_s > 0
        assert self.task_timeout_s > 0
        assert self.max_consecutive_drops > 0
        assert self.grace_s > 0
        assert self.lockstep_tokens >= 0

    @property
    def group_limit_s(self) -> float:
        """How long a group may take by the real clock: its episodes, then their scores."""
        return NO_LIMIT_S if self.lockstep_tokens else 2.0 * self.task_timeout_s

    @property
    def patience_s(self) -> float:
        """How long nothing may end or move."""
        return (self.task_timeout_s if self.lockstep_tokens else self.group_limit_s) + self.grace_s

    @property
    def slow_limit_s(self) -> float:
        """How long a publish waits for slow tasks by the real clock."""
        return NO_LIMIT_S if self.lockstep_tokens else self.slow_wait_s

    @property
    def policy(self) -> StalenessPolicy:
        match self.stale_action:
            case StaleAction.DROP:
                return HeadBound(self.max_staleness)
            case StaleAction.MASK:
                return SegmentWise(self.max_staleness)
