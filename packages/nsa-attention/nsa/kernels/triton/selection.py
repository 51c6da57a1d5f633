"""Launches top-n block selection, alone or after the compressed branch, whose log-sum-exp it then reuses.

Shapes as in `nsa.kernels.reference`.
"""

import torch
import triton
from torch import Tensor

from nsa.geometry import Geometry
from nsa.kernels.interface import BranchInputs
from nsa.kernels.triton.autotune import Launch, Work, tuned
from nsa.kernels.triton.bounds import compressed_bounds, key_bounds
from nsa.kernels.triton.device.select import range_lse_kernel, select_kernel
from nsa.kernels.triton.range_attention import range_forward, row_strides, rows_contiguous
from nsa.kernels.triton.tuning import TileSizes, is_wide, split_width


def select_blocks(
    q_BSGRK: Tensor, k_BCGK: Tensor, pos_BS: Tensor, first_BS: Tensor, geometry: Geometry, scale: float
) -> Tensor:
    B, S, G, R, K = q_BSGRK.shape
    q, k = rows_contiguous(q_BSGRK, k_BCGK)
    lse = q.new_empty((B, S, G, R), dtype=torch.float32)
    lo, hi, *_ = compressed_bounds(pos_BS, first_BS, geometry, k.shape[1])

    def prepare(tiles: TileSizes) -> Work:
        arguments = (q, k, lo, hi, lse, scale, S, k.shape[1], *row_strides(q, k))
        constants = dict(G=G, R=R, **_keys(K), BLOCK_M=tiles.m, BLOCK_N=tiles.n, WIDE=is_wide(q.dtype))
        grid = (triton.cdiv(S * R, tiles.m), B * G)
        return Work([Launch(range_lse_kernel, grid, arguments, {**constants, **tiles.options})])

    # The forward's loop, without values.
    for kernel, grid, arguments, constants in tuned("range_forward", q, 0, prepare).launches:
        kernel[grid](*arguments, **constants)
    return _choose(q, k, pos_BS, first_BS, hi, lse, geometry, scale)


def compressed_and_select(x: BranchInputs) -> tuple[Tensor, Tensor, Tensor]:
    bounds = key_bounds(x)
    out, lse = range_forward(x, bounds)
    q, k = rows_contiguous(x.q_BSGRK, x.k_BTGK)
    return out, lse, _choose(q, k, x.pos_BS, x.start_BS, bounds.hi_BS, lse, x.geometry, x.scale)


def _choose(
    q: Tensor, k: Tensor, pos_BS: Tensor, first_BS: Tensor, hi: Tensor, lse: Tensor, geometry: Geometry, scale: float
) -> Tensor:
    B, S, G, R, K = q.shape
    idx = torch.empty((B, S, G, geometry.n_sel), dtype=torch.int32, device=q.device)

    def prepare(tiles: TileSizes) -> Work:
        sizes = select_sizes(geometry, tiles)
        places = (*pos_BS.stride(), *first_BS.stride(), *row_strides(q, k))
        arguments = (q, k, pos_BS, first_BS, hi, lse, idx, scale, S, k.shape[1], R, *places)
        constants = dict(G=G, **_keys(K), **sizes, WIDE=is_wide(q.dtype), **tiles.options)
        return Work([Launch(select_kernel, (triton.cdiv(S, sizes["BLOCK_Q"]), B * G), arguments, constants)])

    g = geometry
    work = tuned("select", q, 0, prepare, l=g.l, d=g.d, l_sel=g.l_sel, n_sel=g.n_sel)
    for kernel, grid, arguments, constants in work.launches:
        kernel[grid](*arguments, **constants)
    return idx


def select_sizes(geometry: Geometry, tiles: TileSizes) -> dict[str, int]:
    """The kernel's constants; where a step has more keys than the tile, its queries are fewer."""
    l, d, l_sel, n_sel = geometry.l, geometry.d, geometry.l_sel, geometry.n_sel
    keep, span = max(16, triton.next_power_of_2(n_sel)), triton.next_power_of_2(l_sel // d)
    queries = max(16, min(tiles.m, tiles.m * tiles.n // (span * keep)))
    return dict(PER_L=l // d, PER_SEL=l_sel // d, L_SEL=l_sel, N_SEL=n_sel, KEEP=keep, SPAN=span, BLOCK_Q=queries)


def _keys(n: int) -> dict[str, int]:
    width = split_width(n)
    return dict(K=n, K1=width.main, K2=width.rest)
