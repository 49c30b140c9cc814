"""Who sits in which KV slot, and what each holds: the engine's bookkeeping, without torch, threads or clocks.

A sequence waits, sits in a slot, or has ended. A slot remembers the tokens whose keys and values it holds, also after
its sequence has left, so a later sequence with the same beginning starts from there. Only `tokens - 1` positions of a
slot are used: the last takes the writes of slots that have nothing to say in a decode step.
"""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from headrace.types import Completion, SampleRequest, Stop, float_array, int_array

WORTH_WAITING = 8  # tokens of prefill saved that are worth one engine step of delay


@dataclass(slots=True, eq=False)
class Sequence:
    """One request on its way. `tokens` is prompt plus sampled; the last one is fed to the next decode step."""

    request: SampleRequest
    future: "Future[Completion]"
    stop_tokens: frozenset[int]
    limit: int  # longest `tokens` may become
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    row: int | None = None

    def __post_init__(self) -> None:
        self.tokens = self.request.prompt.tolist()
        if (done := self.request.continue_from) is not None:
            self.tokens += done.tokens.tolist()
            self.logprobs = done.sampler_logprobs.tolist()
            self.raw_logprobs = done.raw_logprobs.tolist()
            self.versions = done.versions.tolist()

    @property
    def num_sampled(self) -> int:
        return len(self.versions)

    def completion(self, stop: Stop) -> Completion:
        return Completion(
            tokens=int_array(self.tokens[len(self.request.prompt) :]),
            sampler_logprobs=float_array(self.logprobs),
            raw_logprobs=float_array(self.raw_logprobs),
            versions=int_array(self.versions),
            stop=stop,
        )


@dataclass(slots=True)
class Slot:
    """`held[:filled]` are the tokens in the cache; `used_at` orders slots by when they were last of use."""

    sequence: Sequence | None = None
    held: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    filled: int = 0
    used_at: int = 0


@dataclass(frozen=True, slots=True)
class Placed:
    """A sequence was given slot `row`; copy `shared` positions from `donor` first if that is another slot."""

    row: int
    donor: int
    shared: int


class Slots:
    """Rows of the cache. Prefers low rows, so that a decode step over the first B rows wastes few."""

    def __init__(self, rows: int, tokens: int) -> None:
        self.slots = [Slot() for _ in range(rows)]
        self.tokens = tokens
        self.waiting: deque[Sequence] = deque()
        self._clock = 0

    def active(self) -> Iterator[tuple[int, Sequence]]:
        for row, slot in enumerate(self.slots):
            if slot.sequence is not None:
                yield row, slot.sequence

    def place_next(self) -> Placed | None:
        """Give the first waiting sequence a slot, or None when it must wait (no slot free, or too long for one).

        It also waits while another slot is still filling in a beginning that it could share.
        """
        if not self.waiting:
            return None
        sequence = self.waiting[0]
        if len(sequence.tokens) > self.tokens - 1:
            return None
        free = [row for row, slot in enumerate(self.slots) if slot.sequence is None]
        if not free:
            return None
        wanted = np.array(sequence.tokens[:-1], dtype=np.int64)
        shares = [_common(wanted, slot.held[: slot.filled]) for slot in self.slots]
        coming = max(
            (
                _common(wanted, np.array(slot.sequence.tokens[:-1], dtype=np.int64))
                for slot in self.slots
                if slot.sequence is not None and slot.filled < len(slot.sequence.tokens) - 1
            ),
            default=0,
        )
        donor = max(range(len(self.slots)), key=lambda row: (shares[row], -row))
        if coming >= shares[donor] + WORTH_WAITING:
            return None
        given = self.slots[donor]
        if shares[donor] and given.sequence is None and 2 * shares[donor] >= given.filled:
            row = donor  # take it over as it is; a slot that holds much more is kept for whom it belongs to
        else:
            row = min(free, key=lambda row: (self.slots[row].filled > 0, self.slots[row].used_at, row))
        self.waiting.popleft()
        self._seat(sequence, row, wanted[: shares[donor]])
        return Placed(row, donor, shares[donor])

    def _seat(self, sequence: Sequence, row: int, held: npt.NDArray[np.int64]) -> None:
        self._clock += 1
        slot = self.slots[row]
        slot.sequence, slot.filled, slot.used_at = sequence, len(held), self._clock
        slot.held = np.zeros(self.tokens, dtype=np.int64)
        slot.held[: len(held)] = held
        sequence.row = row

    def fill(self, row: int, tokens: list[int]) -> None:
        """Record that `tokens` were written behind what the slot holds."""
        slot = self.slots[row]
        slot.held[slot.filled : slot.filled + len(tokens)] = tokens
        slot.filled += len(tokens)

    def leave(self, sequence: Sequence) -> None:
        """The sequence ends; what its slot holds stays until somebody takes the slot."""
        assert sequence.row is not None
        self._clock += 1
        slot = self.slots[sequence.row]
        slot.sequence, slot.used_at = None, self._clock
        sequence.row = None

    def preempt(self, sequence: Sequence) -> None:
        """Back to the head of the queue, keeping what it has sampled; its keys and values are computed again."""
        self.leave(sequence)
        self.waiting.appendleft(sequence)

    def forget(self) -> None:
        """New weights: nothing in the cache is valid any more."""
        for slot in self.slots:
            assert slot.sequence is None
            slot.filled = 0

    def move(self, source: int, target: int) -> int:
        """Seat the sequence of `source` in the free slot `target`; returns the positions to copy."""
        origin = self.slots[source]
        sequence, filled = origin.sequence, origin.filled
        assert sequence is not None
        assert self.slots[target].sequence is None
        self._seat(sequence, target, origin.held[:filled])
        origin.sequence = None
        return filled

    def resize(self, rows: int, tokens: int) -> None:
        """Another layout of the cache; sequences in rows that disappear were preempted by the caller."""
        assert all(slot.sequence is None for slot in self.slots[rows:])
        self.slots = [*self.slots[:rows], *(Slot() for _ in range(rows - len(self.slots)))]
        self.tokens = tokens
        for slot in self.slots:
            slot.filled = min(slot.filled, tokens)
            held = np.zeros(tokens, dtype=np.int64)
            held[: slot.filled] = slot.held[: slot.filled]
            slot.held = held


def _common(left: npt.NDArray[np.int64], right: npt.NDArray[np.int64]) -> int:
    """Length of the common beginning."""
    size = min(len(left), len(right))
    if not size or left[0] != right[0]:
        return 0
    differ = np.nonzero(left[:size] != right[:size])[0]
    return int(differ[0]) if len(differ) else size
