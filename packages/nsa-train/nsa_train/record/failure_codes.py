"""Failure codes: why a process of a run ended, recorded by the writer and read by health checks.

The heartbeat and the error event carry the code (`failure_code`) beside the message, so that a reworded message changes
no finding. Records of older runs have no code; `_code_from_legacy_text` classifies those by their message.
"""

import errno
import re
import sys
from collections.abc import Iterator
from enum import StrEnum

from nsa.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DataProcessKilled,
    DataTimeout,
    ExitCode,
    NonFiniteError,
    OutputError,
    PreflightError,
    ReplicaError,
)
from nsa.files import NO_ROOM


class FailureCode(StrEnum):
    """Codes, the most specific first: of several in one chain of exceptions, the first in this order is recorded."""

    OUT_OF_MEMORY = "out_of_memory"
    DATA_PROCESS_KILLED = "data_process_killed"
    """The prefetching process got SIGKILL, usually from the kernel's out-of-memory killer."""
    DISK_FULL = "disk_full"
    DATA_TIMEOUT = "data_timeout"
    NONFINITE = "nonfinite"
    REPLICAS_DIFFER = "replicas_differ"
    PREFLIGHT = "preflight"
    CONFIG = "config"
    DATA = "data"
    CHECKPOINT = "checkpoint"
    OUTPUT = "output"
    HUNG = "hung"
    KILLED_BY_SIGNAL = "killed_by_signal"
    UNEXPECTED = "unexpected"
    """An exception or exit status without a code of its own."""


# A subclass before its base.
_OF_CLASS: tuple[tuple[type[BaseException], FailureCode], ...] = (
    (MemoryError, FailureCode.OUT_OF_MEMORY),
    (DataProcessKilled, FailureCode.DATA_PROCESS_KILLED),
    (DataTimeout, FailureCode.DATA_TIMEOUT),
    (DataError, FailureCode.DATA),
    (NonFiniteError, FailureCode.NONFINITE),
    (ReplicaError, FailureCode.REPLICAS_DIFFER),
    (PreflightError, FailureCode.PREFLIGHT),
    (ConfigError, FailureCode.CONFIG),
    (CheckpointError, FailureCode.CHECKPOINT),
    (OutputError, FailureCode.OUTPUT),
)
_OF_EXIT_CODE: dict[int, FailureCode] = {
    PreflightError.exit_code: FailureCode.PREFLIGHT,
    ReplicaError.exit_code: FailureCode.REPLICAS_DIFFER,
    ConfigError.exit_code: FailureCode.CONFIG,
    DataError.exit_code: FailureCode.DATA,
    CheckpointError.exit_code: FailureCode.CHECKPOINT,
    NonFiniteError.exit_code: FailureCode.NONFINITE,
    ExitCode.HUNG: FailureCode.HUNG,
}
_CPU_ALLOCATOR = "DefaultCPUAllocator"
"""PyTorch raises a plain RuntimeError when the CPU is out of memory; the allocator's name is all that marks it."""


def code_of_exception(error: BaseException) -> FailureCode:
    """The most specific code of an exception and of what it was raised from."""
    order = list(FailureCode)
    return min((_of_one(each) for each in _chain(error)), key=order.index)


def code_of_exit_status(status: int) -> FailureCode:
    """Return the code for the status of a process: an exit code, or a negative signal number."""
    return FailureCode.KILLED_BY_SIGNAL if status < 0 else _OF_EXIT_CODE.get(status, FailureCode.UNEXPECTED)


def recorded_code(code: str | None, message: str) -> FailureCode:
    """The code of a record; from its message where it has none, or one that this version does not know."""
    try:
        return FailureCode(code or "")
    except ValueError:
        return _code_from_legacy_text(message)


# "exit code -9": a prefetching process that the kernel killed.
_LEGACY_OUT_OF_MEMORY = re.compile(r"OutOfMemoryError|MemoryError|out of memory|Cannot allocate memory|exit code -9")
_LEGACY_TIMEOUT = re.compile(r"^(DataTimeout|_TooLate)\b|did not come within")


def _code_from_legacy_text(message: str) -> FailureCode:
    """Classify records from before `failure_code` by their `ExceptionClass: message` of that time. Never extended."""
    if _LEGACY_OUT_OF_MEMORY.search(message):
        return FailureCode.OUT_OF_MEMORY
    return FailureCode.DATA_TIMEOUT if _LEGACY_TIMEOUT.search(message) else FailureCode.UNEXPECTED


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__


def _of_one(error: BaseException) -> FailureCode:
    if isinstance(error, OSError):
        if error.errno in NO_ROOM:
            return FailureCode.DISK_FULL
        if error.errno == errno.ENOMEM:
            return FailureCode.OUT_OF_MEMORY
    # Without importing torch: readers of run folders do not need it; a process that raised its error has it.
    gpu_out_of_memory = getattr(sys.modules.get("torch"), "OutOfMemoryError", ())
    if isinstance(error, RuntimeError) and (isinstance(error, gpu_out_of_memory) or _CPU_ALLOCATOR in str(error)):
        return FailureCode.OUT_OF_MEMORY
    return next((code for kind, code in _OF_CLASS if isinstance(error, kind)), FailureCode.UNEXPECTED)
