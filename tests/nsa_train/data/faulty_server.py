"""A real HTTP server on the loopback with byte ranges and faults that can be switched on.

Faults come from a seeded generator in the order of requests, so a failing test fails again.
"""

import json
import random
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


@dataclass
class Faults:
    """Fractions of requests that fail in some way, and how the rest is served."""

    error_500: float = 0.0
    cut_body: float = 0.0
    reset: float = 0.0
    wrong_range: float = 0.0
    """Fraction of requests answered with other bytes than requested."""
    flip_byte: float = 0.0
    hang_every: int = 0
    """Every n-th request hangs for `hang_s`."""
    hang_s: float = 60.0
    bytes_per_s: float = 0.0
    status: int = 0
    """Answer every request with this status."""
    ignore_range: bool = False


@dataclass
class FaultyServer:
    """`files` maps a path to bytes; a `dict` or `list` is served as JSON, a `str` as a redirect to another path."""

    files: dict[str, object]
    faults: Faults = field(default_factory=Faults)
    page_links: dict[str, str] = field(default_factory=dict)
    requests: int = 0
    flips: int = 0
    ranges: list[tuple[str, str]] = field(default_factory=list)

    def __enter__(self) -> "FaultyServer":
        self._rng = random.Random(7)
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 30

            def do_GET(self) -> None:
                outer._answer(self)

            def log_message(self, *args: object) -> None: ...

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: object, client_address: object) -> None: ...

        self._server = Server(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Gone for good: nothing listens on the port any more, and connections that are open are reset."""
        if not self._stopping.is_set():
            self._stopping.set()
            self._server.shutdown()
            self._server.server_close()

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        with self._lock:
            self.requests += 1
            number, faults = self.requests, self.faults
            dice = {name: self._rng.random() for name in ("500", "cut", "reset", "wrong", "flip", "where")}
            self.ranges.append((request.path, request.headers.get("Range", "")))
        if faults.hang_every and number % faults.hang_every == 0:
            self._stopping.wait(faults.hang_s)
            request.close_connection = True
            return
        if dice["reset"] < faults.reset or self._stopping.is_set():
            _reset(request)
            return
        if faults.status or dice["500"] < faults.error_500:
            _send(request, faults.status or 500, {}, b"fault")
            return
        self._serve(request, faults, dice)

    def _serve(self, request: BaseHTTPRequestHandler, faults: Faults, dice: dict[str, float]) -> None:
        path = unquote(urlsplit(request.path).path)
        content = self.files.get(request.path, self.files.get(path))
        if content is None:
            _send(request, 404, {}, b"missing")
            return
        if isinstance(content, str):
            _send(request, 302, {"Location": content}, b"")
            return
        if isinstance(content, (dict, list)):
            link = self.page_links.get(request.path, "")
            address = link if "://" in link else self.url(link)
            headers = {"Link": f'<{address}>; rel="next"'} if link else {}
            _send(request, 200, headers, json.dumps(content).encode())
            return
        assert isinstance(content, bytes)
        asked = request.headers.get("Range", "")
        if not asked or faults.ignore_range:
            _send(request, 200, {}, content)
            return
        first, last = _span(asked, len(content))
        if dice["wrong"] < faults.wrong_range and first:
            first, last = first - 1, last - 1
        body = bytearray(content[first : last + 1])
        if dice["flip"] < faults.flip_byte:
            body[int(dice["where"] * len(body))] ^= 0x20
            self.flips += 1
        headers = {"Content-Range": f"bytes {first}-{last}/{len(content)}", "ETag": f'"{hash(content)}"'}
        cut_at = int(dice["where"] * len(body)) if dice["cut"] < faults.cut_body else len(body)
        _send(request, 206, headers, bytes(body), cut_at=cut_at, bytes_per_s=faults.bytes_per_s)


def _span(asked: str, size: int) -> tuple[int, int]:
    first, last = asked.removeprefix("bytes=").split("-")
    if not first:
        return max(0, size - int(last)), size - 1
    return int(first), min(int(last), size - 1)


def _send(
    request: BaseHTTPRequestHandler,
    status: int,
    headers: dict[str, str],
    body: bytes,
    *,
    cut_at: int | None = None,
    bytes_per_s: float = 0.0,
) -> None:
    request.send_response(status)
    for name, value in {**headers, "Content-Length": str(len(body))}.items():
        request.send_header(name, value)
    request.end_headers()
    whole, body = len(body), body[:cut_at]
    piece = int(bytes_per_s * 0.05) or len(body) or 1
    for start in range(0, len(body), piece):
        request.wfile.write(body[start : start + piece])
        if bytes_per_s:
            time.sleep(0.05)
    if len(body) < whole:
        request.close_connection = True


def _reset(request: BaseHTTPRequestHandler) -> None:
    """A TCP reset instead of an orderly end."""
    request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    request.close_connection = True
    request.connection.close()
