"""Machine code statistics of a compiled kernel: its resources, matrix and copy instructions, and pipelined loops."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from triton.backends.compiler import GPUTarget

from nsa.gpus import GpuArchitecture
from nsa.kernels.triton.autotune import KernelResources, read_by, resources


@dataclass(frozen=True)
class MachineCode(KernelResources):
    matrix: dict[str, int]
    """Matrix instructions by kind."""
    async_copies: int
    loops: int
    """That multiply tiles."""
    loops_not_pipelined: int
    """Those of them that wait for a tile, or copy nothing asynchronously."""

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
    """Return the target of `triton.compile` for a GPU, which need not be present."""
    return GPUTarget(gpu.backend, gpu.arch, gpu.warp_size)


def read(compiled: Any, gpu: GpuArchitecture) -> MachineCode:
    loops = list(_loops_that_multiply(compiled.asm["ttgir"]))
    waiting = sum(bool(_LOADS.search(body)) or not _COPIES.search(body) for body in loops)
    if gpu.backend == "hip":
        code = compiled.asm["amdgcn"]
        matrix = _count(r"\bv_(mfma_\w+?)_(?:bf16|f16|f32|xf32)\b", code)
        copies = len(re.findall(r"\b(?:global|buffer)_load_lds_", code))
    else:
        code = disassembled(compiled.asm)
        matrix = _count(r"\b(HMMA|HGMMA|QGMMA|UTCHMMA|DMMA)\b", code)
        copies = len(re.findall(r"\b(?:LDGSTS|UTMALDG|UBLKCP)\b", code))
    return MachineCode(
        **vars(resources(compiled, gpu)),
        matrix=matrix,
        async_copies=copies,
        loops=len(loops),
        loops_not_pipelined=waiting,
    )


def disassembled(asm: Any) -> str:
    """NVIDIA machine code as text."""
    return read_by("nvdisasm", asm)


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


def _count(pattern: str, text: str) -> dict[str, int]:
    matches = re.findall(pattern, text)
    return {kind: matches.count(kind) for kind in sorted(set(matches))}
