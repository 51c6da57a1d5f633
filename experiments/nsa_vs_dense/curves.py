"""The curves of a table as one SVG file: the mean of a variant's seeds, with a band from the lowest to the highest."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from itertools import cycle

from experiments.nsa_vs_dense.tables import StudyRun, StudyTable
from nsa_train.record.run_data import EvaluationRecord
from nsa_train.watch.view.downsample import bucket
from nsa_train.watch.view.formatting import number, share
from nsa_train.watch.view.run_charts import STYLES
from nsa_train.watch.view.svg_chart import ChartLine, SvgChart

WIDTH, HEIGHT, KEY_LINE = 720, 340, 18


def draw_curves(table: StudyTable, curves: Mapping[StudyRun, Sequence[EvaluationRecord]]) -> str:
    by_variant: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run, records in curves.items():
        for record in records:
            value = record.val_accuracy if table.drawn == "accuracy" else record.val_loss
            by_variant[run.variant][record.step].append(value)
    lines = [
        ChartLine(
            variant, [bucketed for step, y in sorted(points.items()) if (bucketed := bucket([step] * len(y), y))], style
        )
        for (variant, points), style in zip(by_variant.items(), cycle((*STYLES, "gone")), strict=False)
    ]
    steps = [point.x for line in lines for point in line.buckets]
    chart = SvgChart(
        table.question,
        table.drawn,
        lines,
        (min(steps, default=0), max(steps, default=1)),
        from_zero=table.drawn == "accuracy",
        format=share if table.drawn == "accuracy" else number,
        width=WIDTH,
        height=HEIGHT,
    )
    return _standalone(chart)


def _style() -> str:
    """Styles for charts from a report's style sheet, with the colours of light pages: not every viewer knows
    variables."""
    css = files("nsa_train.watch.view").joinpath("page.css").read_text(encoding="utf-8")
    colours = dict(reversed(re.findall(r"(--\w+): (#\w+);", css)))  # the first of each name is the light one
    rules = re.findall(r"(?:^|(?<=\} ))((?:svg [.a-z]|\.line|\.band)[^{}]*\{[^{}]*\})", css, re.MULTILINE)
    return re.sub(r"var\((--\w+)\)", lambda name: colours[name[1]], "\n".join([*rules, ".hover { fill: none }"]))


def _standalone(chart: SvgChart) -> str:
    """The chart with its colours, title and key in one file."""
    key = "".join(
        f'<g transform="translate(48 {HEIGHT + 24 + KEY_LINE * place})"><path class="line {line.style}" d="M0 0H26"/>'
        f'<text x="34" y="4">{escape(line.label)}</text></g>'
        for place, line in enumerate(chart.lines)
    )
    height = HEIGHT + 24 + KEY_LINE * len(chart.lines)
    title = f'<text x="48" y="14">{escape(chart.title)} ({escape(chart.unit)})</text>'
    inner = chart.svg().replace("<svg ", f'<svg y="22" width="{WIDTH}" height="{HEIGHT}" ', 1)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height + 22}" width="{WIDTH}">'
        f'<style>{_style()}</style><rect width="100%" height="100%" fill="#fff"/>'
        f'{title}{inner}<g transform="translate(0 10)">{key}</g></svg>\n'
    )
