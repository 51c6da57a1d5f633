"""Printing with escaped control characters, writability checks of output paths, and messages for disk errors."""

import errno
import sys
from pathlib import Path

from nsa.errors import OutputError
from nsa.files import NO_ROOM
from nsa.terminal_text import printable

_WRONG_PATH = {
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP,
}  # fmt: skip


def print_line(text: object) -> None:
    """Print one line to stdout. Control characters in names, manifests, records and errors are escaped."""
    print(printable(text), flush=True)


def print_error(text: object) -> None:
    """Print an error, which may have several lines, to stderr."""
    print(printable(text, keep_newlines=True), file=sys.stderr, flush=True)


def print_rejected(finding: object) -> None:
    """Report on stderr a checkpoint that was passed over for an older one."""
    print_error(f"WARNING: passed over {finding}")


def require_writable_file(*paths: Path | None) -> None:
    """Raise if one of these files, or its folder, is not writable; None means no output."""
    for path in paths:
        if path is not None:
            require_writable_folder(path.parent)
            try:
                is_folder = path.is_dir()
            except OSError as error:
                raise explain(error) or error from None
            if is_folder:
                raise OutputError(f"cannot write {path}: it is a folder. Name a file.")


def require_writable_folder(folder: Path | None) -> None:
    """Raise if this folder is not writable or cannot be created."""
    from nsa.observe.run_folder import why_not_writable

    if folder is not None and (problem := why_not_writable(folder)):
        raise OutputError(f"cannot write to {folder}: {problem}. Name another path, or change its permissions.")


def explain(error: OSError) -> OutputError | None:
    """The error for a path or disk problem that the user can fix; None for anything else."""
    if error.errno in NO_ROOM:
        what = f"cannot write {error.filename}" if error.filename else "cannot write"
        return OutputError(f"{what}: {error.strerror}. Free disk space, or write to another disk.")
    if error.errno in _WRONG_PATH and error.filename:
        return OutputError(
            f"cannot read or write {error.filename}: {error.strerror}. Name another path, or change its permissions."
        )
    return None
