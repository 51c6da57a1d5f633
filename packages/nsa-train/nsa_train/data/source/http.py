"""HTTP client for byte ranges: retries with exponential back-off, timeouts, a total deadline, resumed bodies.

Used instead of fsspec because its limits are strict: status 500 is retried and not reported as a missing file, a server
that hangs costs one read timeout, an interrupted body continues where it stopped, and every response is checked against
the request. The limits are those of `RetryPolicy`.
"""

import random
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from threading import Thread
from typing import Any, TypeVar

from nsa.errors import ConfigError, DataError, DataTimeout

MAX_PARALLEL = 8
_CHUNK = 256 * 1024
_MAX_REDIRECTS = 5
_RETRIED_STATUS = frozenset({408, 425, 429})
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})", re.ASCII)
_T = TypeVar("_T")
_NUMBER = re.compile(r"\d{1,18}", re.ASCII)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Limits of one read (a unit, or one entry of a listing)."""

    connect_timeout_s: float = 5.0
    read_timeout_s: float = 10.0
    attempts: int = 8
    """Consecutive attempts without a new byte before giving up."""
    backoff_s: float = 0.2
    backoff_max_s: float = 5.0
    deadline_s: float = 90.0
    """Limit of the whole read, so that a server that sends one byte per second is given up too."""

    def __post_init__(self) -> None:
        if self.deadline_s <= 2 * self.read_timeout_s:
            raise ConfigError(
                f"deadline_s is {self.deadline_s:g} but read_timeout_s is {self.read_timeout_s:g}: the deadline must "
                f"leave time for a second attempt. Set read_timeout_s below {self.deadline_s / 2:g}."
            )
        if self.attempts < 1:
            raise ConfigError(f"attempts is {self.attempts}: at least one is needed. Set it to 1 or more.")

    @classmethod
    def below(cls, loader_timeout_s: float) -> "RetryPolicy":
        """Limits below the loader's timeout, so that a failing read reports its reason before the loader times out."""
        deadline_s = 0.75 * loader_timeout_s
        return cls(
            connect_timeout_s=min(5.0, deadline_s / 8), read_timeout_s=min(10.0, deadline_s / 4), deadline_s=deadline_s
        )

    def pause_s(self, attempt: int) -> float:
        """Exponential back-off with jitter, so that thousands of ranks do not retry at the same instant."""
        return min(self.backoff_max_s, self.backoff_s * 2**attempt) * (0.5 + 0.5 * random.random())


class ReadDeadline:
    """Total deadline of one read. No wait starts later than one read timeout before it, so none can exceed it."""

    def __init__(self, retry_policy: RetryPolicy) -> None:
        self._started = time.monotonic()
        self._last_start = self._started + retry_policy.deadline_s - retry_policy.read_timeout_s

    def left_s(self) -> float:
        return self._last_start - time.monotonic()

    def passed_s(self) -> float:
        return time.monotonic() - self._started


class ServerUnreachable(DataError):
    """The server refused the request, or did not answer within the limits of the retry policy."""


class _ServerTimeout(ServerUnreachable, DataTimeout):
    """The server did not answer within the limits of the retry policy (as opposed to refusing)."""


class _RetryableError(Exception):
    """Failure of one attempt; another may succeed. `after_s` is the server's Retry-After."""

    def __init__(self, why: str, after_s: float = 0.0) -> None:
        super().__init__(why)
        self.after_s = after_s


class HttpClient:
    def __init__(self, retry_policy: RetryPolicy) -> None:
        self._retry_policy = retry_policy

    @cached_property
    def _connections(self) -> Any:
        import urllib3

        return urllib3.PoolManager(maxsize=MAX_PARALLEL)

    def range(self, url: str, start: int, length: int, deadline: ReadDeadline, *, etag: str = "") -> bytes:
        """`length` bytes from `start`, in as many requests as needed."""
        received = bytearray()

        def attempt() -> None:
            first, last = start + len(received), start + length - 1
            with self._opened(url, deadline, {"Range": f"bytes={first}-{last}"}) as response:
                _check_range(response, url, first, last, etag)
                self._receive(response, received, length, deadline)

        if length:
            self._retry(attempt, f"{url} bytes {start}-{start + length - 1}", deadline, progress=lambda: len(received))
        return bytes(received)

    def tail(self, url: str, length: int, deadline: ReadDeadline) -> tuple[bytes, int, str]:
        """The last `length` bytes (or the whole of a shorter file), the file's size and its ETag, in one request."""

        def attempt() -> tuple[bytes, int, str]:
            received = bytearray()
            with self._opened(url, deadline, {"Range": f"bytes=-{length}"}) as response:
                first, last, size = _content_range(response, url)
                if last != size - 1 or first != max(0, size - length):
                    raise _RetryableError(f"requested the last {length} bytes, got bytes {first}-{last} of {size}")
                self._receive(response, received, last - first + 1, deadline)
                return bytes(received), size, response.headers.get("ETag", "")

        return self._retry(attempt, f"{url} (last bytes)", deadline)

    def listing(self, url: str, deadline: ReadDeadline, max_bytes: int) -> tuple[bytes, str]:
        """A response of at most `max_bytes` and its `Link` header, which holds the next page of a listing."""

        def attempt() -> tuple[bytes, str]:
            received = bytearray()
            with self._opened(url, deadline, {}) as response:
                declared = response.headers.get("Content-Length", "")
                length = int(declared) if _NUMBER.fullmatch(declared) else None
                if length is None or length <= max_bytes:
                    self._receive(response, received, length, deadline, max_bytes)
                if (seen := max(length or 0, len(received))) > max_bytes:
                    raise ServerUnreachable(
                        f"{url}: the response has {seen} bytes or more, the limit for a listing is {max_bytes}. Check "
                        "the URL, or download the files and set the path to their folder"
                    )
                return bytes(received), response.headers.get("Link", "")

        return self._retry(attempt, url, deadline)

    def _retry(
        self, attempt: Callable[[], _T], what: str, deadline: ReadDeadline, progress: Callable[[], int] = lambda: 0
    ) -> _T:
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
            time.sleep(pause_s)

    @contextmanager
    def _opened(self, url: str, deadline: ReadDeadline, headers: dict[str, str]) -> Iterator[Any]:
        """The answer to a request. Its connection is used again only if all of it was read."""
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
            lambda: self._connections.request(
                "GET",
                url,
                headers={"Accept-Encoding": "identity", "User-Agent": "nsa-train", **headers},
                timeout=timeout,
                retries=redirects_only,
                preload_content=False,
            ),
        )
        try:
            if response.status in _REDIRECTS and response.headers.get("Location"):
                raise ServerUnreachable(
                    f"{url}: the server redirects more than {_MAX_REDIRECTS} times. Check the URL; it may need a login"
                )
            if response.status in _RETRIED_STATUS or response.status >= 500:
                after = response.headers.get("Retry-After", "").strip()
                raise _RetryableError(f"status {response.status}", float(after) if _NUMBER.fullmatch(after) else 0.0)
            if response.status >= 400:
                raise ServerUnreachable(
                    f"{url}: the server refuses with status {response.status}, which is not retried"
                )
            yield response
        finally:
            if response.length_remaining == 0:
                response.release_conn()
            else:
                response.close()

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
