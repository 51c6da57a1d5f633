"""Text layout for the monitor: lines of fixed width, titles, columns, ASCII fallback."""

from collections.abc import Sequence
from itertools import zip_longest

from rich.text import Text

QUIET = "dim"
_LEVELS = " ▁▂▃▄▅▆▇█"

_Pieces = str | Text | tuple[str, str]


def line(*pieces: _Pieces) -> Text:
    return Text.assemble(*pieces, no_wrap=True, overflow="ellipsis")


def fit(text: Text, width: int) -> Text:
    """Fit text into exactly `width` cells: truncated with an ellipsis, or padded."""
    fitted = text.copy()
    fitted.truncate(max(0, width), overflow="ellipsis", pad=True)
    return fitted


def ends(left: Text, right: Text, width: int) -> Text:
    """Left- and right-aligned text in one line; the right one is kept whole if possible."""
    room = max(0, width - right.cell_len - 1)
    joined = fit(left, room)
    joined.append(" ")
    joined.append_text(right)
    return fit(joined, width)


def title(words: str, about: Text | str, width: int) -> Text:
    """A heading with its unit or values, and a rule to the full width."""
    head = line((words, "bold"), " ")
    if about:
        head.append_text(line(about if isinstance(about, Text) else (about, QUIET), " "))
    head.truncate(width, overflow="ellipsis")
    head.append("─" * max(0, width - head.cell_len), QUIET)
    return head


def beside(left: Sequence[Text], right: Sequence[Text], left_width: int, gap: int = 2) -> list[Text]:
    return [
        line(fit(a if a is not None else Text(), left_width), " " * gap, b if b is not None else Text())
        for a, b in zip_longest(left, right)
    ]


def level(share: float) -> str:
    """A share from 0 to 1 as a block character of that height."""
    if not 0 <= share <= 1:
        return "?" if share != share or share in (float("inf"), float("-inf")) else "█"
    return _LEVELS[max(1, round(share * 8))] if share > 0 else _LEVELS[1]


def plain_ascii(text: Text) -> Text:
    """Replace the characters that a terminal without Unicode lacks."""
    styled = Text(text.plain.translate(_ASCII), no_wrap=True, overflow="ellipsis")
    styled.spans = list(text.spans)
    return styled


_ASCII = {
    **dict.fromkeys(range(0x2801, 0x2900), "*"),
    **dict(zip(map(ord, _LEVELS[1:]), "12345678", strict=True)),
    **{ord(a): b for a, b in zip("─│┤┊·×↑…–●○✓■✗▲≈→µ", "-||:.x^.-*o+#x!~>u", strict=True)},
}
