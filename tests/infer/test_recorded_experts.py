"""The engine records the experts of every token, and training sends the tokens to these experts."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from headrace.algo.packing import build_prefix_tree
from headrace.infer.engine import EmbeddedEngine
from headrace.metrics import metric_values
from headrace.model.experts import routing_shape
from headrace.model.load import LanguageModel, prepare
from headrace.model.tiny import make_tokenizer
from headrace.train.micro_batch import MicroBatchRunner
from headrace.train.torch_backend import TorchBackend, make_optimizer
from headrace.types import (
    Completion,
    Datum,
    ExpertArray,
    LossSpec,
    SampleRequest,
    SamplingParams,
    StopReason,
    float_array,
    int_array,
)
from support.model_variants import VOCABULARY, make

PPO = LossSpec(fn="ppo")
VARIANTS = ["qwen3_moe", "olmoe", "glm4_moe", "gpt_oss", "deepseek_v3", "glm4_moe_lite", "qwen3_next", "nemotron_h"]
PROMPT = [(7 * i + i * i) % VOCABULARY for i in range(37)]


def mixture(variant: str = "qwen3_moe") -> LanguageModel:
    return prepare(make(variant), make_tokenizer(()), source=variant)


def routers_of(model: Any) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]


def chosen_by_transformers(variant: str, tokens: list[int]) -> ExpertArray:
    """What the routers of transformers' own model choose for a whole sequence."""
    model = make(variant)
    seen: list[torch.Tensor] = []
    for router in routers_of(model):
        router.register_forward_hook(lambda _module, _inputs, output: seen.append(output[2]))
    with torch.no_grad():
        model(input_ids=torch.tensor([tokens]), use_cache=False)
    return torch.stack(seen, dim=1).numpy().astype(np.int16)


async def sample(engine: EmbeddedEngine, prompts: list[list[int]], *, max_tokens: int = 9) -> list[Completion]:
    params = [SamplingParams(max_tokens=max_tokens, seed=seed, stop_tokens=()) for seed in range(len(prompts))]
    requests = [SampleRequest(prompt=int_array(p), params=q) for p, q in zip(prompts, params, strict=True)]
    return list(await asyncio.gather(*[engine.sample(request) for request in requests]))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_completion_has_the_experts_that_transformers_chooses(variant: str) -> None:
    """Prompts read in chunks, a prompt that two sequences share, and one that continues another's tokens."""
    engine = EmbeddedEngine(mixture(variant), max_num_seqs=8, prefill_chunk_tokens=16, prefill_tokens=32)
    try:
        first = asyncio.run(sample(engine, [PROMPT, PROMPT, PROMPT[:5]]))
        longer = [*PROMPT, *first[0].tokens.tolist(), 3, 4]
        (second,) = asyncio.run(sample(engine, [longer]))
        assert engine.counters.shared > 0
    finally:
        engine.close()
    for prompt, out in zip([PROMPT, PROMPT, PROMPT[:5], longer], [*first, second], strict=True):
        tokens = [*prompt, *out.tokens.tolist()][:-1]
        assert out.experts is not None
        assert np.array_equal(np.sort(out.experts), np.sort(chosen_by_transformers(variant, tokens)))


def test_an_interrupted_completion_keeps_the_experts_that_it_had() -> None:
    lm = mixture()
    engine = EmbeddedEngine(lm, max_num_seqs=8)

    async def play() -> tuple[Completion, Completion]:
        request = SampleRequest(prompt=int_array(PROMPT), params=SamplingParams(max_tokens=60, stop_tokens=()))
        running = asyncio.ensure_future(engine.sample(request))
        while engine.counters.decoded < 5:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await engine.pause(interrupt=True)
        part = await running
        with torch.no_grad():
            for router in routers_of(lm.model):
                router.weight.copy_(router.weight.flip(0))  # other experts from here on
        await engine.resume()
        return part, await engine.sample(replace(request, continue_from=part))

    try:
        part, whole = asyncio.run(play())
    finally:
        engine.close()
    assert part.stop is StopReason.INTERRUPTED
    assert part.experts is not None
    assert whole.experts is not None
    assert len(part.experts) == len(PROMPT) + len(part.tokens) - 1
    assert len(whole.experts) == len(PROMPT) + 60 - 1
    assert np.array_equal(whole.experts[: len(part.experts)], part.experts)


def test_nothing_is_recorded_where_it_is_not_asked_for_or_there_are_no_experts() -> None:
    for lm, record in ((mixture(), False), (prepare(make("qwen3"), make_tokenizer(()), source="q"), True)):
        engine = EmbeddedEngine(lm, record_experts=record)
        try:
            assert asyncio.run(sample(engine, [PROMPT]))[0].experts is None
        finally:
            engine.close()


def datum(prompt: list[int], out: Completion) -> Datum:
    tokens = [*prompt, *out.tokens.tolist()]
    sampled = np.arange(1, len(tokens)) >= len(prompt)
    logprobs = np.zeros(len(sampled), dtype=np.float32)
    logprobs[sampled] = out.sampler_logprobs
    return Datum(
        inputs=int_array(tokens[:-1]),
        targets=int_array(tokens[1:]),
        arrays={
            "weights": float_array(sampled.astype(np.float32)),
            "advantages": float_array(np.ones(len(sampled))),
            "sampler_logprobs": float_array(logprobs),
        },
        experts=out.experts,
    )


def sampled_data(lm: LanguageModel) -> list[Datum]:
    prompts = [PROMPT, PROMPT, PROMPT[:20]]  # of which training shares the beginning
    engine = EmbeddedEngine(lm, max_num_seqs=8)
    try:
        return [datum(p, out) for p, out in zip(prompts, asyncio.run(sample(engine, prompts)), strict=True)]
    finally:
        engine.close()


@pytest.mark.parametrize("recompute", [False, True])
def test_training_replays_the_experts_of_the_sampler_and_trains_the_router(recompute: bool) -> None:
    lm = mixture()
    data = sampled_data(lm)
    if recompute:
        from headrace.model.load import recompute_layers

        recompute_layers(lm.model)
    backend = TorchBackend(lm, micro_batch_tokens=4096)
    try:
        same = backend.forward(data, PPO).result()
        assert metric_values(same.metrics)["routing/differs"] == 0.0
        for each, logprobs in zip(data, same.logprobs, strict=True):
            trained = each.arrays["weights"] != 0
            assert np.abs(logprobs - each.arrays["sampler_logprobs"])[trained].max() < 1e-5
        with torch.no_grad():
            for router in routers_of(lm.model):
                router.weight.copy_(router.weight.flip(0))  # the router now prefers other experts
        used: list[torch.Tensor] = []
        for layer in lm.model.base_model.layers:
            layer.mlp.experts.register_forward_pre_hook(lambda _module, inputs: used.append(inputs[1]))
        out = backend.forward_backward(data, PPO).result()
        assert metric_values(out.metrics)["routing/differs"] > 0.5
        gradients = backend.gradients().result()
        assert all(gradients[f"model.layers.{i}.mlp.gate.weight"].abs().max() > 0 for i in range(2))
    finally:
        backend.close()
    recorded = {tuple(map(tuple, rows.tolist())) for each in data for rows in each.experts}  # type: ignore[union-attr]
    laid_out = torch.stack(used[:2], dim=1)
    assert {tuple(map(tuple, rows)) for rows in laid_out.tolist()} == recorded


@pytest.mark.parametrize("threads", [1, 2])
def test_a_shared_token_is_sent_to_the_experts_of_its_first_sequence_however_many_threads_torch_has(
    threads: int,
) -> None:
    """With two threads, torch writes repeated places of an index in no fixed order."""
    num_tokens, sequences = 20_000, 6
    lm = mixture()
    runner = MicroBatchRunner(
        lm, make_optimizer(lm), chunk_tokens=64, score_everything=False, scalar_head=None, value_head=None
    )
    routers, choices = routing_shape(lm.model) or (0, 0)
    inputs = int_array([5] * num_tokens)
    data = [
        Datum(
            inputs=inputs,
            targets=inputs,
            arrays={},
            experts=np.full((num_tokens, routers, choices), index, dtype=np.int16),
        )
        for index in range(sequences)
    ]
    layout = build_prefix_tree([inputs] * sequences, shortest=8)
    assert len(layout.tokens) == num_tokens + sequences - 1, "all but the last token is shared"
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        replayed = [runner._recorded_experts(data, layout) for _ in range(3)]
    finally:
        torch.set_num_threads(before)
    last = list(range(1, sequences))
    for each in replayed:
        assert each is not None
        assert not each[:num_tokens].any()
        assert each[num_tokens:, 0, 0].tolist() == last


def test_without_a_record_the_router_chooses_anew() -> None:
    lm = mixture()
    data = [replace(each, experts=None) for each in sampled_data(lm)]
    backend = TorchBackend(lm)
    try:
        metrics = metric_values(backend.forward(data, PPO).result().metrics)
    finally:
        backend.close()
    assert "routing/differs" not in metrics
    assert 0.0 < metrics["routing/entropy"] <= np.log(5)
    assert metrics["routing/balance"] > 0.5
    assert 0.0 <= metrics["routing/idle_experts"] < 1.0
