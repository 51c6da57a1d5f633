"""Escapes control characters in untrusted text before it is shown in a terminal, a log or a label.

Untrusted is what a file, a server or another person chose: names of files and runs, manifests, heartbeats, events,
`.HALT`. A terminal executes control characters: they move the cursor, hide lines, rename the window, write the
clipboard (OSC 52) or make a link (OSC 8); bidirectional overrides show a name in another order than it has.
"""


def printable(text: object, most: int | None = None, *, keep_newlines: bool = False) -> str:
    """`text` on one line, with every character that is not printable written as its escape, e.g. `\\x1b`.

    Longer than `most`, it is cut with an ellipsis. `keep_newlines` is for our own messages of several lines.
    """
    raw = str(text)
    shown = raw if most is None or len(raw) <= most else raw[: most + 1]
    if not shown.isprintable():
        shown = "".join(
            letter if letter.isprintable() or (keep_newlines and letter == "\n") else _escaped(letter)
            for letter in shown
        )
    return shown if most is None or len(shown) <= most else shown[: max(0, most - 1)] + "…"


def _escaped(letter: str) -> str:
    """Escape a character as Python does: \\n, \\x1b, \\u202e, and half of a surrogate pair, which has no encoding."""
    return letter.encode("unicode_escape").decode("ascii")
