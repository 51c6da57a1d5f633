"""Resources of a compiled kernel: registers, spills and shared memory.

For kernels compiled ahead of time for an absent GPU, and for those compiled just in time. The compiler does not check
shared memory, so it is compared with the GPU's limit here.
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton

from nsa.gpus import GpuArchitecture


@dataclass(frozen=True)
class KernelResources:
    registers: int
    spilled_bytes: int
    """To memory, for each lane."""
    vector_spills: int
    """Registers moved to the matrix units' (AMD only)."""
    scalar_spills: int
    """Scalar registers kept in lanes of vector registers (AMD only): an instruction each way, no memory."""
    shared_bytes: int

    def over_limits(self, gpu: GpuArchitecture) -> list[str]:
        """Resources the kernel takes and should not."""
        reasons = []
        if self.spilled_bytes:
            reasons.append(f"{self.spilled_bytes} bytes spilled")
        if self.vector_spills or self.scalar_spills:
            reasons.append(f"{self.vector_spills} vector and {self.scalar_spills} scalar registers spilled")
        if self.shared_bytes > gpu.shared_limit:
            reasons.append(f"{self.shared_bytes} bytes of shared memory, the limit is {gpu.shared_limit}")
        return reasons


def resources(compiled: Any, gpu: GpuArchitecture) -> KernelResources:
    if gpu.backend == "cuda":
        usage = read_by("cuobjdump", compiled.asm, "--dump-resource-usage")
        registers, spilled, vector, scalar = _number(r"REG:(\d+)", usage), _number(r"STACK:(\d+)", usage), 0, 0
    else:
        registers, spilled, vector, scalar = (
            _number(rf"\.{name}:\s+(\d+)", compiled.asm["amdgcn"])
            for name in ("vgpr_count", "private_segment_fixed_size", "vgpr_spill_count", "sgpr_spill_count")
        )
    return KernelResources(registers, spilled, vector, scalar, compiled.metadata.shared)


def read_by(tool: str, asm: Any, *options: str) -> str:
    """What a tool of NVIDIA's prints of a kernel's machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
        command = [str(program), *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"the compiler's output has no {pattern!r}: another version writes it differently")
    return int(match[1])
