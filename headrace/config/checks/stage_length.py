"""Check how long the stages last: `steps` or `epochs`, and a warm-up that is shorter."""

from collections.abc import Iterator

from headrace.config.schema import Config, OptimizerConfig, RlConfig, stages_of


def stage_length_problems(config: Config) -> Iterator[str]:
    """Yield what is wrong with `steps` and `epochs`; the warm-up is compared once the steps are known."""
    for name, stage in stages_of(config).items():
        if stage.steps is not None and stage.epochs is not None:
            yield f"'{name}.steps' and '{name}.epochs' both say how long the stage lasts: leave one of them out"
        if stage.steps is None:
            continue
        yield from _warmup_problems(name, stage.optimizer, stage.steps)
        if isinstance(stage, RlConfig) and stage.critic is not None:
            yield from _warmup_problems("rl.critic", stage.critic.optimizer, stage.steps)


def _warmup_problems(stage: str, optimizer: OptimizerConfig, steps: int) -> Iterator[str]:
    warmup = optimizer.schedule.warmup_steps
    if warmup >= steps:
        yield (
            f"'{stage}.optimizer.schedule.warmup_steps' is {warmup}, so the warm-up fills all {steps} steps: "
            f"write less than {steps}"
        )
