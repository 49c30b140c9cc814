"""Decode mixtures and hybrids in CUDA graphs: the model's own modules, captured, with the sampling of `graphs.py`.

Nothing in a decode step of these modules waits for the device, so a step of all slots up to the last one in use is
captured as it is, for the filled part of the longest slot rounded up to a power of two. Row i is slot i; the state and
the keys of an idle slot stay as they are. Prompts are computed by the modules without a graph.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.infer.cuda.graphs import MAX_STEPS, POSITION, PROMPT_TOKENS, TOKEN, GraphDecoder
from headrace.infer.cuda.tiling import bucket_for
from headrace.infer.model_runner import ModelRunner
from headrace.infer.multistep import DecodeResult, DecodeRow
from headrace.model import head
from headrace.model.attention import ROUND, Cached, KVCache, PromptChunk, visible_mask
from headrace.model.hybrid.layout import SlotRuns
from headrace.model.load import LanguageModel

LEAST_FILLED = 256
IDLE = DecodeRow(slot=0, token=0, position=-1, count=0, limit=0, seed=0, temperature=1.0, stops=())


class ModuleDecoder(GraphDecoder):
    """Decode up to `max_num_seqs` rows with the model's modules; `record_experts` as of the engine."""

    def __init__(
        self,
        lm: LanguageModel,
        *,
        max_num_seqs: int,
        prompt_tokens: int = PROMPT_TOKENS,
        record_experts: bool = True,
    ) -> None:
        self._lm, self.prompt_tokens = lm, prompt_tokens
        self._deterministic, self.share_sampled, self.takes_adapters = False, True, False
        self._adapters = None
        self._max_num_seqs = bucket_for(max_num_seqs)
        self._make_cache = ModelRunner(lm, source=None, adapters=None, record_experts=record_experts).make_cache
        self._cache: KVCache | None = None
        self._make_rows(lm.device, lm.vocabulary)
        self._numbers = torch.arange(self._max_num_seqs, device=lm.device)
        self._slots: list[int] = []  # of the rows, by their number in `start`
        self._reach = self._room = 0  # positions that rows may have filled, and those that the graph reads

    def refresh(self) -> None:
        """Graphs read the model's own parameters."""

    def cache(self, rows: int, tokens: int) -> KVCache:
        """Allocate the keys, values and states of `rows` slots of `tokens` positions."""
        self._drop_graphs(set(self._graphs))
        self._cache = self._make_cache(rows, tokens)
        return self._cache

    def prefill(
        self, chunks: Sequence[PromptChunk], tokens: Sequence[int], adapters: Sequence[int] | None = None
    ) -> None:
        """Write keys, values and states of the chunks' tokens (end to end in `tokens`) into their slots."""
        assert self._cache is not None
        positions = np.concatenate([np.arange(c.offset, c.offset + c.length) for c in chunks])
        slots = np.repeat([chunk.row for chunk in chunks], [chunk.length for chunk in chunks])
        laid_out = torch.from_numpy(np.stack([np.array(tokens), positions, slots]))
        tokens_T, positions_T, slots_T = laid_out.to(self._lm.device)
        filled = min(-(-int(positions.max() + 1) // ROUND) * ROUND, self._cache.tokens)
        context = Cached(
            cache=self._cache,
            slots=slots_T,
            positions=positions_T,
            mask=None,
            chunks=tuple(chunks),
            chunk_mask=visible_mask(positions_T, filled, self._cache.keys[0].dtype),
        )
        self._lm.hidden(tokens_T, positions_T, context)

    def start(self, rows: Sequence[DecodeRow], steps: int) -> None:
        """Start to decode up to `steps` tokens of every row."""
        assert self._cache is not None
        self._unfinished.clear()
        self._slots = [row.slot for row in rows]
        self._bucket = min(bucket_for(max(self._slots) + 1), self._cache.rows)
        self._most = max(row.limit - row.position - 1 for row in rows)
        self._reach = max(row.position for row in rows) + 1
        placed = dict(zip(self._slots, rows, strict=True))
        self._upload([placed.get(slot, IDLE) for slot in range(self._bucket)])
        started = self._launch(steps)
        assert started, "a row that has all its tokens"

    def finish(self) -> DecodeResult:
        """Wait for the first unfinished multi-step decode and return its result."""
        result = self._unfinished.popleft().result(range(self._bucket))
        names = ("drawn", "tokens", "logprobs", "raw_logprobs")
        return replace(result, **{name: getattr(result, name)[self._slots] for name in names})

    def _launch(self, steps: int) -> bool:
        assert self._cache is not None
        self._reach += max(0, min(steps, MAX_STEPS, self._most))
        self._room = min(max(LEAST_FILLED, 1 << (self._reach - 1).bit_length()), self._cache.tokens)
        return super()._launch(steps)

    def _step(self, bucket: int, room: int) -> None:
        """Compute the next token of every slot below `bucket`, over their first `room` positions."""
        assert self._cache is not None
        positions = self._field(POSITION)[:bucket]
        active = positions >= 0
        places = torch.where(active, positions, self._cache.tokens - 1)  # which is never read
        numbers = self._numbers[:bucket]
        context = Cached(
            cache=self._cache,
            slots=numbers,
            positions=places,
            mask=visible_mask(places.clamp_max(room - 1), room, self._cache.keys[0].dtype),
            chunks=(),
            runs=_runs(numbers, active),
        )
        hidden_BD = self._lm.hidden(self._field(TOKEN)[:bucket], places.clamp_max(self._lm.context - 1), context)
        logits: Any = head.logits(hidden_BD, self._lm.head_weight().detach(), out=self._logits[:bucket])
        self._sample(self._lm.logit_rule.apply(logits), self._lm.vocabulary)


def _runs(numbers: Tensor, active: Tensor) -> SlotRuns:
    """Describe one token of each slot; an idle slot's run is empty, which the device alone knows."""
    count = len(numbers)
    return SlotRuns(
        slots_R=numbers,
        starts_R=numbers,
        lengths=(1,) * count,
        rows=count,
        begins=tuple(range(count)),
        lengths_R=active.int(),
    )
