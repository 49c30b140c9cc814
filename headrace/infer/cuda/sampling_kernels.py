"""Triton kernels that sample a token per row from its logits and advance the row, without the host.

The uniform number of (seed, count) is that of `headrace.algo.random.uniforms`, bit for bit, and the token is found by
inverse CDF in two levels: blocks of the vocabulary, then inside the block. A row that sampled a stop token or reached
its limit gets position -1 and is skipped by every kernel from then on.
"""

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def block_kernel(logits, temperatures, positions, highest, sums, raw_sums, best, size, blocks, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Reduce each block of a row's logits: the largest, where it is, and the sums of exp. Grid (rows, blocks)."""
    row = tl.program_id(0)
    block = tl.program_id(1)
    if tl.load(positions + row) < 0:
        return
    column = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row.to(tl.int64) * size + column, mask=column < size, other=float("-inf")).to(tl.float32)
    temperature = tl.load(temperatures + row)
    top = tl.max(x, 0)
    place = row * blocks + block
    tl.store(highest + place, top)
    raw = tl.sum(tl.exp(x - top), 0)
    tl.store(raw_sums + place, raw)
    if temperature == 0.0:
        tl.store(best + place, tl.min(tl.where(x == top, column, size), 0))
        tl.store(sums + place, raw)
    elif temperature == 1.0:
        tl.store(sums + place, raw)
    else:
        tl.store(sums + place, tl.sum(tl.exp((x - top) / temperature), 0))


@triton.jit
def _finalise(value):  # type: ignore[no-untyped-def]
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def uniform(seed, count):  # type: ignore[no-untyped-def]
    """Compute u(seed, count) in (0, 1), float64; both unsigned 64-bit."""
    golden = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    step = tl.full((), 0xD1342543DE82EF95, tl.uint64)
    offset = tl.full((), 0x632BE59BD9B4E019, tl.uint64)
    mixed = _finalise(seed + golden)
    mixed = _finalise(mixed ^ _finalise(count * step + offset))
    drawn = ((mixed >> 11).to(tl.float64) + 0.5) * 1.1102230246251565e-16
    return tl.minimum(drawn, 0.9999999999999999)


@triton.jit  # type: ignore[untyped-decorator]
def draw_kernel(  # type: ignore[no-untyped-def]
    logits,
    temperatures,
    highest,
    sums,
    raw_sums,
    best,
    tokens,
    positions,
    seeds,
    counts,
    drawn,
    limits,
    stops,
    out_tokens,
    out_logprobs,
    out_raw,
    size,
    blocks,
    room,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    STOPS: tl.constexpr,
):
    """Sample, record, advance. One program per row; `room` tokens of a row fit into the outputs."""
    row = tl.program_id(0)
    position = tl.load(positions + row)
    if position < 0:
        return
    temperature = tl.load(temperatures + row)
    greedy = temperature == 0.0
    temperature = tl.where(greedy, 1.0, temperature)
    b = tl.arange(0, BLOCKS)
    there = b < blocks
    tops = tl.load(highest + row * blocks + b, mask=there, other=float("-inf"))
    top = tl.max(tops, 0)
    raw = tl.sum(tl.load(raw_sums + row * blocks + b, mask=there, other=0.0) * tl.exp(tops - top), 0)
    weight = tl.load(sums + row * blocks + b, mask=there, other=0.0) * tl.exp((tops - top) / temperature)
    weight = weight.to(tl.float64)
    cumulative = tl.cumsum(weight, 0)
    total = tl.sum(weight, 0)
    done = tl.load(drawn + row)
    number = uniform(tl.load(seeds + row).to(tl.uint64, bitcast=True), (tl.load(counts + row) + done).to(tl.uint64))
    target = number * total
    block = tl.minimum(tl.sum(((cumulative <= target) & there).to(tl.int32), 0), blocks - 1)
    before = tl.sum(tl.where(b < block, weight, 0.0), 0)
    inside = tl.arange(0, BLOCK)
    column = block * BLOCK + inside
    line = logits + row.to(tl.int64) * size
    x = tl.load(line + column, mask=column < size, other=float("-inf")).to(tl.float32)
    share = tl.exp((x - top) / temperature)
    index = tl.sum((tl.cumsum(share.to(tl.float64), 0) <= target - before).to(tl.int32), 0)
    last = tl.max(tl.where(share > 0.0, inside, 0), 0)  # rounding may push the target past the block's end
    token = block * BLOCK + tl.minimum(index, last)
    if greedy:
        token = tl.load(best + row * blocks + tl.argmax(tops, 0))
    above = tl.load(line + token).to(tl.float32) - top
    tl.store(out_tokens + row * room + done, token)
    tl.store(out_logprobs + row * room + done, above / temperature - tl.log(total.to(tl.float32)))
    tl.store(out_raw + row * room + done, above - tl.log(raw))
    tl.store(drawn + row, done + 1)
    tl.store(tokens + row, token.to(tokens.dtype.element_ty))
    stop = tl.load(stops + row * STOPS + tl.arange(0, STOPS))
    ended = (tl.sum((stop == token).to(tl.int32), 0) > 0) | (position + 2 >= tl.load(limits + row))
    tl.store(positions + row, tl.where(ended, -1, position + 1))
