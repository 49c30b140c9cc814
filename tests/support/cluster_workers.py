"""Players for workers, an environment that takes its time, and actors that are objects of this process."""

import asyncio
import hashlib
import pickle
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.cluster import runtime
from headrace.cluster.connection import Places
from headrace.cluster.role_worker import RoleWorker
from headrace.cluster.worker_pool import WorkerPool
from headrace.protocols import Sampler
from headrace.render import Renderer
from headrace.rollout.group import GroupPlayer
from headrace.testing import FakeRewardRunner
from headrace.types import Group, Message, Observation, SampleRequest, SamplingParams, StepResult, Task
from headrace.wiring import stage_context
from support.scripted_episodes import TOKENIZER, ScriptedSampler

GROUP_SIZE = 2


class CountingEnv:
    """Ends after so many turns, each of which takes `step_s`; the same actions give the same observations."""

    def __init__(self, *, turns: int = 3, step_s: float = 0.0, deterministic: bool = True) -> None:
        self._turns, self._step_s, self.deterministic, self.blocking = turns, step_s, deterministic, step_s > 0
        self._done = 0

    def reset(self, task: Task, seed: int) -> Observation:
        return Observation(messages=(Message(role="user", content="count"),), state=str(seed))

    def step(self, action: str) -> StepResult:
        time.sleep(self._step_s)
        self._done += 1
        observation = Observation(messages=(Message(role="user", content="up"),), state=f"{self._done}")
        return StepResult(observation=observation, reward=float(len(action)), done=self._done >= self._turns)

    def close(self) -> None:
        return None


def seeded_words(request: SampleRequest) -> str:
    """Say digits that follow from the seed and the prompt alone."""
    content = request.params.seed.to_bytes(16, "little", signed=True) + request.prompt.tobytes()
    return " ".join(str(byte % 10) for byte in hashlib.blake2b(content, digest_size=3).digest())


def seeded_sampler() -> ScriptedSampler:
    return ScriptedSampler(seeded_words)


def build_player(env: Callable[[], CountingEnv], sampler: Sampler) -> GroupPlayer:
    return GroupPlayer(
        group_size=GROUP_SIZE,
        make_env=env,
        sampler=sampler,
        renderer=Renderer(TOKENIZER),
        reward_runner=FakeRewardRunner(),
        sampling=SamplingParams(max_tokens=8),
        max_turns=16,
        run_seed=3,
        timeout_s=120.0,
    )


def player_of(**env: Any) -> Callable[[Sampler], GroupPlayer]:
    return partial(build_player, partial(CountingEnv, **env))


def content(group: Group) -> list[Any]:
    """Everything of a group that can be compared."""
    return [
        (
            scored.episode.id,
            scored.episode.seed,
            scored.reward.total,
            scored.episode.messages,
            [(step.prompt.tolist(), step.completion.tokens.tolist(), step.state) for step in scored.episode.steps],
        )
        for scored in group.episodes
    ]


class LocalActor:
    """A worker that is an object of this process, called as Ray's actors are; it can be killed, or made to hang."""

    def __init__(self, worker: RoleWorker) -> None:
        self.worker = worker
        self.hangs = self.dead = False
        self._open: set[asyncio.Future[Any]] = set()
        self._tasks: set[asyncio.Task[Any]] = set()

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: self._call(name, *arguments))

    def kill(self) -> None:
        self.dead = True
        for task in self._tasks:
            task.cancel()
        for answer in self._open:
            if not answer.done():
                answer.set_exception(_died())

    def _call(self, name: str, *arguments: Any) -> "asyncio.Future[Any]":
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self.dead:
            answer.set_exception(_died())
            return answer
        self._open.add(answer)
        answer.add_done_callback(self._open.discard)
        if self.hangs:
            return answer
        task = asyncio.ensure_future(getattr(self.worker, name)(*arguments))
        self._tasks.add(task)

        def ended(task: "asyncio.Task[Any]") -> None:
            self._tasks.discard(task)
            if not answer.done() and not self.dead and not task.cancelled():
                error = task.exception()
                answer.set_result(task.result()) if error is None else answer.set_exception(error)

        task.add_done_callback(ended)
        return answer


class PicklingActor(LocalActor):
    """Calls with pickled arguments and results, as Ray does."""

    def __init__(self, worker: RoleWorker) -> None:
        super().__init__(worker)
        self.worker.__dict__["run_pickled"] = _run_pickled

    def _call(self, name: str, *arguments: Any) -> "asyncio.Future[Any]":
        return super()._call("run_pickled", getattr(self.worker, name), pickle.dumps(arguments))


async def _run_pickled(method: Callable[..., Any], arguments: bytes) -> Any:
    return pickle.loads(pickle.dumps(await method(*pickle.loads(arguments))))


def use_workers_of_this_process(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Make the workers of runs objects of this process; returns the list that will have their classes."""
    ray, made = pytest.importorskip("ray"), list[str]()

    def create(kind: type, options: Any, *arguments: object) -> LocalActor:
        made.append(kind.__name__)
        return PicklingActor(type(kind.__name__, (kind,), {"forwards_log": False})(*arguments))

    @asynccontextmanager
    async def open_places(address: str, wanted: Any, *, deadline_s: float) -> AsyncIterator[Places | None]:
        yield Places(None, wanted) if wanted else None

    monkeypatch.setattr(Places, "options", lambda places, role, index: {})
    monkeypatch.setattr(stage_context, "open_places", open_places)
    monkeypatch.setattr(runtime, "create_actor", create)
    monkeypatch.setattr(runtime, "kill_actor", lambda actor: actor.kill())
    monkeypatch.setattr(ray, "put", lambda value: pickle.loads(pickle.dumps(value)))
    return made


def _died() -> Exception:
    from ray.exceptions import ActorDiedError

    return ActorDiedError()


class LocalWorkers:
    """Creates `LocalActor`s for a pool and keeps all of them."""

    def __init__(self, make: Callable[[], RoleWorker], build: Callable[..., Any]) -> None:
        self._make, self.build = make, build
        self.actors: list[LocalActor] = []
        self.at: dict[int, LocalActor] = {}  # the newest of each place

    def create(self, index: int) -> LocalActor:
        actor = LocalActor(self._make())
        self.actors.append(actor)
        self.at[index] = actor
        return actor

    def pool(self, count: int, *, deadline_s: float = 30.0) -> WorkerPool:
        return WorkerPool(
            "rollout",
            count,
            create=self.create,
            build=self.build,
            kill=lambda actor: actor.kill(),
            deadline_s=deadline_s,
        )
