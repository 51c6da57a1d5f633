"""Shared helpers of selected attention: a program handles a piece of the queries that selected one window of keys.

Every row of a tile selected the window, so no product is wasted. What a query gets from a window is a partial result
in a slot of its own; a block of a packed document may lie across two windows, so a query has 2·N slots, and
windows wider than a tile of keys are cut, which makes CUTS of each. A last kernel merges a query's slots.
"""

import triton
import triton.language as tl

from nsa.kernels.triton.device.block_index import reached
from nsa.kernels.triton.device.tile import group_at


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
def keys_of(window, b, g, T, k_b, k_t, k_g, v_b, v_t, v_g, L: tl.constexpr, BLOCK_N: tl.constexpr):
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
