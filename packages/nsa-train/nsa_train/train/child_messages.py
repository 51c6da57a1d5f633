"""Messages of a child process of ours: JSON lines on its stdout, everything else that it prints on stderr."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO


@contextmanager
def message_sender() -> Iterator[Callable[..., None]]:
    """In the child: a function that sends its keyword arguments. What libraries print to stdout goes to stderr."""
    with os.fdopen(os.dup(1), "w", buffering=1) as out:
        os.dup2(2, 1)

        def send(**message: object) -> None:
            out.write(json.dumps(message) + "\n")

        yield send


def last_line(errors: IO[bytes]) -> str:
    """In the parent: the last line that a child printed to stderr, which is this file."""
    errors.seek(0)
    return (errors.read().decode("utf-8", "replace").strip().splitlines() or ["it printed no reason"])[-1][:300]
