"""Prometheus exporter: serves metrics of run folders over HTTP, from its own process.

Files are read at a scrape, and scrapes within a second share one reading. A folder that is temporarily unreadable keeps
its last values, so that the age of its heartbeat grows and triggers the alert. Metrics of single records are defined in
`heartbeat_record`, those of a run's history here. Labels are the run name, the rank and fixed words; text from a config
or a record (paths, URLs, error messages) may contain a secret and never becomes a label.
"""

import errno
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from prometheus_client import CollectorRegistry, make_wsgi_app, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from nsa.errors import ConfigError
from nsa.files import write_atomic
from nsa_train import names
from nsa_train.listen_address import in_url
from nsa_train.record.events import EventKind
from nsa_train.record.heartbeat_record import GATE_BRANCHES, METRICS, PrometheusGauge
from nsa_train.record.value_checks import section
from nsa_train.terminal_text import printable
from nsa_train.watch.conditions import CONDITIONS, HealthLimits
from nsa_train.watch.health import examine, stall_limit_s
from nsa_train.watch.history import RankLog, RunHistory
from nsa_train.watch.run_reader import ClockReading, RunReader

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

_LONGEST_LABEL = 80


class _MetricSample(NamedTuple):
    name: str
    labels: Mapping[str, str]
    value: float


GAUGES: Mapping[str, PrometheusGauge] = {
    name: field.gauge._replace(help=field.gauge.help or field.about)
    for name, field in METRICS.items()
    if field.gauge is not None
}
"""Gauge of each metric of a progress record that is exported as it is (times `scale`)."""

_STATES = ("starting", "running", "halted", "stopped", "done", "failed")
_STATE_OF_ENDING = {names.HALTED: "halted", names.STOPPED: "stopped", names.DONE: "done", names.FAILED: "failed"}
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


def samples(history: RunHistory, now: ClockReading, local: set[int], limits: HealthLimits) -> Iterator[_MetricSample]:
    """All samples of one run; ranks in `local` have their processes on this host."""
    for rank, log in sorted(history.present.items()):
        for name, labels, value in _of_rank(history, log, now, rank in local, limits):
            yield _MetricSample(name, {"rank": str(rank), **labels}, value)
    yield from _of_run(history, now)
    ended = all(_state_of(log) in _ENDED_REGULARLY for log in history.present.values())
    findings = [] if ended else examine(history, now=now.steady, limits=limits)
    counts = Counter(finding.name for finding in findings)
    for name, condition in CONDITIONS.items():
        yield _MetricSample("nsa_findings", {"condition": name, "severity": condition.level.value}, counts[name])
    for finding in findings:
        if finding.rank is not None:
            labels = {"condition": finding.name, "severity": finding.level.value, "rank": str(finding.rank)}
            yield _MetricSample("nsa_rank_findings", labels, 1.0)


def _run_info(env: Mapping[str, Any]) -> _MetricSample:
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
    return _MetricSample("nsa_run_info", {name: _label(word) for name, word in words.items()}, 1.0)


def _label(word: Any) -> str:
    """Text of a file as a label: short and printable."""
    return printable(word, _LONGEST_LABEL) if isinstance(word, (str, int)) else ""


def _of_run(history: RunHistory, now: ClockReading) -> Iterator[_MetricSample]:
    known = {
        "nsa_restarts_total": history.event_counts[EventKind.RESTART],
        "nsa_rollbacks_total": history.event_counts[EventKind.ROLLBACK],
        "nsa_lost_steps_total": history.lost_steps,
        "nsa_last_checkpoint_step": history.saved_step,
        "nsa_unreadable_records": history.unreadable.total(),
        "nsa_missing_ranks": sum(rank not in history.present for rank in range(history.facts.world or 1)),
        "nsa_start_timestamp_seconds": None if history.started_at is None else _wall_time(history.started_at, now),
        "nsa_last_checkpoint_timestamp_seconds": history.saved_ts,
        "nsa_eval_loss_nats": history.eval_loss,
        "nsa_eval_accuracy_ratio": history.eval_accuracy,
        "nsa_checkpoint_interval_steps": history.facts.save_every or None,
        "nsa_steps_target": history.facts.steps,
    }
    yield from (_MetricSample(name, {}, value) for name, value in known.items() if value is not None)


def _of_rank(
    history: RunHistory, log: RankLog, now: ClockReading, local: bool, limits: HealthLimits
) -> Iterator[_MetricSample]:
    rank, state = log.rank, _state_of(log)
    yield from (_MetricSample("nsa_run_state", {"state": each}, float(each == state)) for each in _STATES)
    yield _MetricSample("nsa_step", {}, log.last.step)
    yield _MetricSample("nsa_heartbeat_timestamp_seconds", {}, _wall_time(log.last_at, now))
    yield _MetricSample("nsa_step_timestamp_seconds", {}, _wall_time(log.step_at, now))
    yield _MetricSample("nsa_skipped_steps_total", {}, history.skipped[rank])
    yield _MetricSample("nsa_nonfinite_steps_total", {}, history.nonfinite[rank])
    yield _MetricSample("nsa_nonfinite_losses_total", {}, history.bad_losses[rank])
    yield _MetricSample("nsa_nonfinite_grad_norms_total", {}, history.bad_norms[rank])
    if not log.ended:
        yield _MetricSample("nsa_heartbeat_limit_seconds", {}, stall_limit_s(log, history, limits))
        if local:
            yield _MetricSample("nsa_process_up", {}, float(rank not in history.gone))
    if state not in _ENDED_REGULARLY:
        yield _MetricSample("nsa_data_substituted", {}, float(history.facts.is_substituted(log.last)))
        yield from _figures(_latest(log))


def _state_of(log: RankLog) -> str:
    if log.ended:
        return _STATE_OF_ENDING[log.last.msg]
    return "running" if log.progress else "starting"


def _figures(figures: Mapping[str, Any]) -> Iterator[_MetricSample]:
    for name, gauge in GAUGES.items():
        if name in figures:
            yield _MetricSample(gauge.name, gauge.labels, figures[name] * gauge.scale)
    for branch, share in zip(GATE_BRANCHES, figures.get("gate_branch_shares", ()), strict=False):
        yield _MetricSample("nsa_gate_share_mean_ratio", {"branch": branch}, share)
    for layer, shares in enumerate(figures.get("gate_shares_by_layer", ())):
        for branch, share in zip(GATE_BRANCHES, shares, strict=False):
            yield _MetricSample("nsa_gate_share_ratio", {"branch": branch, "layer": str(layer)}, share)
    for name in figures:
        if name.startswith("kernel_"):
            yield _MetricSample(
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


_Family = GaugeMetricFamily | CounterMetricFamily
SHARED_S = 1.0
"""Scrapes within this time after a reading get the same text: the cost of many scrapers is that of one per second."""
_WAITING_SCRAPES = 128
"""Connections that may wait to be accepted."""


class RunsCollector(Collector):
    """Run folders, and folders that contain run folders; new runs are found at each scrape."""

    def __init__(self, folders: Sequence[Path], limits: HealthLimits | None = None) -> None:
        self._limits = limits or HealthLimits()
        self._folders = [folder.resolve() for folder in folders]
        self._readers: dict[Path, RunReader] = {}
        self._lock = threading.Lock()  # the server handles requests in threads

    def collect(self) -> Iterator[_Family]:
        with self._lock:
            for folder in self._folders:
                for path in (folder, *sorted(folder.glob("*/"))):
                    if path not in self._readers and any(path.glob(names.HEARTBEATS)):
                        self._readers[path] = RunReader(path)
            scraped = [(run, sample) for path, run in _run_names(self._readers).items() for sample in self._read(path)]
        yield from _families(scraped)

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()

    def _read(self, path: Path) -> list[_MetricSample]:
        reader = self._readers[path]
        with suppress(OSError):
            reader.update()
        local = {log.rank for log in reader.local()}
        info = [_run_info(reader.env)] if reader.env else []
        return [*samples(reader.history, reader.now, local, self._limits), *info]


def _run_names(paths: Iterable[Path]) -> dict[Path, str]:
    """Folder name of each run, with the parent folder where names repeat."""
    paths = list(paths)
    count = Counter(path.name for path in paths)
    named = {path: path.name if count[path.name] == 1 else f"{path.parent.name}/{path.name}" for path in paths}
    return {path: printable(name) for path, name in named.items()}


class _SharedScrapes:
    """WSGI application that gives concurrent and quickly repeated requests the answer to the first of them."""

    def __init__(self, app: "WSGIApplication", clock: Callable[[], float] = time.monotonic) -> None:
        self._app, self._clock = app, clock
        self._lock = threading.Lock()
        self._answers: dict[tuple[str, ...], tuple[float, tuple[Any, ...], list[bytes]]] = {}

    def __call__(self, environ: "WSGIEnvironment", start_response: "StartResponse") -> list[bytes]:
        varying = ("REQUEST_METHOD", "PATH_INFO", "QUERY_STRING", "HTTP_ACCEPT", "HTTP_ACCEPT_ENCODING")
        variant = tuple(str(environ.get(name, "")) for name in varying)
        with self._lock:
            answers = {key: answer for key, answer in self._answers.items() if self._clock() - answer[0] < SHARED_S}
            if variant not in answers:
                started: list[tuple[Any, ...]] = []
                body = list(self._app(environ, lambda *head: started.append(head)))  # type: ignore[arg-type]
                answers[variant] = self._clock(), started[0], body
            self._answers = answers
            _, head, body = answers[variant]
        start_response(*head)
        return body


class MetricsExporter:
    def __init__(
        self,
        folders: Sequence[Path],
        *,
        host: str,
        port: int,
        file_sd: Path | None = None,
        limits: HealthLimits | None = None,
    ) -> None:
        self._collector = RunsCollector(folders, limits)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self._collector)
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except (OSError, UnicodeError) as error:  # invalid host, address of another machine, port in use
            in_use = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
            raise ConfigError(
                f"cannot listen on {host}:{port} ({getattr(error, 'strerror', error)}): Prometheus could not scrape "
                f"it. Choose another {'--port' if in_use else '--host'}."
            ) from None
        self._server.set_app(_SharedScrapes(make_wsgi_app(registry)))
        self._server.socket.listen(_WAITING_SCRAPES)
        reached_as = socket.gethostname() if host in ("0.0.0.0", "::") else host
        self.address = f"{in_url(reached_as)}:{self._server.server_port}"
        """Address under which clients reach the server."""
        self._file_sd = file_sd
        if file_sd is not None:  # a target file for Prometheus' file_sd_configs, which is reloaded when it changes
            file_sd.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(file_sd, json.dumps([{"targets": [self.address]}]) + "\n")

    def close(self) -> None:
        if self._file_sd is not None:
            self._file_sd.unlink(missing_ok=True)
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self._collector.close()


def _families(scraped: Iterable[tuple[str, _MetricSample]]) -> Iterator[_Family]:
    """Groups samples by metric, as the exposition format requires."""
    families: dict[tuple[str, tuple[str, ...]], _Family] = {}
    for run, (name, labels, value) in scraped:
        label_names = ("run", *labels)
        family = families.get((name, label_names))
        if family is None:
            make = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            family = families[name, label_names] = make(name, HELP[name], labels=label_names)
        family.add_metric([run, *labels.values()], value)
    yield from families.values()
