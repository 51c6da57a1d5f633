"""HTTP client for byte ranges: retries with exponential back-off, timeouts, a total deadline, resumed bodies.

Used instead of fsspec because its limits are strict: status 500 is retried and not reported as a missing file, a server
that hangs costs one read timeout, an interrupted body continues where it stopped, and every response is checked against
the request. The limits are in `retry_policy.py`.
"""

import os
import re
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Thread
from typing import Any

from nsa.errors import DataError, DataTimeout
from nsa_train.data.source.retry_policy import ReadDeadline, RetryPolicy

MAX_PARALLEL = 8
_CHUNK = 256 * 1024
_MAX_REDIRECTS = 5
_RETRIED_STATUS = frozenset({408, 425, 429})
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})", re.ASCII)
_NUMBER = re.compile(r"\d{1,18}", re.ASCII)


class ServerUnreachable(DataError):
    """The server refused the request, or did not answer within the limits of the retry policy."""


class _ServerTimeout(ServerUnreachable, DataTimeout):
    """The server did not answer within the limits of the retry policy (as opposed to refusing)."""


class _RetryableError(Exception):
    """Failure of one attempt; another may succeed. `after_s` is the server's Retry-After."""

    def __init__(self, why: str, after_s: float = 0.0) -> None:
        super().__init__(why)
        self.after_s = after_s


@dataclass(frozen=True, slots=True)
class _ResponseBody:
    """Bytes, their offset in the file, and the size and ETag of the file."""

    data: bytes
    start: int
    file_size: int
    etag: str


class HttpClient:
    def __init__(
        self, retry_policy: RetryPolicy, *, headers: dict[str, str] | None = None, proxy_url: str | None = None
    ) -> None:
        self._retry_policy = retry_policy
        self._headers = {"Accept-Encoding": "identity", "User-Agent": "nsa-train", **(headers or {})}
        self._proxy_url = proxy_url
        self._pool: Any = None
        self._pool_owner = -1
        self.retries = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pool": None, "_pool_owner": -1}

    def range(self, url: str, start: int, length: int, deadline: ReadDeadline, *, etag: str = "") -> bytes:
        """`length` bytes from `start`, in as many requests as needed."""
        received = bytearray()

        def attempt() -> None:
            first, last = start + len(received), start + length - 1
            response = self._open(url, deadline, {"Range": f"bytes={first}-{last}"})
            try:
                _check_range(response, url, first, last, etag)
                self._receive(response, received, length, deadline)
            finally:
                _release(response, complete=len(received) == length)

        if length:
            self._retry(attempt, f"{url} bytes {start}-{start + length - 1}", deadline, progress=lambda: len(received))
        return bytes(received)

    def tail(self, url: str, length: int, deadline: ReadDeadline) -> _ResponseBody:
        """The last `length` bytes (or the whole of a shorter file) and the file's size, in one request."""

        def attempt() -> _ResponseBody:
            response = self._open(url, deadline, {"Range": f"bytes=-{length}"})
            received = bytearray()
            try:
                first, last, size = _content_range(response, url)
                if last != size - 1 or first != max(0, size - length):
                    raise _RetryableError(f"requested the last {length} bytes, got bytes {first}-{last} of {size}")
                self._receive(response, received, last - first + 1, deadline)
            finally:
                _release(response, complete=False)
            return _ResponseBody(bytes(received), first, size, response.headers.get("ETag", ""))

        body: _ResponseBody = self._retry(attempt, f"{url} (last bytes)", deadline)
        return body

    def listing(self, url: str, deadline: ReadDeadline, max_bytes: int) -> tuple[bytes, str]:
        """A response of at most `max_bytes` and its `Link` header, which holds the next page of a listing."""

        def attempt() -> tuple[bytes, str]:
            response = self._open(url, deadline, {})
            received = bytearray()
            try:
                declared = response.headers.get("Content-Length", "")
                length = int(declared) if _NUMBER.fullmatch(declared) else None
                if length is not None and length > max_bytes:
                    raise ServerUnreachable(_too_long(url, length, max_bytes))
                self._receive(response, received, length, deadline, max_bytes)
                if len(received) > max_bytes:
                    raise ServerUnreachable(_too_long(url, len(received), max_bytes))
            finally:
                _release(response, complete=False)
            return bytes(received), response.headers.get("Link", "")

        body: tuple[bytes, str] = self._retry(attempt, url, deadline)
        return body

    def _retry(self, attempt: Any, what: str, deadline: ReadDeadline, progress: Any = lambda: 0) -> Any:
        from urllib3.exceptions import HTTPError

        failures, before = 0, progress()
        while True:
            why, after_s = "", 0.0
            try:
                return attempt()
            except _RetryableError as error:
                why, after_s = str(error), error.after_s
            except (HTTPError, OSError) as error:
                why = f"{type(error).__name__}: {error}"
            now = progress()
            failures, before = (failures + 1, before) if now == before else (0, now)
            pause_s = max(self._retry_policy.pause_s(failures), min(after_s, self._retry_policy.backoff_max_s))
            if failures >= self._retry_policy.attempts or deadline.left_s() <= pause_s:
                raise _ServerTimeout(
                    f"{what} could not be read in {deadline.passed_s():.1f} s ({failures} attempts in a row without "
                    f"progress, limits: {self._retry_policy.attempts} attempts, {self._retry_policy.deadline_s:g} s; "
                    f"last: {why})"
                )
            self.retries += 1
            time.sleep(pause_s)

    def _open(self, url: str, deadline: ReadDeadline, headers: dict[str, str]) -> Any:
        from urllib3.util import Retry, Timeout

        left_s = deadline.left_s()
        if left_s <= 0:
            raise _RetryableError("the deadline has passed")
        timeout = Timeout(
            connect=min(self._retry_policy.connect_timeout_s, left_s),
            read=min(self._retry_policy.read_timeout_s, left_s),
        )
        # Redirects are followed again each time: a hub redirects to signed URLs that expire.
        redirects_only = Retry(
            total=None, redirect=_MAX_REDIRECTS, connect=0, read=0, status=0, other=0, raise_on_redirect=False
        )
        response = _with_timeout(
            left_s + self._retry_policy.read_timeout_s,
            lambda: self._connections().request(
                "GET",
                url,
                headers={**self._headers, **headers},
                timeout=timeout,
                retries=redirects_only,
                preload_content=False,
            ),
        )
        if response.status in _REDIRECTS and response.headers.get("Location"):
            _release(response, complete=False)
            raise ServerUnreachable(
                f"{url}: the server redirects more than {_MAX_REDIRECTS} times. Check the URL; it may need a login"
            )
        if response.status in _RETRIED_STATUS or response.status >= 500:
            _release(response, complete=False)
            raise _RetryableError(
                f"status {response.status}", after_s=_seconds(response.headers.get("Retry-After", ""))
            )
        if response.status >= 400:
            _release(response, complete=False)
            raise ServerUnreachable(f"{url}: the server refuses with status {response.status}, which is not retried")
        return response

    def _receive(
        self, response: Any, into: bytearray, total: int | None, deadline: ReadDeadline, max_bytes: int | None = None
    ) -> None:
        """Append the body to `into` until it holds `total` bytes; without a total, until it ends or is longer than
        `max_bytes`."""
        while total is None or len(into) < total:
            if deadline.left_s() <= 0:
                raise _RetryableError("the deadline passed while the body was being received")
            chunk = response.read1(_CHUNK if total is None else min(_CHUNK, total - len(into)))
            if not chunk and total is not None:
                raise _RetryableError(f"the body ended after {len(into)} of {total} bytes")
            if not chunk:
                return
            into += chunk
            if total is None and max_bytes is not None and len(into) > max_bytes:
                return

    def _connections(self) -> Any:
        # A forked worker must not use its parent's sockets.
        if self._pool_owner != os.getpid():
            import urllib3

            self._pool = (
                urllib3.ProxyManager(self._proxy_url, maxsize=MAX_PARALLEL)
                if self._proxy_url
                else urllib3.PoolManager(maxsize=MAX_PARALLEL)
            )
            self._pool_owner = os.getpid()
        return self._pool


def _with_timeout(seconds: float, request: Callable[[], Any]) -> Any:
    """Run `request` with a timeout until its headers have arrived. The socket timeout is not enough: it restarts with
    every received piece, and a server can send its headers byte by byte."""
    response: Future[Any] = Future()

    def work() -> None:
        try:
            response.set_result(request())
        except BaseException as error:  # noqa: BLE001  raised again in the calling thread
            response.set_exception(error)

    Thread(target=work, name="http-request", daemon=True).start()
    try:
        return response.result(seconds)
    except TimeoutError:
        if response.done():
            raise  # raised by the request itself
        response.add_done_callback(lambda late: None if late.exception() else late.result().close())
        raise _RetryableError(f"the response headers did not arrive within {seconds:.1f} s") from None


def _too_long(url: str, length: int, limit: int) -> str:
    return (
        f"{url}: the response has {length} bytes or more, the limit for a listing is {limit}. Check the URL, or "
        "download the files and set the path to their folder"
    )


def _release(response: Any, *, complete: bool) -> None:
    """Reuse the connection only if the response was read completely."""
    if complete:
        response.release_conn()
    else:
        response.close()


def _content_range(response: Any, url: str) -> tuple[int, int, int]:
    if response.status != 206:
        raise ServerUnreachable(
            f"{url}: requested a byte range and got status {response.status}: the server does not support ranges. "
            "Download the files and set the path to their folder."
        )
    if response.headers.get("Content-Encoding", "identity") != "identity":
        raise _RetryableError(f"unexpected Content-Encoding {response.headers['Content-Encoding']!r}")
    match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
    if match is None:
        raise _RetryableError(f"invalid Content-Range {response.headers.get('Content-Range')!r}")
    first, last, size = map(int, match.groups())
    return first, last, size


def _check_range(response: Any, url: str, first: int, last: int, etag: str) -> None:
    got = _content_range(response, url)
    if got[:2] != (first, last):
        raise _RetryableError(f"requested bytes {first}-{last}, got {got[0]}-{got[1]}")
    declared = response.headers.get("Content-Length", "")
    if declared and declared != str(last - first + 1):
        raise _RetryableError(f"requested {last - first + 1} bytes, Content-Length is {declared}")
    now = response.headers.get("ETag", "")
    if etag and now and now != etag:
        raise ServerUnreachable(
            f"{url} changed while it was being read (ETag was {etag}, is {now}). Start again with the new files."
        )


def _seconds(text: str) -> float:
    return float(text) if _NUMBER.fullmatch(text.strip()) else 0.0
