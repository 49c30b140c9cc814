"""Groups that were trained on before, as one more source of a batch, for as long as they are within the bound.

A loss that corrects for who sampled a token (`importance_sampling`) may learn from a group again. The groups that were
used least come first, the younger of two. Their tokens carry the versions they had, so no bound is stretched.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from headrace.algo.staleness import Verdict
from headrace.rollout.group_json import group_from_json, group_to_json
from headrace.types import Group


class ReplayBuffer:
    """At most `max_groups`; the oldest make room."""

    def __init__(self, *, max_groups: int) -> None:
        self._max_groups = max_groups
        self._groups: dict[int, Group] = {}
        self._used: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[Group]:
        return iter([self._groups[id] for id in sorted(self._groups)])

    def add(self, groups: Sequence[Group]) -> None:
        """Groups that have just been trained on; one that is here already stays as it is."""
        for group in groups:
            self._groups.setdefault(group.id, group)
            self._used.setdefault(group.id, 0)
        for id in sorted(self._groups)[: max(0, len(self._groups) - self._max_groups)]:
            self._forget(id)

    def replace(self, group: Group) -> None:
        assert group.id in self._groups
        self._groups[group.id] = group

    def sweep(self, decide: Callable[[Group], Verdict]) -> None:
        for group in self:
            if decide(group) is Verdict.DROP:
                self._forget(group.id)

    def draw(self, n: int) -> tuple[Group, ...]:
        """Up to `n` groups, in the order of their ids; each counts as used."""
        chosen = sorted(sorted(self._groups, key=lambda id: (self._used[id], -id))[:n])
        for id in chosen:
            self._used[id] += 1
        return tuple(self._groups[id] for id in chosen)

    def _forget(self, id: int) -> None:
        del self._groups[id], self._used[id]

    def snapshot(self) -> Callable[[], list[Any]]:
        """What is here now; the call makes JSON of it."""
        kept = [(self._used[group.id], group) for group in self]
        return lambda: [{"used": used, "group": group_to_json(group)} for used, group in kept]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        groups = [group_from_json(entry["group"]) for entry in state]
        self._groups = {group.id: group for group in groups}
        self._used = {group.id: int(entry["used"]) for group, entry in zip(groups, state, strict=True)}
