"""Prometheus alert rules: one expression per health condition, with the limits of `HealthLimits` filled in.

`nsa alert-rules` prints the rule file. Expressions use the metrics of `nsa exporter`. Trends over records (plateau,
spikes, memory growth) and failure codes are evaluated by the exporter with the watchdog's code and exported as
`nsa_findings`: PromQL works on seconds, not on records.

NaN is the only value that differs from itself. Metrics of a run that is done or was stopped are no longer exported, so
only the heartbeat rules need the state of a run.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace

import yaml

from nsa_train.observe.watch.conditions import CONDITIONS, AlertLevel, HealthLimits

RUNBOOK = "docs/RUNBOOK.md"
REFRESH = "nsa alert-rules > ops/prometheus/rules.yml"
EXPORTER_DOWN = "exporter_down"
"""Not a condition of a run: its exporter does not respond."""

RECENT_S = 900.0
"""How long a single occurrence keeps an alert firing."""
CRITICAL_FOR_S, WARNING_FOR_S = 60.0, 300.0
"""How long a value must exceed its limit for a critical alert, and for a warning: one record is noise."""
BASELINE_S = 24 * 3600.0
"""Throughput is compared with its maximum over this window."""


@dataclass(frozen=True)
class AlertRule:
    signal: str
    """Measured quantity: a critical alert inhibits the warnings of the same signal."""
    expr: str
    for_s: float = 0.0


_AGE = "time() - nsa_heartbeat_timestamp_seconds"


_BY_RUN = "by (instance, job, run)"
"""One alert per run where all ranks have the same value."""


def _finding(condition: str) -> str:
    return f'nsa_findings{{{{condition="{condition}"}}}} > 0'


def _not_finite(condition: str, gauge: str, counter: str) -> str:
    """The gauge may be overwritten between two scrapes, the counter is not; skipped steps are in neither."""
    taken = f"{gauge} != {gauge} or abs({gauge}) == Inf or increase({counter}[{{recent}}]) > 0"
    return f"count {_BY_RUN} ({taken}) or sum {_BY_RUN} ({_finding(condition)})"


_USUAL_FORWARD = (
    "((quantile by (instance, run) (0.5, nsa_forward_seconds) and count by (instance, run) (nsa_forward_seconds) > 2)"
    " or min by (instance, run) (nsa_forward_seconds))"
)
"""Median of the ranks; for two ranks, where a median is the mean, the minimum."""

_SIGNAL_OF_FINDING = {
    "loss_divergence": "loss",
    "throughput_zero": "throughput",
    "loader_timeout": "data",
    "out_of_memory": "memory",
    "loss_plateau": "loss",
    "loss_spike": "loss",
    "data_slow": "data",
    "memory_creep": "memory",
    "grad_spikes": "grad_norm",
    "copy_failed": "copy",
    "nodes_missing": "nodes",
    "evaluation_failed": "evaluation",
    "clock_skew": "clock",
}
"""Conditions that the exporter evaluates: the alert only looks at `nsa_findings`."""

RULES = {
    **{name: AlertRule(signal, _finding(name)) for name, signal in _SIGNAL_OF_FINDING.items()},
    "heartbeat_stall": AlertRule(
        "heartbeat",
        f"{_AGE} > nsa_heartbeat_limit_seconds / {{speed}} unless nsa_process_up == 0 "
        "or nsa_missing_ranks > 0 and time() - nsa_start_timestamp_seconds > {startup_s}",
    ),
    "process_gone": AlertRule("process", f"{_AGE} > {{gone_s}} and nsa_process_up == 0"),
    "run_failed": AlertRule(
        "run",
        'nsa_run_state{{state="failed"}} == 1 '
        'unless on (instance, run) nsa_findings{{condition=~"out_of_memory|loader_timeout"}} > 0',
    ),
    "loss_nonfinite": AlertRule("loss", _not_finite("loss_nonfinite", "nsa_loss_nats", "nsa_nonfinite_losses_total")),
    "grad_nonfinite": AlertRule(
        "grad_norm", _not_finite("grad_nonfinite", "nsa_grad_norm", "nsa_nonfinite_grad_norms_total")
    ),
    "gate_entropy_critical": AlertRule(
        "gate_entropy", f"min {_BY_RUN} (nsa_gate_entropy_nats) < {{entropy_critical}}", CRITICAL_FOR_S
    ),
    "gate_collapse_critical": AlertRule(
        "gate_collapse", f"max {_BY_RUN} (nsa_gate_collapse_ratio) > {{collapse_critical}}", CRITICAL_FOR_S
    ),
    "steps_skipped": AlertRule("skips", f"max {_BY_RUN} (increase(nsa_skipped_steps_total[{{recent}}])) > 0"),
    "throughput_drop": AlertRule(
        "throughput",
        f"min {_BY_RUN} (nsa_tokens_per_second and nsa_heartbeat_limit_seconds) < (1 - {{throughput_drop}}) * "
        f"max {_BY_RUN} (max_over_time(nsa_tokens_per_second[{{baseline}}]))",
        for_s=HealthLimits.throughput_drop_s,
    ),
    "gate_entropy_low": AlertRule(
        "gate_entropy", f"min {_BY_RUN} (nsa_gate_entropy_nats) < {{entropy_warning}}", WARNING_FOR_S
    ),
    "gate_collapse_high": AlertRule(
        "gate_collapse", f"max {_BY_RUN} (nsa_gate_collapse_ratio) > {{collapse_warning}}", WARNING_FOR_S
    ),
    "gate_max_high": AlertRule("gate_max", f"max {_BY_RUN} (nsa_gate_max_ratio) >= {{gate_max}}", WARNING_FOR_S),
    "reads_differ": AlertRule("reads", "nsa_reads_counted != nsa_reads_predicted"),
    "straggler": AlertRule(
        "forward",
        f"nsa_forward_seconds / on (instance, run) group_left () {_USUAL_FORWARD} > {{straggler}} "
        f"and nsa_forward_seconds - on (instance, run) group_left () {_USUAL_FORWARD} > 0.1 * nsa_step_seconds",
        WARNING_FOR_S,
    ),
    "checkpoint_overdue": AlertRule(
        "checkpoint",
        f"max {_BY_RUN} (nsa_step and nsa_heartbeat_limit_seconds) - nsa_last_checkpoint_step "
        "> {checkpoint_overdue} * nsa_checkpoint_interval_steps",
    ),
    "synthetic_data": AlertRule("dataset", f"max {_BY_RUN} (nsa_data_substituted) == 1"),
}
"""`nsa_heartbeat_limit_seconds` is exported until a rank writes its final record."""

_EXPORTER_DOWN_S = 120.0


def alert_name(condition: str) -> str:
    return "NSA" + "".join(word.capitalize() for word in condition.split("_"))


def faster(limits: HealthLimits, speed: float) -> HealthLimits:
    """The limits scaled so that one second stands for `speed` seconds, for drills."""
    seconds = {field.name: getattr(limits, field.name) / speed for field in fields(limits) if field.name.endswith("_s")}
    kept = {"fetch_s": limits.fetch_s}  # compared with a measured value, not with a clock
    return replace(limits, **(seconds | kept))


def rule_file(speed: float = 1.0) -> str:
    """The YAML text of all rules."""
    limits = faster(HealthLimits(), speed)
    groups = [
        {"name": f"nsa-{level.value}", "rules": list(_of_level(level, limits, speed))}
        for level in (AlertLevel.CRITICAL, AlertLevel.WARNING)
    ]
    groups[0]["rules"].append(_exporter_down(speed))  # type: ignore[attr-defined]
    note = f"# Written by `{REFRESH}`. Edit its source, nsa_train/observe/export/alert_rules.py, instead.\n"
    return note + yaml.safe_dump({"groups": groups}, sort_keys=False, width=120, allow_unicode=True)


def _of_level(level: AlertLevel, limits: HealthLimits, speed: float) -> Iterator[dict[str, object]]:
    numbers = {name: f"{value:g}" for name, value in asdict(limits).items()}
    spans = {"speed": f"{speed:g}", "recent": _span(RECENT_S / speed), "baseline": _span(BASELINE_S / speed)}
    for condition in CONDITIONS.values():
        if condition.level != level:
            continue
        rule = RULES[condition.name]
        yield _alert(
            condition.name,
            rule.expr.format(**numbers, **spans),
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
        "runbook_url": f"{RUNBOOK}#{name}",
    }
    return rule | {"labels": labels, "annotations": annotations}


def _span(seconds: float) -> str:
    return f"{max(1, round(seconds))}s"
