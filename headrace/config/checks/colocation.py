"""Check `cluster.colocate`: trainer and inference servers that use the same GPUs in turns."""

from collections.abc import Iterator
from ipaddress import ip_address
from urllib.parse import urlsplit

from headrace.config.schema import Config


def colocation_problems(config: Config) -> Iterator[str]:
    """Yield what cannot work with trainer and servers that take turns."""
    if not config.cluster.colocate:
        return
    engine, ranks = config.engine, config.cluster.ranks
    if not engine.is_served:
        yield (
            f"'cluster.colocate' is for inference servers, and 'engine.type' is \"{engine.type}\", which samples on "
            "the trainer's device anyway: leave it out"
        )
        return
    c = config.cluster
    if c.address not in ("", "local") and (ranks > 1 or c.engine_replicas):
        yield (
            f"'cluster.colocate' shares the GPUs of this machine, and with 'cluster.address' = \"{c.address}\" "
            "Ray places ranks and servers on others: leave one of them out"
        )
    if ranks > 1 and engine.launch is not None and not engine.launch.gpus and config.model.device in ("auto", "cuda"):
        yield (
            f"'cluster.colocate' with {ranks} ranks: write 'engine.launch.gpus', one entry for each server, so that "
            "they share the GPUs of the ranks"
        )
    for url in engine.urls:
        if not is_local(url):
            yield (
                f"'cluster.colocate' shares the GPUs of this machine, and 'engine.urls' has \"{url}\", which is "
                "another one: leave one of them out"
            )
    if engine.sync == "broadcast":
        yield (
            "'cluster.colocate' puts trainer and servers on one GPU, where NCCL cannot broadcast between them: "
            'write \'engine.sync\' = "ipc" or "folder"'
        )
    if config.distill is not None:
        yield (
            "'cluster.colocate' has no turns for [distill], whose teachers score while the model samples: leave one of "
            "them out"
        )
    if config.rl is None:
        return
    if config.rl.critic is not None and config.rl.critic.trunk != "shared":
        yield (
            "'cluster.colocate' moves the optimiser of the policy out of the way, not that of a critic with a trunk of "
            "its own: write 'rl.critic.trunk' = \"shared\", or leave one of them out"
        )
    staleness = config.rl.asynchronous.max_staleness
    if staleness:
        yield (
            f"'cluster.colocate' lets sampling and training take turns, and 'rl.async.max_staleness' is "
            f"{staleness}, which lets them overlap: write 0, or leave 'cluster.colocate' out"
        )


def keeps_weights(config: Config) -> bool:
    """Tell whether servers that sleep must keep their weights: unless whole new ones come before they sample again."""
    return config.model.lora is not None or (config.rl is not None and config.rl.sync_every > 1)


def is_local(url: str) -> bool:
    """Tell whether a URL is of this machine.

    >>> is_local("http://127.0.0.1:8000"), is_local("http://localhost:1"), is_local("http://node7:8000")
    (True, True, False)
    """
    host = urlsplit(url).hostname or ""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
