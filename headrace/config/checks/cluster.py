"""Check [cluster]: ranks that train together, and which other roles of a run get processes of their own."""

from collections.abc import Iterator

from headrace.config.checks.colocation import colocation_problems
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
    yield from _replica_problems(config)
    yield from colocation_problems(config)
    yield from _worker_problems(config)


def _rank_problems(config: Config) -> Iterator[str]:
    ranks, model = config.cluster.ranks, config.model
    if ranks == 1:
        return
    if model.service is not None:
        yield f"'cluster.ranks' is {ranks} and the model is trained at 'model.service': leave one of them out"
    if model.device == "mps":
        yield f"'cluster.ranks' is {ranks} and a machine has one device \"mps\": leave one of them out"
    if model.compile is True:
        yield f"'model.compile' has not been tried on {ranks} ranks: leave it out, or 'cluster.ranks'"
    if beside := [name for name in ("experts", "router") if model.lora is not None and name in model.lora.layers]:
        yield f"adapters on {beside[0]} are not trained on {ranks} ranks: leave it out of 'model.lora.targets'"
    if model.router_aux_loss:
        yield f"'model.router_aux_loss' is not computed on {ranks} ranks: leave it out, or 'cluster.ranks'"


def _replica_problems(config: Config) -> Iterator[str]:
    count, engine = config.cluster.engine_replicas, config.engine
    if not count:
        return
    if config.model.service is not None:
        yield f"'cluster.engine_replicas' is {count} and the model is sampled at 'model.service': leave one of them out"
    elif engine.is_served:
        yield from _placed_server_problems(config)
    elif engine.type != "embedded":
        yield (
            f"'cluster.engine_replicas' is {count} and 'engine.type' is \"{engine.type}\": only embedded "
            'engines and servers have replicas; write "embedded"'
        )
    if config.model.device == "mps":
        yield f"'cluster.engine_replicas' is {count} and a machine has one device \"mps\": leave one of them out"
    if config.rl is None and config.distill is None and config.eval.source is None:
        yield f"'cluster.engine_replicas' is {count}, but nothing is sampled: add a table [rl], or leave the key out"


def _placed_server_problems(config: Config) -> Iterator[str]:
    """Yield what keeps Ray from placing servers."""
    c, engine = config.cluster, config.engine
    if not c.address or c.address == "local":
        yield (
            f"'cluster.engine_replicas' is {c.engine_replicas} and 'engine.type' is \"{engine.type}\", whose servers "
            "are placed on the machines of a cluster: write 'cluster.address', or 'engine.launch.replicas' for servers "
            "on this machine, which need no Ray"
        )
    elif engine.launch is None:
        yield (
            f"'cluster.engine_replicas' is {c.engine_replicas}, and nothing says how servers are started: add a table "
            "[engine.launch] in place of 'engine.urls', or leave the key out"
        )
    elif engine.launch.replicas != 1 or engine.launch.gpus:
        yield (
            "'cluster.engine_replicas' says how many servers there are, and Ray which GPUs they get: leave "
            "'engine.launch.replicas' and 'engine.launch.gpus' out"
        )


def _worker_problems(config: Config) -> Iterator[str]:
    c = config.cluster
    if not c.address:
        for key in ("rollout_workers", "reward_workers", "reference_workers"):
            if getattr(c, key):
                yield (
                    f"'cluster.{key}' is {getattr(c, key)}, but there is no cluster: write 'cluster.address' = "
                    '"local", or leave the key out'
                )
        return
    if config.rl is None:
        if not c.engine_replicas and c.ranks == 1:
            yield "'cluster.address' is set, but only [rl] uses workers: add that table, or leave the key out"
        return
    workers = rollout_workers(c) + c.reward_workers + c.reference_workers
    if not workers and not c.engine_replicas and c.ranks == 1:
        yield (
            "'cluster.address' is set, but there are no workers: write 'cluster.rollout_workers' above 0, or leave the "
            "address out"
        )
    if c.reference_workers and config.model.service is not None:
        yield ("'cluster.reference_workers' is set, and with 'model.service' the service scores: leave one of them out")
    if rollout_workers(c) and config.rl.asynchronous.lockstep_tokens:
        yield (
            "'rl.async.lockstep_tokens' is a clock of one process, and rollout workers go by their own: leave one of "
            "'rl.async.lockstep_tokens' and 'cluster.rollout_workers' out"
        )
