"""How many keys a kernel call reads, counted from the arguments it was given rather than from the formula.

B batch · S queries · G kv groups · N chosen blocks
"""

import torch
from torch import Tensor


def sliding_reads(pos_BS: Tensor, start_BS: Tensor, n_keys: int, w: int) -> Tensor:
    end = (start_BS + pos_BS + 1).clamp(max=n_keys)
    begin = (start_BS + pos_BS + 1 - w).maximum(start_BS).clamp(min=0)
    return (end - begin).clamp(min=0)


def compressed_reads(pos_BS: Tensor, first_BS: Tensor, n_keys: int, l: int, d: int) -> Tensor:
    complete = ((pos_BS + 1 - l) // d + 1).clamp(min=0)
    return ((first_BS + complete).clamp(max=n_keys) - first_BS).clamp(min=0)


def selected_reads(idx_BSGN: Tensor, pos_BS: Tensor, l_sel: int) -> Tensor:
    """Tokens at or before the query in the chosen blocks, per group; a block listed twice is read once."""
    repeated = torch.zeros_like(idx_BSGN, dtype=torch.bool)
    repeated[..., 1:] = idx_BSGN[..., 1:] == idx_BSGN[..., :-1]
    tokens = (pos_BS[..., None, None] + 1 - idx_BSGN.long() * l_sel).clamp(0, l_sel)
    return tokens.masked_fill(repeated | (idx_BSGN < 0), 0).sum(-1)
