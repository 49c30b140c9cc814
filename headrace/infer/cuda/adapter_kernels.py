"""Triton kernels that add low-rank updates to the products of a layer, a different adapter for each block of rows.

A block is up to ROWS neighbouring rows of one adapter: (adapter, first row, rows); adapter -1 is the base model alone.
The factors of adapter a on part p lie at `addresses[a, p]`: A [n R, I] and B [O, R], for a part of n linear layers with
O outputs together, or 0 where the adapter does not change the part. R is the adapter's own rank, a multiple of 16.

`shrink_kernel` computes A x in slices of the inputs, because one program would wait for each of its loads in turn; the
last program to arrive adds the slices up in their order.

Shape letters: I inputs, O outputs, R rank.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]  # a 1 would be no tensor
def shrink_kernel(  # type: ignore[no-untyped-def]
    low,
    slices,
    arrivals,
    x,
    blocks,
    addresses,
    ranks,
    scales,
    part,
    parts,
    inputs,
    rows,
    slice_inputs,
    LAYERS: tl.constexpr,
    MOST_RANK: tl.constexpr,
    SLICES: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """low[row, layer] = alpha / rank A x. Grid (blocks, layers and tiles of rank, SLICES).

    `arrivals`, one for each block and tile, are zero before and after.
    """
    block = tl.program_id(0)
    tile = tl.program_id(1)
    split = tl.program_id(2)
    entry = blocks + block * 3
    adapter = tl.load(entry).to(tl.int64)
    first = tl.load(entry + 1).to(tl.int64)
    count = tl.load(entry + 2)
    if adapter < 0:
        return
    TILES: tl.constexpr = MOST_RANK // RANKS
    layer = tile // TILES
    start = (tile % TILES) * RANKS
    rank = tl.multiple_of(tl.load(ranks + adapter), 16)  # for loads of 16 bytes
    scale = tl.load(scales + adapter)
    address = tl.load(addresses + (adapter * parts + part) * 2)
    if (address == 0) | (start >= rank):
        return
    dtype = x.dtype.element_ty
    down = tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)
    i = tl.arange(0, ROWS)
    r = start + tl.arange(0, RANKS)
    k = tl.arange(0, BLOCK)
    spot = x + (first + i)[:, None] * inputs + k[None, :]
    factor = down + (layer * rank + r).to(tl.int64)[:, None] * inputs + k[None, :]
    there = (i < count)[:, None]
    real = (r < rank)[:, None]
    total = tl.zeros((ROWS, RANKS), tl.float32)
    begin = split * slice_inputs
    for at in range(begin, tl.minimum(begin + slice_inputs, inputs), BLOCK):
        inside = (at + k < inputs)[None, :]
        own = tl.load(spot + at, mask=there & inside, other=0.0)
        weight = tl.load(factor + at, mask=real & inside, other=0.0)
        total = tl.dot(own, tl.trans(weight), total, input_precision=PRECISION)
    place = ((first + i) * LAYERS + layer)[:, None] * MOST_RANK + r[None, :]
    if SLICES > 1:
        stride = rows.to(tl.int64) * LAYERS * MOST_RANK
        tl.store(slices + split * stride + place, total, mask=there)
        tl.debug_barrier()
        counter = arrivals + block * tl.num_programs(1) + tile
        if tl.atomic_add(counter, 1, sem="acq_rel") != SLICES - 1:
            return
        tl.store(counter, 0)
        each = tl.arange(0, SLICES).to(tl.int64)[:, None, None] * stride
        spot = slices + place[None, :, :] + each
        total = tl.sum(tl.load(spot, mask=there[None, :, :], other=0.0, cache_modifier=".cg"), 0)
    tl.store(low + place, (total * scale).to(dtype), mask=there)


@triton.jit  # type: ignore[untyped-decorator]
def expand_kernel(  # type: ignore[no-untyped-def]
    y,
    low,
    blocks,
    addresses,
    ranks,
    part,
    parts,
    outputs,
    first_outputs,
    second_outputs,
    LAYERS: tl.constexpr,
    MOST_RANK: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """y += B low in the type of y. Grid (blocks, tiles of columns), where no tile lies in two layers of the part: their
    outputs are `first_outputs`, `second_outputs` and the others."""
    entry = blocks + tl.program_id(0) * 3
    adapter = tl.load(entry).to(tl.int64)
    first = tl.load(entry + 1).to(tl.int64)
    count = tl.load(entry + 2)
    if adapter < 0:
        return
    rank = tl.multiple_of(tl.load(ranks + adapter), 16)  # for loads of 16 bytes
    address = tl.load(addresses + (adapter * parts + part) * 2 + 1)
    if address == 0:
        return
    tile = tl.program_id(1)
    layer = 0
    before = 0
    size = first_outputs
    if LAYERS > 1:  # noqa: SIM102 the first is known when the kernel is compiled
        if tile >= tl.cdiv(first_outputs, COLUMNS):
            layer = 1
            tile -= tl.cdiv(first_outputs, COLUMNS)
            before = first_outputs
            size = second_outputs
            if tile >= tl.cdiv(second_outputs, COLUMNS):
                layer = 2
                tile -= tl.cdiv(second_outputs, COLUMNS)
                before += second_outputs
                size = outputs - before
    dtype = low.dtype.element_ty
    up = tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)
    i = tl.arange(0, ROWS)
    o = tile * COLUMNS + tl.arange(0, COLUMNS)
    column = (before + o).to(tl.int64)
    spot = y + (first + i)[:, None] * outputs + column[None, :]
    mask = (i < count)[:, None] & (o < size)[None, :]
    held = tl.load(spot, mask=mask, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, rank, RANKS):
        r = start + tl.arange(0, RANKS)
        factor = up + column[:, None] * rank + r[None, :]
        weight = tl.load(factor, mask=(o < size)[:, None] & (r < rank)[None, :], other=0.0)
        spot_low = low + ((first + i) * LAYERS + layer)[:, None] * MOST_RANK + r[None, :]
        own = tl.load(spot_low, mask=(i < count)[:, None] & (r < rank)[None, :], other=0.0)
        total = tl.dot(own, tl.trans(weight), total, input_precision=PRECISION)
    tl.store(spot, (held + total).to(y.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def adapted_gate_kernel(  # type: ignore[no-untyped-def]
    out,
    both,
    low,
    blocks,
    addresses,
    ranks,
    part,
    parts,
    inner,
    MOST_RANK: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out = silu(gate) * up as `kernels.gate_kernel`, with the adapters' updates added to gate and up first, and
    rounded where the trainer rounds. Blocks without an adapter are computed too. Grid (blocks, tiles of columns)."""
    entry = blocks + tl.program_id(0) * 3
    adapter = tl.load(entry).to(tl.int64)
    first = tl.load(entry + 1).to(tl.int64)
    count = tl.load(entry + 2)
    if count == 0:
        return
    dtype = both.dtype.element_ty
    i = tl.arange(0, ROWS)
    o = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = o < inner
    mask = (i < count)[:, None] & inside[None, :]
    spot = both + (first + i)[:, None] * (2 * inner) + o[None, :]
    gate = tl.load(spot, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(spot + inner, mask=mask, other=0.0).to(tl.float32)
    rank = 0
    address = adapter * 0
    if adapter >= 0:
        rank = tl.multiple_of(tl.load(ranks + adapter), 16)  # for loads of 16 bytes
        address = tl.load(addresses + (adapter * parts + part) * 2 + 1)
    if address != 0:
        factors = tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)
        more_gate = tl.zeros((ROWS, COLUMNS), tl.float32)
        more_up = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, rank, RANKS):
            r = start + tl.arange(0, RANKS)
            where = factors + o.to(tl.int64)[:, None] * rank + r[None, :]
            real = inside[:, None] & (r < rank)[None, :]
            weight = tl.load(where, mask=real, other=0.0)
            spot_low = low + ((first + i) * 2)[:, None] * MOST_RANK + r[None, :]
            mask_low = (i < count)[:, None] & (r < rank)[None, :]
            own = tl.load(spot_low, mask=mask_low, other=0.0)
            more_gate = tl.dot(own, tl.trans(weight), more_gate, input_precision=PRECISION)
            weight = tl.load(where + inner.to(tl.int64) * rank, mask=real, other=0.0)
            own = tl.load(spot_low + MOST_RANK, mask=mask_low, other=0.0)
            more_up = tl.dot(own, tl.trans(weight), more_up, input_precision=PRECISION)
        gate = (gate + more_gate).to(dtype).to(tl.float32)
        up = (up + more_up).to(dtype).to(tl.float32)
    product = gate * tl.sigmoid(gate) * up
    if dtype == tl.float16:
        product = tl.minimum(tl.maximum(product, -65504.0), 65504.0)
    tl.store(out + (first + i)[:, None] * inner + o[None, :], product.to(dtype), mask=mask)
