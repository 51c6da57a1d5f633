"""Tile sizes, the switch for timing them (runtime.tune_kernels), and the file that keeps what was measured.

One JSON file per GPU name and Triton version. Needs no Triton, so that the switch can be set where it is not installed.

Several processes may start at once: one times while the others wait for the lock, then read what it found. The file
appears by one rename, so no reader sees a partial file. It holds a hash of the kernels' sources; measurements
of other sources are ignored.
"""

import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from nsa.files import file_lock, hash_of_files, write_atomic

_log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent

_tunes = False


def set_tuning(on: bool) -> None:
    global _tunes
    _tunes = on


def tunes() -> bool:
    return _tunes


class TileSizes(NamedTuple):
    m: int
    """Rows: queries × heads."""
    n: int
    """Keys."""
    warps: int = 4
    stages: int = 2

    @property
    def options(self) -> dict[str, int]:
        return dict(num_warps=self.warps, num_stages=self.stages)


class TileStore:
    def __init__(self, folder: Path, gpu_name: str, triton_version: str) -> None:
        name = re.sub(r"[^A-Za-z0-9.]+", "-", f"{gpu_name}_triton-{triton_version}").strip("-")
        self.path = folder / f"tiles_{name}.json"
        self._kernels = hash_of_files(SOURCES.glob("*.py"), SOURCES)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One process at a time; OSError where the folder cannot be written."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with file_lock(self.path.with_suffix(".lock"), mode=0o600):
            yield

    def read(self) -> dict[str, TileSizes]:
        try:
            content = json.loads(self.path.read_text())
            tiles = {key: TileSizes(*(int(size) for size in sizes)) for key, sizes in content["tiles"].items()}
            measured_with = content["kernels"]
        except FileNotFoundError:
            return {}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            _log.warning(
                "%s is not a table of tiles (%r): they are timed again and the file is replaced.", self.path, error
            )
            return {}
        if measured_with != self._kernels:
            _log.info("%s was measured with other kernels: tiles are timed again.", self.path)
            return {}
        return tiles

    def write(self, tiles: dict[str, TileSizes]) -> None:
        content = {"kernels": self._kernels, "tiles": {key: list(sizes) for key, sizes in sorted(tiles.items())}}
        write_atomic(self.path, json.dumps(content, indent=1) + "\n", durable=True, many_writers=True, mode=0o600)
