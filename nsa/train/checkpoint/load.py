"""From a checkpoint on disk to tensors in memory, without ever executing what is in it."""

import io
import json
import logging
import os
import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from nsa.errors import CheckpointError
from nsa.train.checkpoint import layout
from nsa.train.checkpoint.manifest import Manifest, examine
from nsa.train.checkpoint.pickles import demand_harmless, read_index
from nsa.train.checkpoint.record import RunRecord
from nsa.train.checkpoint.store import Folder, sync

log = logging.getLogger(__name__)

MODEL_PT = "model.pt"
MODEL_SAFETENSORS = "model.safetensors"


def demand_trustworthy(
    checkpoint: Path, *, key: bytes | None = None, allow_foreign: bool = False, hashed: bool = False
) -> Manifest | None:
    """Raise CheckpointError unless a checkpoint is whole, ours, and free of pickles that run code.

    `allow_foreign` takes a folder without COMMIT.json, never one whose COMMIT.json does not fit. `hashed` spares
    reading every byte again, for a caller that has just done so.
    """
    if not checkpoint.is_dir():
        raise CheckpointError(f"{checkpoint} does not exist. `nsa checkpoint ls RUN_FOLDER` shows what there is.")
    manifest = None
    if allow_foreign and not (checkpoint / layout.COMMIT).exists():
        log.warning("%s has no %s: damage to its tensors cannot be detected", checkpoint, layout.COMMIT)
    else:
        step = layout.step_of(checkpoint.name)
        manifest = examine(Folder(checkpoint), key=key, step=step, deep=not hashed).demand_good()
    demand_harmless(checkpoint)
    return manifest


def read_model(checkpoint: Path) -> dict[str, Tensor]:
    """The model's whole tensors from DCP's pieces, by parameter name, in one process. Verify the checkpoint first."""
    folder = layout.tensors_of(checkpoint)
    if not folder.is_dir():
        folder = checkpoint  # tensors alone, as `torch.distributed.checkpoint.save` leaves them
    index = read_index(folder / layout.TENSOR_INDEX)
    paths: Mapping[str, Any] = index.planner_data or {}
    whole = {}
    for key, described in index.state_dict_metadata.items():
        path = [str(part) for part in paths.get(key, key.split("."))]
        if path[0] != "model" or not isinstance(described, TensorStorageMetadata):
            continue
        tensor = torch.empty(described.size, dtype=described.properties.dtype)
        missing = tensor.numel()
        for chunk in described.chunks:
            piece = _read_piece(folder, index.storage_data[MetadataIndex(key, chunk.offsets)])
            part = tensor
            for dim, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                part = part.narrow(dim, offset, size)
            if part.shape != piece.shape:
                raise CheckpointError(
                    f"{folder}: a piece of {key} has shape {tuple(piece.shape)}, the index says otherwise."
                )
            part.copy_(piece)
            missing -= piece.numel()
        if missing:
            raise CheckpointError(f"{folder}: {missing} of the {tensor.numel()} values of {key} are in no piece.")
        whole[".".join(path[1:])] = tensor
    if not whole:
        raise CheckpointError(f"{folder} holds no model: no tensor in it is called model.*.")
    return whole


def export(checkpoint: Path, to: Path, *, key: bytes | None = None, allow_foreign: bool = False) -> list[Path]:
    """Write model.pt and model.safetensors; each file appears whole or not at all."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    demand_trustworthy(checkpoint, key=key, allow_foreign=allow_foreign)
    model = read_model(checkpoint)
    about = {"format": "pt"}
    if (checkpoint / layout.STATE).is_file():
        record = RunRecord.read(checkpoint)
        about |= {"step": str(record.step), "config": json.dumps(record.config, sort_keys=True)}
    to.mkdir(parents=True, exist_ok=True)
    written = []
    for name in (MODEL_PT, MODEL_SAFETENSORS):
        path, temporary = to / name, to / f".{name}.new"
        try:
            if name == MODEL_PT:
                torch.save(model, temporary)
            else:
                save_file(model, temporary, metadata=about)
                shutil.copymode(to / MODEL_PT, temporary)  # safetensors makes private files
            sync(temporary)
            os.replace(temporary, path)
        # torch.save reports a full disk by a RuntimeError, safetensors by an error of its own.
        except (OSError, RuntimeError, SafetensorError) as error:
            temporary.unlink(missing_ok=True)
            raise CheckpointError(f"{path} could not be written: {error}.") from error
        written.append(path)
    sync(to)
    return written


def _read_piece(folder: Path, where: Any) -> Tensor:
    file = folder / where.relative_path
    try:
        with file.open("rb") as stream:
            stream.seek(where.offset)
            piece = torch.load(io.BytesIO(stream.read(where.length)), map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError, ValueError, EOFError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}.") from error
    if not isinstance(piece, Tensor):
        raise CheckpointError(f"{file} holds {type(piece).__name__} where the index has a tensor.")
    return piece
