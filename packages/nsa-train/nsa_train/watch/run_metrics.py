"""Prometheus metrics of a run: those that its history gives; those of single records are in `heartbeat_record`.

Labels are the run name, the rank and fixed words; text from a config or a record (paths, URLs, error messages) may
contain a secret and never becomes a label.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from nsa_train import names
from nsa_train.record.events import EventKind
from nsa_train.record.heartbeat_record import GATE_BRANCHES, METRICS, PrometheusGauge
from nsa_train.record.value_checks import section
from nsa_train.terminal_text import printable
from nsa_train.watch.conditions import CONDITIONS, HealthLimits
from nsa_train.watch.health import examine, stall_limit_s
from nsa_train.watch.history import RankLog, RunHistory
from nsa_train.watch.run_reader import ClockReading

_LONGEST_LABEL = 80


class MetricDefinition(NamedTuple):
    name: str
    help: str
    kind: Literal["gauge", "counter"] = "gauge"

    @property
    def served_name(self) -> str:
        return f"{self.name}_total" if self.kind == "counter" else self.name


class MetricSample(NamedTuple):
    metric: MetricDefinition
    labels: Mapping[str, str]
    value: float


_SKIPPED = MetricDefinition(
    "nsa_skipped_steps", "Steps whose optimizer did not run, the non-finite ones included.", "counter"
)
_NONFINITE = MetricDefinition(
    "nsa_nonfinite_steps", "Steps with a loss or gradient norm that is not finite.", "counter"
)


GAUGES: Mapping[str, PrometheusGauge] = {
    name: field.gauge._replace(help=field.gauge.help or field.about)
    for name, field in METRICS.items()
    if field.gauge is not None
}
"""Gauge of each metric of a progress record that is exported as it is (times `scale`)."""

STATES = ("starting", "running", "halted", "stopped", "done", "failed")
_STATE_OF_ENDING = {
    names.HALTED: "halted",
    names.STOPPED: "stopped",
    names.DONE: "done",
    names.FAILED: "failed",
}
_ENDED_REGULARLY = ("stopped", "done")
"""Regular ends: the last values of such a run are not exported."""

_STATE = MetricDefinition("nsa_run_state", "1 for the current state of a rank.")
_STEP = MetricDefinition("nsa_step", "Last step recorded by a rank.")
_BEAT_TS = MetricDefinition("nsa_heartbeat_timestamp_seconds", "Time of the last record of a rank.")
_STEP_TS = MetricDefinition("nsa_step_timestamp_seconds", "Time of the first record with the last step of a rank.")
_UP = MetricDefinition("nsa_process_up", "1 if the process of a rank runs; only for ranks on this host.")
_BAD_LOSS = MetricDefinition(
    "nsa_nonfinite_losses", "Records of steps with a non-finite loss that were not skipped.", "counter"
)
_BAD_NORM = MetricDefinition(
    "nsa_nonfinite_grad_norms", "Records of steps with a non-finite gradient norm that were not skipped.", "counter"
)
_SHARE = MetricDefinition("nsa_gate_share_ratio", "Mean share of a branch in the gates of a layer.")
_SHARE_MEAN = MetricDefinition("nsa_gate_share_mean_ratio", "Mean share of a branch in the gates of all layers.")
_KERNEL = MetricDefinition("nsa_kernel_info", "The backend that computes a branch.")
_SUBSTITUTED = MetricDefinition(
    "nsa_data_substituted", "1 while a rank trains on synthetic data although a dataset is configured."
)
_INFO = MetricDefinition("nsa_run_info", "Versions, device, precision, dataset and number of ranks of the run.")
_RESTARTS = MetricDefinition(
    "nsa_restarts", "Starts that resumed from a checkpoint or were made by the launcher.", "counter"
)
_ROLLBACKS = MetricDefinition("nsa_rollbacks", "Rollbacks to a checkpoint by the run itself.", "counter")
_LOST = MetricDefinition("nsa_lost_steps", "Steps that had to be repeated after a restart or rollback.", "counter")
_SAVE_STEP = MetricDefinition(
    "nsa_last_checkpoint_step", "Step of the last checkpoint, or the step the run began from."
)
_SAVE_TS = MetricDefinition("nsa_last_checkpoint_timestamp_seconds", "Time at which the last checkpoint was complete.")
_SAVE_EVERY = MetricDefinition("nsa_checkpoint_interval_steps", "train.save_every; not exported if it is 0.")
_EVAL = MetricDefinition("nsa_eval_loss_nats", "Held-out loss per token of the last evaluation.")
_EVAL_ACCURACY = MetricDefinition(
    "nsa_eval_accuracy_ratio", "Share of held-out tokens that were the most likely token in the last evaluation."
)
_LIMIT = MetricDefinition(
    "nsa_heartbeat_limit_seconds", "Heartbeat age at which a rank counts as stalled at its current step."
)
_MISSING = MetricDefinition("nsa_missing_ranks", "Ranks without a heartbeat since the run was started.")
_START_TS = MetricDefinition("nsa_start_timestamp_seconds", "Time of the last start or restart of the run.")
_FINDING = MetricDefinition("nsa_findings", "Findings per health condition: affected ranks, or 1 for the run.")
_RANK_FINDING = MetricDefinition("nsa_rank_findings", "1 for each health condition that holds for a rank.")
_TARGET = MetricDefinition("nsa_steps_target", "train.steps.")
_UNREADABLE = MetricDefinition("nsa_unreadable_records", "Records of the run folder that could not be fully read.")


def served_names() -> set[str]:
    """Every metric name that rules and dashboards may use."""
    metrics = [value for value in globals().values() if isinstance(value, MetricDefinition)]
    return {metric.served_name for metric in metrics} | {gauge.name for gauge in GAUGES.values()}


def samples(history: RunHistory, now: ClockReading, local: set[int], limits: HealthLimits) -> Iterator[MetricSample]:
    """All samples of one run; ranks in `local` have their processes on this host."""
    for rank, log in sorted(history.present.items()):
        for metric, labels, value in _of_rank(history, log, now, rank in local, limits):
            yield MetricSample(metric, {"rank": str(rank), **labels}, value)
    yield from _of_run(history, now)
    ended = all(_state_of(log) in _ENDED_REGULARLY for log in history.present.values())
    findings = [] if ended else examine(history, now=now.steady, limits=limits)
    counts = Counter(finding.name for finding in findings)
    for name, condition in CONDITIONS.items():
        yield MetricSample(_FINDING, {"condition": name, "severity": condition.level.value}, counts[name])
    for finding in findings:
        if finding.rank is not None:
            labels = {"condition": finding.name, "severity": finding.level.value, "rank": str(finding.rank)}
            yield MetricSample(_RANK_FINDING, labels, 1.0)


def run_info(env: Mapping[str, Any]) -> MetricSample:
    """Labels from env.json, only fields that cannot contain a secret."""

    def part(of: Mapping[str, Any], name: str) -> dict[str, Any]:
        return section(of.get(name)) or {}

    config = part(env, "config")
    words = {
        "version": env.get("nsa"),
        "torch": part(env, "packages").get("torch"),
        "device": env.get("device"),
        "world_size": env.get("world_size"),
        "precision": part(config, "runtime").get("precision"),
        "dataset": part(config, "data").get("dataset"),
    }
    return MetricSample(_INFO, {name: _label(word) for name, word in words.items()}, 1.0)


def _label(word: Any) -> str:
    """Text of a file as a label: short and printable."""
    return printable(word, _LONGEST_LABEL) if isinstance(word, (str, int)) else ""


def _of_run(history: RunHistory, now: ClockReading) -> Iterator[MetricSample]:
    yield MetricSample(_RESTARTS, {}, history.event_counts[EventKind.RESTART])
    yield MetricSample(_ROLLBACKS, {}, history.event_counts[EventKind.ROLLBACK])
    yield MetricSample(_LOST, {}, history.lost_steps)
    yield MetricSample(_SAVE_STEP, {}, history.saved_step)
    yield MetricSample(_UNREADABLE, {}, history.unreadable.total())
    yield MetricSample(_MISSING, {}, sum(rank not in history.present for rank in range(history.facts.world or 1)))
    known = {
        _START_TS: None if history.started_at is None else _wall_time(history.started_at, now),
        _SAVE_TS: history.saved_ts,
        _EVAL: history.eval_loss,
        _EVAL_ACCURACY: history.eval_accuracy,
        _SAVE_EVERY: history.facts.save_every or None,
        _TARGET: history.facts.steps,
    }
    yield from (MetricSample(metric, {}, value) for metric, value in known.items() if value is not None)


def _of_rank(
    history: RunHistory, log: RankLog, now: ClockReading, local: bool, limits: HealthLimits
) -> Iterator[MetricSample]:
    rank, state = log.rank, _state_of(log)
    yield from (MetricSample(_STATE, {"state": each}, float(each == state)) for each in STATES)
    yield MetricSample(_STEP, {}, log.last.step)
    yield MetricSample(_BEAT_TS, {}, _wall_time(log.last_at, now))
    yield MetricSample(_STEP_TS, {}, _wall_time(log.step_at, now))
    yield MetricSample(_SKIPPED, {}, history.skipped[rank])
    yield MetricSample(_NONFINITE, {}, history.nonfinite[rank])
    yield MetricSample(_BAD_LOSS, {}, history.bad_losses[rank])
    yield MetricSample(_BAD_NORM, {}, history.bad_norms[rank])
    if not log.ended:
        yield MetricSample(_LIMIT, {}, stall_limit_s(log, history, limits))
        if local:
            yield MetricSample(_UP, {}, float(rank not in history.gone))
    if state not in _ENDED_REGULARLY:
        yield MetricSample(_SUBSTITUTED, {}, float(history.facts.is_substituted(log.last)))
        yield from _figures(_latest(log))


def _state_of(log: RankLog) -> str:
    if log.ended:
        return _STATE_OF_ENDING[log.last.msg]
    return "running" if log.progress else "starting"


def _figures(figures: Mapping[str, Any]) -> Iterator[MetricSample]:
    for name, gauge in GAUGES.items():
        if name in figures:
            yield MetricSample(MetricDefinition(gauge.name, gauge.help), gauge.labels, figures[name] * gauge.scale)
    for branch, share in zip(GATE_BRANCHES, figures.get("gate_branch_shares", ()), strict=False):
        yield MetricSample(_SHARE_MEAN, {"branch": branch}, share)
    for layer, shares in enumerate(figures.get("gate_shares_by_layer", ())):
        for branch, share in zip(GATE_BRANCHES, shares, strict=False):
            yield MetricSample(_SHARE, {"branch": branch, "layer": str(layer)}, share)
    for name in figures:
        if name.startswith("kernel_"):
            yield MetricSample(_KERNEL, {"branch": name.removeprefix("kernel_"), "backend": _label(figures[name])}, 1.0)


def _latest(log: RankLog) -> dict[str, Any]:
    """The newest progress record, with loss and gradient norm of the newest step that was not skipped."""
    if not log.progress:
        return {}
    figures = log.progress[-1].as_dict()
    taken = next((beat for beat in reversed(log.progress) if not log.skipped_step_of(beat)), None)
    for name in ("loss", "grad_norm"):
        figures.pop(name, None)
        if taken is not None and getattr(taken, name) is not None:
            figures[name] = getattr(taken, name)
    return figures


def _wall_time(at: float, now: ClockReading) -> float:
    return round(now.wall - (now.steady - at), 3)
