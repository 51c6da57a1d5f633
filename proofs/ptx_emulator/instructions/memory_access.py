"""Loads, stores and asynchronous copies: parameters, global and shared memory."""

import re

import numpy as np

from proofs.ptx_emulator.execution import Builder, ExecutionUnit, elements
from proofs.ptx_emulator.parser import Immediate, Instruction, Register, UnsupportedPtx
from proofs.ptx_emulator.state import PARAMETER_BYTES, STORAGE, Array, Run


def build_parameter(unit: ExecutionUnit, at: Instruction) -> Run:
    """ld.param: what the launch passed, widened by its sign to the register."""
    state, (to, source) = unit.state, at.operands
    letter, bits = at.opcode.removeprefix("ld.param.")[0], int(at.opcode.removeprefix("ld.param.")[1:])
    target = state.register(to, "b32", "b64")
    kind = state.kernel.register_kind(to.name) if isinstance(to, Register) else ""
    sign = "i" if letter == "s" else "u"
    narrow, read = np.dtype(f"u{bits // 8}"), np.dtype(f"{sign}{bits // 8}")
    widened, mask = np.dtype(f"{sign}{int(kind[1:]) // 8}"), state.mask(at)
    address = unit.address(source, "b64")

    def run() -> None:
        chosen, at_address = mask(), address()
        bad = (at_address % np.uint64(PARAMETER_BYTES) != 0) | (at_address >= PARAMETER_BYTES * len(state.parameters))
        if (bad if chosen is None else bad & chosen).any():
            raise UnsupportedPtx(f"{at.text}: an address inside a parameter")
        index = np.where(bad, 0, at_address // np.uint64(PARAMETER_BYTES)).astype(np.int64)
        value: Array = state.parameters[index].astype(narrow).view(read).astype(widened).view(STORAGE[kind])
        state.put_where(target, value, chosen)

    return run


def _sizes(opcode: str) -> tuple[int, int]:
    """Elements and bytes of each, from .v2/.v4 and .b8 to .b64; a load may also be of .s8 to .s32."""
    match = re.fullmatch(r"(?:ld|st)\.(?:global|shared)(?:\.v([24]))?\.[bus](8|16|32|64)", opcode)
    if match is None:
        raise UnsupportedPtx(opcode)
    return int(match.group(1) or 1), int(match.group(2)) // 8


def build_load(unit: ExecutionUnit, at: Instruction) -> Run:
    state, (to, source) = unit.state, at.operands
    count, size = _sizes(at.opcode)
    targets = [(state.register(element, "b16", "b32", "b64"), element) for element in elements(to)]
    if len(targets) != count:
        raise UnsupportedPtx(f"{at.opcode} into {len(targets)} registers")
    kinds = [STORAGE[state.kernel.register_kind(e.name)] for _, e in targets if isinstance(e, Register)]
    if any(np.dtype(kind).itemsize < size for kind in kinds):
        raise UnsupportedPtx(f"{at.opcode} into a narrower register")
    in_shared, mask = ".shared" in at.opcode, state.mask(at)
    address = unit.address(source, "b32" if in_shared else "b64")
    load = unit.shared.load if in_shared else unit.memory.load
    # `astype` repeats the sign of a signed number in a wider register.
    read = np.dtype(f"{'i' if at.opcode.rpartition('.')[2].startswith('s') else 'u'}{size}")

    def run() -> None:
        chosen = mask()
        loaded = load(at, address(), chosen, count * size).view(read)
        for i, ((target, _), kind) in enumerate(zip(targets, kinds, strict=True)):
            state.put_where(target, loaded[..., i].astype(kind), chosen)

    return run


def build_store(unit: ExecutionUnit, at: Instruction) -> Run:
    state, (to, source) = unit.state, at.operands
    count, size = _sizes(at.opcode)
    parts = elements(source)
    if len(parts) != count:
        raise UnsupportedPtx(f"{at.opcode} of {len(parts)} values")
    slots = []
    for part in parts:
        kind = state.kernel.register_kind(part.name) if isinstance(part, Register) else f"b{max(16, 8 * size)}"
        slots.append(state.source(part, kind))
    in_shared, mask, values = ".shared" in at.opcode, state.mask(at), state.values
    address = unit.address(to, "b32" if in_shared else "b64")
    store = unit.shared.store if in_shared else unit.memory.store
    written = np.dtype(f"u{size}")

    def run() -> None:
        data = np.empty((state.programs, state.threads, count), written)
        for i, slot in enumerate(slots):
            data[..., i] = values[slot].astype(written)
        store(at, address(), mask(), data.view(np.uint8))

    return run


def build_copy(unit: ExecutionUnit, at: Instruction) -> Run:
    """cp.async of 4, 8 or 16 bytes; bytes past the source size are zeros."""
    state, (to, source, size, *rest) = unit.state, at.operands
    if not isinstance(size, Immediate) or size.bits not in (4, 8, 16) or len(rest) > 1:
        raise UnsupportedPtx(at.text)
    n = size.bits
    if ".cg." in at.opcode and n != 16:
        raise UnsupportedPtx(f"{at.opcode} of {n} bytes")
    present = state.source(rest[0], "b32") if rest else None
    to_address, from_address = unit.address(to, "b32"), unit.address(source, "b64")
    mask, values = state.mask(at), state.values

    def run() -> None:
        chosen = mask()
        data = np.zeros((state.programs, state.threads, n), np.uint8)
        if present is None:
            data[:] = unit.memory.load(at, state.full(from_address()), chosen, n)
        else:
            sizes = state.full(values[present])
            whole = sizes == n
            part = ~whole & (sizes != 0)
            if (part if chosen is None else part & chosen).any():
                raise UnsupportedPtx(f"cp.async of a part: {at.text}")
            reads: Array = whole if chosen is None else whole & chosen
            loaded = unit.memory.load(at, state.full(from_address()), reads, n)
            data[:] = np.where(whole[..., None], loaded, np.uint8(0))
        unit.shared.copy_async(at, to_address(), chosen, data)

    return run


def build_commit(unit: ExecutionUnit, at: Instruction) -> Run:
    mask = unit.state.mask(at)
    return lambda: unit.shared.commit(mask())


def build_wait(unit: ExecutionUnit, at: Instruction) -> Run:
    mask = unit.state.mask(at)
    (newest,) = at.operands
    if not isinstance(newest, Immediate):
        raise UnsupportedPtx(at.text)
    return lambda: unit.shared.wait(at, mask(), newest.bits)


_WIDTHS = [
    f"{vector}.b{bits}" for vector in ("", ".v2", ".v4") for bits in (8, 16, 32, 64) if (vector, bits) != (".v4", 64)
]
BUILDERS: dict[str, Builder] = {
    **{f"ld.param.{t}": build_parameter for t in ("b32", "b64", "u32", "s32", "u64", "s64", "f32")},
    **{f"ld.{space}{width}": build_load for space in ("global", "shared") for width in _WIDTHS},
    **{f"ld.{space}.s{bits}": build_load for space in ("global", "shared") for bits in (8, 16, 32)},
    **{f"st.{space}{width}": build_store for space in ("global", "shared") for width in _WIDTHS},
    "cp.async.ca.shared.global": build_copy,
    "cp.async.cg.shared.global": build_copy,
    "cp.async.commit_group": build_commit,
    "cp.async.wait_group": build_wait,
}
