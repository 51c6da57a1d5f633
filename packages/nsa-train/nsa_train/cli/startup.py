"""Settings of the process of a command: OpenMP's waiting, bars of libraries, garbage collection, SIGTERM."""

import gc
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_SPIN_COUNT = "1000"
"""Turns an OpenMP thread waits before it sleeps, as GNU's runtime does by itself where threads outnumber cores.

Its default of 300,000 keeps a core for milliseconds after every parallel loop. On two cores with other work the
quickstart was ten times slower with it, on cores of its own about a tenth faster: docs/ENV.md has the figures.
"""
_OPENMP_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def prepare_process() -> None:
    """Call once, at the start of a command, before torch is imported. Child processes inherit the variables."""
    if not any(os.environ.get(name) for name in _OPENMP_WAITING):
        os.environ["GOMP_SPINCOUNT"] = _SPIN_COUNT  # libgomp reads it when it is loaded, with torch
    if not sys.stderr.isatty():  # bars of tqdm, as Transformers draws them, fill logs with their lines
        os.environ.setdefault("TQDM_DISABLE", "1")
    # Base installs have no NumPy, and no command that works there needs it. A NumPy that is broken is still reported.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy: No module named 'numpy'", UserWarning)


@contextmanager
def imports_not_collected() -> Iterator[None]:
    """Look for no garbage during imports, and later none among what they left: it stays until the process ends. Both
    take a tenth of the CPU time of a start, and the second takes time at every collection."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM inside this block, so that cleanup code runs as after Ctrl-C."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
