"""Rows of tokens on their way to the model, and which of them belong to a rank."""

from dataclasses import dataclass

import numpy as np

from nsa.errors import ConfigError, DataError


class EndOfData(DataError):
    """Every allowed epoch has been read; what an evaluation pass waits for, and an error in training."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of one document inside a row; `offset` counts tokens from the document's start."""

    doc_id: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """R rows of S tokens.

    `cu_doc_lens[r]` holds the document boundaries inside row r, from 0 to S; padding, where there is any, lies between
    its last two boundaries. `loss_mask` says which tokens may be predicted; None means all of them.
    """

    tokens: np.ndarray  # (R, S), uint16 or uint32
    cu_doc_lens: tuple[np.ndarray, ...]  # R arrays of int32
    loss_mask: np.ndarray | None  # (R, S) bool
    row_ids: np.ndarray  # (R,) int64: place of each row in the global sequence, counted over all epochs
    epoch: int  # of the last row
    documents: int  # documents that end in these rows
    provenance: tuple[tuple[Segment, ...], ...] | None = None  # R, when it was asked for

    @property
    def valid_tokens(self) -> int:
        return int(self.loss_mask.sum()) if self.loss_mask is not None else int(self.tokens.size)

    def flat_cu_doc_lens(self) -> np.ndarray:
        """Boundaries of the whole batch laid out as one row of R × S tokens; every row ends a document."""
        seq_len = self.tokens.shape[1]
        parts = [np.zeros(1, dtype=np.int32)]
        parts += [cu[1:] + np.int32(r * seq_len) for r, cu in enumerate(self.cu_doc_lens)]
        return np.concatenate(parts).astype(np.int32, copy=False)


def rows_of_rank(global_rows: int, rank: int, world: int) -> range:
    """The rows of a global batch that belong to one rank: ranks in order, joined, give the batch again."""
    if world < 1 or not 0 <= rank < world:
        raise ConfigError(f"rank {rank} is not in a world of {world}. Give 0 <= rank < world.")
    if global_rows < 1 or global_rows % world:
        raise ConfigError(
            f"a global batch of {global_rows} rows cannot be shared by {world} ranks: every rank must get the same "
            f"number, or the sequence would depend on the world size. Use a multiple of {world}."
        )
    share = global_rows // world
    return range(rank * share, (rank + 1) * share)
