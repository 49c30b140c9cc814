"""Score given sequences under the weights that sample: packed forward passes of a few thousand tokens each.

Shape letters: T packed tokens, C tokens of a chunk, D width, V vocabulary, K alternatives per token.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.errors import SamplerError
from headrace.model import head
from headrace.model.attention import Context, Packed
from headrace.model.cpu.packed_linear import linear
from headrace.model.load import LanguageModel
from headrace.model.multi_lora import BASE, HEAD, AdapterTable, apply_adapters, use_adapters
from headrace.types import FloatArray, IntArray, float_array, int_array

SCORE_TOKENS = 4096  # packed tokens of one call

Hidden = Callable[[Tensor, Tensor, Context], Tensor]  # tokens and positions [T] to the last hidden states [T, D]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scorer:
    """Score sequences under a model's current weights and one adapter."""

    lm: LanguageModel
    hidden: Hidden
    head_VD: Tensor
    table: AdapterTable | None = None  # of the adapters
    adapter: int = BASE  # key of the adapter that all rows use

    def score(self, sequences: Sequence[IntArray], temperature: float) -> tuple[FloatArray, ...]:
        """Return log p of every token given those before it, NaN for the first. Raises SamplerError."""
        if not temperature > 0:
            raise SamplerError(f"scores need a temperature above 0, not {temperature}")
        results: list[FloatArray] = []
        batch: list[IntArray] = []
        for sequence in sequences:
            self._check(sequence)
            if batch and sum(map(len, batch)) + len(sequence) > SCORE_TOKENS:
                results += self._score_batch(batch, temperature)
                batch = []
            batch.append(sequence)
        return tuple(results + (self._score_batch(batch, temperature) if batch else []))

    def top(self, sequence: IntArray, k: int) -> tuple[IntArray, FloatArray]:
        """Return the k most likely tokens at each position after the first and their log-probs, [T - 1, K]."""
        if not 1 <= k <= self.lm.vocabulary:
            raise SamplerError(f"{k} most likely tokens cannot be told: 1 to {self.lm.vocabulary} can")
        self._check(sequence)
        chunks = [torch.topk(logp_CV, k) for _, logp_CV in self._rows(self._forward([sequence])[:-1])]
        tokens = [chunk.indices.cpu().numpy() for chunk in chunks] or [np.zeros((0, k))]
        values = [chunk.values.cpu().numpy() for chunk in chunks] or [np.zeros((0, k))]
        return int_array(np.concatenate(tokens)), float_array(np.concatenate(values))

    def targets(self, sequence: IntArray, targets_TK: IntArray) -> FloatArray:
        """Return the log-probs of the tokens in row i at position i + 1 of the sequence; 0 where the token is -1."""
        self._check(sequence)
        if targets_TK.ndim != 2 or len(targets_TK) != len(sequence) - 1 or not (targets_TK >= -1).all():
            raise SamplerError(f"targets need {len(sequence) - 1} rows of tokens, -1 where none is asked for")
        if targets_TK.size and int(targets_TK.max()) >= self.lm.vocabulary:
            raise SamplerError(f"a target lies outside of the vocabulary of {self.lm.vocabulary}")
        tokens_TK = torch.from_numpy(targets_TK.astype(np.int64)).to(self.lm.device)
        out = np.zeros(targets_TK.shape, dtype=np.float32)
        for span, logp_CV in self._rows(self._forward([sequence])[:-1]):
            out[span] = logp_CV.gather(1, tokens_TK[span].clamp_min(0)).cpu().numpy()
        return float_array(np.where(targets_TK < 0, 0.0, out))

    def _check(self, sequence: IntArray) -> None:
        if not len(sequence) or len(sequence) > self.lm.context:
            raise SamplerError(f"a sequence of {len(sequence)} tokens cannot be scored: 1 to {self.lm.context} can")
        if not (int(sequence.min()) >= 0 and int(sequence.max()) < self.lm.vocabulary):
            raise SamplerError(f"the sequence has a token outside of the vocabulary of {self.lm.vocabulary}")

    def _score_batch(self, batch: Sequence[IntArray], temperature: float) -> list[FloatArray]:
        hidden_TD = self._forward(batch)
        tokens_T = torch.from_numpy(np.concatenate(batch)).long().to(self.lm.device)
        following_T = torch.roll(tokens_T, -1)
        if self.adapter == BASE:
            scale = None if temperature == 1.0 else torch.full((len(tokens_T),), temperature, device=self.lm.device)
            targets = head.Targets(following_T, scale)
            logprobs_T, _ = head.logprobs(hidden_TD, self.head_VD, targets, rule=self.lm.logit_rule)
        else:
            rows = self._rows(hidden_TD, temperature)
            logprobs_T = torch.cat([logp_CV.gather(1, following_T[span, None])[:, 0] for span, logp_CV in rows])
        parts = np.split(logprobs_T.float().cpu().numpy(), np.cumsum([len(sequence) for sequence in batch])[:-1])
        return [float_array(np.concatenate([[np.nan], part[:-1]])) for part in parts]

    def _forward(self, batch: Sequence[IntArray]) -> Tensor:
        lengths = tuple(len(sequence) for sequence in batch)
        tokens_T = torch.from_numpy(np.concatenate(batch)).long().to(self.lm.device)
        positions_T = torch.cat([torch.arange(length) for length in lengths]).to(self.lm.device)
        with self._adapted(len(tokens_T)):
            return self.hidden(tokens_T, positions_T, Packed(lengths))

    def _rows(self, hidden_TD: Tensor, temperature: float = 1.0) -> Iterator[tuple[slice, Tensor]]:
        """Yield log-probs over the whole vocabulary, chunk by chunk."""
        chunk = head.default_chunk(self.lm.device)
        for start in range(0, len(hidden_TD), chunk):
            hidden_CD = hidden_TD[start : start + chunk]
            with self._adapted(len(hidden_CD)):
                product = head.logits if hidden_CD.is_cuda else linear
                logits_CV = apply_adapters(HEAD, hidden_CD, product(hidden_CD, self.head_VD))
            logits_CV = logits_CV if logits_CV.dtype == torch.float64 else logits_CV.float()
            logits_CV = self.lm.logit_rule.apply(logits_CV)
            yield slice(start, start + len(hidden_CD)), torch.log_softmax(logits_CV / temperature, dim=-1)

    def _adapted(self, rows: int) -> AbstractContextManager[None]:
        if self.table is None or self.adapter == BASE:
            return nullcontext()
        return use_adapters(self.table, self.table.row_adapters(np.full(rows, self.adapter)))
