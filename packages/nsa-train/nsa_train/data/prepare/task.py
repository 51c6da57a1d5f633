"""One task of `nsa data prepare`: reads its units, and writes token shards or, in the first pass of `--dedup`, hashes.

Deduplication keeps the first of documents with the same text. The first pass stores 16 bytes per document, a hash of
its text, in one file per task. The hashes of all tasks are compared at once, and each task gets a mask of the documents
to keep. First means first in the order of the tasks, so the result does not depend on the number of workers. Every file
appears complete or not at all: an interrupted preparation continues with what is there.
"""

import hashlib
import json
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from nsa.errors import DataError
from nsa_train.data.document import CorruptUnit, Document, is_held_out
from nsa_train.data.prepare.plan import WORK, PreparePlan, PrepareTask, open_task
from nsa_train.data.shards.manifest import SPLITS, TRAIN, VALIDATION
from nsa_train.data.shards.writer import ShardInfo, ShardWriter
from nsa_train.data.source.file import FileKind, file_kind
from nsa_train.data.source.read_report import DAMAGED_PARTS, DUPLICATES, ReadReport
from nsa_train.data.source.resolve import read_counted
from nsa_train.data.tokenizer import Tokenizer, check_same, load_tokenizer
from nsa_train.storage import StorageFolder

_BATCH_DOCUMENTS = 128
_BATCH_CHARACTERS = 4 * 2**20
_HASH_BYTES = 16
DEDUP_DONE = f"{WORK}/dedup.json"
"""File that exists when the masks of all tasks are there."""
CountCallback = Callable[[int, int], None]
"""Called with the number of tokens written and of units read since the last call."""


class _TaskReader:
    """The documents of one task that have text, in file order. `report` and `bad_units` are filled on the way."""

    def __init__(self, plan: PreparePlan, task: PrepareTask, on_count: CountCallback = lambda tokens, units: None):
        self._plan = plan
        self._task = task
        self._on_count = on_count
        self._units_done = self._units_counted = 0
        self.report = ReadReport()
        self.bad_units: list[str] = []

    def count(self, tokens: int = 0) -> None:
        """Report tokens, and the units that were read since the last call."""
        self._on_count(tokens, self._units_done - self._units_counted)
        self._units_counted = self._units_done

    def documents(self, keep: np.ndarray | None = None) -> Iterator[tuple[FileKind, Document]]:
        """`keep` says for each document with text whether it is the first with its text."""
        number = 0
        for kind, document in self._read():
            if keep is None or (number < len(keep) and keep[number]):
                yield kind, document
            elif number < len(keep):
                self.report.skip(DUPLICATES, document.id)
            number += 1
        if keep is not None and len(keep) != number:
            raise DataError(
                f"{self._task.file} has {number} documents and had {len(keep)} when they were compared: the source "
                "changed. Prepare into another folder."
            )

    def _read(self) -> Iterator[tuple[FileKind, Document]]:
        plan, task = self._plan, self._task
        scratch = Path(tempfile.gettempdir()) / f"nsa-prepare-{uuid.uuid4().hex}"  # created only if a file is fetched
        try:
            source = open_task(plan, task, scratch, self.report)
            if len(source) < task.stop_unit:
                raise DataError(
                    f"{task.file} has {len(source)} units but had at least {task.stop_unit} when it was listed: the "
                    "source changed. Prepare into another folder."
                )
            if not task.names and task.first_unit == 0:
                self.report.kind(_kind(task.file)).files += 1
            for index in range(task.first_unit, task.stop_unit):
                documents: list[Document] = []
                text_file = task.names[index] if task.names else None
                kind = _kind(text_file or task.file)
                try:
                    documents = read_counted(source, index, self.report, text_file)
                except CorruptUnit as error:
                    self._quarantine(f"{task.file}, {source.unit(index).part}", error)
                for document in documents:
                    self.report.kind(kind).files += text_file is not None
                    yield kind, document
                self._units_done += 1
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _quarantine(self, unit: str, error: CorruptUnit) -> None:
        self.bad_units.append(unit)
        self.report.skip(DAMAGED_PARTS, unit)
        if len(self.bad_units) > self._plan.max_bad_units:
            raise DataError(
                f"{error}. {error.fix}, or skip damaged parts of files: --max-bad-units N, which is "
                f"{self._plan.max_bad_units}."
            ) from error


def _kind(name: str) -> FileKind:
    return file_kind(name) or "parquet"  # a URL may end in anything; all of them are parquet


def done_tasks(out: StorageFolder, kind: str = "tasks") -> set[int]:
    """Ranks of finished tasks, from one listing: a request per task would take hours on an object store.

    kind: `tasks`, or `hashes` for those whose hashes are stored.
    """
    return {int(Path(name).stem) for name, _ in out.files((".json", ".bin"), f"{WORK}/{kind}")}


def _record_name(rank: int) -> str:
    return f"{WORK}/tasks/{rank:06d}.json"


def run_task(
    plan: PreparePlan, out: StorageFolder, rank: int, on_count: CountCallback = lambda tokens, units: None
) -> None:
    """Tokenize the documents of a task and write shards. It is done when its record, written last, exists."""
    if out.exists(_record_name(rank)):
        return
    tokenizer = _cached_tokenizer(plan.tokenizer, plan.eos_token)
    check_same(plan.vocab_size, plan.fingerprint, tokenizer)
    reader, keep = _TaskReader(plan, plan.tasks()[rank], on_count), None
    if plan.dedup:
        raw = out.read_bytes(_mask_name(rank))
        bits = np.unpackbits(np.frombuffer(raw[8:], dtype=np.uint8), count=int.from_bytes(raw[:8], "little"))
        keep = bits.astype(bool)
    # A rename needs the same file system as its target; an upload does not.
    scratch = out.local_path(f"{WORK}/tmp") if out.is_local else Path(tempfile.mkdtemp(prefix="nsa-shards-"))
    writers = {split: _SplitWriter(f"{split}/{rank:06d}", plan, out, scratch) for split in SPLITS}
    try:
        for batch in _batches(reader.documents(keep)):
            tokens = tokenizer.encode_batch([document.text for _, document in batch])
            for (kind, document), ids in zip(batch, tokens, strict=True):
                split = VALIDATION if is_held_out(document.id, plan.held_out_fraction) else TRAIN
                writers[split].add(document.id, ids)
                reader.report.count(kind, len(document.text), len(ids) + 1)
            reader.count(sum(len(ids) + 1 for ids in tokens))
        reader.count()
        shards = {split: [shard.as_json() for shard in writer.close()] for split, writer in writers.items()}
    finally:
        for writer in writers.values():
            writer.discard()
        if not out.is_local:
            shutil.rmtree(scratch, ignore_errors=True)
    record = {"shards": shards, "bad_units": reader.bad_units, "report": reader.report.as_json()}
    # With its SHA-256: an object store may keep a truncated record after a killed upload.
    out.write_bytes(_record_name(rank), json.dumps({"record": record, "sha256": _digest(record)}, indent=1).encode())


def read_record(out: StorageFolder, rank: int) -> dict[str, Any]:
    name = _record_name(rank)
    try:
        content = json.loads(out.read_bytes(name))
        record: dict[str, Any] = content["record"]
        if _digest(record) == content["sha256"]:
            return record
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{out.url}/{name} is damaged ({error!r}). Delete it and run the same command again."
        ) from error
    raise DataError(f"{out.url}/{name} does not match its SHA-256. Delete it and run the same command again.")


def _digest(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


@lru_cache(maxsize=1)
def _cached_tokenizer(spec: str, eos_token: str | None) -> Tokenizer:
    """Cached: a worker runs many tasks, and loading a 32k vocabulary takes most of a second."""
    return load_tokenizer(spec, eos_token=eos_token)


class _SplitWriter:
    """The shards of one split of one task, each closed at the first document end at or beyond `shard_tokens`."""

    def __init__(self, name: str, plan: PreparePlan, out: StorageFolder, scratch: Path) -> None:
        self._name = name
        self._plan = plan
        self._out = out
        self._scratch = scratch
        self._open: ShardWriter | None = None
        self._done: list[ShardInfo] = []

    def add(self, doc_id: str, tokens: np.ndarray) -> None:
        if self._open is None:
            name = f"{self._name}-{len(self._done):03d}"
            self._open = ShardWriter(name, np.dtype(self._plan.dtype), self._scratch)
        self._open.add(doc_id, tokens, self._plan.eos_id)
        if self._open.tokens >= self._plan.shard_tokens:
            self.close()

    def close(self) -> list[ShardInfo]:
        if self._open is not None:
            self._done.append(self._open.finish(self._out))
            self._open = None
        return self._done

    def discard(self) -> None:
        if self._open is not None:
            self._open.discard()


def _batches(documents: Iterable[tuple[FileKind, Document]]) -> Iterator[list[tuple[FileKind, Document]]]:
    batch: list[tuple[FileKind, Document]] = []
    characters = 0
    for kind, document in documents:
        batch.append((kind, document))
        characters += len(document.text)
        if len(batch) == _BATCH_DOCUMENTS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def hash_task(
    plan: PreparePlan, out: StorageFolder, rank: int, on_count: CountCallback = lambda tokens, units: None
) -> None:
    """Store the hashes of a task's documents."""
    reader = _TaskReader(plan, plan.tasks()[rank], on_count)
    hashes = bytearray()
    for batch in _batches(reader.documents()):
        for _, document in batch:
            hashes += hashlib.blake2b(document.text.encode("utf-8", "surrogatepass"), digest_size=_HASH_BYTES).digest()
        reader.count()
    out.write_bytes(_hashes_name(rank), bytes(hashes))
    reader.count()


def write_masks(plan: PreparePlan, out: StorageFolder) -> None:
    """Compare the hashes of all tasks and store which documents to keep."""
    stored = [out.read_bytes(_hashes_name(rank)) for rank in range(len(plan.tasks()))]
    counts = [len(hashes) // _HASH_BYTES for hashes in stored]
    keep = _first_occurrences(b"".join(stored))
    del stored
    for rank, end in enumerate(np.cumsum(counts).tolist()):
        mask = keep[end - counts[rank] : end]
        out.write_bytes(_mask_name(rank), len(mask).to_bytes(8, "little") + np.packbits(mask).tobytes())
    duplicates = int(len(keep) - keep.sum())
    out.write_bytes(DEDUP_DONE, json.dumps({"documents": len(keep), "duplicates": duplicates}).encode())


def _first_occurrences(hashes: bytes) -> np.ndarray:
    """Whether each of these hashes, one after another, is the first of its value."""
    words = np.frombuffer(hashes, dtype=np.uint64).reshape(-1, _HASH_BYTES // 8)
    order = np.lexsort((words[:, 1], words[:, 0]))  # stable: equal hashes stay in the order of the documents
    keep = np.ones(len(words), dtype=bool)
    ordered = words[order]
    keep[order[1:][(ordered[1:] == ordered[:-1]).all(axis=1)]] = False
    return keep


def _hashes_name(rank: int) -> str:
    return f"{WORK}/hashes/{rank:06d}.bin"


def _mask_name(rank: int) -> str:
    return f"{WORK}/masks/{rank:06d}.bin"
