"""Run the model for the scheduler: one forward pass over a batch of decode rows and prompt chunks, logits, sampling.

Owns the weights that sample, their version, and the LoRA adapters that requests may name. It must not know queues,
slots' owners or event loops.

Shape letters: B decode rows, T rows of the step, V vocabulary, D width.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.algo.random import uniforms
from headrace.errors import SamplerError
from headrace.infer.kv_slots import SequenceState
from headrace.infer.sampling import SampledTokens, sample_rows
from headrace.infer.scoring import Scorer
from headrace.infer.slot_cache import ALIGN
from headrace.model import head
from headrace.model.attention import ROUND, Cached, KVCache, PromptChunk, visible_mask
from headrace.model.cpu.forward import cpu_forward
from headrace.model.cpu.packed_linear import invalidate_packed, linear
from headrace.model.cuda.fp16_matmul import cache_dtype
from headrace.model.device import wide_dtype
from headrace.model.experts import routing_shape
from headrace.model.hybrid.layers import state_shapes
from headrace.model.load import LanguageModel, copy_folder, copy_weights
from headrace.model.multi_lora import BASE, HEAD, AdapterTable, apply_adapters, use_adapters
from headrace.model.supported import cached_shapes, shared_layers
from headrace.model.vision.tower import FeatureCache, ImageRows, RowsOfImage, image_rows
from headrace.types import WeightsFolder, WeightsHandle, int_array

NO_ADAPTER = "the adapter to sample with is not loaded, or no longer"
READ = 16  # a decode step reads the filled part of the longest slot, rounded up to this


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The work of one step: a token for each decoding sequence, and prompt chunks of others."""

    chunks: list[PromptChunk]
    chunk_sequences: list[SequenceState]  # of each chunk
    decoding: list[tuple[int, SequenceState]]  # slots in ascending order, and their sequences

    @property
    def decode_rows(self) -> int:
        """Number of decode rows, including idle slots between active ones, rounded up to ALIGN."""
        return -(-(self.decoding[-1][0] + 1) // ALIGN) * ALIGN if self.decoding else 0

    @property
    def chunk_tokens(self) -> list[int]:
        """The tokens of all chunks, end to end."""
        chunks = zip(self.chunks, self.chunk_sequences, strict=True)
        return [token for chunk, sequence in chunks for token in tokens_of(chunk, sequence)]

    @property
    def has_images(self) -> bool:
        sequences = [*(sequence for _, sequence in self.decoding), *self.chunk_sequences]
        return any(sequence.request.images for sequence in sequences)

    def spans(self) -> Iterator[tuple[slice, int, SequenceState]]:
        """Yield the rows of each sequence, and the position of the first of them in it."""
        for row, sequence in self.decoding:
            yield slice(row, row + 1), len(sequence.tokens) - 1, sequence
        start = self.decode_rows
        for chunk, sequence in zip(self.chunks, self.chunk_sequences, strict=True):
            yield slice(start, start + chunk.length), chunk.offset, sequence
            start += chunk.length


def tokens_of(chunk: PromptChunk, sequence: SequenceState) -> list[int]:
    return sequence.tokens[chunk.offset : chunk.offset + chunk.length]


class ModelRunner:
    """Compute hidden states, logits and samples of `lm`.

    `source`: the trainer's model when `lm` is a copy of it for sampling; `SharedWeights` then means "copy from it".
    `adapters`: LoRA adapters of this model, of which each row of a batch may use another.
    """

    def __init__(
        self,
        lm: LanguageModel,
        *,
        source: LanguageModel | None,
        adapters: AdapterTable | None,
        record_experts: bool = False,
    ) -> None:
        self.lm = lm
        self._routing = routing_shape(lm.model) if record_experts else None
        self.state_shapes = state_shapes(lm.model)
        self.version = 0  # of the weights
        self._source, self._adapters = source, adapters
        self._hidden = cpu_forward(lm) or lm.hidden
        self._head: Tensor | None = None
        self._row_adapters: list[int] = []  # adapter of each row of the last forward pass
        self.images = FeatureCache(lm.model) if lm.vision is not None else None

    # --- weights and adapters ---

    def load(self, handle: WeightsHandle) -> None:
        """Replace the weights by those of the handle."""
        if isinstance(handle, WeightsFolder):
            copy_folder(handle.path, self.lm.model, partial=handle.partial)
        elif self._source is not None:
            copy_weights(dict(self._source.model.named_parameters()), self.lm.model)
        self._head = None
        invalidate_packed(self.lm.model)
        if self.images is not None:
            self.images.clear()

    def has_adapter(self, adapter: int) -> bool:
        return adapter == BASE or (self._adapters is not None and adapter in self._adapters)

    def version_of(self, adapter: int) -> int:
        """Return the adapter's version, or the model's where there is no such adapter."""
        if adapter == BASE or self._adapters is None or adapter not in self._adapters:
            return self.version
        return self._adapters.version(adapter)

    def remove_adapter(self, adapter: int) -> None:
        assert self._adapters is not None
        self._adapters.remove(adapter)

    def scorer(self, adapter: int) -> Scorer:
        """Return a scorer under the current weights. Raises SamplerError on an adapter that is not loaded."""
        if not self.has_adapter(adapter):
            raise SamplerError(NO_ADAPTER)
        return Scorer(
            lm=self.lm,
            hidden=self._hidden,
            head_VD=self._head_weight(),
            table=self._adapters,
            adapter=adapter,
        )

    # --- one step ---

    def make_cache(self, rows: int, tokens: int) -> KVCache:
        config: Any = self.lm.model.config
        shapes = cached_shapes(config)
        heads, width, _ = shapes[0]
        return KVCache(
            layers=len(shapes),
            rows=rows,
            heads=heads,
            tokens=tokens,
            width=width,
            layer_shapes=shapes,
            shared=shared_layers(config),
            dtype=cache_dtype(self.lm.model, self.lm.dtype),
            device=self.lm.device,
            routing=self._routing,
            state_shapes=self.state_shapes,
        )

    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Feed the batch to the model, write keys and values, and return the last hidden states [T, D].

        Decode rows come first, one for each slot up to the last that decodes, then the chunks, then padding. A slot
        that does not decode writes to its last position, which is never read.
        """
        chunks, decode_rows = batch.chunks, batch.decode_rows
        scratch = cache.tokens - 1
        tokens = [0] * decode_rows
        positions = [scratch] * decode_rows
        adapters = [BASE] * decode_rows
        for row, sequence in batch.decoding:
            tokens[row] = sequence.tokens[-1]
            positions[row] = len(sequence.tokens) - 1
            adapters[row] = sequence.adapter
        slots = list(range(decode_rows))
        for chunk, sequence in zip(chunks, batch.chunk_sequences, strict=True):
            adapters += [sequence.adapter] * chunk.length
            tokens += tokens_of(chunk, sequence)
            positions += range(chunk.offset, chunk.offset + chunk.length)
            slots += [chunk.row] * chunk.length
        written = len(tokens)
        padding = max(-written % ALIGN, ALIGN - written)
        laid_out = np.array([tokens + [0] * padding, positions + [0] * padding, slots + [0] * padding])
        tokens_T, positions_T, slots_T = torch.from_numpy(laid_out).to(self.lm.device)
        mask = chunk_mask = None
        if decode_rows:
            longest = max(len(sequence.tokens) for _, sequence in batch.decoding)
            filled = min(-(-longest // READ) * READ, cache.tokens)
            visible = positions_T[:decode_rows].clamp_max(filled - 1)
            mask = visible_mask(visible, filled, cache.keys[0].dtype)
        if chunks:
            longest = max(chunk.offset + chunk.length for chunk in chunks)
            filled = min(-(-longest // ROUND) * ROUND, cache.tokens)
            chunk_mask = visible_mask(positions_T[decode_rows:written], filled, cache.keys[0].dtype)
        context = Cached(
            cache=cache,
            slots=slots_T[:written],
            positions=positions_T[:written],
            mask=mask,
            chunks=tuple(chunks),
            chunk_mask=chunk_mask,
            active=tuple(row for row, _ in batch.decoding),
        )
        self._row_adapters = adapters + [BASE] * padding
        rotary_T = positions_T.clamp_max(self.lm.context - 1)
        with self._using(self._row_adapters):
            if not batch.has_images:
                return self._hidden(tokens_T, rotary_T, context)
            images = self._image_rows(batch)
            return self._hidden(tokens_T, self._rotary(batch, rotary_T), context, images=images)

    def _rotary(self, batch: ForwardBatch, positions_T: Tensor) -> Tensor:
        """Return the rotary positions of a step's rows, [3, T] where images give them three axes."""
        if self.lm.vision is None or not self.lm.vision.three_axes:
            return positions_T
        rotary = np.broadcast_to(positions_T.cpu().numpy(), (3, len(positions_T))).copy()
        for rows, start, sequence in batch.spans():
            stop = start + rows.stop - rows.start
            rotary[:, rows] += sequence.rotary_shift
            if sequence.rotary is not None and start < (given := sequence.rotary.shape[1]):
                inside = min(stop, given)
                rotary[:, rows.start : rows.start + inside - start] = sequence.rotary[:, start:inside]
        return torch.from_numpy(rotary).to(positions_T.device)

    def _image_rows(self, batch: ForwardBatch) -> ImageRows | None:
        """Return the features of the images that lie among a step's rows."""
        parts: list[RowsOfImage] = []
        for rows, start, sequence in batch.spans():
            for placed in sequence.request.images:
                first, last = np.searchsorted(placed.at, (start, start + rows.stop - rows.start)).tolist()
                if first < last:
                    at = int_array(placed.at[first:last] - start + rows.start)
                    parts.append(RowsOfImage(placed.image, at, int_array(np.arange(first, last))))
        if not parts:
            return None
        assert self.images is not None
        return image_rows(parts, self.images.get([part.image for part in parts]), self.lm.device)

    def sample(self, hidden_TD: Tensor, decoding: Sequence[tuple[int, SequenceState]]) -> SampledTokens:
        """Sample the next token of each decoding sequence, at the uniform number of its seed and position."""
        logits_BV = self.logits(hidden_TD, [row for row, _ in decoding])
        params = [sequence.request.params for _, sequence in decoding]
        numbers = uniforms([row.seed for row in params], [sequence.num_sampled for _, sequence in decoding])
        return sample_rows(
            logits_BV, params, torch.from_numpy(numbers).to(logits_BV.device, wide_dtype(logits_BV.device)), spend=True
        )

    def logits(self, hidden_TD: Tensor, rows: list[int]) -> Tensor:
        """Compute the logits of some rows of the last forward pass."""
        padded = rows + rows[:1] * max(-len(rows) % ALIGN, ALIGN - len(rows))
        hidden_BD = hidden_TD[padded]
        with self._using([self._row_adapters[row] for row in padded]):
            plain = self._adapters is None or hidden_BD.is_cuda
            logits_BV = (head.logits if plain else linear)(hidden_BD, self._head_weight())
            logits_BV = apply_adapters(HEAD, hidden_BD, logits_BV)
            return self.lm.logit_rule.apply(logits_BV)[: len(rows)]

    def _using(self, adapters: list[int]) -> AbstractContextManager[None]:
        """Apply these adapters to the rows of every layer inside."""
        if self._adapters is None:
            return nullcontext()
        return use_adapters(self._adapters, self._adapters.row_adapters(np.array(adapters)))

    def _head_weight(self) -> Tensor:
        if self._head is None:
            self._head = self.lm.head_weight()
        return self._head
