"""Hashes made while a file is written are those of the file on the disk."""

import errno
import hashlib
import os
import random
import resource
import signal
from pathlib import Path

import pytest

from nsa_train.checkpoint.manifest import BLOCK_BYTES, HashedFile, ManifestEntry, hash_blocks


def expected(content: bytes) -> ManifestEntry:
    starts = range(0, len(content), BLOCK_BYTES)
    return ManifestEntry(
        len(content), tuple(hashlib.sha256(content[at : at + BLOCK_BYTES]).hexdigest() for at in starts)
    )


@pytest.mark.parametrize("size", [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 2 * BLOCK_BYTES + 777])
def test_hashes_are_those_of_the_file_whatever_the_size_of_the_writes(tmp_path: Path, size: int) -> None:
    dice = random.Random(size)
    content = dice.randbytes(size)
    with HashedFile(tmp_path / "file") as file:
        left = memoryview(content)
        while len(left):
            part = left[: dice.choice([1, 4096, 3 << 20, 20 << 20])]
            assert file.write(part) == len(part)
            left = left[len(part) :]
        assert file.tell() == size
    assert (tmp_path / "file").read_bytes() == content
    assert file.entry() == expected(content) == hash_blocks([content])


def test_wider_elements_count_in_bytes(tmp_path: Path) -> None:
    numbers = memoryview(bytearray(range(64))).cast("I")
    with HashedFile(tmp_path / "file") as file:
        assert file.write(numbers) == 64
    assert file.entry() == expected(bytes(range(64)))


def test_a_file_that_exists_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError):
        HashedFile(tmp_path / "file")


def test_the_reason_of_a_failed_write_is_kept(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        with HashedFile(tmp_path / "file") as file, pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
            file.write(bytes(100_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert file.failure is not None
