"""Score groups in a worker: reward functions and their sandboxes run here."""

from collections.abc import Callable, Sequence

from headrace.cluster.role_worker import RoleWorker
from headrace.errors import HeadraceError
from headrace.protocols import RewardRunner
from headrace.types import Episode, FailedEpisode, Reward


class RewardWorker(RoleWorker):
    """Scores groups with a runner of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._runner: RewardRunner | None = None

    def build(self, build: Callable[[], RewardRunner]) -> None:
        self._runner = build()

    async def score(self, episodes: Sequence[Episode]) -> list[Reward | FailedEpisode] | HeadraceError:
        """Score the episodes of a group; return a reward or a FailedEpisode for each, or the error that ended it."""
        assert self._runner is not None
        try:
            scored = await self._runner.score(episodes)
        except HeadraceError as exc:
            return exc
        return [item if isinstance(item, FailedEpisode) else item.reward for item in scored]

    async def close(self) -> None:
        """End the processes of users' functions."""
        if self._runner is not None:
            await self._runner.close()
