"""Multi-step decoding: the interface between the scheduler and a decoder that runs several steps per call on a device.

A decoder owns the cache's storage, prefills prompts into it, and decodes sequences until they stop, reach their limit
or have taken the steps of the call. Sequences join and leave between calls. While none waits or is being prefilled, the
scheduler starts the next call for the same sequences before it reads the results of the last, so that the device does
not idle. This module touches no device.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.infer.kv_slots import SequenceState, Slots
from headrace.model.attention import KVCache, PromptChunk
from headrace.model.multi_lora import BASE
from headrace.types import FloatArray, IntArray

STOPS = 8  # most stop tokens of a sequence that a decoder looks for
STEPS = 16  # of a multi-step decode while sequences wait for slots
STEPS_JOINED = 8  # when a sequence has just got its slot
STEPS_ALONE = 32  # otherwise
STEPS_AHEAD = 16  # when the next multi-step decode starts before the results are read


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """A sequence to decode."""

    slot: int
    token: int  # to feed next
    position: int  # of that token
    count: int  # tokens sampled so far
    limit: int  # longest length of the sequence
    seed: int
    temperature: float
    stops: tuple[int, ...]  # stop tokens
    adapter: int = BASE  # its key
    donor: int = 0  # slot that holds the first `shared` positions too, where other sequences read them
    shared: int = 0
    rotary_shift: int = 0  # from a position to the rotary one, behind pictures whose positions have three axes


@dataclass(frozen=True, slots=True)
class DecodeResult:
    """The sampled tokens of a multi-step decode; of each row the first `drawn[row]` columns count."""

    drawn: IntArray  # [rows]
    tokens: IntArray  # [rows, steps]
    logprobs: FloatArray
    raw_logprobs: FloatArray


class Decoder(Protocol):
    """Prefill and decode on a device, several steps per call.

    The scheduler calls `start`, then any number of `start_next`, and `finish` once for each of them, in order.
    """

    prompt_tokens: int  # most tokens of one `prefill`
    takes_adapters: bool  # whether rows and prompts may use adapters
    share_sampled: bool  # whether keys and values of sampled tokens may replace prefilled ones, though last bits differ

    def cache(self, rows: int, tokens: int) -> KVCache:
        """Lay the storage out as `rows` slots of `tokens` positions; the caller moves its content."""
        ...

    def prefill(
        self, chunks: Sequence[PromptChunk], tokens: Sequence[int], adapters: Sequence[int] | None = None
    ) -> None:
        """Write keys and values of the chunks' tokens, which lie end to end, into their slots; `adapters` has the key
        of each chunk's."""
        ...

    def start(self, rows: Sequence[DecodeRow], steps: int) -> None:
        """Start to decode at most `steps` tokens of every row; a decoder may have a lower limit of its own."""
        ...

    def start_next(self, steps: int) -> bool:
        """Start to decode `steps` more tokens of the same rows behind the decode that runs; rows that have ended get
        none. Return False, and start nothing, if no row can have more tokens. Two may be unfinished at most."""
        ...

    def finish(self) -> DecodeResult:
        """Wait for the first unfinished multi-step decode and return its result."""
        ...

    def refresh(self) -> None:
        """Renew copies of the model's weights, which have changed."""
        ...


def decodable(sequence: SequenceState) -> bool:
    """Return whether a decoder can sample for this request: no truncated distribution, not too many stop tokens."""
    return not sequence.request.params.truncated and len(sequence.stop_tokens) <= STOPS


def decode_row(slot: int, sequence: SequenceState, *, slots: Slots) -> DecodeRow:
    """Describe a sequence to a decoder. One that outgrows its slot stops there, and goes on when slots have grown."""
    params = sequence.request.params
    donor, shared = slots.shared_prefix_slot(slot)
    return DecodeRow(
        slot=slot,
        token=sequence.tokens[-1],
        position=len(sequence.tokens) - 1,
        count=sequence.num_sampled,
        limit=min(sequence.limit, slots.tokens),
        seed=params.seed,
        temperature=params.temperature,
        stops=tuple(sequence.stop_tokens),
        adapter=sequence.adapter,
        donor=donor,
        shared=shared,
        rotary_shift=sequence.rotary_shift,
    )


def decoded_rows(result: DecodeResult) -> Iterator[tuple[list[int], list[float], list[float]]]:
    """Yield tokens, log-probs and raw log-probs of each row."""
    rows = zip(result.tokens.tolist(), result.logprobs.tolist(), result.raw_logprobs.tolist(), strict=True)
    for count, (tokens, logprobs, raw) in zip(result.drawn.tolist(), rows, strict=True):
        yield tokens[:count], logprobs[:count], raw[:count]


def all_finite(logprobs: Sequence[float]) -> bool:
    return all(map(math.isfinite, logprobs))
