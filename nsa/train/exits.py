"""Exit codes of a run by cause (errors carry their own, `nsa.errors`); signals that ask a run to save and exit."""

import signal

DONE = 0
PREEMPTED = 10
"""Asked to leave; a checkpoint was written and the run can go on."""
HALTED = 11
"""`.HALT` was found; somebody must look before it goes on."""


def leave_signals() -> tuple[signal.Signals, ...]:
    """Signals that ask a run to save and exit. Without SIGHUP where it is ignored: `nohup` asks for that."""
    always = signal.SIGTERM, signal.SIGINT
    return always if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (*always, signal.SIGHUP)
