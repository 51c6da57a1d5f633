"""Safe unpickler: builds plain values from a pickle and never imports, calls or modifies what the pickle names.

A name in a pickle (GLOBAL) stays text. Calling it (REDUCE), making an object of it (NEWOBJ) and setting its state
(BUILD) are looked up in a `PickleGrammar`, a short table of our own functions; everything else is refused. Containers
are exact built-in types, so that nothing in the result has a method from the pickle. A pickle can name a value again in
two bytes: everything that is made is charged to a budget of memory in proportion to the size of the pickle.
"""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

_DEEPEST = 64
_BUILTINS = frozenset({type(None), bool, int, float, str, bytes, list, tuple, dict})
_KEY_TYPES = frozenset({type(None), bool, str, bytes})
_LARGEST_KEY = 1 << 60  # larger integers can be chosen to share a hash, which makes a dict quadratic
_LONGEST_KEY = 64  # parts of a key that is a tuple; its hash is computed at every use
_FREE_BYTES = 1 << 20
_MOST_EXPANSION = 32  # bytes of memory per byte of a pickle; an index of tensors takes 12, by these estimates 18
_FREE_VALUES = 1 << 20
# Estimates of what CPython allocates.
_OBJECT_BYTES, _ITEM_BYTES, _ENTRY_BYTES, _PENDING_BYTES = 72, 8, 48, 120


class PickleRefused(ValueError):
    """The pickle contains something that its grammar does not allow."""


@dataclass(frozen=True, slots=True)
class PickledName:
    """A name in a pickle: text, never the object itself."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class PendingObject:
    """An object between its creation and its BUILD; `finish` turns the state into a value."""

    __slots__ = ("finish", "memo_keys")

    def __init__(self, finish: Callable[[Any], Any]) -> None:
        self.finish = finish
        self.memo_keys: list[int] = []


@dataclass(frozen=True)
class PickleGrammar:
    """Names that a kind of pickle may contain besides plain values."""

    constants: Mapping[PickledName, Any] = field(default_factory=dict)
    """Names with a fixed value."""
    calls: Mapping[PickledName, Callable[..., Any]] = field(default_factory=dict)
    """Names that may be called, with our function for it; it may return a `PendingObject`."""
    objects: Mapping[PickledName, Callable[[Any], Any]] = field(default_factory=dict)
    """Classes that may be instantiated, with our function from the state to the value."""
    stateless: Mapping[PickledName, Callable[[], Any]] = field(default_factory=dict)
    """Classes that may be instantiated without a state."""
    arguments: frozenset[PickledName] = frozenset()
    """Names that may only be arguments of a call."""
    persistent: Callable[[Any], Any] | None = None
    """Resolves a persistent id."""
    leaves: frozenset[type] = frozenset()
    """Types, besides the built-in ones, that may be in the result."""
    keys: frozenset[type] = frozenset()
    """Types, besides text and numbers, that may be keys."""
    memory: Callable[[Any], int] = lambda value: 0
    """Bytes that a value made by a call takes in memory, if it is neither text, bytes nor a dict."""


def read_pickle(raw: bytes | bytearray | memoryview, grammar: PickleGrammar) -> Any:
    """The value of a pickle; raises PickleRefused for everything that is not in the grammar, and for damage."""
    try:
        value = _PickleMachine(bytes(raw), grammar).run()
    except PickleRefused:
        raise
    # Damage: missing positions and marks, states of the wrong shape, bytes that are not text.
    except (IndexError, KeyError, TypeError, ValueError, AttributeError, struct.error, OverflowError) as error:
        raise PickleRefused(f"it is damaged ({type(error).__name__})") from error
    _require_plain(value, grammar.leaves, _FREE_VALUES + len(raw))
    return value


def _require_plain(value: Any, leaves: frozenset[type], most: int) -> None:
    """Exact types at every level, no cycles, limited depth and, counting a shared part wherever it is used, size."""
    level: list[Any] = [value]
    for _ in range(_DEEPEST):
        below: list[Any] = []
        for item in level:
            kind = type(item)
            if kind not in _BUILTINS:
                if kind not in leaves:
                    raise PickleRefused(f"it holds {_describe(item)}")
                continue
            if kind in (list, tuple, dict) and item:
                most -= len(item)
                if most < 0:
                    raise PickleRefused("it repeats its values more often than its size allows")
                below.extend(item)
                if kind is dict:
                    below.extend(item.values())
        if not below:
            return
        level = below
    raise PickleRefused(f"its values are more than {_DEEPEST} levels deep")


def _describe(item: Any) -> str:
    if isinstance(item, PickledName):
        return str(item)
    return "an object without its state" if isinstance(item, PendingObject) else type(item).__name__


_MARK = object()


class _PickleMachine:
    def __init__(self, raw: bytes, grammar: PickleGrammar) -> None:
        self.raw, self.at, self.grammar = raw, 0, grammar
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: list[Any] = []
        self.names: dict[PickledName, Any] = {}
        self.memory_left = _FREE_BYTES + _MOST_EXPANSION * len(raw)

    def run(self) -> Any:
        raw, operations = self.raw, _OPERATIONS
        while True:
            operation = raw[self.at]
            self.at += 1
            if operation == 0x2E:  # STOP
                break
            act = operations[operation]
            if act is None:
                raise PickleRefused(f"it uses the pickle operation 0x{operation:02x}, which no checkpoint needs")
            act(self)
        (value,) = self.stack
        return value

    def take(self, count: int) -> bytes:
        start = self.at
        self.at = end = start + count
        if end > len(self.raw):
            raise PickleRefused("it is cut off")
        return self.raw[start:end]

    def line(self) -> str:
        end = self.raw.index(b"\n", self.at)
        text = self.raw[self.at : end].decode()
        self.at = end + 1
        return text

    def number(self, form: struct.Struct) -> Any:
        return form.unpack(self.take(form.size))[0]

    def charge(self, count: int) -> None:
        self.memory_left -= count
        if self.memory_left < 0:
            raise PickleRefused(f"it would take more than {_MOST_EXPANSION} times its size in memory")

    def push_made(self, value: Any) -> None:
        """Push a value that one of our functions made."""
        kind, more = type(value), 0
        if kind is bytes or kind is str:
            more = len(value)
        elif kind is dict:
            more = len(value) * _ENTRY_BYTES
        else:
            more = self.grammar.memory(value)
        self.charge(_OBJECT_BYTES + more)
        self.stack.append(value)

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def push_object(self, value: Any) -> None:
        self.charge(_OBJECT_BYTES)
        self.stack.append(value)

    def pop(self) -> Any:
        value = self.stack.pop()
        if value is _MARK:
            raise PickleRefused("it is damaged (a mark where a value belongs)")
        return value

    def pop_to_mark(self) -> list[Any]:
        start = self.marks.pop()
        items = self.stack[start + 1 :]
        del self.stack[start:]
        return items

    def put(self, key: int) -> None:
        value, memo = self.stack[-1], self.memo
        if type(value) is PendingObject:
            value.memo_keys.append(key)
        if key == len(memo):
            memo.append(value)
        elif key < len(memo):
            memo[key] = value
        else:
            raise PickleRefused("it numbers its values with gaps, which no pickler does")

    def mark(self) -> None:
        self.marks.append(len(self.stack))
        self.stack.append(_MARK)

    def small_tuple(self, count: int) -> None:
        items = tuple(self.pop() for _ in range(count))
        self.push_object(items[::-1])

    def append(self) -> None:
        value = self.pop()
        self.charge(_ITEM_BYTES)
        self.container(list).append(value)

    def appends(self) -> None:
        items = self.pop_to_mark()
        self.charge(_ITEM_BYTES * len(items))
        self.container(list).extend(items)

    def set_item(self) -> None:
        value, key = self.pop(), self.pop()
        self.require_key(key)
        self.charge(_ENTRY_BYTES)
        self.container(dict)[key] = value

    def set_items(self) -> None:
        items = self.pop_to_mark()
        target = self.container(dict)
        self.charge(_ENTRY_BYTES // 2 * len(items))
        for key, value in zip(items[::2], items[1::2], strict=True):
            self.require_key(key)
            target[key] = value

    def container(self, kind: type) -> Any:
        target = self.stack[-1]
        if type(target) is not kind:
            raise PickleRefused(f"it adds items to {_describe(target)}")
        return target

    def require_key(self, key: Any) -> None:
        kind = type(key)
        if kind in _KEY_TYPES or kind in self.grammar.keys or (kind is int and -_LARGEST_KEY < key < _LARGEST_KEY):
            return
        # A deep one overflows the stack of hash().
        if kind is tuple and len(key) <= _LONGEST_KEY and all(type(part) in (str, int) for part in key):
            return
        raise PickleRefused(f"it has a key of type {_describe(key)}")

    def global_(self) -> None:
        self.find(self.line(), self.line())

    def stack_global(self) -> None:
        name, module = self.pop(), self.pop()
        self.find(module, name)

    def find(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise PickleRefused("it has a name that is not text")
        reference, grammar = PickledName(module, name), self.grammar
        if reference in grammar.constants:
            self.stack.append(grammar.constants[reference])
        elif any(reference in some for some in (grammar.calls, grammar.objects, grammar.stateless, grammar.arguments)):
            self.stack.append(self.names.setdefault(reference, reference))
        else:
            raise PickleRefused(f"it refers to {reference}")

    def reduce(self) -> None:
        arguments, name = self.pop(), self.pop()
        if type(name) is not PickledName or name not in self.grammar.calls or type(arguments) is not tuple:
            raise PickleRefused(f"it calls {_describe(name)}")
        self.push_made(self.grammar.calls[name](*arguments))

    def new_object(self) -> None:
        self.charge(_PENDING_BYTES)
        arguments, name = self.pop(), self.pop()
        if type(name) is PickledName and type(arguments) is tuple and not arguments:
            if name in self.grammar.objects:
                return self.stack.append(PendingObject(self.grammar.objects[name]))
            if name in self.grammar.stateless:
                return self.stack.append(self.grammar.stateless[name]())
        raise PickleRefused(f"it makes an object of {_describe(name)}")

    def build(self) -> None:
        state, pending = self.pop(), self.stack[-1]
        if type(pending) is not PendingObject:
            raise PickleRefused(f"it sets the state of {_describe(pending)}")
        value = pending.finish(state)
        self.stack.pop()
        self.push_made(value)
        for key in pending.memo_keys:
            if self.memo[key] is pending:
                self.memo[key] = value

    def persistent(self) -> None:
        if self.grammar.persistent is None:
            raise PickleRefused("it refers to a persistent object")
        self.push_made(self.grammar.persistent(self.pop()))

    # The most frequent operations of an index, without calling `take`.
    def small_number(self) -> None:
        self.stack.append(self.raw[self.at])
        self.at += 1

    def get(self) -> None:
        self.stack.append(self.memo[self.raw[self.at]])
        self.at += 1

    def long_get(self) -> None:
        self.stack.append(self.memo[int.from_bytes(self.take(4), "little")])

    def integer(self) -> None:
        self.stack.append(int.from_bytes(self.take(self.take(1)[0]), "little", signed=True))


_U1, _U2, _I4, _U4, _U8 = (struct.Struct(form) for form in ("<B", "<H", "<i", "<I", "<Q"))
_F8 = struct.Struct(">d")
_Act = Callable[[_PickleMachine], object]


def _text(length: struct.Struct) -> _Act:
    return lambda m: m.push(m.take(m.number(length)).decode("utf-8", "surrogatepass"))


def _bytes(length: struct.Struct) -> _Act:
    return lambda m: m.push(m.take(m.number(length)))


_ACTS: dict[int, _Act] = {
    0x80: lambda m: m.take(1),  # PROTO
    0x95: lambda m: m.take(8),  # FRAME: the length to read ahead; all of it is in memory
    0x28: _PickleMachine.mark,
    0x30: lambda m: m.pop(),  # POP
    0x4E: lambda m: m.push(None),
    0x88: lambda m: m.push(True),
    0x89: lambda m: m.push(False),
    0x4B: _PickleMachine.small_number,  # BININT1, BININT2, BININT, LONG1
    0x4D: lambda m: m.push(m.number(_U2)),
    0x4A: lambda m: m.push(m.number(_I4)),
    0x8A: _PickleMachine.integer,
    0x47: lambda m: m.push(m.number(_F8)),  # BINFLOAT
    0x8C: _text(_U1),  # SHORT_BINUNICODE, BINUNICODE, BINUNICODE8
    0x58: _text(_U4),
    0x8D: _text(_U8),
    0x43: _bytes(_U1),  # SHORT_BINBYTES, BINBYTES, BINBYTES8
    0x42: _bytes(_U4),
    0x8E: _bytes(_U8),
    0x5D: lambda m: m.push_object([]),
    0x61: _PickleMachine.append,
    0x65: _PickleMachine.appends,
    0x29: lambda m: m.push(()),
    0x74: lambda m: m.push_object(tuple(m.pop_to_mark())),
    0x85: lambda m: m.small_tuple(1),
    0x86: lambda m: m.small_tuple(2),
    0x87: lambda m: m.small_tuple(3),
    0x7D: lambda m: m.push_object({}),
    0x73: _PickleMachine.set_item,
    0x75: _PickleMachine.set_items,
    0x63: _PickleMachine.global_,
    0x93: _PickleMachine.stack_global,
    0x52: _PickleMachine.reduce,
    0x81: _PickleMachine.new_object,
    0x62: _PickleMachine.build,
    0x51: _PickleMachine.persistent,
    0x71: lambda m: m.put(m.number(_U1)),  # BINPUT, LONG_BINPUT, MEMOIZE
    0x72: lambda m: m.put(m.number(_U4)),
    0x94: lambda m: m.put(len(m.memo)),
    0x68: _PickleMachine.get,  # BINGET, LONG_BINGET
    0x6A: _PickleMachine.long_get,
}
_OPERATIONS = [_ACTS.get(operation) for operation in range(256)]
