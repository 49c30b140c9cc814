"""One RL step of ours against TRL's GRPOTrainer on one GPU, in one run: same weights, prompts, sizes and loss.

    python bench/gpu/rl_step.py [--trl-steps 3] [--steps 6] [--trl-recompute]
    python bench/gpu/rl_step.py --tail     # the end-of-sequence logit is raised, so that lengths are geometric
    python bench/gpu/rl_step.py --ours     # without TRL, to look at our own time

A model of the shape of Qwen2.5-1.5B with random weights in bfloat16; 16 prompts x 16 samples, 128 + 512 tokens, GRPO's
advantages, clipped surrogate averaged over tokens, AdamW. TRL has micro-batches of 32 sequences and `generate` with
its dynamic cache, without activation recomputation. With `--tail` the mean length is about 128 of at most 512 tokens,
and the learning rate is next to nothing in both, so that it stays there.

The loss is checked first: TRL's first batch, with its advantages, goes through our backend at the same weights, and
loss and gradient norm have to agree. Then each side's steps are timed, the first of each not counted, and its peak
memory is taken. The last line is JSON; `ratio` is TRL's seconds per sampled token over ours (medians).
"""

import argparse
import asyncio
import gc
import json
import logging
import os
import statistics
import tempfile
import time
import warnings
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TQDM_DISABLE", "1")

import numpy as np
import torch
from qwen import VOCABULARY, random_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM, TrainerCallback

from headrace.algo.advantages.credit import credit
from headrace.algo.datum import to_data
from headrace.algo.loss_weights import reweight
from headrace.data.task_source import TaskSource
from headrace.envs.single_turn import SingleTurnEnv
from headrace.infer.cuda import graph_decoder
from headrace.infer.engine import EmbeddedEngine
from headrace.loops.update import Updater
from headrace.model.compute_thread import ComputeThread
from headrace.model.cuda.layers import fuse_layers
from headrace.model.load import LanguageModel, prepare
from headrace.render import Renderer
from headrace.reward.reward_runner import InProcessRewardRunner
from headrace.reward.terms import Term
from headrace.rollout.executor import RolloutExecutor
from headrace.rollout.executor.settings import AsyncSettings
from headrace.rollout.group import GroupPlayer
from headrace.rollout.publisher import Publisher
from headrace.train.torch_backend import TorchBackend
from headrace.types import (
    Adam,
    Datum,
    DiscardGradient,
    Episode,
    LossSpec,
    Message,
    SamplingParams,
    Task,
    float_array,
    int_array,
)

PROMPTS, SAMPLES, PROMPT_TOKENS, COMPLETION_TOKENS, TRL_MICRO_BATCH = 16, 16, 128, 512, 32
MICRO_BATCH_TOKENS = 32 * (PROMPT_TOKENS + COMPLETION_TOKENS)
TAIL_MEAN, EOS, COMMON = 128, 1, 0.5
LEARNING_RATE = 1e-6
TAIL_LEARNING_RATE = 1e-12  # a step of 1e-6 doubles the lengths; this leaves them geometric, and costs as much
Times = tuple[float, float, int]  # seconds of generation, of the rest, sampled tokens


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<eos>": EOS} | {f"w{index}": index for index in range(2, VOCABULARY)}
    level = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    level.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=level, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return tokenizer


def prompts(count: int = 64) -> list[str]:
    ids = np.random.default_rng(1).integers(2, VOCABULARY, (count, PROMPT_TOKENS))
    return [" ".join(f"w{index}" for index in row) for row in ids]


def evenness(ids: list[int]) -> float:
    """A reward that differs between samples: the share of even token ids."""
    return sum(index % 2 == 0 for index in ids) / max(len(ids), 1)


@torch.no_grad()
def tail_bias() -> float:
    """What the end-of-sequence token needs of the common coordinate, so that its mean probability is one in TAIL_MEAN
    where the model itself has sampled."""
    model = make_model(0.0)
    table = model.get_input_embeddings().weight
    drawn = torch.randint(2, VOCABULARY, (16, PROMPT_TOKENS), generator=torch.Generator().manual_seed(2)).cuda()
    tokens = model.generate(
        drawn,
        attention_mask=torch.ones_like(drawn),
        do_sample=True,
        top_k=0,
        temperature=1.0,
        max_new_tokens=COMPLETION_TOKENS // 2,
        suppress_tokens=[EOS],
    )
    hidden = model.base_model(input_ids=tokens[:, :-1]).last_hidden_state[:, PROMPT_TOKENS - 1 :].flatten(0, 1)
    others = torch.cat([torch.logsumexp((part @ table[2:].T).float(), dim=-1) for part in hidden.split(1024)])
    low, high = 0.0, 1000.0
    for _ in range(60):
        middle = (low + high) / 2
        rate = torch.sigmoid(hidden[:, 0].float() * middle - others).mean()
        low, high = (middle, high) if rate < 1 / TAIL_MEAN else (low, middle)
    return low


@torch.no_grad()
def make_model(bias: float | None) -> Qwen2ForCausalLM:
    """With a bias, one coordinate of the stream is the same everywhere (all tokens bring it, and no layer adds to it),
    and the end-of-sequence token has nothing but `bias` of it: it is about as likely in one place as in another, so
    lengths are geometric."""
    model = random_model(attn_implementation="sdpa")
    if bias is not None:
        table = model.get_input_embeddings().weight
        table[:, 0] = COMMON
        for layer in model.base_model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        table[EOS] = 0.0
        table[EOS, 0] = bias
    return model


class Ours:
    """The loop of `loops/rl.py`, one step at a time."""

    def __init__(self, lm: LanguageModel, *, learning_rate: float) -> None:
        fuse_layers(lm.model)
        self.learning_rate = learning_rate
        self.worker = ComputeThread()
        self.backend = TorchBackend(lm, micro_batch_tokens=MICRO_BATCH_TOKENS, worker=self.worker)
        rows = PROMPTS * SAMPLES
        room = rows * -(-(PROMPT_TOKENS + COMPLETION_TOKENS + 1) // 64) * 64
        self.make_engine = lambda: EmbeddedEngine(
            lm,
            max_num_seqs=rows,
            kv_tokens=room,
            worker=self.worker,
            decoder=graph_decoder(lm, max_num_seqs=rows, kv_tokens=room, graphs=True),
        )
        self.lm = lm

    def check(self, batch: list[dict[str, np.ndarray]]) -> tuple[float, float]:
        """Loss and gradient norm of TRL's batch here, at ratio 1 as there."""
        data = [datum for rows in batch for datum in data_of(rows)]
        ppo = LossSpec(fn="ppo")
        scored = self.backend.forward(data, ppo).result().logprobs
        data = [with_logprobs(datum, row) for datum, row in zip(data, scored, strict=True)]
        loss = self.backend.forward_backward(data, ppo).result().loss
        gradients = self.backend.gradients().result()
        norm = torch.stack([gradient.float().norm() for gradient in gradients.values()]).norm()
        self.backend.optim_step(DiscardGradient()).result()
        return loss, float(norm)

    def start(self) -> None:
        self.engine = self.make_engine()
        tasks = [Task(id=str(i), messages=(Message(role="user", content=text),)) for i, text in enumerate(prompts())]
        self.source = TaskSource(tasks, seed=0)
        self.updater = Updater(backend=self.backend, adam=lambda _: Adam(learning_rate=self.learning_rate), max_skips=1)
        self.runner = asyncio.Runner()
        self.runner.run(self._open())

    async def _open(self) -> None:
        def score(episode: Episode) -> float:
            return evenness(episode.steps[0].completion.tokens.tolist())

        player = GroupPlayer(
            group_size=SAMPLES,
            make_env=SingleTurnEnv,
            sampler=self.engine,
            renderer=Renderer(self.lm.tokenizer, eos_tokens=self.lm.eos_tokens),
            reward_runner=InProcessRewardRunner([Term(name="evenness", fn=score)]),
            sampling=SamplingParams(max_tokens=COMPLETION_TOKENS),
            max_turns=1,
            max_episode_tokens=PROMPT_TOKENS + COMPLETION_TOKENS,
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

    async def _step(self) -> Times:
        began = time.perf_counter()
        groups = await self.executor.take_batch()
        generated = time.perf_counter()
        credited = credit(groups, method="grpo")
        data = reweight(to_data(credited.episodes), weighting="token_mean")
        await self.updater.update(0, data, LossSpec(fn="ppo"))
        self.executor.done(groups)
        await self.executor.publish(await asyncio.wrap_future(self.backend.export_weights()))
        torch.cuda.synchronize()
        ended = time.perf_counter()
        tokens = sum(scored.episode.num_sampled for group in groups for scored in group.episodes)
        return generated - began, ended - generated, tokens

    def step(self) -> Times:
        return self.runner.run(self._step())

    def close(self) -> None:
        self.runner.run(self.executor.__aexit__(None, None, None))
        self.engine.close()
        self.backend.close()
        self.worker.close()


def data_of(rows: dict[str, np.ndarray]) -> list[Datum]:
    """TRL's micro-batch as our data: prompts padded on the left, completions on the right."""
    data = []
    for index, advantage in enumerate(rows["advantages"]):
        prompt = rows["prompt_ids"][index][rows["prompt_mask"][index] > 0]
        completion = rows["completion_ids"][index][rows["completion_mask"][index] > 0]
        tokens = np.concatenate([prompt, completion])
        sampled = np.arange(1, len(tokens)) >= len(prompt)
        arrays = {"weights": sampled / rows["num_items_in_batch"], "advantages": sampled * advantage}
        arrays["sampler_logprobs"] = np.zeros(len(sampled))
        data.append(
            Datum(
                inputs=int_array(tokens[:-1]),
                targets=int_array(tokens[1:]),
                arrays={name: float_array(values) for name, values in arrays.items()},
            )
        )
    return data


def with_logprobs(datum: Datum, logprobs: np.ndarray) -> Datum:
    arrays = {**datum.arrays, "sampler_logprobs": float_array(np.nan_to_num(logprobs))}
    return Datum(inputs=datum.inputs, targets=datum.targets, arrays=arrays)


class Watch(TrainerCallback):
    """Times of TRL's steps, and its gradient norms."""

    def __init__(self) -> None:
        self.times: list[Times] = []
        self.norms: list[float] = []
        self.generation_s, self.tokens, self.began = 0.0, 0, 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        if not self.began:
            self.began = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        torch.cuda.synchronize()
        spent = time.perf_counter() - self.began
        self.times.append((self.generation_s, spent - self.generation_s, self.tokens))
        show("trl", len(self.times), self.times[-1])
        self.generation_s, self.tokens, self.began = 0.0, 0, time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        if "grad_norm" in logs:
            self.norms.append(logs["grad_norm"])


def show(name: str, step: int, times: Times) -> None:
    generation_s, rest_s, tokens = times
    print(f"{name:5} {step}: generation {generation_s:6.2f} s, rest {rest_s:6.2f} s, {tokens} tokens", flush=True)


def run_trl(
    model: Qwen2ForCausalLM, steps: int, *, recompute: bool, learning_rate: float
) -> tuple[Watch, list[dict[str, np.ndarray]], float]:
    """Times, and the first step's batch with its loss."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    watch, first, losses = Watch(), [], []

    def reward(completions: Any, completion_ids: list[list[int]], **_: Any) -> list[float]:
        watch.tokens += sum(map(len, completion_ids))
        return [evenness(ids) for ids in completion_ids]

    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder,
            bf16=True,
            per_device_train_batch_size=TRL_MICRO_BATCH,
            gradient_accumulation_steps=PROMPTS * SAMPLES // TRL_MICRO_BATCH,
            num_generations=SAMPLES,
            max_completion_length=COMPLETION_TOKENS,
            max_steps=steps,
            learning_rate=learning_rate,
            lr_scheduler_type="constant",
            beta=0.0,
            epsilon=0.2,
            loss_type="dapo",
            temperature=1.0,
            top_k=0,
            max_grad_norm=1.0,
            gradient_checkpointing=recompute,
            save_strategy="no",
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=settings,
            train_dataset=Dataset.from_dict({"prompt": prompts()}),
            processing_class=make_tokenizer(),
            callbacks=[watch],
        )
        generate, compute_loss = trainer._generate, trainer._compute_loss

        def timed(*args: Any, **kwargs: Any) -> Any:
            torch.cuda.synchronize()
            began = time.perf_counter()
            try:
                return generate(*args, **kwargs)
            finally:
                torch.cuda.synchronize()
                watch.generation_s += time.perf_counter() - began

        def kept(model: Any, inputs: dict[str, Any]) -> Any:
            loss = compute_loss(model, inputs)
            if not watch.times:
                names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")
                first.append({name: inputs[name].cpu().numpy() for name in names})
                first[-1]["num_items_in_batch"] = float(inputs["num_items_in_batch"])
                losses.append(float(loss.detach()))
            return loss

        trainer._generate, trainer._compute_loss = timed, kept
        trainer.train()
    return watch, first, sum(losses)


def check_loss(ours: Ours, batch: list[dict[str, np.ndarray]], trl_loss: float, trl_norm: float) -> None:
    loss, norm = ours.check(batch)
    print(f"loss: TRL {trl_loss:.6f}, ours {loss:.6f}; gradient norm: TRL {trl_norm:.5f}, ours {norm:.5f}", flush=True)
    if abs(loss - trl_loss) > 0.01 or abs(norm / trl_norm - 1) > 0.05:
        raise SystemExit("the losses differ: nothing to compare")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=6, help="of ours; the first is not counted")
    parser.add_argument("--trl-steps", type=int, default=3, help="the first is not counted")
    parser.add_argument("--tail", action="store_true")
    parser.add_argument("--ours", action="store_true", help="without TRL")
    parser.add_argument("--trl-recompute", action="store_true", help="TRL with gradient checkpointing, its own default")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("headrace").setLevel(logging.ERROR)
    bias = tail_bias() if given.tail else None
    rate = TAIL_LEARNING_RATE if given.tail else LEARNING_RATE
    figures: dict[str, float] = {}
    sides: list[tuple[str, list[Times]]] = []
    left_gb = 0.0
    if given.ours:
        ours = Ours(prepare(make_model(bias), make_tokenizer(), source="bench"), learning_rate=rate)
    else:
        watch, batch, trl_loss = run_trl(
            make_model(bias), given.trl_steps, recompute=given.trl_recompute, learning_rate=rate
        )
        sides.append(("trl", watch.times[1:]))
        figures["trl_peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        gc.collect()
        torch.cuda.empty_cache()
        left_gb = torch.cuda.memory_allocated() / 1e9
        ours = Ours(prepare(make_model(bias), make_tokenizer(), source="bench"), learning_rate=rate)
        check_loss(ours, batch, trl_loss, watch.norms[0])
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    ours.start()
    mine = []
    gc.freeze()  # as `headrace train` does
    for step in range(given.steps):
        mine.append(ours.step())
        show("ours", step + 1, mine[-1])
    figures["ours_peak_gb"] = torch.cuda.max_memory_allocated() / 1e9 - left_gb
    ours.close()
    sides.append(("ours", mine[1:]))
    for name, rows in sides:
        figures[f"{name}_generation_s"] = statistics.median(row[0] for row in rows)
        figures[f"{name}_rest_s"] = statistics.median(row[1] for row in rows)
        figures[f"{name}_tokens_per_s"] = statistics.median(row[2] / (row[0] + row[1]) for row in rows)
    if not given.ours:
        figures["ratio"] = figures["ours_tokens_per_s"] / figures["trl_tokens_per_s"]
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
