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
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from datatrove.data import Document as TroveDocument
from datatrove.pipeline.base import PipelineStep

from nsa.errors import DataError
from nsa_train.data.document import is_held_out
from nsa_train.data.prepare.dedup import read_mask, require_same_documents
from nsa_train.data.prepare.plan import WORK, PreparePlan
from nsa_train.data.prepare.read_task import TaskReader
from nsa_train.data.shards.manifest import SPLITS, TRAIN, VALIDATION
from nsa_train.data.shards.writer import ShardInfo, ShardWriter
from nsa_train.data.source.read_report import DUPLICATES
from nsa_train.data.tokenizer import Tokenizer, check_same, load_tokenizer
from nsa_train.storage import StorageFolder

_BATCH_DOCUMENTS = 128
_BATCH_CHARACTERS = 4 * 2**20
_KIND = "kind"  # in the metadata of a document
CountCallback = Callable[[int, int, int], None]  # documents, tokens, units of the source


def _record_name(rank: int) -> str:
    return f"{WORK}/tasks/{rank:06d}.json"


def _is_done(out: StorageFolder, rank: int) -> bool:
    return out.exists(_record_name(rank))


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
        self.task: TaskReader | None = None
        """Reader of the task that runs, with its report."""

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[TroveDocument]:
        out = StorageFolder(self.out_url)
        if _is_done(out, rank):
            return
        task = self.plan.tasks()[rank]
        self.task = reader = TaskReader(self.plan, task)
        keep = read_mask(out, rank) if self.plan.dedup else None
        documents = 0
        for kind, document in reader.documents():
            documents += 1
            if keep is not None and documents > len(keep):
                require_same_documents(keep, documents, task.file)
            if keep is None or keep[documents - 1]:
                yield TroveDocument(text=document.text, id=document.id, metadata={_KIND: kind})
            else:
                reader.report.skip(DUPLICATES, document.id)
        if keep is not None:
            require_same_documents(keep, documents, task.file)


class WriteShards(PrepareStep):
    """Tokenize and write shards; the task is done when its record, written last, exists."""

    name = "token shards"
    type = "writer"

    def __init__(
        self, plan: PreparePlan, out_url: str, reader: ReadUnits, on_count: CountCallback | None = None
    ) -> None:
        super().__init__(plan, out_url)
        self.reader = reader
        self._on_count = on_count or (lambda documents, tokens, units: None)
        self._counted_units = 0

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[TroveDocument]:
        out = StorageFolder(self.out_url)
        if _is_done(out, rank):
            return
        plan, self._counted_units = self.plan, 0
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
                    self._reader().report.count(document.metadata[_KIND], len(document.text), len(ids) + 1)
                self._count_units(len(documents), sum(len(ids) + 1 for ids in tokens))
            self._count_units(0, 0)
            shards = {split: writer.close() for split, writer in splits.items()}
        finally:
            for writer in splits.values():
                writer.discard()
            if not out.is_local:
                shutil.rmtree(scratch, ignore_errors=True)
        record = {
            "shards": {split: [shard.as_json() for shard in written] for split, written in shards.items()},
            "bad_units": self._reader().bad_units,
            "report": self._reader().report.as_json(),
        }
        out.write_bytes(_record_name(rank), _with_checksum(record))
        yield from ()

    def _reader(self) -> TaskReader:
        assert self.reader.task is not None, "documents come from a task"
        return self.reader.task

    def _count_units(self, documents: int, tokens: int) -> None:
        done = self._reader().units_done
        self._on_count(documents, tokens, done - self._counted_units)
        self._counted_units = done


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
    characters = 0
    for document in documents or ():
        batch.append(document)
        characters += len(document.text)
        if len(batch) == _BATCH_DOCUMENTS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _with_checksum(record: dict[str, Any]) -> bytes:
    """The record with its SHA-256: an object store may keep a truncated record after a killed upload."""
    body = json.dumps(record, sort_keys=True)
    return json.dumps({"record": record, "sha256": hashlib.sha256(body.encode()).hexdigest()}, indent=1).encode()


def read_record(out: StorageFolder, rank: int) -> dict[str, Any]:
    name = _record_name(rank)
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
