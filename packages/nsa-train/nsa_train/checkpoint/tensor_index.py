"""The index of a checkpoint's tensors: where each piece is. Written as JSON, and as DCP's pickle for other readers.

Checkpoints of earlier versions, and folders that DCP wrote alone, have the pickle (`.metadata`) only; it is read
without executing anything. The result is built from checked values: every piece is in a file of the same folder, no two
pieces share bytes, and every tensor is as large as the sum of its pieces.
"""

import io
import json
import math
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from nsa.errors import CheckpointError
from nsa_train import names
from nsa_train.checkpoint.manifest import HashedFile, ManifestEntry
from nsa_train.checkpoint.safe_pickle import (
    DTYPE_NAMES,
    DTYPES,
    PendingObject,
    PickleRefused,
    read_pickle,
    whole_numbers,
)

_FORMAT = 1
_SMALLEST_LIMIT_BYTES = 16 << 20
_LARGEST_SHARE_BYTES = 1 << 20
_DEEPEST_PATH = 64

PieceWritten = tuple[str, tuple[int, ...] | None, str, int, int]
"""Name and offsets of the piece (None for what is no tensor), file, first byte, length."""


@dataclass(frozen=True, slots=True)
class PieceLocation:
    """Location of the bytes of one piece; the engine's `_StorageInfo`."""

    relative_path: str
    offset: int
    length: int


class UnplannedStorage:
    """What DCP wants of a storage that leaves the plans of all ranks as they are."""

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        return plans

    def reset(self, checkpoint_id: Any = None) -> None: ...

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def largest_index(tensor_bytes: int, files: int) -> int:
    """Size limit of an index of so many bytes of tensors in so many files.

    An index has about 120 bytes per piece: less than a thousandth of the tensors while pieces are large, and with
    thousands of shards, whose pieces are small, 120 kB per rank and thousand tensors.
    """
    return _SMALLEST_LIMIT_BYTES + tensor_bytes // 1000 + files * _LARGEST_SHARE_BYTES


# Writing.


def write_index(folder: Path, metadata: Metadata, pieces: Iterable[PieceWritten]) -> dict[str, ManifestEntry]:
    """Write both forms of the index into the folder of the tensors; returns their hashes by file name."""
    places = {(name, at): (file, start, length) for name, at, file, start, length in pieces}
    metadata.storage_data, metadata.storage_meta = {}, StorageMeta()
    files = sorted({file for file, _, _ in places.values()})
    numbers = {file: number for number, file in enumerate(files)}
    with HashedFile(folder / names.TENSOR_INDEX_JSON) as text, HashedFile(folder / names.TENSOR_INDEX) as pickled:
        _write_line(text, {"format": _FORMAT, "files": files})
        for name, described in metadata.state_dict_metadata.items():
            line: dict[str, Any] = {"name": name, "path": metadata.planner_data[name], "pieces": []}
            boxes: list[tuple[Any, Any]] = [(None, ())]
            if isinstance(described, TensorStorageMetadata):
                line |= {"dtype": str(described.properties.dtype).removeprefix("torch."), "size": described.size}
                boxes = [(chunk.offsets, chunk.sizes) for chunk in described.chunks]
            for at, sizes in boxes:
                file, start, length = places[name, at]
                line["pieces"].append((numbers[file], start, length, *(at or ()), *sizes))
                metadata.storage_data[_index_key(name, at)] = _StorageInfo(file, start, length)
            _write_line(text, line)
        pickle.dump(metadata, pickled)
    return {file.path.name: file.entry() for file in (text, pickled)}


def _index_key(name: str, at: torch.Size | None) -> MetadataIndex:
    key = MetadataIndex(name)
    if at is not None:
        object.__setattr__(key, "offset", at)  # the constructor makes a copy; pickle writes an object once
    return key


def _write_line(file: HashedFile, value: object) -> None:
    file.write(json.dumps(value, separators=(",", ":")).encode() + b"\n")


# Reading.


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor or a value of the index, as it was read: nothing in it is checked."""

    name: Any
    path: Any
    dtype: Any
    """None for what is no tensor."""
    size: Any
    pieces: Iterable[Any]
    """File, first byte, length, offsets and sizes of each."""


def parse_index(raw: bytes | bytearray, sizes: Mapping[str, int], where: Path) -> Metadata:
    """The index in these bytes; raises CheckpointError. `sizes`: the files beside it, by name, in bytes."""
    try:
        return _build(_entries_of_pickle(raw) if where.name == names.TENSOR_INDEX else _entries_of_json(raw), sizes)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        reason = error if isinstance(error, PickleRefused) else f"it is damaged ({type(error).__name__})"
        raise CheckpointError(f"{where} is not an index of tensors that can be trusted: {reason}.") from error


def _build(entries: Iterable[_Entry], sizes: Mapping[str, int]) -> Metadata:
    index = Metadata({}, {}, {}, StorageMeta())
    used = dict.fromkeys(sizes, 0)
    for entry in entries:
        name, path = entry.name, entry.path
        if type(name) is not str or name in index.state_dict_metadata:
            raise PickleRefused(f"it has the name {name!r:.80}, which is not text, or has it twice")
        if path is not None:
            known = type(path) in (list, tuple) and 0 < len(path) < _DEEPEST_PATH
            if not known or any(type(part) not in (str, int) for part in path):
                raise PickleRefused(f"it has an invalid path of {name!r:.80}")
            index.planner_data[name] = tuple(path)
        if entry.dtype is not None and type(entry.dtype) is not torch.dtype:
            raise PickleRefused(f"it has no type of {name!r:.80}")
        size = torch.Size(whole_numbers(entry.size))
        chunks: dict[torch.Size, ChunkStorageMetadata] = {}
        covered = 0
        for file, start, length, at, shape in entry.pieces:
            offsets, piece = torch.Size(whole_numbers(at)), torch.Size(whole_numbers(shape))
            start, length = whole_numbers((start, length))
            _require_place(file, start, length, sizes, used)
            if offsets in chunks:  # its bytes are there once
                raise PickleRefused(f"it has a piece of {name!r:.80} more than once")
            inside = all(begin + n <= whole for begin, n, whole in zip(offsets, piece, size, strict=False))
            if not len(offsets) == len(piece) == len(size) or not inside:
                raise PickleRefused(f"a piece of {name!r:.80} is outside of its tensor")
            if entry.dtype is not None and math.prod(piece) * entry.dtype.itemsize > length:
                raise PickleRefused(f"a piece of {name!r:.80} is larger than its location")
            covered += math.prod(piece)
            chunks[offsets] = ChunkStorageMetadata(offsets, piece)
            key = _index_key(name, None if entry.dtype is None else offsets)
            index.storage_data[key] = PieceLocation(file, start, length)
        if covered != math.prod(size):
            raise PickleRefused(f"the pieces of {name!r:.80} have {covered} of its {math.prod(size)} values")
        if entry.dtype is None:
            index.state_dict_metadata[name] = BytesStorageMetadata()
        else:
            properties = TensorProperties(dtype=entry.dtype)
            index.state_dict_metadata[name] = TensorStorageMetadata(properties, size, list(chunks.values()))
    return index


def _require_place(file: Any, start: int, length: int, sizes: Mapping[str, int], used: dict[str, int]) -> None:
    if file not in used:
        raise PickleRefused(f"it points at {file!r:.80}, which is not in its folder")
    used[file] += length
    if start + length > sizes[file]:
        raise PickleRefused(f"it points beyond the end of {file}")
    if used[file] > sizes[file]:
        raise PickleRefused(f"it reads the same bytes of {file} more than once")


def _entries_of_json(raw: bytes | bytearray) -> Iterator[_Entry]:
    lines = io.BytesIO(raw)
    head = json.loads(next(lines, b"{}"))
    if head["format"] != _FORMAT:
        raise PickleRefused(f"it has format {head['format']!r:.40}, this version reads {_FORMAT}")
    files = head["files"]
    for line in map(json.loads, lines):
        size = line.get("size", [])
        end = 3 + len(size)
        pieces = ((files[piece[0]], *piece[1:3], piece[3:end], piece[end:]) for piece in line["pieces"])
        yield _Entry(line["name"], line["path"], DTYPES[line["dtype"]] if "dtype" in line else None, size, pieces)


def _entries_of_pickle(raw: bytes | bytearray) -> Iterator[_Entry]:
    index = read_pickle(raw, _PICKLED_NAMES)
    paths, places = index["planner_data"] or {}, index["storage_data"]

    def pieces(name: str, chunks: Any) -> Iterator[Any]:
        for offsets, sizes in chunks:
            place = places.get((name, *offsets))
            if place is None:
                raise PickleRefused(f"it has no location for a piece of {name!r:.80}")
            yield *place, offsets, sizes

    for name, (dtype, size, chunks) in index["state_dict_metadata"].items():
        yield _Entry(name, paths.get(name), dtype, size, pieces(name, chunks))


def _fields(*required: str, optional: tuple[str, ...] = (), then: Callable[..., Any] = lambda *values: values) -> Any:
    """Values of the fields from which a pickle builds an object of a class, in order, None for missing ones."""

    def finish(state: Any) -> Any:
        if type(state) is not dict or not set(required) <= state.keys() <= {*required, *optional}:
            raise PickleRefused("it has an object with other fields than expected")
        return then(*(state.get(name) for name in (*required, *optional)))

    return lambda: PendingObject(finish)


def _memory_format(number: Any) -> None:
    if type(number) is not int:
        raise PickleRefused("it has an unknown memory format")


def _member(of: Any, name: Any) -> None:
    """`getattr`, with which Python up to 3.11.3 pickles an enum member: only for that."""
    if of is not _memory_format or type(name) is not str or not name.startswith("TORCH_"):
        raise PickleRefused("it calls getattr")


def _piece_key(name: Any, offset: Any, _index: Any) -> tuple[Any, ...]:
    return (name, *whole_numbers(offset or ()))


def _place(path: Any, offset: Any, length: Any, transforms: Any) -> tuple[Any, ...]:
    if transforms:
        raise PickleRefused("it has pieces that are compressed or encrypted")
    return path, offset, length


_DCP = "torch.distributed.checkpoint.metadata"
_STORAGE_META = ("checkpoint_id", "save_id", "load_id", "modules")
_LOCATION = _fields("relative_path", "offset", "length", optional=("transform_descriptors",), then=_place)
_PICKLED_NAMES: dict[str, Any] = {
    **DTYPE_NAMES,
    f"{_DCP}.Metadata": _fields(
        "state_dict_metadata", "planner_data", "storage_data", optional=("storage_meta", "version"),
        then=lambda tensors, paths, places, *_: {
            "state_dict_metadata": tensors, "planner_data": paths, "storage_data": places
        },
    ),
    f"{_DCP}.MetadataIndex": _fields("fqn", optional=("offset", "index"), then=_piece_key),
    f"{_DCP}.TensorStorageMetadata": _fields("properties", "size", "chunks"),
    f"{_DCP}.ChunkStorageMetadata": _fields("offsets", "sizes"),
    f"{_DCP}.BytesStorageMetadata": lambda: (None, (), [((), ())]),
    f"{_DCP}.TensorProperties": lambda: PendingObject(lambda state: state[0]),
    f"{_DCP}.StorageMeta": _fields(optional=_STORAGE_META),
    f"{_DCP}._MEM_FORMAT_ENCODING": _memory_format,
    "torch.serialization._get_layout": lambda name: None,
    "builtins.getattr": _member,
    **{f"{package}.filesystem._StorageInfo": _LOCATION for package in
       ("torch.distributed.checkpoint", "olmo_core.distributed.checkpoint")},
    **{f"{module}.{name}": lambda *parts: None for module in ("pathlib", "pathlib._local")
       for name in ("PosixPath", "PurePosixPath")},
}  # fmt: skip
