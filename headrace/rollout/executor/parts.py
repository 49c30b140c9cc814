"""Define the parts of an executor that a caller may bring in place of ours: stores of groups, scorer, staleness rule.

Each is a small protocol that ours implement without knowing it. A part that is not given is the one that the settings
ask for.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from headrace.algo.staleness import StalenessPolicy, Verdict
from headrace.rollout.executor.admission import Limit
from headrace.rollout.next_logprobs import NextScorer
from headrace.types import Group


class ReadyStore(Protocol):
    """Hold finished groups until they are trained (`ready_buffer.ReadyBuffer`); iterates oldest start first."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Group]: ...

    def put(self, group: Group) -> None: ...

    def replace(self, group: Group) -> None:
        """Replace a group by a new value of itself."""

    def sweep(self, decide: Callable[[Group], Verdict]) -> tuple[Group, ...]:
        """Remove and return the groups that `decide` drops."""

    def take(self, ids: Iterable[int]) -> tuple[Group, ...]:
        """Remove and return these groups, oldest first."""

    def take_all(self) -> tuple[Group, ...]:
        """Remove and return every group, oldest first."""

    def snapshot(self) -> Callable[[], list[Any]]:
        """Capture the present content; calling the result encodes it as JSON, for a checkpoint."""

    def load_state_dict(self, state: Sequence[Any]) -> None:
        """Restore what `snapshot` encoded."""


class ReplayStore(Protocol):
    """Keep trained groups that may be trained again (`replay_buffer.ReplayBuffer`)."""

    def __iter__(self) -> Iterator[Group]: ...

    def add(self, groups: Sequence[Group]) -> None: ...

    def replace(self, group: Group) -> None:
        """Replace a group by a new value of itself."""

    def sweep(self, decide: Callable[[Group], Verdict]) -> None:
        """Remove the groups that `decide` drops."""

    def draw(self, n: int) -> tuple[Group, ...]:
        """Return up to `n` groups to train again."""

    def snapshot(self) -> Callable[[], list[Any]]:
        """Capture the present content; calling the result encodes it as JSON, for a checkpoint."""

    def load_state_dict(self, state: Sequence[Any]) -> None:
        """Restore what `snapshot` encoded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorParts:
    """The parts that a caller brings; None: ours."""

    ready: ReadyStore | None = None  # finished groups that wait to be trained: the output queue
    replay: ReplayStore | None = None  # trained groups that `replay_groups` draws from: the cache of results
    scorer: NextScorer | None = None  # recomputes log-probs under the next version before new weights are loaded
    policy: StalenessPolicy | None = None  # which groups and tokens are fresh enough
    limits: Sequence[Limit] = ()  # on the groups that may start, besides those of the settings


OUR_PARTS = ExecutorParts()
