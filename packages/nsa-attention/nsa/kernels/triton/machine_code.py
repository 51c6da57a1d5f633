"""Machine code statistics of a compiled kernel: registers, spills, shared memory, matrix and copy instructions.

For kernels compiled ahead of time for an absent GPU, and for those compiled just in time. The compiler does not check
shared memory, so it is compared with the GPU's limit here.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from nsa.gpus import GpuArchitecture


@dataclass(frozen=True)
class MachineCode:
    registers: int
    spilled_bytes: int
    """To memory, for each lane."""
    vector_spills: int
    """Registers moved to the matrix units' (AMD only)."""
    scalar_spills: int
    """Scalar registers kept in lanes of vector registers (AMD only): an instruction each way, no memory."""
    shared_bytes: int
    matrix: dict[str, int]
    """Matrix instructions by kind."""
    async_copies: int
    loops: int
    """That multiply tiles."""
    loops_not_pipelined: int
    """Those of them that wait for a tile, or copy nothing asynchronously."""

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

    def faults(self, gpu: GpuArchitecture) -> list[str]:
        """Faults of a half-precision kernel: what is over the limits, and what the GPU could do and does not."""
        reasons = self.over_limits(gpu)
        if self.loops and not self.matrix:
            reasons.append("no matrix instructions")
        if self.loops_not_pipelined and gpu.copies_asynchronously:
            reasons.append(
                f"{self.loops_not_pipelined} of {self.loops} loops wait for their tiles: the pipeline is lost"
            )
        return reasons


def compile_target(gpu: GpuArchitecture) -> GPUTarget:
    """As `triton.compile` takes it, for a GPU that need not be here."""
    return GPUTarget(gpu.backend, gpu.arch, gpu.warp_size)


def read(compiled: Any, gpu: GpuArchitecture) -> MachineCode:
    loops = list(_loops_that_multiply(compiled.asm["ttgir"]))
    waiting = sum(bool(_LOADS.search(body)) or not _COPIES.search(body) for body in loops)
    rest = dict(shared_bytes=compiled.metadata.shared, loops=len(loops), loops_not_pipelined=waiting)
    return (_read_amd if gpu.backend == "hip" else _read_nvidia)(compiled.asm, rest)


def disassembled(asm: Any) -> str:
    """NVIDIA machine code as text."""
    return _told_by("nvdisasm", asm)


def _read_nvidia(asm: Any, rest: dict[str, int]) -> MachineCode:
    usage, code = _told_by("cuobjdump", asm, "--dump-resource-usage"), disassembled(asm)
    return MachineCode(
        registers=_number(r"REG:(\d+)", usage),
        spilled_bytes=_number(r"STACK:(\d+)", usage),
        vector_spills=0,
        scalar_spills=0,
        matrix=_count(r"\b(HMMA|HGMMA|QGMMA|UTCHMMA|DMMA)\b", code),
        async_copies=len(re.findall(r"\b(?:LDGSTS|UTMALDG|UBLKCP)\b", code)),
        **rest,
    )


def _read_amd(asm: Any, rest: dict[str, int]) -> MachineCode:
    code = asm["amdgcn"]
    return MachineCode(
        registers=_number(r"\.vgpr_count:\s+(\d+)", code),
        spilled_bytes=_number(r"\.private_segment_fixed_size:\s+(\d+)", code),
        vector_spills=_number(r"\.vgpr_spill_count:\s+(\d+)", code),
        scalar_spills=_number(r"\.sgpr_spill_count:\s+(\d+)", code),
        matrix=_count(r"\bv_(mfma_\w+?)_(?:bf16|f16|f32|xf32)\b", code),
        async_copies=len(re.findall(r"\b(?:global|buffer)_load_lds_", code)),
        **rest,
    )


def _told_by(tool: str, asm: Any, *options: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        return _output(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool, *options, file.name)


_LOOP = re.compile(r"\bscf\.(?:for|while)\b")
_MULTIPLIES = re.compile(r"\b(?:tt\.dot|ttng\.warp_group_dot|ttng\.tc_gen5_mma)\b")
_LOADS = re.compile(r"\btt\.load\b.*tensor<\d+x\d+x")  # of a tile, into registers
_COPIES = re.compile(r"\b(?:ttg\.async_copy_global_to_local|ttng\.async_tma_copy_global_to_local)\b")


def _loops_that_multiply(ttgir: str) -> Iterator[str]:
    """The body of each loop with a product of tiles, without the loops inside it."""
    open_loops: list[tuple[int, list[str]]] = []  # the depth of braces outside, and the lines that are its own
    depth = 0
    for line in ttgir.splitlines():
        opens = _LOOP.search(line)
        if opens:
            open_loops.append((depth, []))
        elif open_loops:
            open_loops[-1][1].append(line)
        depth += line.count("{") - line.count("}")
        while open_loops and not opens and depth <= open_loops[-1][0]:
            _, lines = open_loops.pop()
            body = "\n".join(lines)
            if _MULTIPLIES.search(body):
                yield body


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"the compiler's output has no {pattern!r}: another version writes it differently")
    return int(match[1])


def _count(pattern: str, text: str) -> dict[str, int]:
    matches = re.findall(pattern, text)
    return {kind: matches.count(kind) for kind in sorted(set(matches))}


def _output(*command: str | Path) -> str:
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, check=True).stdout
