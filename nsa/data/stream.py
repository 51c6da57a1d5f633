"""The direct stream: documents of a source in one seeded global order, tokenised, with a cursor that fits in a line.

The order is a permutation of units per epoch and a permutation of rows per unit. There is no shuffle buffer, so a
position is three numbers, and it knows nothing of ranks: whoever has four ranks takes every fourth row of the same
sequence.
"""

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from nsa.data.document import Document, Position, TokenDoc, is_held_out
from nsa.data.order import permutation
from nsa.data.source.unit import CorruptUnit, Source
from nsa.data.tokenizer import Tokenizer
from nsa.errors import ConfigError, DataError

Split = Literal["train", "validation"]
AtEnd = Literal["repeat", "error", "stop"]

_STATE_VERSION = 1
_UNIT_ORDER, _ROW_ORDER = 1, 2  # keep the two families of permutations apart
_log = logging.getLogger(__name__)


class DocumentStream:
    """An iterator of `TokenDoc`. At the end of the data it counts an epoch and goes on, raises an error, or stops."""

    def __init__(
        self,
        source: Source,
        tokenizer: Tokenizer,
        *,
        seed: int,
        split: Split = "train",
        held_out_fraction: float = 0.0,
        at_end: AtEnd = "repeat",
        max_bad_units: int = 8,
        tokenize_batch: int = 64,
    ) -> None:
        if not 0.0 <= held_out_fraction < 1.0:
            raise ConfigError(
                f"held_out_fraction is {held_out_fraction}: it is the share of documents kept from training. Set it to "
                "at least 0 and below 1, e.g. 0.001."
            )
        if len(source) == 0:
            raise DataError("the data source holds no unit: every file is empty. Check the path.")
        self._source = source
        self._tokenizer = tokenizer
        self._seed = seed
        self._split = split
        self._held_out_fraction = held_out_fraction
        self._at_end = at_end
        self._max_bad_units = max_bad_units
        self._tokenize_batch = tokenize_batch
        self._quarantined: dict[int, str] = {}
        self._next = Position(epoch=0, unit=0, row=0, documents=0, tokens=0)
        self._flow: Iterator[TokenDoc] | None = None
        self.empty_documents = 0

    @property
    def epoch(self) -> int:
        return self._next.epoch

    def counters(self) -> dict[str, int]:
        """`documents` and `tokens` count from the first step of the run, the others in this process."""
        return {
            "documents": self._next.documents,
            "tokens": self._next.tokens,
            "bad_units": len(self._quarantined),
            "empty_documents": self.empty_documents,
            "retries": self._source.retries,
        }

    def __iter__(self) -> "DocumentStream":
        return self

    def __next__(self) -> TokenDoc:
        if self._flow is None:
            self._flow = self._documents(self._next)
        try:
            doc = next(self._flow)
        except DataError:
            self._flow = None  # a generator that has raised would next pretend that the data ended
            raise
        self._next = _after(doc)
        return doc

    def state_dict(self) -> dict[str, Any]:
        """Where to go on after the last document that was handed out."""
        return self._state(self._next)

    def state_before(self, doc: TokenDoc) -> dict[str, Any]:
        """A stream that loads this hands out `doc` next."""
        return self._state(doc.position)

    def state_after(self, doc: TokenDoc) -> dict[str, Any]:
        """A stream that loads this hands out the document after `doc` next."""
        return self._state(_after(doc))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        expected = self._identity()
        if differing := [key for key in expected if state.get(key) != expected[key]]:
            values = ", ".join(f"{key}: saved {state.get(key)!r}, now {expected[key]!r}" for key in differing)
            raise DataError(
                f"the data cursor belongs to another stream ({values}): it would point at other documents. Restore "
                "the files and settings it was saved with, or start the data anew on purpose."
            )
        self._next = Position(*(int(state[key]) for key in ("epoch", "unit", "row", "documents", "tokens")))
        self._quarantined = {int(index): self._name(int(index)) for index in state["quarantined"]}
        self._flow = None

    def _identity(self) -> dict[str, Any]:
        return {
            "version": _STATE_VERSION,
            "seed": self._seed,
            "fingerprint": self._source.fingerprint,
            "tokenizer": self._tokenizer.fingerprint,
            "split": self._split,
            "held_out_fraction": self._held_out_fraction,
        }

    def _state(self, position: Position) -> dict[str, Any]:
        place = {key: getattr(position, key) for key in ("epoch", "unit", "row", "documents", "tokens")}
        return {**self._identity(), **place, "quarantined": sorted(self._quarantined)}

    def _documents(self, position: Position) -> Iterator[TokenDoc]:
        self._check_quarantine()
        while True:
            before = position.documents
            order = permutation(len(self._source), self._seed, _UNIT_ORDER, position.epoch)
            started_inside = position.unit > 0 or position.row > 0
            for place in range(position.unit, len(order)):
                position = replace(position, unit=place, row=position.row if place == position.unit else 0)
                for doc in self._unit_documents(int(order[place]), position):
                    position = _after(doc)
                    yield doc
            position = self._end_epoch(position, empty=position.documents == before and not started_inside)
            if self._at_end == "stop":
                return

    def _end_epoch(self, position: Position, *, empty: bool) -> Position:
        if empty:
            raise DataError(
                f"a whole epoch brought no {self._split} document (held_out_fraction={self._held_out_fraction}, "
                f"{len(self._quarantined)} of {len(self._source)} units quarantined). Check the split and the files."
            )
        if self._at_end == "error":
            raise DataError(
                f"the data ended after {position.documents} documents, {position.tokens} tokens, in epoch "
                f"{position.epoch}: repeating it is not allowed. Set at_end=repeat, train fewer steps, or add data."
            )
        _log.info(
            "epoch %d of the %s data ended: %d documents, %d tokens so far",
            position.epoch,
            self._split,
            position.documents,
            position.tokens,
        )
        return replace(position, epoch=position.epoch + 1, unit=0, row=0)

    def _unit_documents(self, index: int, position: Position) -> Iterator[TokenDoc]:
        """The documents of one unit from `position.row` on, in the unit's own order."""
        documents = self._read(index)
        order = permutation(len(documents), self._seed, _ROW_ORDER, position.epoch, index)
        rows = [int(row) for row in range(position.row, len(documents)) if self._wanted(documents[order[row]])]
        for first in range(0, len(rows), self._tokenize_batch):
            batch = rows[first : first + self._tokenize_batch]
            tokens = self._tokenizer.encode_batch([documents[order[row]].text for row in batch])
            for row, ids in zip(batch, tokens, strict=True):
                doc = TokenDoc(documents[order[row]].id, _read_only(ids), replace(position, row=row))
                position = _after(doc)
                yield doc

    def _wanted(self, document: Document) -> bool:
        if not document.text:
            self.empty_documents += 1
            return False
        return is_held_out(document.id, self._held_out_fraction) == (self._split == "validation")

    def _read(self, index: int) -> list[Document]:
        if index in self._quarantined:
            return []
        try:
            return self._source.read(index)
        except CorruptUnit as error:
            self._quarantined[index] = self._name(index)
            _log.warning("unit %d is skipped from now on (bad unit %d): %s", index, len(self._quarantined), error)
            self._check_quarantine(error)
            return []

    def _check_quarantine(self, cause: CorruptUnit | None = None) -> None:
        if len(self._quarantined) > self._max_bad_units:
            raise DataError(
                f"{len(self._quarantined)} units are corrupt, max_bad_units is {self._max_bad_units}: this is no "
                f"single bad sector. Quarantined: {'; '.join(self._quarantined.values())}. Restore the files, or "
                "raise the limit."
            ) from cause

    def _name(self, index: int) -> str:
        return str(self._source.unit(index))


def _after(doc: TokenDoc) -> Position:
    at = doc.position
    return Position(at.epoch, at.unit, at.row + 1, at.documents + 1, at.tokens + len(doc.tokens))


def _read_only(ids: np.ndarray) -> np.ndarray:
    ids.setflags(write=False)
    return ids


def sample_texts(source: Source, *, seed: int, max_bytes: int) -> Iterator[str]:
    """Text of whole units, in the order of the first epoch, up to `max_bytes`; what a tokenizer is trained on."""
    used = 0
    for index in permutation(len(source), seed, _UNIT_ORDER, 0):
        for document in source.read(int(index)):
            if used >= max_bytes:
                return
            used += len(document.text.encode())
            yield document.text
