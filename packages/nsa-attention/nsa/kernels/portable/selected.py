"""Selected attention: every query attends to its own blocks.

Neighbouring queries select many of the same blocks. Where a chunk's queries together use few blocks, those are loaded
once and each query hides what it did not select; else every query gets a copy of its own keys, which costs memory
traffic but no arithmetic on keys that no query selected. Which of the two depends on the data: where values are not
read, few queries (as in decode) get copies, and `key_windows` computes many.

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
    key: Tensor
    """Indices of the keys: [B, G, U] for all its queries, or [B, c, G, U] for each."""
    hidden: Tensor
    shared: bool
    row_of: dict[tuple[int, ...], Tensor]
    """Rows of a matrix with the keys, by how they lie in it (see `as_rows`)."""

    def rows(self, x_BSGRX: Tensor) -> Tensor:
        return group_rows(x_BSGRX[:, self.at]) if self.shared else wide(x_BSGRX[:, self.at])

    def unrows(self, x: Tensor, heads_per_group: int) -> Tensor:
        return query_rows(x, heads_per_group) if self.shared else x

    def keys(self, x_BTGX: Tensor) -> Tensor:
        matrix, steps = as_rows(x_BTGX)
        return wide(matrix.index_select(0, self._rows_in(x_BTGX, steps))).view(*self.key.shape, x_BTGX.shape[-1])

    def add(self, total_BTGX: Tensor, part: Tensor) -> None:
        matrix, steps = as_rows(total_BTGX)
        matrix.index_add_(0, self._rows_in(total_BTGX, steps), part.flatten(0, -2))

    def _rows_in(self, x_BTGX: Tensor, steps: tuple[int, int, int]) -> Tensor:
        if steps not in self.row_of:
            per_row, per_key, per_group = steps
            batch = torch.arange(x_BTGX.shape[0], device=self.key.device).mul_(per_row)
            group = torch.arange(x_BTGX.shape[2], device=self.key.device).mul_(per_group)
            first = batch.view(-1, *[1] * (self.key.dim() - 1)) + group[:, None]
            self.row_of[steps] = (self.key * per_key).add_(first).flatten()
        return self.row_of[steps]


def as_rows(x_BTGX: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
    """Keys where they lie, as a matrix [n, X], and how many of its rows are between batches, tokens and groups.

    Keys of a cache, or of a projection for several branches, are not next to each other; they are copied only if they
    do not lie on a grid of rows.
    """
    X, strides = x_BTGX.shape[-1], x_BTGX.stride()
    if x_BTGX.numel() == 0 or strides[3] != 1 or any(stride % X for stride in strides[:3]):
        x_BTGX = x_BTGX.contiguous()
        strides = x_BTGX.stride()
    per_row, per_key, per_group = (stride // X for stride in strides[:3])
    B, T, G, _ = x_BTGX.shape
    n = 1 + (B - 1) * per_row + (T - 1) * per_key + (G - 1) * per_group
    return x_BTGX.as_strided((n, X), (X, 1)), (per_row, per_key, per_group)


def selected_chunks(x: BranchInputs) -> Iterator[BlockChunk]:
    B, S, G, R, _ = x.q_BSGRK.shape
    l_sel, n_keys = x.geometry.l_sel, x.k_BTGK.shape[1]
    size = max(1, budget(x.q_BSGRK) // max(1, B * G * R * x.chosen_BSGN.shape[3] * l_sel))
    for s in range(0, S if B else 0, size):
        at = slice(s, min(S, s + size))
        if shared := _union(at, *_of_queries(x, at), n_keys, l_sel):
            yield shared
        else:
            yield from copied_chunks(x, at)


def copied_chunks(x: BranchInputs, within: slice = slice(None)) -> Iterator[BlockChunk]:
    """A copy of its own keys for every query."""
    B, S, G, _, K = x.q_BSGRK.shape
    l_sel, n_keys = x.geometry.l_sel, x.k_BTGK.shape[1]
    size = max(1, 4 * budget(x.q_BSGRK) // max(1, B * G * x.chosen_BSGN.shape[3] * l_sel * K))
    first, end, _ = within.indices(S)
    for s in range(first, end, size):
        at = slice(s, min(end, s + size))
        yield _copies(at, *_of_queries(x, at), n_keys, l_sel)


def few_queries(x: BranchInputs) -> bool:
    """Whether the keys that all queries chose are no more than there are, counted once for each query."""
    n_chosen = x.q_BSGRK.shape[1] * x.chosen_BSGN.shape[3]
    return n_chosen <= max(x.chosen_BSGN.shape[3], x.k_BTGK.shape[1] // x.geometry.l_sel)


def _of_queries(x: BranchInputs, at: slice) -> tuple[Tensor, Tensor, Tensor]:
    """Their chosen blocks, positions and starts."""
    return x.chosen_BSGN[:, at], x.pos_BS[:, at], x.start_BS[:, at]


def _union(at: slice, idx_BcGN: Tensor, pos_Bc: Tensor, start_Bc: Tensor, n_keys: int, l_sel: int) -> BlockChunk | None:
    """All blocks that the chunk's queries chose, once each; None if they are too many or of several documents."""
    if bool((start_Bc != start_Bc[:, :1]).any()):
        return None
    # A block after its query is hidden anyway; however far it is, it must not need a place in the table below.
    idx_BcGN = idx_BcGN.masked_fill(idx_BcGN.long() * l_sel > pos_Bc[..., None, None], -1)
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
    token_BGU = token_BGU.masked_fill(_absent(key_BGU, n_keys), torch.iinfo(token_BGU.dtype).max)  # after every query
    hidden_BGcU = ~chose_BGcJ.repeat_interleave(l_sel, -1)
    hidden_BGcU |= token_BGU[:, :, None] > pos_Bc[:, None, :, None]
    return BlockChunk(at, key_BGU.clamp(0, n_keys - 1), hidden_BGcU[:, :, :, None], True, {})


def _copies(at: slice, idx_BcGN: Tensor, pos_Bc: Tensor, start_Bc: Tensor, n_keys: int, l_sel: int) -> BlockChunk:
    token_BcGU = (idx_BcGN.long()[..., None] * l_sel + torch.arange(l_sel, device=idx_BcGN.device)).flatten(-2)
    key_BcGU = token_BcGU + start_Bc[..., None, None]
    hidden_BcGU = (token_BcGU < 0) | (token_BcGU > pos_Bc[..., None, None]) | _absent(key_BcGU, n_keys)
    return BlockChunk(at, key_BcGU.masked_fill(hidden_BcGU, 0), hidden_BcGU[..., None, None, :], False, {})


def _absent(key: Tensor, n_keys: int) -> Tensor:
    """Chosen keys that are not on the axis: a cache dropped them, or they are not there yet."""
    return (key < 0) | (key >= n_keys)
