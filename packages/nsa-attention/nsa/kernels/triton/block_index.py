"""Kernels that build the inverse index (key block → queries that selected it): a stable, deterministic counting sort.

What is sorted are pairs: a query, and which of its N chosen blocks, as query · N + n.

The queries of a group are cut into chunks, and a few chunks make a run, which one program takes in turn. A chunk sorts
its selected blocks in registers, and each gets its rank among those of the same window in its run (`sort_chunks`). The
runs' counts of each window become places (`place_chunks`, `place_windows`), and every chunk writes
its own (`fill`). A window has those whose block begins in the window before and lies across, then those whose block
begins in it, each by query. Counts take memory for runs × windows: the longer the row, the more chunks make a run.

Queries are taken in spans, which are whole runs (`nsa.kernels.triton.selected`): each span has places of its own for
every window, the first span's before the second's, so that one index serves all of them.

Windows are counted by where blocks begin, from 1: 0 is for blocks that begin before the first key, in caches that
dropped old ones. Two counts come in one integer: of blocks in the lower half, of those that lie across in the upper.

A window is l_sel keys on the absolute axis; a block of a packed document may lie across two. Where a row is one
document, windows are its blocks: their axis begins up to l_sel − 1 places before the first key (`axis_shift`), and what
is stored of keys is on that axis. Every key belongs to one window. What is sorted are integers of 31 bits that name the
window, the query within its chunk, and which of its blocks: for blocks of 64, of which 16 are chosen, rows are shorter
than 2^27 tokens.

B batch · S queries · T keys · G kv groups · N chosen blocks · W windows
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.kernels.triton import PIECE
from nsa.kernels.triton.launch import launch
from nsa.kernels.triton.tile import VARYING, ceil_div, length_of, parts_of

_NONE = tl.constexpr(2147483647)
"""Sorts last."""


@triton.jit
def half(BIT: tl.constexpr, LOG: tl.constexpr):
    """1 in the upper halves of runs of 2^(BIT + 1) elements, for rows as `_sort_rows` holds them."""
    return tl.reshape(tl.arange(0, 2), [1] * (LOG - BIT) + [2] + [1] * BIT)


@triton.jit
def _sort_rows(x, LOG: tl.constexpr):
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
def axis_shift(start, n_sides, L: tl.constexpr):
    """Places between the beginning of the windows' axis and the first key. `n_sides`: windows that a block may lie in:
    2, or 1 where each row is one document."""
    return tl.where(n_sides == 1, (L - (start % L + L) % L) % L, 0)


@triton.jit
def reached(block, start, last, n_windows, L: tl.constexpr):
    """The counted window in which a chosen block begins (0: before the first key), if any window has it, and if it lies
    across the next one, which `last`, the last key its query may see, has to reach."""
    after = start + block * L + L  # the first key after the block
    window = after // L
    real = (block >= 0) & (after > 0) & (after < (n_windows + 1) * L)
    return window, real, real & (after % L != 0) & (window * L <= last) & (window < n_windows)


@triton.jit
def unpack(key, chunk, position, origin, b, n_windows, n_sides, position_b, position_s, origin_b, origin_s,
           N: tl.constexpr, L: tl.constexpr, CHUNK: tl.constexpr, SHIFT: tl.constexpr, BITS: tl.constexpr):  # fmt: skip
    """Sorted entries: counted window, pair, the block's first key, if it lies across; how many up to each entry.

    Where windows are blocks, the first key that there is."""
    real = key != _NONE
    window = key >> SHIFT
    query = chunk * CHUNK + ((key & ((1 << SHIFT) - 1)) >> BITS)
    at = query.to(tl.int64)
    start = tl.load(origin + b * origin_b + at * origin_s, mask=real, other=0).to(tl.int32)
    shift = axis_shift(start, n_sides, L)
    start += shift
    pos = tl.load(position + b * position_b + at * position_s, mask=real, other=0).to(tl.int32)
    begin = (window - 1) * L + (start % L + L) % L
    _, _, across = reached((begin - start) // L, start, start + pos, n_windows, L)
    across = across & real
    begin = tl.where(n_sides == 1, tl.maximum(begin, shift), begin)
    count = tl.cumsum(1 + (across.to(tl.int32) << 16), 1)
    return window, query * N + (key & ((1 << BITS) - 1)), begin, across, count


@triton.jit
def _sort_chunk(
    chunk, entry, bg, idx, position, origin, last, entries, ranks, S, n_chunks, n_windows, n_sides,
    position_b, position_s, origin_b, origin_s,
    G: tl.constexpr, N: tl.constexpr, L: tl.constexpr,
    CHUNK: tl.constexpr, SHIFT: tl.constexpr, BITS: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    """`ranks` gets how many entries, and how many that lie across, there are in the chunk up to each one."""
    b, g = bg // G, bg % G
    turn, which = entry // N, entry % N
    query = (chunk * CHUNK + turn).to(tl.int64)
    ok = (turn < CHUNK) & (query < S)
    block = tl.load(idx + ((b * S + query) * G + g) * N + which, mask=ok, other=-1)
    start = tl.load(origin + b * origin_b + query * origin_s, mask=ok, other=0).to(tl.int32)
    start += axis_shift(start, n_sides, L)
    once = ok & (which == 0) & (g == 0)
    pos = tl.load(position + b * position_b + query * position_s, mask=once, other=0).to(tl.int32)
    tl.store(last + b * S + query, start + pos, mask=once)
    window, real, _ = reached(block, start, 0, n_windows, L)
    key = _sort_rows(tl.where(real, (window << SHIFT) | (turn << BITS) | which, _NONE), LOG)
    _, _, _, _, count = unpack(
        key, chunk, position, origin, b, n_windows, n_sides, position_b, position_s, origin_b, origin_s,
        N, L, CHUNK, SHIFT, BITS,
    )  # fmt: skip
    at = (bg * n_chunks + chunk) * 2**LOG + entry
    tl.store(entries + at, key, mask=chunk < n_chunks)
    tl.store(ranks + at, count, mask=chunk < n_chunks)


@triton.jit(do_not_specialize=VARYING)
def sort_chunks_kernel(
    idx, position, origin, last, entries, ranks, counts, S, n_chunks, run_length, n_windows, n_sides,
    position_b, position_s, origin_b, origin_s,
    G: tl.constexpr, N: tl.constexpr, L: tl.constexpr,
    CHUNK: tl.constexpr, SHIFT: tl.constexpr, BITS: tl.constexpr, LOG: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """2^LOG ≥ CHUNK·N, 2^BITS ≥ N, 2^(SHIFT − BITS) ≥ CHUNK. `last`: the last key each query may see.

    ROWS runs of `run_length` chunks: the rank of each entry among those of its window in the run, from 1, and how
    many each window has. Neighbours meet, and chunks hand the counts on, through memory that only this program uses:
    barriers separate its reads and writes."""
    bg = tl.program_id(1).to(tl.int64)
    run = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    n_runs = tl.cdiv(n_chunks, run_length)
    entry = tl.arange(0, 2**LOG)[None, :]
    counts += (bg * n_runs + run) * (n_windows + 1)
    for w in tl.range(0, n_windows + 1, 2**LOG):
        none = tl.zeros([ROWS, 2**LOG], tl.int32)
        tl.store(counts + (w + entry), none, mask=(run < n_runs) & (w + entry <= n_windows))
    for i in tl.range(0, run_length):
        chunk = run * run_length + i
        _sort_chunk(
            chunk, entry, bg, idx, position, origin, last, entries, ranks, S, n_chunks, n_windows, n_sides,
            position_b, position_s, origin_b, origin_s, G, N, L, CHUNK, SHIFT, BITS, LOG,
        )  # fmt: skip
        tl.debug_barrier()
        at, exists = (bg * n_chunks + chunk) * 2**LOG + entry, chunk < n_chunks
        key = tl.load(entries + at, mask=exists, other=_NONE)
        before = tl.load(entries + at - 1, mask=exists & (entry > 0), other=-1)
        after = tl.load(entries + at + 1, mask=exists & (entry < 2**LOG - 1), other=-1)
        count = tl.load(ranks + at, mask=exists, other=0)
        count_before = tl.load(ranks + at - 1, mask=exists & (entry > 0), other=0)
        window, real = key >> SHIFT, key != _NONE
        begins, ends = real & (before >> SHIFT != window), real & (after >> SHIFT != window)
        tl.debug_barrier()
        # The window's earlier entries are added to the count, those of other windows in the chunk are taken away.
        base = tl.load(counts + window, mask=begins, other=0) - count_before
        tl.store(counts + window, base, mask=begins)
        tl.debug_barrier()
        rank = tl.load(counts + window, mask=real, other=0) + count
        tl.debug_barrier()
        tl.store(counts + window, rank, mask=ends)
        tl.store(ranks + at, rank, mask=exists)


@triton.jit(do_not_specialize=VARYING)
def place_chunks_kernel(
    counts, before, totals, n_runs, runs_per_span, n_counted, RUNS: tl.constexpr, BINS: tl.constexpr
):  # fmt: skip
    """How many there are in earlier runs of a span, and in all of it: pairs (blocks, those that lie across)."""
    bg, span = tl.program_id(1).to(tl.int64), tl.program_id(2)
    window = (tl.program_id(0) * BINS + tl.arange(0, BINS))[None, :]
    total, total_across = tl.zeros([1, BINS], tl.int32), tl.zeros([1, BINS], tl.int32)
    end = tl.minimum((span + 1) * runs_per_span, n_runs)
    for first in tl.range(span * runs_per_span, end, RUNS):
        run = (first + tl.arange(0, RUNS))[:, None]
        at = (bg * n_runs + run) * n_counted + window
        ok = (run < end) & (window < n_counted)
        count = tl.load(counts + at, mask=ok, other=0)
        across = count >> 16
        count = count & 0xFFFF
        tl.store(before + at * 2, total + tl.cumsum(count, 0) - count, mask=ok)
        tl.store(before + at * 2 + 1, total_across + tl.cumsum(across, 0) - across, mask=ok)
        total += tl.sum(count, 0)[None, :]
        total_across += tl.sum(across, 0)[None, :]
    at = ((span * tl.num_programs(1) + bg) * n_counted + window) * 2
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
        at = ((place // n_windows).to(tl.int64) * (n_windows + 1) + place % n_windows) * 2  # of the window before
        count = tl.load(totals + at + 1, mask=ok, other=0) + tl.load(totals + at + 2, mask=ok, other=0)
        pieces = (count + PIECE - 1) // PIECE
        tl.store(offsets + place, n_entries + tl.cumsum(count, 0) - count, mask=ok)
        tl.store(piece_first + place, n_pieces + tl.cumsum(pieces, 0) - pieces, mask=ok)
        n_entries += tl.sum(count)
        n_pieces += tl.sum(pieces)
    tl.store(offsets + n_places, n_entries)
    tl.store(piece_first + n_places, n_pieces)


@triton.jit
def fill(
    entries, ranks, before, totals, offsets, position, origin, pairs, begins,
    n_chunks, run_length, runs_per_span, n_windows, n_sides, position_b, position_s, origin_b, origin_s,
    G: tl.constexpr, N: tl.constexpr, L: tl.constexpr,
    CHUNK: tl.constexpr, SHIFT: tl.constexpr, BITS: tl.constexpr, LOG: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The entries of ROWS chunks, each to its place among all."""
    bg = tl.program_id(1).to(tl.int64)
    chunk = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    at = (bg * n_chunks + chunk) * 2**LOG + tl.arange(0, 2**LOG)[None, :]
    key = tl.load(entries + at, mask=chunk < n_chunks, other=_NONE)
    rank = tl.load(ranks + at, mask=chunk < n_chunks, other=0)
    window, pair, begin, across, _ = unpack(
        key, chunk, position, origin, bg // G, n_windows, n_sides, position_b, position_s, origin_b, origin_s,
        N, L, CHUNK, SHIFT, BITS,
    )  # fmt: skip
    mine = (key != _NONE) & (window > 0)
    run = chunk // run_length
    at = (bg * tl.cdiv(n_chunks, run_length) + run) * (n_windows + 1) + window
    row = run // runs_per_span * tl.num_programs(1) + bg
    place = row * n_windows + window
    before_it = tl.load(totals + (row * (n_windows + 1) + window - 1) * 2 + 1, mask=mine, other=0)
    to = tl.load(offsets + place - 1, mask=mine, other=0) + before_it + (rank & 0xFFFF) - 1
    to += tl.load(before + at * 2, mask=mine, other=0)
    tl.store(pairs + to, pair, mask=mine)
    tl.store(begins + to, begin, mask=mine)
    to = tl.load(offsets + place, mask=across, other=0) + (rank >> 16) - 1
    to += tl.load(before + at * 2 + 1, mask=across, other=0)
    tl.store(pairs + to, pair, mask=across)
    tl.store(begins + to, begin, mask=across)


@triton.jit
def _find_pieces(block, piece_first, piece_window, n_places, n_pieces, steps, BLOCK: tl.constexpr):
    """The window of each of BLOCK pieces, by bisection; n_places for pieces that are not needed."""
    piece = block * BLOCK + tl.arange(0, BLOCK)
    low, high = tl.zeros([BLOCK], tl.int32), tl.full([BLOCK], 0, tl.int32) + n_places
    for _ in tl.range(0, steps):  # the first window whose successor begins after the piece
        middle = (low + high) // 2
        inside = (piece < n_pieces) & (middle < n_places)
        after = tl.load(piece_first + middle + 1, mask=inside, other=2147483647) > piece
        low, high = tl.where(after, low, middle + 1), tl.where(after, middle, high)
    tl.store(piece_window + piece, tl.minimum(low, n_places), mask=piece < n_pieces)


@triton.jit(do_not_specialize=VARYING)
def fill_kernel(
    entries, ranks, before, totals, offsets, piece_first, position, origin, pairs, begins, piece_window,
    n_chunks, run_length, runs_per_span, n_windows, n_sides, n_places, n_pieces, steps,
    position_b, position_s, origin_b, origin_s,
    G: tl.constexpr, N: tl.constexpr, L: tl.constexpr,
    CHUNK: tl.constexpr, SHIFT: tl.constexpr, BITS: tl.constexpr, LOG: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Programs past the chunks find the windows of pieces: nothing that follows needs the one without the other."""
    later = tl.program_id(0) - tl.cdiv(n_chunks, ROWS)
    if later < 0:
        fill(
            entries, ranks, before, totals, offsets, position, origin, pairs, begins,
            n_chunks, run_length, runs_per_span, n_windows, n_sides, position_b, position_s, origin_b, origin_s,
            G, N, L, CHUNK, SHIFT, BITS, LOG, ROWS,
        )  # fmt: skip
    else:
        block = later * tl.num_programs(1) + tl.program_id(1)
        _find_pieces(block, piece_first, piece_window, n_places, n_pieces, steps, BLOCK)


_MOST_SORTED = 1024
"""Entries that a chunk of queries sorts in registers."""
WINDOWS_PER_CHUNK = 2048
"""Windows counted for each chunk of a run: three integers each, so that counts take memory in proportion to the chosen
blocks (six integers for each of them), not to queries × windows."""


class IndexSizes(NamedTuple):
    """Numbers that follow from the form of a selected branch's inputs."""

    B: int
    S: int
    G: int
    N: int
    L: int
    n_keys: int
    n_sides: int
    """Windows that a block may lie in, and slots of a chosen block: 2, or 1 where each row is one document."""
    span: int
    """Queries of each row in a span; the last span may have fewer."""

    @property
    def n_windows(self) -> int:
        """Windows of a row; one more where the axis may begin before the first key."""
        return ceil_div(self.n_keys, self.L) + (self.n_sides == 1)

    @property
    def n_spans(self) -> int:
        return ceil_div(self.S, self.span)

    @property
    def places_of_span(self) -> int:
        return self.B * self.G * self.n_windows

    @property
    def pieces_of_span(self) -> int:
        """The most pieces that a span has."""
        return self._entries(self.span) // PIECE + self.places_of_span

    @property
    def lengths(self) -> tuple[int, ...]:
        """Numbers in each tensor of a `BlockIndex`."""
        entries, places = self._entries(self.S), self.n_spans * self.places_of_span
        return entries, entries, places + 1, places + 1, entries // PIECE + places, self.B * self.S

    @property
    def length(self) -> int:
        """Numbers in all of them."""
        return length_of(self.lengths)

    def _entries(self, n_queries: int) -> int:
        return self.n_sides * self.B * n_queries * self.G * self.N

    def index_in(self, memory: Tensor) -> "BlockIndex":
        """The index that this memory holds."""
        return BlockIndex(memory, *parts_of(memory, self.lengths))


class BlockIndex(NamedTuple):
    memory: Tensor
    """All of them, int32."""
    pair: Tensor
    """query · N + n, by (span, batch, group, window); in a window those whose block begins before it, then the others,
    by query."""
    begin: Tensor
    """First key of the block by which each of them got here."""
    offset: Tensor
    """Where each (span, batch, group, window) begins in them, and the end."""
    piece_first: Tensor
    """Where each window's pieces of at most PIECE entries begin, and the end."""
    piece_window: Tensor
    """The (span, batch, group, window) of each piece; their number for pieces that are not needed."""
    last: Tensor
    """The last key each query may see: [B · S]."""

    @property
    def by_piece(self) -> tuple[Tensor, ...]:
        """As the kernels of pieces take them."""
        return self.pair, self.begin, self.offset, self.piece_window, self.piece_first


def _sorted_sizes(n: int) -> dict[str, int]:
    """A program sorts one row; when interpreted, several, because every operation takes its time there."""
    return dict(LOG=max(1, (n - 1).bit_length()), ROWS=8 if triton.knobs.runtime.interpret else 1)


def sorting_warps(sizes: dict[str, int]) -> int:
    """A warp holds 256 entries, 8 per lane."""
    return max(1, 2 ** sizes["LOG"] // 256)


def index_sizes(
    shape: Sequence[int], n_sides: int, l_sel: int, n_keys: int, most_queries: int | None = None
) -> IndexSizes:
    """Sizes for chosen blocks of this shape, [B, S, G, N]; `most_queries`: of a row in a span, all by default."""
    B, S, G, N = shape
    whole = IndexSizes(B, S, G, N, l_sel, n_keys, n_sides, max(1, S))
    if most_queries is None or most_queries >= S:
        return whole
    run = chunk_sizes(N, l_sel)["CHUNK"] * _run_length(whole)
    return whole._replace(span=max(1, most_queries // run) * run)


def _run_length(sizes: IndexSizes) -> int:
    """Chunks of a run."""
    return ceil_div(sizes.n_windows + 1, WINDOWS_PER_CHUNK)


def build_block_index(
    idx_BSGN: Tensor, pos_BS: Tensor, start_BS: Tensor, sizes: IndexSizes, memory: Tensor | None = None
) -> BlockIndex:
    """`memory`: where to put it, int32."""
    idx, n_windows, groups = idx_BSGN.contiguous(), sizes.n_windows, sizes.B * sizes.G
    index = sizes.index_in(_new_index(idx, sizes.length) if memory is None else memory)
    chunks = chunk_sizes(sizes.N, sizes.L)
    assert (n_windows + 1) << chunks["SHIFT"] < 2**31, "too many keys for integers that name window, query and block"
    assert index.pair.numel() < 2**31, "too many chosen blocks for integers that count them"
    warps, n_chunks = sorting_warps(chunks), triton.cdiv(sizes.S, chunks["CHUNK"])
    n_places, n_pieces = sizes.n_spans * sizes.places_of_span, index.piece_window.numel()
    run_length = _run_length(sizes)
    assert run_length * chunks["CHUNK"] < 2**15, "too many queries in a run for counts of 15 bits"
    n_runs = triton.cdiv(n_chunks, run_length)
    runs_per_span = triton.cdiv(sizes.span, chunks["CHUNK"] * run_length)
    entries, ranks = (_new_index(idx, groups, n_chunks, 2 ** chunks["LOG"]) for _ in range(2))
    counts, before = (_new_index(idx, groups, n_runs, n_windows + 1, n) for n in (1, 2))
    totals = _new_index(idx, sizes.n_spans * groups, n_windows + 1, 2)
    where = (*pos_BS.stride(), *start_BS.stride())
    of_chunks = dict(G=sizes.G, **chunks, num_warps=warps)
    blocks, steps = triton.cdiv(n_chunks, chunks["ROWS"]), (n_places + 1).bit_length()
    launch(
        sort_chunks_kernel, (triton.cdiv(n_runs, chunks["ROWS"]), groups),
        idx, pos_BS, start_BS, index.last, entries, ranks, counts, sizes.S, n_chunks, run_length, n_windows,
        sizes.n_sides, *where, **of_chunks,
    )  # fmt: skip
    launch(
        place_chunks_kernel, (triton.cdiv(n_windows + 1, BINS), groups, sizes.n_spans),
        counts, before, totals, n_runs, runs_per_span, n_windows + 1, RUNS=RUNS, BINS=BINS,
    )  # fmt: skip
    launch(
        place_windows_kernel, (1,),
        totals, index.offset, index.piece_first, n_places, n_windows, PIECE=PIECE, BLOCK=PLACES
    )  # fmt: skip
    launch(
        fill_kernel, (blocks + triton.cdiv(triton.cdiv(n_pieces, PLACES), groups), groups),
        entries, ranks, before, totals, index.offset, index.piece_first, pos_BS, start_BS,
        index.pair, index.begin, index.piece_window,
        n_chunks, run_length, runs_per_span, n_windows, sizes.n_sides, n_places, n_pieces, steps, *where,
        **of_chunks, BLOCK=PLACES,
    )  # fmt: skip
    return index


RUNS, BINS, PLACES = 64, 32, 1024


def chunk_sizes(n_sel: int, l_sel: int) -> dict[str, int]:
    """Queries of a chunk; few when interpreted, so that short rows have several."""
    most = 32 if triton.knobs.runtime.interpret else 128
    chunk = max(1, min(most, _MOST_SORTED // triton.next_power_of_2(n_sel)))
    bits = (n_sel - 1).bit_length()
    shift = bits + (chunk - 1).bit_length()
    return dict(N=n_sel, L=l_sel, CHUNK=chunk, SHIFT=shift, BITS=bits, **_sorted_sizes(chunk * n_sel))


def _new_index(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32, device=like.device)
