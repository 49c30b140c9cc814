"""Asynchronous against synchronous rollouts when lengths have a long tail: seconds per training step and trained lag.

    python bench/async_speedup.py [--steps 60] [--group-size 8] [--real-time]
    python bench/async_speedup.py --embedded [--steps 60] [--pairs 4]
    python bench/async_speedup.py --scale [--gpus 8 1024] [--coordinator-ms 7]

The real `RolloutExecutor` over an engine and a trainer that only sleep, so that no core decides. By default they sleep
on a virtual clock: exact, and over in seconds; `--real-time` really sleeps, a hundredth of the time. A batch is 64
sequences in groups of 8; lengths are log-normal with mean 1 s, at one token a hundredth of a second, and belong to the
task, so that a slow task is slow whenever it is tried. Both sides have the same devices: synchronous training uses all
of them for sampling (64 slots) and then for training (0.3 s); asynchronous training gives three quarters to sampling
(48 slots) and one quarter to training (1.2 s). Bringing weights to the engine takes 0.02 s.

Two ways to hold the bound. "mask" trains the tokens that are young enough and nothing waits. "drop" gives the whole
group up, tries its task again, and after two drops the publish waits for it; since a group of duration D can then see
at most eta publishes, a step that must take in every task lasts at least max D / (eta + 1), and no such run is more
than about eta + 1 times as fast.

`ratio` is synchronous / asynchronous seconds per step at log-sigma 1.0, eta = 2 with "mask", `ratio_drop` with "drop".
`trained_token_speedup` counts only tokens that are trained.

`--embedded` trains a tiny model with the real engine and trainer instead, eta = 2 against eta = 0, where both sides
share the cores of this machine and there is little to win. Both do the same work: the same tasks, loss and batch, and a
learning rate so small that the policy, and with it the length of episodes, stays what it was (`tokens_per_step` of
both is shown). Runs come in pairs, one of each kind, and every other pair begins with the other kind, so what drifts on
the machine falls on both. `ratio` is the synchronous runs' seconds over the asynchronous runs', added up over all pairs
and timed steps: it is the time that a user would have saved, every second counts the same, and no run is left out.
"Not slower" is a `ratio` of 1 or more; `low` and `high`, the 95 % t-interval of the mean of the pairs' log-ratios, say
how sure that is.

`--scale` runs the model of 8 to 1,024 GPUs in `bench/scale_model.py`, which lists its figures, their sources and its
assumptions: a table of trained tokens a second for each size, the best split and eta, and what limits it.
"""

import argparse
import asyncio
import heapq
import json
import math
import random
import statistics
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from headrace.rollout.executor import RolloutExecutor
from headrace.rollout.executor.settings import AsyncSettings, StaleAction
from headrace.rollout.partial_rollout import PartialRollouts
from headrace.rollout.publisher import Publisher
from headrace.testing import run_virtual
from headrace.types import (
    Completion,
    Episode,
    FloatArray,
    Group,
    IntArray,
    Reward,
    SampleRequest,
    SamplingParams,
    ScoredEpisode,
    SharedWeights,
    Step,
    StopReason,
    Task,
    WeightsHandle,
    float_array,
    int_array,
)

SEQUENCES, MEAN_TOKENS, TOKEN_S, LOAD_S = 64, 100, 0.01, 0.02
SYNC_SLOTS, SYNC_TRAIN_S = 64, 0.3
ASYNC_SLOTS, ASYNC_TRAIN_S = 48, 1.2
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365)  # two-sided, of Student's t for 1, 2, ... degrees of freedom
SIGMAS, ETAS, WARMUP = (0.0, 0.5, 1.0), (1, 2, 4), 6


class SleepingEngine:
    """Samples `max_tokens` tokens at a fixed speed in each of `slots` slots; what was interrupted goes on first."""

    def __init__(self, *, slots: int, scale: float) -> None:
        self._free, self._scale = slots, scale
        self._version = 0
        self._paused = asyncio.Event()
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._idle = asyncio.Event()
        self._open = 0
        self._queue: list[tuple[bool, int, asyncio.Future[bool]]] = []
        self._arrivals = count()

    @property
    def version(self) -> int:
        return self._version

    async def sample(self, request: SampleRequest) -> Completion:
        await self._resumed.wait()
        self._open += 1
        try:
            return await self._sample(request)
        finally:
            self._open -= 1
            if not self._open:
                self._idle.set()

    async def _sample(self, request: SampleRequest) -> Completion:
        done = request.continue_from
        versions = [] if done is None else done.versions.tolist()
        if not await self._slot(new=done is None):
            return _completion(versions, StopReason.INTERRUPTED)
        try:
            left = request.params.max_tokens - len(versions)
            made = await self._sleep(left)
        finally:
            self._release()
        versions += [self._version] * made
        return _completion(versions, StopReason.INTERRUPTED if made < left else StopReason.LENGTH)

    async def _sleep(self, tokens: int) -> int:
        """How many tokens were made before the engine was paused."""
        loop = asyncio.get_running_loop()
        began_s, token_s = loop.time(), TOKEN_S * self._scale
        try:
            async with asyncio.timeout(tokens * token_s):
                await self._paused.wait()
        except TimeoutError:
            return tokens
        return min(tokens, int((loop.time() - began_s) / token_s))

    async def _slot(self, *, new: bool) -> bool:
        """Wait for a slot; False when the engine was paused first."""
        if self._free:
            self._free -= 1
            return True
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._queue, (new, next(self._arrivals), turn))
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.result():
                self._release()
            raise

    def _release(self) -> None:
        """Hand a slot to the next that waits for one."""
        while self._queue:
            _, _, turn = heapq.heappop(self._queue)
            if not turn.done():
                turn.set_result(True)
                return
        self._free += 1

    async def score(self, sequences: Sequence[IntArray], temperature: float = 1.0) -> tuple[FloatArray, ...]:
        return tuple(float_array([math.nan, *[-0.5] * (len(sequence) - 1)]) for sequence in sequences)

    async def load(self, handle: WeightsHandle, version: int) -> str:
        await asyncio.sleep(LOAD_S * self._scale)
        self._version = version
        return handle.fingerprint

    async def pause(self, *, interrupt: bool) -> None:
        self._resumed.clear()
        if interrupt:
            self._paused.set()
            waiting, self._queue = self._queue, []
            for _, _, turn in waiting:
                if not turn.done():
                    turn.set_result(False)
        if self._open:
            self._idle.clear()
            await self._idle.wait()

    async def resume(self) -> None:
        self._paused.clear()
        self._resumed.set()


def _completion(versions: list[int], stop: StopReason) -> Completion:
    logprobs = float_array(np.full(len(versions), -0.5))
    tokens = int_array(np.zeros(len(versions), dtype=np.int32))
    return Completion(
        tokens=tokens, sampler_logprobs=logprobs, raw_logprobs=logprobs, versions=int_array(versions), stop=stop
    )


# --- one configuration -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    sigma: float
    eta: int
    slots: int
    train_s: float
    group_size: int
    stale_action: StaleAction = StaleAction.DROP

    @property
    def name(self) -> str:
        return f"sigma {self.sigma:g}, eta {self.eta}" + (f", {self.stale_action}" if self.eta else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    step_s: float
    lag_mean: float
    lag_max: int
    dropped: float  # share of the groups that ended
    masked: float  # share of the tokens of trained groups


def lengths(sigma: float, task: Task, group_size: int) -> list[int]:
    """Of a group's sequences: the same whenever the task is played, so slow tasks stay slow and all cases have the same
    work."""
    dice = random.Random(f"lengths of {task.id}")
    normal = [dice.gauss(0.0, 1.0) for _ in range(group_size)]
    return [max(1, round(MEAN_TOKENS * math.exp(sigma * z - sigma**2 / 2))) for z in normal]


def player(
    engine: SleepingEngine, partial_rollouts: PartialRollouts, case: Case
) -> Callable[[Task, int], Awaitable[Group]]:
    async def one(task: Task, id: int, index: int, tokens: int) -> ScoredEpisode:
        request = SampleRequest(prompt=int_array([0]), params=SamplingParams(max_tokens=tokens))
        completion = await partial_rollouts.open(id, case.group_size)[index].sample(engine, request)
        step = Step(prompt=request.prompt, completion=completion, action="")
        episode = Episode(id=f"{id}/{index}", task=task, seed=0, steps=(step,), messages=(), temperature=1.0)
        return ScoredEpisode(episode=episode, reward=Reward(total=0.0))

    async def play(task: Task, id: int) -> Group:
        sizes = lengths(case.sigma, task, case.group_size)
        episodes = await asyncio.gather(*(one(task, id, index, tokens) for index, tokens in enumerate(sizes)))
        return Group(id=id, task=task, episodes=tuple(episodes))

    return play


async def run(case: Case, *, steps: int, scale: float) -> Timing:
    engine = SleepingEngine(slots=case.slots, scale=scale)
    numbers, partial_rollouts = count(), PartialRollouts()
    executor = RolloutExecutor(
        play=player(engine, partial_rollouts, case),
        partial_rollouts=partial_rollouts,
        next_task=lambda: Task(id=f"t{next(numbers)}"),
        batch_groups=SEQUENCES // case.group_size,
        settings=AsyncSettings(
            max_staleness=case.eta, stale_action=case.stale_action, task_timeout_s=1e6, slow_wait_s=1e6
        ),
        publisher=Publisher([engine]),
    )
    clock = asyncio.get_running_loop().time
    lags: list[int] = []
    began_s = clock()
    async with executor:
        for step in range(WARMUP + steps):
            if step == WARMUP:
                executor.metrics()
                began_s, lags = clock(), []
            groups = await executor.take_batch()
            for group in groups:
                for scored in group.episodes:
                    lags += (executor.version - scored.episode.steps[0].completion.versions).tolist()
            await asyncio.sleep(case.train_s * scale)
            executor.done(groups)
            await executor.publish(SharedWeights(fingerprint=f"w{step}"))
        values = executor.metrics()
        spent_s = clock() - began_s
    dropped = sum(value for name, value in values.items() if name.startswith("rollout/dropped_"))
    ended = values["rollout/consumed"] + dropped
    assert max(lags) <= case.eta or case.stale_action is StaleAction.MASK, "a token older than the bound was trained"
    trained = [lag for lag in lags if lag <= case.eta]
    return Timing(
        step_s=spent_s / steps / scale,
        lag_mean=statistics.fmean(trained),
        lag_max=max(trained),
        dropped=dropped / max(ended, 1.0),
        masked=1.0 - len(trained) / len(lags),
    )


def cases(sigma: float, group_size: int) -> Iterator[Case]:
    """The synchronous one first."""
    yield Case(sigma=sigma, eta=0, slots=SYNC_SLOTS, train_s=SYNC_TRAIN_S, group_size=group_size)
    for action in StaleAction:
        for eta in ETAS:
            yield Case(
                sigma=sigma,
                eta=eta,
                slots=ASYNC_SLOTS,
                train_s=ASYNC_TRAIN_S,
                group_size=group_size,
                stale_action=action,
            )


def asleep(steps: int, *, group_size: int, real_time: bool) -> dict[str, Any]:
    """The table of all cases; one line each."""
    scale = 0.01 if real_time else 1.0
    execute = asyncio.run if real_time else run_virtual
    table: dict[str, Any] = {}
    print(f"{'case':26} {'s/step':>7} {'speed-up':>9} {'lag mean':>9} {'max':>4} {'dropped':>8} {'masked':>7}")
    for sigma in SIGMAS:
        sync_s = 0.0
        for case in cases(sigma, group_size):
            timing = execute(run(case, steps=steps, scale=scale))
            sync_s = sync_s or timing.step_s
            speedup = sync_s / timing.step_s
            table[case.name] = {name: round(value, 3) for name, value in asdict(timing).items()}
            table[case.name] |= {
                "speedup": round(speedup, 3),
                "trained_token_speedup": round(speedup * (1.0 - timing.masked), 3),
            }
            print(
                f"{case.name:26} {timing.step_s:7.2f} {speedup:8.2f}x {timing.lag_mean:9.2f} {timing.lag_max:4d} "
                f"{100 * timing.dropped:7.1f}% {100 * timing.masked:6.1f}%",
                flush=True,
            )
    ratios = {action: table[f"sigma 1, eta 2, {action}"]["speedup"] for action in StaleAction}
    return {"cases": table, "ratio_drop": ratios[StaleAction.DROP], "ratio": ratios[StaleAction.MASK]}


# --- the real engine and trainer -------------------------------------------------------------------------------------

EMBEDDED = """
[run]
name = "speed"
folder = "{folder}"
tensorboard = false
[model]
path = "tiny"
tiny = {{ width = 96, layers = 3, heads = 4, kv_heads = 2, context = 512 }}
[engine]
max_num_seqs = 48
[rl]
steps = {steps}
groups = 4
group_size = 4
max_turns = 6
max_prompt_tokens = 64
max_episode_tokens = 400
loss = "decoupled_ppo"
sampling = {{ max_tokens = 4 }}
tasks = {{ type = "env", name = "key_door", size = 500, seed = 2 }}
optimizer = {{ learning_rate = 1e-9 }}
async = {{ max_staleness = {eta} }}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One run of the real engine and trainer, its first steps left out."""

    seconds: float
    tokens: float  # sampled


def embedded(steps: int, pairs: int) -> dict[str, Any]:
    """Whole runs, synchronous and eta = 2, in pairs."""
    runs: dict[int, list[Measured]] = {0: [], 2: []}
    for pair in range(pairs):
        for eta in (0, 2) if pair % 2 == 0 else (2, 0):
            runs[eta].append(_embedded_run(steps, eta))
            print(f"pair {pair}, eta {eta}: {runs[eta][-1].seconds / steps:.3f} s a step", flush=True)
    return {"pairs": pairs, **compared(runs[0], runs[2], steps=steps)}


def compared(sync: Sequence[Measured], other: Sequence[Measured], *, steps: int) -> dict[str, Any]:
    """
    >>> one, two, four = (Measured(seconds=s, tokens=6.0) for s in (1.0, 2.0, 4.0))
    >>> found = compared([four, two], [two, one], steps=2)
    >>> found["ratio"], found["low"], found["high"], found["sync_step_s"], found["tokens_per_step"]
    (2.0, 2.0, 2.0, 1.5, [3.0, 3.0])
    """
    assert len(sync) == len(other) > 1
    totals = [sum(one.seconds for one in runs) for runs in (sync, other)]
    logs = [math.log(mine.seconds / its.seconds) for mine, its in zip(sync, other, strict=True)]
    half = T_95[min(len(logs) - 2, len(T_95) - 1)] * statistics.stdev(logs) / math.sqrt(len(logs))
    middle, num_steps = statistics.fmean(logs), steps * len(sync)
    return {
        "sync_step_s": round(totals[0] / num_steps, 4),
        "async_step_s": round(totals[1] / num_steps, 4),
        "tokens_per_step": [round(sum(one.tokens for one in runs) / num_steps, 1) for runs in (sync, other)],
        "low": round(math.exp(middle - half), 3),
        "high": round(math.exp(middle + half), 3),
        "ratio": round(totals[0] / totals[1], 3),
    }


def _embedded_run(steps: int, eta: int) -> Measured:
    from headrace import wiring
    from headrace.observe.sinks.jsonl import read_metrics
    from headrace.wiring.checked_config import load_checked

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.toml"
        file.write_text(EMBEDDED.format(folder=folder, steps=WARMUP + steps, eta=eta))
        config = load_checked(file, [], command="train")
        result = wiring.train(config, config_text_path=file, resume=None)
        timed = [one.values for one in read_metrics(result.folder / "metrics.jsonl") if one.step > WARMUP]
    assert len(timed) == steps
    return Measured(
        seconds=sum(values["time/step_s"] for values in timed),
        tokens=sum(values["rollout/sampled_tokens"] for values in timed),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="training steps that are timed")
    parser.add_argument("--real-time", action="store_true", help="sleep on the real clock, a hundredth of the time")
    parser.add_argument("--group-size", type=int, default=8, help="sequences of a group; a batch has 64 sequences")
    parser.add_argument("--embedded", action="store_true", help="the real engine and trainer on this machine's cores")
    parser.add_argument("--pairs", type=int, default=4, help="pairs of runs with --embedded")
    parser.add_argument("--scale", action="store_true", help="the model of 8 to 1,024 GPUs")
    parser.add_argument("--gpus", type=int, nargs="+", help="sizes of the model")
    parser.add_argument("--coordinator-ms", type=float, default=10.0, help="CPU of a group, from bench/coordinator.py")
    options = parser.parse_args()
    if options.scale:
        from scale_model import SIZES, run_model

        best = run_model(coordinator_ms=options.coordinator_ms, sizes=options.gpus or SIZES)
        print(json.dumps({"bench": "async_speedup", "scale": best}))
        return
    if options.embedded:
        figures = embedded(options.steps, options.pairs)
    else:
        figures = asleep(options.steps, group_size=options.group_size, real_time=options.real_time)
    print(json.dumps({"bench": "async_speedup", "steps": options.steps, **figures}))


if __name__ == "__main__":
    main()
