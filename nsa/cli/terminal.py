"""Output of commands: lines in which foreign text is escaped."""

import sys

from nsa.terminal_text import printable


def say(text: object) -> None:
    """One line on stdout. Control characters of names, manifests, records and errors in it are shown, not obeyed."""
    print(printable(text), flush=True)


def complain(text: object) -> None:
    """An error on stderr; ours have several lines."""
    print(printable(text, keep_newlines=True), file=sys.stderr, flush=True)
