"""Plan of `nsa data prepare`: input files, division into tasks, and all settings, recorded for an identical rerun.

The parent lists the source once; a worker opens only the files of its task, so that a thousand workers do not read a
thousand footers each. Files are read by the same sources as in direct streaming: same documents, ids and corruption
checks. Small text files are put together in tasks of some megabytes: a task writes shards of its own.
"""

import hashlib
import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from nsa.errors import ConfigError, DataError
from nsa_train.data.document import DocumentColumns, DocumentSource
from nsa_train.data.shards.manifest import MANIFEST_NAME, read_manifest
from nsa_train.data.source.file import JSONL_SUFFIXES, PARQUET_SUFFIX, LocalFile, StoredFile, file_kind
from nsa_train.data.source.http import RetryPolicy
from nsa_train.data.source.jsonl import JsonlSource
from nsa_train.data.source.parquet import ParquetSource
from nsa_train.data.source.read_report import EMPTY, ReadReport
from nsa_train.data.source.resolve import combine, is_local, list_local, local_root, open_local, open_source
from nsa_train.data.source.text import DEFAULT_FALLBACK, TextFileSource, require_encoding
from nsa_train.data.tokenizer import load_tokenizer, token_dtype
from nsa_train.storage import StorageFolder

WORK = "_work"  # subfolder of the output, removed after the manifest is written
_PLAN_NAME = f"{WORK}/plan.json"
_TEXT_TASK_BYTES, _TEXT_TASK_FILES = 16 * 2**20, 4096


@dataclass(frozen=True, slots=True)
class PrepareTask:
    """Consecutive units of one file, or text files (`names`), a unit each, of which `file` is the first.

    Tasks depend on the source and the settings, not on the number of workers.
    """

    file: str
    first_unit: int
    stop_unit: int
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PreparePlan:
    source: str
    files: list[tuple[str, int]]  # (parquet or JSONL file, units)
    source_fingerprint: str
    text_column: str
    id_column: str | None
    tokenizer: str
    eos_token: str | None
    vocab_size: int
    fingerprint: str
    eos_id: int
    dtype: str
    held_out_fraction: float
    units_per_task: int
    shard_tokens: int
    max_bad_units: int
    text_tasks: list[list[str]] = field(default_factory=list)
    """Names of text, Markdown and HTML files relative to the source, by task."""
    encoding: str = DEFAULT_FALLBACK
    """Encoding of text files that are not Unicode."""
    dedup: bool = False
    left_out: dict[str, Any] = field(default_factory=dict)
    """Files that the listing left out, as JSON of a `ReadReport`."""

    @property
    def columns(self) -> DocumentColumns:
        return DocumentColumns(self.text_column, self.id_column)

    def tasks(self) -> list[PrepareTask]:
        of_files = [
            PrepareTask(file, first, min(first + self.units_per_task, units))
            for file, units in self.files
            for first in range(0, units, self.units_per_task)
        ]
        return of_files + [PrepareTask(names[0], 0, len(names), tuple(names)) for names in self.text_tasks]

    def made_from(self) -> dict[str, Any]:
        """Values that determine the bytes of the output; the path of the tokenizer file does not.

        What earlier versions did not have is left out where it makes no difference: their sets stay valid.
        """
        content: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        del content["tokenizer"], content["eos_token"], content["left_out"]
        if not self.text_tasks:
            del content["text_tasks"], content["encoding"]
        if not self.dedup:
            del content["dedup"]
        return content


def make_plan(
    source: str,
    tokenizer: str,
    *,
    columns: DocumentColumns | None = None,
    eos_token: str | None = None,
    held_out_fraction: float = 0.0,
    units_per_task: int | None = None,
    shard_tokens: int = 2**28,
    max_bad_units: int = 0,
    limit_units: int | None = None,
    encoding: str = DEFAULT_FALLBACK,
    dedup: bool = False,
    exclude: Path | None = None,
) -> PreparePlan:
    """List the source and resolve every setting. `limit_units` uses only the first units; `exclude` is a folder that is
    not looked into, for an output inside the source."""
    if not 0.0 <= held_out_fraction < 1.0:
        raise ConfigError(f"the held-out fraction is {held_out_fraction}: it must be in [0, 1). Set e.g. 0.0005.")
    if shard_tokens < 1 or (units_per_task is not None and units_per_task < 1):
        raise ConfigError(f"shard_tokens={shard_tokens}, units_per_task={units_per_task}: both must be at least 1.")
    columns = columns or DocumentColumns()
    loaded = load_tokenizer(tokenizer, eos_token=eos_token)
    encoding = require_encoding(encoding)
    files, texts, source_fingerprint, left_out = _list_files(source, columns, encoding, exclude)
    if limit_units is not None:
        files = _first_units(files, limit_units)
        texts = texts[: max(0, limit_units - sum(units for _, units in files))]
    # 64 row groups of 1,000 documents are about 64 M tokens: at most a minute or two of work is lost when killed.
    default_units = 1 if all(units == 1 and file.endswith(JSONL_SUFFIXES) for file, units in files) else 64
    return PreparePlan(
        source=source,
        files=files,
        source_fingerprint=source_fingerprint,
        text_column=columns.text,
        id_column=columns.id,
        tokenizer=tokenizer,
        eos_token=eos_token,
        vocab_size=loaded.vocab_size,
        fingerprint=loaded.fingerprint,
        eos_id=loaded.eos_id,
        dtype=token_dtype(loaded.vocab_size).name,
        held_out_fraction=held_out_fraction,
        units_per_task=units_per_task or default_units,
        shard_tokens=shard_tokens,
        max_bad_units=max_bad_units,
        text_tasks=_text_tasks(texts, units_per_task or _TEXT_TASK_FILES),
        encoding=encoding,
        dedup=dedup,
        left_out=left_out.as_json(),
    )


def _text_tasks(texts: list[tuple[str, int]], most_files: int) -> list[list[str]]:
    """Files one after another, up to so many, until a task has enough bytes."""
    tasks: list[list[str]] = []
    room = 0
    for name, size in texts:
        if room <= 0 or len(tasks[-1]) == most_files:
            tasks.append([])
            room = _TEXT_TASK_BYTES
        tasks[-1].append(name)
        room -= size
    return tasks


def _first_units(files: list[tuple[str, int]], limit: int) -> list[tuple[str, int]]:
    first: list[tuple[str, int]] = []
    for file, units in files:
        if (used := min(units, limit)) > 0:
            first.append((file, used))
        limit -= used
    return first


def is_finished(plan: PreparePlan, out: StorageFolder) -> bool:
    """True if `out` holds the result of this plan; raises if it holds that of another one."""
    if not out.exists(MANIFEST_NAME):
        return False
    _refuse_other(read_manifest(out).made_from, plan, out)
    return True


def record_plan(plan: PreparePlan, out: StorageFolder) -> None:
    """Write plan.json, or check it against the one of an interrupted run."""
    if out.exists(_PLAN_NAME):
        try:
            recorded = json.loads(out.read_bytes(_PLAN_NAME))
            if not isinstance(recorded, dict):
                raise ValueError(f"it is {type(recorded).__name__}, not an object")
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{out.url}/{_PLAN_NAME} is not a valid plan ({error}). Delete {out.url} and prepare again."
            ) from error
        _refuse_other(recorded, plan, out)
        return
    out.write_bytes(_PLAN_NAME, json.dumps(plan.made_from(), indent=1).encode())


def _refuse_other(recorded: dict[str, Any], plan: PreparePlan, out: StorageFolder) -> None:
    mine = plan.made_from()
    if differing := sorted(key for key in mine.keys() | recorded.keys() if mine.get(key) != recorded.get(key)):
        shown = ", ".join(f"{k}: saved {_short(recorded.get(k))}, now {_short(mine.get(k))}" for k in differing)
        raise ConfigError(
            f"{out.url} belongs to another preparation ({shown}): the two cannot be mixed. Use the same settings, or "
            "another output folder."
        )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


_NamedCounts = list[tuple[str, int]]


def _list_files(
    spec: str, columns: DocumentColumns, encoding: str, exclude: Path | None
) -> tuple[_NamedCounts, _NamedCounts, str, ReadReport]:
    """Parquet and JSONL files with their units, text files with their bytes (both in output order), the fingerprint of
    the source, and what was left out. Names of text files are relative to the source."""
    if _in_object_store(spec):
        return *_list_object_store(spec, columns), ReadReport()
    if not is_local(spec):
        remote = open_source(spec, columns=columns)
        return _unit_counts(remote), [], remote.fingerprint, ReadReport()
    listing = list_local(spec, exclude=exclude)
    parts = open_local(listing.files, columns=columns, fallback_encoding=encoding)
    files: list[tuple[str, int]] = []
    texts: list[tuple[str, int]] = []
    for part in parts:
        if isinstance(part, TextFileSource):
            texts = [(file.name, size) for file, size in zip(part.files, part.sizes, strict=True)]
        else:
            files += _unit_counts(part)
    with_units = {file for file, _ in files}
    for file in listing.files:
        if file_kind(file.name) == "jsonl" and file.where not in with_units:
            listing.left_out.skip(EMPTY, file.name)
    return files, texts, combine(parts).fingerprint, listing.left_out


def _unit_counts(source: DocumentSource) -> _NamedCounts:
    return list(Counter(source.unit(index).file for index in range(len(source))).items())


def _list_object_store(spec: str, columns: DocumentColumns) -> tuple[_NamedCounts, _NamedCounts, str]:
    folder = StorageFolder(spec)
    sizes = {name: size for name, size in folder.files((PARQUET_SUFFIX, *JSONL_SUFFIXES)) if size}
    names = list(sizes)
    kinds = {file_kind(name) for name in names}
    if len(kinds) != 1:
        what = "both parquet and JSONL files: the same documents may be in both" if kinds else "no data file"
        raise ConfigError(
            f"{spec} holds {what}. Use a prefix with only parquet or only JSONL(.gz/.zst) files; copy text, Markdown "
            "and HTML files to a local folder first."
        )
    if kinds == {"jsonl"}:
        # A JSONL file in an object store is fetched and read whole.
        return [(name, 1) for name in names], [], hashlib.sha256(repr(sizes).encode()).hexdigest()
    sources = [ParquetSource([StoredFile(folder, name)], RetryPolicy(), columns=columns) for name in names]
    digest = hashlib.sha256("".join(source.fingerprint for source in sources).encode())
    return [(name, len(source)) for name, source in zip(names, sources, strict=True)], [], digest.hexdigest()


def open_task(plan: PreparePlan, task: PrepareTask, scratch: Path, report: ReadReport) -> DocumentSource:
    """A source with the files of one task. A JSONL file in an object store is copied to `scratch` first."""
    columns = plan.columns
    if task.names:
        root = local_root(plan.source)
        files = [LocalFile(name, root / name) for name in task.names]
        return TextFileSource(files, columns=columns, fallback_encoding=plan.encoding, report=report)
    if not _in_object_store(plan.source):
        if is_local(plan.source) and file_kind(task.file) == "jsonl":
            return JsonlSource([LocalFile(Path(task.file).name, Path(task.file))], columns=columns, report=report)
        return open_source(task.file, columns=columns)
    folder = StorageFolder(plan.source)
    if file_kind(task.file) == "parquet":
        return ParquetSource([StoredFile(folder, task.file)], RetryPolicy(), columns=columns)
    local = scratch / Path(task.file).name
    folder.copy_to(task.file, local)
    # One block for the whole file: the listing counted it as one unit.
    block_bytes = max(1, local.stat().st_size)
    return JsonlSource([LocalFile(task.file, local)], columns=columns, block_bytes=block_bytes, report=report)


def _in_object_store(spec: str) -> bool:
    scheme = urlsplit(spec).scheme
    return scheme not in ("", "file", "http", "https") and "://" in spec
