"""Settings of an executor, built once from [rl.async] and passed to the parts that need them."""

from dataclasses import dataclass
from enum import StrEnum

from headrace.algo.staleness import HeadBound, SegmentWise, StalenessPolicy
from headrace.rollout.publisher import Interrupt

NO_LIMIT_S = 1e8


class StaleAction(StrEnum):
    """Choose what happens to a group with a token older than the bound."""

    DROP = "drop"
    MASK = "mask"  # its tokens that are young enough are trained


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncSettings:
    """Bound the staleness, concurrency and waiting times of an executor."""

    max_staleness: int = 0  # eta: how many versions older than the trainer a token may be; 0 is synchronous
    max_running: int | None = None  # groups; None: as many as the staleness bound admits
    stale_action: StaleAction = StaleAction.DROP
    interrupt: Interrupt = Interrupt.ABORT
    oversampling: float = 1.0  # groups started for each group of a batch
    replay_groups: int = 0  # trained groups that a batch has on top of its new ones
    next_logprobs: bool = False  # score the tokens of waiting and running groups under the version after theirs
    drain_s: float = 60.0  # with Interrupt.DRAIN: how long open sequences may take to end
    slow_wait_s: float = 60.0  # how long a publish waits for a task that was dropped as stale twice
    # How long an episode may take, and again as long all that follows the episodes of a group, so that an episode that
    # hangs fails alone and not with its group.
    task_timeout_s: float = 600.0
    max_consecutive_drops: int = 64  # as many in a row end the run
    grace_s: float = 30.0  # how long a cancelled group may take to end, on top of its timeout
    # Above 0: a virtual clock, by which every open sequence samples that many tokens and then waits for all others. A
    # group's time is then not measured, since it would pass while the trainer works, and slow tasks are waited for to
    # their end; a round in which nothing moves for `task_timeout_s` ends the run.
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
        """Return how long a group may take on the real clock: its episodes, then their scores."""
        return NO_LIMIT_S if self.lockstep_tokens else 2.0 * self.task_timeout_s

    @property
    def patience_s(self) -> float:
        """Return how long nothing may end or move."""
        return (self.task_timeout_s if self.lockstep_tokens else self.group_limit_s) + self.grace_s

    @property
    def slow_limit_s(self) -> float:
        """Return how long a publish waits for slow tasks on the real clock."""
        return NO_LIMIT_S if self.lockstep_tokens else self.slow_wait_s

    @property
    def policy(self) -> StalenessPolicy:
        """Return the rule by which a group's tokens are judged too old."""
        match self.stale_action:
            case StaleAction.DROP:
                return HeadBound(self.max_staleness)
            case StaleAction.MASK:
                return SegmentWise(self.max_staleness)
