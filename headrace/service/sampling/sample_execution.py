"""Run a sampling job on an open sampler of the host: draw its sequences, score its prompt, rank tokens."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from headrace.errors import RequestError
from headrace.service.host.model_host import ModelHost, TopLogprobs, TopLogprobsHost
from headrace.service.sampling.sample_job import SampleJob
from headrace.service.wire.messages import WireSamples
from headrace.types import Completion, FloatArray, IntArray, SampleRequest, float_array, int_array


async def draw_sequences(host: ModelHost, sampler: str, job: SampleJob, *, tempered: bool) -> WireSamples:
    """Sample the job's sequences and score its prompt; cancelling it stops the decoding. Raises SamplerError."""
    try:
        async with asyncio.TaskGroup() as group:
            drawing = [
                group.create_task(
                    host.sample(sampler, SampleRequest(prompt=job.prompt, params=params, images=job.images))
                )
                for params in job.params
            ]
            scoring = group.create_task(_prompt_logprobs(host, sampler, job))
    except ExceptionGroup as exc:  # one of them is enough to know why
        raise exc.exceptions[0] from exc.exceptions[0].__cause__
    completions = tuple(task.result() for task in drawing)
    return WireSamples(completions=completions, tempered=tempered, prompt_logprobs=scoring.result())


async def add_rankings(host: ModelHost, sampler: str, job: SampleJob, sampled: WireSamples) -> WireSamples:
    """Add the likeliest tokens and the log-probs of target tokens, where the job asks for them.

    Raises SamplerError, and RequestError when the host ranks no tokens.
    """
    return replace(
        sampled,
        tops=await _sample_tops(host, sampler, job, sampled.completions),
        prompt_tops=await _prompt_tops(host, sampler, job),
        prompt_targets=await _target_logprobs(host, sampler, job),
        target_rows=job.target_rows,
    )


def top_logprobs_host(host: ModelHost) -> TopLogprobsHost:
    """Return the host as one that ranks tokens; raises RequestError when it cannot."""
    if not isinstance(host, TopLogprobsHost):
        raise RequestError("this server cannot rank other tokens than those sampled: ask for prompt_logprobs only")
    return host


async def _prompt_logprobs(host: ModelHost, sampler: str, job: SampleJob) -> FloatArray | None:
    if not job.prompt_logprobs:
        return None
    (logprobs,) = await host.score(sampler, [job.prompt])
    if job.last_n is None:
        return logprobs
    last = logprobs.copy()
    last[: len(last) - job.last_n] = np.nan
    return float_array(last)


async def _sample_tops(
    host: ModelHost, sampler: str, job: SampleJob, completions: Sequence[Completion]
) -> tuple[TopLogprobs, ...] | None:
    if not job.num_sample_tops:
        return None
    tops, start = [], len(job.prompt)
    for completion in completions:
        sequence: IntArray = int_array(np.concatenate([job.prompt, completion.tokens]))
        top = await top_logprobs_host(host).top_logprobs(sampler, sequence, job.num_sample_tops)
        tops.append(TopLogprobs(tokens=top.tokens[start:], logprobs=top.logprobs[start:]))
    return tuple(tops)


async def _prompt_tops(host: ModelHost, sampler: str, job: SampleJob) -> TopLogprobs | None:
    if not job.num_prompt_tops:
        return None
    return await top_logprobs_host(host).top_logprobs(sampler, job.prompt, job.num_prompt_tops)


async def _target_logprobs(host: ModelHost, sampler: str, job: SampleJob) -> FloatArray | None:
    if job.targets is None:
        return None
    return await top_logprobs_host(host).target_logprobs(sampler, job.prompt, job.targets)
