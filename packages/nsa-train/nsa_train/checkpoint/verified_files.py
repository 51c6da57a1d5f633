"""Reads checkpoint files and verifies the SHA-256 of every block before its bytes are used.

Verifying a folder first and reading it later would leave a time window for a swap. Here a block is read into memory,
hashed there, compared with the manifest, and only then used: a file that is replaced or changed meanwhile is refused.
No byte is read twice, and a rank reads only the blocks that contain its own tensors.
"""

import hashlib
import os
import threading
from collections import OrderedDict
from concurrent.futures import Future
from pathlib import Path

from nsa.errors import CheckpointError
from nsa.files import open_regular
from nsa_train import names
from nsa_train.checkpoint.block_hashes import BLOCK_BYTES, hash_blocks, same_content
from nsa_train.checkpoint.manifest import IRREGULAR, CheckpointManifest, LocalFiles

_CACHED_BLOCKS = 4
LARGEST_RANK_FILE_BYTES = 16 << 20


class VerifiedFiles:
    """The files of a checkpoint as its manifest lists them; without a manifest, as they are."""

    def __init__(self, path: Path, manifest: CheckpointManifest | None) -> None:
        self.path, self.manifest = path, manifest
        if manifest is not None:
            self.sizes = {name: entry.bytes for name, entry in manifest.files.items()}
        else:
            self.sizes = {name: size for name, size in LocalFiles(path).files().items() if size != IRREGULAR}
        self._cache: OrderedDict[tuple[str, int], Future[bytes]] = OrderedDict()
        self._digests: dict[str, tuple[str, ...]] = {}
        self._lock = threading.Lock()
        self.bytes_read = 0
        """Read from the files so far: whole blocks, and parts that are not verified."""

    @property
    def tensor_folder(self) -> str:
        """Folder of the tensor index, ending with a slash; empty for a folder written by DCP alone."""
        inside = f"{names.TENSORS}/"
        return inside if f"{inside}{names.TENSOR_INDEX}" in self.sizes else ""

    def read(self, name: str, *, limit: int) -> bytearray:
        """A whole small file."""
        if self.sizes.get(name, 0) > limit:
            raise CheckpointError(
                f"{self.path / name} has {self.sizes[name]} bytes, more than the {limit} that such a file may have."
            )
        return self.read_range(name, 0, self.sizes.get(name, 0))

    def read_range(self, name: str, offset: int, length: int) -> bytearray:
        """Part of a file; raises CheckpointError if it is not what was committed."""
        if name not in self.sizes:
            raise CheckpointError(f"{self.path / name} is missing.")
        if offset < 0 or length < 0 or offset + length > self.sizes[name]:
            raise CheckpointError(f"{self.path / name} ends before byte {offset + length}.")
        content = bytearray(length)
        first, last = offset // BLOCK_BYTES, (offset + length - 1) // BLOCK_BYTES
        for number in range(first, last + 1):
            start = number * BLOCK_BYTES
            begin, end = max(offset, start), min(offset + length, start + BLOCK_BYTES)
            block = self._block(name, number, keep=number in (first, last))
            content[begin - offset : end - offset] = memoryview(block)[begin - start : end - start]
        return content

    def peek(self, name: str, offset: int, length: int) -> bytes:
        """Part of a file, not verified: for checks that do not use the content."""
        try:
            with open_regular(self.path / name, follow_links=False) as file:
                content = os.pread(file.fileno(), length, offset)
        except OSError as error:
            raise CheckpointError(f"{self.path / name} cannot be read: {error}.") from error
        with self._lock:
            self.bytes_read += len(content)
        return content

    def _block(self, name: str, number: int, *, keep: bool) -> bytes:
        """`keep` caches the block: the next piece probably begins in it, or another thread needs it now."""
        if not keep:
            return self._read_block(name, number)
        with self._lock:
            reading = self._cache.get((name, number))
            mine = reading is None
            if reading is None:
                reading = self._cache[name, number] = Future()
                while len(self._cache) > _CACHED_BLOCKS:
                    self._cache.popitem(last=False)
        if mine:
            try:
                reading.set_result(self._read_block(name, number))
            except BaseException as error:  # noqa: BLE001 - raised below, and in every thread that waits
                reading.set_exception(error)
        return reading.result()

    def _read_block(self, name: str, number: int) -> bytes:
        start = number * BLOCK_BYTES
        length = min(BLOCK_BYTES, self.sizes[name] - start)
        block = self.peek(name, start, length)
        expected = self._expected(name)
        if len(block) != length or (expected is not None and hashlib.sha256(block).hexdigest() != expected[number]):
            raise CheckpointError(
                f"{self.path / name} does not match its SHA-256: it was damaged, or changed after it was verified. "
                f"Nothing of it is used. Use another checkpoint; `nsa checkpoint ls` shows which there are."
            )
        return block

    def _expected(self, name: str) -> tuple[str, ...] | None:
        if self.manifest is None:
            return None
        entry = self.manifest.files[name]
        if entry.sha256 is None:
            return entry.blocks
        with self._lock:
            if name not in self._digests:
                # The first format has one hash per file: blocks hashed in the same pass are as good as it is.
                hashes = hash_blocks(LocalFiles(self.path).chunks(name), whole=True)
                if not same_content(entry, hashes):
                    raise CheckpointError(f"{self.path / name} does not match its SHA-256.")
                self._digests[name] = hashes.blocks
            return self._digests[name]
