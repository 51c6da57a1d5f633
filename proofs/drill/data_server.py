"""Data of the drill's runs: deterministic synthetic text as JSONL or parquet, and an HTTP server with faults."""

import json
import random
import socket
import struct
import threading
from enum import StrEnum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

NAME = "/drill.parquet"
_SENTENCE = "attention reads a block of keys and the window slides on while gates decide what each branch may add"


def documents(count: int) -> list[str]:
    """Some 400 bytes each."""
    chance, words = random.Random(3), _SENTENCE.split()
    return [" ".join(chance.choices(words, k=80)) for _ in range(count)]


def write_jsonl(path: Path, count: int) -> None:
    lines = [json.dumps({"id": str(number), "text": text}) for number, text in enumerate(documents(count))]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_parquet(path: Path, count: int) -> None:
    """Four documents per row group, so that one fetch is enough for a few steps only."""
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"text": documents(count), "id": [str(number) for number in range(count)]})
    pyarrow.parquet.write_table(table, path, row_group_size=4, write_page_checksum=True)


class ServerFault(StrEnum):
    """Answers of a server that fails."""

    INTERNAL_ERROR = "500"
    TOO_MANY_REQUESTS = "429"
    RESET = "reset"
    """The connection is reset without an answer."""
    TRUNCATED = "truncated"
    """The connection is closed after half of the body."""


class DataServer:
    """Serves one parquet file by byte ranges; while it hangs, it accepts requests and does not answer."""

    def __init__(self, folder: Path, host: str = "127.0.0.1", count: int = 400) -> None:
        file = folder / NAME[1:]
        write_parquet(file, count)
        self._content = file.read_bytes()
        self.fault: ServerFault | None = None
        self._answering = threading.Event()
        self._answering.set()
        self._closed = False
        outer = self

        class HangingHandler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer._answering.wait()
                if outer._closed:
                    self.close_connection = True
                else:
                    outer._answer(self)

            def log_message(self, *args: object) -> None: ...

        class HangingServer(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: object, client_address: object) -> None:
                """Ignore clients that disconnected while they waited."""

        self._server = HangingServer((host, 0), HangingHandler)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def url(self) -> str:
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}{NAME}"

    def hang(self) -> None:
        self._answering.clear()

    def recover(self) -> None:
        self._answering.set()

    def close(self) -> None:
        self._closed = True
        self._answering.set()
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        size, requested = len(self._content), request.headers.get("Range", "bytes=0-")
        first_word, _, last_word = requested.removeprefix("bytes=").partition("-")
        first = int(first_word) if first_word else max(0, size - int(last_word))
        last = min(int(last_word), size - 1) if first_word and last_word else size - 1
        body = self._content[first : last + 1]
        if self.fault in (ServerFault.INTERNAL_ERROR, ServerFault.TOO_MANY_REQUESTS):
            request.send_response(int(self.fault))
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        if self.fault is ServerFault.RESET:
            reset(request)
            return
        request.send_response(206)
        request.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        request.send_header("Content-Length", str(len(body)))
        request.send_header("ETag", '"drill"')
        request.end_headers()
        request.close_connection = self.fault is ServerFault.TRUNCATED
        request.wfile.write(body[: len(body) // 2] if request.close_connection else body)


def reset(request: BaseHTTPRequestHandler) -> None:
    """Close the connection with a TCP reset."""
    request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    request.connection.close()
    request.close_connection = True
