"""Every exception a user may meet, and the exit code each one ends a command with.

A message states the rule, the values that broke it, why the rule exists, and the fix, in the user's own spelling.
`assert` is for mistakes of ours; these are for everything a user, a disk or a network can do.
"""


class NSAError(Exception):
    """Base of all errors that carry a message for the user; the command line prints it without a traceback."""

    exit_code = 1


class ConfigError(NSAError):
    """A setting that is unknown, malformed, or contradicts another one."""

    exit_code = 20


class KernelUnavailable(ConfigError):
    """A backend was asked for by name and cannot run here."""


class DataError(NSAError):
    """Data that is missing, corrupt beyond the allowed limit, or too late."""

    exit_code = 21


class DataTimeout(DataError):
    """Data that did not come in time: its source is slow, hangs or is gone. The condition `loader_timeout`."""


class DataProcessKilled(DataError):
    """The prefetching process was killed (SIGKILL), usually by the kernel's out-of-memory killer."""


class CheckpointError(NSAError):
    """A checkpoint that cannot be trusted, written or found, or a run folder that another process holds."""

    exit_code = 22


class OutputError(NSAError):
    """A file or folder that cannot be written: a wrong path, missing permission, a full or read-only disk."""

    exit_code = 22


class NonFiniteError(NSAError):
    """Steps that were not finite, or spiked, more often than the run may skip or go back for."""

    exit_code = 23


class ReplicaError(NSAError):
    """Replicas of the weights that are no longer the same: suspect hardware."""

    exit_code = 16


class PreflightError(NSAError):
    """A run that breaks rules which would make it a waste; `--allow RULE` overrides one by name."""

    exit_code = 2
