"""A real vLLM that sleeps while a trainer trains. On CPU its sleep is a pause; routes and answers are the real ones."""

import asyncio

import pytest

from headrace.infer.servers.colocation import VllmMemory
from headrace.infer.servers.launch import LaunchedServer
from headrace.types import SampleRequest, SamplingParams, int_array
from headrace.wiring.runtime.colocated import GpuTurns
from support.real_vllm import trained

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.mark.parametrize("keep_weights", [True, False])
async def test_a_server_sleeps_wakes_and_proves_new_weights(servers: list[LaunchedServer], keep_weights: bool) -> None:
    request = SampleRequest(prompt=int_array([3, 7, 4]), params=SamplingParams(max_tokens=12, stop_tokens=()))
    async with trained(servers[:1]) as run:
        memory = VllmMemory(servers[0].url)
        turns = GpuTurns(run.backend, run.sampler, [memory], keep_weights=keep_weights)
        await turns.to_sampling()
        for version in (1, 2):
            await turns.to_training()
            assert await memory._is_sleeping()
            await run.train()
            await turns.to_sampling()
            assert not await memory._is_sleeping()
            await run.publish(version)
            async with asyncio.timeout(120):
                completion = await run.sampler.sample(request)
            assert completion.versions.tolist() == [version] * 12
        assert run.sampler.taken_out == 0
