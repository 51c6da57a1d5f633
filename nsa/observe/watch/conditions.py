"""Everything that can be wrong with a run, once: name, level, rule, what to do. Watchdog, alerts, runbook share it."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class AlertLevel(StrEnum):
    WARNING = "warning"
    CRITICAL = "critical"
    """The run is losing money: a watchdog that may, halts it."""


@dataclass(frozen=True)
class HealthCondition:
    name: str
    level: AlertLevel
    rule: str
    """When it holds, in words, with the limit's name in braces where `HealthLimits` has one."""
    advice: str
    """The first thing to do."""
    over: bool = False
    """The process has ended by itself: there is nothing to halt, and a launcher may be starting it again."""


@dataclass(frozen=True, kw_only=True)
class HealthLimits:
    """Spec section 6. Seconds, nats, shares and counts as the names say."""

    stall_s: float = 180.0
    stall_steps: float = 4.0
    """A beat may also be this many of the run's own step times late, where that is longer."""
    startup_s: float = 600.0
    """Instead of stall_s where silence is usual: until the first progress record of a process (compiling, filling
    buffers), and where a save, an evaluation, the way back to a checkpoint or the end of the run may have begun."""
    evaluation_s: float = 1800.0
    """Beats without a new step while it evaluates."""
    gone_s: float = 300.0
    nonfinite_records: int = 3
    """Progress records in a row that are not finite although the run skips such steps."""
    divergence_records: int = 30
    """The loss has risen when the mean of this many last records of a process lies above the lowest mean of as many
    earlier ones by all of the following three."""
    divergence: float = 0.1
    """As a share of that lowest mean."""
    divergence_nats: float = 0.1
    divergence_sigma: float = 6.0
    """Times the noise of such means."""
    plateau_steps: int = 1000
    plateau_gain: float = 0.001
    """Relative improvement of the mean loss, second half of the window against the first, that is no plateau."""
    plateau_share: float = 0.25
    """The window is at least this share of the steps so far: a loss that falls as a power of the steps gains less and
    less in any thousand of them, and about the same in any quarter."""
    throughput_drop: float = 0.5
    throughput_drop_s: float = 600.0
    entropy_warning: float = 0.3
    entropy_critical: float = 0.2
    collapse_warning: float = 0.1
    collapse_critical: float = 0.2
    gate_max: float = 0.9
    gate_records: int = 3
    """Records in a row that must say so: one batch may be odd."""
    fetch_s: float = 2.0
    fetch_records: int = 5
    creep: float = 0.2
    """Growth of memory that is creeping, over what the watcher remembers (up to 240 spans of at least 30 s)."""
    creep_mib: float = 256.0
    """Growth below this is nobody's trouble."""
    spike_sigma: float = 6.0
    spike_records: int = 3
    """Spikes within the window that are a finding; one is noise."""
    window: int = 100
    """Progress records that trends are judged over."""
    straggler: float = 1.5
    """Own forward time of a rank against the median of the ranks."""
    straggler_records: int = 3
    checkpoint_overdue: float = 2.0
    """Save intervals without a checkpoint."""
    clock_skew_s: float = 60.0
    """A record may be so far ahead of the watcher's clock; beyond it, its time is not believed."""


@dataclass(frozen=True)
class HealthFinding:
    condition: HealthCondition
    rank: int | None
    """None where it concerns the run."""
    step: int
    message: str
    """The values, against the limit."""

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
    HealthCondition("heartbeat_stall", _C, "no beat for {stall_s} s", "look at the stack dumps; then halt, resume"),
    HealthCondition(
        "process_gone", _C, "process gone for {gone_s} s without a last word", "system log; then resume", True
    ),
    HealthCondition(
        "run_failed",
        _C,
        "the last word of a process is an error",
        "read the error; its exit code says whom to ask",
        True,
    ),
    HealthCondition(
        "loss_nonfinite", _C, "NaN or infinite loss in a step that was taken", "resume from before it, lower lr"
    ),
    HealthCondition("grad_nonfinite", _C, "NaN or infinite gradient norm in a step that was taken", "resume, lower lr"),
    HealthCondition(
        "loss_divergence",
        _C,
        "loss risen by {divergence} of its lowest mean over {divergence_records} records, beyond noise",
        "resume from before the rise, lower lr",
    ),
    HealthCondition(
        "throughput_zero",
        _C,
        "beats without a new step for {stall_s} s, or {gate_records} records of 0 tokens/s",
        "look at the stack dumps",
    ),
    HealthCondition(
        "gate_entropy_critical",
        _C,
        "gate entropy below {entropy_critical} nats",
        "gate_collapse_details.json; lower lr",
    ),
    HealthCondition(
        "gate_collapse_critical",
        _C,
        "more than {collapse_critical} of the gates collapsed",
        "gate_collapse_details.json; lower lr",
    ),
    HealthCondition(
        "loader_timeout",
        _C,
        "no data in time: the source is slow, hangs or is gone",
        "nsa data smoke; the server",
        True,
    ),
    HealthCondition(
        "out_of_memory", _C, "a process ran out of memory", "nsa estimate; smaller batch, checkpointing", True
    ),
    HealthCondition(
        "steps_skipped", _W, "steps skipped by the run itself, non-finite or spiking", "look at events.jsonl"
    ),
    HealthCondition(
        "loss_plateau", _W, "loss not falling over {plateau_steps} steps", "lr schedule, data order, held-out loss"
    ),
    HealthCondition(
        "loss_spike", _W, "loss {spike_sigma} sigma above its window, repeatedly", "lower lr, look at the data"
    ),
    HealthCondition(
        "throughput_drop", _W, "tokens/s down by more than {throughput_drop} for {throughput_drop_s} s", "nvidia-smi"
    ),
    HealthCondition("gate_entropy_low", _W, "gate entropy below {entropy_warning} nats", "watch it; gate_temperature"),
    HealthCondition("gate_collapse_high", _W, "more than {collapse_warning} of the gates collapsed", "watch it"),
    HealthCondition("gate_max_high", _W, "largest gate {gate_max} or more on average", "watch it; gate_temperature"),
    HealthCondition("reads_differ", _W, "keys read are not the keys predicted", "nsa doctor --prove"),
    HealthCondition(
        "data_slow",
        _W,
        "more than {fetch_s} s wait for data, {fetch_records} records in a row",
        "data.queue_depth, source",
    ),
    HealthCondition(
        "memory_creep", _W, "memory grew by more than {creep} over the window", "restart at a checkpoint; report"
    ),
    HealthCondition(
        "grad_spikes", _W, "gradient norm {spike_sigma} sigma above its window, repeatedly", "grad_clip, lr"
    ),
    HealthCondition(
        "straggler", _W, "one rank's forward {straggler} times the others'", "that GPU's clocks and neighbours"
    ),
    HealthCondition(
        "checkpoint_overdue", _W, "no checkpoint for {checkpoint_overdue} save intervals", "disk, events.jsonl"
    ),
    HealthCondition(
        "evaluation_failed", _W, "the newest evaluation failed; training continues", "the held-out split, events.jsonl"
    ),
    HealthCondition("synthetic_data", _W, "made-up data where a dataset was asked for", "fix the data source, restart"),
    HealthCondition(
        "clock_skew",
        _W,
        "records more than {clock_skew_s} s ahead of this machine's clock",
        "set the clocks (NTP); ages are taken from file times meanwhile",
    ),
)
