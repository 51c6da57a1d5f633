"""Moves, packing and conversions: integers of every width, bf16, fp16, tf32 and their packed pairs."""

from collections.abc import Callable

import numpy as np

from proofs.ptx_emulator.instructions.arithmetic import lane_closure
from proofs.ptx_emulator.parser import Instruction, Register, SymbolName, UnsupportedPtx, VectorOperand
from proofs.ptx_emulator.state import STORAGE, Array, LaneBuilder, LaneState, Run


def bf16_bits(x: Array) -> Array:
    """fp32 to bf16, to the nearest, ties to even; NaN becomes the canonical one."""
    bits = x.astype(np.float32).view(np.uint32)
    nearest = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FFF), nearest).astype(np.uint16)


def bf16_values(bits: Array) -> Array:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f16_bits(x: Array) -> Array:
    return np.where(np.isnan(x), np.uint16(0x7FFF), x.astype(np.float16).view(np.uint16)).astype(np.uint16)


def f16_values(bits: Array) -> Array:
    return bits.view(np.float16).astype(np.float32)


def tf32_bits(x: Array) -> Array:
    """fp32 to tf32 in the upper 19 bits, to the nearest, ties away from zero (cvt.rna)."""
    bits = x.view(np.uint32)
    nearest = bits + np.uint32(0x1000) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(x), nearest, bits)


def _pair(narrow: Callable[[Array], Array]) -> Callable[[Array, Array], Array]:
    def pack(upper: Array, lower: Array) -> Array:
        return narrow(upper).astype(np.uint32) << np.uint32(16) | narrow(lower)

    return pack


_F32 = np.float32
# opcode: (computation, types of the inputs, kinds of the inputs, kind of the output)
_CONVERSIONS: dict[str, tuple[Callable[..., Array], tuple[type[np.generic], ...], tuple[str, ...], str]] = {
    "cvt.f32.bf16": (bf16_values, (np.uint16,), ("b16",), "b32"),
    "cvt.f32.f16": (f16_values, (np.uint16,), ("b16",), "b32"),
    "cvt.rn.bf16.f32": (bf16_bits, (_F32,), ("b32",), "b16"),
    "cvt.rn.f16.f32": (f16_bits, (_F32,), ("b32",), "b16"),
    "cvt.rn.bf16x2.f32": (_pair(bf16_bits), (_F32, _F32), ("b32", "b32"), "b32"),
    "cvt.rn.f16x2.f32": (_pair(f16_bits), (_F32, _F32), ("b32", "b32"), "b32"),
    "cvt.rna.tf32.f32": (tf32_bits, (_F32,), ("b32",), "b32"),
    "cvt.rn.f32.s32": (lambda x: x.astype(_F32), (np.int32,), ("b32",), "b32"),
    "cvt.rn.f32.u32": (lambda x: x.astype(_F32), (np.uint32,), ("b32",), "b32"),
    "cvt.rn.f32.s64": (lambda x: x.astype(_F32), (np.int64,), ("b64",), "b32"),
}


def _integer_conversions() -> None:
    """Convert integers: narrower ones take the low bits, wider ones the sign of the source type. Bytes lie in wider
    registers."""
    for to_letter, to_kind in (("s", "i"), ("u", "u")):
        for letter, kind in (("s", "i"), ("u", "u")):
            for to_bits in (16, 32, 64):
                for bits in (8, 16, 32, 64):
                    to_type, from_type = np.dtype(f"{to_kind}{to_bits // 8}"), np.dtype(f"{kind}{bits // 8}").type
                    _CONVERSIONS[f"cvt.{to_letter}{to_bits}.{letter}{bits}"] = (
                        lambda x, t=to_type: x.astype(t), (from_type,), (f"b{bits}",), f"b{to_bits}",
                    )  # fmt: skip


_integer_conversions()


def build_conversion(state: LaneState, at: Instruction) -> Run:
    compute, types, kinds, out_kind = _CONVERSIONS[at.opcode]
    if len(at.operands) != len(kinds) + 1:
        raise UnsupportedPtx(f"{at.opcode} with {len(at.operands)} operands")
    to = state.register(at.operands[0], out_kind)
    first = at.operands[1]
    if isinstance(first, Register) and state.kernel.register_kind(first.name) != kinds[0]:
        if len(kinds) > 1 or state.kernel.register_kind(first.name) == "pred":
            raise UnsupportedPtx(at.text)
        return _of_low_bits(state, at, to, first, compute, types[0], out_kind)
    slots = [state.source(o, kind) for o, kind in zip(at.operands[1:], kinds, strict=True)]
    return lane_closure(state, at, to, slots, list(types), compute, out_kind)


def _of_low_bits(
    state: LaneState, at: Instruction, to: int, source: Register, compute: Callable[..., Array],
    low: type[np.generic], out_kind: str,
) -> Run:  # fmt: skip
    """A register wider than the type that is converted: its low bits count."""
    kind = state.kernel.register_kind(source.name)
    if np.dtype(STORAGE[kind]).itemsize < np.dtype(low).itemsize:
        raise UnsupportedPtx(at.text)
    whole = np.dtype(STORAGE[kind]).type
    return lane_closure(
        state, at, to, [state.source(source, kind)], [whole], lambda x: compute(x.astype(low)), out_kind
    )


def build_move(state: LaneState, at: Instruction) -> Run:
    kind = at.opcode.removeprefix("mov.").replace("u", "b").replace("f32", "b32")
    to, source = at.operands
    if isinstance(to, VectorOperand):
        return _unpack(state, at, to, state.source(source, kind), int(kind[1:]))
    if isinstance(source, VectorOperand):
        return _pack(state, at, state.register(to, kind), source, int(kind[1:]))
    slot, values, target = state.source(source, kind), state.values, state.register(to, kind)
    mask = state.mask(at)
    return lambda: state.put_where(target, values[slot], mask())


def _unpack(state: LaneState, at: Instruction, to: VectorOperand, slot: int, bits: int) -> Run:
    part = bits // len(to.elements)
    targets = [
        (i, state.register(element, f"b{part}")) for i, element in enumerate(to.elements) if element != SymbolName("_")
    ]
    values, mask, narrow = state.values, state.mask(at), np.dtype(f"u{part // 8}")

    def run() -> None:
        whole, chosen = values[slot], mask()
        for i, target in targets:
            state.put_where(target, (whole >> whole.dtype.type(i * part)).astype(narrow), chosen)

    return run


def _pack(state: LaneState, at: Instruction, to: int, source: VectorOperand, bits: int) -> Run:
    part = bits // len(source.elements)
    slots = [state.source(element, f"b{part}") for element in source.elements]
    values, mask, wide = state.values, state.mask(at), np.dtype(f"u{bits // 8}")

    def run() -> None:
        result = values[slots[0]].astype(wide)
        for i, slot in enumerate(slots[1:], 1):
            result = result | values[slot].astype(wide) << wide.type(i * part)
        state.put_where(to, result, mask())

    return run


BUILDERS: dict[str, LaneBuilder] = {
    **dict.fromkeys(_CONVERSIONS, build_conversion),
    **{f"mov.{t}": build_move for t in ("pred", "b16", "u16", "b32", "u32", "f32", "b64", "u64")},
}
