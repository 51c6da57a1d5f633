"""Writes the Prometheus rule file from the alerts in the table of health conditions; `nsa alert-rules` prints it."""

from collections.abc import Iterator
from dataclasses import asdict, fields, replace

import yaml

from nsa_train.watch.conditions import CONDITIONS, AlertLevel, HealthLimits, findings_expr

_RUNBOOK = "docs/RUNBOOK.md"
REFRESH = "nsa alert-rules > ops/prometheus/rules.yml"
EXPORTER_DOWN = "exporter_down"
"""Alert that is no condition of a run: its exporter does not respond."""

_RECENT_S = 900.0
"""How long a single occurrence keeps an alert firing."""
_BASELINE_S = 24 * 3600.0
"""Throughput is compared with its maximum over this window."""
_EXPORTER_DOWN_S = 120.0


def alert_name(condition: str) -> str:
    return "NSA" + "".join(word.capitalize() for word in condition.split("_"))


def _faster(limits: HealthLimits, speed: float) -> HealthLimits:
    """Return the limits scaled so that one second stands for `speed` seconds, for drills."""
    seconds = {field.name: getattr(limits, field.name) / speed for field in fields(limits) if field.name.endswith("_s")}
    seconds["fetch_s"] = limits.fetch_s  # compared with a measured value, not with a clock
    return replace(limits, **seconds)


def rule_file(speed: float = 1.0) -> str:
    """The YAML text of all rules."""
    limits = _faster(HealthLimits(), speed)
    groups = [
        {"name": f"nsa-{level.value}", "rules": list(_of_level(level, limits, speed))}
        for level in (AlertLevel.CRITICAL, AlertLevel.WARNING)
    ]
    groups[0]["rules"].append(_exporter_down(speed))  # type: ignore[attr-defined]
    note = f"# Written by `{REFRESH}`. Edit its source, nsa_train/watch/alert_rules.py, instead.\n"
    return note + yaml.safe_dump({"groups": groups}, sort_keys=False, width=120, allow_unicode=True)


def _of_level(level: AlertLevel, limits: HealthLimits, speed: float) -> Iterator[dict[str, object]]:
    numbers = {name: f"{value:g}" for name, value in asdict(limits).items()}
    spans = {"speed": f"{speed:g}", "recent": _span(_RECENT_S / speed), "baseline": _span(_BASELINE_S / speed)}
    for condition in CONDITIONS.values():
        if condition.level != level:
            continue
        rule = condition.alert
        expr = rule.expr or findings_expr(condition.name)
        yield _alert(
            condition.name,
            expr.format(**numbers, **spans),
            rule.for_s / speed,
            {"severity": level.value, "condition": condition.name, "signal": rule.signal},
            summary=f"run {{{{ $labels.run }}}}{_RANK}: {condition.rule.format(**numbers)}",
            advice=condition.advice,
        )


_RANK = "{{ if $labels.rank }} rank {{ $labels.rank }}{{ end }}"


def _exporter_down(speed: float) -> dict[str, object]:
    return _alert(
        EXPORTER_DOWN,
        'up{job="nsa"} == 0',
        _EXPORTER_DOWN_S / speed,
        {"severity": AlertLevel.CRITICAL.value, "condition": EXPORTER_DOWN, "signal": "exporter"},
        summary="exporter {{ $labels.instance }} does not respond: its runs are not monitored",
        advice="restart nsa exporter; until then use nsa status RUN",
    )


def _alert(
    name: str, expr: str, for_s: float, labels: dict[str, str], *, summary: str, advice: str
) -> dict[str, object]:
    rule: dict[str, object] = {"alert": alert_name(name), "expr": expr}
    if for_s:
        rule["for"] = _span(for_s)
    annotations = {
        "summary": summary,
        "value": "{{ $value | humanize }}",
        "advice": advice,
        "runbook_url": f"{_RUNBOOK}#{name}",
    }
    return rule | {"labels": labels, "annotations": annotations}


def _span(seconds: float) -> str:
    return f"{max(1, round(seconds))}s"
