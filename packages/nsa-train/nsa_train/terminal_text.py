"""Text for people: untrusted text without control characters, for a terminal, a log or a label; durations.

Untrusted is what a file, a server or another person chose: names of files and runs, manifests, heartbeats, events,
`.HALT`. A terminal executes control characters: they move the cursor, hide lines, rename the window, write the
clipboard (OSC 52) or make a link (OSC 8); bidirectional overrides show a name in another order than it has.
"""

import math

UNKNOWN = "–"


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


def duration(seconds: float | None) -> str:
    """Format a duration in its two largest units."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    if seconds < 0:
        return "0 s"
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms" if seconds >= 0.0005 else f"{1000 * seconds:.1f} ms" if seconds else "0 s"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    days, hours, minutes, rest = whole // 86400, whole // 3600 % 24, whole // 60 % 60, whole % 60
    if days:
        return f"{days} d {hours:02d} h"
    if hours:
        return f"{hours} h {minutes:02d} m"
    return f"{minutes} m {rest:02d} s" if minutes else f"{rest} s"
