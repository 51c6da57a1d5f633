"""Writes a folder of files at once: into a hidden folder beside it, which is renamed when it is complete."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from nsa.errors import OutputError
from nsa.files import fsync_path, fsync_tree, temporary_path


@contextmanager
def new_folder(out: Path, *, may_replace: Callable[[Path], bool] = lambda folder: False) -> Iterator[Path]:
    """Yield an empty folder that becomes `out` at the end; on an error `out` stays as it was.

    `out` must not exist, or be empty, or be one that `may_replace` accepts.
    """
    _require_replaceable(out, may_replace)
    out = out.absolute()
    staging, former = temporary_path(out), temporary_path(out)
    try:
        staging.mkdir(parents=True)
        yield staging
        fsync_tree(staging)
        _require_replaceable(out, may_replace)
        if out.exists():
            os.rename(out, former)
        os.rename(staging, out)
        fsync_path(out.parent)
    except BaseException:
        if former.exists() and not out.exists():
            os.rename(former, out)
        raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        shutil.rmtree(former, ignore_errors=True)


def _require_replaceable(out: Path, may_replace: Callable[[Path], bool]) -> None:
    if not os.path.lexists(out):
        return
    if out.is_symlink() or not out.is_dir():
        raise OutputError(f"{out} is not a folder: nothing is written there. Name a new folder.")
    if any(out.iterdir()) and not may_replace(out):
        raise OutputError(
            f"{out} is not empty, and holds something else than an earlier export, or --overwrite was not given: "
            f"nothing in it is changed. Name a new folder, or add --overwrite to replace an earlier export."
        )
