"""Who chose what, turned round in two ways, on the device and without asking it anything.

Forward and dQ: the blocks that a tile of queries chose together, each once, with a bit per query (`Union`).
dK and dV: the queries that chose each window of keys, in order (`Chosen`). A window is l_sel keys on the absolute axis;
a block of a packed document may lie across two. Every key belongs to one window, hence to one writer.

B batch · S queries · T keys · G kv groups · N chosen blocks · Q queries of a tile · W windows
"""

from typing import NamedTuple

import torch
from torch import Tensor

_NONE = torch.iinfo(torch.int32).max
MOST_QUERIES = 32  # bits of a mask


class Union(NamedTuple):
    begin: Tensor
    """First key of each block that the tile's queries chose: int32 [B, tiles, G, Q·N], ascending, `size` of them."""
    bits: Tensor
    """Which of the tile's queries chose it."""
    size: Tensor
    """How many there are: [B, tiles, G]."""


class Chosen(NamedTuple):
    query: Tensor
    """int32, sorted by (batch, group, window), then by query; those that belong to no window come last."""
    begin: Tensor
    """First key of the block by which each of them got here."""
    offset: Tensor
    """Where each (batch, group, window) begins in them: int32 [B·G·W + 1]."""


def first_keys(idx_BSGN: Tensor, start_BS: Tensor, l_sel: int) -> Tensor:
    """The first key of each chosen block on the key axis; _NONE where there is no block."""
    begin = idx_BSGN * l_sel + start_BS[:, :, None, None].to(torch.int32)
    return begin.masked_fill(idx_BSGN < 0, _NONE)


def union(idx_BSGN: Tensor, start_BS: Tensor, l_sel: int, n_queries: int) -> Union:
    assert n_queries <= MOST_QUERIES
    B, S, G, N = idx_BSGN.shape
    begin = first_keys(idx_BSGN, start_BS, l_sel)
    begin = torch.nn.functional.pad(begin, (0, 0, 0, 0, 0, -S % n_queries), value=_NONE)
    begin = begin.view(B, -1, n_queries, G, N).transpose(2, 3).flatten(-2)
    begin, source = begin.sort(dim=-1, stable=True)
    new = begin != _NONE
    new[..., 1:] &= begin[..., 1:] != begin[..., :-1]
    slot = new.cumsum(-1) - 1
    slot = slot.masked_fill(begin == _NONE, begin.shape[-1])  # a column for what is nothing, cut off again
    shape = (*begin.shape[:-1], begin.shape[-1] + 1)
    first = torch.full(shape, _NONE, dtype=torch.int32, device=begin.device).scatter_(-1, slot, begin)
    bit = torch.ones_like(source) << (source // N)
    bits = torch.zeros(shape, dtype=torch.int64, device=begin.device).scatter_add_(-1, slot, bit)
    bits = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32)
    return Union(first[..., :-1].contiguous(), bits[..., :-1].contiguous(), new.sum(-1, dtype=torch.int32))


def chosen(idx_BSGN: Tensor, pos_BS: Tensor, start_BS: Tensor, l_sel: int, n_keys: int) -> Chosen:
    B, S, G, N = idx_BSGN.shape
    windows = -(-n_keys // l_sel)
    begin = first_keys(idx_BSGN, start_BS, l_sel).permute(0, 2, 1, 3)  # batch, group, query, block: queries ascend
    end = (start_BS + pos_BS).to(torch.int32)[:, None, :, None]
    at = (torch.arange(B, device=idx_BSGN.device)[:, None] * G + torch.arange(G, device=idx_BSGN.device))[
        ..., None, None
    ]
    nowhere = B * G * windows
    one = begin // l_sel
    two = one + 1
    none = begin == _NONE
    first = (at * windows + one).masked_fill(none, nowhere)
    across = ~none & (begin % l_sel != 0) & (two * l_sel <= end) & (two < windows)
    second = (at * windows + two).masked_fill(~across, nowhere)
    where = torch.stack((first, second), -1).flatten()
    where, source = where.sort(stable=True)
    begin2 = torch.stack((begin, begin), -1).flatten()
    query = (source // (2 * N)) % S
    offset = torch.searchsorted(where, torch.arange(nowhere + 1, device=where.device))
    return Chosen(query.to(torch.int32), begin2[source].contiguous(), offset.to(torch.int32))
