"""Frozen models that training is compared with: loaded when first asked for, kept while there is room, shared.

An LRU cache. It must not know what the scores are for. Loading and scoring happen on the caller's thread; a model that
is being loaded is waited for by all who want it, and one that is evicted while somebody scores with it goes when he is
done.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace.errors import ModelError, RequestError
from headrace.model.load import LanguageModel
from headrace.model.quantized import model_bytes
from headrace.train.frozen_model import FrozenScorer
from headrace.types import Datum, FloatArray

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FrozenReference:
    """A model in the cache. `lock`: one request at a time computes on it."""

    scorer: FrozenScorer
    size_bytes: int
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(slots=True)
class CacheCounts:
    """What the cache did."""

    loaded: int = 0
    evicted: int = 0
    found: int = 0


class ReferenceModels:
    """Load a model by its name with `load` and keep at most `limit`, of `room_bytes` together if that is given; the
    one that was used longest ago goes first."""

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
        self._kept: OrderedDict[str, FrozenReference] = OrderedDict()
        self._loading: dict[str, threading.Event] = {}
        self._lock = threading.Lock()
        self.counts = CacheCounts()

    def score(self, name: str, data: Sequence[Datum]) -> tuple[FloatArray, ...]:
        """See `FrozenScorer.score`. Raises ModelError when the model cannot be loaded or has no room, and RequestError
        when data are too long for it or hold tokens that it does not know."""
        reference = self._get(name)
        _check(data, reference.scorer.lm)
        with reference.lock:
            return reference.scorer.score(data)

    @property
    def names(self) -> tuple[str, ...]:
        """The models that are kept, the one used last at the end."""
        with self._lock:
            return tuple(self._kept)

    @property
    def size_bytes(self) -> int:
        with self._lock:
            return sum(each.size_bytes for each in self._kept.values())

    def _get(self, name: str) -> FrozenReference:
        while True:
            with self._lock:
                if (known := self._kept.get(name)) is not None:
                    self._kept.move_to_end(name)
                    self.counts.found += 1
                    return known
                waited_for = self._loading.get(name)
                if waited_for is None:
                    mine = self._loading[name] = threading.Event()
                    break
            waited_for.wait()  # if that load fails, this caller tries for itself
        try:
            return self._keep(name, self._make(name))
        finally:
            with self._lock:
                del self._loading[name]
            mine.set()

    def _make(self, name: str) -> FrozenReference:
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

    def _keep(self, name: str, reference: FrozenReference) -> FrozenReference:
        with self._lock:
            self.counts.loaded += 1
            self._kept[name] = reference
            while len(self._kept) > self._limit or self._over_room():
                self._kept.popitem(last=False)
                self.counts.evicted += 1
        return reference

    def _over_room(self) -> bool:
        return self._room_bytes is not None and sum(each.size_bytes for each in self._kept.values()) > self._room_bytes


def _check(data: Sequence[Datum], lm: LanguageModel) -> None:
    for index, datum in enumerate(data):
        if datum.num_tokens > lm.context:
            raise RequestError(f"datum {index} has {datum.num_tokens} tokens; the model's context is {lm.context}")
        if max(int(datum.inputs.max(initial=0)), int(datum.targets.max(initial=0))) >= lm.vocabulary:
            raise RequestError(f"datum {index} holds a token outside of the vocabulary of {lm.vocabulary}")
