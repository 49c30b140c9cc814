"""Score with frozen models, references and teachers, in workers of their own; both sides of it."""

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence

from headrace.cluster.role_worker import RoleWorker
from headrace.cluster.worker_pool import WorkerLostError, WorkerPool
from headrace.errors import HeadraceError, ModelError, RolloutError, boundary
from headrace.process.watchdog import watching
from headrace.retry import doubling
from headrace.types import Datum, FloatArray

logger = logging.getLogger(__name__)
MAX_ATTEMPTS = 8  # at a request whose workers are lost one after another

Scorer = Callable[[Sequence[Datum]], Sequence[FloatArray]]


class ReferenceWorker(RoleWorker):
    """Holds the frozen models that it was asked for, and scores with them, one request at a time."""

    def __init__(self) -> None:
        super().__init__()
        self._load: Callable[[str], Scorer] | None = None
        self._scorers: dict[str, Scorer] = {}
        self._turn = asyncio.Lock()

    def build(self, build: Callable[[str], Scorer]) -> None:
        self._load = build

    async def score(self, folder: str, data: Sequence[Datum]) -> Sequence[FloatArray] | HeadraceError:
        """Score with the model of a folder, which is loaded at its first request; return the scores or the error."""
        async with self._turn:
            try:
                with boundary(ModelError, f"the frozen model {folder} cannot score"):
                    return await asyncio.to_thread(self._score, folder, data)
            except HeadraceError as exc:
                return exc

    def _score(self, folder: str, data: Sequence[Datum]) -> Sequence[FloatArray]:
        assert self._load is not None
        if folder not in self._scorers:
            self._scorers[folder] = self._load(folder)
        return self._scorers[folder](data) if data else ()


class ClusterScorer:
    """Scores at reference workers: a whole request goes to one, so that workers change no rounding."""

    def __init__(self, pool: WorkerPool, folder: str) -> None:
        self._pool, self._folder = pool, folder

    async def __call__(self, data: Sequence[Datum]) -> Sequence[FloatArray]:
        pauses_s = doubling(0.1, 5.0)
        for attempt in itertools.count(1):
            try:
                async with self._pool.worker() as worker:
                    with watching(f"the scores of {self._folder} by {worker.name}", loads=True):  # at first it loads
                        scores = await worker.call("score", self._folder, tuple(data))
                break
            except WorkerLostError as exc:
                if attempt == MAX_ATTEMPTS:
                    raise RolloutError(
                        f"scoring with {self._folder} lost {attempt} workers one after another, the last with: {exc}; "
                        "if the model needs more memory than a node has, use larger nodes"
                    ) from exc
                logger.warning("a request to %s is scored again: %s", self._folder, exc)
            await asyncio.sleep(next(pauses_s))
        if isinstance(scores, HeadraceError):
            raise scores
        return tuple(scores)
