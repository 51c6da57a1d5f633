"""Documents and the interface of a document source; the held-out (validation) split by a hash of the document id.

A source is a fixed list of units (a parquet row group, a block of JSONL lines); a unit is the smallest piece that can
be fetched and checked alone. Sources only read: the stream permutes units and the rows inside them.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from nsa.errors import DataError

DEFAULT_MAX_UNIT_BYTES = 2**30
_LARGEST_RATIO = 100
"""Bytes that compressed data may unpack to per byte, beyond `FREE_UNPACKED_BYTES`; text has about 3 to 10."""
_FREE_UNPACKED_BYTES = 64 * 2**20
DOCUMENT_BYTES = 256
"""Memory of a document besides its text, for limits."""
DEFAULT_ID = "id"
_HASH_RANGE = 2**64


@dataclass(frozen=True, slots=True)
class Document:
    id: str
    text: str


@dataclass(frozen=True, slots=True)
class DocumentColumns:
    """Columns (or JSON keys) of text and id. `id=None` derives ids from the content, and so does a file without the
    default column; a column that was named must exist, because the held-out split depends on the ids."""

    text: str = "text"
    id: str | None = DEFAULT_ID

    @property
    def identity(self) -> str:
        """Part of every source's fingerprint, and so of saved cursors: fixed, whatever the class is called."""
        return f"Columns(text={self.text!r}, id={self.id!r})"


def make_document(id: object, text: str | None) -> Document:
    """Make a document; its id defaults to a hash of the text, which does not depend on the files or their order."""
    text = text or ""
    if id is None or id == "":
        id = "blake2b:" + hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    return Document(str(id), text)


def is_held_out(doc_id: str, fraction: float) -> bool:
    """Whether a document belongs to the validation split.

    Depends on a hash of the id alone, so it is the same for any order, file layout and machine, and a larger fraction
    holds out everything a smaller one did.
    """
    digest = hashlib.blake2b(doc_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * _HASH_RANGE


def require_plausible_ratio(unpacked: int, packed: int) -> None:
    """Raise `CorruptUnit` for data that becomes larger than text does: a file of kilobytes may unpack to gigabytes."""
    if unpacked > _FREE_UNPACKED_BYTES + _LARGEST_RATIO * packed:
        raise CorruptUnit(f"it unpacks to more than {_LARGEST_RATIO} times its {packed} bytes, which text does not")


@dataclass(frozen=True, slots=True)
class SourceUnit:
    index: int
    """Position in the source's own order."""
    file: str
    part: str
    """Which piece of `file`, for messages."""

    def __str__(self) -> str:
        return f"{self.file}, {self.part}"


class UnitOffsets:
    """Locates units that are numbered through several parts (files, sources) one after another."""

    def __init__(self, counts: Iterable[int]) -> None:
        self._first = np.concatenate([[0], np.cumsum(list(counts))]).astype(int)

    def __len__(self) -> int:
        return int(self._first[-1])

    def locate(self, index: int) -> tuple[int, int]:
        """Return the part that holds a unit, and the unit's number in it."""
        part = int(np.searchsorted(self._first, index, side="right")) - 1
        return part, index - int(self._first[part])


class CorruptUnit(DataError):
    """The data was read and is damaged: a retry will not help, skipping the unit may."""

    fix = "Restore the file"


class NoTextColumn(CorruptUnit):
    """The data is whole, and has no text under the name of the text's column or JSON key."""

    fix = "Name the one that holds it with --text-column NAME of `nsa data prepare` or `nsa data tokenizer train`"


class DocumentSource(Protocol):
    @property
    def fingerprint(self) -> str:
        """SHA-256, in hex, of the files' names, sizes and units; independent of their location."""
        ...

    def __len__(self) -> int:
        """Number of units."""
        ...

    def unit(self, index: int) -> SourceUnit: ...

    def read(self, index: int) -> list[Document]:
        """All documents of a unit, in file order. Raises `CorruptUnit`, or `DataError` if it cannot be fetched."""
        ...
