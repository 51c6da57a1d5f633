"""A place that holds files: a local folder, or a prefix in an object store, behind one small interface.

S3 goes through `pyarrow.fs.S3FileSystem`: s3fs cannot be installed beside the training engine in a usable version.
Credentials come from the AWS variables or files that the S3 client reads by itself, never from an address, because
addresses are written into manifests and logs. `s3://bucket/prefix?endpoint=http://host:port&region=r` names another
S3 service. Every other scheme (`gs://`, `hf://`, `https://`) is opened by fsspec.
"""

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import parse_qsl, urlsplit

from pyarrow import fs as arrow_fs

from nsa.errors import ConfigError, DataError
from nsa.files import replace_file, write_atomic

_CONNECT_TIMEOUT_S = 10
_REQUEST_TIMEOUT_S = 60
_COPY_CHUNK_BYTES = 8 * 2**20
_S3_OPTIONS = ("endpoint", "region")


class StorageFolder:
    """Names are relative, with `/`. A written file appears whole under its name or not at all, if the store can do so;
    an object store may show a cut-off upload of a killed writer, which is why readers compare sizes and hashes."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._fs, self._root, self.is_local = _open(self.url)

    def __repr__(self) -> str:
        return f"Folder({self.url!r})"

    def __reduce__(self) -> tuple[type["StorageFolder"], tuple[str]]:
        return StorageFolder, (self.url,)

    def local_path(self, name: str) -> Path:
        assert self.is_local, f"{self.url} is not a local folder"
        return Path(self._root) / name

    def files(self, suffixes: Iterable[str], below: str = "") -> list[tuple[str, int]]:
        """(name, bytes) of every file in the folder, or in `below` inside it, with one of these endings, sorted."""
        endings = tuple(suffixes)
        start = f"{self._root}/{below}" if below else self._root
        selector = arrow_fs.FileSelector(start, recursive=True, allow_not_found=bool(below))
        with self._explained("the files cannot be listed"):
            infos = self._fs.get_file_info(selector)
        found = [
            (info.path[len(self._root) :].lstrip("/"), int(info.size))
            for info in infos
            if info.type == arrow_fs.FileType.File and info.path.endswith(endings)
        ]
        return sorted(found)

    def exists(self, name: str) -> bool:
        with self._explained(f"{name} cannot be looked up"):
            info = self._fs.get_file_info([self._path(name)])[0]
        return bool(info.type == arrow_fs.FileType.File)

    def open_input(self, name: str) -> BinaryIO:
        with self._explained(f"{name} cannot be opened"):
            stream: BinaryIO = self._fs.open_input_stream(self._path(name), compression=None)
        return stream

    def open_random(self, name: str) -> Any:
        """A file with `size()` and `read_at(length, offset)`."""
        with self._explained(f"{name} cannot be opened"):
            return self._fs.open_input_file(self._path(name))

    def read_bytes(self, name: str) -> bytes:
        with self.open_input(name) as stream, self._explained(f"{name} cannot be read"):
            return stream.read()

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
        """What a disk or a store refuses, as an error with the place and a way on."""
        try:
            yield
        except OSError as error:
            raise DataError(
                f"{what} in {self.url} ({error}). Check that it exists, the credentials, the space, and the network."
            ) from error

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


def _open(url: str) -> tuple[Any, str, bool]:
    parts = urlsplit(url)
    if parts.username or parts.password:
        raise ConfigError(
            f"the address of {parts.hostname} carries a user or password: addresses are written to manifests and logs. "
            "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the store's own login, instead."
        )
    if parts.scheme in ("", "file"):
        root = Path(parts.path if parts.scheme else url).expanduser()
        return arrow_fs.LocalFileSystem(), str(root.absolute()), True
    if parts.scheme == "s3":
        return _open_s3(url), f"{parts.netloc}{parts.path}", False
    import fsspec

    try:
        filesystem, root_path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"{url} cannot be opened ({error}). Use a folder, s3:// or install the named package."
        ) from error
    return arrow_fs.PyFileSystem(arrow_fs.FSSpecHandler(filesystem)), root_path, False


def _open_s3(url: str) -> Any:
    options = dict(parse_qsl(urlsplit(url).query))
    if unknown := sorted(set(options) - set(_S3_OPTIONS)):
        raise ConfigError(f"{url} has unknown options {unknown}: an S3 address takes {list(_S3_OPTIONS)}. Remove them.")
    arguments: dict[str, Any] = {}
    if endpoint := options.get("endpoint"):
        at = urlsplit(endpoint)
        if at.scheme not in ("http", "https"):
            raise ConfigError(f"S3 endpoint {endpoint!r} has no scheme. Write http://host:port or https://host.")
        arguments |= {"scheme": at.scheme, "endpoint_override": at.netloc}
        plain_s3_checksums()  # our own SHA-256 does what they would
    if region := options.get("region"):
        arguments["region"] = region
    return arrow_fs.S3FileSystem(
        connect_timeout=_CONNECT_TIMEOUT_S,
        request_timeout=_REQUEST_TIMEOUT_S,
        retry_strategy=arrow_fs.AwsStandardS3RetryStrategy(max_attempts=5),
        **arguments,
    )


def plain_s3_checksums() -> None:
    """Some S3 services (Ceph 16) refuse the client's trailing checksums with status 411; a user's own choice wins."""
    os.environ.setdefault("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
