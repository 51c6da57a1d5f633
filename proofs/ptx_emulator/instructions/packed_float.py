"""Floating-point instructions of newer GPUs (sm_100 and later): pairs of fp32, three-way maximum, mixed precision."""

from collections.abc import Callable

import numpy as np

from proofs.ptx_emulator.instructions.arithmetic import OPERATIONS, build_operation, fused, lane_closure
from proofs.ptx_emulator.instructions.conversions import bf16_values, f16_values
from proofs.ptx_emulator.parser import Instruction, UnsupportedPtx
from proofs.ptx_emulator.state import Array, LaneBuilder, LaneState, Run

_HALF = np.uint64(32)
_PAIRS: dict[str, tuple[Callable[..., Array], int]] = {
    "add": (np.add, 2), "sub": (np.subtract, 2), "mul": (np.multiply, 2), "fma.rn": (fused, 3),
    "add.rn": (np.add, 2), "sub.rn": (np.subtract, 2), "mul.rn": (np.multiply, 2),
}  # fmt: skip


def _halves(x: Array) -> tuple[Array, Array]:
    return x.astype(np.uint32).view(np.float32), (x >> _HALF).astype(np.uint32).view(np.float32)


def build_pair(state: LaneState, at: Instruction) -> Run:
    compute, n = _PAIRS[at.opcode.removesuffix(".f32x2")]
    if len(at.operands) != n + 1:
        raise UnsupportedPtx(f"{at.opcode} with {len(at.operands)} operands")

    def both(*inputs: Array) -> Array:
        lower, upper = (compute(*parts) for parts in zip(*map(_halves, inputs), strict=True))
        return lower.view(np.uint32).astype(np.uint64) | upper.view(np.uint32).astype(np.uint64) << _HALF

    to, slots = state.register(at.operands[0], "b64"), [state.source(x, "b64") for x in at.operands[1:]]
    return lane_closure(state, at, to, slots, [np.uint64] * n, both, "b64")


def build_extreme(state: LaneState, at: Instruction) -> Run:
    """max and min of two or three values."""
    if len(at.operands) == 3:
        return build_operation(state, at)
    if len(at.operands) != 4:
        raise UnsupportedPtx(f"{at.opcode} with {len(at.operands)} operands")
    compute = OPERATIONS[at.opcode].compute
    to, slots = state.register(at.operands[0], "b32"), [state.source(x, "b32") for x in at.operands[1:]]

    def of_three(a: Array, b: Array, c: Array) -> Array:
        return compute(compute(a, b), c)

    return lane_closure(state, at, to, slots, [np.float32] * 3, of_three, "b32")


def build_mixed(state: LaneState, at: Instruction) -> Run:
    """fma of two halves, added to an fp32, rounded once."""
    values = bf16_values if at.opcode.endswith("bf16") else f16_values
    to, *sources = at.operands
    kinds = ("b16", "b16", "b32")
    slots = [state.source(x, kind) for x, kind in zip(sources, kinds, strict=True)]

    def mixed(a: Array, b: Array, c: Array) -> Array:
        return fused(values(a), values(b), c)

    types: list[type[np.generic]] = [np.uint16, np.uint16, np.float32]
    return lane_closure(state, at, state.register(to, "b32"), slots, types, mixed, "b32")


BUILDERS: dict[str, LaneBuilder] = {
    **{f"{name}.f32x2": build_pair for name in _PAIRS},
    **{f"{name}{nan}.f32": build_extreme for name in ("max", "min") for nan in ("", ".NaN")},
    "fma.rn.f32.bf16": build_mixed,
    "fma.rn.f32.f16": build_mixed,
}
