"""The contract of samplers, on a real vLLM. Clauses that it cannot keep are skipped by its flags."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from contracts.test_sampler import *  # noqa: F403

from headrace.infer.servers.launch import LaunchedServer
from headrace.infer.servers.replicas import ReplicaSampler
from headrace.model.load import fingerprint
from headrace.protocols import Sampler
from headrace.types import SharedWeights, WeightsHandle, int_array
from support.implementations import SamplerCase
from support.real_vllm import CONTEXT, LONG, servable_model, trained
from support.server_samplers import sampling

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def case(servers: list[LaunchedServer]) -> SamplerCase:
    @asynccontextmanager
    async def open_sampler() -> AsyncIterator[Sampler]:
        async with trained(servers[:1]) as trainer:
            yield trainer.sampler

    def handle(sampler: Sampler) -> WeightsHandle:
        return SharedWeights(fingerprint=fingerprint(servable_model().model.named_parameters()))

    async def begun(sampler: Sampler, calls: int) -> None:
        assert isinstance(sampler, ReplicaSampler)
        await sampling(sampler, calls=calls)

    return SamplerCase(
        name="vllm",
        open=open_sampler,
        oversized=int_array([3] * (CONTEXT + 1)),
        handle=handle,
        long=LONG,
        begun=begun,
    )
