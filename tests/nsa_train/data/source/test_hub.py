"""A server that does not stop answering ends a listing with an error that names the limit."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from nsa.errors import DataError, DataTimeout
from nsa_train.data.source.http import HttpClient, ReadDeadline, RetryPolicy
from nsa_train.data.source.hub import ListingLimits, list_hub
from nsa_train.data.source.resolve import open_source
from tests.nsa_train.data.faulty_server import FaultyServer

API, TREE = "/api/datasets/owner/set", "/api/datasets/owner/set/tree/c0ffee?recursive=true"
POLICY = RetryPolicy(connect_timeout_s=0.5, read_timeout_s=0.5, attempts=3, backoff_s=0.01, deadline_s=3.0)


def hub(**files: object) -> dict[str, object]:
    entries = [{"type": "file", "path": f"data/{i}.parquet"} for i in range(10)]
    return {f"{API}/revision/main": {"sha": "c0ffee"}, TREE: entries, **files}


def listed(server: FaultyServer, **limits: Any) -> list[Any]:
    client = HttpClient(POLICY)
    return list_hub("owner/set", client, POLICY, endpoint=server.url(""), limits=ListingLimits(**limits))


@pytest.mark.timeout(60)  # without a limit it would never end
@pytest.mark.parametrize(
    ("limits", "named"),
    [
        ({"pages": 7}, "pages"),
        ({"entries": 55}, "entries"),
        ({"total_bytes": 2000}, "bytes"),
        ({"seconds": 0.3}, "seconds"),
    ],
)
def test_pages_without_end_are_not_followed(limits: dict[str, Any], named: str) -> None:
    with FaultyServer(hub(), page_links={TREE: TREE}) as server:
        with pytest.raises(DataError, match=named) as caught:
            listed(server, **limits)
        assert "owner/set" in str(caught.value)
        assert server.requests < 1000


def test_a_next_page_on_another_server_is_not_asked_for() -> None:
    with FaultyServer({"/steal": []}) as other, FaultyServer(hub()) as server:
        server.page_links[TREE] = other.url("/steal")
        with pytest.raises(DataError):
            listed(server)
        assert other.requests == 0


@pytest.mark.parametrize("what", ["announced", "without a length"])
def test_an_answer_is_read_up_to_its_limit_only(what: str) -> None:
    with endless(announced=what == "announced") as (url, sent):
        client = HttpClient(POLICY)
        with pytest.raises(DataError, match="100000"):
            client.listing(url, ReadDeadline(POLICY), 100_000)
        assert sent() < 20_000_000


@pytest.mark.parametrize("online", [True, False])
def test_a_wrong_local_path_that_reads_like_a_dataset_id_is_said_to_be_missing(online: bool) -> None:
    with FaultyServer({}) as server:
        endpoint = server.url("")
        if online:
            with pytest.raises(DataError, match="no file or folder 'my/texts' here") as caught:
                open_source("my/texts", retry_policy=POLICY, hub_endpoint=endpoint)
            assert "404" in str(caught.value)
            assert not isinstance(caught.value, DataTimeout)
    if not online:
        with pytest.raises(DataTimeout, match="no file or folder 'my/texts' here"):
            open_source("my/texts", retry_policy=POLICY, hub_endpoint=endpoint)


def test_redirects_end() -> None:
    with FaultyServer({f"{API}/revision/main": f"{API}/revision/main"}) as server:
        with pytest.raises(DataError):
            listed(server)
        assert server.requests <= 6


@pytest.mark.timeout(60)  # without a deadline it would never end
def test_headers_that_come_byte_by_byte_end_with_the_deadline() -> None:
    with endless(headers=True) as (url, _), pytest.raises(DataTimeout):
        HttpClient(POLICY).listing(url, ReadDeadline(POLICY), 1000)


@pytest.mark.parametrize(
    "tree", [{"error": "x"}, [1, 2], ["data/a.parquet"], [{"type": "file"}], b"[" * 100_000, b"\xff", b"<html>"]
)
def test_a_listing_that_is_none_is_refused(tree: object) -> None:
    with FaultyServer(hub(**{TREE: tree})) as server, pytest.raises(DataError):
        listed(server)


@pytest.mark.parametrize(
    "card",
    ["a: [", "configs: 3", "configs: [x, 3]", "configs: [{config_name: default, data_files: 7}]", "- x", "[" * 400],
)
def test_a_card_with_any_header_gives_files_or_a_refusal(card: str) -> None:
    readme = {"type": "file", "path": "README.md"}
    files = hub(**{TREE: [readme, {"type": "file", "path": "data/0.parquet"}]})
    files["/datasets/owner/set/resolve/c0ffee/README.md"] = f"---\n{card}\n---\n".encode()
    with FaultyServer(files) as server, contextlib.suppress(DataError):
        assert len(listed(server)) == 1


def test_a_footer_of_a_gigabyte_is_not_fetched() -> None:
    claimed = 2**30
    with endless_file(claimed + 2**20, (claimed - 8).to_bytes(4, "little") + b"PAR1") as (url, ranges):
        with pytest.raises(DataError, match=str(claimed)):
            open_source(url, retry_policy=POLICY)
        assert len(ranges) == 1


@contextmanager
def endless(*, announced: bool = False, headers: bool = False) -> Iterator[tuple[str, Any]]:
    """A server whose one answer does not end: its body, or its headers."""
    listener = socket.create_server(("127.0.0.1", 0))
    sent, stopping = [0], threading.Event()

    def answer(connection: socket.socket) -> None:
        with connection:
            try:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 OK\r\n")
                while headers and not stopping.wait(0.05):
                    connection.sendall(b"X")
                connection.sendall(b"Content-Length: 1000000000000\r\n\r\n" if announced else b"\r\n")
                while not stopping.is_set():
                    sent[0] += connection.send(b"x" * 65536)
            except OSError:
                pass

    def serve() -> None:
        while not stopping.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/", lambda: sent[0]
    finally:
        stopping.set()
        listener.close()


@contextmanager
def endless_file(size: int, end: bytes) -> Iterator[tuple[str, list[str]]]:
    """A file of `size` bytes of which only the last are ever made."""
    listener = socket.create_server(("127.0.0.1", 0))
    ranges: list[str] = []

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                request = connection.recv(65536).decode()
                asked = next(line for line in request.splitlines() if line.lower().startswith("range:"))
                ranges.append(asked)
                length = int(asked.rsplit("-", 1)[1])
                body = b"\0" * (length - len(end)) + end
                span = f"bytes {size - length}-{size - 1}/{size}"
                head = f"HTTP/1.1 206 P\r\nContent-Length: {length}\r\nContent-Range: {span}\r\nConnection: close"
                connection.sendall(f"{head}\r\n\r\n".encode() + body)

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/a.parquet", ranges
    finally:
        listener.close()
