"""Signal handlers that record TERM, INT, HUP and USR2; the trainer acts on them at the next step boundary.

USR1 is different: it must answer while a rank hangs in a collective, where no Python handler runs. Python's C handler
writes the signal's number into a pipe; a thread that waits there writes the stacks of all threads and the record of the
process groups. It does so with the interpreter lock held: `faulthandler.register` writes stacks without it, while other
threads run, and ended processes with a segmentation fault. A native call that never gives the lock back keeps the
thread from answering; `py-spy dump` sees into such a process.
"""

import faulthandler
import os
import signal
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TextIO

from nsa.train.flight_recorder import write_record
from nsa.train.launch.agent import leave_signals

SAVE = signal.SIGUSR2
DUMP = signal.SIGUSR1


class SignalHandlers:
    """Installed once at the start, and again after the engine has put its own handlers in place."""

    def __init__(self, stackdump: Path, collectives: Path | None = None) -> None:
        self.leave: str | None = None
        self.save = False
        self._leave = leave_signals()
        self._file: TextIO = stackdump.open("a", encoding="utf-8")
        self._collectives = collectives
        self._heard, self._tell = os.pipe()
        os.set_blocking(self._tell, False)
        self._listener = threading.Thread(target=self._listen, name="nsa-signals", daemon=True)
        self._listener.start()

    def install(self) -> None:
        for number in (*self._leave, SAVE, DUMP):
            signal.signal(number, self._note)
        signal.set_wakeup_fd(self._tell, warn_on_full_buffer=False)

    def close(self) -> None:
        """USR1 and USR2 end a process that does not handle them, and the run is over: ignore them."""
        signal.set_wakeup_fd(-1)
        os.close(self._tell)  # the listener reads to the end and leaves
        self._listener.join()
        for number in (DUMP, SAVE):
            signal.signal(number, signal.SIG_IGN)
        for number in self._leave:
            signal.signal(number, signal.SIG_DFL)
        self._file.close()
        path = Path(self._file.name)
        if path.stat().st_size == 0:
            path.unlink()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == SAVE:
            self.save = True
        elif number in self._leave:
            self.leave = signal.Signals(number).name

    def _listen(self) -> None:
        with os.fdopen(self._heard, "rb", buffering=0) as heard:
            while numbers := heard.read(64):
                if DUMP not in numbers:
                    continue
                with suppress(OSError):  # a full disk now must not cost the next answer
                    faulthandler.dump_traceback(self._file, all_threads=True)
                    if self._collectives is not None:
                        write_record(self._collectives)
