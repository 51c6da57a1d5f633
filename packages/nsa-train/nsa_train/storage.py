"""Storage for files: a local folder, or a prefix in an object store (S3, or any scheme of fsspec).

`s3://bucket/prefix?endpoint=http://host:port&region=r` names an S3 service other than AWS. Credentials come from the
AWS variables or files that the S3 clients read by themselves, never from an address, because addresses are written
into manifests and logs.

Data shards use `StorageFolder`: it streams through `pyarrow.fs`, which retries inside a file (s3fs cannot be installed
beside the training engine in a usable version). Checkpoints are copied through boto3 (`nsa_train.checkpoint.transfer`):
a commit needs its conditional put, which pyarrow lacks. Both have the same addresses, timeouts and number of attempts.
"""

import errno
import os
import shutil
import stat
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import SplitResult, parse_qsl, urlsplit

from nsa.errors import ConfigError, DataError
from nsa.files import replace_file, write_atomic

_CONNECT_TIMEOUT_S = 10
_REQUEST_TIMEOUT_S = 60
_CHECK_TIMEOUT_S = 5
_ATTEMPTS = 5
_COPY_CHUNK_BYTES = 8 * 2**20
_S3_OPTIONS = ("endpoint", "region")


@dataclass(frozen=True)
class StorageAddress:
    """A parsed address; `path` is a local path, or what follows the bucket."""

    scheme: str
    bucket: str
    path: str
    endpoint: str | None = None
    region: str | None = None

    @classmethod
    def parse(cls, url: str) -> "StorageAddress":
        parts = _split(url)
        if parts.scheme in ("", "file"):
            return cls("", "", parts.path if parts.scheme else url)
        if parts.scheme != "s3":
            return cls(parts.scheme, parts.netloc, parts.path)
        options = dict(parse_qsl(parts.query))
        if unknown := sorted(set(options) - set(_S3_OPTIONS)):
            raise ConfigError(
                f"{url} has unknown options {unknown}: an S3 address takes {list(_S3_OPTIONS)}. Remove them."
            )
        endpoint = options.get("endpoint")
        if endpoint and _split(endpoint).scheme not in ("http", "https"):
            raise ConfigError(f"S3 endpoint {endpoint!r} has no scheme. Write http://host:port or https://host.")
        return cls("s3", parts.netloc, parts.path, endpoint, options.get("region"))


def _split(url: str) -> SplitResult:
    try:
        address = urlsplit(url)
    except ValueError as error:
        raise ConfigError(f"{url} is no address ({error}). Write s3://BUCKET/PATH, or the path of a folder.") from error
    if address.username or address.password:
        raise ConfigError(
            f"the address of {address.hostname} carries a user or password: addresses are written to manifests and "
            "logs. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the store's own login, instead."
        )
    return address


class StorageFolder:
    """A local folder or a prefix in an object store, for data. Names are relative, with `/`.

    A written file appears complete under its name or not at all, where the store can do so; an object store may show a
    cut-off upload of a killed writer, which is why readers compare sizes and hashes.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._fs, self._root, self.is_local = _open_filesystem(self.url)

    def __repr__(self) -> str:
        return f"StorageFolder({self.url!r})"

    def __reduce__(self) -> tuple[type["StorageFolder"], tuple[str]]:
        return StorageFolder, (self.url,)

    def local_path(self, name: str) -> Path:
        assert self.is_local, f"{self.url} is not a local folder"
        return Path(self._root) / name

    def files(self, suffixes: Iterable[str], below: str = "") -> list[tuple[str, int]]:
        """(name, bytes) of every file in the folder, or in `below` inside it, with one of these endings, sorted."""
        from pyarrow import fs as arrow_fs

        endings = tuple(suffixes)
        start = f"{self._root}/{below}" if below else self._root
        selector = arrow_fs.FileSelector(start, recursive=True, allow_not_found=bool(below))
        with self._explained("the files cannot be listed"):
            infos = self._fs.get_file_info(selector)
        files = [
            (info.path[len(self._root) :].lstrip("/"), int(info.size))
            for info in infos
            if info.type == arrow_fs.FileType.File and info.path.endswith(endings)
        ]
        return sorted(files)

    def exists(self, name: str) -> bool:
        from pyarrow import fs as arrow_fs

        with self._explained(f"{name} cannot be looked up"):
            info = self._fs.get_file_info([self._path(name)])[0]
        return bool(info.type == arrow_fs.FileType.File)

    def open_input(self, name: str) -> BinaryIO:
        with self._explained(f"{name} cannot be opened"):
            self._require_regular(name)
            stream: BinaryIO = self._fs.open_input_stream(self._path(name), compression=None)
        return stream

    def open_random(self, name: str) -> Any:
        """A file with `size()` and `read_at(length, offset)`."""
        with self._explained(f"{name} cannot be opened"):
            self._require_regular(name)
            return self._fs.open_input_file(self._path(name))

    def read_bytes(self, name: str, *, limit: int | None = None) -> bytes:
        """A whole file; raises DataError for one of more than `limit` bytes."""
        with self.open_input(name) as stream, self._explained(f"{name} cannot be read"):
            raw = stream.read() if limit is None else stream.read(limit + 1)
        if limit is not None and len(raw) > limit:
            raise DataError(f"{self.url}/{name} has more than the {limit} bytes that such a file may have.")
        return raw

    def copy_to(self, name: str, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        with self.open_input(name) as source, target.open("wb") as copy, self._explained(f"{name} cannot be copied"):
            shutil.copyfileobj(source, copy, _COPY_CHUNK_BYTES)

    def write_bytes(self, name: str, content: bytes) -> None:
        with self._explained(f"{name} cannot be written"):
            if self.is_local:
                target = self.local_path(name)
                target.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(target, content, durable=True, many_writers=True)
                return
            with self._fs.open_output_stream(self._path(name)) as stream:
                stream.write(content)

    def put_file(self, source: Path, name: str) -> None:
        """Move a finished local file here under `name`; `source` is gone afterwards."""
        with self._explained(f"{name} cannot be written"):
            if self.is_local:
                target = self.local_path(name)
                target.parent.mkdir(parents=True, exist_ok=True)
                replace_file(source, target, durable=True)
                return
            with source.open("rb") as content, self._fs.open_output_stream(self._path(name)) as stream:
                shutil.copyfileobj(content, stream, _COPY_CHUNK_BYTES)
            source.unlink()

    def delete_tree(self, below: str) -> None:
        """Remove a folder inside this one, if it is there."""
        try:
            self._fs.delete_dir(self._path(below))
        except FileNotFoundError:
            return

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Raise what a disk or a store refuses as DataError, with the place and what to check."""
        try:
            yield
        except OSError as error:
            raise DataError(
                f"{what} in {self.url} ({error}). Check that it exists, the credentials, the space, and the network."
            ) from error

    def _require_regular(self, name: str) -> None:
        """pyarrow would wait for the writer of a pipe, and read a device without end."""
        if self.is_local and not stat.S_ISREG(self.local_path(name).stat().st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(self.local_path(name)))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


def _open_filesystem(url: str) -> tuple[Any, str, bool]:
    """A pyarrow filesystem, the root inside it, and whether it is local."""
    from pyarrow import fs as arrow_fs

    address = StorageAddress.parse(url)
    if not address.scheme:
        return arrow_fs.LocalFileSystem(), str(Path(address.path).expanduser().absolute()), True
    if address.scheme == "s3":
        return _arrow_s3(address), f"{address.bucket}{address.path}", False
    import fsspec

    try:
        filesystem, root_path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"{url} cannot be opened ({error}). Use a folder, s3:// or install the named package."
        ) from error
    return arrow_fs.PyFileSystem(arrow_fs.FSSpecHandler(filesystem)), root_path, False


def _arrow_s3(address: StorageAddress) -> Any:
    from pyarrow import fs as arrow_fs

    arguments: dict[str, Any] = {}
    if address.endpoint:
        at = urlsplit(address.endpoint)
        arguments |= {"scheme": at.scheme, "endpoint_override": at.netloc}
        _plain_s3_checksums()  # our own SHA-256 does what they would
    if address.region:
        arguments["region"] = address.region
    return arrow_fs.S3FileSystem(
        connect_timeout=_CONNECT_TIMEOUT_S,
        request_timeout=_REQUEST_TIMEOUT_S,
        retry_strategy=arrow_fs.AwsStandardS3RetryStrategy(max_attempts=_ATTEMPTS),
        **arguments,
    )


def boto3_client(address: StorageAddress, *, patient: bool) -> Any:
    """Path-style addressing works with stores at a plain address, too; AWS_ENDPOINT_URL is read by boto3 itself.

    patient: whether failed requests are repeated, with long timeouts; otherwise one attempt of some seconds.
    """
    from botocore.config import Config  # type: ignore[import-untyped]
    from botocore.session import Session  # type: ignore[import-untyped]

    if address.endpoint:
        _plain_s3_checksums()
    credentials = Session().get_credentials()  # as files and variables are now
    variables = tuple(sorted((name, value) for name, value in os.environ.items() if name.startswith("AWS_")))
    with _session_lock:  # sessions are not made for threads, clients are
        return _boto3_session(credentials and credentials.get_frozen_credentials(), variables).client(
            "s3",
            endpoint_url=address.endpoint,
            region_name=address.region,
            config=Config(
                connect_timeout=_CONNECT_TIMEOUT_S if patient else _CHECK_TIMEOUT_S,
                read_timeout=_REQUEST_TIMEOUT_S if patient else _CHECK_TIMEOUT_S,
                retries={"max_attempts": _ATTEMPTS if patient else 0, "mode": "standard"},
                s3={"addressing_style": "path"},
            ),
        )


_session_lock = threading.Lock()


@lru_cache(maxsize=1)
def _boto3_session(credentials: Any, variables: tuple[tuple[str, str], ...]) -> Any:
    """A session per set of credentials, because it keeps the first it reads.

    It has 12 MB of descriptions of the service. One per checkpoint would fill the host's memory, because Python's
    garbage collector runs only every 1,000 steps of a run.
    """
    from boto3.session import Session  # type: ignore[import-untyped]

    return Session()


def _plain_s3_checksums() -> None:
    """Turn off trailing checksums, which some S3 services (Ceph 16) refuse with 411; a user's own choice wins."""
    os.environ.setdefault("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
