"""Check [cluster]: ranks that train together, and which other roles of a run get processes of their own."""

from collections.abc import Iterator

from headrace.config.schema import ClusterConfig, Config

DEFAULT_WORKERS = 2


def rollout_workers(c: ClusterConfig) -> int:
    """Return how many rollout workers a run has."""
    if c.rollout_workers is not None:
        return c.rollout_workers
    return DEFAULT_WORKERS if c.address else 0


def cluster_problems(config: Config) -> Iterator[str]:
    """Yield what cannot work in [cluster]."""
    yield from _rank_problems(config)
    yield from _worker_problems(config)


def _rank_problems(config: Config) -> Iterator[str]:
    ranks, model = config.cluster.ranks, config.model
    if ranks == 1:
        return
    if model.service is not None:
        yield f"'cluster.ranks' is {ranks} and the model is trained at 'model.service': leave one of them out"
    if model.device == "mps":
        yield f"'cluster.ranks' is {ranks} and a machine has one device \"mps\": leave one of them out"
    if config.engine.is_served:
        yield (
            f"'cluster.ranks' is {ranks} and 'engine.type' is \"{config.engine.type}\": servers take weights from one "
            "process so far; leave one of them out"
        )
    if model.compile is True:
        yield f"'model.compile' has not been tried on {ranks} ranks: leave it out, or 'cluster.ranks'"


def _worker_problems(config: Config) -> Iterator[str]:
    c = config.cluster
    if not c.address:
        for key in ("rollout_workers", "reward_workers"):
            if getattr(c, key):
                yield (
                    f"'cluster.{key}' is {getattr(c, key)}, but there is no cluster: write 'cluster.address' = "
                    '"local", or leave the key out'
                )
        return
    if config.rl is None:
        yield "'cluster.address' is set, but only [rl] uses workers: add that table, or leave the key out"
        return
    if not rollout_workers(c) and not c.reward_workers:
        yield (
            "'cluster.address' is set, but there are no workers: write 'cluster.rollout_workers' above 0, or leave the "
            "address out"
        )
    if rollout_workers(c) and config.rl.asynchronous.lockstep_tokens:
        yield (
            "'rl.async.lockstep_tokens' is a clock of one process, and rollout workers go by their own: leave one of "
            "'rl.async.lockstep_tokens' and 'cluster.rollout_workers' out"
        )
