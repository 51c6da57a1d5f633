"""What every source offers: units in a fixed order, each read whole.

A unit (a parquet row group, a block of lines) is the smallest piece that can be fetched and checked alone. The stream
permutes units and the rows inside them; a source only reads.
"""

from dataclasses import dataclass
from typing import Protocol

from nsa.data.document import Document
from nsa.errors import DataError

DEFAULT_MAX_UNIT_BYTES = 2**30


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
