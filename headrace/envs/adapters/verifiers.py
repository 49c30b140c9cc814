"""Play environments of the package verifiers: SingleTurnEnv, MultiTurnEnv, ToolEnv and their subclasses.

Their `rollout` runs unchanged, on an event loop thread that all episodes of this process share. It requests the model's
replies from a client, and that client is this file: a request becomes an observation, the policy's action the reply. So
set-up, stop conditions, tools and clean-up are the environment's. At the end its rubric judges the rollout, and the
weighted sum is the reward of the last step. Tasks are rows of its dataset.
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

from headrace.envs.adapters.loop_thread import LoopThread
from headrace.envs.adapters.optional_package import choose_tasks, require
from headrace.envs.adapters.textarena import state_key
from headrace.errors import ConfigError, DataError, EpisodeError, boundary
from headrace.types import Action, Message, Observation, StepResult, Task, ToolCall
from headrace.user_code import load_function

logger = logging.getLogger(__name__)

PIP = "'verifiers>=0.3,<0.4'"
CLOSE_TIMEOUT_S = 5.0
LIMITS = ("max_turns_reached", "max_total_completion_tokens_reached", "timeout_reached", "prompt_too_long")
LOOP = LoopThread("verifiers")  # one for all, as in verifiers: environments keep semaphores and sessions of one loop
_LOADING = threading.Lock()
_FAILURES: contextvars.ContextVar[list[str]] = contextvars.ContextVar("failures of reward functions")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """A request of the environment for a reply to these messages."""

    prompt: Sequence[Any]
    tools: Sequence[Any]
    state: Mapping[str, Any]  # the environment's, read only


class VerifiersEnv:
    """Plays a verifiers environment. `valid` is False for a malformed tool call; the environment gets it as text."""

    deterministic = False  # an environment takes no seed, and may draw anything
    blocking = True

    def __init__(self) -> None:
        self._env: Any = None
        self._rollout: Rollout | None = None
        self._fields: Sequence[str] = ()
        self._request: ModelRequest | None = None

    def reset(self, task: Task, seed: int) -> Observation:
        """Start an episode.

        Raises DataError when the task is not one of this environment, EpisodeError when the rollout cannot begin.
        """
        settings = task.data.get("verifiers")
        if settings is None or "row" not in task.data:
            raise DataError(f"task {task.id} is not of the environment verifiers: its data need `verifiers` and `row`")
        self.close()
        self._fields = settings["state"]
        self._env = load_env(settings["env"], settings["settings"], settings["max_turns"])
        self._rollout = Rollout(self._env)
        request = _on_loop(self._rollout.begin(task.data["row"]))
        if not isinstance(request, ModelRequest):
            raise EpisodeError("the environment ended the rollout before the model was asked anything")
        self._request = request
        return self._observe(request, request.prompt)

    def step(self, action: str) -> StepResult:
        return self.call(Action(text=action, content=action))

    def call(self, action: Action) -> StepResult:
        assert self._rollout is not None, "reset comes before step"
        assert self._request is not None, "the episode is over"
        before, self._request = self._request, None
        request = _on_loop(self._rollout.answer(action))
        valid = action.problem is None
        if isinstance(request, ModelRequest):
            self._request = request
            new = _new_messages(before.prompt, request.prompt)
            return StepResult(observation=self._observe(request, new), reward=0.0, done=False, valid=valid)
        return self._final_result(request, before, answered=not action.calls, valid=valid)

    def _final_result(
        self, state: Mapping[str, Any], before: ModelRequest, *, answered: bool, valid: bool
    ) -> StepResult:
        """Make the result of a rollout's last step.

        An answer in the last turn is no truncation if the environment has tools, or only one turn.
        """
        by_answer = isinstance(self._env, package().ToolEnv) or self._env.max_turns == 1
        reason = state.get("stop_condition")
        truncated = reason in LIMITS and not (reason == "max_turns_reached" and by_answer and answered)
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

    def _observe(self, request: ModelRequest, new: Sequence[Any]) -> Observation:
        key = {field: request.state.get(field) for field in self._fields}
        return Observation(
            messages=tuple(map(_our_message, [{"role": "user", "content": new}] if isinstance(new, str) else new)),
            state=state_key(key) if key else None,
            tools=tuple(_described(tool) for tool in request.tools),
        )

    def close(self) -> None:
        if self._rollout is not None:
            _on_loop(self._rollout.stop(), timeout_s=CLOSE_TIMEOUT_S)
        self._rollout, self._request = None, None


class Rollout:
    """Runs one `env.rollout(...)` and its scoring on the loop, and pauses whenever it requests a reply."""

    def __init__(self, env: Any) -> None:
        self._env = env
        self._requests: asyncio.Queue[ModelRequest] = asyncio.Queue()
        self._replies: asyncio.Queue[Any] = asyncio.Queue()
        self._task: asyncio.Task[Mapping[str, Any]] | None = None

    async def begin(self, row: Mapping[str, Any]) -> ModelRequest | Mapping[str, Any]:
        """Start the rollout; return its first request, or the state if it ends without one."""
        self._task = asyncio.create_task(self._run(row))
        return await self._next()

    async def answer(self, action: Action) -> ModelRequest | Mapping[str, Any]:
        """Reply to the request; return the next one, or the state at the end."""
        self._replies.put_nowait(_response(action))
        return await self._next()

    async def stop(self) -> None:
        """Cancel the rollout and wait until it has ended."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def get_response(self, prompt: Any, model: Any, sampling_args: Any, tools: Any = None, **rest: Any) -> Any:
        """Request a reply; the environment calls this method of its client."""
        self._requests.put_nowait(ModelRequest(prompt=tuple(prompt), tools=tuple(tools or ()), state=rest["state"]))
        return await self._replies.get()

    async def _next(self) -> ModelRequest | Mapping[str, Any]:
        """Return the next request, or the state at the end; raises EpisodeError when the rollout failed."""
        assert self._task is not None
        question = asyncio.create_task(self._requests.get())
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
        if failures:  # verifiers itself would continue with a reward of 0
            raise EpisodeError(f"the rubric failed: {failures[0]}")
        return state


# --- between the two vocabularies ------------------------------------------------------------------------------------


def _client(rollout: Rollout) -> Any:
    """Make a `vf.Client` whose replies come from the rollout; none of its other methods is ever used."""
    base = package().Client

    def unused(*args: Any) -> Any:
        raise AssertionError("get_response asks no other method")

    verbs = dict.fromkeys(base.__abstractmethods__, unused)
    client = type("PolicyClient", (base,), {**verbs, "get_response": staticmethod(rollout.get_response)})
    return client(SimpleNamespace())


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
    """Return the messages after the policy's reply; raises EpisodeError if earlier messages were rewritten."""
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
    """Import verifiers; raises ConfigError with the command that installs a version that has environments."""
    verifiers = require("verifiers", PIP)
    if importlib.util.find_spec("verifiers.legacy") is None:
        raise ConfigError(f"verifiers {verifiers.__version__} has no ToolEnv and its like: run  pip install {PIP}")
    logging.getLogger("verifiers").setLevel(logging.WARNING)  # importing it turns on a log line for every load
    return verifiers


def _on_loop(work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
    """Run `work` on the loop and wait for it; the episode's time limit stops a rollout by `close`."""
    future = LOOP.submit(work)
    try:
        return future.result(timeout_s)
    except TimeoutError as exc:
        if future.done():
            raise
        raise EpisodeError("the verifiers environment does not end: a tool of it blocks the event loop") from exc


def load_env(env: str, settings: Mapping[str, Any], max_turns: int) -> Any:
    """Load the environment, once for the same arguments; raises ConfigError if it cannot be made or judged."""
    with _LOADING:
        return _load_once(env, json.dumps(settings, sort_keys=True), max_turns)


@lru_cache(maxsize=16)
def _load_once(env: str, settings: str, max_turns: int) -> Any:
    verifiers = package()
    make = load_function(env) if ":" in env else functools.partial(verifiers.load_environment, env)
    with boundary(ConfigError, f"verifiers cannot load {env}"), _signals_left_alone():
        loaded = make(**json.loads(settings))
    if not isinstance(loaded, verifiers.MultiTurnEnv):
        raise ConfigError(f"{env} is no environment of turns (vf.MultiTurnEnv) but a {type(loaded).__name__}")
    if loaded.requires_group_rollouts:
        raise ConfigError(
            f"the rubric of {env} judges whole groups at once: write it as a batch reward (authoring-rewards.md)"
        )
    if max_turns:
        loaded.max_turns = max_turns
    for rubric in _rubrics(loaded.rubric):
        rubric.funcs = [_watch(function) for function in rubric.funcs]
    return loaded


@contextmanager
def _signals_left_alone() -> Iterator[None]:
    """Keep an environment from handling SIGINT and SIGTERM: only a main thread can, and ours has its own handlers."""
    module = importlib.import_module("verifiers.legacy.envs.environment")
    real_signal = module.signal
    module.signal = SimpleNamespace(  # type: ignore[attr-defined]
        signal=lambda *args: None, SIGINT=real_signal.SIGINT, SIGTERM=real_signal.SIGTERM, default_int_handler=None
    )
    try:
        yield
    finally:
        module.signal = real_signal  # type: ignore[attr-defined]


def _rubrics(rubric: Any) -> list[Any]:
    inner = getattr(rubric, "rubrics", None)
    return [rubric] if inner is None else [leaf for part in inner for leaf in _rubrics(part)]


def _watch(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a reward function so that a failure of it, which a rubric turns into 0, is recorded."""

    @functools.wraps(function)
    async def watched(*args: Any, **kwargs: Any) -> Any:
        try:
            with boundary(EpisodeError, getattr(function, "__name__", "a reward function")):
                score = function(*args, **kwargs)
                return float(await score if inspect.isawaitable(score) else score)
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
    """Choose `size` rows of the dataset of `env`: the name of an installed environment, or "file.py:load_environment".

    `held_out` are rows of its evaluation dataset; without one, a fifth of the dataset is kept for it. `state` names
    the fields of verifiers' state that make up the anchor state. `max_turns` replaces the environment's own, if not 0.
    """
    package()
    if not env:
        raise ConfigError('the environment verifiers needs the option env: env = "file.py:load_environment", say')
    loaded = load_env(env, settings, max_turns)
    with boundary(ConfigError, f"the dataset of {env} cannot be loaded"):
        held_out = loaded.build_eval_dataset()
        trained = loaded.build_dataset()
    rows = held_out if split == "held_out" and held_out is not None else trained
    if rows is None:
        raise ConfigError(f"{env} has no dataset to train on, only one to evaluate on: use it in eval.source")
    candidates = [Task(id="", data={"answer": row.get("answer"), "row": row}) for row in map(dict, rows)]
    saved = {"env": env, "settings": settings, "state": state, "max_turns": max_turns}
    by_hash = held_out is None
    return choose_tasks("verifiers", candidates, size, seed, split=split, settings=saved, what=env, by_hash=by_hash)
