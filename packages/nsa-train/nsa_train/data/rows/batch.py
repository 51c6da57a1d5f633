"""A batch of packed rows with document boundaries, and the split of a global batch among ranks."""

from dataclasses import dataclass

import numpy as np

from nsa.errors import ConfigError, DataError


class EndOfData(DataError):
    """All allowed epochs have been read: the normal end of an evaluation pass, an error in training."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of one document inside a row; `offset` counts tokens from the document's start."""

    doc_id: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """R rows of S tokens.

    `cu_doc_lens[r]` holds the cumulative document lengths of row r, from 0 to S; padding, if any, lies between its last
    two boundaries. `loss_mask` marks the tokens that count in the loss; None means all of them. With
    `mask_document_ends`, the first token of a document is no label of the last token of the document before it.
    """

    tokens: np.ndarray  # (R, S), uint16 or uint32
    cu_doc_lens: tuple[np.ndarray, ...]  # R arrays of int32
    loss_mask: np.ndarray | None  # (R, S) bool
    row_ids: np.ndarray  # (R,) int64: position of each row in the global sequence over all epochs
    epoch: int  # of the last row
    documents: int  # number of documents that end in these rows
    provenance: tuple[tuple[Segment, ...], ...] | None = None  # one entry per row, if requested
    mask_document_ends: bool = True

    @property
    def valid_tokens(self) -> int:
        return int(self.loss_mask.sum()) if self.loss_mask is not None else int(self.tokens.size)

    def flat_cu_doc_lens(self) -> np.ndarray:
        """Boundaries of the batch flattened to one row of R × S tokens; the end of a row is a boundary too."""
        seq_len = self.tokens.shape[1]
        parts = [np.zeros(1, dtype=np.int32)]
        parts += [cu[1:] + np.int32(r * seq_len) for r, cu in enumerate(self.cu_doc_lens)]
        return np.concatenate(parts).astype(np.int32, copy=False)


def rows_of_rank(global_rows: int, rank: int, world: int) -> range:
    """The rows of a global batch that belong to `rank`: a contiguous, equal share per rank."""
    if world < 1 or not 0 <= rank < world:
        raise ConfigError(f"rank is {rank} and world size {world}: 0 <= rank < world size is required.")
    if global_rows < 1 or global_rows % world:
        raise ConfigError(
            f"a global batch of {global_rows} rows cannot be divided among {world} ranks: every rank must get the "
            f"same number, or the sequence would depend on the world size. Use a multiple of {world}."
        )
    share = global_rows // world
    return range(rank * share, (rank + 1) * share)
