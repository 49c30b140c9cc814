"""Environments of the package verifiers (SingleTurnEnv, MultiTurnEnv, ToolEnv and what is made of them) as worlds.

Their own `rollout` runs as it is, on an event loop and a thread of its own that all episodes of this process share; it
asks a client for the model's replies, and that client is this file: what is asked becomes an observation, the policy's
action the reply. So set-up, stop conditions, tools and clean-up are the environment's. At the end its rubric judges the
rollout; the weighted sum is the reward of the last step. Tasks are rows of its dataset.
"""

import asyncio
import contextvars
import functools
import importlib.util
import inspect
import json
import logging
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, Literal, TypeVar

from headrace.envs.adapters.optional_package import choose_tasks, require
from headrace.envs.adapters.textarena import state_key
from headrace.errors import ConfigError, DataError, EpisodeError, boundary
from headrace.rollout.worlds.adapters.loop_thread import LoopThread
from headrace.types import Action, Message, Observation, StepResult, Task, ToolCall
from headrace.user_code import load_function

logger = logging.getLogger(__name__)

PIP = "'verifiers>=0.3,<0.4'"
CLOSE_TIMEOUT_S = 5.0
LIMITS = ("max_turns_reached", "max_total_completion_tokens_reached", "timeout_reached", "prompt_too_long")
LOOP = LoopThread("verifiers")  # one for all, as under verifiers: environments keep semaphores and sessions of one loop
_LOADING = threading.Lock()
_FAILURES: contextvars.ContextVar[list[str]] = contextvars.ContextVar("failures of reward functions")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """The environment wants a reply to these messages; `state` is its own, to be looked at only."""

    prompt: Sequence[Any]
    tools: Sequence[Any]
    state: Mapping[str, Any]


class VerifiersEnv:
    """`valid` is False for what looks like a call of a tool and is none; the environment gets it as text."""

    deterministic = False  # nothing is known of what an environment draws, and nothing of it takes a seed
    blocking = True

    def __init__(self) -> None:
        self._env: Any = None
        self._rollout: Rollout | None = None
        self._fields: Sequence[str] = ()
        self._asked: ModelRequest | None = None

    def reset(self, task: Task, seed: int) -> Observation:
        """Raises DataError when the task is not one of this world, EpisodeError when the rollout cannot begin."""
        settings = task.data.get("verifiers")
        if settings is None or "row" not in task.data:
            raise DataError(f"task {task.id} is not of the verifiers world: its data need `verifiers` and `row`")
        self.close()
        self._fields = settings["state"]
        self._env = load_env(settings["env"], settings["settings"], settings["max_turns"])
        self._rollout = Rollout(self._env)
        asked = _on_loop(self._rollout.begin(task.data["row"]))
        if not isinstance(asked, ModelRequest):
            raise EpisodeError("the environment ended the rollout before the model was asked anything")
        self._asked = asked
        return self._observe(asked, asked.prompt)

    def step(self, action: str) -> StepResult:
        return self.call(Action(text=action, content=action))

    def call(self, action: Action) -> StepResult:
        assert self._rollout is not None, "reset comes before step"
        assert self._asked is not None, "the episode is over"
        before, self._asked = self._asked, None
        asked = _on_loop(self._rollout.answer(action))
        valid = action.problem is None
        if isinstance(asked, ModelRequest):
            self._asked = asked
            new = _new_messages(before.prompt, asked.prompt)
            return StepResult(observation=self._observe(asked, new), reward=0.0, done=False, valid=valid)
        return self._judged(asked, before, answered=not action.calls, valid=valid)

    def _judged(self, state: Mapping[str, Any], before: ModelRequest, *, answered: bool, valid: bool) -> StepResult:
        """The end of a rollout. An answer in the last turn there is, of tools or the only one, is no cut."""
        by_answer = isinstance(self._env, package().ToolEnv) or self._env.max_turns == 1
        why = state.get("stop_condition")
        truncated = why in LIMITS and not (why == "max_turns_reached" and by_answer and answered)
        reward = float(state["reward"])
        logger.debug("rubric: %s", state.get("metrics"))
        last = ModelRequest(prompt=(), tools=before.tools, state=state)
        return StepResult(
            observation=self._observe(last, state.get("final_env_response") or ()),
            reward=reward,
            done=not truncated,
            truncated=truncated,
            valid=valid,
            success=not truncated and reward >= getattr(self._env, "pass_threshold", 0.5),
        )

    def _observe(self, asked: ModelRequest, new: Sequence[Any]) -> Observation:
        key = {field: asked.state.get(field) for field in self._fields}
        return Observation(
            messages=tuple(map(_our_message, [{"role": "user", "content": new}] if isinstance(new, str) else new)),
            state=state_key(key) if key else None,
            tools=tuple(_described(tool) for tool in asked.tools),
        )

    def close(self) -> None:
        if self._rollout is not None:
            _on_loop(self._rollout.stop(), timeout_s=CLOSE_TIMEOUT_S)
        self._rollout, self._asked = None, None


class Rollout:
    """One `env.rollout(...)` and the judgement of it, halted whenever it asks for a reply. Lives on the loop."""

    def __init__(self, env: Any) -> None:
        self._env = env
        self._asked: asyncio.Queue[ModelRequest] = asyncio.Queue()
        self._replies: asyncio.Queue[Any] = asyncio.Queue()
        self._task: asyncio.Task[Mapping[str, Any]] | None = None

    async def begin(self, row: Mapping[str, Any]) -> ModelRequest | Mapping[str, Any]:
        self._task = asyncio.create_task(self._run(row))
        return await self._next()

    async def answer(self, action: Action) -> ModelRequest | Mapping[str, Any]:
        self._replies.put_nowait(_response(action))
        return await self._next()

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def get_response(self, prompt: Any, model: Any, sampling_args: Any, tools: Any = None, **rest: Any) -> Any:
        """What the environment calls as its client."""
        self._asked.put_nowait(ModelRequest(prompt=tuple(prompt), tools=tuple(tools or ()), state=rest["state"]))
        return await self._replies.get()

    async def _next(self) -> ModelRequest | Mapping[str, Any]:
        """The next question, or the state at the end; raises EpisodeError when the rollout failed."""
        assert self._task is not None
        question = asyncio.create_task(self._asked.get())
        try:
            await asyncio.wait({question, self._task}, return_when=asyncio.FIRST_COMPLETED)
            if question.done():
                return question.result()
            if self._task.cancelled():
                raise EpisodeError("the rollout was stopped")
            return self._task.result()
        finally:
            question.cancel()

    async def _run(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        with boundary(EpisodeError, "the verifiers environment failed"):
            state: Mapping[str, Any] = await self._env.rollout(dict(row), _client(self), "policy", {})
        if state.get("error") is not None:
            cause = state["error"].__cause__
            raise EpisodeError(
                f"the verifiers environment failed: {state['error']!r}" + (f" ({cause})" if cause else "")
            )
        failures: list[str] = []
        _FAILURES.set(failures)
        with boundary(EpisodeError, "the rubric failed"):
            await self._env.rubric.score_rollout(state)
            await self._env.rubric.cleanup(state)
        if failures:  # verifiers would have gone on with a reward of 0 for it
            raise EpisodeError(f"the rubric failed: {failures[0]}")
        return state


# --- between the two vocabularies ------------------------------------------------------------------------------------


def _client(rollout: Rollout) -> Any:
    """A `vf.Client` that asks the rollout's halted side; none of its other verbs is ever used."""
    base = package().Client

    def unused(*args: Any) -> Any:
        raise AssertionError("get_response asks no other method")

    verbs = dict.fromkeys(base.__abstractmethods__, unused)
    made = type("PolicyClient", (base,), {**verbs, "get_response": staticmethod(rollout.get_response)})
    return made(SimpleNamespace())


def _response(action: Action) -> Any:
    types = importlib.import_module("verifiers.legacy.types")
    calls = [types.ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in action.calls]
    message = types.ResponseMessage(
        content=action.content if calls else action.text,
        tool_calls=calls or None,
        finish_reason="tool_calls" if calls else "stop",
        is_truncated=False,
    )
    return types.Response(id="reply", created=0, model="policy", message=message)


def _new_messages(before: Sequence[Any], now: Sequence[Any]) -> Sequence[Any]:
    """What was said after the policy's reply; raises EpisodeError where the past was rewritten."""
    reply = now[len(before)] if len(now) > len(before) else None
    if list(now[: len(before)]) != list(before) or reply is None or reply.role != "assistant":
        raise EpisodeError(
            "the verifiers environment rewrites the conversation so far: run it as an agent program (rl.program)"
        )
    return now[len(before) + 1 :]


def _our_message(message: Any) -> Message:
    plain = message if isinstance(message, Mapping) else message.model_dump()
    content = plain.get("content") or ""
    if not isinstance(content, str):
        if any(part.get("type") != "text" for part in content):
            raise EpisodeError("the verifiers environment shows other things than text, which no model here can see")
        content = "".join(part["text"] for part in content)
    calls = tuple(
        ToolCall(id=call["id"], name=call["name"], arguments=call["arguments"])
        for call in plain.get("tool_calls") or ()
    )
    return Message(role=plain["role"], content=content, tool_calls=calls, tool_call_id=plain.get("tool_call_id"))


def _described(tool: Any) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


# --- the package and its loop ----------------------------------------------------------------------------------------


def package() -> Any:
    """verifiers; raises ConfigError with the command that installs it, also for a version without environments."""
    verifiers = require("verifiers", PIP)
    if importlib.util.find_spec("verifiers.legacy") is None:
        raise ConfigError(f"verifiers {verifiers.__version__} has no ToolEnv and its like: run  pip install {PIP}")
    logging.getLogger("verifiers").setLevel(logging.WARNING)  # importing it makes it tell of every load
    return verifiers


def _on_loop(work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
    """Waits for as long as the rollout takes; the episode's own time limit stops it, by `close`."""
    future = LOOP.submit(work)
    try:
        return future.result(timeout_s)
    except TimeoutError as exc:
        if future.done():
            raise
        raise EpisodeError("the verifiers environment does not end: a tool of it blocks the event loop") from exc


def load_env(env: str, settings: Mapping[str, Any], max_turns: int) -> Any:
    """The environment, the same object for the same arguments; raises ConfigError if it cannot be made or judged."""
    with _LOADING:
        return _loaded(env, json.dumps(settings, sort_keys=True), max_turns)


@lru_cache(maxsize=16)
def _loaded(env: str, settings: str, max_turns: int) -> Any:
    verifiers = package()
    make = load_function(env) if ":" in env else functools.partial(verifiers.load_environment, env)
    with boundary(ConfigError, f"verifiers cannot load {env}"), _signals_left_alone():
        made = make(**json.loads(settings))
    if not isinstance(made, verifiers.MultiTurnEnv):
        raise ConfigError(f"{env} is no environment of turns (vf.MultiTurnEnv) but a {type(made).__name__}")
    if made.requires_group_rollouts:
        raise ConfigError(
            f"the rubric of {env} judges whole groups at once: write it as a batch reward (authoring-rewards.md)"
        )
    if max_turns:
        made.max_turns = max_turns
    for rubric in _rubrics(made.rubric):
        rubric.funcs = [_watched(function) for function in rubric.funcs]
    return made


@contextmanager
def _signals_left_alone() -> Iterator[None]:
    """Making an environment takes SIGINT and SIGTERM over, which only a main thread can and ours must keep."""
    module = importlib.import_module("verifiers.legacy.envs.environment")
    theirs = module.signal
    module.signal = SimpleNamespace(  # type: ignore[attr-defined]
        signal=lambda *args: None, SIGINT=theirs.SIGINT, SIGTERM=theirs.SIGTERM, default_int_handler=None
    )
    try:
        yield
    finally:
        module.signal = theirs  # type: ignore[attr-defined]


def _rubrics(rubric: Any) -> list[Any]:
    inner = getattr(rubric, "rubrics", None)
    return [rubric] if inner is None else [leaf for part in inner for leaf in _rubrics(part)]


def _watched(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function; a failure of it, which a rubric turns into 0, is remembered."""

    @functools.wraps(function)
    async def watched(*args: Any, **kwargs: Any) -> Any:
        try:
            with boundary(EpisodeError, getattr(function, "__name__", "a reward function")):
                found = function(*args, **kwargs)
                return float(await found if inspect.isawaitable(found) else found)
        except EpisodeError as exc:
            _FAILURES.get().append(str(exc))
            raise

    return watched


# --- tasks -----------------------------------------------------------------------------------------------------------


def generate_tasks(
    size: int,
    seed: int,
    *,
    split: Literal["train", "held_out"] = "train",
    env: str = "",
    settings: dict[str, Any] = {},  # noqa: B006 - never changed; its type says what the option takes
    state: list[str] = [],  # noqa: B006
    max_turns: int = 0,
) -> list[Task]:
    """`size` rows of the dataset of `env`: the name of an installed environment, or "file.py:load_environment".

    `held_out` are rows of its evaluation dataset; without one, a fifth of the dataset is kept for it. `state` names
    the fields of verifiers' state that make up the anchor state. `max_turns` replaces the environment's own, if not 0.
    """
    package()
    if not env:
        raise ConfigError('the world verifiers needs the option env: env = "file.py:load_environment", say')
    made = load_env(env, settings, max_turns)
    with boundary(ConfigError, f"the dataset of {env} cannot be loaded"):
        held_out = made.build_eval_dataset()
        trained = made.build_dataset()
    rows = held_out if split == "held_out" and held_out is not None else trained
    if rows is None:
        raise ConfigError(f"{env} has no dataset to train on, only one to evaluate on: use it in eval.source")
    known = [Task(id="", data={"answer": row.get("answer"), "row": row}) for row in map(dict, rows)]
    own = {"env": env, "settings": settings, "state": state, "max_turns": max_turns}
    by_hash = held_out is None
    return choose_tasks("verifiers", known, size, seed, split=split, settings=own, what=env, by_hash=by_hash)
