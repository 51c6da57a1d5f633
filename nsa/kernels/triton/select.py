"""Launches the choice of blocks. Shapes as in `nsa.kernels.reference`."""

import torch
import triton
from torch import Tensor

from nsa.kernels.portable.shared import compressed_bounds
from nsa.kernels.triton.runs import rows_contiguous
from nsa.kernels.triton.select_kernel import runs_lse_kernel, select_kernel
from nsa.kernels.triton.tile import is_wide, split_width
from nsa.kernels.triton.tuning import choose


def select(
    q_BSGRK: Tensor, k_BCGK: Tensor, pos_BS: Tensor, first_BS: Tensor, l: int, d: int, l_sel: int, n_sel: int,
    scale: float,
) -> Tensor:  # fmt: skip
    B, S, G, R, K = q_BSGRK.shape
    q, k = rows_contiguous(q_BSGRK, k_BCGK)
    lo, hi = (x.to(torch.int32).contiguous() for x in compressed_bounds(pos_BS, first_BS, [l, d], k.shape[1]))
    pos, first = (x.to(torch.int32).contiguous() for x in (pos_BS, first_BS))
    lse = q.new_empty((B, S, G, R), dtype=torch.float32)
    idx = torch.empty((B, S, G, n_sel), dtype=torch.int32, device=q.device)
    width = split_width(K)
    common = dict(G=G, R=R, K=K, K1=width.main, K2=width.rest, WIDE=is_wide(q.dtype))
    strides = (*q.stride()[:4], *k.stride()[:3])
    tiles = choose("runs_forward", K)
    runs_lse_kernel[(triton.cdiv(S * R, tiles.m), B * G)](
        q, k, lo, hi, lse, scale, S, k.shape[1], *strides, BLOCK_M=tiles.m, BLOCK_N=tiles.n, **common, **tiles.options
    )
    tiles = choose("select", K)
    select_kernel[(triton.cdiv(S, tiles.m), B * G)](
        q, k, pos, first, hi, lse, idx, scale, S, k.shape[1], *strides, PER_L=l // d, PER_SEL=l_sel // d, L_SEL=l_sel,
        N_SEL=n_sel, KEEP=max(16, triton.next_power_of_2(n_sel)), BLOCK_Q=tiles.m, **common, **tiles.options,
    )  # fmt: skip
    return idx
