"""Inspection of a prepared set: SHA-256 verification of every file, document length statistics, document lookup."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from nsa.errors import ConfigError, DataError
from nsa_train.data.shards.manifest import ShardManifest, read_from_set
from nsa_train.data.shards.writer import (
    BLOCK_BYTES,
    ShardIndex,
    ShardInfo,
    check_block,
    check_sha256,
    decode_ids,
    read_index,
)
from nsa_train.names import TOKENIZER
from nsa_train.storage import StorageFolder

_CHUNK_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class _DamagedFile:
    name: str
    problem: str


def verify_set(
    folder: StorageFolder, manifest: ShardManifest, on_bytes: Callable[[int], None] = lambda count: None
) -> Iterator[_DamagedFile]:
    """Compare size and SHA-256 of every shard, and the fingerprint of the tokenizer; yields the files that differ."""
    for shards in manifest.splits.values():
        for shard in shards:
            for name, size, sha256 in shard.files():
                try:
                    read, digest = _hash_file(folder, name, on_bytes)
                except (DataError, OSError) as error:
                    yield _DamagedFile(name, str(error))
                    continue
                if read != size:
                    yield _DamagedFile(name, f"{read} bytes instead of {size}")
                elif digest != sha256:
                    yield _DamagedFile(name, f"SHA-256 {digest[:16]}… instead of {sha256[:16]}…")
    try:
        read_from_set(folder, manifest)
    except (DataError, ConfigError, OSError) as error:
        yield _DamagedFile(TOKENIZER, str(error))


def _hash_file(folder: StorageFolder, name: str, on_bytes: Callable[[int], None]) -> tuple[int, str]:
    digest, read = hashlib.sha256(), 0
    with folder.open_input(name) as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
            read += len(chunk)
            on_bytes(len(chunk))
    return read, digest.hexdigest()


def _read_index(folder: StorageFolder, shard: ShardInfo) -> ShardIndex:
    return read_index(_read_verified(folder, f"{shard.name}.idx", shard.idx_sha256), shard)


def _read_ids(folder: StorageFolder, shard: ShardInfo) -> list[str]:
    return decode_ids(_read_verified(folder, f"{shard.name}.ids", shard.ids_sha256), shard)


def _read_verified(folder: StorageFolder, name: str, sha256: str) -> bytes:
    raw = folder.read_bytes(name)
    check_sha256(raw, sha256, name)
    return raw


@dataclass(frozen=True, slots=True)
class LengthStats:
    """Document lengths in tokens, the end-of-document token included."""

    documents: int
    tokens: int
    mean: float
    percentiles: dict[int, int]
    longest: int


def length_stats(folder: StorageFolder, manifest: ShardManifest, split: str) -> LengthStats:
    """Reads the indexes only; memory is limited to a histogram of lengths, for any number of documents."""
    counts: dict[int, int] = {}
    for shard in manifest.shards(split):
        lengths = np.diff(_read_index(folder, shard).ends, prepend=0)
        for length, count in zip(*(part.tolist() for part in np.unique(lengths, return_counts=True)), strict=True):
            counts[length] = counts.get(length, 0) + count
    if not counts:
        return LengthStats(0, 0, 0.0, {}, 0)
    lengths = np.asarray(sorted(counts), dtype=np.int64)
    cumulative = np.cumsum([counts[length] for length in lengths.tolist()])
    documents, tokens = int(cumulative[-1]), sum(length * count for length, count in counts.items())
    at = {p: int(lengths[np.searchsorted(cumulative, p / 100 * documents)]) for p in (5, 25, 50, 75, 95, 99)}
    return LengthStats(documents, tokens, tokens / documents, at, int(lengths[-1]))


@dataclass(frozen=True, slots=True)
class _FoundDocument:
    doc_id: str
    shard: str
    start: int  # position in the split's concatenated tokens
    tokens: int


def find_document(folder: StorageFolder, manifest: ShardManifest, split: str, number: int) -> _FoundDocument:
    """The document with this number in the stored order of the split."""
    left, start = number, 0
    for shard in manifest.shards(split) if number >= 0 else []:
        if left < shard.documents:
            ends = _read_index(folder, shard).ends.tolist()
            first = ends[left - 1] if left else 0
            return _FoundDocument(_read_ids(folder, shard)[left], shard.name, start + first, ends[left] - first)
        left -= shard.documents
        start += shard.tokens
    raise DataError(f"split {split!r} has {manifest.totals(split)['documents']} documents; {number} is out of range.")


@dataclass(frozen=True, slots=True)
class _DocumentStart:
    """The first tokens of a document; `ids` ends with the end-of-document token if it is short enough."""

    doc_id: str
    tokens: int
    ids: list[int]


def _read_tokens(file: Any, shard: ShardInfo, index: ShardIndex, start: int, length: int) -> bytes:
    """Read a part of an open token file; every block is compared with its hash in the index."""
    first, last = start // BLOCK_BYTES, (start + length - 1) // BLOCK_BYTES
    content = b""
    for number in range(first, last + 1):
        at = number * BLOCK_BYTES
        block = file.read_at(min(BLOCK_BYTES, shard.tok_bytes - at), at)
        check_block(block, index.block_sha256, number, shard.name)
        content += block
    return content[start - first * BLOCK_BYTES :][:length]


def first_documents(
    folder: StorageFolder, manifest: ShardManifest, split: str, *, documents: int, max_tokens: int
) -> list[_DocumentStart]:
    """The beginnings of the first documents of a split, for a preview."""
    starts: list[_DocumentStart] = []
    dtype = manifest.numpy_dtype
    for shard in manifest.shards(split):
        if len(starts) == documents:
            break
        index, ids = _read_index(folder, shard), _read_ids(folder, shard)
        ends = index.ends.tolist()
        with folder.open_random(f"{shard.name}.tok") as file:
            for number in range(min(len(ends), documents - len(starts))):
                first = ends[number - 1] if number else 0
                length = min(ends[number] - first, max_tokens)
                raw = _read_tokens(file, shard, index, first * dtype.itemsize, length * dtype.itemsize)
                starts.append(_DocumentStart(ids[number], ends[number] - first, np.frombuffer(raw, dtype).tolist()))
    return starts
