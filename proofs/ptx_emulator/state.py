"""Lanes of a batch of programs: registers as numpy arrays, and the mask of lanes that execute the current instruction.

A value has the shape [programs, threads], or one that broadcasts to it: what depends on the program alone is
[programs, 1], what depends on the thread alone [1, threads]. Registers hold bits (unsigned integers, or bool for
predicates); instructions view them as what they need. A value is never changed in place, only replaced.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from proofs.ptx_emulator.findings import Finding, FindingKind, FindingLog
from proofs.ptx_emulator.parser import Immediate, Instruction, Operand, PtxKernel, Register, SymbolName, UnsupportedPtx

Array = NDArray[Any]
Run = Callable[[], None]

WARP = 32
PARAMETER_BYTES = 8
STORAGE = {"pred": np.bool_, "b16": np.uint16, "b32": np.uint32, "b64": np.uint64}
_POISON = {"pred": 0, "b16": 0x7FED, "b32": 0x7FEDBEEF, "b64": 0x7FEDBEEF7FEDBEEF}
"""Content of registers that nothing was written to: NaN as a float, far out of bounds as an address."""


class LaneState:
    """Register values and control state that decoded instructions work on."""

    def __init__(self, kernel: PtxKernel, log: FindingLog) -> None:
        self.kernel, self.log = kernel, log
        self.values: list[Array] = []
        self.active: Array | None = None
        """Mask of the lanes that execute the current block; None: all of them."""
        self.threads = kernel.threads
        self.warps = kernel.threads // WARP
        self.programs = 0
        self.grid = (1, 1, 1)
        self.program_ids: Array = np.zeros(0, np.int64)
        """Numbers in the grid of the programs of this batch."""
        self.epoch: Array = np.zeros((0, 1), np.int64)
        """Barriers passed by each program, counted from 1: [programs, 1]."""
        self.thread: Array = np.arange(self.threads, dtype=np.int64)[None]
        self.parameters: Array = np.zeros(0, np.uint64)
        """Bits of each parameter; its address is its number times PARAMETER_BYTES."""
        self._parameter_numbers = {parameter.name: i for i, parameter in enumerate(kernel.parameters)}
        self._initial: list[Array] = []
        self._slots: dict[object, int] = {}
        self._special: dict[str, int] = {}

    # decoding

    def _new(self, key: object, value: Array) -> int:
        if key not in self._slots:
            self._slots[key] = len(self._initial)
            self._initial.append(value)
        return self._slots[key]

    def register(self, operand: Operand, *kinds: str) -> int:
        """The slot of a register of one of these kinds."""
        if not isinstance(operand, Register) or self.kernel.register_kind(operand.name) not in kinds:
            raise UnsupportedPtx(f"{operand} where a register of kind {'/'.join(kinds)} is expected")
        kind = self.kernel.register_kind(operand.name)
        return self._new(operand.name, np.full((1, 1), _POISON[kind], STORAGE[kind]))

    def source(self, operand: Operand, kind: str) -> int:
        """The slot of a register, a constant, a special register or the address of a shared symbol."""
        if isinstance(operand, Register):
            return self.register(operand, kind)
        storage = np.dtype(STORAGE[kind])
        if isinstance(operand, Immediate):
            bits = int(operand.bits != 0) if kind == "pred" else operand.bits & ((1 << 8 * storage.itemsize) - 1)
            return self._new((kind, bits), np.full((1, 1), bits, storage))
        if isinstance(operand, SymbolName) and operand.name in self.kernel.shared_symbols and kind in ("b32", "b64"):
            address = self.kernel.shared_symbols[operand.name]
            return self._new((kind, address), np.full((1, 1), address, storage))
        if isinstance(operand, SymbolName) and operand.name in self._parameter_numbers and kind == "b64":
            address = self._parameter_numbers[operand.name] * PARAMETER_BYTES
            return self._new((kind, address), np.full((1, 1), address, storage))
        if isinstance(operand, SymbolName) and operand.name in _SPECIAL and kind == "b32":
            slot = self._new(operand.name, np.zeros((1, 1), np.uint32))
            self._special[operand.name] = slot
            return slot
        raise UnsupportedPtx(f"operand {operand} as {kind}")

    def mask(self, instruction: Instruction) -> Callable[[], Array | None]:
        """Lanes that execute an instruction, by its guard and the current block; None: all of them."""
        guard = instruction.guard
        if guard is None:
            return lambda: self.active
        slot = self.register(Register(guard.register), "pred")
        values = self.values

        def guarded() -> Array | None:
            chosen = ~values[slot] if guard.negated else values[slot]
            return chosen if self.active is None else chosen & self.active

        return guarded

    # execution

    def begin(self, program_ids: Array) -> None:
        self.program_ids, self.programs = program_ids, len(program_ids)
        self.values[:] = self._initial
        self.active = None
        self.epoch = np.ones((self.programs, 1), np.int64)
        x, y, z = self.coordinates(program_ids[:, None])
        known = {
            "%tid.x": self.thread, "%tid.y": np.zeros((1, 1)), "%tid.z": np.zeros((1, 1)),
            "%laneid": self.thread % WARP, "%ctaid.x": x, "%ctaid.y": y, "%ctaid.z": z,
            "%ntid.x": np.full((1, 1), self.threads),
            **{f"%nctaid.{axis}": np.full((1, 1), n) for axis, n in zip("xyz", self.grid, strict=True)},
        }  # fmt: skip
        for name, slot in self._special.items():
            self.values[slot] = known[name].astype(np.uint32)

    def coordinates(self, program: Array) -> tuple[Array, Array, Array]:
        n_x, n_y, _ = self.grid
        return program % n_x, program // n_x % n_y, program // (n_x * n_y)

    def put(self, slot: int, value: Array) -> None:
        active = self.active
        self.values[slot] = value if active is None else np.where(active, value, self.values[slot])

    def put_where(self, slot: int, value: Array, mask: Array | None) -> None:
        self.values[slot] = value if mask is None else np.where(mask, value, self.values[slot])

    def full(self, value: Array) -> Array:
        if value.shape == (self.programs, self.threads):
            return value
        return np.broadcast_to(value, (self.programs, self.threads))

    def lanes(self, mask: Array | None) -> Array:
        """A mask as an array; None: all lanes."""
        return self.full(np.ones((1, 1), np.bool_) if mask is None else mask)

    def by_warp(self, value: Array) -> Array:
        return self.full(value).reshape(self.programs, self.warps, WARP)

    def report(self, kind: FindingKind, at: Instruction, bad: Array, address: Array | int, detail: str = "") -> None:
        """`bad`: which lanes, [programs, threads] or [programs, lanes, …]; `address` broadcasts to it."""
        where = np.argwhere(bad)
        if not len(where):
            return
        first = tuple(where[0])
        x, y, z = self.coordinates(self.program_ids[first[0]])
        at_address = int(np.broadcast_to(np.asarray(address), bad.shape)[first])
        warp = int(first[1]) * (self.threads // bad.shape[1] if bad.shape[1] < self.threads else 1) // WARP
        place = (self.kernel.name, at.line, at.text, at.source, (int(x), int(y), int(z)), warp, at_address)
        self.log.add(Finding(kind, *place, detail, len(where)))

    def whole_warps(self, instruction: Instruction, mask: Array | None) -> None:
        """Reports warps of which only some lanes execute an instruction that needs all."""
        if mask is None:
            return
        lanes = self.by_warp(mask)
        some = lanes.any(-1) & ~lanes.all(-1)
        if some.any():
            detail = "only some lanes of the warp execute it"
            self.report(FindingKind.WARP_DIVERGENCE, instruction, np.repeat(some, WARP, 1), 0, detail)


LaneBuilder = Callable[[LaneState, Instruction], Run]

_SPECIAL = frozenset(
    ("%tid.x", "%tid.y", "%tid.z", "%laneid", "%ctaid.x", "%ctaid.y", "%ctaid.z", "%ntid.x", "%nctaid.x", "%nctaid.y",
     "%nctaid.z")
)  # fmt: skip
