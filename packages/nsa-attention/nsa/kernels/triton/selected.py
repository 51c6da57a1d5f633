"""Selected attention, forward: one window of keys at a time for the queries that selected it; then slots are merged.

A program handles a piece of the queries that selected one window of keys. Every row of a tile selected the window, so
no product is wasted. What a query gets from a window is a partial result in a slot of its own; a block of a packed
document may lie across two windows, so a query has 2·N slots, and windows wider than a tile of keys are cut, which
makes CUTS of each. A last kernel merges a query's slots. Slots are 2·N times as large as an output: too large for all
of a long row, so they are reused by spans of its queries.

The loop carries nothing from one tile of queries to the next, and its only loads are unconditional: a branch around
them would cost the software pipeline. Log-sum-exps of slots are in base 2. Shapes as in `nsa.kernels.reference`.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.kernels.interface import BranchInputs
from nsa.kernels.triton import QUERIES_OF_SLOTS, SLOT_BYTES, block_index
from nsa.kernels.triton.autotune import Work, tuned
from nsa.kernels.triton.block_index import BlockIndex, build_block_index, reached
from nsa.kernels.triton.launch import Launch, launch, launch_all, planned
from nsa.kernels.triton.tile import (
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
    row_strides,
    rows_contiguous,
    store_both,
    store_rows,
    zeros_both,
)
from nsa.kernels.triton.tuning import TileSizes, choose, is_wide, split_width, widths


@triton.jit
def piece_of(offsets, piece_window, piece_first, n_windows, n_groups_all, PIECE: tl.constexpr):
    """This program's batch · groups + group, window, and entries [first, end); none for a piece that is not needed."""
    piece = tl.program_id(0)
    place = tl.load(piece_window + piece)
    needed = place < n_groups_all * n_windows
    place = tl.where(needed, place, 0)
    first = tl.load(offsets + place) + (piece - tl.load(piece_first + place)) * PIECE
    first = tl.where(needed, first, 0)  # or it would count pieces that are not needed: rows of 2M tokens have billions
    end = tl.minimum(first + PIECE, tl.load(offsets + place + 1))
    return place // n_windows, place % n_windows, first, tl.where(needed, end, first), needed


@triton.jit
def window_keys(window, b, g, T, k_b, k_t, k_g, v_b, v_t, v_g, L: tl.constexpr, BLOCK_N: tl.constexpr):
    """This program's cut of the window: places in it, keys on the axis, which of them there are, and their rows."""
    step = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = window * L + step
    inside = (step < L) & (at < T)
    k_at = group_at(b, g, k_b, k_g) + at.to(tl.int64) * k_t
    v_at = group_at(b, g, v_b, v_g) + at.to(tl.int64) * v_t
    return step, at, inside, k_at, v_at


@triton.jit
def ends_of(begin, last, window, L: tl.constexpr):
    """The last key of the window that each row sees: of its block, of its past, and of the window itself."""
    return tl.minimum(tl.minimum(begin + (L - 1), last), window * L + (L - 1))


@triton.jit
def rows_to_mask(pairs, begins, last, first, end, window, b, S, T, R: tl.constexpr, N: tl.constexpr, L: tl.constexpr,
                 BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SCAN: tl.constexpr):  # fmt: skip
    """The end of the tiles of rows that need masks: after the last entry that does not see every key of this cut.

    Queries of a window are in order, so that those inside of it, which see a part of it, come first.
    """
    key = window * L + tl.program_id(1) * BLOCK_N
    key_end = key + BLOCK_N
    masked = tl.where(key_end <= T, first, end)
    for n in tl.range(first, end, SCAN, num_stages=1):
        entry = n + tl.arange(0, SCAN)
        ok = entry < end
        begin = tl.load(begins + entry, mask=ok, other=0)
        query = (tl.load(pairs + entry, mask=ok, other=0) // N).to(tl.int64)
        stop = ends_of(begin, tl.load(last + b * S + query, mask=ok, other=-1), window, L)
        partly = ok & ((begin > key) | (stop < key_end - 1))
        masked = tl.maximum(masked, tl.max(tl.where(partly, entry + 1, 0)))
    return tl.minimum(first * R + tl.cdiv((masked - first) * R, BLOCK_M) * BLOCK_M, end * R)


@triton.jit
def readers_of(pairs, begins, m, end, window, R: tl.constexpr, N: tl.constexpr, L: tl.constexpr, BLOCK_M: tl.constexpr):
    """Query heads of a tile of entries, from row m on: query, head, which of them exist, the slot of what each gets
    here, and the first key of its block."""
    row = m + tl.arange(0, BLOCK_M)
    entry, head, ok = row // R, row % R, row < end * R
    pair = tl.load(pairs + entry, mask=ok, other=0)
    begin = tl.load(begins + entry, mask=ok, other=0)
    query, here = (pair // N).to(tl.int64), pair % N * 2 + (begin < window * L).to(tl.int32)
    return query, head, ok, here, begin


@triton.jit
def slots_of(idx, last, origin, b, g, query, ok, n, S, n_windows, origin_b, origin_s,
             G: tl.constexpr, N: tl.constexpr, L: tl.constexpr):  # fmt: skip
    """Where the two slots of each query's n-th block are, and which of them were written."""
    at = ((b * S + query) * G + g) * N + n
    block = tl.load(idx + at, mask=ok, other=-1)
    start = tl.load(origin + b * origin_b + query * origin_s, mask=ok, other=0).to(tl.int32)
    end = tl.load(last + b * S + query, mask=ok, other=-1)
    window, real, across = reached(block, start, end, n_windows, L)
    return at * 2, real & (window > 0), across


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
    _, at, inside, k_at, v_at = window_keys(window, b, g, T, k_b, k_t, k_g, v_b, v_t, v_g, L, BLOCK_N)
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


@planned
def selected_forward(x: BranchInputs) -> tuple[Tensor, Tensor]:
    l_sel = x.geometry.l_sel
    B, S, G, R, K = x.q_BSGRK.shape
    q, k, v = rows_contiguous(x.q_BSGRK, x.k_BTGK, x.v_BTGV)
    (T, V), N = (v.shape[1], v.shape[-1]), x.chosen_BSGN.shape[-1]
    n_windows = triton.cdiv(T, l_sel)
    out = q.new_empty((B, S, G, R, V))
    lse = q.new_empty((B, S, G, R), dtype=torch.float32)
    for some in spans("selected_forward", q, N, l_sel, V, max(K, V)):
        queries, idx, start = q[:, some], x.chosen_BSGN[:, some].contiguous(), x.start_BS[:, some]
        index = build_block_index(idx, x.pos_BS[:, some], start, l_sel, T)
        work = _windows_forward(queries, k, v, index, N, l_sel, x.scale)
        launch_all(work.launches)
        slots, levels = work.results
        launch(
            merge_slots_kernel, (triton.cdiv(queries.shape[1] * R, rows_of(V)), B * G),
            idx, index.last_BS, start, slots, levels, out[:, some], lse[:, some], queries.shape[1], S, n_windows,
            *start.stride(), G=G, R=R, **columns("V", V), N=N, L=l_sel, CUTS=slots.shape[4], BLOCK_M=rows_of(V),
        )  # fmt: skip
    return out, lse


def _windows_forward(
    q_BSGRK: Tensor, k_BTGK: Tensor, v_BTGV: Tensor, index: BlockIndex, n_sel: int, l_sel: int, scale: float
) -> Work:
    """Partial result of each query and block, [B, S, G, slots, cuts, R, V], with its log-sum-exp in base 2."""
    B, S, G, R, K = q_BSGRK.shape
    (T, V), q, k, v = (v_BTGV.shape[1], v_BTGV.shape[-1]), q_BSGRK, k_BTGK, v_BTGV

    def prepare(tiles: TileSizes) -> Work:
        keys, cuts = keys_of(tiles, l_sel)
        slots = q.new_empty((B, S, G, 2 * n_sel, cuts, R, V))
        levels = q.new_empty(slots.shape[:-1], dtype=torch.float32)
        sizes = (scale, S, T, triton.cdiv(T, l_sel), B * G, *row_strides(q, k, v))
        arguments = (q, k, v, index.last_BS, *index.by_piece, slots, levels, *sizes)
        constants = dict(
            G=G, R=R, **widths(K, V), N=n_sel, L=l_sel, PIECE=block_index.PIECE, BLOCK_M=tiles.m, BLOCK_N=keys,
            WIDE=is_wide(q.dtype), **tiles.options,
        )  # fmt: skip
        return Work([Launch(selected_forward_kernel, (index.n_pieces, cuts), arguments, constants)], (slots, levels))

    return tuned("selected_forward", q, V, prepare, l_sel=l_sel, n_sel=n_sel)


def spans(kernel: str, q_BSGRK: Tensor, n_sel: int, l_sel: int, width: int, widest: int) -> Iterator[slice]:
    """Queries whose slots, rows of `width`, fit in the memory they may take, in equal numbers."""
    B, S, G, R, K = q_BSGRK.shape
    _, cuts = keys_of(choose(kernel, widest, element_size=q_BSGRK.dtype.itemsize), l_sel)
    heads = B * G * R * q_BSGRK.dtype.itemsize
    length = span_of(S, heads * K, heads * width * 2 * n_sel * cuts)
    return (slice(first, min(first + length, S)) for first in range(0, S, length))


def span_of(n_queries: int, bytes_per_query: int, slot_bytes_per_query: int) -> int:
    """A multiple of 16, so that a span is aligned like the whole."""
    allowed = max(SLOT_BYTES, QUERIES_OF_SLOTS * n_queries * bytes_per_query)
    n_spans = max(1, triton.cdiv(n_queries * slot_bytes_per_query, allowed))
    return max(1, triton.cdiv(triton.cdiv(n_queries, n_spans), 16)) * 16


def keys_of(tiles: TileSizes, l_sel: int) -> tuple[int, int]:
    """Keys of a tile, a whole block or a cut of a long one, and how many cuts that makes."""
    keys = min(tiles.n, block_of(l_sel))
    return keys, triton.cdiv(l_sel, keys)


def rows_of(width: int) -> int:
    """Query heads of a program that merges slots, rows of `width`."""
    return 64 if width <= 64 else 32


def block_of(l_sel: int) -> int:
    return max(16, triton.next_power_of_2(l_sel))


def columns(name: str, width: int) -> dict[str, int]:
    n, main, rest = split_width(width)
    return {name: n, f"{name}1": main, f"{name}2": rest}
