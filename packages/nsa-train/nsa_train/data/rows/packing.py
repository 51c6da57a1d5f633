"""Packing: documents of any length become rows of one length, in order (concat) or fitted together (best fit).

Each packed row carries the cursor after it, a few integers that point back into the document stream; no tokens are
stored in a cursor.
"""

import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from nsa.errors import ConfigError
from nsa_train.data.document_stream import TokenDoc
from nsa_train.data.rows.batch import Segment

Packing = Literal["concat", "best_fit"]


@dataclass(frozen=True, slots=True)
class PackerResume:
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
    resume: PackerResume


def make_packer(
    packing: Packing, *, seq_len: int, eos_id: int, dtype: np.dtype, buffer_rows: int = 64
) -> "ConcatPacker | BestFitPacker":
    if packing not in get_args(Packing):
        raise ConfigError(f"packing is {packing!r}. Choose one of {list(get_args(Packing))}.")
    if seq_len < 1 or buffer_rows < 1:
        raise ConfigError(f"seq_len is {seq_len} and buffer_rows {buffer_rows}: both must be at least 1.")
    if packing == "concat":
        return ConcatPacker(seq_len, eos_id, dtype)
    return BestFitPacker(seq_len, eos_id, dtype, buffer_rows)


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

    def _lay_out(self, pieces: list[_DocumentPiece], resume: PackerResume) -> PackedRow:
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


class ConcatPacker(_RowLayout):
    """Concatenates documents and cuts them into rows: long documents continue in the next, only the last is padded."""

    def rows(self, documents: Iterator[TokenDoc], skip: int = 0) -> Iterator[PackedRow]:
        """`skip` tokens of the first document are in earlier rows."""
        pieces: list[_DocumentPiece] = []
        room = self.seq_len
        last: PackerResume | None = None
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
                last = PackerResume(document, stop)
                if not room:
                    yield self._lay_out(pieces, last)
                    pieces, room = [], self.seq_len
        if pieces:
            assert last is not None
            yield self._lay_out(pieces, last)


@dataclass(frozen=True)
class BestFitPacker(_RowLayout):
    """Keeps documents whole where possible (best-fit-decreasing bin packing): collects a bounded group, cuts only what
    is longer than a row, and puts each piece where it leaves the least room. The rest is padding."""

    buffer_rows: int

    def rows(self, documents: Iterator[TokenDoc], skip: int = 0) -> Iterator[PackedRow]:
        """`skip` rows of the first group were yielded before."""
        while group := self._group(documents):
            bins = self._assign(self._cut(group))
            for number, pieces in enumerate(bins):
                if number >= skip:
                    yield self._lay_out(pieces, PackerResume(group[0], number + 1))
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
