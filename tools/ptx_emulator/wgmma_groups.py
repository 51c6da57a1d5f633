"""Groups of wgmma: which registers and shared-memory cells asynchronous products still use, and what fences cover.

Registers of a group that was not waited for must not be touched by other instructions. Groups
are followed for each batch of programs as a whole, which is exact as long as programs reach waits by the same number of
groups, as loops that Triton pipelines do.
"""

from dataclasses import dataclass, field

import numpy as np

from tools.ptx_emulator.findings import FindingKind
from tools.ptx_emulator.parser import Instruction
from tools.ptx_emulator.state import Array, LaneState


@dataclass
class OpenGroup:
    registers: set[int] = field(default_factory=set)
    cells: list[Array] = field(default_factory=list)


class WgmmaGroups:
    def __init__(self, state: LaneState) -> None:
        self._state = state
        self.operands: set[int] = set()
        """Every register slot that some wgmma of the kernel uses: known after decoding."""
        self.begin()

    def begin(self) -> None:
        self._open = OpenGroup()
        self._committed: list[OpenGroup] = []
        self._time = 0
        self._fence: Array | None = None
        self._written: dict[int, Array] = {}

    @property
    def in_flight(self) -> set[int]:
        return set().union(self._open.registers, *(group.registers for group in self._committed))

    def note_write(self, slots: frozenset[int]) -> None:
        """Registers of a wgmma written by another instruction: a fence must follow before wgmma uses them."""
        self._time += 1
        now = self._programs() * self._time
        for slot in slots:
            known = self._written.get(slot)
            self._written[slot] = now if known is None else np.maximum(known, now)

    def fence(self) -> None:
        self._time += 1
        now = self._programs() * self._time
        self._fence = now if self._fence is None else np.maximum(self._fence, now)

    def issue(self, at: Instruction, registers: set[int], accumulators: set[int], cells: list[Array]) -> None:
        covered = np.zeros(self._state.programs, np.int64) if self._fence is None else self._fence
        late = self._programs() > 0
        bad = np.zeros(self._state.programs, np.bool_) | (covered == 0)
        for slot in registers:
            if slot in self._written:
                bad = bad | (self._written[slot] > covered)
        bad = bad & late
        if bad.any():
            detail = "registers were written without a wgmma.fence after it"
            self._state.report(FindingKind.MISSING_FENCE, at, bad[:, None], 0, detail)
        self._open.registers |= accumulators
        self._open.cells += cells

    def commit(self) -> None:
        self._committed.append(self._open)
        self._open = OpenGroup()

    def wait(self, newest: int) -> list[Array]:
        """The cells that groups still in flight read."""
        keep = self._committed[len(self._committed) - newest :] if newest else []
        self._committed = keep
        return [cells for group in [*keep, self._open] for cells in group.cells]

    def _programs(self) -> Array:
        active = self._state.active
        if active is None:
            return np.ones(self._state.programs, np.int64)
        return np.broadcast_to(active.any(1), (self._state.programs,)).astype(np.int64)
