"""Dynamic instruction counts: how many warp instructions of each class a kernel executed, how often its loops ran."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from proofs.ptx_emulator.machine import BUILDERS, ENDS_OF_BLOCKS, Machine
from proofs.ptx_emulator.state import WARP

CLASSES = (
    "mma", "fp32", "special", "conversion", "integer", "predicate", "move", "global", "shared", "async_copy", "shuffle",
    "barrier", "branch",
)  # fmt: skip
_BY_FAMILY = {
    "mma": "mma", "wgmma": "mma", "ex2": "special", "lg2": "special", "rcp": "special", "sqrt": "special",
    "rsqrt": "special", "tanh": "special", "cvt": "conversion", "setp": "predicate", "selp": "predicate", "mov": "move",
    "cp": "async_copy", "ldmatrix": "shared", "stmatrix": "shared", "shfl": "shuffle", "redux": "shuffle",
    "vote": "shuffle", "bar": "barrier", "barrier": "barrier", "fence": "barrier", "bra": "branch", "ret": "branch",
    "exit": "branch",
}  # fmt: skip


def class_of(opcode: str) -> str:
    family = opcode.partition(".")[0]
    if opcode.startswith(("wgmma.fence", "wgmma.commit", "wgmma.wait", "cp.async.wait", "cp.async.commit")):
        return "barrier"
    if family in _BY_FAMILY:
        return _BY_FAMILY[family]
    if family in ("ld", "st"):
        return {"global": "global", "shared": "shared", "param": "move"}[opcode.split(".")[1]]
    if opcode.endswith(".pred"):
        return "predicate"
    return "fp32" if ".f32" in opcode else "integer"


def by_class(opcodes: Mapping[str, int]) -> dict[str, int]:
    """Warp instructions by class, every class of CLASSES."""
    totals = dict.fromkeys(CLASSES, 0)
    for opcode, n in opcodes.items():
        totals[class_of(opcode)] += n
    return totals


@dataclass(frozen=True)
class LoopCounts:
    trips: int
    """Iterations over all programs and launches so far."""
    opcodes: Counter[str]
    """Instructions of one iteration, by all warps of a program."""


def loops_executed(machine: Machine) -> list[LoopCounts]:
    """The loops of a kernel, in order: a loop is all jumps back to one place."""
    jumps: dict[int, list[int]] = {}
    for last, block in enumerate(machine.blocks):
        if block.end is not None and block.end.family == "bra" and 0 <= block.target <= last:
            jumps.setdefault(block.target, []).append(last)
    warps, loops = machine.kernel.threads // WARP, []
    for first, ends in sorted(jumps.items()):
        body = machine.blocks[first : max(ends) + 1]
        opcodes = Counter(at.opcode for part in body for at in (*part.instructions, *([part.end] if part.end else ())))
        trips = sum(int(machine.warps_by_block[last]) for last in ends) // warps
        loops.append(LoopCounts(trips, Counter({opcode: n * warps for opcode, n in opcodes.items()})))
    return loops


def idle_stores(machines: Iterable[Machine]) -> tuple[list[str], int]:
    """Stores to global memory of one kernel that never stored anything, where a fault shows nowhere; and all of them.

    The compiler makes several copies of a store: for the parts of a tile, and for the ways through a kernel. Variants
    of a kernel for other constants with as many stores have the same copies, so that one of them has to store.
    """
    idle: dict[tuple[int, int], str] = {}
    reached: set[tuple[int, int]] = set()
    for machine in machines:
        stores = [at for at in machine.kernel.instructions if at.opcode.startswith("st.global")]
        for number, at in enumerate(stores):
            copy = len(stores), number
            idle.setdefault(copy, f"store {number} of {len(stores)}, line {at.line}: {at.text}")
            if at.line in machine.unit.memory.stored_lines:
                reached.add(copy)
    return [text for copy, text in idle.items() if copy not in reached], len(idle)


def unknown_instructions(ptx: str) -> Counter[str]:
    """Instructions that the emulator does not execute, and how often they are in the text."""
    opcodes = re.findall(r"^\t(?:@!?%p\d+ )?([a-z][\w.:]*)[ \t;]", ptx, re.MULTILINE)
    return Counter(opcode for opcode in opcodes if opcode not in (*BUILDERS, *ENDS_OF_BLOCKS))
