"""Plan of `nsa data prepare`: input files, division into tasks, and all settings, recorded for an identical rerun.

The parent lists the source once; a worker opens only the file of its task, so that a thousand workers do not read a
thousand footers each. Files are read by the same sources as in direct streaming: same documents, ids and corruption
checks.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from nsa.data.document import DocumentColumns, DocumentSource
from nsa.data.shards.manifest import MANIFEST_NAME, read_manifest
from nsa.data.source.file import LocalFile, StoredFile
from nsa.data.source.jsonl import SUFFIXES as JSONL_SUFFIXES
from nsa.data.source.jsonl import JsonlSource
from nsa.data.source.parquet import ParquetSource
from nsa.data.source.resolve import open_source
from nsa.data.source.retry_policy import RetryPolicy
from nsa.data.tokenizer import load_tokenizer, token_dtype
from nsa.errors import ConfigError, DataError
from nsa.storage import StorageFolder

WORK = "_work"  # subfolder of the output, removed after the manifest is written
PLAN_NAME = f"{WORK}/plan.json"
_PARQUET = ".parquet"


@dataclass(frozen=True, slots=True)
class PrepareTask:
    """Consecutive units of one file. Tasks depend on the source and the settings, not on the number of workers."""

    file: str
    first_unit: int
    stop_unit: int


@dataclass(frozen=True, slots=True)
class PreparePlan:
    source: str
    files: list[tuple[str, int]]  # (file, units)
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

    @property
    def columns(self) -> DocumentColumns:
        return DocumentColumns(self.text_column, self.id_column)

    def tasks(self) -> list[PrepareTask]:
        return [
            PrepareTask(file, first, min(first + self.units_per_task, units))
            for file, units in self.files
            for first in range(0, units, self.units_per_task)
        ]

    def made_from(self) -> dict[str, Any]:
        """Everything that determines the bytes of the output; the path of the tokenizer file does not."""
        content: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        del content["tokenizer"], content["eos_token"]
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
) -> PreparePlan:
    """List the source and resolve every setting. `limit_units` uses only the first units."""
    if not 0.0 <= held_out_fraction < 1.0:
        raise ConfigError(f"the held-out fraction is {held_out_fraction}: it must be in [0, 1). Set e.g. 0.0005.")
    if shard_tokens < 1 or (units_per_task is not None and units_per_task < 1):
        raise ConfigError(f"shard_tokens={shard_tokens}, units_per_task={units_per_task}: both must be at least 1.")
    columns = columns or DocumentColumns()
    loaded = load_tokenizer(tokenizer, eos_token=eos_token)
    files, source_fingerprint = list_files(source, columns)
    if limit_units is not None:
        files = _first_units(files, limit_units)
    # 64 row groups of 1,000 documents are about 64 M tokens: at most a minute or two of work is lost when killed.
    default_units = 1 if units_are_whole_files(files) else 64
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
    )


def _first_units(files: list[tuple[str, int]], limit: int) -> list[tuple[str, int]]:
    kept: list[tuple[str, int]] = []
    for file, units in files:
        if (used := min(units, limit)) > 0:
            kept.append((file, used))
        limit -= used
    return kept


def is_finished(plan: PreparePlan, out: StorageFolder) -> bool:
    """True if `out` holds the result of this plan; raises if it holds that of another one."""
    if not out.exists(MANIFEST_NAME):
        return False
    _refuse_other(read_manifest(out).made_from, plan, out)
    return True


def record_plan(plan: PreparePlan, out: StorageFolder) -> None:
    """Write plan.json, or check it against the one of an interrupted run."""
    if out.exists(PLAN_NAME):
        try:
            recorded = json.loads(out.read_bytes(PLAN_NAME))
            if not isinstance(recorded, dict):
                raise ValueError(f"it is {type(recorded).__name__}, not an object")
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{out.url}/{PLAN_NAME} is not a valid plan ({error}). Delete {out.url} and prepare again."
            ) from error
        _refuse_other(recorded, plan, out)
        return
    out.write_bytes(PLAN_NAME, json.dumps(plan.made_from(), indent=1).encode())


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


def list_files(spec: str, columns: DocumentColumns) -> tuple[list[tuple[str, int]], str]:
    """(file, units) of every file in output order, and a fingerprint of all of them."""
    if not _in_object_store(spec):
        source = open_source(spec, columns=columns)
        counts: dict[str, int] = {}
        for index in range(len(source)):
            file = source.unit(index).file
            counts[file] = counts.get(file, 0) + 1
        return list(counts.items()), source.fingerprint
    folder = StorageFolder(spec)
    sizes = {name: size for name, size in folder.files((_PARQUET, *JSONL_SUFFIXES)) if size}
    names = list(sizes)
    kinds = {name.endswith(_PARQUET) for name in names}
    if len(kinds) != 1:
        what = "both parquet and JSONL files: the same documents may be in both" if kinds else "no data file"
        raise ConfigError(f"{spec} holds {what}. Use a prefix with only parquet or only JSONL(.gz/.zst) files.")
    if kinds == {False}:
        # A JSONL file in an object store is fetched and read whole.
        return [(name, 1) for name in names], hashlib.sha256(repr(sizes).encode()).hexdigest()
    sources = [ParquetSource([StoredFile(folder, name)], RetryPolicy(), columns=columns) for name in names]
    digest = hashlib.sha256("".join(source.fingerprint for source in sources).encode())
    return [(name, len(source)) for name, source in zip(names, sources, strict=True)], digest.hexdigest()


def open_file(spec: str, file: str, columns: DocumentColumns, scratch: Path) -> DocumentSource:
    """A source with one listed file. A JSONL file in an object store is copied to `scratch` first."""
    if not _in_object_store(spec):
        return open_source(file, columns=columns)
    folder = StorageFolder(spec)
    if file.endswith(_PARQUET):
        return ParquetSource([StoredFile(folder, file)], RetryPolicy(), columns=columns)
    local = scratch / Path(file).name
    folder.copy_to(file, local)
    # One block for the whole file: the listing counted it as one unit.
    return JsonlSource([LocalFile(file, local)], columns=columns, block_bytes=max(1, local.stat().st_size))


def units_are_whole_files(files: list[tuple[str, int]]) -> bool:
    return all(units == 1 and file.endswith(JSONL_SUFFIXES) for file, units in files)


def _in_object_store(spec: str) -> bool:
    scheme = urlsplit(spec).scheme
    return scheme not in ("", "file", "http", "https") and "://" in spec
