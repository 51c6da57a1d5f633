"""Table of health conditions (name, level, rule, advice) and their limits.

The watchdog, `nsa status`, the Prometheus alert rules and the runbook are all made from this table.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class AlertLevel(StrEnum):
    WARNING = "warning"
    CRITICAL = "critical"
    """GPU time is being wasted: `nsa watch --halt 1` halts the run."""


@dataclass(frozen=True)
class HealthCondition:
    name: str
    level: AlertLevel
    rule: str
    """When the condition holds; names of `HealthLimits` in braces are filled in."""
    advice: str
    """The first action to take."""
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


def _table(*conditions: HealthCondition) -> Mapping[str, HealthCondition]:
    return {condition.name: condition for condition in conditions}


_C, _W = AlertLevel.CRITICAL, AlertLevel.WARNING

CONDITIONS = _table(
    HealthCondition(
        "heartbeat_stall",
        _C,
        "no heartbeat for {stall_s} s",
        "read the stack dumps in the run folder; halt and resume",
    ),
    HealthCondition(
        "process_gone",
        _C,
        "process gone for {gone_s} s without a final record",
        "check the system log (out-of-memory killer, node failure); resume",
        True,
    ),
    HealthCondition(
        "run_failed",
        _C,
        "a process ended with an error",
        "read the error; the runbook lists the exit codes",
        True,
    ),
    HealthCondition(
        "loss_nonfinite",
        _C,
        "NaN or infinite loss in a step that was not skipped",
        "resume from a checkpoint before it; lower train.lr",
    ),
    HealthCondition(
        "grad_nonfinite",
        _C,
        "NaN or infinite gradient norm in a step that was not skipped",
        "resume from a checkpoint before it; lower train.lr",
    ),
    HealthCondition(
        "loss_divergence",
        _C,
        "loss risen by {divergence} of its lowest mean over {divergence_records} records, beyond noise",
        "resume from a checkpoint before the rise; lower train.lr",
    ),
    HealthCondition(
        "throughput_zero",
        _C,
        "heartbeats without a new step for {stall_s} s, or {gate_records} records of 0 tokens/s",
        "read the stack dumps in the run folder",
    ),
    HealthCondition(
        "gate_entropy_critical",
        _C,
        "gate entropy below {entropy_critical} nats",
        "read gate_collapse_details.json; lower train.lr",
    ),
    HealthCondition(
        "gate_collapse_critical",
        _C,
        "more than {collapse_critical} of the gates collapsed",
        "read gate_collapse_details.json; lower train.lr",
    ),
    HealthCondition(
        "loader_timeout",
        _C,
        "no data within the loader timeout: the source is slow, hangs or is unreachable",
        "run nsa data smoke; check the data server and the network",
        True,
    ),
    HealthCondition(
        "out_of_memory",
        _C,
        "a process ran out of memory",
        "run nsa estimate; smaller train.batch_size or runtime.gradient_checkpointing",
        True,
    ),
    HealthCondition(
        "steps_skipped",
        _W,
        "the run skipped steps with a non-finite or spiking loss or gradient",
        "read the reasons in events.jsonl",
    ),
    HealthCondition(
        "loss_plateau",
        _W,
        "loss not falling over {plateau_steps} steps",
        "check the learning-rate schedule, the data order and the held-out loss",
    ),
    HealthCondition(
        "loss_spike",
        _W,
        "loss {spike_sigma} sigma above its window, repeatedly",
        "lower train.lr; check the data at those steps",
    ),
    HealthCondition(
        "throughput_drop",
        _W,
        "tokens/s down by more than {throughput_drop} for {throughput_drop_s} s",
        "check GPU clocks and other processes (nvidia-smi)",
    ),
    HealthCondition(
        "gate_entropy_low", _W, "gate entropy below {entropy_warning} nats", "keep watching; raise nsa.gate_temperature"
    ),
    HealthCondition("gate_collapse_high", _W, "more than {collapse_warning} of the gates collapsed", "keep watching"),
    HealthCondition(
        "gate_max_high",
        _W,
        "largest gate {gate_max} or more on average",
        "keep watching; raise nsa.gate_temperature",
    ),
    HealthCondition(
        "reads_differ", _W, "counted key reads differ from the prediction", "run nsa doctor --prove; report a bug"
    ),
    HealthCondition(
        "data_slow",
        _W,
        "more than {fetch_s} s wait for data, {fetch_records} records in a row",
        "check the data source; raise data.queue_depth",
    ),
    HealthCondition(
        "memory_creep",
        _W,
        "memory grew by more than {creep} over the window",
        "restart from a checkpoint; report a memory leak",
    ),
    HealthCondition(
        "grad_spikes",
        _W,
        "gradient norm {spike_sigma} sigma above its window, repeatedly",
        "check train.grad_clip; lower train.lr",
    ),
    HealthCondition(
        "straggler",
        _W,
        "forward time of one rank {straggler} times that of the others",
        "check the clocks of that GPU and other jobs on its node",
    ),
    HealthCondition(
        "checkpoint_overdue",
        _W,
        "no checkpoint for {checkpoint_overdue} save intervals",
        "check free disk space and events.jsonl",
    ),
    HealthCondition(
        "copy_failed",
        _W,
        "the newest checkpoint was not copied to train.checkpoint_store; training continues",
        "read the error in events.jsonl; correct the credentials; copy it with nsa checkpoint push",
    ),
    HealthCondition(
        "nodes_missing",
        _W,
        "a launcher waits for other nodes; no rank has started",
        "start nsa launch on the missing nodes, each with the same --rdzv-endpoint",
    ),
    HealthCondition(
        "evaluation_failed",
        _W,
        "the newest evaluation failed; training continues",
        "read the error in events.jsonl; check the held-out split",
    ),
    HealthCondition(
        "synthetic_data",
        _W,
        "training on synthetic data although a dataset is configured",
        "fix the data source and restart",
    ),
    HealthCondition(
        "clock_skew",
        _W,
        "records more than {clock_skew_s} s ahead of this machine's clock",
        "synchronize the clocks (NTP); until then ages come from file times",
    ),
)
