"""A model elsewhere, spoken to by OpenAI's chat-completions API: messages in, one message out.

No tokens and no log-probs come back that training could use, so this is no `Sampler`. Attempts that may succeed later
are made again, with growing pauses, until a deadline; every request has a time limit of its own.
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
class Where:
    """`url` is the base, up to and including /v1. `api_key_env` names the environment variable that has the key; "":
    none is sent. `timeout_s` is of one request, `deadline_s` of a reply with all its attempts; `at_once` requests are
    open together."""

    url: str
    api_key_env: str = ""
    timeout_s: float = 120.0
    deadline_s: float = 600.0
    at_once: int = 16


class RemoteModel:
    """The model `name` at an endpoint. Of `sampling`, max_tokens, temperature, top_p and stop strings are asked for."""

    def __init__(
        self,
        name: str,
        where: Where,
        sampling: SamplingParams,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Raises ConfigError when the key is not in the environment, or something is asked for that the API has not."""
        if sampling.top_k is not None or sampling.min_p:
            raise ConfigError("a model elsewhere takes no top_k and no min_p: leave them out of rl.sampling")
        self._name, self._where, self._pause = name, where, pause
        self._asked = _asked(sampling)
        self._room = asyncio.Semaphore(where.at_once)
        self._client = httpx.AsyncClient(
            base_url=where.url.rstrip("/") + "/",
            headers=_headers(where.api_key_env),
            timeout=where.timeout_s,
            transport=transport,
            trust_env=True,
        )

    async def reply(self, messages: Sequence[Message], tools: Tools) -> tuple[Message, StopReason]:
        """The model's next message. Raises SamplerError when it refuses, or answers nothing before the deadline."""
        body: dict[str, Any] = {
            "model": self._name,
            "messages": [_wire(message) for message in messages],
            **self._asked,
        }
        if tools:
            body["tools"] = [dict(tool) for tool in tools]
        async with self._room:
            answer = await self._answer(body)
        with boundary(SamplerError, f"the reply of {self._name} is not a chat completion"):
            choice = answer["choices"][0]
            return _message(choice["message"]), StopReason.LENGTH if choice.get(
                "finish_reason"
            ) == "length" else StopReason.STOP

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

        limit = asyncio.timeout(self._where.deadline_s)
        try:
            async with limit:
                return await retry_async(attempt, Backoff(doubling(FIRST_PAUSE_S, LONGEST_PAUSE_S)), self._pause)
        except TimeoutError as exc:
            if not limit.expired():
                raise
            raise SamplerError(
                f"{self._name} gave no reply within {self._where.deadline_s:g} s; the last attempt: {last_failure}; "
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


def _asked(sampling: SamplingParams) -> dict[str, Any]:
    """What differs from the API's own defaults; some models refuse parameters that they cannot change."""
    asked: dict[str, Any] = {"max_completion_tokens": sampling.max_tokens}
    if sampling.temperature != 1.0:
        asked["temperature"] = sampling.temperature
    if sampling.top_p != 1.0:
        asked["top_p"] = sampling.top_p
    if sampling.stop_strings:
        asked["stop"] = list(sampling.stop_strings)
    return asked


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
    made = wire_message(message)
    if message.role == "tool":  # a result is known by its call's id
        made.pop("name", None)
    if message.tool_calls:
        made["content"] = message.content or None
    return made


def _message(said: Mapping[str, Any]) -> Message:
    calls = tuple(
        ToolCall(
            name=str(call["function"]["name"]),
            arguments=_arguments(call["function"].get("arguments")),
            id=str(call.get("id") or ""),
        )
        for call in said.get("tool_calls") or ()
    )
    return Message(role="assistant", content=_text(said.get("content")), tool_calls=calls)


def _text(content: Any) -> str:
    """Some servers answer in parts, as messages may be sent; of other parts than texts (thoughts) nothing is said."""
    if isinstance(content, list):
        return "".join(part["text"] for part in content if part.get("type") == "text")
    return str(content or "")


def _arguments(given: Any) -> str:
    """JSON in a text, as the API has it; some servers send the object itself."""
    return json.dumps(given) if isinstance(given, Mapping) else str(given or "{}")


async def _read(response: httpx.Response) -> bytes:
    body = bytearray()
    async for chunk in response.aiter_bytes():
        body += chunk
        if len(body) > MAX_REPLY_BYTES:
            raise SamplerError(f"a reply has more than {MAX_REPLY_BYTES} bytes")
    return bytes(body)
