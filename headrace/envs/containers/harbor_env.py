"""Play a task of the Harbor format: commands in its container, by the tool `bash`, then its tests.

A turn without a call ends the episode, and so do the time limit of the task and the last turn. Then tests/ is copied to
/tests, tests/test.sh runs, and /logs/verifier says the reward. What cannot be found out fails the episode: a container
that died, tests that write no reward or do not end.
"""

import json
import math
import threading
import time
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headrace.envs.containers.command_line import FinishedCall, find_program
from headrace.envs.containers.harbor_tasks import FOLDER, HarborTask, read_harbor_task
from headrace.envs.containers.pool import MAX_CONTAINERS, STARTS_PER_S, ContainerPool
from headrace.envs.tool_env import arguments_of, describe_tool, tool_message
from headrace.errors import ConfigError, EpisodeError
from headrace.protocols import Env
from headrace.types import Action, Message, Observation, StepResult, Task, ToolCall

BASH = describe_tool(
    "bash",
    "Run a command with bash in the task's container, and return what it prints. End your work with a reply without "
    "a call.",
    {"command": {"type": "string"}},
)
SETUP_S = 120.0  # of copying the tests
SPARE_S = 300.0  # that a container lives longer than its task may take
PID_FILE = "/tmp/.headrace_command"
# The shell says its number, so that a command that takes too long can be ended.
WRAPPED = f'echo $$ > {PID_FILE}; if command -v bash >/dev/null; then exec bash -c "$0"; fi; exec sh -c "$0"'
KILL = f"pid=$(cat {PID_FILE}); kill -9 -$pid || kill -9 $pid"  # its group, which docker exec makes
REWARD_FILES = (
    "if [ -s /logs/verifier/reward.json ]; then cat /logs/verifier/reward.json; "
    "elif [ -s /logs/verifier/reward.txt ]; then cat /logs/verifier/reward.txt; else exit 3; fi"
)


class HarborOptions(BaseModel):
    """The `options` of a source of type "harbor"."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    program: Literal["docker", "podman"] | None = None  # None: the first that answers
    max_containers: int = Field(default=MAX_CONTAINERS, ge=1)  # of this process, training and evaluation together
    starts_per_s: float = Field(default=STARTS_PER_S, gt=0)
    start_timeout_s: float = Field(default=600.0, gt=0)  # of waiting for a container
    command_timeout_s: float = Field(default=120.0, gt=0)  # of one command
    max_output: int = Field(default=10_000, ge=100)  # bytes of a command's output that the policy sees


def harbor_env_maker(options: Mapping[str, Any], max_turns: int | None = None) -> Callable[[], Env]:
    """Return what makes environments of Harbor tasks. Raises ConfigError if no container program answers."""
    try:
        chosen = HarborOptions.model_validate(dict(options))
    except ValidationError as exc:
        error = exc.errors(include_url=False, include_context=False)[0]
        known = ", ".join(HarborOptions.model_fields)
        key = ".".join(str(part) for part in error["loc"])
        raise ConfigError(f'options.{key} of type "harbor": {error["msg"]}; there are {known}') from exc
    pool = shared_pool(chosen.program, chosen.max_containers, chosen.starts_per_s)
    return partial(HarborEnv, pool, options=chosen, max_turns=max_turns)


@lru_cache(maxsize=8)
def shared_pool(program: str | None, max_containers: int, starts_per_s: float) -> ContainerPool:
    """Open the pool of this process, which training and evaluation share."""
    return ContainerPool(find_program(program), max_containers=max_containers, starts_per_s=starts_per_s)


class HarborEnv:
    """The container of one episode.

    `max_turns`: after so many turns the tests run, so that an episode at the limit of turns has its reward.
    """

    blocking = True

    def __init__(
        self, pool: ContainerPool, *, options: HarborOptions | None = None, max_turns: int | None = None
    ) -> None:
        self._pool, self._max_turns = pool, max_turns
        self._options = options or HarborOptions()
        self._lock = threading.Lock()  # of closing, which may come from another thread while a call waits
        self._closed = False
        self._container: str | None = None
        self._task: HarborTask | None = None
        self._deadline, self._turns = math.inf, 0

    def reset(self, task: Task, seed: int) -> Observation:
        self._release()
        folder = task.data.get(FOLDER)
        if not isinstance(folder, str):
            raise EpisodeError(f"task {task.id} is not from a Harbor folder")
        harbor = read_harbor_task(Path(folder))
        settings = harbor.settings
        self._pool.image(harbor.image, context=harbor.build_context, timeout_s=settings.environment.build_timeout_sec)
        lifetime_s = settings.agent.timeout_sec + settings.verifier.timeout_sec + SPARE_S
        container = self._pool.start(
            harbor.image, harbor.run_options, lifetime_s=lifetime_s, wait_s=self._options.start_timeout_s
        )
        with self._lock:
            if self._closed:
                self._pool.release(container)
                raise EpisodeError(f"task {task.id}: the episode ended before its container was there")
            self._container = container
        self._task, self._turns = harbor, 0
        self._deadline = time.monotonic() + settings.agent.timeout_sec
        return Observation(messages=(), tools=(BASH,))

    def step(self, action: str) -> StepResult:
        return self.call(Action(text=action, content=action))

    def call(self, action: Action) -> StepResult:
        self._turns += 1
        if not action.calls and action.problem is None:
            return self._finish(done=True)
        if action.problem is not None:
            messages: tuple[Message, ...] = (Message(role="user", content=action.problem),)
            valid = False
        else:
            answers = [self._run(call) for call in action.calls]
            messages = tuple(tool_message(call, text) for call, (text, _) in zip(action.calls, answers, strict=True))
            valid = all(possible for _, possible in answers)
        if time.monotonic() >= self._deadline or self._turns == self._max_turns:
            return self._finish(*messages, valid=valid)
        return StepResult(observation=_observe(*messages), reward=0.0, done=False, valid=valid)

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._release()

    def _release(self) -> None:
        with self._lock:
            container, self._container = self._container, None
        if container is not None:
            self._pool.release(container)

    def _running(self) -> tuple[str, HarborTask]:
        if self._container is None or self._task is None:
            raise EpisodeError("the container is closed")
        return self._container, self._task

    def _run(self, call: ToolCall) -> tuple[str, bool]:
        """Run a command; return what it printed, and whether it was one."""
        command = arguments_of(call).get("command")
        if call.name != "bash" or not isinstance(command, str):
            return 'error: call bash with {"command": "..."}', False
        _, task = self._running()
        limit_s = min(self._options.command_timeout_s, self._deadline - time.monotonic())
        if limit_s <= 0:
            return "error: the time of this task is over", True
        result = self._execute(["sh", "-c", WRAPPED, command], timeout_s=limit_s, user=task.agent_user)
        if result.code is None:
            self._execute(["sh", "-c", KILL], timeout_s=SETUP_S, user="0")
            return f"{result.output}\nerror: the command did not end within {limit_s:.0f} s and was killed", True
        code = "" if result.code == 0 else f"\n(exit code {result.code})"
        return result.output + code, True

    def _finish(self, *messages: Message, done: bool = False, valid: bool = True) -> StepResult:
        """Run the tests; an episode that did not end by itself is truncated."""
        reward = self._verify()
        return StepResult(
            observation=_observe(*messages),
            reward=reward,
            done=done,
            truncated=not done,
            valid=valid,
            success=reward >= 1.0,
        )

    def _verify(self) -> float:
        container, task = self._running()
        # what the policy may have left there must not count
        prepare = "rm -rf /tests /logs/verifier && mkdir -p /tests /logs/verifier"
        prepared = self._execute(["sh", "-c", prepare], timeout_s=SETUP_S, user="0")
        if prepared.code != 0:
            raise EpisodeError(f"the tests of {task.name} cannot be set up: {prepared.output.strip()[:300]}")
        self._pool.program.check("cp", f"{task.folder / 'tests'}/.", f"{container}:/tests", timeout_s=SETUP_S)
        limit_s = task.settings.verifier.timeout_sec
        tested = self._execute(
            ["bash", "/tests/test.sh"], timeout_s=limit_s, user=task.verifier_user, env=task.verifier_env
        )
        if tested.code is None:
            raise EpisodeError(f"the tests of {task.name} did not end within {limit_s:g} s")
        written = self._execute(["sh", "-c", REWARD_FILES], timeout_s=SETUP_S, user="0")
        if written.code != 0:
            last = tested.output.strip()[-300:]
            raise EpisodeError(f"the tests of {task.name} wrote no reward to /logs/verifier: {last}")
        return read_reward(written.output, task.name)

    def _execute(
        self, command: list[str], *, timeout_s: float, user: str | None, env: Mapping[str, str] | None = None
    ) -> FinishedCall:
        container, _ = self._running()
        return self._pool.program.execute(
            container, command, timeout_s=timeout_s, user=user, env=env, max_bytes=self._options.max_output
        )


def read_reward(text: str, task: str) -> float:
    """Read a number, or a JSON object with `reward`, or with one number alone. Raises EpisodeError.

    >>> read_reward("1\\n", "t"), read_reward('{"reward": 0.5, "speed": 3}', "t"), read_reward('{"score": 0}', "t")
    (1.0, 0.5, 0.0)
    """
    try:
        value: Any = json.loads(text)
    except ValueError:
        value = None
    if isinstance(value, dict):
        value = value.get("reward", next(iter(value.values())) if len(value) == 1 else None)
    if isinstance(value, bool | int | float) and math.isfinite(value):
        return float(value)
    raise EpisodeError(f"the tests of {task} wrote {text.strip()[:80]!r}, which is no number and has no 'reward'")


def _observe(*messages: Message) -> Observation:
    return Observation(messages=messages, tools=(BASH,))
