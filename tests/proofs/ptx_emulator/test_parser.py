"""PTX text becomes instructions with lines and sources; what is not known is refused."""

import pytest

from proofs.ptx_emulator.parser import AddressOperand, Guard, Immediate, Register, UnsupportedPtx, VectorOperand, parse
from tests.proofs.ptx_emulator.ptx_snippets import module, run

TEXT = """
.target sm_80
.extern .shared .align 16 .b8 global_smem[];
.visible .entry some_kernel(
	.param .u64 .ptr .global .align 1 some_kernel_param_0,
	.param .f32 some_kernel_param_1
)
.reqntid 128
{
	.reg .pred 	%p<3>;
	.reg .b32 	%r<9>;
	.loc	1 42 0                          // some.py:42:0
// %bb.0:
	@!%p1 ld.shared.v2.b32 	{%r1, %r2}, [%r3+-16];
$L__BB0_1:                              // a loop
	.pragma "used_bytes_mask 0xff0";
	mov.b32 	%r4, 0f3F800000;
	bra.uni 	$L__BB0_1;
}
	.file	1 "/somewhere/some.py"
"""


def test_instructions_have_operands_guards_lines_and_sources():
    kernel = parse(TEXT)
    assert (kernel.name, kernel.target, kernel.threads) == ("some_kernel", "sm_80", 128)
    assert [(p.name, p.type) for p in kernel.parameters] == [
        ("some_kernel_param_0", "u64"),
        ("some_kernel_param_1", "f32"),
    ]
    load, move, branch = kernel.instructions
    assert load.opcode == "ld.shared.v2.b32"
    assert load.guard == Guard("%p1", True)
    assert load.operands == (VectorOperand((Register("%r1"), Register("%r2"))), AddressOperand(Register("%r3"), -16))
    assert (load.source, load.line) == ("some.py:42", 14)
    assert move.operands[1] == Immediate(0x3F800000, is_float=True)
    assert move.used_bytes == 0xFF0
    assert kernel.labels == {"$L__BB0_1": 1}
    assert branch.opcode == "bra.uni"


@pytest.mark.parametrize(
    "line",
    [
        "\tadd.sat.s32 %r1, %r2, %r3;",  # a modifier that is not known
        "\tld.volatile.global.b32 %r1, [%rd90];",
        "\tatom.global.add.u32 %r1, [%rd90], 1;",
        "\tmma.sync.aligned.m16n8k16.row.row.f32.bf16.bf16.f32 {%r1},{%r5},{%r9},{%r1};",
        "\tshfl.sync.bfly.b32 %r1, %r2, 1, 31, 0xffff;",  # some lanes only
        "\tbar.sync 1;",  # another barrier
        "\tbar.sync 0, 64;",
        "\tadd.s32 %r1, %r2;",  # too few operands
        "\tadd.s32 %rd1, %rd2, %rd3;",  # registers of another width
        "\tmov.b32 %r1, unknown_symbol;",
        "\tmov.u32 %r1, %clock;",
        "\tcp.async.cg.shared.global [%r1], [%rd1], 4;",
        "not ptx at all",
    ],
)
def test_what_is_not_known_is_refused(line):
    with pytest.raises(UnsupportedPtx):
        run(line)


def test_static_shared_memory_and_functions_are_refused():
    text = module("", 0, 32)
    for line in (".shared .align 4 .b8 buffer[64];", ".func helper()"):
        with pytest.raises(UnsupportedPtx):
            parse(text.replace(".visible", f"{line}\n.visible"))
