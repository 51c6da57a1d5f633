"""Row streams: the global sequence of rows for every kind of data, with the data cursor that a run resumes from.

The sequence does not depend on the number of ranks; each rank takes its share of every global batch. A cursor holds the
position in that sequence and the identity of the data, so it can be loaded with another world size or batch size and is
refused if it would point at other tokens.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from nsa.errors import ConfigError
from nsa_train.data.document_stream import DocumentStream
from nsa_train.data.rows.batch import Batch, EndOfData, rows_of_rank
from nsa_train.data.rows.mixture import MixedRows
from nsa_train.data.rows.packing import BestFitPacker, ConcatPacker, PackedRow, PackerResume
from nsa_train.data.rows.prepared import PreparedRows
from nsa_train.data.rows.synthetic import SyntheticRows

_VERSION = 1
State = dict[str, Any]


class IndexedRowStream:
    """Row stream over rows that can be computed from their position; its cursor is one integer."""

    def __init__(self, rows: PreparedRows | MixedRows | SyntheticRows) -> None:
        self.kind = rows.kind
        self.seq_len = rows.seq_len
        self._rows = rows
        self._next_row = 0

    def next_batch(self, global_rows: int, rank: int = 0, world: int = 1) -> Batch:
        """Advance by `global_rows` rows (the global batch) and return this rank's share of them."""
        share = rows_of_rank(global_rows, rank, world)
        first = self._next_row
        self._rows.check_rows(first, first + global_rows)
        batch = self._rows.rows(np.arange(first + share.start, first + share.stop, dtype=np.int64))
        self._next_row = first + global_rows
        return batch

    def state_dict(self) -> State:
        """Cursor after the last batch: small JSON, independent of rank and world size."""
        return {"version": _VERSION, "identity": self._rows.identity, "next_row": self._next_row}

    def load_state_dict(self, state: State) -> None:
        _check_identity(state, self._rows.identity)
        self._next_row = int(state["next_row"])

    def close(self) -> None:
        """Do nothing: no thread reads in the background."""


class DirectRowStream:
    """Row stream over packed documents. Every rank packs the whole token sequence and keeps its share of the rows, so
    ranks cannot diverge; reading and tokenizing may be divided among them."""

    kind = "direct"

    def __init__(
        self,
        documents: DocumentStream,
        packer: ConcatPacker | BestFitPacker,
        *,
        seq_len: int,
        packing: str,
        mask_document_ends: bool = True,
    ) -> None:
        self._documents = documents
        self._packer = packer
        self._mask_document_ends = mask_document_ends
        self.seq_len = seq_len
        self._identity = {"kind": self.kind, "seq_len": seq_len, "packing": packing}
        self._next_row = 0
        self._padding_tokens = 0
        self._resume: PackerResume | None = None
        self._start: State = documents.state_dict()
        self._start_skip = 0
        self._iterator: Iterator[PackedRow] | None = None

    def next_batch(self, global_rows: int, rank: int = 0, world: int = 1) -> Batch:
        share = rows_of_rank(global_rows, rank, world)
        if self._iterator is None:
            self._iterator = self._packer.rows(iter(self._documents), self._start_skip)
        mine = []
        row = None
        padding = 0
        for number in range(global_rows):
            row = next(self._iterator, None)
            if row is None:
                raise EndOfData(
                    f"the documents ended after {self._next_row + number} rows, {number} of a batch of {global_rows}. "
                    "Train fewer steps, add data, or allow more epochs."
                )
            padding += row.padding
            if number in share:
                mine.append(row)
        assert row is not None
        batch = self._join(mine, self._next_row + share.start)
        # Only a whole batch advances the cursor: after an error it still points behind the last complete batch.
        self._resume = row.resume
        self._next_row += global_rows
        self._padding_tokens += padding
        return batch

    def _join(self, rows: list[PackedRow], first_row: int) -> Batch:
        mask = None
        if any(row.padding for row in rows):
            mask = np.ones((len(rows), self.seq_len), dtype=bool)
            for r, row in enumerate(rows):
                mask[r, self.seq_len - row.padding :] = False
        return Batch(
            tokens=np.stack([row.tokens for row in rows]),
            cu_doc_lens=tuple(row.cu_doc_lens for row in rows),
            loss_mask=mask,
            row_ids=np.arange(first_row, first_row + len(rows), dtype=np.int64),
            epoch=rows[-1].epoch,
            documents=sum(row.documents for row in rows),
            provenance=tuple(row.segments for row in rows),
            mask_document_ends=self._mask_document_ends,
        )

    def state_dict(self) -> State:
        resume = self._resume
        return {
            "version": _VERSION,
            "identity": self._identity,
            "next_row": self._next_row,
            "padding_tokens": self._padding_tokens,
            "documents": self._documents.state_before(resume.document) if resume else self._start,
            "skip": resume.skip if resume else self._start_skip,
        }

    def load_state_dict(self, state: State) -> None:
        _check_identity(state, self._identity)
        self._documents.load_state_dict(state["documents"])
        self._start = state["documents"]
        self._start_skip = int(state["skip"])
        self._resume = None
        self._iterator = None
        self._next_row = int(state["next_row"])
        self._padding_tokens = int(state["padding_tokens"])

    def close(self) -> None:
        """Stop background reading."""
        self._documents.close()


RowStream = IndexedRowStream | DirectRowStream


def _check_identity(state: State, mine: dict[str, object]) -> None:
    if state.get("version") != _VERSION:
        raise ConfigError(f"the data cursor has version {state.get('version')}, this version reads {_VERSION}.")
    saved: dict[str, object] = state["identity"]
    differing = sorted(key for key in saved.keys() | mine.keys() if saved.get(key) != mine.get(key))
    if differing:
        values = ", ".join(f"{key}: saved {saved.get(key)!r}, now {mine.get(key)!r}" for key in differing)
        raise ConfigError(
            f"the data cursor was saved under other settings ({values}): it would point at other tokens. Restore them, "
            "or start the data from the beginning on purpose."
        )
