"""How processor time and memory of one RL step grow with what a user can raise: one table.

    python bench/growth.py [--repeats 3] [--only answer_tokens]

A step is that of `loops/rl.py` on the CPU: sample, score, credit, train, publish; a random-weight Llama, one thread of
arithmetic. From a small base one size at a time is doubled three times: episodes a group, groups, tokens of the prompt,
tokens of the answer, turns, layers; and adapters that a service trains and samples one after the other. Every point is
a process of its own. `cpu_s` is the median of the steps' processor time, on which other programs have little influence;
`memory` is the process' peak above what it had when the model was built.

`growth` of a doubling is the cost after it over twice the cost before: 1 is proportional, less means that part of the
cost does not grow. Attention over a longer sequence grows with its square, which is why lengths may be above 1.
The last line is JSON; `ratio` is the largest growth of processor time in the table (bar: 1.15).
"""

import argparse
import asyncio
import json
import multiprocessing
import resource
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from multiprocessing.connection import Connection

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from headrace.algo.advantages.credit import credit
from headrace.algo.datum import to_data
from headrace.algo.loss_weights import reweight
from headrace.data.task_source import TaskSource
from headrace.infer.engine import EmbeddedEngine
from headrace.loops.update import Updater
from headrace.model.compute_thread import ComputeThread
from headrace.model.load import prepare
from headrace.render import Renderer
from headrace.reward.reward_runner import InProcessRewardRunner
from headrace.reward.terms import Term
from headrace.rollout.executor import AsyncSettings, RolloutExecutor
from headrace.rollout.group import GroupPlayer
from headrace.rollout.publisher import Publisher
from headrace.service.host.adapter_host import AdapterHost
from headrace.service.host.model_host import AdapterSpec
from headrace.train.torch_backend import TorchBackend
from headrace.types import (
    CROSS_ENTROPY,
    Adam,
    Datum,
    Episode,
    LossSpec,
    Message,
    Observation,
    SampleRequest,
    SamplingParams,
    StepResult,
    Task,
    float_array,
    int_array,
)

BAR, DOUBLINGS, VOCABULARY, CONTEXT, REPLY = 1.15, 3, 2048, 4096, 8


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a step has; `adapters` above 0 means that many adapters of a service instead."""

    group_size: int = 4
    groups: int = 4
    prompt_tokens: int = 64
    answer_tokens: int = 32
    turns: int = 1
    layers: int = 4
    adapters: int = 0


AXES: dict[str, Sizes] = {
    "group_size": Sizes(),
    "groups": Sizes(),
    "prompt_tokens": Sizes(),
    "answer_tokens": Sizes(),
    "turns": Sizes(),
    "layers": Sizes(),
    "adapters": Sizes(adapters=4),
}


@dataclass(frozen=True, slots=True)
class Cost:
    cpu_s: float
    memory_mib: float


class Talk:
    """An environment that answers a few words for a number of turns."""

    deterministic = True

    def __init__(self, turns: int) -> None:
        self._turns, self._left = turns, 0

    def reset(self, task: Task, seed: int) -> Observation:
        self._left = self._turns
        return Observation(messages=(), state="start")

    def step(self, action: str) -> StepResult:
        self._left -= 1
        said = Message(role="user", content=" ".join(f"w{index}" for index in range(2, 2 + REPLY)))
        shown = Observation(messages=(said,) if self._left else (), state=str(self._left))
        return StepResult(observation=shown, reward=0.0, done=self._left == 0)

    def close(self) -> None:
        self._left = 0


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<eos>": 1} | {f"w{index}": index for index in range(2, VOCABULARY)}
    level = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    level.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=level, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    return tokenizer


def make_model(layers: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).float()
    model.model.embed_tokens.weight.data[1] = 0.0  # the end is drawn as rarely as any other token
    return model


def tasks(sizes: Sizes, count: int = 64) -> list[Task]:
    ids = np.random.default_rng(1).integers(2, VOCABULARY, (count, sizes.prompt_tokens)).tolist()
    texts = [" ".join(f"w{index}" for index in row) for row in ids]
    return [Task(id=str(i), messages=(Message(role="user", content=text),)) for i, text in enumerate(texts)]


def evenness(episode: Episode) -> float:
    tokens = episode.steps[0].completion.tokens.tolist()
    return sum(index % 2 == 0 for index in tokens) / max(len(tokens), 1)


def rl_steps(sizes: Sizes, repeats: int) -> Cost:
    tokenizer = make_tokenizer()
    lm = prepare(make_model(sizes.layers), tokenizer, source="bench")
    worker = ComputeThread(threads=1)
    backend = TorchBackend(lm, worker=worker)
    engine = EmbeddedEngine(lm, max_num_seqs=sizes.groups * sizes.group_size, worker=worker)
    source = TaskSource(tasks(sizes), seed=0)
    updater = Updater(backend=backend, adam=lambda _: Adam(learning_rate=1e-6), max_skips=1)
    player = GroupPlayer(
        group_size=sizes.group_size,
        make_env=lambda: Talk(sizes.turns),
        sampler=engine,
        renderer=Renderer(tokenizer, eos_tokens=()),
        reward_runner=InProcessRewardRunner([Term(name="evenness", fn=evenness)]),
        sampling=SamplingParams(max_tokens=sizes.answer_tokens, stop_tokens=()),
        max_turns=sizes.turns,
        max_episode_tokens=CONTEXT,
        timeout_s=600.0,
        run_seed=0,
    )
    before_mib = peak_mib()

    async def run() -> list[float]:
        executor = RolloutExecutor(
            play=player,
            next_task=source.next,
            batch_groups=sizes.groups,
            settings=AsyncSettings(),
            publisher=Publisher([engine]),
        )
        taken = []
        async with executor:
            for _ in range(repeats + 1):
                began = time.process_time()
                groups = await executor.take_batch()
                data = reweight(to_data(credit(groups, method="grpo").episodes), weighting="token_mean")
                await updater.update(0, data, LossSpec(fn="ppo"))
                executor.done(groups)
                await executor.publish(await asyncio.wrap_future(backend.export_weights()))
                taken.append(time.process_time() - began)
                sampled = sum(each.episode.num_sampled for group in groups for each in group.episodes)
                assert sampled == sizes.groups * sizes.group_size * sizes.turns * sizes.answer_tokens, sampled
        return taken

    taken = asyncio.run(run())
    engine.close()
    backend.close()
    worker.close()
    return Cost(statistics.median(taken[1:]), peak_mib() - before_mib)


def adapter_steps(sizes: Sizes, repeats: int) -> Cost:
    """Train each adapter on one sequence, publish it, and sample two answers from each, all at once."""
    lm = prepare(make_model(sizes.layers), None, source="bench")
    host = AdapterHost(lm, max_num_seqs=2 * sizes.adapters, kv_tokens=4 * sizes.adapters * 256)
    rng = np.random.default_rng(0)
    tokens = int_array(rng.integers(2, VOCABULARY, 129))
    datum = Datum(inputs=tokens[:-1], targets=tokens[1:], arrays={"weights": float_array(np.ones(128))})
    names = [f"adapter-{index}" for index in range(sizes.adapters)]
    before_mib = peak_mib()
    for index, name in enumerate(names):
        host.create(name, AdapterSpec(rank=8, seed=index)).result()
    taken = []
    for repeat in range(repeats + 1):
        began = time.process_time()
        for name in names:
            host.forward_backward(name, [datum], CROSS_ENTROPY)
            host.optim_step(name, Adam(learning_rate=1e-3))
            host.snapshot(name, f"{name}-{repeat}").result()
        requests = [
            SampleRequest(
                prompt=int_array(rng.integers(2, VOCABULARY, sizes.prompt_tokens)),
                params=SamplingParams(max_tokens=sizes.answer_tokens, stop_tokens=(), seed=seed),
            )
            for seed in range(2 * sizes.adapters)
        ]

        async def sample(repeat: int = repeat, requests: list[SampleRequest] = requests) -> None:
            played = (host.sample(f"{names[i // 2]}-{repeat}", each) for i, each in enumerate(requests))
            await asyncio.gather(*played)

        asyncio.run(sample())
        for name in names:
            host.close_sampler(f"{name}-{repeat}").result()
        taken.append(time.process_time() - began)
    host.close()
    return Cost(statistics.median(taken[1:]), peak_mib() - before_mib)


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(pipe: Connection, sizes: Sizes, repeats: int) -> None:
    torch.set_num_threads(1)
    run = adapter_steps if sizes.adapters else rl_steps
    pipe.send(run(sizes, repeats))


@contextmanager
def own_process(sizes: Sizes, repeats: int) -> Iterator[Connection]:
    start = multiprocessing.get_context("spawn")
    here, there = start.Pipe()
    process = start.Process(target=measure, args=(there, sizes, repeats), daemon=True)
    process.start()
    there.close()
    yield here
    process.join(60)


def costs(axis: str, base: Sizes, repeats: int) -> list[tuple[int, Cost]]:
    points = []
    for doubling in range(DOUBLINGS + 1):
        value = asdict(base)[axis] * 2**doubling
        with own_process(replace(base, **{axis: value}), repeats) as pipe:
            cost = pipe.recv()
        points.append((value, cost))
        print(f"{axis:>14} {value:>5}  {cost.cpu_s:7.3f} s  {cost.memory_mib:7.1f} MiB", flush=True)
    return points


def growth(before: float, after: float) -> float:
    return round(after / (2 * before), 2) if before > 0 else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3, help="steps that are counted at each point")
    parser.add_argument("--only", choices=sorted(AXES), help="one row of the table")
    given = parser.parse_args()
    table = {}
    for axis, base in AXES.items():
        if given.only in (None, axis):
            points = [cost for _, cost in costs(axis, base, given.repeats)]
            steps = list(pairwise(points))
            table[axis] = {
                "cpu": [growth(a.cpu_s, b.cpu_s) for a, b in steps],
                "memory": [growth(a.memory_mib, b.memory_mib) for a, b in steps],
            }
    for axis, row in table.items():
        print(f"{axis:>14}  processor time {row['cpu']}  memory {row['memory']}")
    ratio = max(value for row in table.values() for value in row["cpu"])
    print(json.dumps({"growth": table, "bar": BAR, "ratio": ratio}))


if __name__ == "__main__":
    main()
