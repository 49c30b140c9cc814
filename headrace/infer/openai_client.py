"""Ask a remote model through OpenAI's chat-completions API: messages in, one message out.

The API returns no tokens and log-probs that training could use, so this is no `Sampler`. Attempts that may succeed
later are repeated, with growing pauses, until a deadline; every request has a time limit of its own.
"""

import asyncio
import json
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from headrace.errors import ConfigError, SamplerError, boundary
from headrace.render import Tools
from headrace.retry import Backoff, TryAgain, check_transient, doubling, reply_words, retry_async
from headrace.types import Message, SamplingParams, StopReason, ToolCall, wire_message

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 20.0
MAX_REPLY_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointConfig:
    """An OpenAI-compatible endpoint and its limits."""

    url: str  # the base, up to and including /v1
    api_key_env: str = ""  # the environment variable that has the key; "": no key is sent
    timeout_s: float = 120.0  # of one request
    deadline_s: float = 600.0  # of a reply with all its attempts
    at_once: int = 16  # requests that are open together


class RemoteModel:
    """The model `name` at an endpoint. Of `sampling` it sends max_tokens, temperature, top_p and stop strings."""

    def __init__(
        self,
        name: str,
        endpoint: EndpointConfig,
        sampling: SamplingParams,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Raise ConfigError if the key is not in the environment, or `sampling` has settings that the API lacks."""
        if sampling.top_k is not None or sampling.min_p:
            raise ConfigError("a remote model takes no top_k and no min_p: leave them out of rl.sampling")
        self._name, self._endpoint, self._pause = name, endpoint, pause
        self._sampling_body = _sampling_fields(sampling)
        self._permits = asyncio.Semaphore(endpoint.at_once)
        self._client = httpx.AsyncClient(
            base_url=endpoint.url.rstrip("/") + "/",
            headers=_headers(endpoint.api_key_env),
            timeout=endpoint.timeout_s,
            transport=transport,
            trust_env=True,
        )

    async def reply(self, messages: Sequence[Message], tools: Tools) -> tuple[Message, StopReason]:
        """Return the model's next message. Raises SamplerError if it refuses, or if the deadline passes."""
        body: dict[str, Any] = {
            "model": self._name,
            "messages": [_wire(message) for message in messages],
            **self._sampling_body,
        }
        if tools:
            body["tools"] = [dict(tool) for tool in tools]
        async with self._permits:
            answer = await self._answer(body)
        with boundary(SamplerError, f"the reply of {self._name} is not a chat completion"):
            choice = answer["choices"][0]
            stop = StopReason.LENGTH if choice.get("finish_reason") == "length" else StopReason.STOP
            return _message(choice["message"]), stop

    async def close(self) -> None:
        await self._client.aclose()

    async def _answer(self, body: Mapping[str, Any]) -> Any:
        last_failure = "no attempt has ended"

        async def attempt() -> Any:
            nonlocal last_failure
            try:
                return await self._attempt(body)
            except TryAgain as failure:
                last_failure = str(failure)
                logger.info("%s: %s; trying again", self._name, last_failure)
                raise

        limit = asyncio.timeout(self._endpoint.deadline_s)
        try:
            async with limit:
                return await retry_async(attempt, Backoff(doubling(FIRST_PAUSE_S, LONGEST_PAUSE_S)), self._pause)
        except TimeoutError as exc:
            if not limit.expired():
                raise
            raise SamplerError(
                f"{self._name} gave no reply within {self._endpoint.deadline_s:g} s; the last attempt: {last_failure}; "
                "raise remote.deadline_s, or look at the server"
            ) from exc

    async def _attempt(self, body: Mapping[str, Any]) -> Any:
        try:
            async with self._client.stream("POST", "chat/completions", json=body) as response:
                content = await _read(response)
        except httpx.TransportError as exc:
            raise TryAgain(f"{type(exc).__name__}: {exc}") from exc
        if response.status_code == 200:
            with boundary(SamplerError, f"the reply of {self._name} is not JSON"):
                return json.loads(content)
        status = response.status_code
        check_transient(status, response.headers, content)
        raise SamplerError(f"{self._name} refused a request, status {status}: {reply_words(status, content)}")


def _sampling_fields(sampling: SamplingParams) -> dict[str, Any]:
    """Return the settings that differ from the API's defaults; some models refuse those that they cannot change."""
    fields: dict[str, Any] = {"max_completion_tokens": sampling.max_tokens}
    if sampling.temperature != 1.0:
        fields["temperature"] = sampling.temperature
    if sampling.top_p != 1.0:
        fields["top_p"] = sampling.top_p
    if sampling.stop_strings:
        fields["stop"] = list(sampling.stop_strings)
    return fields


def _headers(api_key_env: str) -> dict[str, str]:
    if not api_key_env:
        return {}
    key = os.environ.get(api_key_env, "")
    if not key:
        raise ConfigError(
            f"the environment variable {api_key_env}, which has the key of the remote model, is not set: set it, or "
            'write remote.api_key_env = "" where none is needed'
        )
    return {"Authorization": f"Bearer {key}"}


def _wire(message: Message) -> dict[str, Any]:
    wire = wire_message(message)
    if message.role == "tool":  # the call's id identifies a result
        wire.pop("name", None)
    if message.tool_calls:
        wire["content"] = message.content or None
    return wire


def _message(reply: Mapping[str, Any]) -> Message:
    calls = tuple(
        ToolCall(
            name=str(call["function"]["name"]),
            arguments=_arguments(call["function"].get("arguments")),
            id=str(call.get("id") or ""),
        )
        for call in reply.get("tool_calls") or ()
    )
    return Message(role="assistant", content=_text(reply.get("content")), tool_calls=calls)


def _text(content: Any) -> str:
    """Join the text parts of a content that some servers send as a list; other parts (thoughts) are left out."""
    if isinstance(content, list):
        return "".join(part["text"] for part in content if part.get("type") == "text")
    return str(content or "")


def _arguments(arguments: Any) -> str:
    """Return the arguments as JSON text, as the API has them; some servers send the object itself."""
    return json.dumps(arguments) if isinstance(arguments, Mapping) else str(arguments or "{}")


async def _read(response: httpx.Response) -> bytes:
    body = bytearray()
    async for chunk in response.aiter_bytes():
        body += chunk
        if len(body) > MAX_REPLY_BYTES:
            raise SamplerError(f"a reply has more than {MAX_REPLY_BYTES} bytes")
    return bytes(body)
