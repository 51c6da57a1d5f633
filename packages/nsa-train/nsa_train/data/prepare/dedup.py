"""Exact deduplication for `nsa data prepare --dedup`: of documents with the same text the first is kept.

A first pass over the source stores 16 bytes per document, a hash of its text, in one file per task. The hashes of all
tasks are compared at once, and each task gets a mask of the documents to keep. First means first in the order of the
tasks, so the result does not depend on the number of workers. Every file appears complete or not at all: an interrupted
preparation continues with what is there.
"""

import hashlib
import json
from collections.abc import Iterator

import numpy as np

from nsa.errors import DataError
from nsa_train.data.prepare.plan import WORK, PreparePlan
from nsa_train.data.prepare.read_task import TaskReader
from nsa_train.storage import StorageFolder

_HASH_BYTES = 16
_HASHES, _MASKS = f"{WORK}/hashes", f"{WORK}/masks"
_DONE = f"{WORK}/dedup.json"


def is_deduplicated(out: StorageFolder) -> bool:
    """Whether the masks of all tasks are there."""
    return out.exists(_DONE)


def hashed_tasks(out: StorageFolder) -> set[int]:
    """Ranks of the tasks whose hashes are stored."""
    return {int(name.rsplit("/", 1)[1].removesuffix(".bin")) for name, _ in out.files((".bin",), _HASHES)}


def hash_task(plan: PreparePlan, out: StorageFolder, rank: int) -> Iterator[int]:
    """Store the hashes of a task's documents; yields the number of units read since the last time."""
    reader = TaskReader(plan, plan.tasks()[rank])
    hashes, previous = bytearray(), 0
    for _, document in reader.documents():
        hashes += hashlib.blake2b(document.text.encode("utf-8", "surrogatepass"), digest_size=_HASH_BYTES).digest()
        if reader.units_done > previous:
            yield reader.units_done - previous
            previous = reader.units_done
    out.write_bytes(_hashes_name(rank), bytes(hashes))
    yield reader.units_done - previous


def write_masks(plan: PreparePlan, out: StorageFolder) -> int:
    """Compare the hashes of all tasks and store which documents to keep; returns the number of duplicates."""
    stored = [out.read_bytes(_hashes_name(rank)) for rank in range(len(plan.tasks()))]
    counts = [len(hashes) // _HASH_BYTES for hashes in stored]
    keep = _first_occurrences(b"".join(stored))
    del stored
    for rank, end in enumerate(np.cumsum(counts).tolist()):
        mask = keep[end - counts[rank] : end]
        out.write_bytes(_mask_name(rank), len(mask).to_bytes(8, "little") + np.packbits(mask).tobytes())
    duplicates = int(len(keep) - keep.sum())
    out.write_bytes(_DONE, json.dumps({"documents": len(keep), "duplicates": duplicates}).encode())
    return duplicates


def _first_occurrences(hashes: bytes) -> np.ndarray:
    """Whether each of these hashes, one after another, is the first of its value."""
    words = np.frombuffer(hashes, dtype=np.uint64).reshape(-1, _HASH_BYTES // 8)
    order = np.lexsort((words[:, 1], words[:, 0]))  # stable: equal hashes stay in the order of the documents
    keep = np.ones(len(words), dtype=bool)
    ordered = words[order]
    keep[order[1:][(ordered[1:] == ordered[:-1]).all(axis=1)]] = False
    return keep


def read_mask(out: StorageFolder, rank: int) -> np.ndarray:
    """Whether to keep each document of a task, counting only documents with text."""
    raw = out.read_bytes(_mask_name(rank))
    return np.unpackbits(np.frombuffer(raw[8:], dtype=np.uint8), count=int.from_bytes(raw[:8], "little")).astype(bool)


def require_same_documents(mask: np.ndarray, documents: int, where: str) -> None:
    """Raise if a task has another number of documents than when it was hashed."""
    if len(mask) != documents:
        raise DataError(
            f"{where} has at least {documents} documents and had {len(mask)} when they were compared: the source "
            "changed. Prepare into another folder."
        )


def _hashes_name(rank: int) -> str:
    return f"{_HASHES}/{rank:06d}.bin"


def _mask_name(rank: int) -> str:
    return f"{_MASKS}/{rank:06d}.bin"
