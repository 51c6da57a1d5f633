"""File format and writer of prepared token shards.

A shard is three files. No document spans two shards, and every document ends with the end-of-document token.

    NAME.tok  the tokens, uint16 or uint32, little endian, nothing else
    NAME.idx  header, end of every document (uint64, in tokens), SHA-256 of every 64 KiB block of NAME.tok
    NAME.ids  end of every document id (uint64, in bytes), then the ids in UTF-8; read only if provenance is requested

The block hashes let a reader verify what it reads when it reads it: hashing whole shards at start would take hours on a
large set. `manifest.py` holds the hash of each whole file.
"""

import hashlib
import uuid
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from nsa.errors import DataError
from nsa.files import fsync_path, storage_errors
from nsa_train.storage import StorageFolder

BLOCK_BYTES = 64 * 2**10
HASH_BYTES = 32
_INDEX_MAGIC = b"NSAIDX01"
_HEADER_WORDS = 3  # documents, tokens, blocks


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """One shard as the manifest describes it."""

    name: str
    tokens: int
    documents: int
    tok_bytes: int
    idx_bytes: int
    ids_bytes: int
    tok_sha256: str
    idx_sha256: str
    ids_sha256: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def files(self) -> list[tuple[str, int, str]]:
        """(file name, bytes, SHA-256) of the three files."""
        return [
            (f"{self.name}.tok", self.tok_bytes, self.tok_sha256),
            (f"{self.name}.idx", self.idx_bytes, self.idx_sha256),
            (f"{self.name}.ids", self.ids_bytes, self.ids_sha256),
        ]


@dataclass(frozen=True, slots=True)
class ShardIndex:
    ends: np.ndarray  # int64, end of each document in tokens
    block_sha256: bytes  # HASH_BYTES per block of the token file


class ShardWriter:
    """Collects the documents of one shard in a scratch file and moves the finished files to a folder."""

    def __init__(self, name: str, dtype: np.dtype, scratch: Path) -> None:
        self.name = name
        self._dtype = dtype.newbyteorder("<")
        # A worker that briefly outlives its killed parent may still write the same shard: unique name.
        self._path = scratch / f"{name.replace('/', '-')}.{uuid.uuid4().hex}.tok.tmp"
        scratch.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("wb")
        self._sha256 = hashlib.sha256()
        self._block_hashes: list[bytes] = []
        self._open_block = bytearray()
        self._ends: list[int] = []
        self._ids: list[bytes] = []
        self.tokens = 0

    def add(self, doc_id: str, tokens: np.ndarray, eos_id: int) -> None:
        self._write(tokens.astype(self._dtype, copy=False).tobytes())
        self._write(np.asarray([eos_id], dtype=self._dtype).tobytes())
        self.tokens += len(tokens) + 1
        self._ends.append(self.tokens)
        self._ids.append(doc_id.encode("utf-8", "surrogatepass"))

    def _write(self, content: bytes) -> None:
        with self._storage_errors():
            self._file.write(content)
        self._sha256.update(content)
        self._open_block += content
        full = len(self._open_block) // BLOCK_BYTES * BLOCK_BYTES
        if full:
            view = memoryview(self._open_block)[:full]
            for start in range(0, full, BLOCK_BYTES):
                self._block_hashes.append(hashlib.sha256(view[start : start + BLOCK_BYTES]).digest())
            view.release()
            del self._open_block[:full]

    def finish(self, folder: StorageFolder) -> ShardInfo:
        with self._storage_errors():
            self._file.flush()
            fsync_path(self._path)
        tok_bytes = self._file.tell()
        self._file.close()
        if self._open_block:
            self._block_hashes.append(hashlib.sha256(self._open_block).digest())
        numbers = np.asarray([len(self._ends), self.tokens, len(self._block_hashes), *self._ends], dtype="<u8")
        index = _INDEX_MAGIC + numbers.tobytes() + b"".join(self._block_hashes)
        ids = np.cumsum([len(i) for i in self._ids], dtype="<u8").tobytes() + b"".join(self._ids)
        folder.put_file(self._path, f"{self.name}.tok")
        for suffix, content in ((".idx", index), (".ids", ids)):
            # Via the scratch folder too: an unfinished file next to the shards would remain after a kill.
            unfinished = self._path.with_suffix(suffix)
            with self._storage_errors():
                unfinished.write_bytes(content)
            folder.put_file(unfinished, f"{self.name}{suffix}")
        return ShardInfo(
            name=self.name,
            tokens=self.tokens,
            documents=len(self._ends),
            tok_bytes=tok_bytes,
            idx_bytes=len(index),
            ids_bytes=len(ids),
            tok_sha256=self._sha256.hexdigest(),
            idx_sha256=hashlib.sha256(index).hexdigest(),
            ids_sha256=hashlib.sha256(ids).hexdigest(),
        )

    def discard(self) -> None:
        with suppress(OSError):  # on a full disk, close() flushes and fails again
            self._file.close()
        self._path.unlink(missing_ok=True)

    def _storage_errors(self) -> AbstractContextManager[None]:
        fix = "Free disk space and run the same command again; finished tasks are kept."
        problem = f"shard {self.name} cannot be written to {self._path.parent}"
        return storage_errors(problem, fix=fix, if_full=(DataError, fix))


def check_sha256(content: bytes | memoryview, sha256: str, name: str) -> None:
    if hashlib.sha256(content).hexdigest() != sha256:
        raise DataError(
            f"{name} does not match its SHA-256: the bytes changed after they were written. Restore the file or "
            "prepare the data again; `nsa data verify` lists every damaged file."
        )


def check_block(content: bytes | memoryview, block_sha256: bytes, number: int, shard: str) -> None:
    """Compare one block of a shard's token file with its hash in the index."""
    expected = block_sha256[number * HASH_BYTES : (number + 1) * HASH_BYTES].hex()
    check_sha256(content, expected, f"{shard}.tok (bytes from {number * BLOCK_BYTES})")


def read_index(content: bytes, info: ShardInfo) -> ShardIndex:
    """Decode the index of a shard and check it against the manifest."""
    name, start = f"{info.name}.idx", len(_INDEX_MAGIC) + 8 * _HEADER_WORDS
    if content[: len(_INDEX_MAGIC)] != _INDEX_MAGIC or len(content) < start:
        raise DataError(
            f"{name} does not begin with {_INDEX_MAGIC!r}: it is not a shard index. Prepare the data again."
        )
    documents, tokens, blocks = (int(v) for v in np.frombuffer(content, "<u8", _HEADER_WORDS, len(_INDEX_MAGIC)))
    expected = start + 8 * documents + HASH_BYTES * blocks
    if len(content) != expected:
        raise DataError(
            f"{name} has {len(content)} bytes but its header describes {expected}: it was truncated. Prepare it again."
        )
    ends = np.frombuffer(content, "<u8", documents, start)
    if (
        (documents, tokens, blocks) != (info.documents, info.tokens, -(-info.tok_bytes // BLOCK_BYTES))
        or int(ends[-1] if documents else 0) != info.tokens
        or bool((ends[1:] <= ends[:-1]).any())
    ):
        raise DataError(
            f"{name} describes {documents} documents in {tokens} tokens, the manifest {info.documents} "
            f"in {info.tokens}: they belong to different sets. Restore the folder or prepare the data again."
        )
    return ShardIndex(ends.astype(np.int64), content[start + 8 * documents :])


def decode_ids(content: bytes, info: ShardInfo) -> list[str]:
    try:
        ends = np.frombuffer(content, "<u8", info.documents).tolist()
        text = content[8 * info.documents :]
        if ends and ends[-1] != len(text):
            raise ValueError(f"{len(text)} bytes of ids instead of {ends[-1]}")
        if any(b < a for a, b in pairwise(ends)):  # ids would overlap, and be longer than the file together
            raise ValueError("an id ends before it begins")
        return [text[a:b].decode("utf-8", "surrogatepass") for a, b in zip([0, *ends[:-1]], ends, strict=True)]
    except ValueError as error:
        raise DataError(
            f"{info.name}.ids does not hold {info.documents} document ids ({error}). Restore or prepare it again."
        ) from error
