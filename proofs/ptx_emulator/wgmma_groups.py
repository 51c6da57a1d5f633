"""Groups of wgmma: which registers and shared-memory cells asynchronous products still use, and what fences cover.

Registers of a group that was not waited for must not be touched by other instructions. Each program of a batch has its
own groups and fences.
"""

from typing import NamedTuple

import numpy as np

from proofs.ptx_emulator.findings import FindingKind
from proofs.ptx_emulator.parser import Instruction
from proofs.ptx_emulator.state import Array, LaneState


class ProductInFlight(NamedTuple):
    registers: frozenset[int]
    """Slots of its accumulators."""
    cells: list[Array]
    """Addresses that it reads in shared memory."""
    programs: Array
    """Mask of the programs that issued it."""
    group: Array
    """Number of groups that each program had committed before."""


class WgmmaGroups:
    def __init__(self, state: LaneState) -> None:
        self._state = state
        self.operands: set[int] = set()
        """Every register slot that some wgmma of the kernel uses: known after decoding."""
        self.begin()

    def begin(self) -> None:
        n = self._state.programs
        self._products: list[ProductInFlight] = []
        self._committed, self._completed = np.zeros(n, np.int64), np.zeros(n, np.int64)
        self._time = 0
        self._fence = np.zeros(n, np.int64)
        self._written: dict[int, Array] = {}

    def in_flight(self, slots: frozenset[int]) -> Array | None:
        """The executing programs in which one of these registers belongs to an unfinished product; None: in none."""
        bad: Array | None = None
        for product in self._products:
            if product.registers & slots:
                here = self._unfinished(product) & self._programs()
                bad = here if bad is None else bad | here
        return bad if bad is not None and bad.any() else None

    def note_write(self, slots: frozenset[int]) -> None:
        """Registers of a wgmma written by another instruction: a fence must follow before wgmma uses them."""
        self._time += 1
        now = np.where(self._programs(), self._time, 0)
        for slot in slots:
            known = self._written.get(slot)
            self._written[slot] = now if known is None else np.maximum(known, now)

    def fence(self) -> None:
        self._time += 1
        self._fence = np.where(self._programs(), self._time, self._fence)

    def issue(self, at: Instruction, registers: set[int], accumulators: set[int], cells: list[Array]) -> None:
        bad = self._fence == 0
        for slot in registers:
            if slot in self._written:
                bad = bad | (self._written[slot] > self._fence)
        bad = bad & self._programs()
        if bad.any():
            detail = "registers were written without a wgmma.fence after it"
            self._state.report(FindingKind.MISSING_FENCE, at, bad[:, None], 0, detail)
        self._products.append(
            ProductInFlight(frozenset(accumulators), cells, self._programs(), self._committed.copy())
        )  # fmt: skip

    def commit(self) -> None:
        self._committed = self._committed + self._programs()

    def wait(self, newest: int) -> list[tuple[Array, Array]]:
        """Cells that products still read, each with the programs in which they do."""
        done = np.maximum(self._completed, self._committed - newest)
        self._completed = np.where(self._programs(), done, self._completed)
        self._products = [product for product in self._products if self._unfinished(product).any()]
        return [(cells, self._unfinished(product)) for product in self._products for cells in product.cells]

    def _unfinished(self, product: ProductInFlight) -> Array:
        return product.programs & (product.group >= self._completed)

    def _programs(self) -> Array:
        """Mask of the programs that execute the current instruction."""
        active = self._state.active
        if active is None:
            return np.ones(self._state.programs, np.bool_)
        return np.broadcast_to(active.any(1), (self._state.programs,))
