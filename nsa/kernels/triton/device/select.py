"""Choosing blocks: scores from the compressed branch's own probabilities, mapped by overlap, summed over heads, best n.

No matrix of scores is ever stored. A first pass finds each row's log-sum-exp; the second forms the probabilities again,
adds them up per selection block, and keeps the best in registers. A block's strides are computed column by column
(block j takes compressed keys j·l_sel/d + m for a fixed range of m): no shuffling between lanes, and the overlap is
computed twice, (l_sel + l − d) / l_sel of the products.

Blocks are ranked by one integer: the bits of the score, which is ≥ 0 or +inf, above the block's index turned round. No
two are equal, so the choice is exact, and ties go to the lower index.
"""

import triton
import triton.language as tl

from nsa.kernels.triton.device.tile import LN2, LOG2E, dot, load_rows


@triton.constexpr_function
def shared_strides(m, per_l, per_sel):
    """Strides of selection block j that lie in compressed block j·per_sel + m − (per_l − 1)."""
    return min(m + 1, per_l, per_sel, per_sel + per_l - 1 - m)


@triton.jit
def ranked(mass, j, own):
    """Blocks j of a query in block `own` as integers in order of preference; −1 for a block after the query's."""
    forced = (j == 0) | (j == own) | (j == own - 1)
    score = tl.where(forced, float("inf"), mass)
    key = (score.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (2147483647 - j).to(tl.int64)
    return tl.where(j <= own, key, -1)


@triton.jit
def ascending(best, wanted):
    """The blocks of ranked integers, best first: those wanted, in order of index, then −1."""
    block = tl.where((best >= 0) & wanted, 2147483647 - (best & 2147483647), 2147483647)
    block = tl.sort(block.to(tl.int32))
    return tl.where(block == 2147483647, -1, block)


@triton.jit
def runs_lse_kernel(
    q, k, lo, hi, lse, scale, S, T, q_b, q_s, q_g, q_r, k_b, k_t, k_g,
    G: tl.constexpr, R: tl.constexpr, K: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    tile, b, g = tl.program_id(0), tl.program_id(1) // G, tl.program_id(1) % G
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    query, head, ok = (row // R).to(tl.int64), row % R, row < S * R
    bounds = b.to(tl.int64) * S + query
    lo_M = tl.load(lo + bounds, mask=ok, other=T)
    hi_M = tl.load(hi + bounds, mask=ok, other=0)
    q_at = b.to(tl.int64) * q_b + query * q_s + g * q_g + head * q_r
    q1 = load_rows(q, q_at, ok, K, 0, K1, WIDE)
    if K2 > 0:
        q2 = load_rows(q, q_at, ok, K, K1, K2, WIDE)
    k += b.to(tl.int64) * k_b + g * k_g
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for n in tl.range(tl.min(lo_M) // BLOCK_N * BLOCK_N, tl.max(hi_M), BLOCK_N):
        at = n + tl.arange(0, BLOCK_N)
        k_at = at.to(tl.int64) * k_t
        s = dot(q1, tl.trans(load_rows(k, k_at, at < T, K, 0, K1, WIDE)))
        if K2 > 0:
            s += dot(q2, tl.trans(load_rows(k, k_at, at < T, K, K1, K2, WIDE)))
        visible = (at[None, :] >= lo_M[:, None]) & (at[None, :] < hi_M[:, None])
        s = tl.where(visible, s * (scale * LOG2E), float("-inf"))
        new = tl.maximum(top, tl.max(s, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp2(top - safe) + tl.sum(tl.exp2(s - safe[:, None]), 1)
        top = new
    nothing = total == 0
    total = tl.where(nothing, 1.0, total)
    flat = ((b.to(tl.int64) * S + query) * G + g) * R + head
    tl.store(lse + flat, tl.where(nothing, float("-inf"), (top + tl.log2(total)) * LN2), mask=ok)


@triton.jit
def select_kernel(
    q, k, pos, first, hi, lse, idx, scale, S, T, q_b, q_s, q_g, q_r, k_b, k_t, k_g,
    G: tl.constexpr, R: tl.constexpr, K: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr,
    PER_L: tl.constexpr, PER_SEL: tl.constexpr, L_SEL: tl.constexpr, N_SEL: tl.constexpr, KEEP: tl.constexpr,
    BLOCK_Q: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """KEEP ≥ N_SEL is a power of two; blocks are looked at KEEP at a time."""
    tile, b, g = tl.program_id(0), tl.program_id(1) // G, tl.program_id(1) % G
    query = (tile * BLOCK_Q + tl.arange(0, BLOCK_Q)).to(tl.int64)
    ok = query < S
    bounds = b.to(tl.int64) * S + query
    pos_Q = tl.load(pos + bounds, mask=ok, other=-1)
    first_Q = tl.load(first + bounds, mask=ok, other=0)
    hi_Q = tl.load(hi + bounds, mask=ok, other=0)
    own_Q = pos_Q // L_SEL
    q_at = b.to(tl.int64) * q_b + query * q_s + g * q_g
    flat = ((b.to(tl.int64) * S + query) * G + g) * R
    k += b.to(tl.int64) * k_b + g * k_g
    # Queries of one document share its first key; a tile across documents takes them in turn.
    low, high = tl.min(tl.where(ok, first_Q, 2147483647)), tl.max(tl.where(ok, first_Q, -2147483648))

    best = tl.full([BLOCK_Q, KEEP], -1, tl.int64)
    for j0 in tl.range(0, tl.max(own_Q) + 1, KEEP):
        j = j0 + tl.arange(0, KEEP)
        mass = tl.zeros([BLOCK_Q, KEEP], tl.float32)
        document = low
        while document <= high:
            mine = ok & (first_Q == document)
            for m in tl.static_range(0, PER_SEL + PER_L - 1):
                # Strides of block j that compressed key j·PER_SEL + m − (PER_L − 1) lies in.
                c = j * PER_SEL + m - (PER_L - 1)
                at = document + c
                weight = shared_strides(m, PER_L, PER_SEL)
                real = (c >= 0) & (at >= 0) & (at < T)
                k_at = at.to(tl.int64) * k_t
                k1 = load_rows(k, k_at, real, K, 0, K1, WIDE)
                if K2 > 0:
                    k2 = load_rows(k, k_at, real, K, K1, K2, WIDE)
                visible = mine[:, None] & real[None, :] & (at[None, :] < hi_Q[:, None])
                for r in tl.range(0, R):
                    s = dot(load_rows(q, q_at + r * q_r, mine, K, 0, K1, WIDE), tl.trans(k1))
                    if K2 > 0:
                        s += dot(load_rows(q, q_at + r * q_r, mine, K, K1, K2, WIDE), tl.trans(k2))
                    level = tl.load(lse + flat + r, mask=mine, other=0.0)
                    level = tl.where(level == float("-inf"), 0.0, level)
                    p = tl.exp2(s * (scale * LOG2E) - level[:, None] * LOG2E)
                    mass += tl.where(visible, p, 0.0) * weight
            document = tl.min(tl.where(ok & (first_Q > document), first_Q, 2147483647))
        key = ranked(mass, j[None, :], own_Q[:, None])
        best = tl.topk(tl.reshape(tl.join(best, key), [BLOCK_Q, 2 * KEEP]), KEEP)
    rank = tl.arange(0, KEEP)
    block = ascending(best, rank[None, :] < N_SEL)
    at = ((b.to(tl.int64) * S + query) * G + g) * N_SEL
    tl.store(idx + at[:, None] + rank[None, :], block, mask=ok[:, None] & (rank[None, :] < N_SEL))
