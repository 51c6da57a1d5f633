"""One task of `nsa data prepare` as datatrove pipeline steps: read units, tokenize, write shards.

datatrove provides the task model, per-task logs and the Slurm executor. Its own steps are not used: the readers only
log and skip what they cannot parse, do not verify page checksums, and name documents without an id by their position in
a file, so the held-out split would differ from direct streaming; its DocumentTokenizer shuffles with a merge step,
stores no ids and no hashes, and does not write atomically.
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
from datatrove.data import Document as TroveDocument
from datatrove.pipeline.base import PipelineStep

from nsa.data.document import CorruptUnit, is_held_out
from nsa.data.prepare.plan import WORK, PreparePlan, open_file
from nsa.data.shards.manifest import SPLITS, TRAIN, VALIDATION
from nsa.data.shards.writer import ShardInfo, ShardWriter
from nsa.data.tokenizer import Tokenizer, check_same, load_tokenizer
from nsa.errors import DataError
from nsa.storage import StorageFolder

_BATCH_DOCUMENTS = 128
CountCallback = Callable[[int, int], None]  # documents, tokens


def record_name(rank: int) -> str:
    return f"{WORK}/tasks/{rank:06d}.json"


def is_done(out: StorageFolder, rank: int) -> bool:
    return out.exists(record_name(rank))


def done_tasks(out: StorageFolder) -> set[int]:
    """Ranks of finished tasks, from one listing: a request per task would take hours on an object store."""
    return {int(name.rsplit("/", 1)[1].removesuffix(".json")) for name, _ in out.files((".json",), f"{WORK}/tasks")}


class PrepareStep(PipelineStep):
    """A datatrove pipeline step of one preparation."""

    def __init__(self, plan: PreparePlan, out_url: str) -> None:
        super().__init__()
        self.plan = plan
        self.out_url = out_url


class ReadUnits(PrepareStep):
    """The documents of one task, in file order."""

    name = "units of a source"
    type = "reader"

    def __init__(self, plan: PreparePlan, out_url: str) -> None:
        super().__init__(plan, out_url)
        self.bad_units: list[str] = []
        self.empty_documents = 0

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[TroveDocument]:
        if is_done(StorageFolder(self.out_url), rank):
            return
        plan, task = self.plan, self.plan.tasks()[rank]
        scratch = Path(tempfile.gettempdir()) / f"nsa-prepare-{uuid.uuid4().hex}"  # created only if a file is fetched
        try:
            source = open_file(plan.source, task.file, plan.columns, scratch)
            if len(source) < task.stop_unit:
                raise DataError(
                    f"{task.file} has {len(source)} units but had at least {task.stop_unit} when it was listed: the "
                    "source changed. Prepare into another folder."
                )
            for index in range(task.first_unit, task.stop_unit):
                try:
                    documents = source.read(index)
                except CorruptUnit as error:
                    self._quarantine(f"{task.file}, {source.unit(index).part}", error)
                    continue
                for document in documents:
                    if document.text:
                        yield TroveDocument(text=document.text, id=document.id)
                    else:
                        self.empty_documents += 1
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _quarantine(self, unit: str, error: CorruptUnit) -> None:
        self.bad_units.append(unit)
        if len(self.bad_units) > self.plan.max_bad_units:
            raise DataError(
                f"{len(self.bad_units)} unit(s) of one task are corrupt, max_bad_units is {self.plan.max_bad_units}. "
                f"Last: {error}. Download the file again, or raise --max-bad-units to skip such units."
            ) from error


class WriteShards(PrepareStep):
    """Tokenize and write shards; the task is done when its record, written last, exists."""

    name = "token shards"
    type = "writer"

    def __init__(
        self, plan: PreparePlan, out_url: str, reader: ReadUnits, on_count: CountCallback | None = None
    ) -> None:
        super().__init__(plan, out_url)
        self.reader = reader
        self._on_count = on_count or (lambda documents, tokens: None)

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[TroveDocument]:
        out = StorageFolder(self.out_url)
        if is_done(out, rank):
            return
        plan = self.plan
        tokenizer = _cached_tokenizer(plan.tokenizer, plan.eos_token)
        check_same(plan.vocab_size, plan.fingerprint, tokenizer)
        # A rename needs the same file system as its target; an upload does not.
        scratch = out.local_path(f"{WORK}/tmp") if out.is_local else Path(tempfile.mkdtemp(prefix="nsa-shards-"))
        splits = {split: _SplitWriter(split, rank, plan, out, scratch) for split in SPLITS}
        try:
            for documents in _batches(data):
                tokens = tokenizer.encode_batch([document.text for document in documents])
                for document, ids in zip(documents, tokens, strict=True):
                    split = VALIDATION if is_held_out(document.id, plan.held_out_fraction) else TRAIN
                    splits[split].add(document.id, ids)
                self._on_count(len(documents), sum(len(ids) + 1 for ids in tokens))
            shards = {split: writer.close() for split, writer in splits.items()}
        finally:
            for writer in splits.values():
                writer.discard()
            if not out.is_local:
                shutil.rmtree(scratch, ignore_errors=True)
        record = {
            "shards": {split: [shard.as_json() for shard in written] for split, written in shards.items()},
            "bad_units": self.reader.bad_units,
            "empty_documents": self.reader.empty_documents,
        }
        out.write_bytes(record_name(rank), _with_checksum(record))
        yield from ()


@lru_cache(maxsize=1)
def _cached_tokenizer(spec: str, eos_token: str | None) -> Tokenizer:
    """Cached: a worker runs many tasks, and loading a 32k vocabulary takes most of a second."""
    return load_tokenizer(spec, eos_token=eos_token)


class _SplitWriter:
    """The shards of one split of one task, each closed at the first document end at or beyond `shard_tokens`."""

    def __init__(self, split: str, rank: int, plan: PreparePlan, out: StorageFolder, scratch: Path) -> None:
        self._name = f"{split}/{rank:06d}"
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


def _batches(documents: Iterable[TroveDocument]) -> Iterator[list[TroveDocument]]:
    batch: list[TroveDocument] = []
    for document in documents or ():
        batch.append(document)
        if len(batch) == _BATCH_DOCUMENTS:
            yield batch
            batch = []
    if batch:
        yield batch


def _with_checksum(record: dict[str, Any]) -> bytes:
    """The record with its SHA-256: an object store may keep a truncated record after a killed upload."""
    body = json.dumps(record, sort_keys=True)
    return json.dumps({"record": record, "sha256": hashlib.sha256(body.encode()).hexdigest()}, indent=1).encode()


def read_record(out: StorageFolder, rank: int) -> dict[str, Any]:
    name = record_name(rank)
    try:
        content = json.loads(out.read_bytes(name))
        record: dict[str, Any] = content["record"]
        if hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest() == content["sha256"]:
            return record
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{out.url}/{name} is damaged ({error!r}). Delete it and run the same command again."
        ) from error
    raise DataError(f"{out.url}/{name} does not match its SHA-256. Delete it and run the same command again.")
