"""Open the workers of a run besides the coordinator, and close them."""

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from headrace.cluster.connection import Places
from headrace.cluster.group_player import ClusterGroupPlayer
from headrace.cluster.reference_worker import ClusterScorer, ReferenceWorker, Scorer
from headrace.cluster.reward_runner import ClusterRewardRunner
from headrace.cluster.reward_worker import RewardWorker
from headrace.cluster.rollout_worker import RolloutWorker
from headrace.cluster.worker_pool import WorkerPool
from headrace.protocols import RewardRunner, Sampler
from headrace.rollout.executor import Play
from headrace.rollout.group import GroupPlayer

logger = logging.getLogger(__name__)
MAX_CALLS = 10_000  # open at once in one worker
ROLLOUT, REWARD, REFERENCE, ENGINE, RANK = "rollout", "reward", "reference", "engine", "rank"  # roles


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRoles:
    """Says what the workers of a run build. The builders are sent to them, so they must pickle."""

    deadline_s: float
    build_player: Callable[[Sampler], GroupPlayer]
    build_rewards: Callable[[], RewardRunner]
    build_frozen: Callable[[str], Scorer]  # the frozen model of a folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The workers of a run; None for a role that the coordinator plays itself."""

    rollouts: WorkerPool | None
    rewards: WorkerPool | None
    references: WorkerPool | None

    @property
    def reward_runner(self) -> RewardRunner | None:
        """Return what scores on the reward workers."""
        return None if self.rewards is None else ClusterRewardRunner(self.rewards)

    def play(self, player: GroupPlayer) -> Play:
        """Return what plays groups: the rollout workers, or `player` itself if there are none."""
        return player if self.rollouts is None else ClusterGroupPlayer(self.rollouts, player)

    def frozen(self, folder: str) -> ClusterScorer | None:
        """Return what scores with the frozen model of a folder on the reference workers."""
        return None if self.references is None else ClusterScorer(self.references, folder)


@asynccontextmanager
async def open_workers(places: Places, roles: ClusterRoles) -> AsyncIterator[Cluster]:
    """Start a worker in each of its places. Raises ConfigError or RolloutError."""
    async with AsyncExitStack() as opened:
        import ray

        def pool(role: str, kind: type, build: object) -> WorkerPool | None:
            if not places.count(role):
                return None
            made = WorkerPool(
                role,
                places.count(role),
                create=lambda index: create_actor(kind, places.options(role, index)),
                build=ray.put(build),
                kill=kill_actor,
                deadline_s=roles.deadline_s,
            )
            opened.push_async_callback(made.close)
            made.start()
            return made

        pools = {
            ROLLOUT: pool(ROLLOUT, RolloutWorker, roles.build_player),
            REWARD: pool(REWARD, RewardWorker, roles.build_rewards),
            REFERENCE: pool(REFERENCE, ReferenceWorker, roles.build_frozen),
        }
        for started in pools.values():
            if started is not None:
                await started.started()
        logger.info("cluster: %s", ", ".join(f"{places.count(role)} {role} workers" for role in pools))
        yield Cluster(rollouts=pools[ROLLOUT], rewards=pools[REWARD], references=pools[REFERENCE])


def create_actor(kind: type, options: Mapping[str, Any], *arguments: object) -> Any:
    """Start an actor. Ray does not restart it: a new one is made in its place."""
    return (
        _actor_class(kind)
        .options(max_restarts=0, max_task_retries=0, max_concurrency=MAX_CALLS, **options)
        .remote(*arguments)
    )


@cache
def _actor_class(kind: type) -> Any:
    import ray

    return ray.remote(kind)


def kill_actor(actor: Any) -> None:
    """End an actor at once."""
    import ray

    if ray.is_initialized():
        ray.kill(actor, no_restart=True)
