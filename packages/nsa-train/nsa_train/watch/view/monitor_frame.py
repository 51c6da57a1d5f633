"""Renders one monitor frame: a run snapshot as lines of a given terminal size, complete at 80 × 24.

Pure functions of the snapshot; larger terminals show more detail.
"""

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from rich.text import Text

from nsa_train.record.events import EventKind, RunEvent
from nsa_train.record.heartbeat_record import GATE_BRANCHES, METRICS
from nsa_train.record.run_data import RunData
from nsa_train.terminal_text import duration
from nsa_train.watch.conditions import AlertLevel, HealthLimits
from nsa_train.watch.status import describe_findings
from nsa_train.watch.view.formatting import (
    EVENT_MARKS,
    PLACED_METRICS,
    STATE_MARKS,
    accuracy_text,
    as_float,
    clock,
    count,
    event_text,
    memory,
    metric_format,
    number,
    plain,
    share,
)
from nsa_train.watch.view.summary import RunSnapshot
from nsa_train.watch.view.terminal_plot import QUIET, PlotCurve, beside, braille_plot, ends, fit, level, line, title

_STYLES = {"good": "bold green", "calm": "", "": "bold", "warn": "bold yellow", "crit": "bold red"}
_LEVEL_MARKS = {AlertLevel.CRITICAL: ("✗ critical", "bold red"), AlertLevel.WARNING: ("▲ warning", "yellow")}
_ENDED = ("finished", "halted", "stopped", "failed")
_PACE_RECORDS = 20


def frame(snapshot: RunSnapshot, width: int, height: int, *, live: bool = True) -> list[Text]:
    """Render `height` lines of `width` cells; fewer without free lines and keys to press if it is not `live`."""
    plan = _plan(snapshot, height)
    left = (width - 2) // 2
    lines = [_header(snapshot, width), _facts(snapshot, width)]
    lines += _charts(snapshot, width, plan.charts, plan.two_rows)
    gates, figures = _gates(snapshot.run, left, plan.gates), _figures(snapshot.run, width - 2 - left, plan.two_rows)
    lines += beside(gates, figures, left)
    lines += _findings(snapshot, width, plan.findings)
    lines += _events(snapshot.run.events, width, height - 1 - len(lines))
    lines = lines[: height - 1]
    if live:
        lines += [Text("")] * (height - 1 - len(lines))
    return [fit(each, width) for each in [*lines, _footer(snapshot, width, live)]]


class _FrameLayout(NamedTuple):
    """Number of lines of each part; the rest is for events."""

    charts: int = 8
    two_rows: bool = False
    gates: int = 4
    findings: int = 2


def _plan(snapshot: RunSnapshot, height: int) -> _FrameLayout:
    """Divide the lines: 24 show everything; more make charts taller, then show gates by layer, then more findings."""
    two_rows = height >= 36
    usual = _FrameLayout(two_rows=two_rows)
    spare = height - 24 - (usual.charts if two_rows else 0)
    if spare <= 0:
        return usual
    taller = min(spare // (4 if two_rows else 2), 6)
    spare -= taller * (2 if two_rows else 1)
    n_layers = len(snapshot.run.lead.last_progress.get("gate_shares_by_layer") or ())
    layers = min(spare // 2, max(0, n_layers + 1 - usual.gates))
    findings = min(max(0, len(snapshot.grouped()) - usual.findings), (spare - layers) // 2)
    return _FrameLayout(usual.charts + taller, two_rows, usual.gates + layers, usual.findings + findings)


def _header(snapshot: RunSnapshot, width: int) -> Text:
    mark, level = STATE_MARKS[snapshot.state]
    run, lead = snapshot.run, snapshot.run.lead
    left = line((f"{mark} {snapshot.state}", _STYLES[level]), "  ", (plain(run.name, 60), "bold"))
    step, target = lead.last.get("step", 0), run.target_steps
    words = f"step {step:,}"
    if target:
        words += f" of {target:,} · {share(min(1.0, step / target))}"
        if snapshot.state == "running" and (pace := _pace(run)):
            words += f" · {duration(max(0, target - step) * pace)} left"
    return ends(left, line((words, "bold")), width)


def _pace(run: RunData) -> float | None:
    recent = [pace for pace in run.lead.column("step_s")[-_PACE_RECORDS:] if math.isfinite(pace)]
    return statistics.median(recent) if recent else None


def _facts(snapshot: RunSnapshot, width: int) -> Text:
    """As many facts as fit into the line, the most important first."""
    run, lead, summary, wall = snapshot.run, snapshot.run.lead, snapshot.summary, snapshot.summary.wall
    saves = [event for event in run.events if event.kind == EventKind.SAVE]
    facts = [f"{summary.restarts} restart{'' if summary.restarts == 1 else 's'}"]
    facts.append(f"checkpoint at {saves[-1].step:,}" if saves else "no checkpoint yet")
    if wall is not None and wall.total > 0:
        facts = [duration(wall.total), f"goodput {share(summary.goodput)}", *facts]
    if snapshot.state not in _ENDED and lead.last:
        age = max(0.0, snapshot.now - lead.last["ts"])
        facts.insert(0, f"heartbeat {duration(age) if age >= 10 else f'{age:.0f} s'} ago")
    if run.halt is not None:
        facts.insert(0, f".HALT: {plain(run.halt.reason, 40)}")
    if unreadable := run.unreadable.total():
        facts.append(f"{unreadable} unreadable record{'' if unreadable == 1 else 's'}")
    if summary.tokens > 0:
        facts.append(f"{count(summary.tokens)} tokens")
    words = facts[0]
    for fact in facts[1:]:
        words += f" · {fact}" if len(words) + len(fact) + 3 <= width else ""
    return line((words, QUIET))


def _charts(snapshot: RunSnapshot, width: int, height: int, two_rows: bool) -> list[Text]:
    run = snapshot.run
    left = (width - 2) // 2
    right = width - 2 - left
    lines = beside(_loss(snapshot, left, height), _metric_plot(run, "toks_per_s", "tokens/s", right, height), left)
    if two_rows:
        name, where = ("gpu_mem_reserved", "reserved on the GPU") if run.uses_gpu else ("host_mem_rss", "on the host")
        grad_norm = _metric_plot(run, "grad_norm", "before clipping", left, height)
        lines += beside(grad_norm, _metric_plot(run, name, f"{where}, MiB", right, height, heading="memory"), left)
    return lines


def _metric_plot(run: RunData, name: str, words: str, width: int, height: int, heading: str = "") -> list[Text]:
    """Draw a metric with its newest value in the title."""
    about = line((_latest_text(run, name), "bold cyan"), (f" {words}", QUIET))
    return [title(heading or METRICS[name].title, about, width), *_plot(run, name, width, height - 1)]


def _plot(
    run: RunData, name: str, width: int, height: int, points: Sequence[tuple[float, float]] = (), from_zero: bool = True
) -> list[Text]:
    lead = run.lead
    restarts = [event.step for event in run.events if event.kind in (EventKind.RESTART, EventKind.ROLLBACK)]
    curve, x_range = (
        PlotCurve(lead.counted("step"), lead.counted(name), "cyan"),
        (0.0, float(max([*lead.step[-1:], 1]))),
    )
    return braille_plot([curve], width, height, points=points, restarts=restarts, from_zero=from_zero, x_range=x_range)


def _loss(snapshot: RunSnapshot, width: int, height: int) -> list[Text]:
    run, summary = snapshot.run, snapshot.summary
    evaluations, loss, n = run.counted_evaluations(), summary.loss, summary.loss_records
    about = line((number(loss), "bold cyan" if math.isfinite(loss) else "bold red"))
    about.append(f" avg {n}" if math.isfinite(loss) and n > 1 else " nats" if math.isfinite(loss) else "", QUIET)
    if evaluations:
        held_out, accuracy = number(summary.held_out), accuracy_text(summary.held_out_accuracy)
        if about.cell_len + len(f"loss  · o {held_out} held out{accuracy} ") > width:
            accuracy = ""
        about.append_text(line((" · o ", QUIET), (held_out, "bold magenta"), (f" held out{accuracy}", QUIET)))
    points = [(float(each.step), each.val_loss) for each in evaluations]
    skips = [event for event in run.events if event.kind == EventKind.SKIPPED_STEP]
    points += [(float(event.step), math.inf) for event in skips if event.step <= run.lead.last.get("step", 0)]
    return [title("loss", about, width), *_plot(run, "loss", width, height - 1, points, from_zero=False)]


def _latest(run: RunData, name: str) -> float:
    column = run.lead.column(name)
    return column[-1] if len(column) else math.nan


def _latest_text(run: RunData, name: str) -> str:
    return metric_format(name)(_latest(run, name))


def _gates(run: RunData, width: int, height: int) -> list[Text]:
    """One row per branch with all layers side by side; with enough lines, one row of values per layer instead."""
    gates = run.lead.gates()
    if not gates:
        return [title("gates by layer", "", width), Text("no record yet", QUIET)]
    layers, last = gates[-1].shares, run.lead.last_progress
    lines = [title("gates by layer", f"0 to {len(layers) - 1}", width)]
    if len(layers) > 3 and height > len(layers):
        lines += [_layer(number_, shares, width) for number_, shares in enumerate(layers)]
    else:
        means = last.get("gate_branch_shares") or [math.nan] * 3
        room = width - 11 - 7
        for branch, (name, mean) in enumerate(zip(GATE_BRANCHES, means, strict=False)):
            values = [layer[branch] for layer in layers]
            strip = _strip(values, room)
            lines.append(line((f"{name:10} ", ""), (f"{share(as_float(mean)):>6} ", "bold"), (strip, "cyan")))
    entropy, largest = _latest(run, "gate_entropy_mean"), _latest(run, "gate_max_mean")
    if math.isnan(entropy):  # not recorded for gates of kind tanh
        return lines
    collapsed = _latest(run, "gate_collapse_frac")
    uniform = " of 1.10 nats" if width >= 54 else ""
    words, ending = f"entropy {entropy:.2f}{uniform}", f" · collapsed {share(collapsed)}"
    if len(full := f"{words} · max {largest:.2f}") + len(ending) <= width:
        words = full
    return [*lines, line(words, (ending, "bold red" if collapsed > HealthLimits.collapse_warning else ""))]


def _strip(values: Sequence[float], room: int) -> str:
    """A block per layer, with its share in percent if there is room."""
    if 5 * len(values) <= room:
        return " ".join(f"{level(each)}{100 * each:<3.0f}" if math.isfinite(each) else "?   " for each in values)
    return "".join(level(each) for each in _squeezed(values, room))


def _layer(index: int, shares: Sequence[float], width: int) -> Text:
    room = max(3, width - 5 - 15)
    figures = " ".join(f"{100 * each:3.0f}%" if math.isfinite(each) else "  ? " for each in shares)
    whole = [each if math.isfinite(each) else 0.0 for each in shares]
    first, second = round(whole[0] * room), round(sum(whole[:2]) * room)
    bar = [("c" * first, "cyan"), ("s" * (second - first), "magenta"), ("w" * max(0, room - second), QUIET)]
    return line((f"{index:3}  ", QUIET), *bar, " ", figures)


def _squeezed(values: Sequence[float], room: int) -> list[float]:
    """Means of neighbouring values where there are more values than cells."""
    if len(values) <= room:
        return list(values)
    cuts = [round(i * len(values) / room) for i in range(room + 1)]
    return [math.fsum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]


def _figures(run: RunData, width: int, two_rows: bool) -> list[Text]:
    last = run.lead.last_progress
    if not last:
        return [title("details", "", width), Text("no record yet", QUIET)]
    k_mean, k_max, at_max = (_latest(run, name) for name in ("sel_k_mean", "sel_k_max", "sel_pct_at_max"))
    predicted, counted = last.get("reads_pred"), last.get("reads_act_total")
    same = line(("reads = predicted", "")) if predicted == counted else line(("reads ≠ predicted", "bold red"))
    lines = [
        title("details", "", width),
        line("selected ", (number(k_mean, 3), "bold"), f"/{number(k_max, 3)} keys · {share(at_max)} at max"),
        line(same, (f" {count(as_float(counted))} keys", QUIET)),
        line("data wait ", (_latest_text(run, "dt_fetch_s"), "bold"), " · ", _memory_words(run)),
        line(
            "lr ", (f"{_latest(run, 'lr'):.2e}", "bold"), " · ",
            *([("forward ", ""), (_latest_text(run, "forward_s"), "bold")] if two_rows
              else [("grad norm ", ""), (number(_latest(run, "grad_norm"), 3), "bold")]),
        ),
    ]  # fmt: skip
    if len(run.ranks) > 1 and two_rows:
        lines.append(_ranks(run))
    elif len(run.ranks) > 1:
        spare = 2 if predicted == counted else 4
        lines[spare] = _ranks(run)
    if two_rows:
        kernels = [str(last.get(f"kernel_{branch}", "?")) for branch in ("compressed", "select", "selected", "sliding")]
        reason = str(last.get("kernels_reason") or "")
        others = [
            name for name, metric in METRICS.items() if metric.title and name not in PLACED_METRICS and name in last
        ]
        lines += [line(f"{METRICS[name].title} ", (_latest_text(run, name), "bold")) for name in others]
        lines.append(line("kernels ", (plain("/".join(dict.fromkeys(kernels))), "bold"), (f" {plain(reason)}", QUIET)))
    return lines


def _memory_words(run: RunData) -> Text:
    """The largest value of any rank."""
    of_ranks = [series.last_progress for series in run.ranks.values() if series.last_progress]
    on_gpu = max((as_float(each.get("gpu_mem_reserved")) for each in of_ranks), default=math.nan)
    host = max((as_float(each.get("host_mem_rss")) for each in of_ranks), default=math.nan)
    words = f"GPU {memory(on_gpu)}" if on_gpu > 0 else f"host {memory(host)}"
    return line((words, "bold"))


def _ranks(run: RunData) -> Text:
    forward = {rank: as_float(each.last_progress.get("forward_s")) for rank, each in run.ranks.items()}
    known = {rank: seconds for rank, seconds in forward.items() if math.isfinite(seconds)}
    words = line((f"{len(run.ranks)} ranks", "bold"))
    if known:
        slowest = max(known, key=lambda rank: known[rank])
        usual = statistics.median(known.values())
        words.append(f" · slowest {slowest}: {duration(known[slowest])} / {duration(usual)}")
    return words


def _findings(snapshot: RunSnapshot, width: int, room: int) -> list[Text]:
    groups = snapshot.grouped()
    if not groups:
        return [title("findings", "", width), line(("✓ no findings", "green"))]
    levels = [group[0].level for group in groups]
    counts = [f"{n} {each.value}" for each in (AlertLevel.CRITICAL, AlertLevel.WARNING) if (n := levels.count(each))]
    shown = groups if len(groups) <= room else groups[: room - 1]
    lines = [title("findings", ", ".join(counts), width)]
    for group in shown:
        mark, style = _LEVEL_MARKS[group[0].level]
        lines.append(line((mark, style), " ", plain(describe_findings(group), 300)))
    if rest := groups[len(shown) :]:
        lines.append(line((f"and {len(rest)} more: {', '.join(group[0].name for group in rest)}", QUIET)))
    return lines


def _events(events: Sequence[RunEvent], width: int, room: int) -> list[Text]:
    if room < 2:
        return []
    lines = [title("events", f"{len(events):,}, newest first, UTC", width)]
    if not events:
        lines.append(Text("none yet", QUIET))
    for event in list(events)[:-room:-1]:
        style = _STYLES[EVENT_MARKS[event.kind].style] if event.kind in EVENT_MARKS else ""
        words = event.kind.value.replace("_", " ")
        lines.append(
            line((f"{clock(event.ts)} ", QUIET), (f"{words:12}", style), f" step {event.step:<8,} ", event_text(event))
        )
    return lines


def _footer(snapshot: RunSnapshot, width: int, live: bool) -> Text:
    ended = "this run has ended; these are its last values" if snapshot.state in _ENDED else ""
    keys = " · ".join(words for words in ("q quit" if live else "", ended) if words)
    return ends(line((keys, QUIET)), line((f"{clock(snapshot.now)} UTC", QUIET)), width)
