"""Launches the kernels that compute each query's range of visible keys. B batch · S queries"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from nsa.geometry import Geometry
from nsa.kernels.interface import BranchInputs
from nsa.kernels.triton.device.bounds import bounds_kernel, seen_by_kernel

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
    bounds_kernel[(n_chunks, B)](
        pos_BS, start_BS, *bounds, S, n_keys, *pos_BS.stride(), *start_BS.stride(), **sizes, CHUNK=CHUNK
    )
    return bounds


def seen_by(bounds: KeyBounds, n_tiles: int, n: int) -> tuple[Tensor, Tensor]:
    """The queries that may see each tile of n keys, [first, end): [B, tiles]. Exact where bounds only grow along S."""
    B, S = bounds.lo_BS.shape
    first, end = (torch.empty((B, n_tiles), dtype=torch.int32, device=bounds.lo_BS.device) for _ in range(2))
    seen_by_kernel[(n_tiles, B)](
        *bounds, first, end, S, bounds.reach.shape[1], N=n, CHUNK=CHUNK, BLOCK=CHUNKS
    )  # fmt: skip
    return first, end
