"""Every kind of finding: a snippet that has the fault is reported, the same one without it is not."""

import numpy as np
import pytest

from tests.proofs.ptx_emulator.ptx_snippets import at, run

EXCHANGE = """
	st.shared.b32 [%r91], %r90;
	{barrier}
	xor.b32 %r1, %r91, {partner};
	ld.shared.b32 %r2, [%r1];
"""


def kinds(body, *arrays, **sizes):
    return {finding.kind for finding in run(body, *arrays, **sizes)}


def test_a_barrier_makes_an_exchange_between_warps_right():
    assert not kinds(EXCHANGE.format(barrier="bar.sync 0;", partner=128), threads=64, shared=256)
    (finding,) = run(EXCHANGE.format(barrier="", partner=128), threads=64, shared=256)
    assert finding.kind == "shared_race"
    assert finding.instruction.startswith("ld.shared")
    assert (finding.program, finding.warp, finding.occurrences) == ((0, 0, 0), 0, 64)


def test_lanes_of_one_warp_race_too():
    assert kinds(EXCHANGE.format(barrier="", partner=4), shared=128) == {"shared_race"}


def test_a_warp_barrier_orders_the_lanes_of_a_warp_only():
    assert not kinds(EXCHANGE.format(barrier="bar.warp.sync -1;", partner=4), threads=64, shared=256)
    assert kinds(EXCHANGE.format(barrier="bar.warp.sync -1;", partner=128), threads=64, shared=256) == {"shared_race"}
    first = "\tst.shared.b32 [%r91], %r90;\n\tbar.sync 0;\n\tand.b32 %r1, %r91, {mask};\n\tld.shared.b32 %r2, [%r1];\n"
    then = "\t{barrier}\n\tst.shared.b32 [%r91], %r2;\n"
    body = first + then  # a lane reads for others of its warp (mask 128), or of all warps (mask 0)
    assert not kinds(body.format(mask=128, barrier="bar.warp.sync -1;"), threads=64, shared=256)
    assert kinds(body.format(mask=128, barrier=""), threads=64, shared=256) == {"shared_race"}
    assert kinds(body.format(mask=0, barrier="bar.warp.sync -1;"), threads=64, shared=256) == {"shared_race"}


def test_write_after_read_needs_a_barrier():
    body = EXCHANGE.format(barrier="bar.sync 0;", partner=128) + "\t{}\n\tst.shared.b32 [%r91], %r2;\n"
    assert not kinds(body.format("bar.sync 0;"), threads=64, shared=256)
    (finding,) = run(body.format(""), threads=64, shared=256)
    assert finding.kind == "shared_race"
    assert finding.instruction.startswith("st.shared")


def test_threads_may_write_the_same_value_to_one_place_but_no_other():
    assert not kinds("\tmov.b32 %r1, 7;\n\tst.shared.b32 [global_smem], %r1;\n", threads=64, shared=16)
    assert kinds("\tst.shared.b32 [global_smem], %r90;\n", threads=64, shared=16) == {"shared_race"}


def test_uninitialized_shared_memory():
    (finding,) = run("\tld.shared.b32 %r1, [%r91];\n", shared=128)
    assert (finding.kind, finding.address) == ("uninitialized", 0)


COPY = """
	mul.wide.u32 %rd1, %r90, 4;
	add.s64 %rd1, %rd1, %rd90;
	cp.async.ca.shared.global [%r91], [%rd1], 0x4;
	cp.async.commit_group;
	add.s32 %r1, %r91, 256;
	cp.async.ca.shared.global [%r1], [%rd1], 0x4;
	{commit}
	cp.async.wait_group {newest};
	{barrier}
	xor.b32 %r2, %r91, 128;
	ld.shared.b32 %r3, [%r2];
	{then}
"""


def copy(*, commit="cp.async.commit_group;", newest=1, barrier="bar.sync 0;", then=""):
    text = COPY.format(commit=commit, newest=newest, barrier=barrier, then=then)
    return run(text, np.arange(64, dtype=np.int32), threads=64, shared=512)


def test_copied_data_is_read_after_wait_and_barrier():
    assert not copy()
    assert {f.kind for f in copy(newest=2)} == {"read_before_wait"}
    assert {f.kind for f in copy(commit="")} == {"read_before_wait"}  # the first group is the newest then
    assert {f.kind for f in copy(barrier="")} == {"shared_race"}  # each thread waits for its own copies only


def test_memory_that_is_being_copied_must_not_be_written():
    assert not copy(newest=0, then="st.shared.b32 [%r91+256], %r90;")
    findings = copy(then="st.shared.b32 [%r91+256], %r90;")
    assert {f.kind for f in findings} == {"write_before_wait"}


def test_out_of_bounds():
    x = np.zeros(31, np.int32)
    (finding,) = run(at(0, 4) + "\tld.global.b32 %r1, [%rd80];\n", x)
    assert (finding.kind, finding.occurrences) == ("out_of_bounds", 1)
    assert finding.address == x.ctypes.data + 31 * 4
    guarded = "\tsetp.lt.u32 %p1, %r90, 31;\n" + at(0, 4) + "\t@%p1 st.global.b32 [%rd80], %r90;\n"
    assert not run(guarded, x)
    assert kinds("\tst.shared.b32 [%r91+4], %r90;\n", shared=128) == {"out_of_bounds"}
    assert kinds("\tmov.b32 %r1, 3;\n" + at(0, 4) + "\tst.global.b32 [%rd80+-128], %r1;\n", x) == {"out_of_bounds"}


def test_misaligned():
    x = np.zeros(80, np.int32)
    assert kinds(at(0, 4) + "\tld.global.v2.b32 {%r1, %r2}, [%rd80];\n", x) == {"misaligned"}
    assert not kinds(at(0, 8) + "\tld.global.v2.b32 {%r1, %r2}, [%rd80];\n", x)
    assert kinds("\tst.shared.b32 [%r91+2], %r90;\n", shared=256) == {"misaligned"}


STORE = """
	shr.u32 %r1, %r92, {shift};
	shl.b32 %r2, %r1, 5;
	add.s32 %r2, %r2, %r90;
	mul.wide.u32 %rd1, %r2, 4;
	add.s64 %rd1, %rd1, %rd90;
"""


def test_programs_must_not_share_what_they_write():
    x = np.zeros(256, np.int32)
    assert not kinds(STORE.format(shift=0) + "\tst.global.b32 [%rd1], %r92;\n", x, programs=8)
    assert kinds(STORE.format(shift=1) + "\tst.global.b32 [%rd1], %r92;\n", x, programs=8) == {"global_race"}
    read_all = "\tld.global.b32 %r3, [%rd90];\n" + STORE.format(shift=0) + "\tst.global.b32 [%rd1], %r3;\n"
    assert kinds(read_all, x, programs=8) == {"global_race"}
    y = np.zeros(256, np.int32)
    apart = "\tld.global.b32 %r3, [%rd91];\n" + STORE.format(shift=0) + "\tst.global.b32 [%rd1], %r3;\n"
    assert not kinds(apart, x, y, programs=8)


@pytest.mark.parametrize("programs", [8, 600])
def test_programs_of_different_batches_race_too(programs):
    x = np.zeros(32, np.int32)
    body = STORE.format(shift=20) + "\tsetp.eq.b32 %p1, %r92, 0;\n\t@%p1 st.global.b32 [%rd1], %r90;\n"
    body += f"\tsetp.eq.b32 %p2, %r92, {programs - 1};\n\t@%p2 ld.global.b32 %r3, [%rd1];\n"
    assert kinds(body, x, programs=programs) == {"global_race"}


def test_warps_of_a_program_exchange_through_global_memory_only_with_a_barrier():
    x = np.zeros(64, np.int32)
    body = at(0, 4) + "\tst.global.b32 [%rd80], %r90;\n\t{}\n\txor.b32 %r1, %r91, 128;\n"
    body += "\tcvt.u64.u32 %rd1, %r1;\n\tadd.s64 %rd1, %rd1, %rd90;\n\tld.global.b32 %r2, [%rd1];\n"
    assert not kinds(body.format("bar.sync 0;"), x, threads=64)
    assert kinds(body.format(""), x, threads=64) == {"global_race"}


def test_a_barrier_that_some_threads_do_not_reach():
    body = "\tsetp.lt.u32 %p1, %r90, 32;\n\t@%p1 bra $END;\n\tbar.sync 0;\n$END:\n"
    assert kinds(body, threads=64) == {"barrier_divergence"}
    assert not kinds(body.replace("%r90, 32", "%r90, 0"), threads=64)


def test_programs_of_a_batch_may_pass_barriers_different_numbers_of_times():
    body = """
	mov.b32 %r1, 0;
$LOOP:
	st.shared.b32 [%r91], %r1;
	bar.sync 0;
	xor.b32 %r2, %r91, 128;
	ld.shared.b32 %r3, [%r2];
	bar.sync 0;
	add.s32 %r1, %r1, 1;
	setp.le.u32 %p1, %r1, %r92;
	@%p1 bra $LOOP;
"""
    out = np.zeros(5 * 64, np.int32)
    store = """
	mad.lo.s32 %r4, %r92, 64, %r90;
	mul.wide.u32 %rd1, %r4, 4;
	add.s64 %rd1, %rd1, %rd90;
	st.global.b32 [%rd1], %r3;
"""
    assert not kinds(body + store, out, threads=64, programs=5, shared=256)
    assert out.reshape(5, 64).tolist() == [[p] * 64 for p in range(5)]
