"""Small episodes, groups and fakes for the tests of the loops."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.testing import FakeBackend
from headrace.types import (
    Adam,
    Completion,
    DiscardGradient,
    Episode,
    FailedEpisode,
    Group,
    Message,
    Reward,
    ScaleUpdate,
    ScoredEpisode,
    Step,
    StopReason,
    Task,
    UpdateOut,
    float_array,
    int_array,
)


def step(
    logprobs: Sequence[float], *, prompt: Sequence[int] = (7, 8), valid: bool = True, version: int | None = None
) -> Step:
    """One turn of as many tokens as there are log-probs; its tokens are 10, 11, ..."""
    return Step(
        prompt=int_array(prompt),
        completion=Completion(
            tokens=int_array(range(10, 10 + len(logprobs))),
            sampler_logprobs=float_array(logprobs),
            raw_logprobs=float_array(logprobs),
            versions=int_array([version or 0] * len(logprobs)),
            stop=StopReason.STOP,
        ),
        action="go",
        valid=valid,
    )


def scored(
    reward: float,
    *steps: Step,
    task: str = "t",
    success: bool | None = None,
    truncated: bool = False,
    parts: Mapping[str, float] | None = None,
) -> ScoredEpisode:
    episode = Episode(
        id=f"{task}/0",
        task=Task(id=task),
        seed=1,
        steps=steps or (step([-0.5, -0.5]),),
        messages=(Message(role="user", content="x"), Message(role="assistant", content="go")),
        temperature=1.0,
        truncated=truncated,
    )
    return ScoredEpisode(episode=episode, reward=Reward(total=reward, parts=parts or {}, success=success))


def group(id: int, *episodes: ScoredEpisode, num_failed: int = 0) -> Group:
    task = Task(id=f"t{id}")
    failed = FailedEpisode(id="f", task=task, reason="the engine died")
    return Group(id=id, task=task, episodes=episodes, failed=(failed,) * num_failed)


@dataclass(slots=True)
class MemoryStore:
    """Keeps what was saved: step, state and score, and what the backend wrote."""

    folder: Path
    saved: list[tuple[int, dict[str, Any], float | None]] = field(default_factory=list)
    written: list[str] = field(default_factory=list)

    def save(
        self, step: int, write: Callable[[Path], None], state: Mapping[str, Any], score: float | None = None
    ) -> Path:
        write(self.folder)
        self.saved.append((step, dict(state), score))
        self.written.append((self.folder / "fake.json").read_text())
        return self.folder


class SkippingBackend(FakeBackend):
    """A FakeBackend whose gradient is not finite in the updates that are listed (counted from 0)."""

    def __init__(self, *bad: int) -> None:
        super().__init__()
        self._bad, self._seen = set(bad), 0

    def optim_step(self, update: Adam | DiscardGradient | ScaleUpdate) -> "Future[UpdateOut]":
        self._seen += 1
        if self._seen - 1 not in self._bad:
            return super().optim_step(update)
        super().optim_step(DiscardGradient())
        skipped: Future[UpdateOut] = Future()
        skipped.set_result(UpdateOut(grad_norm=float("nan"), updated=False, num_updates=0))
        return skipped
