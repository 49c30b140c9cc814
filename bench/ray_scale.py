"""Measure how episodes a second grow with rollout workers, and what workers cost a small run.

Part one: a scripted sampler (no model), five turns an episode, each followed by a tool call whose time is log-normal
with a mean of 0.5 s; 64 episodes in flight on each worker, 1 to 8 workers on a Ray of this machine. Tools only wait, so
workers need few cores; what is measured is the coordinator and the way to the workers.

Part two: the demo's [rl] on a few steps, in one process and with two rollout workers; trainer and engine are in the
coordinator's process. The time of the steps is compared, without the start of Ray.

    python bench/ray_scale.py [--workers 1,2,4,8] [--seconds 20] [--steps 8] [--skip-run]

The last line is JSON and ends with the ratios and their bars: episodes a second of each number of workers against as
many times those of the fewest (at least 0.9), and how much longer a step of the demo takes (at most 0.15).
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from headrace.cluster.connection import LOCAL, RolePlaces, connected, open_places
from headrace.cluster.reference_worker import Scorer
from headrace.cluster.runtime import ROLLOUT, ClusterRoles, open_workers
from headrace.model.tiny import END_ID, make_tokenizer
from headrace.observe.sinks.jsonl import read_metrics
from headrace.protocols import Sampler
from headrace.render import Renderer
from headrace.rollout.executor import AsyncSettings, build_executor
from headrace.rollout.group import GroupPlayer
from headrace.testing import FakeRewardRunner, FakeSampler
from headrace.types import (
    Completion,
    Message,
    Observation,
    SampleRequest,
    SamplingParams,
    SharedWeights,
    StepResult,
    StopReason,
    Task,
    float_array,
    int_array,
)
from headrace.wiring import demo_config, train

DEADLINE_S = 300.0
TURNS, TOOL_MEAN_S, TOOL_SIGMA = 5, 0.5, 0.6
GROUP_SIZE, IN_FLIGHT = 8, 64  # episodes
TOKENIZER = make_tokenizer(("count", "up"))


class WordSampler(FakeSampler):
    """Says the same word at once."""

    async def sample(self, request: SampleRequest) -> Completion:
        tokens = [*TOKENIZER("up")["input_ids"], END_ID]
        logprobs = float_array([-0.5] * len(tokens))
        return Completion(
            tokens=int_array(tokens),
            sampler_logprobs=logprobs,
            raw_logprobs=logprobs,
            versions=int_array([self.version] * len(tokens)),
            stop=StopReason.STOP,
        )


class ToolEnv:
    """Waits, after each turn, as long as a tool would take."""

    deterministic = blocking = True

    def __init__(self) -> None:
        self._turns = 0

    def reset(self, task: Task, seed: int) -> Observation:
        self._random = random.Random(os.urandom(8))
        return Observation(messages=(Message(role="user", content="count"),), state=str(seed))

    def step(self, action: str) -> StepResult:
        mu = -(TOOL_SIGMA**2) / 2
        time.sleep(TOOL_MEAN_S * self._random.lognormvariate(mu, TOOL_SIGMA))
        self._turns += 1
        observation = Observation(messages=(Message(role="user", content="up"),), state=str(self._turns))
        return StepResult(observation=observation, reward=1.0, done=self._turns >= TURNS)

    def close(self) -> None:
        return None


def build_player(sampler: Sampler) -> GroupPlayer:
    from concurrent.futures import ThreadPoolExecutor

    return GroupPlayer(
        group_size=GROUP_SIZE,
        make_env=ToolEnv,
        sampler=sampler,
        renderer=Renderer(TOKENIZER),
        reward_runner=FakeRewardRunner(),
        sampling=SamplingParams(max_tokens=8),
        threads=ThreadPoolExecutor(max_workers=2 * IN_FLIGHT),
    )


class Tasks:
    """Tasks without end."""

    def next(self) -> Task:
        return Task(id="t")

    def state_dict(self) -> dict[str, int]:
        return {}


async def episodes_per_s(workers: int, seconds: float) -> tuple[float, float]:
    """Return episodes a second, and the share of one core that the coordinator used."""
    roles = ClusterRoles(
        deadline_s=DEADLINE_S, build_player=build_player, build_rewards=FakeRewardRunner, build_frozen=_no_model
    )
    in_flight = workers * IN_FLIGHT // GROUP_SIZE  # groups
    async with (
        open_places(LOCAL, {ROLLOUT: RolePlaces(count=workers)}, deadline_s=DEADLINE_S) as places,
        open_workers(places, roles) as cluster,
    ):
        sampler = WordSampler()
        executor = build_executor(
            AsyncSettings(max_staleness=1000, max_running=in_flight),
            batch_groups=max(1, in_flight // 8),
            samplers=[sampler],
            player=build_player(sampler),
            source=Tasks(),
            play=cluster.play,
        )
        played, began_s, began_cpu_s = 0, 0.0, 0.0
        async with executor:
            warm = in_flight  # groups that are not counted: all workers are full after them
            while not began_s or time.perf_counter() - began_s < seconds:
                groups = await executor.take_batch()
                executor.done(groups)
                await executor.publish(SharedWeights(fingerprint="f"))
                warm -= len(groups)
                if began_s:
                    played += sum(len(group.episodes) for group in groups)
                elif warm <= 0:
                    began_s, began_cpu_s = time.perf_counter(), time.process_time()
            passed_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    return played / passed_s, cpu_s / passed_s


def _no_model(folder: str) -> Scorer:
    raise AssertionError("nothing is scored here")


async def measure_rates(counts: Sequence[int], seconds: float) -> dict[int, float]:
    """Measure each number of workers on one Ray of this machine."""
    rates: dict[int, float] = {}
    async with connected(LOCAL, cpus=max(counts), deadline_s=DEADLINE_S):
        for workers in counts:
            rates[workers], busy = await episodes_per_s(workers, seconds)
            print(
                f"{workers} workers, {workers * IN_FLIGHT} in flight: {rates[workers]:.1f} episodes/s, coordinator "
                f"{busy:.0%} of a core, {busy / rates[workers] * 1000:.2f} ms an episode",
                flush=True,
            )
    return rates


def step_seconds(steps: int, *, workers: int) -> float:
    """Return the median time of a training step of the demo, after the first two."""
    from dataclasses import replace

    with tempfile.TemporaryDirectory() as folder:
        config = demo_config(seed=0, folder=Path(folder))
        assert config.rl is not None
        config = replace(config, sft=None, rl=replace(config.rl, steps=steps))
        if workers:
            config = replace(config, cluster=replace(config.cluster, address="local", rollout_workers=workers))
        run = train(config, config_text_path=Path("demo.toml"), resume=None).folder
        records = [record.values for record in read_metrics(run / "metrics.jsonl") if "time/step_s" in record.values]
        return statistics.median(values["time/step_s"] for values in records[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", default="1,2,4,8")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--skip-run", action="store_true", help="measure the workers alone")
    arguments = parser.parse_args()
    result: dict[str, object] = {"cpus": os.cpu_count(), "load_before": os.getloadavg()[0]}
    rates = asyncio.run(measure_rates([int(count) for count in arguments.workers.split(",")], arguments.seconds))
    result["episodes_per_s"] = {str(workers): round(rate, 2) for workers, rate in rates.items()}
    fewest = min(rates)
    linear = {str(count): round(rate / count / (rates[fewest] / fewest), 3) for count, rate in rates.items()}
    ratios: dict[str, object] = {"of_linear": linear, "linear_bar": 0.9}
    if not arguments.skip_run:
        alone, with_workers = step_seconds(arguments.steps, workers=0), step_seconds(arguments.steps, workers=2)
        print(f"demo: {alone:.3f} s a step in one process, {with_workers:.3f} s with two rollout workers")
        result |= {"step_s_alone": round(alone, 4), "step_s_two_workers": round(with_workers, 4)}
        ratios |= {"overhead": round(with_workers / alone - 1, 3), "overhead_bar": 0.15}
    print(json.dumps(result | ratios))


if __name__ == "__main__":
    main()
