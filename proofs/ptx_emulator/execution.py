"""Resources of a decoded instruction: lanes, shared memory and global memory of one kernel."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from proofs.ptx_emulator.fragment_cache import FragmentCache
from proofs.ptx_emulator.global_memory import GlobalMemory
from proofs.ptx_emulator.parser import AddressOperand, Instruction, Operand, UnsupportedPtx, VectorOperand
from proofs.ptx_emulator.shared_memory import SharedMemory
from proofs.ptx_emulator.state import Array, LaneState, Run
from proofs.ptx_emulator.wgmma_groups import WgmmaGroups


@dataclass
class ExecutionUnit:
    state: LaneState
    shared: SharedMemory
    memory: GlobalMemory
    wgmma: WgmmaGroups
    fragments: FragmentCache

    def address(self, operand: Operand, kind: str) -> Callable[[], Array]:
        """The value of [base + offset]."""
        if not isinstance(operand, AddressOperand):
            raise UnsupportedPtx(f"{operand} where an address is expected")
        slot, values = self.state.source(operand.base, kind), self.state.values
        if not operand.offset:
            return lambda: values[slot]
        width = 32 if kind == "b32" else 64
        offset = np.array(operand.offset & ((1 << width) - 1), f"u{width // 8}")
        return lambda: values[slot] + offset


Builder = Callable[[ExecutionUnit, Instruction], Run]


def elements(operand: Operand) -> tuple[Operand, ...]:
    """Return the operands of {a, b, …} or the single operand."""
    return operand.elements if isinstance(operand, VectorOperand) else (operand,)
