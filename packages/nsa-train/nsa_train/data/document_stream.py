"""Direct streaming: shuffled, tokenized documents of a source in one seeded global order, with a resumable cursor.

The shuffling order is a permutation of units per epoch and a permutation of rows per unit (`permutation.py`). There is
no shuffle buffer, so the cursor is three integers, and it does not depend on ranks: every rank walks the same sequence
and takes its share of the rows. Ranks that share a folder divide the reading among them (`unit_exchange.py`) without
changing the sequence.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from typing import Any, Literal, TypeVar

import numpy as np

from nsa.errors import ConfigError, DataError
from nsa_train.data.document import CorruptUnit, Document, DocumentSource, is_held_out
from nsa_train.data.permutation import seeded_permutation
from nsa_train.data.source.file import WHOLE_FILE_KINDS, file_kind
from nsa_train.data.source.read_report import ReadReport
from nsa_train.data.source.resolve import read_counted
from nsa_train.data.tokenizer import Tokenizer
from nsa_train.data.unit_exchange import ExchangeSettings, TokenUnit, UnitExchange

Split = Literal["train", "validation"]
AtEnd = Literal["repeat", "error", "stop"]

_STATE_VERSION = 1
_UNIT_ORDER, _ROW_ORDER = 1, 2  # keep the two families of permutations apart
_log = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """Position of one document in the global order; the same for every world size.

    `unit` and `row` count along the shuffled order, not along the files: `unit` is the position in the epoch's
    permutation of units, `row` the position in that unit's permutation of rows. `documents` and `tokens` count what was
    yielded before this document.
    """

    epoch: int
    unit: int
    row: int
    documents: int
    tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class TokenDoc:
    """A tokenized document, without the end-of-document token, which packing appends."""

    doc_id: str
    tokens: np.ndarray
    position: StreamPosition


class DocumentStream:
    """An iterator of `TokenDoc`. At the end of an epoch it starts the next one, raises an error, or stops (`at_end`).

    With `exchange`, it reads only its share of the units and receives the others from the streams of other ranks.
    """

    def __init__(
        self,
        source: DocumentSource,
        tokenizer: Tokenizer,
        *,
        seed: int,
        split: Split = "train",
        held_out_fraction: float = 0.0,
        at_end: AtEnd = "repeat",
        max_bad_units: int = 8,
        tokenize_batch: int = 64,
        exchange: ExchangeSettings | None = None,
    ) -> None:
        if not 0.0 <= held_out_fraction < 1.0:
            raise ConfigError(
                f"held_out_fraction is {held_out_fraction}: the fraction of documents kept for validation must be in "
                "[0, 1). Set it to e.g. 0.001."
            )
        if len(source) == 0:
            raise DataError("the data source has no units: every file is empty. Check the path.")
        self._source = source
        self._tokenizer = tokenizer
        self._seed = seed
        self._split = split
        self._held_out_fraction = held_out_fraction
        self._at_end = at_end
        self._max_bad_units = max_bad_units
        self._tokenize_batch = tokenize_batch
        self._quarantined: dict[int, str] = {}
        self._last_corrupt: CorruptUnit | None = None
        self._next = StreamPosition(epoch=0, unit=0, row=0, documents=0, tokens=0)
        self._iterator: Iterator[TokenDoc] | None = None
        self._unit_order = lru_cache(maxsize=2)(partial(seeded_permutation, len(source), seed, _UNIT_ORDER))
        self._exchange = UnitExchange(exchange, self._tokenize_unit) if exchange is not None else None

    def close(self) -> None:
        """Stop the background reading for other ranks."""
        if self._exchange is not None:
            self._exchange.close()

    def __iter__(self) -> "DocumentStream":
        return self

    def __next__(self) -> TokenDoc:
        if self._iterator is None:
            self._iterator = self._documents(self._next)
        try:
            doc = next(self._iterator)
        except DataError:
            self._iterator = None  # a generator that has raised then stops, which would look like the end of the data
            raise
        self._next = _after(doc)
        return doc

    def state_dict(self) -> dict[str, Any]:
        """Cursor: a stream that loads it continues after the last document yielded."""
        return self._state(self._next)

    def state_before(self, doc: TokenDoc) -> dict[str, Any]:
        """Cursor: a stream that loads it yields `doc` next."""
        return self._state(doc.position)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        expected = self._identity()
        if differing := [key for key in expected if state.get(key) != expected[key]]:
            values = ", ".join(f"{key}: saved {state.get(key)!r}, now {expected[key]!r}" for key in differing)
            raise DataError(
                f"the data cursor belongs to another stream ({values}): it would point at other documents. Restore "
                "the files and settings it was saved with, or start the data from the beginning on purpose."
            )
        self._next = StreamPosition(*(int(state[key]) for key in ("epoch", "unit", "row", "documents", "tokens")))
        self._quarantined = {int(index): self._name(int(index)) for index in state["quarantined"]}
        self._iterator = None

    def _identity(self) -> dict[str, Any]:
        return {
            "version": _STATE_VERSION,
            "seed": self._seed,
            "fingerprint": self._source.fingerprint,
            "tokenizer": self._tokenizer.fingerprint,
            "split": self._split,
            "held_out_fraction": self._held_out_fraction,
        }

    def _state(self, position: StreamPosition) -> dict[str, Any]:
        return {**self._identity(), **asdict(position), "quarantined": sorted(self._quarantined)}

    def _documents(self, position: StreamPosition) -> Iterator[TokenDoc]:
        self._check_quarantine()
        if self._exchange is not None:
            stop = None if self._at_end == "repeat" else (position.epoch + 1) * len(self._source)
            self._exchange.start(position.epoch * len(self._source) + position.unit, stop)
        while True:
            before = position.documents
            order = self._unit_order(position.epoch)
            started_inside = position.unit > 0 or position.row > 0
            for place in range(position.unit, len(order)):
                position = replace(position, unit=place, row=position.row if place == position.unit else 0)
                for doc in self._unit_documents(int(order[place]), position):
                    position = _after(doc)
                    yield doc
            position = self._end_epoch(position, empty=position.documents == before and not started_inside)
            if self._at_end == "stop":
                return

    def _end_epoch(self, position: StreamPosition, *, empty: bool) -> StreamPosition:
        if empty:
            raise DataError(
                f"a whole epoch had no {self._split} document (held_out_fraction={self._held_out_fraction}, "
                f"{len(self._quarantined)} of {len(self._source)} units quarantined). Check the split and the files."
                + (f" The last of them: {error}. {error.fix}." if (error := self._last_corrupt) else "")
            )
        if self._at_end == "error":
            raise DataError(
                f"the data ended after {position.documents} documents, {position.tokens} tokens, in epoch "
                f"{position.epoch}, and repeating it is disabled. Set data.on_end=epoch (at_end='repeat'), train fewer "
                "steps, or add data."
            )
        _log.info(
            "end of epoch %d of the %s data: %d documents, %d tokens so far",
            position.epoch,
            self._split,
            position.documents,
            position.tokens,
        )
        return replace(position, epoch=position.epoch + 1, unit=0, row=0)

    def _unit_documents(self, index: int, position: StreamPosition) -> Iterator[TokenDoc]:
        """The documents of one unit from `position.row` on, in the unit's shuffled order."""
        if self._exchange is None:
            rows = self._read_rows(index, position)
        else:
            rows = self._received_rows(index, position, self._exchange)
        for row, doc_id, tokens in rows:
            doc = TokenDoc(doc_id, tokens, replace(position, row=row))
            position = _after(doc)
            yield doc

    def _read_rows(self, index: int, position: StreamPosition) -> Iterator[tuple[int, str, np.ndarray]]:
        documents = self._unless_corrupt(index, lambda: self._source.read(index)) or []
        order = seeded_permutation(len(documents), self._seed, _ROW_ORDER, position.epoch, index)
        rows = [row for row in range(position.row, len(documents)) if self._is_selected(documents[order[row]])]
        selected = [documents[order[row]] for row in rows]
        for row, document, tokens in zip(rows, selected, self._tokenize(selected), strict=True):
            yield row, document.id, tokens

    def _received_rows(
        self, index: int, position: StreamPosition, exchange: UnitExchange
    ) -> Iterator[tuple[int, str, np.ndarray]]:
        number = position.epoch * len(self._source) + position.unit
        unit = self._unless_corrupt(index, lambda: exchange.take(number)) or TokenUnit([], [])
        order = seeded_permutation(len(unit.ids), self._seed, _ROW_ORDER, position.epoch, index)
        for row in range(position.row, len(order)):
            if (tokens := unit.tokens[order[row]]) is not None:
                yield row, unit.ids[order[row]], tokens

    def _tokenize_unit(self, number: int) -> TokenUnit | None:
        """Tokenize a unit, in the exchange's own thread; None for a quarantined unit, which no rank will request."""
        epoch, place = divmod(number, len(self._source))
        if (index := int(self._unit_order(epoch)[place])) in self._quarantined:
            return None
        documents = self._source.read(index)
        selected = [row for row, document in enumerate(documents) if self._is_selected(document)]
        tokens: list[np.ndarray | None] = [None] * len(documents)
        for row, ids in zip(selected, self._tokenize([documents[row] for row in selected]), strict=True):
            tokens[row] = ids
        return TokenUnit([document.id for document in documents], tokens)

    def _tokenize(self, documents: list[Document]) -> Iterator[np.ndarray]:
        for first in range(0, len(documents), self._tokenize_batch):
            batch = documents[first : first + self._tokenize_batch]
            for ids in self._tokenizer.encode_batch([document.text for document in batch]):
                ids.setflags(write=False)
                yield ids

    def _is_selected(self, document: Document) -> bool:
        """Whether a document has text and belongs to the split."""
        in_split = is_held_out(document.id, self._held_out_fraction) == (self._split == "validation")
        return bool(document.text) and in_split

    def _unless_corrupt(self, index: int, read: Callable[[], _T]) -> _T | None:
        if index in self._quarantined:
            return None
        try:
            return read()
        except CorruptUnit as error:
            self._quarantined[index], self._last_corrupt = self._name(index), error
            _log.warning(
                "skipping corrupt unit %d from now on (%d quarantined so far): %s", index, len(self._quarantined), error
            )
            self._check_quarantine(error)
            return None

    def _check_quarantine(self, cause: CorruptUnit | None = None) -> None:
        if len(self._quarantined) > self._max_bad_units:
            raise DataError(
                f"{len(self._quarantined)} units are corrupt, max_bad_units is {self._max_bad_units}. "
                f"Quarantined: {'; '.join(self._quarantined.values())}. {(cause or CorruptUnit).fix}, or raise the "
                "limit."
            ) from cause

    def _name(self, index: int) -> str:
        return str(self._source.unit(index))


def _after(doc: TokenDoc) -> StreamPosition:
    at = doc.position
    return StreamPosition(at.epoch, at.unit, at.row + 1, at.documents + 1, at.tokens + len(doc.tokens))


def sample_texts(source: DocumentSource, *, seed: int, max_bytes: int, report: ReadReport) -> Iterator[str]:
    """Sample of a corpus to train a tokenizer on: documents in the first epoch's order of units, up to `max_bytes`.
    What `nsa data prepare` skips is skipped and counted in `report`."""
    used = 0
    for index in map(int, seeded_permutation(len(source), seed, _UNIT_ORDER, 0)):
        name = source.unit(index).file
        try:
            documents = read_counted(source, index, report, name if file_kind(name) in WHOLE_FILE_KINDS else None)
        except CorruptUnit as error:
            raise DataError(f"{error}. {error.fix}.") from error
        for document in documents:
            if used >= max_bytes:
                return
            used += len(document.text.encode())
            yield document.text
    if not used:
        raise DataError("the data source has no text to train a tokenizer on: every document is empty. Check the path.")
