"""Generate with transformers' own modules and cache, one sequence at a time.

Serves models that the shared attention function does not run, and is the engine's independent reference: attention is
transformers' own, only the sampling of tokens is shared. The sampler has its own copy of the weights.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import DynamicCache

from headrace.algo.random import uniforms
from headrace.errors import SamplerError, boundary
from headrace.infer.sampling import check_request, refuse_images, sample_rows
from headrace.model.device import wide_dtype
from headrace.model.load import copy_folder, copy_weights, fingerprint
from headrace.model.supported import context_of
from headrace.types import (
    Completion,
    FloatArray,
    IntArray,
    SampleRequest,
    StopReason,
    WeightsFolder,
    WeightsHandle,
    float_array,
    int_array,
    known_next_logprobs,
)

R = TypeVar("R")


class GenerateSampler:
    """Sample from `model`. `source`, if given, is the model whose weights `load` copies for `SharedWeights`."""

    def __init__(self, model: Any, tokenizer: Any, *, eos_tokens: Sequence[int], source: Any | None = None) -> None:
        model.eval()
        self._model, self._tokenizer, self._source = model, tokenizer, source
        self._eos = frozenset(eos_tokens)
        self._context = context_of(model.config)
        self._version = 0
        # one sequence uses the model at a time
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="headrace-generate")
        self._open = 0
        self._interrupt = self._closed = False
        self._running = asyncio.Event()
        self._running.set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def version(self) -> int:
        return self._version

    async def sample(self, request: SampleRequest) -> Completion:
        refuse_images(request, "the sampler by transformers' generate")
        vocabulary = int(self._model.config.vocab_size)
        decodes = self._tokenizer is not None
        check_request(request, context=self._context, vocabulary=vocabulary, decodes=decodes)
        await self._running.wait()
        if self._closed:
            raise SamplerError("the sampler is closed")
        self._open += 1
        self._idle.clear()
        abandoned = threading.Event()
        try:
            return await self._on_thread(lambda: self._sample(request, abandoned))
        finally:
            abandoned.set()  # if the caller was cancelled, the thread is still sampling
            self._open -= 1
            if not self._open:
                self._idle.set()

    async def score(self, sequences: Sequence[IntArray], temperature: float = 1.0) -> tuple[FloatArray, ...]:
        if not temperature > 0:
            raise SamplerError(f"scores need a temperature above 0, not {temperature}")
        return await self._on_thread(lambda: tuple(self._score(sequence, temperature) for sequence in sequences))

    async def load(self, handle: WeightsHandle, version: int) -> str:
        if self._open:
            raise SamplerError("weights cannot be loaded while sequences are being sampled: call pause first")
        if version <= self._version:
            raise SamplerError(f"version {version} is not newer than {self._version}")
        return await self._on_thread(lambda: self._load(handle, version))

    async def pause(self, *, interrupt: bool) -> None:
        self._running.clear()
        self._interrupt = interrupt
        await self._idle.wait()
        self._interrupt = False

    async def resume(self) -> None:
        self._running.set()

    def close(self) -> None:
        """Fail open calls."""
        self._closed = True
        self._running.set()
        self._thread.shutdown(wait=False)

    async def _on_thread(self, run: Callable[[], R]) -> R:
        if self._closed:
            raise SamplerError("the sampler is closed")
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._guarded, run)

    def _guarded(self, run: Callable[[], R]) -> R:
        with boundary(SamplerError, "generation failed"), torch.inference_mode():
            return run()

    def _sample(self, request: SampleRequest, abandoned: threading.Event) -> Completion:
        params, done = request.params, request.continue_from
        prompt = request.prompt.tolist()
        tokens = [] if done is None else done.tokens.tolist()
        logprobs = [] if done is None else done.sampler_logprobs.tolist()
        raws = [] if done is None else done.raw_logprobs.tolist()
        versions = [] if done is None else done.versions.tolist()
        stops = self._eos if params.stop_tokens is None else frozenset(params.stop_tokens)
        limit = min(params.max_tokens, self._context - len(prompt))
        cache = DynamicCache(config=self._model.config)
        new = prompt + tokens
        stop = StopReason.LENGTH
        while len(tokens) < limit:
            if self._closed:
                raise SamplerError("the sampler is closed")
            if self._interrupt or abandoned.is_set():
                stop = StopReason.INTERRUPTED
                break
            inputs = torch.tensor([new], device=self._model.device)
            logits = self._model(inputs, past_key_values=cache, use_cache=True).logits[:, -1]
            number = torch.from_numpy(uniforms([params.seed], [len(tokens)]))
            drawn = sample_rows(logits, [params], number.to(logits.device, wide_dtype(logits.device)))
            new = [int(drawn.tokens_B[0])]
            tokens += new
            logprobs.append(float(drawn.logprobs_B[0]))
            raws.append(float(drawn.raw_logprobs_B[0]))
            versions.append(self._version)
            text = self._tokenizer.decode(tokens) if params.stop_strings else ""
            if new[0] in stops or any(word in text for word in params.stop_strings):
                stop = StopReason.STOP
                break
        return Completion(
            tokens=int_array(tokens),
            sampler_logprobs=float_array(logprobs),
            raw_logprobs=float_array(raws),
            versions=int_array(versions),
            stop=stop,
            next_logprobs=known_next_logprobs(done, len(tokens)),
        )

    def _score(self, sequence: IntArray, temperature: float) -> FloatArray:
        inputs = torch.from_numpy(sequence.astype(np.int64)).to(self._model.device)
        logits = self._model(inputs[None], use_cache=False).logits[0].float() / temperature
        scores = torch.log_softmax(logits[:-1], dim=-1).gather(1, inputs[1:, None])[:, 0]
        return float_array(np.concatenate([[np.nan], scores.cpu().numpy()]))

    def _load(self, handle: WeightsHandle, version: int) -> str:
        if isinstance(handle, WeightsFolder):
            copy_folder(handle.path, self._model)
        elif self._source is not None:
            copy_weights(dict(self._source.named_parameters()), self._model)
        else:
            raise SamplerError("this sampler shares no weights with the trainer: publish a folder instead")
        self._version = version
        return fingerprint(self._model.named_parameters())
