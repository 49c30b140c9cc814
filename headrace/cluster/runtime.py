"""Open the roles of a run besides the coordinator, and close them."""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from headrace.cluster.connection import connected, reserved
from headrace.cluster.group_player import ClusterGroupPlayer
from headrace.cluster.reward_runner import ClusterRewardRunner
from headrace.cluster.reward_worker import RewardWorker
from headrace.cluster.rollout_worker import RolloutWorker
from headrace.cluster.worker_pool import WorkerPool
from headrace.protocols import RewardRunner, Sampler
from headrace.rollout.executor import Play
from headrace.rollout.group import GroupPlayer

logger = logging.getLogger(__name__)
MAX_CALLS = 10_000  # open at once in one worker


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRoles:
    """Says which workers a run has, and what they build. The builders are sent to them, so they must pickle."""

    address: str
    deadline_s: float
    rollout_workers: int
    build_player: Callable[[Sampler], GroupPlayer]
    reward_workers: int
    build_rewards: Callable[[], RewardRunner]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The workers of a run; None for a role that the coordinator plays itself."""

    rollouts: WorkerPool | None
    rewards: WorkerPool | None

    @property
    def reward_runner(self) -> RewardRunner | None:
        """Return what scores on the reward workers."""
        return None if self.rewards is None else ClusterRewardRunner(self.rewards)

    def play(self, player: GroupPlayer) -> Play:
        """Return what plays groups: the rollout workers, or `player` itself if there are none."""
        return player if self.rollouts is None else ClusterGroupPlayer(self.rollouts, player)


@asynccontextmanager
async def open_cluster(roles: ClusterRoles) -> AsyncIterator[Cluster]:
    """Connect, reserve a place for every worker and start it. Raises ConfigError or RolloutError."""
    count = roles.rollout_workers + roles.reward_workers
    async with AsyncExitStack() as opened:
        await opened.enter_async_context(connected(roles.address, cpus=count, deadline_s=roles.deadline_s))
        import ray

        place = await opened.enter_async_context(reserved(count, deadline_s=roles.deadline_s))

        def pool(role: str, workers: int, first: int, kind: type, build: object) -> WorkerPool | None:
            if not workers:
                return None
            made = WorkerPool(
                role,
                workers,
                create=_creator(kind, lambda index: place(first + index)),
                build=ray.put(build),
                kill=_kill,
                deadline_s=roles.deadline_s,
            )
            opened.push_async_callback(made.close)
            made.start()
            return made

        rollouts = pool("rollout", roles.rollout_workers, 0, RolloutWorker, roles.build_player)
        rewards = pool("reward", roles.reward_workers, roles.rollout_workers, RewardWorker, roles.build_rewards)
        for started in (rollouts, rewards):
            if started is not None:
                await started.started()
        logger.info("cluster: %d rollout workers, %d reward workers", roles.rollout_workers, roles.reward_workers)
        yield Cluster(rollouts=rollouts, rewards=rewards)


def _creator(kind: type, place: Callable[[int], dict[str, Any]]) -> Callable[[int], Any]:
    """Return what starts the actor of an index. Ray does not restart it: a new one is made in its place."""
    import ray

    actor_class = ray.remote(kind)

    def create(index: int) -> Any:
        options = place(index)
        return actor_class.options(max_restarts=0, max_task_retries=0, max_concurrency=MAX_CALLS, **options).remote()

    return create


def _kill(actor: Any) -> None:
    import ray

    if ray.is_initialized():
        ray.kill(actor, no_restart=True)
