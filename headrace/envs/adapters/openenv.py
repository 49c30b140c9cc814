"""Play environments of the package OpenEnv, made in this process: no server, no container.

An OpenEnv environment takes a typed action, a pydantic model. The model's text is a JSON object of the action's fields,
or, with the option `field`, the value of that one field. The model sees one field of the typed observation, or all of
them as JSON. The state is the environment's `state`, without the counters that every OpenEnv state has. A task's seed
decides the start.
"""

import json
import logging
import typing
from collections.abc import Mapping
from typing import Any, Literal

import pydantic

from headrace.envs.adapters.optional_package import require, seed_tasks
from headrace.envs.adapters.textarena import state_key
from headrace.errors import ConfigError, DataError, EpisodeError, boundary
from headrace.types import Message, Observation, StepResult, Task
from headrace.user_code import load_function

logger = logging.getLogger(__name__)

PIP = "openenv"
OWN_FIELDS = ("done", "reward", "metadata")  # of every observation
COUNTERS = ("episode_id", "step_count")  # of every state
NEEDED = ("env", "settings", "reset", "field", "show", "seed", "max_turns")


class OpenEnvEnv:
    """Plays an OpenEnv environment.

    `valid` means that the text is an action of the environment's type; any other text costs a turn, and the environment
    does not see it.
    """

    deterministic = False  # an environment gets a seed; whether it follows it is unknown
    blocking = True

    def __init__(self) -> None:
        self._env: Any = None
        self._codec = Codec(None, field="", show="")
        self._observation = Observation(messages=())
        self._turns_left = 0

    def reset(self, task: Task, seed: int) -> Observation:
        """Start an episode.

        Raises DataError when the task is not one of this environment, EpisodeError when the OpenEnv environment fails.
        """
        if not set(NEEDED) <= task.data.keys():
            raise DataError(f"task {task.id} is not of the environment openenv: its data need {', '.join(NEEDED)}")
        self.close()
        data = task.data
        self._env, self._codec = make_env(data["env"], data["settings"], field=data["field"], show=data["show"])
        with boundary(EpisodeError, f"the OpenEnv environment {data['env']} cannot be reset"):
            observed = self._env.reset(seed=int(data["seed"]), **data["reset"])
        self._turns_left = int(data["max_turns"])
        return self._observe(observed)

    def step(self, action: str) -> StepResult:
        assert self._env is not None, "reset comes before step"
        assert self._turns_left > 0, "the episode is over"
        self._turns_left -= 1
        parsed = self._codec.read(action)
        if isinstance(parsed, str):
            problem = Message(role="user", content=parsed)
            last = self._observation
            observation = Observation(messages=(problem,), state=last.state, actions=last.actions)
            return StepResult(
                observation=observation,
                reward=0.0,
                done=False,
                truncated=self._turns_left == 0,
                valid=False,
                success=False,
            )
        with boundary(EpisodeError, "the OpenEnv environment failed"):
            result = self._env.step(parsed)
        reward, done = float(result.reward or 0.0), bool(result.done)
        self._turns_left = 0 if done else self._turns_left
        return StepResult(
            observation=self._observe(result),
            reward=reward,
            done=done,
            truncated=not done and self._turns_left == 0,
            success=done and reward > 0,
        )

    def _observe(self, observed: Any) -> Observation:
        self._observation = Observation(
            messages=(Message(role="user", content=self._codec.tell(observed)),),
            state=_state_of(self._env.state),
            actions=self._codec.offered(self._env, observed),
        )
        return self._observation

    def close(self) -> None:
        if self._env is not None:
            with boundary(EpisodeError, "the OpenEnv environment cannot be closed"):
                self._env.close()
        self._env = None


class Codec:
    """Converts between texts and the types of one environment; `action` is its class of actions."""

    def __init__(self, action: Any, *, field: str, show: str) -> None:
        self._action, self._field, self._show = action, field, show
        values = {} if action is None else action.model_json_schema()["properties"].get(field, {})
        self._plain = values.get("type", "string")
        self._values = tuple(str(value) for value in values["enum"]) if "enum" in values else None

    def offered(self, env: Any, observed: Any) -> tuple[str, ...] | None:
        """Return the actions that the environment lists for its web page, or else the values of an enumerated field."""
        listed = env.web_actions(observed.model_dump(mode="json")) if hasattr(env, "web_actions") else []
        if not listed:
            return self._values
        return tuple(str(fields[self._field]) if self._field else json.dumps(fields) for _, fields in listed)

    def read(self, text: str) -> Any:
        """Parse an action; return it, or a sentence that says what is wrong with the text.

        >>> from pydantic import BaseModel
        >>> class Move(BaseModel): steps: int
        >>> Codec(Move, field="", show="").read('{"steps": 2}'), Codec(Move, field="steps", show="").read(" 2 ")
        (Move(steps=2), Move(steps=2))
        >>> Codec(Move, field="", show="").read("2")
        'write an action as a JSON object with the fields steps'
        """
        fields = [name for name in self._action.model_fields if name != "metadata"]
        if self._field:
            fields_given: Any = {self._field: text.strip() if self._plain != "string" or self._values else text}
        else:
            try:
                fields_given = json.loads(text)
            except ValueError:
                fields_given = None
            if not isinstance(fields_given, dict):
                return f"write an action as a JSON object with the fields {', '.join(fields) or 'none'}"
        try:
            return self._action.model_validate(fields_given)
        except pydantic.ValidationError as exc:
            first = exc.errors()[0]
            return f"{'.'.join(map(str, first['loc'])) or 'the action'}: {first['msg']}"

    def tell(self, observed: Any) -> str:
        """Write an observation as text: the field to show, else its only field, else all fields as JSON."""
        fields = {key: value for key, value in observed.model_dump(mode="json").items() if key not in OWN_FIELDS}
        if self._show:
            if self._show not in fields:
                raise EpisodeError(f"an observation has no field {self._show}: it has {', '.join(fields) or 'none'}")
            value = fields[self._show]
        else:
            [value] = fields.values() if len(fields) == 1 else [fields]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _state_of(state: Any) -> str | None:
    """Hash the environment's state; return None if it has nothing but the counters."""
    fields = {key: value for key, value in state.model_dump().items() if key not in COUNTERS}
    return state_key(fields) if fields else None


def make_env(name: str, settings: Mapping[str, Any], *, field: str, show: str) -> tuple[Any, Codec]:
    """Make the environment that "file.py:Class" or "package.module:Class" names, with its codec.

    Raises ConfigError if it cannot be made, or its actions have no such field.
    """
    require("openenv", PIP)
    server = require("openenv.core.env_server", PIP)
    make = load_function(name)
    with boundary(ConfigError, f"OpenEnv cannot make {name}"):
        env = make(**settings)
    if not isinstance(env, server.Environment):
        raise ConfigError(f"{name} makes a {type(env).__name__}, not an OpenEnv Environment")
    if env.REQUIRES_SINGLE_THREAD_EXECUTOR:
        raise ConfigError(f"{name} has to stay on one thread, which episodes here do not: take one that can be moved")
    action = action_type(env, server.Action)
    if field and field not in action.model_fields:
        raise ConfigError(f"actions of {name} have no field {field!r}: they have {', '.join(action.model_fields)}")
    return env, Codec(action, field=field, show=show)


def action_type(env: Any, base: Any) -> Any:
    """Return the class of actions in the annotations of `step`."""
    with boundary(ConfigError, f"the types of {type(env).__name__}.step cannot be read"):
        hints = typing.get_type_hints(type(env).step)
    action = hints.get("action")
    if not isinstance(action, type) or not issubclass(action, base):
        raise ConfigError(f"{type(env).__name__}.step does not say which Action it takes: annotate its `action`")
    return action


def generate_tasks(
    size: int,
    seed: int,
    *,
    split: Literal["train", "held_out"] = "train",
    env: str = "",
    settings: dict[str, Any] = {},  # noqa: B006 - never changed; its type says what the option takes
    reset: dict[str, Any] = {},  # noqa: B006
    field: str = "",
    show: str = "",
    max_turns: int = 20,
) -> list[Task]:
    """Draw `size` seeds for the environment `env`, made with `settings` and reset with the seed and `reset`."""
    require("openenv", PIP)
    if not env:
        raise ConfigError('the environment openenv needs the option env: env = "file.py:MyEnvironment", say')
    trial, _ = make_env(env, settings, field=field, show=show)
    trial.close()
    if not trial.SUPPORTS_CONCURRENT_SESSIONS:
        logger.warning("%s does not set SUPPORTS_CONCURRENT_SESSIONS, and several of it will be played at once", env)
    data = {"env": env, "settings": settings, "reset": reset, "field": field, "show": show, "max_turns": max_turns}
    return seed_tasks("openenv", size, seed, split=split, data=data)
