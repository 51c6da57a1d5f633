"""From a checkpoint on disk to tensors in memory, without ever executing what is in it."""

import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from nsa import names
from nsa.checkpoint.manifest import examine
from nsa.checkpoint.pickle_scan import demand_harmless, read_index, read_piece
from nsa.checkpoint.run_state import LARGEST_JSON_BYTES, RunRecord
from nsa.checkpoint.verified_files import VerifiedFiles
from nsa.errors import CheckpointError
from nsa.files import replace_file
from nsa.storage import IRREGULAR, LocalFiles

log = logging.getLogger(__name__)


def demand_trustworthy(
    checkpoint: Path, *, key: bytes | None = None, allow_foreign: bool = False, deep: bool = True
) -> VerifiedFiles:
    """Raise CheckpointError unless a checkpoint is whole, ours, and holds nothing but what a checkpoint may hold.

    What it returns hands out verified bytes only. `allow_foreign` takes a folder without COMMIT.json, never one whose
    COMMIT.json does not fit. Without `deep` only names, sizes, the index and the small files are looked at: the rest
    is verified as it is read.
    """
    files = open_checkpoint(checkpoint, key=key, allow_foreign=allow_foreign, deep=deep)
    demand_harmless(files, pieces=deep)
    return files


def open_checkpoint(
    checkpoint: Path, *, key: bytes | None = None, allow_foreign: bool = False, deep: bool = False
) -> VerifiedFiles:
    if not checkpoint.is_dir():
        raise CheckpointError(f"{checkpoint} does not exist. `nsa checkpoint ls RUN_FOLDER` shows what there is.")
    if allow_foreign and not os.path.lexists(checkpoint / names.COMMIT):
        log.warning("%s has no %s: damage to its tensors cannot be detected", checkpoint, names.COMMIT)
        store = LocalFiles(checkpoint)
        if irregular := sorted(name for name, size in store.files().items() if size == IRREGULAR):
            raise CheckpointError(f"{checkpoint / irregular[0]} is a link: a checkpoint holds its own files only.")
        return VerifiedFiles(checkpoint, None)
    step = names.step_of(checkpoint.name)
    manifest = examine(LocalFiles(checkpoint), key=key, step=step, deep=deep).demand_good()
    return VerifiedFiles(checkpoint, manifest)


def read_model(files: VerifiedFiles) -> dict[str, Tensor]:
    """The model's whole tensors from DCP's pieces, by parameter name, in one process, every byte verified."""
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


def export(checkpoint: Path, to: Path, *, key: bytes | None = None, allow_foreign: bool = False) -> list[Path]:
    """Write model.pt and model.safetensors; each file appears whole or not at all."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    files = demand_trustworthy(checkpoint, key=key, allow_foreign=allow_foreign, deep=False)
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
