"""Filters of the engine's log: what it announces about itself is dropped, its warnings about a run are not.

Imported before the rest of the engine: it logs one of these messages while it is imported.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_ENGINE = "olmo_core"
_ANNOUNCING_LOGS = (f"{_ENGINE}.utils", f"{_ENGINE}.distributed.utils", f"{_ENGINE}.train")
"""Loggers of the engine that announce environment variables, ranks and time limits."""


def _no_announcement(record: logging.LogRecord) -> bool:
    """A variable that the user or the launcher set, e.g. OMP_NUM_THREADS, stays as it is: no reason to warn."""
    return record.levelno > logging.INFO and not record.getMessage().startswith("Will skip setting env var")


_DROPPED = {
    # A run that was asked to stop says so itself, with the step and how to continue.
    f"{_ENGINE}.train.trainer": "Run canceled from all ranks.",
    # Transformer Engine is optional and unused here. One that is installed and does not load is worth a warning.
    f"{_ENGINE}.nn.attention.te_attn_api": "No module named 'transformer_engine'",
    # The gradient norm is reduced over one kind of parallelism after the other: one number, and nothing to change.
    "torch.distributed.tensor._redistribute": "_NormPartial",
}
"""Logger → text of the messages that it does not show."""
for _name, _text in _DROPPED.items():
    logging.getLogger(_name).addFilter(lambda record, text=_text: text not in record.getMessage())  # type: ignore[misc]


@contextmanager
def quiet_engine_log() -> Iterator[None]:
    """Drop the engine's log messages below WARNING."""
    log = logging.getLogger(_ENGINE)
    level = log.level
    log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.setLevel(level)


@contextmanager
def without_announcements() -> Iterator[None]:
    """Drop what the engine announces while it sets up a process.

    It prints to stdout until logging is configured, so a handler and a level are set first; then filters see it.
    """
    root, engine, stderr = logging.getLogger(), logging.getLogger(_ENGINE), logging.StreamHandler()
    level = engine.level
    stderr.setLevel(logging.WARNING)
    root.addHandler(stderr)
    engine.setLevel(logging.INFO)
    for name in _ANNOUNCING_LOGS:
        logging.getLogger(name).addFilter(_no_announcement)
    try:
        yield
    finally:
        for name in _ANNOUNCING_LOGS:
            logging.getLogger(name).removeFilter(_no_announcement)
        engine.setLevel(level)
        root.removeHandler(stderr)


@contextmanager
def logging_restored() -> Iterator[None]:
    """Undo at the end what the engine does to the logging of the process: handlers, level, captured warnings.

    Without it, whatever runs afterwards in the same process logs to a handler whose stream may be closed.
    """
    root, factory, show = logging.getLogger(), logging.getLogRecordFactory(), warnings.showwarning
    handlers, level, filters = root.handlers[:], root.level, warnings.filters[:]
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        warnings.filters[:] = filters  # type: ignore[index]
        if warnings.showwarning is not show:
            logging.captureWarnings(False)
        logging.setLogRecordFactory(factory)
