"""Plain generation: what the contract tests do not ask of every sampler."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import SamplerError
from headrace.infer.hf_generate import GenerateSampler
from headrace.model.load import fingerprint
from headrace.types import SharedWeights, StopReason, WeightsFolder, int_array
from support.engines import LIMIT_S, VOCABULARY, bits, request_of, small_model


def plain(seed: int = 0, *, source: Any = None, context: int = 128) -> GenerateSampler:
    lm = small_model(seed, context=context)
    lm.model.config._attn_implementation = "sdpa"
    return GenerateSampler(lm.model, lm.tokenizer, eos_tokens=lm.eos_tokens, source=source)


async def test_stop_tokens_stop_strings_and_a_full_context_end_a_sequence() -> None:
    sampler = plain()
    free = await sampler.sample(request_of([5, 6], 30, seed=1))
    tokens = free.tokens.tolist()
    end = tokens.index(tokens[12]) + 1
    stopped = await sampler.sample(request_of([5, 6], 30, seed=1, stop_tokens=(tokens[12],)))
    assert (stopped.stop, stopped.tokens.tolist()) == (StopReason.STOP, tokens[:end])
    decode = small_model().tokenizer.decode
    stop = decode(tokens[7:9])[1:]
    end = next(size for size in range(30) if stop in decode(tokens[:size]))
    stopped = await sampler.sample(request_of([5, 6], 30, seed=1, stop_strings=(stop,)))
    assert (stopped.stop, stopped.tokens.tolist()) == (StopReason.STOP, tokens[:end])
    full = await sampler.sample(request_of([5] * 120, 30, seed=1))
    assert (full.stop, len(full.tokens)) == (StopReason.LENGTH, 8)


@pytest.mark.parametrize(
    ("prompt", "params"), [([], {}), ([1] * 128, {}), ([VOCABULARY], {}), ([1], {"top_k": 0}), ([1], {"max_tokens": 0})]
)
async def test_a_request_that_cannot_be_served_is_refused(prompt: list[int], params: dict[str, Any]) -> None:
    sampler = plain()
    with pytest.raises(SamplerError):
        await sampler.sample(request_of(prompt, **{"max_tokens": 3, **params}))
    with pytest.raises(SamplerError):
        await sampler.score([int_array([1, 2])], 0.0)


async def test_weights_come_from_the_source_or_from_a_folder(tmp_path: Path) -> None:
    other = small_model(4, context=128)
    request = request_of([5, 6], 10, seed=1)
    expected = bits(await plain(4).sample(request))
    other.model.save_pretrained(tmp_path)
    for handle, source in (
        (SharedWeights(fingerprint=""), other.model),
        (WeightsFolder(path=tmp_path, fingerprint=""), None),
    ):
        sampler = plain(3, source=source)
        assert bits(await sampler.sample(request)) != expected
        assert await sampler.load(handle, 1) == fingerprint(other.model.named_parameters())
        assert bits(await sampler.sample(request)) == expected


async def test_without_a_source_shared_weights_are_refused_and_nothing_changes() -> None:
    sampler = plain()
    with pytest.raises(SamplerError, match="folder"):
        await sampler.load(SharedWeights(fingerprint=""), 1)
    assert sampler.version == 0


async def test_a_failing_model_fails_the_call_and_closing_fails_those_that_wait() -> None:
    lm = small_model(5)
    sampler = GenerateSampler(lm.model, lm.tokenizer, eos_tokens=())  # its attention needs what only the engine gives
    with pytest.raises(SamplerError, match="generation failed"):
        await sampler.sample(request_of([1], 3))
    sampler = plain()
    await sampler.pause(interrupt=True)
    held = asyncio.create_task(sampler.sample(request_of([1], 3)))
    await asyncio.sleep(0)
    sampler.close()
    with pytest.raises(SamplerError, match="closed"):
        await held


async def test_plain_functions_that_wait_for_sequences_on_all_threads_there_are_get_them() -> None:
    """A user's plain rollout holds one of the event loop's threads while it waits: sampling must not need one, too."""
    sampler, loop = plain(), asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(max_workers=2))

    def rollout(seed: int) -> int:
        sampling = asyncio.run_coroutine_threadsafe(sampler.sample(request_of([5, 6], 3, seed=seed)), loop)
        return len(sampling.result(timeout=LIMIT_S).tokens)

    assert await asyncio.gather(*(asyncio.to_thread(rollout, seed) for seed in range(4))) == [3] * 4
    sampler.close()
    with pytest.raises(SamplerError, match="closed"):
        await sampler.score([int_array([1, 2])])
