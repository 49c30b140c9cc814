"""Many episodes in one process: episodes a second, CPU time and memory, by the number in flight.

    python bench/episodes.py [--in-flight 1 100 1000 5000] [--threads 64]

The real executor, groups of one episode and the real episode worker with a chat template and tools, over a sampler that
takes 50 ms for every reply, however many it has, and an environment whose tool blocks for 5 ms and therefore runs on
threads, off the event loop. An episode is three turns: 165 ms if it is alone. What a sampler and a machine with enough
cores would do is in flight / 0.165 s; the tool allows threads / 15 ms; all else is what this process computes itself
(templates, tokens, calls, bookkeeping), on one core.

`in_flight` is the bound that the executor holds, `most` how many there were at once, `tools` how many tools waited at
the same time: 1 if they ran on the event loop. `cpu_ms_per_episode` is of all threads, and tells what is possible on a
machine that is not busy with something else. `bytes_per_episode` is the growth of resident memory while so many were in
flight, divided by their number; all that had ended were kept as well.

`ratio` is episodes a second with 1000 in flight / with 1 (with the largest number, if 1000 is not among them).
"""

import argparse
import asyncio
import gc
import json
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from headrace.render import Renderer
from headrace.rollout.executor.build import build_executor
from headrace.rollout.executor.settings import AsyncSettings
from headrace.rollout.group import GroupPlayer
from headrace.testing import FakeRewardRunner, FakeSampler, FakeToolEnv
from headrace.types import (
    Action,
    Completion,
    Observation,
    SampleRequest,
    SamplingParams,
    StepResult,
    StopReason,
    Task,
    float_array,
    int_array,
)

REPLY_S, TOOL_S, TURNS = 0.05, 0.005, 3
TICK_S = 0.05
TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\\nTools:' }}{% for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endif %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
    "{% for call in m.tool_calls or [] %}{{ '<tool_call>' }}"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}{{ '</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    bpe.add_tokens([AddedToken(mark, special=False) for mark in ("<tool_call>", "</tool_call>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


class SlowSampler(FakeSampler):
    """Says the same after a fixed time, to any number at once."""

    def __init__(self, said: Sequence[int]) -> None:
        super().__init__()
        tokens = int_array(said)
        logprobs = float_array([-0.5] * len(tokens))
        self._said = Completion(
            tokens=tokens,
            sampler_logprobs=logprobs,
            raw_logprobs=logprobs,
            versions=int_array([0] * len(tokens)),
            stop=StopReason.STOP,
        )

    async def sample(self, request: SampleRequest) -> Completion:
        await asyncio.sleep(REPLY_S)
        return self._said


class Count:
    """How many there are of something now, and how many there were at most."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self._lock = threading.Lock()

    def move(self, change: int) -> None:
        with self._lock:
            self.now += change
            self.most = max(self.most, self.now)


class SlowTool(FakeToolEnv):
    blocking = True

    def __init__(self, in_flight: Count, tools: Count) -> None:
        super().__init__(target=TURNS)
        self._in_flight, self._tools, self._open = in_flight, tools, False

    def reset(self, task: Task, seed: int) -> Observation:
        self._in_flight.move(+1)
        self._open = True
        return super().reset(task, seed)

    def call(self, action: Action) -> StepResult:
        self._tools.move(+1)
        time.sleep(TOOL_S)
        self._tools.move(-1)
        return super().call(action)

    def close(self) -> None:
        if self._open:
            self._in_flight.move(-1)
        self._open = False


class Tasks:
    def __init__(self) -> None:
        self._ids = count()

    def next(self) -> Task:
        return Task(id=str(next(self._ids)))

    def state_dict(self) -> dict[str, int]:
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    in_flight: int
    most: int
    episodes: int
    tools: int
    episodes_per_s: float
    cpu_ms_per_episode: float
    bytes_per_episode: float


async def measure(in_flight: int, renderer: Renderer, sampler: SlowSampler, threads: Executor) -> Figures:
    counted, tools = Count(), Count()
    episodes = max(20, 2 * in_flight)
    executor = build_executor(
        AsyncSettings(max_running=in_flight),
        batch_groups=episodes,
        samplers=[sampler],
        player=GroupPlayer(
            group_size=1,
            make_env=partial(SlowTool, counted, tools),
            sampler=sampler,
            renderer=renderer,
            reward_runner=FakeRewardRunner(),
            sampling=SamplingParams(max_tokens=64),
            max_turns=TURNS + 1,
            max_episode_tokens=2048,
            timeout_s=600.0,
            run_seed=0,
            threads=threads,
        ),
        source=Tasks(),
    )
    gc.collect()
    before, peak = resident_bytes(), 0

    async def watch() -> None:
        nonlocal peak
        while True:
            await asyncio.sleep(TICK_S)
            peak = max(peak, resident_bytes())

    async with executor:
        watching = asyncio.create_task(watch())
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        groups = await executor.take_batch()
        spent_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
        watching.cancel()
        assert len(groups) == episodes
        assert all(group.episodes[0].success for group in groups)
        executor.done(groups)
    assert counted.most <= in_flight
    return Figures(
        in_flight=in_flight,
        most=counted.most,
        episodes=episodes,
        tools=tools.most,
        episodes_per_s=episodes / spent_s,
        cpu_ms_per_episode=1000 * cpu_s / episodes,
        bytes_per_episode=max(peak - before, 0) / in_flight,
    )


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 100, 1000, 5000])
    parser.add_argument("--threads", type=int, default=64)
    given = parser.parse_args()
    tokenizer = make_tokenizer()
    said = tokenizer('<tool_call>{"name": "up", "arguments": {}}</tool_call><|im_end|>')["input_ids"]
    renderer, sampler = Renderer(tokenizer), SlowSampler(said)
    print("in flight     most    tools   episodes/s   CPU ms/episode   kB/episode")
    found = []
    with ThreadPoolExecutor(max_workers=given.threads) as threads:
        for in_flight in given.in_flight:
            figures = asyncio.run(measure(in_flight, renderer, sampler, threads))
            found.append(figures)
            print(
                f"{figures.in_flight:9} {figures.most:8} {figures.tools:8} {figures.episodes_per_s:12.1f} "
                f"{figures.cpu_ms_per_episode:16.2f} {figures.bytes_per_episode / 1024:12.1f}",
                flush=True,
            )
    rates = {figures.in_flight: figures.episodes_per_s for figures in found}
    ratio = rates.get(1000, found[-1].episodes_per_s) / found[0].episodes_per_s
    print(json.dumps({"ratio": round(ratio, 1), "levels": [asdict(figures) for figures in found]}))


if __name__ == "__main__":
    main()
