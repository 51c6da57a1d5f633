"""Selected attention, forward: one window of keys at a time for the queries that selected it; then slots are merged.

The loop carries nothing from one tile of queries to the next, and its only loads are unconditional: a branch around
them would cost the software pipeline. Log-sum-exps of slots are in base 2.
"""

import triton
import triton.language as tl

from nsa.kernels.triton.device.selected_common import ends_of, keys_of, piece_of, readers_of, rows_to_mask, slots_of
from nsa.kernels.triton.device.tile import (
    LN2,
    LOG2E,
    VARYING,
    divisor,
    dot,
    group_at,
    heads_at,
    heads_of,
    load_both,
    load_rows,
    log_sum,
    rounded,
    store_both,
    store_rows,
    zeros_both,
)


@triton.jit
def window_tile(m, end, window, b, cut, at, k1, k2, v1, v2, q, q_s, q_r, last, pairs, begins, slot, slot_lse, scale, S,
                G: tl.constexpr, R: tl.constexpr,
                K: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, V: tl.constexpr, V1: tl.constexpr,
                V2: tl.constexpr, N: tl.constexpr, L: tl.constexpr, CUTS: tl.constexpr, BLOCK_M: tl.constexpr,
                WIDE: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """The softmax of the rows from m on over this cut of the window. Not MASKED: they see all of its keys."""
    query, head, ok, here, begin_M = readers_of(pairs, begins, m, end, window, R, N, L, BLOCK_M)
    q_at = heads_at(query, head, q_s, q_r)
    s = dot(load_rows(q, q_at, ok, K, 0, K1, WIDE), tl.trans(k1))
    if K2 > 0:
        s += dot(load_rows(q, q_at, ok, K, K1, K2, WIDE), tl.trans(k2))
    s = s * (scale * LOG2E)
    if MASKED:
        end_M = ends_of(begin_M, tl.load(last + b * S + query, mask=ok, other=-1), window, L)
        visible = (at[None, :] >= begin_M[:, None]) & (at[None, :] <= end_M[:, None])
        s = tl.where(visible, s, float("-inf"))
    top = tl.max(s, 1)
    e = tl.exp2(s - (tl.where(top == float("-inf"), 0.0, top) if MASKED else top)[:, None])
    total = tl.sum(e, 1)
    if MASKED:
        total = tl.where(total == 0, 1.0, total)
    share = 1 / total  # of each row, once
    p = rounded(e, WIDE, q.dtype.element_ty)
    to = ((query * (G * 2 * N) + here) * CUTS + cut) * R + head
    store_rows(slot, to * V, ok, dot(p, v1) * share[:, None], V, 0, V1)
    if V2 > 0:
        store_rows(slot, to * V, ok, dot(p, v2) * share[:, None], V, V1, V2)
    tl.store(slot_lse + to, top + tl.log2(total), mask=ok)


@triton.jit(do_not_specialize=VARYING)
def selected_forward_kernel(
    q, k, v, last, pairs, begins, offsets, piece_window, piece_first, slot, slot_lse,
    scale, S, T, n_windows, n_groups_all,
    q_b, q_s, q_g, q_r, k_b, k_t, k_g, v_b, v_t, v_g,
    G: tl.constexpr, R: tl.constexpr,
    K: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, V: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
    N: tl.constexpr, L: tl.constexpr, PIECE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    CUTS: tl.constexpr = (L + BLOCK_N - 1) // BLOCK_N
    bg, window, first, end, _ = piece_of(offsets, piece_window, piece_first, n_windows, n_groups_all, PIECE)
    b, g, cut = (bg // G).to(tl.int64), bg % G, tl.program_id(1)
    _, at, inside, k_at, v_at = keys_of(window, b, g, T, k_b, k_t, k_g, v_b, v_t, v_g, L, BLOCK_N)
    k1, k2 = load_both(k, k_at, inside, K, K1, K2, WIDE)
    v1, v2 = load_both(v, v_at, inside, V, V1, V2, WIDE)

    q += group_at(b, g, q_b, q_g)
    slots_before = (b * S * G + g) * (2 * N * CUTS * R)
    slot += slots_before * V
    slot_lse += slots_before
    masked = rows_to_mask(pairs, begins, last, first, end, window, b, S, T, R, N, L, BLOCK_M, BLOCK_N, 1024)
    for m in tl.range(first * R, masked, BLOCK_M):
        window_tile(
            m, end, window, b, cut, at, k1, k2, v1, v2, q, q_s, q_r, last, pairs, begins, slot, slot_lse, scale, S,
            G, R, K, K1, K2, V, V1, V2, N, L, CUTS, BLOCK_M, WIDE, True,
        )  # fmt: skip
    for m in tl.range(masked, end * R, BLOCK_M):
        window_tile(
            m, end, window, b, cut, at, k1, k2, v1, v2, q, q_s, q_r, last, pairs, begins, slot, slot_lse, scale, S,
            G, R, K, K1, K2, V, V1, V2, N, L, CUTS, BLOCK_M, WIDE, False,
        )  # fmt: skip


@triton.jit(do_not_specialize=VARYING)
def merge_slots_kernel(
    idx, last, origin, slot, slot_lse, out, lse, S, n_queries, n_windows, origin_b, origin_s,
    G: tl.constexpr, R: tl.constexpr, V: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
    N: tl.constexpr, L: tl.constexpr, CUTS: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Each slot by its share of the whole softmax. `n_queries`: of a row of `out`, of which these are a part."""
    b, g, query, head, ok = heads_of(S, G, R, BLOCK_M)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc1, acc2 = zeros_both(BLOCK_M, V1, V2)
    for n in tl.range(0, N):
        base, here, across = slots_of(
            idx, last, origin, b, g, query, ok, n, S, n_windows, origin_b, origin_s, G, N, L
        )  # fmt: skip
        for cut in tl.static_range(0, 2 * CUTS):
            written = here if cut < CUTS else across
            at = (base * CUTS + cut) * R + head
            level = tl.load(slot_lse + at, mask=written, other=float("-inf"))
            new = tl.maximum(top, level)
            safe = tl.where(new == float("-inf"), 0.0, new)
            decay, share = tl.exp2(top - safe), tl.exp2(level - safe)
            top, total = new, total * decay + share
            x = load_rows(slot, at * V, written, V, 0, V1, False).to(tl.float32)
            acc1 = acc1 * decay[:, None] + x * share[:, None]
            if V2 > 0:
                x = load_rows(slot, at * V, written, V, V1, V2, False).to(tl.float32)
                acc2 = acc2 * decay[:, None] + x * share[:, None]
    flat = ((b * n_queries + query) * G + g) * R + head
    store_both(out, flat * V, ok, acc1 / divisor(total), acc2 / divisor(total), V, V1, V2)
    tl.store(lse + flat, log_sum(top, total) * LN2, mask=ok)
