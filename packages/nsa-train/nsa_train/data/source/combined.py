"""Document source made of several others, for folders with files of several kinds: their units one after another."""

import hashlib
from collections.abc import Sequence

import numpy as np

from nsa_train.data.document import Document, DocumentSource, SourceUnit


class CombinedSource:
    def __init__(self, parts: Sequence[DocumentSource]) -> None:
        self._parts = list(parts)
        self._first_unit = np.concatenate([[0], np.cumsum([len(part) for part in self._parts])]).astype(int)
        self.fingerprint = hashlib.sha256("\n".join(part.fingerprint for part in self._parts).encode()).hexdigest()

    @property
    def retries(self) -> int:
        return sum(part.retries for part in self._parts)

    @property
    def bytes_read(self) -> int:
        return sum(part.bytes_read for part in self._parts)

    def __len__(self) -> int:
        return int(self._first_unit[-1])

    def unit(self, index: int) -> SourceUnit:
        part, inside = self._locate(index)
        unit = part.unit(inside)
        return SourceUnit(index, unit.file, unit.part)

    def read(self, index: int) -> list[Document]:
        part, inside = self._locate(index)
        return part.read(inside)

    def _locate(self, index: int) -> tuple[DocumentSource, int]:
        part = int(np.searchsorted(self._first_unit, index, side="right")) - 1
        return self._parts[part], index - int(self._first_unit[part])
