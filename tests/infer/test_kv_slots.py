"""Slots against a model of the cache: whatever happens, a slot holds what it says, and nobody is lost."""

from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.infer.kv_slots import WORTH_WAITING, SequenceState, SlotAssignment, Slots
from headrace.types import Completion, SampleRequest, SamplingParams, StopReason, int_array

JUNK = (-1,)


def sequence_of(
    prompt: list[int], *, arrival: int = 0, after: Completion | None = None, adapter: int = 0
) -> SequenceState:
    params = SamplingParams(max_tokens=100)
    request = SampleRequest(prompt=int_array(prompt), params=params, continue_from=after)
    return SequenceState(request, Future(), frozenset(), 1000, arrival, adapter)


class Bookkeeping(RuleBasedStateMachine):
    """`cache[row][position]` is the adapter and the beginning whose last token has its keys and values there."""

    @initialize(rows=st.integers(1, 4), tokens=st.integers(16, 40))
    def start(self, rows: int, tokens: int) -> None:
        self.slots = Slots(rows, tokens)
        self.cache: list[list[Any]] = [[JUNK] * tokens for _ in range(rows)]
        self.open: list[SequenceState] = []

    def sequences(self) -> list[SequenceState]:
        return [sequence for _, sequence in self.slots.active()]

    @rule(
        stem=st.integers(0, 1),
        size=st.integers(1, 20),
        tail=st.lists(st.integers(0, 1), max_size=3),
        adapter=st.integers(0, 2),
    )
    def arrive(self, stem: int, size: int, tail: list[int], adapter: int) -> None:
        sequence = sequence_of([stem] * size + tail, arrival=len(self.open), adapter=adapter)
        self.open.append(sequence)
        self.slots.enqueue(sequence)

    def settle(self, placed: SlotAssignment) -> None:
        if placed.stale:
            self.cache[placed.row] = [JUNK] * self.slots.tokens
        if placed.donor != placed.row:
            self.cache[placed.row][: placed.shared] = self.cache[placed.donor][: placed.shared]

    @rule(piece=st.integers(1, 12), token=st.integers(0, 1))
    def step(self, piece: int, token: int) -> None:
        """What the engine does in one step: seats, copies, fills in pieces, decodes, and scribbles on scratch."""
        slots = self.slots
        before, idle = list(slots.waiting), not self.sequences()
        for placed in slots.place_waiting():
            self.settle(placed)
        if idle and before and len(before[0].tokens) < slots.tokens:
            assert before[0].row is not None, "nothing is running, and the first still waits"
        for row in range(slots.rows):
            self.cache[row][slots.tokens - 1] = JUNK
        for row, sequence in slots.active():
            filled = slots.filled[row]
            missing = len(sequence.tokens) - 1 - filled
            new = min(missing, piece) or 1
            for position in range(filled, filled + new):
                self.cache[row][position] = (sequence.adapter, *sequence.tokens[: position + 1])
            slots.fill(row, sequence.tokens[filled : filled + new])
            if not missing:
                sequence.tokens.append(token)
                if len(sequence.tokens) >= slots.tokens:
                    self.end(sequence)

    def end(self, sequence: SequenceState) -> None:
        self.slots.leave(sequence)
        self.open.remove(sequence)

    @precondition(lambda self: self.sequences())
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(self.sequences())))

    @precondition(lambda self: self.sequences())
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.sequences()))
        self.slots.preempt(sequence)
        assert self.slots.waiting[0] is sequence

    @precondition(lambda self: self.sequences() and None in self.slots.occupants)
    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        source = data.draw(st.sampled_from([row for row, _ in self.slots.active()]))
        target = data.draw(st.sampled_from([row for row, who in enumerate(self.slots.occupants) if who is None]))
        self.settle(self.slots.move(source, target))

    @rule(rows=st.integers(1, 4), tokens=st.integers(16, 40))
    def resize(self, rows: int, tokens: int) -> None:
        for row, sequence in list(self.slots.active()):
            if row >= rows or len(sequence.tokens) >= tokens:
                self.slots.preempt(sequence)
        old, kept = self.slots.tokens, min(rows, self.slots.rows)
        self.slots.resize(rows, tokens)
        width = min(old, tokens)
        self.cache = [
            [*(self.cache[row][:width] if row < kept else []), *[JUNK] * tokens][:tokens] for row in range(rows)
        ]

    @precondition(lambda self: not self.sequences())
    @rule()
    def forget(self) -> None:
        self.slots.forget()
        self.cache = [[JUNK] * self.slots.tokens for _ in self.cache]

    @invariant()
    def a_slot_holds_what_it_says(self) -> None:
        for row in range(self.slots.rows):
            held = self.slots.holds(row).tolist()
            assert self.slots.filled[row] == len(held) < self.slots.tokens
            found = self.cache[row][: len(held)]
            assert [entry[1:] for entry in found] == [tuple(held[: size + 1]) for size in range(len(held))]
            assert len({entry[0] for entry in found}) <= 1

    @invariant()
    def a_sequence_sits_on_its_own_beginning(self) -> None:
        for row, sequence in self.slots.active():
            held = self.slots.holds(row).tolist()
            assert sequence.row == row
            assert held == sequence.tokens[:-1][: len(held)]
            found = {entry[0] for entry in self.cache[row] if entry != JUNK}
            assert found <= {sequence.adapter}, "nothing of another adapter is left, not even behind what is held"

    @invariant()
    def what_another_slot_is_said_to_have_is_there(self) -> None:
        for row, _ in self.slots.active():
            donor, shared = self.slots.shared_prefix_slot(row)
            assert self.cache[donor][:shared] == self.cache[row][:shared]
            assert JUNK not in self.cache[row][:shared]

    @invariant()
    def nobody_is_lost_or_there_twice(self) -> None:
        found = [*self.sequences(), *self.slots.waiting]
        assert sorted(map(id, found)) == sorted(map(id, self.open))
        assert all(sequence.row is None for sequence in self.slots.waiting)


TestBookkeeping = Bookkeeping.TestCase
TestBookkeeping.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)


# --- by hand ---------------------------------------------------------------------------------------------------------


def seated(rows: int, tokens: int, *prompts: list[int]) -> Slots:
    slots = Slots(rows, tokens)
    slots.waiting.extend(sequence_of(prompt) for prompt in prompts)
    return slots


def fill_all(slots: Slots) -> None:
    for row, sequence in slots.active():
        slots.fill(row, sequence.tokens[slots.filled[row] : -1])


def test_a_twin_waits_for_the_beginning_and_lets_others_pass() -> None:
    twin = list(range(20))
    slots = seated(4, 64, twin, twin, [7, 8, 9], [*twin, 5])
    assert slots.place_waiting() == [SlotAssignment(0, 0, 0), SlotAssignment(1, 0, 0)]
    assert [sequence.tokens[-1] for sequence in slots.waiting] == [19, 5]
    fill_all(slots)
    assert slots.place_waiting() == [SlotAssignment(2, 0, 19), SlotAssignment(3, 0, 19)]


def test_who_waits_for_a_beginning_is_looked_at_again_only_when_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    common = list(range(40))
    slots = seated(32, 64, *([*common, 100 + index] for index in range(31)))
    looked: list[SequenceState] = []
    real = Slots._place
    monkeypatch.setattr(Slots, "_place", lambda self, one, *how: looked.append(one) or real(self, one, *how))
    assert len(slots.place_waiting()) == 1
    first = looked[0]
    looked.clear()
    slots.fill(0, common[:39])
    assert slots.place_waiting() == []
    assert looked == []
    slots.fill(0, common[39:])
    assert len(slots.place_waiting()) == len(looked) == 30
    assert first not in looked


def test_sampled_positions_stay_with_who_sampled_them_if_asked_for() -> None:
    for share_sampled, shared in ((True, 29), (False, 19)):
        slots = Slots(4, 64, share_sampled=share_sampled)
        first = sequence_of(list(range(20)))
        slots.enqueue(first)
        slots.place_waiting()
        fill_all(slots)
        first.tokens += range(20, 31)
        slots.fill(0, list(range(19, 30)), sampled=True)
        moved = slots.move(0, 2)
        assert moved == SlotAssignment(2, 0, 30, moved=True)
        slots.leave(first)
        slots.filled[0] = 0
        slots.enqueue(sequence_of(list(range(30))))
        [placed] = slots.place_waiting()
        assert placed.shared == shared
        slots.fill(placed.row, list(range(shared, 29)))
        slots.enqueue(sequence_of(list(range(30))))
        [again] = slots.place_waiting()
        assert again.shared == 29  # it was read by now


def test_who_waits_for_a_beginning_that_will_not_come_does_not_wait_for_it() -> None:
    common = list(range(40))
    slots = seated(2, 64, [*common, 1], [*common, 2])
    [placed] = slots.place_waiting()
    ahead, behind = slots.occupants[placed.row], slots.waiting[0]
    assert ahead is not None
    slots.leave(ahead)
    assert len(slots.place_waiting()) == 1
    assert behind.row is not None


def test_the_same_tokens_under_another_adapter_are_neither_shared_nor_waited_for() -> None:
    tokens = list(range(20))
    slots = Slots(3, 64)
    for adapter in (0, 7, 7):
        slots.enqueue(sequence_of(tokens, adapter=adapter))
    assert slots.place_waiting() == [
        SlotAssignment(0, 0, 0),
        SlotAssignment(1, 0, 0, True),
    ]  # the second of 7 waits for the first
    fill_all(slots)
    assert slots.place_waiting() == [SlotAssignment(2, 1, 19, True)]


def test_adapters_take_turns_in_the_queue() -> None:
    slots = Slots(1, 64)
    arrivals = [(1, 10), (1, 11), (1, 12), (1, 13), (2, 20), (2, 21), (0, 30)]
    for adapter, token in arrivals:
        slots.enqueue(sequence_of([token], adapter=adapter))

    def serve(count: int) -> list[int]:
        served = []
        for _ in range(count):
            slots.place_waiting()
            [(_, sequence)] = slots.active()
            served.append(sequence.tokens[0])
            slots.leave(sequence)
        return served

    assert serve(3) == [10, 20, 30]
    slots.enqueue(sequence_of([40], adapter=3))  # a newcomer has no claim on what was served before it came
    slots.enqueue(sequence_of([41], adapter=3))
    assert serve(6) == [40, 11, 21, 41, 12, 13]


def test_a_short_common_beginning_is_not_waited_for() -> None:
    common = list(range(WORTH_WAITING))
    slots = seated(2, 64, [*common, 50, 51], [*common[:-1], 60, 61])
    assert slots.place_waiting() == [SlotAssignment(0, 0, 0), SlotAssignment(1, 0, 0)]
    slots = seated(2, 64, [*common, 50, 51], [*common, 60, 61])
    assert slots.place_waiting() == [SlotAssignment(0, 0, 0)]


def test_a_sequence_too_long_for_a_slot_holds_up_those_behind_it() -> None:
    slots = seated(2, 16, [1] * 16, [2])
    assert slots.place_waiting() == []
    slots.resize(2, 17)
    assert len(slots.place_waiting()) == 2


def test_a_later_turn_takes_its_own_slot_over_and_a_stranger_takes_the_least_recently_used() -> None:
    slots = seated(3, 64, list(range(10)), list(range(20, 30)), list(range(40, 50)))
    slots.place_waiting()
    fill_all(slots)
    for _, sequence in list(slots.active()):
        slots.leave(sequence)
    slots.waiting.append(sequence_of([*range(20, 30), 1, 2]))
    assert slots.place_waiting() == [SlotAssignment(1, 1, 9)]
    slots.waiting.append(sequence_of([60, 61]))
    assert slots.place_waiting() == [SlotAssignment(0, 0, 0)]


def test_a_slot_that_holds_much_more_is_copied_from_and_kept() -> None:
    slots = seated(2, 64, list(range(40)))
    slots.place_waiting()
    fill_all(slots)
    slots.leave(slots.occupants[0])  # type: ignore[arg-type]
    slots.waiting.append(sequence_of([*range(12), 63]))
    assert slots.place_waiting() == [SlotAssignment(1, 0, 12)]
    assert slots.holds(0).tolist() == list(range(39))


def cut_in_its_prompt(slots: Slots) -> None:
    """A sequence of the first slot is cut when 16 tokens of its prompt are there, and new weights come."""
    slots.place_waiting()
    slots.fill(0, list(range(16)))
    slots.interrupt(slots.occupants[0])  # type: ignore[arg-type]
    slots.forget(hold=True)


def after(tokens: list[int]) -> Completion:
    ones = np.float32([-1.0] * len(tokens))
    versions = int_array([0] * len(tokens))
    return Completion(
        tokens=int_array(tokens),
        sampler_logprobs=ones,
        raw_logprobs=ones,
        versions=versions,
        stop=StopReason.INTERRUPTED,
    )


def test_what_is_held_in_flight_is_for_its_own_sequence_only() -> None:
    prompt = [*range(20), *range(30, 50)]
    slots = seated(2, 64, prompt)
    cut_in_its_prompt(slots)
    slots.waiting.append(sequence_of([*range(20), 60, 61], after=after([5, 6])))  # the same first words
    assert [(placed.row, placed.shared) for placed in slots.place_waiting()] == [(1, 0)]
    slots.waiting.append(sequence_of(prompt, after=after([5, 6])))
    assert [(placed.row, placed.shared) for placed in slots.place_waiting()] == [(0, 16)]
    for _, sequence in list(slots.active()):
        slots.leave(sequence)
    slots.forget(hold=True)
    assert slots.filled == [0, 0], "what has ended is not held"


def test_a_slot_held_in_flight_is_old_until_new_weights_come_again() -> None:
    prompt = [*range(20), *range(30, 50)]
    slots = seated(3, 64, prompt)
    cut_in_its_prompt(slots)
    slots.waiting.append(sequence_of(prompt, after=after([5, 6])))
    slots.place_waiting()
    twin = sequence_of([*prompt, 5, 6, 7])
    slots.waiting.append(twin)
    assert [placed.shared for placed in slots.place_waiting()] == [0]  # while it runs, and there is no use in waiting
    slots.leave(twin)
    fill_all(slots)
    assert slots.move(0, 2).shared == 41
    assert slots.filled[0] == 0, "what was moved away is not offered to others"
    slots.leave(slots.occupants[2])  # type: ignore[arg-type]
    slots.waiting.append(sequence_of([*prompt, 5, 6, 7]))
    assert [placed.shared for placed in slots.place_waiting()] == [0]  # and when it has ended
    slots.leave(slots.occupants[1] or slots.occupants[0])  # type: ignore[arg-type]
    slots.forget(hold=True)
    assert slots.filled == [0, 0, 0]


def test_a_partial_goes_on_behind_what_it_has() -> None:
    partial = Completion(
        tokens=int_array([4, 5]),
        sampler_logprobs=np.float32([-1.0, -2.0]),
        raw_logprobs=np.float32([-3.0, -4.0]),
        versions=int_array([2, 3]),
        stop=StopReason.INTERRUPTED,
        next_logprobs=np.float32([-5.0, np.nan]),
    )
    sequence = sequence_of([1, 2], after=partial)
    assert (sequence.tokens, sequence.num_sampled) == ([1, 2, 4, 5], 2)
    back = sequence.completion(StopReason.LENGTH)
    assert (back.tokens.tolist(), back.versions.tolist(), back.stop) == ([4, 5], [2, 3], StopReason.LENGTH)
    assert (back.sampler_logprobs.tolist(), back.raw_logprobs.tolist()) == ([-1.0, -2.0], [-3.0, -4.0])
    np.testing.assert_array_equal(back.next_logprobs, np.float32([-5.0, np.nan]))


def test_a_group_reads_its_prompt_in_one_slot_until_that_is_given_away() -> None:
    slots = Slots(4, 40)
    group = [sequence_of([7] * 20, arrival=arrival) for arrival in range(3)]
    for member in group:
        slots.enqueue(member)
    [first] = slots.place_waiting()
    slots.fill(first.row, [7] * 19)
    others = slots.place_waiting()
    assert [(placed.donor, placed.shared) for placed in others] == [(0, 19), (1, 19)]
    assert [slots.shared_prefix_slot(placed.row) for placed in others] == [
        (0, 19),
        (0, 19),
    ]  # one slot, whoever it was copied from
    assert slots.shared_prefix_slot(first.row) == (0, 0)
    slots.leave(group[0])
    assert slots.shared_prefix_slot(1) == (0, 19)  # what the slot holds stays
    slots.enqueue(sequence_of([5] * 30))
    slots.enqueue(sequence_of([6] * 30))
    slots.place_waiting()
    assert [slots.shared_prefix_slot(row) for row in (1, 2)] == [(1, 0), (2, 0)]
