"""Global memory: the tensors of a launch at their real addresses, bounds-checked, with a record of who touched what.

A cell (1, 2 or 4 bytes) keeps its last writer and reader as program, epoch and warp. Programs of one launch are never
ordered: if two of them touch a cell and one writes, that is a race. Within a program the same holds for two warps
between two barriers.
"""

import ctypes
from typing import Any

import numpy as np

from proofs.ptx_emulator.findings import FindingKind
from proofs.ptx_emulator.parser import Instruction
from proofs.ptx_emulator.state import WARP, Array, LaneState

_MANY = -1


class MemoryArena:
    """An address range that kernels may touch: one tensor, or several that overlap."""

    def __init__(self, begin: int, end: int) -> None:
        self.begin, self.end = begin, end
        self.origin = begin // 16 * 16
        buffer = (ctypes.c_uint8 * (end - self.origin)).from_address(self.origin)
        self.data: Array = np.ctypeslib.as_array(buffer)
        self.written_by_kernel = True
        self.writer: Array = np.zeros(0, np.int64)
        self.reader: Array = np.zeros(0, np.int64)

    def rows(self, n_bytes: int) -> Array:
        """[rows, n_bytes], from the origin; a last row that is not whole belongs to nobody."""
        whole = len(self.data) // n_bytes
        return self.data[: whole * n_bytes].reshape(whole, n_bytes)


def arenas_of(ranges: list[tuple[int, int]]) -> list[MemoryArena]:
    """Ranges [begin, end) of tensors; those that overlap are one arena."""
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(r for r in ranges if r[0] < r[1]):
        if merged and begin < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return [MemoryArena(begin, end) for begin, end in merged]


class GlobalMemory:
    def __init__(self, state: LaneState, cell_bytes: int) -> None:
        self._state, self._shift = state, cell_bytes.bit_length() - 1
        self.arenas: list[MemoryArena] = []
        self._last: dict[int, MemoryArena] = {}
        self.stored_lines: set[int] = set()
        """Lines of stores that stored something, over all launches."""

    def begin(self, arenas: list[MemoryArena], written: set[int] | None) -> None:
        """`written`: addresses that the kernel's stores are relative to; None: not known."""
        self.arenas, self._last = arenas, {}
        for arena in arenas:
            arena.written_by_kernel = written is None or any(arena.begin <= a < arena.end for a in written)
            n_cells = (len(arena.data) >> self._shift) + 16
            arena.writer = np.zeros(n_cells, np.int64)
            arena.reader = np.zeros(n_cells, np.int64)

    def load(self, at: Instruction, address: Array, mask: Array | None, n_bytes: int) -> Array:
        """[…, n_bytes] of uint8; zeros where the mask or the bounds say no."""
        if mask is not None:
            address, mask = np.broadcast_arrays(address, mask)
        parts = self._resolve(at, address, mask, n_bytes)
        if len(parts) == 1 and parts[0][1] is None:
            return self._load_all(at, parts[0][0], address, None, n_bytes)
        result = np.zeros((*address.shape, n_bytes), np.uint8)
        for arena, chosen in parts:
            if chosen is None or chosen.any():
                loaded = self._load_all(at, arena, address, chosen, n_bytes)
                if len(parts) == 1:
                    return loaded
                result[chosen] = loaded[chosen]
        return result

    def _load_all(self, at: Instruction, arena: MemoryArena, address: Array, mask: Array | None, n_bytes: int) -> Array:
        index = (address - np.uint64(arena.origin)).astype(np.int64)
        if mask is not None:
            index = np.where(mask, index, -(-(arena.begin - arena.origin) // n_bytes) * n_bytes)
        if arena.written_by_kernel:
            self._check_read(at, arena, index, address, mask, n_bytes)
        rows = arena.rows(n_bytes)
        if not len(rows):
            return np.zeros((*address.shape, n_bytes), np.uint8)
        return rows[np.minimum(index // n_bytes, len(rows) - 1)]

    def store(self, at: Instruction, address: Array, mask: Array | None, data: Array) -> None:
        """`data`: [programs, threads, bytes] of uint8."""
        n_bytes = data.shape[-1]
        address = np.broadcast_to(address, data.shape[:2])
        for arena, chosen in self._resolve(at, address, mask, n_bytes):
            keep = np.broadcast_to(np.True_ if chosen is None else chosen, address.shape)
            if not keep.any():
                continue
            index = (address[keep] - np.uint64(arena.origin)).astype(np.int64)
            self.stored_lines.add(at.line)
            arena.rows(n_bytes)[index // n_bytes] = data[keep]
            self._check_write(at, arena, index, address, keep, data[keep])

    def _resolve(
        self, at: Instruction, address: Array, mask: Array | None, n_bytes: int
    ) -> list[tuple[MemoryArena, Array | None]]:  # fmt: skip
        """The arenas that the lanes' addresses are in; bad addresses are reported and left out."""
        mask = self._aligned(at, address, mask, n_bytes)
        last = self._last.get(at.line)
        if last is not None:
            inside = self._inside(last, address, n_bytes)
            if (inside if mask is None else inside | ~mask).all():
                return [(last, mask)]
        outside = np.ones(address.shape, np.bool_) if mask is None else np.broadcast_to(mask, address.shape).copy()
        if not outside.any():
            return []
        parts: list[tuple[MemoryArena, Array | None]] = []
        for arena in self.arenas:
            here = self._inside(arena, address, n_bytes) & outside
            if here.any():
                parts.append((arena, None if here.all() else here))
                self._last[at.line] = arena
                outside &= ~here
        if outside.any():
            detail = f"{n_bytes} bytes that belong to no tensor of the launch"
            self._state.report(FindingKind.OUT_OF_BOUNDS, at, outside, address, detail)
        return parts

    @staticmethod
    def _inside(arena: MemoryArena, address: Array, n_bytes: int) -> Array:
        room = arena.end - arena.begin - n_bytes
        if room < 0:
            return np.zeros(address.shape, np.bool_)
        inside: Array = address - np.uint64(arena.begin) <= np.uint64(room)
        return inside

    def _aligned(self, at: Instruction, address: Array, mask: Array | None, n_bytes: int) -> Array | None:
        crooked = address & np.uint64(n_bytes - 1) != 0
        if not crooked.any():
            return mask
        hit = crooked if mask is None else crooked & mask
        if hit.any():
            self._state.report(FindingKind.MISALIGNED, at, hit, address, f"{n_bytes} bytes of global memory")
        return ~crooked if mask is None else mask & ~crooked

    # shadow state

    def _key(self) -> Array:
        """Program + 1, epoch and warp of each lane: [programs, threads]."""
        state = self._state
        return ((state.program_ids[:, None] + 1) << 32) | (state.epoch << 8) | (state.thread // WARP)

    def _cells(self, index: Array, n_bytes: int) -> Array:
        return (index >> self._shift)[..., None] + np.arange(max(1, n_bytes >> self._shift))

    def _check_read(
        self, at: Instruction, arena: MemoryArena, index: Array, address: Array, mask: Array | None, n_bytes: int
    ) -> None:  # fmt: skip
        shape = (self._state.programs, self._state.threads)
        cells = np.broadcast_to(self._cells(index, n_bytes), (*shape, max(1, n_bytes >> self._shift)))
        key = np.broadcast_to(self._key()[..., None], cells.shape)
        writer = arena.writer[cells]
        bad: Array = _conflicts(writer, key)
        active = self._state.active if mask is None else mask
        if active is not None:
            chosen = np.broadcast_to(active[..., None], cells.shape)
            bad = bad & chosen
            cells, key = cells[chosen], key[chosen]
        if bad.any():
            where = np.broadcast_to(address, shape)
            lanes: Any = bad.any(-1)
            self._state.report(FindingKind.GLOBAL_RACE, at, lanes, where, "written in this launch by another")
        old = arena.reader[cells]
        program = key >> 32
        mine = np.where((old == 0) | (old >> 32 == program), key, _MANY)
        arena.reader[cells] = mine
        several = arena.reader[cells] >> 32 != program
        arena.reader[cells[several]] = _MANY

    def _check_write(
        self, at: Instruction, arena: MemoryArena, index: Array, address: Array, keep: Array, data: Array
    ) -> None:  # fmt: skip
        n_bytes = data.shape[-1]
        cells = self._cells(index, n_bytes)
        key = np.broadcast_to(np.broadcast_to(self._key(), keep.shape)[keep][:, None], cells.shape)
        bad = _conflicts(arena.writer[cells], key) | _conflicts(arena.reader[cells], key)
        arena.writer[cells] = key
        lost = _conflicts(arena.writer[cells], key)
        if lost.any():  # several lanes at once: of one program they may write the same value
            elsewhere = arena.writer[cells] >> 32 != key >> 32
            unequal = (arena.rows(n_bytes)[index // n_bytes] != data).any(-1)
            bad = bad | elsewhere | (lost & unequal[:, None])
        if bad.any():
            lanes = np.zeros(keep.shape, np.bool_)
            lanes[keep] = bad.any(-1)
            self._state.report(FindingKind.GLOBAL_RACE, at, lanes, address, "touched in this launch by another")


def _conflicts(other: Array, mine: Array) -> Array:
    """Whether an access is of another program, or of another warp of this one since the last barrier."""
    differ = other ^ mine
    elsewhere = differ >> 32 != 0
    unsynchronized = (differ >> 8 == 0) & (differ != 0)
    conflicts: Array = (other != 0) & (elsewhere | unsynchronized)
    return conflicts
