"""Prometheus metrics of a run: those that its history gives; those of single records are in `heartbeat_record`.

Labels are the run name, the rank and fixed words; text from a config or a record (paths, URLs, error messages) may
contain a secret and never becomes a label.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

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


class MetricSample(NamedTuple):
    name: str
    labels: Mapping[str, str]
    value: float


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

HELP: Mapping[str, str] = {
    **{gauge.name: gauge.help for gauge in GAUGES.values()},
    "nsa_skipped_steps_total": "Steps whose optimizer did not run, the non-finite ones included.",
    "nsa_nonfinite_steps_total": "Steps with a loss or gradient norm that is not finite.",
    "nsa_run_state": "1 for the current state of a rank.",
    "nsa_step": "Last step recorded by a rank.",
    "nsa_heartbeat_timestamp_seconds": "Time of the last record of a rank.",
    "nsa_step_timestamp_seconds": "Time of the first record with the last step of a rank.",
    "nsa_process_up": "1 if the process of a rank runs; only for ranks on this host.",
    "nsa_nonfinite_losses_total": "Records of steps with a non-finite loss that were not skipped.",
    "nsa_nonfinite_grad_norms_total": "Records of steps with a non-finite gradient norm that were not skipped.",
    "nsa_gate_share_ratio": "Mean share of a branch in the gates of a layer.",
    "nsa_gate_share_mean_ratio": "Mean share of a branch in the gates of all layers.",
    "nsa_kernel_info": "The backend that computes a branch.",
    "nsa_data_substituted": "1 while a rank trains on synthetic data although a dataset is configured.",
    "nsa_run_info": "Versions, device, precision, dataset and number of ranks of the run.",
    "nsa_restarts_total": "Starts that resumed from a checkpoint or were made by the launcher.",
    "nsa_rollbacks_total": "Rollbacks to a checkpoint by the run itself.",
    "nsa_lost_steps_total": "Steps that had to be repeated after a restart or rollback.",
    "nsa_last_checkpoint_step": "Step of the last checkpoint, or the step the run began from.",
    "nsa_last_checkpoint_timestamp_seconds": "Time at which the last checkpoint was complete.",
    "nsa_checkpoint_interval_steps": "train.save_every; not exported if it is 0.",
    "nsa_eval_loss_nats": "Held-out loss per token of the last evaluation.",
    "nsa_eval_accuracy_ratio": "Share of held-out tokens that were the most likely token in the last evaluation.",
    "nsa_heartbeat_limit_seconds": "Heartbeat age at which a rank counts as stalled at its current step.",
    "nsa_missing_ranks": "Ranks without a heartbeat since the run was started.",
    "nsa_start_timestamp_seconds": "Time of the last start or restart of the run.",
    "nsa_findings": "Findings per health condition: affected ranks, or 1 for the run.",
    "nsa_rank_findings": "1 for each health condition that holds for a rank.",
    "nsa_steps_target": "train.steps.",
    "nsa_unreadable_records": "Records of the run folder that could not be fully read.",
}
"""Name and description of every metric that rules and dashboards may use; counters end with `_total`."""


def samples(history: RunHistory, now: ClockReading, local: set[int], limits: HealthLimits) -> Iterator[MetricSample]:
    """All samples of one run; ranks in `local` have their processes on this host."""
    for rank, log in sorted(history.present.items()):
        for name, labels, value in _of_rank(history, log, now, rank in local, limits):
            yield MetricSample(name, {"rank": str(rank), **labels}, value)
    yield from _of_run(history, now)
    ended = all(_state_of(log) in _ENDED_REGULARLY for log in history.present.values())
    findings = [] if ended else examine(history, now=now.steady, limits=limits)
    counts = Counter(finding.name for finding in findings)
    for name, condition in CONDITIONS.items():
        yield MetricSample("nsa_findings", {"condition": name, "severity": condition.level.value}, counts[name])
    for finding in findings:
        if finding.rank is not None:
            labels = {"condition": finding.name, "severity": finding.level.value, "rank": str(finding.rank)}
            yield MetricSample("nsa_rank_findings", labels, 1.0)


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
    return MetricSample("nsa_run_info", {name: _label(word) for name, word in words.items()}, 1.0)


def _label(word: Any) -> str:
    """Text of a file as a label: short and printable."""
    return printable(word, _LONGEST_LABEL) if isinstance(word, (str, int)) else ""


def _of_run(history: RunHistory, now: ClockReading) -> Iterator[MetricSample]:
    yield MetricSample("nsa_restarts_total", {}, history.event_counts[EventKind.RESTART])
    yield MetricSample("nsa_rollbacks_total", {}, history.event_counts[EventKind.ROLLBACK])
    yield MetricSample("nsa_lost_steps_total", {}, history.lost_steps)
    yield MetricSample("nsa_last_checkpoint_step", {}, history.saved_step)
    yield MetricSample("nsa_unreadable_records", {}, history.unreadable.total())
    yield MetricSample(
        "nsa_missing_ranks", {}, sum(rank not in history.present for rank in range(history.facts.world or 1))
    )
    known = {
        "nsa_start_timestamp_seconds": None if history.started_at is None else _wall_time(history.started_at, now),
        "nsa_last_checkpoint_timestamp_seconds": history.saved_ts,
        "nsa_eval_loss_nats": history.eval_loss,
        "nsa_eval_accuracy_ratio": history.eval_accuracy,
        "nsa_checkpoint_interval_steps": history.facts.save_every or None,
        "nsa_steps_target": history.facts.steps,
    }
    yield from (MetricSample(name, {}, value) for name, value in known.items() if value is not None)


def _of_rank(
    history: RunHistory, log: RankLog, now: ClockReading, local: bool, limits: HealthLimits
) -> Iterator[MetricSample]:
    rank, state = log.rank, _state_of(log)
    yield from (MetricSample("nsa_run_state", {"state": each}, float(each == state)) for each in STATES)
    yield MetricSample("nsa_step", {}, log.last.step)
    yield MetricSample("nsa_heartbeat_timestamp_seconds", {}, _wall_time(log.last_at, now))
    yield MetricSample("nsa_step_timestamp_seconds", {}, _wall_time(log.step_at, now))
    yield MetricSample("nsa_skipped_steps_total", {}, history.skipped[rank])
    yield MetricSample("nsa_nonfinite_steps_total", {}, history.nonfinite[rank])
    yield MetricSample("nsa_nonfinite_losses_total", {}, history.bad_losses[rank])
    yield MetricSample("nsa_nonfinite_grad_norms_total", {}, history.bad_norms[rank])
    if not log.ended:
        yield MetricSample("nsa_heartbeat_limit_seconds", {}, stall_limit_s(log, history, limits))
        if local:
            yield MetricSample("nsa_process_up", {}, float(rank not in history.gone))
    if state not in _ENDED_REGULARLY:
        yield MetricSample("nsa_data_substituted", {}, float(history.facts.is_substituted(log.last)))
        yield from _figures(_latest(log))


def _state_of(log: RankLog) -> str:
    if log.ended:
        return _STATE_OF_ENDING[log.last.msg]
    return "running" if log.progress else "starting"


def _figures(figures: Mapping[str, Any]) -> Iterator[MetricSample]:
    for name, gauge in GAUGES.items():
        if name in figures:
            yield MetricSample(gauge.name, gauge.labels, figures[name] * gauge.scale)
    for branch, share in zip(GATE_BRANCHES, figures.get("gate_branch_shares", ()), strict=False):
        yield MetricSample("nsa_gate_share_mean_ratio", {"branch": branch}, share)
    for layer, shares in enumerate(figures.get("gate_shares_by_layer", ())):
        for branch, share in zip(GATE_BRANCHES, shares, strict=False):
            yield MetricSample("nsa_gate_share_ratio", {"branch": branch, "layer": str(layer)}, share)
    for name in figures:
        if name.startswith("kernel_"):
            yield MetricSample(
                "nsa_kernel_info", {"branch": name.removeprefix("kernel_"), "backend": _label(figures[name])}, 1.0
            )


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
