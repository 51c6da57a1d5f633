"""Random access to the tokens of a prepared set, as one concatenated array of memory-mapped shards; their cache.

Local shards are mapped in place, remote ones from the cache. Everything returned is verified: the index of a shard
against the manifest when the shard is opened, each 64 KiB block of tokens against the index when it is first read.
"""

import hashlib
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np

from nsa.errors import ConfigError, DataError
from nsa.files import file_lock, open_regular, replace_file, storage_errors, temporary_path
from nsa_train.data.rows.batch import Segment
from nsa_train.data.shards.manifest import TRAIN, ShardManifest, read_manifest
from nsa_train.data.shards.writer import (
    BLOCK_BYTES,
    HASH_BYTES,
    ShardInfo,
    check_block,
    check_sha256,
    decode_ids,
    read_index,
)
from nsa_train.storage import StorageFolder

# Each open shard holds one memory map; Linux allows 65,530 of them per process by default.
_MAX_OPEN_SHARDS = 4096
_OPEN_ATTEMPTS = 5
_COPY_BYTES = 4 * 2**20
_FETCH_ATTEMPTS = 3
_T = TypeVar("_T")


class _OpenShard:
    """A memory-mapped shard that records which of its blocks have been verified."""

    def __init__(self, path: Path, index_raw: bytes, info: ShardInfo, dtype: np.dtype) -> None:
        self.info = info
        check_sha256(index_raw, info.idx_sha256, f"{info.name}.idx")
        index = read_index(index_raw, info)
        self.ends = index.ends
        self._block_sha256 = index.block_sha256
        actual = path.stat().st_size
        if actual != info.tok_bytes:
            raise DataError(
                f"{info.name}.tok has {actual} bytes instead of {info.tok_bytes}: it was truncated or changed. "
                "Restore it or prepare the data again."
            )
        self._raw: np.ndarray = (
            np.asarray(np.memmap(path, dtype=np.uint8, mode="r")) if actual else np.empty(0, np.uint8)
        )
        self._tokens = self._raw.view(dtype)
        self._itemsize = dtype.itemsize
        self._verified = bytearray(len(self._block_sha256) // HASH_BYTES)

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """A verified view of tokens [start, stop)."""
        first = start * self._itemsize // BLOCK_BYTES
        last = (stop * self._itemsize - 1) // BLOCK_BYTES
        for block in range(first, last + 1):
            if not self._verified[block]:
                self._verify(block)
        return self._tokens[start:stop]

    def _verify(self, block: int) -> None:
        content = self._raw[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
        check_block(content.data, self._block_sha256, block, self.info.name)
        self._verified[block] = 1


class ShardReader:
    """The tokens of one split, addressed from 0 to `total_tokens`."""

    def __init__(
        self,
        folder: StorageFolder,
        split: str = TRAIN,
        *,
        cache: "ShardCache | None" = None,
        manifest: ShardManifest | None = None,
        max_open_shards: int = _MAX_OPEN_SHARDS,
    ) -> None:
        self.folder = folder
        self.manifest = manifest or read_manifest(folder)
        self._shards = self.manifest.shards(split)
        self.split = split
        if cache is None and not folder.is_local:
            raise ConfigError(f"{folder.url} is remote: its shards need a local cache. Set data.cache_dir.")
        self._cache = cache
        self._dtype = self.manifest.numpy_dtype
        self.starts = np.zeros(len(self._shards) + 1, dtype=np.int64)
        np.cumsum([s.tokens for s in self._shards], out=self.starts[1:])
        self.total_tokens = int(self.starts[-1])
        self._open: OrderedDict[int, _OpenShard] = OrderedDict()
        self._open_bytes = 0
        self._ids: tuple[int, list[str]] = (-1, [])
        self._max_open = max_open_shards

    @property
    def total_bytes(self) -> int:
        return self.total_tokens * self._dtype.itemsize

    @property
    def cache_limit_bytes(self) -> int | None:
        """Limit of the local cache in bytes; None if shards are read in place."""
        return None if self._cache is None or self.folder.is_local else self._cache.limit_bytes

    def copy_window(self, start: int, stop: int, out: np.ndarray) -> np.ndarray:
        """Copy tokens [start, stop) into `out`; returns the document ends e with start < e <= stop."""
        assert 0 <= start < stop <= self.total_tokens, f"window [{start}, {stop}) outside {self.total_tokens} tokens"
        number = int(self.starts.searchsorted(start, side="right")) - 1
        ends = []
        written = 0
        while start < stop:
            shard = self._shard(number)
            base = int(self.starts[number])
            low, high = start - base, min(stop - base, shard.info.tokens)
            out[written : written + high - low] = shard.tokens(low, high)
            first, last = shard.ends.searchsorted((low, high), side="right")
            ends.append(shard.ends[first:last] + base)
            written += high - low
            start = base + high
            number += 1
        return ends[0] if len(ends) == 1 else np.concatenate(ends)

    def segments(self, start: int, stop: int) -> tuple[Segment, ...]:
        """The pieces of documents that tokens [start, stop) belong to."""
        segments: list[Segment] = []
        while start < stop:
            number = int(np.searchsorted(self.starts, start, side="right")) - 1
            shard = self._shard(number)
            base = int(self.starts[number])
            document = int(np.searchsorted(shard.ends, start - base, side="right"))
            doc_start = base + (int(shard.ends[document - 1]) if document else 0)
            end = min(base + int(shard.ends[document]), stop)
            segments.append(Segment(self._doc_ids(number)[document], start - doc_start, end - start))
            start = end
        return tuple(segments)

    def _doc_ids(self, number: int) -> list[str]:
        if self._ids[0] != number:
            info = self._shards[number]
            name = f"{info.name}.ids"
            raw = self._retry_if_evicted(lambda: self._read(name, info.ids_bytes, info.ids_sha256))
            check_sha256(raw, info.ids_sha256, name)
            self._ids = (number, decode_ids(raw, info))
        return self._ids[1]

    def _shard(self, number: int) -> _OpenShard:
        shard = self._open.get(number)
        if shard is None:
            shard = self._open[number] = self._open_shard(self._shards[number])
            self._open_bytes += shard.info.tok_bytes
            limit = self.cache_limit_bytes
            # An evicted cache file uses disk space as long as it is mapped: close what exceeds the cache.
            while len(self._open) > self._max_open or (limit and self._open_bytes > limit and len(self._open) > 1):
                self._open_bytes -= self._open.popitem(last=False)[1].info.tok_bytes
        else:
            self._open.move_to_end(number)
        return shard

    def _open_shard(self, info: ShardInfo) -> _OpenShard:
        def attempt() -> _OpenShard:
            index_raw = self._read(f"{info.name}.idx", info.idx_bytes, info.idx_sha256)
            token_path = self._local(f"{info.name}.tok", info.tok_bytes, info.tok_sha256)
            return _OpenShard(token_path, index_raw, info, self._dtype)

        return self._retry_if_evicted(attempt)

    def _retry_if_evicted(self, attempt: Callable[[], _T]) -> _T:
        """Retry for cached files: another rank may evict one between its download and our opening it."""
        for _ in range(1 if self.folder.is_local else _OPEN_ATTEMPTS):
            try:
                return attempt()
            except FileNotFoundError as error:
                missing = error
            except OSError as error:
                raise DataError(
                    f"a file of {self.folder.url} cannot be read ({error}). Restore it or prepare the data again."
                ) from error
        raise DataError(
            f"{missing.filename} is missing but listed in the manifest. Restore it or prepare the data again; if the "
            "set is remote, raise data.cache_gib."
        ) from missing

    def _read(self, name: str, size: int, sha256: str) -> bytes:
        """A whole small file; a folder, pipe or device in its place is an OSError."""
        with open_regular(self._local(name, size, sha256)) as file:
            return file.read(min(size, os.fstat(file.fileno()).st_size) + 1)

    def _local(self, name: str, size: int, sha256: str) -> Path:
        if self.folder.is_local:
            return self.folder.local_path(name)
        assert self._cache is not None
        return self._cache.fetch(self.folder, name, size, sha256)


class ShardCache:
    """Local cache of remote shard files: limited size, shared by the ranks of a node, verified after download.

    Evicts least recently used files first; a process that has an evicted file open can still read it.
    """

    def __init__(self, path: str | Path, limit_bytes: int) -> None:
        if limit_bytes < 1:
            raise ConfigError(
                f"the shard cache limit is {limit_bytes} bytes: it must hold at least one shard. Raise data.cache_gib."
            )
        self.path = Path(path)
        self.limit_bytes = limit_bytes
        fix = "Set data.cache_dir to a writable folder."
        with storage_errors(f"shard cache {self.path} cannot be written", fix=fix):
            self.path.mkdir(parents=True, exist_ok=True)

    def fetch(self, folder: StorageFolder, name: str, size: int, sha256: str) -> Path:
        """The local copy of `name`; if missing, it is downloaded, verified by its hash and renamed into place."""
        # The hash is part of the name: two sets, or two versions of one, never share a cache entry.
        target = self.path / f"{sha256[:32]}-{Path(name).name}"
        if self._touch(target, size):
            return target
        if size > self.limit_bytes:
            raise ConfigError(
                f"{name} has {size} bytes but the shard cache is limited to {self.limit_bytes}. Raise data.cache_gib."
            )
        with self._lock(target.name):
            if not self._touch(target, size):  # another rank may have fetched it while we waited
                self._make_room(size)
                self._download(folder, name, size, sha256, target)
        return target

    @staticmethod
    def _touch(target: Path, size: int) -> bool:
        try:
            if target.stat().st_size != size:
                return False
            os.utime(target)
        except FileNotFoundError:
            return False
        return True

    def _download(self, folder: StorageFolder, name: str, size: int, sha256: str, target: Path) -> None:
        unfinished = temporary_path(target)
        problem = ""
        for _ in range(_FETCH_ATTEMPTS):
            digest = hashlib.sha256()
            try:
                with folder.open_input(name) as source, unfinished.open("wb") as copy:
                    while chunk := source.read(_COPY_BYTES):
                        digest.update(chunk)
                        copy.write(chunk)
                if digest.hexdigest() == sha256:
                    replace_file(unfinished, target, durable=True)
                    return
                problem = (
                    f"SHA-256 {digest.hexdigest()} of {unfinished.stat().st_size} bytes instead of {sha256} of {size}"
                )
            except OSError as error:
                problem = str(error)
            finally:
                unfinished.unlink(missing_ok=True)
        raise DataError(
            f"{name} from {folder.url} could not be fetched in {_FETCH_ATTEMPTS} attempts ({problem}). Check the "
            "store; if the stored file is damaged, prepare this set again."
        )

    def _make_room(self, size: int) -> None:
        entries = []
        for path in self.path.iterdir():
            if path.suffix in (".tok", ".idx", ".ids"):
                try:
                    status = path.stat()
                except FileNotFoundError:  # another rank removed it just now
                    continue
                entries.append((status.st_mtime_ns, status.st_size, path))
        used = sum(entry[1] for entry in entries)
        for _, entry_size, path in sorted(entries):
            if used + size <= self.limit_bytes:
                return
            path.unlink(missing_ok=True)
            used -= entry_size

    @contextmanager
    def _lock(self, name: str) -> Iterator[None]:
        # One lock for the whole cache would serialise downloads; 64 keep the number of lock files bounded.
        slot = int(hashlib.sha256(name.encode()).hexdigest(), 16) % 64
        with file_lock(self.path / f".lock-{slot:02d}"):
            yield
