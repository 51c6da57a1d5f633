"""Selected attention: every query attends to its own blocks.

Neighbouring queries select many of the same blocks. Where a chunk's queries together use few blocks, those are loaded
once and each query hides what it did not select; else every query gets a copy of its own keys, which costs memory
traffic but no arithmetic on keys that no query selected. Which of the two depends on the data: where values are not
read, few queries (as in decode) get copies, and many are computed by windows of keys, in static shapes.

A window is l_sel keys. The blocks that queries chose are sorted by window, stably, and cut into pieces of PIECE that
share one: a piece is a matrix product of queries copied together with keys that are read once for all of them. Each
query then merges its own results, and each key sums over the pieces of its window: every number has one writer, and
sums are in a fixed order. A block of a packed document may lie across two windows, so that every choice has two
entries; in rows of one document windows begin where blocks do.

Shapes as in `nsa.kernels.reference`; additionally c queries of a chunk · U keys that a row of it sees · J blocks
M entries of a query and group (N or 2·N) · E entries of a chunk (B·c·G·M) · W windows of a row · n pieces
P entries of a piece · L = l_sel
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa.kernels.interface import BranchInputs, Gradients
from nsa.kernels.portable.chunk import (
    attend,
    budget,
    gradients,
    group_rows,
    operand,
    query_rows,
    row_correction,
    wide_zeros,
)

# Arithmetic on hidden keys that a shared load may cost, as a multiple of what the queries chose. A copied key costs
# about as much as this many products with one; measured on a CPU, see docs/LOG.md.
UNION_FACTOR = 6


class BlockChunk(NamedTuple):
    """Queries with the blocks that they chose; methods as those of `RangeChunk`."""

    at: slice
    key: Tensor
    """Indices of the keys: [B, G, U] for all its queries, or [B, c, G, U] for each."""
    hidden: Tensor
    shared: bool
    row_of: dict[tuple[int, ...], Tensor]
    """Rows of a matrix with the keys, by how they lie in it (see `as_rows`)."""

    def rows(self, x_BSGRX: Tensor) -> Tensor:
        return group_rows(x_BSGRX[:, self.at]) if self.shared else operand(x_BSGRX[:, self.at])

    def unrows(self, x: Tensor, heads_per_group: int) -> Tensor:
        return query_rows(x, heads_per_group) if self.shared else x

    def keys(self, x_BTGX: Tensor) -> Tensor:
        matrix, steps = _as_rows(x_BTGX)
        return operand(matrix.index_select(0, self._rows_in(x_BTGX, steps))).view(*self.key.shape, x_BTGX.shape[-1])

    def add(self, total_BTGX: Tensor, part: Tensor) -> None:
        matrix, steps = _as_rows(total_BTGX)
        matrix.index_add_(0, self._rows_in(total_BTGX, steps), part.flatten(0, -2))

    def _rows_in(self, x_BTGX: Tensor, steps: tuple[int, int, int]) -> Tensor:
        if steps not in self.row_of:
            per_row, per_key, per_group = steps
            batch = torch.arange(x_BTGX.shape[0], device=self.key.device).mul_(per_row)
            group = torch.arange(x_BTGX.shape[2], device=self.key.device).mul_(per_group)
            first = batch.view(-1, *[1] * (self.key.dim() - 1)) + group[:, None]
            self.row_of[steps] = (self.key * per_key).add_(first).flatten()
        return self.row_of[steps]


def _as_rows(x_BTGX: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
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
    """Chosen blocks, positions and starts of these queries."""
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


PIECE = 32


def windows_forward(x: BranchInputs) -> tuple[Tensor, Tensor]:
    q = x.q_BSGRK
    out_BSGRV = q.new_empty((*q.shape[:-1], x.v_BTGV.shape[-1]))
    lse_BSGR = q.new_empty(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32))
    for at in _chunks(x):
        out_BSGRV[:, at], lse_BSGR[:, at] = _forward(x, at)
    return out_BSGRV, lse_BSGR


def _forward(x: BranchInputs, at: slice) -> tuple[Tensor, Tensor]:
    pieces = _build_pieces(x, at)
    k, v = pieces.keys(x.k_BTGK), pieces.keys(x.v_BTGV)
    out_nMV, lse_nM = attend(pieces.rows(x.q_BSGRK[:, at]), k, v, pieces.hidden, x.scale)
    lse_BcGMR = pieces.of_queries(lse_nM[..., None], -torch.inf).squeeze(-1)
    top_BcGR = lse_BcGMR.amax(3)
    top_BcGR = top_BcGR.masked_fill(top_BcGR == -torch.inf, 0)
    weight_BcGMR = (lse_BcGMR - top_BcGR[:, :, :, None]).exp()
    total_BcGR = weight_BcGMR.sum(3)
    out_BcGRV = pieces.of_queries(out_nMV, 0).mul_(weight_BcGMR[..., None]).sum(3)
    out_BcGRV.div_(total_BcGR.masked_fill(total_BcGR == 0, 1)[..., None])
    return out_BcGRV, top_BcGR + total_BcGR.log()  # −inf where nothing is seen


def windows_backward(
    x: BranchInputs, out_BSGRV: Tensor, lse_BSGR: Tensor, dout_BSGRV: Tensor, dlse_BSGR: Tensor | None
) -> Gradients:
    dq_BSGRK = x.q_BSGRK.new_empty(x.q_BSGRK.shape)
    dk_BTGK, dv_BTGV = wide_zeros(x.k_BTGK), wide_zeros(x.v_BTGV)
    for at in _chunks(x):
        dlse = None if dlse_BSGR is None else dlse_BSGR[:, at, ..., None]
        delta_BcGR1 = row_correction(dout_BSGRV[:, at], out_BSGRV[:, at], dlse)
        pieces = _build_pieces(x, at)
        dq_nMK, dk_nLK, dv_nLV = _backward(x, at, pieces, dout_BSGRV[:, at], lse_BSGR[:, at], delta_BcGR1)
        dq_BSGRK[:, at] = pieces.of_queries(dq_nMK, 0).sum(3)
        dk_BTGK += pieces.sum_by_key(dk_nLK)
        dv_BTGV += pieces.sum_by_key(dv_nLV)
        del pieces, dq_nMK, dk_nLK, dv_nLV  # not to be kept while the next chunk's are made
    return dq_BSGRK, dk_BTGK.to(x.k_BTGK.dtype), dv_BTGV.to(x.v_BTGV.dtype)


def _backward(
    x: BranchInputs, at: slice, pieces: "_WindowPieces", dout_BcGRV: Tensor, lse_BcGR: Tensor, delta_BcGR1: Tensor
) -> Gradients:
    """Gradients of each piece's queries, keys and values."""
    q, dout, k, v = pieces.rows(x.q_BSGRK[:, at]), pieces.rows(dout_BcGRV), pieces.keys(x.k_BTGK), pieces.keys(x.v_BTGV)
    lse, delta = pieces.rows(lse_BcGR[..., None]), pieces.rows(delta_BcGR1)
    return gradients(dout, q, k, v, pieces.hidden, lse, delta, x.scale)


class _WindowPieces(NamedTuple):
    """Entries of a chunk of queries, in pieces that share a window of keys."""

    entry_nP: Tensor
    """Index in [B, c, G, M] of each entry of a piece; the last one again where a piece has fewer."""
    hidden: Tensor
    """[n, P, 1, L]."""
    batch_n1: Tensor
    key_nL: Tensor
    group_n1: Tensor
    """Which keys a piece reads."""
    first_piece: Tensor
    """Number of the first piece of each (batch, group, window), and of those that no window needs: [B·G·W + 1]."""
    place_BcGM: Tensor
    """Where each entry is, counted in entries of pieces."""
    seen_BcGM: Tensor
    """Entries that see a key; others are in no piece."""
    row_BT: Tensor
    """Where each key is in the windows of its row."""

    def rows(self, x_BcGRX: Tensor) -> Tensor:
        """Gather rows of the queries for each entry of a piece: [n, P·R, X]."""
        per_entry = x_BcGRX.flatten(0, 2).index_select(0, (self.entry_nP // self.seen_BcGM.shape[3]).flatten())
        return operand(per_entry).view(self.entry_nP.shape[0], -1, x_BcGRX.shape[-1])

    def keys(self, x_BTGX: Tensor) -> Tensor:
        return operand(x_BTGX[self.batch_n1, self.key_nL, self.group_n1])

    def of_queries(self, x_nMX: Tensor, unseen: float) -> Tensor:
        """Results of pieces by query and entry: [B, c, G, M, R, X]."""
        per_entry = x_nMX.view(self.entry_nP.numel(), -1, x_nMX.shape[-1]).index_select(0, self.place_BcGM.flatten())
        seen = self.seen_BcGM[..., None, None]
        return per_entry.view(*self.seen_BcGM.shape, *per_entry.shape[1:]).masked_fill_(~seen, unseen)

    def sum_by_key(self, x_nLX: Tensor) -> Tensor:
        """Sums over the pieces of each window, in their order: [B, T, G, X]."""
        (B, _, G, _), (n, _, X) = self.seen_BcGM.shape, x_nLX.shape
        all_pieces = torch.arange(n, device=x_nLX.device)
        sums = F.embedding_bag(all_pieces, x_nLX.flatten(1), self.first_piece, mode="sum")[:-1]
        batch_B1 = torch.arange(B, device=x_nLX.device)[:, None]
        return sums.view(B, G, -1, X).transpose(1, 2)[batch_B1, self.row_BT]


def _chunks(x: BranchInputs) -> Iterator[slice]:
    """The queries in chunks, as long as the element budget allows."""
    B, S, G, R, K = x.q_BSGRK.shape
    widest = max(K, x.v_BTGV.shape[-1], x.geometry.l_sel)
    entries = _entries_per_choice(x.start_BS) * x.chosen_BSGN.shape[3]
    size = max(1, budget(x.q_BSGRK) // max(1, B * G * R * entries * widest))
    return (slice(s, min(S, s + size)) for s in range(0, S, size))


def _entries_per_choice(start_BS: Tensor) -> int:
    """One where a row is known to be one document: it has one start, which the tensor repeats without storing it."""
    return 1 if start_BS.stride(1) == 0 else 2


def _build_pieces(x: BranchInputs, at: slice) -> _WindowPieces:
    idx_BcGN, pos_Bc, start_Bc = x.chosen_BSGN[:, at], x.pos_BS[:, at], x.start_BS[:, at]
    (B, _, G, _), device, l_sel, n_keys = idx_BcGN.shape, idx_BcGN.device, x.geometry.l_sel, x.k_BTGK.shape[1]
    entries = _entries_per_choice(start_Bc)
    n_windows = -(-n_keys // l_sel) + 2 - entries
    # Windows that are not blocks begin at key 0; those that are, at the last block's beginning before it.
    origin_B = start_Bc[:, 0].long() % l_sel - l_sel if entries == 1 else torch.zeros_like(start_Bc[:, 0].long())
    origin = origin_B[:, None, None, None]
    start_Bc11, end_Bc11 = start_Bc[..., None, None].long(), (start_Bc + pos_Bc + 1).clamp(max=n_keys)[..., None, None]

    def entries_of(begin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The window of each, and the keys that the query sees there."""
        window_BcGM = (begin - origin) // l_sel
        if entries == 2:
            window_BcGM, begin = torch.cat((window_BcGM, window_BcGM + 1), 3), torch.cat((begin, begin), 3)
        in_window = window_BcGM * l_sel + origin
        first = torch.maximum(begin, in_window).clamp(min=0)
        return window_BcGM, first, torch.minimum(torch.minimum(begin, in_window) + l_sel, end_Bc11)

    window_BcGM, first_BcGM, end_BcGM = entries_of(start_Bc11 + idx_BcGN.long() * l_sel)
    chosen = (idx_BcGN >= 0).repeat(1, 1, 1, entries)
    seen_BcGM = chosen & (first_BcGM < end_BcGM)
    n_places = B * G * n_windows
    row = torch.arange(B, device=device)[:, None] * G + torch.arange(G, device=device)
    of_entry = (row[:, None, :, None] * n_windows + window_BcGM).masked_fill(~seen_BcGM, n_places).flatten()

    in_order, order = of_entry.sort(stable=True)
    offset = torch.searchsorted(in_order, torch.arange(n_places + 1, device=device))
    first_piece = F.pad(((offset.diff() + PIECE - 1) // PIECE).cumsum(0), (1, 0))
    n_pieces = of_entry.numel() // PIECE + min(n_places, of_entry.numel())
    piece_n = torch.arange(n_pieces, device=device)
    place_n = torch.searchsorted(first_piece[1:], piece_n, right=True).clamp(max=n_places - 1)
    end_n1 = offset[place_n + 1][:, None]
    rank_nP = (offset[place_n] + (piece_n - first_piece[place_n]) * PIECE)[:, None] + torch.arange(PIECE, device=device)
    entry_nP = order[torch.minimum(rank_nP, end_n1 - 1).clamp(min=0)]

    row_n, window_n = place_n // n_windows, place_n % n_windows
    batch_n1, group_n1 = (row_n // G)[:, None], (row_n % G)[:, None]
    key_nL = (origin_B[batch_n1] + window_n[:, None] * l_sel) + torch.arange(l_sel, device=device)
    first_nP1 = first_BcGM.flatten()[entry_nP][..., None]
    end_nP1 = end_BcGM.flatten()[entry_nP].masked_fill(rank_nP >= end_n1, 0)[..., None]
    hidden_nPL = (key_nL[:, None] < first_nP1) | (key_nL[:, None] >= end_nP1)

    rank = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=device))
    window = of_entry.clamp(max=n_places - 1)
    place = (first_piece[window] * PIECE + rank - offset[window]).view_as(seen_BcGM).masked_fill(~seen_BcGM, 0)
    row_BT = torch.arange(n_keys, device=device) - origin_B[:, None]
    return _WindowPieces(
        entry_nP, hidden_nPL[:, :, None], batch_n1, key_nL.clamp(0, n_keys - 1), group_n1, first_piece, place,
        seen_BcGM, row_BT,
    )  # fmt: skip
