"""Matrix products of a warpgroup (sm_90): wgmma with operands in shared memory, its fences, groups and waits.

A descriptor gives the start of a tile, two strides and a swizzle. Tiles consist of rows of 128, 64 or 32 bytes (the
swizzle) along the contiguous dimension, 8 rows to an atom; the swizzle exchanges 16-byte chunks within an atom.
"""

import re
from typing import NamedTuple

import numpy as np

from proofs.ptx_emulator.execution import Builder, ExecutionUnit, elements
from proofs.ptx_emulator.instructions.matrix import a_fragment, c_matrix, c_registers, widened
from proofs.ptx_emulator.parser import Immediate, Instruction, Operand, Register, UnsupportedPtx, VectorOperand
from proofs.ptx_emulator.state import Array, Run

GROUP = 128
"""Threads of a warpgroup."""
_WGMMA = re.compile(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.(bf16|f16)\.(bf16|f16)")
_ROW_BYTES = {1: 128, 2: 64, 3: 32}


class MatrixDescriptor(NamedTuple):
    start: int
    leading: int
    stride: int
    swizzle: int

    @classmethod
    def decode(cls, bits: int) -> "MatrixDescriptor":
        if bits >> 49 & 7:
            raise UnsupportedPtx(f"wgmma descriptor {bits:#x} with a base offset")
        return cls((bits & 0x3FFF) << 4, (bits >> 16 & 0x3FFF) << 4, (bits >> 32 & 0x3FFF) << 4, bits >> 62)

    def chunk_addresses(self, rows: int, chunks: int, across: bool) -> Array:
        """Offsets of 16-byte chunks, [rows, chunks], relative to `start`, before the swizzle.

        K is contiguous: rows are M or N, chunks 8 elements of K. `across`: rows are K, chunks 8 elements of M or N.
        """
        row, chunk = np.arange(rows)[:, None], np.arange(chunks)[None, :]
        if self.swizzle == 0:
            if across:
                raise UnsupportedPtx("wgmma operand without swizzle along M or N")
            return row // 8 * self.stride + row % 8 * 16 + chunk * self.leading
        width = _ROW_BYTES[self.swizzle]
        per_row = width // 16
        if not across and chunks > per_row:
            raise UnsupportedPtx("wgmma operand wider than its swizzle")
        return row // 8 * self.stride + row % 8 * width + chunk % per_row * 16 + chunk // per_row * self.leading

    def swizzled(self, address: Array) -> Array:
        bits = {0: 0, 1: 7, 2: 3, 3: 1}[self.swizzle]
        return address ^ ((address >> 7 & bits) << 4)


def operand_tile(
    unit: ExecutionUnit, at: Instruction, slot: int, rows: int, across: bool, dtype: str, cells: list[Array]
) -> Array:  # fmt: skip
    """[programs, groups, rows, 16], or with `across` [programs, groups, 16, rows], as fp32."""
    state = unit.state
    bits = state.full(state.values[slot]).reshape(state.programs, -1, GROUP)
    active = None if state.active is None else state.full(state.active).reshape(bits.shape)
    if (bits != bits[..., :1]).any() and (active is None or ((bits != bits[..., :1]) & active).any()):
        raise UnsupportedPtx(f"{at.text}: a descriptor that differs between threads")
    used = bits[..., 0]
    chosen = np.ones(used.shape, np.bool_) if active is None else active[..., 0]
    shape = (16, rows // 8) if across else (rows, 2)
    address = np.zeros((*used.shape, *shape), np.int64)
    for value in np.unique(used[chosen]).tolist():
        descriptor = MatrixDescriptor.decode(value)
        address[used == value] = descriptor.swizzled(descriptor.start + descriptor.chunk_addresses(*shape, across))
    mask = np.broadcast_to(chosen[..., None, None], address.shape)
    flat = (state.programs, -1)
    data, touched = unit.shared.multiply_load(at, address.reshape(flat).astype(np.uint32), mask.reshape(flat))
    cells.append(touched)
    return widened(np.ascontiguousarray(data).view(np.uint16), dtype).reshape(*used.shape, shape[0], -1)


def build_wgmma(unit: ExecutionUnit, at: Instruction) -> Run:
    match = _WGMMA.fullmatch(at.opcode)
    if match is None or match.group(2) != match.group(3) or at.guard is not None:
        raise UnsupportedPtx(at.text)
    n, dtype, state = int(match.group(1)), match.group(2), unit.state
    d, a, b, keep, *flags = at.operands
    signs, transposes = _flags(flags, at)
    accumulators = [state.register(x, "b32") for x in elements(d)]
    in_registers = isinstance(a, VectorOperand)
    if len(accumulators) != n // 2 or signs != [1, 1] or len(transposes) != (1 if in_registers else 2):
        raise UnsupportedPtx(at.text)
    a_slots = [state.register(x, "b32" if in_registers else "b64") for x in elements(a)]
    b_slot, keep_slot = state.register(b, "b64"), state.source(keep, "pred")
    registers = {*accumulators, *(a_slots if in_registers else ())}
    unit.wgmma.operands |= registers
    values = state.values

    def run() -> None:
        state.whole_warps(at, state.active)
        cells: list[Array] = []
        if in_registers:
            left = a_fragment([state.by_warp(values[slot]) for slot in a_slots], dtype)
            left = left.reshape(state.programs, -1, 64, 16)
        else:
            left = operand_tile(unit, at, a_slots[0], 64, bool(transposes[0]), dtype, cells)
            left = left.swapaxes(-1, -2) if transposes[0] else left
        right = operand_tile(unit, at, b_slot, n, bool(transposes[-1]), dtype, cells)
        right = right if transposes[-1] else right.swapaxes(-1, -2)
        product = np.matmul(left, right).reshape(state.programs, state.warps, 16, n)
        before = c_matrix([state.by_warp(values[slot]) for slot in accumulators])
        keeps = state.by_warp(values[keep_slot])[..., :1, None]
        unit.wgmma.issue(at, registers, set(accumulators), cells)
        for slot, value in zip(accumulators, c_registers(np.where(keeps, before, 0) + product), strict=True):
            state.put(slot, value)

    return run


def _flags(operands: list[Operand], at: Instruction) -> tuple[list[int], list[int]]:
    """Signs of A and B, and which operands are transposed."""
    if not all(isinstance(x, Immediate) for x in operands):
        raise UnsupportedPtx(at.text)
    bits = [x.bits for x in operands if isinstance(x, Immediate)]
    return bits[:2], bits[2:]


def build_fence(unit: ExecutionUnit, at: Instruction) -> Run:
    return unit.wgmma.fence


def build_commit(unit: ExecutionUnit, at: Instruction) -> Run:
    return unit.wgmma.commit


def build_wait(unit: ExecutionUnit, at: Instruction) -> Run:
    (newest,) = at.operands
    if not isinstance(newest, Immediate):
        raise UnsupportedPtx(at.text)
    return lambda: unit.shared.multiply_done(unit.wgmma.wait(newest.bits))


def build_proxy_fence(unit: ExecutionUnit, at: Instruction) -> Run:
    mask = unit.state.mask(at)
    return lambda: unit.shared.fence_proxy(mask())


BUILDERS: dict[str, Builder] = {
    **{f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{t}.{t}": build_wgmma
       for n in range(8, 257, 8) for t in ("bf16", "f16")},
    "wgmma.fence.sync.aligned": build_fence,
    "wgmma.commit_group.sync.aligned": build_commit,
    "wgmma.wait_group.sync.aligned": build_wait,
    "fence.proxy.async.shared": build_proxy_fence,
}  # fmt: skip


def register_operands(operands: tuple[Operand, ...]) -> list[Register]:
    return [x for operand in operands for x in elements(operand) if isinstance(x, Register)]
