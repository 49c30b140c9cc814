"""Model engines, trainers and links of 8 to 1,024 GPUs around the real executor, on a virtual clock.

    python bench/async_speedup.py --scale [--gpus 8 1024] [--coordinator-ms 10]

Nothing here was measured on so many cards: it says what follows from
the figures below, and no more.

Figures, and where they are from:

- *Decode*: the shape of Qwen3-8B on an H200 samples 21,500 tokens/s with 256 sequences of about 416 tokens of context
  (`headrace train`, docs/gpu.md's card). A decode step reads the weights once and every sequence's keys and values:
  step_s = (16.4 GB + sequences x context x 147 kB) / 2.7 TB/s, where 2.7 TB/s is what that figure comes to. A card
  decodes at most 128 sequences at once; if more are open they take turns.
- *Training*: 7,200 tokens/s a card, 36.1 % of 989 TFLOP/s by 6 N (prime-rl's checked-in baseline of full RL training,
  eight H200). Each doubling beyond 8 cards costs 3 % (assumed).
- *Sync*: 1.3 s (Perplexity, 2025-09: 256 to 128 GPUs by RDMA) or 9 s (NeMo-RL, checkpoint-engine guide: 9.25 s, 288
  H100); the engines wait meanwhile. After an abort the engines read all open sequences again at 27,000 tokens/s a card
  (45 % of 989 TFLOP/s by 2 N); with `inflight` they do not.
- *Lengths*: log-normal with mean 4,096 tokens and log-sigma 0.8, at most 32,768; prompts of 512.
- *Batch*: groups of 16 sequences; 64 groups on 8 cards, 512 groups from 128 cards on (the settings of the AReaL paper,
  arXiv 2505.24298), in between 4 groups for each card.
- *Coordinator*: the CPU time of a group that bench/coordinator.py measures, on one core.

Every simulated group stands for as many as make up the batch with 32 of them. Tokens older than the bound are masked
(`rl.async.stale_action = "mask"`). What staleness does to learning is not in the model: of all settings within 3 % of
the fastest, the one with the smallest eta counts as the best.
"""

import asyncio
import heapq
import itertools
import json
import math
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from headrace.rollout.executor import AsyncSettings, RolloutExecutor, StaleAction
from headrace.rollout.partial_rollout import PartialRollouts
from headrace.rollout.publisher import Publisher
from headrace.testing import FakeSampler, run_virtual
from headrace.types import (
    Completion,
    Episode,
    Group,
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

SIZES, SHARES, ETAS, SYNCS_S = (8, 32, 128, 512, 1024), (0.5, 0.625, 0.75, 0.875), (1, 2, 4, 8), (1.3, 9.0)
WEIGHTS_GB, KV_GB_PER_TOKEN, BANDWIDTH_GB_PER_S, MOST_SEQUENCES = 16.4, 147e-6, 2700.0, 128
TRAIN_TOKENS_PER_S, LOSS_PER_DOUBLING, REREAD_TOKENS_PER_S = 7200.0, 0.03, 27_000.0
MEAN_TOKENS, SIGMA, CAP, PROMPT = 4096, 0.8, 32_768, 512
GROUP_SIZE, SIMULATED = 16, 32  # sequences of a group; simulated groups of a batch
QUANTUM = 128  # tokens: lengths are multiples
WARMUP, STEPS = 4, 10
CLOSE = 0.97  # of the fastest


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """One configuration. With eta = 0 all cards sample, then all train."""

    gpus: int
    sampling: int  # cards
    eta: int
    sync_s: float
    coordinator_s: float  # CPU of a group
    rereads: bool = False  # open sequences are read again after a sync

    @property
    def training(self) -> int:
        return self.gpus if self.eta == 0 else self.gpus - self.sampling

    @property
    def batch_groups(self) -> int:
        return min(512, max(64, 4 * self.gpus))

    @property
    def weight(self) -> float:
        """Return how many groups a simulated one stands for."""
        return self.batch_groups / SIMULATED

    @property
    def train_tokens_per_s(self) -> float:
        doublings = max(0.0, math.log2(self.training / 8))
        return self.training * TRAIN_TOKENS_PER_S * (1.0 - LOSS_PER_DOUBLING) ** doublings


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one configuration comes to."""

    tokens_per_s: float  # trained
    step_s: float
    engine: float  # shares: of the tokens that full engines would sample,
    trainer: float  # of the time that the trainer trains,
    sync: float  # of the time that engines wait for weights,
    coordinator: float  # of one core
    masked: float
    lag: float

    @property
    def limit(self) -> str:
        """Name what is busiest; nothing is when the bound on staleness keeps both engines and trainer from more."""
        shares = {"trainer": self.trainer, "engine": self.engine, "sync": self.sync, "coordinator": self.coordinator}
        busiest = max(shares, key=lambda name: shares[name])
        return busiest if shares[busiest] >= 0.85 else "eta and the long tail"


def decode_step_s(sequences: float, context: float) -> float:
    """Return the time of one decode step of a card.

    >>> round(256 / decode_step_s(256, 416), -2)  # the measured figure: 21,500 tokens/s
    21500.0
    """
    return (WEIGHTS_GB + sequences * context * KV_GB_PER_TOKEN) / BANDWIDTH_GB_PER_S


CONTEXT = PROMPT + MEAN_TOKENS * math.exp(SIGMA**2) / 2  # mean over open sequences: long ones are open longer
FULL_TOKENS_PER_S = MOST_SEQUENCES / decode_step_s(MOST_SEQUENCES, CONTEXT)


class ModelEngine(FakeSampler):
    """Samples groups on `cards` cards: all open sequences advance at the speed of the present batch."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__()
        self._cluster = cluster
        self._tokens = 0.0  # that a sequence has advanced since the start
        self._open: dict[int, _OpenGroup] = {}
        self._ends: list[tuple[float, int]] = []  # of sequences: when, group
        self._active = self._to_reread = 0
        self._numbers = itertools.count()
        self._changed = asyncio.Event()
        self._ready = asyncio.Event()
        self._ready.set()
        self.wait_s = self.sampled = 0.0

    async def sample(self, request: SampleRequest) -> Completion:
        await self._ready.wait()
        done = request.continue_from
        had = 0 if done is None else len(done.tokens)
        lengths = [length - had for length in lengths_of(request.params.seed) if length > had]
        number, group = next(self._numbers), _OpenGroup(left=len(lengths), began=self._tokens)
        self._open[number] = group
        for length in lengths:
            heapq.heappush(self._ends, (self._tokens + length * QUANTUM, number))
        self._active += len(lengths)
        self._changed.set()
        try:
            whole = await group.ended
        finally:
            del self._open[number]
            self._active -= group.left
        made = max(lengths) if whole else int((self._tokens - group.began) / QUANTUM)
        versions = np.concatenate([[] if done is None else done.versions, np.full(made, self._version)])
        return _completion(versions, StopReason.STOP if whole else StopReason.INTERRUPTED)

    async def run(self) -> None:
        """Advance the open sequences; the body of a task."""
        loop = asyncio.get_running_loop()
        while True:
            self._changed.clear()
            while self._ends and self._ends[0][1] not in self._open:
                heapq.heappop(self._ends)
            if not self._ends or not self._ready.is_set():
                await self._changed.wait()
                continue
            sequences = self._active * self._cluster.weight / self._cluster.sampling
            served = min(sequences, MOST_SEQUENCES)
            speed = served / sequences / decode_step_s(served, CONTEXT)
            began_s, left = loop.time(), self._ends[0][0] - self._tokens
            try:
                async with asyncio.timeout(left / speed):
                    await self._changed.wait()
            except TimeoutError:
                pass
            advanced = min(left, (loop.time() - began_s) * speed)
            self._tokens += advanced
            self.sampled += advanced * self._active * self._cluster.weight
            while self._ends and self._ends[0][0] <= self._tokens + 1e-6:
                self._end_one(heapq.heappop(self._ends)[1])

    def _end_one(self, number: int) -> None:
        group = self._open.get(number)
        if group is None:
            return
        group.left -= 1
        self._active -= 1
        if not group.left and not group.ended.done():
            group.ended.set_result(True)

    async def load(self, handle: WeightsHandle, version: int) -> str:
        sequences = min(self._to_reread * self._cluster.weight / self._cluster.sampling, MOST_SEQUENCES)
        wait_s = self._cluster.sync_s + (sequences * CONTEXT / REREAD_TOKENS_PER_S if self._cluster.rereads else 0.0)
        self.wait_s += wait_s
        await asyncio.sleep(wait_s)
        self._version = version
        return handle.fingerprint

    async def pause(self, *, interrupt: bool) -> None:
        self._changed.set()
        await asyncio.sleep(0)  # the time until now is counted
        self._ready.clear()
        self._to_reread = self._active
        for group in self._open.values():
            if not group.ended.done():
                group.ended.set_result(False)

    async def resume(self) -> None:
        self._ready.set()
        self._changed.set()


class _OpenGroup:
    def __init__(self, *, left: int, began: float) -> None:
        self.left, self.began = left, began
        self.ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()


def _completion(versions: "np.ndarray[tuple[int], np.dtype[np.int32]]", stop: StopReason) -> Completion:
    logprobs = float_array(np.full(len(versions), -0.5))
    tokens = int_array(np.zeros(len(versions)))
    return Completion(
        tokens=tokens, sampler_logprobs=logprobs, raw_logprobs=logprobs, versions=int_array(versions), stop=stop
    )


def lengths_of(seed: int) -> list[int]:
    """Draw the lengths of a group's sequences, in quanta."""
    dice = random.Random(seed)
    tokens = [MEAN_TOKENS * math.exp(dice.gauss(-(SIGMA**2) / 2, SIGMA)) for _ in range(GROUP_SIZE)]
    return [max(1, round(min(CAP, length) / QUANTUM)) for length in tokens]


def player(engine: ModelEngine, partial_rollouts: PartialRollouts) -> Callable[[Task, int], Awaitable[Group]]:
    """Play a group as one episode that ends with its longest sequence."""

    async def play(task: Task, id: int) -> Group:
        request = SampleRequest(prompt=int_array([0]), params=SamplingParams(max_tokens=CAP, seed=int(task.id)))
        completion = await partial_rollouts.open(id, 1)[0].sample(engine, request)
        step = Step(prompt=request.prompt, completion=completion, action="")
        episode = Episode(id=f"{id}/0", task=task, seed=0, steps=(step,), messages=(), temperature=1.0)
        return Group(id=id, task=task, episodes=(ScoredEpisode(episode=episode, reward=Reward(total=0.0)),))

    return play


async def simulate(cluster: Cluster) -> Outcome:
    """Train some steps and return what they came to."""
    engine, partial_rollouts, numbers = ModelEngine(cluster), PartialRollouts(), itertools.count()
    executor = RolloutExecutor(
        play=player(engine, partial_rollouts),
        partial_rollouts=partial_rollouts,
        next_task=lambda: Task(id=str(next(numbers))),
        batch_groups=SIMULATED,
        settings=AsyncSettings(
            max_staleness=cluster.eta,
            stale_action=StaleAction.MASK,
            task_timeout_s=1e7,
            slow_wait_s=1e7,
        ),
        publisher=Publisher([engine], timeout_s=1e7),
    )
    clock = asyncio.get_running_loop().time
    running = asyncio.create_task(engine.run())
    began_s = trained = young = lags = trained_s = 0.0
    async with executor:
        for step in range(WARMUP + STEPS):
            if step == WARMUP:
                began_s, trained, young, lags, trained_s = clock(), 0.0, 0.0, 0.0, 0.0
                engine.wait_s = engine.sampled = 0.0
            groups = await executor.take_batch()
            tokens = 0.0
            for group in groups:
                lag = executor.version - group.episodes[0].episode.steps[0].completion.versions
                # a sequence of n quanta was sampled while the first n of its group were
                sizes = lengths_of(int(group.task.id))
                tokens += sum(sizes) * QUANTUM
                young += sum(float((lag[:size] <= cluster.eta).sum()) for size in sizes) * QUANTUM
                lags += float(np.minimum(lag, cluster.eta).mean()) / len(groups)
            trained += tokens
            prompts = SIMULATED * GROUP_SIZE * PROMPT
            train_s = (tokens + prompts) * cluster.weight / cluster.train_tokens_per_s
            train_s = max(train_s, cluster.batch_groups * cluster.coordinator_s)
            trained_s += train_s
            await asyncio.sleep(train_s)
            executor.done(groups)
            await executor.publish(SharedWeights(fingerprint=f"w{step}"))
        spent_s = clock() - began_s
        running.cancel()
    step_s = spent_s / STEPS
    return Outcome(
        tokens_per_s=young * cluster.weight / spent_s,
        step_s=step_s,
        engine=engine.sampled / spent_s / (cluster.sampling * FULL_TOKENS_PER_S),
        trainer=trained_s / spent_s,
        sync=engine.wait_s / spent_s,
        coordinator=cluster.batch_groups * cluster.coordinator_s / step_s,
        masked=1.0 - young / trained,
        lag=lags / STEPS,
    )


# --- all configurations ----------------------------------------------------------------------------------------------


def splits(gpus: int) -> Iterator[int]:
    """Yield the numbers of sampling cards that are tried."""
    yield from sorted({min(gpus - 1, max(1, round(share * gpus))) for share in SHARES})


def best_of(outcomes: dict[Cluster, Outcome]) -> Cluster:
    """Choose, of all within 3 % of the fastest, the smallest eta, and of those the fastest."""
    fastest = max(outcome.tokens_per_s for outcome in outcomes.values())
    near = [cluster for cluster, outcome in outcomes.items() if outcome.tokens_per_s >= CLOSE * fastest]
    return min(near, key=lambda cluster: (cluster.eta, -outcomes[cluster].tokens_per_s))


def run_model(*, coordinator_ms: float, sizes: Sequence[int] = SIZES) -> dict[str, object]:
    """Print a table for each number of GPUs and return the best configurations."""
    found: dict[str, object] = {}
    print(
        f"model: full engine {FULL_TOKENS_PER_S:,.0f} tokens/s a card, training {TRAIN_TOKENS_PER_S:,.0f}, mean "
        f"context {CONTEXT:,.0f}, coordinator {coordinator_ms:g} ms a group"
    )
    for gpus in sizes:
        for sync_s in SYNCS_S:
            base = Cluster(gpus=gpus, sampling=gpus, eta=0, sync_s=sync_s, coordinator_s=coordinator_ms / 1000)
            sync = run_virtual(simulate(base))
            tried = [replace(base, sampling=sampling, eta=eta) for sampling in splits(gpus) for eta in ETAS]
            outcomes = {cluster: run_virtual(simulate(cluster)) for cluster in tried}
            best = best_of(outcomes)
            print(
                f"\n{gpus} GPUs, sync {sync_s:g} s, {base.batch_groups} groups of {GROUP_SIZE} a step; thousand "
                f"trained tokens/s by sampling cards and eta (synchronous: {sync.tokens_per_s / 1000:,.0f})"
            )
            print("sampling " + "".join(f"{f'eta {eta}':>10}" for eta in ETAS))
            for sampling in splits(gpus):
                rates = [outcomes[replace(base, sampling=sampling, eta=eta)].tokens_per_s / 1000 for eta in ETAS]
                print(f"{sampling:8} " + "".join(f"{rate:10,.0f}" for rate in rates))
            outcome = outcomes[best]
            abort = run_virtual(simulate(replace(best, rereads=True)))
            print(
                f"best: {best.sampling} sample, {best.training} train, eta {best.eta}: {outcome.step_s:.1f} s a step, "
                f"engine {outcome.engine:.0%}, trainer {outcome.trainer:.0%}, sync {outcome.sync:.0%}, coordinator "
                f"{outcome.coordinator:.0%} of a core, mean lag {outcome.lag:.1f}, masked {outcome.masked:.1%}; limit: "
                f"{outcome.limit}; {outcome.tokens_per_s / sync.tokens_per_s:.2f} x synchronous; with abort in place "
                f"of inflight {abort.tokens_per_s / outcome.tokens_per_s:.0%} of it",
                flush=True,
            )
            found[f"{gpus} GPUs, sync {sync_s:g} s"] = {
                "sampling": best.sampling,
                "training": best.training,
                "eta": best.eta,
                "thousand_tokens_per_s": round(outcome.tokens_per_s / 1000, 1),
                "speedup": round(outcome.tokens_per_s / sync.tokens_per_s, 2),
                "step_s": round(outcome.step_s, 2),
                "engine": round(outcome.engine, 3),
                "trainer": round(outcome.trainer, 3),
                "sync": round(outcome.sync, 3),
                "coordinator": round(outcome.coordinator, 3),
                "abort": round(abort.tokens_per_s / outcome.tokens_per_s, 3),
                "limit": outcome.limit,
            }
    return found


if __name__ == "__main__":
    print(json.dumps({"bench": "scale_model", "scale": run_model(coordinator_ms=10.0)}))
