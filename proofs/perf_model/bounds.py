"""Loop iterations of the range-attention kernels (sliding, compressed), computed from the launchers' bounds.

B batch · S queries
"""

import torch
from torch import Tensor

from nsa.kernels.portable.range_attention import compressed_bounds, window_bounds
from nsa.kernels.triton.range_attention import _parts
from nsa.kernels.triton.tuning import TileSizes
from proofs.perf_model.work import LaunchSizes


def bounds(sizes: LaunchSizes, branch: str) -> tuple[Tensor, Tensor, int]:
    """First key and end of every query's range in an unpacked row, and the number of keys."""
    g, pos_BS = sizes.shape.geometry, torch.arange(sizes.length)[None]
    zero_BS = torch.zeros_like(pos_BS)
    if branch == "sliding":
        return *window_bounds(pos_BS, zero_BS, g, sizes.length), sizes.length
    return *compressed_bounds(pos_BS, zero_BS, g, sizes.n_compressed), sizes.n_compressed


def query_tile_trips(sizes: LaunchSizes, branch: str, tiles: TileSizes) -> tuple[Tensor, int]:
    """Count the steps of one group's programs, in their order, the last rows first: a tile of m rows loops from its
    smallest first key, rounded down to n, to its largest end; and how many of all those tiles of keys all its rows
    see."""
    lo_BS, hi_BS, _ = bounds(sizes, branch)
    heads, last = sizes.shape.heads_per_group, sizes.length - 1
    first_row = torch.arange(0, sizes.rows, tiles.m)
    first, end = first_row // heads, ((first_row + tiles.m - 1) // heads).clamp(max=last)
    # Both bounds are monotonic along an unpacked row: a tile's extremes are its ends.
    begin = lo_BS[0, first] // tiles.n
    trips = (_up(hi_BS[0, end], tiles.n) - begin).clamp(min=0)
    inner = (hi_BS[0, first] // tiles.n - _up(lo_BS[0, end], tiles.n)).clamp(min=0)
    return trips.flip(0), int(inner.sum())


def key_tile_trips(sizes: LaunchSizes, branch: str, tiles: TileSizes) -> tuple[Tensor, int, int]:
    """Count the steps of one group, [parts, tiles]: rows in steps of m for every tile of n keys, cut into parts; how
    many of all those steps' rows all see every key; and how many parts there are."""
    lo_BS, hi_BS, n_keys = bounds(sizes, branch)
    s, heads = sizes.shape, sizes.shape.heads_per_group
    q = torch.empty((1, sizes.length, s.n_kv_groups, heads, s.d_k), device="meta")
    parts = _parts(q, n_keys, tiles)
    begin = torch.arange(0, n_keys, tiles.n)
    first, end = torch.searchsorted(hi_BS[0], begin, right=True), torch.searchsorted(lo_BS[0], begin + tiles.n)
    rows = ((end - first).clamp(min=0) * heads).long()
    length = _up(_up(rows, parts), tiles.m) * tiles.m
    mine = torch.arange(parts)[:, None] * length
    last = rows.minimum(mine + length).maximum(mine)
    reaching = torch.searchsorted(hi_BS[0], (begin + tiles.n).clamp(max=n_keys))  # rows from there on see the last key
    late = torch.searchsorted(lo_BS[0], begin, right=True)  # and before that the first
    inner_first = mine + _up(((reaching - first) * heads - mine).clamp(min=0), tiles.m) * tiles.m
    inner = (((late - first) * heads).minimum(last) - inner_first).clamp(min=0) // tiles.m
    return _up(last - mine, tiles.m), int(inner.sum()), parts


def _up(x: Tensor, n: int) -> Tensor:
    """Divided, rounded up."""
    return (x + n - 1) // n
