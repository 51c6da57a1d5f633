"""Exceptions for users and the exit codes of commands and runs.

An error message states the rule, the values that broke it, why the rule exists, and the fix, in the user's spelling.
`assert` is for mistakes in this code; these exceptions are for everything a user, a disk or a network can do.
"""

from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple


class ExitCode(IntEnum):
    """Exit codes of `nsa` commands and of training runs. Schedulers and scripts rely on them: values never change."""

    meaning: str

    def __new__(cls, value: int, meaning: str) -> "ExitCode":
        member = int.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        return member

    DONE = 0, "finished"
    FAILED = 1, "a defect or an error of no other kind"
    REFUSED = 2, "the command line is wrong, or preflight refused the run"
    PREEMPTED = 10, "stopped by a signal; a checkpoint was saved and the run can resume"
    HALTED = 11, "stopped by `.HALT`; a person must clear it before the run resumes"
    REGROUP = 12, "saved to continue on more nodes; `nsa launch` restarts it by itself"
    REPLICAS_DIFFER = 16, "replicas of the weights differ: suspect hardware"
    CONFIG = 20, "a setting is unknown, malformed or contradicts another one"
    DATA = 21, "data is missing, corrupt or too late"
    CHECKPOINT = 22, "a checkpoint or an output file cannot be read, trusted or written"
    NON_FINITE = 23, "more non-finite or spiking steps than the run may skip"
    HUNG = 24, "a run hung and was killed"


class NSAError(Exception):
    """Base of all errors that carry a message for the user; the command line prints it without a traceback."""

    exit_code = ExitCode.FAILED


class ConfigError(NSAError):
    """A setting that is unknown, malformed, or contradicts another one."""

    exit_code = ExitCode.CONFIG


class KernelUnavailable(ConfigError):
    """A backend was requested by name and cannot run here."""


class UnsupportedTransform(ConfigError):
    """A transform of torch (vmap, forward mode, double backward) that an operator of ours does not support."""


class DataError(NSAError):
    """Data that is missing, corrupt beyond the allowed limit, or too late."""

    exit_code = ExitCode.DATA


class DataTimeout(DataError):
    """Data that did not arrive in time: its source is slow, hangs or is gone. The condition `loader_timeout`."""


class DataProcessKilled(DataError):
    """The prefetching process was killed (SIGKILL), usually by the kernel's out-of-memory killer."""


class CheckpointError(NSAError):
    """A checkpoint that cannot be trusted, written or found, or a run folder locked by another process."""

    exit_code = ExitCode.CHECKPOINT


class StoreRefused(CheckpointError):
    """An object store that refuses its address or the credentials: another attempt would fail in the same way."""


class OutputError(NSAError):
    """A file or folder that cannot be written: a wrong path, missing permission, a full or read-only disk."""

    exit_code = ExitCode.CHECKPOINT


class NonFiniteError(NSAError):
    """More non-finite or spiking steps than the run may skip or roll back."""

    exit_code = ExitCode.NON_FINITE


class ReplicaError(NSAError):
    """Replicas of the weights that are no longer bitwise equal: suspect hardware."""

    exit_code = ExitCode.REPLICAS_DIFFER


class PreflightError(NSAError):
    """A run that breaks preflight rules; `--allow RULE` overrides one by name."""

    exit_code = ExitCode.REFUSED


class BrokenRule(NamedTuple):
    """A rule between options or settings that does not hold: their names, as the message spells them, and it."""

    keys: tuple[str, ...]
    message: str


def require_rules(broken: Iterable[BrokenRule]) -> None:
    """Raise one `ConfigError` with every broken rule."""
    if messages := [rule.message for rule in broken]:
        raise ConfigError("\n".join(messages))
