"""HTML comparison of several runs: summary, differing settings, curves on common axes."""

from collections.abc import Sequence
from html import escape
from math import isfinite

from nsa_train.record.heartbeat_record import METRICS
from nsa_train.record.run_data import RunData
from nsa_train.watch.view.downsample import buckets
from nsa_train.watch.view.formatting import memory, metric_format, plain, share
from nsa_train.watch.view.report.html_page import chart_figure, page, section, table
from nsa_train.watch.view.report.run_charts import OF_TOKENS, accuracy_line, drawn_metrics, time_unit, worst
from nsa_train.watch.view.report.run_report import value_text
from nsa_train.watch.view.report.svg_chart import ChartLine, SvgChart
from nsa_train.watch.view.summary import differing_settings, figures, labels, summarize

_POINTS = 250
_MEMORY = ("host_mem_rss", "gpu_mem_alloc", "gpu_mem_reserved")
STYLES = ("c1", "c2", "c3", "c4", "c5", "c6")


def render(runs: Sequence[RunData]) -> str:
    names = labels(runs)
    summaries = [summarize(run) for run in runs]
    side_by_side = table(("", *names), [(name, *values) for name, values in figures(summaries)])
    differing = differing_settings(runs)
    if differing:
        rows = [(plain(key), *(value_text(value) for value in values)) for key, values in differing]
        settings = table(("setting", *names), rows, codes=range(len(names) + 1))
    else:
        settings = '<p class="quiet">All settings are equal.</p>'
    title = " · ".join(names)
    head = f"<header><h1>{len(runs)} runs</h1><p>{escape(title)}</p></header>"
    body = [
        head,
        section("Summary", "figures", f'<div class="even">{side_by_side}</div>'),
        section("Settings that differ", "settings", f'<div class="even">{settings}</div>'),
        section("Curves", "curves", '<p class="quiet">Lines are means, bands show minimum to maximum; repeated '
                "steps are left out. × not finite · ▲ above the axis.</p>", '<div class="charts">',
                *(chart_figure(chart) for chart in _charts(runs, names)), "</div>"),
    ]  # fmt: skip
    return page(f"{title} · nsa compare", body)


def _charts(runs: Sequence[RunData], names: Sequence[str]) -> list[SvgChart]:
    return [
        _over_steps(runs, names, "loss", from_zero=False),
        _loss_over(runs, names, "tokens"),
        _loss_over(runs, names, "time"),
        _held_out(runs, names),
        *_accuracy(runs, names),
        *(_over_steps(runs, names, name) for name in drawn_metrics(runs) if name not in ("loss", *_MEMORY)),
        _memory(runs, names),
    ]


def _style(place: int) -> str:
    return STYLES[place % len(STYLES)]


def _last_step(runs: Sequence[RunData]) -> float:
    return float(max((max(run.lead.step) for run in runs if len(run.lead)), default=1))


def _over_steps(runs: Sequence[RunData], names: Sequence[str], column: str, from_zero: bool = True) -> SvgChart:
    metric = METRICS[column]
    lines = [
        ChartLine(name, buckets(run.lead.counted("step"), run.lead.counted(column), _POINTS), _style(place))
        for place, (run, name) in enumerate(zip(runs, names, strict=True))
    ]
    last, text = _last_step(runs), metric_format(column)
    return SvgChart(metric.title, metric.unit, lines, (0.0, last), from_zero=from_zero, format=text)


def _loss_over(runs: Sequence[RunData], names: Sequence[str], what: str) -> SvgChart:
    """Draw the loss over tokens, or over time, for runs with different batch sizes or speeds."""
    seconds, unit = time_unit(max((run.lead.ts[-1] - run.lead.ts[0] for run in runs if len(run.lead)), default=0.0))
    lines, last = [], 0.0
    for place, (run, name) in enumerate(zip(runs, names, strict=True)):
        lead = run.lead
        if what == "tokens":
            pairs = list(zip(lead.counted("tokens_seen"), lead.counted("loss"), strict=True))
            x = [tokens for tokens, _ in pairs if isfinite(tokens)]
            y = [loss for tokens, loss in pairs if isfinite(tokens)]
        else:
            x = [(ts - lead.ts[0]) / seconds for ts in lead.counted("ts")]
            y = list(lead.counted("loss"))
        last = max([last, *x[-1:]])
        lines.append(ChartLine(name, buckets(x, y, _POINTS), _style(place)))
    about = "over tokens" if what == "tokens" else "over time, from the first record"
    x_unit = "tokens" if what == "tokens" else unit
    return SvgChart(f"loss {about}", "nats per token", lines, (0.0, last or 1.0), x_unit=x_unit, from_zero=False)


def _held_out(runs: Sequence[RunData], names: Sequence[str]) -> SvgChart:
    lines = []
    for place, (run, name) in enumerate(zip(runs, names, strict=True)):
        evaluations = run.counted_evaluations()
        steps, losses = [float(each.step) for each in evaluations], [each.val_loss for each in evaluations]
        lines.append(ChartLine(name, buckets(steps, losses, _POINTS), _style(place)))
    return SvgChart("held-out loss", "nats per token", lines, (0.0, _last_step(runs)), from_zero=False)


def _accuracy(runs: Sequence[RunData], names: Sequence[str]) -> list[SvgChart]:
    """Draw the held-out accuracies; no chart if no run has recorded one."""
    lines = [accuracy_line(run, name, _style(place)) for place, (run, name) in enumerate(zip(runs, names, strict=True))]
    chart = SvgChart("held-out accuracy", OF_TOKENS, lines, (0.0, _last_step(runs)), format=share)
    return [chart] if any(line.buckets for line in lines) else []


def _memory(runs: Sequence[RunData], names: Sequence[str]) -> SvgChart:
    on_gpu = any(value > 0 for run in runs for value in run.lead.column("gpu_mem_reserved"))
    column, what = ("gpu_mem_reserved", "GPU, reserved") if on_gpu else ("host_mem_rss", "host")
    lines = [
        ChartLine(name, worst(run, column), _style(place))
        for place, (run, name) in enumerate(zip(runs, names, strict=True))
    ]
    return SvgChart("memory", f"MiB, {what}, maximum over ranks", lines, (0.0, _last_step(runs)), format=memory)
