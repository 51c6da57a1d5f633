"""Reads checkpoints: every block is verified against the manifest before its bytes are used, and nothing is executed.

Verifying a folder first and reading it later would leave a time window for a swap. Here a block is read into memory,
hashed there, compared with the manifest, and only then used: a file that is replaced or changed meanwhile is refused.
No byte is read twice, and a rank reads only the blocks that contain its own tensors.
"""

import hashlib
import io
import json
import logging
import math
import os
import re
import shutil
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor
from torch.distributed.checkpoint import LoadPlan, LoadPlanner, StorageReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from nsa.core.compression import pooling_shapes
from nsa.core.pooling import rows_shape
from nsa.errors import CheckpointError, NSAError
from nsa.files import open_regular, replace_file
from nsa_train import names
from nsa_train.checkpoint.manifest import (
    BLOCK_BYTES,
    IRREGULAR,
    CheckpointManifest,
    LocalFiles,
    examine,
    hash_blocks,
    same_content,
)
from nsa_train.checkpoint.run_state import LARGEST_JSON_BYTES, RunRecord
from nsa_train.checkpoint.safe_pickle import PickleRefused, read_torch_file
from nsa_train.checkpoint.tensor_index import PieceLocation, UnplannedStorage, largest_index, parse_index
from nsa_train.config.schema import RunConfig

_log = logging.getLogger(__name__)

_CACHED_BLOCKS = 4
LARGEST_RANK_FILE_BYTES = 16 << 20
_READ_AHEAD = 2
"""Pieces in memory per thread: those being read, and as many waiting."""


class VerifiedFiles:
    """The files of a checkpoint as its manifest lists them; without a manifest, as they are."""

    def __init__(self, path: Path, manifest: CheckpointManifest | None) -> None:
        self.path, self.manifest = path, manifest
        if manifest is not None:
            self.sizes = {name: entry.bytes for name, entry in manifest.files.items()}
        else:
            self.sizes = {name: size for name, size in LocalFiles(path).files().items() if size != IRREGULAR}
        self._cache: OrderedDict[tuple[str, int], Future[bytes]] = OrderedDict()
        self._digests: dict[str, tuple[str, ...]] = {}
        self._lock = threading.Lock()
        self.bytes_read = 0
        """Read from the files so far, in whole blocks."""

    @property
    def tensor_folder(self) -> str:
        """Folder of the tensor index, ending with a slash; empty for a folder written by DCP alone."""
        inside = f"{names.TENSORS}/"
        return inside if f"{inside}{names.TENSOR_INDEX}" in self.sizes else ""

    @property
    def tensor_index(self) -> str:
        """The index of the tensors: the pickle only where there is no JSON, as in checkpoints of earlier versions."""
        name = f"{self.tensor_folder}{names.TENSOR_INDEX_JSON}"
        return name if name in self.sizes else f"{self.tensor_folder}{names.TENSOR_INDEX}"

    def read(self, name: str, *, limit: int) -> bytearray:
        """A whole small file."""
        if self.sizes.get(name, 0) > limit:
            raise CheckpointError(
                f"{self.path / name} has {self.sizes[name]} bytes, more than the {limit} that such a file may have."
            )
        return self.read_range(name, 0, self.sizes.get(name, 0))

    def read_range(self, name: str, offset: int, length: int) -> bytearray:
        """Part of a file; raises CheckpointError if it is not what was committed."""
        if name not in self.sizes:
            raise CheckpointError(f"{self.path / name} is missing.")
        if offset < 0 or length < 0 or offset + length > self.sizes[name]:
            raise CheckpointError(f"{self.path / name} ends before byte {offset + length}.")
        content = bytearray(length)
        first, last = offset // BLOCK_BYTES, (offset + length - 1) // BLOCK_BYTES
        for number in range(first, last + 1):
            start = number * BLOCK_BYTES
            begin, end = max(offset, start), min(offset + length, start + BLOCK_BYTES)
            block = self._block(name, number, keep=number in (first, last))
            content[begin - offset : end - offset] = memoryview(block)[begin - start : end - start]
        return content

    def _block(self, name: str, number: int, *, keep: bool) -> bytes:
        """`keep` caches the block: the next piece probably begins in it, or another thread needs it now."""
        if not keep:
            return self._read_block(name, number)
        with self._lock:
            reading = self._cache.get((name, number))
            mine = reading is None
            if reading is None:
                reading = self._cache[name, number] = Future()
                while len(self._cache) > _CACHED_BLOCKS:
                    self._cache.popitem(last=False)
        if mine:
            try:
                reading.set_result(self._read_block(name, number))
            except BaseException as error:  # noqa: BLE001 - raised below, and in every thread that waits
                reading.set_exception(error)
        return reading.result()

    def _read_block(self, name: str, number: int) -> bytes:
        start = number * BLOCK_BYTES
        length = min(BLOCK_BYTES, self.sizes[name] - start)
        try:
            with open_regular(self.path / name, follow_links=False) as file:
                block = os.pread(file.fileno(), length, start)
        except OSError as error:
            raise CheckpointError(f"{self.path / name} cannot be read: {error}.") from error
        with self._lock:
            self.bytes_read += len(block)
        expected = self._expected(name)
        if len(block) != length or (expected is not None and hashlib.sha256(block).hexdigest() != expected[number]):
            raise CheckpointError(
                f"{self.path / name} does not match its SHA-256: it was damaged, or changed after it was verified. "
                f"Nothing of it is used. Use another checkpoint; `nsa checkpoint ls` shows which there are."
            )
        return block

    def _expected(self, name: str) -> tuple[str, ...] | None:
        if self.manifest is None:
            return None
        entry = self.manifest.files[name]
        if entry.sha256 is None:
            return entry.blocks
        with self._lock:
            if name not in self._digests:
                # The first format has one hash per file: blocks hashed in the same pass are as good as it is.
                hashes = hash_blocks(LocalFiles(self.path).chunks(name), whole=True)
                if not same_content(entry, hashes):
                    raise CheckpointError(f"{self.path / name} does not match its SHA-256.")
                self._digests[name] = hashes.blocks
            return self._digests[name]


def read_index(files: VerifiedFiles, name: str | None = None) -> Metadata:
    """The index of a checkpoint's tensors, or one form of it; raises CheckpointError if it cannot be trusted."""
    name, folder = name or files.tensor_index, files.tensor_folder
    sizes = {
        name.removeprefix(folder): size
        for name, size in files.sizes.items()
        if name.startswith(folder) and name.endswith(names.TENSOR_FILES)
    }
    if name not in files.sizes:
        raise CheckpointError(f"{files.path} holds no tensors: {names.TENSORS}/{names.TENSOR_INDEX} is missing.")
    raw = files.read(name, limit=largest_index(sum(sizes.values()), len(sizes)))
    return parse_index(raw, sizes, files.path / name)


def _read_piece(files: VerifiedFiles, where: PieceLocation) -> object:
    """A tensor, or a plain value, from its location in a `.distcp` file."""
    name = f"{files.tensor_folder}{where.relative_path}"
    return parse_plain(files.read_range(name, where.offset, where.length), files.path / name)


def _file_order(where: PieceLocation) -> tuple[str, int]:
    return where.relative_path, where.offset


def read_trainer_state(files: VerifiedFiles, rank: int) -> object:
    """The engine's state of a rank; that of rank 0 if the saving run had no such rank. None if there is neither."""
    for name in (names.trainer_state(rank), names.trainer_state(0)):
        if name in files.sizes:
            return parse_plain(files.read(name, limit=LARGEST_RANK_FILE_BYTES), files.path / name)
    return None


def parse_plain(raw: bytearray, where: Path) -> object:
    """Tensors and plain values from the bytes of a file of torch.save; `where` is for messages."""
    try:
        return read_torch_file(raw)
    except PickleRefused as error:
        raise CheckpointError(f"{where} cannot be loaded safely: {error}.") from error


def require_harmless(files: VerifiedFiles, *, pieces: bool = True, rank: int = 0, world: int = 1) -> Metadata:
    """Raise CheckpointError, naming the file, for anything that does not belong in a checkpoint or cannot be loaded.

    Returns the index of the tensors. `pieces=False` leaves out the pieces of tensors, of which a large run has
    millions, and the form of the index that is not used: they are checked when they are loaded. The ranks of a run
    divide the trainer states, one file per rank that saved, among them.
    """
    states = sorted(name for name in files.sizes if name.endswith(".pt"))
    for name in states[rank::world]:
        parse_plain(files.read(name, limit=LARGEST_RANK_FILE_BYTES), files.path / name)
    for name, size in files.sizes.items():
        if not names.is_known_file(name):
            raise CheckpointError(f"{files.path} holds {name!r}, which does not belong in a checkpoint.")
        if name.endswith(".json") and name != names.COMMIT and size > LARGEST_JSON_BYTES:
            raise CheckpointError(f"{files.path / name} has {size} bytes: a record has at most {LARGEST_JSON_BYTES}.")
    index = read_index(files)
    folder, used = files.tensor_folder, {where.relative_path for where in index.storage_data.values()}
    for name, size in files.sizes.items():  # a replica that had nothing to add leaves empty files
        inside = name.startswith(folder) and name.removeprefix(folder) in used
        if name.endswith(names.TENSOR_FILES) and size and not inside:
            raise CheckpointError(f"{files.path / name} is not in the index of tensors.")
    if pieces:
        pickled = f"{folder}{names.TENSOR_INDEX}"
        if pickled != files.tensor_index and read_index(files, pickled) != index:
            raise CheckpointError(f"{files.path / pickled} is not the index in {names.TENSOR_INDEX_JSON}.")
        unverified = VerifiedFiles(files.path, None)  # its hashes were compared a moment ago, and nothing is used
        for where in sorted(index.storage_data.values(), key=_file_order):
            _read_piece(unverified, where)
    return index


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
    """The model's full tensors from DCP's pieces, by parameter name, in one process, every byte verified.

    In the shapes of the library's model, if the checkpoint has the record of its run; else as they are stored.
    """
    index = read_index(files)
    paths: Mapping[str, Any] = index.planner_data or {}
    whole: dict[str, Tensor] = {}
    pieces: list[tuple[PieceLocation, str, Tensor, ChunkStorageMetadata]] = []
    for key, described in index.state_dict_metadata.items():
        path = [str(part) for part in paths.get(key, key.split("."))]
        if path[0] != "model" or not isinstance(described, TensorStorageMetadata):
            continue
        tensor = whole[".".join(path[1:])] = torch.empty(described.size, dtype=described.properties.dtype)
        places = (index.storage_data[MetadataIndex(key, chunk.offsets)] for chunk in described.chunks)
        pieces += [(place, key, tensor, chunk) for place, chunk in zip(places, described.chunks, strict=True)]
    # In the order of the files, where those of a tensor are far from each other: a block is read once.
    for place, key, part, chunk in sorted(pieces, key=lambda piece: _file_order(piece[0])):
        for dim, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            part = part.narrow(dim, offset, size)
        value = _read_piece(files, place)
        if not isinstance(value, Tensor) or part.shape != value.shape:
            raise CheckpointError(f"{files.path}: a piece of {key} has another shape than the index says.")
        part.copy_(value)
    if not whole:
        raise CheckpointError(f"{files.path} holds no model: no tensor in it is called model.*.")
    return _by_group(files, whole)


# φ: runs store it as rows (`nsa.core.pooling.rows_shape`), those of earlier versions by kv group, as the library does.

_OF_PHI = re.compile(r"\.phi_[kv]\.(\w+)")


def _rows(name: str, shape: Sequence[int]) -> torch.Size:
    phi = _OF_PHI.search(name)
    return torch.Size(shape if phi is None else rows_shape(phi[1], shape))


def _by_group(files: VerifiedFiles, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a model in the shapes of the library's, by the settings of the run."""
    record = read_record(files)
    as_rows = [name for name, each in tensors.items() if _OF_PHI.search(name) and not name.endswith(".pos_emb")]
    as_rows = [name for name in as_rows if _rows(name, tensors[name].shape) == tensors[name].shape]
    if record is None or not as_rows:
        return tensors
    try:
        shapes = pooling_shapes(RunConfig.of_saved(record.config).attention)
        by_group = {name: tensors[name].view(shapes[".".join(name.split(".")[-2:])]) for name in as_rows}
    except (ValidationError, NSAError, LookupError, RuntimeError) as error:
        raise CheckpointError(f"{files.path} has other tensors than its settings describe: {error}.") from error
    return {**tensors, **by_group}


def describe_as_rows(index: Metadata, state: Mapping[str, Any]) -> None:
    """Describe φ of an earlier version as the rows that `state`, into which it is loaded, has."""
    for name, described in index.state_dict_metadata.items():
        if not isinstance(described, TensorStorageMetadata) or (size := _rows(name, described.size)) == described.size:
            continue
        wanted: Any = state
        for part in (index.planner_data or {}).get(name, name.split(".")):
            wanted = wanted.get(part) if isinstance(wanted, Mapping) else None
        if not isinstance(wanted, Tensor) or wanted.shape != size:
            continue
        in_one = math.prod(described.size[1 : 1 + len(described.size) - len(size)])
        for place, chunk in enumerate(described.chunks):
            if chunk.sizes[1:] != described.size[1:]:
                raise CheckpointError(f"a piece of {name} is cut along another axis than the first.")
            offsets = torch.Size((chunk.offsets[0] * in_one, *(0 for _ in size[1:])))
            where = index.storage_data.pop(MetadataIndex(name, chunk.offsets))
            index.storage_data[MetadataIndex(name, offsets)] = where
            described.chunks[place] = ChunkStorageMetadata(offsets, torch.Size((chunk.sizes[0] * in_one, *size[1:])))
        described.size = size


class VerifiedReader(UnplannedStorage, StorageReader):
    """DCP storage reader over `VerifiedFiles`: what DCP loads is verified as it is read, and executes nothing."""

    def __init__(self, files: VerifiedFiles, index: Metadata, thread_count: int) -> None:
        self._files, self._index, self._thread_count = files, index, max(1, thread_count)

    @property
    def checkpoint_id(self) -> str:
        return str(self._files.path)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
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
        items = sorted(plan.items, key=lambda item: _file_order(where[item.storage_index]))
        waiting: deque[tuple[ReadItem, Future[object]]] = deque()
        with ThreadPoolExecutor(self._thread_count, thread_name_prefix="checkpoint-read") as pool:
            for item in items:
                waiting.append((item, pool.submit(_read_piece, self._files, where[item.storage_index])))
                if len(waiting) >= _READ_AHEAD * self._thread_count:
                    first, reading = waiting.popleft()
                    yield first, self._as_described(first, reading.result())
            while waiting:
                first, reading = waiting.popleft()
                yield first, self._as_described(first, reading.result())

    def _as_described(self, item: ReadItem, value: object) -> object:
        """A piece in the shape that the index has for it: see `describe_as_rows`."""
        described = self._index.state_dict_metadata[item.storage_index.fqn]
        if not isinstance(described, TensorStorageMetadata) or not isinstance(value, Tensor):
            return value
        return (
            value if value.dim() == len(described.size) else value.reshape(_rows(item.storage_index.fqn, value.shape))
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass


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
