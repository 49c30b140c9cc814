"""Hold groups that were trained before and may be trained again while they are within the staleness bound.

A loss that corrects for the sampling policy (`importance_sampling`) may learn from a group again. Groups used least
come first, of equal ones the younger. Their tokens keep their versions, so the bound holds for them too.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from headrace.algo.staleness import Verdict
from headrace.rollout.group_json import group_from_json, group_to_json
from headrace.types import Group


class ReplayBuffer:
    """Hold at most `max_groups`; the oldest are evicted."""

    def __init__(self, *, max_groups: int) -> None:
        self._max_groups = max_groups
        self._groups: dict[int, Group] = {}
        self._used: dict[int, int] = {}  # how often each group was drawn

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[Group]:
        return iter([self._groups[id] for id in sorted(self._groups)])

    def add(self, groups: Sequence[Group]) -> None:
        """Add groups that have just been trained; a group that is here already stays unchanged."""
        for group in groups:
            self._groups.setdefault(group.id, group)
            self._used.setdefault(group.id, 0)
        for id in sorted(self._groups)[: max(0, len(self._groups) - self._max_groups)]:
            self._evict(id)

    def replace(self, group: Group) -> None:
        """Replace a group by a new value of itself."""
        assert group.id in self._groups
        self._groups[group.id] = group

    def sweep(self, decide: Callable[[Group], Verdict]) -> None:
        """Evict the groups that `decide` drops."""
        for group in self:
            if decide(group) is Verdict.DROP:
                self._evict(group.id)

    def draw(self, n: int) -> tuple[Group, ...]:
        """Return up to `n` groups in the order of their ids, and count each as used."""
        chosen = sorted(sorted(self._groups, key=lambda id: (self._used[id], -id))[:n])
        for id in chosen:
            self._used[id] += 1
        return tuple(self._groups[id] for id in chosen)

    def _evict(self, id: int) -> None:
        del self._groups[id], self._used[id]

    def snapshot(self) -> Callable[[], list[Any]]:
        """Capture the present content; calling the result encodes it as JSON."""
        uses_and_groups = [(self._used[group.id], group) for group in self]
        return lambda: [{"used": used, "group": group_to_json(group)} for used, group in uses_and_groups]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Restore what `snapshot` encoded."""
        groups = [group_from_json(entry["group"]) for entry in state]
        self._groups = {group.id: group for group in groups}
        self._used = {group.id: int(entry["used"]) for group, entry in zip(groups, state, strict=True)}
