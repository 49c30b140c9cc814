"""A real vLLM samples what the trainer has: agreement, weight sync, adapters, pauses, and servers that are killed."""

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest

from headrace.errors import SamplerError
from headrace.infer.servers.api import PauseMode
from headrace.infer.servers.launch import LaunchedServer
from headrace.infer.servers.proof import trainer_score
from headrace.infer.servers.replicas import ReplicaLimits
from headrace.infer.servers.transfer.buckets import BUCKET_BYTES
from headrace.infer.servers.vllm import EMPTY_DIGEST
from headrace.types import Completion, SampleRequest, SamplingParams, StopReason, int_array
from support.processes import alive, descendants
from support.real_vllm import CONTEXT, LONG, VOCABULARY, Trained, trained
from support.server_samplers import sampling

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

PROMPT = [3, 7, 4]


def request_of(
    max_tokens: int, *, seed: int = 0, temperature: float = 1.0, after: Completion | None = None
) -> SampleRequest:
    params = SamplingParams(max_tokens=max_tokens, stop_tokens=(), seed=seed, temperature=temperature)
    return SampleRequest(prompt=int_array(PROMPT), params=params, continue_from=after)


async def difference(trainer: Trained, completion: Completion, temperature: float = 1.0) -> float:
    """The largest difference between recorded log-probs and the trainer's."""
    sequence = int_array([*PROMPT, *completion.tokens.tolist()])
    [wanted] = await trainer_score(trainer.backend)([sequence], temperature)
    return float(np.abs(wanted[len(PROMPT) - 1 :] - completion.sampler_logprobs).max())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_logprobs_are_the_trainers(servers: list[LaunchedServer], temperature: float) -> None:
    async with trained(servers[:1], temperature=temperature) as trainer:
        requests = [request_of(100, seed=seed, temperature=temperature) for seed in range(4)]
        for completion in await asyncio.gather(*[trainer.sampler.sample(request) for request in requests]):
            assert await difference(trainer, completion, temperature) < 1e-4
        [greedy] = [await trainer.sampler.sample(request_of(10, temperature=0.0))]
        assert await difference(trainer, greedy) < 1e-4


async def test_stop_tokens_and_stop_strings_end_a_sequence_with_their_token(servers: list[LaunchedServer]) -> None:
    async with trained(servers[:1]) as trainer:
        free = await trainer.sampler.sample(request_of(60, seed=2))
        third = int(free.tokens[3])
        params = SamplingParams(max_tokens=60, stop_tokens=(third,), seed=2)
        stopped = await trainer.sampler.sample(SampleRequest(prompt=int_array(PROMPT), params=params))
        assert stopped.stop is StopReason.STOP
        assert stopped.tokens.tolist() == free.tokens[: free.tokens.tolist().index(third) + 1].tolist()
        params = SamplingParams(max_tokens=60, stop_tokens=(), stop_strings=(f"w{third}",), seed=2)
        worded = await trainer.sampler.sample(SampleRequest(prompt=int_array(PROMPT), params=params))
        assert worded.stop is StopReason.STOP
        assert len(worded.tokens) <= len(stopped.tokens)


async def test_prompts_that_do_not_fit_into_one_step_are_sampled_in_several(servers: list[LaunchedServer]) -> None:
    """vLLM on a CPU would compute one of them in parts, and end at its seed."""
    numbers = np.random.default_rng(0)
    prompts = [int_array(numbers.integers(2, VOCABULARY, size)) for size in (CONTEXT - 100, *[400] * 12)]
    async with trained(servers[:1]) as trainer:
        params = SamplingParams(max_tokens=8, stop_tokens=(), seed=5)
        calls = [trainer.sampler.sample(SampleRequest(prompt=prompt, params=params)) for prompt in prompts]
        completions = await asyncio.gather(*calls)
        sequences = [
            int_array([*prompt.tolist(), *completion.tokens.tolist()])
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        wanted = await trainer_score(trainer.backend)(sequences, 1.0)
        for prompt, logprobs, completion in zip(prompts, wanted, completions, strict=True):
            assert np.abs(logprobs[len(prompt) - 1 :] - completion.sampler_logprobs).max() < 1e-4
        assert trainer.sampler.taken_out == 0


async def test_samples_follow_the_weights_by_folder(servers: list[LaunchedServer]) -> None:
    async with trained(servers) as trainer:
        before = await trainer.sampler.sample(request_of(50, seed=1))
        for version in (1, 2, 3):
            await trainer.train()
            await trainer.publish(version)
            completions = await asyncio.gather(*[trainer.sampler.sample(request_of(50, seed=n)) for n in range(4)])
            for completion in completions:
                assert completion.versions.tolist() == [version] * 50
                assert await difference(trainer, completion) < 1e-4
        assert await difference(trainer, before) > 1e-2, "training has changed the policy"


async def test_a_reload_that_did_not_happen_is_found(
    servers: list[LaunchedServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with trained(servers[:1], limits=ReplicaLimits(repairs=1)) as trainer:
        [replica] = trainer.sampler.usable
        replica.restart = None

        async def nothing(folder: Path, version: int) -> None: ...

        monkeypatch.setattr(replica.sampler.api, "load_folder", nothing)
        await trainer.train()
        with pytest.raises(SamplerError, match=r"still answers as version 0|does not hold version 1"):
            await trainer.publish(1)


async def test_cached_prefixes_of_earlier_weights_are_found(
    servers: list[LaunchedServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with trained(servers[:1], limits=ReplicaLimits(repairs=1)) as trainer:
        [replica] = trainer.sampler.usable
        replica.restart = None

        async def nothing(mode: object = None) -> None: ...

        for verb in ("flush_caches", "pause", "resume"):  # a pause of an idle engine drops its caches too
            monkeypatch.setattr(replica.sampler.api, verb, nothing)
        await trainer.train(0.1)
        with pytest.raises(SamplerError, match="cached prefixes"):
            await trainer.publish(1)


@pytest.mark.parametrize("bucket_bytes", [BUCKET_BYTES, 20_000])
async def test_samples_follow_the_weights_by_broadcast(servers: list[LaunchedServer], bucket_bytes: int) -> None:
    async with trained(servers, broadcast=True, bucket_bytes=bucket_bytes) as trainer:
        before = await trainer.sampler.sample(request_of(50, seed=1))
        for version in (1, 2):
            await trainer.train()
            await trainer.publish(version)
            assert len(trainer.sampler.usable) == 2
            completions = await asyncio.gather(*[trainer.sampler.sample(request_of(50, seed=n)) for n in range(4)])
            for completion in completions:
                assert completion.versions.tolist() == [version] * 50
                assert await difference(trainer, completion) < 1e-4
        assert await difference(trainer, before) > 1e-2, "training has changed the policy"


async def test_a_broadcast_that_reaches_no_weights_is_found(
    servers: list[LaunchedServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with trained(servers[:1], broadcast=True, limits=ReplicaLimits(repairs=1)) as trainer:
        [replica] = trainer.sampler.usable
        replica.restart = None
        tensors = replica.sampler.api.tensors

        async def old(specs: object, group: object) -> None:
            raise AssertionError("nothing is to be sent")

        async def version_only(version: int) -> None:
            await tensors._http.post("/update_weight_version", {"new_version": str(version)})  # type: ignore[attr-defined]

        async def nothing() -> None: ...

        monkeypatch.setattr(tensors, "begin_update", nothing)
        monkeypatch.setattr(tensors, "receive", old)
        monkeypatch.setattr(tensors, "end_update", version_only)
        monkeypatch.setattr("headrace.infer.servers.transfer.senders.split_into_buckets", lambda *given: [])
        await trainer.train()
        with pytest.raises(SamplerError, match=r"still answers as version 0|does not hold version 1"):
            await trainer.publish(1)


async def test_adapters_are_sampled_under_a_name_for_each_version(servers: list[LaunchedServer]) -> None:
    async with trained(servers[1:], lora=True) as trainer:
        for version in (1, 2, 3):
            await trainer.train()
            await trainer.publish(version)
            completion = await trainer.sampler.sample(request_of(50, seed=version))
            assert completion.versions.tolist() == [version] * 50
            assert await difference(trainer, completion) < 1e-4
        api = trainer.sampler.usable[0].sampler.api
        base = await api.prompt_logprobs(int_array([3, 7, 4, 9, 2, 11, 5]), adapter=None)
        [tuned] = await trainer_score(trainer.backend)([int_array([3, 7, 4, 9, 2, 11, 5])], 1.0)
        assert np.abs(base - tuned).max() > 1e-2, "the base is another policy by now"


async def test_a_server_that_samples_the_base_under_an_adapter_is_found(
    servers: list[LaunchedServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with trained(servers[1:], lora=True, limits=ReplicaLimits(repairs=1)) as trainer:
        [replica] = trainer.sampler.usable
        replica.restart = None
        api = replica.sampler.api
        generate, score = api.generate, api.prompt_logprobs
        monkeypatch.setattr(api, "generate", lambda call: generate(replace(call, adapter=None)))
        monkeypatch.setattr(api, "prompt_logprobs", lambda tokens, adapter: score(tokens, adapter=None))
        await trainer.train()
        with pytest.raises(SamplerError, match="the adapter was loaded and is not used"):
            await trainer.publish(1)


async def test_an_abort_by_id_that_aborts_nothing_is_not_relied_on(servers: list[LaunchedServer]) -> None:
    async with trained(servers[:1]) as trainer:
        [replica] = trainer.sampler.usable
        task = asyncio.create_task(trainer.sampler.sample(request_of(LONG, seed=3)))
        await sampling(trainer.sampler)
        [stream] = replica.sampler.open_streams
        reply = await replica.sampler.api._http.post("/abort_requests", {"request_ids": ["headrace"]})  # type: ignore[attr-defined]
        assert reply["aborted"] == 1, "it says so"
        count = len(stream.tokens)
        async with asyncio.timeout(60):
            while len(stream.tokens) <= count and not stream.ended.is_set():  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert len(stream.tokens) > count, "and samples on"
        await trainer.sampler.pause(interrupt=True)
        assert (await task).stop is StopReason.INTERRUPTED
        await trainer.sampler.resume()
        dropped = asyncio.create_task(trainer.sampler.sample(request_of(LONG, seed=4)))
        await sampling(trainer.sampler)
        assert await running_requests(servers[0]) == 1
        dropped.cancel()
        async with asyncio.timeout(60):
            while await running_requests(servers[0]):  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def running_requests(server: LaunchedServer) -> float:
    async with httpx.AsyncClient(trust_env=False) as client:
        text = (await client.get(f"{server.url}/metrics", timeout=30)).text
    lines = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


@pytest.mark.parametrize("hold", [False, True])
async def test_a_request_is_paused_and_goes_on_under_new_weights(servers: list[LaunchedServer], hold: bool) -> None:
    async with trained(servers[:1], hold=hold) as trainer:
        task = asyncio.create_task(trainer.sampler.sample(request_of(LONG, seed=3)))
        await sampling(trainer.sampler, tokens=6)
        await trainer.sampler.pause(interrupt=True)
        partial = await task
        assert partial.stop is StopReason.INTERRUPTED
        assert 0 < len(partial.tokens) < LONG
        assert await difference(trainer, partial) < 1e-4
        await trainer.train()
        await trainer.sampler.load(trainer.handle(), 1)
        await trainer.sampler.resume()
        done = len(partial.tokens)
        if hold:  # the server goes on with the request itself; its spans of versions come when that ends
            api = trainer.sampler.usable[0].sampler.api
            task = asyncio.create_task(trainer.sampler.sample(request_of(LONG, seed=3, after=partial)))
            await sampling(trainer.sampler, tokens=done + 40)
            await api.pause(PauseMode.ABORT)
            whole = await task
            await api.resume()
            assert whole.stop is StopReason.INTERRUPTED
            assert done + 40 <= len(whole.tokens) < LONG
        else:
            whole = await trainer.sampler.sample(request_of(done + 40, seed=3, after=partial))
            assert whole.stop is StopReason.LENGTH
            assert len(whole.tokens) == done + 40
        assert whole.tokens[:done].tolist() == partial.tokens.tolist()
        old, new = int((whole.versions == 0).sum()), int((whole.versions == 1).sum())
        assert whole.versions.tolist() == [0] * old + [1] * new
        assert new > 0
        assert old >= done if hold else old == done


async def test_checksums_leave_out_what_is_packed_away(servers: list[LaunchedServer]) -> None:
    async with trained(servers[:1]) as trainer:
        found = await trainer.sampler.usable[0].sampler.api.checksums()
        assert found
        assert EMPTY_DIGEST not in found.values()


async def test_a_killed_server_is_started_again_and_brought_up_to_date(servers: list[LaunchedServer]) -> None:
    async with trained(servers) as trainer:
        await trainer.train()
        await trainer.publish(1)
        tasks = [asyncio.create_task(trainer.sampler.sample(request_of(700, seed=n))) for n in range(12)]
        second = trainer.sampler.usable[1].sampler
        await sampling(trainer.sampler, calls=12)
        assert len(second.open_streams) == 6
        assert servers[1].pid is not None
        old = descendants(servers[1].pid)
        os.kill(old[0], signal.SIGKILL)  # the API process, whose workers would live on
        for completion in await asyncio.gather(*tasks):
            assert len(completion.tokens) == 700
            assert completion.versions.tolist() == [1] * 700
            assert await difference(trainer, completion) < 1e-4
        assert trainer.sampler.taken_out == 1
        async with asyncio.timeout(600):
            while len(trainer.sampler.usable) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.2)
        assert not any(alive(pid) for pid in old), "nothing of the killed server is left"
        completion = await second.sample(request_of(50))
        assert completion.versions.tolist() == [1] * 50
        assert await difference(trainer, completion) < 1e-4
