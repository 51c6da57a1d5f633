"""Builds the inverse index (key block → queries that selected it) on the device, without synchronizing with the host.

A window is l_sel keys on the absolute axis; a block of a packed document may lie across two. Every key belongs to one
window. What is sorted are integers of 31 bits that name the window, the query within its chunk, and which of its
blocks: for blocks of 64, of which 16 are chosen, rows are shorter than 2^27 tokens.

B batch · S queries · T keys · G kv groups · N chosen blocks · W windows
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from nsa.kernels.triton import PIECE
from nsa.kernels.triton.device.block_index import (
    fill_kernel,
    find_pieces_kernel,
    place_chunks_kernel,
    place_windows_kernel,
    sort_chunks_kernel,
)

MOST_SORTED = 1024
"""Entries that a chunk of queries sorts in registers."""


class BlockIndex(NamedTuple):
    pair: Tensor
    """query · N + n, int32, by (batch, group, window); in a window those whose block begins before it, then the others,
    by query."""
    begin: Tensor
    """First key of the block by which each of them got here."""
    offset: Tensor
    """Where each (batch, group, window) begins in them: int32 [B·G·W + 1]."""
    piece_first: Tensor
    """Where each window's pieces of at most PIECE entries begin: int32 [B·G·W + 1]."""
    piece_window: Tensor
    """The (batch, group, window) of each piece; B·G·W for pieces that are not needed."""
    last_BS: Tensor
    """The last key each query may see."""

    @property
    def n_pieces(self) -> int:
        return self.piece_window.numel()

    @property
    def by_piece(self) -> tuple[Tensor, ...]:
        """As the kernels of pieces take them."""
        return self.pair, self.begin, self.offset, self.piece_window, self.piece_first


def sorted_sizes(n: int) -> dict[str, int]:
    """A program sorts one row; when interpreted, several, because every operation takes its time there."""
    return dict(LOG=max(1, (n - 1).bit_length()), ROWS=8 if triton.knobs.runtime.interpret else 1)


def sorting_warps(sizes: dict[str, int]) -> int:
    """A warp holds 256 entries, 8 per lane."""
    return max(1, 2 ** sizes["LOG"] // 256)


def build_block_index(idx_BSGN: Tensor, pos_BS: Tensor, start_BS: Tensor, l_sel: int, n_keys: int) -> BlockIndex:
    B, S, G, N = idx_BSGN.shape
    idx, n_windows = idx_BSGN.contiguous(), triton.cdiv(n_keys, l_sel)
    sizes = chunk_sizes(N, l_sel)
    assert (n_windows + 1) << sizes["SHIFT"] < 2**31, "too many keys for integers that name window, query and block"
    warps, n_chunks, n_places = sorting_warps(sizes), triton.cdiv(S, sizes["CHUNK"]), B * G * n_windows
    n_entries = 2 * idx.numel()
    n_pieces = n_entries // PIECE + n_places
    entries = new_index(idx, B * G, n_chunks, 2 ** sizes["LOG"])
    counted = (B * G, n_chunks, n_windows + 1)
    begins, ends = new_index(idx, *counted), torch.zeros(counted, dtype=torch.int32, device=idx.device)
    before, totals = new_index(idx, *counted, 2), new_index(idx, B * G, n_windows + 1, 2)
    shapes = ((n_entries,), (n_entries,), (n_places + 1,), (n_places + 1,), (n_pieces,), (B, S))
    found = BlockIndex(*(new_index(idx, *shape) for shape in shapes))
    where, grid = (*pos_BS.stride(), *start_BS.stride()), (triton.cdiv(n_chunks, sizes["ROWS"]), B * G)
    sort_chunks_kernel[grid](
        idx, pos_BS, start_BS, found.last_BS, entries, begins, ends, S, n_chunks, n_windows, *where, G=G, **sizes,
        num_warps=warps,
    )  # fmt: skip
    place_chunks_kernel[(triton.cdiv(n_windows + 1, BINS), B * G)](
        begins, ends, before, totals, n_chunks, n_windows + 1, CHUNKS=CHUNKS, BINS=BINS
    )
    place_windows_kernel[(1,)](
        totals, found.offset, found.piece_first, n_places, n_windows, PIECE=PIECE, BLOCK=PLACES
    )  # fmt: skip
    fill_kernel[grid](
        entries, begins, before, totals, found.offset, pos_BS, start_BS, found.pair, found.begin, n_chunks, n_windows,
        *where, G=G, **sizes, num_warps=warps,
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
    bits = (n_sel - 1).bit_length()
    shift = bits + (chunk - 1).bit_length()
    return dict(N=n_sel, L=l_sel, CHUNK=chunk, SHIFT=shift, BITS=bits, **sorted_sizes(chunk * n_sel))


def new_index(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32, device=like.device)
