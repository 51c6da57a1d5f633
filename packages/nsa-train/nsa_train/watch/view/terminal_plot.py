"""Terminal text: lines of fixed width, titles, columns, and line plots with braille characters (two by four dots each).

Plots are readable without colour: × is non-finite, ↑ above the axis, ┊ a restart, o an evaluation.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from rich.text import Text

from nsa_train.watch.view.downsample import ChartBucket, ValueRange, buckets, nice_step, ticks, value_range
from nsa_train.watch.view.formatting import tick

QUIET = "dim"
_LEVELS = " ▁▂▃▄▅▆▇█"

_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_BAD, _HIGH, _RESTART, _POINT = "bold red", "yellow", "dim yellow", "bold magenta"
_ASCII = {
    **dict.fromkeys(range(0x2801, 0x2900), "*"),
    **dict(zip(map(ord, _LEVELS[1:]), "12345678", strict=True)),
    **{ord(a): b for a, b in zip("─│┤┊·×↑…–●○✓■✗▲≈→µ", "-||:.x^.-*o+#x!~>u", strict=True)},
}

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


def beside(left: Sequence[Text], right: Sequence[Text], left_width: int) -> list[Text]:
    return [line(fit(a, left_width), "  ", b) for a, b in zip_longest(left, right, fillvalue=Text())]


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


@dataclass
class PlotCurve:
    x: Sequence[float]
    y: Sequence[float]
    style: str = ""
    letter: str = ""
    """Drawn on the curve at a few places, to tell several curves apart."""


def braille_plot(
    curves: Sequence[PlotCurve],
    width: int,
    height: int,
    *,
    points: Sequence[tuple[float, float]] = (),
    restarts: Sequence[float] = (),
    from_zero: bool = False,
    x_range: tuple[float, float] | None = None,
) -> list[Text]:
    """Draw `height` lines, the last of them the horizontal axis, each at most `width` cells wide."""
    drawn = [buckets(curve.x, curve.y, 2 * width) for curve in curves]
    everything = [bucket for each in drawn for bucket in each]
    span = value_range(everything, from_zero=from_zero, more=[y for _, y in points])
    xs = [bucket.x for bucket in everything] + [x for x, _ in points]
    if not xs:
        return _centred("no record yet", width, height)
    first, last = x_range or (min(xs), max(xs))
    if first == last:
        first, last = first - 1, last + 1
    rows = height - 1
    labels = _labels(span, rows)
    gutter = max((len(label) for label in labels.values()), default=1)
    canvas = _BrailleCanvas(width - gutter - 2, rows, (first, last), span or ValueRange(0.0, 1.0))
    for place, (each, curve) in enumerate(zip(drawn, curves, strict=True)):
        canvas.draw(each, curve.style)
        canvas.letter(each, curve.letter, f"bold {curve.style}", place)
    for x in restarts:
        canvas.restart(x)
    for x, y in points:
        canvas.point(x, y)
    lines = []
    for row, cells in enumerate(canvas.lines()):
        label = labels.get(row, "")
        lines.append(Text.assemble((f"{label:>{gutter}} {'┤' if label else '│'}", QUIET), cells))
    step = max(1.0, (last - first) / 4)
    begin, end = tick(round(first), step), f"{tick(round(last), step)} steps"
    room = max(1, width - gutter - 2 - len(begin) - len(end))
    return [*lines, Text(f"{'':{gutter + 2}}{begin}{' ' * room}{end}", QUIET)]


class _BrailleCanvas:
    def __init__(self, width: int, height: int, x_range: tuple[float, float], span: ValueRange) -> None:
        self.width, self.height = max(1, width), height
        self._x_range, self._span = x_range, span
        self._dots = [[0] * self.width for _ in range(height)]
        self._style = [[""] * self.width for _ in range(height)]
        self._over: dict[tuple[int, int], tuple[str, str]] = {}

    def draw(self, points: Sequence[ChartBucket], style: str) -> None:
        before: tuple[int, int] | None = None
        for bucket in points:
            column = self._column(bucket.x)
            if bucket.not_finite:
                self._over[0, column // 2] = ("×", _BAD)
            if math.isnan(bucket.mean):
                before = None
                continue
            if bucket.high > self._span.high:
                self._over.setdefault((0, column // 2), ("↑", _HIGH))
            low, high, mean = self._row(bucket.low), self._row(bucket.high), self._row(bucket.mean)
            for row in range(high, low + 1):
                self._dot(column, row, style)
            if before is not None:
                self._line(before, (column, mean), style)
            before = (column, mean)

    def letter(self, points: Sequence[ChartBucket], letter: str, style: str, place: int) -> None:
        """Write a letter at four places along the curve, different for each curve."""
        finite = [bucket for bucket in points if not math.isnan(bucket.mean)]
        for quarter in range(4 if letter and finite else 0):
            at = (quarter + (place + 0.5) / 6) / 4
            bucket = finite[min(len(finite) - 1, int(at * len(finite)))]
            self._over[self._row(bucket.mean) // 4, self._column(bucket.x) // 2] = (letter, style)

    def restart(self, x: float) -> None:
        column = self._column(x) // 2
        for row in range(self.height):
            if not self._dots[row][column]:
                self._over.setdefault((row, column), ("┊", _RESTART))

    def point(self, x: float, y: float) -> None:
        if not math.isfinite(y):
            self._over[0, self._column(x) // 2] = ("×", _BAD)
        else:
            self._over[self._row(y) // 4, self._column(x) // 2] = ("o", _POINT)

    def lines(self) -> Iterable[Text]:
        for row in range(self.height):
            line = Text()
            for column in range(self.width):
                letter, style = self._over.get((row, column), ("", ""))
                dots = self._dots[row][column]
                line.append(letter or (chr(0x2800 + dots) if dots else " "), style or self._style[row][column])
            yield line

    def _column(self, x: float) -> int:
        first, last = self._x_range
        return min(2 * self.width - 1, max(0, round((x - first) / (last - first) * (2 * self.width - 1))))

    def _row(self, y: float) -> int:
        low, high = self._span
        return min(4 * self.height - 1, max(0, round((high - y) / (high - low) * (4 * self.height - 1))))

    def _dot(self, column: int, row: int, style: str) -> None:
        self._dots[row // 4][column // 2] |= _DOTS[column % 2][row % 4]
        self._style[row // 4][column // 2] = style

    def _line(self, begin: tuple[int, int], end: tuple[int, int], style: str) -> None:
        (x0, y0), (x1, y1) = begin, end
        steps = max(abs(x1 - x0), abs(y1 - y0), 1)
        for step in range(steps + 1):
            self._dot(round(x0 + (x1 - x0) * step / steps), round(y0 + (y1 - y0) * step / steps), style)


def _labels(span: ValueRange | None, rows: int) -> dict[int, str]:
    """Axis labels by row: round values at the rows that contain them."""
    if span is None or rows < 1:
        return {}
    most = max(1, min(5, (rows + 1) // 2))
    step = nice_step(span.high - span.low, most)
    placed = {}
    for value in ticks(span.low, span.high, most):
        row = min(rows - 1, int((span.high - value) / (span.high - span.low) * rows))
        placed[row] = tick(value, step)
    return placed


def _centred(words: str, width: int, height: int) -> list[Text]:
    lines = [Text("") for _ in range(height)]
    lines[(height - 1) // 2] = Text(f"{words:^{width}}", QUIET)
    return lines
