"""HTML report of one run (summary, curves, gates, timeline, goodput, findings, events, configuration) or of several."""

import json
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from nsa.errors import ConfigError
from nsa_train import names
from nsa_train.config.layer import flatten
from nsa_train.data.rows.mixture import MixtureOrder, whole_weights
from nsa_train.record import record_files, value_checks
from nsa_train.record.events import EventKind, RunEvent
from nsa_train.record.run_data import RunData
from nsa_train.terminal_text import UNKNOWN, duration
from nsa_train.watch.conditions import AlertLevel, HealthFinding
from nsa_train.watch.status import ranks_of
from nsa_train.watch.view.evaluation_tables import evaluation_section
from nsa_train.watch.view.formatting import (
    STATE_MARKS,
    accuracy_text,
    count,
    event_text,
    mean_of_last,
    moment,
    number,
    plain,
    share,
)
from nsa_train.watch.view.html_page import SafeHtml, chart_figure, filter_field, page, section, table, tiles
from nsa_train.watch.view.measured_goodput import HOW_MEASURED, Goodput, TimeCause
from nsa_train.watch.view.run_charts import charts, compared_charts, gate_pictures, timeline
from nsa_train.watch.view.summary import RunSnapshot, differing_settings, figures, run_labels, summarize

_SWATCHES = {
    TimeCause.PRODUCTIVE: "s-good", TimeCause.LOST: "s-waste1", TimeCause.SKIPPED: "s-waste2", TimeCause.DATA: "s-data",
    TimeCause.EVALUATION: "s-eval", TimeCause.CHECKPOINT: "s-save", TimeCause.START_UP: "s-start", TimeCause.STALL:
    "s-stall",
    TimeCause.DOWN: "s-down",
}  # fmt: skip
_MOST_EVENTS, _MOST_LOG_LINES = 300, 200
_LEGEND = (
    "Lines are means, bands show the minimum and maximum of the records in each bucket. "
    "↻ restart · ↶ rollback · × not finite or skipped · ▲ above the axis · grey dots: repeated later. "
    "Hover over a chart for values."
)


def render(snapshot: RunSnapshot) -> str:
    run, wall = snapshot.run, snapshot.summary.wall
    sections = (
        ("Curves", "curves", f'<p class="quiet">{_LEGEND}</p>',
         '<div class="charts">', *(chart_figure(chart) for chart in charts(run)), "</div>"),
        ("Evaluations", names.EVALUATIONS, evaluation_section(run.model_evaluations)),
        ("Gates by layer over time", "gates", _gates(run)),
        ("Timeline", "timeline", _timeline(run, wall)),
        ("Goodput", "goodput", _goodput(wall)),
        *([("Data mixture", "mixture", mixture)] if (mixture := _mixture(run)) else []),
        ("Findings", "findings", _findings(snapshot)),
        ("Events", "events", _events(run.events)),
        ("Configuration", "configuration", _config(run)),
        ("Environment", "environment", _environment(run)),
    )  # fmt: skip
    links = "".join(f'<a href="#{anchor}">{anchor}</a>' for _, anchor, *_ in sections)
    body = [_head(snapshot, links), *(section(*each) for each in sections)]
    return page(f"{plain(run.name)} · nsa report", body)


def render_comparison(runs: Sequence[RunData]) -> str:
    """Page of several runs: summary, differing settings, curves on common axes."""
    labels = run_labels(runs)
    summary = table(("", *labels), [(name, *values) for name, values in figures([summarize(run) for run in runs])])
    settings = '<p class="quiet">All settings are equal.</p>'
    if differing := differing_settings(runs):
        rows = [(plain(key), *map(value_text, values)) for key, values in differing]
        settings = table(("setting", *labels), rows, codes=range(len(labels) + 1))
    title = " · ".join(labels)
    body = [
        f"<header><h1>{len(runs)} runs</h1><p>{escape(title)}</p></header>",
        section("Summary", "figures", f'<div class="even">{summary}</div>'),
        section("Settings that differ", "settings", f'<div class="even">{settings}</div>'),
        section("Curves", "curves", '<p class="quiet">Lines are means, bands show minimum to maximum; repeated '
                "steps are left out. × not finite · ▲ above the axis.</p>", '<div class="charts">',
                *map(chart_figure, compared_charts(runs, labels)), "</div>"),
    ]  # fmt: skip
    return page(f"{title} · nsa compare", body)


def _head(snapshot: RunSnapshot, links: str) -> str:
    run, wall = snapshot.run, snapshot.summary.wall
    unreadable = record_files.describe_unreadable(run.unreadable)
    warning = f' · <span class="warn">{escape(unreadable)}</span>' if unreadable else ""
    sign, style = STATE_MARKS[snapshot.state]
    began = f"began {moment(wall.begin)} · " if wall else ""
    about = f"{began}{plain(run.lead.last_progress.get('data') or run.env.get('data') or 'data unknown')}"
    return (
        f"<header>\n<h1>{escape(plain(run.name))}</h1>\n"
        f'<p><span class="state {style}">{sign} {escape(snapshot.state)}</span> · {escape(about)} · '
        f"as of {moment(snapshot.now)}{warning}</p>"
        f"\n{tiles(_tiles(snapshot))}\n<nav>{links}</nav>\n</header>"
    )


def _tiles(snapshot: RunSnapshot) -> list[tuple[str, str, str]]:
    summary = snapshot.summary
    levels = [group[0].level for group in snapshot.grouped()]
    target = f"of {summary.target:,}" if summary.target else "target unknown"
    wall = summary.wall
    return [
        ("steps", f"{summary.step:,}", target),
        ("loss, nats per token", number(summary.loss),
         f"{mean_of_last(summary.loss_records)}, to step {summary.loss_step:,} · "
         f"lowest {number(summary.best_loss)} at {summary.best_step:,}"
         if summary.loss_records else "no record yet"),
        ("held-out loss", number(summary.held_out),
         f"at {summary.held_out_step:,}{accuracy_text(summary.held_out_accuracy)} · "
         f"best {number(summary.best_held_out)} at {summary.best_held_out_step:,}"
         if summary.held_out_step else "never evaluated"),
        ("tokens", count(summary.tokens), "seen, all ranks"),
        ("throughput", count(summary.toks_per_s), "tokens per second, median"),
        ("goodput", share(summary.goodput), f"of {duration(wall.total)}" if wall else "no time recorded"),
        *([("MFU", share(summary.mfu), "model FLOPs over the peak, median")] if summary.mfu == summary.mfu else []),
        *([("tokens per dollar", count(summary.tokens_per_usd_of_all),
            f"of all the time; {count(summary.tokens_per_usd)} while it trains, median")]
          if summary.tokens_per_usd == summary.tokens_per_usd else []),
        ("restarts", str(summary.restarts),
         f"{summary.rollbacks} rollbacks · {summary.lost_steps:,} steps repeated · {summary.skipped} skipped"),
        ("findings", str(len(levels)),
         f"{levels.count(AlertLevel.CRITICAL)} critical" if levels else "none"),
    ]  # fmt: skip


def _gates(run: RunData) -> str:
    drawn = gate_pictures(run)
    if drawn is None:
        return '<p class="quiet">No gate values by layer recorded.</p>'
    pictures, low, high, layers, (first, last) = drawn
    height = max(40, min(300, layers * 14))
    figures = []
    for branch, uri in pictures:
        figures.append(
            f"<figure><h3>{branch} <small>layer 0 on top, {layers - 1} at the bottom</small></h3>"
            f'<img src="{uri}" style="height:{height}px" alt="share of the {branch} gate by layer and step">'
            f'<div class="ends"><span>step {first:,}</span><span>step {last:,}</span></div></figure>'
        )
    scale = f'<p class="quiet">share of the gate: {share(low)}<span class="scale"></span>{share(high)}</p>'
    newest = run.lead.gates()[-1]
    rows = [[str(layer), *(share(value) for value in shares)] for layer, shares in enumerate(newest.shares)]
    figures_now = table(("layer", "compressed", "selected", "sliding"), rows, numbers=(1, 2, 3))
    return (
        f'<div class="heat">{"".join(figures)}</div>{scale}'
        f"<details><summary>values of step {newest.step:,}</summary>{figures_now}</details>"
    )


_NO_TIMES = '<p class="quiet">Not known: no records yet, or a clock that was set back while the run wrote them.</p>'


def _timeline(run: RunData, wall: Goodput | None) -> str:
    if wall is None:
        return _NO_TIMES
    words = f"From {moment(wall.begin)} to {moment(wall.end)}; the axis shows time since the start. Outlined: start-up."
    return f'{timeline(run.events, wall)}<p class="quiet">{words}</p>'


def _goodput(wall: Goodput | None) -> str:
    if wall is None or wall.total <= 0:
        return _NO_TIMES
    bar: list[str] = []
    rows: list[tuple[str, ...]] = []
    for cause in TimeCause:
        part = wall.share(cause)
        if part > 0:
            words = f"{cause.value} {share(part)}" if part > 0.14 else share(part) if part > 0.05 else ""
            title = f"{cause.value}: {share(part)}"
            bar.append(f'<i class="{_SWATCHES[cause]}" style="flex:{part:.5f}" title="{title}">{words}</i>')
        name = SafeHtml(f'<span class="swatch {_SWATCHES[cause]}"></span>{cause.value}')
        rows.append((name, duration(wall.seconds[cause]) if part else "0", share(part), HOW_MEASURED[cause]))
    rows.append(("total", duration(wall.total), share(1.0), "from the first start event to the last record"))
    causes = table(("cause", "time", "share", "how it is measured"), rows, numbers=(1, 2))
    return f'<div class="bar">{"".join(bar)}</div>{causes}'


def _mixture(run: RunData) -> str:
    """Rows of each set so far, from the weights: the order of the sets depends on nothing else. Empty without one."""
    settings, length = (value_checks.section(run.config.get(name)) or {} for name in ("data", "train"))
    weights, seq_len = value_checks.section(settings.get("mixture")), value_checks.whole(length.get("seq_len"))
    tokens = run.lead.column("tokens_seen")[-1] if len(run.lead) else 0.0
    if not weights or not seq_len or not math.isfinite(tokens):
        return ""
    try:
        whole = whole_weights({name: float(weight) for name, weight in weights.items()})
    except (ConfigError, ValueError, TypeError, ArithmeticError):
        return ""
    rows = int(tokens) // seq_len
    columns = zip(weights, whole, MixtureOrder(whole).counts(rows), strict=True)
    lines = [
        (plain(name), share(weight / sum(whole)), f"{n:,}", share(n / rows) if rows else UNKNOWN, count(n * seq_len))
        for name, weight, n in columns
    ]
    return table(("set", "weight", "rows", "share", "tokens"), lines, numbers=(1, 2, 3, 4))


def _findings(snapshot: RunSnapshot) -> str:
    about = (
        "Findings on the records of the newest process when this report was written; below, findings logged by the "
        "watchdog, if one was running."
    )
    if snapshot.findings:
        content = table(
            ("level", "condition", "rank", "step", "values", "what to do"),
            [_finding_row(group) for group in snapshot.grouped()],
        )
    else:
        content = '<p class="good">✓ no findings</p>'
    return (
        f'<p class="quiet">{about}</p>{content}{_found_before(snapshot.run.events)}{_health_log(snapshot.run.folder)}'
    )


def _finding_row(group: Sequence[HealthFinding]) -> Sequence[str]:
    finding = group[0]
    critical = finding.level == AlertLevel.CRITICAL
    level = SafeHtml(
        f'<span class="{"crit" if critical else "warn"}">{"✗ critical" if critical else "▲ warning"}</span>'
    )
    ranks = ", ".join(map(str, ranks_of(group)[:8])) + (f" of {len(group)}" if len(group) > 8 else "")
    condition = finding.condition
    return (level, condition.name, ranks or "all", f"{finding.step:,}", plain(finding.message), condition.advice)


def _found_before(events: Sequence[RunEvent]) -> str:
    """Findings of the watchdog with begin and end, newest first."""
    rows: list[tuple[str, ...]] = []
    open_ones: dict[str, int] = {}
    for event in events:
        name = str(event.details.get("condition") or "")
        if event.kind not in (EventKind.FINDING, EventKind.STALL) or not name:
            continue
        if not event.details.get("over"):
            open_ones[name] = len(rows)
            level = str(event.details.get("level") or "")
            values = plain(event.details.get("message") or "")
            rows.append((plain(name), plain(level), f"{event.step:,}", moment(event.ts), UNKNOWN, values))
        elif (place := open_ones.pop(name, None)) is not None:
            rows[place] = (*rows[place][:4], moment(event.ts), rows[place][5])
    if not rows:
        return ""
    content = table(("condition", "level", "step", "from", "until", "values"), rows[: -_MOST_EVENTS - 1 : -1])
    return f"<h3>found by the watchdog <small>newest first</small></h3>{content}"


def _health_log(folder: Path) -> str:
    try:
        lines = record_files.read_text(folder / names.HEALTH_LOG).splitlines()
    except OSError:
        return ""
    shown = "\n".join(plain(line) for line in lines[-_MOST_LOG_LINES:])
    words = f"the last {min(len(lines), _MOST_LOG_LINES)} of {len(lines)} lines of {names.HEALTH_LOG}"
    return f"<details><summary>{words}</summary><pre>{escape(shown)}</pre></details>"


def _events(events: Sequence[RunEvent]) -> str:
    if not events:
        return '<p class="quiet">None yet.</p>'
    rows = [
        (moment(event.ts), event.kind.value.replace("_", " "), f"{event.step:,}", event_text(event))
        for event in reversed(events[-_MOST_EVENTS:])
    ]
    content = table(("time", "event", "step", ""), rows, numbers=(2,), anchor="all-events")
    some = f"the newest {_MOST_EVENTS} of {len(events):,}" if len(events) > _MOST_EVENTS else f"all {len(events)}"
    opened = " open" if len(events) <= 20 else ""
    return f"<details{opened}><summary>{some}, newest first</summary>{filter_field('all-events')}{content}</details>"


def _config(run: RunData) -> str:
    settings = flatten(run.config)
    if not settings:
        return f'<p class="quiet">{names.ENV} does not exist.</p>'
    origins = value_checks.section(run.env.get("origins")) or {}
    order = sorted(settings, key=lambda key: (origins.get(key) == "default",))
    rows = [(plain(key), value_text(settings[key]), plain(origins.get(key, UNKNOWN))) for key in order]
    classes = ["default" if origins.get(key) == "default" else "" for key in order]
    changed = sum(not each for each in classes)
    content = table(("setting", "value", "from"), rows, codes=(0, 1, 2), anchor="settings", classes=classes)
    words = f"{changed} settings were given, {len(order) - changed} are defaults; given settings come first."
    return f'<p class="quiet">{words}</p>{filter_field("settings")}{content}'


def _environment(run: RunData) -> str:
    left_out = ("config", "origins", "packages")
    facts = {name: value for name, value in run.env.items() if name not in left_out}
    facts |= value_checks.section(run.env.get("packages")) or {}
    last = run.lead.last_progress
    facts |= {name.replace("_", " "): value for name, value in last.items() if name.startswith("kernel_")}
    facts |= {"ranks with records": len(run.ranks), "records of the lowest rank": len(run.lead)}
    return table(("", ""), [(plain(name), value_text(value)) for name, value in facts.items()], codes=(1,))


def value_text(value: Any) -> str:
    return plain(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
