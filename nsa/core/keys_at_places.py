"""Gathers keys at places that each query and group chose for itself.

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
