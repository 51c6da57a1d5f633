"""Checksum file of a source: what every unit held when it was first read, compared at every later read.

Plain JSONL, parquet without page checksums and zstd without frame checksums cannot tell a flipped bit from text. The
first read of such a unit cannot be verified; every later one can, in a later epoch, after a restart, on another rank,
or in another run that uses the same folder. Checksums are of the documents: other bytes of a file may change.

One fixed-size entry per unit at a fixed place: ranks write the same file without reading it whole.
"""

import hashlib
import os
import zlib
from collections.abc import Iterable
from pathlib import Path

from nsa.data.document import CorruptUnit, Document, DocumentSource, SourceUnit
from nsa.errors import CheckpointError
from nsa.files import file_lock, storage_errors

_DIGEST_BYTES, _CRC_BYTES = 28, 4
_ENTRY_BYTES = _DIGEST_BYTES + _CRC_BYTES


class ChecksummedSource:
    """A source whose units are compared with the checksum file in `folder`, which is made if it is not there."""

    def __init__(self, source: DocumentSource, folder: Path) -> None:
        self._source = source
        # Named after the content that was listed: a folder serves any number of sources, wherever they lie.
        self._path = folder / f"unit-checksums-{source.fingerprint[:32]}.bin"

    @property
    def fingerprint(self) -> str:
        return self._source.fingerprint

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
        for _ in range(2):  # without TLS, bytes can be damaged on the way and not where they lie
            documents = self._source.read(index)
            digest = _digest(documents)
            recorded = self._recorded_or_record(index, digest)
            if recorded == digest:
                return documents
        raise CorruptUnit(
            f"{self.unit(index)} is not what it was when it was first read (checksum {digest.hex()[:16]}…, recorded "
            f"{recorded.hex()[:16]}… in {self._path}): one of the two reads was damaged. Restore the file; if it was "
            "the first read that was wrong, delete the checksum file"
        )

    def _recorded_or_record(self, index: int, digest: bytes) -> bytes:
        """The digest on record; `digest` itself, now recorded, where there was none."""
        problem = f"checksum file {self._path} cannot be written, and data that changes under a run would go unseen"
        fix = "Set data.cache_dir to a folder that can be written."
        with storage_errors(problem, fix=fix, if_full=(CheckpointError, "Free disk space and add --resume.")):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # Opened anew each time: on a network file system this is what shows another node's entries.
            with file_lock(self._path) as file:
                entry = os.pread(file, _ENTRY_BYTES, index * _ENTRY_BYTES)
                recorded, crc = entry[:_DIGEST_BYTES], entry[_DIGEST_BYTES:]
                if crc and crc == _crc(index, recorded):
                    return recorded
                # Not written yet, or damaged itself: then this read counts as the first.
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
