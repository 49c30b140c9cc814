"""Decode in CUDA graphs: several steps per call, sampling included, over slots that rows join and leave between calls.

The decoder owns everything a graph points to: the rows' state, intermediate buffers, keys and values, and copies of
weights. A graph is one decode step for a fixed number of rows (`tiling.BUCKETS`); it is captured when first needed and
replayed from then on. Rows that stop are skipped on the device. The decoder must not know requests, queues or versions.
"""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor

from headrace.infer.cuda import forward, sampling_kernels
from headrace.infer.cuda.adapter_factors import AdaptedRows, AdapterFactors, LowBuffers
from headrace.infer.cuda.forward import DecodeAttention, TokenIndex, Workspace
from headrace.infer.cuda.layer_weights import DenseWeights
from headrace.infer.cuda.tiling import (
    DECODE_BLOCK,
    PROMPT_BLOCK,
    adapter_blocks,
    bucket_for,
    prompt_blocks,
    room_for_blocks,
)
from headrace.infer.multistep import STOPS, DecodeResult, DecodeRow
from headrace.model import head
from headrace.model.attention import KVCache, PromptChunk
from headrace.model.load import LanguageModel
from headrace.model.multi_lora import AdapterTable

PROMPT_TOKENS = 4096
MAX_STEPS = 32  # of one multi-step decode
BLOCK = 4096  # of the vocabulary
TOKEN, POSITION, SLOT, DONOR, SHARED, SHIFT, SEED, COUNT, LIMIT, DRAWN, FIELDS = range(11)


class GraphDecoder:
    """Decode up to `max_num_seqs` rows over `kv_tokens` cached positions; prefill up to `prompt_tokens` at a time.

    `deterministic`: every matrix product has the same number of rows, so that a row's bits do not depend on the others;
    and sampled tokens that become part of a prompt are prefilled again, so that bits do not depend on what was cached.
    `adapters`: rows may use these; the weights of the layers stay as they are.
    """

    def __init__(
        self,
        lm: LanguageModel,
        *,
        max_num_seqs: int,
        kv_tokens: int,
        prompt_tokens: int = PROMPT_TOKENS,
        deterministic: bool = False,
        adapters: AdapterTable | None = None,
    ) -> None:
        self._deterministic = deterministic
        self.share_sampled = not deterministic
        self._weights = DenseWeights(lm, positions=lm.context)
        shape, device = self._weights.shape, lm.device
        self.prompt_tokens = prompt_tokens
        self._max_num_seqs = bucket_for(max_num_seqs)
        self._workspace = Workspace.make(self._weights, self._max_num_seqs)
        self._prompt_workspace: Workspace | None = None
        self._attention = DecodeAttention(self._weights, self._max_num_seqs)
        kv = (shape.layers, 2, kv_tokens * shape.H * shape.W)
        self._storage = torch.zeros(kv, dtype=self._weights.dtype, device=device)
        self._slot_tokens = torch.zeros(1, dtype=torch.int32, device=device)
        self._cache: KVCache | None = None
        self._make_rows(device, shape.V)
        self.takes_adapters = adapters is not None
        self._adapters = None if adapters is None else AdapterFactors(self._weights, adapters)
        self._room = 0  # for blocks of adapters; 0 when all rows use the base alone
        self._layout: tuple[int, int] | None = None  # of the adapters that graphs were captured for
        self._adapter_blocks = torch.zeros((self._max_num_seqs, 3), dtype=torch.int32, device=device)
        self._low: LowBuffers | None = None
        self._beside = torch.cuda.Stream(device) if device.type == "cuda" and adapters is not None else None  # type: ignore[no-untyped-call]

    def _make_rows(self, device: torch.device, vocabulary: int) -> None:
        """Allocate the state of the rows and what they sample, and forget all graphs."""
        state = self._max_num_seqs * (FIELDS + STOPS)
        pinned = device.type == "cuda"
        self._state = torch.zeros(state, dtype=torch.int64, device=device)
        self._state[self._max_num_seqs * POSITION : self._max_num_seqs * (POSITION + 1)] = -1
        self._host_state = torch.zeros(state, dtype=torch.int64, pin_memory=pinned)
        self._temperatures = torch.ones(self._max_num_seqs, dtype=torch.float32, device=device)
        self._host_temperatures = torch.ones(self._max_num_seqs, dtype=torch.float32, pin_memory=pinned)
        self._out = torch.zeros((3, self._max_num_seqs, MAX_STEPS), dtype=torch.int32, device=device)
        self._host_copies = [_HostCopy.make(self._max_num_seqs, pinned=pinned) for _ in range(2)]
        self._unfinished: deque[_HostCopy] = deque()
        self._count = self._bucket = 0  # rows that are decoded, and rows of their graph
        self._most = 0  # tokens that a row can still have
        self._logits = torch.zeros((self._max_num_seqs, vocabulary), dtype=torch.float32, device=device)
        self._blocks = torch.zeros((4, self._max_num_seqs * triton.cdiv(vocabulary, BLOCK)), device=device)
        self._graphs: dict[tuple[int, int], Any] = {}  # by rows and blocks of adapters
        self._pool: Any = None
        self._order: list[int] = []  # the rows as they are decoded, by their number in `start`

    def refresh(self) -> None:
        """Renew copies of the model's parameters, which have changed."""
        self._weights.refresh()

    def cache(self, rows: int, tokens: int) -> KVCache:
        """Lay the keys and values out as `rows` slots of `tokens` positions."""
        shape = self._weights.shape
        self._slot_tokens.fill_(tokens)
        self._cache = KVCache(
            layers=shape.layers,
            rows=rows,
            heads=shape.H,
            tokens=tokens,
            width=shape.W,
            dtype=self._storage.dtype,
            device=self._storage.device,
            storage=self._storage,
        )
        return self._cache

    # --- prompts ---

    def prefill(
        self, chunks: Sequence[PromptChunk], tokens: Sequence[int], adapters: Sequence[int] | None = None
    ) -> None:
        """Write keys and values of the chunks' tokens (end to end in `tokens`) into their slots."""
        assert self._cache is not None
        assert len(tokens) == sum(chunk.length for chunk in chunks) <= self.prompt_tokens
        if self._prompt_workspace is None:
            self._prompt_workspace = Workspace.make(self._weights, self.prompt_tokens)
        device = self._storage.device
        rows = self.prompt_tokens if self._deterministic else len(tokens)
        laid_out = np.zeros((3, rows), dtype=np.int64)
        laid_out[0, : len(tokens)] = tokens
        laid_out[1, : len(tokens)] = np.concatenate([np.arange(c.offset, c.offset + c.length) for c in chunks])
        laid_out[2] = -1
        laid_out[2, : len(tokens)] = np.repeat([chunk.row for chunk in chunks], [chunk.length for chunk in chunks])
        tokens_T, positions_T, slots_T = torch.from_numpy(laid_out).to(device)
        blocks = torch.from_numpy(prompt_blocks(chunks)).to(device)
        workspace = self._prompt_workspace.first(rows)
        index = TokenIndex(positions_T, slots_T, self._slot_tokens)
        last = self._weights.shape.layers - 1

        def attend(layer: int) -> None:
            assert self._cache is not None
            forward.prompt_attention(
                self._weights, layer, workspace, index, self._cache, blocks, only_cache=layer == last
            )

        adapted = None
        if self._adapters is not None and adapters is not None and any(adapters):
            runs = [(self._adapters.slot_of(key), chunk.length) for key, chunk in zip(adapters, chunks, strict=True)]
            parts = torch.from_numpy(adapter_blocks(runs, PROMPT_BLOCK)).to(device)
            buffers = LowBuffers.make(self._adapters, rows, len(parts), PROMPT_BLOCK)
            adapted = AdaptedRows(self._adapters, parts, rows, PROMPT_BLOCK, buffers)
        forward.hidden(self._weights, tokens_T, workspace, attend, only_cache=True, adapted=adapted)

    # --- decoding ---

    def start(self, rows: Sequence[DecodeRow], steps: int) -> None:
        """Start to decode up to `steps` tokens of every row."""
        assert 0 < len(rows) <= self._max_num_seqs
        self._unfinished.clear()
        self._count = len(rows)
        self._bucket = self._max_num_seqs if self._deterministic else bucket_for(len(rows))
        self._most = max(row.limit - row.position - 1 for row in rows)
        self._order = sorted(range(len(rows)), key=lambda index: rows[index].adapter)
        self._upload([rows[index] for index in self._order])
        started = self._launch(steps)
        assert started, "a row that has all its tokens"

    def start_next(self, steps: int) -> bool:
        """Start to decode up to `steps` more tokens of the same rows, behind the decode that runs."""
        self._field(COUNT).add_(self._field(DRAWN))
        self._field(DRAWN).zero_()
        return self._launch(steps)

    def finish(self) -> DecodeResult:
        """Wait for the first unfinished multi-step decode and return its result."""
        return self._unfinished.popleft().result(self._order)

    def _launch(self, steps: int) -> bool:
        """Queue the steps and the copy of their results; return False if no row can have more tokens."""
        steps = min(steps, MAX_STEPS, self._most)
        if steps <= 0:
            return False
        self._most -= steps
        graph = self._bucket, self._room
        if self._state.is_cuda and graph not in self._graphs:
            self._graphs[graph] = self._capture(*graph)
        for _ in range(steps):
            if self._state.is_cuda:
                self._graphs[graph].replay()
            else:
                self._step(*graph)
        copy = next(copy for copy in self._host_copies if copy not in self._unfinished)
        copy.start(self._field(DRAWN), self._out, steps)
        self._unfinished.append(copy)
        return True

    def _upload(self, rows: Sequence[DecodeRow]) -> None:
        fields = self._host_state.numpy()[: FIELDS * self._max_num_seqs].reshape(FIELDS, -1)
        stops = self._host_state.numpy()[FIELDS * self._max_num_seqs :].reshape(-1, STOPS)
        count = len(rows)
        fields[TOKEN, :count] = [row.token for row in rows]
        fields[POSITION, :count] = [row.position for row in rows]
        fields[POSITION, count:] = -1
        fields[SLOT, :count] = [row.slot for row in rows]
        fields[DONOR, :count] = [row.donor for row in rows]
        fields[SHARED, :count] = [row.shared for row in rows]
        fields[SHIFT, :count] = [row.rotary_shift for row in rows]
        fields.view(np.uint64)[SEED, :count] = [row.seed for row in rows]
        fields[COUNT, :count] = [row.count for row in rows]
        fields[LIMIT, :count] = [row.limit for row in rows]
        fields[DRAWN] = 0
        stops[:count] = -1
        for index, row in enumerate(rows):
            if row.stops:
                stops[index, : len(row.stops)] = row.stops
        self._host_temperatures.numpy()[:count] = [row.temperature for row in rows]
        self._choose_adapters([row.adapter for row in rows])
        self._state.copy_(self._host_state, non_blocking=True)
        self._temperatures.copy_(self._host_temperatures, non_blocking=True)

    def _choose_adapters(self, keys: Sequence[int]) -> None:
        """Upload the blocks of rows that share an adapter; rows lie in the order of their adapters."""
        self._room = 0
        if self._adapters is None or not any(keys):
            return
        if self._layout != self._adapters.layout:
            self._layout = self._adapters.layout
            self._drop_graphs({graph for graph in self._graphs if graph[1]})
            self._low = LowBuffers.make(self._adapters, self._max_num_seqs, self._max_num_seqs, DECODE_BLOCK)
        blocks = adapter_blocks([(self._adapters.slot_of(key), 1) for key in keys], DECODE_BLOCK)
        self._room = room_for_blocks(self._bucket, len(blocks))
        padded = np.full((self._room, 3), (-1, 0, 0), dtype=np.int32)
        padded[: len(blocks)] = blocks
        self._adapter_blocks[: self._room].copy_(torch.from_numpy(padded))

    def _field(self, name: int) -> Tensor:
        return self._state[name * self._max_num_seqs : (name + 1) * self._max_num_seqs]

    def _drop_graphs(self, dropped: Collection[tuple[int, int]]) -> None:
        self._graphs = {graph: captured for graph, captured in self._graphs.items() if graph not in dropped}
        if not self._graphs:
            self._pool = None  # it has gone with the last of its graphs

    def _capture(self, bucket: int, room: int) -> Any:
        """Capture a graph of one step, after a step with all rows idle that compiles kernels and sets up libraries."""
        positions = self._field(POSITION)
        before = positions.clone()
        positions.fill_(-1)
        self._step(bucket, room)
        torch.cuda.current_stream().synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            self._step(bucket, room)
        self._pool = graph.pool()
        positions.copy_(before)
        return graph

    def _step(self, bucket: int, room: int) -> None:
        assert self._cache is not None
        adapted = None
        if room:
            assert self._adapters is not None
            assert self._low is not None
            blocks = self._adapter_blocks[:room]
            adapted = AdaptedRows(self._adapters, blocks, bucket, DECODE_BLOCK, self._low, self._beside)
        shape, workspace = self._weights.shape, self._workspace.first(bucket)
        index = TokenIndex(
            self._field(POSITION),
            self._field(SLOT),
            self._slot_tokens,
            self._field(DONOR),
            self._field(SHARED),
            self._field(SHIFT),
        )
        attend = partial(self._attention, workspace=workspace, index=index, cache=self._cache)
        forward.hidden(self._weights, self._field(TOKEN), workspace, attend, only_cache=False, adapted=adapted)
        logits = self._logits[:bucket]
        if adapted is not None:
            adapted.shrink(adapted.factors.head, workspace.last)
        head.logits(workspace.last, self._weights.head, out=logits)
        if adapted is not None:
            adapted.expand(adapted.factors.head, logits, (shape.V,))
        self._sample(logits, shape.V)

    def _sample(self, logits: Tensor, vocabulary: int) -> None:
        """Sample a token of every row from its logits, and advance the row."""
        positions = self._field(POSITION)
        blocks = triton.cdiv(vocabulary, BLOCK)
        partials = (self._blocks[0], self._blocks[1], self._blocks[2], self._blocks[3].view(torch.int32))
        sampling_kernels.block_kernel[(len(logits), blocks)](
            logits,
            self._temperatures,
            positions,
            *partials,
            vocabulary,
            blocks,
            BLOCK=BLOCK,
            num_warps=8,
        )
        sampling_kernels.draw_kernel[(len(logits),)](
            logits,
            self._temperatures,
            *partials,
            self._field(TOKEN),
            positions,
            self._field(SEED),
            self._field(COUNT),
            self._field(DRAWN),
            self._field(LIMIT),
            self._state[FIELDS * self._max_num_seqs :],
            self._out[0],
            self._out[1].view(torch.float32),
            self._out[2].view(torch.float32),
            vocabulary,
            blocks,
            MAX_STEPS,
            BLOCK=BLOCK,
            BLOCKS=triton.next_power_of_2(blocks),
            STOPS=STOPS,
            num_warps=8,
        )


@dataclass(slots=True, eq=False)
class _HostCopy:
    """The results of a multi-step decode on the host."""

    drawn: Tensor
    out: Tensor
    ready: torch.cuda.Event | None  # recorded behind the copies
    steps: int = 0

    @staticmethod
    def make(rows: int, *, pinned: bool) -> "_HostCopy":
        drawn = torch.zeros(rows, dtype=torch.int64, pin_memory=pinned)
        out = torch.zeros((3, rows, MAX_STEPS), dtype=torch.int32, pin_memory=pinned)
        return _HostCopy(drawn, out, torch.cuda.Event() if pinned else None)  # type: ignore[no-untyped-call]

    def start(self, drawn: Tensor, out: Tensor, steps: int) -> None:
        self.steps = steps
        self.drawn.copy_(drawn, non_blocking=True)
        self.out.copy_(out, non_blocking=True)
        if self.ready is not None:
            self.ready.record()

    def result(self, order: Sequence[int]) -> DecodeResult:
        """Return the results in the order in which the rows were given."""
        if self.ready is not None:
            self.ready.synchronize()
        place = np.argsort(order)
        tokens, logprobs, raw = (part[place, : self.steps] for part in self.out.numpy())
        return DecodeResult(
            drawn=self.drawn.numpy()[place].astype(np.int32),
            tokens=tokens,
            logprobs=logprobs.view(np.float32),
            raw_logprobs=raw.view(np.float32),
        )
