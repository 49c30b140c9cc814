"""Triton kernels that add low-rank updates to the products of a layer, a different adapter for each block of rows.

A block is up to ROWS neighbouring rows of one adapter: (adapter, first row, rows); adapter -1 is the base model alone.
The factors of adapter a on part p lie at `addresses[a, p]`: A [n R, I] and B [O, R], for a part of n linear layers with
O outputs together, or 0 where the adapter does not change the part. R is the adapter's own rank, a multiple of 16.

`shrink_kernel` computes A x in slices of the inputs; whoever reads the result adds the slices up in their order.

Shape letters: I inputs, O outputs, R rank.
"""

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def shrink_kernel(  # type: ignore[no-untyped-def]
    low,
    x,
    blocks,
    addresses,
    ranks,
    part,
    parts,
    inputs,
    rows,
    slice_inputs,
    LAYERS: tl.constexpr,
    MOST_RANK: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """low[slice, row, layer] = A x over a slice of the inputs. Grid (blocks, layers and tiles of rank, slices)."""
    entry = blocks + tl.program_id(0) * 3
    adapter = tl.load(entry).to(tl.int64)
    first = tl.load(entry + 1).to(tl.int64)
    count = tl.load(entry + 2)
    if adapter < 0:
        return
    TILES: tl.constexpr = MOST_RANK // RANKS
    layer = tl.program_id(1) // TILES
    start = (tl.program_id(1) % TILES) * RANKS
    split = tl.program_id(2)
    rank = tl.load(ranks + adapter)
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
    to = low + ((split * rows + first + i) * LAYERS + layer)[:, None] * MOST_RANK + r[None, :]
    tl.store(to, total, mask=there)


@triton.jit  # type: ignore[untyped-decorator]
def _low(  # type: ignore[no-untyped-def]
    low, first, i, count, rows, layer, start, rank, scale,
    dtype: tl.constexpr, LAYERS: tl.constexpr, MOST_RANK: tl.constexpr, RANKS: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """Add up the slices of A x for a tile of the rank, times alpha / rank."""
    r = start + tl.arange(0, RANKS)
    mask = (i < count)[:, None] & (r < rank)[None, :]
    spot = low + ((first + i) * LAYERS + layer)[:, None] * MOST_RANK + r[None, :]
    if SLICES == 1:
        total = tl.load(spot, mask=mask, other=0.0)
    else:
        split = tl.arange(0, SLICES).to(tl.int64) * rows * LAYERS * MOST_RANK
        total = tl.sum(tl.load(spot[None, :, :] + split[:, None, None], mask=mask[None, :, :], other=0.0), 0)
    return (total * scale).to(dtype)


@triton.jit  # type: ignore[untyped-decorator]
def expand_kernel(  # type: ignore[no-untyped-def]
    y,
    low,
    blocks,
    addresses,
    ranks,
    scales,
    part,
    parts,
    rows,
    outputs,
    first_outputs,
    second_outputs,
    like,
    LAYERS: tl.constexpr,
    MOST_RANK: tl.constexpr,
    SLICES: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """y += B (A x) in the type of y. Grid (blocks, tiles of columns), where no tile lies in two layers of the part.

    `like` has the type of the factors; the layers' outputs are `first_outputs`, `second_outputs` and the others.
    """
    entry = blocks + tl.program_id(0) * 3
    adapter = tl.load(entry).to(tl.int64)
    first = tl.load(entry + 1).to(tl.int64)
    count = tl.load(entry + 2)
    if adapter < 0:
        return
    rank = tl.load(ranks + adapter)
    scale = tl.load(scales + adapter)
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
    dtype = like.dtype.element_ty
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
        own = _low(low, first, i, count, rows, layer, start, rank, scale, dtype, LAYERS, MOST_RANK, RANKS, SLICES)
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
    scales,
    part,
    parts,
    rows,
    inner,
    MOST_RANK: tl.constexpr,
    SLICES: tl.constexpr,
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
    scale = 0.0
    address = adapter * 0
    if adapter >= 0:
        rank = tl.load(ranks + adapter)
        scale = tl.load(scales + adapter)
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
            own = _low(low, first, i, count, rows, 0, start, rank, scale, dtype, 2, MOST_RANK, RANKS, SLICES)
            more_gate = tl.dot(own, tl.trans(weight), more_gate, input_precision=PRECISION)
            weight = tl.load(where + inner.to(tl.int64) * rank, mask=real, other=0.0)
            own = _low(low, first, i, count, rows, 1, start, rank, scale, dtype, 2, MOST_RANK, RANKS, SLICES)
            more_up = tl.dot(own, tl.trans(weight), more_up, input_precision=PRECISION)
        gate = (gate + more_gate).to(dtype).to(tl.float32)
        up = (up + more_up).to(dtype).to(tl.float32)
    product = gate * tl.sigmoid(gate) * up
    if dtype == tl.float16:
        product = tl.minimum(tl.maximum(product, -65504.0), 65504.0)
    tl.store(out + (first + i)[:, None] * inner + o[None, :], product.to(dtype), mask=mask)
