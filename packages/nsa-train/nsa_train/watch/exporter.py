"""Prometheus exporter: serves metrics of run folders over HTTP, from its own process.

Files are read at a scrape, and scrapes within a second share one reading. A folder that is temporarily unreadable keeps
its last values, so that the age of its heartbeat grows and triggers the alert.
"""

import errno
import ipaddress
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from nsa.errors import ConfigError
from nsa.files import write_atomic
from nsa_train import names
from nsa_train.terminal_text import printable
from nsa_train.watch.conditions import HealthLimits
from nsa_train.watch.run_metrics import HELP, MetricSample, run_info, samples
from nsa_train.watch.run_reader import RunReader

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

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
            self._find()
            scraped = [(run, sample) for path, run in run_names(self._readers).items() for sample in self._read(path)]
        yield from _families(scraped)

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()

    def _find(self) -> None:
        for folder in self._folders:
            for path in (folder, *sorted(folder.glob("*/"))):
                if path not in self._readers and any(path.glob(names.HEARTBEATS)):
                    self._readers[path] = RunReader(path)

    def _read(self, path: Path) -> list[MetricSample]:
        reader = self._readers[path]
        with suppress(OSError):
            reader.update()
        local = {log.rank for log in reader.local()}
        info = [run_info(reader.env)] if reader.env else []
        return [*samples(reader.history, reader.now, local, self._limits), *info]


def run_names(paths: Iterable[Path]) -> dict[Path, str]:
    """Folder name of each run, with the parent folder where names repeat."""
    paths = list(paths)
    count = Counter(path.name for path in paths)
    named = {path: path.name if count[path.name] == 1 else f"{path.parent.name}/{path.name}" for path in paths}
    return {path: printable(name) for path, name in named.items()}


class SharedScrapes:
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
        self._server.set_app(SharedScrapes(make_wsgi_app(registry)))
        self._server.socket.listen(_WAITING_SCRAPES)
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


def _families(scraped: Iterable[tuple[str, MetricSample]]) -> Iterator[_Family]:
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
