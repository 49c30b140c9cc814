"""Allocate KV slots: which sequence is in which slot, and which tokens each slot holds. No torch, threads or clocks.

A sequence waits, occupies a slot, or has ended. A slot remembers the tokens whose keys and values it holds, also after
its sequence has left, so that a later sequence with the same prefix starts from there. Only `tokens - 1` positions of a
slot are used: the last one takes the writes of slots that are idle in a decode step.

Sequences share a prefix only if they use the same adapter, because keys and values depend on it. Adapters take turns in
the queue, so that many requests for one do not hold up the others. A slot that passes to another adapter is zeroed
first: values that are not finite, left by a damaged adapter, would be seen behind any mask.

A shared prefix is copied into the sequence's own slot. As long as the donor keeps it too, a decoder may read it there,
where the whole group reads it (`shared_prefix_slot`).

With sequences held in flight, a slot whose sequence was interrupted keeps its keys and values over a change of weights.
Only a continuation of that very sequence may use them; no other sequence shares such a slot, then or later.

Layers with a state (`model/hybrid/`) have it for one length of a prefix, where keys and values are there for every
shorter one too. With them a slot can be shared at two lengths only: all that it holds, and where its state was kept.
"""

from array import array
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from headrace.model.multi_lora import BASE
from headrace.pictures import image_marks
from headrace.types import (
    Completion,
    ExpertArray,
    IntArray,
    SampleRequest,
    StopReason,
    float_array,
    int_array,
    known_next_logprobs,
)

WORTH_WAITING = 8  # tokens of prefill saved that are worth one engine step of delay
SequenceKey = tuple[int, int, bytes]  # adapter, seed and prompt: identifies a sequence that is continued


@dataclass(slots=True, eq=False)
class SequenceState:
    """A request while it is sampled."""

    request: SampleRequest
    future: "Future[Completion]"
    stop_tokens: frozenset[int]
    limit: int  # longest `tokens` may become
    arrival: int  # orders sequences by age
    adapter: int = BASE  # key of its adapter
    turn: int = 0  # orders the queue
    tokens: list[int] = field(default_factory=list)  # prompt plus sampled; the last is fed to the next decode step
    logprobs: "array[float]" = field(default_factory=lambda: array("f"))
    raw_logprobs: "array[float]" = field(default_factory=lambda: array("f"))
    versions: "array[int]" = field(default_factory=lambda: array("i"))
    prefix_logprobs: list[float] = field(default_factory=list)  # from `score_from` on, as far as known
    experts: ExpertArray | None = None  # of all tokens but the last, when it has ended
    row: int | None = None  # its slot
    rotary: IntArray | None = None  # [3, prompt]: positions of a prompt with images, where they have three axes
    rotary_shift: int = 0  # from a later token's index to its position
    _marks: list[int] | None = None  # of a prompt with images: its tokens, with those of images marked
    waits_for: "tuple[SequenceState, int] | None" = (
        None  # the sequence that prefills so many tokens that this one shares
    )

    def __post_init__(self) -> None:
        self.tokens = self.request.prompt.tolist()
        if self.request.images:
            self._marks = image_marks(self.request.prompt, self.request.images).tolist()
        if (done := self.request.continue_from) is not None:
            self.tokens += done.tokens.tolist()
            self.logprobs.extend(done.sampler_logprobs.tolist())
            self.raw_logprobs.extend(done.raw_logprobs.tolist())
            self.versions.extend(done.versions.tolist())
            self.experts = done.experts

    @property
    def num_sampled(self) -> int:
        return len(self.versions)

    @property
    def num_given(self) -> int:
        return self.request.num_given

    @property
    def unscored(self) -> int | None:
        """First position that has to be computed because its hidden state gives a requested log-prob, or None."""
        start = self.request.score_from
        if start is None or start + len(self.prefix_logprobs) >= self.num_given:
            return None
        return start - 1 + len(self.prefix_logprobs)

    @property
    def key(self) -> SequenceKey:
        prompt = self.request.prompt if self._marks is None else int_array(np.array(self._marks))
        return self.adapter, self.request.params.seed, prompt.tobytes()

    def marked(self, start: int, stop: int) -> list[int]:
        """Return tokens as prefixes are compared: those that an image replaces are numbers made of its digest."""
        if self._marks is None or start >= len(self._marks):
            return self.tokens[start:stop]
        return self._marks[start:stop] + self.tokens[max(start, len(self._marks)) : stop]

    def completion(self, stop: StopReason) -> Completion:
        score_from = self.request.score_from
        return Completion(
            tokens=int_array(self.tokens[len(self.request.prompt) :]),
            sampler_logprobs=float_array(np.array(self.logprobs)),
            raw_logprobs=float_array(np.array(self.raw_logprobs)),
            versions=int_array(np.array(self.versions)),
            stop=stop,
            next_logprobs=known_next_logprobs(self.request.continue_from, self.num_sampled),
            prefix_logprobs=(
                None if score_from is None or self.unscored is not None else float_array(self.prefix_logprobs)
            ),
            experts=self.experts,
        )

    def record_experts(self, cached: ExpertArray) -> None:
        """Keep the experts of the cached tokens; those that an interrupted completion brought stay what they were."""
        kept = cached[: len(self.tokens) - 1].copy()
        done = self.request.continue_from
        if done is not None and done.experts is not None:
            kept[: len(done.experts)] = done.experts[: len(kept)]
        kept.setflags(write=False)
        self.experts = kept


@dataclass(frozen=True, slots=True)
class SlotAssignment:
    """The assignment of a slot to a sequence, which the cache has to follow."""

    row: int  # the slot
    donor: int  # the slot to copy from, if it is another
    shared: int  # positions to copy
    stale: bool = False  # zero the slot first
    from_kept: bool = False  # of layers with a state: start from the one that the donor kept
    moved: bool = False  # the donor's sequence goes on in this slot


class Slots:
    """Assign slots (rows of the cache) to sequences, the lowest first: a decode step covers all up to the last in use.

    `share_sampled` false: only prefilled positions are shared, never those of sampled tokens, because the decoder
    computes the two with different bits. `has_states`: the model has layers with a state.
    """

    def __init__(self, rows: int, tokens: int, *, share_sampled: bool = True, has_states: bool = False) -> None:
        self.tokens = tokens  # positions of a slot
        self._share_sampled, self._has_states = share_sampled, has_states
        self._kept_at = [0] * rows  # the length of each slot's prefix whose state was kept
        self._overrun = [False] * rows  # slots whose state has taken in tokens that were discarded
        self.waiting: deque[SequenceState] = deque()
        self.occupants: list[SequenceState | None] = [None] * rows
        self.filled = [0] * rows  # positions of each slot that are in the cache
        self._prefilled = [0] * rows  # of those, how many from the start on were prefilled, not sampled
        # tokens of the filled positions, then those that the sequence is still prefilling: one comparison finds both
        self._cached_tokens = np.zeros((rows, tokens), dtype=np.int32)
        self._slot_adapters = np.full(rows, BASE)  # the adapter with which each slot was computed
        self._turn = 0  # of the sequence that got a slot last
        self._last_turns: dict[int, int] = {}  # of each adapter's newest sequence
        self._used_at = [0] * rows  # orders slots by their last use
        self._earlier_weights: list[SequenceKey | None] = [
            None
        ] * rows  # sequence whose keys and values of earlier weights are held
        self._interrupted: dict[int, SequenceKey] = {}  # slots whose sequence may be continued
        self._clock = 0
        self._generations = [0] * rows  # how often each slot was assigned
        self._shared_prefixes = [(0, 0, 0)] * rows  # donor, shared positions, and the donor's generation then

    @property
    def rows(self) -> int:
        return len(self.occupants)

    def active(self) -> Iterator[tuple[int, SequenceState]]:
        for row, sequence in enumerate(self.occupants):
            if sequence is not None:
                yield row, sequence

    def holds(self, row: int) -> IntArray:
        """Return the tokens whose keys and values are in the slot."""
        return self._cached_tokens[row, : self.filled[row]]

    def shared_prefix_slot(self, row: int) -> tuple[int, int]:
        """Return (donor slot, shared length) if another slot still holds this slot's prefix, else (row, 0)."""
        donor, shared, generation = self._shared_prefixes[row]
        return (donor, shared) if self._generations[donor] == generation else (row, 0)

    def enqueue(self, sequence: SequenceState) -> None:
        """Append to the queue, but round-robin over adapters: each one's next comes before another's next but one."""
        sequence.turn = max(self._turn, self._last_turns.get(sequence.adapter, -1) + 1)
        self._last_turns[sequence.adapter] = sequence.turn
        place = len(self.waiting)
        while place and self.waiting[place - 1].turn > sequence.turn:
            place -= 1
        self.waiting.insert(place, sequence)

    def forget_adapter(self, adapter: int) -> None:
        self._last_turns.pop(adapter, None)

    def place_waiting(self) -> list[SlotAssignment]:
        """Assign free slots to waiting sequences in order; the caller makes the copies in the order of the result.

        A sequence waits while another slot is still prefilling a prefix that it could share; those behind it go ahead.
        A sequence that is too long for a slot holds up all behind it, or it would never be admitted.
        """
        assignments: list[SlotAssignment] = []
        delayed: list[SequenceState] = []
        alike: dict[tuple[int, bytes], tuple[SequenceState, int]] = {}
        whole: dict[tuple[int, bytes], int] = {}  # a slot that holds the whole prefix of such sequences
        free = sorted(
            (row for row, other in enumerate(self.occupants) if other is None),
            key=lambda row: (self.filled[row] > 0, self._used_at[row], row),
            reverse=True,
        )
        while self.waiting and free and len(self.waiting[0].tokens) < self.tokens:
            sequence = self.waiting.popleft()
            if self._still_waits(sequence):
                delayed.append(sequence)
                continue
            prefix = np.array(sequence.marked(0, len(sequence.tokens) - 1), dtype=np.int32)
            key = (sequence.adapter, prefix.tobytes())
            sequence.waits_for = alike.get(key)
            assignment = None
            if sequence.waits_for is None:
                assignment = self._place(sequence, prefix, free, whole.get(key))
            if assignment is None:
                assert sequence.waits_for is not None
                alike[key] = sequence.waits_for
                delayed.append(sequence)
            else:
                assignments.append(assignment)
                if assignment.shared == len(prefix) and self._earlier_weights[assignment.row] is None:
                    whole[key] = assignment.row
                self._turn = max(self._turn, sequence.turn)
        self.waiting.extendleft(reversed(delayed))
        return assignments

    def _still_waits(self, sequence: SequenceState) -> bool:
        """Return whether the prefix that the sequence waits for is still being prefilled. Searching the best donor of
        hundreds of waiting sequences again at every step would take longer than the step."""
        if sequence.waits_for is None:
            return False
        other, needed = sequence.waits_for
        return other.row is not None and self.filled[other.row] < needed

    def _place(
        self, sequence: SequenceState, prefix: IntArray, free: list[int], whole: int | None
    ) -> SlotAssignment | None:
        """Assign the donor's slot if it can be taken over, else the last of the `free` slots; return None if the
        sequence has to wait for another. `whole`: a slot that is known to hold the whole prefix."""
        if whole is not None and sequence.num_sampled == 0 and sequence.unscored is None:
            donor, shared, resumed = whole, len(prefix), False
        else:
            choice = self._donor(sequence, prefix)
            if choice is None:
                return None
            donor, shared, resumed = choice
        if shared and (resumed or (self.occupants[donor] is None and 2 * shared >= self.filled[donor])):
            row = donor  # take the slot over as it is; one that holds much more is kept for its own continuation
            free.remove(row)
        else:
            row = free.pop()
        self._earlier_weights[row] = sequence.key if resumed else None
        from_kept = self._has_states and 0 < shared < self.filled[donor]
        assert not from_kept or shared == self._kept_at[donor]
        stale = self._assign(sequence, row, shared, donor=donor)
        self._kept_at[row] = shared
        return SlotAssignment(row, donor, shared, stale, from_kept)

    def _donor(self, sequence: SequenceState, prefix: IntArray) -> tuple[int, int, bool] | None:
        """Find the slot that holds most of the prefix, how much, and whether it is the sequence's own from before an
        interruption. Return None, and set `waits_for`, if another slot will soon hold more."""
        differs = self._cached_tokens[:, : len(prefix)] != prefix
        common = np.where(differs.any(axis=1), differs.argmax(axis=1), len(prefix)) if len(prefix) else 0
        common = np.where(self._slot_adapters == sequence.adapter, common, 0)
        filled, old = np.array(self.filled), np.array([key is not None for key in self._earlier_weights])
        coming = np.array([0 if other is None else len(other.tokens) - 1 for other in self.occupants])
        coming[old] = 0
        empty = np.array([other is None for other in self.occupants])
        same_key = np.array([key is not None and key == sequence.key for key in self._earlier_weights])
        # the sequence's own slot from before it was interrupted
        resumed = same_key & empty & (common >= filled) & (sequence.num_sampled > 0)
        if sequence.unscored is not None:  # from there on positions have to be computed
            common = np.minimum(common, sequence.unscored)
        sharable = filled if self._share_sampled else np.minimum(filled, np.array(self._prefilled))
        reached = np.minimum(common, sharable)
        if self._has_states:
            kept = np.array(self._kept_at)
            exact = (common >= filled) & ~np.array(self._overrun)
            reached = np.where(exact, filled, np.where(common >= kept, kept, 0))
        shares = np.where(old & ~resumed, 0, reached)
        donor = int(shares.argmax())
        shared = int(shares[donor])
        promised = np.where(coming > filled, np.minimum(common, coming), 0)
        if self._has_states:
            promised = np.where(common >= coming, promised, 0)
        if promised.max() >= shared + WORTH_WAITING:
            filling = self.occupants[int(promised.argmax())]
            assert filling is not None
            sequence.waits_for = filling, int(promised.max())
            return None
        return donor, shared, bool(resumed[donor])

    def _assign(self, sequence: SequenceState, row: int, filled: int, *, donor: int) -> bool:
        """Put the sequence into a slot; return whether another adapter used the slot before."""
        self._clock += 1
        first, shared = self.shared_prefix_slot(donor)
        source, common = (first, filled) if shared >= filled else (donor, filled)  # the slot that the whole group reads
        self._generations[row] += 1
        self._shared_prefixes[row] = (source, common if source != row else 0, self._generations[source])
        stale = bool(self._slot_adapters[row] != sequence.adapter)
        self._slot_adapters[row] = sequence.adapter
        self.occupants[row], self.filled[row], self._used_at[row] = sequence, filled, self._clock
        self._prefilled[row], self._overrun[row] = filled, False
        self._interrupted.pop(row, None)
        known = len(sequence.tokens) - 1
        self._cached_tokens[row, :known] = sequence.marked(0, known)
        sequence.row = row
        return stale

    def fill(self, row: int, tokens: list[int], *, sampled: bool = False) -> None:
        """Record that `tokens` were written behind what the slot holds, by prefilling or while sampling."""
        start = self.filled[row]
        if not sampled and self._prefilled[row] == start:
            self._prefilled[row] = start + len(tokens)
        self._cached_tokens[row, start : start + len(tokens)] = tokens
        self.filled[row] = start + len(tokens)

    def state_kept(self, row: int) -> None:
        """Record that the state after all tokens of the slot was kept."""
        self._kept_at[row] = self.filled[row]

    def state_overrun(self, row: int) -> None:
        """Record that the state of the slot has taken in tokens behind those that it holds."""
        self._overrun[row] = self._has_states

    def empty(self, row: int) -> None:
        """Give up what a slot holds."""
        self.filled[row] = self._kept_at[row] = 0

    def leave(self, sequence: SequenceState) -> None:
        """Free the slot of a sequence; what it holds stays until it is assigned again."""
        assert sequence.row is not None
        self._clock += 1
        self.occupants[sequence.row], self._used_at[sequence.row] = None, self._clock
        sequence.row = None

    def preempt(self, sequence: SequenceState) -> None:
        """Evict a sequence to the head of the queue; it keeps its sampled tokens, and its prefix is prefilled again."""
        self.leave(sequence)
        self.waiting.appendleft(sequence)

    def interrupt(self, sequence: SequenceState) -> None:
        """Free the slot of a sequence that may be continued."""
        assert sequence.row is not None
        self._interrupted[sequence.row] = sequence.key
        self.leave(sequence)

    def forget(self, *, hold: bool = False) -> None:
        """Invalidate the cache for new weights, except, with `hold`, the slots of interrupted sequences."""
        assert not any(True for _ in self.active())
        held = self._interrupted if hold else {}
        self.filled = [filled if row in held else 0 for row, filled in enumerate(self.filled)]
        self._kept_at = [0] * self.rows
        self._earlier_weights = [held.get(row) for row in range(self.rows)]

    def move(self, source: int, target: int) -> SlotAssignment:
        """Move the sequence of `source` into the free slot `target`."""
        sequence, filled, read = self.occupants[source], self.filled[source], self._prefilled[source]
        assert sequence is not None
        assert self.occupants[target] is None
        self.occupants[source] = None
        donor, shared = self.shared_prefix_slot(source)
        stale = self._assign(sequence, target, filled, donor=source)
        self._shared_prefixes[target] = (donor, shared if donor != target else 0, self._generations[donor])
        self._prefilled[target], self._kept_at[target] = read, self._kept_at[source]
        self._earlier_weights[target] = self._earlier_weights[source]
        if self._earlier_weights[source] is not None:
            self._earlier_weights[source], self.filled[source] = None, 0
        return SlotAssignment(target, source, filled, stale, moved=True)

    def resize(self, rows: int, tokens: int) -> None:
        """Change the number and length of slots; the caller has moved or preempted sequences in slots that disappear.

        The last position of a shorter slot takes stray writes from now on, so its content is given up.
        """
        assert all(sequence is None for sequence in self.occupants[rows:])
        assert all(len(sequence.tokens) < tokens for _, sequence in self.active())
        old, new = min(rows, self.rows), max(0, rows - self.rows)
        cached = np.zeros((rows, tokens), dtype=np.int32)
        width = min(tokens, self.tokens)
        cached[:old, :width] = self._cached_tokens[:old, :width]
        self._cached_tokens, self.tokens = cached, tokens
        self.occupants = self.occupants[:rows] + [None] * new
        cut = [filled >= tokens for filled in self.filled[:rows]]  # a state is that of all tokens, or of none
        self._kept_at = [0 if gone else kept for gone, kept in zip(cut, self._kept_at, strict=False)] + [0] * new
        self.filled = [
            0 if gone and self._has_states else min(filled, tokens - 1)
            for gone, filled in zip(cut, self.filled, strict=False)
        ] + [0] * new
        self._prefilled = self._prefilled[:rows] + [0] * new
        self._overrun = self._overrun[:rows] + [False] * new
        self._used_at = self._used_at[:rows] + [0] * new
        self._generations = [count + 1 for count in self._generations[:rows]] + [0] * new  # no shared prefix survives
        self._slot_adapters = np.concatenate([self._slot_adapters[:rows], np.full(new, BASE)])
        self._earlier_weights = self._earlier_weights[:rows] + [None] * new
        self._shared_prefixes = [(row, 0, 0) for row in range(rows)]
        self._interrupted = {row: key for row, key in self._interrupted.items() if row < rows}
