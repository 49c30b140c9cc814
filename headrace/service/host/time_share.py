"""Share one thread between training and sampling: each has it for as long as the other had it before."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class TimeShare:
    """Give sampling the time that training took: before the next request, so that no reply waits for it, and between
    the micro-batches of a long request.

    `sample(seconds, clock)` samples for that long at most, or returns at once when there is nothing to sample.
    """

    def __init__(self, sample: Callable[[float, Callable[[], float]], None], clock: Callable[[], float]) -> None:
        self._sample, self._clock = sample, clock
        self._owed_s = 0.0
        self._started = 0.0

    @contextmanager
    def training(self) -> Iterator[None]:
        """Run a training request inside the block; whether it fails or not, its time counts."""
        self._sample(self._owed_s, self._clock)
        self._started = self._clock()
        try:
            yield
        finally:
            self._owed_s = self._clock() - self._started

    def between(self) -> None:
        """Sample between two micro-batches."""
        self._sample(self._clock() - self._started, self._clock)
        self._started = self._clock()
