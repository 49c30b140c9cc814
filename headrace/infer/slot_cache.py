"""Keep the KV cache and its slots in step: number and length of slots, the sequences in them, and copies of prefixes.

`SlotLimits` derives slot sizes from the KV budget; `SlotCache` admits sequences, grows and shrinks slots, preempts and
compacts. It runs on the compute thread and must not know requests' parameters or the model.
"""

from collections.abc import Callable
from dataclasses import dataclass

from headrace.errors import SamplerError
from headrace.infer.kv_slots import SlotAssignment, Slots
from headrace.model.attention import ROUND, KVCache
from headrace.names import ROW_ALIGN, min_kv_tokens

ALIGN = ROW_ALIGN  # matrix products have a multiple of this many rows, so that a row's bits do not depend on the others
FIRST_SLOT_TOKENS = 128


@dataclass(frozen=True, slots=True)
class SlotLimits:
    """Sizes of slots under a KV budget. Slots come in multiples of ALIGN, their lengths in multiples of ROUND."""

    max_num_seqs: int  # most slots, a multiple of ALIGN
    kv_tokens: int  # cached positions in all slots together
    context: int  # of the model

    @property
    def longest_slot(self) -> int:
        """Positions of the longest slot that the budget allows."""
        return min(self.kv_tokens // ALIGN, _round_up(self.context + 1)) // ROUND * ROUND

    @property
    def first_slot(self) -> int:
        """Positions of a slot at the start, when slots grow as sequences do."""
        return min(FIRST_SLOT_TOKENS, self.longest_slot)

    @property
    def even_slot(self) -> int:
        """Positions of a slot when `max_num_seqs` of them share the whole budget from the start."""
        return max(self.first_slot, min(self.longest_slot, self.kv_tokens // self.max_num_seqs // ROUND * ROUND))

    def rows_for(self, tokens: int) -> int:
        """Number of slots of `tokens` positions that the budget allows."""
        return min(self.max_num_seqs, self.kv_tokens // tokens // ALIGN * ALIGN)


def slot_limits(max_num_seqs: int, kv_tokens: int | None, context: int) -> SlotLimits:
    """Round the limits up; without `kv_tokens`, every slot may hold a whole context. Raises SamplerError."""
    assert max_num_seqs > 0
    rows = -(-max_num_seqs // ALIGN) * ALIGN
    kv_tokens = kv_tokens or rows * _round_up(context + 1)
    if kv_tokens < ALIGN * ROUND:
        raise SamplerError(f"engine.kv_tokens must be at least {ALIGN * ROUND}, not {kv_tokens}")
    return SlotLimits(rows, kv_tokens, context)


def default_kv_tokens(max_num_seqs: int, longest: int) -> int:
    """Return the budget of twice `max_num_seqs` sequences of `longest` tokens, because slots grow by doubling."""
    return max(2 * max_num_seqs * longest, min_kv_tokens(longest))


class SlotCache:
    """Keep the cache's tensors in step with the slots' bookkeeping.

    `tokens`: positions of a slot at first. `make_cache(rows, tokens)` allocates a cache, or lays one out anew.
    `share_sampled`, `has_states`: see `Slots`.
    """

    def __init__(
        self,
        limits: SlotLimits,
        *,
        tokens: int,
        make_cache: Callable[[int, int], KVCache],
        share_sampled: bool,
        has_states: bool = False,
    ) -> None:
        self._limits, self._make_cache = limits, make_cache
        self.slots = Slots(limits.rows_for(tokens), tokens, share_sampled=share_sampled, has_states=has_states)
        self.cache = make_cache(self.slots.rows, self.slots.tokens)

    def admit_waiting(self) -> list[SlotAssignment]:
        """Give slots to waiting sequences and copy the prefixes that they share."""
        assignments = self.slots.place_waiting()
        for assignment in assignments:
            self._apply(assignment)
        return assignments

    def fit_slots(self) -> int:
        """Change the length of all slots if a sequence needs it, and return how many sequences were preempted for it.

        Slots double when a sequence reaches the end of its own. If the budget then allows fewer of them, the youngest
        sequences are preempted. Slots get shorter again when that gives a slot to sequences that wait.
        """
        slots = self.slots
        active = [sequence for _, sequence in slots.active()]
        first = [slots.waiting[0]] if slots.waiting else []
        needed = max((len(sequence.tokens) + 1 for sequence in active), default=0)
        for sequence in first:
            if self._limits.rows_for(_round_up(len(sequence.tokens) + 1) * 2) > len(active) or not active:
                needed = max(needed, len(sequence.tokens) + 1)
        tokens = slots.tokens
        while tokens < needed:
            tokens = min(tokens * 2, self._limits.longest_slot)
        if tokens == slots.tokens and slots.rows < self._limits.max_num_seqs and slots.waiting:
            longest = max(len(sequence.tokens) + 1 for sequence in [*active, *first])
            while tokens // 2 >= max(longest + ROUND, FIRST_SLOT_TOKENS):
                tokens //= 2
            tokens = _round_up(tokens)
        return self._resize(tokens) if tokens != slots.tokens else 0

    def keep_state(self, row: int) -> None:
        """Keep the state of a slot whose prompt has been prefilled, for other sequences with the same prompt."""
        if self.cache.states is not None:
            self.cache.states.keep(row)
            self.slots.state_kept(row)

    def compact(self) -> None:
        """Move sequences to lower slots when more than half of the slots that a decode step covers are empty."""
        used = [row for row, _ in self.slots.active()]
        if not used or 2 * max(len(used), ALIGN) > used[-1] + 1:
            return
        free = [row for row in range(used[-1]) if self.slots.occupants[row] is None]
        for source, target in zip(reversed(used), free, strict=False):
            if target >= source:
                break
            self._apply(self.slots.move(source, target))

    def _resize(self, tokens: int) -> int:
        """Lay the cache out in slots of `tokens` positions; return how many sequences were preempted."""
        slots, rows = self.slots, self._limits.rows_for(tokens)
        youngest = sorted((sequence for _, sequence in slots.active()), key=lambda sequence: -sequence.arrival)
        evicted = youngest[: max(0, len(youngest) - rows)]
        for sequence in evicted:
            slots.preempt(sequence)
        free = [row for row in range(min(rows, slots.rows)) if slots.occupants[row] is None]
        for row in [row for row, _ in slots.active() if row >= rows]:
            target = free.pop(0)
            self._apply(slots.move(row, target))
        rows_kept = min(rows, slots.rows)
        slots.resize(rows, tokens)
        before, self.cache = self.cache, self._make_cache(slots.rows, slots.tokens)
        self.cache.adopt(before, rows_kept)
        return len(evicted)

    def _apply(self, assignment: SlotAssignment) -> None:
        if assignment.stale:
            for layer in (*self.cache.keys, *self.cache.values):
                layer[assignment.row].zero_()
        if assignment.shared and assignment.donor != assignment.row:
            self.cache.copy_prefix(assignment.donor, assignment.row, assignment.shared)
        if (states := self.cache.states) is None:
            return
        if not assignment.shared:
            states.clear(assignment.row)
        elif assignment.moved:
            states.move(assignment.donor, assignment.row)
        else:
            states.start(assignment.row, assignment.donor, from_kept=assignment.from_kept)


def _round_up(tokens: int) -> int:
    """Cached lengths are multiples of ROUND."""
    return -(-tokens // ROUND) * ROUND
