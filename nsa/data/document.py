"""Documents and the interface of a document source; the held-out (validation) split by a hash of the document id.

A source is a fixed list of units (a parquet row group, a block of JSONL lines); a unit is the smallest piece that can
be fetched and checked alone. Sources only read: the stream permutes units and the rows inside them.
"""

import hashlib
from dataclasses import dataclass
from typing import Protocol

from nsa.errors import DataError

DEFAULT_MAX_UNIT_BYTES = 2**30
_HASH_RANGE = 2**64


@dataclass(frozen=True, slots=True)
class Document:
    id: str
    text: str


@dataclass(frozen=True, slots=True)
class DocumentColumns:
    """Where text and id are. `id=None` names documents after their content; it must be said, because the held-out split
    hangs on ids."""

    text: str = "text"
    id: str | None = "id"

    @property
    def identity(self) -> str:
        """Part of every source's fingerprint, and so of saved cursors: fixed, whatever the class is called."""
        return f"Columns(text={self.text!r}, id={self.id!r})"


def make_document(id: object, text: str | None) -> Document:
    """A document without an id is named after its content, which is stable under any change of files and order."""
    text = text or ""
    if id is None or id == "":
        id = "blake2b:" + hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    return Document(str(id), text)


def is_held_out(doc_id: str, fraction: float) -> bool:
    """Whether a document belongs to the validation split.

    A hash of the id alone: the answer survives another order, another file layout and another machine, and a larger
    fraction holds out everything a smaller one did.
    """
    digest = hashlib.blake2b(doc_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * _HASH_RANGE


@dataclass(frozen=True, slots=True)
class SourceUnit:
    """`index` is the place in the source's own order, `part` the piece of `file`, in words."""

    index: int
    file: str
    part: str

    def __str__(self) -> str:
        return f"{self.file}, {self.part}"


class CorruptUnit(DataError):
    """The bytes arrived and are wrong: reading again will not help, skipping the unit may."""


class DocumentSource(Protocol):
    @property
    def fingerprint(self) -> str:
        """SHA-256, in hex, of the files' names, sizes and units, not of where they lie."""
        ...

    @property
    def retries(self) -> int:
        """Requests repeated so far because of the network."""
        ...

    @property
    def bytes_read(self) -> int:
        """Bytes of units read so far, without listings."""
        ...

    def __len__(self) -> int:
        """How many units."""
        ...

    def unit(self, index: int) -> SourceUnit: ...

    def read(self, index: int) -> list[Document]:
        """All documents of a unit, in file order. Raises `CorruptUnit`, or `DataError` when it cannot be fetched."""
        ...
