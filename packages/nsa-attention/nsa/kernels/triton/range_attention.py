"""Sliding and compressed attention: each query sees one range of keys, lo ≤ t < hi, whatever the branch.

Forward: a tile loops from the smallest lo of its rows to the largest hi: tiles of keys that no row sees are not read.
Tiles that only some rows see, at both edges of the range, come first, with masks; then those that every row sees,
without. Backward: dQ in the forward's loop, dK and dV with the keys outside.

No atomics: every row of dQ, and every key's gradient, has one writer that adds in a fixed order. Where few keys are
seen by many queries (compressed attention), the queries are cut into parts whose sums are added afterwards, in order.
Shapes as in `nsa.kernels.reference`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.kernels.interface import BranchInputs, Gradients
from nsa.kernels.triton.autotune import Work, tuned
from nsa.kernels.triton.bounds import KeyBounds, key_bounds, seen_by
from nsa.kernels.triton.launch import Launch, launch_all, planned
from nsa.kernels.triton.tile import (
    INTERPRETED,
    LN2,
    LOG2E,
    VARYING,
    add_partial_rows,
    divisor,
    dot,
    dot_rows,
    edge_tile,
    group_at,
    heads_at,
    heads_with_range,
    load_both,
    load_rows,
    log_sum,
    rounded,
    row_strides,
    rows_contiguous,
    soften,
    store_both,
    store_rows,
    tiles_of_range,
    weigh,
    zeros_both,
)
from nsa.kernels.triton.tuning import TileSizes, is_wide, widths


@triton.jit
def attend_tile(n, q1, q2, k, v, k_t, v_t, lo_M, hi_M, end, scale, top, total, acc1, acc2,
                K: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, V: tl.constexpr, V1: tl.constexpr,
                V2: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr, VALUES: tl.constexpr,
                MASKED: tl.constexpr):  # fmt: skip
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
    if VALUES:
        acc1, acc2 = weigh(acc1, acc2, decay, e, v, v_at, inside, V, V1, V2, WIDE)
    return top, total, acc1, acc2


@triton.jit(do_not_specialize=VARYING)
def range_forward_kernel(
    q, k, v, lo, hi, out, lse, scale, S, T,
    q_b, q_s, q_g, q_r, k_b, k_t, k_g, v_b, v_t, v_g,
    G: tl.constexpr, R: tl.constexpr,
    K: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, V: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Not VALUES: log-sum-exps alone, without v and out."""
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
            K, K1, K2, V, V1, V2, BLOCK_N, WIDE, VALUES, True,
        )  # fmt: skip
    for n in tl.range(first, first + length, BLOCK_N):
        top, total, acc1, acc2 = attend_tile(
            n, q1, q2, k, v, k_t, v_t, lo_M, hi_M, end, scale, top, total, acc1, acc2,
            K, K1, K2, V, V1, V2, BLOCK_N, WIDE, VALUES, False,
        )  # fmt: skip

    flat = ((b.to(tl.int64) * S + query) * G + g) * R + head
    if VALUES:
        store_both(out, flat * V, ok, acc1 / divisor(total), acc2 / divisor(total), V, V1, V2)
    tl.store(lse + flat, log_sum(top, total) * LN2, mask=ok)


@triton.jit
def probabilities(s, lse, visible, scale):
    """From scores and the forward's log-sum-exp; exactly 0 where hidden, also in rows that see nothing (lse −inf).

    Hidden before the exponential, not after: the mask need not be kept while it is computed. visible None: every row
    sees every key, so no log-sum-exp is −inf.
    """
    if visible is None:
        p = tl.exp2(s * (scale * LOG2E) - lse * LOG2E)
    else:
        level = tl.where(lse == float("-inf"), 0.0, lse)
        p = tl.exp2(tl.where(visible, s * (scale * LOG2E) - level * LOG2E, float("-inf")))
    return p


@triton.jit
def products(k1, k2, v1, v2, q, dout, q_at, do_at, ok,
             K: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, V: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
             WIDE: tl.constexpr):  # fmt: skip
    """Scores k · qᵀ and their gradients v · doutᵀ of a tile of query heads, whose rows are loaded and returned too.

    In this order; with the loads of q before those of dout, wide rows take more registers on sm_90.
    """
    q1, do1 = load_rows(q, q_at, ok, K, 0, K1, WIDE), load_rows(dout, do_at, ok, V, 0, V1, WIDE)
    q2, do2 = q1, do1
    s = dot(k1, tl.trans(q1))
    dp = dot(v1, tl.trans(do1))
    if K2 > 0:
        q2 = load_rows(q, q_at, ok, K, K1, K2, WIDE)
        s += dot(k2, tl.trans(q2))
    if V2 > 0:
        do2 = load_rows(dout, do_at, ok, V, V1, V2, WIDE)
        dp += dot(v2, tl.trans(do2))
    return s, dp, q1, q2, do1, do2


@triton.jit
def store_gradients(dk, dv, row, ok, dk1, dk2, dv1, dv2,
                    K: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr,
                    V: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr):  # fmt: skip
    """In this order: dK before dV takes 18 more registers with wide rows on sm_90."""
    store_rows(dk, row * K, ok, dk1, K, 0, K1)
    store_rows(dv, row * V, ok, dv1, V, 0, V1)
    if K2 > 0:
        store_rows(dk, row * K, ok, dk2, K, K1, K2)
    if V2 > 0:
        store_rows(dv, row * V, ok, dv2, V, V1, V2)


@triton.jit
def dq_tile(n, q1, q2, do1, do2, k, v, k_t, v_t, lo_M, hi_M, lse_M, delta_M, end, scale, dq1, dq2,
            K: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, V: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
            BLOCK_N: tl.constexpr, WIDE: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """dQ with what the keys from n on add. Not MASKED: all of them exist, and every row sees them."""
    at = n + tl.arange(0, BLOCK_N)
    inside = at < end if MASKED else None
    k_at, v_at = at.to(tl.int64) * k_t, at.to(tl.int64) * v_t
    s, k1, k2 = dot_rows(q1, q2, k, k_at, inside, K, K1, K2, WIDE)
    visible = (at[None, :] >= lo_M[:, None]) & (at[None, :] < hi_M[:, None]) if MASKED else None
    p = probabilities(s, lse_M[:, None], visible, scale)
    dp, _, _ = dot_rows(do1, do2, v, v_at, inside, V, V1, V2, WIDE)
    ds = rounded(p * (dp - delta_M[:, None]) * scale, WIDE, k.dtype.element_ty)
    dq1 += dot(ds, k1)
    if K2 > 0:
        dq2 += dot(ds, k2)
    return dq1, dq2


@triton.jit(do_not_specialize=VARYING)
def range_dq_kernel(
    dout, q, k, v, lo, hi, out, lse, dlse, dq, delta, scale, S, T,
    do_b, do_s, do_g, do_r, q_b, q_s, q_g, q_r, k_b, k_t, k_g, v_b, v_t, v_g,
    G: tl.constexpr, R: tl.constexpr,
    K: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, V: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    b, g, query, head, ok, lo_M, hi_M = heads_with_range(lo, hi, S, T, G, R, BLOCK_M)
    q_at = group_at(b, g, q_b, q_g) + heads_at(query, head, q_s, q_r)
    do_at = group_at(b, g, do_b, do_g) + heads_at(query, head, do_s, do_r)
    flat = ((b.to(tl.int64) * S + query) * G + g) * R + head
    q1, do1 = load_rows(q, q_at, ok, K, 0, K1, WIDE), load_rows(dout, do_at, ok, V, 0, V1, WIDE)
    delta_M = tl.sum(do1.to(tl.float32) * load_rows(out, flat * V, ok, V, 0, V1, WIDE).to(tl.float32), 1)
    q2, do2 = q1, do1
    if K2 > 0:
        q2 = load_rows(q, q_at, ok, K, K1, K2, WIDE)
    if V2 > 0:
        do2 = load_rows(dout, do_at, ok, V, V1, V2, WIDE)
        delta_M += tl.sum(do2.to(tl.float32) * load_rows(out, flat * V, ok, V, V1, V2, WIDE).to(tl.float32), 1)
    if dlse is not None:  # p times itself is added to every score's gradient
        delta_M -= tl.load(dlse + flat, mask=ok, other=0.0)
    tl.store(delta + flat, delta_M, mask=ok)
    lse_M = tl.load(lse + flat, mask=ok, other=0.0)
    k += group_at(b, g, k_b, k_g)
    v += group_at(b, g, v_b, v_g)

    dq1, dq2 = zeros_both(BLOCK_M, K1, K2)
    begin, end, first, length = tiles_of_range(lo_M, hi_M, ok, BLOCK_N)
    for n in tl.range(begin, end - length, BLOCK_N):
        dq1, dq2 = dq_tile(
            edge_tile(n, first, length), q1, q2, do1, do2, k, v, k_t, v_t, lo_M, hi_M, lse_M, delta_M, end, scale,
            dq1, dq2, K, K1, K2, V, V1, V2, BLOCK_N, WIDE, True,
        )  # fmt: skip
    for n in tl.range(first, first + length, BLOCK_N):
        dq1, dq2 = dq_tile(
            n, q1, q2, do1, do2, k, v, k_t, v_t, lo_M, hi_M, lse_M, delta_M, end, scale,
            dq1, dq2, K, K1, K2, V, V1, V2, BLOCK_N, WIDE, False,
        )  # fmt: skip
    store_both(dq, flat * K, ok, dq1, dq2, K, K1, K2)


@triton.jit
def rows_that_see_all(lo, hi, begin, end, key, key_end, R: tl.constexpr, BLOCK_M: tl.constexpr, SCAN: tl.constexpr):
    """Tiles of the rows begin ≤ m < end whose queries all see the keys key ≤ t < key_end: from `first`, `length` rows.

    After the last query that does not reach the last key, before the first one whose range begins too late: right for
    bounds in any order, and all such tiles where bounds only grow.
    """
    reaching, late = begin // R, tl.cdiv(end, R)
    for n in tl.range(begin // R, tl.cdiv(end, R), SCAN, num_stages=1):
        query = n + tl.arange(0, SCAN)
        ok = query < tl.cdiv(end, R)
        short = tl.load(hi + query, mask=ok, other=2147483647) < key_end
        behind = tl.load(lo + query, mask=ok, other=0) > key
        reaching = tl.maximum(reaching, tl.max(tl.where(short, query + 1, 0)))
        late = tl.minimum(late, tl.min(tl.where(behind, query, 2147483647)))
    first = begin + tl.cdiv(tl.maximum(reaching * R - begin, 0), BLOCK_M) * BLOCK_M
    length = (tl.minimum(late * R, end) - first) // BLOCK_M * BLOCK_M
    return first, tl.maximum(length, 0)


@triton.jit
def dkv_tile(m, end, at, k1, k2, v1, v2, q, dout, lo, hi, lse, delta, scale, b, g, S, T,
             do_b, do_s, do_g, do_r, q_b, q_s, q_g, q_r, dk1, dk2, dv1, dv2, G: tl.constexpr, R: tl.constexpr,
             K: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, V: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
             BLOCK_M: tl.constexpr, WIDE: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """dK and dV with what the rows from m on add. Not MASKED: all of them exist, and see every key."""
    row = m + tl.arange(0, BLOCK_M)
    query, head = (row // R).to(tl.int64), row % R
    q_at = group_at(b, g, q_b, q_g) + heads_at(query, head, q_s, q_r)
    do_at = group_at(b, g, do_b, do_g) + heads_at(query, head, do_s, do_r)
    flat = ((b.to(tl.int64) * S + query) * G + g) * R + head
    if MASKED:
        ok = row < end
        lo_M = tl.load(lo + b.to(tl.int64) * S + query, mask=ok, other=T)
        hi_M = tl.load(hi + b.to(tl.int64) * S + query, mask=ok, other=0)
        lse_M = tl.load(lse + flat, mask=ok, other=float("-inf"))
        delta_M = tl.load(delta + flat, mask=ok, other=0.0)
    else:
        ok = None
        lse_M, delta_M = tl.load(lse + flat), tl.load(delta + flat)
    s, dp, q1, q2, do1, do2 = products(
        k1, k2, v1, v2, q, dout, q_at, do_at, ok, K, K1, K2, V, V1, V2, WIDE
    )  # fmt: skip
    visible = (at[:, None] >= lo_M[None, :]) & (at[:, None] < hi_M[None, :]) if MASKED else None
    p = probabilities(s, lse_M[None, :], visible, scale)
    ds = rounded(p * (dp - delta_M[None, :]) * scale, WIDE, q.dtype.element_ty)
    p = rounded(p, WIDE, q.dtype.element_ty)
    dv1 += dot(p, do1)
    dk1 += dot(ds, q1)
    if V2 > 0:
        dv2 += dot(p, do2)
    if K2 > 0:
        dk2 += dot(ds, q2)
    return dk1, dk2, dv1, dv2


@triton.jit(do_not_specialize=VARYING)
def range_dkv_kernel(
    dout, q, k, v, lo, hi, lse, delta, dk, dv, seen_first, seen_end, scale, S, T, n_tiles, n_parts,
    do_b, do_s, do_g, do_r, q_b, q_s, q_g, q_r, k_b, k_t, k_g, v_b, v_t, v_g,
    G: tl.constexpr, R: tl.constexpr,
    K: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, V: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    # All parts of a tile before the next one: of keys that grow visible with time, later tiles have fewer readers.
    tile, part = tl.program_id(0) // n_parts, tl.program_id(0) % n_parts
    b, g = tl.program_id(1) // G, tl.program_id(1) % G
    at = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = at < T
    k_at = group_at(b, g, k_b, k_g) + at.to(tl.int64) * k_t
    v_at = group_at(b, g, v_b, v_g) + at.to(tl.int64) * v_t
    k1, k2 = load_both(k, k_at, inside, K, K1, K2, WIDE)
    v1, v2 = load_both(v, v_at, inside, V, V1, V2, WIDE)
    dk1, dk2 = zeros_both(BLOCK_N, K1, K2)
    dv1, dv2 = zeros_both(BLOCK_N, V1, V2)

    # Rows of the queries that may see this tile, cut into n_parts equal lengths of whole tiles.
    first = tl.load(seen_first + b.to(tl.int64) * n_tiles + tile) * R
    end = tl.load(seen_end + b.to(tl.int64) * n_tiles + tile) * R
    length = tl.cdiv(tl.cdiv(tl.maximum(end - first, 0), n_parts), BLOCK_M) * BLOCK_M
    mine = first + part * length
    last = tl.minimum(mine + length, end)
    # Tiles of 32 keys, for wide rows, are bound by memory: a second loop would cost them 50 registers for nothing.
    SPLIT: tl.constexpr = INTERPRETED or BLOCK_N >= 64
    inner, n_inner = last, 0
    if SPLIT:
        seen = b.to(tl.int64) * S
        inner, n_inner = rows_that_see_all(
            lo + seen, hi + seen, mine, last, tile * BLOCK_N, tl.minimum(tile * BLOCK_N + BLOCK_N, T), R, BLOCK_M, 1024
        )  # fmt: skip
    for m in tl.range(mine, last - n_inner, BLOCK_M):
        dk1, dk2, dv1, dv2 = dkv_tile(
            edge_tile(m, inner, n_inner), end, at, k1, k2, v1, v2, q, dout, lo, hi, lse, delta, scale, b, g, S, T,
            do_b, do_s, do_g, do_r, q_b, q_s, q_g, q_r, dk1, dk2, dv1, dv2,
            G, R, K, K1, K2, V, V1, V2, BLOCK_M, WIDE, True,
        )  # fmt: skip
    if SPLIT:
        for m in tl.range(inner, inner + n_inner, BLOCK_M):
            dk1, dk2, dv1, dv2 = dkv_tile(
                m, end, at, k1, k2, v1, v2, q, dout, lo, hi, lse, delta, scale, b, g, S, T,
                do_b, do_s, do_g, do_r, q_b, q_s, q_g, q_r, dk1, dk2, dv1, dv2,
                G, R, K, K1, K2, V, V1, V2, BLOCK_M, WIDE, False,
            )  # fmt: skip

    n_batch = tl.num_programs(1) // G
    flat_T = ((part.to(tl.int64) * n_batch + b) * T + at) * G + g
    store_gradients(dk, dv, flat_T, inside, dk1, dk2, dv1, dv2, K, K1, K2, V, V1, V2)


@triton.jit(do_not_specialize=VARYING)
def add_parts_kernel(
    dk_part, dv_part, dk, dv, window_dk_part, window_dv_part, window_dk, window_dv,
    n_rows, n_parts, n_window_rows, n_window_parts,
    K: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, V: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Programs of the last axis: keys, values, and those of a second branch, if there is one."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    if tl.program_id(1) >= 2:
        dk_part, dv_part, dk, dv = window_dk_part, window_dv_part, window_dk, window_dv
        n_rows, n_parts = n_window_rows, n_window_parts
    ok = row < n_rows
    if tl.program_id(1) % 2 == 0:
        add_partial_rows(dk_part, dk, row, row, n_rows, ok, row < 0, 0, n_parts, K, K1, K2, BLOCK_M)
    else:
        add_partial_rows(dv_part, dv, row, row, n_rows, ok, row < 0, 0, n_parts, V, V1, V2, BLOCK_M)


@planned
def range_forward(x: BranchInputs, bounds: KeyBounds | None = None) -> tuple[Tensor, Tensor]:
    """`bounds`: the branch's, if the caller has them."""
    q, k, v = rows_contiguous(x.q_BSGRK, x.k_BTGK, x.v_BTGV)
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
    launch_all(forward_work(q, k, v, bounds or key_bounds(x)[0], x.scale, lse, out).launches)
    return out, lse


def forward_work(
    q: Tensor, k: Tensor, v: Tensor, bounds: KeyBounds, scale: float, lse: Tensor, out: Tensor | None
) -> Work:
    """What writes log-sum-exps and, unless it is None, the output."""
    (B, S, G, R, K), V = q.shape, v.shape[-1]

    def prepare(tiles: TileSizes) -> Work:
        result = lse if out is None else out
        arguments = (q, k, v, bounds.lo_BS, bounds.hi_BS, result, lse, scale, S, k.shape[1], *row_strides(q, k, v))
        constants = dict(G=G, R=R, **widths(K, V), BLOCK_M=tiles.m, BLOCK_N=tiles.n, WIDE=is_wide(q.dtype))
        grid = (triton.cdiv(S * R, tiles.m), B * G)
        options = {**constants, **tiles.options, "VALUES": out is not None}
        return Work([Launch(range_forward_kernel, grid, arguments, options)])

    return tuned("range_forward", q, 0 if out is None else V, prepare)


class RangeResults(NamedTuple):
    """Inputs and results of a branch, with the gradients of the results."""

    x: BranchInputs
    out_BSGRV: Tensor
    lse_BSGR: Tensor
    dout_BSGRV: Tensor
    dlse_BSGR: Tensor | None


def range_backward(*branches: RangeResults, bounds: Sequence[KeyBounds] | None = None) -> list[Gradients]:
    """Gradients of one branch, or of the compressed and the sliding branch, whose queries are the same. `bounds`: of
    each branch, if the caller has them."""
    q, G, R, K = branches[0].x.q_BSGRK, *branches[0].x.q_BSGRK.shape[2:]
    V = branches[0].x.v_BTGV.shape[-1]
    bounds = bounds or key_bounds(*(branch.x for branch in branches))
    every = [_RangeBackward(branch, one) for branch, one in zip(branches, bounds, strict=True)]
    common = dict(G=G, R=R, **widths(K, V), WIDE=is_wide(q.dtype))

    def prepare_dq(tiles: TileSizes) -> Work:
        constants = dict(BLOCK_M=tiles.m, BLOCK_N=tiles.n, **common, **tiles.options)
        return Work([one.dq_launch(tiles, constants) for one in every])

    def prepare_dkv(tiles: TileSizes) -> Work:
        n_tiles = [triton.cdiv(one.k.shape[1], tiles.n) for one in every]
        seen = seen_by(tiles.n, *zip(bounds, n_tiles, strict=True))
        constants = dict(BLOCK_M=tiles.m, BLOCK_N=tiles.n, **common, **tiles.options)
        prepared = [one.dkv_launch(tiles, *of_one, constants) for one, of_one in zip(every, seen, strict=True)]
        launches = [launch for launch, *_ in prepared]
        cut = [parts for _, parts, _ in prepared if parts[-1] > 1]
        if cut:
            (*first, n_rows, n_parts), (*last, n_last, last_parts) = cut[0], cut[-1]
            grid = (triton.cdiv(max(n_rows, n_last), ROWS_ADDED), 2 * len(cut))
            of_sums = dict(**widths(K, V), BLOCK_M=ROWS_ADDED)
            numbers = (n_rows, n_parts, n_last, last_parts)
            launches.append(Launch(add_parts_kernel, grid, (*first, *last, *numbers), of_sums))
        return Work(launches, tuple(x for *_, results in prepared for x in results))

    launch_all(tuned("range_dq", q, V, prepare_dq).launches)
    of_keys = tuned("range_dkv", q, V, prepare_dkv)
    launch_all(of_keys.launches)
    keys = of_keys.results
    return [(one.dq, *keys[2 * i : 2 * i + 2]) for i, one in enumerate(every)]  # type: ignore[misc]


@planned
def range_gradients(
    x: BranchInputs, out_BSGRV: Tensor, lse_BSGR: Tensor, dout_BSGRV: Tensor, dlse_BSGR: Tensor | None
) -> Gradients:
    """`range_backward` of one branch."""
    (gradients,) = range_backward(RangeResults(x, out_BSGRV, lse_BSGR, dout_BSGRV, dlse_BSGR))
    return gradients


class _RangeBackward:
    """Launches of one branch."""

    def __init__(self, branch: RangeResults, bounds: KeyBounds) -> None:
        x = branch.x
        self.dout, self.q, self.k, self.v = rows_contiguous(branch.dout_BSGRV, x.q_BSGRK, x.k_BTGK, x.v_BTGV)
        self.out, self.lse = branch.out_BSGRV.contiguous(), branch.lse_BSGR.contiguous()
        self.dlse = None if branch.dlse_BSGR is None else branch.dlse_BSGR.contiguous()
        self.bounds, self.scale = bounds, x.scale
        self.dq, self.delta = self.q.new_empty(self.q.shape), torch.empty_like(self.lse)
        self.strides = row_strides(self.dout, self.q, self.k, self.v)

    def dq_launch(self, tiles: TileSizes, constants: Mapping[str, Any]) -> Launch:
        (B, S, G, R, _), T = self.q.shape, self.k.shape[1]
        lo, hi, *_ = self.bounds
        arguments = (
            self.dout, self.q, self.k, self.v, lo, hi, self.out, self.lse, self.dlse, self.dq, self.delta, self.scale,
            S, T, *self.strides,
        )  # fmt: skip
        return Launch(range_dq_kernel, (triton.cdiv(S * R, tiles.m), B * G), arguments, constants)

    def dkv_launch(
        self, tiles: TileSizes, seen_first: Tensor, seen_end: Tensor, constants: Mapping[str, Any]
    ) -> tuple[Launch, tuple[Any, ...], tuple[Tensor, ...]]:
        """The launch, what adds up its parts, and the gradients."""
        (B, S, G, _, _), (k, v) = self.q.shape, (self.k, self.v)
        T, (lo, hi, *_) = k.shape[1], self.bounds
        n_tiles, parts = triton.cdiv(T, tiles.n), _parts(self.q, T, tiles)
        dk, dv = (x.new_empty(x.shape) for x in (k, v))
        sums = (dk, dv) if parts == 1 else tuple(x.new_empty((parts, *x.shape), dtype=torch.float32) for x in (k, v))
        arguments = (
            self.dout, self.q, k, v, lo, hi, self.lse, self.delta, *sums, seen_first, seen_end, self.scale,
            S, T, n_tiles, parts, *self.strides,
        )  # fmt: skip
        launch = Launch(range_dkv_kernel, (n_tiles * parts, B * G), arguments, constants)
        return launch, (*sums, dk, dv, B * T * G, parts), (dk, dv)


def _parts(q_BSGRK: Tensor, n_keys: int, tiles: TileSizes) -> int:
    """Keys that many queries share are worked on by several programs: enough for every unit of a large GPU."""
    B, S, G, R, _ = q_BSGRK.shape
    programs = triton.cdiv(n_keys, tiles.n) * B * G
    return max(1, min(_PROGRAMS_WANTED // max(1, programs), triton.cdiv(S * R, 8 * tiles.m)))


_PROGRAMS_WANTED = 1024
ROWS_ADDED = 32
"""Keys whose partial gradients one program adds."""
