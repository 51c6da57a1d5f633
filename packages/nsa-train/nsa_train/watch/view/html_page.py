"""HTML building blocks of a report: page, sections, tiles, tables. Escapes all text that comes from files."""

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files

from nsa_train.watch.view.svg_chart import SvgChart

# Optional: without scripts the page only lacks the filter field, which is hidden then.
_FILTER = """
for (const field of document.querySelectorAll('input[data-filters]')) {
  field.hidden = false;
  const rows = document.getElementById(field.dataset.filters).tBodies[0].rows;
  field.addEventListener('input', () => {
    const wanted = field.value.toLowerCase();
    for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(wanted);
  });
}
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def page(title: str, body: Iterable[str]) -> str:
    css = files("nsa_train.watch.view").joinpath("page.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{css}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + f"\n<script>{_FILTER}</script>\n</body>\n</html>\n"
    )


def section(name: str, anchor: str, *content: str) -> str:
    return f'<section id="{anchor}">\n<h2>{escape(name)}</h2>\n' + "\n".join(content) + "\n</section>"


def tiles(figures: Sequence[tuple[str, str, str]]) -> str:
    """Render tiles of (name, value, note)."""
    cells = [
        f'<div class="tile"><span>{escape(name)}</span><b>{escape(figure)}</b><span>{escape(more)}</span></div>'
        for name, figure, more in figures
    ]
    return f'<div class="tiles">{"".join(cells)}</div>'


def chart_figure(chart: SvgChart) -> str:
    key = _key(chart)
    return f"<figure><h3>{escape(chart.title)} <small>{escape(chart.unit)}</small></h3>{chart.svg()}{key}</figure>"


def _key(chart: SvgChart) -> str:
    styles = {line.label: line.style for line in chart.lines if line.buckets}
    entries = [
        f'<span><svg viewBox="0 0 26 10"><path class="line {style}" d="M0 5H26"/></svg> {escape(label)}</span>'
        for label, style in (styles.items() if len(styles) > 1 or chart.points else ())
    ]
    if chart.points:
        entries.append(
            '<span><svg viewBox="0 0 26 10"><circle class="point" cx="13" cy="5" r="4"/></svg> held-out loss</span>'
        )
    return f'<p class="key">{"".join(entries)}</p>' if entries else ""


def table(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numbers: Sequence[int] = (),
    codes: Sequence[int] = (),
    anchor: str = "",
    classes: Sequence[str] = (),
) -> str:
    """Render a table; cells are escaped unless they are `SafeHtml`."""

    def css(place: int) -> str:
        return ' class="n"' if place in numbers else ' class="code"' if place in codes else ""

    head = "".join(
        f"<th{css(place) if place in numbers else ''}>{escape(name)}</th>" for place, name in enumerate(heads)
    )
    body = []
    for index, row in enumerate(rows):
        named = f' class="{classes[index]}"' if index < len(classes) and classes[index] else ""
        texts = (str(cell) if isinstance(cell, SafeHtml) else escape(str(cell)) for cell in row)
        cells = "".join(f"<td{css(place)}>{text}</td>" for place, text in enumerate(texts))
        body.append(f"<tr{named}>{cells}</tr>")
    identity = f' id="{anchor}"' if anchor else ""
    return f"<table{identity}><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"


class SafeHtml(str):
    """Markup in which all foreign text is already escaped."""


def filter_field(anchor: str) -> str:
    return f'<p><input type="search" hidden data-filters="{anchor}" placeholder="filter" aria-label="filter rows"></p>'
