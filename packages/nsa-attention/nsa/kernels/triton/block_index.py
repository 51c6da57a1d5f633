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
    place_chunks_kernel,
    place_windows_kernel,
    rank_chunks_kernel,
    sort_chunks_kernel,
)

MOST_SORTED = 1024
"""Entries that a chunk of queries sorts in registers."""
WINDOWS_PER_CHUNK = 2048
"""Windows counted for each chunk of a run: three integers each, so that counts take memory in proportion to the chosen
blocks (six integers for each of them), not to queries × windows."""


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
    run_length = triton.cdiv(n_windows + 1, WINDOWS_PER_CHUNK)
    assert run_length * sizes["CHUNK"] < 2**15, "too many queries in a run for counts of 15 bits"
    n_runs = triton.cdiv(n_chunks, run_length)
    entries, ranks = (new_index(idx, B * G, n_chunks, 2 ** sizes["LOG"]) for _ in range(2))
    counts, before = (new_index(idx, B * G, n_runs, n_windows + 1, n) for n in (1, 2))
    totals = new_index(idx, B * G, n_windows + 1, 2)
    shapes = ((n_entries,), (n_entries,), (n_places + 1,), (n_places + 1,), (n_pieces,), (B, S))
    index = BlockIndex(*(new_index(idx, *shape) for shape in shapes))
    where = (*pos_BS.stride(), *start_BS.stride())
    of_chunks = dict(G=G, **sizes, num_warps=warps)
    blocks, steps = triton.cdiv(n_chunks, sizes["ROWS"]), (n_places + 1).bit_length()
    sort_chunks_kernel[(blocks, B * G)](
        idx, pos_BS, start_BS, index.last_BS, entries, ranks, S, n_chunks, n_windows, *where, **of_chunks
    )
    rank_chunks_kernel[(triton.cdiv(n_runs, sizes["ROWS"]), B * G)](
        entries, ranks, counts, n_chunks, run_length, n_windows, **rank_sizes(sizes), num_warps=warps
    )
    place_chunks_kernel[(triton.cdiv(n_windows + 1, BINS), B * G)](
        counts, before, totals, n_runs, n_windows + 1, RUNS=RUNS, BINS=BINS
    )
    place_windows_kernel[(1,)](
        totals, index.offset, index.piece_first, n_places, n_windows, PIECE=PIECE, BLOCK=PLACES
    )  # fmt: skip
    fill_kernel[(blocks + triton.cdiv(triton.cdiv(n_pieces, PLACES), B * G), B * G)](
        entries, ranks, before, totals, index.offset, index.piece_first, pos_BS, start_BS,
        index.pair, index.begin, index.piece_window,
        n_chunks, run_length, n_windows, n_places, n_pieces, steps, *where, **of_chunks, BLOCK=PLACES,
    )  # fmt: skip
    return index


RUNS, BINS, PLACES = 64, 32, 1024


def chunk_sizes(n_sel: int, l_sel: int) -> dict[str, int]:
    """Queries of a chunk; few when interpreted, so that short rows have several."""
    most = 32 if triton.knobs.runtime.interpret else 128
    chunk = max(1, min(most, MOST_SORTED // triton.next_power_of_2(n_sel)))
    bits = (n_sel - 1).bit_length()
    shift = bits + (chunk - 1).bit_length()
    return dict(N=n_sel, L=l_sel, CHUNK=chunk, SHIFT=shift, BITS=bits, **sorted_sizes(chunk * n_sel))


def rank_sizes(sizes: dict[str, int]) -> dict[str, int]:
    return {name: sizes[name] for name in ("SHIFT", "LOG", "ROWS")}


def new_index(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32, device=like.device)
