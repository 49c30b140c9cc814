"""Measure how many groups a second one core coordinates with 10,000 episodes in flight: CPU time and bytes a group.

    python bench/coordinator.py [--in-flight 10000] [--batches 10] [--turns 2] [--tokens 256] [--profile]

The real executor, publisher, partial rollouts and group player, in one thread. An engine that waits and computes
nothing answers every turn; groups have 8 episodes, an episode has two turns of 256 tokens on average behind a prompt of
256. Lengths are log-normal. After every 512 groups the loop's own work is done (advantages, data, digests of the step's
transaction), then weights are published: all open sequences are interrupted and continued.

Three ways to play a group:

- `here`: episodes run in the coordinator, as in a run without a cluster, by a rollout function of the user's. Waiting
  takes no time (a virtual clock), so the thread is always busy, whatever else the machine does.
- `messages`: episodes run on 16 rollout workers, over the messages of headrace/cluster: a job and a result for each
  group, a call and an answer for each turn. The workers are objects in this process, so there is no network; every
  message is pickled and unpickled, and counted (`sent_bytes`, `received_bytes` of a group). The workers' CPU time is
  measured and taken off. Needs Ray to be installed, and starts none.
- `real`: as `here`, on the real clock, with 150 groups a second offered. `wall_groups_per_s` is what came.

`in_flight` is the mean number of episodes that have begun and not ended. `groups_per_s` is groups per CPU second: what
one core can do. `cpu_ms` is the CPU time of a group, the engine's included, and `loop_cpu_ms` the share of the loop's
own work in it. `live_bytes` is the growth of resident memory divided by the groups that were live.

The last line is JSON; its `ratio` is the smallest of episodes in flight over 10,000 and groups per CPU second over 100,
over all ways.
"""

import argparse
import asyncio
import cProfile
import importlib.util
import itertools
import json
import math
import os
import pickle
import pstats
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from headrace.algo.advantages.credit import credit
from headrace.algo.datum import SequenceUnit
from headrace.cluster.group_player import ClusterGroupPlayer
from headrace.cluster.role_worker import SampleCall
from headrace.cluster.rollout_worker import GroupJob
from headrace.cluster.worker_pool import WorkerPool
from headrace.loops.step_batch import step_batch
from headrace.observe.buffer.commits import CommitLog
from headrace.observe.buffer.data_buffer import DataBuffer
from headrace.rollout.executor import AsyncSettings, RolloutExecutor, build_executor
from headrace.rollout.group import GroupPlayer
from headrace.testing import FakeEnv, FakeRewardRunner, FakeSampler, run_virtual
from headrace.types import (
    Completion,
    Episode,
    Message,
    SampleRequest,
    SamplingParams,
    SharedWeights,
    Step,
    StopReason,
    Task,
    WeightsHandle,
    float_array,
    int_array,
)
from headrace.wiring.stages import rare_collections

REQUIRED_IN_FLIGHT, REQUIRED_GROUPS_PER_S = 10_000, 100.0
GROUP_SIZE, ETA, WORKERS = 8, 12, 16
SIGMA, PROMPT, MAX_TOKENS = 0.4, 256, 4096
OFFERED = 150.0  # groups a second, if coordinating them took no time
PRIVATE = int_array(np.arange(2 * MAX_TOKENS) % 997)
LOGPROBS = float_array(np.full(MAX_TOKENS, -0.5))
EMPTY = int_array([])
LENGTHS = np.random.default_rng(0).lognormal(-(SIGMA**2) / 2, SIGMA, 10_007).tolist()  # over their mean
WARMUP = 5  # batches
PROFILE = cProfile.Profile()


class WaitingEngine(FakeSampler):
    """Answers a turn of n tokens after n times `token_s`; n is log-normal and follows from the request's seed."""

    def __init__(self, *, mean_tokens: int, token_s: float) -> None:
        super().__init__()
        self._mean, self._token_s = mean_tokens, token_s
        self._open_calls: dict[asyncio.Future[bool], asyncio.TimerHandle] = {}
        self._resumed = asyncio.Event()
        self._resumed.set()

    async def sample(self, request: SampleRequest) -> Completion:
        if not self._resumed.is_set():
            await self._resumed.wait()
        done = request.continue_from
        had = 0 if done is None else len(done.tokens)
        length = max(1, min(MAX_TOKENS, round(self._mean * LENGTHS[request.params.seed % len(LENGTHS)])))
        loop = asyncio.get_running_loop()
        began_s, version = loop.time(), self._version
        ended: asyncio.Future[bool] = loop.create_future()
        self._open_calls[ended] = loop.call_later((length - had) * self._token_s, _resolve, ended, True)
        try:
            whole = await ended
        finally:
            self._open_calls.pop(ended).cancel()
        made = length - had if whole else min(length - had - 1, int((loop.time() - began_s) / self._token_s))
        versions = np.full(had + made, version, dtype=np.int32)
        if done is not None:
            versions[:had] = done.versions
        versions.setflags(write=False)
        return Completion(
            tokens=PRIVATE[: had + made],
            sampler_logprobs=LOGPROBS[: had + made],
            raw_logprobs=LOGPROBS[: had + made],
            versions=versions,
            stop=StopReason.STOP if whole else StopReason.INTERRUPTED,
        )

    async def load(self, handle: WeightsHandle, version: int) -> str:
        self._version = version
        return handle.fingerprint

    async def pause(self, *, interrupt: bool) -> None:
        self._resumed.clear()
        for ended in self._open_calls:
            _resolve(ended, False)

    async def resume(self) -> None:
        self._resumed.set()


def _resolve(ended: "asyncio.Future[bool]", whole: bool) -> None:
    if not ended.done():
        ended.set_result(whole)


def copied(completion: Completion) -> Completion:
    """Give an answer memory of its own, as one that came over a network has."""
    return replace(
        completion,
        tokens=int_array(completion.tokens),
        sampler_logprobs=float_array(completion.sampler_logprobs),
        raw_logprobs=float_array(completion.raw_logprobs),
    )


class InFlight:
    """Count episodes that have begun and not ended."""

    def __init__(self) -> None:
        self.now = 0

    @contextmanager
    def episode(self) -> Iterator[None]:
        self.now += 1
        try:
            yield
        finally:
            self.now -= 1


def episode_of(task: Task, steps: list[Step]) -> Episode:
    """Build an episode whose reward differs within its group."""
    reward = float(len(steps[-1].completion.tokens) % 2)
    steps[-1] = replace(steps[-1], reward=reward)
    messages = (Message(role="user", content="a question"), Message(role="assistant", content="an answer"))
    return Episode(id="", task=task, seed=0, steps=tuple(steps), messages=messages, temperature=1.0)


def request_of(seed: int, turn: int, before: list[Step]) -> SampleRequest:
    """Ask for the next turn: its prompt is all that came before."""
    size = PROMPT + sum(len(step.completion.tokens) for step in before)
    return SampleRequest(prompt=PRIVATE[:size], params=SamplingParams(max_tokens=MAX_TOKENS, seed=seed + turn))


# --- rollout workers in this process ---------------------------------------------------------------------------------


class Wire:
    """Count the bytes of messages, and the CPU time that the workers' side of this process takes."""

    def __init__(self) -> None:
        self.sent = self.received = 0
        self.worker_s = 0.0

    @contextmanager
    def working(self) -> Iterator[None]:
        began_s = time.thread_time()
        try:
            yield
        finally:
            self.worker_s += time.thread_time() - began_s


class ScriptedWorker:
    """Plays groups as a rollout worker does: asks for turn after turn of each episode and returns the episodes."""

    def __init__(self, wire: Wire, in_flight: InFlight, turns: int) -> None:
        self._wire, self._in_flight, self._turns = wire, in_flight, turns
        self._outbox: list[bytes] = []
        self._arrived = asyncio.Event()
        self._ids = itertools.count()
        self._open: dict[int, tuple[_ScriptedGroup, int]] = {}  # calls: group, episode
        for method in ("ready", "poll", "answer", "play", "cancel"):
            setattr(self, method, _Remote(getattr(self, f"_{method}")))

    async def _ready(self, build: bytes) -> int:
        return os.getpid()

    async def _cancel(self, attempt: bytes) -> None:
        return None

    async def _poll(self, timeout: bytes) -> list[Any]:
        if not self._outbox:
            await self._arrived.wait()
        self._arrived.clear()
        messages, self._outbox = self._outbox, []
        return [self._read(message) for message in messages]

    def _read(self, message: bytes) -> Any:
        self._wire.received += len(message)
        return pickle.loads(message)

    async def _answer(self, answers: bytes) -> None:
        with self._wire.working():
            for id, completion in pickle.loads(answers):
                group, index = self._open.pop(id)
                steps = group.steps[index]
                steps.append(Step(prompt=group.prompts[index], completion=completion, action="an answer"))
                if len(steps) < self._turns:
                    self._ask(group, index)
                else:
                    group.left -= 1
                    self._in_flight.now -= 1
                    if not group.left:
                        episodes = [replace(episode_of(group.job.task, steps), id="x") for steps in group.steps]
                        group.ended.set_result(pickle.dumps(episodes, protocol=5))

    async def _play(self, job: bytes) -> Any:
        with self._wire.working():
            group = _ScriptedGroup(pickle.loads(job))
            self._in_flight.now += GROUP_SIZE
            for index in range(GROUP_SIZE):
                self._ask(group, index)
        return self._read(await group.ended)

    def _ask(self, group: "_ScriptedGroup", index: int) -> None:
        steps = group.steps[index]
        request = request_of(group.job.group_id * 1000 + index * 10, len(steps), steps)
        group.prompts[index] = request.prompt
        id = next(self._ids)
        self._open[id] = group, index
        call = SampleCall(id=id, attempt=group.job.attempt, index=index, request=request, replayable=True)
        self._outbox.append(pickle.dumps(call, protocol=5))
        self._arrived.set()


class _ScriptedGroup:
    def __init__(self, job: GroupJob) -> None:
        self.job, self.left = job, GROUP_SIZE
        self.steps: list[list[Step]] = [[] for _ in range(GROUP_SIZE)]
        self.prompts = [EMPTY] * GROUP_SIZE
        self.ended: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()


class _Remote:
    """Call a method as Ray does: what is passed is pickled here and now."""

    def __init__(self, method: Callable[[bytes], Awaitable[Any]]) -> None:
        self._method = method

    def remote(self, argument: Any) -> Awaitable[Any]:
        message = pickle.dumps(argument, protocol=5)
        wire: Wire = self._method.__self__._wire  # type: ignore[attr-defined]
        wire.sent += len(message)
        return asyncio.ensure_future(self._method(message))


# --- one measurement -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    in_flight: float
    groups: int
    groups_per_s: float
    cpu_ms: float  # of a group
    loop_cpu_ms: float  # of that: advantages, data, digests
    wall_groups_per_s: float  # on the real clock alone; else 0
    live_bytes: float  # of a group
    sent_bytes: float = 0.0
    received_bytes: float = 0.0

    @property
    def ratio(self) -> float:
        return min(self.in_flight / REQUIRED_IN_FLIGHT, self.groups_per_s / REQUIRED_GROUPS_PER_S)


class Tasks:
    """Tasks without end."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def next(self) -> Task:
        return Task(id=f"t{next(self._numbers)}", messages=(Message(role="user", content="a question"),))

    def state_dict(self) -> dict[str, int]:
        return {}


def group_player(engine: WaitingEngine, in_flight: InFlight, turns: int) -> GroupPlayer:
    async def rollout(task: Task, sampler: Any, renderer: Any, seed: int) -> Episode:
        steps: list[Step] = []
        with in_flight.episode():
            for turn in range(turns):
                request = request_of(seed, turn, steps)
                completion = copied(await sampler.sample(request))
                steps.append(Step(prompt=request.prompt, completion=completion, action="an answer"))
        return episode_of(task, steps)

    return GroupPlayer(
        group_size=GROUP_SIZE,
        make_env=FakeEnv,
        sampler=engine,
        renderer=None,  # type: ignore[arg-type]  # the rollout function renders nothing
        reward_runner=FakeRewardRunner(),
        sampling=SamplingParams(max_tokens=MAX_TOKENS),
        generate_fn=rollout,
    )


async def measure(way: str, options: argparse.Namespace, folder: Path) -> Figures:
    """Fill up to so many episodes in flight, then measure so many training steps."""
    # an episode is over before the longest of its group, so more groups than episodes / 8 must run
    spare = 1.0 + 1.4 * SIGMA / math.sqrt(options.turns)
    running = math.ceil(1.15 * spare * options.in_flight / GROUP_SIZE)
    in_flight, wire = InFlight(), Wire()
    episode_s = options.in_flight / GROUP_SIZE / OFFERED
    engine = WaitingEngine(mean_tokens=options.tokens, token_s=episode_s / options.turns / options.tokens)
    pool = WorkerPool(
        "rollout",
        WORKERS,
        create=lambda index: ScriptedWorker(wire, in_flight, options.turns),
        build=b"",
        kill=lambda actor: None,
        deadline_s=600.0,
    )
    executor = build_executor(
        AsyncSettings(max_staleness=ETA, max_running=running),
        batch_groups=options.batch_groups,
        samplers=[engine],
        player=group_player(engine, in_flight, options.turns),
        source=Tasks(),
        play=(lambda player: player) if way != "messages" else lambda player: ClusterGroupPlayer(pool, player),
    )
    commits = CommitLog(folder / f"{way}.jsonl", records=0)
    buffer = DataBuffer(commits, stage="rl", records=lambda: 0, spill_to=folder / "buffer")
    before_bytes, levels = resident_bytes(), []
    if way == "messages":  # not before: a run without a cluster has none
        pool.start()
        await pool.started()
    numbers = itertools.count(1)
    async with executor:
        for _ in range(WARMUP):
            await train(executor, buffer, next(numbers))
        wire.__init__()  # type: ignore[misc]
        began_s, began_cpu_s, loop_s, groups = time.perf_counter(), time.process_time(), 0.0, 0
        if options.profile:
            PROFILE.enable()
        for _ in range(options.batches):
            levels.append(in_flight.now)
            loop_s += await train(executor, buffer, next(numbers))
            groups += options.batch_groups
        PROFILE.disable()
        passed_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s - wire.worker_s
        live = executor.metrics()
        live_bytes = (resident_bytes() - before_bytes) / (live["rollout/running"] + live["rollout/ready"])
    if way == "messages":
        await pool.close()
    return Figures(
        in_flight=sum(levels) / len(levels),
        groups=groups,
        groups_per_s=groups / cpu_s,
        cpu_ms=1000 * cpu_s / groups,
        loop_cpu_ms=1000 * loop_s / groups,
        wall_groups_per_s=groups / passed_s if way == "real" else 0.0,
        live_bytes=live_bytes,
        sent_bytes=wire.sent / groups,
        received_bytes=wire.received / groups,
    )


async def train(executor: RolloutExecutor, buffer: DataBuffer, step: int) -> float:
    """Do what a training step asks of the coordinator; returns the CPU seconds of the loop's own work."""
    groups = await executor.take_batch()
    began_s = time.thread_time()
    credited: Any = credit(groups, method="grpo")
    batch = step_batch(credited, SequenceUnit.EPISODE)
    buffer.store_rollouts(step, groups, batch.episodes)
    buffer.store_evaluation(step, {})
    spent_s = time.thread_time() - began_s
    executor.done(groups)
    await executor.publish(SharedWeights(fingerprint=f"w{step}"))
    executor.metrics()
    return spent_s


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--in-flight", type=int, default=REQUIRED_IN_FLIGHT, help="episodes")
    parser.add_argument("--batches", type=int, default=10, help="training steps that are measured")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=256, help="mean of a turn")
    parser.add_argument("--batch-groups", type=int, default=512, help="groups of a training step")
    parser.add_argument("--ways", nargs="+", default=["here", "messages", "real"])
    parser.add_argument("--profile", action="store_true", help="show where the time goes")
    options = parser.parse_args()
    print(
        f"{'way':9} {'in flight':>9} {'groups/s':>9} {'CPU ms':>7} {'of it loop':>10} {'wall':>6} {'kB live':>8} "
        f"{'kB sent':>8} {'kB received':>11}"
    )
    found: dict[str, Figures] = {}
    for way in options.ways:
        if way == "messages" and importlib.util.find_spec("ray") is None:
            print("messages  left out: Ray is not installed (pip install 'headrace[ray]')")
            continue
        with tempfile.TemporaryDirectory() as folder, rare_collections():  # as in a run
            execute = asyncio.run if way == "real" else run_virtual
            found[way] = execute(measure(way, options, Path(folder)))
        if options.profile:
            pstats.Stats(PROFILE, stream=sys.stdout).sort_stats("tottime").print_stats(45)
        f = found[way]
        print(
            f"{way:9} {f.in_flight:9.0f} {f.groups_per_s:9.1f} {f.cpu_ms:7.2f} {f.loop_cpu_ms:10.2f} "
            f"{f.wall_groups_per_s:6.1f} {f.live_bytes / 1024:8.1f} {f.sent_bytes / 1024:8.1f} "
            f"{f.received_bytes / 1024:11.1f}",
            flush=True,
        )
    ratio = min(figures.ratio for figures in found.values())
    ways = {way: {name: round(value, 3) for name, value in asdict(f).items()} for way, f in found.items()}
    print(json.dumps({"bench": "coordinator", "cpus": os.cpu_count(), "ways": ways, "ratio": round(ratio, 3)}))


if __name__ == "__main__":
    main()
