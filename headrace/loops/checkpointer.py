"""What a loop does between two training steps besides training: stop when asked to, and checkpoint.

A keeper remembers the run's JSON state of the last barrier, so a stop that arrives while episodes are being played
saves that state at once: the weights have not changed since.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

from headrace.errors import HeadraceError, Interrupted
from headrace.loops.evaluate import EvalResult
from headrace.protocols import TrainBackend

logger = logging.getLogger(__name__)
R = TypeVar("R")
NO_BACKENDS: Mapping[str, TrainBackend] = {}


class CheckpointWriter(Protocol):
    """`train.checkpoint.CheckpointStore`, as far as a loop needs it."""

    def save(
        self, step: int, write: Callable[[Path], None], state: Mapping[str, Any], score: float | None = None
    ) -> Path: ...


class Checkpointer:
    """`every` training steps (0: only at the end). `snapshot` returns the JSON state of everything but the backends;
    a value of it that takes long to make is a function, called when the state is written, which tells the state of the
    snapshot. Backends of `beside` are saved into sub-folders of their name."""

    def __init__(
        self,
        store: CheckpointWriter,
        backend: TrainBackend,
        snapshot: Callable[[], Mapping[str, Any]],
        *,
        every: int,
        total: int,
        done: int,
        stop: asyncio.Event,
        beside: Mapping[str, TrainBackend] = NO_BACKENDS,
    ) -> None:
        self._store, self._backend, self._snapshot, self._beside = store, backend, snapshot, beside
        self._every, self._total, self._stop = every, total, stop
        self._done = self._saved = done  # steps behind the state, and behind the newest checkpoint
        self._state = snapshot()

    async def run_or_stop(self, work: Awaitable[R]) -> R:
        """The result of `work`; when a stop is asked for first, cancel it, save the last barrier and end the run."""
        working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
        finally:
            working.cancel()
            stopping.cancel()
            await asyncio.gather(working, stopping, return_exceptions=True)
        raise await self._saved_and_stopped()

    async def evaluate_or_save(self, done: int, evaluation: Awaitable[EvalResult]) -> float:
        """The score after `done` steps. If it cannot be had, they are saved without one before the error goes on: what
        was trained must not be lost with it."""
        try:
            return (await evaluation).score
        except HeadraceError:
            self._done, self._state = done, self._snapshot()
            await self._save(None)
            logger.warning("the evaluation after step %d failed; the step is saved, without a score", done)
            raise

    async def end_of_step(self, done: int, score: float | None = None) -> None:
        """`done` steps are finished, logged and published: checkpoint if it is time, end if a stop was asked for."""
        self._done, self._state = done, self._snapshot()
        if done == self._total or (self._every and done % self._every == 0):
            await self._save(score)
        if self._stop.is_set():
            raise await self._saved_and_stopped()

    async def _save(self, score: float | None) -> None:
        def write(folder: Path) -> None:
            self._backend.save_state(folder).result()
            for name, backend in self._beside.items():
                backend.save_state(folder / name).result()

        def save(done: int, state: Mapping[str, Any]) -> None:
            made = {name: value() if callable(value) else value for name, value in state.items()}
            self._store.save(done, write, made, score)

        await asyncio.to_thread(save, self._done, self._state)
        self._saved = self._done

    async def _saved_and_stopped(self) -> Interrupted:
        """A checkpoint made only because of the stop has no score: which one is the best must not depend on it."""
        if self._saved != self._done:
            await self._save(None)
        return Interrupted(f"stopped on request after step {self._done} of {self._total}")
