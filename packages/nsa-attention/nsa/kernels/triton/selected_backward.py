"""Selected attention, backward: five products per tile, one window of keys at a time for the queries that selected it.

dK and dV stay in registers for a piece of PIECE readers and are added over pieces, in order, by `add_pieces`; dQ goes
to slots, which `add_slots` adds, in order. No atomics: the same bits every time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.kernels.interface import BranchInputs, Gradients, is_one_document
from nsa.kernels.triton import block_index
from nsa.kernels.triton.autotune import Work, tuned
from nsa.kernels.triton.block_index import BlockIndex, IndexSizes, axis_shift, build_block_index
from nsa.kernels.triton.launch import Launch, launch, launch_all, planned
from nsa.kernels.triton.range_attention import probabilities, products, store_gradients
from nsa.kernels.triton.selected import (
    block_of,
    columns,
    ends_of,
    keys_of,
    piece_of,
    queries_of,
    readers_of,
    rows_of,
    rows_to_mask,
    sizes_of,
    slots_of,
    span_numbers,
    window_keys,
)
from nsa.kernels.triton.tile import (
    INTERPRETED,
    VARYING,
    add_partial_rows,
    dot,
    group_at,
    heads_at,
    heads_of,
    load_both,
    load_rows,
    rounded,
    row_strides,
    rows_contiguous,
    store_both,
    store_rows,
    zeros_both,
)
from nsa.kernels.triton.tuning import TileSizes, is_wide, widths


@triton.jit(do_not_specialize=VARYING)
def delta_kernel(
    dout, out, dlse, delta, S, do_b, do_s, do_g, do_r,
    G: tl.constexpr, R: tl.constexpr, V: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Compute dout · out − dlse of each query head: what is taken from every score's gradient."""
    b, g, query, head, ok = heads_of(S, G, R, BLOCK_M)
    do_at = group_at(b, g, do_b, do_g) + heads_at(query, head, do_s, do_r)
    flat = ((b * S + query) * G + g) * R + head
    x = load_rows(dout, do_at, ok, V, 0, V1, False).to(tl.float32)
    delta_M = tl.sum(x * load_rows(out, flat * V, ok, V, 0, V1, False).to(tl.float32), 1)
    if V2 > 0:
        x = load_rows(dout, do_at, ok, V, V1, V2, False).to(tl.float32)
        delta_M += tl.sum(x * load_rows(out, flat * V, ok, V, V1, V2, False).to(tl.float32), 1)
    if dlse is not None:
        delta_M -= tl.load(dlse + flat, mask=ok, other=0.0)
    tl.store(delta + flat, delta_M, mask=ok)


@triton.jit
def window_gradients(m, end, window, b, cut, at, k1, k2, v1, v2, q, dout, q_s, q_r, do_s, do_r, last, pairs, begins,
                     lse, delta, slot, scale, n_queries, n_sides, dk1, dk2, dv1, dv2, G: tl.constexpr, R: tl.constexpr,
                     K: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, V: tl.constexpr, V1: tl.constexpr,
                     V2: tl.constexpr, N: tl.constexpr, L: tl.constexpr, CUTS: tl.constexpr, BLOCK_M: tl.constexpr,
                     WIDE: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """dK and dV of this cut of the window with what the rows from m on add; their dQ goes to slots. Not MASKED: they
    see all of its keys. Rows that do not exist are zero, as are their gradients, and add nothing."""
    query, head, ok, here, begin_M = readers_of(pairs, begins, m, end, window, n_sides, R, N, L, BLOCK_M)
    flat = query * (G * R) + head
    lse_M = tl.load(lse + flat, mask=ok, other=0.0)
    delta_M = tl.load(delta + flat, mask=ok, other=0.0)
    # Heads are placed in 32 bits: the launcher copies rows whose heads lie too far apart. In 64 bits sm_80 spills.
    s, dp, q1, q2, do1, do2 = products(
        k1, k2, v1, v2, q, dout, query * q_s + head * q_r, query * do_s + head * do_r, ok,
        K, K1, K2, V, V1, V2, WIDE,
    )  # fmt: skip
    visible = None
    if MASKED:
        end_M = ends_of(begin_M, tl.load(last + b * n_queries + query, mask=ok, other=-1), window, L)
        visible = (at[:, None] >= begin_M[None, :]) & (at[:, None] <= end_M[None, :])
    p = probabilities(s, lse_M[None, :], visible, scale)
    ds = rounded(p * (dp - delta_M[None, :]) * scale, WIDE, q.dtype.element_ty)
    p = rounded(p, WIDE, q.dtype.element_ty)
    dv1 += dot(p, do1)
    dk1 += dot(ds, q1)
    to = ((query * (G * N * n_sides) + here) * CUTS + cut) * R + head
    store_rows(slot, to * K, ok, dot(tl.trans(ds), k1), K, 0, K1)
    if V2 > 0:
        dv2 += dot(p, do2)
    if K2 > 0:
        dk2 += dot(ds, q2)
        store_rows(slot, to * K, ok, dot(tl.trans(ds), k2), K, K1, K2)
    return dk1, dk2, dv1, dv2


@triton.jit(do_not_specialize=VARYING)
def selected_backward_kernel(
    dout, q, k, v, origin, last, pairs, begins, offsets, piece_window, piece_first, lse, delta, slot, dk_part, dv_part,
    scale, n_queries, n_span, first_query, first_place, T, n_windows, n_sides, n_groups_all, origin_b,
    do_b, do_s, do_g, do_r, q_b, q_s, q_g, q_r, k_b, k_t, k_g, v_b, v_t, v_g,
    G: tl.constexpr, R: tl.constexpr,
    K: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, V: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
    N: tl.constexpr, L: tl.constexpr, PIECE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """`n_queries`: of a row, of which a span of `n_span` from `first_query` on has these slots and parts."""
    CUTS: tl.constexpr = (L + BLOCK_N - 1) // BLOCK_N
    bg, window, first, end, needed = piece_of(
        offsets, piece_window, piece_first, first_place, n_windows, n_groups_all, PIECE
    )  # fmt: skip
    b, g, cut = (bg // G).to(tl.int64), bg % G, tl.program_id(1)
    step, at, inside, k_at, v_at, T = window_keys(
        window, b, g, T, origin, origin_b, n_sides, k_b, k_t, k_g, v_b, v_t, v_g, L, BLOCK_N
    )  # fmt: skip
    k1, k2 = load_both(k, k_at, inside, K, K1, K2, WIDE)
    v1, v2 = load_both(v, v_at, inside, V, V1, V2, WIDE)
    dk1, dk2 = zeros_both(BLOCK_N, K1, K2)
    dv1, dv2 = zeros_both(BLOCK_N, V1, V2)

    q += group_at(b, g, q_b, q_g)
    dout += group_at(b, g, do_b, do_g)
    lse += (b * n_queries * G + g) * R
    delta += (b * n_queries * G + g) * R
    slot += ((b * n_span - first_query) * G + g) * (N * n_sides * CUTS * R) * K
    # A second loop over tiles of 32 rows takes 84 registers more on sm_80, where products are the bound anyway.
    SPLIT: tl.constexpr = INTERPRETED or BLOCK_M >= 64
    masked = end * R
    if SPLIT:
        masked = rows_to_mask(
            pairs, begins, last, first, end, window, b, n_queries, T, R, N, L, BLOCK_M, BLOCK_N, 1024
        )  # fmt: skip
    for m in tl.range(first * R, masked, BLOCK_M):
        dk1, dk2, dv1, dv2 = window_gradients(
            m, end, window, b, cut, at, k1, k2, v1, v2, q, dout, q_s, q_r, do_s, do_r, last, pairs, begins,
            lse, delta, slot, scale, n_queries, n_sides, dk1, dk2, dv1, dv2,
            G, R, K, K1, K2, V, V1, V2, N, L, CUTS, BLOCK_M, WIDE, True,
        )  # fmt: skip
    if SPLIT:
        for m in tl.range(masked, end * R, BLOCK_M):
            dk1, dk2, dv1, dv2 = window_gradients(
                m, end, window, b, cut, at, k1, k2, v1, v2, q, dout, q_s, q_r, do_s, do_r, last, pairs, begins,
                lse, delta, slot, scale, n_queries, n_sides, dk1, dk2, dv1, dv2,
                G, R, K, K1, K2, V, V1, V2, N, L, CUTS, BLOCK_M, WIDE, False,
            )  # fmt: skip

    part_at = tl.program_id(0).to(tl.int64) * L + step
    inside = (step < L) & needed
    store_gradients(dk_part, dv_part, part_at, inside, dk1, dk2, dv1, dv2, K, K1, K2, V, V1, V2)


@triton.jit(do_not_specialize=VARYING)
def add_slots_kernel(
    idx, last, origin, slot, dq, dq_other, S, n_queries, n_span, first_query, n_windows, n_sides, origin_b, origin_s,
    G: tl.constexpr, R: tl.constexpr, K: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr,
    N: tl.constexpr, L: tl.constexpr, CUTS: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Add up the slots of S queries from `first_query` on, of `n_queries` in a row; `dq_other`, unless it is None, and
    what dq holds then are those of the other branches."""
    b, g, query, head, ok = heads_of(S, G, R, BLOCK_M)
    query += first_query
    sum1, sum2 = zeros_both(BLOCK_M, K1, K2)
    for n in tl.range(0, N):
        base, here, across = slots_of(
            idx, last, origin, b, g, query, ok, n, n_queries, n_span, first_query, n_windows, n_sides,
            origin_b, origin_s, G, N, L,
        )  # fmt: skip
        for cut in tl.static_range(0, 2 * CUTS):
            written = here if cut < CUTS else across
            at = (base * CUTS + cut) * R + head
            sum1 += load_rows(slot, at * K, written, K, 0, K1, False).to(tl.float32)
            if K2 > 0:
                sum2 += load_rows(slot, at * K, written, K, K1, K2, False).to(tl.float32)
    flat = ((b * n_queries + query) * G + g) * R + head
    if dq_other is not None:
        sum1 += load_rows(dq, flat * K, ok, K, 0, K1, False).to(tl.float32)
        sum1 += load_rows(dq_other, flat * K, ok, K, 0, K1, False).to(tl.float32)
        if K2 > 0:
            sum2 += load_rows(dq, flat * K, ok, K, K1, K2, False).to(tl.float32)
            sum2 += load_rows(dq_other, flat * K, ok, K, K1, K2, False).to(tl.float32)
    store_both(dq, flat * K, ok, sum1, sum2, K, K1, K2)


@triton.jit(do_not_specialize=VARYING)
def add_pieces_kernel(
    dk_part, dv_part, piece_first, origin, dk, dv, first_place, T, n_windows, n_sides, more, origin_b,
    G: tl.constexpr, K: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr,
    V: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, L: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Programs of the last axis: keys, values. `more`: add to what earlier queries have left there."""
    window, bg = tl.program_id(0), tl.program_id(1)
    shift = axis_shift(tl.load(origin + (bg // G).to(tl.int64) * origin_b).to(tl.int32), n_sides, L)
    step = tl.arange(0, BLOCK_N)
    at = window * L + step - shift
    ok = (step < L) & (at >= 0) & (at < T)
    place = first_place + bg.to(tl.int64) * n_windows + window
    before_all = tl.load(piece_first + first_place)
    first, end = tl.load(piece_first + place) - before_all, tl.load(piece_first + place + 1) - before_all
    flat = ((bg // G).to(tl.int64) * T + at) * G + bg % G
    before = ok & (more > 0)
    if tl.program_id(2) == 0:
        add_partial_rows(dk_part, dk, flat, step, L, ok, before, first, end, K, K1, K2, BLOCK_N)
    else:
        add_partial_rows(dv_part, dv, flat, step, L, ok, before, first, end, V, V1, V2, BLOCK_N)


@planned
def selected_backward(
    x: BranchInputs, out_BSGRV: Tensor, lse_BSGR: Tensor, dout_BSGRV: Tensor, dlse_BSGR: Tensor | None
) -> Gradients:
    S, G, R, V = out_BSGRV.shape[1:]
    (dout,), out, lse = rows_contiguous(dout_BSGRV), out_BSGRV.contiguous(), lse_BSGR.contiguous()
    dlse = None if dlse_BSGR is None else dlse_BSGR.contiguous()
    delta = torch.empty_like(lse)
    launch(
        delta_kernel, (triton.cdiv(S * R, rows_of(V)), out.shape[0] * G),
        dout, out, dlse, delta, S, *row_strides(dout), G=G, R=R, **columns("V", V), BLOCK_M=rows_of(V),
    )  # fmt: skip
    return selected_gradients(x, sizes_of(x, is_one_document(x.start_BS)), lse, dout, delta)


def selected_gradients(
    x: BranchInputs, sizes: IndexSizes, lse_BSGR: Tensor, dout_BSGRV: Tensor, delta_BSGR: Tensor,
    of_others: tuple[Tensor, Tensor] | None = None, memory: Tensor | None = None,
) -> Gradients:  # fmt: skip
    """`of_others`: dq of the other branches, which are added; the first becomes the sum. `memory`: holds the forward's
    block index; without it, the index is built again."""
    B, S, G, R, K = x.q_BSGRK.shape
    T, V = x.v_BTGV.shape[1], x.v_BTGV.shape[-1]
    dout, q, k, v = rows_contiguous(dout_BSGRV, x.q_BSGRK, x.k_BTGK, x.v_BTGV)
    dout, q = (y if y.stride(3) * R < 2**31 else y.contiguous() for y in (dout, q))  # heads are placed in 32 bits
    lse, delta, idx, start = lse_BSGR.contiguous(), delta_BSGR, x.chosen_BSGN.contiguous(), x.start_BS
    dq, dq_other = of_others or (q.new_empty(q.shape), None)
    wide = torch.float32 if sizes.n_spans > 1 else k.dtype
    new = torch.empty if sizes.n_spans else torch.zeros
    dk, dv = (new(keys.shape, dtype=wide, device=keys.device) for keys in (k, v))
    index = build_block_index(idx, x.pos_BS, start, sizes) if memory is None else sizes.index_in(memory)
    work = _windows_backward(dout, q, k, v, lse, delta, start, index, sizes, x.scale)
    slots, *sums = work.results
    for span, windows in enumerate(work.launches):
        launch_all([windows])
        (first, n), places = queries_of(sizes, span), span * sizes.places_of_span
        launch(
            add_slots_kernel, (triton.cdiv(n * R, rows_of(K)), B * G),
            idx, index.last, start, slots, dq, dq_other, n, S, sizes.span, first, sizes.n_windows, sizes.n_sides,
            *start.stride(), G=G, R=R, **columns("K", K), N=sizes.N, L=sizes.L, CUTS=slots.shape[4],
            BLOCK_M=rows_of(K),
        )  # fmt: skip
        launch(
            add_pieces_kernel, (sizes.n_windows, B * G, 2),
            *sums, index.piece_first, start, dk, dv, places, T, sizes.n_windows, sizes.n_sides, int(span > 0),
            start.stride(0), G=G, **widths(K, V), L=sizes.L, BLOCK_N=block_of(sizes.L), num_warps=adding_warps(K, V),
        )  # fmt: skip
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _windows_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, start_BS: Tensor, index: BlockIndex,
    sizes: IndexSizes, scale: float,
) -> Work:  # fmt: skip
    """A launch for each span; dQ by slots, dK and dV by pieces of windows."""
    (B, _, G, R, K), V = q.shape, v.shape[-1]

    def prepare(tiles: TileSizes) -> Work:
        keys, cuts = keys_of(tiles, sizes.L)
        slots = q.new_empty((B, sizes.span, G, sizes.n_sides * sizes.N, cuts, R, K))
        dk_part, dv_part = (
            torch.empty((sizes.pieces_of_span, sizes.L, width), dtype=torch.float32, device=q.device)
            for width in (K, V)
        )
        outputs = (slots, dk_part, dv_part)
        constants = dict(
            G=G, R=R, **widths(K, V), N=sizes.N, L=sizes.L, PIECE=block_index.PIECE, BLOCK_M=tiles.m, BLOCK_N=keys,
            WIDE=is_wide(q.dtype), **tiles.options,
        )  # fmt: skip
        launches = [
            Launch(
                selected_backward_kernel, (sizes.pieces_of_span, cuts),
                (dout, q, k, v, start_BS, index.last, *index.by_piece, lse, delta, *outputs, scale,
                 *span_numbers(sizes, span), start_BS.stride(0), *row_strides(dout, q, k, v)),
                constants,
            )
            for span in range(sizes.n_spans)
        ]  # fmt: skip
        return Work(launches, outputs)

    return tuned("selected_backward", q, V, prepare, l_sel=sizes.L, n_sel=sizes.N)


def adding_warps(d_k: int, d_v: int) -> int:
    """Warps of a program that adds the pieces of a window: wide rows spill with four."""
    return 8 if max(d_k, d_v) > 64 else 4
