"""Signal handlers of a run: SIGTERM, INT and HUP stop it, USR2 saves, USR1 dumps stacks and the flight recorder; URG,
from the agent of `nsa launch`, saves and stops it so that it can continue on more nodes.

Handlers only record a signal; `StopRequestCallback` acts on it at the end of a step, on all ranks together.

USR1 is different: it must work while a rank hangs in a collective, where no Python handler runs. Python's C handler
writes the signal's number into a pipe; a thread that reads it writes the stacks of all threads and the flight recorder
(the last collectives of every process group). It does so with the interpreter lock held: `faulthandler.register` writes
stacks without it, while other threads run, and that ended processes with a segmentation fault. A native call that never
releases the lock keeps the thread from working; `py-spy dump` sees into such a process.
"""

import faulthandler
import json
import os
import signal
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TextIO

from nsa.files import write_atomic
from nsa_train import names

_SAVE = signal.SIGUSR2
_DUMP = signal.SIGUSR1
REGROUP = signal.SIGURG
"""Ignored by default, so that it does not end a rank that has not installed its handlers yet."""

_BUFFER = "TORCH_FR_BUFFER_SIZE"
_ENTRIES = "2000"
_DUMPS = {"gloo": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}
"""The second exists in builds with CUDA."""


def stop_signals() -> tuple[signal.Signals, ...]:
    """Signals that make a run save and exit. SIGHUP is left out where it is ignored: `nohup` requests that."""
    always = signal.SIGTERM, signal.SIGINT
    return always if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (*always, signal.SIGHUP)


class SignalHandlers:
    """Installed once at the start, and again after the engine has installed its own handlers (in `Trainer.fit`)."""

    def __init__(self, stackdump: Path, collectives: Path | None = None) -> None:
        self.stop_signal: str | None = None
        self.save = False
        self.regroup = False
        self._stop_signals = stop_signals()
        self._file: TextIO = stackdump.open("a", encoding="utf-8")
        self._collectives = collectives
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        self._listener = threading.Thread(target=self._listen, name="nsa-signals", daemon=True)
        self._listener.start()

    @classmethod
    def of_rank(cls, folder: Path, rank: int) -> "SignalHandlers":
        """With the dump files of this process in the run folder."""
        return cls(folder / names.stackdump(rank, os.getpid()), folder / names.collectives(rank, os.getpid()))

    def install(self) -> None:
        for number in (*self._stop_signals, _SAVE, _DUMP, REGROUP):
            signal.signal(number, self._record)
        signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)

    def close(self) -> None:
        """Restore defaults. USR1 and USR2 are ignored: by default they would end the process, and the run is over."""
        signal.set_wakeup_fd(-1)
        os.close(self._write_end)  # the listener reads to the end and returns
        self._listener.join()
        for number in (_DUMP, _SAVE):
            signal.signal(number, signal.SIG_IGN)
        for number in (*self._stop_signals, REGROUP):
            signal.signal(number, signal.SIG_DFL)
        self._file.close()
        path = Path(self._file.name)
        if path.stat().st_size == 0:
            path.unlink()

    def _record(self, number: int, frame: FrameType | None) -> None:
        if number == _SAVE:
            self.save = True
        elif number == REGROUP:
            self.regroup = True
        elif number in self._stop_signals:
            self.stop_signal = signal.Signals(number).name

    def _listen(self) -> None:
        with os.fdopen(self._read_end, "rb", buffering=0) as pipe:
            while numbers := pipe.read(64):
                if _DUMP not in numbers:
                    continue
                with suppress(OSError):  # a full disk now must not prevent the next dump
                    faulthandler.dump_traceback(self._file, all_threads=True)
                    if self._collectives is not None:
                        _write_flight_record(self._collectives)


def enable_flight_recorder() -> None:
    """Before the process groups are made: NCCL keeps a record only if `_BUFFER` is set by then, Gloo always does."""
    os.environ.setdefault(_BUFFER, _ENTRIES)


def _write_flight_record(path: Path) -> bool:
    """Write the last collectives of every process group, atomically; False where there are no groups.

    It takes no collective and, as a blocked collective releases the interpreter lock, any thread can call it while the
    main thread hangs.
    """
    import torch  # the launcher imports this module and stays without torch
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return False
    c10d = torch._C._distributed_c10d
    record = {backend: json.loads(getattr(c10d, dump)()) for backend, dump in _DUMPS.items() if hasattr(c10d, dump)}
    write_atomic(path, json.dumps(record, indent=1) + "\n")
    return True
