"""Where the files of one checkpoint lie: a folder here, a prefix of an object store in `s3`."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from nsa.files import open_regular

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
        with open_regular(self.path / name, follow_links=False) as file:
            while chunk := file.read(CHUNK_BYTES):
                yield chunk
