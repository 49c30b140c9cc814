"""Check sampling: the trainer gives sampled tokens the sampler's log-probs, and a request does not depend on what else
is in the batch."""

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
from headrace.verify.subject import ENVIRONMENT, Played, VerifySubject, tasks

Floats = npt.NDArray[np.float64]
MICRO_BATCH_TOKENS = 2048
REQUESTS, TOKENS = 16, 24
TEMPERATURES = (1.0, 0.7)
FLOAT64_EVERY = 4  # every fourth request, because the reference is slow
FLOAT64_FACTOR = 2.0


def check_first_step(parts: VerifySubject, played: Played) -> PropertyResult:
    """Check that before any update every ratio is 1 and the KL 0, as the loss reports them too."""
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


def check_sampler(parts: VerifySubject, played: Played) -> PropertyResult:
    """Compare the log-probs recorded at sampling with the trainer's, and both with float64."""
    data = asyncio.run(_sampled(parts))
    trainer = parts.make_trainer(parts.lm, micro_batch_tokens=MICRO_BATCH_TOKENS)
    try:
        logprobs = trainer.forward(data, parts.cross_entropy).result().logprobs
    finally:
        trainer.close()
    subset = data[::FLOAT64_EVERY]
    model = reference_model(parts.lm)
    with torch.inference_mode():
        exact = _trained(subset, [reference_logprobs(model, datum).cpu().numpy() for datum in subset])
    recorded = [datum.arrays["sampler_logprobs"] for datum in data]
    difference = np.abs(_trained(data, recorded) - _trained(data, logprobs))
    sampler_error = _mean(_trained(subset, recorded[::FLOAT64_EVERY]) - exact)
    trainer_error = _mean(_trained(subset, logprobs[::FLOAT64_EVERY]) - exact)
    allowed = FLOAT64_FACTOR * max(trainer_error, float(np.finfo(np.float32).eps))
    return PropertyResult(
        name="sampler and trainer agree",
        figures=(
            Figure(label="log-probs apart, mean", value=_mean(difference), bound=parts.bounds.logprob_mean),
            Figure(label="log-probs apart, largest", value=_largest(difference), bound=parts.bounds.logprob_max),
            Figure(label="sampler to float64, mean (2 x trainer's)", value=sampler_error, bound=allowed),
        ),
        detail=f"{len(difference)} tokens at temperatures {', '.join(map(str, TEMPERATURES))}; the log-probs are apart "
        f"most at {_place(data, difference)}",
    )


def check_bits(parts: VerifySubject, played: Played) -> PropertyResult:
    """Compare the bits of a request sampled alone, among others, and preempted."""
    result = parts.check_bits(parts.lm)
    bound = 0.0 if parts.exact else math.inf
    figure = Figure(label="requests whose bits depend on the batch", value=float(result.changed), bound=bound)
    return PropertyResult(name="a crowd changes no bit", figures=(figure,), detail=result.detail)


def _place(data: Sequence[Datum], difference_N: Floats) -> str:
    """Say which sampled token the largest difference is at."""
    worst = int(np.argmax(np.nan_to_num(difference_N, nan=np.inf)))
    for index, datum in enumerate(data):
        trained = np.flatnonzero(datum.arrays["weights"])
        if worst < len(trained):
            return (
                f"position {int(trained[worst]) + 1} of request {index}, whose prompt has {int(trained[0]) + 1} tokens"
            )
        worst -= len(trained)
    raise AssertionError("differences are of the data's tokens")


async def _sampled(parts: VerifySubject) -> list[Datum]:
    """Sample sequences, with the recorded log-probs and weight 1 on the sampled tokens."""
    engine = parts.make_engine(parts.lm)
    try:
        requests = [_request(parts, index) for index in range(REQUESTS)]
        completions = await asyncio.gather(*(engine.sample(request) for request in requests))
    finally:
        engine.close()
    data = []
    for request, completion in zip(requests, completions, strict=True):
        prompt_zeros = np.zeros(len(request.prompt), dtype=np.float32)
        arrays = {
            "weights": np.concatenate([prompt_zeros, np.ones(len(completion.tokens), dtype=np.float32)]),
            "sampler_logprobs": np.concatenate([prompt_zeros, completion.sampler_logprobs]),
        }
        tokens = int_array(np.concatenate([request.prompt, completion.tokens]))
        data.append(shift(tokens, arrays, temperature=request.params.temperature))
    return data


def _request(parts: VerifySubject, index: int) -> SampleRequest:
    task = tasks()[index % len(tasks())]
    messages = ENVIRONMENTS[ENVIRONMENT].make_env().reset(task, seed=0).messages
    return SampleRequest(
        prompt=parts.renderer.prompt([*task.messages, *messages]),
        params=SamplingParams(
            max_tokens=TOKENS,
            temperature=TEMPERATURES[index // FLOAT64_EVERY % len(TEMPERATURES)],
            stop_tokens=(),
            seed=index,
        ),
    )


def _trained(data: Sequence[Datum], arrays: Sequence[npt.NDArray[np.floating]]) -> Floats:
    """Concatenate the entries at trained positions, in float64."""
    entries = [array[datum.arrays["weights"] != 0] for datum, array in zip(data, arrays, strict=True)]
    return np.concatenate(entries).astype(np.float64)


def _mean(values: Floats) -> float:
    return float(np.abs(values).mean())


def _largest(values: Floats) -> float:
    return float(np.abs(values).max())
