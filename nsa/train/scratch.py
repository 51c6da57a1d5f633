"""Scratch folders of the dry run, on the disk where the run will write."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def scratch_folder(out_dir: Path) -> Iterator[Path]:
    """In the run folder, or where that will be made; removed at the end."""
    made = Path(tempfile.mkdtemp(prefix=_prefix(os.getpid()), dir=_place(out_dir)))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def remove_scratch_of(pid: int, out_dir: Path) -> None:
    """What a process that was killed could not remove itself."""
    for left in _place(out_dir).glob(f"{_prefix(pid)}*"):
        shutil.rmtree(left, ignore_errors=True)


def _place(out_dir: Path) -> Path:
    return next(path for path in (out_dir, *out_dir.absolute().parents) if os.path.isdir(path))


def _prefix(pid: int) -> str:
    return f".preflight-{pid}-"
