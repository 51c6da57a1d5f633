"""A SIGTERM that ends a command as Ctrl-C does: through the blocks that end its processes and keep what it has."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def polite_end() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
