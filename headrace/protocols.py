"""Define the five protocols through which every stage is reached. Implementations do not inherit from them.

Each has a contract-test file in `tests/contracts/` that runs against every implementation, fakes included. A sampler or
an environment may also have the attributes of `SamplerFlags` or `EnvFlags`, which say what more it can do.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from headrace.types import (
    Action,
    Adam,
    Completion,
    Datum,
    DiscardGradient,
    Episode,
    FailedEpisode,
    FloatArray,
    ForwardOut,
    IntArray,
    LossSpec,
    Observation,
    SampleRequest,
    ScaleUpdate,
    ScoredEpisode,
    StepResult,
    Task,
    UpdateOut,
    WeightsHandle,
)


class Sampler(Protocol):
    """Samples from a policy. A token's version is the one loaded when it was sampled. May have `SamplerFlags`."""

    @property
    def version(self) -> int: ...

    async def sample(self, request: SampleRequest) -> Completion:
        """Sample one sequence. After `pause(interrupt=True)` an open call resolves with `stop = INTERRUPTED`.

        A call made while paused waits for `resume`. Raises SamplerError on a request that can never fit.
        `prefix_logprobs` may be None although the request asks for them (`score_from`): then call `score`.
        """

    async def score(self, sequences: Sequence[IntArray], temperature: float = 1.0) -> tuple[FloatArray, ...]:
        """Compute the log-prob of every token given those before it; entry 0 of each sequence is NaN."""

    async def load(self, handle: WeightsHandle, version: int) -> str:
        """Load new weights and return their fingerprint. Only while paused or idle; versions only grow."""

    async def pause(self, *, interrupt: bool) -> None:
        """Stop decoding: interrupt open calls or, with interrupt=False, wait until they have ended."""

    async def resume(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerFlags:
    """Optional attributes of a `Sampler`; one that it lacks counts as the default here."""

    # Keeps the KV cache of interrupted sequences when weights are loaded, so that a request that continues one of them
    # (`continue_from`) need not prefill it again; every other cached prefix is still dropped. Needed by
    # `interrupt = "inflight"`.
    holds_in_flight: bool = False
    # A continued request draws the tokens that it would have drawn uninterrupted, under the same weights.
    resumes_draws: bool = True
    # `score` takes temperatures other than 1; others raise SamplerError, and the trainer has to score.
    scores_any_temperature: bool = True


def sampler_flags(sampler: Sampler) -> SamplerFlags:
    """Read a sampler's optional attributes."""
    default = SamplerFlags()
    return SamplerFlags(
        holds_in_flight=bool(getattr(sampler, "holds_in_flight", default.holds_in_flight)),
        resumes_draws=bool(getattr(sampler, "resumes_draws", default.resumes_draws)),
        scores_any_temperature=bool(getattr(sampler, "scores_any_temperature", default.scores_any_temperature)),
    )


class TrainBackend(Protocol):
    """Trains one model. Every verb returns a future at once; requests run one after another in submission order.

    A failed request fails its own future with BackendError, discards the accumulated gradient and leaves the backend
    usable. Gradients of several `forward_backward` calls add up until `optim_step`.
    """

    def forward(self, data: Sequence[Datum], loss: LossSpec) -> "Future[ForwardOut]":
        """Compute loss and log-probs without a gradient; no state changes."""

    def forward_backward(self, data: Sequence[Datum], loss: LossSpec) -> "Future[ForwardOut]": ...

    def optim_step(self, update: Adam | DiscardGradient | ScaleUpdate) -> "Future[UpdateOut]":
        """Update the weights, discard the gradient, or scale the last update back.

        Raises (through the future) NoGradientError for an Adam when nothing was accumulated, and BackendError for a
        ScaleUpdate that follows no reversible Adam.
        """

    def save_state(self, folder: Path) -> "Future[None]":
        """Write the weights in Hugging Face layout and all that an exact resume needs (optimiser, counters).

        The state is that of this place in the order of requests; later ones need not wait until it is written.
        """

    def load_state(self, folder: Path) -> "Future[None]": ...

    def export_weights(self) -> "Future[WeightsHandle]": ...


class Env(Protocol):
    """The environment of one episode. Its verbs are synchronous. May have `EnvFlags`."""

    def reset(self, task: Task, seed: int) -> Observation: ...

    def step(self, action: str) -> StepResult: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvFlags:
    """Optional attributes of an `Env`; one that it lacks counts as the default here."""

    # The same task, seed and actions give the same observations and rewards. Its episodes in flight survive a
    # checkpoint: they are replayed from their recorded actions.
    deterministic: bool = False
    # Its verbs take long or wait, so they are called on a thread instead of the event loop.
    blocking: bool = False


def env_flags(env: Env) -> EnvFlags:
    """Read an environment's optional attributes."""
    return EnvFlags(
        deterministic=bool(getattr(env, "deterministic", False)), blocking=bool(getattr(env, "blocking", False))
    )


class ToolEnv(Env, Protocol):
    """An environment whose observations may offer tools, each observation its own.

    After an observation with tools, the policy's turn goes to `call` instead of `step`, with its calls parsed. The
    environment makes the calls and returns their results in `tool` messages with the calls' ids. If there is an
    `action.problem`, it tells the policy so and marks the step invalid.
    """

    def call(self, action: Action) -> StepResult: ...


class RewardRunner(Protocol):
    """Scores the episodes of one group, in order; returns a FailedEpisode where the reward could not be determined."""

    async def score(self, episodes: Sequence[Episode]) -> tuple[ScoredEpisode | FailedEpisode, ...]: ...

    async def close(self) -> None: ...


class MetricSink(Protocol):
    """Takes numbers named `area/name`, one call per step and area of the run."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...
