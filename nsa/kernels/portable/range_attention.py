"""Sliding and compressed attention: the queries of a chunk share one range of keys.

Shapes as in `nsa.kernels.reference`; additionally c queries of a chunk · U keys that it sees · M = c·R rows.
"""

from collections.abc import Iterator
from math import isqrt
from typing import NamedTuple

import torch
from torch import Tensor

from nsa.geometry import Geometry
from nsa.kernels.interface import BranchInputs
from nsa.kernels.portable.chunk import budget, group_rows, query_rows, wide


class RangeChunk(NamedTuple):
    """Queries that see keys of lo ≤ t < hi."""

    at: slice
    lo: int
    hi: int
    hidden: Tensor

    def rows(self, x_BSGRX: Tensor) -> Tensor:
        return group_rows(x_BSGRX[:, self.at])

    def unrows(self, x_BGMX: Tensor, heads_per_group: int) -> Tensor:
        return query_rows(x_BGMX, heads_per_group)

    def keys(self, x_BTGX: Tensor) -> Tensor:
        return per_group(x_BTGX[:, self.lo : self.hi])

    def add(self, total_BTGX: Tensor, part_BGUX: Tensor) -> None:
        total_BTGX[:, self.lo : self.hi] += part_BGUX.transpose(1, 2)


def range_chunks(x: BranchInputs) -> Iterator[RangeChunk]:
    n_keys = x.k_BTGK.shape[1]
    if x.branch == "sliding":
        (lo_BS, hi_BS), most = window_bounds(x.pos_BS, x.start_BS, x.geometry, n_keys), x.geometry.w
    else:
        (lo_BS, hi_BS), most = compressed_bounds(x.pos_BS, x.start_BS, x.geometry, n_keys), n_keys
    for at, lo, hi in key_ranges(x.q_BSGRK, lo_BS, hi_BS, most):
        yield RangeChunk(at, lo, hi, outside(lo_BS[:, at], hi_BS[:, at], lo, hi))


def window_bounds(pos_BS: Tensor, start_BS: Tensor, geometry: Geometry, n_keys: int) -> tuple[Tensor, Tensor]:
    end_BS = start_BS + pos_BS + 1
    first_BS = start_BS + (pos_BS - geometry.w + 1).clamp(min=0)
    return first_BS.clamp(0, n_keys), end_BS.clamp(0, n_keys)


def compressed_bounds(pos_BS: Tensor, first_BS: Tensor, geometry: Geometry, n_keys: int) -> tuple[Tensor, Tensor]:
    n_complete_BS = ((pos_BS + 1 - geometry.l) // geometry.d + 1).clamp(min=0)
    return first_BS.clamp(0, n_keys), (first_BS + n_complete_BS).clamp(0, n_keys)


def key_ranges(q_BSGRK: Tensor, lo_BS: Tensor, hi_BS: Tensor, keys: int) -> Iterator[tuple[slice, int, int]]:
    """Chunks of queries, as long as the element budget allows, with the range of keys that each needs."""
    B, S, G, R, _ = q_BSGRK.shape
    if S == 0:
        return
    rows = budget(q_BSGRK) // (B * G * R)
    chunk = min(S, max(1, min(rows // max(1, keys), isqrt(rows))))  # a window of keys grows with the chunk itself
    starts = range(0, S, chunk)
    # One transfer for all chunks, so that an accelerator is not synchronized at each.
    lo = torch.stack([x.amin() for x in lo_BS.split(chunk, 1)]).tolist()
    hi = torch.stack([x.amax() for x in hi_BS.split(chunk, 1)]).tolist()
    for s, first, end in zip(starts, lo, hi, strict=True):
        yield slice(s, min(S, s + chunk)), first, max(first, end)


def outside(lo_Bc: Tensor, hi_Bc: Tensor, lo: int, hi: int) -> Tensor:
    """True where key lo + u is hidden from this query: [B, 1, c, 1, U]."""
    at_U = torch.arange(lo, hi, device=lo_Bc.device)
    return ((at_U < lo_Bc[..., None]) | (at_U >= hi_Bc[..., None]))[:, None, :, None]


def per_group(x_BUGX: Tensor) -> Tensor:
    return wide(x_BUGX).transpose(1, 2)
