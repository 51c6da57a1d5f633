"""Runs a few lines of PTX on numpy arrays: what the tests of the emulator's instructions are written with."""

import numpy as np

from proofs.ptx_emulator.findings import Finding, FindingLog
from proofs.ptx_emulator.global_memory import arenas_of
from proofs.ptx_emulator.machine import Machine
from proofs.ptx_emulator.parser import parse


def module(body: str, n_arrays: int, threads: int) -> str:
    """%rd90, %rd91, … are the arrays' addresses; %r90 is the thread, %r91 four times it, %r92 the program."""
    parameters = ",\n".join(f"\t.param .u64 .ptr .global .align 1 snippet_param_{i}" for i in range(n_arrays))
    loads = "\n".join(f"\tld.param.b64 %rd{90 + i}, [snippet_param_{i}];" for i in range(n_arrays))
    return f"""
.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry snippet(
{parameters}
)
.reqntid {threads}
{{
\t.reg .pred %p<50>;
\t.reg .b16 %rs<100>;
\t.reg .b32 %r<400>;
\t.reg .b64 %rd<100>;
{loads}
\tmov.u32 %r90, %tid.x;
\tshl.b32 %r91, %r90, 2;
\tmov.u32 %r92, %ctaid.x;
{body}
\tret;
}}
"""


def run(body: str, *arrays: np.ndarray, threads: int = 32, programs: int = 1, shared: int = 0) -> list[Finding]:
    """Arrays are read and written in place."""
    log = FindingLog()
    machine = Machine(parse(module(body, len(arrays), threads)), log)
    addresses = np.array([a.ctypes.data for a in arrays], np.uint64)
    ranges = [(a.ctypes.data, a.ctypes.data + a.nbytes) for a in arrays]
    machine.launch((programs, 1, 1), addresses, shared, arenas_of(ranges))
    return log.take()


def at(array: int, stride: int, register: str = "%rd80") -> str:
    """The thread's place in an array of elements of `stride` bytes."""
    return f"\tmul.wide.u32 %rd79, %r90, {stride};\n\tadd.s64 {register}, %rd{90 + array}, %rd79;\n"


_WIDTHS = {16: "%rs", 32: "%r", 64: "%rd"}


def lanes(opcode: str, inputs: list[np.ndarray], output: np.dtype, *, more: str = "") -> np.ndarray:
    """One instruction on arrays of 32 lanes; a bool input or output is a predicate. `more`: further operands."""
    body, operands = "", []
    stored = np.dtype(np.int32) if output == np.bool_ else np.dtype(output)
    arrays = [x.astype(np.int32) if x.dtype == np.bool_ else np.ascontiguousarray(x) for x in inputs]
    for i, (x, values) in enumerate(zip(arrays, inputs, strict=True)):
        name = f"{_WIDTHS[8 * x.itemsize]}{i + 1}"
        body += at(i, x.itemsize) + f"\tld.global.b{8 * x.itemsize} {name}, [%rd80];\n"
        if values.dtype == np.bool_:
            body += f"\tsetp.ne.b32 %p{i + 1}, {name}, 0;\n"
            name = f"%p{i + 1}"
        operands.append(name)
    to = "%p9" if output == np.bool_ else f"{_WIDTHS[8 * stored.itemsize]}9"
    body += f"\t{opcode} {', '.join([to, *operands])}{more};\n"
    if output == np.bool_:
        body += "\tselp.b32 %r9, 1, 0, %p9;\n"
    out = np.zeros(32, stored)
    body += at(len(arrays), stored.itemsize)
    body += f"\tst.global.b{8 * stored.itemsize} [%rd80], {_WIDTHS[8 * stored.itemsize]}9;\n"
    assert not run(body, *arrays, out)
    return out.astype(output)
