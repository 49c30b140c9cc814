"""Several decode steps per call: what the engine hands to a decoder that runs them on a device, and what it takes back.

A decoder owns the cache's storage, reads prompts into it, and decodes rows until they stop, reach their limit or the
steps of a visit are used up. Sequences join and leave between visits; while nobody waits or reads a prompt, the next
visit of the same rows begins before the results of the last are looked at, so that the device does not wait. Nothing
here touches a device.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from headrace.errors import SamplerError
from headrace.infer.slots import SequenceState, Slots
from headrace.model.attention import KVCache, Piece
from headrace.types import FloatArray, IntArray

STOPS = 8  # stop tokens that a decoder looks for in a row
STEPS, STEPS_JOINED, STEPS_ALONE = 16, 8, 32  # of a visit while others wait for rows, when some just got theirs, else
STEPS_AHEAD = 16  # of a visit that another one follows or that follows another


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """A sequence to decode: `token` at `position` is fed next; `count` were sampled; `limit` is its longest length. The
    first `shared` positions of its slot are also in the slot `donor`, where others read them too."""

    slot: int
    token: int
    position: int
    count: int
    limit: int
    seed: int
    temperature: float
    stops: tuple[int, ...]
    donor: int = 0
    shared: int = 0


@dataclass(frozen=True, slots=True)
class DecodeResult:
    """What each row drew, [rows, steps], of which the first `drawn[row]` columns count."""

    drawn: IntArray
    tokens: IntArray
    logprobs: FloatArray
    raw_logprobs: FloatArray


class Decoder(Protocol):
    """`prompt_tokens` of prompts are read in one call at most. `share_sampled`: keys and values of sampled tokens may
    stand in for those that reading the same tokens would give, though their last bits differ."""

    prompt_tokens: int
    share_sampled: bool

    def cache(self, rows: int, tokens: int) -> KVCache:
        """Lay the storage out anew; what was in it is the caller's to move."""
        ...

    def prefill(self, pieces: Sequence[Piece], tokens: Sequence[int]) -> None: ...

    def start(self, rows: Sequence[DecodeRow], steps: int) -> None:
        """A visit: at most `steps` tokens of every row, fewer when the decoder has fewer at a time."""
        ...

    def start_next(self, steps: int) -> bool:
        """Another visit of the same rows behind the one that has begun; those that have ended draw nothing. False, and
        nothing begins, where no row can have more tokens. There are two unfinished visits at most."""
        ...

    def finish(self) -> DecodeResult:
        """What came of the first unfinished visit."""
        ...

    def refresh(self) -> None:
        """The model's weights changed."""
        ...


def decodable(sequence: SequenceState) -> bool:
    """Whether a decoder draws as this request asks: no cut distribution, not too many stop tokens."""
    return not sequence.request.params.truncated and len(sequence.stop_tokens) <= STOPS


def decode_row(slot: int, sequence: SequenceState, *, slots: Slots) -> DecodeRow:
    """A sequence that outgrows its slot stops there and goes on when the slot has grown."""
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
        donor=donor,
        shared=shared,
    )


def decoded_rows(visit: DecodeResult) -> Iterator[tuple[list[int], list[float], list[float]]]:
    """Tokens, log-probs and raw log-probs that each row drew. Raises SamplerError when one is not finite."""
    counts = np.arange(visit.tokens.shape[1]) < visit.drawn[:, None]
    if not np.isfinite(visit.logprobs[counts]).all():
        raise SamplerError("the model's log-probs are not finite: its weights are damaged")
    rows = zip(visit.tokens.tolist(), visit.logprobs.tolist(), visit.raw_logprobs.tolist(), strict=True)
    for count, (tokens, logprobs, raw) in zip(visit.drawn.tolist(), rows, strict=True):
        yield tokens[:count], logprobs[:count], raw[:count]
