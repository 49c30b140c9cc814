"""Score data with a model that is not trained: log-probs of a reference or teacher, scores of a reward model.

Shape letters: T packed tokens, R tokens that have a weight, D width.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from headrace.algo.packing import pack
from headrace.model import head
from headrace.model.attention import Packed
from headrace.model.load import LanguageModel
from headrace.model.lora import ADAPTER
from headrace.model.value_head import has_scalar_head, scalars
from headrace.process.watchdog import beat
from headrace.train.batch import packed_targets
from headrace.train.image_inputs import ImageInputs, check_images, packed_image_parts, packed_positions
from headrace.types import Datum, FloatArray, IntArray, float_array, int_array

Rows = npt.NDArray[np.intp]


class FrozenScorer:
    """Scores data with a frozen model.

    With `base_only` the model's adapters are left out, so that the base of a LoRA model is its own reference.
    """

    def __init__(self, lm: LanguageModel, *, micro_batch_tokens: int = 8192, base_only: bool = False) -> None:
        self.lm = lm
        self._micro_batch_tokens = micro_batch_tokens
        self._adapter = None if base_only else 0
        self._images = ImageInputs(lm)

    def score(self, data: Sequence[Datum]) -> tuple[FloatArray, ...]:
        """Return one number for each position that has a weight, and 0 for others.

        The number is the target's log-prob at the datum's temperature, or the output of the scalar head.
        """
        check_images(self.lm, data)
        out: list[FloatArray] = [float_array(np.zeros(datum.num_tokens)) for datum in data]
        token = ADAPTER.set(self._adapter)
        try:
            for indices in pack(
                [datum.num_tokens for datum in data], [None] * len(data), budget=self._micro_batch_tokens
            ):
                beat()
                scores = self._score_micro_batch([data[index] for index in indices])
                for index, datum_scores in zip(indices, scores, strict=True):
                    out[index] = datum_scores
        finally:
            ADAPTER.reset(token)
        return tuple(out)

    def top_tokens(self, data: Sequence[Datum], count: int) -> list[tuple[IntArray, FloatArray]]:
        """Return the `count` likeliest next tokens [T, K] of each datum's positions that have a weight, the likeliest
        first, and their log-probs at the datum's temperature; token 0 and 0.0 at other positions."""
        check_images(self.lm, data)
        count = min(count, self.lm.vocabulary)
        tokens = [np.zeros((datum.num_tokens, count), dtype=np.int32) for datum in data]
        logprobs = [np.zeros((datum.num_tokens, count), dtype=np.float32) for datum in data]
        token = ADAPTER.set(self._adapter)
        try:
            for indices in pack(
                [datum.num_tokens for datum in data], [None] * len(data), budget=self._micro_batch_tokens
            ):
                beat()
                batch = [data[index] for index in indices]
                rows_R, top_RK, logprobs_RK = self._top_of_micro_batch(batch, count)
                starts = np.cumsum([0, *(datum.num_tokens for datum in batch)])
                for place, index in enumerate(indices):
                    inside = (rows_R >= starts[place]) & (rows_R < starts[place + 1])
                    tokens[index][rows_R[inside] - starts[place]] = top_RK[inside]
                    logprobs[index][rows_R[inside] - starts[place]] = logprobs_RK[inside]
        finally:
            ADAPTER.reset(token)
        return [(int_array(of), float_array(values)) for of, values in zip(tokens, logprobs, strict=True)]

    def _hidden(self, batch: Sequence[Datum]) -> torch.Tensor:
        """Compute the last hidden states of data laid end to end."""
        device, lengths = self.lm.device, tuple(datum.num_tokens for datum in batch)
        place = int_array(np.arange(sum(lengths)))
        positions = np.concatenate([np.arange(length) for length in lengths])
        positions_T = torch.from_numpy(packed_positions(self.lm, batch, place, positions).astype(np.int64)).to(device)
        tokens_T = torch.from_numpy(np.concatenate([datum.inputs for datum in batch])).long().to(device)
        images = self._images.rows(packed_image_parts(batch, place), want_gradient=False)
        return self.lm.hidden(tokens_T, positions_T, Packed(lengths), images=images)

    @torch.no_grad()
    def _top_of_micro_batch(self, batch: Sequence[Datum], count: int) -> tuple[Rows, IntArray, FloatArray]:
        """Return the rows of the packed tokens that have a weight, and their likeliest tokens with log-probs."""
        device = self.lm.device
        rows = np.flatnonzero(np.concatenate([datum.arrays["weights"] for datum in batch]))
        hidden_RD = self._hidden(batch)[torch.from_numpy(rows).to(device)]
        heat = np.concatenate([np.full(datum.num_tokens, datum.temperature) for datum in batch])[rows]
        top, values = [], []
        chunk = head.default_chunk(device)
        for start in range(0, len(rows), chunk):
            logits_CV = self.lm.logit_rule.apply(head.logits(hidden_RD[start : start + chunk], self.lm.head_weight()))
            real = torch.float64 if logits_CV.dtype == torch.float64 else torch.float32
            scaled_CV = logits_CV.to(real) / torch.from_numpy(heat[start : start + chunk]).to(device, real)[:, None]
            best = torch.log_softmax(scaled_CV, dim=-1).topk(count, dim=-1)
            top.append(best.indices.int().cpu())
            values.append(best.values.float().cpu())
        if not top:
            return rows, np.zeros((0, count), dtype=np.int32), np.zeros((0, count), dtype=np.float32)
        return rows, torch.cat(top).numpy(), torch.cat(values).numpy()

    @torch.no_grad()
    def _score_micro_batch(self, batch: Sequence[Datum]) -> list[FloatArray]:
        device, lengths = self.lm.device, tuple(datum.num_tokens for datum in batch)
        rows_R = torch.from_numpy(np.flatnonzero(np.concatenate([datum.arrays["weights"] for datum in batch])))
        scores_T = np.zeros(sum(lengths), dtype=np.float32)
        if len(rows_R):
            hidden_RD = self._hidden(batch)[rows_R.to(device)]
            real = torch.float64 if hidden_RD.dtype == torch.float64 else torch.float32
            if has_scalar_head(self.lm):
                values_R = scalars(self.lm.model.score, hidden_RD)
            else:
                targets = packed_targets(batch, rows_R, device=device, dtype=real)
                values_R, _ = head.logprobs(hidden_RD, self.lm.head_weight(), targets, rule=self.lm.logit_rule)
            scores_T[rows_R.numpy()] = values_R.float().cpu().numpy()
        return [float_array(part) for part in np.split(scores_T, np.cumsum(lengths)[:-1])]
