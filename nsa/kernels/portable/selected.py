"""Selected attention: every query attends to its own blocks.

Neighbouring queries select many of the same blocks. Where a chunk's queries together use few blocks, those are loaded
once and each query hides what it did not select; else every query gets a copy of its own keys, which costs memory
traffic but no arithmetic on keys that no query selected.

Shapes as in `nsa.kernels.reference`; additionally c queries of a chunk · U keys that a row of it sees · J blocks.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from nsa.kernels.interface import BranchInputs
from nsa.kernels.portable.chunk import budget, group_rows, query_rows, wide

# Arithmetic on hidden keys that a shared load may cost, as a multiple of what the queries chose. A copied key costs
# about as much as this many products with one; measured on a CPU, see docs/LOG.md.
UNION_FACTOR = 6


class BlockChunk(NamedTuple):
    """Queries with the blocks that they chose."""

    at: slice
    row: Tensor
    """Rows of [B·T·G, X] with the keys: [B, G, U] for all its queries, or [B, c, G, U] for each."""
    hidden: Tensor
    shared: bool

    def rows(self, x_BSGRX: Tensor) -> Tensor:
        return group_rows(x_BSGRX[:, self.at]) if self.shared else wide(x_BSGRX[:, self.at])

    def unrows(self, x: Tensor, heads_per_group: int) -> Tensor:
        return query_rows(x, heads_per_group) if self.shared else x

    def keys(self, x_BTGX: Tensor) -> Tensor:
        return wide(x_BTGX.flatten(0, 2).index_select(0, self.row.flatten())).view(*self.row.shape, x_BTGX.shape[-1])

    def add(self, total_BTGX: Tensor, part: Tensor) -> None:
        total_BTGX.flatten(0, 2).index_add_(0, self.row.flatten(), part.flatten(0, -2))


def selected_chunks(x: BranchInputs) -> Iterator[BlockChunk]:
    B, S, G, R, K = x.q_BSGRK.shape
    l_sel, k_shape = x.geometry.l_sel, x.k_BTGK.shape
    chosen = x.chosen_BSGN.shape[3] * l_sel
    size = max(1, budget(x.q_BSGRK) // (B * G * R * chosen))
    copied = max(1, 4 * budget(x.q_BSGRK) // (B * G * chosen * K))
    for s in range(0, S, size):
        at = slice(s, min(S, s + size))
        if shared := _union(at, *_of_queries(x, at), k_shape, l_sel):
            yield shared
            continue
        for t in range(s, at.stop, copied):
            part = slice(t, min(at.stop, t + copied))
            yield _copies(part, *_of_queries(x, part), k_shape, l_sel)


def _of_queries(x: BranchInputs, at: slice) -> tuple[Tensor, Tensor, Tensor]:
    """Their chosen blocks, positions and starts."""
    return x.chosen_BSGN[:, at], x.pos_BS[:, at], x.start_BS[:, at]


def _union(
    at: slice, idx_BcGN: Tensor, pos_Bc: Tensor, start_Bc: Tensor, k_shape: torch.Size, l_sel: int
) -> BlockChunk | None:
    """All blocks that the chunk's queries chose, once each; None if they are too many or of several documents."""
    if bool((start_Bc != start_Bc[:, :1]).any()):
        return None
    n_blocks = int(idx_BcGN.max()) + 1
    chose_BcGJ = torch.zeros(*idx_BcGN.shape[:3], n_blocks + 1, dtype=torch.bool, device=idx_BcGN.device)
    chose_BcGJ.scatter_(3, idx_BcGN.long().masked_fill(idx_BcGN < 0, n_blocks), True)
    used_BGJ = chose_BcGJ[..., :n_blocks].any(1)
    n_used = int(used_BGJ.sum(-1).max())
    if n_used > UNION_FACTOR * idx_BcGN.shape[3]:
        return None
    # Used blocks first; a group that uses fewer than another gets some that all its queries hide.
    block_BGJ = used_BGJ.byte().argsort(dim=-1, descending=True, stable=True)[..., :n_used]
    token_BGU = (block_BGJ[..., None] * l_sel + torch.arange(l_sel, device=block_BGJ.device)).flatten(-2)
    chose_BGcJ = chose_BcGJ.transpose(1, 2).gather(3, block_BGJ[:, :, None].expand(-1, -1, idx_BcGN.shape[1], -1))
    key_BGU = token_BGU + start_Bc[:, :1, None]
    token_BGU = token_BGU.masked_fill(_absent(key_BGU, k_shape), torch.iinfo(token_BGU.dtype).max)  # after every query
    hidden_BGcU = ~chose_BGcJ.repeat_interleave(l_sel, -1)
    hidden_BGcU |= token_BGU[:, :, None] > pos_Bc[:, None, :, None]
    key_BGU = key_BGU.clamp(0, k_shape[1] - 1)
    return BlockChunk(at, _row_index(key_BGU, k_shape, group_dim=1), hidden_BGcU[:, :, :, None], shared=True)


def _copies(
    at: slice, idx_BcGN: Tensor, pos_Bc: Tensor, start_Bc: Tensor, k_shape: torch.Size, l_sel: int
) -> BlockChunk:
    token_BcGU = (idx_BcGN.long()[..., None] * l_sel + torch.arange(l_sel, device=idx_BcGN.device)).flatten(-2)
    key_BcGU = token_BcGU + start_Bc[..., None, None]
    hidden_BcGU = (token_BcGU < 0) | (token_BcGU > pos_Bc[..., None, None]) | _absent(key_BcGU, k_shape)
    key_BcGU = key_BcGU.masked_fill(hidden_BcGU, 0)
    return BlockChunk(at, _row_index(key_BcGU, k_shape, group_dim=2), hidden_BcGU[..., None, None, :], shared=False)


def _absent(key: Tensor, k_shape: torch.Size) -> Tensor:
    """Chosen keys that are not on the axis: a cache dropped them, or they are not there yet."""
    return (key < 0) | (key >= k_shape[1])


def _row_index(key: Tensor, k_shape: torch.Size, group_dim: int) -> Tensor:
    """Where key t of batch b and group g lies in [B·T·G, X]; batch is dim 0 of `key`."""
    B, T, G, _ = k_shape
    batch = torch.arange(B, device=key.device).view(B, *[1] * (key.dim() - 1))
    group = torch.arange(G, device=key.device).view(G, *[1] * (key.dim() - 1 - group_dim))
    return (batch * T + key) * G + group
