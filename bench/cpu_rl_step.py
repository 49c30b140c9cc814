"""One RL step of ours against TRL's GRPOTrainer on the CPU, alternating, same model, sizes and loss.

A random-weight Llama (256 wide, 6 layers, 4 heads, 2 KV heads, 49,152 vocabulary, tied), 4 prompts x 8 completions,
32 prompt + 64 completion tokens, clipped surrogate averaged over tokens, AdamW. Both sides start from equal weights,
each in a process of its own (so that neither's threads slow the other's), and take turns step by step. Ours starts as
`headrace train` does, with large pages (`headrace/start.py`; --trl-large-pages gives TRL the same) and with a garbage
collector that leaves the model alone. Prints seconds, split into generation and the rest; the last line is JSON,
`ratio` = TRL's seconds per real token over ours (medians).

    python bench/cpu_rl_step.py [--steps 5] [--trl-recompute] [--trl-large-pages]
"""

import argparse
import asyncio
import gc
import json
import logging
import multiprocessing
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TQDM_DISABLE", "1")

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback

from headrace.algo.advantages.credit import credit
from headrace.algo.datum import to_data
from headrace.algo.loss_weights import reweight
from headrace.data.task_source import TaskSource
from headrace.envs.single_turn import SingleTurnEnv
from headrace.infer.engine import EmbeddedEngine
from headrace.loops.update import Updater
from headrace.model.compute_thread import ComputeThread, limit_torch_threads
from headrace.model.load import prepare
from headrace.render import Renderer
from headrace.reward.reward_runner import InProcessRewardRunner
from headrace.reward.terms import Term
from headrace.rollout.executor import AsyncSettings, RolloutExecutor
from headrace.rollout.group import GroupPlayer
from headrace.rollout.publisher import Publisher
from headrace.start import SETTINGS, VARIABLE, runs_on_glibc
from headrace.train.torch_backend import TorchBackend
from headrace.types import Adam, Episode, LossSpec, Message, SamplingParams, Task

PROMPTS, SAMPLES, PROMPT_TOKENS, COMPLETION_TOKENS, VOCABULARY = 4, 8, 32, 64, 49_152
LEARNING_RATE = 1e-6
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<eos>": 1} | {f"w{index}": index for index in range(2, VOCABULARY)}
    level = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    level.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=level, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).float()


def prompts(count: int) -> list[str]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, VOCABULARY, (count, PROMPT_TOKENS), generator=generator).tolist()
    return [" ".join(f"w{index}" for index in row) for row in ids]


def evenness(ids: list[int]) -> float:
    """A reward that differs between samples: the share of even token ids."""
    return sum(index % 2 == 0 for index in ids) / max(len(ids), 1)


class Ours:
    """The loop of `loops/rl.py`, one step at a time."""

    def __init__(self, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, threads: int) -> None:
        lm = prepare(model, tokenizer, source="bench")
        self.worker = ComputeThread(threads=threads)
        self.backend = TorchBackend(lm, worker=self.worker)
        self.engine = EmbeddedEngine(lm, max_num_seqs=PROMPTS * SAMPLES, worker=self.worker)
        tasks = [Task(id=str(i), messages=(Message(role="user", content=text),)) for i, text in enumerate(prompts(64))]
        self.source = TaskSource(tasks, seed=0)
        self.updater = Updater(backend=self.backend, adam=lambda _: Adam(learning_rate=LEARNING_RATE), max_skips=1)
        self.runner = asyncio.Runner()
        self.runner.run(self._open(lm.eos_tokens, tokenizer))

    async def _open(self, eos: tuple[int, ...], tokenizer: PreTrainedTokenizerFast) -> None:
        def score(episode: Episode) -> float:
            return evenness(episode.steps[0].completion.tokens.tolist())

        player = GroupPlayer(
            group_size=SAMPLES,
            make_env=SingleTurnEnv,
            sampler=self.engine,
            renderer=Renderer(tokenizer, eos_tokens=eos),
            reward_runner=InProcessRewardRunner([Term(name="evenness", fn=score)]),
            sampling=SamplingParams(max_tokens=COMPLETION_TOKENS),
            max_turns=1,
            max_episode_tokens=256,
            timeout_s=600.0,
            run_seed=0,
        )
        self.executor = RolloutExecutor(
            play=player,
            next_task=self.source.next,
            batch_groups=PROMPTS,
            settings=AsyncSettings(),
            publisher=Publisher([self.engine]),
        )
        await self.executor.__aenter__()

    async def _step(self) -> tuple[float, float, int]:
        began = time.perf_counter()
        groups = await self.executor.take_batch()
        generated = time.perf_counter()
        credited = credit(groups, method="grpo")
        data = reweight(to_data(credited.episodes), weighting="token_mean")
        await self.updater.update(0, data, LossSpec(fn="ppo"))
        self.executor.done(groups)
        await self.executor.publish(await asyncio.wrap_future(self.backend.export_weights()))
        ended = time.perf_counter()
        tokens = sum(scored.episode.num_sampled for group in groups for scored in group.episodes)
        return generated - began, ended - generated, tokens

    def step(self) -> tuple[float, float, int]:
        return self.runner.run(self._step())

    def close(self) -> None:
        self.runner.run(self.executor.__aexit__(None, None, None))
        self.engine.close()
        self.backend.close()
        self.worker.close()


class Turns(TrainerCallback):
    """TRL's steps, each begun when asked for and reported when it has ended."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        self.generation_s, self.tokens, self.began = 0.0, 0, 0.0

    def on_train_begin(self, *args, **kwargs) -> None:
        self._wait()

    def on_step_end(self, *args, **kwargs) -> None:
        spent = time.perf_counter() - self.began
        self.pipe.send((self.generation_s, spent - self.generation_s, self.tokens))
        self._wait()

    def _wait(self) -> None:
        self.pipe.recv()
        self.generation_s, self.tokens, self.began = 0.0, 0, time.perf_counter()


@contextmanager
def environment(*, large_pages: bool) -> Iterator[None]:
    """What a process that is started inside begins with."""
    before = os.environ.get(VARIABLE)
    if large_pages and before is None and runs_on_glibc():
        os.environ[VARIABLE] = SETTINGS
    yield
    if before is None:
        os.environ.pop(VARIABLE, None)


def run_ours(pipe: Connection, steps: int) -> None:
    logging.getLogger("headrace").setLevel(logging.ERROR)
    threads = limit_torch_threads()
    ours = Ours(make_model(), make_tokenizer(), threads)
    gc.collect()
    gc.freeze()
    for _ in range(steps):
        pipe.recv()
        pipe.send(ours.step())
    ours.close()


def run_trl(pipe: Connection, steps: int, recompute: bool) -> None:
    warnings.simplefilter("ignore")
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = make_tokenizer()
    turns = Turns(pipe)

    def reward(completions, completion_ids, **_) -> list[float]:
        turns.tokens += sum(map(len, completion_ids))
        return [evenness(ids) for ids in completion_ids]

    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=PROMPTS * SAMPLES,
            num_generations=SAMPLES,
            max_completion_length=COMPLETION_TOKENS,
            max_steps=steps + 1,  # the one beyond is never begun
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            beta=0.0,
            epsilon=0.2,
            loss_type="dapo",
            temperature=1.0,
            top_k=0,
            max_grad_norm=1.0,
            gradient_checkpointing=recompute,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=make_model(),
            reward_funcs=reward,
            args=settings,
            train_dataset=Dataset.from_dict({"prompt": prompts(64)}),
            processing_class=tokenizer,
            callbacks=[turns],
        )
        generate = trainer._generate

        def timed(*args, **kwargs):
            began = time.perf_counter()
            try:
                return generate(*args, **kwargs)
            finally:
                turns.generation_s += time.perf_counter() - began

        trainer._generate = timed
        trainer.train()


def run(steps: int, *, recompute: bool, trl_large_pages: bool) -> dict[str, float]:
    start = multiprocessing.get_context("spawn")
    sides, processes = {}, []
    for name, body, extra in (("trl", run_trl, (recompute,)), ("ours", run_ours, ())):
        here, there = start.Pipe()
        process = start.Process(target=body, args=(there, steps, *extra), daemon=True)
        with environment(large_pages=name == "ours" or trl_large_pages):
            process.start()
        processes.append(process)
        there.close()
        sides[name] = here
    taken = {name: [] for name in sides}
    for step in range(steps):
        for name, pipe in sides.items():
            pipe.send("go")
            generation_s, rest_s, tokens = pipe.recv()
            taken[name].append((generation_s, rest_s, tokens))
            print(f"{name:5} {step + 1}: generation {generation_s:6.2f} s, rest {rest_s:6.2f} s, {tokens} tokens")
    for process in processes:  # TRL's trainer waits for a step that never comes
        process.terminate()
    figures: dict[str, float] = {}
    for name, rows in taken.items():
        counted = rows[1:]  # the first step warms up
        figures[f"{name}_generation_s"] = statistics.median(row[0] for row in counted)
        figures[f"{name}_rest_s"] = statistics.median(row[1] for row in counted)
        figures[f"{name}_tokens_per_s"] = statistics.median(row[2] / (row[0] + row[1]) for row in counted)
    figures["ratio"] = figures["ours_tokens_per_s"] / figures["trl_tokens_per_s"]
    return {name: round(value, 3) for name, value in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5, help="the first is not counted")
    parser.add_argument("--trl-recompute", action="store_true", help="TRL with gradient checkpointing, its own default")
    parser.add_argument("--trl-large-pages", action="store_true", help="TRL with the memory settings of ours")
    given = parser.parse_args()
    print(json.dumps(run(given.steps, recompute=given.trl_recompute, trl_large_pages=given.trl_large_pages)))


if __name__ == "__main__":
    main()
