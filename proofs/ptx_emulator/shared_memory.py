"""Shared memory of a batch of programs, with shadow state that finds races, early reads and uninitialized reads.

Each cell (1, 2 or 4 bytes, the narrowest access of the kernel) keeps its last writer and readers as
epoch · THREADS + thread, where a program's epoch grows with every barrier: two threads conflict if they meet in a cell
in the same epoch and one writes. What cp.async copies becomes visible with the wait of the thread that issued it, as
late as hardware may do it. Reads are only looked at when a write follows in the same epoch.
"""

from typing import Any, NamedTuple

import numpy as np

from proofs.ptx_emulator.findings import FindingKind
from proofs.ptx_emulator.parser import Instruction
from proofs.ptx_emulator.state import WARP, Array, LaneState

THREADS = 2048
MANY = THREADS - 1
"""Stands for several readers."""
SYNCED, LANES = 1024, 1536
"""Plus the warp, instead of a thread: lanes of that warp, before its last bar.warp.sync; several of its lanes since."""


class CopyInFlight(NamedTuple):
    address: Array
    data: Array
    """[programs, threads, bytes]"""
    mask: Array
    group: Array
    """Number of groups that each thread had committed before."""


class CellReads(NamedTuple):
    cells: Array
    """[programs, threads, cells], flat indices."""
    mask: Array | None
    key: Array
    epoch: Array


class SharedMemory:
    def __init__(self, state: LaneState, cell_bytes: int, *, has_async_proxy: bool) -> None:
        self._state, self._shift, self.cell_bytes = state, cell_bytes.bit_length() - 1, cell_bytes
        self._has_async_proxy = has_async_proxy
        self.size = 0

    def begin(self, size: int) -> None:
        """Allocate `size` bytes for each program of the state."""
        state = self._state
        self.size, self._stride = size, -(-size // 16) * 16
        n = state.programs
        self.data = np.full(n * self._stride, 0xA5, np.uint8)
        n_cells = self._stride >> self._shift
        self._offset = np.arange(n, dtype=np.int64)[:, None]
        self._n_cells = n_cells
        self._writer = np.zeros(n * n_cells, np.int64)
        self._reader = np.zeros(n * n_cells, np.int64)
        self._copying = np.zeros(n * n_cells, np.bool_)
        self._fenced = np.zeros(n * n_cells if self._has_async_proxy else 0, np.bool_)
        self._multiplied = np.zeros(n * n_cells if self._has_async_proxy else 0, np.bool_)
        self._reads: list[CellReads] = []
        self._copies: list[CopyInFlight] = []
        self._committed = np.zeros((n, state.threads), np.int32)
        self._completed = np.zeros((n, state.threads), np.int32)

    # accesses

    def load(
        self, at: Instruction, address: Array, mask: Array | None, n_bytes: int, thread: Array | None = None
    ) -> Array:  # fmt: skip
        """[programs, lanes, n_bytes] of uint8, contiguous; zeros where the mask or the bounds say no."""
        mask = self._in_bounds(at, address, mask, n_bytes)
        self._check_read(at, address, mask, n_bytes, thread)
        rows = self.data.reshape(-1, n_bytes)
        index = (address // np.uint32(n_bytes)).astype(np.int64) + self._offset * (self._stride // n_bytes)
        if mask is not None:
            index = np.where(mask, index, 0)
        return rows[index]

    def store(
        self, at: Instruction, address: Array, mask: Array | None, data: Array, thread: Array | None = None
    ) -> None:  # fmt: skip
        """`data`: [programs, lanes, bytes] of uint8."""
        n_bytes = data.shape[-1]
        address = np.broadcast_to(address, data.shape[:2])
        mask = self._in_bounds(at, address, mask, n_bytes)
        rows = self.data.reshape(-1, n_bytes)
        index = (address // np.uint32(n_bytes)).astype(np.int64) + self._offset * (self._stride // n_bytes)
        if mask is None:
            same = self._check_write(at, address, mask, n_bytes, thread, rows, index, data)
            rows[index] = data
        else:
            chosen = np.broadcast_to(mask, index.shape)
            same = self._check_write(at, address, chosen, n_bytes, thread, rows, index, data)
            rows[index[chosen]] = data[chosen]
        self._check_same(at, address, mask, rows, index, data, same)

    def _in_bounds(self, at: Instruction, address: Array, mask: Array | None, n_bytes: int) -> Array | None:
        outside = address.astype(np.int64) > self.size - n_bytes
        crooked = address & np.uint32(n_bytes - 1) != 0
        bad = outside | crooked
        if not bad.any():
            return mask
        for kind, wrong in ((FindingKind.OUT_OF_BOUNDS, outside), (FindingKind.MISALIGNED, crooked)):
            hit = wrong if mask is None else wrong & mask
            if hit.any():
                detail = f"{n_bytes} bytes of {self.size} in shared memory"
                self._state.report(kind, at, hit, address.astype(np.int64), detail)
        return ~bad if mask is None else mask & ~bad

    # shadow state

    def _cells(self, address: Array, n_bytes: int, used: int | None = None) -> Array:
        steps = np.arange(max(1, n_bytes >> self._shift))
        if used is not None:
            steps = np.array([i for i in steps if used >> (i << self._shift) & (2**self.cell_bytes - 1)], np.int64)
        first = (address >> np.uint32(self._shift)).astype(np.int64) + self._offset * self._n_cells
        return first[..., None] + steps

    def _keys(self, thread: Array | None) -> tuple[Array, Array]:
        """The first key of each program's epoch, and each lane's key."""
        base = self._state.epoch * THREADS
        return base[..., None], (base + (self._state.thread if thread is None else thread))[..., None]

    def _check_read(
        self, at: Instruction, address: Array, mask: Array | None, n_bytes: int, thread: Array | None
    ) -> None:  # fmt: skip
        lanes = self._state.thread.shape[1] if thread is None else thread.shape[1]
        address = np.broadcast_to(address, (self._state.programs, lanes))
        cells = self._cells(address, n_bytes, at.used_bytes)
        if mask is not None:
            cells = np.where(mask[..., None], cells, 0)
        base, key = self._keys(thread)
        writer = self._writer[cells]
        good = ((writer < base) | (writer == key) | (writer == _synced(key))) & (writer > 0)
        if mask is not None:
            good = good | ~mask[..., None]
        if not good.all():
            self._report_read(at, address, ~good, writer)
        if self._copies:
            early = self._copying[cells]
            early = early if mask is None else early & mask[..., None]
            if early.any():
                detail = "cp.async has written it, and its group was not waited for"
                lanes_early: Any = early.any(-1)
                self._state.report(FindingKind.READ_BEFORE_WAIT, at, lanes_early, address.astype(np.int64), detail)
        self._reads.append(CellReads(cells, mask, key, self._state.epoch.copy()))

    def _report_read(self, at: Instruction, address: Array, bad: Array, writer: Array) -> None:
        missing = (bad & (writer == 0)).any(-1)
        raced = (bad & (writer != 0)).any(-1)
        where = address.astype(np.int64)
        if self._copies and missing.any():  # what is still being copied is reported as an early read
            copied = self._copying[self._cells(address, self.cell_bytes)].any(-1)
            missing = missing & ~copied
        self._state.report(FindingKind.UNINITIALIZED, at, missing, where)
        detail = "written by another thread since the last barrier"
        self._state.report(FindingKind.SHARED_RACE, at, raced, where, detail)

    def _gather_reads(self) -> None:
        """The reads of the current epochs into the shadow state."""
        epoch = self._state.epoch
        for reads in self._reads:
            now = np.broadcast_to((reads.epoch == epoch)[..., None], reads.cells.shape)
            if reads.mask is not None:
                now = now & reads.mask[..., None]
            cells = reads.cells[now]
            key = np.broadcast_to(reads.key, reads.cells.shape)[now]
            base = key // THREADS * THREADS
            old = self._reader[cells]
            key = _joined(old, key, base)
            self._reader[cells] = key
            last = self._reader[cells]
            several = last != key
            self._reader[cells[several]] = _joined(last, key, base)[several]
        self._reads.clear()

    def _check_write(
        self, at: Instruction, address: Array, mask: Array | None, n_bytes: int, thread: Array | None,
        rows: Array | None = None, index: Array | None = None, data: Array | None = None,
    ) -> Array | None:  # fmt: skip
        """Reports conflicts and records the writers. Returns lanes whose cells another lane wrote at the same time."""
        if self._reads:
            self._gather_reads()
        cells = self._cells(address, n_bytes)
        base, key = self._keys(thread)
        key = np.broadcast_to(key, cells.shape)
        chosen: Array | None = None
        if mask is not None:
            chosen = np.broadcast_to(mask[..., None], cells.shape)
            cells = np.where(chosen, cells, 0)
        writer, reader = self._writer[cells], self._reader[cells]
        synced = _synced(key)
        bad = (writer >= base) & (writer != key) & (writer != synced)
        if data is not None and rows is not None and index is not None and bad.any():
            unequal = (rows[np.where(mask, index, 0) if mask is not None else index] != data).any(-1)
            bad = bad & unequal[..., None]  # several threads may write the same value
        bad = bad | ((reader >= base) & (reader != key) & (reader != synced))
        where = address.astype(np.int64)
        for kind, wrong, detail in (
            (FindingKind.SHARED_RACE, bad, "read or written by another thread since the last barrier"),
            (FindingKind.WRITE_BEFORE_WAIT, self._copying[cells] if self._copies else None,
             "cp.async is still writing it"),
            (FindingKind.WRITE_BEFORE_WAIT, self._multiplied[cells] if self._has_async_proxy else None,
             "wgmma may still read it"),
        ):  # fmt: skip
            if wrong is None:
                continue
            hit: Any = (wrong if chosen is None else wrong & chosen).any(-1)
            if hit.any():
                self._state.report(kind, at, hit, where, detail)
        if chosen is None:
            self._writer[cells] = key
        else:
            self._writer[cells[chosen]] = key[chosen]
        if self._has_async_proxy:
            self._fenced[cells if chosen is None else cells[chosen]] = False
        lost = (self._writer[cells] != key) if chosen is None else (self._writer[cells] != key) & chosen
        return lost.any(-1) if lost.any() else None

    def _check_same(
        self, at: Instruction, address: Array, mask: Array | None, rows: Array, index: Array, data: Array,
        lost: Array | None,
    ) -> None:  # fmt: skip
        """Lanes that wrote a cell together must have written the same value."""
        if lost is None:
            return
        unequal = lost & (rows[np.where(mask, index, 0) if mask is not None else index] != data).any(-1)
        if unequal.any():
            detail = "several threads write different values at once"
            self._state.report(FindingKind.SHARED_RACE, at, unequal, address.astype(np.int64), detail)

    # barriers and asynchronous copies

    def barrier(self, everybody: bool) -> None:
        """After epochs have grown; `everybody`: of all programs."""
        if everybody:
            self._reads.clear()
        else:
            self._reads = [reads for reads in self._reads if (reads.epoch == self._state.epoch).any()]

    def warp_barrier(self, mask: Array | None) -> None:
        """Order accesses by warp: what lanes of the executing warps touched in this epoch no longer conflicts with
        their own warp."""
        self._gather_reads()
        lanes, base = self._state.lanes(mask), self._state.epoch * THREADS
        for shadow in (self._writer, self._reader):
            code = shadow.reshape(self._state.programs, self._n_cells) - base
            warp = np.where(code >= LANES, code - LANES, code // WARP)
            known = (code >= 0) & (code != MANY) & ((code < SYNCED) | (code >= LANES))
            there = np.take_along_axis(lanes, np.clip(warp * WARP, 0, self._state.threads - 1), 1)
            shadow[:] = np.where(known & there, base + SYNCED + warp, code + base).reshape(-1)

    def copy_async(self, at: Instruction, address: Array, mask: Array | None, data: Array) -> None:
        address = np.broadcast_to(address, data.shape[:2])
        mask = self._in_bounds(at, address, mask, data.shape[-1])
        chosen = np.broadcast_to(np.True_ if mask is None else mask, data.shape[:2])
        self._check_write(at, address, chosen, data.shape[-1], None)
        cells = self._cells(address, data.shape[-1])[chosen]
        self._copying[cells] = True
        self._copies.append(CopyInFlight(address, data, chosen, self._committed.copy()))

    def commit(self, mask: Array | None) -> None:
        self._committed = self._committed + (1 if mask is None else mask.astype(np.int32))

    def wait(self, at: Instruction, mask: Array | None, newest: int) -> None:
        """Wait until at most the `newest` groups of each thread are still in flight."""
        done = np.maximum(self._completed, self._committed - newest)
        self._completed = done if mask is None else np.where(mask, done, self._completed)
        left = []
        for copy in self._copies:
            landed = copy.mask & (copy.group < self._completed)
            if landed.any():
                self._land(copy, landed)
            if not landed[copy.mask].all():
                left.append(copy._replace(mask=copy.mask & ~landed))
        self._copies = left
        for copy in left:  # another copy may have landed in the same place
            self._copying[self._cells(copy.address, copy.data.shape[-1])[copy.mask]] = True

    def _land(self, copy: CopyInFlight, landed: Array) -> None:
        n_bytes = copy.data.shape[-1]
        index = (copy.address // np.uint32(n_bytes)).astype(np.int64) + self._offset * (self._stride // n_bytes)
        self.data.reshape(-1, n_bytes)[index[landed]] = copy.data[landed]
        cells = self._cells(copy.address, n_bytes)
        _, key = self._keys(None)
        self._copying[cells[landed]] = False
        self._writer[cells[landed]] = np.broadcast_to(key, cells.shape)[landed]
        if self._has_async_proxy:
            self._fenced[cells[landed]] = False

    # the asynchronous proxy of wgmma

    def fence_proxy(self, mask: Array | None) -> None:
        """Fence: what is visible to the executing threads, or was written by them, becomes visible to wgmma."""
        shape = (self._state.programs, self._n_cells)
        writer = self._writer.reshape(shape)
        everybody = self._state.lanes(mask)
        visible = writer < np.where(everybody.any(1, keepdims=True), self._state.epoch, 0) * THREADS
        own = np.take_along_axis(everybody, np.minimum(writer % THREADS, self._state.threads - 1), 1)
        self._fenced |= (visible | own).reshape(-1)

    def multiply_load(self, at: Instruction, address: Array, mask: Array | None) -> tuple[Array, Array]:
        """Operands of wgmma, 16 bytes at each address: [programs, lanes, 16], and the cells that were read."""
        mask = self._in_bounds(at, address, mask, 16)
        cells = self._cells(address, 16)
        index = (address // np.uint32(16)).astype(np.int64) + self._offset * (self._stride // 16)
        chosen = np.broadcast_to(np.True_ if mask is None else mask, address.shape)
        cells, index = np.where(chosen[..., None], cells, 0), np.where(chosen, index, 0)
        writer, where = self._writer[cells], address.astype(np.int64)
        base, _ = self._keys(np.zeros((1, 1), np.int64))
        checks = (
            (FindingKind.UNINITIALIZED, (writer == 0) & ~self._copying[cells], ""),
            (FindingKind.READ_BEFORE_WAIT, self._copying[cells], "cp.async was not waited for"),
            (FindingKind.SHARED_RACE, writer >= base, "written since the last barrier"),
            (FindingKind.MISSING_FENCE, ~self._fenced[cells] & (writer > 0) & (writer < base),
             "written without a fence.proxy.async"),
        )  # fmt: skip
        for kind, bad, detail in checks:
            hit = (bad & chosen[..., None]).any(-1)
            if hit.any():
                self._state.report(kind, at, hit, where, detail)
        self._multiplied[cells[chosen]] = True
        return self.data.reshape(-1, 16)[index], cells[chosen]

    def multiply_done(self, still_read: list[tuple[Array, Array]]) -> None:
        """After a wait: only these cells may still be read by wgmma, in the programs given with them.

        What was read counts as read now, by several threads.
        """
        done = np.flatnonzero(self._multiplied)
        self._multiplied[done] = False
        for cells, programs in still_read:
            self._multiplied[cells[programs[cells // self._n_cells]]] = True
        epoch = self._state.epoch[done // self._n_cells, 0]
        self._reader[done] = epoch * THREADS + MANY


def _synced(key: Array) -> Array:
    """Return, for a thread's key, the key of its warp's lanes before their last bar.warp.sync."""
    return key // THREADS * THREADS + SYNCED + key % THREADS // WARP


def _joined(old: Array, key: Array, base: Array) -> Array:
    """The key of a cell's readers after a thread with this key has read it, too."""
    warp = (key - base) // WARP
    of_one_warp = ((old >= base) & (old < base + SYNCED) & ((old - base) // WARP == warp)) | (
        old == base + LANES + warp
    )
    alone = (old < base) | (old == key) | (old == base + SYNCED + warp)
    return np.where(alone, key, np.where(of_one_warp, base + LANES + warp, base + MANY))
