"""Sizes and positions of the self-check: long enough to reach every path of the kernels for the run's own shape.

Two rows: one document, and packed documents, one of a single token, one shorter than a compressed block, one empty,
one shorter than the window. The row's length is a multiple of no tile, longer than the window, has more blocks than
are chosen, and more queries than one program of the selected branch's backward sums over.
"""

from itertools import pairwise
from typing import NamedTuple

import torch

from nsa.geometry import Geometry
from nsa.kernels.interface import KernelShape
from nsa.kernels.self_check.kernel_call import KernelCall, QueryPositions
from nsa.kernels.triton import PIECE

MOST_TOKENS = 4501
"""The reference compares every query with every key: longer windows are checked without being full."""
SMALL_PIECE, SMALL_TOKENS = 20, 41
"""Under the interpreter: rows are short, but longer than a tile of 32 keys."""
DECODE_STEPS = 3


class SelfCheckSizes(NamedTuple):
    shape: KernelShape
    documents: tuple[tuple[int, ...], ...]
    """Cumulative lengths of the documents of each row."""
    piece: int
    """Queries of one window of keys that one program sums over."""

    @property
    def length(self) -> int:
        return self.documents[0][-1]

    @property
    def decode_lengths(self) -> tuple[int, ...]:
        """Tokens of each cached row before the first step: the second step completes a compressed block in both."""
        g = self.shape.geometry
        blocks = (self.length - DECODE_STEPS - g.l + 2) // g.d
        return max(0, g.l - 2), max(0, g.l + blocks * g.d - 2)

    def call(self, dtype: torch.dtype) -> KernelCall:
        n = self.length
        positions = packed_rows(self.documents, self.shape.geometry)
        n_compressed = self.shape.geometry.n_compressed(n)
        return KernelCall(self.shape, positions, n, n_compressed, dtype, seed=n, strided=True)


def check_sizes(shape: KernelShape, *, small: bool) -> SelfCheckSizes:
    """`small`: for the interpreter, with pieces of a few queries."""
    g = shape.geometry
    piece = SMALL_PIECE if small else PIECE
    least = SMALL_TOKENS if small else PIECE + 100
    wanted = max(least, (g.n_sel + 3) * g.l_sel, g.w + g.l_sel, 2 * g.l + g.d)
    length = min(MOST_TOKENS, wanted) | 1
    ends = (1, g.l, g.l, g.l + 2 * g.l_sel + 3)  # documents of 1, l − 1, 0 and two blocks and a few tokens
    return SelfCheckSizes(shape, ((0, length), (0, *(min(end, length) for end in ends), length)), piece)


def packed_rows(documents: tuple[tuple[int, ...], ...], geometry: Geometry) -> QueryPositions:
    """Positions of every token of rows of packed documents, one row of cumulative lengths each."""
    rows = []
    for cumulative in documents:
        tokens, first = [], 0
        for begin, end in pairwise(cumulative):
            tokens += [(token - begin, begin, first) for token in range(begin, end)]
            first += geometry.n_compressed(end - begin)
        rows.append(tokens)
    pos, start, first_BS = torch.tensor(rows).unbind(-1)
    return QueryPositions(pos, start, first_BS)
