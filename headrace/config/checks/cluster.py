"""Check `[cluster]` against the rest of the file."""

from collections.abc import Iterator

from headrace.config.schema import Config


def cluster_problems(config: Config) -> Iterator[str]:
    """Yield what cannot work on several ranks."""
    ranks, model = config.cluster.ranks, config.model
    if ranks == 1:
        return
    if model.service is not None:
        yield f"'cluster.ranks' is {ranks} and the model is trained at 'model.service': leave one of them out"
    if model.device == "mps":
        yield f"'cluster.ranks' is {ranks} and a machine has one device \"mps\": leave one of them out"
    if model.compile is True:
        yield f"'model.compile' has not been tried on {ranks} ranks: leave it out, or 'cluster.ranks'"
