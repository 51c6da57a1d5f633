"""Turns what a disk refuses (read-only, no permission, full, a file where a folder should be) into a message."""

from collections.abc import Iterator
from contextlib import contextmanager

from nsa.errors import NO_ROOM, DataError, NSAError


@contextmanager
def storage_errors(problem: str, *, fix: str, if_full: tuple[type[NSAError], str] | None = None) -> Iterator[None]:
    """An `OSError` inside becomes `DataError`: "problem (reason). fix". `if_full` is the class and the fix for a disk
    without room."""
    try:
        yield
    except OSError as error:
        kind: type[NSAError] = DataError
        if error.errno in NO_ROOM:
            kind, fix = if_full or (DataError, "Free disk space and run the same command again.")
        reason = error.strerror or str(error)
        where = f": {error.filename}" if error.filename and str(error.filename) not in problem else ""
        raise kind(f"{problem} ({reason}{where}). {fix}") from error
