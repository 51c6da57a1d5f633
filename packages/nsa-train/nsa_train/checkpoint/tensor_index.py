"""Safe reader for DCP's `.metadata`, the index of a checkpoint's tensors (a pickle), without executing anything.

The result is built from checked values: every piece is in a file of the same folder, no two pieces share bytes, and
every tensor is as large as the sum of its pieces.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import torch
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
from nsa_train.checkpoint.pickle_reader import PickledName, PickleGrammar, PickleRefused, read_pickle
from nsa_train.checkpoint.torch_file import DTYPES, size_of, whole_numbers

_DCP = "torch.distributed.checkpoint.metadata"
_FORMATS = (torch.contiguous_format, torch.channels_last, torch.preserve_format)
_FORMAT_NAMES = ("TORCH_CONTIGUOUS_FORMAT", "TORCH_CHANNELS_LAST", "TORCH_PRESERVE_FORMAT")
_FORMAT = PickledName(_DCP, "_MEM_FORMAT_ENCODING")
_SMALLEST_LIMIT_BYTES = 16 << 20
_LARGEST_SHARE_BYTES = 1 << 20
_LONGEST_PATH = 4096
_INDEX_OBJECT_BYTES = 64  # beyond an object of no fields


@dataclass(frozen=True, slots=True)
class PieceLocation:
    """Location of the bytes of one piece; the engine's `_StorageInfo`."""

    relative_path: str
    offset: int
    length: int


def largest_index(tensor_bytes: int, files: int) -> int:
    """Size limit of an index of so many bytes of tensors in so many files.

    An index has about 120 bytes per piece: less than a thousandth of the tensors while pieces are large, and with
    thousands of shards, whose pieces are small, 120 kB per rank and thousand tensors.
    """
    return _SMALLEST_LIMIT_BYTES + tensor_bytes // 1000 + files * _LARGEST_SHARE_BYTES


def parse_index(raw: bytes | bytearray, sizes: Mapping[str, int], where: object) -> Metadata:
    """The index in these bytes; raises CheckpointError. `sizes`: the files beside it, by name, in bytes."""
    try:
        index = read_pickle(raw, _GRAMMAR)
        if type(index) is not Metadata:
            raise PickleRefused(f"it holds {type(index).__name__}")
        _require_sound(index, sizes)
    except PickleRefused as error:
        raise CheckpointError(f"{where} is not an index of tensors that can be trusted: {error}.") from error
    return index


def _require_sound(index: Metadata, sizes: Mapping[str, int]) -> None:
    used_bytes: dict[str, int] = {}
    pieces: dict[MetadataIndex, PieceLocation] = index.storage_data
    for place in pieces.values():
        if place.relative_path not in sizes:
            raise PickleRefused(f"it points at {place.relative_path!r}, which is not in its folder")
        if place.offset + place.length > sizes[place.relative_path]:
            raise PickleRefused(f"it points beyond the end of {place.relative_path}")
        used_bytes[place.relative_path] = used_bytes.get(place.relative_path, 0) + place.length
        if used_bytes[place.relative_path] > sizes[place.relative_path]:
            raise PickleRefused(f"it reads the same bytes of {place.relative_path} more than once")
    for key, described in index.state_dict_metadata.items():
        if type(described) is BytesStorageMetadata:
            if MetadataIndex(key) not in pieces:
                raise PickleRefused(f"it has no location for {key!r}")
            continue
        assert isinstance(described, TensorStorageMetadata)
        covered = 0
        if len({chunk.offsets for chunk in described.chunks}) != len(described.chunks):
            raise PickleRefused(f"it has a piece of {key!r} more than once")  # their bytes are there once
        for chunk in described.chunks:
            place_of_chunk = pieces.get(MetadataIndex(key, chunk.offsets))
            numel = math.prod(chunk.sizes)
            if place_of_chunk is None or numel * described.properties.dtype.itemsize > place_of_chunk.length:
                raise PickleRefused(f"a piece of {key!r} is larger than its location, or has none")
            if not len(chunk.offsets) == len(chunk.sizes) == len(described.size) or any(
                start + length > whole
                for start, length, whole in zip(chunk.offsets, chunk.sizes, described.size, strict=True)
            ):
                raise PickleRefused(f"a piece of {key!r} is outside of its tensor")
            covered += numel
        if covered != math.prod(described.size):
            raise PickleRefused(f"the pieces of {key!r} have {covered} of its {math.prod(described.size)} values")


def _fields(state: Any, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> list[Any]:
    """The values of known fields, in order; None for missing optional ones."""
    if type(state) is not dict or not set(required) <= state.keys() <= {*required, *optional}:
        raise PickleRefused("it has an object with other fields than expected")
    return [state.get(name) for name in (*required, *optional)]


def _require(*rules: bool) -> None:
    if not all(rules):
        raise PickleRefused("it has an object with a field of another type than expected")


def _text_or_none(value: Any) -> bool:
    return value is None or type(value) is str


def _metadata(state: Any) -> Metadata:
    required = ("state_dict_metadata", "planner_data", "storage_data")
    described, paths, pieces, meta, version = _fields(state, required, ("storage_meta", "version"))
    paths = {} if paths is None else paths
    _require(type(described) is dict, type(paths) is dict, type(pieces) is dict, _text_or_none(version))
    _require(meta is None or type(meta) is StorageMeta)
    _require(all(type(key) is str for key in described))
    _require(all(type(value) in (TensorStorageMetadata, BytesStorageMetadata) for value in described.values()))
    _require(all(type(key) is MetadataIndex and type(place) is PieceLocation for key, place in pieces.items()))
    _require(all(type(path) is tuple and 0 < len(path) < 64 for path in paths.values()))
    _require(all(type(part) in (str, int) for path in paths.values() for part in path))
    return Metadata(described, paths, pieces, meta, version)


def _metadata_index(state: Any) -> MetadataIndex:
    fqn, offset, index = _fields(state, ("fqn",), ("offset", "index"))
    _require(type(fqn) is str, offset is None or type(offset) is torch.Size, index is None or type(index) is int)
    return MetadataIndex(fqn, offset, index)


def _piece(state: Any) -> PieceLocation:
    path, offset, length, transforms = _fields(state, ("relative_path", "offset", "length"), ("transform_descriptors",))
    _require(type(path) is str, not transforms)
    whole_numbers((offset, length))
    return PieceLocation(path, offset, length)


def _tensor(state: Any) -> TensorStorageMetadata:
    properties, size, chunks = _fields(state, ("properties", "size", "chunks"))
    _require(type(properties) is TensorProperties, type(size) is torch.Size, type(chunks) is list)
    _require(all(type(chunk) is ChunkStorageMetadata for chunk in chunks))
    return TensorStorageMetadata(properties, size, chunks)


def _chunk(state: Any) -> ChunkStorageMetadata:
    offsets, sizes = _fields(state, ("offsets", "sizes"))
    _require(type(offsets) is torch.Size, type(sizes) is torch.Size)
    return ChunkStorageMetadata(offsets, sizes)


def _properties(state: Any) -> TensorProperties:
    _require(type(state) is tuple, len(state) == 5)
    dtype, layout, requires_grad, memory_format, pin_memory = state
    _require(type(dtype) is torch.dtype, layout is torch.strided, type(requires_grad) is bool)
    _require(type(memory_format) is torch.memory_format, type(pin_memory) is bool)
    return TensorProperties(dtype, layout, requires_grad, memory_format, pin_memory)


def _storage_meta(state: Any) -> StorageMeta:
    names = ("checkpoint_id", "save_id", "load_id", "modules")
    checkpoint_id, save_id, load_id, modules = _fields(state, (), names)
    _require(_text_or_none(checkpoint_id), _text_or_none(save_id), _text_or_none(load_id))
    _require(modules is None or (type(modules) is list and all(type(name) is str for name in modules)))
    return StorageMeta(checkpoint_id, save_id, load_id, modules or [])


def _layout(name: Any) -> torch.layout:
    _require(name == "torch.strided")
    return torch.strided


def _memory_format(number: Any) -> torch.memory_format:
    _require(type(number) is int, number in (0, 1, 2))
    return _FORMATS[number]


def _member(of: Any, name: Any) -> torch.memory_format:
    """`getattr`, with which Python up to 3.11.3 pickles an enum member: only for that."""
    _require(of == _FORMAT, name in _FORMAT_NAMES)
    return _FORMATS[_FORMAT_NAMES.index(name)]


def _path(*parts: Any) -> str:
    _require(all(type(part) is str for part in parts), sum(map(len, parts)) < _LONGEST_PATH)
    return str(PurePosixPath(*parts))


_OBJECTS: dict[PickledName, Callable[[Any], Any]] = {
    PickledName(_DCP, "Metadata"): _metadata,
    PickledName(_DCP, "MetadataIndex"): _metadata_index,
    PickledName(_DCP, "TensorStorageMetadata"): _tensor,
    PickledName(_DCP, "ChunkStorageMetadata"): _chunk,
    PickledName(_DCP, "TensorProperties"): _properties,
    PickledName(_DCP, "StorageMeta"): _storage_meta,
    PickledName("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _piece,
    PickledName("olmo_core.distributed.checkpoint.filesystem", "_StorageInfo"): _piece,
}
_CALLS: dict[PickledName, Callable[..., Any]] = {
    PickledName("torch", "Size"): size_of,
    PickledName("torch.serialization", "_get_layout"): _layout,
    _FORMAT: _memory_format,
    PickledName("builtins", "getattr"): _member,
    **{
        PickledName(module, name): _path
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath")
    },
}
_GRAMMAR = PickleGrammar(
    constants=DTYPES,
    calls=_CALLS,
    objects=_OBJECTS,
    stateless={PickledName(_DCP, "BytesStorageMetadata"): BytesStorageMetadata},
    leaves=frozenset({Metadata}),
    keys=frozenset({MetadataIndex}),
    memory=lambda value: _INDEX_OBJECT_BYTES,
)
