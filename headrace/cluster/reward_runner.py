"""Score groups on reward workers: the coordinator's side. A group whose worker is lost is scored by another one."""

import asyncio
import itertools
import logging
from collections.abc import Sequence

from headrace.cluster.worker_pool import WorkerLostError, WorkerPool
from headrace.errors import HeadraceError, RewardError
from headrace.retry import doubling
from headrace.types import Episode, FailedEpisode, ScoredEpisode

logger = logging.getLogger(__name__)
MAX_ATTEMPTS = 8


class ClusterRewardRunner:
    """Implements `RewardRunner` with reward workers, which have runners of their own."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool

    async def score(self, episodes: Sequence[Episode]) -> tuple[ScoredEpisode | FailedEpisode, ...]:
        if not episodes:
            return ()
        pauses_s = doubling(0.1, 5.0)
        for attempt in itertools.count(1):
            try:
                async with self._pool.worker() as worker:
                    results = await worker.call("score", tuple(episodes))
                break
            except WorkerLostError as exc:
                if attempt == MAX_ATTEMPTS:
                    raise RewardError(
                        f"the rewards of episode {episodes[0].id} and its group lost {attempt} workers one after "
                        f"another, the last with: {exc}; if a reward function takes all memory, mend it"
                    ) from exc
                logger.warning("the rewards of episode %s and its group are computed again: %s", episodes[0].id, exc)
            await asyncio.sleep(next(pauses_s))
        if isinstance(results, HeadraceError):
            raise results
        return tuple(
            result if isinstance(result, FailedEpisode) else ScoredEpisode(episode=episode, reward=result)
            for episode, result in zip(episodes, results, strict=True)
        )

    async def close(self) -> None:
        """Do nothing: the pool ends its workers."""
