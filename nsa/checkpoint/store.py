"""Where the files of one checkpoint lie: a folder here, a prefix of an object store in `s3`."""

import errno
import io
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

CHUNK_BYTES = 4 << 20
IRREGULAR = -1


class CheckpointStore(Protocol):
    """The files of one checkpoint, by name relative to it, with `/` between folders."""

    def files(self) -> dict[str, int]:
        """Name → size in bytes; IRREGULAR for what is no plain file."""

    def chunks(self, name: str) -> Iterator[bytes]:
        """The content in pieces small enough to hold in memory."""

    def __str__(self) -> str:
        """The place, as a user would name it."""


class FolderStore:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def files(self) -> dict[str, int]:
        found = {}
        for folder, subfolders, names in os.walk(self.path):
            here = Path(folder)
            links = [name for name in subfolders if (here / name).is_symlink()]  # os.walk does not enter them
            for path in (here / name for name in (*names, *links)):
                regular = path.is_file() and not path.is_symlink()
                found[path.relative_to(self.path).as_posix()] = path.stat().st_size if regular else IRREGULAR
        return found

    def chunks(self, name: str) -> Iterator[bytes]:
        with open_plain(self.path / name) as file:
            while chunk := file.read(CHUNK_BYTES):
                yield chunk

    def sync(self) -> None:
        """Bring every file and folder to the disk, so that a power cut after the commit loses nothing."""
        for folder, _, names in os.walk(self.path, topdown=False):
            for name in names:
                sync(Path(folder) / name)
            sync(Path(folder))


def open_plain(path: Path) -> io.FileIO:
    """Open a plain file for reading: never through a link, never waiting for a pipe to be written to."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no plain file", str(path))
    return io.FileIO(descriptor, "rb")


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, content: bytes) -> None:
    """Write a small file so that it is either absent, old or whole, whatever happens."""
    temporary = path.with_name(f"{path.name}.new")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync(path.parent)
