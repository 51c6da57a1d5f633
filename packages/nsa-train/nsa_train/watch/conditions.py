"""Table of health conditions (name, level, rule, advice, alert) and their limits.

The watchdog, `nsa status`, the Prometheus alert rules and the runbook are all made from this table. A new condition is
one entry here and the function of `health` that finds it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class AlertLevel(StrEnum):
    WARNING = "warning"
    CRITICAL = "critical"
    """GPU time is being wasted: `nsa watch --halt 1` halts the run."""


@dataclass(frozen=True)
class AlertRule:
    """The Prometheus alert of a condition, on the metrics of `nsa exporter`.

    NaN is the only value that differs from itself. Metrics of a run that is done or was stopped are no longer exported,
    so only the heartbeat rules need the state of a run.
    """

    signal: str
    """Measured quantity: a critical alert inhibits the warnings of the same signal."""
    expr: str = ""
    """PromQL; names of `HealthLimits`, `speed`, `recent` and `baseline` in braces are filled in. Without one the alert
    is on `nsa_findings` of the exporter: PromQL works on seconds, not on records, and knows no failure codes."""
    for_s: float = 0.0


@dataclass(frozen=True)
class HealthCondition:
    name: str
    level: AlertLevel
    rule: str
    """When the condition holds; names of `HealthLimits` in braces are filled in."""
    advice: str
    """The first action to take."""
    alert: AlertRule
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


def findings_expr(condition: str) -> str:
    """Return the expression of an alert on what the exporter found."""
    return f'nsa_findings{{{{condition="{condition}"}}}} > 0'


_CRITICAL_FOR_S, _WARNING_FOR_S = 60.0, 300.0
"""How long a value must exceed its limit for a critical alert, and for a warning: one record is noise."""

_AGE = "time() - nsa_heartbeat_timestamp_seconds"
_BY_RUN = "by (instance, job, run)"
"""One alert per run where all ranks have the same value."""


def _not_finite(condition: str, gauge: str, counter: str) -> str:
    """Combine gauge and counter: a scrape may miss a value of the gauge, not a count; skipped steps are in neither."""
    taken = f"{gauge} != {gauge} or abs({gauge}) == Inf or increase({counter}[{{recent}}]) > 0"
    return f"count {_BY_RUN} ({taken}) or sum {_BY_RUN} ({findings_expr(condition)})"


_USUAL_FORWARD = (
    "((quantile by (instance, run) (0.5, nsa_forward_seconds) and count by (instance, run) (nsa_forward_seconds) > 2)"
    " or min by (instance, run) (nsa_forward_seconds))"
)
"""Median of the ranks; for two ranks, where a median is the mean, the minimum."""


def _table(*conditions: HealthCondition) -> Mapping[str, HealthCondition]:
    return {condition.name: condition for condition in conditions}


_C, _W = AlertLevel.CRITICAL, AlertLevel.WARNING

CONDITIONS = _table(
    HealthCondition(
        "heartbeat_stall",
        _C,
        "no heartbeat for {stall_s} s",
        "read the stack dumps in the run folder; halt and resume",
        AlertRule(
            "heartbeat",
            f"{_AGE} > nsa_heartbeat_limit_seconds / {{speed}} unless nsa_process_up == 0 "
            "or nsa_missing_ranks > 0 and time() - nsa_start_timestamp_seconds > {startup_s}",
        ),
    ),
    HealthCondition(
        "process_gone",
        _C,
        "process gone for {gone_s} s without a final record",
        "check the system log (out-of-memory killer, node failure); resume",
        AlertRule("process", f"{_AGE} > {{gone_s}} and nsa_process_up == 0"),
        process_ended=True,
    ),
    HealthCondition(
        "run_failed",
        _C,
        "a process ended with an error",
        "read the error; the runbook lists the exit codes",
        AlertRule(
            "run",
            'nsa_run_state{{state="failed"}} == 1 '
            'unless on (instance, run) nsa_findings{{condition=~"out_of_memory|loader_timeout"}} > 0',
        ),
        process_ended=True,
    ),
    HealthCondition(
        "loss_nonfinite",
        _C,
        "NaN or infinite loss in a step that was not skipped",
        "resume from a checkpoint before it; lower train.lr",
        AlertRule("loss", _not_finite("loss_nonfinite", "nsa_loss_nats", "nsa_nonfinite_losses_total")),
    ),
    HealthCondition(
        "grad_nonfinite",
        _C,
        "NaN or infinite gradient norm in a step that was not skipped",
        "resume from a checkpoint before it; lower train.lr",
        AlertRule("grad_norm", _not_finite("grad_nonfinite", "nsa_grad_norm", "nsa_nonfinite_grad_norms_total")),
    ),
    HealthCondition(
        "loss_divergence",
        _C,
        "loss risen by {divergence} of its lowest mean over {divergence_records} records, beyond noise",
        "resume from a checkpoint before the rise; lower train.lr",
        AlertRule("loss"),
    ),
    HealthCondition(
        "throughput_zero",
        _C,
        "heartbeats without a new step for {stall_s} s, or {gate_records} records of 0 tokens/s",
        "read the stack dumps in the run folder",
        AlertRule("throughput"),
    ),
    HealthCondition(
        "gate_entropy_critical",
        _C,
        "gate entropy below {entropy_critical} nats",
        "read gate_collapse_details.json; lower train.lr",
        AlertRule("gate_entropy", f"min {_BY_RUN} (nsa_gate_entropy_nats) < {{entropy_critical}}", _CRITICAL_FOR_S),
    ),
    HealthCondition(
        "gate_collapse_critical",
        _C,
        "more than {collapse_critical} of the gates collapsed",
        "read gate_collapse_details.json; lower train.lr",
        AlertRule("gate_collapse", f"max {_BY_RUN} (nsa_gate_collapse_ratio) > {{collapse_critical}}", _CRITICAL_FOR_S),
    ),
    HealthCondition(
        "loader_timeout",
        _C,
        "no data within the loader timeout: the source is slow, hangs or is unreachable",
        "run nsa data smoke; check the data server and the network",
        AlertRule("data"),
        process_ended=True,
    ),
    HealthCondition(
        "out_of_memory",
        _C,
        "a process ran out of memory",
        "run nsa estimate; smaller train.batch_size or runtime.gradient_checkpointing",
        AlertRule("memory"),
        process_ended=True,
    ),
    HealthCondition(
        "steps_skipped",
        _W,
        "the run skipped steps with a non-finite or spiking loss or gradient",
        "read the reasons in events.jsonl",
        AlertRule("skips", f"max {_BY_RUN} (increase(nsa_skipped_steps_total[{{recent}}])) > 0"),
    ),
    HealthCondition(
        "loss_plateau",
        _W,
        "loss not falling over {plateau_steps} steps",
        "check the learning-rate schedule, the data order and the held-out loss",
        AlertRule("loss"),
    ),
    HealthCondition(
        "loss_spike",
        _W,
        "loss {spike_sigma} sigma above its window, repeatedly",
        "lower train.lr; check the data at those steps",
        AlertRule("loss"),
    ),
    HealthCondition(
        "throughput_drop",
        _W,
        "tokens/s down by more than {throughput_drop} for {throughput_drop_s} s",
        "check GPU clocks and other processes (nvidia-smi)",
        AlertRule(
            "throughput",
            f"min {_BY_RUN} (nsa_tokens_per_second and nsa_heartbeat_limit_seconds) < (1 - {{throughput_drop}}) * "
            f"max {_BY_RUN} (max_over_time(nsa_tokens_per_second[{{baseline}}]))",
            for_s=HealthLimits.throughput_drop_s,
        ),
    ),
    HealthCondition(
        "gate_entropy_low",
        _W,
        "gate entropy below {entropy_warning} nats",
        "keep watching; raise nsa.gate_temperature",
        AlertRule("gate_entropy", f"min {_BY_RUN} (nsa_gate_entropy_nats) < {{entropy_warning}}", _WARNING_FOR_S),
    ),
    HealthCondition(
        "gate_collapse_high",
        _W,
        "more than {collapse_warning} of the gates collapsed",
        "keep watching",
        AlertRule("gate_collapse", f"max {_BY_RUN} (nsa_gate_collapse_ratio) > {{collapse_warning}}", _WARNING_FOR_S),
    ),
    HealthCondition(
        "gate_max_high",
        _W,
        "largest gate {gate_max} or more on average",
        "keep watching; raise nsa.gate_temperature",
        AlertRule("gate_max", f"max {_BY_RUN} (nsa_gate_max_ratio) >= {{gate_max}}", _WARNING_FOR_S),
    ),
    HealthCondition(
        "reads_differ",
        _W,
        "counted key reads differ from the prediction",
        "run nsa doctor --prove; report a bug",
        AlertRule("reads", "nsa_reads_counted != nsa_reads_predicted"),
    ),
    HealthCondition(
        "data_slow",
        _W,
        "more than {fetch_s} s wait for data, {fetch_records} records in a row",
        "check the data source; raise data.queue_depth",
        AlertRule("data"),
    ),
    HealthCondition(
        "memory_creep",
        _W,
        "memory grew by more than {creep} over the window",
        "restart from a checkpoint; report a memory leak",
        AlertRule("memory"),
    ),
    HealthCondition(
        "grad_spikes",
        _W,
        "gradient norm {spike_sigma} sigma above its window, repeatedly",
        "check train.grad_clip; lower train.lr",
        AlertRule("grad_norm"),
    ),
    HealthCondition(
        "straggler",
        _W,
        "forward time of one rank {straggler} times that of the others",
        "check the clocks of that GPU and other jobs on its node",
        AlertRule(
            "forward",
            f"nsa_forward_seconds / on (instance, run) group_left () {_USUAL_FORWARD} > {{straggler}} "
            f"and nsa_forward_seconds - on (instance, run) group_left () {_USUAL_FORWARD} > 0.1 * nsa_step_seconds",
            _WARNING_FOR_S,
        ),
    ),
    HealthCondition(
        "checkpoint_overdue",
        _W,
        "no checkpoint for {checkpoint_overdue} save intervals",
        "check free disk space and events.jsonl",
        AlertRule(
            "checkpoint",
            f"max {_BY_RUN} (nsa_step and nsa_heartbeat_limit_seconds) - nsa_last_checkpoint_step "
            "> {checkpoint_overdue} * nsa_checkpoint_interval_steps",
        ),
    ),
    HealthCondition(
        "copy_failed",
        _W,
        "the newest checkpoint was not copied to train.checkpoint_store; training continues",
        "read the error in events.jsonl; correct the credentials; copy it with nsa checkpoint push",
        AlertRule("copy"),
    ),
    HealthCondition(
        "nodes_missing",
        _W,
        "a launcher waits for other nodes; no rank has started",
        "start nsa launch on the missing nodes, each with the same --rdzv-endpoint",
        AlertRule("nodes"),
    ),
    HealthCondition(
        "evaluation_failed",
        _W,
        "the newest evaluation failed; training continues",
        "read the error in events.jsonl; check the held-out split",
        AlertRule("evaluation"),
    ),
    HealthCondition(
        "synthetic_data",
        _W,
        "training on synthetic data although a dataset is configured",
        "fix the data source and restart",
        AlertRule("dataset", f"max {_BY_RUN} (nsa_data_substituted) == 1"),
    ),
    HealthCondition(
        "clock_skew",
        _W,
        "records more than {clock_skew_s} s ahead of this machine's clock",
        "synchronize the clocks (NTP); until then ages come from file times",
        AlertRule("clock"),
    ),
)
