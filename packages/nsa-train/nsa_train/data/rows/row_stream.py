"""Row streams: the global sequence of rows for every kind of data, with the data cursor that a run resumes from.

The sequence does not depend on the number of ranks; each rank takes its share of every global batch. A cursor holds the
position in that sequence and the identity of the data, so it can be loaded with another world size or batch size and is
refused if it would point at other tokens.
"""

import math
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from nsa.errors import ConfigError
from nsa_train.data.document_stream import TokenDoc
from nsa_train.data.rows.batch import Batch, EndOfData, rows_of_rank
from nsa_train.data.rows.packing import PackedRow, PackerResume, RowPacker

_VERSION = 1
State = dict[str, Any]


class RowStream(Protocol):
    """Interface used by the trainer and the prefetch process."""

    @property
    def kind(self) -> str: ...
    @property
    def seq_len(self) -> int: ...
    def next_batch(self, global_rows: int, rank: int = 0, world: int = 1) -> Batch:
        """Advance by `global_rows` rows (the global batch) and return this rank's share of them."""
        ...

    def state_dict(self) -> State:
        """Cursor after the last batch: small JSON, independent of rank and world size."""
        ...

    def load_state_dict(self, state: State) -> None: ...
    def close(self) -> None:
        """Stop background reading."""
        ...


class _IndexedRows(Protocol):
    """Rows that can be computed from their position: prepared shards, synthetic tasks."""

    @property
    def kind(self) -> str: ...
    @property
    def seq_len(self) -> int: ...
    @property
    def identity(self) -> dict[str, object]: ...
    def check_rows(self, first: int, stop: int) -> None: ...
    def rows(self, row_ids: np.ndarray) -> Batch: ...


class _ResumableDocuments(Protocol):
    """Tokenized documents in one seeded global order. Iteration continues from the loaded state, which the stream
    compares with its own source, tokenizer and seed."""

    def __next__(self) -> TokenDoc: ...
    def __iter__(self) -> Iterator[TokenDoc]: ...
    def state_before(self, doc: TokenDoc) -> State:
        """Cursor: a stream that loads it yields `doc` next."""
        ...

    def state_dict(self) -> State: ...
    def load_state_dict(self, state: State) -> None: ...
    def close(self) -> None: ...


class IndexedRowStream:
    """Row stream over `IndexedRows`; its cursor is one integer."""

    def __init__(self, rows: _IndexedRows) -> None:
        self.kind = rows.kind
        self.seq_len = rows.seq_len
        self._rows = rows
        self._next_row = 0

    def next_batch(self, global_rows: int, rank: int = 0, world: int = 1) -> Batch:
        share = rows_of_rank(global_rows, rank, world)
        first = self._next_row
        self._rows.check_rows(first, first + global_rows)
        batch = self._rows.rows(np.arange(first + share.start, first + share.stop, dtype=np.int64))
        self._next_row = first + global_rows
        return batch

    def state_dict(self) -> State:
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
        documents: _ResumableDocuments,
        packer: RowPacker,
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

    @property
    def padding_fraction(self) -> float:
        """Fraction of padding tokens so far; `nan` before the first row."""
        return self._padding_tokens / (self._next_row * self.seq_len) if self._next_row else math.nan

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
        self._documents.close()


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
