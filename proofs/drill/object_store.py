"""Object store of drills: the part of S3's protocol that copies of checkpoints use, with switchable errors.

Objects are kept as size and hash only, since nothing reads them back.
"""

import hashlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from proofs.drill.request_signature import is_signed_with

BUCKET = "chaos"


def store_environment(url: str, secret: str = "drill") -> dict[str, str]:
    """Variables of processes that use the store at this address."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "drill",
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_DEFAULT_REGION": "us-east-1",
    }


class ObjectStore:
    """Serves one bucket. While `failing`, every request is answered with status 503; with a `secret`, one that was
    signed with another with status 403."""

    def __init__(self, host: str = "127.0.0.1", secret: str | None = None) -> None:
        self.objects: dict[str, tuple[int, str]] = {}
        """Key → size and SHA-256."""
        self.failing, self.secret = False, secret
        self._lock = threading.Lock()
        outer = self

        class StoreHandler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer._list(self)

            def do_HEAD(self) -> None:
                outer._head(self)

            def do_PUT(self) -> None:
                outer._put(self)

            def do_DELETE(self) -> None:
                outer._delete(self)

            def log_message(self, *args: object) -> None: ...

        class StoreServer(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: object, client_address: object) -> None:
                """Ignore clients that disconnected."""

        self._server = StoreServer((host, 0), StoreHandler)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def url(self) -> str:
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _put(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length", "0")))
        if self._refuses(request):
            return
        key = _key(request)
        with self._lock:
            taken = request.headers.get("If-None-Match") == "*" and key in self.objects
            if not taken:
                self.objects[key] = len(body), hashlib.sha256(body).hexdigest()
        if taken:
            _answer(request, 412, "<Error><Code>PreconditionFailed</Code></Error>")
        else:
            _answer(request, 200, etag=key)

    def _head(self, request: BaseHTTPRequestHandler) -> None:
        if self._refuses(request):
            return
        content = self.objects.get(_key(request))
        if content is None:
            _answer(request, 404)
        else:
            _answer(request, 200, etag=content[1])

    def _delete(self, request: BaseHTTPRequestHandler) -> None:
        if self._refuses(request):
            return
        with self._lock:
            self.objects.pop(_key(request), None)
        _answer(request, 204)

    def _list(self, request: BaseHTTPRequestHandler) -> None:
        if self._refuses(request):
            return
        prefix = parse_qs(urlsplit(request.path).query).get("prefix", [""])[0]
        with self._lock:
            entries = sorted((key, size) for key, (size, _) in self.objects.items() if key.startswith(prefix))
        items = "".join(f"<Contents><Key>{escape(key)}</Key><Size>{size}</Size></Contents>" for key, size in entries)
        _answer(request, 200, f"<ListBucketResult><IsTruncated>false</IsTruncated>{items}</ListBucketResult>")

    def _refuses(self, request: BaseHTTPRequestHandler) -> bool:
        """Whether the request was answered with an error."""
        if self.failing:
            _answer(request, 503, "<Error><Code>SlowDown</Code><Message>planted</Message></Error>")
            return True
        secret, headers = self.secret, dict(request.headers.items())
        if secret is None or is_signed_with(secret, request.command, request.path, headers):
            return False
        _answer(request, 403, "<Error><Code>SignatureDoesNotMatch</Code><Message>planted</Message></Error>")
        return True


def _key(request: BaseHTTPRequestHandler) -> str:
    return unquote(urlsplit(request.path).path).removeprefix(f"/{BUCKET}/")


def _answer(request: BaseHTTPRequestHandler, status: int, body: str = "", etag: str = "") -> None:
    content = body.encode()
    request.send_response(status)
    request.send_header("Content-Length", str(len(content)))
    request.send_header("Content-Type", "application/xml")
    if etag:
        request.send_header("ETag", f'"{hashlib.md5(etag.encode(), usedforsecurity=False).hexdigest()}"')
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(content)
