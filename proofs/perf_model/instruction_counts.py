"""Instructions per iteration of a kernel's main loops, counted in its compiled machine code (SASS).

A kernel that runs tiles without masks where it can has two loops; how often each runs is the work's (`bounds`).

A multiprocessor issues one instruction per clock and scheduler, of any kind: masks, addresses and the sorting
network of the selection take issue slots like matrix instructions. Nothing is executed and stalls are not modelled, so
this is a lower bound of the time.
"""

import re
from dataclasses import dataclass
from functools import cache

from nsa.bench.case import BenchShape
from proofs.perf_model.work import KernelWork

HMMA_FLOPS = 16 * 8 * 16 * 2
"""Operations of one m16n8k16 instruction of a warp."""
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)(.*)")


@dataclass(frozen=True)
class InstructionCounts:
    """Instructions of one loop iteration, by all warps of a program."""

    instructions: int
    inner_instructions: int
    """Instructions in the loop without masks; the same where there is one loop."""
    hmma_flops: int
    """HMMA operations: more than the product needs where warps repeat each other's work; 0 where others are used."""

    def of(self, work: KernelWork) -> int:
        return self.instructions * (work.trips - work.inner_trips) + self.inner_instructions * work.inner_trips


@cache
def count_instructions(kernel: str, shape: BenchShape, code: str) -> InstructionCounts | None:
    """Count instructions of the machine code; Count instructions of the machine code; None for GPUs without NVIDIA
    machine code."""
    if not code.startswith("sm_"):
        return None
    from nsa.gpus import ARCHITECTURES as GPUS
    from proofs.compile_report import report as compile_report
    from proofs.compile_report.machine_code import disassembled

    job = next(job for job in compile_report.jobs(compile_report.CompiledShape(shape), code) if job.kernel == kernel)
    text = disassembled(compile_report.compile_for(job, GPUS[code]).asm)
    instructions, inner, hmma = count(text, shape.heads_per_group if kernel == "select" else 0)
    return InstructionCounts(instructions * job.warps, inner * job.warps, hmma * job.warps * HMMA_FLOPS)


def count(text: str, heads: int = 0) -> tuple[int, int, int]:
    """Instructions of one iteration of the main loop, of the loop without masks, and of the first, HMMA.

    The main loop is the first with exponentials, or the outermost; the loop without masks is the next one after it.
    With `heads`, a step is the loop around the main one, which runs once per head. A pipelined loop has some of its
    iterations before or after itself: the exponentials there show how many. A kernel without loops counts as one
    iteration.
    """
    names, loops = parse(text)
    if not loops:
        n = sum(name != "NOP" for name in names)
        return n, n, 0

    def measure(begin: int, end: int) -> tuple[int, int]:
        return end - begin + 1, sum(name.startswith("HMMA") for name in names[begin : end + 1])

    def exponentials(begin: int, end: int) -> int:
        return sum(name.startswith("MUFU.EX2") for name in names[begin : end + 1])

    busy = [loop for loop in loops if exponentials(*loop) > 2] or loops[-1:]
    main = busy[0]
    if not heads:
        after = [loop for loop in busy if loop[0] > main[1]]
        n, hmma = measure(*main)
        return n, measure(*after[0])[0] if after else n, hmma
    around = [loop for loop in busy if loop != main and loop[0] <= main[0] and loop[1] >= main[1]]
    outer = min(around, key=lambda loop: loop[1] - loop[0])
    again = heads - exponentials(*outer) // exponentials(*main)
    step, head = measure(*outer), measure(*main)
    n = step[0] + again * head[0]
    return n, n, step[1] + again * head[1]


def parse(text: str) -> tuple[list[str], list[tuple[int, int]]]:
    """Instruction names in order, and the loops (backward jumps) as (first, last), ordered by end.

    Jumps after the last EXIT are no loops: the code that waits for a barrier is there, and jumps back.
    """
    names: list[str] = []
    labels: dict[str, int] = {}
    jumps: list[tuple[int, str]] = []
    for line in text.splitlines():
        if label := re.match(r"^(\.L_x_\d+):", line):
            labels[label[1]] = len(names)
        elif match := _INSTRUCTION.match(line):
            if match[1].startswith("BRA") and (target := re.search(r"`\((\.L_x_\d+)\)", match[2])):
                jumps.append((len(names), target[1]))
            names.append(match[1])
    end = max((at for at, name in enumerate(names) if name == "EXIT"), default=len(names))
    return names, [(labels[target], at) for at, target in jumps if labels.get(target, at + 1) < at < end]
