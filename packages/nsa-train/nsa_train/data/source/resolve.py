"""Resolves `data.path` (folder, glob pattern, URLs, hub dataset id) to a document source.

Lists local files in a fixed order, with what was left out and why; verifies units by the checksums of earlier reads.
"""

import difflib
import glob
import hashlib
import logging
import os
import stat
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from nsa.errors import CheckpointError, ConfigError
from nsa.files import file_lock, storage_errors
from nsa_train.data.document import CorruptUnit, Document, DocumentColumns, DocumentSource, SourceUnit, UnitOffsets
from nsa_train.data.source.file import SUFFIXES, WHOLE_FILE_KINDS, FileKind, HttpFile, LocalFile, file_kind
from nsa_train.data.source.http import HttpClient, RetryPolicy, ServerUnreachable
from nsa_train.data.source.hub import HUB_ID, list_hub
from nsa_train.data.source.jsonl import JsonlSource
from nsa_train.data.source.parquet import ParquetSource
from nsa_train.data.source.read_report import (
    EMPTY,
    EMPTY_RECORDS,
    FOLDER_LINK,
    HIDDEN,
    NOT_A_FILE,
    UNKNOWN_ENDING,
    UNREADABLE,
    ReadReport,
)
from nsa_train.data.source.text import DEFAULT_FALLBACK, TextFileSource, UnreadableText
from nsa_train.shipped import text_source

_HTTP = ("http://", "https://")
_log = logging.getLogger(__name__)
_DIGEST_BYTES, _CRC_BYTES = 28, 4
_ENTRY_BYTES = _DIGEST_BYTES + _CRC_BYTES


class _LocalListing(NamedTuple):
    """The files of a source, sorted by name; names are relative to the root."""

    files: list[LocalFile]
    left_out: ReadReport


def open_source(
    spec: str | Sequence[str],
    *,
    retry_policy: RetryPolicy | None = None,
    columns: DocumentColumns | None = None,
    hub_endpoint: str | None = None,
    cache_dir: Path | None = None,
    checksum_dir: Path | None = None,
    fallback_encoding: str = DEFAULT_FALLBACK,
    report: ReadReport | None = None,
) -> DocumentSource:
    """List and open the files of `spec` in the order that defines the units.

    A folder is searched for every kind of file and all of them are used; a pattern may use `**` and selects one.
    `debian_docs` and `simple_stories` are the shipped corpora, unless a local file or folder has that name.
    A text, Markdown or HTML file is one document. URLs are parquet files, and
    `owner/name[:config][@revision]` is a dataset on the hub, unless a local folder has that name. `cache_dir` keeps the
    listing of a hub dataset between starts; `checksum_dir` the checksum of every unit, see `ChecksummedSource`.
    `fallback_encoding` is that of local text files that are not Unicode.
    With a `report`, bad lines of local JSONL files are skipped; they and the files left out are counted there.
    """
    source = _open(spec, retry_policy or RetryPolicy(), columns, hub_endpoint, cache_dir, fallback_encoding, report)
    return ChecksummedSource(source, checksum_dir) if checksum_dir is not None else source


def _open(
    spec: str | Sequence[str],
    retry_policy: RetryPolicy,
    columns: DocumentColumns | None,
    hub_endpoint: str | None,
    cache_dir: Path | None,
    fallback_encoding: str,
    report: ReadReport | None,
) -> DocumentSource:
    specs = [spec] if isinstance(spec, str) else list(spec)
    if not specs:
        raise ConfigError("no data source is given. Set a folder, a glob pattern, URLs or a dataset id.")
    remote = [one for one in specs if one.startswith(_HTTP)]
    is_hub_id = len(specs) == 1 and not remote and _is_hub_id(specs[0])
    if remote or is_hub_id:
        client = HttpClient(retry_policy)
        if is_hub_id:
            try:
                files = list_hub(specs[0], client, retry_policy, endpoint=hub_endpoint)
            except ServerUnreachable as error:
                raise type(error)(
                    f"there is no file or folder {specs[0]!r} here, and as a dataset id the hub does not list it "
                    f"({error}). Check the path, or the id and the network."
                ) from error
        elif len(remote) == len(specs):
            # The name is the path alone: another port or mirror of the same files has the same fingerprint.
            files = [HttpFile(urlsplit(url).path, url, client) for url in sorted(specs)]
        else:
            raise ConfigError(f"{specs} mixes URLs and local paths. Use one kind.")
        _refuse_duplicates([file.name for file in files])
        listing_cache = cache_dir if is_hub_id else None
        return ParquetSource(files, retry_policy, columns=columns, cache_dir=listing_cache)
    listings = [list_local(one) for one in specs]
    for one, listing in zip(specs, listings, strict=True):
        for reason, entry in listing.left_out.skipped.items():
            _log.info("%s: %d left out, %s (e.g. %r)", one, entry.count, reason, entry.first[0])
        if report is not None:
            report.add(listing.left_out)
    local = sorted((file for listing in listings for file in listing.files), key=lambda file: file.name)
    return combine(
        open_local(
            local, retry_policy=retry_policy, columns=columns, fallback_encoding=fallback_encoding, report=report
        )
    )


def is_local(spec: str) -> bool:
    """Whether a source is a folder, file or pattern on this machine, and no URL and no hub dataset id."""
    return not (spec.startswith(_HTTP) or _is_hub_id(spec))


def _is_hub_id(spec: str) -> bool:
    return HUB_ID.fullmatch(spec) is not None and not Path(spec).exists()


def combine(parts: Sequence[DocumentSource]) -> DocumentSource:
    """One source of several kinds; a single one is returned as it is, with its own fingerprint."""
    return parts[0] if len(parts) == 1 else _CombinedSource(parts)


def open_local(
    files: Sequence[LocalFile],
    *,
    retry_policy: RetryPolicy | None = None,
    columns: DocumentColumns | None = None,
    fallback_encoding: str = DEFAULT_FALLBACK,
    report: ReadReport | None = None,
) -> list[ParquetSource | JsonlSource | TextFileSource]:
    """A source for each kind of file that is there: parquet, JSONL, then text, Markdown and HTML together."""
    _refuse_duplicates([file.name for file in files])

    def of_kind(*kinds: FileKind) -> list[LocalFile]:
        return [file for file in files if file_kind(file.name) in kinds]

    parts: list[ParquetSource | JsonlSource | TextFileSource] = []
    if parquet := of_kind("parquet"):
        parts.append(ParquetSource(parquet, retry_policy or RetryPolicy(), columns=columns))
    if jsonl := of_kind("jsonl"):
        parts.append(JsonlSource(jsonl, columns=columns, report=report))
    if texts := of_kind(*WHOLE_FILE_KINDS):
        parts.append(TextFileSource(texts, columns=columns, fallback_encoding=fallback_encoding, report=report))
    return parts


def read_counted(source: DocumentSource, index: int, report: ReadReport, text_file: str | None) -> list[Document]:
    """Read the documents of a unit that have text; the others, and a text file that cannot be decoded, are counted in
    `report`. `text_file` is the name of a file that is one document."""
    try:
        documents = source.read(index)
    except UnreadableText as error:
        report.skip(error.reason, text_file or str(source.unit(index)))
        return []
    for document in documents:
        if not document.text:
            report.skip(*((EMPTY_RECORDS, document.id) if text_file is None else (EMPTY, text_file)))
    return [document for document in documents if document.text]


def _refuse_duplicates(names: list[str]) -> None:
    if twice := sorted(name for name, count in Counter(names).items() if count > 1):
        raise ConfigError(
            f"{twice[0]!r} occurs twice in the data source: its documents would be trained on twice. Remove one."
        )


class _CombinedSource:
    """Several sources as one, for folders with files of several kinds: their units one after another."""

    def __init__(self, parts: Sequence[DocumentSource]) -> None:
        self._parts = list(parts)
        self._units = UnitOffsets(len(part) for part in self._parts)
        self.fingerprint = hashlib.sha256("\n".join(part.fingerprint for part in self._parts).encode()).hexdigest()

    def __len__(self) -> int:
        return len(self._units)

    def unit(self, index: int) -> SourceUnit:
        part, inside = self._units.locate(index)
        return replace(self._parts[part].unit(inside), index=index)

    def read(self, index: int) -> list[Document]:
        part, inside = self._units.locate(index)
        return self._parts[part].read(inside)


def list_local(spec: str, *, exclude: Path | None = None) -> _LocalListing:
    """Files of a folder with its subfolders, of a pattern, or one file. Raises if there is none.

    In a folder, hidden files and folders, other endings and links to folders are left out, and the folder `exclude`
    (the output of a preparation) is not looked into. A file or pattern that names another ending is refused.
    """
    path, left_out = text_source(spec), ReadReport()
    root = local_root(spec)
    if path.is_dir():
        paths = list(_walk(path, exclude.resolve() if exclude is not None else None, left_out))
    else:
        paths = [path] if path.is_file() else [Path(p) for p in glob.glob(spec, recursive=True)]
        if other := [str(path) for path in paths if file_kind(path.name) is None]:
            raise ConfigError(
                f"data source {spec!r} matches {other[:3]}: files must end in {', '.join(SUFFIXES)}. Rename the file, "
                "or choose another pattern."
            )
    if not paths:
        raise ConfigError(f"data source {spec!r} {_why_nothing(path, left_out)}")
    files = [LocalFile(p.relative_to(root).as_posix(), p) for p in paths]
    return _LocalListing(sorted(files, key=lambda file: file.name), left_out)


def local_root(spec: str) -> Path:
    """The folder that the names of a source's files are relative to."""
    path = text_source(spec)
    if path.is_dir():
        return path
    if path.is_file():
        return path.parent
    parts: list[str] = []
    for part in path.parts:
        if glob.has_magic(part):
            break
        parts.append(part)
    return Path(*parts)


def _walk(folder: Path, exclude: Path | None, left_out: ReadReport) -> Iterator[Path]:
    """Links to folders are not followed, so that a loop of them does no harm."""
    pending = [folder]
    while pending:
        here = pending.pop()
        try:
            entries = sorted(os.scandir(here), key=lambda entry: entry.name)
        except OSError as error:
            left_out.skip(UNREADABLE, f"{here.relative_to(folder).as_posix()}/ ({error.strerror})")
            continue
        for entry in entries:
            path = Path(entry.path)
            if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                if exclude is None or path.resolve() != exclude:
                    pending.append(path)
            elif (reason := _why_left_out(entry, path)) is not None:
                left_out.skip(reason, path.relative_to(folder).as_posix())
            else:
                yield path


def _why_left_out(entry: os.DirEntry[str], path: Path) -> str | None:
    if entry.name.startswith("."):
        return HIDDEN
    kind = file_kind(entry.name)
    try:
        mode = entry.stat().st_mode
    except OSError:  # a link to nothing, or to itself
        return NOT_A_FILE
    if stat.S_ISDIR(mode):
        return FOLDER_LINK
    if not stat.S_ISREG(mode):
        return NOT_A_FILE
    if kind is None:
        return UNKNOWN_ENDING
    # A parquet or JSONL file that cannot be read is an error: it may be most of the data.
    return UNREADABLE if kind in WHOLE_FILE_KINDS and not os.access(path, os.R_OK) else None


def _why_nothing(path: Path, left_out: ReadReport) -> str:
    endings = f"files must end in {', '.join(SUFFIXES)}"
    if not path.is_dir():
        if glob.has_magic(str(path)):
            return f"matches no file: {endings}. Check the pattern."
        siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        guess = difflib.get_close_matches(path.name, siblings, n=1)
        hint = f"Did you mean {path.parent / guess[0]}?" if guess else "Check the path."
        return f"is no file or folder here. {hint} (A dataset of the Hugging Face hub is written as owner/name.)"
    reasons = [f"{entry.count} {reason}, e.g. {entry.first[0]!r}" for reason, entry in left_out.skipped.items()]
    return f"has no file to read ({'; '.join(reasons) or 'it is empty'}): {endings}. Check the path."


class ChecksummedSource:
    """A source whose units are verified against the checksum file in `folder`, which is created if missing.

    In plain JSONL, parquet without page checksums and zstd without frame checksums, a flipped bit can look like valid
    text. The first read of such a unit cannot be verified; every later one can, in a later epoch, after a restart, on
    another rank, or in another run that uses the same folder. Only the documents are covered: other bytes of a file may
    change. The file has one fixed-size entry per unit at a fixed offset, so ranks can share it without rewriting it.
    """

    def __init__(self, source: DocumentSource, folder: Path) -> None:
        self._source = source
        self.fingerprint = source.fingerprint
        # Named after the source's fingerprint: one folder serves any number of sources.
        self._path = folder / f"unit-checksums-{source.fingerprint[:32]}.bin"

    def __len__(self) -> int:
        return len(self._source)

    def unit(self, index: int) -> SourceUnit:
        return self._source.unit(index)

    def read(self, index: int) -> list[Document]:
        for _ in range(2):  # without TLS, bytes can be damaged in transit and not at rest
            documents = self._source.read(index)
            digest = _digest(documents)
            recorded = self._recorded_or_record(index, digest)
            if recorded == digest:
                return documents
        raise CorruptUnit(
            f"{self.unit(index)} has changed since it was first read (checksum {digest.hex()[:16]}…, recorded "
            f"{recorded.hex()[:16]}… in {self._path}): one of the two reads was damaged. Restore the file; if the "
            "first read was the wrong one, delete the checksum file"
        )

    def _recorded_or_record(self, index: int, digest: bytes) -> bytes:
        """The recorded digest of a unit; records and returns `digest` if there is none yet."""
        problem = f"checksum file {self._path} cannot be written, so changes of the data could not be detected"
        fix = "Set data.cache_dir to a writable folder."
        with storage_errors(problem, fix=fix, if_full=(CheckpointError, "Free disk space and add --resume.")):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # Reopened each time: on a network file system only that makes another node's entries visible.
            with file_lock(self._path) as file:
                entry = os.pread(file, _ENTRY_BYTES, index * _ENTRY_BYTES)
                recorded, crc = entry[:_DIGEST_BYTES], entry[_DIGEST_BYTES:]
                if crc and crc == _crc(index, recorded):
                    return recorded
                # Missing, or the entry itself is damaged: this read counts as the first.
                os.pwrite(file, digest + _crc(index, digest), index * _ENTRY_BYTES)
                return digest


def _crc(index: int, digest: bytes) -> bytes:
    return zlib.crc32(digest, index & 0xFFFFFFFF).to_bytes(_CRC_BYTES, "little")


def _digest(documents: Iterable[Document]) -> bytes:
    digest = hashlib.sha256()
    for document in documents:
        id, text = document.id.encode("utf-8", "surrogatepass"), document.text.encode("utf-8", "surrogatepass")
        digest.update(b"%d %d " % (len(id), len(text)))
        digest.update(id)
        digest.update(text)
    return digest.digest()[:_DIGEST_BYTES]
