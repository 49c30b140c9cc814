"""Who sits in which KV slot, and what each holds: the engine's bookkeeping, without torch, threads or clocks.

A sequence waits, sits in a slot, or has ended. A slot remembers the tokens whose keys and values it holds, also after
its sequence has left, so a later sequence with the same beginning starts from there. Only `tokens - 1` positions of a
slot are used: the last takes the writes of slots that have nothing to say in a decode step.

Sequences share a beginning only where they use the same adapter, because keys and values depend on it. Adapters take
turns in the queue, so that a crowd of one does not hold up the others. A slot that passes to another adapter is wiped
first: numbers that are not finite, left in it by a damaged adapter, would be seen behind any mask.

What a sequence has from another slot is copied into its own. As long as the other slot keeps it too, a decoder may read
it there, where the whole group reads it (`shared_prefix_slot`).

With sequences held in flight, a slot whose sequence was interrupted keeps its keys and values over a change of weights.
It is *old* then: what continues that very sequence goes on in it, and nobody else shares it, then or later.
"""

from array import array
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from headrace.model.adapters import BASE
from headrace.types import Completion, IntArray, SampleRequest, Stop, float_array, int_array, known_next_logprobs

WORTH_WAITING = 8  # tokens of prefill saved that are worth one engine step of delay
Name = tuple[int, int, bytes]  # by which a sequence is known when it comes back: adapter, seed and prompt


@dataclass(slots=True, eq=False)
class SequenceState:
    """One request on its way. `tokens` is prompt plus sampled; the last one is fed to the next decode step."""

    request: SampleRequest
    future: "Future[Completion]"
    stop_tokens: frozenset[int]
    limit: int  # longest `tokens` may become
    arrival: int  # orders sequences by age
    adapter: int = BASE  # the key of the one it uses
    turn: int = 0  # orders those who wait
    tokens: list[int] = field(default_factory=list)
    logprobs: "array[float]" = field(default_factory=lambda: array("f"))
    raw_logprobs: "array[float]" = field(default_factory=lambda: array("f"))
    versions: "array[int]" = field(default_factory=lambda: array("i"))
    prefix_logprobs: list[float] = field(default_factory=list)  # those that `score_from` asks for, as far as known
    row: int | None = None
    behind: "tuple[SequenceState, int] | None" = None  # who fills in so many tokens that this one will begin with

    def __post_init__(self) -> None:
        self.tokens = self.request.prompt.tolist()
        if (done := self.request.continue_from) is not None:
            self.tokens += done.tokens.tolist()
            self.logprobs.extend(done.sampler_logprobs.tolist())
            self.raw_logprobs.extend(done.raw_logprobs.tolist())
            self.versions.extend(done.versions.tolist())

    @property
    def num_sampled(self) -> int:
        return len(self.versions)

    @property
    def num_given(self) -> int:
        return self.request.num_given

    @property
    def unscored(self) -> int | None:
        """The position whose hidden state tells the next log-prob that is asked for: it has to be computed."""
        start = self.request.score_from
        if start is None or start + len(self.prefix_logprobs) >= self.num_given:
            return None
        return start - 1 + len(self.prefix_logprobs)

    @property
    def name(self) -> Name:
        return self.adapter, self.request.params.seed, self.request.prompt.tobytes()

    def completion(self, stop: Stop) -> Completion:
        asked = self.request.score_from
        return Completion(
            tokens=int_array(self.tokens[len(self.request.prompt) :]),
            sampler_logprobs=float_array(np.array(self.logprobs)),
            raw_logprobs=float_array(np.array(self.raw_logprobs)),
            versions=int_array(np.array(self.versions)),
            stop=stop,
            next_logprobs=known_next_logprobs(self.request.continue_from, self.num_sampled),
            prefix_logprobs=None if asked is None or self.unscored is not None else float_array(self.prefix_logprobs),
        )


@dataclass(frozen=True, slots=True)
class SlotAssignment:
    """A sequence was given slot `row`; wipe that first if it is `stale`, then copy `shared` positions from `donor` if
    that is another slot."""

    row: int
    donor: int
    shared: int
    stale: bool = False


class Slots:
    """Rows of the cache. Empty ones are taken from the lowest, so that a decode step over the first B wastes few.

    `filled[row]` positions of a slot are in the cache. Its row of `_held` has the tokens of those and, behind them, of
    those that its sequence is still filling in, so one comparison finds what is there and what is coming.

    `share_sampled` false: only positions that were read as part of a prompt are given to others, those of sampled
    tokens never, because a decoder computes the two with other bits.
    """

    def __init__(self, rows: int, tokens: int, *, share_sampled: bool = True) -> None:
        self.tokens = tokens
        self._share_sampled = share_sampled
        self.waiting: deque[SequenceState] = deque()
        self.seated: list[SequenceState | None] = [None] * rows
        self.filled = [0] * rows
        self._read = [0] * rows  # of those, how many at the beginning were not sampled
        self._held = np.zeros((rows, tokens), dtype=np.int32)
        self._owners = np.full(rows, BASE)  # the adapters with which that was computed
        self._turn = 0  # of whom was seated last
        self._last_turns: dict[int, int] = {}  # of each adapter's sequence that came last
        self._used_at = [0] * rows  # orders slots by when they were last of use
        self._old: list[Name | None] = [None] * rows  # of whom keys and values of earlier weights are there
        self._interrupted: dict[int, Name] = {}  # slots whose sequence was cut and may come back
        self._clock = 0
        self._seatings = [0] * rows  # how often each slot was given away
        self._sources = [(0, 0, 0)] * rows  # donor, positions shared with it, and its seatings at the time

    @property
    def rows(self) -> int:
        return len(self.seated)

    def active(self) -> Iterator[tuple[int, SequenceState]]:
        for row, sequence in enumerate(self.seated):
            if sequence is not None:
                yield row, sequence

    def holds(self, row: int) -> IntArray:
        """The tokens whose keys and values are in the cache."""
        return self._held[row, : self.filled[row]]

    def shared_prefix_slot(self, row: int) -> tuple[int, int]:
        """Another slot whose first so many positions are those of this one; 0 if there is none."""
        donor, shared, seatings = self._sources[row]
        return (donor, shared) if self._seatings[donor] == seatings else (row, 0)

    def enqueue(self, sequence: SequenceState) -> None:
        """Behind those who wait, but each adapter's next before another's next but one."""
        sequence.turn = max(self._turn, self._last_turns.get(sequence.adapter, -1) + 1)
        self._last_turns[sequence.adapter] = sequence.turn
        place = len(self.waiting)
        while place and self.waiting[place - 1].turn > sequence.turn:
            place -= 1
        self.waiting.insert(place, sequence)

    def forget_adapter(self, adapter: int) -> None:
        self._last_turns.pop(adapter, None)

    def place_waiting(self) -> list[SlotAssignment]:
        """Seat whom there is a slot for, first come, first served; the caller makes the copies in this order.

        A sequence waits while another slot is still filling in a beginning that it could share; those behind it go
        ahead. One that is too long for a slot holds up all behind it, or it would never get its turn.
        """
        placed: list[SlotAssignment] = []
        delayed: list[SequenceState] = []
        alike: dict[tuple[int, bytes], tuple[SequenceState, int]] = {}
        whole: dict[tuple[int, bytes], int] = {}  # a slot that has all that such a sequence begins with
        free = sorted(
            (row for row, other in enumerate(self.seated) if other is None),
            key=lambda row: (self.filled[row] > 0, self._used_at[row], row),
            reverse=True,
        )
        while self.waiting and free and len(self.waiting[0].tokens) < self.tokens:
            sequence = self.waiting.popleft()
            if self._still_behind(sequence):
                delayed.append(sequence)
                continue
            wanted = np.array(sequence.tokens[:-1], dtype=np.int32)
            key = (sequence.adapter, wanted.tobytes())
            sequence.behind = alike.get(key)
            seat = self._place(sequence, wanted, free, whole.get(key)) if sequence.behind is None else None
            if seat is None:
                assert sequence.behind is not None
                alike[key] = sequence.behind
                delayed.append(sequence)
            else:
                placed.append(seat)
                if seat.shared == len(wanted) and self._old[seat.row] is None:
                    whole[key] = seat.row
                self._turn = max(self._turn, sequence.turn)
        self.waiting.extendleft(reversed(delayed))
        return placed

    def _still_behind(self, sequence: SequenceState) -> bool:
        """Whether what it was found to wait for is still on its way: with hundreds that wait, looking for the best
        beginning of each again at every step would take longer than the step."""
        if sequence.behind is None:
            return False
        other, needed = sequence.behind
        return other.row is not None and self.filled[other.row] < needed

    def _place(
        self, sequence: SequenceState, wanted: IntArray, free: list[int], whole: int | None
    ) -> SlotAssignment | None:
        """In one of the `free` slots, the last of them unless it can take over another. `whole`: a slot that has all it
        begins with. None: it is behind another now."""
        if whole is not None and sequence.num_sampled == 0 and sequence.unscored is None:
            donor, shared, own = whole, len(wanted), False
        else:
            found = self._donor(sequence, wanted)
            if found is None:
                return None
            donor, shared, own = found
        if shared and (own or (self.seated[donor] is None and 2 * shared >= self.filled[donor])):
            row = donor  # take it over as it is; a slot that holds much more is kept for whom it belongs to
            free.remove(row)
        else:
            row = free.pop()
        self._old[row] = sequence.name if own else None
        return SlotAssignment(row, donor, shared, self._seat(sequence, row, shared, donor=donor))

    def _donor(self, sequence: SequenceState, wanted: IntArray) -> tuple[int, int, bool] | None:
        """The slot that has most of it, how much, and whether it is its own from before it was cut. None: more is on
        its way in another slot, and it is behind that now."""
        differs = self._held[:, : len(wanted)] != wanted
        common = np.where(differs.any(axis=1), differs.argmax(axis=1), len(wanted)) if len(wanted) else 0
        common = np.where(self._owners == sequence.adapter, common, 0)
        filled, old = np.array(self.filled), np.array([name is not None for name in self._old])
        coming = np.array([0 if other is None else len(other.tokens) - 1 for other in self.seated])
        coming[old] = 0
        empty = np.array([other is None for other in self.seated])
        known = np.array([name is not None and name == sequence.name for name in self._old])
        own = known & empty & (common >= filled) & (sequence.num_sampled > 0)  # it sat there before it was cut
        if sequence.unscored is not None:  # from there on it is computed, whoever has it
            common = np.minimum(common, sequence.unscored)
        there = filled if self._share_sampled else np.minimum(filled, np.array(self._read))
        shares = np.where(old & ~own, 0, np.minimum(common, there))
        donor = int(shares.argmax())
        shared = int(shares[donor])
        promised = np.where(coming > filled, np.minimum(common, coming), 0)
        if promised.max() >= shared + WORTH_WAITING:
            filling = self.seated[int(promised.argmax())]
            assert filling is not None
            sequence.behind = filling, int(promised.max())
            return None
        return donor, shared, bool(own[donor])

    def _seat(self, sequence: SequenceState, row: int, filled: int, *, donor: int) -> bool:
        """Whether another adapter had the slot before."""
        self._clock += 1
        first, shared = self.shared_prefix_slot(donor)
        source, common = (first, filled) if shared >= filled else (donor, filled)  # where the whole group reads it
        self._seatings[row] += 1
        self._sources[row] = (source, common if source != row else 0, self._seatings[source])
        stale = bool(self._owners[row] != sequence.adapter)
        self._owners[row] = sequence.adapter
        self.seated[row], self.filled[row], self._used_at[row] = sequence, filled, self._clock
        self._read[row] = filled
        self._interrupted.pop(row, None)
        self._held[row, : len(sequence.tokens) - 1] = sequence.tokens[:-1]
        sequence.row = row
        return stale

    def fill(self, row: int, tokens: list[int], *, sampled: bool = False) -> None:
        """Record that `tokens` were written behind what the slot holds, by reading them or while sampling."""
        start = self.filled[row]
        if not sampled and self._read[row] == start:
            self._read[row] = start + len(tokens)
        self._held[row, start : start + len(tokens)] = tokens
        self.filled[row] = start + len(tokens)

    def leave(self, sequence: SequenceState) -> None:
        """The sequence ends; what its slot holds stays until somebody takes the slot."""
        assert sequence.row is not None
        self._clock += 1
        self.seated[sequence.row], self._used_at[sequence.row] = None, self._clock
        sequence.row = None

    def preempt(self, sequence: SequenceState) -> None:
        """Back to the head of the queue, keeping what it has sampled; its keys and values are computed again."""
        self.leave(sequence)
        self.waiting.appendleft(sequence)

    def interrupt(self, sequence: SequenceState) -> None:
        """The sequence is cut, and may be continued."""
        assert sequence.row is not None
        self._interrupted[sequence.row] = sequence.name
        self.leave(sequence)

    def forget(self, *, hold: bool = False) -> None:
        """New weights: nothing in the cache is valid any more, except (`hold`) for sequences that were interrupted."""
        assert not any(True for _ in self.active())
        kept = self._interrupted if hold else {}
        self.filled = [filled if row in kept else 0 for row, filled in enumerate(self.filled)]
        self._old = [kept.get(row) for row in range(self.rows)]

    def move(self, source: int, target: int) -> SlotAssignment:
        """Seat the sequence of `source` in the free slot `target`."""
        sequence, filled, read = self.seated[source], self.filled[source], self._read[source]
        assert sequence is not None
        assert self.seated[target] is None
        self.seated[source] = None
        donor, shared = self.shared_prefix_slot(source)
        stale = self._seat(sequence, target, filled, donor=source)
        self._sources[target] = (donor, shared if donor != target else 0, self._seatings[donor])
        self._read[target] = read
        self._old[target] = self._old[source]
        if self._old[source] is not None:
            self._old[source], self.filled[source] = None, 0
        return SlotAssignment(target, source, filled, stale)

    def resize(self, rows: int, tokens: int) -> None:
        """Another layout of the cache; sequences in rows that disappear were moved or preempted by the caller.

        The last position of a shorter slot takes stray writes from now on, so what was there is given up.
        """
        assert all(sequence is None for sequence in self.seated[rows:])
        assert all(len(sequence.tokens) < tokens for _, sequence in self.active())
        kept, new = min(rows, self.rows), max(0, rows - self.rows)
        held = np.zeros((rows, tokens), dtype=np.int32)
        width = min(tokens, self.tokens)
        held[:kept, :width] = self._held[:kept, :width]
        self._held, self.tokens = held, tokens
        self.seated = self.seated[:rows] + [None] * new
        self.filled = [min(filled, tokens - 1) for filled in self.filled[:rows]] + [0] * new
        self._read = self._read[:rows] + [0] * new
        self._used_at = self._used_at[:rows] + [0] * new
        self._seatings = [count + 1 for count in self._seatings[:rows]] + [0] * new  # every source ends here
        self._owners = np.concatenate([self._owners[:rows], np.full(new, BASE)])
        self._old = self._old[:rows] + [None] * new
        self._sources = [(row, 0, 0) for row in range(rows)]
        self._interrupted = {row: name for row, name in self._interrupted.items() if row < rows}
