"""Read the log-probs of a sequence's prefix off the forward pass that prefills it.

A sequence that continues under new weights has its prefix prefilled again, and the hidden state of each token gives the
log-prob of the next one. The bits are those that sampling these tokens under these weights would have recorded.

Shape letters: R rows, V vocabulary, D width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.infer.kv_slots import SequenceState
from headrace.model.attention import PromptChunk
from headrace.model.head import picked_logprobs

CHUNK = 64  # rows whose probabilities over the vocabulary are in memory at a time


@dataclass(frozen=True, slots=True)
class LogprobRow:
    """A requested log-prob."""

    row: int  # of the step's hidden states
    token: int  # whose log-prob that row gives
    sequence: SequenceState


def logprob_rows(
    chunks: Sequence[PromptChunk], occupants: Sequence[SequenceState | None], *, first_row: int
) -> list[LogprobRow]:
    """List the log-probs that the chunks of a step can give; chunks lie one after another from `first_row` on."""
    rows: list[LogprobRow] = []
    for chunk in chunks:
        sequence = occupants[chunk.row]
        assert sequence is not None
        start = sequence.unscored
        if start is not None:
            assert start >= chunk.offset, "a requested token was taken from another slot"
            end = min(chunk.offset + chunk.length, sequence.num_given - 1)
            rows += [
                LogprobRow(first_row + position - chunk.offset, sequence.tokens[position + 1], sequence)
                for position in range(start, end)
            ]
        first_row += chunk.length
    return rows


def record(hidden_TD: Tensor, rows: Sequence[LogprobRow], logits: Callable[[Tensor, list[int]], Tensor]) -> None:
    """Write the log-probs into their sequences; `logits` gives [R, V] for rows of the hidden states."""
    for start in range(0, len(rows), CHUNK):
        batch = rows[start : start + CHUNK]
        logits_RV = logits(hidden_TD, [row.row for row in batch]).float()
        temperatures = [row.sequence.request.params.temperature for row in batch]
        if any(temperature != 1.0 for temperature in temperatures):
            logits_RV = logits_RV / torch.tensor(temperatures, device=logits_RV.device)[:, None]
        tokens_R1 = torch.tensor([[row.token] for row in batch], device=logits_RV.device)
        for row, logprob in zip(batch, _logprobs(logits_RV, tokens_R1).tolist(), strict=True):
            row.sequence.prefix_logprobs.append(logprob)


def _logprobs(logits_RV: Tensor, tokens_R1: Tensor) -> Tensor:
    """Compute log-probs as sampling records them, and without underflow where a token was hardly possible."""
    probs_RV = torch.softmax(logits_RV, dim=-1)
    picked_R1 = probs_RV.gather(1, tokens_R1)
    safe_R1 = picked_logprobs(logits_RV.gather(1, tokens_R1), logits_RV.amax(dim=-1, keepdim=True), probs_RV)
    return torch.where(picked_R1 > 0, picked_R1.log(), safe_R1)[:, 0]
