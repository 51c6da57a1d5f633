"""Matrix instructions of one warp: mma.sync, ldmatrix and stmatrix.

Fragments, for lane 4·g + t: of the product's rows, registers hold (g, 2t), (g, 2t+1), (g+8, 2t), (g+8, 2t+1).
"""

import re

import numpy as np

from proofs.ptx_emulator.execution import Builder, ExecutionUnit, elements
from proofs.ptx_emulator.instructions.conversions import bf16_values, f16_values
from proofs.ptx_emulator.parser import Instruction, Operand, UnsupportedPtx
from proofs.ptx_emulator.state import WARP, Array, Run

_MMA = re.compile(r"mma\.sync\.aligned\.m16n8k(4|8|16)\.row\.col\.f32\.(bf16|f16|tf32)\.(bf16|f16|tf32)\.f32")
_MATRIX = re.compile(r"(ld|st)matrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared\.b16")


def widened(bits: Array, dtype: str) -> Array:
    """Operand elements as fp32. `bits`: uint16 of halves, uint32 of tf32, of which 19 bits count."""
    if dtype == "tf32":
        return (bits & np.uint32(0xFFFFE000)).view(np.float32)
    return bf16_values(bits) if dtype == "bf16" else f16_values(bits)


def stacked(registers: list[Array]) -> Array:
    """[programs, warps, lanes, registers] from [programs, warps, lanes] each."""
    return np.stack(registers, -1)


def a_fragment(registers: list[Array], dtype: str) -> Array:
    """[programs, warps, 16, k] from the registers of A."""
    joined = stacked(registers)
    p, w = joined.shape[:2]
    if dtype == "tf32":
        x = joined.reshape(p, w, 8, 4, len(registers) // 2, 2)  # g, t, k half, row half
        return widened(x.transpose(0, 1, 5, 2, 4, 3).reshape(p, w, 16, -1), dtype)
    x = joined.view(np.uint16).reshape(p, w, 8, 4, len(registers) // 2, 2, 2)  # g, t, k half, row half, element
    return widened(x.transpose(0, 1, 5, 2, 4, 3, 6).reshape(p, w, 16, -1), dtype)


def b_fragment(registers: list[Array], dtype: str) -> Array:
    """[programs, warps, k, 8] from the registers of B."""
    joined = stacked(registers)
    p, w = joined.shape[:2]
    if dtype == "tf32":
        x = joined.reshape(p, w, 8, 4, len(registers))  # g, t, k half
        return widened(x.transpose(0, 1, 4, 3, 2).reshape(p, w, -1, 8), dtype)
    x = joined.view(np.uint16).reshape(p, w, 8, 4, len(registers), 2)  # g, t, k half, element
    return widened(x.transpose(0, 1, 4, 3, 5, 2).reshape(p, w, -1, 8), dtype)


def c_matrix(registers: list[Array]) -> Array:
    """[programs, warps, 16, columns] from four registers for every 8 columns."""
    joined = stacked(registers).view(np.float32)
    p, w, _, n = joined.shape
    x = joined.reshape(p, w, 8, 4, n // 4, 2, 2)  # g, t, column tile, row half, element
    return x.transpose(0, 1, 5, 2, 4, 3, 6).reshape(p, w, 16, -1)


def c_registers(matrix: Array) -> list[Array]:
    """The inverse of `c_matrix`: registers of shape [programs, threads]."""
    p, w, _, n = matrix.shape
    x = matrix.reshape(p, w, 2, 8, n // 8, 4, 2).transpose(4, 2, 6, 0, 1, 3, 5)
    return list(np.ascontiguousarray(x, np.float32).view(np.uint32).reshape(n // 2, p, w * WARP))


def build_mma(unit: ExecutionUnit, at: Instruction) -> Run:
    match = _MMA.fullmatch(at.opcode)
    if match is None or match.group(2) != match.group(3):
        raise UnsupportedPtx(at.opcode)
    k, dtype = int(match.group(1)), match.group(2)
    expected = {"tf32": {4: (2, 1), 8: (4, 2)}, "f16": {8: (2, 1), 16: (4, 2)}, "bf16": {8: (2, 1), 16: (4, 2)}}
    state = unit.state
    d, a, b, c = ([state.register(x, "b32") for x in elements(operand)] for operand in at.operands)
    if (len(a), len(b)) != expected[dtype].get(k) or len(c) != 4 or len(d) != 4:
        raise UnsupportedPtx(at.text)
    mask, cache = state.mask(at), unit.fragments

    def run() -> None:
        chosen = mask()
        state.whole_warps(at, chosen)
        left = cache.get(f"a {dtype}", a, lambda registers: a_fragment(registers, dtype))
        right = cache.get(f"b {dtype}", b, lambda registers: b_fragment(registers, dtype))
        total = np.matmul(left, right) + cache.get("c", c, c_matrix)
        results = c_registers(total)
        for slot, value in zip(d, results, strict=True):
            state.put_where(slot, value, chosen)
        if chosen is None:
            cache.put("c", results, total)

    return run


def build_matrix_load(unit: ExecutionUnit, at: Instruction) -> Run:
    """ldmatrix: lane 8·j + r has the address of row r of matrix j."""
    n, transposed, targets, thread = _matrices(unit, at, at.operands[0])
    state, address, mask = unit.state, unit.address(at.operands[1], "b32"), unit.state.mask(at)

    def run() -> None:
        chosen = mask()
        state.whole_warps(at, chosen)
        rows = _row_lanes(unit, address(), n)
        row_mask = None if chosen is None else _row_lanes(unit, chosen, n)
        loaded = unit.shared.load(at, rows, row_mask, 16, thread).view(np.uint16)
        loaded = loaded.reshape(state.programs, state.warps, n, 8, 8)
        if transposed:
            loaded = loaded.swapaxes(-1, -2)
        words = np.ascontiguousarray(loaded.transpose(2, 0, 1, 3, 4)).view(np.uint32)
        for slot, value in zip(targets, words.reshape(n, state.programs, -1), strict=True):
            state.put_where(slot, value, chosen)

    return run


def build_matrix_store(unit: ExecutionUnit, at: Instruction) -> Run:
    n, transposed, sources, thread = _matrices(unit, at, at.operands[1])
    state, address, mask = unit.state, unit.address(at.operands[0], "b32"), unit.state.mask(at)
    values = state.values

    def run() -> None:
        chosen = mask()
        state.whole_warps(at, chosen)
        row_mask = None if chosen is None else _row_lanes(unit, chosen, n)
        words = np.stack([state.by_warp(values[slot]) for slot in sources], 2)  # [programs, warps, n, 32]
        rows = np.ascontiguousarray(words).view(np.uint16).reshape(state.programs, state.warps, n, 8, 8)
        if transposed:
            rows = rows.swapaxes(-1, -2)
        data = np.ascontiguousarray(rows).view(np.uint8).reshape(state.programs, -1, 16)
        unit.shared.store(at, _row_lanes(unit, address(), n), row_mask, data, thread)

    return run


def _matrices(unit: ExecutionUnit, at: Instruction, registers: Operand) -> tuple[int, bool, list[int], Array]:
    """Operands of ldmatrix and stmatrix: number of matrices, whether transposed, register slots, threads that give
    addresses."""
    match, state = _MATRIX.fullmatch(at.opcode), unit.state
    assert match is not None
    n, transposed = int(match.group(2)), bool(match.group(3))
    slots = [state.register(x, "b32") for x in elements(registers)]
    if len(slots) != n:
        raise UnsupportedPtx(at.text)
    return n, transposed, slots, state.thread.reshape(state.warps, WARP)[:, : 8 * n].reshape(1, -1)


def _row_lanes(unit: ExecutionUnit, value: Array, n: int) -> Array:
    """Addresses of the lanes that give them: [programs, warps · 8 · n]."""
    return unit.state.by_warp(value)[:, :, : 8 * n].reshape(unit.state.programs, -1)


_OPERANDS = ("tf32", "f16", "bf16")
BUILDERS: dict[str, Builder] = {
    **{f"mma.sync.aligned.m16n8k{k}.row.col.f32.{t}.{t}.f32": build_mma for k in (4, 8, 16) for t in _OPERANDS},
    **{f"ldmatrix.sync.aligned.m8n8.x{n}{trans}.shared.b16": build_matrix_load
       for n in (1, 2, 4) for trans in ("", ".trans")},
    **{f"stmatrix.sync.aligned.m8n8.x{n}{trans}.shared.b16": build_matrix_store
       for n in (1, 2, 4) for trans in ("", ".trans")},
}  # fmt: skip
