"""Ranges of visible keys per query, and of queries per tile of keys. B batch · S queries

The bounds are those of `nsa.kernels.portable.range_attention`. The extreme bounds of each chunk of queries are stored
too: the queries that may see a tile of keys are then found in the first and the last chunk that touch it, whatever the
bounds' order.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.geometry import Geometry
from nsa.kernels.interface import BranchInputs
from nsa.kernels.triton.launch import launch
from nsa.kernels.triton.tile import VARYING


@triton.jit(do_not_specialize=VARYING)
def bounds_kernel(
    position, origin, lo, hi, reach, ahead, S, n_keys, position_b, position_s, origin_b, origin_s,
    W: tl.constexpr, L: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A window of W tokens, or, if W is 0, the blocks of L tokens every D that are complete."""
    chunk, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    query = chunk * CHUNK + tl.arange(0, CHUNK)
    ok = query < S
    pos = tl.load(position + b * position_b + query.to(tl.int64) * position_s, mask=ok, other=0).to(tl.int32)
    start = tl.load(origin + b * origin_b + query.to(tl.int64) * origin_s, mask=ok, other=0).to(tl.int32)
    if W > 0:
        first, end = start + tl.maximum(pos - W + 1, 0), start + pos + 1
    else:
        first, end = start, start + tl.where(pos + 1 >= L, (pos + 1 - L) // D + 1, 0)
    first = tl.minimum(tl.maximum(first, 0), n_keys)
    end = tl.minimum(tl.maximum(end, 0), n_keys)
    tl.store(lo + b * S + query, first, mask=ok)
    tl.store(hi + b * S + query, end, mask=ok)
    at = b * tl.num_programs(0) + chunk
    tl.store(reach + at, tl.max(tl.where(ok, end, -1)))
    tl.store(ahead + at, tl.min(tl.where(ok, first, 2147483647)))


@triton.jit(do_not_specialize=VARYING)
def seen_by_kernel(
    lo, hi, reach, ahead, seen_first, seen_end, S, n_chunks, N: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """For a tile of N keys: the first query that reaches past its first key, the end of those that begin in time."""
    tile, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    begin = tile * N
    early, late = n_chunks, -1
    for c in tl.range(0, n_chunks, BLOCK):
        chunk = c + tl.arange(0, BLOCK)
        ok = chunk < n_chunks
        past = tl.load(reach + b * n_chunks + chunk, mask=ok, other=-1) > begin
        before = tl.load(ahead + b * n_chunks + chunk, mask=ok, other=2147483647) < begin + N
        early = tl.minimum(early, tl.min(tl.where(past, chunk, n_chunks)))
        late = tl.maximum(late, tl.max(tl.where(before, chunk, -1)))
    step = tl.arange(0, CHUNK)
    query = early * CHUNK + step
    past = tl.load(hi + b * S + query, mask=query < S, other=-1) > begin
    tl.store(seen_first + b * tl.num_programs(0) + tile, tl.min(tl.where(past, query, S)))
    query = late * CHUNK + step
    before = tl.load(lo + b * S + query, mask=(late >= 0) & (query < S), other=2147483647) < begin + N
    tl.store(seen_end + b * tl.num_programs(0) + tile, tl.max(tl.where(before, query + 1, 0)))


CHUNK = 1024
"""Queries whose bounds one program computes."""
CHUNKS = 128
"""Chunks that one step of the loop reads."""


class KeyBounds(NamedTuple):
    """A query sees the keys lo ≤ t < hi: int32."""

    lo_BS: Tensor
    hi_BS: Tensor
    reach: Tensor
    """The largest hi of each chunk of queries: [B, chunks]."""
    ahead: Tensor
    """The smallest lo."""


def key_bounds(x: BranchInputs) -> KeyBounds:
    """Bounds of the sliding branch's window, or of the compressed branch's complete blocks."""
    bounds = window_bounds if x.branch == "sliding" else compressed_bounds
    return bounds(x.pos_BS, x.start_BS, x.geometry, x.k_BTGK.shape[1])


def window_bounds(pos_BS: Tensor, start_BS: Tensor, geometry: Geometry, n_keys: int) -> KeyBounds:
    return _bounds(pos_BS, start_BS, n_keys, W=geometry.w, L=1, D=1)


def compressed_bounds(pos_BS: Tensor, first_BS: Tensor, geometry: Geometry, n_keys: int) -> KeyBounds:
    return _bounds(pos_BS, first_BS, n_keys, W=0, L=geometry.l, D=geometry.d)


def _bounds(pos_BS: Tensor, start_BS: Tensor, n_keys: int, **sizes: int) -> KeyBounds:
    B, S = pos_BS.shape
    n_chunks = triton.cdiv(S, CHUNK)
    shapes = ((B, S), (B, S), (B, n_chunks), (B, n_chunks))
    bounds = KeyBounds(*(torch.empty(shape, dtype=torch.int32, device=pos_BS.device) for shape in shapes))
    where = (*pos_BS.stride(), *start_BS.stride())
    launch(
        bounds_kernel, (n_chunks, B), pos_BS, start_BS, *bounds, S, n_keys, *where, **sizes, CHUNK=CHUNK
    )  # fmt: skip
    return bounds


def seen_by(bounds: KeyBounds, n_tiles: int, n: int) -> tuple[Tensor, Tensor]:
    """The queries that may see each tile of n keys, [first, end): [B, tiles]. Exact where bounds only grow along S."""
    B, S = bounds.lo_BS.shape
    first, end = (torch.empty((B, n_tiles), dtype=torch.int32, device=bounds.lo_BS.device) for _ in range(2))
    n_chunks = bounds.reach.shape[1]
    launch(seen_by_kernel, (n_tiles, B), *bounds, first, end, S, n_chunks, N=n, CHUNK=CHUNK, BLOCK=CHUNKS)
    return first, end
