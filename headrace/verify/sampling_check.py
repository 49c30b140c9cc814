"""Proofs about what is sampled: the trainer gives the sampler's tokens the sampler's own log-probs, and a request does
not depend on what else is in the batch."""

import asyncio
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from headrace.algo.datum import shift
from headrace.algo.statistics import k3
from headrace.envs import ENVIRONMENTS
from headrace.types import Datum, SampleRequest, SamplingParams, int_array
from headrace.verify.property_result import Figure, PropertyResult
from headrace.verify.reference import reference_logprobs, reference_model
from headrace.verify.subject import WORLD, Played, VerifySubject, tasks

Floats = npt.NDArray[np.float64]
MICRO_BATCH_TOKENS = 2048
REQUESTS, TOKENS = 16, 24
TEMPERATURES = (1.0, 0.7)
FLOAT64_EVERY = 4  # requests; the reference is slow
FLOAT64_FACTOR = 2.0


def prove_first_step(parts: VerifySubject, played: Played) -> PropertyResult:
    """Rollouts that are trained on before any update: every ratio is 1 and the KL 0, by the loss's own account too."""
    trainer = parts.make_trainer(parts.lm, micro_batch_tokens=MICRO_BATCH_TOKENS)
    try:
        out = trainer.forward(played.data, parts.ppo).result()
    finally:
        trainer.close()
    sampler, policy = (
        _trained(played.data, [datum.arrays["sampler_logprobs"] for datum in played.data]),
        _trained(played.data, out.logprobs),
    )
    reported = abs(out.metrics["loss/ratio_mean"].value() - 1)
    return PropertyResult(
        name="the first step is on policy",
        figures=(
            Figure(label="largest |ratio - 1|", value=_largest(np.expm1(policy - sampler)), bound=parts.bounds.ratio),
            Figure(label="|mean ratio - 1|, as the loss reports it", value=reported, bound=parts.bounds.ratio),
            Figure(label="KL(sampler || trainer), k3", value=float(k3(sampler, policy).mean()), bound=parts.bounds.kl),
        ),
        detail=f"{len(sampler)} sampled tokens of {len(played.data)} sequences of several turns",
    )


def prove_sampler(parts: VerifySubject, played: Played) -> PropertyResult:
    """Log-probs recorded at sampling against the trainer's, and both against float64."""
    data = asyncio.run(_sampled(parts))
    trainer = parts.make_trainer(parts.lm, micro_batch_tokens=MICRO_BATCH_TOKENS)
    try:
        logprobs = trainer.forward(data, parts.cross_entropy).result().logprobs
    finally:
        trainer.close()
    few = data[::FLOAT64_EVERY]
    model = reference_model(parts.lm)
    with torch.inference_mode():
        exact = _trained(few, [reference_logprobs(model, datum).cpu().numpy() for datum in few])
    recorded = [datum.arrays["sampler_logprobs"] for datum in data]
    apart = np.abs(_trained(data, recorded) - _trained(data, logprobs))
    sampler_error = _mean(_trained(few, recorded[::FLOAT64_EVERY]) - exact)
    trainer_error = _mean(_trained(few, logprobs[::FLOAT64_EVERY]) - exact)
    allowed = FLOAT64_FACTOR * max(trainer_error, float(np.finfo(np.float32).eps))
    return PropertyResult(
        name="sampler and trainer agree",
        figures=(
            Figure(label="log-probs apart, mean", value=_mean(apart), bound=parts.bounds.logprob_mean),
            Figure(label="log-probs apart, largest", value=_largest(apart), bound=parts.bounds.logprob_max),
            Figure(label="sampler to float64, mean (2 x trainer's)", value=sampler_error, bound=allowed),
        ),
        detail=f"{len(apart)} tokens at temperatures {', '.join(map(str, TEMPERATURES))}",
    )


def prove_bits(parts: VerifySubject, played: Played) -> PropertyResult:
    """A request alone, in a crowd, and preempted."""
    result = parts.check_bits(parts.lm)
    bound = 0.0 if parts.exact else math.inf
    figure = Figure(label="requests whose bits depend on the batch", value=float(result.changed), bound=bound)
    return PropertyResult(name="a crowd changes no bit", figures=(figure,), detail=result.detail)


async def _sampled(parts: VerifySubject) -> list[Datum]:
    """Sequences the engine has sampled, with what it recorded; weight 1 on the sampled tokens."""
    engine = parts.make_engine(parts.lm)
    try:
        requests = [_request(parts, index) for index in range(REQUESTS)]
        done = await asyncio.gather(*(engine.sample(request) for request in requests))
    finally:
        engine.close()
    data = []
    for request, completion in zip(requests, done, strict=True):
        before = np.zeros(len(request.prompt), dtype=np.float32)
        arrays = {
            "weights": np.concatenate([before, np.ones(len(completion.tokens), dtype=np.float32)]),
            "sampler_logprobs": np.concatenate([before, completion.sampler_logprobs]),
        }
        tokens = int_array(np.concatenate([request.prompt, completion.tokens]))
        data.append(shift(tokens, arrays, temperature=request.params.temperature))
    return data


def _request(parts: VerifySubject, index: int) -> SampleRequest:
    start = tasks()[index % len(tasks())]
    messages = ENVIRONMENTS[WORLD].make_env().reset(start, seed=0).messages
    return SampleRequest(
        prompt=parts.renderer.prompt([*start.messages, *messages]),
        params=SamplingParams(
            max_tokens=TOKENS,
            temperature=TEMPERATURES[index // FLOAT64_EVERY % len(TEMPERATURES)],
            stop_tokens=(),
            seed=index,
        ),
    )


def _trained(data: Sequence[Datum], arrays: Sequence[npt.NDArray[np.floating]]) -> Floats:
    """The entries at trained positions, end to end, in float64."""
    kept = [array[datum.arrays["weights"] != 0] for datum, array in zip(data, arrays, strict=True)]
    return np.concatenate(kept).astype(np.float64)


def _mean(values: Floats) -> float:
    return float(np.abs(values).mean())


def _largest(values: Floats) -> float:
    return float(np.abs(values).max())
