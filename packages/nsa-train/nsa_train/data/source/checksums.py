"""Checksums of source units: recorded at the first read of a unit, verified at every later read.

In plain JSONL, parquet without page checksums and zstd without frame checksums, a flipped bit can look like valid text.
The first read of such a unit cannot be verified; every later one can, in a later epoch, after a restart, on another
rank, or in another run that uses the same folder. Only the documents are covered: other bytes of a file may change.

The checksum file has one fixed-size entry per unit at a fixed offset, so ranks can share it without rewriting it.
"""

import hashlib
import os
import zlib
from collections.abc import Iterable
from pathlib import Path

from nsa.errors import CheckpointError
from nsa.files import file_lock, storage_errors
from nsa_train.data.document import CorruptUnit, Document, DocumentSource, SourceUnit

_DIGEST_BYTES, _CRC_BYTES = 28, 4
_ENTRY_BYTES = _DIGEST_BYTES + _CRC_BYTES


class ChecksummedSource:
    """A source whose units are verified against the checksum file in `folder`, which is created if missing."""

    def __init__(self, source: DocumentSource, folder: Path) -> None:
        self._source = source
        self.fingerprint = source.fingerprint
        # Named after the source's fingerprint: one folder serves any number of sources.
        self._path = folder / f"unit-checksums-{source.fingerprint[:32]}.bin"

    @property
    def retries(self) -> int:
        return self._source.retries

    @property
    def bytes_read(self) -> int:
        return self._source.bytes_read

    def __len__(self) -> int:
        return len(self._source)

    def unit(self, index: int) -> SourceUnit:
        return self._source.unit(index)

    def read(self, index: int) -> list[Document]:
        for _ in range(2):  # without TLS, bytes can be damaged in transit and not at rest
            documents = self._source.read(index)
            digest = _digest(documents)
            recorded = self._recorded_or_record(index, digest)
            if recorded == digest:
                return documents
        raise CorruptUnit(
            f"{self.unit(index)} has changed since it was first read (checksum {digest.hex()[:16]}…, recorded "
            f"{recorded.hex()[:16]}… in {self._path}): one of the two reads was damaged. Restore the file; if the "
            "first read was the wrong one, delete the checksum file"
        )

    def _recorded_or_record(self, index: int, digest: bytes) -> bytes:
        """The recorded digest of a unit; records and returns `digest` if there is none yet."""
        problem = f"checksum file {self._path} cannot be written, so changes of the data could not be detected"
        fix = "Set data.cache_dir to a writable folder."
        with storage_errors(problem, fix=fix, if_full=(CheckpointError, "Free disk space and add --resume.")):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # Reopened each time: on a network file system only that makes another node's entries visible.
            with file_lock(self._path) as file:
                entry = os.pread(file, _ENTRY_BYTES, index * _ENTRY_BYTES)
                recorded, crc = entry[:_DIGEST_BYTES], entry[_DIGEST_BYTES:]
                if crc and crc == _crc(index, recorded):
                    return recorded
                # Missing, or the entry itself is damaged: this read counts as the first.
                os.pwrite(file, digest + _crc(index, digest), index * _ENTRY_BYTES)
                return digest


def _crc(index: int, digest: bytes) -> bytes:
    return zlib.crc32(digest, index & 0xFFFFFFFF).to_bytes(_CRC_BYTES, "little")


def _digest(documents: Iterable[Document]) -> bytes:
    digest = hashlib.sha256()
    for document in documents:
        id, text = document.id.encode("utf-8", "surrogatepass"), document.text.encode("utf-8", "surrogatepass")
        digest.update(b"%d %d " % (len(id), len(text)))
        digest.update(id)
        digest.update(text)
    return digest.digest()[:_DIGEST_BYTES]
