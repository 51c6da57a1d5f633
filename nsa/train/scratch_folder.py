"""Temporary folders of the dry run, on the disk where the run will write; removable by a parent after a kill."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def scratch_folder(out_dir: Path) -> Iterator[Path]:
    """A temporary folder on the disk of the run: in the run folder, or in its nearest existing parent."""
    made = Path(tempfile.mkdtemp(prefix=_scratch_prefix(os.getpid()), dir=_existing_parent(out_dir)))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def remove_scratch_of(pid: int, out_dir: Path) -> None:
    """Scratch folders that a killed process could not remove itself."""
    for left in _existing_parent(out_dir).glob(f"{_scratch_prefix(pid)}*"):
        shutil.rmtree(left, ignore_errors=True)


def _existing_parent(out_dir: Path) -> Path:
    return next(path for path in (out_dir, *out_dir.absolute().parents) if os.path.isdir(path))


def _scratch_prefix(pid: int) -> str:
    return f".preflight-{pid}-"
