"""Resolves `data.path` (folder, glob pattern, URLs, hub dataset id) to a document source."""

import hashlib
import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from nsa.errors import ConfigError
from nsa_train.data.document import Document, DocumentColumns, DocumentSource, SourceUnit
from nsa_train.data.source.file import HttpFile
from nsa_train.data.source.http import HttpClient, ServerUnreachable
from nsa_train.data.source.hub import HUB_ID, list_hub
from nsa_train.data.source.jsonl import JsonlSource
from nsa_train.data.source.kinds import WHOLE_FILE_KINDS
from nsa_train.data.source.local_files import LocalListing, list_local
from nsa_train.data.source.parquet import ParquetSource
from nsa_train.data.source.read_report import ReadReport
from nsa_train.data.source.retry_policy import RetryPolicy
from nsa_train.data.source.text import TextFileSource
from nsa_train.data.source.text_encoding import DEFAULT_FALLBACK

_HTTP = ("http://", "https://")
_log = logging.getLogger(__name__)


def open_source(
    spec: str | Sequence[str],
    *,
    retry_policy: RetryPolicy | None = None,
    columns: DocumentColumns | None = None,
    hub_endpoint: str | None = None,
    headers: dict[str, str] | None = None,
    proxy_url: str | None = None,
    cache_dir: Path | None = None,
) -> DocumentSource:
    """List and open the files of `spec` in the order that defines the units.

    A folder is searched for every kind of `kinds.py` and all of them are used; a pattern may use `**` and selects one.
    A text, Markdown or HTML file is one document. URLs are parquet files, and
    `owner/name[:config][@revision]` is a dataset on the hub, unless a local folder has that name. `cache_dir` keeps the
    listing of a hub dataset between starts.
    """
    specs = [spec] if isinstance(spec, str) else list(spec)
    if not specs:
        raise ConfigError("no data source is given. Set a folder, a glob pattern, URLs or a dataset id.")
    retry_policy = retry_policy or RetryPolicy()
    remote = [one for one in specs if one.startswith(_HTTP)]
    is_hub_id = len(specs) == 1 and not remote and _is_hub_id(specs[0])
    if remote or is_hub_id:
        client = HttpClient(retry_policy, headers=headers, proxy_url=proxy_url)
        if is_hub_id:
            files = _list_hub(specs[0], client, retry_policy, hub_endpoint)
        elif len(remote) == len(specs):
            # The name is the path alone: another port or mirror of the same files has the same fingerprint.
            files = [HttpFile(urlsplit(url).path, url, client) for url in sorted(specs)]
        else:
            raise ConfigError(f"{specs} mixes URLs and local paths. Use one kind.")
        _refuse_duplicates([file.name for file in files])
        listing_cache = cache_dir if is_hub_id else None
        return ParquetSource(files, retry_policy, client=client, columns=columns, cache_dir=listing_cache)
    listings = [list_local(one) for one in specs]
    for one, listing in zip(specs, listings, strict=True):
        _log_left_out(one, listing)
    local = sorted((file for listing in listings for file in listing.files), key=lambda file: file.name)
    parts = open_local(LocalListing(local, ReadReport()), retry_policy=retry_policy, columns=columns)
    return combine(parts)


def _list_hub(spec: str, client: HttpClient, retry_policy: RetryPolicy, endpoint: str | None) -> list[HttpFile]:
    """The files of a dataset on the hub. If there is none, the error also says that it is no local path."""
    try:
        return list_hub(spec, client, retry_policy, endpoint=endpoint)
    except ServerUnreachable as error:
        raise type(error)(
            f"there is no file or folder {spec!r} here, and as a dataset id the hub does not list it ({error}). Check "
            f"the path, or the id and the network."
        ) from error


def is_local(spec: str) -> bool:
    """Whether a source is a folder, file or pattern on this machine, and no URL and no hub dataset id."""
    return not (spec.startswith(_HTTP) or _is_hub_id(spec))


def _is_hub_id(spec: str) -> bool:
    return HUB_ID.fullmatch(spec) is not None and not Path(spec).exists()


def combine(parts: Sequence[DocumentSource]) -> DocumentSource:
    """One source of several kinds; a single one is returned as it is, with its own fingerprint."""
    return parts[0] if len(parts) == 1 else _CombinedSource(parts)


def open_local(
    listing: LocalListing,
    *,
    retry_policy: RetryPolicy | None = None,
    columns: DocumentColumns | None = None,
    fallback_encoding: str = DEFAULT_FALLBACK,
) -> list[ParquetSource | JsonlSource | TextFileSource]:
    """A source for each kind of file that is there: parquet, JSONL, then text, Markdown and HTML together."""
    _refuse_duplicates([file.name for file in listing.files])
    parts: list[ParquetSource | JsonlSource | TextFileSource] = []
    if files := listing.of_kind("parquet"):
        parts.append(ParquetSource(files, retry_policy or RetryPolicy(), columns=columns))
    if files := listing.of_kind("jsonl"):
        parts.append(JsonlSource(files, columns=columns))
    if files := listing.of_kind(*WHOLE_FILE_KINDS):
        parts.append(TextFileSource(files, columns=columns, fallback_encoding=fallback_encoding))
    return parts


def _log_left_out(spec: str, listing: LocalListing) -> None:
    for reason, entry in listing.left_out.skipped.items():
        _log.info("%s: %d left out, %s (e.g. %r)", spec, entry.count, reason, entry.first[0])


def _refuse_duplicates(names: list[str]) -> None:
    if twice := sorted(name for name, count in Counter(names).items() if count > 1):
        raise ConfigError(
            f"{twice[0]!r} occurs twice in the data source: its documents would be trained on twice. Remove one."
        )


class _CombinedSource:
    """Several sources as one, for folders with files of several kinds: their units one after another."""

    def __init__(self, parts: Sequence[DocumentSource]) -> None:
        self._parts = list(parts)
        self._first_unit = np.concatenate([[0], np.cumsum([len(part) for part in self._parts])]).astype(int)
        self.fingerprint = hashlib.sha256("\n".join(part.fingerprint for part in self._parts).encode()).hexdigest()

    @property
    def retries(self) -> int:
        return sum(part.retries for part in self._parts)

    @property
    def bytes_read(self) -> int:
        return sum(part.bytes_read for part in self._parts)

    def __len__(self) -> int:
        return int(self._first_unit[-1])

    def unit(self, index: int) -> SourceUnit:
        part, inside = self._locate(index)
        unit = part.unit(inside)
        return SourceUnit(index, unit.file, unit.part)

    def read(self, index: int) -> list[Document]:
        part, inside = self._locate(index)
        return part.read(inside)

    def _locate(self, index: int) -> tuple[DocumentSource, int]:
        part = int(np.searchsorted(self._first_unit, index, side="right")) - 1
        return self._parts[part], index - int(self._first_unit[part])
