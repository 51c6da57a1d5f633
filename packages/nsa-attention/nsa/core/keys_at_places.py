"""Gathers keys at places that each query and group chose for itself, and adds to them.

c queries · G kv groups · N chosen blocks · x places in a block · X keys · K key dim
"""

import torch
from torch import Tensor


def keys_at(k_XGK: Tensor, at_cGNx: Tensor) -> Tensor:
    """Keys of each query's own group at these places, [c, G, N, x, K]; places outside are moved inside."""
    rows = row_numbers(at_cGNx, *k_XGK.shape[:2])
    width = k_XGK.shape[-1]
    return k_XGK.reshape(-1, width).index_select(0, rows.flatten()).view(*rows.shape, width)


def row_numbers(at_cGNx: Tensor, n: int, n_groups: int) -> Tensor:
    """Where those keys lie among all keys of all groups, flattened from [n, G]."""
    group_G11 = torch.arange(n_groups, device=at_cGNx.device)[:, None, None]
    return at_cGNx.clamp(0, n - 1) * n_groups + group_G11


def add_rows(total_nX: Tensor, rows_m: Tensor, part_mX: Tensor) -> None:
    """Add each row of `part` to a row of `total`, in an order that does not depend on threads: on a GPU `index_put_`
    sorts and `index_add_` does not; on a CPU `index_add_` takes one row after the other and `index_put_` does not."""
    if total_nX.is_cpu:
        total_nX.index_add_(0, rows_m, part_mX)
    else:
        total_nX.index_put_((rows_m,), part_mX, accumulate=True)
