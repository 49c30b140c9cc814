"""Check what cannot be done with pictures: with `model.vision` set, and again when data turn out to have some."""

from collections.abc import Iterator

from headrace.config.schema import Config


def vision_problems(config: Config) -> Iterator[str]:
    """Yield what stands against pictures if `model.vision` is set."""
    if config.model.vision is not None:
        yield from picture_problems(config)
    if config.model.vision == "train" and config.model.lora is not None:
        yield (
            '\'model.vision\' is "train" and [model.lora] trains nothing but adapters: write "frozen", or leave '
            "[model.lora] out"
        )


def picture_problems(config: Config) -> Iterator[str]:
    """Yield what cannot work with pictures, whatever the configuration says of them."""
    model, engine, cluster, rl = config.model, config.engine, config.cluster, config.rl
    if model.service is not None:
        yield (
            "pictures are not sent to the service of 'model.service': train the vision model here, or through the "
            "tinker SDK, whose data have image chunks"
        )
    if engine.type != "embedded":
        yield (
            f'\'engine.type\' is "{engine.type}", which gets no pictures: write "embedded", or leave the pictures out '
            "of the data"
        )
    if cluster.ranks > 1:
        yield f"'cluster.ranks' is {cluster.ranks}: pictures are trained on one rank, so leave it out"
    if config.reward_model is not None:
        yield "[reward_model] scores text alone: leave it out, or the pictures"
    if config.dpo is not None:
        yield "[dpo] trains on text alone: leave it out, or the pictures"
    if rl is not None and rl.critic is not None:
        yield "a critic reads text alone: leave out [rl.critic], or the pictures"
    if rl is not None:
        for key in ("program", "generate_fn"):
            if getattr(rl, key) is not None:
                yield f"'rl.{key}' plays episodes of text alone: leave it out, or the pictures"
