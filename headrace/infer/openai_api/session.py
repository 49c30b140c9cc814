"""Turn the messages of an agent program's episode into tokens, sample replies, and record both.

A call whose messages begin with those of an earlier call and its reply continues from the very tokens of that call.
Where the messages were rewritten, or the chat template renders the past differently, the call starts from a prompt of
its own. The record holds what the sampler was given and returned; the text that the program gets, cut at stop strings
and split into content and tool calls, is never turned back into tokens that count as sampled.
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from headrace.algo.random import derive_seed
from headrace.errors import DataError, EpisodeError, HeadraceError, SamplerError, boundary
from headrace.infer.openai_api.chat_requests import ApiError, ChatRequest
from headrace.render import Renderer
from headrace.tool_calls import ParsedReply, ToolForm, extended_prompt, parse_reply, with_ids
from headrace.types import (
    Completion,
    EndReason,
    IntArray,
    Message,
    SampleRequest,
    SamplingParams,
    Step,
    StopReason,
    int_array,
)

MAX_INTERRUPTS = 1000


class SampleFn(Protocol):
    """The one verb of a `Sampler` that an episode needs."""

    async def sample(self, request: SampleRequest) -> Completion: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """An answered call."""

    number: int
    messages: tuple[Message, ...]  # as the program sent them
    rendered: tuple[Message, ...]  # as they are in the prompt, where a reply is the whole of its sampled text
    tools: tuple[dict[str, Any], ...] | None
    prompt: IntArray
    params: SamplingParams
    completion: Completion
    text: str  # all that was sampled, special tokens too, but for the end of the turn
    reply: Message  # what the program was given

    @property
    def finish_reason(self) -> str:
        if self.reply.tool_calls:
            return "tool_calls"
        return "length" if self.completion.stop is StopReason.LENGTH else "stop"


class ChatSession:
    """Answer and record the calls of an open episode. Calls may overlap; they are numbered in the order of arrival.

    `sampling` has the defaults of a call, and the most `max_tokens` that one may ask for. With `pinned`, a call may not
    choose another temperature or top_p, as training needs it. A call's seed is derived from the episode's seed and the
    call's number, or the `seed` that the call asks for.
    """

    def __init__(
        self,
        *,
        base_url: str,
        sampler: SampleFn,
        renderer: Renderer,
        form: ToolForm | None,
        sampling: SamplingParams,
        seed: int,
        max_calls: int,
        max_tokens: int,
        pinned: bool,
    ) -> None:
        assert max_calls > 0
        assert max_tokens > 0
        self.base_url = base_url
        self.error: HeadraceError | None = None  # the first failure of the sampler
        self._sampler, self._renderer, self._form = sampler, renderer, form
        self._sampling, self._seed, self._pinned = sampling, seed, pinned
        self._max_calls, self._max_tokens = max_calls, max_tokens
        self._calls: dict[int, Call] = {}
        self._begun = 0
        self.limit: EndReason | None = None  # why a call was refused last: too many tokens, or too many calls
        self._open: set[asyncio.Task[Call]] = set()
        self._closed = False

    # --- the record --------------------------------------------------------------------------------------------------

    @property
    def calls(self) -> tuple[Call, ...]:
        return tuple(self._calls[number] for number in sorted(self._calls))

    @property
    def steps(self) -> tuple[Step, ...]:
        """A step for each call: exactly what the sampler was given, and what it returned."""
        return tuple(
            Step(prompt=call.prompt, completion=call.completion, action=self._renderer.decode(call.completion.tokens))
            for call in self.calls
        )

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation: of each call the messages after the last reply that it repeats, then its own reply."""
        conversation: list[Message] = []
        replies: list[tuple[Any, ...]] = []
        for call in self.calls:
            repeated = [index for index, message in enumerate(call.messages) if _key(message) in replies]
            conversation += [*call.messages[max(repeated, default=-1) + 1 :], call.reply]
            replies.append(_key(call.reply))
        return tuple(conversation)

    @property
    def temperature(self) -> float:
        """Temperature of all calls. Raises EpisodeError when they differ: an episode is trained at one temperature."""
        temperatures = sorted({call.params.temperature for call in self._calls.values()})
        if len(temperatures) > 1:
            listed = ", ".join(f"{value:g}" for value in temperatures)
            raise EpisodeError(f"the program sampled at the temperatures {listed}: use one of them")
        return temperatures[0] if temperatures else self._sampling.temperature

    @property
    def truncated(self) -> bool:
        """True if a limit ended the episode: the last reply was truncated, or a call was refused because of a limit."""
        return self.limit is not None or (bool(self._calls) and self.calls[-1].completion.stop is StopReason.LENGTH)

    # --- calls -------------------------------------------------------------------------------------------------------

    async def answer(self, request: ChatRequest) -> Call:
        """Sample one reply and record it. Raises ApiError, and SamplerError when sampling failed.

        A call that is cancelled, because the program no longer waits for it, leaves no trace.
        """
        if self._closed:
            raise _unknown_episode()
        task = asyncio.ensure_future(self._answer(request))
        self._open.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if self._closed:  # and not the caller
                raise _unknown_episode() from None
            raise
        finally:
            task.cancel()
            self._open.discard(task)

    def count(self, request: ChatRequest) -> int:
        """Count the tokens of the prompt that a call would have now. Raises ApiError. Records nothing."""
        if self._closed:
            raise _unknown_episode()
        prompt, _ = self._prompt(tuple(message.to_message() for message in request.messages), request.shown_tools)
        return len(prompt)

    def close(self) -> None:
        """Refuse later calls and those that are still open."""
        self._closed = True
        for task in self._open:
            task.cancel()

    async def _answer(self, request: ChatRequest) -> Call:
        if self._begun >= self._max_calls:
            self.limit = EndReason.MAX_TURNS
            raise ApiError(f"the episode has had its {self._max_calls} calls", code="too_many_calls")
        messages = tuple(message.to_message() for message in request.messages)
        tools = request.shown_tools
        prompt, rendered = self._prompt(messages, tools)
        params = self._params(request, self._begun, len(prompt))
        number, self._begun = self._begun, self._begun + 1
        completion = await self._sample(SampleRequest(prompt=prompt, params=params))
        text, reply = self._reply(request, number, params, completion)
        call = Call(
            number=number,
            messages=messages,
            rendered=rendered,
            tools=tools,
            prompt=prompt,
            params=params,
            completion=completion,
            text=text,
            reply=reply,
        )
        self._calls[number] = call
        if self.limit is EndReason.MAX_TOKENS:  # the program shortened its messages, and goes on
            self.limit = None
        return call

    def _prompt(
        self, messages: tuple[Message, ...], tools: tuple[dict[str, Any], ...] | None
    ) -> tuple[IntArray, tuple[Message, ...]]:
        """Return the tokens to continue, and the messages as they are rendered in them."""
        try:
            before = self._before(messages, tools)
            if before is not None:
                new = messages[len(before.messages) + 1 :]
                past = int_array(np.concatenate([before.prompt, before.completion.tokens]))
                # as it was sampled; else as the template writes it, which may be the same tokens under another name
                replies = (Message(role="assistant", content=before.text), before.reply)
                extended = extended_prompt(self._renderer, past, before.rendered, replies, new, tools)
                if extended is not None:
                    return extended
            prompt = self._renderer.prompt(messages, tools)
            if tools is not None and np.array_equal(prompt, self._renderer.prompt(messages)):
                raise ApiError(
                    "this model's chat template shows no tools: describe them in a message and leave tools out",
                    param="tools",
                )
        except DataError as exc:
            raise ApiError(str(exc), param="messages") from exc
        return prompt, messages

    def _before(self, messages: Sequence[Message], tools: tuple[dict[str, Any], ...] | None) -> Call | None:
        """Find the latest call whose messages and reply these messages begin with."""
        keys = [_key(message) for message in messages]
        for call in reversed(self.calls):
            earlier = [_key(message) for message in (*call.messages, call.reply)]
            if call.tools == tools and keys[: len(earlier)] == earlier:
                return call
        return None

    def _params(self, request: ChatRequest, number: int, prompt_tokens: int) -> SamplingParams:
        room = self._max_tokens - prompt_tokens
        if room <= 0:
            self.limit = EndReason.MAX_TOKENS
            raise ApiError(
                f"the messages have {prompt_tokens} tokens, and with the reply there may be {self._max_tokens}",
                param="messages",
                code="context_length_exceeded",
            )
        chosen = self._sampling
        for name in ("temperature", "top_p"):
            requested, pinned = getattr(request, name), getattr(chosen, name)
            if self._pinned and requested is not None and requested != pinned:
                raise ApiError(
                    f"{name} is {pinned:g} in this episode, which may be trained on: leave it out", param=name
                )
        seed = derive_seed(self._seed, number)
        return replace(
            chosen,
            max_tokens=min(chosen.max_tokens, room, request.asked_tokens or room),
            temperature=chosen.temperature if request.temperature is None else request.temperature,
            top_p=chosen.top_p if request.top_p is None else request.top_p,
            stop_strings=(*chosen.stop_strings, *request.stops),
            seed=seed if request.seed is None else derive_seed(self._seed, "asked", request.seed),
        )

    async def _sample(self, request: SampleRequest) -> Completion:
        """Sample to the end of the sequence, across weight updates."""
        try:
            with boundary(SamplerError, "sampling failed"):
                completion = await self._sampler.sample(request)
                for _ in range(MAX_INTERRUPTS):
                    if completion.stop is not StopReason.INTERRUPTED:
                        return completion
                    completion = await self._sampler.sample(replace(request, continue_from=completion))
                raise SamplerError(f"a sequence was interrupted {MAX_INTERRUPTS} times: publish less often")
        except HeadraceError as exc:
            self.error = self.error or exc
            raise

    def _reply(
        self, request: ChatRequest, number: int, params: SamplingParams, completion: Completion
    ) -> tuple[str, Message]:
        text = self._renderer.spoken(completion.tokens)
        parsed = ParsedReply(content="")
        in_channels = self._form is not None and self._form.kind == "channels"
        if request.callable_tools or in_channels:
            parsed = parse_reply(cut_at_stops(text, params.stop_strings), self._form, request.callable_tools)
        if not parsed.calls:
            content = cut_at_stops(self._renderer.decode(completion.tokens), params.stop_strings)
            if in_channels and parsed.content != text:  # decoding leaves out the marks of channels, not their names
                content = parsed.content
            return text, Message(role="assistant", content=content)
        calls = with_ids(parsed.calls, self._seed, number)
        return text, Message(role="assistant", content=parsed.content, tool_calls=calls)


def _unknown_episode() -> ApiError:
    return ApiError("there is no such episode, or it is over", status=404, code="unknown_episode")


def cut_at_stops(text: str, stops: Sequence[str]) -> str:
    """
    >>> cut_at_stops("one. two; three", (";", "."))
    'one'
    """
    return text[: min((place for place in (text.find(stop) for stop in stops) if place >= 0), default=len(text))]


def _key(message: Message) -> tuple[Any, ...]:
    """Return a key that is equal for equal messages, also if a call's arguments are written with other spaces."""
    calls = tuple((call.id, call.name, _arguments(call.arguments)) for call in message.tool_calls)
    return message.role, message.content, message.name, calls, message.tool_call_id


def _arguments(text: str) -> str:
    """Write arguments in one way; 1.0 becomes 1, as it does in clients that are written in JavaScript."""
    try:
        return json.dumps(json.loads(text, parse_float=_number), sort_keys=True)
    except (ValueError, RecursionError):
        return text


def _number(text: str) -> float:
    value = float(text)
    return int(value) if value.is_integer() else value
