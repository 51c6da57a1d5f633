"""manifest.json of a prepared set: shards, token counts, tokenizer, SHA-256 of every file; checks of what it lists.

It is written once and last: a folder without a manifest is unfinished, a folder with one is complete.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from nsa.errors import ConfigError, DataError
from nsa_train.data.shards.writer import (
    BLOCK_BYTES,
    ShardIndex,
    ShardInfo,
    check_block,
    check_sha256,
    decode_ids,
    read_index,
)
from nsa_train.data.tokenizer import LARGEST_TOKENIZER_BYTES, Tokenizer, check_same, parse_saved, token_dtype
from nsa_train.names import TOKENIZER
from nsa_train.storage import StorageFolder

MANIFEST_NAME = "manifest.json"
_CHUNK_BYTES = 4 * 2**20
_LARGEST_MANIFEST_BYTES = 64 << 20  # 100,000 shards
TRAIN, VALIDATION = "train", "validation"
SPLITS = (TRAIN, VALIDATION)
_FORMAT, _VERSION = "nsa-token-shards", 1
_DTYPES = ("uint16", "uint32")
# A name is a path below the set's folder and must not point outside it.
_SHARD_NAME = re.compile(r"[\w-]+(/[\w-]+)*")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class ShardManifest:
    vocab_size: int
    tokenizer_fingerprint: str
    eos_id: int
    dtype: str
    made_from: dict[str, Any]  # source, files and settings, as JSON; the same values give the same bytes
    quarantined: list[str]  # units of the source that could not be read
    splits: dict[str, list[ShardInfo]]

    @property
    def numpy_dtype(self) -> np.dtype:
        return np.dtype(self.dtype).newbyteorder("<")

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the content; two sets with the same one hold the same tokens in the same order.

        Cached: it is part of every cursor and takes a quarter of a second to compute for ten thousand shards.
        """
        return hashlib.sha256(_canonical(self._content())).hexdigest()

    @property
    def tokenizer_record(self) -> dict[str, Any]:
        """The record of the tokenizer that the set was prepared with."""
        return {"vocab_size": self.vocab_size, "fingerprint": self.tokenizer_fingerprint, "eos_id": self.eos_id}

    def shards(self, split: str) -> list[ShardInfo]:
        if split not in self.splits:
            raise ConfigError(f"the prepared set has no split {split!r}. Choose one of {sorted(self.splits)}.")
        return self.splits[split]

    def totals(self, split: str) -> dict[str, int]:
        shards = self.shards(split)
        return {
            "shards": len(shards),
            "documents": sum(s.documents for s in shards),
            "tokens": sum(s.tokens for s in shards),
            "bytes": sum(s.tok_bytes + s.idx_bytes + s.ids_bytes for s in shards),
        }

    def _content(self) -> dict[str, Any]:
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "tokenizer": self.tokenizer_record,
            "dtype": self.dtype,
            "block_bytes": BLOCK_BYTES,
            "made_from": self.made_from,
            "quarantined": self.quarantined,
            "totals": {split: self.totals(split) for split in self.splits},
            "splits": {split: [s.as_json() for s in shards] for split, shards in self.splits.items()},
        }

    def to_bytes(self) -> bytes:
        return json.dumps(self._content() | {"sha256": self.fingerprint}, indent=1).encode()


def _canonical(content: dict[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


@lru_cache(maxsize=2)
def _parse_manifest(raw: bytes, where: str) -> ShardManifest:
    """The manifest in these bytes. Cached: a rank opens the same set several times while it starts."""
    broken = f"{where} is not a manifest of prepared shards"
    try:
        content = json.loads(raw)
        recorded = content.pop("sha256")
        if (content["format"], content["version"], content["block_bytes"]) != (_FORMAT, _VERSION, BLOCK_BYTES):
            raise DataError(
                f"{where} has format {content['format']!r} version {content['version']}, this version reads "
                f"{_FORMAT!r} version {_VERSION}. Prepare the data again."
            )
        if hashlib.sha256(_canonical(content)).hexdigest() != recorded:
            raise DataError(
                f"{where} does not match its own SHA-256: it was changed or damaged. Restore or prepare it again."
            )
        manifest = ShardManifest(
            vocab_size=content["tokenizer"]["vocab_size"],
            tokenizer_fingerprint=content["tokenizer"]["fingerprint"],
            eos_id=content["tokenizer"]["eos_id"],
            dtype=content["dtype"],
            made_from=content["made_from"],
            quarantined=content["quarantined"],
            splits={split: [ShardInfo(**s) for s in shards] for split, shards in content["splits"].items()},
        )
        manifest.__dict__["fingerprint"] = recorded  # verified above
        _check_values(manifest)
        return manifest
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{broken} ({error!r}). Use the folder that `nsa data prepare` wrote.") from error


def _check_values(manifest: ShardManifest) -> None:
    """Raise `ValueError` for values that `prepare` never writes: the hash detects damage, not invalid values."""
    _require(_is_count(manifest.vocab_size) and 0 < manifest.vocab_size <= 2**32, "vocab_size", manifest.vocab_size)
    _require(_is_count(manifest.eos_id) and manifest.eos_id < manifest.vocab_size, "eos_id", manifest.eos_id)
    _require(isinstance(manifest.tokenizer_fingerprint, str), "fingerprint", manifest.tokenizer_fingerprint)
    wide_enough = _DTYPES[_DTYPES.index(token_dtype(manifest.vocab_size).name) :]
    _require(manifest.dtype in wide_enough, f"dtype for {manifest.vocab_size} ids", manifest.dtype)
    _require(isinstance(manifest.made_from, dict), "made_from", manifest.made_from)
    quarantined = manifest.quarantined
    _require(isinstance(quarantined, list) and all(isinstance(u, str) for u in quarantined), "quarantined", quarantined)
    _require(set(manifest.splits) == set(SPLITS), "splits", sorted(manifest.splits))
    for shard in (shard for shards in manifest.splits.values() for shard in shards):
        _require(isinstance(shard.name, str) and _SHARD_NAME.fullmatch(shard.name) is not None, "name", shard.name)
        for field in ("tokens", "documents", "tok_bytes", "idx_bytes", "ids_bytes"):
            _require(_is_count(getattr(shard, field)), f"{field} of {shard.name}", getattr(shard, field))
        for field in ("tok_sha256", "idx_sha256", "ids_sha256"):
            value = getattr(shard, field)
            _require(isinstance(value, str) and _SHA256.fullmatch(value) is not None, f"{field} of {shard.name}", value)
        sound = shard.tok_bytes == shard.tokens * manifest.numpy_dtype.itemsize and shard.documents <= shard.tokens
        _require(sound, f"tok_bytes, tokens and documents of {shard.name}", [shard.tok_bytes, shard.tokens])


def _require(holds: bool, what: str, value: object) -> None:
    if not holds:
        shown = repr(value)
        raise ValueError(f"{what} is {shown if len(shown) <= 80 else shown[:77] + '...'}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62


def read_manifest(folder: StorageFolder) -> ShardManifest:
    if not folder.exists(MANIFEST_NAME):
        if folder.is_local and not folder.local_path("").is_dir():
            raise DataError(
                f"{folder.url} does not exist. Check the path, or write the set with `nsa data prepare SRC "
                f"{folder.url}`."
            )
        raise DataError(
            f"{folder.url} has no {MANIFEST_NAME}: it is not a prepared set, or `nsa data prepare` has not finished. "
            f"Write one with `nsa data prepare {folder.url} OUT`; one that was interrupted continues."
        )
    raw = folder.read_bytes(MANIFEST_NAME, limit=_LARGEST_MANIFEST_BYTES)
    return _parse_manifest(raw, f"{folder.url}/{MANIFEST_NAME}")


def save_with_set(out: StorageFolder, tokenizer: Tokenizer, vocab_size: int, fingerprint: str) -> None:
    """Write tokenizer.json into a prepared set, unless it has one; raises if it is not the tokenizer of the set."""
    if out.exists(TOKENIZER):
        return
    check_same(vocab_size, fingerprint, tokenizer)
    out.write_bytes(TOKENIZER, tokenizer.to_json().encode())


def read_from_set(folder: StorageFolder, manifest: ShardManifest) -> Tokenizer | None:
    """The tokenizer of a prepared set; None for a set of an earlier version, which has none."""
    if not folder.exists(TOKENIZER):
        return None
    where = Path(folder.url) / TOKENIZER
    raw = folder.read_bytes(TOKENIZER, limit=LARGEST_TOKENIZER_BYTES)
    return parse_saved(raw, where, manifest.tokenizer_record)


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
