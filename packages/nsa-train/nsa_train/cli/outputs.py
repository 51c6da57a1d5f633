"""Output of commands: escaped control characters, closed pipes, progress lines, checks of output paths, disk errors."""

import errno
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TextIO

from nsa.errors import OutputError
from nsa.files import NO_ROOM
from nsa_train.terminal_text import printable

if TYPE_CHECKING:
    from rich.console import Console

_WRONG_PATH = {
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP,
}  # fmt: skip
_PROGRESS_DELAY_S = 2.0
_PROGRESS_REFRESH_S = 0.5
_PROGRESS_LOG_EVERY_S = 10.0
_CLEAR_LINE = "\r\x1b[K"


class PipedStdout:
    """stdout whose reader may close it, as `nsa … | head -1` does: the next write ends the command without a trace.

    The exit code is the shell's for SIGPIPE. The signal itself stays ignored: commands also write to sockets and to
    pipes of their children, whose errors they handle.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with self._until_closed():
            return self._stream.write(text)

    def flush(self) -> None:
        with self._until_closed():
            self._stream.flush()

    @contextmanager
    def _until_closed(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())  # for what is in the buffer, which Python writes when it exits
            os.close(nowhere)
            raise SystemExit(128 + signal.SIGPIPE) from None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def print_line(text: object) -> None:
    """Print one line to stdout. Control characters in names, manifests, records and errors are escaped."""
    print(printable(text), flush=True)


def table_console(width: int = 170) -> "Console":
    """A console for tables on stdout: as wide as the terminal, or this wide in a pipe, where grep finds whole lines."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else width, markup=False, highlight=False)


def print_json(value: Any) -> None:
    """Print one JSON document to stdout, for `--json`. Numbers that JSON lacks (NaN, infinite) become null."""
    print(json.dumps(_representable(value), indent=2, default=str, allow_nan=False), flush=True)


def _representable(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _representable(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_representable(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_error(text: object) -> None:
    """Print an error, which may have several lines, to stderr."""
    print(printable(text, keep_newlines=True), file=sys.stderr, flush=True)


def warn_if_exposed(host: str, reachable: str) -> None:
    """Warn on stderr if a server listens on more than loopback; `reachable`: what others can do or read then."""
    from nsa_train.train.launch.node_address import is_loopback

    if not is_loopback(host):
        print_error(
            f"WARNING: listening on {host}, not on loopback: whoever reaches this machine on that address can "
            f"{reachable}, without a password and unencrypted. Use --host 127.0.0.1 and an ssh tunnel, or a firewall."
        )


def print_rejected(finding: object) -> None:
    """Report on stderr a checkpoint that was passed over for an older one."""
    print_error(f"WARNING: passed over {finding}")


def require_writable_file(*paths: Path | None) -> None:
    """Raise if one of these files, or its folder, is not writable; None means no output."""
    for path in paths:
        if path is not None:
            require_writable_folder(path.parent)
            try:
                is_other = path.exists() and not path.is_file()
            except OSError as error:
                raise explain(error) or error from None
            if is_other:  # a pipe would block, and a device would be replaced by a file
                raise OutputError(f"cannot write {path}: it is a folder, pipe, socket or device. Name a file.")


def require_writable_folder(folder: Path | None) -> None:
    """Raise if this folder is not writable or cannot be created."""
    from nsa_train.record.run_folder import why_not_writable

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


class ProgressLine:
    """Shows a text and the seconds since the start on stderr, once the block has taken two seconds.

    On a terminal one line is updated in place and removed at the end; elsewhere a new line is written now and then.
    """

    def __init__(self, text: str) -> None:
        self._text, self._began, self._shown = text, time.monotonic(), False
        self._stopped, self._terminal = threading.Event(), sys.stderr.isatty()
        self._thread = threading.Thread(target=self._run, name="progress-line", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def update(self, text: str) -> None:
        self._text = text

    def stop(self) -> None:
        """Remove the line; for work that prints its results itself from here on. Idempotent."""
        if not self._stopped.is_set():
            self._stopped.set()
            self._thread.join()
            if self._shown and self._terminal:
                self._write(_CLEAR_LINE)

    def _run(self) -> None:
        pause_s = _PROGRESS_DELAY_S
        while not self._stopped.wait(pause_s):
            line = printable(f"{self._text} … {time.monotonic() - self._began:.0f} s")
            self._write(f"{_CLEAR_LINE}{line}" if self._terminal else f"{line}\n")
            self._shown, pause_s = True, _PROGRESS_REFRESH_S if self._terminal else _PROGRESS_LOG_EVERY_S

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()
