"""Resolves `data.path` (folder, glob pattern, URLs, hub dataset id) to a document source."""

import glob
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from nsa.data.document import DocumentColumns, DocumentSource
from nsa.data.source.file import HttpFile, LocalFile
from nsa.data.source.http import HttpClient
from nsa.data.source.hub import HUB_ID, list_hub
from nsa.data.source.jsonl import SUFFIXES as JSONL_SUFFIXES
from nsa.data.source.jsonl import JsonlSource
from nsa.data.source.parquet import ParquetSource
from nsa.data.source.retry_policy import RetryPolicy
from nsa.errors import ConfigError

_HTTP = ("http://", "https://")
_SUFFIXES = (".parquet", *JSONL_SUFFIXES)


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

    A folder is searched for parquet and JSONL(.gz/.zst), a pattern may use `**`, URLs are parquet files, and
    `owner/name[:config][@revision]` is a dataset on the hub, unless a local folder has that name. `cache_dir` keeps the
    listing of a hub dataset between starts.
    """
    specs = [spec] if isinstance(spec, str) else list(spec)
    if not specs:
        raise ConfigError("no data source is given. Set a folder, a glob pattern, URLs or a dataset id.")
    retry_policy = retry_policy or RetryPolicy()
    remote = [one for one in specs if one.startswith(_HTTP)]
    is_hub_id = len(specs) == 1 and not remote and HUB_ID.fullmatch(specs[0]) and not Path(specs[0]).exists()
    if remote or is_hub_id:
        client = HttpClient(retry_policy, headers=headers, proxy_url=proxy_url)
        if is_hub_id:
            files = list_hub(specs[0], client, retry_policy, endpoint=hub_endpoint)
        elif len(remote) == len(specs):
            # The name is the path alone: another port or mirror of the same files has the same fingerprint.
            files = [HttpFile(urlsplit(url).path, url, client) for url in sorted(specs)]
        else:
            raise ConfigError(f"{specs} mixes URLs and local paths. Use one kind.")
        _refuse_duplicates([file.name for file in files])
        kept = cache_dir if is_hub_id else None
        return ParquetSource(files, retry_policy, client=client, columns=columns, cache_dir=kept)
    local = sorted((file for one in specs for file in _local(one)), key=lambda file: file.name)
    _refuse_duplicates([file.name for file in local])
    kinds = {file.name.endswith(".parquet") for file in local}
    if kinds == {True, False}:
        raise ConfigError(
            f"{specs} holds both parquet and JSONL files: the same documents may be in both. Select one kind with a "
            "glob pattern."
        )
    if kinds == {True}:
        return ParquetSource(local, retry_policy, columns=columns)
    return JsonlSource(local, columns=columns)


def _local(spec: str) -> list[LocalFile]:
    path = Path(spec)
    if path.is_dir():
        root, found = path, [p for p in sorted(path.rglob("*")) if p.is_file() and p.name.endswith(_SUFFIXES)]
    elif path.is_file():
        root, found = path.parent, [path]
    else:
        root, found = _without_wildcards(path), sorted(Path(p) for p in glob.glob(spec, recursive=True))
    unreadable = [str(p) for p in found if not p.name.endswith(_SUFFIXES)]
    if not found or unreadable:
        what = f"matches {unreadable[:3]}" if unreadable else "matches no file"
        raise ConfigError(
            f"data source {spec!r} {what}: files must end in {', '.join(_SUFFIXES)}. Check the path; a hub "
            "dataset id is written as owner/name."
        )
    return [LocalFile(p.relative_to(root).as_posix(), p) for p in found]


def _without_wildcards(pattern: Path) -> Path:
    parts: list[str] = []
    for part in pattern.parts:
        if glob.has_magic(part):
            break
        parts.append(part)
    return Path(*parts)


def _refuse_duplicates(names: list[str]) -> None:
    if twice := sorted(name for name, count in Counter(names).items() if count > 1):
        raise ConfigError(
            f"{twice[0]!r} occurs twice in the data source: its documents would be trained on twice. Remove one."
        )
