"""Integer, logic, comparison and single-precision instructions, as numpy operations on whole batches of lanes."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from proofs.ptx_emulator.parser import Immediate, Instruction, UnsupportedPtx
from proofs.ptx_emulator.state import Array, LaneBuilder, LaneState, Run

_VIEWS: dict[str, tuple[str, type[np.generic]]] = {
    "pred": ("pred", np.bool_),
    **{f"{letter}{bits}": (f"b{bits}", np.dtype(f"{kind}{bits // 8}").type)
       for letter, kind in (("b", "u"), ("u", "u"), ("s", "i")) for bits in (16, 32, 64)},
    "f32": ("b32", np.float32),
}  # fmt: skip


class LaneOperation(NamedTuple):
    compute: Callable[..., Array]
    inputs: tuple[str, ...]
    output: str


def flush(x: Array) -> Array:
    """.ftz: subnormal numbers are zero of the same sign."""
    return np.where(np.abs(x) < np.float32(2**-126), np.copysign(np.float32(0), x), x)


def _flushed(compute: Callable[..., Array]) -> Callable[..., Array]:
    return lambda *x: flush(compute(*(flush(each) for each in x)))


def fused(a: Array, b: Array, c: Array) -> Array:
    """One rounding: the product is exact in fp64."""
    return (a.astype(np.float64) * b + c).astype(np.float32)


def _wide(a: Array, b: Array) -> Array:
    wide = np.dtype(f"{a.dtype.kind}{2 * a.dtype.itemsize}")
    return a.astype(wide) * b.astype(wide)


def _high(a: Array, b: Array) -> Array:
    return (_wide(a, b) >> (8 * a.dtype.itemsize)).astype(a.dtype)


def _quotient(a: Array, b: Array) -> Array:
    """Truncated; by zero: all bits set, as hardware does it (PTX leaves it open)."""
    safe = np.where(b == 0, np.ones_like(b), b)
    return np.where(b == 0, np.array(-1).astype(a.dtype), (a - np.fmod(a, safe)) // safe)


def _remainder(a: Array, b: Array) -> Array:
    return np.where(b == 0, a, np.fmod(a, np.where(b == 0, np.ones_like(b), b)))


def _shift_left(a: Array, by: Array) -> Array:
    bits = 8 * a.dtype.itemsize
    return np.where(by < bits, a << np.minimum(by, bits - 1).astype(a.dtype), np.zeros_like(a))


def _shift_right(a: Array, by: Array) -> Array:
    """Shifts past the width give 0, or copies of the sign."""
    bits = 8 * a.dtype.itemsize
    shifted = a >> np.minimum(by, bits - 1).astype(a.dtype)
    return shifted if a.dtype.kind == "i" else np.where(by < bits, shifted, np.zeros_like(a))


def _wide_sum(a: Array, b: Array, c: Array) -> Array:
    return _wide(a, b) + c


def _choose(a: Array, b: Array, which: Array) -> Array:
    return np.where(which, a, b)


def _less_or_greater(a: Array, b: Array) -> Array:
    return (a < b) | (a > b)


_COMPARE: dict[str, Callable[..., Array]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
_UNORDERED: dict[str, Callable[..., Array]] = {
    "equ": lambda a, b: ~_less_or_greater(a, b), "neu": np.not_equal, "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b), "gtu": lambda a, b: ~(a <= b), "geu": lambda a, b: ~(a < b),
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)), "nan": lambda a, b: np.isnan(a) | np.isnan(b),
}  # fmt: skip


def _integer_operations() -> Mapping[str, LaneOperation]:
    table: dict[str, LaneOperation] = {}

    def add(name: str, compute: Callable[..., Array], types: tuple[str, ...], n: int = 2) -> None:
        for t in types:
            table[f"{name}.{t}"] = LaneOperation(compute, (t,) * n, t)

    signed, unsigned = ("s16", "s32", "s64"), ("u16", "u32", "u64")
    both = (*signed, *unsigned)
    for name, plain in {"add": np.add, "sub": np.subtract, "max": np.maximum, "min": np.minimum}.items():
        add(name, plain, both)
    add("mul.lo", np.multiply, both)
    add("mul.hi", _high, ("s16", "u16", "s32", "u32"))
    add("div", _quotient, both)
    add("rem", _remainder, both)
    add("neg", np.negative, signed, 1)
    add("abs", np.abs, signed, 1)
    add("mad.lo", lambda a, b, c: a * b + c, both, 3)
    for t, wide in (("s16", "s32"), ("u16", "u32"), ("s32", "s64"), ("u32", "u64")):
        table[f"mul.wide.{t}"] = LaneOperation(_wide, (t, t), wide)
        table[f"mad.wide.{t}"] = LaneOperation(_wide_sum, (t, t, wide), wide)
    for name, bitwise in {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}.items():
        add(name, bitwise, ("pred", "b16", "b32", "b64"))
    add("not", np.invert, ("pred", "b16", "b32", "b64"), 1)
    for bits in (16, 32, 64):
        table[f"shl.b{bits}"] = LaneOperation(_shift_left, (f"b{bits}", "u32"), f"b{bits}")
        for t in (f"u{bits}", f"s{bits}"):
            table[f"shr.{t}"] = LaneOperation(_shift_right, (t, "u32"), t)
        for t in (f"b{bits}", f"u{bits}", f"s{bits}"):
            for name, compute in _COMPARE.items():
                table[f"setp.{name}.{t}"] = LaneOperation(compute, (t, t), "pred")
            table[f"selp.{t}"] = LaneOperation(_choose, (t, t, "pred"), t)
    return table


def _float_operations() -> Mapping[str, LaneOperation]:
    table: dict[str, LaneOperation] = {
        "selp.f32": LaneOperation(_choose, ("f32", "f32", "pred"), "f32"),
        "abs.f32": LaneOperation(np.abs, ("f32",), "f32"),
        "neg.f32": LaneOperation(np.negative, ("f32",), "f32"),
    }
    plain: dict[str, tuple[Callable[..., Array], int]] = {
        "add": (np.add, 2), "sub": (np.subtract, 2), "mul": (np.multiply, 2), "max": (np.fmax, 2), "min": (np.fmin, 2),
        "max.NaN": (np.maximum, 2), "min.NaN": (np.minimum, 2), "fma.rn": (fused, 3), "div.full": (np.divide, 2),
        "div.rn": (np.divide, 2), "ex2.approx": (np.exp2, 1), "lg2.approx": (np.log2, 1),
        "rcp.approx": (np.reciprocal, 1), "rcp.rn": (np.reciprocal, 1), "sqrt.rn": (np.sqrt, 1),
        "sqrt.approx": (np.sqrt, 1), "rsqrt.approx": (lambda x: 1 / np.sqrt(x), 1), "tanh.approx": (np.tanh, 1),
    }  # fmt: skip
    for name, (compute, n) in plain.items():
        table[f"{name}.f32"] = LaneOperation(compute, ("f32",) * n, "f32")
        table[f"{name}.ftz.f32"] = LaneOperation(_flushed(compute), ("f32",) * n, "f32")
    for name in ("add", "sub", "mul"):
        for ftz in ("", ".ftz"):
            table[f"{name}.rn{ftz}.f32"] = table[f"{name}{ftz}.f32"]
    comparisons = {**_COMPARE, **_UNORDERED, "ne": _less_or_greater}
    for name, compute in comparisons.items():
        table[f"setp.{name}.f32"] = LaneOperation(compute, ("f32", "f32"), "pred")
    return table


OPERATIONS: Mapping[str, LaneOperation] = {**_integer_operations(), **_float_operations()}


def build_operation(state: LaneState, at: Instruction) -> Run:
    operation = OPERATIONS[at.opcode]
    if len(at.operands) != len(operation.inputs) + 1:
        raise UnsupportedPtx(f"{at.opcode} with {len(at.operands)} operands")
    out_kind, _ = _VIEWS[operation.output]
    to = state.register(at.operands[0], out_kind)
    slots = [state.source(o, _VIEWS[t][0]) for o, t in zip(at.operands[1:], operation.inputs, strict=True)]
    types = [_VIEWS[t][1] for t in operation.inputs]
    return lane_closure(state, at, to, slots, types, operation.compute, out_kind)


def lane_closure(
    state: LaneState, at: Instruction, to: int, slots: list[int], types: list[type[np.generic]],
    compute: Callable[..., Array], out_kind: str,
) -> Run:  # fmt: skip
    values = state.values
    bits = None if out_kind == "pred" else np.dtype(f"u{int(out_kind[1:]) // 8}")

    def result() -> Array:
        value = compute(*(values[slot].view(t) for slot, t in zip(slots, types, strict=True)))
        return value if bits is None else value.view(bits)

    if at.guard is not None:
        mask = state.mask(at)
        return lambda: state.put_where(to, result(), mask())
    if len(slots) == 2:  # the common case, without a generator
        (a, b), (type_a, type_b) = slots, types

        def run_two() -> None:
            result = compute(values[a].view(type_a), values[b].view(type_b))
            state.put(to, result if bits is None else result.view(bits))

        return run_two
    return lambda: state.put(to, result())


def build_bit_field(state: LaneState, at: Instruction) -> Run:
    """bfe with constant position and length; of the signed one the field's highest bit is its sign."""
    _, source, position, length = at.operands
    if not isinstance(position, Immediate) or not isinstance(length, Immediate):
        raise UnsupportedPtx(f"{at.opcode} with a position that is not constant")
    p, n = position.bits & 0xFF, length.bits & 0xFF
    if not 0 < n <= 32 - p:
        raise UnsupportedPtx(f"{at.opcode} of {n} bits from {p}")
    signed = at.opcode == "bfe.s32"

    def field(x: Array) -> Array:
        moved = x.view(np.int32 if signed else np.uint32) << (32 - p - n)
        return (moved >> (32 - n)).view(np.uint32)

    to, slot = state.register(at.operands[0], "b32"), state.source(source, "b32")
    return lane_closure(state, at, to, [slot], [np.uint32], field, "b32")


def build_permute(state: LaneState, at: Instruction) -> Run:
    """prmt without a mode: each selector's low 3 bits choose a byte of the pair, bit 3 copies its sign instead."""
    selector = at.operands[3]
    if not isinstance(selector, Immediate):
        raise UnsupportedPtx("prmt with a selector that is not constant")
    chosen = [selector.bits >> 4 * i & 0xF for i in range(4)]

    def permute(a: Array, b: Array) -> Array:
        pair = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
        result = np.zeros_like(pair)
        for i, nibble in enumerate(chosen):
            byte = pair >> np.uint64(8 * (nibble & 7)) & np.uint64(0xFF)
            if nibble & 8:
                byte = (byte >> np.uint64(7)) * np.uint64(0xFF)
            result = result | byte << np.uint64(8 * i)
        return result.astype(np.uint32)

    to = state.register(at.operands[0], "b32")
    slots = [state.source(operand, "b32") for operand in at.operands[1:3]]
    return lane_closure(state, at, to, slots, [np.uint32, np.uint32], permute, "b32")


BUILDERS: dict[str, LaneBuilder] = {
    **dict.fromkeys(OPERATIONS, build_operation),
    "bfe.u32": build_bit_field,
    "bfe.s32": build_bit_field,
    "prmt.b32": build_permute,
}  # fmt: skip
