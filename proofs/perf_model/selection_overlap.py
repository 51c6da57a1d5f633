"""Overlap of the blocks that neighbouring queries select, measured with the real selection on benchmark data.

Groups are statistically alike, so one is measured; of a long row, spans of queries at equal distances.

S queries of a span · N chosen blocks
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from nsa.bench.case import BenchCase, BenchShape
from nsa.bench.nsa_backends import chooser
from nsa.kernels.registry import BackendRequest, plan

SPAN = 160
"""Queries in a row that are measured together: whole tiles of 1, 2, 4, 5, 8, 10, 16, 20 or 32."""
MOST_SPANS = 48


@dataclass(frozen=True)
class SelectionOverlap:
    """The chosen blocks of one group: all of a row's queries, or spans of them."""

    shape: BenchShape
    length: int
    data: str
    idx_LSN: Tensor
    """[spans, queries, N]; one span of all queries if the row is short."""

    @property
    def whole(self) -> bool:
        return self.idx_LSN.shape[0] == 1 and self.idx_LSN.shape[1] == self.length

    @property
    def n_measured(self) -> int:
        return self.idx_LSN.shape[0] * self.idx_LSN.shape[1]

    def blocks(self, queries: int) -> int:
        """Sum over tiles of so many queries of the blocks in their union, for one group."""
        n_tiles = -(-self.length // queries)
        return self._sizes(queries)[0] if self.whole else round(self.mean(queries) * n_tiles)

    def mean(self, queries: int) -> float:
        """Blocks in the union of a tile."""
        total, n_tiles = self._sizes(queries)
        return total / n_tiles

    def _sizes(self, queries: int) -> tuple[int, int]:
        """Sum over tiles of the blocks in their union, and the number of tiles."""
        idx_LSN = self.idx_LSN if self.whole else self.idx_LSN[:, : self.idx_LSN.shape[1] // queries * queries]
        tiles = torch.nn.functional.pad(idx_LSN, (0, 0, 0, -idx_LSN.shape[1] % queries), value=-1)
        tiles = tiles.reshape(-1, queries * tiles.shape[-1]).sort(-1).values
        new = tiles >= 0
        new[:, 1:] &= tiles[:, 1:] != tiles[:, :-1]
        return int(new.sum()), len(tiles)

    def entries(self) -> int:
        """Blocks that queries chose, each counted for each of them."""
        return round(int((self.idx_LSN >= 0).sum()) * (self.length / self.n_measured))

    @cached_property
    def readers(self) -> Tensor:
        """Queries that chose each window of keys, in one group; the row is plain, so windows are blocks."""
        n_windows = self.shape.geometry.n_blocks(self.length)
        chosen = self.idx_LSN[self.idx_LSN >= 0].long()
        return (torch.bincount(chosen, minlength=n_windows) * (self.length / self.n_measured)).round().long()

    def trips(self, piece: int, m: int, n_spans: int = 1) -> tuple[int, int]:
        """Steps of m rows over each window's readers, cut into pieces; and how many pieces have any.

        Spans of queries run one after the other: each has its share of every window's readers.
        """
        steps = self.piece_steps(piece, m, n_spans)
        return n_spans * int(steps.sum()), n_spans * len(steps)

    def piece_steps(self, piece: int, m: int, n_spans: int = 1) -> Tensor:
        """Those of each piece of a span, in their order."""
        shares, heads = -(-self.readers // n_spans), self.shape.heads_per_group
        pieces, rest = -(-shares // piece), shares % piece
        steps = torch.full((int(pieces.sum()),), -(-piece * heads // m))
        steps[(pieces.cumsum(0) - 1)[rest > 0]] = -(-rest[rest > 0] * heads // m)
        return steps

    def masked_trips(self, piece: int, m: int, keys: int, n_spans: int = 1) -> int:
        """Those of `trips` over all cuts of `keys` keys in which a query may not see every key of the cut.

        The queries inside of a window are the first of its readers; all need masks where a cut has keys past the
        window or the row. A window's own queries are in one span.
        """
        heads, l_sel = self.shape.heads_per_group, self.shape.geometry.l_sel
        window, total = torch.arange(len(self.readers)), 0
        shares = -(-self.readers // n_spans)
        for end in range(keys, l_sel + keys, keys):
            partial = (window * l_sel + end > self.length) | (end > l_sel)
            count = torch.where(partial, shares, shares.clamp(max=end - 1))
            steps = count // piece * -(-piece * heads // m) + -(-(count % piece) * heads // m)
            total += int((steps * torch.where(partial, n_spans, 1)).sum())
        return total


def random_overlap(shape: BenchShape, length: int, seed: int = 0) -> SelectionOverlap:
    """Spans of queries that choose the forced blocks and others at random, for rows too long to measure here."""
    g, generator = shape.geometry, torch.Generator().manual_seed(seed)
    first = torch.linspace(0, length - SPAN, min(MOST_SPANS, length // SPAN)).long()
    own = ((first[:, None] + torch.arange(SPAN)) // g.l_sel).flatten()
    chosen = []
    for block in own.tolist():
        forced = {0, block, max(block - 1, 0)}
        others = torch.randperm(block + 1, generator=generator)[: g.n_sel].tolist()
        some = sorted([*forced, *[b for b in others if b not in forced][: g.n_sel - len(forced)]])
        chosen.append(some + [-1] * (g.n_sel - len(some)))
    return SelectionOverlap(shape, length, "random blocks", torch.tensor(chosen).view(len(first), SPAN, -1))


def measure_overlap(shape: BenchShape, length: int, data: str = "random", seed: int = 0) -> SelectionOverlap:
    """Select blocks as the module does, on the data of `nsa bench attention`."""
    one = replace(shape, n_heads=shape.heads_per_group, n_kv_groups=1)
    case = BenchCase(one, length, torch.float32, data, seed)
    n_spans = min(MOST_SPANS, length // SPAN)
    if length <= MOST_SPANS * SPAN:
        rows = torch.arange(length)[None]
    else:
        first = torch.linspace(0, length - SPAN, n_spans).long()
        rows = first[:, None] + torch.arange(SPAN)
    wanted = plan(BackendRequest(), torch.device("cpu"), torch.float32, one.kernel)
    backend = next(choice.backend for choice in wanted.choices if choice.branch == "select")
    idx = chooser(case, backend)(rows.flatten())
    return SelectionOverlap(shape, length, data, idx[0, :, 0].view(*rows.shape, -1))
