"""Define what is asked of an inference server, and the values that pass. Adapters implement `EngineApi`."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from torch import Tensor
from torch.distributed.distributed_c10d import Store

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


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """The name, type and shape of a tensor that a server is about to receive."""

    name: str
    dtype: str  # as torch writes it, without "torch."
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferGroup:
    """A process group of the trainer, rank 0, and the workers of one server."""

    name: str
    host: str  # where the trainer's store listens
    port: int
    backend: str  # "gloo" or "nccl"
    num_ranks: int


class TensorApi(Protocol):
    """Give tensors to a server without files, between `begin_update` and `end_update`, while it is paused."""

    async def num_workers(self) -> int:
        """Return how many processes of the server hold weights."""

    def group_store(self, store: Store, group: TransferGroup) -> Store:
        """Return the part of the store that the server's workers meet in."""

    async def join_group(self, group: TransferGroup) -> None:
        """Return when the workers have joined."""

    async def leave_group(self, group: TransferGroup) -> None: ...

    async def begin_update(self) -> None: ...

    async def receive(self, specs: Sequence[TensorSpec], group: TransferGroup) -> None:
        """Receive tensors in this order, each by a broadcast from rank 0."""

    async def open_shared(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Read tensors from the memory of a GPU of this machine, where this process keeps them meanwhile."""

    async def end_update(self, version: int) -> None: ...


class EngineApi(Protocol):
    """One inference server. Every verb has a deadline.

    All raise ServerLostError when the server does not answer or has failed, SamplerError when it refuses.
    """

    @property
    def url(self) -> str: ...

    @property
    def tensors(self) -> TensorApi: ...

    def move(self, url: str) -> None:
        """Go on at another address, where the server was started again."""

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
