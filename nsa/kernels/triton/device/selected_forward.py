"""Selected attention, forward: a tile of queries reads the union of its blocks, each once, and a bit says who may look.

Never more bytes than a loop per query would read, one exact online softmax, no partial sums. The loop's only loads are
unconditional: a branch around them would cost the software pipeline.
"""

import triton
import triton.language as tl

from nsa.kernels.triton.device.tile import LN2, LOG2E, dot, load_rows, rounded, seen, soften, store_rows


@triton.jit
def selected_forward_kernel(
    q, k, v, last, begins, bits, counts, out, lse, scale, S, T, n_tiles, n_slots,
    q_b, q_s, q_g, q_r, k_b, k_t, k_g, v_b, v_t, v_g,
    G: tl.constexpr, R: tl.constexpr,
    K: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, V: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
    L: tl.constexpr, QUERIES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    CUTS: tl.constexpr = (L + BLOCK_N - 1) // BLOCK_N  # of a block, taken one after the other
    tile, b, g = tl.program_id(0), tl.program_id(1) // G, tl.program_id(1) % G
    row = tl.arange(0, BLOCK_M)
    turn, head = row // R, row % R
    query = (tile * QUERIES + turn).to(tl.int64)
    ok = (turn < QUERIES) & (query < S)
    last_M = tl.load(last + b.to(tl.int64) * S + query, mask=ok, other=-1)
    q_at = b.to(tl.int64) * q_b + query * q_s + g * q_g + head * q_r
    q1 = load_rows(q, q_at, ok, K, 0, K1, WIDE)
    if K2 > 0:
        q2 = load_rows(q, q_at, ok, K, K1, K2, WIDE)
    k += b.to(tl.int64) * k_b + g * k_g
    v += b.to(tl.int64) * v_b + g * v_g
    here = (b.to(tl.int64) * n_tiles + tile) * G + g
    begins += here * n_slots
    bits += here * n_slots

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc1 = tl.zeros([BLOCK_M, V1], tl.float32)
    if V2 > 0:
        acc2 = tl.zeros([BLOCK_M, V2], tl.float32)
    for u in tl.range(0, tl.load(counts + here) * CUTS):
        step = u % CUTS * BLOCK_N + tl.arange(0, BLOCK_N)
        at = tl.load(begins + u // CUTS) + step
        mask_u = tl.load(bits + u // CUTS)
        inside = (at >= 0) & (at < T)
        if CUTS * BLOCK_N > L:
            inside = inside & (step < L)
        k_at, v_at = at.to(tl.int64) * k_t, at.to(tl.int64) * v_t
        s = dot(q1, tl.trans(load_rows(k, k_at, inside, K, 0, K1, WIDE)))
        if K2 > 0:
            s += dot(q2, tl.trans(load_rows(k, k_at, inside, K, K1, K2, WIDE)))
        visible = seen(at, inside, ((mask_u >> turn) & 1) == 1, last_M)
        e, top, total, decay = soften(tl.where(visible, s * (scale * LOG2E), float("-inf")), top, total)
        p = rounded(e, WIDE, v.dtype.element_ty)
        acc1 = acc1 * decay[:, None] + dot(p, load_rows(v, v_at, inside, V, 0, V1, WIDE))
        if V2 > 0:
            acc2 = acc2 * decay[:, None] + dot(p, load_rows(v, v_at, inside, V, V1, V2, WIDE))

    nothing = total == 0
    total = tl.where(nothing, 1.0, total)
    flat = ((b.to(tl.int64) * S + query) * G + g) * R + head
    store_rows(out, flat * V, ok, acc1 / total[:, None], V, 0, V1)
    if V2 > 0:
        store_rows(out, flat * V, ok, acc2 / total[:, None], V, V1, V2)
    tl.store(lse + flat, tl.where(nothing, float("-inf"), (top + tl.log2(total)) * LN2), mask=ok)
