"""Selected attention, forward: one window of keys at a time for the queries that selected it; then slots are merged.

A program handles a piece of the queries that selected one window of keys. Every row of a tile selected the window, so
no product is wasted. What a query gets from a window is a partial result in a slot of its own. A query has N slots, or
2·N where a block of a packed document may lie across two windows, and windows wider than a tile of keys are cut, which
makes CUTS of each. A last kernel merges a query's slots. Slots are N or 2·N times as large as an output: too large for
all of a long row, so they are reused by spans of its queries.

The loop carries nothing from one tile of queries to the next, and its only loads are unconditional: a branch around
them would cost the software pipeline. Log-sum-exps of slots are in base 2. Shapes as in `nsa.kernels.reference`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.kernels.interface import BranchInputs, is_one_document
from nsa.kernels.triton import QUERIES_OF_SLOTS, SLOT_BYTES, block_index
from nsa.kernels.triton.autotune import Work, tuned
from nsa.kernels.triton.block_index import (
    BlockIndex,
    IndexSizes,
    axis_shift,
    build_block_index,
    index_sizes,
    reached,
)
from nsa.kernels.triton.launch import Launch, launch, launch_all, planned
from nsa.kernels.triton.mix import load_gates
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
    narrowed,
    rounded,
    row_strides,
    rows_contiguous,
    store_both,
    store_rows,
    zeros_both,
)
from nsa.kernels.triton.tuning import TileSizes, choose, is_wide, split_width, widths


@triton.jit
def piece_of(offsets, piece_window, piece_first, first_place, n_windows, n_groups_all, PIECE: tl.constexpr):
    """This program's batch · groups + group, window, and entries [first, end); none for a piece that is not needed.
    `first_place`: of the span of queries."""
    piece = tl.program_id(0) + tl.load(piece_first + first_place)
    place = tl.load(piece_window + piece)
    needed = place < first_place + n_groups_all * n_windows
    place = tl.where(needed, place, first_place)
    first = tl.load(offsets + place) + (piece - tl.load(piece_first + place)) * PIECE
    first = tl.where(needed, first, 0)  # or it would count pieces that are not needed: rows of 2M tokens have billions
    end = tl.minimum(first + PIECE, tl.load(offsets + place + 1))
    place -= first_place
    return place // n_windows, place % n_windows, first, tl.where(needed, end, first), needed


@triton.jit
def window_keys(window, b, g, T, origin, origin_b, n_sides, k_b, k_t, k_g, v_b, v_t, v_g,
                L: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """This program's cut of the window: places in it, on the windows' axis, which of them are keys, and their rows; the
    end of the keys on that axis."""
    shift = axis_shift(tl.load(origin + b * origin_b).to(tl.int32), n_sides, L)
    step = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = window * L + step
    key = at - shift
    inside = (step < L) & (key >= 0) & (key < T)
    k_at = group_at(b, g, k_b, k_g) + key.to(tl.int64) * k_t
    v_at = group_at(b, g, v_b, v_g) + key.to(tl.int64) * v_t
    return step, at, inside, k_at, v_at, T + shift


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
def readers_of(pairs, begins, m, end, window, n_sides,
               R: tl.constexpr, N: tl.constexpr, L: tl.constexpr, BLOCK_M: tl.constexpr):  # fmt: skip
    """Query heads of a tile of entries, from row m on: query, head, which of them exist, the slot of what each gets
    here, and the first key of its block."""
    row = m + tl.arange(0, BLOCK_M)
    entry, head, ok = row // R, row % R, row < end * R
    pair = tl.load(pairs + entry, mask=ok, other=0)
    begin = tl.load(begins + entry, mask=ok, other=0)
    query, here = (pair // N).to(tl.int64), pair % N * n_sides + (begin < window * L).to(tl.int32)
    return query, head, ok, here, begin


@triton.jit
def slots_of(idx, last, origin, b, g, query, ok, n, n_queries, n_span, first_query, n_windows, n_sides,
             origin_b, origin_s, G: tl.constexpr, N: tl.constexpr, L: tl.constexpr):  # fmt: skip
    """Where the slots of each query's n-th block are, and which of the two were written."""
    block = tl.load(idx + ((b * n_queries + query) * G + g) * N + n, mask=ok, other=-1)
    start = tl.load(origin + b * origin_b + query * origin_s, mask=ok, other=0).to(tl.int32)
    start += axis_shift(start, n_sides, L)
    end = tl.load(last + b * n_queries + query, mask=ok, other=-1)
    window, real, across = reached(block, start, end, n_windows, L)
    at = (((b * n_span + query - first_query) * G + g) * N + n) * n_sides
    return at, real & (window > 0), across


@triton.jit
def window_tile(m, end, window, b, cut, at, k1, k2, v1, v2, q, q_s, q_r, last, pairs, begins, slot, slot_lse, scale,
                n_queries, n_sides, G: tl.constexpr, R: tl.constexpr,
                K: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, V: tl.constexpr, V1: tl.constexpr,
                V2: tl.constexpr, N: tl.constexpr, L: tl.constexpr, CUTS: tl.constexpr, BLOCK_M: tl.constexpr,
                WIDE: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """The softmax of the rows from m on over this cut of the window. Not MASKED: they see all of its keys."""
    query, head, ok, here, begin_M = readers_of(pairs, begins, m, end, window, n_sides, R, N, L, BLOCK_M)
    q_at = heads_at(query, head, q_s, q_r)
    s = dot(load_rows(q, q_at, ok, K, 0, K1, WIDE), tl.trans(k1))
    if K2 > 0:
        s += dot(load_rows(q, q_at, ok, K, K1, K2, WIDE), tl.trans(k2))
    s = s * (scale * LOG2E)
    if MASKED:
        end_M = ends_of(begin_M, tl.load(last + b * n_queries + query, mask=ok, other=-1), window, L)
        visible = (at[None, :] >= begin_M[:, None]) & (at[None, :] <= end_M[:, None])
        s = tl.where(visible, s, float("-inf"))
    top = tl.max(s, 1)
    e = tl.exp2(s - (tl.where(top == float("-inf"), 0.0, top) if MASKED else top)[:, None])
    total = tl.sum(e, 1)
    if MASKED:
        total = tl.where(total == 0, 1.0, total)
    share = 1 / total  # of each row, once
    p = rounded(e, WIDE, q.dtype.element_ty)
    to = ((query * (G * N * n_sides) + here) * CUTS + cut) * R + head
    store_rows(slot, to * V, ok, dot(p, v1) * share[:, None], V, 0, V1)
    if V2 > 0:
        store_rows(slot, to * V, ok, dot(p, v2) * share[:, None], V, V1, V2)
    tl.store(slot_lse + to, top + tl.log2(total), mask=ok)


@triton.jit(do_not_specialize=VARYING)
def selected_forward_kernel(
    q, k, v, origin, last, pairs, begins, offsets, piece_window, piece_first, slot, slot_lse,
    scale, n_queries, n_span, first_query, first_place, T, n_windows, n_sides, n_groups_all, origin_b,
    q_b, q_s, q_g, q_r, k_b, k_t, k_g, v_b, v_t, v_g,
    G: tl.constexpr, R: tl.constexpr,
    K: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, V: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
    N: tl.constexpr, L: tl.constexpr, PIECE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """`n_queries`: of a row, of which a span of `n_span` from `first_query` on has these slots."""
    CUTS: tl.constexpr = (L + BLOCK_N - 1) // BLOCK_N
    bg, window, first, end, _ = piece_of(
        offsets, piece_window, piece_first, first_place, n_windows, n_groups_all, PIECE
    )  # fmt: skip
    b, g, cut = (bg // G).to(tl.int64), bg % G, tl.program_id(1)
    _, at, inside, k_at, v_at, T = window_keys(
        window, b, g, T, origin, origin_b, n_sides, k_b, k_t, k_g, v_b, v_t, v_g, L, BLOCK_N
    )  # fmt: skip
    k1, k2 = load_both(k, k_at, inside, K, K1, K2, WIDE)
    v1, v2 = load_both(v, v_at, inside, V, V1, V2, WIDE)

    q += group_at(b, g, q_b, q_g)
    slots_before = ((b * n_span - first_query) * G + g) * (N * n_sides * CUTS * R)
    slot += slots_before * V
    slot_lse += slots_before
    masked = rows_to_mask(pairs, begins, last, first, end, window, b, n_queries, T, R, N, L, BLOCK_M, BLOCK_N, 1024)
    for m in tl.range(first * R, masked, BLOCK_M):
        window_tile(
            m, end, window, b, cut, at, k1, k2, v1, v2, q, q_s, q_r, last, pairs, begins, slot, slot_lse, scale,
            n_queries, n_sides, G, R, K, K1, K2, V, V1, V2, N, L, CUTS, BLOCK_M, WIDE, True,
        )  # fmt: skip
    for m in tl.range(masked, end * R, BLOCK_M):
        window_tile(
            m, end, window, b, cut, at, k1, k2, v1, v2, q, q_s, q_r, last, pairs, begins, slot, slot_lse, scale,
            n_queries, n_sides, G, R, K, K1, K2, V, V1, V2, N, L, CUTS, BLOCK_M, WIDE, False,
        )  # fmt: skip


@triton.jit
def mix_columns(compressed, selected_MX, sliding, mixed, row, ok, c, s, w, V: tl.constexpr, AT: tl.constexpr,
                WIDTH: tl.constexpr):  # fmt: skip
    """As `mix_forward_kernel`, of columns that are at hand."""
    total = c[:, None] * load_rows(compressed, row * V, ok, V, AT, WIDTH, True)
    total += s[:, None] * narrowed(selected_MX, mixed.dtype.element_ty).to(tl.float32)
    total += w[:, None] * load_rows(sliding, row * V, ok, V, AT, WIDTH, True)
    store_rows(mixed, row * V, ok, total, V, AT, WIDTH)


@triton.jit(do_not_specialize=VARYING)
def merge_slots_kernel(
    idx, last, origin, slot, slot_lse, out, lse, gates, compressed, sliding, mixed,
    S, n_queries, n_span, first_query, n_windows, n_sides, origin_b, origin_s,
    G: tl.constexpr, R: tl.constexpr, V: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
    N: tl.constexpr, L: tl.constexpr, CUTS: tl.constexpr, HEADS: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Each slot by its share of the whole softmax, for S queries from `first_query` on, of `n_queries` in a row.

    `mixed`, unless it is None, gets the three branches mixed by their gates, of which each is for HEADS heads."""
    b, g, query, head, ok = heads_of(S, G, R, BLOCK_M)
    query += first_query
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc1, acc2 = zeros_both(BLOCK_M, V1, V2)
    for n in tl.range(0, N):
        base, here, across = slots_of(
            idx, last, origin, b, g, query, ok, n, n_queries, n_span, first_query, n_windows, n_sides,
            origin_b, origin_s, G, N, L,
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
    tl.store(lse + flat, log_sum(top, total) * LN2, mask=ok)
    out1, out2 = acc1 / divisor(total), acc2 / divisor(total)
    store_both(out, flat * V, ok, out1, out2, V, V1, V2)
    if mixed is not None:
        c, s, w = load_gates(gates, flat // HEADS, ok)
        mix_columns(compressed, out1, sliding, mixed, flat, ok, c, s, w, V, 0, V1)
        if V2 > 0:
            mix_columns(compressed, out2, sliding, mixed, flat, ok, c, s, w, V, V1, V2)


class MixInputs(NamedTuple):
    """What the merge needs to mix the branches, too."""

    gates_BSGX3: Tensor
    compressed_BSGRV: Tensor
    sliding_BSGRV: Tensor


@planned
def selected_forward(x: BranchInputs) -> tuple[Tensor, Tensor]:
    out, lse, _ = selected_and_mixed(x, sizes_of(x, is_one_document(x.start_BS)))
    return out, lse


def selected_and_mixed(
    x: BranchInputs, sizes: IndexSizes, mix: MixInputs | None = None, memory: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Output, log-sum-exps, and the branches mixed, if `mix` has the others. `memory`: for the block index."""
    B, S, G, R, _ = x.q_BSGRK.shape
    q, k, v = rows_contiguous(x.q_BSGRK, x.k_BTGK, x.v_BTGV)
    V, idx, start = v.shape[-1], x.chosen_BSGN.contiguous(), x.start_BS
    out = q.new_empty((B, S, G, R, V))
    lse = q.new_empty((B, S, G, R), dtype=torch.float32)
    mixed = None if mix is None else torch.empty_like(out)
    others = (None,) * 3 if mix is None else tuple(y.contiguous() for y in mix)
    heads = 1 if mix is None else R // mix.gates_BSGX3.shape[3]
    index = build_block_index(idx, x.pos_BS, start, sizes, memory)
    work = _windows_forward(q, k, v, start, index, sizes, x.scale)
    slots, levels = work.results
    for span, windows in enumerate(work.launches):
        launch_all([windows])
        first, n = queries_of(sizes, span)
        launch(
            merge_slots_kernel, (triton.cdiv(n * R, rows_of(V)), B * G),
            idx, index.last, start, slots, levels, out, lse, *others, mixed,
            n, S, sizes.span, first, sizes.n_windows, sizes.n_sides, *start.stride(),
            G=G, R=R, **columns("V", V), N=sizes.N, L=sizes.L, CUTS=slots.shape[4], HEADS=heads, BLOCK_M=rows_of(V),
        )  # fmt: skip
    return out, lse, mixed


def _windows_forward(
    q: Tensor, k: Tensor, v: Tensor, start_BS: Tensor, index: BlockIndex, sizes: IndexSizes, scale: float
) -> Work:
    """A launch for each span; partial result of each query and block of a span, [B, span, G, slots, cuts, R, V], with
    its log-sum-exp in base 2."""
    (B, _, G, R, K), V = q.shape, v.shape[-1]

    def prepare(tiles: TileSizes) -> Work:
        keys, cuts = keys_of(tiles, sizes.L)
        slots = q.new_empty((B, sizes.span, G, sizes.n_sides * sizes.N, cuts, R, V))
        levels = q.new_empty(slots.shape[:-1], dtype=torch.float32)
        constants = dict(
            G=G, R=R, **widths(K, V), N=sizes.N, L=sizes.L, PIECE=block_index.PIECE, BLOCK_M=tiles.m, BLOCK_N=keys,
            WIDE=is_wide(q.dtype), **tiles.options,
        )  # fmt: skip
        launches = [
            Launch(
                selected_forward_kernel, (sizes.pieces_of_span, cuts),
                (q, k, v, start_BS, index.last, *index.by_piece, slots, levels, scale,
                 *span_numbers(sizes, span), start_BS.stride(0), *row_strides(q, k, v)),
                constants,
            )
            for span in range(sizes.n_spans)
        ]  # fmt: skip
        return Work(launches, (slots, levels))

    return tuned("selected_forward", q, V, prepare, l_sel=sizes.L, n_sel=sizes.N)


def sizes_of(x: BranchInputs, one_document: bool) -> IndexSizes:
    """Sizes of the block index, with spans whose slots fit in the memory that they may take, forward and backward."""
    B, S, G, R, K = x.q_BSGRK.shape
    n_sides, shape = 1 if one_document else 2, x.chosen_BSGN.shape
    width, element, l_sel = max(K, x.v_BTGV.shape[-1]), x.q_BSGRK.dtype.itemsize, x.geometry.l_sel
    most = span_of(S, B * G * R * element, K, width * n_sides * shape[-1] * most_cuts(width, element, l_sel))
    return index_sizes(shape, n_sides, l_sel, x.k_BTGK.shape[1], most)


def span_of(n_queries: int, bytes_per_query: int, d_k: int, slots_width: int) -> int:
    """The most queries of a span. Bytes of a query's heads for each column; columns of all slots of a head."""
    allowed = max(SLOT_BYTES, QUERIES_OF_SLOTS * n_queries * bytes_per_query * d_k)
    n_spans = max(1, -(-n_queries * bytes_per_query * slots_width // allowed))
    return -(-n_queries // n_spans)


def most_cuts(width: int, element_size: int, l_sel: int, gpu: str | None = None) -> int:
    """Cuts of a window, forward or backward."""
    kernels = ("selected_forward", "selected_backward")
    return max(keys_of(choose(kernel, width, gpu, element_size=element_size), l_sel)[1] for kernel in kernels)


def queries_of(sizes: IndexSizes, span: int) -> tuple[int, int]:
    """First query of a span, and how many there are."""
    first = span * sizes.span
    return first, min(sizes.span, sizes.S - first)


def span_numbers(sizes: IndexSizes, span: int) -> tuple[int, ...]:
    """What kernels of windows need to know of a span."""
    first, places = span * sizes.span, span * sizes.places_of_span
    return sizes.S, sizes.span, first, places, sizes.n_keys, sizes.n_windows, sizes.n_sides, sizes.B * sizes.G


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
