"""A sequence that was interrupted is continued, and every token keeps the version it was sampled under."""

import asyncio
from dataclasses import replace

import pytest

from headrace.errors import SamplerError
from headrace.rollout.generate import sample_to_end
from headrace.testing import FakeSampler
from headrace.types import Completion, SampleRequest, SamplingParams, Shared, Stop, int_array

REQUEST = SampleRequest(prompt=int_array([1, 2]), params=SamplingParams(max_tokens=6))


async def test_two_updates_inside_one_sequence() -> None:
    ticks: asyncio.Queue[None] = asyncio.Queue()
    sampler = FakeSampler(tick=ticks.get)
    sampling = asyncio.create_task(sample_to_end(sampler, REQUEST))
    for version, tokens in ((1, 2), (2, 3)):  # 2 tokens under version 0, 3 under version 1, the last under version 2
        for _ in range(tokens - 1):
            ticks.put_nowait(None)
        for _ in range(10):
            await asyncio.sleep(0)
        pausing = asyncio.create_task(sampler.pause(interrupt=True))
        await asyncio.sleep(0)
        ticks.put_nowait(None)
        await pausing
        await sampler.load(Shared(fingerprint=f"v{version}"), version)
        await sampler.resume()
    ticks.put_nowait(None)
    completion = await asyncio.wait_for(sampling, 5)
    # the fake's token is version * 1000 + position
    assert completion.tokens.tolist() == [0, 1, 1002, 1003, 1004, 2005]
    assert completion.versions.tolist() == [0, 0, 1, 1, 1, 2]
    assert completion.stop is Stop.LENGTH


async def test_endless_interruption_is_an_error() -> None:
    class Jumpy(FakeSampler):
        async def sample(self, request: SampleRequest) -> Completion:
            return replace(await super().sample(request), stop=Stop.INTERRUPTED)

    with pytest.raises(SamplerError, match="interrupted 3 times and is at 6 tokens"):
        await sample_to_end(Jumpy(), REQUEST, max_interrupts=3)
