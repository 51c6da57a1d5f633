"""Reads pickles and files of torch.save without importing, calling or changing anything that they name.

`pickletools` decodes the operations of a pickle. A name in it is looked up in a short table of constants and functions
of ours, and everything else is refused. Containers are exact built-in types, so that nothing in the result has a method
from the pickle. A pickle can name a value again in two bytes: everything that is made is charged to a budget of memory
in proportion to the size of the pickle.

`torch.load` decompresses archives, so that 2 MiB become 2 GiB, and does not bound the memory of a pickle. Here an
archive is as large as its records, a storage as large as its record, and a tensor at most as large as its storage.
Tensors share the memory of the bytes they were read from.
"""

import math
import pickletools
import struct
import zipfile
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

_DEEPEST = 64
_LARGEST_KEY = 1 << 60  # larger integers can be chosen to share a hash, which makes a dict quadratic
_LONGEST_KEY = 64  # parts of a key that is a tuple; its hash is computed at every use
_FREE_BYTES = 1 << 20
_MOST_EXPANSION = 32  # bytes of memory per byte of a pickle; an index of tensors takes 12, by these estimates 18
_FREE_VALUES = 1 << 20
# Estimates of what CPython allocates.
_OBJECT_BYTES, _ITEM_BYTES, _ENTRY_BYTES, _PENDING_BYTES, _TENSOR_BYTES = 72, 8, 48, 120, 800
_LARGEST_PICKLE_BYTES = 16 << 20
_LARGEST_LISTING_BYTES = 8 << 20
_MOST_DIMENSIONS = 64
_LOCAL_HEADER = struct.Struct("<4s22xHH")


class PickleRefused(ValueError):
    """The pickle contains something that its reader does not allow."""


class PendingObject:
    """An object between its creation and its BUILD; `finish` turns the state into a value."""

    def __init__(self, finish: Callable[[Any], Any]) -> None:
        self.finish = finish
        self.memo_keys: list[int] = []


def _no_storage(pid: object) -> Any:
    raise PickleRefused("it refers to a persistent object")


def read_pickle(
    raw: bytes | bytearray | memoryview,
    names: Mapping[str, Any],
    load_storage: Callable[[Any], Any] = _no_storage,
) -> Any:
    """The value of a pickle; raises PickleRefused for what is not allowed, and for damage.

    names: by `module.name`, constants, and functions that take the place of what is called; one of them may return a
    `PendingObject`. load_storage: resolves a persistent id.
    """
    try:
        return _PickleMachine(bytes(raw), names, load_storage).run()
    except PickleRefused:
        raise
    # Damage: missing positions and marks, states of the wrong shape, bytes that are not text.
    except (IndexError, KeyError, TypeError, ValueError, AttributeError, struct.error, OverflowError) as error:
        raise PickleRefused(f"it is damaged ({type(error).__name__})") from error


_MARK = object()
_VALUES = frozenset(
    (
        *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8"),
        *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
    )
)
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": (), "MARK": _MARK}
_SHORT_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _PickleMachine:
    def __init__(self, raw: bytes, names: Mapping[str, Any], load_storage: Callable[[Any], Any]) -> None:
        self._raw, self._names, self._load_storage = raw, names, load_storage
        self._stack: list[Any] = []
        self._memo: list[Any] = []
        self._memory_left = _FREE_BYTES + _MOST_EXPANSION * len(raw)

    def run(self) -> Any:
        push = self._stack.append
        argument: Any
        for operation, argument, _ in pickletools.genops(self._raw):
            name = operation.name
            if name in _VALUES:
                push(argument)
            elif name in ("BINGET", "LONG_BINGET"):
                push(self._memo[argument])
            elif name in ("MEMOIZE", "BINPUT", "LONG_BINPUT"):
                self._put(len(self._memo) if argument is None else argument)
            elif name in _CONSTANTS:
                push(_CONSTANTS[name])
            elif name in _SHORT_TUPLES:
                self._push_new(tuple([self._pop() for _ in range(_SHORT_TUPLES[name])][::-1]))
            elif (act := _ACTS.get(name)) is not None:
                act(self, argument)
            else:
                raise PickleRefused(f"it uses the pickle operation {name}, which no checkpoint needs")
        value = self._pop()
        if self._stack:
            raise PickleRefused("it is damaged (values are left over)")
        return value

    def _charge(self, count: int) -> None:
        self._memory_left -= count
        if self._memory_left < 0:
            raise PickleRefused(f"it would take more than {_MOST_EXPANSION} times its size in memory")

    def _push_new(self, value: Any) -> None:
        """Push a value that is not in the pickle itself."""
        kind, more = type(value), 0
        if kind in (bytes, str):
            more = len(value)
        elif kind is dict:
            more = len(value) * _ENTRY_BYTES
        elif kind is PendingObject:
            more = _PENDING_BYTES
        elif kind in (Tensor, _TensorStorage):  # a tensor shares the bytes of its storage
            more = _TENSOR_BYTES
        elif kind is torch.Size:
            more = len(value) * _ITEM_BYTES
        else:
            more = int(getattr(value, "nbytes", 0))  # an array has its own
        self._charge(_OBJECT_BYTES + more)
        self._stack.append(value)

    def _pop(self) -> Any:
        value = self._stack.pop()
        if value is _MARK:
            raise PickleRefused("it is damaged (a mark where a value belongs)")
        return value

    def _pop_to_mark(self) -> list[Any]:
        items = []
        while (value := self._stack.pop()) is not _MARK:
            items.append(value)
        return items[::-1]

    def _put(self, key: int) -> None:
        value = self._stack[-1]
        if type(value) is PendingObject:
            value.memo_keys.append(key)
        if key == len(self._memo):
            self._memo.append(value)
        elif key < len(self._memo):
            self._memo[key] = value
        else:
            raise PickleRefused("it numbers its values with gaps, which no pickler does")

    def _append(self, items: list[Any]) -> None:
        self._charge(_ITEM_BYTES * len(items))
        self._container(list).extend(items)

    def _set_items(self, items: list[Any]) -> None:
        self._charge(_ENTRY_BYTES // 2 * len(items))
        target = self._container(dict)
        for key, value in zip(items[::2], items[1::2], strict=True):
            _require_key(key)
            target[key] = value

    def _container(self, kind: type) -> Any:
        target = self._stack[-1]
        if type(target) is not kind:
            raise PickleRefused(f"it adds items to {_describe(target)}")
        return target

    def _find(self, name: str) -> None:
        if name not in self._names:
            raise PickleRefused(f"it refers to {name}")
        self._stack.append(self._names[name])

    def _find_by_stack(self) -> None:
        name, module = self._pop(), self._pop()
        if type(module) is not str or type(name) is not str:
            raise PickleRefused("it has a name that is not text")
        self._find(f"{module}.{name}")

    def _call(self) -> None:
        arguments, function = self._pop(), self._pop()
        if not callable(function) or type(arguments) is not tuple:
            raise PickleRefused(f"it calls {_describe(function)}")
        self._push_new(function(*arguments))

    def _build(self) -> None:
        state, pending = self._pop(), self._pop()
        if type(pending) is not PendingObject:
            raise PickleRefused(f"it sets the state of {_describe(pending)}")
        value = pending.finish(state)
        self._push_new(value)
        for key in pending.memo_keys:
            if self._memo[key] is pending:
                self._memo[key] = value


_ACTS: dict[str, Callable[[_PickleMachine, Any], object]] = {
    "PROTO": lambda m, _: None,
    "FRAME": lambda m, _: None,  # the length to read ahead; all of it is in memory
    "STOP": lambda m, _: None,
    "POP": lambda m, _: m._pop(),
    "EMPTY_LIST": lambda m, _: m._push_new([]),
    "EMPTY_DICT": lambda m, _: m._push_new({}),
    "TUPLE": lambda m, _: m._push_new(tuple(m._pop_to_mark())),
    "APPEND": lambda m, _: m._append([m._pop()]),
    "APPENDS": lambda m, _: m._append(m._pop_to_mark()),
    "SETITEM": lambda m, _: m._set_items([m._pop(), m._pop()][::-1]),
    "SETITEMS": lambda m, _: m._set_items(m._pop_to_mark()),
    "GLOBAL": lambda m, name: m._find(name.replace(" ", ".")),
    "STACK_GLOBAL": lambda m, _: m._find_by_stack(),
    "REDUCE": lambda m, _: m._call(),
    "NEWOBJ": lambda m, _: m._call(),
    "BUILD": lambda m, _: m._build(),
    "BINPERSID": lambda m, _: m._push_new(m._load_storage(m._pop())),
}


def _require_key(key: Any) -> None:
    kind = type(key)
    if kind in (type(None), bool, str, bytes) or (kind is int and -_LARGEST_KEY < key < _LARGEST_KEY):
        return
    # A deep one overflows the stack of hash().
    if kind is tuple and len(key) <= _LONGEST_KEY and all(type(part) in (str, int) for part in key):
        return
    raise PickleRefused(f"it has a key of type {_describe(key)}")


def _describe(item: Any) -> str:
    return "an object without its state" if type(item) is PendingObject else type(item).__name__


# Files of torch.save.


class _StorageType(NamedTuple):
    dtype: torch.dtype | None
    """None for bytes without a type."""


class _TensorStorage(NamedTuple):
    content: memoryview
    dtype: torch.dtype | None


class _ArrayType(NamedTuple):
    kind: str
    """Letter and bytes of an element, as numpy writes them."""


class _SeekableView:
    """File interface as far as `zipfile` uses it, over bytes that are not copied."""

    def __init__(self, content: memoryview) -> None:
        self._content, self._at = content, 0

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, offset + (0, self._at, len(self._content))[whence])
        return self._at

    def read(self, count: int = -1) -> bytes:
        part = self._content[self._at :] if count < 0 else self._content[self._at : self._at + count]
        if len(part) > _LARGEST_LISTING_BYTES:
            raise PickleRefused("its list of records is too long")
        self._at += len(part)
        return bytes(part)


def read_torch_file(content: bytearray) -> Any:
    """The value in the bytes of a file of torch.save; raises PickleRefused."""
    view = memoryview(content)
    records = _list_records(view)

    def record(name: str, limit: int | None = None) -> memoryview:
        if name not in records:
            raise PickleRefused(f"it has no {name}")
        info = records[name]
        header = bytes(view[info.header_offset : info.header_offset + _LOCAL_HEADER.size])
        if info.header_offset < 0 or len(header) != _LOCAL_HEADER.size:
            raise PickleRefused(f"its {name} is cut off")
        magic, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
        start = info.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
        if magic != b"PK\x03\x04" or start + info.file_size > len(view):
            raise PickleRefused(f"its {name} is cut off")
        if limit is not None and info.file_size > limit:
            raise PickleRefused(f"its {name} has {info.file_size} bytes, more than the {limit} allowed")
        return view[start : start + info.file_size]

    def load_storage(pid: Any) -> _TensorStorage:
        kind, storage, key, _location, numel = pid
        if kind != "storage" or type(storage) is not _StorageType or type(key) is not str or type(numel) is not int:
            raise PickleRefused("it refers to a persistent object that is not a storage")
        raw = record(f"data/{key}")
        if numel < 0 or len(raw) != numel * (1 if storage.dtype is None else storage.dtype.itemsize):
            raise PickleRefused(f"it has a storage of {len(raw)} bytes for {numel} values")
        return _TensorStorage(raw, storage.dtype)

    if "byteorder" in records and bytes(record("byteorder", 16)) != b"little":
        raise PickleRefused("it was not written on a little-endian machine")
    raw = record("data.pkl", _LARGEST_PICKLE_BYTES)
    value = read_pickle(raw, _TORCH_NAMES, load_storage)
    _require_plain(value, _FREE_VALUES + len(raw))
    return value


def _list_records(view: memoryview) -> dict[str, zipfile.ZipInfo]:
    """The records of an archive by their names without its folder."""
    try:
        with zipfile.ZipFile(_SeekableView(view)) as archive:
            infos = archive.infolist()
    except PickleRefused:
        raise
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error, IndexError) as error:
        raise PickleRefused(f"it is not an archive written by torch.save ({error})") from error
    records = {info.filename.partition("/")[2]: info for info in infos}
    if len(records) != len(infos):
        raise PickleRefused("it holds two records of the same name")
    if any(
        info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size or info.flag_bits & 1
        for info in infos
    ):
        raise PickleRefused("it holds compressed or encrypted records, which torch.save does not write")
    if sum(info.file_size for info in infos) > len(view):
        raise PickleRefused("its records are larger than the file")
    return records


def _require_plain(value: Any, most: int) -> None:
    """Exact types at every level, no cycles, limited depth and, counting a shared part wherever it is used, size."""
    leaves = {type(None), bool, int, float, str, bytes, Tensor, torch.dtype, torch.Size}
    level: list[Any] = [value]
    for _ in range(_DEEPEST):
        below: list[Any] = []
        for item in level:
            kind = type(item)
            if kind in (list, tuple, dict):
                most -= len(item)
                if most < 0:
                    raise PickleRefused("it repeats its values more often than its size allows")
                below.extend(item)
                if kind is dict:
                    below.extend(item.values())
            elif kind not in leaves and f"{kind.__module__}.{kind.__name__}" != "numpy.ndarray":
                raise PickleRefused(f"it holds {_describe(item)}")
        if not below:
            return
        level = below
    raise PickleRefused(f"its values are more than {_DEEPEST} levels deep")


def whole_numbers(values: Any) -> tuple[int, ...]:
    """Check a shape, a stride or offsets."""
    if (
        type(values) not in (tuple, list, torch.Size)
        or len(values) > _MOST_DIMENSIONS
        or any(type(value) is not int or not 0 <= value < 2**62 for value in values)
    ):
        raise PickleRefused("it gives a tensor an invalid shape")
    return tuple(values)


def _dictionary(items: Any = ()) -> dict[str, Any]:
    pairs = [tuple(pair) for pair in items]
    if any(len(pair) != 2 or type(pair[0]) is not str for pair in pairs):
        raise PickleRefused("it has a dictionary whose keys are not text")
    return dict(pairs)


def _tensor(
    storage: Any, offset: Any, size: Any, stride: Any, requires_grad: Any, hooks: Any, metadata: Any = None,
    dtype: Any = None,
) -> Tensor:  # fmt: skip
    if type(storage) is not _TensorStorage or hooks or metadata:
        raise PickleRefused("it makes a tensor of something that is not a storage, or gives it hooks")
    dtype = dtype if storage.dtype is None else storage.dtype
    size, stride, (offset,) = whole_numbers(size), whole_numbers(stride), whole_numbers((offset,))
    if type(dtype) is not torch.dtype or len(size) != len(stride):
        raise PickleRefused("it gives a tensor no type, or no stride per dimension")
    last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    numel = math.prod(size)
    available = len(storage.content) // dtype.itemsize
    if numel and (last >= available or numel > available):
        raise PickleRefused(f"it makes a tensor of {numel} values of a storage of {available}")
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


_NDARRAY = object()
_ARRAY_KINDS = {*(f"{kind}{size}" for kind in "iu" for size in (1, 2, 4, 8)), "f2", "f4", "f8", "b1"}


def _array_type(kind: Any, align: Any = False, copy: Any = False) -> PendingObject:
    """Numbers only: a dtype of objects or fields holds more than bytes."""
    if type(kind) is not str or kind not in _ARRAY_KINDS:
        raise PickleRefused(f"it has an array of type {kind!r:.40}")

    def finish(state: Any) -> _ArrayType:
        if type(state) is not tuple or len(state) < 2 or state[1] not in ("<", "|"):
            raise PickleRefused("it has an array in another byte order")
        return _ArrayType(kind)

    return PendingObject(finish)


def _array(kind: Any, shape: Any, code: Any) -> PendingObject:
    if kind is not _NDARRAY:
        raise PickleRefused("it makes an array of another class")

    def finish(state: Any) -> Any:
        _version, shape, dtype, fortran, content = state
        shape = whole_numbers(shape)
        if type(dtype) is not _ArrayType or type(content) is not bytes or type(fortran) is not bool:
            raise PickleRefused("it makes an array of something that is not bytes")
        if len(content) != math.prod(shape) * int(dtype.kind[1:]):
            raise PickleRefused("it has an array whose size differs from its bytes")
        try:
            import numpy
        except ImportError:  # as where checkpoints are only verified: the content is harmless and unused
            return content
        return numpy.frombuffer(content, f"<{dtype.kind}").reshape(shape, order="F" if fortran else "C").copy()

    return PendingObject(finish)


DTYPES = {
    name: getattr(torch, name)
    for name in (
        *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
        *("float16", "float32", "float64", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
        *("bool", "complex64", "complex128"),
    )
}
"""Types that a tensor in a checkpoint may have."""
_STORAGES = {
    "Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64", "Int": "int32",
    "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool", "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
}  # fmt: skip
DTYPE_NAMES = {f"torch.{name}": dtype for name, dtype in DTYPES.items()} | {
    "torch.Size": lambda values: torch.Size(whole_numbers(values))
}
"""Names of a pickle that describes tensors."""
_TORCH_NAMES = {
    **DTYPE_NAMES,
    **{f"torch.{name}Storage": _StorageType(DTYPES[dtype]) for name, dtype in _STORAGES.items()},
    "torch.storage.UntypedStorage": _StorageType(None),
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": lambda store, at, size, step, grad, hooks, dtype: _tensor(
        store, at, size, step, grad, hooks, dtype=dtype
    ),
    "collections.OrderedDict": _dictionary,
    "_codecs.encode": _encode,
    "numpy.dtype": _array_type,
    "numpy.ndarray": _NDARRAY,
    "numpy.core.multiarray._reconstruct": _array,
    "numpy._core.multiarray._reconstruct": _array,
}
