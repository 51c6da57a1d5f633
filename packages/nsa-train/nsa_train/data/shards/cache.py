"""Local LRU cache of remote shard files: limited size, shared by the ranks of a node, verified after download."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nsa.errors import ConfigError, DataError
from nsa.files import file_lock, replace_file, storage_errors, temporary_path
from nsa_train.storage import StorageFolder

_CHUNK_BYTES = 4 * 2**20
_ATTEMPTS = 3


class ShardCache:
    """Evicts least recently used files first; a process that has an evicted file open can still read it."""

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
        for _ in range(_ATTEMPTS):
            digest = hashlib.sha256()
            try:
                with folder.open_input(name) as source, unfinished.open("wb") as copy:
                    while chunk := source.read(_CHUNK_BYTES):
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
            f"{name} from {folder.url} could not be fetched in {_ATTEMPTS} attempts ({problem}). Check the store; if "
            "the stored file is damaged, prepare this set again."
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
