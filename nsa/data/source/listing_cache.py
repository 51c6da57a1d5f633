"""What the footers of a large dataset said, kept on disk.

All of FineWeb-Edu is some 2,400 files with footers of about a megabyte: worth reading once, not at every restart. Only
for files whose address names their content (a commit on the hub); each footer is still checked against its hash when
used.
"""

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from nsa.files import storage_errors, write_atomic

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ListedFile:
    """What a listing remembers of a parquet file; the footer itself is fetched again when it is needed."""

    size: int
    footer_bytes: int
    footer_sha256: str
    row_groups: int


class ListingCache:
    def __init__(self, folder: Path, names: Sequence[str], columns: str) -> None:
        key = hashlib.sha256("\n".join([columns, *names]).encode()).hexdigest()[:32]
        self._path = folder / f"listing-{key}.json"
        self._names = list(names)

    def load(self) -> list[ListedFile] | None:
        """None if there is nothing usable; a damaged cache is only a slow start."""
        try:
            content = json.loads(self._path.read_text(encoding="utf-8"))
            files = [ListedFile(**entry) for entry in content["files"]]
            sound = content["sha256"] == _digest(files) and len(files) == len(self._names)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            _log.warning("listing cache %s is not used (%s: %s)", self._path, type(error).__name__, error)
            return None
        return files if sound else None

    def save(self, files: Sequence[ListedFile]) -> None:
        fix = "Set data.cache_dir to a folder that can be written, or leave it out."
        with storage_errors(f"listing cache {self._path} cannot be written", fix=fix):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            content = json.dumps({"sha256": _digest(files), "files": [asdict(file) for file in files]})
            write_atomic(self._path, content, many_writers=True)


def _digest(files: Sequence[ListedFile]) -> str:
    return hashlib.sha256(json.dumps([asdict(file) for file in files]).encode()).hexdigest()
