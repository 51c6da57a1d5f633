"""Decode step, one new token per row over the KV cache, in four kernels: two read keys, one ranks blocks, one merges.

Given a token's projections the first kernel also appends it (`nsa.kernels.triton.append`) and the last one counts it:
until then `length_B` is the token's position, which all programs of the step read. The program that reads the newest
compressed entry is the one that makes it. φ with maps (linear, mlp) is left to the cache, between an append of its own
and the other four; it then computes an entry at every step and writes it where a block ends.

Each row's keys are cut into parts, one program each, so that a single row fills a GPU. How many parts there are follows
from the model alone and how long each is from the row's own length, read here: a row has the same bits alone, in any
batch and in a cache of any size. Parts are merged by their log-sum-exp (base 2 throughout) in order, without atomics.

    compressed   parts of the compressed branch; leaves every score, which is less to read again than the keys. Or:
    append       the same, and the new token
    score        the best blocks of each stretch of blocks, ranked as in `select`
    raw          the choice among those, then a page of l_sel keys per program; beside them the window's parts
    merge        the branches' parts and their gates, one head per program

A merged layer has one branch of blocks and window, whose compressed keys have no values.

The host reads shapes only, so the step may be captured in a CUDA graph and replayed as the cache fills up. Shapes as
in `nsa.kernels.reference`; a row's keys must hold its position 0 (start ≥ 0), as a cache's do.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.errors import ConfigError
from nsa.geometry import Geometry
from nsa.kernels.interface import CachedKeys, CacheView, NewToken, TokenForm, device_of
from nsa.kernels.triton.append import (
    MEAN,
    PLACED,
    SOFTMAX,
    emit_entry,
    place_of,
    rotated_columns,
    row_norm,
    write_token,
)
from nsa.kernels.triton.selection import ascending, own_block, ranked, shared_strides
from nsa.kernels.triton.tile import (
    LOG2E,
    VARYING,
    divisor,
    dot_rows,
    group_at,
    load_both,
    load_rows,
    log_sum,
    rounded,
    row_strides,
    rows_contiguous,
    soften,
    store_both,
    store_rows,
    weigh,
    zeros_both,
)
from nsa.kernels.triton.tuning import TileSizes, choose, is_wide, split_width, widths


@triton.jit
def complete_blocks(position, origin, n_keys, L: tl.constexpr, D: tl.constexpr):
    """Where the compressed blocks that this row may see begin and end on the key axis."""
    complete = tl.where(position + 1 >= L, (position + 1 - L) // D + 1, 0)
    return tl.maximum(origin, 0), tl.minimum(tl.maximum(origin + complete, 0), n_keys)


@triton.jit
def share_size(lo, hi, PARTS: tl.constexpr, BLOCK_N: tl.constexpr):
    return tl.cdiv(tl.cdiv(tl.maximum(hi - lo, 0), PARTS), BLOCK_N) * BLOCK_N


@triton.jit
def share(lo, hi, part, PARTS: tl.constexpr, BLOCK_N: tl.constexpr):
    """The keys of one of PARTS parts: whole tiles, the same number for all, so that only the last ones may be empty."""
    size = share_size(lo, hi, PARTS, BLOCK_N)
    begin = lo + part * size
    return begin, tl.minimum(begin + size, hi)


@triton.jit
def state_at(table, at, inside, first_size, PAGE: tl.constexpr, OTHER_PAGE: tl.constexpr):
    """The page of these entries of a row, and where in it they lie: pages have PAGE entries if `first_size`, else
    OTHER_PAGE, constants because of the division. Nothing is read where there is no entry."""
    number = tl.where(first_size, at // PAGE, at // OTHER_PAGE)
    page = tl.load(table + number, mask=inside, other=0)
    return page.to(tl.int64), (at - number * tl.where(first_size, PAGE, OTHER_PAGE)).to(tl.int64)


@triton.jit
def attend_range(
    q1, q2, ok, k, v, table, k_p, k_t, v_p, v_t, first_size, begin, end,
    part, part_lse, part_at, scores, scores_at, scale,
    K: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, V: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
    PAGE: tl.constexpr, OTHER_PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    KEEP_SCORES: tl.constexpr, VALUES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Rows of heads over the keys begin ≤ t < end, all visible: writes one part, and the scores if asked; without
    values, only the part's log-sum-exp."""
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc1, acc2 = zeros_both(BLOCK_M, V1, V2)
    for n in tl.range(begin, end, BLOCK_N):
        at = n + tl.arange(0, BLOCK_N)
        inside = at < end
        page, state = state_at(table, at, inside, first_size, PAGE, OTHER_PAGE)
        k_at, v_at = page * k_p + state * k_t, page * v_p + state * v_t
        s, _, _ = dot_rows(q1, q2, k, k_at, inside, K, K1, K2, WIDE)
        s = tl.where(inside[None, :], s * (scale * LOG2E), float("-inf"))
        if KEEP_SCORES:
            tl.store(scores + scores_at[:, None] + at[None, :], s, mask=ok[:, None] & inside[None, :])
        e, top, total, decay = soften(s, top, total)
        if VALUES:
            acc1, acc2 = weigh(acc1, acc2, decay, e, v, v_at, inside, V, V1, V2, WIDE)
    if VALUES:
        store_both(part, part_at * V, ok, acc1 / divisor(total), acc2 / divisor(total), V, V1, V2)
    tl.store(part_lse + part_at, log_sum(top, total), mask=ok)


@triton.jit
def newest(position, b, BACK: tl.constexpr):
    """The position up to which a row's blocks are chosen: BACK tokens before the newest."""
    return tl.maximum(tl.load(position + b).to(tl.int32) - BACK, -1)


@triton.jit(do_not_specialize=VARYING)
def decode_compressed_kernel(
    q, k, v, table, position, origin, scores, part, part_lse, scale, n_keys, n_parts, table_b,
    q_b, q_g, q_r, k_p, k_g, k_t, v_p, v_g, v_t, G: tl.constexpr, R: tl.constexpr, PAGE: tl.constexpr,
    K: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, V: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
    L: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    VALUES: tl.constexpr, BACK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    bg = tl.program_id(1).to(tl.int64)
    b, g = bg // G, bg % G
    head = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    lo, hi = complete_blocks(newest(position, b, BACK), tl.load(origin + b).to(tl.int32), n_keys, L, D)
    begin, end = share(lo, hi, tl.program_id(0), PARTS, BLOCK_N)
    q_at = group_at(b, g, q_b, q_g) + head.to(tl.int64) * q_r
    q1, q2 = load_both(q, q_at, head < R, K, K1, K2, WIDE)
    attend_range(
        q1, q2, head < R, k + g * k_g, v + g * v_g, table + b * table_b, k_p, k_t, v_p, v_t, True,
        begin, end, part, part_lse, (bg * n_parts + tl.program_id(0)) * R + head,
        scores, (bg * R + head) * n_keys, scale, K, K1, K2, V, V1, V2, PAGE, PAGE, BLOCK_M, BLOCK_N, True,
        VALUES, WIDE,
    )  # fmt: skip


@triton.jit(do_not_specialize=VARYING)
def decode_append_kernel(
    new_q, new_k, new_v, cos, sin, q_weight, k_weight, phi_k, phi_k2, phi_v, phi_v2,
    q, tail_k, tail_v, tail_table, token_k, token_v, token_table, window_k, window_v, window_table,
    k, v, table, position, origin, scores, part, part_lse, scale, eps,
    n_keys, n_tail_keys, n_token_keys, n_window_keys, n_parts, tail_table_b, token_table_b, window_table_b, table_b,
    new_q_b, new_k_b, new_v_b, cos_b, sin_b, phi_k_g, phi_k2_g, phi_v_g, phi_v2_g,
    tk_p, tk_g, tk_t, tv_p, tv_g, tv_t, ok_p, ok_g, ok_t, ov_p, ov_g, ov_t, wk_p, wk_g, wk_t, wv_p, wv_g, wv_t,
    k_p, k_g, k_t, v_p, v_g, v_t,
    G: tl.constexpr, R: tl.constexpr, PAGE: tl.constexpr, TAIL_PAGE: tl.constexpr, TOKEN_PAGE: tl.constexpr,
    WINDOW_PAGE: tl.constexpr, K: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr,
    V: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, L: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, VALUES: tl.constexpr, BACK: tl.constexpr, WIDE: tl.constexpr,
    KEY_STREAMS: tl.constexpr, VALUE_STREAMS: tl.constexpr, HALF: tl.constexpr, NORMED: tl.constexpr,
    POOLING: tl.constexpr, TURNS_ENTRIES: tl.constexpr, OWN_TAIL: tl.constexpr, OWN_WINDOW: tl.constexpr,
    ATTENDS: tl.constexpr,
):  # fmt: skip
    """`decode_compressed_kernel` for a token that is not in the cache yet; `position` is its position. Without ATTENDS
    the token alone is appended, and no entry.

    KEY_STREAMS, VALUE_STREAMS: projections of a group, one per branch or one for all. TURNS_ENTRIES: keys of the
    compressed branch are rotated after φ. OWN_TAIL, OWN_WINDOW: streams that have slots of their own.
    """
    bg = tl.program_id(1).to(tl.int64)
    b, g = bg // G, bg % G
    head = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    heads = head < R
    cos, sin, table = cos + b * cos_b, sin + b * sin_b, table + b * table_b
    tail_table, token_table = tail_table + b * tail_table_b, token_table + b * token_table_b
    window_table = window_table + b * window_table_b
    k, v, tail_k, tail_v = k + g * k_g, v + g * v_g, tail_k + g * tk_g, tail_v + g * tv_g

    q_from = b * new_q_b + (g * R + head) * K
    factor = row_norm(new_q, q_from, heads, eps, K, K1, K2, NORMED)
    x1 = rotated_columns(new_q, q_from, heads, cos, sin, factor, q_weight, K, 0, K1, HALF, NORMED)
    q1 = rounded(x1, WIDE, new_q.dtype.element_ty)
    q2 = q1
    q_at = (bg * R + head) * K
    if tl.program_id(0) == 0:
        store_rows(q, q_at, heads, x1, K, 0, K1)
    if K2 > 0:
        x2 = rotated_columns(new_q, q_from, heads, cos, sin, factor, q_weight, K, K1, K2, HALF, NORMED)
        q2 = rounded(x2, WIDE, new_q.dtype.element_ty)
        if tl.program_id(0) == 0:
            store_rows(q, q_at, heads, x2, K, K1, K2)

    pos = tl.load(position + b).to(tl.int32)
    first = tl.load(origin + b).to(tl.int32)
    lo, hi = complete_blocks(tl.maximum(pos - BACK, -1), first, n_keys, L, D)
    begin, end = share(lo, hi, tl.program_id(0), PARTS, BLOCK_N)
    owner = tl.maximum(hi - 1 - lo, 0) // tl.maximum(share_size(lo, hi, PARTS, BLOCK_N), 1)
    if tl.program_id(0) == (owner if ATTENDS else 0):
        # Programs of other heads write the same.
        k_from, v_from = b * new_k_b + g * KEY_STREAMS * K, b * new_v_b + g * VALUE_STREAMS * V
        k_sel, v_sel = k_from + (1 if KEY_STREAMS > 1 else 0) * K, v_from + (1 if VALUE_STREAMS > 1 else 0) * V
        if OWN_TAIL:
            of_tail = row_norm(new_k, tl.zeros([1], tl.int64) + k_from, None, eps, K, K1, K2, NORMED)
            write_token(
                new_k, k_from, new_v, v_from, cos, sin, of_tail, k_weight, tail_k, tail_v, tail_table,
                pos % n_tail_keys, tk_p, tk_t, tv_p, tv_t, K, K1, K2, V, V1, V2, TAIL_PAGE,
                0 if TURNS_ENTRIES else HALF, NORMED,
            )  # fmt: skip
        of_token = row_norm(new_k, tl.zeros([1], tl.int64) + k_sel, None, eps, K, K1, K2, NORMED)
        write_token(
            new_k, k_sel, new_v, v_sel, cos, sin, of_token, k_weight, token_k + g * ok_g, token_v + g * ov_g,
            token_table, pos % n_token_keys, ok_p, ok_t, ov_p, ov_t, K, K1, K2, V, V1, V2, TOKEN_PAGE, HALF, NORMED,
        )  # fmt: skip
        if OWN_WINDOW:
            k_win, v_win = k_from + (KEY_STREAMS - 1) * K, v_from + (VALUE_STREAMS - 1) * V
            of_window = row_norm(new_k, tl.zeros([1], tl.int64) + k_win, None, eps, K, K1, K2, NORMED)
            write_token(
                new_k, k_win, new_v, v_win, cos, sin, of_window, k_weight, window_k + g * wk_g, window_v + g * wv_g,
                window_table, pos % n_window_keys, wk_p, wk_t, wv_p, wv_t, K, K1, K2, V, V1, V2, WINDOW_PAGE, HALF,
                NORMED,
            )  # fmt: skip
        oldest = pos + 1 - L
        if ATTENDS:  # noqa: SIM102 (a constant decides while compiling)
            if (oldest >= 0) & (oldest % D == 0):
                tl.debug_barrier()  # until the token is written
                page, state = place_of(table, first + oldest // D, PAGE)
                emit_entry(
                    tail_k, tail_table, oldest, n_tail_keys, tk_p, tk_t, phi_k + g * phi_k_g, phi_k2 + g * phi_k2_g,
                    cos, sin, k, page * k_p + state * k_t,
                    K, K1, K2, L, TAIL_PAGE, POOLING, HALF if TURNS_ENTRIES else 0,
                )  # fmt: skip
                if VALUES:
                    emit_entry(
                        tail_v, tail_table, oldest, n_tail_keys, tv_p, tv_t, phi_v + g * phi_v_g,
                        phi_v2 + g * phi_v2_g, cos, sin, v, page * v_p + state * v_t,
                        V, V1, V2, L, TAIL_PAGE, POOLING, 0,
                    )  # fmt: skip
                tl.debug_barrier()  # until the entry is
    if ATTENDS:
        attend_range(
            q1, q2, heads, k, v, table, k_p, k_t, v_p, v_t, True,
            begin, end, part, part_lse, (bg * n_parts + tl.program_id(0)) * R + head,
            scores, (bg * R + head) * n_keys, scale, K, K1, K2, V, V1, V2, PAGE, PAGE, BLOCK_M, BLOCK_N, True,
            VALUES, WIDE,
        )  # fmt: skip


@triton.jit(do_not_specialize=VARYING)
def decode_score_kernel(
    scores, part_lse, position, origin, best, n_keys, n_compressed, n_parts,
    G: tl.constexpr, R: tl.constexpr, L: tl.constexpr, D: tl.constexpr, L_SEL: tl.constexpr, KEEP: tl.constexpr,
    PARTS: tl.constexpr, STRETCHES: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_J: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """The KEEP best blocks of one of STRETCHES stretches, ranked; PARTS ≥ n_compressed, how many parts there are."""
    stretch, bg = tl.program_id(0), tl.program_id(1).to(tl.int64)
    pos, first = newest(position, bg // G, BACK), tl.load(origin + bg // G).to(tl.int32)
    lo, hi = complete_blocks(pos, first, n_keys, L, D)
    own = own_block(pos, L_SEL)
    piece = tl.arange(0, PARTS)
    ranking = tl.full([KEEP], -1, tl.int64)
    begin, end = share(0, own + 1, stretch, STRETCHES, BLOCK_J)
    for j0 in tl.range(begin, end, BLOCK_J):
        j = j0 + tl.arange(0, BLOCK_J)
        mass = tl.zeros([BLOCK_J], tl.float32)
        for r in tl.range(0, R, BLOCK_R):
            head = r + tl.arange(0, BLOCK_R)
            lse_at = (bg * n_parts + piece[None, :]) * R + head[:, None]
            there = (head < R)[:, None] & (piece < n_compressed)[None, :]
            lse = tl.load(part_lse + lse_at, mask=there, other=float("-inf"))
            top = tl.max(lse, 1)
            top = tl.where(top == float("-inf"), 0.0, top)
            total = tl.sum(tl.exp2(lse - top[:, None]), 1)
            level = top + tl.log2(tl.where(total == 0, 1.0, total))
            for m in tl.static_range(0, L_SEL // D + L // D - 1):
                c = j * (L_SEL // D) + m - (L // D - 1)
                at = first + c
                seen = (c >= 0) & (at >= lo) & (at < hi)
                s_at = (bg * R + head)[:, None] * n_keys + at[None, :]
                s = tl.load(scores + s_at, mask=(head < R)[:, None] & seen[None, :], other=float("-inf"))
                mass += tl.sum(tl.exp2(s - level[:, None]), 0) * shared_strides(m, L // D, L_SEL // D)
        key = tl.topk(ranked(mass, j, own), KEEP)
        ranking = tl.topk(tl.reshape(tl.join(ranking, key), [2 * KEEP]), KEEP)
    tl.store(best + (bg * STRETCHES + stretch) * KEEP + tl.arange(0, KEEP), ranking)


@triton.jit(do_not_specialize=VARYING)
def decode_raw_kernel(
    q, k, v, table, position, origin, window_k, window_v, window_table, window_position, window_origin,
    best, idx, part, part_lse, scale, n_keys, n_window_keys, n_compressed, n_parts, table_b, window_table_b,
    q_b, q_g, q_r, k_p, k_g, k_t, v_p, v_g, v_t, wk_p, wk_g, wk_t, wv_p, wv_g, wv_t,
    G: tl.constexpr, R: tl.constexpr, PAGE: tl.constexpr, WINDOW_PAGE: tl.constexpr,
    K: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, V: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
    L_SEL: tl.constexpr, N_SEL: tl.constexpr, KEEP: tl.constexpr, STRETCHES: tl.constexpr, W: tl.constexpr,
    WINDOW_PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BACK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Programs below N_SEL take one chosen block each, the others the window's parts, all through the same loop."""
    program, bg = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, g = bg // G, bg % G
    head = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_page = program < N_SEL
    pos = tl.load(tl.where(is_page, position, window_position) + b).to(tl.int32)
    pos = tl.where(is_page, tl.maximum(pos - BACK, -1), tl.minimum(pos, n_window_keys - 1))  # a ring is all window
    start = tl.load(tl.where(is_page, origin, window_origin) + b).to(tl.int32)

    # No loop here: the compiler pipelines no loop over keys whose bounds come out of another loop.
    key = tl.load(best + bg * STRETCHES * KEEP + tl.arange(0, STRETCHES * KEEP))
    ranking = tl.topk(key, KEEP)
    rank = tl.arange(0, KEEP)
    block = ascending(ranking, rank < N_SEL)
    tl.store(idx + bg * N_SEL + rank, block, mask=(rank < N_SEL) & (program + tl.program_id(2) == 0))
    page = tl.sum(tl.where(rank == program, block, 0))

    seen = start + pos + 1
    page_begin = start + page * L_SEL
    page_end = tl.where(page >= 0, tl.minimum(tl.minimum(page_begin + L_SEL, seen), n_keys), page_begin)
    lo, hi = tl.maximum(start + tl.maximum(pos - W + 1, 0), 0), tl.minimum(seen, n_window_keys)
    begin, end = share(lo, hi, program - N_SEL, WINDOW_PARTS, BLOCK_N)
    q_at = group_at(b, g, q_b, q_g) + head.to(tl.int64) * q_r
    q1, q2 = load_both(q, q_at, head < R, K, K1, K2, WIDE)
    attend_range(
        q1, q2, head < R,
        tl.where(is_page, k + g * k_g, window_k + g * wk_g), tl.where(is_page, v + g * v_g, window_v + g * wv_g),
        tl.where(is_page, table + b * table_b, window_table + b * window_table_b),
        tl.where(is_page, k_p, wk_p), tl.where(is_page, k_t, wk_t),
        tl.where(is_page, v_p, wv_p), tl.where(is_page, v_t, wv_t), is_page,
        tl.where(is_page, tl.maximum(page_begin, 0), begin), tl.where(is_page, page_end, end),
        part, part_lse, (bg * n_parts + n_compressed + program) * R + head, part, head,
        scale, K, K1, K2, V, V1, V2, PAGE, WINDOW_PAGE, BLOCK_M, BLOCK_N, False, True, WIDE,
    )  # fmt: skip


@triton.jit
def merge_parts(
    part, part_lse, bg, head, first, end, n_parts, R: tl.constexpr, V: tl.constexpr, V1: tl.constexpr,
    V2: tl.constexpr, PARTS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """A head's output over the parts of a branch. A part that saw nothing is never read."""
    every = first + tl.arange(0, PARTS)
    lse = tl.load(part_lse + (bg * n_parts + every) * R + head, mask=every < end, other=float("-inf"))
    top = tl.max(lse, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(lse - top), 0)
    total = tl.where(total == 0, 1.0, total)
    sum1 = tl.zeros([V1], tl.float32)
    sum2 = sum1
    if V2 > 0:
        sum2 = tl.zeros([V2], tl.float32)
    for p in tl.range(first, end, AT_ONCE):
        piece = p + tl.arange(0, AT_ONCE)
        row = (bg * n_parts + piece) * R + head
        weight = tl.exp2(tl.load(part_lse + row, mask=piece < end, other=float("-inf")) - top) / total
        sum1 += tl.sum(weight[:, None] * load_rows(part, row * V, weight > 0, V, 0, V1, False), 0)
        if V2 > 0:
            sum2 += tl.sum(weight[:, None] * load_rows(part, row * V, weight > 0, V, V1, V2, False), 0)
    return sum1, sum2


@triton.jit
def branch_gates(logits, at, temperature, GATE: tl.constexpr, BRANCHES: tl.constexpr):
    """The gates of a head, as `nsa.core.branches.BranchGates` computes them; that of a third branch, which a layer of
    two lacks, is 0."""
    c, s = tl.load(logits + at).to(tl.float32), tl.load(logits + at + 1).to(tl.float32)
    w = tl.load(logits + at + BRANCHES - 1).to(tl.float32)
    if GATE != GIVEN:
        c, s, w = c / temperature, s / temperature, w / temperature
    if GATE == SOFTMAX_GATES:
        top = tl.maximum(tl.maximum(c, s), w)
        c, s, w = tl.exp(c - top), tl.exp(s - top), tl.exp(w - top)
        total = c + s
        if BRANCHES > 2:
            total += w
        c, s, w = c / total, s / total, w / total
    if GATE == SIGMOID_GATES:
        c, s, w = tl.sigmoid(c), tl.sigmoid(s), tl.sigmoid(w)
    if GATE == TANH_GATES:
        c, s, w = 2 * tl.sigmoid(2 * c) - 1, 2 * tl.sigmoid(s), 2 * tl.sigmoid(2 * w) - 1
    if BRANCHES == 2:
        w = 0.0
    return c, s, w


@triton.jit(do_not_specialize=VARYING)
def decode_merge_kernel(
    part, part_lse, gates, out, length, done, position, window_position, temperature,
    n_compressed, n_parts, n_window_keys, gates_b,
    G: tl.constexpr, R: tl.constexpr, V: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, N_SEL: tl.constexpr,
    PARTS: tl.constexpr, AT_ONCE: tl.constexpr, ONE_BRANCH: tl.constexpr, GATE: tl.constexpr, GATES: tl.constexpr,
    BRANCHES: tl.constexpr, COUNTS: tl.constexpr, L: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """PARTS is a power of two not below any branch's number of parts. GATES: of a group, one per head or one for all.
    ONE_BRANCH: all parts but the compressed ones are one branch, the only one. COUNTS: the new token now belongs to the
    row's tokens."""
    head, bg = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, g = bg // G, bg % G
    n_blocks = n_compressed + N_SEL
    if ONE_BRANCH:
        sum1, sum2 = merge_parts(part, part_lse, bg, head, n_compressed, n_parts, n_parts, R, V, V1, V2, PARTS, AT_ONCE)
    else:
        gate = b * gates_b + (g * GATES + (head if GATES > 1 else 0)) * BRANCHES
        c, s, w = branch_gates(gates, gate, temperature, GATE, BRANCHES)
        c1, c2 = merge_parts(part, part_lse, bg, head, 0, n_compressed, n_parts, R, V, V1, V2, PARTS, AT_ONCE)
        s1, s2 = merge_parts(part, part_lse, bg, head, n_compressed, n_blocks, n_parts, R, V, V1, V2, PARTS, AT_ONCE)
        w1, w2 = merge_parts(part, part_lse, bg, head, n_blocks, n_parts, n_parts, R, V, V1, V2, PARTS, AT_ONCE)
        sum1, sum2 = c * c1 + s * s1 + w * w1, c * c2 + s * s2 + w * w2
    row = (bg * R + head) * V + tl.zeros([1], tl.int64)
    store_rows(out, row, row >= 0, sum1[None, :], V, 0, V1)
    if V2 > 0:
        store_rows(out, row, row >= 0, sum2[None, :], V, V1, V2)
    if COUNTS:  # noqa: SIM102
        if (head == 0) & (g == 0):
            n = tl.load(length + b)
            tl.store(position + b, n)
            tl.store(window_position + b, tl.minimum(n, n_window_keys - 1))
            tl.store(length + b, n + 1)
            tl.store(done + b, tl.where(n + 1 >= L, (n + 1 - L) // D + 1, 0))


PROGRAMS = 128
"""Programs per row: GPUs have 108 to 148 SMs. Not more, because each leaves a part to be merged."""
WINDOW_PART = 64  # keys
STRETCHES = 16  # of blocks, each ranked by one program; a power of two
BLOCKS_AT_ONCE = 64
_HEADS_AT_ONCE = 16
MERGED_AT_ONCE = 16  # parts


GIVEN, SOFTMAX_GATES, SIGMOID_GATES, TANH_GATES = (tl.constexpr(n) for n in range(4))
_GATES = {None: GIVEN, "softmax": SOFTMAX_GATES, "sigmoid": SIGMOID_GATES, "tanh": TANH_GATES}
_POOLINGS = {None: MEAN, "avg": MEAN, "weighted": PLACED, "softmax": SOFTMAX}


class _DecodeConstants(NamedTuple):
    """Compile-time constants of each kernel."""

    compressed: dict[str, Any]
    score: dict[str, Any]
    raw: dict[str, Any]
    merge: dict[str, Any]


class DecodeParts(NamedTuple):
    """What the branches' programs leave to be merged."""

    part: Tensor
    part_lse: Tensor
    idx_B1GN: Tensor
    n_compressed: int
    n_parts: int


class TritonDecoder:
    """`nsa.kernels.interface.TokenDecoder`. `append` leaves appending to the cache, `step` does it.

    merged: one softmax over selected blocks and window, whose compressed keys have no values, without gates.
    """

    append = None

    def __init__(
        self,
        cache: CacheView,
        *,
        heads_per_group: int,
        means: bool,
        geometry: Geometry,
        scale: float,
        merged: bool = False,
    ) -> None:
        if merged:  # values are not read
            entries = cache.compressed.pages
            cache = cache._replace(compressed=cache.compressed._replace(pages=entries._replace(v=entries.k)))
        self._cache, self._geometry, self._scale, self._merged = cache, geometry, scale, merged
        self._heads = heads_per_group

    def attend(self, q_B1GRK: Tensor, gates_B1GR3: Tensor | None) -> tuple[Tensor, Tensor]:
        if (gates_B1GR3 is None) != self._merged:
            raise ConfigError(
                f"gates are {'missing' if gates_B1GR3 is None else 'given'}: they mix the branches, and a merged layer "
                f"has none. Pass them to a decoder that was made with merged=False, and only to that."
            )
        cache, options = self._cache, dict[str, Any](geometry=self._geometry, scale=self._scale, merged=self._merged)
        with device_of(q_B1GRK):
            parts = attend_parts(q_B1GRK, cache.compressed, cache.selected, cache.window, **options)
            return merge(q_B1GRK, parts, gates_B1GR3, cache, **options), parts.idx_B1GN

    def step(self, token: NewToken, form: TokenForm, emit: Callable[[], None] | None = None) -> tuple[Tensor, Tensor]:
        """`position`, for all kernels but the last one, is the number of tokens before this one."""
        cache = self._cache
        pages = cache.selected.pages
        shape = (len(pages.table_BP), 1, pages.k.shape[1], self._heads, pages.k.shape[-1])
        at_B1 = cache.length_B[:, None]
        compressed, selected, window = (
            keys._replace(pos_B1=at_B1) for keys in (cache.compressed, cache.selected, cache.window)
        )
        options = dict[str, Any](geometry=self._geometry, scale=self._scale, merged=self._merged)
        with device_of(pages.k):
            q = pages.k.new_empty(shape)
            launch_append = partial(_launch_append, token, form, cache, q, geometry=self._geometry)
            if emit is None:
                parts = attend_parts(q, compressed, selected, window, append=launch_append, **options)
            else:
                launch_append(merged=self._merged)
                emit()
                parts = attend_parts(q, compressed, selected, window, **options)
            return merge(q, parts, token.gates, cache, form=form, **options), parts.idx_B1GN


def attend_parts(
    q_B1GRK: Tensor, compressed: CachedKeys, selected: CachedKeys, window: CachedKeys, *, geometry: Geometry,
    scale: float, merged: bool = False, append: Callable[..., None] | None = None,
) -> DecodeParts:  # fmt: skip
    """All parts of all branches, and the chosen blocks; the cache is read in place. merged: of one softmax over the
    window and blocks of the tokens before it. append: launches a kernel that also appends the token, in place of the
    first one."""
    B, _, G, R, K = q_B1GRK.shape
    V = selected.pages.v.shape[-1]
    (q,) = rows_contiguous(q_B1GRK)
    in_cmp, in_sel, in_win = (_laid_out(keys) for keys in (compressed, selected, window))
    pos_cmp, first_cmp = in_cmp[3:]
    C, T = compressed.pages.n_entries, selected.pages.n_entries

    tiles = choose("decode", max(K, V), element_size=q.dtype.itemsize)
    fixed = constants(G, R, K, V, geometry, tiles, wide=is_wide(q.dtype), merged=merged)
    keep, block_m = fixed.score["KEEP"], fixed.compressed["BLOCK_M"]
    n_cmp = min(fixed.compressed["PARTS"], max(1, triton.cdiv(C, tiles.n)))  # any further would always be empty
    n_raw = geometry.n_sel + fixed.raw["WINDOW_PARTS"]
    n_parts = n_cmp + n_raw
    row_tiles = triton.cdiv(R, block_m)

    part = q.new_empty((B, G, n_parts, R, V), dtype=torch.float32)
    part_lse = q.new_empty((B, G, n_parts, R), dtype=torch.float32)
    scores = q.new_empty((B, G, R, C), dtype=torch.float32)
    best = q.new_empty((B, G, STRETCHES, keep), dtype=torch.int64)
    idx = q.new_empty((B, 1, G, geometry.n_sel), dtype=torch.int32)
    q_strides = row_strides(q[:, 0])

    if append is not None:
        append(scores, part, part_lse, scale, n_cmp, n_parts, merged=merged)
    else:
        decode_compressed_kernel[(n_cmp, B * G, row_tiles)](
            q, *in_cmp, scores, part, part_lse, scale, C, n_parts, in_cmp[2].stride(0),
            *q_strides, *row_strides(*in_cmp[:2]), PAGE=_page(compressed), **fixed.compressed, **tiles.options,
        )  # fmt: skip
    decode_score_kernel[(STRETCHES, B * G)](
        scores, part_lse, pos_cmp, first_cmp, best, C, n_cmp, n_parts, **fixed.score
    )
    decode_raw_kernel[(n_raw, B * G, row_tiles)](
        q, *in_sel, *in_win, best, idx, part, part_lse,
        scale, T, window.pages.n_entries, n_cmp, n_parts, in_sel[2].stride(0), in_win[2].stride(0),
        *q_strides, *row_strides(*in_sel[:2], *in_win[:2]), PAGE=_page(selected), WINDOW_PAGE=_page(window),
        **fixed.raw, **tiles.options,
    )  # fmt: skip
    return DecodeParts(part, part_lse, idx, n_cmp, n_parts)


def _launch_append(
    token: NewToken, form: TokenForm, cache: CacheView, q: Tensor, scores: Tensor | None = None,
    part: Tensor | None = None, part_lse: Tensor | None = None, scale: float = 0.0, n_parts_here: int = 1,
    n_parts: int = 1, *, geometry: Geometry, merged: bool,
) -> None:  # fmt: skip
    """Append the token and write its rotated queries to q; with `scores` and parts also attend to compressed keys."""
    B, _, G, R, K = q.shape
    compressed, selected, window = cache.compressed, cache.selected, cache.window
    V = selected.pages.v.shape[-1]
    tiles = choose("decode", max(K, V), element_size=q.dtype.itemsize)
    fixed = constants(G, R, K, V, geometry, tiles, wide=is_wide(q.dtype), merged=merged).compressed
    streams = (cache.tail, selected.pages, window.pages, compressed.pages)
    laid = [rows_contiguous(*pages) for pages in streams]
    new = [x[:, 0] for x in rows_contiguous(token.q, token.k, token.v, token.cos, token.sin)]
    phi = [*(*token.phi_k, q, q)[:2], *(*token.phi_v, q, q)[:2]]
    norms = [q if weight is None else weight for weight in (token.q_norm, token.k_norm)]
    attends = scores is not None
    parts = (scores, part, part_lse) if attends else (q, q, q)
    decode_append_kernel[(n_parts_here, B * G, triton.cdiv(R, fixed["BLOCK_M"]))](
        *new, *norms, *phi, q, *laid[0], *laid[1], *laid[2], *laid[3],
        cache.length_B, compressed.start_B1.contiguous(), *parts, scale, token.eps,
        streams[3].n_entries, *(pages.n_entries for pages in streams[:3]), n_parts,
        *(tensors[2].stride(0) for tensors in laid),
        *(row_strides(x)[0] for x in (*new, *phi)),
        *row_strides(*(x for tensors in laid for x in tensors[:2])),
        PAGE=streams[3].k.shape[2], TAIL_PAGE=streams[0].k.shape[2], TOKEN_PAGE=streams[1].k.shape[2],
        WINDOW_PAGE=streams[2].k.shape[2], **fixed,
        KEY_STREAMS=form.key_streams, VALUE_STREAMS=form.value_streams, HALF=token.cos.shape[-1],
        NORMED=token.q_norm is not None, POOLING=_POOLINGS[form.pooling].value, TURNS_ENTRIES=form.turns_entries,
        OWN_TAIL=cache.tail is not selected.pages, OWN_WINDOW=window.pages is not selected.pages,
        ATTENDS=attends, **tiles.options,
    )  # fmt: skip


def merge(
    q_B1GRK: Tensor, parts: DecodeParts, gates: Tensor | None, cache: CacheView, *, geometry: Geometry, scale: float,
    merged: bool, form: TokenForm | None = None,
) -> Tensor:  # fmt: skip
    """The branches' parts, mixed. gates: as given to `TokenDecoder.attend`; with `form` logits, and the token of the
    step is counted."""
    B, _, G, R, K = q_B1GRK.shape
    V = parts.part.shape[-1]
    out = q_B1GRK.new_empty((B, 1, G, R, V))
    kind, branches, temperature = (None, 3, 1.0) if form is None else (form.gate, form.branches, form.temperature)
    logits = parts.part if gates is None else gates.contiguous().view(B, -1)
    per_group = 1 if gates is None else logits.shape[1] // (G * branches)
    fixed = constants(G, R, K, V, geometry, choose("decode", max(K, V)), wide=False, merged=merged).merge
    decode_merge_kernel[(R, B * G)](
        parts.part, parts.part_lse, logits, out, cache.length_B, cache.n_compressed_B, cache.selected.pos_B1,
        cache.window.pos_B1, temperature, parts.n_compressed, parts.n_parts, cache.window.pages.n_entries,
        row_strides(logits)[0], GATE=_GATES[kind].value, GATES=per_group, BRANCHES=branches, COUNTS=form is not None,
        **fixed,
    )  # fmt: skip
    return out


def constants(
    G: int, R: int, K: int, V: int, geometry: Geometry, tiles: TileSizes, *, wide: bool, merged: bool = False
) -> _DecodeConstants:
    """They depend on the model alone, so that a row has the same bits in any batch and any cache."""
    l, d, l_sel, n_sel, w = geometry.ints
    parts = triton.next_power_of_2(triton.cdiv(PROGRAMS, G))
    window_parts = min(parts, triton.cdiv(w, WINDOW_PART))
    block_m = min(tiles.m, max(16, triton.next_power_of_2(R)))
    keep = triton.next_power_of_2(n_sel)
    heads = dict(G=G, R=R)
    attend = dict(**heads, **widths(K, V), BLOCK_M=block_m, BLOCK_N=tiles.n, WIDE=wide)
    back = dict(BACK=w if merged else 0)
    blocks = dict(L_SEL=l_sel, KEEP=keep, STRETCHES=STRETCHES, **back)
    v_width = split_width(V)
    return _DecodeConstants(
        compressed=dict(**attend, **back, L=l, D=d, PARTS=parts, VALUES=not merged),
        score=dict(**heads, **blocks, L=l, D=d, PARTS=parts, BLOCK_R=_HEADS_AT_ONCE, BLOCK_J=max(BLOCKS_AT_ONCE, keep)),
        raw=dict(
            **attend, **blocks, N_SEL=n_sel, W=w, WINDOW_PARTS=window_parts
        ),
        merge=dict(
            **heads, V=V, V1=v_width.main, V2=v_width.rest, N_SEL=n_sel,
            PARTS=triton.next_power_of_2(n_sel + window_parts if merged else max(parts, n_sel)),
            AT_ONCE=MERGED_AT_ONCE, ONE_BRANCH=merged, L=l, D=d,
        ),
    )  # fmt: skip


def _laid_out(keys: CachedKeys) -> tuple[Tensor, ...]:
    """Keys, values, block table, positions, starts."""
    k, v, table_BP = keys.pages
    return (*rows_contiguous(k, v, table_BP), keys.pos_B1.contiguous(), keys.start_B1.contiguous())


def _page(keys: CachedKeys) -> int:
    return keys.pages.k.shape[2]
