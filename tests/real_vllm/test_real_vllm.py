"""A real vLLM samples what the trainer has: agreement, weight sync, adapters, pauses, and servers that are killed."""

import asyncio
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from headrace.errors import SamplerError
from headrace.infer.servers.launch import LaunchedServer
from headrace.infer.servers.proof import trainer_score
from headrace.infer.servers.replicas import ReplicaLimits
from headrace.infer.servers.vllm import EMPTY_DIGEST
from headrace.types import Completion, SampleRequest, SamplingParams, StopReason, int_array
from support.processes import alive, descendants
from support.real_vllm import Trained, launched, servable_model, trained

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


async def test_adapters_are_sampled_under_a_name_for_each_version(servers: list[LaunchedServer]) -> None:
    async with trained(servers[:1], lora=True) as trainer:
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


@pytest.mark.parametrize("hold", [False, True])
async def test_a_request_is_paused_and_goes_on_under_new_weights(servers: list[LaunchedServer], hold: bool) -> None:
    async with trained(servers[:1], hold=hold) as trainer:
        task = asyncio.create_task(trainer.sampler.sample(request_of(240, seed=3)))
        [replica] = trainer.sampler.usable
        async with asyncio.timeout(60):
            while not any(len(stream.tokens) > 5 for stream in replica.sampler.open_streams):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        await trainer.sampler.pause(interrupt=True)
        partial = await task
        assert partial.stop is StopReason.INTERRUPTED
        assert 0 < len(partial.tokens) < 240
        assert await difference(trainer, partial) < 1e-4
        await trainer.train()
        await trainer.sampler.load(trainer.handle(), 1)
        await trainer.sampler.resume()
        whole = await trainer.sampler.sample(request_of(240, seed=3, after=partial))
        assert whole.stop is StopReason.LENGTH
        assert whole.tokens[: len(partial.tokens)].tolist() == partial.tokens.tolist()
        old = int((whole.versions == 0).sum())
        assert len(partial.tokens) <= old < 240
        assert whole.versions.tolist() == [0] * old + [1] * (240 - old)
        if not hold:
            assert old == len(partial.tokens)


async def test_checksums_leave_out_what_is_packed_away(servers: list[LaunchedServer]) -> None:
    async with trained(servers[:1]) as trainer:
        found = await trainer.sampler.usable[0].sampler.api.checksums()
        assert found
        assert EMPTY_DIGEST not in found.values()


async def test_a_tied_model_follows_folders_that_have_a_head_of_their_own(tmp_path: Path) -> None:
    lm = servable_model(tied=True)
    lm.model.save_pretrained(tmp_path / "tied")
    lm.tokenizer.save_pretrained(tmp_path / "tied")
    with launched(1, tmp_path / "tied", tmp_path, lora_rank=0) as tied:
        async with trained(tied, lm=lm) as trainer:
            await trainer.train(0.1)
            await trainer.publish(1)
            assert await difference(trainer, await trainer.sampler.sample(request_of(50))) < 1e-4


async def test_a_killed_server_is_started_again_and_brought_up_to_date(servers: list[LaunchedServer]) -> None:
    async with trained(servers) as trainer:
        await trainer.train()
        await trainer.publish(1)
        tasks = [asyncio.create_task(trainer.sampler.sample(request_of(240, seed=n))) for n in range(12)]
        async with asyncio.timeout(60):
            second = trainer.sampler.usable[1].sampler
            while not any(stream.tokens for stream in second.open_streams):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert servers[1].pid is not None
        old = descendants(servers[1].pid)
        os.kill(old[0], signal.SIGKILL)  # the API process, whose workers would live on
        for completion in await asyncio.gather(*tasks):
            assert len(completion.tokens) == 240
            assert completion.versions.tolist() == [1] * 240
            assert await difference(trainer, completion) < 1e-4
        assert trainer.sampler.taken_out == 1
        async with asyncio.timeout(600):
            while len(trainer.sampler.usable) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.2)
        assert not any(alive(pid) for pid in old), "nothing of the killed server is left"
        completion = await second.sample(request_of(50))
        assert completion.versions.tolist() == [1] * 50
        assert await difference(trainer, completion) < 1e-4
