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

from nsa.geometry import Geometry
from nsa.kernels.portable.chunk import (
    Gradients,
    attend,
    attend_backward,
    budget,
    group_rows,
    new_outputs,
    query_rows,
    row_correction,
    wide,
    wide_zeros,
)

# Arithmetic on hidden keys that a shared load may cost, as a multiple of what the queries chose. A copied key costs
# about as much as this many products with one; measured on a CPU, see docs/LOG.md.
UNION_FACTOR = 6


class _QueryChunk(NamedTuple):
    at: slice
    row: Tensor
    """Rows of [B·T·G, X] with the keys: [B, G, U] for all its queries, or [B, c, G, U] for each."""
    hidden: Tensor
    shared: bool

    def rows(self, x_BSGRX: Tensor) -> Tensor:
        return group_rows(x_BSGRX[:, self.at]) if self.shared else wide(x_BSGRX[:, self.at])

    def unrows(self, x: Tensor, heads_per_group: int) -> Tensor:
        return query_rows(x, heads_per_group) if self.shared else x


def selected_forward(
    q_BSGRK: Tensor, k_BTGK: Tensor, v_BTGV: Tensor, idx_BSGN: Tensor, pos_BS: Tensor, start_BS: Tensor,
    geometry: Geometry, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    out_BSGRV, lse_BSGR = new_outputs(q_BSGRK, v_BTGV)
    k_XK, v_XV, R = _flat(k_BTGK), _flat(v_BTGV), q_BSGRK.shape[3]
    for chunk in _chunks(q_BSGRK, k_BTGK.shape, idx_BSGN, pos_BS, start_BS, geometry.l_sel):
        k, v = _take(k_XK, chunk.row), _take(v_XV, chunk.row)
        out, lse = attend(chunk.rows(q_BSGRK), k, v, chunk.hidden, scale)
        out_BSGRV[:, chunk.at] = chunk.unrows(out, R)
        lse_BSGR[:, chunk.at] = chunk.unrows(lse[..., None], R)[..., 0]
    return out_BSGRV, lse_BSGR


def selected_backward(
    dout_BSGRV: Tensor, q_BSGRK: Tensor, k_BTGK: Tensor, v_BTGV: Tensor, idx_BSGN: Tensor, pos_BS: Tensor,
    start_BS: Tensor, out_BSGRV: Tensor, lse_BSGR: Tensor, dlse_BSGR: Tensor | None, geometry: Geometry, scale: float,
) -> Gradients:  # fmt: skip
    dq_BSGRK = torch.empty_like(q_BSGRK)
    k_XK, v_XV, R = _flat(k_BTGK), _flat(v_BTGV), q_BSGRK.shape[3]
    dk_XK, dv_XV = wide_zeros(k_XK), wide_zeros(v_XV)
    for chunk in _chunks(q_BSGRK, k_BTGK.shape, idx_BSGN, pos_BS, start_BS, geometry.l_sel):
        dout, lse = chunk.rows(dout_BSGRV), chunk.rows(lse_BSGR[..., None])
        dlse = None if dlse_BSGR is None else chunk.rows(dlse_BSGR[..., None])
        delta = row_correction(dout, chunk.rows(out_BSGRV), dlse)
        k, v = _take(k_XK, chunk.row), _take(v_XV, chunk.row)
        dq, dk, dv = attend_backward(dout, chunk.rows(q_BSGRK), k, v, chunk.hidden, lse, delta, scale)
        dq_BSGRK[:, chunk.at] = chunk.unrows(dq, R)
        dk_XK.index_add_(0, chunk.row.flatten(), dk.flatten(0, -2))
        dv_XV.index_add_(0, chunk.row.flatten(), dv.flatten(0, -2))
    return dq_BSGRK, dk_XK.view(k_BTGK.shape).to(k_BTGK.dtype), dv_XV.view(v_BTGV.shape).to(v_BTGV.dtype)


def _chunks(
    q_BSGRK: Tensor, k_shape: torch.Size, idx_BSGN: Tensor, pos_BS: Tensor, start_BS: Tensor, l_sel: int
) -> Iterator[_QueryChunk]:
    B, S, G, R, K = q_BSGRK.shape
    chosen = idx_BSGN.shape[3] * l_sel
    size = max(1, budget(q_BSGRK) // (B * G * R * chosen))
    copied = max(1, 4 * budget(q_BSGRK) // (B * G * chosen * K))
    for s in range(0, S, size):
        at = slice(s, min(S, s + size))
        if shared := _union(at, idx_BSGN[:, at], pos_BS[:, at], start_BS[:, at], k_shape, l_sel):
            yield shared
            continue
        for t in range(s, at.stop, copied):
            part = slice(t, min(at.stop, t + copied))
            yield _copies(part, idx_BSGN[:, part], pos_BS[:, part], start_BS[:, part], k_shape, l_sel)


def _union(
    at: slice, idx_BcGN: Tensor, pos_Bc: Tensor, start_Bc: Tensor, k_shape: torch.Size, l_sel: int
) -> _QueryChunk | None:
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
    return _QueryChunk(at, _row_index(key_BGU, k_shape, group_dim=1), hidden_BGcU[:, :, :, None], shared=True)


def _copies(
    at: slice, idx_BcGN: Tensor, pos_Bc: Tensor, start_Bc: Tensor, k_shape: torch.Size, l_sel: int
) -> _QueryChunk:
    token_BcGU = (idx_BcGN.long()[..., None] * l_sel + torch.arange(l_sel, device=idx_BcGN.device)).flatten(-2)
    key_BcGU = token_BcGU + start_Bc[..., None, None]
    hidden_BcGU = (token_BcGU < 0) | (token_BcGU > pos_Bc[..., None, None]) | _absent(key_BcGU, k_shape)
    key_BcGU = key_BcGU.masked_fill(hidden_BcGU, 0)
    return _QueryChunk(at, _row_index(key_BcGU, k_shape, group_dim=2), hidden_BcGU[..., None, None, :], shared=False)


def _absent(key: Tensor, k_shape: torch.Size) -> Tensor:
    """Chosen keys that are not on the axis: a cache dropped them, or they are not there yet."""
    return (key < 0) | (key >= k_shape[1])


def _row_index(key: Tensor, k_shape: torch.Size, group_dim: int) -> Tensor:
    """Where key t of batch b and group g lies in [B·T·G, X]; batch is dim 0 of `key`."""
    B, T, G, _ = k_shape
    batch = torch.arange(B, device=key.device).view(B, *[1] * (key.dim() - 1))
    group = torch.arange(G, device=key.device).view(G, *[1] * (key.dim() - 1 - group_dim))
    return (batch * T + key) * G + group


def _flat(x_BTGX: Tensor) -> Tensor:
    return x_BTGX.contiguous().flatten(0, 2)


def _take(x_XK: Tensor, row: Tensor) -> Tensor:
    return wide(x_XK.index_select(0, row.flatten())).view(*row.shape, x_XK.shape[-1])
