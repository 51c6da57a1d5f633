"""Line charts as SVG, whose colours and dashes `page.css` defines, and the shapes of stand-alone SVG pictures.

Charts are readable without colour: × is non-finite, ▲ above the axis, restarts are dashed verticals with a symbol.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from itertools import groupby, pairwise

from nsa_train.watch.view.downsample import ChartBucket, ValueRange, nice_step, ticks, value_range
from nsa_train.watch.view.formatting import number, tick

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 540, 210, 48, 12, 16, 30
MOST_POINTS = 400
ACCENT, MUTED = "#d98032", "#888"
"""Colours of stand-alone pictures, readable on light and dark pages."""
_PICTURE_STYLE = (
    "<style>text{font:13px sans-serif;fill:#888}.t{font:600 15px sans-serif}rect{shape-rendering:crispEdges}</style>"
)
_LETTER_WIDTH = 7.2  # about
_HOVERS = 90
_DOTS_UP_TO = 40


@dataclass
class ChartLine:
    label: str
    buckets: Sequence[ChartBucket]
    style: str = "c1"
    band: bool = True
    in_hover: bool = True


@dataclass
class ChartMark:
    """A vertical line at x: a restart, a rollback."""

    x: float
    symbol: str
    text: str


@dataclass
class SvgChart:
    title: str
    unit: str
    lines: list[ChartLine]
    x_range: tuple[float, float]
    x_unit: str = "steps"
    points: list[tuple[float, float, str]] = field(default_factory=list)
    """x, y, tooltip."""
    bad: list[tuple[float, str]] = field(default_factory=list)
    """x and tooltip of non-finite values that are not in the lines."""
    marks: Sequence[ChartMark] = ()
    from_zero: bool = True
    log: bool = False
    format: Callable[[float], str] = number
    limits: Sequence[tuple[float, str]] = ()
    """Horizontal lines: value and label."""
    width: int = _WIDTH
    height: int = _HEIGHT

    def svg(self) -> str:
        if self.log:
            return _SvgDrawing(self, math.log10, lambda value: 10.0**value).svg()
        return _SvgDrawing(self, lambda value: value, lambda value: value).svg()


class _SvgDrawing:
    def __init__(self, chart: SvgChart, scale: Callable[[float], float], unscale: Callable[[float], float]) -> None:
        self.chart, self._unscale = chart, unscale
        self.lines = [_scaled(line, scale) if chart.log else line for line in chart.lines]
        self.points = [(x, scale(y) if not chart.log or y > 0 else y, text) for x, y, text in chart.points]
        everything = [bucket for line in self.lines for bucket in line.buckets]
        extra = [y for _, y, _ in self.points if math.isfinite(y)]
        extra += [scale(y) for y, _ in chart.limits] if everything else []
        self.span = value_range(everything, from_zero=chart.from_zero and not chart.log, more=extra)
        first, last = chart.x_range
        self.x_range = (first, last) if last > first else (first - 1, first + 1)

    def svg(self) -> str:
        chart = self.chart
        head = (
            f'<svg viewBox="0 0 {chart.width} {chart.height}" role="img" '
            f'aria-label="{escape(chart.title, quote=True)} over {escape(chart.x_unit, quote=True)}">'
        )
        if self.span is None:
            text = "no value is finite" if any(line.buckets for line in self.lines) else "no record yet"
            middle = f'<text class="empty" x="{chart.width / 2}" y="{chart.height / 2}">{text}</text>'
            return f"{head}{middle}{self._bad()}</svg>"
        parts = [self._grid(), self._limits(), self._marks()]
        parts += [self._line(line) for line in self.lines]
        parts += [
            f'<circle class="point" cx="{self._x(x):.1f}" cy="{self._y(y):.1f}" r="4">'
            f"<title>{escape(text)}</title></circle>"
            for x, y, text in self.points
            if math.isfinite(y)
        ]
        parts += [self._bad(), self._hovers()]
        return head + "".join(parts) + "</svg>"

    def _x(self, x: float) -> float:
        first, last = self.x_range
        return _LEFT + (min(last, max(first, x)) - first) / (last - first) * (self.chart.width - _LEFT - _RIGHT)

    def _y(self, y: float) -> float:
        assert self.span is not None
        low, high = self.span
        inside = min(high, max(low, y))
        return _TOP + (high - inside) / (high - low) * (self.chart.height - _TOP - _BOTTOM)

    def _grid(self) -> str:
        assert self.span is not None
        chart, bottom = self.chart, self.chart.height - _BOTTOM
        parts = []
        for value, label in self._levels(self.span):
            y = self._y(value)
            parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{chart.width - _RIGHT}"/>')
            parts.append(f'<text class="y" x="{_LEFT - 6}" y="{y + 4:.1f}">{escape(label)}</text>')
        step = nice_step(self.x_range[1] - self.x_range[0], 6)
        end = f"{tick(self.x_range[1], step / 10)} {escape(chart.x_unit)}"
        for value in ticks(*self.x_range, 6):
            if not value.is_integer() and chart.x_unit == "steps":
                continue
            x = self._x(value)
            if x > chart.width - _RIGHT - 6 * len(end) - 16:  # the unit is there
                continue
            parts.append(f'<path class="tick" d="M{x:.1f} {bottom}v4"/>')
            parts.append(f'<text class="x" x="{x:.1f}" y="{bottom + 17}">{tick(value, step)}</text>')
        parts.append(f'<text class="unit" x="{chart.width - _RIGHT}" y="{bottom + 17}">{end}</text>')
        parts.append(f'<path class="axis" d="M{_LEFT} {bottom}H{chart.width - _RIGHT}"/>')
        return "".join(parts)

    def _levels(self, span: ValueRange) -> list[tuple[float, str]]:
        if self.chart.log:
            whole = range(math.ceil(span.low - 1e-9), math.floor(span.high + 1e-9) + 1)
            return [(float(power), number(10.0**power, 1)) for power in whole]
        step = nice_step(span.high - span.low, 5)
        return [(value, tick(value, step)) for value in ticks(*span, 5)]

    def _limits(self) -> str:
        parts = []
        for level, name in self.chart.limits:
            y = self._y(math.log10(level) if self.chart.log else level)
            parts.append(f'<path class="limit" d="M{_LEFT} {y:.1f}H{self.chart.width - _RIGHT}"/>')
            parts.append(f'<text class="limit" x="{self.chart.width - _RIGHT}" y="{y - 4:.1f}">{escape(name)}</text>')
        return "".join(parts)

    def _marks(self) -> str:
        parts = []
        for mark in self.chart.marks[:200]:
            x = self._x(mark.x)
            parts.append(
                f'<g class="mark"><title>{escape(mark.text)}</title>'
                f'<path d="M{x:.1f} {_TOP - 2}V{self.chart.height - _BOTTOM}"/>'
                f'<text x="{x:.1f}" y="{_TOP - 4}">{escape(mark.symbol)}</text></g>'
            )
        return "".join(parts)

    def _line(self, line: ChartLine) -> str:
        parts = []
        for stretch in _stretches(line.buckets):
            if line.band and any(bucket.high > bucket.low for bucket in stretch):
                upper = [f"{self._x(bucket.x):.1f} {self._y(bucket.high):.1f}" for bucket in stretch]
                lower = [f"{self._x(bucket.x):.1f} {self._y(bucket.low):.1f}" for bucket in reversed(stretch)]
                parts.append(f'<path class="band {line.style}" d="M{"L".join(upper + lower)}Z"/>')
            way = "L".join(f"{self._x(bucket.x):.1f} {self._y(bucket.mean):.1f}" for bucket in stretch)
            if len(stretch) > 1:
                parts.append(f'<path class="line {line.style}" d="M{way}"/>')
        finite = [bucket for bucket in line.buckets if not math.isnan(bucket.mean)]
        if len(finite) <= _DOTS_UP_TO and line.band:
            parts += [
                f'<circle class="{line.style}" cx="{self._x(bucket.x):.1f}" cy="{self._y(bucket.mean):.1f}" r="2.2"/>'
                for bucket in finite
            ]
        return "".join(parts) + self._outside(line)

    def _outside(self, line: ChartLine) -> str:
        assert self.span is not None
        parts = []
        for bucket in line.buckets:
            if bucket.high > self.span.high:
                text = f"{line.label}: up to {self.chart.format(self._unscale(bucket.high))} at {bucket.x:,.0f}"
                x = self._x(bucket.x)
                parts.append(f'<g class="above"><title>{escape(text)}</title><path d="M{x:.1f} {_TOP}l4 7h-8z"/></g>')
        return "".join(parts)

    def _bad(self) -> str:
        marked = [(x, text) for x, y, text in self.points if not math.isfinite(y)] + list(self.chart.bad)
        for line in self.lines:
            marked += [
                (bucket.x, f"{line.label} not finite at {bucket.x:,.0f} ({bucket.not_finite} records)")
                for bucket in line.buckets
                if bucket.not_finite
            ]
        return "".join(
            f'<g class="bad"><title>{escape(text)}</title><path d="M{self._x(x) - 4:.1f} {_TOP}l8 8m0 -8l-8 8"/></g>'
            for x, text in marked[:500]
        )

    def _hovers(self) -> str:
        """Invisible columns whose tooltip shows the values under the pointer, without scripts."""
        lines = [line for line in self.lines if line.in_hover and line.buckets]
        if not lines:
            return ""
        leading = max(lines, key=lambda line: len(line.buckets))
        every = max(1, len(leading.buckets) // _HOVERS)
        chosen = leading.buckets[::every]
        xs = [self._x(bucket.x) for bucket in chosen]
        edges = [_LEFT, *((a + b) / 2 for a, b in pairwise(xs)), self.chart.width - _RIGHT]
        parts = []
        for bucket, begin, end in zip(chosen, edges, edges[1:], strict=False):
            texts = [f"{number(bucket.x) if bucket.x % 1 else f'{bucket.x:,.0f}'} {self.chart.x_unit}"]
            for line in lines:
                near = _nearest(line.buckets, bucket.x)
                texts.append(f"{line.label}: {self._value_text(near)}")
            parts.append(
                f'<rect class="hover" x="{begin:.1f}" y="{_TOP}" width="{max(0.5, end - begin):.1f}" '
                f'height="{self.chart.height - _TOP - _BOTTOM}"><title>{escape(chr(10).join(texts))}</title></rect>'
            )
        return "".join(parts)

    def _value_text(self, bucket: ChartBucket) -> str:
        if math.isnan(bucket.mean):
            return "not finite"
        low, high, mean = (self.chart.format(self._unscale(each)) for each in (bucket.low, bucket.high, bucket.mean))
        return mean if bucket.high == bucket.low else f"{mean} ({low} to {high})"


def _scaled(line: ChartLine, scale: Callable[[float], float]) -> ChartLine:
    scaled = [
        bucket._replace(low=scale(bucket.low), high=scale(bucket.high), mean=scale(bucket.mean))
        if bucket.low > 0
        else bucket._replace(low=math.nan, high=math.nan, mean=math.nan)
        for bucket in line.buckets
    ]
    return replace(line, buckets=scaled)


def _stretches(line_buckets: Sequence[ChartBucket]) -> list[list[ChartBucket]]:
    """Stretches of finite buckets: a line does not bridge non-finite ones."""
    parts = groupby(line_buckets, key=lambda bucket: math.isnan(bucket.mean))
    return [list(stretch) for not_finite, stretch in parts if not not_finite]


def _nearest(line_buckets: Sequence[ChartBucket], x: float) -> ChartBucket:
    place = bisect_right(line_buckets, x, key=lambda bucket: bucket.x)
    return min(line_buckets[max(0, place - 1) : place + 1], key=lambda bucket: abs(bucket.x - x))


def svg_picture(title: str, width: float, height: float, parts: Sequence[str]) -> str:
    """A stand-alone SVG file."""
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{_PICTURE_STYLE}<title>{escape(title)}</title>'
    return f"{head}{''.join(parts)}</svg>\n"


def svg_box(x: float, y: float, width: float, height: float, colour: str, opacity: float) -> str:
    place = f'x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"'
    return f'<rect {place} fill="{colour}" fill-opacity="{opacity:.2f}"/>'


def svg_label(x: float, y: float, words: str, *, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def svg_turned_label(x: float, y: float, words: str) -> str:
    """A label that reads upwards, around its middle."""
    return f'<text transform="translate({x:.0f} {y:.0f}) rotate(-90)" text-anchor="middle">{escape(words)}</text>'


def svg_legend(left: float, bottom: float, entries: Sequence[tuple[str, str, float]]) -> list[str]:
    """A line of samples: words, colour, opacity."""
    parts, x = [], left
    for words, colour, opacity in entries:
        parts += [svg_box(x, bottom - 11, 14, 14, colour, opacity), svg_label(x + 20, bottom, words)]
        x += 20 + legend_width([words])
    return parts


def legend_width(words: Sequence[str]) -> float:
    return sum(28 + _LETTER_WIDTH * len(each) for each in words) + 20 * (len(words) - 1)
