"""Prometheus exporter: serves metrics of run folders over HTTP, from its own process.

Files are read at each scrape. A folder that is temporarily unreadable keeps its last values, so that the age of its
heartbeat grows and triggers the alert.
"""

import errno
import ipaddress
import json
import socket
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from nsa import names
from nsa.errors import ConfigError
from nsa.files import write_atomic
from nsa.observe.export.run_metrics import CountedHistory, MetricSample, run_info, samples
from nsa.observe.watch.history import HistoryReader
from nsa.terminal_text import printable

Family = GaugeMetricFamily | CounterMetricFamily


class RunsCollector(Collector):
    """Run folders, and folders that contain run folders; new runs are found at each scrape."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = [folder.resolve() for folder in folders]
        self._readers: dict[Path, HistoryReader] = {}
        self._lock = threading.Lock()  # the server handles requests in threads

    def collect(self) -> Iterator[Family]:
        with self._lock:
            self._find()
            found = [(run, sample) for path, run in run_names(self._readers).items() for sample in self._read(path)]
        yield from _families(found)

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()

    def _find(self) -> None:
        for folder in self._folders:
            for path in (folder, *sorted(folder.glob("*/"))):
                if path not in self._readers and any(path.glob(names.HEARTBEATS)):
                    self._readers[path] = HistoryReader(path)
                    self._readers[path].history = CountedHistory()

    def _read(self, path: Path) -> list[MetricSample]:
        reader = self._readers[path]
        with suppress(OSError):
            reader.update()
        assert isinstance(reader.history, CountedHistory)
        info: list[MetricSample] = []
        with suppress(OSError):
            info = list(run_info(path))
        return [*samples(reader.history, reader.now, {log.rank for log in reader.local()}), *info]


def run_names(paths: Iterable[Path]) -> dict[Path, str]:
    """Folder name of each run, with the parent folder where names repeat."""
    paths = list(paths)
    count = Counter(path.name for path in paths)
    named = {path: path.name if count[path.name] == 1 else f"{path.parent.name}/{path.name}" for path in paths}
    return {path: printable(name) for path, name in named.items()}


class MetricsExporter:
    def __init__(self, folders: Sequence[Path], *, host: str, port: int, file_sd: Path | None = None) -> None:
        self._collector = RunsCollector(folders)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self._collector)
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        except OSError as error:  # invalid host, address of another machine, port in use
            raise ConfigError(
                f"cannot listen on {host}:{port} ({error.strerror}): Prometheus could not scrape it. Choose another "
                f"{'--port' if error.errno == errno.EADDRINUSE else '--host'}."
            ) from None
        self.address = _address(host, self._server)
        self._file_sd = file_sd
        if file_sd is not None:
            _register(file_sd, self.address)

    def close(self) -> None:
        if self._file_sd is not None:
            self._file_sd.unlink(missing_ok=True)
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self._collector.close()


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _address(host: str, server: WSGIServer) -> str:
    """Address under which clients reach the server."""
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"[{host}]:{server.server_port}" if ":" in host else f"{host}:{server.server_port}"


def _register(path: Path, address: str) -> None:
    """Target file for Prometheus' file_sd_configs, which is reloaded when it changes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps([{"targets": [address]}]) + "\n")


def _families(found: Iterable[tuple[str, MetricSample]]) -> Iterator[Family]:
    """Groups samples by metric, as the exposition format requires."""
    families: dict[tuple[str, tuple[str, ...]], Family] = {}
    for run, (metric, labels, value) in found:
        label_names = ("run", *labels)
        family = families.get((metric.name, label_names))
        if family is None:
            make = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = families[metric.name, label_names] = make(metric.name, metric.help, labels=label_names)
        family.add_metric([run, *labels.values()], value)
    yield from families.values()
