"""Write checkpoints between training steps, and end a run that was asked to stop.

A save stops the loop only until the backends have been asked for their states, which they copy before anything that is
asked of them later; the files are written beside the next steps, one checkpoint at a time.

The checkpointer remembers the run's JSON state at the end of the last step. A stop that arrives during a rollout saves
that state at once: the weights have not changed since.
"""

import asyncio
import gc
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar

from headrace.errors import FolderLockedError, HeadraceError, Interrupted, RolloutError, RunFolderError, StorageError
from headrace.loops.evaluate import EvalResult
from headrace.observe.machine import return_free_memory
from headrace.process.watchdog import watching_thread
from headrace.protocols import TrainBackend

logger = logging.getLogger(__name__)
R = TypeVar("R")
TRIM_EVERY_S = 30.0  # the least time between two returns of freed memory
NO_BACKENDS: Mapping[str, TrainBackend] = {}


def _nothing() -> None:
    """Do nothing before or after a save."""


class CheckpointWriter(Protocol):
    """Writes one checkpoint: the part of `train.checkpoint.CheckpointStore` that a loop needs."""

    def save(
        self, step: int, write: Callable[[Path], None], state: Mapping[str, Any], score: float | None = None
    ) -> Path: ...


class Checkpointer:
    """Saves a checkpoint every so many training steps, at the end, and when a stop is requested.

    `snapshot()` returns the run state without the backends. A value may be a callable: it is evaluated only if the
    checkpoint is written, and must return the state as of the snapshot. `before_save` flushes the files that the state
    counts on; `after_save` is called when the checkpoint stands, perhaps during a later step. A save that fails is
    raised at the end of the next step, or by `finish`.
    """

    def __init__(
        self,
        store: CheckpointWriter,
        backend: TrainBackend,
        snapshot: Callable[[], Mapping[str, Any]],
        *,
        every: int,  # training steps; 0: only at the end
        total: int,  # training steps of the run
        done: int,  # training steps behind the state that the run starts from
        stop: asyncio.Event,
        beside: Mapping[str, TrainBackend] = NO_BACKENDS,  # saved into sub-folders of these names
        before_save: Callable[[], None] = _nothing,
        after_save: Callable[[], None] = _nothing,
    ) -> None:
        self._before_save, self._after_save = before_save, after_save
        self._store, self._backend, self._snapshot, self._beside = store, backend, snapshot, beside
        self._every, self._total, self._stop = every, total, stop
        self._done = self._saved = done  # steps behind the state, and behind the newest checkpoint
        self._state = snapshot()
        self._trimmed_at = time.monotonic()
        self._saving: asyncio.Task[None] | None = None  # the checkpoint that is being written

    async def run_or_stop(self, work: Awaitable[R]) -> R:
        """Return the result of `work`. If a stop comes first, cancel `work`, save the last step's end and raise. If no
        batch can be made (RolloutError), the last step's end is saved too."""
        working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
        except RolloutError:
            await self.save_now()
            raise
        finally:
            working.cancel()
            stopping.cancel()
            await asyncio.gather(working, stopping, return_exceptions=True)
        raise await self._save_and_stop()

    async def evaluate_or_save(self, done: int, evaluation: Awaitable[EvalResult]) -> float:
        """Return the score after `done` steps. If the evaluation fails, save the steps without a score and re-raise:
        the training must not be lost with it. If its files cannot be written nothing is saved: a resume evaluates
        these steps again, which it would not do behind a checkpoint."""
        try:
            return (await evaluation).score
        except (RunFolderError, StorageError, FolderLockedError):
            raise
        except HeadraceError:
            self._done, self._state = done, self._snapshot()
            await self._save(None)
            await self.finish()
            logger.warning("the evaluation after step %d failed; the step is saved, without a score", done)
            raise

    async def end_of_step(self, done: int, score: float | None = None) -> None:
        """Checkpoint if it is time, after `done` finished and published steps; raise Interrupted on a stop request."""
        self._done, self._state = done, self._snapshot()
        if self._saving is not None and self._saving.done():
            await self.finish()
        if time.monotonic() - self._trimmed_at >= TRIM_EVERY_S:
            self._trimmed_at = time.monotonic()
            gc.collect()  # collections are rare in a run, and what waits for one would look like a leak
            await asyncio.to_thread(return_free_memory)
        if done == self._total or (self._every and done % self._every == 0):
            await self._save(score)
        if done == self._total:
            await self.finish()
        if self._stop.is_set():
            raise await self._save_and_stop()

    async def finish(self) -> None:
        """Wait for the checkpoint that is being written, and raise what it has failed with."""
        saving, self._saving = self._saving, None
        if saving is not None:
            await saving

    async def close(
        self, error: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Finish as the exit of a context: beside another error a failed checkpoint is told in the log."""
        try:
            await self.finish()
        except HeadraceError as exc:
            if error is None:
                raise
            logger.warning("%s", exc)

    async def _save(self, score: float | None) -> None:
        """Return when the backends have been asked for their states; the files are written later."""
        await self.finish()
        asked: Future[None] = Future()

        def write(folder: Path) -> None:
            saving = [self._backend.save_state(folder)]
            saving += [backend.save_state(folder / name) for name, backend in self._beside.items()]
            asked.set_result(None)
            for saved in saving:
                saved.result()

        def save(done: int, state: Mapping[str, Any]) -> None:
            with watching_thread(f"the checkpoint of step {done}"):
                evaluated = {name: value() if callable(value) else value for name, value in state.items()}
                self._before_save()
                self._store.save(done, write, evaluated, score)
                self._after_save()

        self._saving = asyncio.create_task(asyncio.to_thread(save, self._done, self._state))
        await asyncio.wait({self._saving, asyncio.wrap_future(asked)}, return_when=asyncio.FIRST_COMPLETED)
        if not asked.done():  # it has failed before
            await self.finish()
        self._saved = self._done

    async def save_now(self) -> None:
        """Save the end of the last step if it is not saved yet, because the run ends.

        A checkpoint written only because of that has no score: which one is the best must not depend on it.
        """
        if self._saved != self._done:
            await self._save(None)
        await self.finish()

    async def _save_and_stop(self) -> Interrupted:
        """Save the last state and return the error that ends the run."""
        await self.save_now()
        return Interrupted(f"stopped on request after step {self._done} of {self._total}")
