"""Log-probs of given sequences under the weights that sample: packed forward passes, a few thousand tokens each."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from headrace.errors import SamplerError
from headrace.model import head
from headrace.model.attention import Context, Packed
from headrace.model.load import LanguageModel
from headrace.types import FloatArray, IntArray, float_array

SCORE_TOKENS = 4096  # packed tokens of one call

Hidden = Callable[[Tensor, Tensor, Context], Tensor]  # tokens and positions [T] to the last hidden states [T, D]


def score_packed(
    lm: LanguageModel, hidden: Hidden, head_VD: Tensor, sequences: Sequence[IntArray], temperature: float
) -> tuple[FloatArray, ...]:
    """log p of every token after its beginning, NaN for the first. Raises SamplerError on what cannot be scored."""
    if not temperature > 0:
        raise SamplerError(f"scores need a temperature above 0, not {temperature}")
    results: list[FloatArray] = []
    batch: list[IntArray] = []
    for sequence in sequences:
        if not len(sequence) or len(sequence) > lm.context:
            raise SamplerError(f"a sequence of {len(sequence)} tokens cannot be scored: 1 to {lm.context} can")
        if batch and sum(map(len, batch)) + len(sequence) > SCORE_TOKENS:
            results += _score_batch(lm.device, hidden, head_VD, batch, temperature)
            batch = []
        batch.append(sequence)
    return tuple(results + (_score_batch(lm.device, hidden, head_VD, batch, temperature) if batch else []))


def _score_batch(
    device: torch.device, hidden: Hidden, head_VD: Tensor, batch: Sequence[IntArray], temperature: float
) -> list[FloatArray]:
    lengths = tuple(len(sequence) for sequence in batch)
    tokens_T = torch.from_numpy(np.concatenate(batch)).long().to(device)
    positions_T = torch.cat([torch.arange(length) for length in lengths]).to(device)
    hidden_TD = hidden(tokens_T, positions_T, Packed(lengths))
    scale = None if temperature == 1.0 else torch.full((len(tokens_T),), temperature, device=device)
    targets = head.Targets(torch.roll(tokens_T, -1), scale)
    logprobs_T, _ = head.logprobs(hidden_TD, head_VD, targets)
    pieces = np.split(logprobs_T.float().cpu().numpy(), np.cumsum(lengths)[:-1])
    return [float_array(np.concatenate([[np.nan], piece[:-1]])) for piece in pieces]
