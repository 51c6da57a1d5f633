"""Launches selected attention. Shapes as in `nsa.kernels.reference`.

Partial results of each query and block are written to slots and merged afterwards. Slots are 2·N times as large as an
output: too large for all of a long row, so they are reused by spans of its queries.
"""

from collections.abc import Iterator

import torch
import triton
from torch import Tensor

from nsa.kernels.interface import BranchInputs, Gradients
from nsa.kernels.triton import PIECE, QUERIES_OF_SLOTS, SLOT_BYTES
from nsa.kernels.triton.autotune import Launch, Work, run, tuned
from nsa.kernels.triton.block_index import BlockIndex, build_block_index
from nsa.kernels.triton.device.selected_backward import (
    add_pieces_kernel,
    add_slots_kernel,
    delta_kernel,
    selected_backward_kernel,
)
from nsa.kernels.triton.device.selected_forward import merge_slots_kernel, selected_forward_kernel
from nsa.kernels.triton.range_attention import row_strides, rows_contiguous
from nsa.kernels.triton.tuning import TileSizes, choose, is_wide, split_width, widths


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
        launches, (slots, levels) = _windows_forward(queries, k, v, index, N, l_sel, x.scale)
        for kernel, grid, arguments, constants in launches:
            kernel[grid](*arguments, **constants)
        merge_slots_kernel[(triton.cdiv(queries.shape[1] * R, rows_of(V)), B * G)](
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
            G=G, R=R, **widths(K, V), N=n_sel, L=l_sel, PIECE=PIECE, BLOCK_M=tiles.m, BLOCK_N=keys,
            WIDE=is_wide(q.dtype), **tiles.options,
        )  # fmt: skip
        return Work([Launch(selected_forward_kernel, (index.n_pieces, cuts), arguments, constants)], (slots, levels))

    return tuned("selected_forward", q, V, prepare, l_sel=l_sel, n_sel=n_sel)


def selected_backward(
    x: BranchInputs, out_BSGRV: Tensor, lse_BSGR: Tensor, dout_BSGRV: Tensor, dlse_BSGR: Tensor | None
) -> Gradients:
    l_sel = x.geometry.l_sel
    B, S, G, R, K = x.q_BSGRK.shape
    (T, V), N = (x.v_BTGV.shape[1], x.v_BTGV.shape[-1]), x.chosen_BSGN.shape[-1]
    n_windows = triton.cdiv(T, l_sel)
    dout, q, k, v = rows_contiguous(dout_BSGRV, x.q_BSGRK, x.k_BTGK, x.v_BTGV)
    dout, q = (y if y.stride(3) * R < 2**31 else y.contiguous() for y in (dout, q))  # heads are placed in 32 bits
    out, lse = out_BSGRV.contiguous(), lse_BSGR.contiguous()
    dlse = None if dlse_BSGR is None else dlse_BSGR.contiguous()
    dq, delta = torch.empty(q.shape, dtype=q.dtype, device=q.device), torch.empty_like(lse)
    delta_kernel[(triton.cdiv(S * R, rows_of(V)), B * G)](
        dout, out, dlse, delta, S, *row_strides(dout), G=G, R=R, **columns("V", V), BLOCK_M=rows_of(V)
    )
    all_spans = list(spans("selected_backward", q, N, l_sel, K, max(K, V)))
    wide = torch.float32 if len(all_spans) > 1 else k.dtype
    new = torch.empty if all_spans else torch.zeros
    dk, dv = (new(keys.shape, dtype=wide, device=keys.device) for keys in (k, v))
    for some in all_spans:
        queries, idx, start = q[:, some], x.chosen_BSGN[:, some].contiguous(), x.start_BS[:, some]
        index = build_block_index(idx, x.pos_BS[:, some], start, l_sel, T)
        work = _windows_backward(
            dout[:, some], queries, k, v, lse[:, some], delta[:, some], S, index, N, l_sel, x.scale
        )  # fmt: skip
        run(work)
        slots, *sums = work.results
        add_slots_kernel[(triton.cdiv(queries.shape[1] * R, rows_of(K)), B * G)](
            idx, index.last_BS, start, slots, dq[:, some], queries.shape[1], S, n_windows, *start.stride(),
            G=G, R=R, **columns("K", K), N=N, L=l_sel, CUTS=slots.shape[4], BLOCK_M=rows_of(K),
        )  # fmt: skip
        add_pieces_kernel[(n_windows, B * G, 2)](
            *sums, index.piece_first, dk, dv, T, n_windows, int(some.start > 0),
            G=G, **widths(K, V), L=l_sel, BLOCK_N=block_of(l_sel), num_warps=adding_warps(K, V),
        )  # fmt: skip
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _windows_backward(
    dout_BSGRV: Tensor, q_BSGRK: Tensor, k_BTGK: Tensor, v_BTGV: Tensor, lse_BSGR: Tensor, delta_BSGR: Tensor,
    n_queries: int, index: BlockIndex, n_sel: int, l_sel: int, scale: float,
) -> Work:  # fmt: skip
    """dQ by slots, dK and dV by pieces of windows. Log-sum-exps and deltas are part of a row of `n_queries`."""
    B, S, G, R, K = q_BSGRK.shape
    (T, V), dout, q, k, v = (v_BTGV.shape[1], v_BTGV.shape[-1]), dout_BSGRV, q_BSGRK, k_BTGK, v_BTGV

    def prepare(tiles: TileSizes) -> Work:
        keys, cuts = keys_of(tiles, l_sel)
        slots = q.new_empty((B, S, G, 2 * n_sel, cuts, R, K))
        dk_part, dv_part = (
            torch.empty((index.n_pieces, l_sel, width), dtype=torch.float32, device=q.device) for width in (K, V)
        )
        sizes = (scale, S, n_queries, T, triton.cdiv(T, l_sel), B * G, *row_strides(dout, q, k, v))
        outputs = (slots, dk_part, dv_part)
        arguments = (dout, q, k, v, index.last_BS, *index.by_piece, lse_BSGR, delta_BSGR, *outputs, *sizes)
        constants = dict(
            G=G, R=R, **widths(K, V), N=n_sel, L=l_sel, PIECE=PIECE, BLOCK_M=tiles.m, BLOCK_N=keys,
            WIDE=is_wide(q.dtype), **tiles.options,
        )  # fmt: skip
        return Work([Launch(selected_backward_kernel, (index.n_pieces, cuts), arguments, constants)], outputs)

    return tuned("selected_backward", q, V, prepare, l_sel=l_sel, n_sel=n_sel)


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


def adding_warps(d_k: int, d_v: int) -> int:
    """Warps of a program that adds the pieces of a window: wide rows spill with four."""
    return 8 if max(d_k, d_v) > 64 else 4


def block_of(l_sel: int) -> int:
    return max(16, triton.next_power_of_2(l_sel))


def columns(name: str, width: int) -> dict[str, int]:
    n, main, rest = split_width(width)
    return {name: n, f"{name}1": main, f"{name}2": rest}
