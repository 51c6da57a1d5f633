"""Compile reports as the Markdown table docs/kernels/COMPILE_REPORT.md: written, read, compared with a new build."""

import re
from pathlib import Path

import triton

from nsa.gpus import ARCHITECTURES as GPUS
from proofs.compile_report.machine_code import MachineCode
from proofs.compile_report.report import CompileReport

TABLE = Path(__file__).parents[2] / "docs" / "kernels" / "COMPILE_REPORT.md"
MORE_REGISTERS = 8
"""Registers per thread that a build may use above the table's before it counts as worse."""

_HEAD = """\
# Compile report

Machine code of every Triton kernel, compiled ahead of time in bf16 by Triton {triton} and inspected; nothing was run.
Written by `python -m proofs.compile_report.write`. Heads, groups, key/value width, selected blocks:
base 12, 2, 64/64, 16; gqa16 32, 2, 64/64, 16;
paper 64, 4, 192/128, 16; width128 32, 4, 128/128, 16; n_sel32 12, 2, 64/64, 32.
Spilled: bytes to memory; on AMD also vector and scalar registers moved to other registers. Shared: bytes used / limit.
Loops: those that multiply tiles, and how many of them wait for a tile instead of being pipelined. Copies: asynchronous
ones (gfx942 has none, so its loops always wait). How tiles are chosen: [tuning.md](tuning.md).

| kernel | model | GPU | tile | registers | spilled | shared / limit | matrix | copies | loops | programs/unit |
|---|---|---|---|---|---|---|---|---|---|---|
"""


def render(reports: list[CompileReport]) -> str:
    faults = [f"- {r.kernel}, {r.model}, {r.gpu}: {fault}" for r in reports for fault in r.faults()]
    return (
        _HEAD.format(triton=triton.__version__)
        + "\n".join([*map(_row, reports), "", "## Faults", "", *(faults or ["None."])])
        + "\n"
    )


def _row(report: CompileReport) -> str:
    code = report.code
    spilled = f"{code.spilled_bytes} B"
    if code.vector_spills or code.scalar_spills:
        spilled += f", {code.vector_spills} vector, {code.scalar_spills} scalar"
    matrix = ", ".join(f"{n} {kind}" for kind, n in code.matrix.items()) or "–"
    loops = f"{code.loops}, {code.loops_not_pipelined} waiting" if code.loops_not_pipelined else f"{code.loops}"
    cells = (report.kernel, report.model, report.gpu, report.tile, code.registers, spilled,
             f"{code.shared_bytes:,} / {GPUS[report.gpu].shared_limit:,}", matrix, code.async_copies, loops,
             report.programs_per_unit)  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def parse(text: str) -> list[CompileReport]:
    lines = (line for line in text.splitlines() if line.startswith("| "))
    return [_parsed(line.strip("| ").split(" | ")) for line in lines if not line.startswith("| kernel ")]


def _parsed(cells: list[str]) -> CompileReport:
    kernel, model, gpu, tile, registers, spilled, shared, matrix, copies, loops, programs = cells
    bytes_, vector, scalar = (*map(int, re.findall(r"\d+", spilled)), 0, 0)[:3]
    n_loops, waiting = (*map(int, re.findall(r"\d+", loops)), 0)[:2]
    kinds = {kind: int(n) for n, kind in re.findall(r"(\d+) (\w+)", matrix)}
    shared_bytes = int(shared.partition(" / ")[0].replace(",", ""))
    code = MachineCode(int(registers), bytes_, vector, scalar, shared_bytes, kinds, int(copies), n_loops, waiting)
    return CompileReport(kernel, model, gpu, tile, code, int(programs))


def regressions(new: CompileReport, recorded: list[CompileReport]) -> list[str]:
    """List the faults of a build, by itself or beside the table's entry for the same kernel, shape and GPU."""
    entries = [r for r in recorded if (r.model, r.gpu, r.kernel) == (new.model, new.gpu, new.kernel)]
    if len(entries) != 1:
        return [f"{len(entries)} entries in {TABLE.name}"]
    code, before = new.code, entries[0].code
    faults = [fault for fault in new.faults() if fault not in entries[0].faults()]
    if code.shared_bytes > before.shared_bytes:
        faults.append(f"{code.shared_bytes} bytes of shared memory, recorded {before.shared_bytes}")
    if code.registers > before.registers + MORE_REGISTERS:
        faults.append(f"{code.registers} registers, recorded {before.registers}")
    if code.matrix.keys() != before.matrix.keys():
        faults.append(f"matrix instructions {', '.join(code.matrix)}, recorded {', '.join(before.matrix)}")
    return faults
