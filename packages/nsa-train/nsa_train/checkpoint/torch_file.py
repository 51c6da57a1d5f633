"""Safe reader for files of torch.save: plain values and tensors in a zip archive, without executing or decompressing.

`torch.load` decompresses archives, so that 2 MiB become 2 GiB, and with weights_only=False it runs any code. Here an
archive is as large as its records, a storage as large as its record, and a tensor at most as large as its storage.
Tensors share the memory of the bytes they were read from.
"""

import io
import math
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nsa_train.checkpoint.pickle_reader import PendingObject, PickledName, PickleGrammar, PickleRefused, read_pickle

_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}
_DTYPE_NAMES = (
    *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
    *("float16", "float32", "float64", "bfloat16", "float8_e4m3fn", "float8_e5m2", "bool", "complex64", "complex128"),
)
DTYPES = {PickledName("torch", name): getattr(torch, name) for name in _DTYPE_NAMES}
_UNTYPED = PickledName("torch.storage", "UntypedStorage")
_NUMPY = ("numpy.core.multiarray", "numpy._core.multiarray")
_ARRAY_KINDS = {*(f"{kind}{size}" for kind in "iu" for size in (1, 2, 4, 8)), "f2", "f4", "f8", "b1"}
_NDARRAY = PickledName("numpy", "ndarray")
_LARGEST_PICKLE_BYTES = 16 << 20
_LARGEST_LISTING_BYTES = 8 << 20
_MOST_DIMENSIONS = 64
_TENSOR_BYTES = 800  # of the object, or of its storage, without the values
_LOCAL_HEADER = struct.Struct("<4s22xHH")


@dataclass(frozen=True, slots=True)
class _TensorStorage:
    content: memoryview | None
    """The object, or None if the tensors are not read."""
    nbytes: int
    dtype: torch.dtype | None
    """Type of the tensor's elements; None for bytes without a type."""


@dataclass(frozen=True, slots=True)
class _UnreadArray:
    """A numpy array that is not read, or the type of one."""

    kind: str
    nbytes: int = 0

    @property
    def itemsize(self) -> int:
        return int(self.kind[1:])


class _FileWindow(io.RawIOBase):
    """A part of a file as a seekable file, for listing its records."""

    def __init__(self, read: Callable[[int, int], bytes | bytearray | memoryview], size: int) -> None:
        self._read, self._size, self._at = read, size, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, offset + (0, self._at, self._size)[whence])
        return self._at

    def read(self, count: int = -1) -> bytes:
        left = max(0, self._size - self._at)
        count = left if count < 0 else min(count, left)
        if count > _LARGEST_LISTING_BYTES:
            raise PickleRefused("its list of records is too long")
        content = bytes(self._read(self._at, count)) if count else b""
        self._at += len(content)
        return content


def read_torch_file(content: bytearray) -> Any:
    """The value in the bytes of a file; raises PickleRefused."""
    view = memoryview(content)
    archive = _ZipArchive(lambda offset, count: view[offset : offset + count], len(content))
    return archive.value(with_tensors=True)


def check_torch_file(read: Callable[[int, int], bytes | bytearray | memoryview], size: int) -> None:
    """Raise PickleRefused for what `read_torch_file` would refuse, without reading the tensors.

    `read(offset, count)` gives bytes of the file.
    """
    _ZipArchive(read, size).value(with_tensors=False)


class _ZipArchive:
    def __init__(self, read: Callable[[int, int], bytes | bytearray | memoryview], size: int) -> None:
        self._read, self._size = read, size
        try:
            with zipfile.ZipFile(_FileWindow(read, size)) as archive:
                infos = archive.infolist()
        except PickleRefused:
            raise
        except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error, IndexError) as error:
            raise PickleRefused(f"it is not an archive written by torch.save ({error})") from error
        self._records = {info.filename.partition("/")[2]: info for info in infos}
        if len(self._records) != len(infos):
            raise PickleRefused("it holds two records of the same name")
        if any(
            info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size or info.flag_bits & 1
            for info in infos
        ):
            raise PickleRefused("it holds compressed or encrypted records, which torch.save does not write")
        if sum(info.file_size for info in infos) > size:
            raise PickleRefused("its records are larger than the file")
        if "byteorder" in self._records and bytes(self._record("byteorder", 16)) != b"little":
            raise PickleRefused("it was not written on a little-endian machine")

    def value(self, *, with_tensors: bool) -> Any:
        self._with_tensors = with_tensors
        return read_pickle(self._record("data.pkl", _LARGEST_PICKLE_BYTES), _grammar(self._storage, with_tensors))

    def _record(self, name: str, limit: int | None = None) -> bytes | bytearray | memoryview:
        start, size = self._place(name)
        if limit is not None and size > limit:
            raise PickleRefused(f"its {name} has {size} bytes, more than the {limit} allowed")
        return self._read(start, size)

    def _place(self, name: str) -> tuple[int, int]:
        if name not in self._records:
            raise PickleRefused(f"it has no {name}")
        info = self._records[name]
        header = bytes(self._read(info.header_offset, _LOCAL_HEADER.size)) if info.header_offset >= 0 else b""
        if len(header) != _LOCAL_HEADER.size:
            raise PickleRefused(f"its {name} is cut off")
        magic, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
        start = info.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
        if magic != b"PK\x03\x04" or start + info.file_size > self._size:
            raise PickleRefused(f"its {name} is cut off")
        return start, info.file_size

    def _storage(self, pid: Any) -> _TensorStorage:
        kind, name, key, _location, numel = pid
        if kind != "storage" or type(name) is not PickledName or type(key) is not str or type(numel) is not int:
            raise PickleRefused("it refers to a persistent object that is not a storage")
        dtype = None if name == _UNTYPED else _STORAGES[name.name]
        _, size = self._place(f"data/{key}")
        if numel < 0 or size != numel * (1 if dtype is None else dtype.itemsize):
            raise PickleRefused(f"it has a storage of {size} bytes for {numel} values")
        return _TensorStorage(memoryview(self._record(f"data/{key}")) if self._with_tensors else None, size, dtype)


def _grammar(storage: Callable[[Any], _TensorStorage], with_tensors: bool) -> PickleGrammar:
    return PickleGrammar(
        constants=DTYPES,
        calls={
            PickledName("torch._utils", "_rebuild_tensor_v2"): _tensor,
            PickledName("torch._utils", "_rebuild_tensor_v3"): _tensor_v3,
            PickledName("torch._utils", "_rebuild_parameter"): lambda data, requires_grad, hooks: _require_tensor(data),
            PickledName("torch", "Size"): size_of,
            PickledName("collections", "OrderedDict"): lambda items=(): dict(_pairs(items)),
            PickledName("_codecs", "encode"): _encode,
            PickledName("numpy", "dtype"): _numpy_dtype,
            **{PickledName(module, "_reconstruct"): partial(_array, with_tensors) for module in _NUMPY},
        },
        arguments=frozenset({*(PickledName("torch", name) for name in _STORAGES), _UNTYPED, _NDARRAY}),
        persistent=storage,
        leaves=frozenset({Tensor, torch.dtype, torch.Size, _array_type() if with_tensors else _UnreadArray}),
        memory=_memory,
    )


def _memory(value: Any) -> int:
    """Estimate the memory of a value; a tensor shares the bytes of its storage, an array has its own."""
    if type(value) in (Tensor, _TensorStorage):
        return _TENSOR_BYTES
    return 8 * len(value) if type(value) is torch.Size else int(getattr(value, "nbytes", 0))


def _array_type() -> type:
    import numpy  # not installed where only attention is

    return numpy.ndarray


def size_of(values: Any) -> torch.Size:
    return torch.Size(whole_numbers(values))


def whole_numbers(values: Any) -> tuple[int, ...]:
    if (
        type(values) not in (tuple, torch.Size)
        or len(values) > _MOST_DIMENSIONS
        or any(type(value) is not int or not 0 <= value < 2**62 for value in values)
    ):
        raise PickleRefused("it gives a tensor an invalid shape")
    return tuple(values)


def _pairs(items: Any) -> list[tuple[Any, Any]]:
    pairs = [tuple(pair) for pair in items]
    if any(len(pair) != 2 or type(pair[0]) is not str for pair in pairs):
        raise PickleRefused("it has a dictionary whose keys are not text")
    return pairs


def _require_tensor(data: Any) -> Tensor:
    if type(data) is not Tensor:
        raise PickleRefused("it makes a parameter of something that is not a tensor")
    return data


def _tensor_v3(
    storage: Any, offset: Any, size: Any, stride: Any, requires_grad: Any, hooks: Any, dtype: Any, metadata: Any = None
) -> Tensor:
    return _tensor(storage, offset, size, stride, requires_grad, hooks, metadata, dtype=dtype)


def _tensor(
    storage: Any,
    offset: Any,
    size: Any,
    stride: Any,
    requires_grad: Any,
    hooks: Any,
    metadata: Any = None,
    *,
    dtype: Any = None,
) -> Tensor:
    if type(storage) is not _TensorStorage or hooks or metadata:
        raise PickleRefused("it makes a tensor of something that is not a storage, or gives it hooks")
    dtype = dtype if storage.dtype is None else storage.dtype
    size, stride, (offset,) = whole_numbers(size), whole_numbers(stride), whole_numbers((offset,))
    if type(dtype) is not torch.dtype or len(size) != len(stride):
        raise PickleRefused("it gives a tensor no type, or no stride per dimension")
    last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    numel = math.prod(size)
    available = storage.nbytes // dtype.itemsize
    if numel and (last >= available or numel > available):
        raise PickleRefused(f"it makes a tensor of {numel} values of a storage of {available}")
    if storage.content is None:
        return torch.empty(0, dtype=dtype)
    try:
        if not numel:
            return torch.empty(size, dtype=dtype)
        flat = torch.frombuffer(storage.content, dtype=dtype, count=available)
        return flat.as_strided(size, stride, offset)
    except (RuntimeError, ValueError) as error:
        raise PickleRefused(f"it makes an invalid tensor ({error})") from error


def _encode(text: Any, encoding: Any) -> bytes:
    if type(text) is not str or encoding != "latin1":
        raise PickleRefused("it encodes something other than bytes")
    return text.encode("latin1")


def _numpy_dtype(kind: Any, align: Any = False, copy: Any = False) -> PendingObject:
    """Numbers only: a dtype of objects or fields holds more than bytes."""
    if type(kind) is not str or kind not in _ARRAY_KINDS:
        raise PickleRefused(f"it has an array of type {kind!r}")

    def finish(state: Any) -> _UnreadArray:
        if type(state) is not tuple or len(state) < 2 or state[1] not in ("<", "|"):
            raise PickleRefused("it has an array in another byte order")
        return _UnreadArray(kind)

    return PendingObject(finish)


def _array(with_tensors: bool, kind: Any, shape: Any, code: Any) -> PendingObject:
    if kind != _NDARRAY:
        raise PickleRefused("it makes an array of another class")

    def finish(state: Any) -> Any:
        _version, shape, dtype, fortran, content = state
        shape = whole_numbers(shape)
        if type(dtype) is not _UnreadArray or type(content) is not bytes or type(fortran) is not bool:
            raise PickleRefused("it makes an array of something that is not bytes")
        if len(content) != math.prod(shape) * dtype.itemsize:
            raise PickleRefused("it has an array whose size differs from its bytes")
        if not with_tensors:
            return _UnreadArray(dtype.kind, len(content))
        import numpy

        return numpy.frombuffer(content, f"<{dtype.kind}").reshape(shape, order="F" if fortran else "C").copy()

    return PendingObject(finish)
