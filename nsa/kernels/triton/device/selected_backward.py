"""Selected attention, backward: dQ in the forward's loop; dK and dV by window of keys over the queries that chose it.

Windows that many queries chose (everybody reads the first block) are cut into pieces of PIECE queries; the pieces' sums
are added in order by a last kernel. No atomics: the same bits every time.
"""

import triton
import triton.language as tl

from nsa.kernels.triton.device.runs_backward import probabilities
from nsa.kernels.triton.device.tile import dot, load_rows, rounded, seen, store_rows


@triton.jit
def selected_dq_kernel(
    dout, q, k, v, last, begins, bits, counts, out, lse, dq, delta, scale, S, T, n_tiles, n_slots,
    do_b, do_s, do_g, do_r, q_b, q_s, q_g, q_r, k_b, k_t, k_g, v_b, v_t, v_g,
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
    do_at = b.to(tl.int64) * do_b + query * do_s + g * do_g + head * do_r
    flat = ((b.to(tl.int64) * S + query) * G + g) * R + head
    q1, do1 = load_rows(q, q_at, ok, K, 0, K1, WIDE), load_rows(dout, do_at, ok, V, 0, V1, WIDE)
    delta_M = tl.sum(do1.to(tl.float32) * load_rows(out, flat * V, ok, V, 0, V1, WIDE).to(tl.float32), 1)
    if K2 > 0:
        q2 = load_rows(q, q_at, ok, K, K1, K2, WIDE)
    if V2 > 0:
        do2 = load_rows(dout, do_at, ok, V, V1, V2, WIDE)
        delta_M += tl.sum(do2.to(tl.float32) * load_rows(out, flat * V, ok, V, V1, V2, WIDE).to(tl.float32), 1)
    tl.store(delta + flat, delta_M, mask=ok)
    lse_M = tl.load(lse + flat, mask=ok, other=float("-inf"))
    k += b.to(tl.int64) * k_b + g * k_g
    v += b.to(tl.int64) * v_b + g * v_g
    here = (b.to(tl.int64) * n_tiles + tile) * G + g
    begins += here * n_slots
    bits += here * n_slots

    dq1 = tl.zeros([BLOCK_M, K1], tl.float32)
    if K2 > 0:
        dq2 = tl.zeros([BLOCK_M, K2], tl.float32)
    for u in tl.range(0, tl.load(counts + here) * CUTS):
        step = u % CUTS * BLOCK_N + tl.arange(0, BLOCK_N)
        at = tl.load(begins + u // CUTS) + step
        mask_u = tl.load(bits + u // CUTS)
        inside = (at >= 0) & (at < T)
        if CUTS * BLOCK_N > L:
            inside = inside & (step < L)
        k_at, v_at = at.to(tl.int64) * k_t, at.to(tl.int64) * v_t
        k1 = load_rows(k, k_at, inside, K, 0, K1, WIDE)
        s = dot(q1, tl.trans(k1))
        if K2 > 0:
            k2 = load_rows(k, k_at, inside, K, K1, K2, WIDE)
            s += dot(q2, tl.trans(k2))
        visible = seen(at, inside, ((mask_u >> turn) & 1) == 1, last_M)
        p = probabilities(s, lse_M[:, None], visible, scale)
        dp = dot(do1, tl.trans(load_rows(v, v_at, inside, V, 0, V1, WIDE)))
        if V2 > 0:
            dp += dot(do2, tl.trans(load_rows(v, v_at, inside, V, V1, V2, WIDE)))
        ds = rounded(p * (dp - delta_M[:, None]) * scale, WIDE, k.dtype.element_ty)
        dq1 += dot(ds, k1)
        if K2 > 0:
            dq2 += dot(ds, k2)
    store_rows(dq, flat * K, ok, dq1, K, 0, K1)
    if K2 > 0:
        store_rows(dq, flat * K, ok, dq2, K, K1, K2)


@triton.jit
def selected_dkv_kernel(
    dout, q, k, v, last, queries, begins, offsets, piece_window, piece_first, lse, delta, dk_part, dv_part,
    scale, S, T, n_windows, n_groups_all,
    do_b, do_s, do_g, do_r, q_b, q_s, q_g, q_r, k_b, k_t, k_g, v_b, v_t, v_g,
    G: tl.constexpr, R: tl.constexpr,
    K: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, V: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
    L: tl.constexpr, PIECE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    piece = tl.program_id(0)
    place = tl.load(piece_window + piece)  # (batch, group, window), or past the last for a piece that is not needed
    needed = place < n_groups_all * n_windows
    place = tl.where(needed, place, 0)
    window, bg = place % n_windows, place // n_windows
    b, g = bg // G, bg % G
    first = tl.load(offsets + place) + (piece - tl.load(piece_first + place)) * PIECE
    end = tl.minimum(first + PIECE, tl.load(offsets + place + 1))
    end = tl.where(needed, end, first)

    step = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)  # a wide window is shared by several programs
    at = window * L + step
    inside = (step < L) & (at < T)
    k_at = b.to(tl.int64) * k_b + g * k_g + at.to(tl.int64) * k_t
    v_at = b.to(tl.int64) * v_b + g * v_g + at.to(tl.int64) * v_t
    k1, v1 = load_rows(k, k_at, inside, K, 0, K1, WIDE), load_rows(v, v_at, inside, V, 0, V1, WIDE)
    dk1, dv1 = tl.zeros([BLOCK_N, K1], tl.float32), tl.zeros([BLOCK_N, V1], tl.float32)
    if K2 > 0:
        k2, dk2 = load_rows(k, k_at, inside, K, K1, K2, WIDE), tl.zeros([BLOCK_N, K2], tl.float32)
    if V2 > 0:
        v2, dv2 = load_rows(v, v_at, inside, V, V1, V2, WIDE), tl.zeros([BLOCK_N, V2], tl.float32)

    for m in tl.range(first * R, end * R, BLOCK_M):
        row = m + tl.arange(0, BLOCK_M)
        entry, head, ok = row // R, row % R, row < end * R
        query = tl.load(queries + entry, mask=ok, other=0).to(tl.int64)
        begin_M = tl.load(begins + entry, mask=ok, other=0)
        last_M = tl.load(last + b.to(tl.int64) * S + query, mask=ok, other=-1)
        q_at = b.to(tl.int64) * q_b + query * q_s + g * q_g + head * q_r
        do_at = b.to(tl.int64) * do_b + query * do_s + g * do_g + head * do_r
        flat = ((b.to(tl.int64) * S + query) * G + g) * R + head
        lse_M = tl.load(lse + flat, mask=ok, other=float("-inf"))
        delta_M = tl.load(delta + flat, mask=ok, other=0.0)
        q1, do1 = load_rows(q, q_at, ok, K, 0, K1, WIDE), load_rows(dout, do_at, ok, V, 0, V1, WIDE)
        s = dot(k1, tl.trans(q1))
        dp = dot(v1, tl.trans(do1))
        if K2 > 0:
            q2 = load_rows(q, q_at, ok, K, K1, K2, WIDE)
            s += dot(k2, tl.trans(q2))
        if V2 > 0:
            do2 = load_rows(dout, do_at, ok, V, V1, V2, WIDE)
            dp += dot(v2, tl.trans(do2))
        # Keys past the end or of another window are past `last`, or their rows are never stored.
        end_M = tl.minimum(begin_M + (L - 1), last_M)
        visible = (at[:, None] >= begin_M[None, :]) & (at[:, None] <= end_M[None, :])
        p = probabilities(s, lse_M[None, :], visible, scale)
        ds = rounded(p * (dp - delta_M[None, :]) * scale, WIDE, q.dtype.element_ty)
        p = rounded(p, WIDE, q.dtype.element_ty)
        dv1 += dot(p, do1)
        dk1 += dot(ds, q1)
        if V2 > 0:
            dv2 += dot(p, do2)
        if K2 > 0:
            dk2 += dot(ds, q2)

    part_at = piece.to(tl.int64) * L + step
    kept = (step < L) & needed
    store_rows(dk_part, part_at * K, kept, dk1, K, 0, K1)
    store_rows(dv_part, part_at * V, kept, dv1, V, 0, V1)
    if K2 > 0:
        store_rows(dk_part, part_at * K, kept, dk2, K, K1, K2)
    if V2 > 0:
        store_rows(dv_part, part_at * V, kept, dv2, V, V1, V2)


@triton.jit
def add_pieces_kernel(
    part, piece_first, out, T, n_windows,
    G: tl.constexpr, X: tl.constexpr, X1: tl.constexpr, X2: tl.constexpr, L: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    window, bg = tl.program_id(0), tl.program_id(1)
    b, g = bg // G, bg % G
    place = bg * n_windows + window
    step = tl.arange(0, BLOCK_N)
    at = window * L + step
    ok = (step < L) & (at < T)
    sum1 = tl.zeros([BLOCK_N, X1], tl.float32)
    if X2 > 0:
        sum2 = tl.zeros([BLOCK_N, X2], tl.float32)
    for piece in tl.range(tl.load(piece_first + place), tl.load(piece_first + place + 1)):
        part_at = (piece * L + step).to(tl.int64) * X
        sum1 += load_rows(part, part_at, ok, X, 0, X1, False)
        if X2 > 0:
            sum2 += load_rows(part, part_at, ok, X, X1, X2, False)
    flat = ((b.to(tl.int64) * T + at) * G + g) * X
    store_rows(out, flat, ok, sum1, X, 0, X1)
    if X2 > 0:
        store_rows(out, flat, ok, sum2, X, X1, X2)
