"""Who chose what, turned round in two ways, on the device and without asking it anything.

Forward and dQ: the blocks that a tile of queries chose together, each once, with a bit per query (`Union`).
dK and dV: the queries that chose each window of keys, in order (`Chosen`). A window is l_sel keys on the absolute axis;
a block of a packed document may lie across two. Every key belongs to one window, hence to one writer.

Both sort integers of 31 bits that also name the query: documents are shorter than 2^26 tokens.

B batch · S queries · T keys · G kv groups · N chosen blocks · Q queries of a tile · W windows
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from nsa.kernels.triton.device.chosen import (
    fill_kernel,
    find_pieces_kernel,
    place_chunks_kernel,
    place_windows_kernel,
    sort_chunks_kernel,
)
from nsa.kernels.triton.device.union import union_kernel

MOST_QUERIES = 32  # bits of a mask
PIECE = 1024
"""Queries of one window that one program adds up."""
MOST_SORTED = 1024
"""Entries that a chunk of queries sorts in registers."""


class Union(NamedTuple):
    begin: Tensor
    """First key of each block that the tile's queries chose: int32 [B, tiles, G, Q·N], ascending, `size` of them."""
    bits: Tensor
    """Which of the tile's queries chose it."""
    size: Tensor
    """How many there are: [B, tiles, G]."""
    last_BS: Tensor
    """The last key each query may see."""


class Chosen(NamedTuple):
    query: Tensor
    """int32, by (batch, group, window); in a window those whose block begins before it, then the others, by query."""
    begin: Tensor
    """First key of the block by which each of them got here."""
    offset: Tensor
    """Where each (batch, group, window) begins in them: int32 [B·G·W + 1]."""
    piece_first: Tensor
    """Where each window's pieces of at most PIECE entries begin: int32 [B·G·W + 1]."""
    piece_window: Tensor
    """The (batch, group, window) of each piece; B·G·W for pieces that are not needed."""


def union(idx_BSGN: Tensor, pos_BS: Tensor, start_BS: Tensor, l_sel: int, n_queries: int) -> Union:
    assert n_queries <= MOST_QUERIES
    B, S, G, N = idx_BSGN.shape
    idx, n_tiles = idx_BSGN.contiguous(), triton.cdiv(S, n_queries)
    begin, bits = (new_index(idx, B, n_tiles, G, n_queries * N) for _ in range(2))
    found = Union(begin, bits, new_index(idx, B, n_tiles, G), new_index(idx, B, S))
    sizes = union_sizes(N, l_sel, n_queries)
    warps = sorting_warps(sizes)
    union_kernel[(triton.cdiv(n_tiles, sizes["ROWS"]), B * G)](
        idx, pos_BS, start_BS, *found, S, n_tiles, *pos_BS.stride(), *start_BS.stride(), G=G, **sizes, num_warps=warps
    )
    return found


def union_sizes(n_sel: int, l_sel: int, n_queries: int) -> dict[str, int]:
    shift = (n_queries - 1).bit_length()
    return dict(N=n_sel, L=l_sel, QUERIES=n_queries, SHIFT=shift, **sorted_sizes(n_queries * n_sel))


def sorted_sizes(n: int) -> dict[str, int]:
    """A program sorts one row; when interpreted, several, because every operation takes its time there."""
    return dict(LOG=max(1, (n - 1).bit_length()), ROWS=8 if triton.knobs.runtime.interpret else 1)


def sorting_warps(sizes: dict[str, int]) -> int:
    """A warp holds 256 entries, 8 per lane."""
    return max(1, 2 ** sizes["LOG"] // 256)


def chosen(idx_BSGN: Tensor, last_BS: Tensor, start_BS: Tensor, l_sel: int, n_keys: int) -> Chosen:
    B, S, G, N = idx_BSGN.shape
    idx, n_windows = idx_BSGN.contiguous(), triton.cdiv(n_keys, l_sel)
    sizes = chunk_sizes(N, l_sel)
    warps, n_chunks, n_places = sorting_warps(sizes), triton.cdiv(S, sizes["CHUNK"]), B * G * n_windows
    n_entries = 2 * idx.numel()
    n_pieces = n_entries // PIECE + n_places
    entries = new_index(idx, B * G, n_chunks, 2 ** sizes["LOG"])
    counted = (B * G, n_chunks, n_windows + 1)
    begins, ends = new_index(idx, *counted), torch.zeros(counted, dtype=torch.int32, device=idx.device)
    before, totals = new_index(idx, *counted, 2), new_index(idx, B * G, n_windows + 1, 2)
    found = Chosen(*(new_index(idx, n) for n in (n_entries, n_entries, n_places + 1, n_places + 1, n_pieces)))
    where, grid = (S, n_chunks, n_windows, *start_BS.stride()), (triton.cdiv(n_chunks, sizes["ROWS"]), B * G)
    sort_chunks_kernel[grid](
        idx, last_BS, start_BS, entries, begins, ends, *where, G=G, N=N, **sizes, num_warps=warps
    )  # fmt: skip
    place_chunks_kernel[(triton.cdiv(n_windows + 1, BINS), B * G)](
        begins, ends, before, totals, n_chunks, n_windows + 1, CHUNKS=CHUNKS, BINS=BINS
    )
    place_windows_kernel[(1,)](
        totals, found.offset, found.piece_first, n_places, n_windows, PIECE=PIECE, BLOCK=PLACES
    )  # fmt: skip
    fill_kernel[grid](
        entries, begins, before, totals, found.offset, last_BS, start_BS, found.query, found.begin, *where, G=G,
        **sizes, num_warps=warps,
    )  # fmt: skip
    find_pieces_kernel[(triton.cdiv(n_pieces, PLACES),)](
        found.piece_first, found.piece_window, n_places, n_pieces, (n_places + 1).bit_length(), BLOCK=PLACES
    )
    return found


CHUNKS, BINS, PLACES = 64, 32, 1024


def chunk_sizes(n_sel: int, l_sel: int) -> dict[str, int]:
    """Queries of a chunk; few when interpreted, so that short rows have several."""
    most = 32 if triton.knobs.runtime.interpret else 128
    chunk = max(1, min(most, MOST_SORTED // triton.next_power_of_2(n_sel)))
    return dict(L=l_sel, CHUNK=chunk, SHIFT=(chunk - 1).bit_length(), **sorted_sizes(chunk * n_sel))


def new_index(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32, device=like.device)
