"""Environments by name, for sources of `type = "env"`, the demo and the tests.

`BUILT_IN` environments need no other package; `ADAPTERS` play the games of other packages, if they are installed.

- `key_door`, `frozen_lake`, `sokoban`: mazes told in words, each with a solver; `grid` has what they share.
- `calculator`, `guess_number`: numbers told digit by digit, each with a solver.
- `single_turn`: a prompt and one answer; also the task of adding two numbers.
- `task_generation`: draw different tasks of one split, and demonstrate them with a solver.
- `tool_env`: describe tools, read calls and answer them, for authors of environments with tools.
- `task_definitions`: tasks and their environment from a task definition of reward-kit.
- `resources`: the environments of task definitions: a dictionary or a SQLite database, with tools.
- `adapters/`: environments of other packages.
- `containers/`: tasks of the Harbor format, each episode in a container.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from headrace import names
from headrace.algo.name_lookup import lookup, nearest_name_hint
from headrace.envs import calculator, frozen_lake, guess_number, key_door, single_turn, sokoban
from headrace.envs.adapters import gymnasium, mcp_env, openenv, textarena, textworld, verifiers
from headrace.envs.adapters.optional_package import no_demonstrations, no_vocabulary
from headrace.envs.task_generation import SolvableEnv, demonstrate
from headrace.errors import ConfigError
from headrace.protocols import Env
from headrace.types import Message, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvSpec:
    """The functions of an environment: make it, generate its tasks, demonstrate them, list its words."""

    make_env: Callable[[], Env]
    # (size, seed, **options) -> different tasks; no task is in both `split = "train"` and `"held_out"`
    generate_tasks: Callable[..., list[Task]]
    demonstrations: Callable[[Sequence[Task], int, float], list[tuple[Message, ...]]]  # (tasks, seed, mistake_rate)
    vocabulary: Callable[[], tuple[str, ...]]  # every word that the environment says or understands


def _solved(
    name: str,
    make_env: Callable[[], SolvableEnv],
    generate_tasks: Callable[..., list[Task]],
    vocabulary: Callable[[], tuple[str, ...]],
) -> EnvSpec:
    """Describe an environment that has a solver."""
    return EnvSpec(
        make_env=make_env,
        generate_tasks=generate_tasks,
        demonstrations=partial(demonstrate, name, make_env),
        vocabulary=vocabulary,
    )


def _foreign(name: str, make_env: Callable[[], Env], generate_tasks: Callable[..., list[Task]]) -> EnvSpec:
    """Describe an environment that has no solver and may say anything."""
    return EnvSpec(
        make_env=make_env,
        generate_tasks=generate_tasks,
        demonstrations=partial(no_demonstrations, name),
        vocabulary=partial(no_vocabulary, name),
    )


BUILT_IN: Mapping[str, EnvSpec] = {
    "key_door": _solved("key_door", key_door.KeyDoorEnv, key_door.generate_tasks, key_door.vocabulary),
    "add": EnvSpec(  # gives no reward of its own: score it with "exact_match"
        make_env=single_turn.SingleTurnEnv,
        generate_tasks=single_turn.addition_tasks,
        demonstrations=single_turn.addition_demonstrations,
        vocabulary=single_turn.addition_vocabulary,
    ),
    "frozen_lake": _solved(
        "frozen_lake", frozen_lake.FrozenLakeEnv, frozen_lake.generate_tasks, frozen_lake.vocabulary
    ),
    "sokoban": _solved("sokoban", sokoban.SokobanEnv, sokoban.generate_tasks, sokoban.vocabulary),
    "calculator": _solved("calculator", calculator.CalculatorEnv, calculator.generate_tasks, calculator.vocabulary),
    "guess_number": _solved(
        "guess_number", guess_number.GuessNumberEnv, guess_number.generate_tasks, guess_number.vocabulary
    ),
}
ADAPTERS: Mapping[str, EnvSpec] = {
    "gymnasium": EnvSpec(
        make_env=gymnasium.GymnasiumEnv,
        generate_tasks=gymnasium.generate_tasks,
        demonstrations=partial(no_demonstrations, "gymnasium"),
        vocabulary=gymnasium.vocabulary,
    ),
    "textarena": _foreign("textarena", textarena.TextArenaEnv, textarena.generate_tasks),
    "textworld": _solved(
        "textworld",
        textworld.TextWorldGameEnv,
        textworld.generate_tasks,
        partial(no_vocabulary, "textworld"),
    ),
    "verifiers": _foreign("verifiers", verifiers.VerifiersEnv, verifiers.generate_tasks),
    "openenv": _foreign("openenv", openenv.OpenEnvEnv, openenv.generate_tasks),
    "mcp": _foreign("mcp", mcp_env.McpEnv, mcp_env.generate_tasks),
}
assert tuple(BUILT_IN) == names.BUILTIN_ENVS
assert tuple(ADAPTERS) == names.ADAPTER_ENVS
ENVIRONMENTS: Mapping[str, EnvSpec] = {**BUILT_IN, **ADAPTERS}


def environment_tasks(name: str, size: int, seed: int, options: Mapping[str, Any]) -> list[Task]:
    """Generate tasks; raises ConfigError on an unknown environment or option, or a value of another type."""
    generate = lookup(ENVIRONMENTS, name, "environment").generate_tasks
    defaults = {
        option: parameter.default
        for option, parameter in inspect.signature(generate).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    for option, value in options.items():
        if option not in defaults:
            hint = nearest_name_hint(option, defaults)
            raise ConfigError(f"the environment {name} has no option {option!r}: {hint}")
        if type(value) is not type(defaults[option]):
            example = repr(defaults[option])
            raise ConfigError(f"option {option!r} of the environment {name} is {value!r}: write {example}, say")
    return generate(size, seed, **options)


def environment_demonstrations(
    name: str, size: int, seed: int, options: Mapping[str, Any]
) -> list[tuple[Message, ...]]:
    """Play a conversation for each of `size` tasks; `options` are those of the tasks and `mistake_rate` (default 0)."""
    mistake_rate = options.get("mistake_rate", 0.0)
    if isinstance(mistake_rate, bool) or not isinstance(mistake_rate, int | float):
        raise ConfigError(f"mistake_rate is {mistake_rate!r}: write a number from 0 to 1")
    tasks = demonstrated_tasks(name, size, seed, options)
    return ENVIRONMENTS[name].demonstrations(tasks, seed, float(mistake_rate))


def demonstrated_tasks(name: str, size: int, seed: int, options: Mapping[str, Any]) -> list[Task]:
    """Generate the tasks that `environment_demonstrations` solves, one for each conversation."""
    task_options = {option: value for option, value in options.items() if option != "mistake_rate"}
    return environment_tasks(name, size, seed, task_options)


def environment_pairs(
    name: str, size: int, seed: int, options: Mapping[str, Any]
) -> list[tuple[tuple[Message, ...], tuple[Message, ...]]]:
    """Play a careful and a careless conversation for each of `size` tasks; leave out tasks where both are the same.

    `options` are those of the tasks, `mistake_rate` of the careful player (default 0) and `rejected_mistake_rate` of
    the careless one (default 1).
    """
    shared = {option: value for option, value in options.items() if option != "rejected_mistake_rate"}
    careful = environment_demonstrations(name, size, seed, shared)
    careless = {**shared, "mistake_rate": options.get("rejected_mistake_rate", 1.0)}
    pairs = zip(careful, environment_demonstrations(name, size, seed, careless), strict=True)
    different = [pair for pair in pairs if pair[0] != pair[1]]
    if not different:
        raise ConfigError(f"no pair of the environment {name} differs: set rejected_mistake_rate above mistake_rate")
    return different
