"""DCP storage reader over `VerifiedFiles`: what DCP loads was verified as it was read, and read without pickle."""

import io
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import LoadPlan, LoadPlanner, StorageReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from nsa.checkpoint.pickle_scan import read_piece
from nsa.checkpoint.verified_files import VerifiedFiles
from nsa.errors import CheckpointError

_READ_AHEAD = 2
"""Pieces in memory per thread: those being read, and as many that wait."""


class VerifiedReader(StorageReader):
    def __init__(self, files: VerifiedFiles, index: Metadata, thread_count: int) -> None:
        self._files, self._index, self._thread_count = files, index, max(1, thread_count)

    @property
    def checkpoint_id(self) -> str:
        return str(self._files.path)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._index.storage_meta is None:
            self._index.storage_meta = StorageMeta()
        return self._index

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> "torch.futures.Future[None]":
        for item, value in self._read(plan):
            if item.type == LoadItemType.BYTE_IO:
                # The planner takes bytes for torch.load: it gets ours, made from the value that was read safely.
                content = io.BytesIO()
                torch.save(value, content)
                content.seek(0)
                planner.load_bytes(item, content)
                continue
            if not isinstance(value, Tensor) or len(item.lengths) != value.dim():
                raise CheckpointError(f"{self._files.path}: {item.storage_index.fqn} is not as the index says.")
            part = value
            for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                if offset + length > value.shape[dim]:
                    raise CheckpointError(
                        f"{self._files.path}: {item.storage_index.fqn} is smaller than the index says."
                    )
                part = part.narrow(dim, offset, length)
            target = planner.resolve_tensor(item).detach()
            if target.shape != part.shape:
                raise CheckpointError(
                    f"{self._files.path}: {item.storage_index.fqn} has shape {tuple(part.shape)}, the model wants "
                    f"{tuple(target.shape)}."
                )
            target.copy_(part)
            planner.commit_tensor(item, target)
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done

    def _read(self, plan: LoadPlan) -> Iterator[tuple[ReadItem, object]]:
        """Every item with its value, in the order of the files, a few read ahead by threads."""
        where = self._index.storage_data
        items = sorted(plan.items, key=lambda i: (where[i.storage_index].relative_path, where[i.storage_index].offset))
        waiting: deque[tuple[ReadItem, Future[object]]] = deque()
        with ThreadPoolExecutor(self._thread_count, thread_name_prefix="checkpoint-read") as pool:
            for item in items:
                waiting.append((item, pool.submit(read_piece, self._files, where[item.storage_index])))
                if len(waiting) >= _READ_AHEAD * self._thread_count:
                    first, reading = waiting.popleft()
                    yield first, reading.result()
            while waiting:
                first, reading = waiting.popleft()
                yield first, reading.result()

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True
