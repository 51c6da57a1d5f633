"""Executes one PTX kernel: decodes its instructions into closures and steps the programs of a grid together.

Every thread has a program counter, by basic block. The block with the lowest index among all threads runs next, for
the threads that are there: lanes, warps and programs that diverged meet again after loops and branches, as LLVM orders
its blocks. A barrier ends a block; threads wait there for the rest of their program.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from proofs.ptx_emulator.execution import Builder, ExecutionUnit
from proofs.ptx_emulator.findings import FindingKind, FindingLog
from proofs.ptx_emulator.fragment_cache import FragmentCache
from proofs.ptx_emulator.global_memory import GlobalMemory, MemoryArena
from proofs.ptx_emulator.instructions import (
    arithmetic,
    conversions,
    matrix,
    memory_access,
    packed_float,
    warp,
    warpgroup,
)
from proofs.ptx_emulator.parser import AddressOperand, Instruction, PtxKernel, Register, SymbolName, UnsupportedPtx
from proofs.ptx_emulator.shared_memory import SharedMemory
from proofs.ptx_emulator.state import WARP, Array, LaneBuilder, LaneState, Run
from proofs.ptx_emulator.wgmma_groups import WgmmaGroups

LANES_AT_ONCE = 8192
"""Programs are run in batches of about this many threads."""
ProgramOrder = Callable[[int], list[int]]
"""Order in which n programs run; a batch of them runs at a time."""
_BARRIERS = ("bar.sync", "barrier.sync", "barrier.sync.aligned")
ENDS_OF_BLOCKS = (*_BARRIERS, "bra", "bra.uni", "ret", "exit")


def _on_lanes(build: LaneBuilder) -> Builder:
    return lambda unit, at: build(unit.state, at)


def _unit_builders() -> dict[str, Builder]:
    plain = {**arithmetic.BUILDERS, **conversions.BUILDERS, **packed_float.BUILDERS}
    of_lanes = {name: _on_lanes(build) for name, build in plain.items()}
    return {**of_lanes, **memory_access.BUILDERS, **warp.BUILDERS, **matrix.BUILDERS, **warpgroup.BUILDERS}


BUILDERS: dict[str, Builder] = _unit_builders()


@dataclass
class BasicBlock:
    runs: list[Run] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    end: Instruction | None = None
    """The branch, return or barrier at its end, if any."""
    target: int = -1
    guard_slot: int = -1


class Machine:
    """One kernel, ready to run on any grid."""

    def __init__(self, kernel: PtxKernel, log: FindingLog) -> None:
        if kernel.threads % WARP or not kernel.threads:
            raise UnsupportedPtx(f"{kernel.threads} threads: whole warps are needed")
        self.kernel = kernel
        self.state = state = LaneState(kernel, log)
        uses_wgmma = any(at.family == "wgmma" for at in kernel.instructions)
        shared = SharedMemory(state, _narrowest(kernel, ".shared"), has_async_proxy=uses_wgmma)
        memory = GlobalMemory(state, _narrowest(kernel, ".global"))
        self.unit = ExecutionUnit(state, shared, memory, WgmmaGroups(state), FragmentCache(state))
        self.blocks = self._decode()
        if uses_wgmma:
            self._guard_registers()
        self._stores = _stored_parameters(kernel)
        self.warps_by_block = np.zeros(len(self.blocks), np.int64)
        """Number of warps that executed each block, over all launches."""

    # decoding

    def _decode(self) -> list[BasicBlock]:
        kernel, blocks, begins = self.kernel, [BasicBlock()], {0: 0}
        places = set(kernel.labels.values())
        for i, at in enumerate(kernel.instructions):
            if i in places and (blocks[-1].instructions or blocks[-1].end is not None):
                blocks.append(BasicBlock())
            begins.setdefault(i, len(blocks) - 1)
            if at.family in ("bra", "ret", "exit") or at.opcode in _BARRIERS:
                blocks[-1].end = at
                blocks.append(BasicBlock())
                continue
            blocks[-1].instructions.append(at)
            blocks[-1].runs.append(self._build(at))
        for label_at in places:
            begins.setdefault(label_at, len(blocks) - 1)
        for block in blocks:
            if block.end is not None:
                self._decode_end(block, begins, len(blocks))
        return blocks

    def _build(self, at: Instruction) -> Run:
        builder = BUILDERS.get(at.opcode)
        if builder is None:
            raise UnsupportedPtx(f"{self.kernel.name}, PTX line {at.line}: unknown instruction {at.text}")
        try:
            return builder(self.unit, at)
        except (UnsupportedPtx, ValueError, KeyError) as error:
            raise UnsupportedPtx(f"{self.kernel.name}, PTX line {at.line}: {at.text}: {error}") from error

    def _decode_end(self, block: BasicBlock, begins: Mapping[int, int], exit_block: int) -> None:
        at = block.end
        assert at is not None
        if at.opcode in ("bra", "bra.uni"):
            (label,) = at.operands
            assert isinstance(label, SymbolName)
            block.target = begins[self.kernel.labels[label.name]]
        elif at.opcode in ("ret", "exit"):
            block.target = exit_block
        elif (at.operands and getattr(at.operands[0], "bits", None) != 0) or len(at.operands) > 1 or at.guard:
            raise UnsupportedPtx(f"{self.kernel.name}, PTX line {at.line}: {at.text}: only barrier 0 of all threads")
        if at.guard is not None:
            block.guard_slot = self.state.register(Register(at.guard.register), "pred")

    def _guard_registers(self) -> None:
        """Instructions that touch the registers of a wgmma check that it was waited for."""
        groups = self.unit.wgmma
        names = {
            r.name: self.state.register(r, "b32", "b64", "b16", "pred")
            for at in self.kernel.instructions
            for r in warpgroup.register_operands(at.operands)
        }
        for block in self.blocks:
            for i, (at, run) in enumerate(zip(block.instructions, block.runs, strict=True)):
                if at.family == "wgmma":
                    continue
                used = frozenset(names[r.name] for r in warpgroup.register_operands(at.operands)) & groups.operands
                if used:
                    to = frozenset(names[r.name] for r in warpgroup.register_operands(at.operands[:1]))
                    written = frozenset() if at.family in ("st", "stmatrix") else used & to
                    block.runs[i] = self._checked(at, run, used, written)

    def _checked(self, at: Instruction, run: Run, used: frozenset[int], written: frozenset[int]) -> Run:
        groups, state = self.unit.wgmma, self.state

        def checked() -> None:
            programs = groups.in_flight(used)
            if programs is not None:
                bad = state.lanes(state.active) & programs[:, None]
                detail = "the register belongs to a wgmma that was not waited for"
                state.report(FindingKind.READ_BEFORE_WAIT, at, bad, 0, detail)
            if written:
                groups.note_write(written)
            run()

        return checked

    # execution

    def launch(
        self, grid: tuple[int, int, int], parameters: Array, shared_bytes: int, arenas: list[MemoryArena],
        order: ProgramOrder | None = None,
    ) -> list[int]:  # fmt: skip
        """`parameters`: the bits of each, as uint64. Returns the programs in the order in which they ran."""
        state = self.state
        state.grid, state.parameters = grid, parameters
        names = [parameter.name for parameter in self.kernel.parameters]
        assert len(names) == len(parameters), f"{len(parameters)} values for {len(names)} parameters"
        addresses = None if self._stores is None else {int(parameters[names.index(name)]) for name in self._stores}
        self.unit.memory.begin(arenas, addresses)
        total = grid[0] * grid[1] * grid[2]
        programs = list(range(total)) if order is None else order(total)
        step = max(1, LANES_AT_ONCE // state.threads)
        with np.errstate(all="ignore"):
            for first in range(0, total, step):
                self._begin_batch(programs[first : first + step], shared_bytes)
                self._run_batch()
        # Triton keeps every kernel it loaded: an idle machine holds no registers, shared memory or tensors.
        self._begin_batch([], 0)
        self.unit.memory.begin([], None)
        return programs

    def _begin_batch(self, programs: list[int], shared_bytes: int) -> None:
        self.state.begin(np.array(programs, np.int64))
        self.unit.shared.begin(max(16, shared_bytes))
        self.unit.wgmma.begin()
        self.unit.fragments.begin()

    def _run_batch(self) -> None:
        state, blocks, at_exit = self.state, self.blocks, len(self.blocks)
        shape = (state.programs, state.threads)
        together: int | None = 0
        counters = np.zeros(shape, np.int32)
        waits = np.full(shape, -1, np.int32)
        while True:
            if together is None:
                runnable = np.where(waits >= 0, at_exit, counters)
                current = int(runnable.min())
                if current == at_exit:
                    if not self._release(counters, waits):
                        return
                    continue
                active = runnable == current
                if active.all():
                    together = current
            else:
                current = together
            if together is not None:
                if together == at_exit:
                    return
                state.active = None
                self.warps_by_block[current] += state.programs * state.warps
            else:
                state.active = active
                self.warps_by_block[current] += int(state.by_warp(active).any(-1).sum())
            block = blocks[current]
            for run in block.runs:
                run()
            if block.end is not None and block.end.opcode in _BARRIERS:
                if together is not None:
                    state.epoch = state.epoch + 1
                    self.unit.shared.barrier(True)
                    together += 1
                else:
                    waits[active] = current
                    self._release(counters, waits)
                continue
            if together is not None:
                together = self._next_together(block, current, counters)
            else:
                counters[active] = np.broadcast_to(self._next(block, current), shape)[active]

    def _next_together(self, block: BasicBlock, current: int, counters: Array) -> int | None:
        """The block that all threads go to, or None if they part, with `counters` set."""
        following = self._next(block, current)
        if (following == following.flat[0]).all():
            return int(following.flat[0])
        counters[:] = following
        return None

    def _next(self, block: BasicBlock, current: int) -> Array:
        if block.end is None or block.target < 0:
            return np.array(current + 1)
        if block.guard_slot < 0:
            return np.array(block.target)
        assert block.end.guard is not None
        taken = self.state.values[block.guard_slot] != block.end.guard.negated
        return np.where(taken, block.target, current + 1)

    def _release(self, counters: Array, waits: Array) -> bool:
        """Lets programs pass a barrier that all their threads have reached; True if any did."""
        exited = counters == len(self.blocks)
        ready = ((waits >= 0) | (exited & (waits < 0))).all(1) & (waits >= 0).any(1)
        if not ready.any():
            return False
        waiting = waits >= 0
        differ = waiting & (waits != np.where(waiting, waits, -1).max(1, keepdims=True))
        partial = ready & ((exited & ~waiting).any(1) | differ.any(1))
        if partial.any():
            program = int(np.flatnonzero(partial)[0])
            end = self.blocks[int(waits[program].max())].end
            assert end is not None
            detail = "some threads of the program have ended or wait at another barrier"
            self.state.report(FindingKind.BARRIER_DIVERGENCE, end, waiting & partial[:, None], 0, detail)
        passes = ready[:, None] & waiting
        counters[passes] = waits[passes] + 1
        waits[passes] = -1
        self.state.epoch = self.state.epoch + ready[:, None]
        self.unit.shared.barrier(bool(ready.all()))
        return True


def _narrowest(kernel: PtxKernel, space: str) -> int:
    """Bytes of the narrowest access to a memory space, at most 4."""
    widths = [4]
    for at in kernel.instructions:
        if space in at.opcode and at.family in ("ld", "st"):
            widths.append(int(at.opcode.rpartition(".")[2][1:]) // 8)
    return min(widths)


_ANY = "*"
"""Stands for a parameter that is chosen at run time."""


def _stored_parameters(kernel: PtxKernel) -> set[str] | None:
    """The parameters that addresses of stores may come from; None if there is a store of which that is not known."""
    sources: dict[str, set[str]] = {}
    stores: list[str] = []
    flows: list[tuple[str, list[str]]] = []
    for at in kernel.instructions:
        names = [r.name for r in warpgroup.register_operands(at.operands)]
        if at.opcode.startswith("ld.param"):
            address = at.operands[1]
            assert isinstance(address, AddressOperand)
            chosen = isinstance(address.base, Register)
            sources.setdefault(names[0], set()).add(_ANY if chosen else address.base.name)
        elif at.opcode.startswith("st.global") and isinstance(at.operands[0], AddressOperand):
            stores.append(at.operands[0].base.name)
        elif at.family not in ("ld", "st", "cp", "bra", "bar", "ldmatrix", "setp") and len(names) > 1:
            flows.append((names[0], names[1:]))
    changed = True
    while changed:
        changed = False
        for to, origins in flows:
            known = sources.setdefault(to, set())
            before = len(known)
            known.update(*(sources.get(o, set()) for o in origins))
            changed |= len(known) != before
    parameters: set[str] = set()
    for base in stores:
        if not sources.get(base):
            return None
        parameters |= sources[base]
    if _ANY in parameters:
        return None
    wide = {p.name for p in kernel.parameters if p.type in ("u64", "b64")}
    return parameters & wide


def instruction_totals(machines: Iterable[Machine]) -> dict[str, int]:
    """Warp instructions executed, by opcode."""
    totals: dict[str, int] = {}
    for machine in machines:
        for block, warps in zip(machine.blocks, machine.warps_by_block.tolist(), strict=True):
            ends = [block.end] if block.end is not None else []
            for at in [*block.instructions, *ends]:
                totals[at.opcode] = totals.get(at.opcode, 0) + warps
    return totals
