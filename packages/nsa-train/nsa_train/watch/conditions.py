"""Table of health conditions (name, level, signal, rule, advice), their limits, and the Prometheus alerts on them.

The watchdog, `nsa status`, the exporter, the alert rules and the runbook are all made from this table. A new condition
is one entry here and the function of `health` that finds it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from nsa.errors import ConfigError


class AlertLevel(StrEnum):
    WARNING = "warning"
    CRITICAL = "critical"
    """GPU time is being wasted: `nsa watch --halt 1` halts the run."""


@dataclass(frozen=True)
class HealthCondition:
    name: str
    level: AlertLevel
    signal: str
    """Measured quantity: a critical alert inhibits the warnings of the same signal."""
    rule: str
    """When the condition holds; names of `HealthLimits` in braces are filled in."""
    advice: str
    """The first action to take."""
    alert_for_s: float = 0.0
    """How long it must hold before Prometheus alerts."""
    process_ended: bool = False
    """The process has already ended: there is nothing to halt, and a launcher may be restarting it."""


@dataclass(frozen=True, kw_only=True)
class HealthLimits:
    """Limits of the health conditions; `--limit NAME=VALUE` changes one. `_s` are seconds."""

    stall_s: float = 180.0
    stall_steps: float = 4.0
    """A heartbeat may also be late by this many of the run's own step times, if that is longer than `stall_s`."""
    startup_s: float = 600.0
    """Used instead of stall_s where a pause is normal: while a launcher starts ranks again, until the first progress
    record of a process (compilation, warm-up), and where a save, an evaluation, a rollback or the end of the run may
    have begun."""
    evaluation_s: float = 1800.0
    """Heartbeats without a new step during an evaluation."""
    gone_s: float = 300.0
    nonfinite_records: int = 3
    """Consecutive non-finite progress records, although the run skips such steps."""
    divergence_records: int = 30
    """The loss diverges when the mean of the last N records of a process exceeds the lowest mean of N earlier ones by
    all of the following three limits."""
    divergence: float = 0.1
    """Relative to that lowest mean."""
    divergence_nats: float = 0.1
    divergence_sigma: float = 6.0
    """In units of the noise of such means."""
    plateau_steps: int = 1000
    plateau_gain: float = 0.001
    """Smallest relative improvement of the mean loss, second half of the window against the first, that is not a
    plateau."""
    plateau_share: float = 0.25
    """The window is at least this share of the steps so far: a power-law loss improves less and less per thousand
    steps, but about as much in every quarter of the run."""
    throughput_drop: float = 0.5
    throughput_drop_s: float = 600.0
    entropy_warning: float = 0.3
    entropy_critical: float = 0.2
    collapse_warning: float = 0.1
    collapse_critical: float = 0.2
    gate_max: float = 0.9
    gate_records: int = 3
    """Consecutive records that must exceed a gate limit: one batch may be unusual."""
    fetch_s: float = 2.0
    fetch_records: int = 5
    creep: float = 0.2
    """Relative memory growth over the remembered window (up to 240 spans of at least 30 s)."""
    creep_mib: float = 256.0
    """Smaller growth is ignored."""
    spike_sigma: float = 6.0
    spike_records: int = 3
    """Spikes within the window that make a finding; a single one is noise."""
    window: int = 100
    """Progress records over which trends are evaluated."""
    straggler: float = 1.5
    """Forward time of a rank relative to the median of the others."""
    straggler_records: int = 3
    checkpoint_overdue: float = 2.0
    """Save intervals without a checkpoint."""
    clock_skew_s: float = 60.0
    """A time stamp further ahead of the local clock than this is not trusted."""


@dataclass(frozen=True)
class HealthFinding:
    condition: HealthCondition
    rank: int | None
    """None for a finding about the whole run."""
    step: int
    message: str
    """The measured values and the limit."""

    @property
    def name(self) -> str:
        return self.condition.name

    @property
    def level(self) -> AlertLevel:
        return self.condition.level


def changed_limits(changes: Iterable[str]) -> HealthLimits:
    """Return the default limits with changes written as NAME=VALUE."""
    limits, known = HealthLimits(), HealthLimits.__dataclass_fields__
    for change in changes:
        name, _, value = change.partition("=")
        try:
            limits = replace(limits, **{name: type(getattr(limits, name))(value)})
        except (AttributeError, ValueError):
            raise ConfigError(
                f"--limit {change} is not NAME=NUMBER with a known name. The names: {', '.join(known)}."
            ) from None
    return limits


_CRITICAL_FOR_S, _WARNING_FOR_S = 60.0, 300.0
_C, _W = AlertLevel.CRITICAL, AlertLevel.WARNING

_CONDITIONS = (
    HealthCondition("heartbeat_stall", _C, "heartbeat", "no heartbeat for {stall_s} s",
                    "read the stack dumps in the run folder; halt and resume"),
    HealthCondition("process_gone", _C, "process", "process gone for {gone_s} s without a final record",
                    "check the system log (out-of-memory killer, node failure); resume", process_ended=True),
    HealthCondition("run_failed", _C, "run", "a process ended with an error",
                    "read the error; the runbook lists the exit codes", process_ended=True),
    HealthCondition("loss_nonfinite", _C, "loss", "NaN or infinite loss in a step that was not skipped",
                    "resume from a checkpoint before it; lower train.lr"),
    HealthCondition("grad_nonfinite", _C, "grad_norm", "NaN or infinite gradient norm in a step that was not skipped",
                    "resume from a checkpoint before it; lower train.lr"),
    HealthCondition("loss_divergence", _C, "loss",
                    "loss risen by {divergence} of its lowest mean over {divergence_records} records, beyond noise",
                    "resume from a checkpoint before the rise; lower train.lr"),
    HealthCondition("throughput_zero", _C, "throughput",
                    "heartbeats without a new step for {stall_s} s, or {gate_records} records of 0 tokens/s",
                    "read the stack dumps in the run folder"),
    HealthCondition("gate_entropy_critical", _C, "gate_entropy", "gate entropy below {entropy_critical} nats",
                    "read gate_collapse_details.json; lower train.lr", alert_for_s=_CRITICAL_FOR_S),
    HealthCondition("gate_collapse_critical", _C, "gate_collapse",
                    "more than {collapse_critical} of the gates collapsed",
                    "read gate_collapse_details.json; lower train.lr", alert_for_s=_CRITICAL_FOR_S),
    HealthCondition("loader_timeout", _C, "data",
                    "no data within the loader timeout: the source is slow, hangs or is unreachable",
                    "run nsa data smoke; check the data server and the network", process_ended=True),
    HealthCondition("out_of_memory", _C, "memory", "a process ran out of memory",
                    "run nsa estimate; smaller train.batch_size or runtime.gradient_checkpointing", process_ended=True),
    HealthCondition("steps_skipped", _W, "skips", "the run skipped steps with a non-finite or spiking loss or gradient",
                    "read the reasons in events.jsonl"),
    HealthCondition("loss_plateau", _W, "loss", "loss not falling over {plateau_steps} steps",
                    "check the learning-rate schedule, the data order and the held-out loss"),
    HealthCondition("loss_spike", _W, "loss", "loss {spike_sigma} sigma above its window, repeatedly",
                    "lower train.lr; check the data at those steps"),
    HealthCondition("throughput_drop", _W, "throughput",
                    "tokens/s down by more than {throughput_drop} for {throughput_drop_s} s",
                    "check GPU clocks and other processes (nvidia-smi)"),
    HealthCondition("gate_entropy_low", _W, "gate_entropy", "gate entropy below {entropy_warning} nats",
                    "keep watching; raise nsa.gate_temperature", alert_for_s=_WARNING_FOR_S),
    HealthCondition("gate_collapse_high", _W, "gate_collapse", "more than {collapse_warning} of the gates collapsed",
                    "keep watching", alert_for_s=_WARNING_FOR_S),
    HealthCondition("gate_max_high", _W, "gate_max", "largest gate {gate_max} or more on average",
                    "keep watching; raise nsa.gate_temperature", alert_for_s=_WARNING_FOR_S),
    HealthCondition("reads_differ", _W, "reads", "counted key reads differ from the prediction",
                    "run nsa doctor --prove; report a bug"),
    HealthCondition("data_slow", _W, "data", "more than {fetch_s} s wait for data, {fetch_records} records in a row",
                    "check the data source; raise data.queue_depth"),
    HealthCondition("memory_creep", _W, "memory", "memory grew by more than {creep} over the window",
                    "restart from a checkpoint; report a memory leak"),
    HealthCondition("grad_spikes", _W, "grad_norm", "gradient norm {spike_sigma} sigma above its window, repeatedly",
                    "check train.grad_clip; lower train.lr"),
    HealthCondition("straggler", _W, "forward", "forward time of one rank {straggler} times that of the others",
                    "check the clocks of that GPU and other jobs on its node", alert_for_s=_WARNING_FOR_S),
    HealthCondition("checkpoint_overdue", _W, "checkpoint", "no checkpoint for {checkpoint_overdue} save intervals",
                    "check free disk space and events.jsonl"),
    HealthCondition("copy_failed", _W, "copy",
                    "the newest checkpoint was not copied to train.checkpoint_store; training continues",
                    "read the error in events.jsonl; correct the credentials; copy it with nsa checkpoint push"),
    HealthCondition("nodes_missing", _W, "nodes", "a launcher waits for other nodes; no rank has started",
                    "start nsa launch on the missing nodes, each with the same --rdzv-endpoint"),
    HealthCondition("evaluation_failed", _W, "evaluation", "the newest evaluation failed; training continues",
                    "read the error in events.jsonl; check the held-out split"),
    HealthCondition("synthetic_data", _W, "dataset", "training on synthetic data although a dataset is configured",
                    "fix the data source and restart"),
    HealthCondition("clock_skew", _W, "clock", "records more than {clock_skew_s} s ahead of this machine's clock",
                    "synchronize the clocks (NTP); until then ages come from file times"),
)  # fmt: skip
CONDITIONS: Mapping[str, HealthCondition] = {condition.name: condition for condition in _CONDITIONS}

_REFRESH = "nsa alert-rules > ops/prometheus/rules.yml"
_EXPORTER_DOWN = "exporter_down"
"""Alert that is no condition of a run: its exporter does not respond."""
_EXPORTER_DOWN_S = 120.0
_RANK = "{{ if $labels.rank }} rank {{ $labels.rank }}{{ end }}"


def _alert_name(condition: str) -> str:
    return "NSA" + condition.title().replace("_", "")


def alert_rules(limits: HealthLimits = HealthLimits(), speed: float = 1.0) -> str:
    """The YAML text of the Prometheus rules: an alert on each condition that an exporter with these limits finds.

    Every alert must hold `speed` times shorter than usual, for drills.
    """
    import yaml

    numbers = {name: f"{value:g}" for name, value in asdict(limits).items()}
    groups: dict[AlertLevel, list[dict[str, Any]]] = {AlertLevel.CRITICAL: [], AlertLevel.WARNING: []}
    for condition in CONDITIONS.values():
        selector = f'{{condition="{condition.name}"}} > 0'
        groups[condition.level].append(
            _alert(
                condition,
                f"nsa_rank_findings{selector} or on (instance, job, run) nsa_findings{selector}",
                f"run {{{{ $labels.run }}}}{_RANK}: {condition.rule.format(**numbers)}",
                speed,
            )
        )
    exporter = HealthCondition(
        _EXPORTER_DOWN, AlertLevel.CRITICAL, "exporter", "", "restart nsa exporter; until then use nsa status RUN",
        alert_for_s=_EXPORTER_DOWN_S,
    )  # fmt: skip
    summary = "exporter {{ $labels.instance }} does not respond: its runs are not monitored"
    groups[AlertLevel.CRITICAL].append(_alert(exporter, 'up{job="nsa"} == 0', summary, speed))
    rules = {"groups": [{"name": f"nsa-{level.value}", "rules": rules} for level, rules in groups.items()]}
    note = f"# Written by `{_REFRESH}`. Edit its source, nsa_train/watch/conditions.py, instead.\n"
    return note + yaml.safe_dump(rules, sort_keys=False, width=120, allow_unicode=True)


def _alert(condition: HealthCondition, expr: str, summary: str, speed: float) -> dict[str, Any]:
    for_s = condition.alert_for_s
    return {
        "alert": _alert_name(condition.name),
        "expr": expr,
        **({"for": f"{max(1, round(for_s / speed))}s"} if for_s else {}),
        "labels": {"severity": condition.level.value, "condition": condition.name, "signal": condition.signal},
        "annotations": {
            "summary": summary,
            "value": "{{ $value | humanize }}",
            "advice": condition.advice,
            "runbook_url": f"docs/RUNBOOK.md#{condition.name}",
        },
    }
