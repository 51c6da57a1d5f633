"""DCP storage writer that hashes tensors while it writes them, and brings the hashes of all ranks to rank 0.

Rank 0 then knows the hash of every file without reading one back. The locations and hashes travel with the results
that DCP gathers anyway, so a save has no collective of its own.
"""

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import Metadata, SavePlan, SavePlanner, StorageWriter
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from nsa.errors import CheckpointError
from nsa_train import names
from nsa_train.checkpoint.manifest import HashedFile, ManifestEntry
from nsa_train.checkpoint.save_plan import share
from nsa_train.checkpoint.tensor_index import PieceWritten, UnplannedStorage, write_index
from nsa_train.checkpoint.transfer import CopyResult, StoreCopy

_THREADS = 4
_SMALLEST_FILE_BYTES = 64 << 20
"""A rank writes as many files as it has threads, but none smaller than this beside another."""


@dataclass(frozen=True)
class _WrittenFiles:
    """Files that one rank has written: places of its pieces, and hashes of the files by name."""

    pieces: list[PieceWritten]
    hashes: Mapping[str, ManifestEntry]
    copy_failure: str | None = None
    """Why its files could not be copied to the object store of the run."""


class HashingWriter(UnplannedStorage, StorageWriter):
    """Writes a checkpoint's tensors below `checkpoint`. One object per save and rank."""

    def __init__(
        self,
        checkpoint: Path,
        *,
        thread_count: int | None = None,
        hashed: Mapping[str, ManifestEntry] | None = None,
        copy: StoreCopy | None = None,
    ) -> None:
        """`hashed` are files that this rank has written already, by name relative to the checkpoint."""
        self._checkpoint, self._thread_count = checkpoint, thread_count or _THREADS
        self._copy = copy
        self.copy_failures: list[str] = []
        """Failed copies of all ranks; on rank 0, when the save has finished."""
        self._hashed = dict(hashed or {})
        self._rank = 0
        self._uploaded: list[str] = []
        self.hashes: dict[str, ManifestEntry] = {}
        """Hashes of the files of all ranks; on rank 0, when the save has finished."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._rank = kwargs["rank"]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        """A future of `_WrittenFiles`; it is done."""
        names.tensors_of(self._checkpoint).mkdir(parents=True, exist_ok=True)
        files = _divide(plan.items, self._thread_count)
        with ThreadPoolExecutor(self._thread_count, thread_name_prefix="checkpoint-write") as pool:
            written = list(pool.map(lambda number: self._write(number, files[number], planner), range(len(files))))
        hashes = self._hashed | {name: entry for name, _, entry in written}
        failure = None if self._copy is None else self._copy.upload(self._checkpoint, hashes)
        future: torch.futures.Future[_WrittenFiles] = torch.futures.Future()
        future.set_result(_WrittenFiles([piece for _, pieces, _ in written for piece in pieces], hashes, failure))
        return future

    def _write(
        self, number: int, items: Sequence[WriteItem], planner: SavePlanner
    ) -> tuple[str, list[PieceWritten], ManifestEntry]:
        name = f"__{self._rank}_{number}{names.TENSOR_FILES}"
        path = names.tensors_of(self._checkpoint) / name
        pieces: list[PieceWritten] = []
        file = None
        try:
            with HashedFile(path) as file:
                for item in items:
                    start = file.tell()
                    _write_item(file, planner.resolve_data(item), item)
                    offsets = None if item.index.offset is None else tuple(item.index.offset)
                    pieces.append((item.index.fqn, offsets, name, start, file.tell() - start))
        # torch.save reports a full disk by a RuntimeError. The message must survive the way to the other ranks.
        except (OSError, RuntimeError) as error:
            reason = file.failure if file is not None and file.failure is not None else error
            raise CheckpointError(f"{path} could not be written: {reason}.") from error
        return f"{names.TENSORS}/{name}", pieces, file.entry()

    def finish(self, metadata: Metadata, results: Any) -> None:
        """Write the index; on rank 0, with the `_WrittenFiles` of every rank."""
        written: list[_WrittenFiles] = results
        for rank in written:
            self.hashes.update(rank.hashes)
            if rank.copy_failure is not None:
                self.copy_failures.append(rank.copy_failure)
        self._uploaded = [] if self._copy is None else list(self.hashes)
        pieces = (piece for rank in written for piece in rank.pieces)
        index = write_index(names.tensors_of(self._checkpoint), metadata, pieces)
        self.hashes |= {f"{names.TENSORS}/{name}": entry for name, entry in index.items()}
        # DCP sends the index to all ranks, where nothing reads it: a large run has 100 MB of it.
        metadata.state_dict_metadata, metadata.storage_data, metadata.planner_data = {}, None, None

    def finish_copy(self, checkpoint: Path) -> CopyResult | None:
        """Complete the copy in the object store, if there is to be one; on rank 0, when `checkpoint` is committed."""
        return None if self._copy is None else self._copy.finish(checkpoint, self._uploaded, self.copy_failures)


def _write_item(file: HashedFile, value: object, item: WriteItem) -> None:
    if item.type == WriteItemType.BYTE_IO:
        file.write(value.getbuffer())  # type: ignore[attr-defined]
        return
    assert isinstance(value, Tensor)
    tensor = value.detach().cpu()
    if tensor.untyped_storage().nbytes() != tensor.nbytes:
        tensor = tensor.clone()  # torch.save writes the whole storage
    torch.save(tensor, file)  # type: ignore[arg-type]


def _divide(items: Sequence[WriteItem], threads: int) -> list[list[WriteItem]]:
    """Consecutive items of about equal bytes for each file."""
    described = (item.tensor_data for item in items)  # of the piece: `tensor_storage_size` is that of the whole tensor
    sizes = [math.prod(d.chunk.sizes) * d.properties.dtype.itemsize if d is not None else 0 for d in described]
    files = max(1, min(threads, sum(sizes) // _SMALLEST_FILE_BYTES))
    parts: list[list[WriteItem]] = [[] for _ in range(files)]
    for item, file in zip(items, share(sizes, files), strict=True):
        parts[file].append(item)
    return [part for part in parts if part]
