"""Rectangles and labels of stand-alone SVG pictures, readable on light and dark pages."""

from collections.abc import Sequence
from html import escape

ACCENT, MUTED = "#d98032", "#888"
_STYLE = (
    "<style>text{font:13px sans-serif;fill:#888}.t{font:600 15px sans-serif}rect{shape-rendering:crispEdges}</style>"
)
_LETTER = 7.2  # width of a character, about


def svg_picture(title: str, width: float, height: float, parts: Sequence[str]) -> str:
    """A stand-alone SVG file."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}">{_STYLE}'
        f"<title>{escape(title)}</title>{''.join(parts)}</svg>\n"
    )


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
    return sum(28 + _LETTER * len(each) for each in words) + 20 * (len(words) - 1)
