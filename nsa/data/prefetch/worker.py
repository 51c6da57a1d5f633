"""The process behind `feeding.Feeder`. Imports no torch: it starts with the trainer and must be quick and small."""

import signal
import sys
from dataclasses import dataclass
from typing import Any

from nsa import errors
from nsa.data.child_process import exit_with_parent
from nsa.data.rows.batch import EndOfData
from nsa.data.rows.row_stream import State
from nsa.data.rows.specs import RowData
from nsa.data.tokenizer import one_tokenizer_thread
from nsa.errors import DataError, NSAError


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """An error of the worker, by name: the trainer raises the same class, or the nearest in `nsa.errors`, again."""

    kind: str
    message: str

    def as_error(self) -> NSAError:
        if self.kind == EndOfData.__name__:
            return EndOfData(self.message)
        error: NSAError = getattr(errors, self.kind, DataError)(self.message)
        return error

    @classmethod
    def of(cls, error: NSAError) -> "WorkerFailure":
        if isinstance(error, EndOfData):
            return cls(EndOfData.__name__, str(error))
        return cls(next(each.__name__ for each in type(error).__mro__ if hasattr(errors, each.__name__)), str(error))


def produce(
    out: Any, parent_pid: int, data: RowData, global_rows: int, rank: int, world: int, state: State | None
) -> None:
    """Put (batch, cursor after it) into the queue until the parent is gone, or a Failure and end."""
    exit_with_parent(parent_pid)
    # A signal to the whole group asks the trainer to save and leave, for which it may need another batch. The trainer
    # ends this process with SIGKILL, which is safe because nothing here is state.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    one_tokenizer_thread()
    try:
        stream = data.open()
        if state is not None:
            stream.load_state_dict(state)
        while True:
            batch = stream.next_batch(global_rows, rank, world)
            out.put((batch, stream.state_dict()))
    except NSAError as error:
        out.put(WorkerFailure.of(error))
        out.close()
        out.join_thread()
        sys.exit(error.exit_code)
