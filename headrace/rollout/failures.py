"""Groups that were of no use, one after another: how many may be, and what is said when they are too many."""

from collections import Counter
from collections.abc import Mapping

from headrace.errors import RolloutError
from headrace.types import Group


class DropsInARow:
    """Counts until a useful group comes; `limit` of them are too many."""

    def __init__(self, *, limit: int) -> None:
        self._limit = limit
        self._reasons: Counter[str] = Counter()
        self._last_error = ""

    def note(self, reason: str, text: str) -> RolloutError | None:
        """One more, with an error's text if there was one; at the limit, the error that ends the run."""
        self._reasons[reason] += 1
        self._last_error = text or self._last_error
        total = self._reasons.total()
        if total < self._limit:
            return None
        most = ", ".join(f"{reason} {count} times" for reason, count in self._reasons.most_common())
        last = f"; the last error was: {self._last_error}" if self._last_error else ""
        return RolloutError(
            f"{total} groups in a row were of no use ({most}){last}. "
            "Mend what failed, change the tasks, the reward or the filters, or raise rl.async.max_consecutive_drops"
        )

    def clear(self) -> None:
        self._reasons.clear()

    def state_dict(self) -> dict[str, int]:
        return dict(sorted(self._reasons.items()))

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._reasons = Counter({str(reason): int(count) for reason, count in state.items()})


def too_few(group: Group) -> bool:
    """A group of several needs two valid episodes to be compared; a group of one needs that one."""
    return len(group.episodes) < min(2, len(group.episodes) + len(group.failed)) or not group.episodes


def why_failed(group: Group) -> str:
    """The most frequent reason among its failed episodes."""
    reasons = Counter(failed.reason for failed in group.failed)
    return reasons.most_common(1)[0][0] if reasons else f"group {group.id} came back without episodes"
