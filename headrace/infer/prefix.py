"""Log-probs of the tokens that a sequence begins with, read off the pass that fills the cache with them.

A sequence that goes on under new weights has its beginning computed again, and the hidden state of each token says how
likely the one after it was. Bits are those that sampling these tokens under these weights would have recorded.

Shape letters: R rows, V vocabulary, D width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.infer.slots import SequenceState
from headrace.model.attention import Piece
from headrace.model.head import picked_logprobs

CHUNK = 64  # rows whose probabilities over the vocabulary exist at a time


@dataclass(frozen=True, slots=True)
class LogprobRow:
    """Row `row` of a step's hidden states tells the log-prob of `token`, the next that `sequence` asks for."""

    row: int
    token: int
    sequence: SequenceState


def logprob_rows(
    pieces: Sequence[Piece], seated: Sequence[SequenceState | None], *, first_row: int
) -> list[LogprobRow]:
    """In order, for pieces that lie one after another from `first_row` on."""
    found: list[LogprobRow] = []
    for piece in pieces:
        sequence = seated[piece.row]
        assert sequence is not None
        start = sequence.unscored
        if start is not None:
            assert start >= piece.offset, "a token that is asked for was taken from another slot"
            end = min(piece.offset + piece.length, sequence.num_given - 1)
            found += [
                LogprobRow(first_row + position - piece.offset, sequence.tokens[position + 1], sequence)
                for position in range(start, end)
            ]
        first_row += piece.length
    return found


def record(hidden_TD: Tensor, wanted: Sequence[LogprobRow], logits: Callable[[Tensor, list[int]], Tensor]) -> None:
    """Write the log-probs into their sequences; `logits` gives [R, V] for rows of the hidden states."""
    for start in range(0, len(wanted), CHUNK):
        chunk = wanted[start : start + CHUNK]
        logits_RV = logits(hidden_TD, [one.row for one in chunk]).float()
        temperatures = [one.sequence.request.params.temperature for one in chunk]
        if any(temperature != 1.0 for temperature in temperatures):
            logits_RV = logits_RV / torch.tensor(temperatures, device=logits_RV.device)[:, None]
        tokens_R1 = torch.tensor([[one.token] for one in chunk], device=logits_RV.device)
        for one, logprob in zip(chunk, _logprobs(logits_RV, tokens_R1).tolist(), strict=True):
            one.sequence.prefix_logprobs.append(logprob)


def _logprobs(logits_RV: Tensor, tokens_R1: Tensor) -> Tensor:
    """As sampling records them; where a probability underflows, which no drawn token's does, in its logarithm."""
    probs_RV = torch.softmax(logits_RV, dim=-1)
    picked_R1 = probs_RV.gather(1, tokens_R1)
    safe_R1 = picked_logprobs(logits_RV.gather(1, tokens_R1), logits_RV.amax(dim=-1, keepdim=True), probs_RV)
    return torch.where(picked_R1 > 0, picked_R1.log(), safe_R1)[:, 0]
