"""Turn `epochs` of a stage into steps, from the number of rows that it trains on."""

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headrace.config import Config, RlConfig, num_steps, stages_of
from headrace.config.checks.stage_length import stage_length_problems
from headrace.errors import ConfigError
from headrace.wiring.build.data import conversations_of, labelled_of, pairs_of, tasks_of
from headrace.wiring.inputs import RunInputs

logger = logging.getLogger(__name__)


def has_epochs(config: Config) -> bool:
    """Tell whether the steps of a stage follow from the number of its rows."""
    return any(stage.steps is None for stage in stages_of(config).values())


def with_any_steps(config: Config) -> Config:
    """Give the stages that have epochs one step, for what is planned before their data are loaded."""
    unknown: dict[str, Any] = {
        name: replace(stage, steps=1) for name, stage in stages_of(config).items() if stage.steps is None
    }
    return replace(config, **unknown)


def with_steps(config: Config, rows: Mapping[str, int]) -> Config:
    """Replace the epochs of every stage by steps: ceil(epochs x rows / rows of a step).

    Raises ConfigError if the rows of a stage are not known, which only a run that is resumed can meet.
    """
    resolved: dict[str, Any] = {}
    for name, stage in stages_of(config).items():
        if stage.steps is not None or stage.epochs is None:
            continue
        if name not in rows:
            raise ConfigError(f"the run was started without '{name}.epochs': write '{name}.steps', as it was then")
        a_step = stage.groups if isinstance(stage, RlConfig) else stage.batch_size
        steps = max(1, math.ceil(round(stage.epochs * rows[name] / a_step, 9)))
        resolved[name] = replace(stage, steps=steps, epochs=None)
    config = replace(config, **resolved)
    for problem in stage_length_problems(config):
        raise ConfigError(problem)
    return config


def describe_epochs(config: Config, resolved: Config, rows: Mapping[str, int]) -> list[str]:
    """Say for every stage with epochs how many steps they are."""
    lines = []
    for name, stage in stages_of(config).items():
        if stage.steps is None:
            assert stage.epochs is not None
            is_rl = isinstance(stage, RlConfig)
            a_step = f"{stage.groups} tasks" if isinstance(stage, RlConfig) else f"{stage.batch_size} rows"
            steps = num_steps(stages_of(resolved)[name])
            what = "tasks" if is_rl or name == "distill" else "rows"
            lines.append(
                f"'{name}.epochs' = {stage.epochs:g} of {rows[name]:,} {what}, {a_step} a step: {steps:,} steps"
            )
    return lines


def loaded_rows(inputs: RunInputs) -> dict[str, int]:
    """Count what the stages train on, by stage; rows that are too long have been left out."""
    rows = {
        name: sum(len(part) for part, _ in stage.sources)
        for name, stage in (
            ("sft", inputs.sft),
            ("distill", inputs.distill),
            ("dpo", inputs.dpo),
            ("reward_model", inputs.reward_model),
        )
        if stage is not None
    }
    return rows if inputs.rl is None else {**rows, "rl": sum(map(len, inputs.rl.tasks))}


def count_rows(config: Config) -> dict[str, int]:
    """Count the rows of the stages that have epochs without a tokenizer, so with those that will be left out."""
    rows: dict[str, int] = {}
    for name, stage in stages_of(config).items():
        if stage.steps is not None:
            continue
        match name:
            case "sft":
                assert config.sft is not None
                rows[name] = sum(len(conversations_of(source)) for source in config.sft.sources)
            case "distill":
                assert config.distill is not None
                rows[name] = sum(len(tasks_of(teacher.tasks)) for teacher in config.distill.teachers)
            case "dpo":
                assert config.dpo is not None
                load = labelled_of if config.dpo.loss == "kto" else pairs_of
                rows[name] = sum(len(load(source)) for source in config.dpo.sources)
            case "reward_model":
                assert config.reward_model is not None
                rows[name] = sum(len(pairs_of(source)) for source in config.reward_model.sources)
            case _:
                assert config.rl is not None
                rows[name] = sum(len(tasks_of(source)) for source in config.rl.tasks)
    return rows
