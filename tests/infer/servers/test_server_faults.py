"""Failures that were seen at real servers, shown by a fake: each must be found and told, and got over if it can be."""

import asyncio
import logging
from dataclasses import replace

import numpy as np
import pytest

from headrace.errors import SamplerError
from headrace.types import Completion, SampleRequest, SamplingParams, StopReason, int_array
from support.fake_vllm import Faults
from support.server_samplers import QUICK, Fleet, open_fleet, sampling


def request_of(max_tokens: int, *, seed: int = 0, first: int = 3, after: Completion | None = None) -> SampleRequest:
    params = SamplingParams(max_tokens=max_tokens, stop_tokens=(), seed=seed)
    return SampleRequest(prompt=int_array([first, 7, 4]), params=params, continue_from=after)


async def publish(fleet: Fleet, version: int) -> None:
    await fleet.sampler.pause(interrupt=True)
    await fleet.sampler.load(fleet.handle, version)
    await fleet.sampler.resume()


async def assert_sampled_by_trainer(fleet: Fleet, completion: Completion, first: int = 3) -> None:
    sequence = int_array([first, 7, 4, *completion.tokens.tolist()])
    [wanted] = await fleet.trainer.score([sequence], 1.0)
    np.testing.assert_allclose(completion.sampler_logprobs, wanted[2:], atol=1e-4)


async def test_samples_follow_the_weights_that_were_published() -> None:
    async with open_fleet() as fleet:
        await assert_sampled_by_trainer(fleet, await fleet.sampler.sample(request_of(20)))
        fleet.trainer.update()
        await publish(fleet, 1)
        completion = await fleet.sampler.sample(request_of(20))
        await assert_sampled_by_trainer(fleet, completion)
        assert completion.versions.tolist() == [1] * 20
        for cache in ("prefix", "mm", "encoder"):
            assert fleet.servers[0].log.count(f"/reset_{cache}_cache") == 2


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("keeps_head", "does not hold version 1"),
        ("keeps_prefixes", "cached prefixes of earlier weights"),
    ],
)
async def test_a_load_that_only_seems_to_succeed_ends_the_run(fault: str, words: str) -> None:
    async with open_fleet() as fleet:
        setattr(fleet.servers[0].faults, fault, True)
        fleet.trainer.update()
        with pytest.raises(SamplerError, match=f"no inference server is left.*{words}"):
            await publish(fleet, 1)


async def test_a_server_that_samples_the_base_under_an_adapter_is_found() -> None:
    async with open_fleet(lora=True) as fleet:
        fleet.trainer.update_adapter()
        await publish(fleet, 1)
        await assert_sampled_by_trainer(fleet, await fleet.sampler.sample(request_of(20)))
        assert list(fleet.servers[0].adapters) == ["headrace-1"]
        fleet.servers[0].faults.ignores_adapters = True
        fleet.trainer.update_adapter()
        with pytest.raises(SamplerError, match=r"no inference server is left.*adapter"):
            await publish(fleet, 2)


async def test_a_server_with_another_base_under_the_adapters_is_brought_to_ours() -> None:
    async with open_fleet(lora=True) as fleet:
        np.testing.assert_array_equal(fleet.servers[0].embed, fleet.trainer.embed)


async def test_a_server_that_keeps_its_own_weights_at_the_start_is_refused() -> None:
    async with open_fleet(start=False) as fleet:
        fleet.servers[0].faults.keeps_head = True
        with pytest.raises(SamplerError, match="at the start: it does not hold the weights it was given"):
            await fleet.sampler.start(fleet.handle)


async def test_a_server_that_computes_prompts_in_parts_on_a_cpu_is_refused() -> None:
    async with open_fleet(start=False) as fleet:
        fleet.servers[0].faults.splits_prompts = True
        with pytest.raises(SamplerError, match="start it with --no-enable-chunked-prefill and --max-num-batched"):
            await fleet.sampler.start(fleet.handle)
        assert fleet.servers[0].requests == [], "nothing was sampled, which would have ended it"


async def test_raw_logprobs_are_refused_at_another_temperature() -> None:
    async with open_fleet(start=False, temperature=0.5) as fleet:
        fleet.servers[0].faults.raw_logprobs = True
        with pytest.raises(SamplerError, match="--logprobs-mode processed_logprobs"):
            await fleet.sampler.start(fleet.handle)
    async with open_fleet(temperature=0.5) as fleet:
        params = SamplingParams(max_tokens=8, stop_tokens=(), temperature=0.5)
        completion = await fleet.sampler.sample(SampleRequest(prompt=int_array([3, 7, 4]), params=params))
        sequence = int_array([3, 7, 4, *completion.tokens.tolist()])
        for temperature, found in ((0.5, completion.sampler_logprobs), (1.0, completion.raw_logprobs)):
            [wanted] = await fleet.trainer.score([sequence], temperature)
            np.testing.assert_allclose(found, wanted[2:], atol=1e-4)


async def test_an_abort_that_aborts_nothing_still_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.infer.servers.server_sampler.ABORT_ROUNDS", 2)
    monkeypatch.setattr("headrace.infer.servers.server_sampler.ABORT_ROUND_S", 0.05)
    async with open_fleet() as fleet:
        fleet.servers[0].faults.aborts_nothing = True
        task = asyncio.create_task(fleet.sampler.sample(request_of(200)))
        await sampling(fleet.sampler)
        await fleet.sampler.pause(interrupt=True)
        partial = await task
        assert partial.stop is StopReason.INTERRUPTED
        assert 0 < len(partial.tokens) < 200  # what had arrived is kept
        await fleet.sampler.resume()
        whole = await fleet.sampler.sample(request_of(200, after=partial))
        assert whole.tokens[: len(partial.tokens)].tolist() == partial.tokens.tolist()
        assert len(whole.tokens) == 200


async def test_a_request_goes_on_at_another_server_when_its_own_dies(caplog: pytest.LogCaptureFixture) -> None:
    async with open_fleet(2) as fleet:
        for server in fleet.servers:
            server.requests.clear()
        fleet.servers[0].faults.dies_after = 5
        with caplog.at_level(logging.WARNING):
            whole = await fleet.sampler.sample(request_of(30))
        assert len(whole.tokens) == 30
        await assert_sampled_by_trainer(fleet, whole)
        [moved] = [body for body in fleet.servers[1].requests if body["stream"]]
        assert moved["token_ids"] == [3, 7, 4, *whole.tokens[:5].tolist()]  # with what was sampled so far
        assert fleet.sampler.retried == 1
        assert "is taken out, 1 are left" in caplog.text


async def test_a_server_that_comes_back_gets_the_current_version_before_it_is_used() -> None:
    async with open_fleet(2) as fleet:
        fleet.servers[0].faults.dead = True
        fleet.trainer.update()
        await publish(fleet, 1)
        assert len(fleet.sampler.usable) == 1
        stale = fleet.servers[0].embed
        fleet.servers[0].faults.dead = False
        async with asyncio.timeout(20):
            while len(fleet.sampler.usable) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert not np.array_equal(fleet.servers[0].embed, stale)
        completions = await asyncio.gather(*[fleet.sampler.sample(request_of(10, seed=seed)) for seed in range(6)])
        for completion in completions:
            assert completion.versions.tolist() == [1] * 10
            await assert_sampled_by_trainer(fleet, completion)


async def test_a_server_that_answers_and_samples_nothing_is_taken_out_and_repaired(
    caplog: pytest.LogCaptureFixture,
) -> None:
    limits = replace(QUICK, health_every_s=0.05, health_s=0.5)
    async with open_fleet(2, limits=limits) as fleet, asyncio.timeout(60):
        await fleet.sampler.sample(request_of(2))
        fleet.servers[0].resumed.clear()  # it is paused, and nobody has asked for that
        while not fleet.sampler.taken_out or len(fleet.sampler.usable) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert fleet.servers[0].resumed.is_set()
        assert fleet.sampler.taken_out == 1
    assert "it failed, or did not sample a token in 0.5 s" in caplog.text


async def test_the_last_server_that_dies_ends_sampling_with_a_sentence() -> None:
    async with open_fleet() as fleet:
        fleet.servers[0].faults.dies_after = 2
        with pytest.raises(SamplerError, match="no inference server is left that holds the weights of version 0"):
            await fleet.sampler.sample(request_of(30))


async def test_frozen_requests_go_on_with_their_keys_and_values() -> None:
    async with open_fleet(hold=True) as fleet:
        task = asyncio.create_task(fleet.sampler.sample(request_of(200, seed=4)))
        await sampling(fleet.sampler)
        await fleet.sampler.pause(interrupt=True)
        partial = await task
        assert partial.stop is StopReason.INTERRUPTED
        assert 0 < len(partial.tokens) < 200
        fleet.trainer.update()
        await fleet.sampler.load(fleet.handle, 1)
        await fleet.sampler.resume()
        count = len(fleet.servers[0].requests)
        whole = await fleet.sampler.sample(request_of(200, seed=4, after=partial))
        assert len(fleet.servers[0].requests) == count, "it was joined to the request that it left"
        assert whole.tokens[: len(partial.tokens)].tolist() == partial.tokens.tolist()
        assert len(whole.tokens) == 200
        changed = int((whole.versions == 0).sum())
        assert changed >= len(partial.tokens)
        assert whole.versions.tolist() == [0] * changed + [1] * (200 - changed)


async def test_turns_of_an_episode_stay_at_one_server_and_others_spread() -> None:
    async with open_fleet(2) as fleet:
        for server in fleet.servers:
            server.requests.clear()
        turns = await asyncio.gather(*[fleet.sampler.sample(request_of(8, seed=n, first=n)) for n in range(8)])
        counts = [len([body for body in server.requests if body["stream"]]) for server in fleet.servers]
        assert counts == [4, 4]
        for first, turn in enumerate(turns):
            prompt = int_array([first, 7, 4, *turn.tokens.tolist(), 9, 9])
            await fleet.sampler.sample(
                SampleRequest(prompt=prompt, params=SamplingParams(max_tokens=2, stop_tokens=()))
            )
        for server in fleet.servers:
            firsts = [body["token_ids"][0] for body in server.requests if body["stream"]]
            assert sorted(firsts[:4]) == sorted(firsts[4:])


async def test_two_versions_are_never_mixed_up_when_a_repair_meets_a_publish() -> None:
    async with open_fleet(2) as fleet:
        fleet.servers[1].faults.dies_after = 1
        tasks = [asyncio.create_task(fleet.sampler.sample(request_of(40, seed=n))) for n in range(4)]
        await asyncio.gather(*tasks)
        fleet.servers[1].faults = Faults()
        for version in (1, 2, 3):
            fleet.trainer.update()
            await publish(fleet, version)
            completions = await asyncio.gather(*[fleet.sampler.sample(request_of(6, seed=n)) for n in range(4)])
            for completion in completions:
                assert completion.versions.tolist() == [version] * 6
                await assert_sampled_by_trainer(fleet, completion)
