"""Row streams: the global sequence of rows for every kind of data, with the data cursor that a run resumes from.

The sequence does not depend on the number of ranks; each rank takes its share of every global batch. A cursor holds the
position in that sequence and the identity of the data, so it can be loaded with another world size or batch size and is
refused if it would point at other tokens.

Documents of any length are packed into rows. Each packed row carries the cursor after it, a few integers that point
back into the document stream; no tokens are stored in a cursor.
"""

import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from nsa.errors import ConfigError
from nsa_train.data.document_stream import DocumentStream, TokenDoc
from nsa_train.data.rows.batch import Batch, EndOfData, Segment, rows_of_rank
from nsa_train.data.rows.prepared import PreparedRows
from nsa_train.data.rows.synthetic import SyntheticRows

_VERSION = 1
State = dict[str, Any]
Packing = Literal["concat", "best_fit"]


@dataclass(frozen=True, slots=True)
class _PackerResume:
    """Resume by reading again from `document` and skipping tokens of it (concat) or finished rows (best fit)."""

    document: TokenDoc
    skip: int


@dataclass(frozen=True, slots=True, eq=False)
class PackedRow:
    tokens: np.ndarray
    cu_doc_lens: np.ndarray
    segments: tuple[Segment, ...]
    padding: int
    documents: int  # number of documents that end here
    epoch: int
    resume: _PackerResume


def make_packer(
    packing: Packing, *, seq_len: int, eos_id: int, dtype: np.dtype, buffer_rows: int = 64
) -> "_ConcatPacker | _BestFitPacker":
    if packing not in get_args(Packing):
        raise ConfigError(f"packing is {packing!r}. Choose one of {list(get_args(Packing))}.")
    if seq_len < 1 or buffer_rows < 1:
        raise ConfigError(f"seq_len is {seq_len} and buffer_rows {buffer_rows}: both must be at least 1.")
    if packing == "concat":
        return _ConcatPacker(seq_len, eos_id, dtype)
    return _BestFitPacker(seq_len, eos_id, dtype, buffer_rows)


@dataclass(frozen=True, slots=True, eq=False)
class _DocumentPiece:
    tokens: np.ndarray
    segment: Segment
    ends_document: bool
    epoch: int
    order: int  # position in the stream


@dataclass(frozen=True)
class _RowLayout:
    """Rows of `seq_len` tokens: padding is the end-of-document token, forms its own segment and is not in the loss."""

    seq_len: int
    eos_id: int
    dtype: np.dtype

    def _with_eos(self, document: TokenDoc) -> np.ndarray:
        tokens = np.empty(len(document.tokens) + 1, dtype=self.dtype)
        tokens[:-1] = document.tokens
        tokens[-1] = self.eos_id
        return tokens

    def _lay_out(self, pieces: list[_DocumentPiece], resume: _PackerResume) -> PackedRow:
        tokens = np.full(self.seq_len, self.eos_id, dtype=self.dtype)
        cu = [0]
        for piece in pieces:
            end = cu[-1] + len(piece.tokens)
            tokens[cu[-1] : end] = piece.tokens
            cu.append(end)
        padding = self.seq_len - cu[-1]
        if padding:
            cu.append(self.seq_len)
        return PackedRow(
            tokens=tokens,
            cu_doc_lens=np.asarray(cu, dtype=np.int32),
            segments=tuple(piece.segment for piece in pieces),
            padding=padding,
            documents=sum(piece.ends_document for piece in pieces),
            epoch=max(piece.epoch for piece in pieces),
            resume=resume,
        )


class _ConcatPacker(_RowLayout):
    """Concatenates documents and cuts them into rows: long documents continue in the next, only the last is padded."""

    def rows(self, documents: Iterator[TokenDoc], skip: int = 0) -> Iterator[PackedRow]:
        """`skip` tokens of the first document are in earlier rows."""
        pieces: list[_DocumentPiece] = []
        room = self.seq_len
        last: _PackerResume | None = None
        for order, document in enumerate(documents):
            tokens = self._with_eos(document)
            start, skip = skip, 0
            while start < len(tokens):
                stop = min(start + room, len(tokens))
                segment = Segment(document.doc_id, start, stop - start)
                ends = stop == len(tokens)
                pieces.append(_DocumentPiece(tokens[start:stop], segment, ends, document.position.epoch, order))
                room -= stop - start
                start = stop
                last = _PackerResume(document, stop)
                if not room:
                    yield self._lay_out(pieces, last)
                    pieces, room = [], self.seq_len
        if pieces:
            assert last is not None
            yield self._lay_out(pieces, last)


@dataclass(frozen=True)
class _BestFitPacker(_RowLayout):
    """Keeps documents whole where possible (best-fit-decreasing bin packing): collects a bounded group, cuts only what
    is longer than a row, and puts each piece where it leaves the least room. The rest is padding."""

    buffer_rows: int

    def rows(self, documents: Iterator[TokenDoc], skip: int = 0) -> Iterator[PackedRow]:
        """`skip` rows of the first group were yielded before."""
        while group := self._group(documents):
            bins = self._assign(self._cut(group))
            for number, pieces in enumerate(bins):
                if number >= skip:
                    yield self._lay_out(pieces, _PackerResume(group[0], number + 1))
            skip = 0

    def _group(self, documents: Iterator[TokenDoc]) -> list[TokenDoc]:
        """Documents for about `buffer_rows` rows; depends only on where the group starts, so a resume rebuilds it."""
        group: list[TokenDoc] = []
        room = self.buffer_rows * self.seq_len
        for document in documents:
            group.append(document)
            room -= len(document.tokens) + 1
            if room <= 0:
                break
        return group

    def _cut(self, group: list[TokenDoc]) -> list[_DocumentPiece]:
        pieces: list[_DocumentPiece] = []
        for document in group:
            tokens = self._with_eos(document)
            for start in range(0, len(tokens), self.seq_len):
                part = tokens[start : start + self.seq_len]
                ends = start + len(part) == len(tokens)
                segment = Segment(document.doc_id, start, len(part))
                pieces.append(_DocumentPiece(part, segment, ends, document.position.epoch, len(pieces)))
        return pieces

    def _assign(self, pieces: list[_DocumentPiece]) -> list[list[_DocumentPiece]]:
        """Longest first, each into the fullest row with enough room; rows are returned in stream order."""
        bins: list[list[_DocumentPiece]] = []
        room: list[tuple[int, int]] = []  # (free tokens, bin), sorted
        for piece in sorted(pieces, key=lambda p: (-len(p.tokens), p.order)):
            length = len(piece.tokens)
            at = bisect.bisect_left(room, (length, -1))
            if at < len(room):
                free, number = room.pop(at)
                bins[number].append(piece)
            else:
                free, number = self.seq_len, len(bins)
                bins.append([piece])
            if free > length:
                bisect.insort(room, (free - length, number))
        for row in bins:
            row.sort(key=lambda p: p.order)
        return sorted(bins, key=lambda row: row[0].order)


class IndexedRowStream:
    """Row stream over rows that can be computed from their position; its cursor is one integer."""

    def __init__(self, rows: PreparedRows | SyntheticRows) -> None:
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
        packer: _ConcatPacker | _BestFitPacker,
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
        self._resume: _PackerResume | None = None
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
