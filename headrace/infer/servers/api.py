"""Define what is asked of an inference server, and the values that pass. Adapters implement `EngineApi`."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from headrace.errors import SamplerError
from headrace.types import Completion, FloatArray, IntArray, SamplingParams


class ServerLostError(SamplerError):
    """A server is gone, or answers no more. `partial` is what it had sampled of the request."""

    partial: Completion | None = None


class WeightsNotProvenError(SamplerError):
    """A server does not hold the weights that it was given."""


class PauseMode(StrEnum):
    """Choose what a pausing server does with its running requests."""

    ABORT = "abort"  # ends them; they return what they have sampled
    KEEP = "keep"  # freezes them; they go on after `resume`


class Finish(StrEnum):
    """Reasons why a server ended a request."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Tokens [start, end) of a request that were sampled with the weights that the server calls `version`."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedTokens:
    """A part of a request's tokens as it arrives."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    finish: Finish | None = None  # in the last part
    spans: tuple[VersionSpan, ...] = ()  # of all tokens, in the last part


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCall:
    """A request to generate one sequence."""

    id: str
    tokens: IntArray
    params: SamplingParams  # with `stop_tokens` spelled out
    adapter: str | None = None  # the LoRA adapter's name; None: the base model


class EngineApi(Protocol):
    """One inference server. Every verb has a deadline.

    All raise ServerLostError when the server does not answer or has failed, SamplerError when it refuses.
    """

    @property
    def url(self) -> str: ...

    async def context(self) -> int:
        """Return how many tokens a sequence may have."""

    def generate(self, call: GenerateCall) -> AsyncIterator[StreamedTokens]:
        """Sample one sequence, and yield its tokens as they come."""

    async def prompt_logprobs(self, tokens: IntArray, *, adapter: str | None) -> FloatArray:
        """Return the log-prob at temperature 1 of every token but the first, computed without a prefix cache."""

    async def pause(self, mode: PauseMode) -> None: ...

    async def resume(self) -> None: ...

    async def load_folder(self, folder: Path, version: int) -> None:
        """Replace the weights, while paused, and name them."""

    async def load_adapter(self, name: str, folder: Path) -> None: ...

    async def unload_adapter(self, name: str) -> None: ...

    async def flush_caches(self) -> None:
        """Drop cached prefixes and encoder outputs of earlier weights."""

    async def checksums(self) -> Mapping[str, str]:
        """Return the server's own digests of its tensors; empty if it has none."""

    async def close(self) -> None: ...
