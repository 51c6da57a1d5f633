"""Loads checkpoints: opens and verifies them, reads the model's tensors, feeds DCP, exports model.pt and safetensors.

Nothing in a checkpoint is executed, and every byte is verified as it is read.
"""

import io
import json
import logging
import os
import shutil
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import LoadPlan, LoadPlanner, StorageReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from nsa.errors import CheckpointError
from nsa.files import replace_file
from nsa_train import names
from nsa_train.checkpoint.manifest import IRREGULAR, LocalFiles, examine
from nsa_train.checkpoint.pickle_scan import read_index, read_piece, require_harmless
from nsa_train.checkpoint.run_state import LARGEST_JSON_BYTES, RunRecord
from nsa_train.checkpoint.verified_files import VerifiedFiles

_log = logging.getLogger(__name__)

_READ_AHEAD = 2
"""Pieces in memory per thread: those being read, and as many waiting."""


def require_trustworthy(
    checkpoint: Path, *, key: bytes | None = None, allow_foreign: bool = False, deep: bool = True
) -> VerifiedFiles:
    """Raise CheckpointError unless a checkpoint is complete, ours, and holds only what belongs in a checkpoint.

    The result reads verified bytes only. `allow_foreign` accepts a folder without COMMIT.json, never one whose
    COMMIT.json does not match. Without `deep` only names, sizes, the index and the small files are checked: the rest is
    verified as it is read.
    """
    files = open_checkpoint(checkpoint, key=key, allow_foreign=allow_foreign, deep=deep)
    require_harmless(files, pieces=deep)
    return files


def open_checkpoint(
    checkpoint: Path, *, key: bytes | None = None, allow_foreign: bool = False, deep: bool = False
) -> VerifiedFiles:
    if not checkpoint.is_dir():
        raise CheckpointError(f"{checkpoint} does not exist. `nsa checkpoint ls RUN_FOLDER` shows what there is.")
    if allow_foreign and not os.path.lexists(checkpoint / names.COMMIT):
        _log.warning("%s has no %s: damage to its tensors cannot be detected", checkpoint, names.COMMIT)
        store = LocalFiles(checkpoint)
        if irregular := sorted(name for name, size in store.files().items() if size == IRREGULAR):
            raise CheckpointError(f"{checkpoint / irregular[0]} is a link: a checkpoint holds its own files only.")
        return VerifiedFiles(checkpoint, None)
    step = names.step_of(checkpoint.name)
    manifest = examine(LocalFiles(checkpoint), key=key, step=step, deep=deep).require_good()
    return VerifiedFiles(checkpoint, manifest)


def read_model(files: VerifiedFiles) -> dict[str, Tensor]:
    """The model's full tensors from DCP's pieces, by parameter name, in one process, every byte verified."""
    index = read_index(files)
    paths: Mapping[str, Any] = index.planner_data or {}
    whole = {}
    for key, described in index.state_dict_metadata.items():
        path = [str(part) for part in paths.get(key, key.split("."))]
        if path[0] != "model" or not isinstance(described, TensorStorageMetadata):
            continue
        tensor = torch.empty(described.size, dtype=described.properties.dtype)
        for chunk in described.chunks:
            piece = read_piece(files, index.storage_data[MetadataIndex(key, chunk.offsets)])
            part = tensor
            for dim, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                part = part.narrow(dim, offset, size)
            if not isinstance(piece, Tensor) or part.shape != piece.shape:
                raise CheckpointError(f"{files.path}: a piece of {key} has another shape than the index says.")
            part.copy_(piece)
        whole[".".join(path[1:])] = tensor
    if not whole:
        raise CheckpointError(f"{files.path} holds no model: no tensor in it is called model.*.")
    return whole


class VerifiedReader(StorageReader):
    """DCP storage reader over `VerifiedFiles`: what DCP loads is verified as it is read, and read without pickle."""

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
        future: torch.futures.Future[None] = torch.futures.Future()
        future.set_result(None)
        return future

    def _read(self, plan: LoadPlan) -> Iterator[tuple[ReadItem, object]]:
        """Every item with its value, in the order of the files; threads read a few ahead."""
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


def export(checkpoint: Path, to: Path, *, key: bytes | None = None, allow_foreign: bool = False) -> list[Path]:
    """Write model.pt and model.safetensors, each atomically."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    files = require_trustworthy(checkpoint, key=key, allow_foreign=allow_foreign, deep=False)
    model = read_model(files)
    about = {"format": "pt"}
    if (record := read_record(files)) is not None:
        about |= {"step": str(record.step), "config": json.dumps(record.config, sort_keys=True)}
    to.mkdir(parents=True, exist_ok=True)
    written = []
    for name in (names.MODEL, names.MODEL_SAFETENSORS):
        path, temporary = to / name, to / f".{name}.new"
        try:
            if name == names.MODEL:
                torch.save(model, temporary)
            else:
                save_file(model, temporary, metadata=about)
                shutil.copymode(to / names.MODEL, temporary)  # safetensors makes private files
            replace_file(temporary, path, durable=True)
        # torch.save reports a full disk by a RuntimeError, safetensors by an error of its own.
        except (OSError, RuntimeError, SafetensorError) as error:
            temporary.unlink(missing_ok=True)
            raise CheckpointError(f"{path} could not be written: {error}.") from error
        written.append(path)
    return written


def read_record(files: VerifiedFiles) -> RunRecord | None:
    """state.json, from verified bytes; None if there is none."""
    if names.STATE not in files.sizes:
        return None
    return RunRecord.parse(files.read(names.STATE, limit=LARGEST_JSON_BYTES), files.path / names.STATE)
