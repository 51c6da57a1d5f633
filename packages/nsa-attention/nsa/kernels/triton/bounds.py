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

from nsa.kernels.interface import BranchInputs
from nsa.kernels.triton.launch import launch
from nsa.kernels.triton.tile import VARYING, ceil_div, length_of, parts_of


@triton.jit
def _store_bounds(
    position, origin, lo, hi, reach, ahead, S, n_keys, position_b, position_s, origin_b, origin_s,
    W: tl.constexpr, L: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
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
def bounds_kernel(
    position, origin, lo, hi, reach, ahead,
    window_position, window_origin, window_lo, window_hi, window_reach, window_ahead,
    S, n_keys, n_window_keys, position_b, position_s, origin_b, origin_s,
    window_position_b, window_position_s, window_origin_b, window_origin_s,
    W: tl.constexpr, L: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Programs of the last axis: the blocks of L tokens every D that are complete; a window of W tokens. With one
    program there is one branch: the window's if W is not 0."""
    if L > 0:  # noqa: SIM102 (constants prune what follows)
        if tl.program_id(2) == 0:
            _store_bounds(
                position, origin, lo, hi, reach, ahead, S, n_keys, position_b, position_s, origin_b, origin_s,
                0, L, D, CHUNK,
            )  # fmt: skip
    if W > 0:  # noqa: SIM102
        if tl.program_id(2) == tl.num_programs(2) - 1:
            _store_bounds(
                window_position, window_origin, window_lo, window_hi, window_reach, window_ahead, S, n_window_keys,
                window_position_b, window_position_s, window_origin_b, window_origin_s, W, L, D, CHUNK,
            )  # fmt: skip


@triton.jit
def _store_seen(
    tile, n_tiles, lo, hi, reach, ahead, seen_first, seen_end, S, n_chunks,
    N: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1).to(tl.int64)
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
    tl.store(seen_first + b * n_tiles + tile, tl.min(tl.where(past, query, S)))
    query = late * CHUNK + step
    before = tl.load(lo + b * S + query, mask=(late >= 0) & (query < S), other=2147483647) < begin + N
    tl.store(seen_end + b * n_tiles + tile, tl.max(tl.where(before, query + 1, 0)))


@triton.jit(do_not_specialize=VARYING)
def seen_by_kernel(
    lo, hi, reach, ahead, seen_first, seen_end,
    window_lo, window_hi, window_reach, window_ahead, window_seen_first, window_seen_end,
    S, n_chunks, n_tiles, N: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """For a tile of N keys: the first query that reaches past its first key, the end of those that begin in time.
    Tiles of one branch, then of another, if there is another."""
    tile = tl.program_id(0)
    if tile < n_tiles:
        _store_seen(tile, n_tiles, lo, hi, reach, ahead, seen_first, seen_end, S, n_chunks, N, CHUNK, BLOCK)
    else:
        _store_seen(
            tile - n_tiles, tl.num_programs(0) - n_tiles, window_lo, window_hi, window_reach, window_ahead,
            window_seen_first, window_seen_end, S, n_chunks, N, CHUNK, BLOCK,
        )  # fmt: skip


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


def bounds_length(pos_BS: Tensor) -> int:
    """Numbers in the bounds of one branch."""
    B, S = pos_BS.shape
    return length_of(_lengths(B, S))


def _lengths(B: int, S: int) -> tuple[int, ...]:
    n_chunks = B * ceil_div(S, CHUNK)
    return B * S, B * S, n_chunks, n_chunks


def bounds_in(memory: Tensor, pos_BS: Tensor) -> KeyBounds:
    """Bounds that this memory holds."""
    B, S = pos_BS.shape
    lo, hi, reach, ahead = parts_of(memory, _lengths(B, S))
    n_chunks = ceil_div(S, CHUNK)
    return KeyBounds(lo.view(B, S), hi.view(B, S), reach.view(B, n_chunks), ahead.view(B, n_chunks))


def key_bounds(*branches: BranchInputs, memory: Tensor | None = None) -> list[KeyBounds]:
    """Bounds of the sliding branch's window, of the compressed branch's complete blocks, or, in one launch, of the
    compressed and of the sliding branch. `memory`: where to put them, int32."""
    first, last = branches[0], branches[-1]
    B, S = first.pos_BS.shape
    n = bounds_length(first.pos_BS)
    if memory is None:
        memory = torch.empty(n * len(branches), dtype=torch.int32, device=first.pos_BS.device)
    every = [bounds_in(memory[i * n : (i + 1) * n], x.pos_BS) for i, x in enumerate(branches)]
    names, g = [x.branch for x in branches], first.geometry
    launch(
        bounds_kernel, (triton.cdiv(S, CHUNK), B, len(branches)),
        first.pos_BS, first.start_BS, *every[0], last.pos_BS, last.start_BS, *every[-1],
        S, first.k_BTGK.shape[1], last.k_BTGK.shape[1],
        *(stride for x in (first, last) for y in (x.pos_BS, x.start_BS) for stride in y.stride()),
        W=g.w if "sliding" in names else 0, L=g.l if "compressed" in names else 0, D=g.d, CHUNK=CHUNK,
    )  # fmt: skip
    return every


def seen_by(n: int, *branches: tuple[KeyBounds, int]) -> list[tuple[Tensor, Tensor]]:
    """The queries that may see each tile of n keys, [first, end): [B, tiles], of one or two branches with their bounds
    and number of tiles. Exact where bounds only grow along S."""
    (first, n_tiles), (last, n_last) = branches[0], branches[-1]
    B, S = first.lo_BS.shape
    every = [[first.lo_BS.new_empty((B, tiles)) for _ in range(2)] for _, tiles in branches]
    programs = n_tiles + (n_last if len(branches) > 1 else 0)
    launch(
        seen_by_kernel, (programs, B), *first, *every[0], *last, *every[-1], S, first.reach.shape[1], n_tiles,
        N=n, CHUNK=CHUNK, BLOCK=CHUNKS,
    )  # fmt: skip
    return [(begin, end) for begin, end in every]
