"""The protocol of the machine that computes: one base model, many adapters, immutable sampling snapshots.

The service decides order, identity, ownership and durability; a host computes. It knows no request, session or wire.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from headrace.service.host.kl_bound import KlBound
from headrace.types import (
    Adam,
    Completion,
    Datum,
    DiscardGradient,
    FloatArray,
    ForwardOut,
    IntArray,
    LossSpec,
    SampleRequest,
    UpdateOut,
)

FULL_COPIES = 2  # samplers of full models that a host keeps


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpec:
    """A LoRA adapter of its own rank; the scale of its product is alpha / rank."""

    rank: int
    alpha: float = 32.0
    seed: int = 0
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True

    def __post_init__(self) -> None:  # the edge has already raised; this catches us
        assert self.rank > 0
        assert self.train_mlp or self.train_attn or self.train_unembed


@dataclass(frozen=True, slots=True, kw_only=True)
class FullFinetune:
    """A model of which every parameter is trained; its snapshots are full copies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopLogprobs:
    """The k most likely tokens at each position of a sequence given those before it; row 0 means nothing."""

    tokens: IntArray  # [T, k]
    logprobs: FloatArray  # [T, k], at temperature 1

    def __post_init__(self) -> None:
        assert self.tokens.ndim == 2
        assert self.tokens.shape == self.logprobs.shape


Data = Sequence[Datum] | Callable[[], Sequence[Datum]]


def resolve_data(data: Data) -> Sequence[Datum]:
    """Return the data, or call the function that makes them."""
    return data() if callable(data) else data


class ModelHost(Protocol):
    """Computes: one base model, and the adapters trained and sampled over it.

    Training verbs return futures at once and run in submission order on one worker; a request that fails leaves every
    other model as it was. A failed `forward_backward` discards what it accumulated itself and nothing that earlier ones
    did. Losses see every position of a datum, also those of weight 0, and `ForwardOut.logprobs` has a value at each.
    `optim_step(Adam)` with nothing accumulated is a step with a zero gradient; every `optim_step` of a model that is
    there forgets what was accumulated, also one that fails or skips its update. Unknown names raise HeadraceErrors
    (through the future), with one sentence.

    One full model may be there beside the adapters, and `FULL_COPIES` samplers of full models: the newest take the
    place of the oldest, whose calls raise SamplerGoneError.
    """

    def create(self, model: str, spec: AdapterSpec | FullFinetune) -> "Future[None]": ...

    def drop(self, model: str) -> "Future[None]":
        """Forget a model, if it is there; its snapshots stay."""

    def forward(self, model: str, data: Data, loss: LossSpec) -> "Future[ForwardOut]":
        """Compute loss and log-probs; gradients and optimiser are not touched.

        `data` may be a function: it is called on the worker when the request's turn comes, so it can use the results of
        requests before it.
        """

    def forward_backward(
        self, model: str, data: Data, loss: LossSpec, bound: KlBound | None = None
    ) -> "Future[ForwardOut]":
        """Accumulate a gradient. With a `bound`, which needs `sampler_logprobs`, the next `optim_step` keeps to it."""

    def optim_step(self, model: str, update: Adam | DiscardGradient) -> "Future[UpdateOut]": ...

    def save(self, model: str, folder: Path, *, optimizer: bool) -> "Future[None]":
        """Save the adapter in PEFT layout, its AdapterSpec, and (optimizer=True) moments and counters.

        Whole or not at all: a temporary name, fsync, rename. A folder that is there is replaced.
        """

    def load(self, model: str, folder: Path, *, optimizer: bool) -> "Future[None]":
        """Load saved weights of the same rank and layers (seeds may differ); moments and counters as saved, or
        (optimizer=False) as of a new model.

        Accumulated gradients are forgotten. Raises CheckpointError, and the model is then as it was.
        """

    def snapshot(self, model: str, sampler: str) -> "Future[None]":
        """Copy the model's weights as they are now into an immutable sampler of this name."""

    def open_sampler(self, sampler: str, folder: Path | None) -> "Future[None]":
        """Open a sampler over a saved adapter, or over the base model itself if `folder` is None."""

    def close_sampler(self, sampler: str) -> "Future[None]":
        """Forget a sampler, if it is there."""

    async def sample(self, sampler: str, request: SampleRequest) -> Completion:
        """Sample one sequence. Cancelling the call stops its decoding. Raises SamplerError."""

    async def score(
        self, sampler: str, sequences: Sequence[IntArray], temperature: float = 1.0
    ) -> tuple[FloatArray, ...]:
        """Return the log-prob of every token given those before it; entry 0 of each reply is NaN."""

    def close(self) -> None: ...


@runtime_checkable
class TopLogprobsHost(Protocol):
    """A host that can also score other tokens than those of a sequence. Without it such requests are refused."""

    async def top_logprobs(self, sampler: str, sequence: IntArray, k: int) -> TopLogprobs:
        """Return the k most likely tokens at every position of the sequence, most likely first."""

    async def target_logprobs(self, sampler: str, sequence: IntArray, targets: IntArray) -> FloatArray:
        """Return log-probs of other tokens: row i of `targets` [T - 1, K] is for position i + 1 (-1: none, gives 0)."""
