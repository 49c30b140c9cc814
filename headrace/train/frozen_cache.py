"""An LRU cache of frozen models that training is compared with: loaded at first use, evicted for room, shared.

It must not know what the scores are for. Loading and scoring happen on the caller's thread. Callers wait for a model
that another thread is loading; a model that is evicted while a caller scores with it is freed when that call ends.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace.errors import ModelError, RequestError
from headrace.model.load import LanguageModel
from headrace.model.quantized import model_bytes
from headrace.process.watchdog import watching_thread
from headrace.train.frozen_model import FrozenScorer
from headrace.types import Datum, FloatArray

logger = logging.getLogger(__name__)

LOAD_S = 3600.0  # the longest wait for a model that another caller loads


@dataclass(frozen=True, slots=True)
class FrozenReference:
    """A model in the cache."""

    scorer: FrozenScorer
    size_bytes: int
    lock: threading.Lock = field(default_factory=threading.Lock)  # one request at a time computes on the model


@dataclass(slots=True)
class CacheCounts:
    """Counts of the cache's loads, evictions and hits."""

    loaded: int = 0
    evicted: int = 0
    hits: int = 0


class ReferenceModels:
    """Loads models by name with `load` and keeps at most `limit`, and at most `room_bytes` together unless None.

    The least recently used model is evicted first.
    """

    def __init__(
        self,
        load: Callable[[str], LanguageModel],
        *,
        limit: int = 2,
        room_bytes: int | None = None,
        micro_batch_tokens: int = 8192,
    ) -> None:
        assert limit >= 1
        self._load = load
        self._limit, self._room_bytes = limit, room_bytes
        self._micro_batch_tokens = micro_batch_tokens
        self._references: OrderedDict[str, FrozenReference] = OrderedDict()  # the least recently used first
        self._loading: dict[str, threading.Event] = {}
        self._lock = threading.Lock()
        self.counts = CacheCounts()

    def score(self, name: str, data: Sequence[Datum]) -> tuple[FloatArray, ...]:
        """Score data with the named model, as `FrozenScorer.score` does.

        Raises ModelError when the model cannot be loaded or does not fit, and RequestError when data are too long for
        it or hold tokens outside of its vocabulary.
        """
        reference = self._get(name)
        _check(data, reference.scorer.lm)
        with reference.lock, watching_thread(f"the reference model '{name}'"):
            return reference.scorer.score(data)

    @property
    def names(self) -> tuple[str, ...]:
        """The cached models, the most recently used last."""
        with self._lock:
            return tuple(self._references)

    @property
    def size_bytes(self) -> int:
        with self._lock:
            return self._total_bytes()

    def _get(self, name: str) -> FrozenReference:
        while True:
            with self._lock:
                if (reference := self._references.get(name)) is not None:
                    self._references.move_to_end(name)
                    self.counts.hits += 1
                    return reference
                other_load = self._loading.get(name)
                if other_load is None:
                    loaded = self._loading[name] = threading.Event()
                    break
            if not other_load.wait(LOAD_S):  # if that load fails, this caller tries for itself
                raise ModelError(
                    f"the reference model '{name}' is still not loaded after {LOAD_S:g} s: ask again later"
                )
        try:
            return self._add(name, self._load_reference(name))
        finally:
            with self._lock:
                del self._loading[name]
            loaded.set()

    def _load_reference(self, name: str) -> FrozenReference:
        with watching_thread(f"loading the reference model '{name}'", loads=True):
            lm = self._load(name)
        lm.model.requires_grad_(False)
        size = model_bytes(lm.model)
        logger.info("the reference model '%s' is loaded: %.1f MiB", name, size / 2**20)
        if self._room_bytes is not None and size > self._room_bytes:
            raise ModelError(
                f"the reference model '{name}' needs {size:,} bytes and reference models may have "
                f"{self._room_bytes:,}: give them more, or fewer bits"
            )
        return FrozenReference(FrozenScorer(lm, micro_batch_tokens=self._micro_batch_tokens), size)

    def _add(self, name: str, reference: FrozenReference) -> FrozenReference:
        """Put a model into the cache, and evict others while it is over its limits."""
        with self._lock:
            self.counts.loaded += 1
            self._references[name] = reference
            while len(self._references) > self._limit or self._exceeds_room():
                self._references.popitem(last=False)
                self.counts.evicted += 1
        return reference

    def _exceeds_room(self) -> bool:
        return self._room_bytes is not None and self._total_bytes() > self._room_bytes

    def _total_bytes(self) -> int:
        return sum(reference.size_bytes for reference in self._references.values())


def _check(data: Sequence[Datum], lm: LanguageModel) -> None:
    for index, datum in enumerate(data):
        if datum.num_tokens > lm.context:
            raise RequestError(f"datum {index} has {datum.num_tokens} tokens; the model's context is {lm.context}")
        if max(int(datum.inputs.max(initial=0)), int(datum.targets.max(initial=0))) >= lm.vocabulary:
            raise RequestError(f"datum {index} holds a token outside of the vocabulary of {lm.vocabulary}")
