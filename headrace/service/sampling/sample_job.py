"""Parse sampling requests into jobs for the host.

A request without a seed gets one from its id, so that it gives the same tokens when it is run again after a restart.
"""

import base64
from dataclasses import dataclass

import numpy as np

from headrace.algo.random import derive_seed
from headrace.errors import RequestError
from headrace.pictures import PlacedImage
from headrace.render import PlacedTokens
from headrace.service.http import schemas
from headrace.service.wire.image_chunks import TEXT_ONLY, ImageChunks, join_chunks
from headrace.service.wire.messages import Array, shaped, unfold
from headrace.types import IntArray, SamplingParams, int_array


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleJob:
    prompt: IntArray
    images: tuple[PlacedImage, ...] = ()
    params: tuple[SamplingParams, ...]  # one per sample, with its own seed
    prompt_logprobs: bool = False
    last_n: int | None = None  # of the prompt's log-probs; None: all
    num_prompt_tops: int = 0  # likeliest tokens reported at each position of the prompt
    num_sample_tops: int = 0  # likeliest tokens reported at each sampled position
    targets: IntArray | None = None  # tokens whose log-probs are reported at positions of the prompt
    target_rows: tuple[Array, Array] | None = None  # crow and column indices, if the targets came in compressed rows


def parse_sample_job(
    body: schemas.Sample, *, id: str, context: int, vocabulary: int, images: ImageChunks = TEXT_ONLY
) -> SampleJob:
    """Check a sampling request against the model's limits; raises RequestError with what to change."""
    placed = _parse_prompt(body.prompt, vocabulary, images)
    prompt = placed.tokens
    room = context - len(prompt)
    sampling = body.sampling_params
    max_tokens = room if sampling.max_tokens is None else sampling.max_tokens
    if room < 1 or max_tokens > room:
        raise RequestError(
            f"a prompt of {len(prompt)} tokens and {max(max_tokens, 1)} to sample do not fit into the context of "
            f"{context}"
        )
    if body.prompt_alt_tokens_k:
        raise RequestError("prompt_alt_tokens_k is not served: ask for topk_prompt_logprobs")
    last_n = body.prompt_logprobs_last_n
    if last_n is not None and not 1 <= last_n <= len(prompt) - 1:
        raise RequestError(f"prompt_logprobs_last_n must be from 1 to {len(prompt) - 1}, not {last_n}")
    ranked = body.topk_prompt_logprobs or body.topk_sample_logprobs or body.target_prompt_logprobs is not None
    if placed.images and (body.prompt_logprobs or last_n is not None or ranked):
        raise RequestError(
            "log-probs of prompts, and those of other tokens than the sampled ones, are not served with images: leave "
            "prompt_logprobs, topk_prompt_logprobs, topk_sample_logprobs and target_prompt_logprobs out"
        )
    targets, rows = _parse_targets(body.target_prompt_logprobs, len(prompt), vocabulary)
    stop_tokens, stop_strings = _parse_stop(sampling.stop)
    seed = derive_seed("sample", id) if sampling.seed is None else sampling.seed
    params = tuple(
        SamplingParams(
            max_tokens=max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k if 0 < sampling.top_k < vocabulary else None,
            stop_tokens=stop_tokens,
            stop_strings=stop_strings,
            seed=sample_seed(seed, index),
        )
        for index in range(body.num_samples)
    )
    return SampleJob(
        prompt=prompt,
        images=placed.images,
        params=params,
        prompt_logprobs=bool(body.prompt_logprobs) or last_n is not None,
        last_n=last_n,
        num_prompt_tops=min(body.topk_prompt_logprobs, vocabulary),
        num_sample_tops=min(body.topk_sample_logprobs, vocabulary),
        targets=targets,
        target_rows=rows,
    )


def sample_seed(seed: int, index: int) -> int:
    """Return the seed of one sample of a request: the request's own for the first, hashes of both for the others, so
    that no sample repeats one of a request with a neighbouring seed.

    >>> sample_seed(7, 0), sample_seed(7, 1) == sample_seed(8, 0)
    (7, False)
    """
    return seed % 2**63 if index == 0 else derive_seed("sample of a request", seed, index)


def _parse_prompt(prompt: schemas.Prompt, vocabulary: int, images: ImageChunks) -> PlacedTokens:
    parts = [_parse_chunk(chunk, vocabulary, images) for chunk in prompt.chunks]
    joined = join_chunks(parts)
    if not len(joined.tokens):
        raise RequestError("the prompt is empty: send at least one token")
    return joined


def _parse_chunk(chunk: schemas.Chunk, vocabulary: int, images: ImageChunks) -> PlacedTokens:
    if chunk.type == "image":
        try:
            data = base64.b64decode(chunk.data, validate=True)
        except ValueError as exc:
            raise RequestError(f"the prompt: the data of an image are not base64 ({exc})") from exc
        return images.read(data, chunk.format, chunk.expected_tokens, "the prompt")
    if chunk.type != "encoded_text":
        raise RequestError(f"only text and images are served, not a chunk of type '{chunk.type}'")
    if chunk.tokens and (min(chunk.tokens) < 0 or max(chunk.tokens) >= vocabulary):
        raise RequestError(f"the prompt holds a token outside of the vocabulary of {vocabulary}")
    return PlacedTokens(tokens=int_array(chunk.tokens))


def _parse_stop(stop: str | list[int] | list[str] | None) -> tuple[tuple[int, ...] | None, tuple[str, ...]]:
    """Return stop tokens and stop strings.

    Absent: the model's end of sequence. []: nothing stops. Tokens: only those. Text: it, and the end of sequence.
    """
    if stop is None:
        return None, ()
    if isinstance(stop, str):
        return None, (stop,)
    tokens = tuple(item for item in stop if isinstance(item, int))
    strings = tuple(item for item in stop if isinstance(item, str))
    return (None, strings) if strings else (tokens, ())


def _parse_targets(
    tensor: schemas.TensorIn | None, length: int, vocabulary: int
) -> tuple[IntArray | None, tuple[Array, Array] | None]:
    if tensor is None:
        return None, None
    what, flat, rows = "target_prompt_logprobs", np.asarray(tensor.data, "i8"), None
    if tensor.sparse_crow_indices is not None and tensor.sparse_col_indices is not None:
        rows = (np.asarray(tensor.sparse_crow_indices, "i8"), np.asarray(tensor.sparse_col_indices, "i8"))
        stored = unfold(flat + 1, *rows, tensor.shape or (), what)
        targets = stored - 1  # what is not stored becomes -1: no token
    else:
        targets = shaped(flat, tensor.shape or (), what)
    if targets.ndim != 2 or len(targets) != length - 1 or not targets.shape[1]:
        raise RequestError(f"{what} has shape {list(targets.shape)}; it needs {length - 1} rows, one per later token")
    if targets.min() < -1 or targets.max() >= vocabulary:
        raise RequestError(f"{what} holds a token outside of the vocabulary of {vocabulary}")
    return int_array(targets), rows
