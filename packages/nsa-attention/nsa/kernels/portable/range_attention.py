"""Sliding and compressed attention, where the queries of a chunk share one range of keys.

Where values are not read (`chunk.READABLE_DEVICES`) the range is every compressed key, and in the sliding branch the
keys are first laid out by query, so that a chunk's range follows from its place in the row.

Shapes as in `nsa.kernels.reference`; additionally c queries of a chunk · U keys that it sees · M = c·R rows.
"""

from collections.abc import Iterator
from math import isqrt
from typing import NamedTuple

import torch
from torch import Tensor

from nsa.geometry import Geometry
from nsa.kernels.interface import BranchInputs
from nsa.kernels.portable.chunk import budget, group_rows, may_read, operand, query_rows


class RangeChunk(NamedTuple):
    """Queries that see keys of lo ≤ t < hi; how both are laid out as matrices."""

    at: slice
    """Slice of the queries."""
    lo: int
    hi: int
    hidden: Tensor
    """Which keys each query does not see."""

    def rows(self, x_BSGRX: Tensor) -> Tensor:
        """The chunk's queries, or anything that belongs to them, as rows (`chunk.operand`)."""
        return group_rows(x_BSGRX[:, self.at])

    def unrows(self, x_BGMX: Tensor, heads_per_group: int) -> Tensor:
        """The way back: [B, c, G, R, X]."""
        return query_rows(x_BGMX, heads_per_group)

    def keys(self, x_BTGX: Tensor) -> Tensor:
        """The chunk's keys or values (`chunk.operand`)."""
        return per_group(x_BTGX[:, self.lo : self.hi])

    def add(self, total_BTGX: Tensor, part_BGUX: Tensor) -> None:
        """Add the gradients of `keys` to those of all keys."""
        total_BTGX[:, self.lo : self.hi] += part_BGUX.transpose(1, 2)


class KeysByQuery(NamedTuple):
    """Sliding attention's keys in the order of the queries: row r is the key w − 1 before query r of the same row.

    Queries that see anything follow one another on the key axis (see `BranchInputs.pos_BS`); how far the two axes are
    apart is a value on the device, one per row.
    """

    key_BU: Tensor
    """The key that each of the S + w − 1 rows holds; those off the axis hold any and are hidden."""
    row_BT: Tensor
    """Where each key went."""

    @classmethod
    def of(cls, x: BranchInputs) -> "KeysByQuery":
        S, w = x.pos_BS.shape[1], x.geometry.w
        sees_BS, apart_BS = x.pos_BS >= 0, x.start_BS + x.pos_BS - _arange(x, S)
        limits = torch.iinfo(torch.int64)
        apart_B1 = apart_BS.long().masked_fill(~sees_BS, limits.min).amax(1, keepdim=True)
        if S > 1:
            nearest_B1 = apart_BS.long().masked_fill(~sees_BS, limits.max).amin(1, keepdim=True)
            torch._assert_async(
                (nearest_B1 >= apart_B1).all(),
                "queries of a row do not follow one another on the key axis, as sliding attention on this device needs",
            )
        before_B1 = apart_B1.masked_fill(apart_B1 == limits.min, 0) - w + 1
        return cls(before_B1 + _arange(x, S + w - 1), _arange(x, x.k_BTGK.shape[1]) - before_B1)

    def lay_out(self, x_BTGX: Tensor) -> Tensor:
        return _rows_at(x_BTGX, self.key_BU)

    def take_back(self, dx_BUGX: Tensor) -> Tensor:
        """Gradients of the laid out keys as those of all keys: zero where no query is near."""
        absent_BT = (self.row_BT < 0) | (self.row_BT >= dx_BUGX.shape[1])
        return _rows_at(dx_BUGX, self.row_BT).masked_fill_(absent_BT[..., None, None], 0)

    def chunks(self, x: BranchInputs) -> Iterator[RangeChunk]:
        """Chunks of `x` as it was before its keys were laid out."""
        (S, w), before_B1 = (x.pos_BS.shape[1], x.geometry.w), self.key_BU[:, :1]
        lo_BS, hi_BS = (at - before_B1 for at in window_bounds(x.pos_BS, x.start_BS, x.geometry, x.k_BTGK.shape[1]))
        length = min(max(w, 64), _chunk_length(x.q_BSGRK, w))  # half of the scores at most are of hidden keys
        for s in range(0, S, length):
            at, end = slice(s, min(S, s + length)), min(S, s + length) + w - 1
            yield RangeChunk(at, s, end, outside(lo_BS[:, at], hi_BS[:, at], s, end))


def range_chunks(x: BranchInputs) -> Iterator[RangeChunk]:
    n_keys = x.k_BTGK.shape[1]
    if x.branch == "sliding":
        (lo_BS, hi_BS) = window_bounds(x.pos_BS, x.start_BS, x.geometry, n_keys)
        most = min(x.geometry.w, n_keys)
    else:
        (lo_BS, hi_BS), most = compressed_bounds(x.pos_BS, x.start_BS, x.geometry, n_keys), n_keys
    for at, lo, hi in key_ranges(x.q_BSGRK, lo_BS, hi_BS, most, n_keys):
        yield RangeChunk(at, lo, hi, outside(lo_BS[:, at], hi_BS[:, at], lo, hi))


def window_bounds(pos_BS: Tensor, start_BS: Tensor, geometry: Geometry, n_keys: int) -> tuple[Tensor, Tensor]:
    end_BS = start_BS + pos_BS + 1
    first_BS = start_BS + (pos_BS - geometry.w + 1).clamp(min=0)
    return first_BS.clamp(0, n_keys), end_BS.clamp(0, n_keys)


def compressed_bounds(pos_BS: Tensor, first_BS: Tensor, geometry: Geometry, n_keys: int) -> tuple[Tensor, Tensor]:
    n_complete_BS = ((pos_BS + 1 - geometry.l) // geometry.d + 1).clamp(min=0)
    return first_BS.clamp(0, n_keys), (first_BS + n_complete_BS).clamp(0, n_keys)


def key_ranges(
    q_BSGRK: Tensor, lo_BS: Tensor, hi_BS: Tensor, most: int, n_keys: int
) -> Iterator[tuple[slice, int, int]]:
    """Chunks of queries, as long as the element budget allows, with the range of keys that each needs: all of them
    where values are not read. `most`: keys that one query sees."""
    S, readable = q_BSGRK.shape[1], may_read(q_BSGRK)
    if S == 0:
        return
    if readable and not lo_BS.numel():
        return  # no rows
    chunk = _chunk_length(q_BSGRK, most if readable else n_keys)
    starts = range(0, S, chunk)
    lo, hi = [0] * len(starts), [n_keys] * len(starts)
    if readable:
        lo = torch.stack([x.amin() for x in lo_BS.split(chunk, 1)]).tolist()
        hi = torch.stack([x.amax() for x in hi_BS.split(chunk, 1)]).tolist()
    for s, first, end in zip(starts, lo, hi, strict=True):
        yield slice(s, min(S, s + chunk)), first, max(first, end)


def _chunk_length(q_BSGRK: Tensor, keys: int) -> int:
    B, S, G, R, _ = q_BSGRK.shape
    rows = budget(q_BSGRK) // max(1, B * G * R)
    return min(S, max(1, min(rows // max(1, keys), isqrt(rows))))  # a window of keys grows with the chunk itself


def outside(lo_Bc: Tensor, hi_Bc: Tensor, lo: int, hi: int) -> Tensor:
    """True where key lo + u is hidden from this query: [B, 1, c, 1, U]."""
    at_U = torch.arange(lo, hi, device=lo_Bc.device)
    return ((at_U < lo_Bc[..., None]) | (at_U >= hi_Bc[..., None]))[:, None, :, None]


def _arange(x: BranchInputs, n: int) -> Tensor:
    return torch.arange(n, device=x.pos_BS.device)


def _rows_at(x_BTGX: Tensor, at_BN: Tensor) -> Tensor:
    """[B, N, G, X]; indices off the axis are moved onto it."""
    B, T = x_BTGX.shape[:2]
    batch_B1 = torch.arange(B, device=at_BN.device)[:, None]
    return x_BTGX[batch_B1, at_BN.clamp(0, T - 1)]


def per_group(x_BUGX: Tensor) -> Tensor:
    return operand(x_BUGX).transpose(1, 2)
