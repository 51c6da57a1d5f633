"""Launches selected attention. Shapes as in `nsa.kernels.reference`."""

import torch
import triton
from torch import Tensor

from nsa.kernels.triton.autotune import Launch, tuned
from nsa.kernels.triton.device.selected_backward import add_pieces_kernel, selected_dkv_kernel, selected_dq_kernel
from nsa.kernels.triton.device.selected_forward import selected_forward_kernel
from nsa.kernels.triton.index import MOST_QUERIES, PIECE, chosen, union
from nsa.kernels.triton.runs import Gradients, rows_contiguous
from nsa.kernels.triton.tuning import Tiles
from nsa.kernels.triton.widths import is_wide, split_width, widths


def selected_forward(
    q_BSGRK: Tensor, k_BTGK: Tensor, v_BTGV: Tensor, idx_BSGN: Tensor, pos_BS: Tensor, start_BS: Tensor,
    sizes: list[int], scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    (l_sel,) = sizes
    B, S, G, R, K = q_BSGRK.shape
    q, k, v = rows_contiguous(q_BSGRK, k_BTGK, v_BTGV)
    T, V = v.shape[1], v.shape[-1]
    out = q.new_empty((B, S, G, R, V))
    lse = q.new_empty((B, S, G, R), dtype=torch.float32)

    def start(tiles: Tiles, launch: Launch) -> None:
        queries, block_m = tile_of(tiles, R)
        begin, bits, size, last = union(idx_BSGN, pos_BS, start_BS, l_sel, queries)
        n_tiles = triton.cdiv(S, queries)
        launch(
            selected_forward_kernel, (n_tiles, B * G),
            q, k, v, last, begin, bits, size, out, lse, scale, S, T, n_tiles, begin.shape[-1],
            *q.stride()[:4], *k.stride()[:3], *v.stride()[:3], G=G, R=R, **widths(K, V), L=l_sel, QUERIES=queries,
            BLOCK_M=block_m, BLOCK_N=keys_of(tiles, l_sel), WIDE=is_wide(q.dtype), **tiles.options,
        )  # fmt: skip

    tuned("selected_forward", q, V, start, l_sel=l_sel, n_sel=idx_BSGN.shape[-1])
    return out, lse


def selected_backward(
    dout_BSGRV: Tensor, q_BSGRK: Tensor, k_BTGK: Tensor, v_BTGV: Tensor, idx_BSGN: Tensor, pos_BS: Tensor,
    start_BS: Tensor, out_BSGRV: Tensor, lse_BSGR: Tensor, sizes: list[int], scale: float,
) -> Gradients:  # fmt: skip
    (l_sel,) = sizes
    B, S, G, R, K = q_BSGRK.shape
    T, V = v_BTGV.shape[1], v_BTGV.shape[-1]
    dout, q, k, v = rows_contiguous(dout_BSGRV, q_BSGRK, k_BTGK, v_BTGV)
    out, lse = out_BSGRV.contiguous(), lse_BSGR.contiguous()
    dq, delta = torch.empty(q.shape, dtype=q.dtype, device=q.device), torch.empty_like(lse)
    strides = (*dout.stride()[:4], *q.stride()[:4], *k.stride()[:3], *v.stride()[:3])
    common = dict(G=G, R=R, L=l_sel, WIDE=is_wide(q.dtype), **widths(K, V))

    def start_dq(tiles: Tiles, launch: Launch) -> Tensor:
        queries, block_m = tile_of(tiles, R)
        begin, bits, size, last = union(idx_BSGN, pos_BS, start_BS, l_sel, queries)
        n_tiles = triton.cdiv(S, queries)
        launch(
            selected_dq_kernel, (n_tiles, B * G),
            dout, q, k, v, last, begin, bits, size, out, lse, dq, delta, scale, S, T, n_tiles, begin.shape[-1],
            *strides, QUERIES=queries, BLOCK_M=block_m, BLOCK_N=keys_of(tiles, l_sel), **common, **tiles.options,
        )  # fmt: skip
        return last

    sizes_chosen = dict(l_sel=l_sel, n_sel=idx_BSGN.shape[-1])
    last = tuned("selected_dq", q, V, start_dq, **sizes_chosen)
    index = chosen(idx_BSGN, last, start_BS, l_sel, T)
    n_windows = triton.cdiv(T, l_sel)
    first, window = index.piece_first, index.piece_window
    n_pieces = window.numel()
    dk_part = torch.empty((n_pieces, l_sel, K), dtype=torch.float32, device=q.device)
    dv_part = torch.empty((n_pieces, l_sel, V), dtype=torch.float32, device=q.device)

    def start_dkv(tiles: Tiles, launch: Launch) -> None:
        keys = keys_of(tiles, l_sel)
        launch(
            selected_dkv_kernel, (n_pieces, triton.cdiv(l_sel, keys)),
            dout, q, k, v, last, index.query, index.begin, index.offset, window, first, lse, delta, dk_part, dv_part,
            scale, S, T, n_windows, B * G, *strides, PIECE=PIECE, BLOCK_M=tiles.m, BLOCK_N=keys, **common,
            **tiles.options,
        )  # fmt: skip

    tuned("selected_dkv", q, V, start_dkv, **sizes_chosen)
    dk, dv = torch.empty(k.shape, dtype=k.dtype, device=k.device), torch.empty(v.shape, dtype=v.dtype, device=v.device)
    for part, total in ((dk_part, dk), (dv_part, dv)):
        n, main, rest = split_width(part.shape[-1])
        add_pieces_kernel[(n_windows, B * G)](
            part, first, total, T, n_windows, G=G, X=n, X1=main, X2=rest, L=l_sel, BLOCK_N=block_of(l_sel)
        )
    return dq, dk, dv


def tile_of(tiles: Tiles, heads_per_group: int) -> tuple[int, int]:
    """Queries of a tile, and its rows as a power of two."""
    queries = max(1, min(MOST_QUERIES, tiles.m // heads_per_group))
    return queries, max(16, triton.next_power_of_2(queries * heads_per_group))


def keys_of(tiles: Tiles, l_sel: int) -> int:
    """Keys of a tile: a whole block, or a cut of a long one."""
    return min(tiles.n, block_of(l_sel))


def block_of(l_sel: int) -> int:
    return max(16, triton.next_power_of_2(l_sel))
