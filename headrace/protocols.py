"""The five protocols every stage is reached through. Implementations do not inherit from them.

Each has a contract-test file in `tests/contracts/` that runs against every implementation, fakes included.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
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
    """Samples from a policy. A token's version is the one loaded when it was sampled.

    A sampler with a true attribute `holds_in_flight` keeps the keys and values of interrupted sequences when weights
    are loaded, so that what continues one of them (`continue_from`) does not compute its beginning again; all else that
    it kept from before is still forgotten. `interrupt = "inflight"` needs it.
    """

    @property
    def version(self) -> int: ...

    async def sample(self, request: SampleRequest) -> Completion:
        """One sequence. After `pause(interrupt=True)` an open call resolves with `stop = INTERRUPTED`.

        A call made while paused waits for `resume`. Raises SamplerError on a request that can never fit.
        `prefix_logprobs` that a request asks for (`score_from`) may be None: then `score` tells.
        """

    async def score(self, sequences: Sequence[IntArray], temperature: float = 1.0) -> tuple[FloatArray, ...]:
        """Log-prob of every token given those before it; entry 0 is NaN, so each reply has its sequence's length."""

    async def load(self, handle: WeightsHandle, version: int) -> str:
        """Take new weights and return their fingerprint. Only while paused or idle; versions only grow."""

    async def pause(self, *, interrupt: bool) -> None:
        """Returns when nothing is being decoded: open calls were interrupted, or (interrupt=False) have ended."""

    async def resume(self) -> None: ...


class TrainBackend(Protocol):
    """Trains one model. Every verb returns a future at once; requests run one after another in submission order.

    A failed request fails its own future with BackendError and leaves the backend usable: what it had accumulated
    is discarded. Gradients of several `forward_backward` calls add up until `optim_step`.
    """

    def forward(self, data: Sequence[Datum], loss: LossSpec) -> "Future[ForwardOut]":
        """Loss and log-probs, no gradient, no state touched."""

    def forward_backward(self, data: Sequence[Datum], loss: LossSpec) -> "Future[ForwardOut]": ...

    def optim_step(self, update: Adam | DiscardGradient | ScaleUpdate) -> "Future[UpdateOut]":
        """Raises (through the future) NoGradientError for an Adam when nothing was accumulated, and BackendError for a
        ScaleBack that follows no reversible Adam."""

    def save_state(self, folder: Path) -> "Future[None]":
        """Weights in Hugging Face layout plus everything needed to go on exactly (optimiser, counters)."""

    def load_state(self, folder: Path) -> "Future[None]": ...

    def export_weights(self) -> "Future[WeightsHandle]": ...


class Env(Protocol):
    """One episode's world. Synchronous; the episode worker runs slow ones off the event loop.

    An environment with a true attribute `deterministic` repeats itself: the same task, seed and actions give the same
    observations and rewards. Its episodes in flight survive a checkpoint, by being played again from their actions.
    """

    def reset(self, task: Task, seed: int) -> Observation: ...

    def step(self, action: str) -> StepResult: ...

    def close(self) -> None: ...


class ToolEnv(Env, Protocol):
    """An environment whose observations may offer tools. What the policy says after one that does goes to `call`
    instead of `step`, with the calls in it; each observation says for itself which tools there are.

    The environment makes the calls and tells what came of them, in `tool` messages with the calls' ids, or tells the
    policy what was wrong (`action.problem`) and calls the step invalid.
    """

    def call(self, action: Action) -> StepResult: ...


class RewardRunner(Protocol):
    """Scores the episodes of one group, in order; an episode whose reward could not be found out comes back failed."""

    async def score(self, episodes: Sequence[Episode]) -> tuple[ScoredEpisode | FailedEpisode, ...]: ...

    async def close(self) -> None: ...


class MetricSink(Protocol):
    """Takes numbers named `area/name`, one call per step and area of the run."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...
