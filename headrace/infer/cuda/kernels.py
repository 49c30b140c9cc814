"""Triton kernels of a layer: norms, rotary positions, attention over KV slots, the gate.

Each rounds where the trainer's kernels round (`model/cuda/layers.py`), to as many bits: once, at its end, and the
residual stream not at all, so that sampling differs from training by the order of sums only. Weights are read from
where they are; no kernel allocates, so every launch can be captured in a graph.

A slot's keys are [heads, positions, width], contiguous; how many positions a slot has is read from device memory, so
a captured launch stays valid when the slots get longer.

Shape letters as names: Q query heads, H key-value heads, G query heads per key-value head, W width of a head.
"""

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634


@triton.jit  # type: ignore[untyped-decorator]
def norm_kernel(  # type: ignore[no-untyped-def]
    out, stream, table, tokens, weight, epsilon, width, BLOCK: tl.constexpr, EMBED: tl.constexpr
):
    """out = RMS norm of the float32 stream times weight; with EMBED the stream is table[token] first. Grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    dtype = out.dtype.element_ty
    if EMBED:
        token = tl.load(tokens + row).to(tl.int64)
        hidden = tl.load(table + token * width + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(stream + row * width + column, hidden, mask=inside)
    else:
        hidden = tl.load(stream + row * width + column, mask=inside, other=0.0)
    scaled = hidden * (1.0 / tl.sqrt(tl.sum(hidden * hidden, 0) / width + epsilon))
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, (scaled * scale).to(dtype), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def gate_kernel(out, both, inner, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """out = silu(gate) * up, where a row of `both` is gate then up; in float16 it ends at the largest number."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    dtype = out.dtype.element_ty
    gate = tl.load(both + row * 2 * inner + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * inner + inner + column, mask=inside, other=0.0).to(tl.float32)
    product = gate * tl.sigmoid(gate) * up
    if dtype == tl.float16:
        product = tl.minimum(tl.maximum(product, -65504.0), 65504.0)
    tl.store(out + row * inner + column, product.to(dtype), mask=inside)


@triton.jit
def _turn(first, second, cosine, sine):  # type: ignore[no-untyped-def]
    """Apply the rotary embedding to a head given as its two halves."""
    x, y, c, s = first.to(tl.float32), second.to(tl.float32), cosine.to(tl.float32), sine.to(tl.float32)
    return (x * c - y * s).to(first.dtype), (y * c + x * s).to(first.dtype)


@triton.jit
def _scaled(half, inverse, weight):  # type: ignore[no-untyped-def]
    """Scale one half of a head by its RMS norm."""
    return (half.to(tl.float32) * inverse * weight.to(tl.float32)).to(half.dtype)


@triton.jit  # type: ignore[untyped-decorator]
def decode_kernel(  # type: ignore[no-untyped-def]
    out,
    parts,
    part_weights,
    arrivals,
    qkv,
    cosines,
    sines,
    keys,
    values,
    positions,
    slots,
    slot_tokens,
    donors,
    shared,
    shifts,
    query_norm,
    key_norm,
    scale,
    epsilon,
    Q: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    LEAST: tl.constexpr,
    NORM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend with one new token of each row to its slot: rotate, write key and value, attend. Grid (rows, H, SPLITS).

    The filled part of a slot is cut into at most SPLITS chunks of LEAST keys or more, each a program; the new token's
    own key is part of the first chunk and never read back. The last program of a row to arrive joins the chunks, in
    their order, so the sum does not depend on which was last; `arrivals` are zero before and after. A row at position
    -1 is skipped.

    Blocks within the first `shared` positions are read from the donor's slot, which has the same numbers: where a whole
    group reads them there, they come through memory once.
    """
    row = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    HALF: tl.constexpr = W // 2
    dtype = qkv.dtype.element_ty
    group = tl.arange(0, GP)
    half = tl.arange(0, HALF)
    column = tl.arange(0, W)
    base = qkv + row * (Q + 2 * H) * W
    real = group[:, None] < G
    spot = base + (head * G + group)[:, None] * W + half[None, :]
    position = tl.load(positions + row).to(tl.int32)  # what does not depend on it is on its way before it is looked at
    slot = tl.load(slots + row).to(tl.int64)
    length = tl.load(slot_tokens).to(tl.int64)
    donor = tl.load(donors + row).to(tl.int64)
    common = tl.load(shared + row).to(tl.int32)
    turn = position + tl.load(shifts + row).to(tl.int32)
    q1 = tl.load(spot, mask=real, other=0.0)
    q2 = tl.load(spot + HALF, mask=real, other=0.0)
    k1 = tl.load(base + (Q + head) * W + half)
    k2 = tl.load(base + (Q + head) * W + HALF + half)
    value = tl.load(base + (Q + H + head) * W + column)
    if position < 0:
        return
    chunk = tl.maximum(tl.cdiv(tl.cdiv(position, SPLITS), BLOCK) * BLOCK, LEAST)
    start = split * chunk
    end = tl.minimum(start + chunk, position)
    if (split > 0) & (start >= position):
        return
    if NORM:
        f1 = q1.to(tl.float32)
        f2 = q2.to(tl.float32)
        inverse = 1.0 / tl.sqrt((tl.sum(f1 * f1, 1) + tl.sum(f2 * f2, 1)) / W + epsilon)
        q1 = _scaled(q1, inverse[:, None], tl.load(query_norm + half)[None, :])
        q2 = _scaled(q2, inverse[:, None], tl.load(query_norm + HALF + half)[None, :])
        g1 = k1.to(tl.float32)
        g2 = k2.to(tl.float32)
        inverse_key = 1.0 / tl.sqrt((tl.sum(g1 * g1, 0) + tl.sum(g2 * g2, 0)) / W + epsilon)
        k1 = _scaled(k1, inverse_key, tl.load(key_norm + half))
        k2 = _scaled(k2, inverse_key, tl.load(key_norm + HALF + half))
    cosine = tl.load(cosines + turn * HALF + half)
    sine = tl.load(sines + turn * HALF + half)
    q1, q2 = _turn(q1, q2, cosine[None, :], sine[None, :])
    k1, k2 = _turn(k1, k2, cosine, sine)
    origin = (slot * H + head) * length * W
    if split == 0:
        tl.store(keys + origin + position * W + half, k1)
        tl.store(keys + origin + position * W + HALF + half, k2)
        tl.store(values + origin + position * W + column, value)
    own_score = tl.sum(q1.to(tl.float32) * k1.to(tl.float32)[None, :], 1)
    own_score += tl.sum(q2.to(tl.float32) * k2.to(tl.float32)[None, :], 1)
    first = split == 0
    highest = tl.where(first, own_score * scale, float("-inf"))
    total = tl.where(first, tl.full((GP,), 1.0, tl.float32), 0.0)
    mixed = tl.zeros((GP, W), tl.float32) + tl.where(first, value.to(tl.float32), 0.0)[None, :]
    donor_origin = (donor * H + head) * length * W
    for at in range(start, end, BLOCK):
        j = at + tl.arange(0, BLOCK)
        filled = j < end
        begin = tl.where(at + BLOCK <= common, donor_origin, origin)
        where = keys + begin + j[:, None] * W + half[None, :]
        c1 = tl.load(where, mask=filled[:, None], other=0.0)
        c2 = tl.load(where + HALF, mask=filled[:, None], other=0.0)
        held = tl.load(values + begin + j[:, None] * W + column[None, :], mask=filled[:, None], other=0.0)
        score = tl.dot(q1, tl.trans(c1), input_precision=PRECISION)
        score = tl.dot(q2, tl.trans(c2), score, input_precision=PRECISION)
        score = tl.where(filled[None, :], score * scale, float("-inf"))
        higher = tl.maximum(highest, tl.max(score, 1))
        share = tl.exp2(score - higher[:, None])
        faded = tl.exp2(highest - higher)
        total = total * faded + tl.sum(share, 1)
        mixed = tl.dot(share.to(dtype), held, mixed * faded[:, None], input_precision=PRECISION)
        highest = higher
    query = row * Q + head * G + group
    to = out + query[:, None] * W + column[None, :]
    used = tl.cdiv(position, tl.maximum(chunk, 1))
    if (SPLITS == 1) | (used <= 1):
        tl.store(to, (mixed / total[:, None]).to(dtype), mask=real)
    else:
        place = query * SPLITS + split
        tl.store(parts + place[:, None] * W + column[None, :], mixed / total[:, None], mask=real)
        tl.store(part_weights + place, highest + tl.log2(total), mask=group < G)
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals + row * H + head, 1, sem="acq_rel")
        if arrived == used - 1:
            tl.store(arrivals + row * H + head, 0)
            _join(to, parts, part_weights, query, used, real, group < G, column, W, SPLITS)


@triton.jit  # type: ignore[untyped-decorator]
def _join(to, parts, part_weights, query, used, real, there, column, W: tl.constexpr, SPLITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Combine the parts of a split row, weighted by their softmax sums, from memory that all programs see."""
    most = tl.load(part_weights + query * SPLITS, mask=there, other=0.0, cache_modifier=".cg")
    for split in tl.static_range(1, SPLITS):
        weight = tl.load(
            part_weights + query * SPLITS + split,
            mask=there & (split < used),
            other=float("-inf"),
            cache_modifier=".cg",
        )
        most = tl.maximum(most, weight)
    total = tl.zeros_like(most)
    mixed = tl.zeros((to.shape[0], W), tl.float32)
    for split in tl.static_range(SPLITS):
        if split < used:
            place = query * SPLITS + split
            weight = tl.load(part_weights + place, mask=there, other=0.0, cache_modifier=".cg")
            spot = parts + place[:, None] * W + column[None, :]
            part = tl.load(spot, mask=real, other=0.0, cache_modifier=".cg")
            share = tl.exp2(weight - most)
            total += share
            mixed += part * share[:, None]
    tl.store(to, (mixed / total[:, None]).to(to.dtype.element_ty), mask=real)


@triton.jit  # type: ignore[untyped-decorator]
def turn_kernel(  # type: ignore[no-untyped-def]
    qkv,
    cosines,
    sines,
    keys,
    values,
    positions,
    slots,
    slot_tokens,
    query_norm,
    key_norm,
    epsilon,
    Q: tl.constexpr,
    H: tl.constexpr,
    HEADS: tl.constexpr,
    W: tl.constexpr,
    NORM: tl.constexpr,
):
    """Rotate prompt queries in place; write keys and values into slots (-1 is no slot). One program per token."""
    row = tl.program_id(0).to(tl.int64)
    HALF: tl.constexpr = W // 2
    head = tl.arange(0, HEADS)
    half = tl.arange(0, HALF)
    position = tl.load(positions + row).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        return
    spot = qkv + (row * (Q + 2 * H) + head)[:, None] * W + half[None, :]
    real = (head < Q + 2 * H)[:, None]
    raw1 = tl.load(spot, mask=real, other=0.0)
    raw2 = tl.load(spot + HALF, mask=real, other=0.0)
    x1 = raw1
    x2 = raw2
    is_query = (head < Q)[:, None]
    if NORM:
        f1 = x1.to(tl.float32)
        f2 = x2.to(tl.float32)
        inverse = 1.0 / tl.sqrt((tl.sum(f1 * f1, 1) + tl.sum(f2 * f2, 1)) / W + epsilon)[:, None]
        w1 = tl.where(is_query, tl.load(query_norm + half)[None, :], tl.load(key_norm + half)[None, :])
        w2 = tl.where(is_query, tl.load(query_norm + HALF + half)[None, :], tl.load(key_norm + HALF + half)[None, :])
        x1 = _scaled(x1, inverse, w1)
        x2 = _scaled(x2, inverse, w2)
    cosine = tl.load(cosines + position * HALF + half)[None, :]
    sine = tl.load(sines + position * HALF + half)[None, :]
    t1, t2 = _turn(x1, x2, cosine, sine)
    tl.store(spot, t1, mask=is_query)
    tl.store(spot + HALF, t2, mask=is_query)
    tokens = tl.load(slot_tokens).to(tl.int64)
    is_key = ((head >= Q) & (head < Q + H))[:, None]
    to_key = keys + (((slot * H + head - Q) * tokens + position) * W)[:, None] + half[None, :]
    tl.store(to_key, t1, mask=is_key)
    tl.store(to_key + HALF, t2, mask=is_key)
    is_value = ((head >= Q + H) & (head < Q + 2 * H))[:, None]
    to_value = values + (((slot * H + head - Q - H) * tokens + position) * W)[:, None] + half[None, :]
    tl.store(to_value, raw1, mask=is_value)
    tl.store(to_value + HALF, raw2, mask=is_value)


@triton.jit  # type: ignore[untyped-decorator]
def prompt_kernel(  # type: ignore[no-untyped-def]
    out,
    qkv,
    keys,
    values,
    blocks,
    slot_tokens,
    scale,
    Q: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend causally with prompt chunks over their slots. Grid (blocks, Q); a block is up to ROWS tokens of a chunk:
    (slot, index of its first token, position of its first token, tokens)."""
    block = blocks + tl.program_id(0) * 4
    head = tl.program_id(1)
    slot = tl.load(block).to(tl.int64)
    first = tl.load(block + 1).to(tl.int64)
    offset = tl.load(block + 2)
    count = tl.load(block + 3)
    dtype = qkv.dtype.element_ty
    i = tl.arange(0, ROWS)
    column = tl.arange(0, W)
    spot = ((first + i) * (Q + 2 * H) + head)[:, None] * W + column[None, :]
    query = tl.load(qkv + spot, mask=(i < count)[:, None], other=0.0)
    origin = (slot * H + head // (Q // H)) * tl.load(slot_tokens).to(tl.int64) * W
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, W), tl.float32)
    for at in range(0, offset + count, BLOCK):
        j = at + tl.arange(0, BLOCK)
        filled = (j < offset + count)[:, None]
        key = tl.load(keys + origin + j[:, None] * W + column[None, :], mask=filled, other=0.0)
        held = tl.load(values + origin + j[:, None] * W + column[None, :], mask=filled, other=0.0)
        score = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
        score = tl.where(j[None, :] <= (offset + i)[:, None], score, float("-inf"))
        higher = tl.maximum(highest, tl.max(score, 1))
        share = tl.exp2(score - higher[:, None])
        faded = tl.exp2(highest - higher)
        total = total * faded + tl.sum(share, 1)
        mixed = tl.dot(share.to(dtype), held, mixed * faded[:, None], input_precision=PRECISION)
        highest = higher
    to = out + ((first + i) * Q + head)[:, None] * W + column[None, :]
    tl.store(to, (mixed / total[:, None]).to(dtype), mask=(i < count)[:, None])
