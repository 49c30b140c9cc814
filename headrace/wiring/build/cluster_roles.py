"""Build what the workers of [cluster] are made of: in a worker, with the functions that build it in one process.

Workers import this module, so it imports no torch: a worker is there in a second or two.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from headrace.cluster.connection import LOCAL, RolePlaces
from headrace.cluster.reference_worker import Scorer
from headrace.cluster.runtime import ENGINE, REFERENCE, REWARD, ROLLOUT, ClusterRoles
from headrace.config import Config, LaunchConfig
from headrace.config.checks.cluster import rollout_workers
from headrace.config.paths import remote_reward
from headrace.names import JUDGE, REWARD_MODEL
from headrace.protocols import RewardRunner, Sampler
from headrace.render import Renderer
from headrace.rollout.group import GroupPlayer
from headrace.types import Episode, FailedEpisode, ScoredEpisode
from headrace.wiring.build.agent_endpoint import AgentEndpoint
from headrace.wiring.build.episodes import train_player
from headrace.wiring.build.rewards import make_reward_runner, make_terms, make_truncation, reward_terms

PARALLEL = ("--tensor-parallel-size", "-tp", "--tp-size", "--tp", "--pipeline-parallel-size", "-pp", "--pp-size")


def role_places(config: Config, *, stage: str, samples: bool, on_gpu: bool) -> dict[str, RolePlaces]:
    """Return the places that a stage needs by role. Processes with a model of their own get a GPU where the run
    computes on one (`on_gpu`)."""
    c = config.cluster
    places = {}
    if samples and places_engines(config):
        launch = config.engine.launch
        gpus = 1 if launch is None else gpus_of_server(launch)
        places[ENGINE] = RolePlaces(count=c.engine_replicas, gpus=gpus if on_gpu else 0)
    if stage == "rl" and config.rl is not None:
        judges = any(
            (term.fn == REWARD_MODEL and remote_reward(term) is None) or (term.fn == JUDGE and term.path is not None)
            for term in reward_terms(config.rl)
        )
        places[ROLLOUT] = RolePlaces(count=rollout_workers(c))
        places[REWARD] = RolePlaces(count=c.reward_workers, gpus=1 if judges and on_gpu else 0)
        places[REFERENCE] = RolePlaces(count=c.reference_workers, gpus=1 if on_gpu else 0)
    return {role: wanted for role, wanted in places.items() if c.address and wanted.count}


def places_engines(config: Config) -> bool:
    """Return whether Ray places the engine replicas; on a Ray of this machine alone the run starts them itself."""
    return config.cluster.engine_replicas > 0 and config.cluster.address not in ("", LOCAL)


def gpus_of_server(launch: LaunchConfig) -> int:
    """Return how many GPUs a server takes, from its arguments of parallelism.

    >>> gpus_of_server(LaunchConfig(python="p", args=("--tensor-parallel-size", "4", "--pipeline-parallel-size=2")))
    8
    """
    words = [part for argument in launch.args for part in argument.split("=", 1)]
    sizes = [int(size) for name, size in itertools.pairwise(words) if name in PARALLEL and size.isdecimal()]
    gpus = 1
    for size in sizes:
        gpus *= size
    return gpus


def make_roles(
    config: Config, renderer: Renderer, reward_model_path: str | None, vocabulary: int | None
) -> ClusterRoles:
    """Return what the workers of [rl] build; `vocabulary` is that of the trained model."""
    return ClusterRoles(
        deadline_s=config.cluster.deadline_s,
        build_player=partial(build_player, config, renderer),
        build_rewards=partial(build_rewards, config, reward_model_path),
        build_frozen=partial(build_frozen, config, vocabulary),
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
    """Build the runner of a reward worker, with the judges and reward models that run here."""
    assert config.rl is not None
    return make_reward_runner(make_terms(config, reward_model_path), config.rl, make_truncation(config.rl))


def build_frozen(config: Config, vocabulary: int | None, folder: str) -> Scorer:
    """Load a frozen model in a reference worker."""
    from headrace.train.frozen_model import FrozenScorer
    from headrace.wiring.build.models import check_vocabulary, load_policy, resolve_auto_settings

    assert config.rl is not None
    model = replace(resolve_auto_settings(config, folder).model, lora=None, recompute=False)
    lm = load_policy(model, folder, seed=0)
    if vocabulary is not None:
        check_vocabulary(lm, folder, vocabulary)
    lm.model.requires_grad_(False)
    return FrozenScorer(lm, micro_batch_tokens=config.rl.micro_batch_tokens).score
