"""Build what the workers of [cluster] are made of: in a worker, with the functions that build it in one process."""

from collections.abc import Sequence
from functools import partial

from headrace.cluster.runtime import ClusterRoles
from headrace.config import Config
from headrace.config.checks.cluster import rollout_workers
from headrace.protocols import RewardRunner, Sampler
from headrace.render import Renderer
from headrace.rollout.group import GroupPlayer
from headrace.types import Episode, FailedEpisode, ScoredEpisode
from headrace.wiring.build.agent_endpoint import AgentEndpoint
from headrace.wiring.build.episodes import train_player
from headrace.wiring.build.rewards import make_reward_runner, make_terms, make_truncation


def make_roles(config: Config, renderer: Renderer, reward_model_path: str | None) -> ClusterRoles | None:
    """Convert [cluster]; None without an address."""
    c = config.cluster
    if not c.address:
        return None
    return ClusterRoles(
        address=c.address,
        deadline_s=c.deadline_s,
        rollout_workers=rollout_workers(c),
        build_player=partial(build_player, config, renderer),
        reward_workers=c.reward_workers,
        build_rewards=partial(build_rewards, config, reward_model_path),
    )


def build_player(config: Config, renderer: Renderer, sampler: Sampler) -> GroupPlayer:
    """Build the player of a rollout worker. Its episodes are scored elsewhere."""
    assert config.rl is not None
    return train_player(config.rl, config.run.seed, sampler, renderer, _Unscored(), AgentEndpoint(renderer))


class _Unscored:
    """Stands where a rollout worker has no reward runner."""

    async def score(self, episodes: Sequence[Episode]) -> tuple[ScoredEpisode | FailedEpisode, ...]:
        raise AssertionError("rollout workers score nothing")

    async def close(self) -> None:
        return None


def build_rewards(config: Config, reward_model_path: str | None) -> RewardRunner:
    """Build the runner of a reward worker."""
    assert config.rl is not None
    return make_reward_runner(make_terms(config, reward_model_path), config.rl, make_truncation(config.rl))
