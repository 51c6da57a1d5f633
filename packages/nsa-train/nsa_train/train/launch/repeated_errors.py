"""Output of a rank for the screen, without the error that an earlier start of the same rank has already printed."""

import re
from collections.abc import Callable

_ERROR = re.compile(r"(\w+(?:Error|Timeout|Killed)): ")


def without_repeated_errors(show: Callable[[str], None]) -> Callable[[str], None]:
    """Wrap `show`, which gets whole lines: an error line that it got before is shortened. Log files keep all of it."""
    seen: set[str] = set()

    def line_once(line: str) -> str:
        if (error := _ERROR.match(line)) is None:
            return line
        if line in seen:
            return f"{error[1]}: the same as before\n"
        seen.add(line)
        return line

    return lambda text: show("".join(map(line_once, text.splitlines(keepends=True))))
