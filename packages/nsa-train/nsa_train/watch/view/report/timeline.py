"""Timeline of a run as SVG: processes as bars, events as symbols in lanes."""

from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

from nsa_train.record.events import EventKind, RunEvent
from nsa_train.watch.conditions import AlertLevel
from nsa_train.watch.view.downsample import nice_step
from nsa_train.watch.view.formatting import clock, duration, event_text
from nsa_train.watch.view.measured_goodput import Goodput
from nsa_train.watch.view.report.run_charts import time_unit

_WIDTH, _LEFT, _RIGHT, _LANE, _TOP = 1100, 132, 14, 24, 6
_TOGETHER = 7.0
"""Pixels; closer symbols of the same kind are merged into one."""


class _TimelineMark(NamedTuple):
    lane: str
    symbol: str
    style: str


_MARKS = {
    EventKind.START: _TimelineMark("starts and ends", "▶", "good"),
    EventKind.RESTART: _TimelineMark("starts and ends", "↻", "warn"),
    EventKind.DONE: _TimelineMark("starts and ends", "✓", "good"),
    EventKind.WAITING: _TimelineMark("starts and ends", "…", "warn"),
    EventKind.STOP: _TimelineMark("starts and ends", "■", "warn"),
    EventKind.HALT: _TimelineMark("starts and ends", "■", "warn"),
    EventKind.ERROR: _TimelineMark("starts and ends", "✗", "crit"),
    EventKind.SAVE: _TimelineMark("checkpoints", "◆", "calm"),
    EventKind.COPY_FAILED: _TimelineMark("checkpoints", "✗", "warn"),
    EventKind.CHECKPOINT_REJECTED: _TimelineMark("checkpoints", "✗", "crit"),
    EventKind.EVALUATION: _TimelineMark("evaluations", "○", "calm"),
    EventKind.EVALUATION_FAILED: _TimelineMark("evaluations", "✗", "warn"),
    EventKind.SKIPPED_STEP: _TimelineMark("problems", "×", "warn"),
    EventKind.ROLLBACK: _TimelineMark("problems", "↶", "warn"),
    EventKind.STALL: _TimelineMark("problems", "▲", "crit"),
    EventKind.FINDING: _TimelineMark("findings", "▲", "warn"),
    EventKind.HALT_ASKED: _TimelineMark("findings", "■", "warn"),
}
_LANES = ("processes", "starts and ends", "checkpoints", "evaluations", "problems", "findings")


def timeline(events: Sequence[RunEvent], wall: Goodput) -> str:
    height = _TOP + _LANE * len(_LANES) + 26
    bottom = _TOP + _LANE * len(_LANES)
    end = max([wall.end, *(event.ts for event in events)])
    total = max(1e-9, end - wall.begin)

    def x(ts: float) -> float:
        return _LEFT + min(1.0, max(0.0, (ts - wall.begin) / total)) * (_WIDTH - _LEFT - _RIGHT)

    parts = [f'<svg class="wide" viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="timeline of the run">']
    for number, lane in enumerate(_LANES):
        y = _TOP + _LANE * (number + 0.5)
        parts.append(f'<text class="lane" x="{_LEFT - 10}" y="{y + 4:.1f}">{lane}</text>')
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>')
    parts += _axis(total, bottom, x, wall.begin)
    for life in wall.lives:
        y, tall = _TOP + 4, _LANE - 8
        words = f"{clock(life.begin)} to {clock(life.end)} UTC, {life.ending or 'no final record'}"
        parts.append(
            f"<g><title>{escape(words)}</title>"
            f'<rect class="startup" x="{x(life.begin):.1f}" y="{y}" height="{tall}" '
            f'width="{max(1.0, x(life.first_step) - x(life.begin)):.1f}"/>'
            f'<rect class="alive" x="{x(life.first_step):.1f}" y="{y}" height="{tall}" '
            f'width="{max(1.0, x(life.end) - x(life.first_step)):.1f}"/></g>'
        )
    for kind_group in _grouped(events, x):
        mark = _mark(kind_group)
        at = sum(x(event.ts) for event in kind_group) / len(kind_group)
        y = _TOP + _LANE * (_LANES.index(mark.lane) + 0.5) + 5
        texts = [
            f"{clock(event.ts)} UTC, step {event.step:,}: {event.kind.value} {event_text(event)}".rstrip()
            for event in kind_group
        ]
        tooltip = "\n".join(texts if len(texts) <= 12 else [*texts[:5], f"and {len(texts) - 10} more", *texts[-5:]])
        parts.append(
            f'<text class="sign {mark.style}" x="{at:.1f}" y="{y:.1f}">{mark.symbol}<title>{escape(tooltip)}</title>'
            "</text>"
        )
    return "".join(parts) + "</svg>"


def _mark(group: Sequence[RunEvent]) -> _TimelineMark:
    mark = _MARKS[group[0].kind]
    if group[0].kind != EventKind.FINDING:
        return mark
    if any(event.details.get("level") == AlertLevel.CRITICAL for event in group):
        return mark._replace(style="crit")
    return mark._replace(symbol="△", style="calm") if all(event.details.get("over") for event in group) else mark


def _grouped(events: Sequence[RunEvent], x: Callable[[float], float]) -> list[list[RunEvent]]:
    groups: list[list[RunEvent]] = []
    newest: dict[EventKind, list[RunEvent]] = {}
    for event in events:
        if event.kind not in _MARKS:
            continue
        group = newest.get(event.kind)
        if group is not None and x(event.ts) - x(group[0].ts) < _TOGETHER:
            group.append(event)
        else:
            newest[event.kind] = [event]
            groups.append(newest[event.kind])
    return groups


def _axis(total: float, bottom: int, x: Callable[[float], float], begin: float) -> list[str]:
    unit = time_unit(total)[0]
    step = nice_step(total / unit, 8) * unit
    parts = []
    for number in range(int(total / step) + 1):
        at = x(begin + number * step)
        anchor = ' style="text-anchor:end"' if at > _WIDTH - 50 else ""
        words = duration(number * step) if number else "0"
        parts.append(f'<path class="tick" d="M{at:.1f} {bottom}v5"/>')
        parts.append(f'<text class="x" x="{at:.1f}" y="{bottom + 19}"{anchor}>{words}</text>')
    parts.append(f'<path class="axis" d="M{_LEFT} {bottom}H{_WIDTH - _RIGHT}"/>')
    return parts
