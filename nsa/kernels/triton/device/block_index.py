"""Kernels that build the inverse index (key block → queries that selected it): a stable, deterministic counting sort.

What is sorted are pairs: a query, and which of its N chosen blocks, as query · N + n.

The queries of a group are cut into chunks. A chunk sorts its selected blocks in registers and records where each window
begins and ends (`sort_chunks`); the counts become places (`place_chunks`, `place_windows`), and every chunk writes its
own (`fill`). A window has those whose block begins in the window before and lies across, then those whose block begins
in it, each by query.

Windows are counted by where blocks begin, from 1: 0 is for blocks that begin before the first key, in caches that
dropped old ones. Two counts come in one integer: of blocks in the lower half, of those that lie across in the upper.
"""

import triton
import triton.language as tl

from nsa.kernels.triton.device.tile import VARYING

NONE = tl.constexpr(2147483647)
"""Sorts last."""


@triton.jit
def half(BIT: tl.constexpr, LOG: tl.constexpr):
    """1 in the upper halves of runs of 2^(BIT + 1) elements, for rows as `sort_rows` holds them."""
    return tl.reshape(tl.arange(0, 2), [1] * (LOG - BIT) + [2] + [1] * BIT)


@triton.jit
def sort_rows(x, LOG: tl.constexpr):
    """Each row of 2^LOG ascending: the bitonic network of `tl.sort`, which the interpreter takes minutes for."""
    cube = tl.reshape(x, [x.shape[0]] + [2] * LOG)
    for stage in tl.static_range(1, LOG + 1):
        for i in tl.static_range(0, stage):
            other = tl.sum(cube, LOG + 1 - stage + i, keep_dims=True) - cube  # of two: the compiler sees the other one
            wants_larger = half(stage - 1 - i, LOG)
            if stage < LOG:
                wants_larger = wants_larger ^ half(stage, LOG)
            cube = tl.where((cube > other) != (wants_larger == 1), other, cube)
    return tl.reshape(cube, x.shape)


@triton.jit
def following(x, LOG: tl.constexpr):
    """Each element's next one in its row; the last one's is itself."""
    at = tl.arange(0, 2**LOG)[None, :] + tl.zeros_like(x)
    return tl.gather(x, tl.minimum(at + 1, 2**LOG - 1), 1)


@triton.jit
def reached(block, start, last, n_windows, L: tl.constexpr):
    """The counted window in which a chosen block begins (0: before the first key), if any window has it, and if it lies
    across the next one, which `last`, the last key its query may see, has to reach."""
    after = start + block * L + L  # the first key after the block
    window = after // L
    real = (block >= 0) & (after > 0) & (after < (n_windows + 1) * L)
    return window, real, real & (after % L != 0) & (window * L <= last) & (window < n_windows)


@triton.jit
def unpack(key, chunk, position, origin, b, n_windows, position_b, position_s, origin_b, origin_s,
           N: tl.constexpr, L: tl.constexpr, CHUNK: tl.constexpr, SHIFT: tl.constexpr, BITS: tl.constexpr):  # fmt: skip
    """Of sorted entries: counted window, pair, the block's first key, if it lies across; how many up to each entry."""
    real = key != NONE
    window = key >> SHIFT
    query = chunk * CHUNK + ((key & ((1 << SHIFT) - 1)) >> BITS)
    at = query.to(tl.int64)
    start = tl.load(origin + b * origin_b + at * origin_s, mask=real, other=0).to(tl.int32)
    pos = tl.load(position + b * position_b + at * position_s, mask=real, other=0).to(tl.int32)
    begin = (window - 1) * L + (start % L + L) % L
    _, _, across = reached((begin - start) // L, start, start + pos, n_windows, L)
    across = across & real
    count = tl.cumsum(1 + (across.to(tl.int32) << 16), 1)
    return window, query * N + (key & ((1 << BITS) - 1)), begin, across, count


@triton.jit(do_not_specialize=VARYING)
def sort_chunks_kernel(
    idx, position, origin, last, entries, run_begins, run_ends, S, n_chunks, n_windows,
    position_b, position_s, origin_b, origin_s,
    G: tl.constexpr, N: tl.constexpr, L: tl.constexpr,
    CHUNK: tl.constexpr, SHIFT: tl.constexpr, BITS: tl.constexpr, LOG: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """2^LOG ≥ CHUNK·N, 2^BITS ≥ N, 2^(SHIFT − BITS) ≥ CHUNK; ROWS chunks. `last`: the last key each query may see.

    `run_ends` is 0 for windows that the chunk did not choose.
    """
    bg = tl.program_id(1).to(tl.int64)
    b, g = bg // G, bg % G
    chunk = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    entry = tl.arange(0, 2**LOG)[None, :]
    turn, which = entry // N, entry % N
    query = (chunk * CHUNK + turn).to(tl.int64)
    ok = (turn < CHUNK) & (query < S)
    block = tl.load(idx + ((b * S + query) * G + g) * N + which, mask=ok, other=-1)
    start = tl.load(origin + b * origin_b + query * origin_s, mask=ok, other=0).to(tl.int32)
    once = ok & (which == 0) & (g == 0)
    pos = tl.load(position + b * position_b + query * position_s, mask=once, other=0).to(tl.int32)
    tl.store(last + b * S + query, start + pos, mask=once)
    window, real, _ = reached(block, start, 0, n_windows, L)
    key = sort_rows(tl.where(real, (window << SHIFT) | (turn << BITS) | which, NONE), LOG)
    here, exists = bg * n_chunks + chunk, chunk < n_chunks
    tl.store(entries + here * 2**LOG + entry, key, mask=exists)
    window, _, _, _, count = unpack(
        key, chunk, position, origin, b, n_windows, position_b, position_s, origin_b, origin_s, N, L, CHUNK, SHIFT, BITS
    )
    run_begins += here * (n_windows + 1)
    run_ends += here * (n_windows + 1)
    after_key = following(key, LOG)
    ends = (key != NONE) & ((window != after_key >> SHIFT) | (entry == 2**LOG - 1))
    tl.store(run_begins + window, tl.zeros_like(key), mask=(key != NONE) & (entry == 0))
    tl.store(run_ends + window, count, mask=ends)
    tl.store(run_begins + (after_key >> SHIFT), count, mask=ends & (after_key != NONE) & (entry < 2**LOG - 1))


@triton.jit(do_not_specialize=VARYING)
def place_chunks_kernel(
    run_begins, run_ends, before, totals, n_chunks, n_counted, CHUNKS: tl.constexpr, BINS: tl.constexpr
):  # fmt: skip
    """How many there are in earlier chunks, and in all: pairs (blocks, those that lie across)."""
    bg = tl.program_id(1).to(tl.int64)
    window = (tl.program_id(0) * BINS + tl.arange(0, BINS))[None, :]
    total, total_across = tl.zeros([1, BINS], tl.int32), tl.zeros([1, BINS], tl.int32)
    for first in tl.range(0, n_chunks, CHUNKS):
        chunk = (first + tl.arange(0, CHUNKS))[:, None]
        at = (bg * n_chunks + chunk) * n_counted + window
        ok = (chunk < n_chunks) & (window < n_counted)
        end = tl.load(run_ends + at, mask=ok, other=0)
        count = end - tl.load(run_begins + at, mask=end > 0, other=0)
        across = count >> 16
        count = count & 0xFFFF
        tl.store(before + at * 2, total + tl.cumsum(count, 0) - count, mask=ok)
        tl.store(before + at * 2 + 1, total_across + tl.cumsum(across, 0) - across, mask=ok)
        total += tl.sum(count, 0)[None, :]
        total_across += tl.sum(across, 0)[None, :]
    at = (bg * n_counted + window) * 2
    tl.store(totals + at, total, mask=window < n_counted)
    tl.store(totals + at + 1, total_across, mask=window < n_counted)


@triton.jit(do_not_specialize=VARYING)
def place_windows_kernel(
    totals, offsets, piece_first, n_places, n_windows, PIECE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One program: where each window's entries begin, and its pieces of at most PIECE entries."""
    n_entries, n_pieces = 0, 0
    for first in tl.range(0, n_places, BLOCK):
        place = first + tl.arange(0, BLOCK)
        ok = place < n_places
        at = (place // n_windows * (n_windows + 1) + place % n_windows) * 2  # of the window before
        count = tl.load(totals + at + 1, mask=ok, other=0) + tl.load(totals + at + 2, mask=ok, other=0)
        pieces = (count + PIECE - 1) // PIECE
        tl.store(offsets + place, n_entries + tl.cumsum(count, 0) - count, mask=ok)
        tl.store(piece_first + place, n_pieces + tl.cumsum(pieces, 0) - pieces, mask=ok)
        n_entries += tl.sum(count)
        n_pieces += tl.sum(pieces)
    tl.store(offsets + n_places, n_entries)
    tl.store(piece_first + n_places, n_pieces)


@triton.jit(do_not_specialize=VARYING)
def fill_kernel(
    entries, run_begins, before, totals, offsets, position, origin, pairs, begins, n_chunks, n_windows,
    position_b, position_s, origin_b, origin_s,
    G: tl.constexpr, N: tl.constexpr, L: tl.constexpr,
    CHUNK: tl.constexpr, SHIFT: tl.constexpr, BITS: tl.constexpr, LOG: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    bg = tl.program_id(1).to(tl.int64)
    chunk = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    here = bg * n_chunks + chunk
    key = tl.load(entries + here * 2**LOG + tl.arange(0, 2**LOG)[None, :], mask=chunk < n_chunks, other=NONE)
    window, pair, begin, across, count = unpack(
        key, chunk, position, origin, bg // G, n_windows, position_b, position_s, origin_b, origin_s,
        N, L, CHUNK, SHIFT, BITS,
    )  # fmt: skip
    mine = (key != NONE) & (window > 0)
    at = here * (n_windows + 1) + window
    rank = count - tl.load(run_begins + at, mask=key != NONE, other=0)
    place = bg * n_windows + window
    before_it = tl.load(totals + (bg * (n_windows + 1) + window - 1) * 2 + 1, mask=mine, other=0)
    to = tl.load(offsets + place - 1, mask=mine, other=0) + before_it + (rank & 0xFFFF) - 1
    to += tl.load(before + at * 2, mask=mine, other=0)
    tl.store(pairs + to, pair, mask=mine)
    tl.store(begins + to, begin, mask=mine)
    to = tl.load(offsets + place, mask=across, other=0) + (rank >> 16) - 1
    to += tl.load(before + at * 2 + 1, mask=across, other=0)
    tl.store(pairs + to, pair, mask=across)
    tl.store(begins + to, begin, mask=across)


@triton.jit(do_not_specialize=VARYING)
def find_pieces_kernel(piece_first, piece_window, n_places, n_pieces, steps, BLOCK: tl.constexpr):
    """The window of each piece, by bisection; n_places for pieces that are not needed."""
    piece = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low, high = tl.zeros([BLOCK], tl.int32), tl.full([BLOCK], 0, tl.int32) + n_places
    for _ in tl.range(0, steps):  # the first window whose successor begins after the piece
        middle = (low + high) // 2
        inside = (piece < n_pieces) & (middle < n_places)
        after = tl.load(piece_first + middle + 1, mask=inside, other=2147483647) > piece
        low, high = tl.where(after, low, middle + 1), tl.where(after, middle, high)
    tl.store(piece_window + piece, tl.minimum(low, n_places), mask=piece < n_pieces)
