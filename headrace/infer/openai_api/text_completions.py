"""Parse requests for OpenAI's text completions, and write replies as bodies and events. Pure functions.

A prompt is text or tokens, one or several of them. With `echo` the prompt and its log-probs are repeated before the
sampled text, and `max_tokens` may be 0, which is how programs score texts.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import Field

from headrace.infer.openai_api.chat_requests import (
    ApiError,
    ChatBody,
    StreamOptionsIn,
    check_stops,
    check_stream,
    parse_body,
)
from headrace.infer.openai_api.chat_responses import LAST_EVENT, WORD, sent_event, usage
from headrace.infer.openai_api.session import cut_at_stops
from headrace.infer.openai_api.streaming import StreamedText
from headrace.render import Renderer
from headrace.types import Completion, FloatArray, IntArray, StopReason, int_array

Tops = Sequence[Mapping[int, float]]  # the most likely tokens at each position
MAX_PROMPTS = 256


class TextRequest(ChatBody):
    """The body of a request. A null field means the same as a missing one."""

    model: str
    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = Field(default=None, ge=0)
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    stop: str | list[str] | None = None
    seed: int | None = None
    n: int | None = None
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0)
    stream: bool | None = None
    stream_options: StreamOptionsIn | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


def parse_text(body: bytes, *, max_n: int, max_tops: int) -> TextRequest:
    """Parse a request. Raises ApiError with the name of the first field that cannot be honoured."""
    request = parse_body(body, TextRequest)
    check_stops(request.stops)
    check_stream(request.stream, request.stream_options)
    if not 1 <= (1 if request.n is None else request.n) <= max_n:
        raise ApiError(f"n must be from 1 to {max_n}", param="n")
    if (request.logprobs or 0) > max_tops:
        raise ApiError(f"logprobs must be from 0 to {max_tops}", param="logprobs")
    if request.max_tokens == 0 and not request.echo:
        raise ApiError("max_tokens may be 0 with echo = true only", param="max_tokens")
    return request


def read_prompts(request: TextRequest, renderer: Renderer, *, vocabulary: int) -> list[IntArray]:
    """Return the tokens of every prompt. Raises ApiError."""
    prompt = request.prompt
    several = prompt if isinstance(prompt, list) and (not prompt or not isinstance(prompt[0], int)) else [prompt]
    if len(several) > MAX_PROMPTS:
        raise ApiError(f"prompt may hold {MAX_PROMPTS} prompts", param="prompt")
    prompts = [int_array(_clamped(renderer.encode(item) if isinstance(item, str) else item)) for item in several]
    if not prompts or any(not len(prompt) for prompt in prompts):
        raise ApiError("prompt is empty: write at least one token", param="prompt")
    if any(prompt.min() < 0 or prompt.max() >= vocabulary for prompt in prompts):
        raise ApiError(f"prompt holds a token outside of the vocabulary of {vocabulary}", param="prompt")
    return prompts


def _clamped(tokens: Any) -> Any:
    """Clamp tokens to int32, and so that those outside of any vocabulary stay outside."""
    return [min(max(token, -1), 2**31 - 1) for token in tokens]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextAnswer:
    """A choice of a text reply."""

    prompt: IntArray
    completion: Completion | None  # None if nothing was sampled
    scores: FloatArray | None = None  # of a prompt that is repeated
    prompt_tops: Tops = ()  # of a prompt that is repeated
    tops: Tops = ()


def text_body(
    answers: Sequence[TextAnswer], request: TextRequest, renderer: Renderer, *, id: str, created: int
) -> dict[str, Any]:
    choices = [
        {
            "index": index,
            "text": _text(answer, request, renderer),
            "logprobs": _logprobs(answer, request, renderer),
            "finish_reason": _reason(answer),
        }
        for index, answer in enumerate(answers)
    ]
    return {**_head(request, id, created), "choices": choices, "usage": _usage(answers, request)}


class TextStream:
    """Write the same as server-sent events. Chunks may come while the text is sampled; log-probs come at the end."""

    def __init__(self, request: TextRequest, renderer: Renderer, *, id: str, created: int) -> None:
        self._request, self._renderer = request, renderer
        self._head = _head(request, id, created)
        self._counted = request.stream_options is not None and request.stream_options.include_usage
        self._texts: dict[int, StreamedText] = {}

    def chunk(self, index: int, completion: Completion) -> Iterator[str]:
        """Send what there is of a choice by now; a prompt that is repeated comes at the end."""
        if self._request.echo:
            return
        text = self._texts.setdefault(index, StreamedText(self._request.stops))
        if added := text.feed(self._renderer.decode(completion.tokens)):
            yield self._event({"index": index, "text": added, "logprobs": None, "finish_reason": None})

    def end(self, answers: Sequence[TextAnswer]) -> Iterator[str]:
        """Send what has not been sent, word by word."""
        for index, answer in enumerate(answers):
            rest = self._texts.get(index, StreamedText(())).finish(_text(answer, self._request, self._renderer))
            for word in WORD.findall(rest):
                yield self._event({"index": index, "text": word, "logprobs": None, "finish_reason": None})
            logprobs = _logprobs(answer, self._request, self._renderer)
            yield self._event({"index": index, "text": "", "logprobs": logprobs, "finish_reason": _reason(answer)})
        if self._counted:
            yield sent_event({**self._head, "choices": [], "usage": _usage(answers, self._request)})
        yield LAST_EVENT

    def _event(self, choice: dict[str, Any]) -> str:
        return sent_event({**self._head, "choices": [choice], **({"usage": None} if self._counted else {})})


def _head(request: TextRequest, id: str, created: int) -> dict[str, Any]:
    return {"id": id, "object": "text_completion", "created": created, "model": request.model}


def _reason(answer: TextAnswer) -> str:
    return "stop" if answer.completion is not None and answer.completion.stop is StopReason.STOP else "length"


def _text(answer: TextAnswer, request: TextRequest, renderer: Renderer) -> str:
    sampled = "" if answer.completion is None else renderer.decode(answer.completion.tokens)
    echoed = renderer.decode(answer.prompt) if request.echo else ""
    return echoed + cut_at_stops(sampled, request.stops)


def _logprobs(answer: TextAnswer, request: TextRequest, renderer: Renderer) -> dict[str, Any] | None:
    """Write the log-prob of every token, also of text behind a stop string; the first of a repeated prompt has none."""
    if request.logprobs is None:
        return None
    tokens: list[int] = []
    logprobs: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    if request.echo and answer.scores is not None:
        tokens += answer.prompt.tolist()
        logprobs += [None, *(float(score) for score in answer.scores[1:])]
        tops += [None, *_named(answer.prompt_tops[1:], len(answer.prompt) - 1, renderer)]
    if answer.completion is not None:
        tokens += answer.completion.tokens.tolist()
        logprobs += [float(logprob) for logprob in answer.completion.raw_logprobs]
        tops += _named(answer.tops, len(answer.completion.tokens), renderer)
    texts = renderer.token_texts(tokens)
    offsets = np.cumsum([0, *(len(text) for text in texts)])[:-1]
    return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets.tolist()}


def _named(tops: Tops, count: int, renderer: Renderer) -> list[dict[str, float] | None]:
    """Key the most likely tokens by their text; of tokens with the same text the more likely one stays."""
    if not tops:
        return [None] * count
    named: list[dict[str, float] | None] = []
    for tokens in tops:
        by_text: dict[str, float] = {}
        for text, logprob in zip(renderer.token_texts(list(tokens)), tokens.values(), strict=True):
            by_text.setdefault(text, logprob)
        named.append(by_text)
    return named


def _usage(answers: Sequence[TextAnswer], request: TextRequest) -> dict[str, int]:
    sampled = sum(len(answer.completion.tokens) for answer in answers if answer.completion is not None)
    return usage(sum(len(answer.prompt) for answer in answers) // (request.n or 1), sampled)
