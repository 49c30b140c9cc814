"""Servers that are lent to other processes: what those sample is counted, interrupted and never of two versions."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from headrace.errors import SamplerError
from headrace.infer.servers.api import ServerLostError
from headrace.infer.servers.server_sampler import ServerSampler
from headrace.infer.servers.vllm import VllmApi
from headrace.types import Completion, SampleRequest, SamplingParams, StopReason, int_array
from support.server_samplers import Fleet, open_fleet


def request_of(max_tokens: int, after: Completion | None = None) -> SampleRequest:
    params = SamplingParams(max_tokens=max_tokens, stop_tokens=(), seed=0)
    return SampleRequest(prompt=int_array([3, 7, 4]), params=params, continue_from=after)


class Borrower:
    """Samples at lent servers with connections of its own, as a rollout worker does."""

    def __init__(self, request: SampleRequest) -> None:
        self.request = request
        self.sampled: Completion | None = None
        self.server: ServerSampler | None = None
        self.urls: list[str] = []

    @property
    def num_arrived(self) -> int:
        return 0 if self.server is None else sum(len(stream.tokens) for stream in self.server.open_streams)

    async def __call__(self, access: Any, version: int) -> str:
        url, adapter, held, model = access
        assert held == version
        self.urls.append(url)
        server = self.server = ServerSampler(VllmApi(url), model, sync=None, prover=None)
        try:
            self.sampled = await server.sample_borrowed(self.request, adapter=adapter, version=version)
        except ServerLostError as exc:
            self.sampled = exc.partial
            return str(exc)
        finally:
            await server.close()
        return ""


async def publish(fleet: Fleet, version: int) -> None:
    await fleet.sampler.pause(interrupt=True)
    await fleet.sampler.load(fleet.handle, version)
    await fleet.sampler.resume()


async def until(reached: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not reached():  # noqa: ASYNC110
            await asyncio.sleep(0)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "adapter"])
async def test_a_publish_interrupts_what_a_borrower_samples_and_it_goes_on_under_the_new_weights(lora: bool) -> None:
    async with open_fleet(lora=lora, lent=True) as fleet:
        first = Borrower(request_of(200))
        lending = asyncio.create_task(fleet.sampler.lend("episode", first))
        await until(lambda: first.num_arrived)
        with pytest.raises(SamplerError, match="while sequences are being sampled"):
            await fleet.sampler.load(fleet.handle, 1)
        fleet.trainer.update_adapter() if lora else fleet.trainer.update()
        await publish(fleet, 1)
        assert await lending
        partial = first.sampled
        assert partial is not None
        assert partial.stop is StopReason.INTERRUPTED
        assert 0 < len(partial.tokens) < 200
        assert set(partial.versions.tolist()) == {0}
        second = Borrower(request_of(200, after=partial))
        assert await fleet.sampler.lend("episode", second)
        whole = second.sampled
        assert whole is not None
        assert whole.tokens[: len(partial.tokens)].tolist() == partial.tokens.tolist()
        assert set(whole.versions[len(partial.tokens) :].tolist()) == {1}
        [wanted] = await fleet.trainer.score([int_array([3, 7, 4, *whole.tokens.tolist()])], 1.0)
        new = slice(len(partial.tokens), None)
        np.testing.assert_allclose(whole.sampler_logprobs[new], wanted[2:][new], atol=1e-4)


async def test_a_server_that_a_borrower_loses_is_taken_out_and_the_next_lease_is_at_another() -> None:
    async with open_fleet(2, lent=True) as fleet:
        fleet.servers[0].faults.dies_after = 5
        borrower = Borrower(request_of(30))
        assert not await fleet.sampler.lend("episode", borrower)
        assert borrower.sampled is not None
        assert len(borrower.sampled.tokens) == 5, "what had arrived is kept"
        again = Borrower(request_of(30, after=borrower.sampled))
        assert await fleet.sampler.lend("episode", again)
        assert again.urls != borrower.urls
        assert fleet.sampler.taken_out == 1


async def test_a_server_that_only_the_borrower_does_not_reach_stays() -> None:
    async def unreached(access: object, version: int) -> str:
        return "no route to it"

    async with open_fleet(lent=True) as fleet:
        assert not await fleet.sampler.lend("episode", unreached)
        assert fleet.sampler.taken_out == 0


async def test_a_borrower_that_does_not_come_back_is_told_and_weights_are_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headrace.infer.servers.server_sampler.ABORT_ROUNDS", 2)
    monkeypatch.setattr("headrace.infer.servers.server_sampler.ABORT_ROUND_S", 0.05)
    told = asyncio.Event()

    async def stays(access: object, version: int) -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            told.set()
            raise
        return ""

    async with open_fleet(lent=True) as fleet:
        lending = asyncio.create_task(fleet.sampler.lend("episode", stays))
        await until(lambda: fleet.sampler.replicas[0].sampler.load_now)
        fleet.trainer.update()
        await publish(fleet, 1)
        assert await lending
        assert told.is_set()
        assert fleet.sampler.taken_out == 0


async def test_turns_of_an_episode_are_lent_the_same_server_and_others_spread() -> None:
    async with open_fleet(2, lent=True) as fleet:
        borrowers = [Borrower(request_of(5)) for _ in range(8)]

        def lend(number: int) -> Coroutine[Any, Any, bool]:
            return fleet.sampler.lend(number % 4, borrowers[number])

        assert all(await asyncio.gather(*(lend(number) for number in range(4))))
        assert all([await lend(number) for number in range(4, 8)])
        assert [one.urls for one in borrowers[:4]] == [one.urls for one in borrowers[4:]]
        assert len({one.urls[0] for one in borrowers}) == 2


async def test_frozen_requests_are_of_the_connection_that_made_them_so_nothing_is_lent() -> None:
    async with open_fleet(hold=True, lent=True) as fleet:
        assert not fleet.sampler.lends
    async with open_fleet() as fleet:
        assert not fleet.sampler.lends
    async with open_fleet(lent=True) as fleet:
        assert fleet.sampler.lends
