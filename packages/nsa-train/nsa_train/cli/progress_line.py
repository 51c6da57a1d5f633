"""A line on stderr for work that takes more than two seconds; nothing is written for work that does not."""

import sys
import threading
import time
from types import TracebackType
from typing import Self

from nsa_train.terminal_text import printable

_DELAY_S = 2.0
_REFRESH_S = 0.5
_LOG_EVERY_S = 10.0
_CLEAR = "\r\x1b[K"


class ProgressLine:
    """Shows a text and the seconds since the start while the block runs.

    On a terminal one line is updated in place and removed at the end; elsewhere a new line is written now and then.
    """

    def __init__(self, text: str) -> None:
        self._text, self._began, self._shown = text, time.monotonic(), False
        self._stopped = threading.Event()
        self._terminal = sys.stderr.isatty()
        self._thread = threading.Thread(target=self._run, name="progress-line", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def update(self, text: str) -> None:
        self._text = text

    def stop(self) -> None:
        """Remove the line; for work that prints its results itself from here on. Idempotent."""
        if not self._stopped.is_set():
            self._stopped.set()
            self._thread.join()
            if self._shown and self._terminal:
                self._write(_CLEAR)

    def _run(self) -> None:
        pause_s = _DELAY_S
        while not self._stopped.wait(pause_s):
            line = printable(f"{self._text} … {time.monotonic() - self._began:.0f} s")
            self._write(f"{_CLEAR}{line}" if self._terminal else f"{line}\n")
            self._shown, pause_s = True, _REFRESH_S if self._terminal else _LOG_EVERY_S

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()
