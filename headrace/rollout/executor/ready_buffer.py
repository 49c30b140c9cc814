"""Hold finished groups that wait to be trained, oldest start first. Decides nothing."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from headrace.algo.staleness import Verdict
from headrace.rollout.group_json import group_from_json, group_to_json
from headrace.types import Group


class ReadyBuffer:
    """Hold at most `max_groups` whole groups by id."""

    def __init__(self, *, max_groups: int) -> None:
        self._max_groups = max_groups
        self._groups: dict[int, Group] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[Group]:
        """Iterate oldest first, by (started_version, id), so that the order of completion leaves no trace."""
        return iter(sorted(self._groups.values(), key=lambda group: (group.started_version, group.id)))

    def put(self, group: Group) -> None:
        """Add a finished group."""
        assert group.id not in self._groups, f"group {group.id} is already here"
        assert len(self._groups) < self._max_groups, "admission let more groups start than the buffer holds"
        self._groups[group.id] = group

    def sweep(self, decide: Callable[[Group], Verdict]) -> tuple[Group, ...]:
        """Remove and return the groups that `decide` drops; the caller records why in the ledger."""
        dropped = tuple(group for group in self if decide(group) is Verdict.DROP)
        for group in dropped:
            del self._groups[group.id]
        return dropped

    def replace(self, group: Group) -> None:
        """Replace a group by a new value of itself."""
        assert group.id in self._groups, f"group {group.id} is not here"
        self._groups[group.id] = group

    def take(self, ids: Iterable[int]) -> tuple[Group, ...]:
        """Remove and return these groups, oldest first."""
        chosen = set(ids)
        assert chosen <= self._groups.keys(), f"groups {sorted(chosen - self._groups.keys())} are not here"
        taken = tuple(group for group in self if group.id in chosen)
        for group in taken:
            del self._groups[group.id]
        return taken

    def take_all(self) -> tuple[Group, ...]:
        """Remove and return every group, oldest first."""
        return self.take(list(self._groups))

    def snapshot(self) -> Callable[[], list[Any]]:
        """Capture the present content; calling the result encodes it as JSON."""
        groups = tuple(self)
        return lambda: [group_to_json(group) for group in groups]

    def load_state_dict(self, state: Sequence[Any]) -> None:
        """Restore what `snapshot` encoded."""
        groups = [group_from_json(entry) for entry in state]
        self._groups = {group.id: group for group in groups}
