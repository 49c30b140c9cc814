"""The actor of an embedded engine, as an object of this process."""

import asyncio
from functools import partial
from pathlib import Path

import pytest

from headrace.cluster.engine_access import interrupted
from headrace.cluster.placed_engine import EngineActor
from headrace.errors import SamplerError
from headrace.types import Completion, SampleRequest, SamplingParams, StopReason, int_array
from support.engine_replicas import tiny_engine
from support.implementations import tiny_model

pytest.importorskip("ray")
BUILD = partial(tiny_engine, tiny_model, hold=False)


def request_of(max_tokens: int, after: Completion | None = None) -> SampleRequest:
    params = SamplingParams(max_tokens=max_tokens, stop_tokens=(), seed=4)
    return SampleRequest(prompt=int_array([3, 7, 4]), params=params, continue_from=after)


async def test_a_pause_returns_what_workers_sample_and_what_comes_later(tmp_path: Path) -> None:
    actor = EngineActor()
    assert await actor.open(BUILD, tmp_path, 1) is None
    whole = await actor.run("sample", (request_of(200),), {})
    lent = asyncio.ensure_future(actor.sample_lent(request_of(200)))
    await asyncio.sleep(0.02)
    await actor.run("pause", (), {"interrupt": True})
    partial_answer = await lent
    assert isinstance(partial_answer, Completion)
    assert partial_answer.stop is StopReason.INTERRUPTED
    late = await actor.sample_lent(request_of(200, after=partial_answer))
    assert isinstance(late, Completion)
    assert late.stop is StopReason.INTERRUPTED, "a call that comes while paused is sent back at once"
    assert late.tokens.tolist() == partial_answer.tokens.tolist()
    await actor.run("resume", (), {})
    resumed = await actor.sample_lent(request_of(200, after=late if len(late.tokens) else None))
    assert isinstance(resumed, Completion)
    assert resumed.tokens.tolist() == whole.tokens.tolist()
    assert resumed.sampler_logprobs.tolist() == whole.sampler_logprobs.tolist()
    await actor.close()


async def test_errors_are_values_with_one_sentence(tmp_path: Path) -> None:
    error = await EngineActor().open(BUILD, tmp_path / "weights", 1)
    assert isinstance(error, SamplerError)
    assert "write 'engine.sync_folder', a folder that all nodes share" in str(error)
    actor = EngineActor()
    unbuilt = await actor.sample_lent(request_of(2))
    assert isinstance(unbuilt, SamplerError)
    assert await actor.open(BUILD, tmp_path, 1) is None
    refused = await actor.run("sample", (SampleRequest(prompt=int_array([]), params=request_of(1).params),), {})
    assert isinstance(refused, SamplerError)
    await actor.close()


def test_nothing_sampled_is_an_interrupted_completion() -> None:
    assert len(interrupted(request_of(2)).tokens) == 0
    assert interrupted(request_of(2)).stop is StopReason.INTERRUPTED
