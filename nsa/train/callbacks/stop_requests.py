"""Stop and save requests: handlers of SIGTERM, INT, HUP, USR1 and USR2, and a callback that all-reduces requests.

Handlers only record a signal. At the end of every step all ranks synchronize what any of them has seen (a `.HALT` file,
a signal to stop or to save, a failed background save) with one small all-reduce, so that all of them act at the same
step.

USR1 is different: it must work while a rank hangs in a collective, where no Python handler runs. Python's C handler
writes the signal's number into a pipe; a thread that reads it writes the stacks of all threads and the flight recorder.
It does so with the interpreter lock held: `faulthandler.register` writes stacks without it, while other threads run,
and that ended processes with a segmentation fault. A native call that never releases the lock keeps the thread from
working; `py-spy dump` sees into such a process.
"""

import faulthandler
import os
import signal
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import ClassVar, TextIO

from nsa import names
from nsa.errors import ExitCode
from nsa.observe.events import EventKind
from nsa.observe.run_folder import RunFolder
from nsa.train.callbacks.event_log import EventLogCallback
from nsa.train.callbacks.heartbeat import HeartbeatCallback
from nsa.train.distributed import HostCollectives, RankInfo
from nsa.train.engine import Callback
from nsa.train.engine.checkpointer import CheckpointCallback
from nsa.train.flight_recorder import write_flight_record
from nsa.train.launch.agent import leave_signals

SAVE = signal.SIGUSR2
DUMP = signal.SIGUSR1


class SignalHandlers:
    """Installed once at the start, and again after the engine has installed its own handlers (in `Trainer.fit`)."""

    def __init__(self, stackdump: Path, collectives: Path | None = None) -> None:
        self.stop_signal: str | None = None
        self.save = False
        self._stop_signals = leave_signals()
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
        for number in (*self._stop_signals, SAVE, DUMP):
            signal.signal(number, self._record)
        signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)

    def close(self) -> None:
        """Restore defaults. USR1 and USR2 are ignored: by default they would end the process, and the run is over."""
        signal.set_wakeup_fd(-1)
        os.close(self._write_end)  # the listener reads to the end and returns
        self._listener.join()
        for number in (DUMP, SAVE):
            signal.signal(number, signal.SIG_IGN)
        for number in self._stop_signals:
            signal.signal(number, signal.SIG_DFL)
        self._file.close()
        path = Path(self._file.name)
        if path.stat().st_size == 0:
            path.unlink()

    def _record(self, number: int, frame: FrameType | None) -> None:
        if number == SAVE:
            self.save = True
        elif number in self._stop_signals:
            self.stop_signal = signal.Signals(number).name

    def _listen(self) -> None:
        with os.fdopen(self._read_end, "rb", buffering=0) as pipe:
            while numbers := pipe.read(64):
                if DUMP not in numbers:
                    continue
                with suppress(OSError):  # a full disk now must not prevent the next dump
                    faulthandler.dump_traceback(self._file, all_threads=True)
                    if self._collectives is not None:
                        write_flight_record(self._collectives)


@dataclass
class StopRequestCallback(Callback):
    """Synchronizes stop and save requests across ranks at step boundaries, and ends the run with an exit code."""

    priority: ClassVar[int] = -10

    folder: RunFolder
    ranks: RankInfo
    collectives: HostCollectives
    signals: SignalHandlers
    checkpoints: CheckpointCallback
    heartbeat: HeartbeatCallback
    event_log: EventLogCallback | None
    exit_code: int = ExitCode.DONE

    def pre_train(self) -> None:
        self.signals.install()

    def post_step(self) -> None:
        reason = self.folder.halt_reason() if self.ranks.first_here else None
        stop = f"{self.signals.stop_signal} received" if self.signals.stop_signal else None
        if self.ranks.agent_gone():
            stop = stop or f"process {self.ranks.agent}, which started this rank, is gone"
        any_halt, any_stop, any_save, any_failed = self.collectives.any(
            [reason is not None, stop is not None, self.signals.save, self.checkpoints.failed]
        )
        if any_failed:
            self.checkpoints.wait_for_save()
        if any_save:
            self.signals.save = False
            self.checkpoints.save_now()
        if any_halt:
            self._end(
                ExitCode.HALTED, names.HALTED, EventKind.HALT, f"{names.HALT}: {reason or 'seen by another rank'}"
            )
        elif any_stop:
            self._end(ExitCode.PREEMPTED, names.STOPPED, EventKind.STOP, stop or "another rank received a stop signal")

    def _end(self, code: int, msg: str, kind: EventKind, detail: str) -> None:
        self.exit_code = code
        self.heartbeat.beat(msg, detail=detail)
        if self.event_log is not None:
            self.event_log.add(kind, reason=detail)
        self.trainer.cancel_run(detail, no_sync=True)
