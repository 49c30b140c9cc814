"""Score groups in a worker: reward functions and their sandboxes run here."""

import pickle
from collections.abc import Callable

from headrace.cluster.role_worker import RoleWorker
from headrace.errors import HeadraceError
from headrace.protocols import RewardRunner
from headrace.types import FailedEpisode, Reward


class RewardWorker(RoleWorker):
    """Scores groups with the runner that `build` makes."""

    def __init__(self, build: Callable[[], RewardRunner]) -> None:
        super().__init__()
        self._build = build
        self._runner: RewardRunner | None = None

    def build(self) -> None:
        self._runner = self._build()

    async def score(self, payload: bytes) -> bytes:
        """Score the episodes of a group; return a reward or a FailedEpisode for each, or the error that ended it."""
        assert self._runner is not None
        try:
            scored = await self._runner.score(pickle.loads(payload))
        except HeadraceError as exc:
            return pickle.dumps(exc)
        results: list[Reward | FailedEpisode] = [
            item if isinstance(item, FailedEpisode) else item.reward for item in scored
        ]
        return pickle.dumps(results)

    async def close(self) -> None:
        """End the processes of users' functions."""
        if self._runner is not None:
            await self._runner.close()
