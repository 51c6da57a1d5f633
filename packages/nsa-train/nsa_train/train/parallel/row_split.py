"""Context parallelism: which tokens of a row each rank has, and which rank needs keys of which other one.

A row is cut into pieces of equal length. `contiguous`: rank r has piece r. `zigzag`: there are two pieces per rank, and
rank r has pieces r and 2n − 1 − r, so that every rank has as many early as late queries: the compressed branch reads
more keys the later a query is. Index arithmetic alone: no tensors, no processes.
"""

from dataclasses import dataclass
from typing import NamedTuple

from nsa.geometry import Geometry


class HaloPlan(NamedTuple):
    """One exchange in which every piece gets the last tokens of the piece before it. A rank's slots hold its pieces."""

    sent_slots: tuple[int, ...]
    """Slots whose last tokens are sent, in the order of their destinations."""
    sent: tuple[int, ...]
    """How many are sent to each rank."""
    received: tuple[int, ...]
    """How many come from each rank. In the order of their sources they belong to the last slots of this rank: to all of
    them, or to all but the first where that is the first piece of the row, which nothing precedes."""


@dataclass(frozen=True)
class RowSplit:
    """The pieces of a row, as one of the ranks that share it sees them."""

    ranks: int
    rank: int
    zigzag: bool = False

    @property
    def slots(self) -> int:
        """Pieces of each rank."""
        return 2 if self.zigzag else 1

    @property
    def n_pieces(self) -> int:
        return self.ranks * self.slots

    def piece_length(self, n_tokens: int) -> int:
        assert n_tokens % self.n_pieces == 0, f"{n_tokens} tokens in {self.n_pieces} pieces"
        return n_tokens // self.n_pieces

    def pieces(self, rank: int | None = None) -> tuple[int, ...]:
        """The pieces of a rank, in the order of the row; default this rank."""
        rank = self.rank if rank is None else rank
        return (rank, self.n_pieces - 1 - rank) if self.zigzag else (rank,)

    def place(self, piece: int) -> int:
        """Where a piece is after a gather, which puts rank after rank: owner times slots, plus the owner's slot."""
        if not self.zigzag:
            return piece
        return 2 * piece if piece < self.ranks else 2 * (self.n_pieces - 1 - piece) + 1

    def owner(self, piece: int) -> int:
        return self.place(piece) // self.slots

    def halo_plan(self) -> HaloPlan:
        sent, received = [0] * self.ranks, [0] * self.ranks
        destinations = []
        for slot, piece in enumerate(self.pieces()):
            if piece + 1 < self.n_pieces:
                destinations.append((self.owner(piece + 1), slot))
                sent[self.owner(piece + 1)] += 1
            if piece > 0:
                received[self.owner(piece - 1)] += 1
        return HaloPlan(tuple(slot for _, slot in sorted(destinations)), tuple(sent), tuple(received))

    def keys_read(self, n_tokens: int, geometry: Geometry) -> list[int]:
        """Keys that the queries of each rank read in a row of one document, per kv group: the work of attention."""
        length = self.piece_length(n_tokens)
        until = [sum(geometry.total_reads(piece * length).values()) for piece in range(self.n_pieces + 1)]
        return [sum(until[piece + 1] - until[piece] for piece in self.pieces(rank)) for rank in range(self.ranks)]
