"""Signals as wishes: a handler only notes them, a step boundary acts on them.

USR1 is different: it must answer while a rank hangs in a collective, where no Python handler runs, so faulthandler
writes the stacks from C.
"""

import faulthandler
import signal
from pathlib import Path
from types import FrameType
from typing import TextIO

LEAVE = (signal.SIGTERM, signal.SIGINT)
SAVE = signal.SIGUSR2
DUMP = signal.SIGUSR1


class Signals:
    """Installed once at the start, and again after the engine has put its own handlers in place."""

    def __init__(self, stackdump: Path) -> None:
        self.leave: str | None = None
        self.save = False
        self._file: TextIO = stackdump.open("a", encoding="utf-8")

    def install(self) -> None:
        faulthandler.register(DUMP, file=self._file, all_threads=True, chain=False)
        for number in (*LEAVE, SAVE):
            signal.signal(number, self._note)

    def close(self) -> None:
        """USR1 and USR2 end a process that does not handle them, and the run is over: ignore them."""
        faulthandler.unregister(DUMP)
        for number in (DUMP, SAVE):
            signal.signal(number, signal.SIG_IGN)
        for number in LEAVE:
            signal.signal(number, signal.SIG_DFL)
        self._file.close()
        path = Path(self._file.name)
        if path.stat().st_size == 0:
            path.unlink()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == SAVE:
            self.save = True
        else:
            self.leave = signal.Signals(number).name
