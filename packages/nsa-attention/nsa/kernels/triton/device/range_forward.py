"""Sliding and compressed attention, forward: each query sees one range of keys, [lo, hi).

A tile loops from the smallest lo of its rows to the largest hi: tiles of keys that no row sees are not read. Tiles that
only some rows see, at both edges of the range, come first, with masks; then those that every row sees, without.
"""

import triton
import triton.language as tl

from nsa.kernels.triton.device.tile import (
    LN2,
    LOG2E,
    VARYING,
    divisor,
    dot_rows,
    edge_tile,
    group_at,
    heads_at,
    heads_with_range,
    load_both,
    log_sum,
    soften,
    store_both,
    tiles_of_range,
    weigh,
    zeros_both,
)


@triton.jit
def attend_tile(n, q1, q2, k, v, k_t, v_t, lo_M, hi_M, end, scale, top, total, acc1, acc2,
                K: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, V: tl.constexpr, V1: tl.constexpr,
                V2: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """The online softmax's step over the keys from n on. Not MASKED: all of them exist, and every row sees them."""
    at = n + tl.arange(0, BLOCK_N)
    inside = at < end if MASKED else None
    k_at, v_at = at.to(tl.int64) * k_t, at.to(tl.int64) * v_t
    s, _, _ = dot_rows(q1, q2, k, k_at, inside, K, K1, K2, WIDE)
    s = s * (scale * LOG2E)
    if MASKED:
        visible = (at[None, :] >= lo_M[:, None]) & (at[None, :] < hi_M[:, None])
        s = tl.where(visible, s, float("-inf"))
    e, top, total, decay = soften(s, top, total)
    acc1, acc2 = weigh(acc1, acc2, decay, e, v, v_at, inside, V, V1, V2, WIDE)
    return top, total, acc1, acc2


@triton.jit(do_not_specialize=VARYING)
def range_forward_kernel(
    q, k, v, lo, hi, out, lse, scale, S, T,
    q_b, q_s, q_g, q_r, k_b, k_t, k_g, v_b, v_t, v_g,
    G: tl.constexpr, R: tl.constexpr,
    K: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, V: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    b, g, query, head, ok, lo_M, hi_M = heads_with_range(lo, hi, S, T, G, R, BLOCK_M)
    q_at = group_at(b, g, q_b, q_g) + heads_at(query, head, q_s, q_r)
    q1, q2 = load_both(q, q_at, ok, K, K1, K2, WIDE)
    k += group_at(b, g, k_b, k_g)
    v += group_at(b, g, v_b, v_g)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc1, acc2 = zeros_both(BLOCK_M, V1, V2)
    begin, end, first, length = tiles_of_range(lo_M, hi_M, ok, BLOCK_N)
    for n in tl.range(begin, end - length, BLOCK_N):
        top, total, acc1, acc2 = attend_tile(
            edge_tile(n, first, length), q1, q2, k, v, k_t, v_t, lo_M, hi_M, end, scale, top, total, acc1, acc2,
            K, K1, K2, V, V1, V2, BLOCK_N, WIDE, True,
        )  # fmt: skip
    for n in tl.range(first, first + length, BLOCK_N):
        top, total, acc1, acc2 = attend_tile(
            n, q1, q2, k, v, k_t, v_t, lo_M, hi_M, end, scale, top, total, acc1, acc2,
            K, K1, K2, V, V1, V2, BLOCK_N, WIDE, False,
        )  # fmt: skip

    flat = ((b.to(tl.int64) * S + query) * G + g) * R + head
    store_both(out, flat * V, ok, acc1 / divisor(total), acc2 / divisor(total), V, V1, V2)
    tl.store(lse + flat, log_sum(top, total) * LN2, mask=ok)
