"""Sliding and compressed attention, where the queries of a chunk share one range of keys; top-n block selection.

Where values are not read (`chunk.READABLE_DEVICES`) the range is every compressed key, and in the sliding branch the
keys are first laid out by query, so that a chunk's range follows from its place in the row. Selection: compressed
probabilities → mass per selection block → the best n_sel, exact.

Shapes as in `nsa.kernels.reference`; additionally c queries of a chunk · U keys that it sees · M = c·R rows.
"""

from collections.abc import Iterator
from math import isqrt
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa.geometry import Geometry
from nsa.kernels.interface import BranchInputs
from nsa.kernels.portable.chunk import budget, group_rows, may_read, query_rows, scores, softmax, wide


class RangeChunk(NamedTuple):
    """Queries that see keys of lo ≤ t < hi; how both are laid out as matrices."""

    at: slice
    """Slice of the queries."""
    lo: int
    hi: int
    hidden: Tensor
    """Which keys each query does not see."""

    def rows(self, x_BSGRX: Tensor) -> Tensor:
        """The chunk's queries, or anything that belongs to them, as rows in fp32 or wider."""
        return group_rows(x_BSGRX[:, self.at])

    def unrows(self, x_BGMX: Tensor, heads_per_group: int) -> Tensor:
        """The way back: [B, c, G, R, X]."""
        return query_rows(x_BGMX, heads_per_group)

    def keys(self, x_BTGX: Tensor) -> Tensor:
        """The chunk's keys or values, in fp32 or wider."""
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
    for at, lo, hi in _key_ranges(x.q_BSGRK, lo_BS, hi_BS, most, n_keys):
        yield RangeChunk(at, lo, hi, outside(lo_BS[:, at], hi_BS[:, at], lo, hi))


def window_bounds(pos_BS: Tensor, start_BS: Tensor, geometry: Geometry, n_keys: int) -> tuple[Tensor, Tensor]:
    end_BS = start_BS + pos_BS + 1
    first_BS = start_BS + (pos_BS - geometry.w + 1).clamp(min=0)
    return first_BS.clamp(0, n_keys), end_BS.clamp(0, n_keys)


def compressed_bounds(pos_BS: Tensor, first_BS: Tensor, geometry: Geometry, n_keys: int) -> tuple[Tensor, Tensor]:
    n_complete_BS = ((pos_BS + 1 - geometry.l) // geometry.d + 1).clamp(min=0)
    return first_BS.clamp(0, n_keys), (first_BS + n_complete_BS).clamp(0, n_keys)


def _key_ranges(
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
    return wide(x_BUGX).transpose(1, 2)


def select(
    q_BSGRK: Tensor, k_BCGK: Tensor, pos_BS: Tensor, first_BS: Tensor, geometry: Geometry, scale: float
) -> Tensor:
    B, S, G, R, _ = q_BSGRK.shape
    l_sel = geometry.l_sel
    idx_BSGN = torch.full((B, S, G, geometry.n_sel), -1, dtype=torch.int32, device=q_BSGRK.device)
    weight = _overlap_weights(geometry, q_BSGRK.device)
    n = k_BCGK.shape[1]
    lo_BS, hi_BS = compressed_bounds(pos_BS, first_BS, geometry, n)
    most_blocks = None if may_read(q_BSGRK) else _most_blocks(n, pos_BS, geometry)
    for at, lo, hi in _key_ranges(q_BSGRK, lo_BS, hi_BS, n, n):
        pos, first = pos_BS[:, at], first_BS[:, at]
        n_blocks = max(0, int(pos.max()) // l_sel + 1) if most_blocks is None else most_blocks
        if n_blocks <= geometry.n_sel:  # everything that is visible is chosen, whatever its score
            idx_BSGN[:, at, :, :n_blocks] = _all_blocks(pos, l_sel, n_blocks)
            continue
        q_BGMK = group_rows(q_BSGRK[:, at])
        hidden = outside(lo_BS[:, at], hi_BS[:, at], lo, hi)
        e_BGMU, total_BGM1, _ = softmax(scores(q_BGMK, per_group(k_BCGK[:, lo:hi]), scale), hidden)
        mass_BcGU = (e_BGMU / total_BGM1).unflatten(2, (-1, R)).sum(3).transpose(1, 2)
        mass_BcGU = _rebase(mass_BcGU, first - lo)
        score_BcGJ = _per_block(mass_BcGU, weight, n_blocks, geometry)
        idx_BSGN[:, at] = _top(score_BcGJ, pos, geometry)
    return idx_BSGN


def _most_blocks(n_compressed: int, pos_BS: Tensor, geometry: Geometry) -> int:
    """Blocks of the longest row that has so many compressed keys."""
    longest = (n_compressed - 1) * geometry.d + geometry.l + geometry.d - 1
    n_blocks = geometry.n_blocks(longest)
    torch._assert_async(
        (pos_BS < n_blocks * geometry.l_sel).all(), "a query's position is past all blocks of the compressed keys"
    )
    return n_blocks


def _overlap_weights(geometry: Geometry, device: torch.device) -> Tensor:
    """Strides a block shares with the compressed blocks beginning −(l/d − 1) … l_sel/d − 1 strides after it."""
    l, d, l_sel = geometry.l, geometry.d, geometry.l_sel
    begin = torch.arange(1 - l // d, l_sel // d, device=device) * d
    return (torch.clamp(begin + l, max=l_sel) - begin.clamp(min=0)).float() / d


def _rebase(mass_BcGU: Tensor, first_Bc: Tensor) -> Tensor:
    """Column 0 becomes compressed block 0 of the query's own document, which lies at column `first`."""
    U = mass_BcGU.shape[-1]
    if U == 0 or (may_read(first_Bc) and not bool(first_Bc.any())):
        return mass_BcGU
    source_BcU = torch.arange(U, device=mass_BcGU.device) + first_Bc[..., None]
    inside_BcU = (source_BcU >= 0) & (source_BcU < U)
    index = source_BcU.clamp(0, U - 1)[:, :, None].expand_as(mass_BcGU)
    return mass_BcGU.gather(-1, index) * inside_BcU[:, :, None]


def _per_block(mass_BcGU: Tensor, weight: Tensor, n_blocks: int, geometry: Geometry) -> Tensor:
    per_l, per_l_sel = geometry.l // geometry.d, geometry.l_sel // geometry.d
    columns = per_l_sel * n_blocks
    padded = F.pad(mass_BcGU, (per_l - 1, columns - mass_BcGU.shape[-1]))
    return padded.unfold(-1, per_l_sel + per_l - 1, per_l_sel) @ weight.to(padded.dtype)


def _all_blocks(pos_Bc: Tensor, l_sel: int, n_blocks: int) -> Tensor:
    j_J = torch.arange(n_blocks, dtype=torch.int32, device=pos_Bc.device)
    return torch.where(j_J <= (pos_Bc // l_sel)[..., None], j_J, -1)[:, :, None]


def _top(score_BcGJ: Tensor, pos_Bc: Tensor, geometry: Geometry) -> Tensor:
    n_blocks = score_BcGJ.shape[-1]
    j_J = torch.arange(n_blocks, device=pos_Bc.device)
    own_Bc1 = (pos_Bc // geometry.l_sel)[..., None]
    forced_BcJ = (j_J == 0) | (j_J == own_Bc1) | (j_J == own_Bc1 - 1)
    score = score_BcGJ.float().nan_to_num(0.0).masked_fill(forced_BcJ[:, :, None], torch.inf)
    score = score.masked_fill((j_J > own_Bc1)[:, :, None], -torch.inf)
    # Scores are ≥ 0 or ±inf, so their bits order as integers do. With the index below them no two keys are equal:
    # the choice is exact and the same on every device, and ties go to the lower index.
    key = score.view(torch.int32).long() << 32 | (n_blocks - j_J)
    key = key.topk(geometry.n_sel, dim=-1).values
    block = n_blocks - (key & 0xFFFFFFFF)
    block = block.masked_fill(key < 0, n_blocks).sort(-1).values
    return block.masked_fill(block == n_blocks, -1).to(torch.int32)
