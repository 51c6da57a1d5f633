"""Shuffles, reductions and votes against a loop over lanes, as the PTX manual describes them."""

import numpy as np
import pytest

from tests.proofs.ptx_emulator.ptx_snippets import at, lanes, run


def manual_shuffle(mode, values, by, bounds):
    """The manual's pseudocode, one lane at a time."""
    segment, clamp, shuffled = bounds >> 8 & 31, bounds & 31, []
    for lane in range(32):
        b = by[lane] & 31
        last, first = (lane & segment) | (clamp & ~segment), lane & segment
        j = {"up": lane - b, "down": lane + b, "bfly": lane ^ b, "idx": first | (b & ~segment)}[mode]
        inside = j >= last if mode == "up" else j <= last
        shuffled.append(values[j] if inside else values[lane])
    return shuffled


@pytest.mark.parametrize(
    ("mode", "by", "bounds"),
    [("bfly", 1, 31), ("bfly", 16, 31), ("up", 1, 0), ("up", 4, 0), ("down", 3, 31), ("idx", 5, 31),
     ("bfly", 2, 0x181F), ("idx", 3, 0x1C1F), ("down", 2, 0x1807), ("up", 3, 0x1800)],
)  # fmt: skip
def test_shuffles_by_a_constant(mode, by, bounds):
    x = np.arange(100, 132, dtype=np.uint32)
    got = lanes(f"shfl.sync.{mode}.b32", [x], np.dtype(np.uint32), more=f", {by}, {bounds}, -1")
    assert got.tolist() == manual_shuffle(mode, x.tolist(), [by] * 32, bounds)


def test_shuffle_by_a_register():
    x = np.arange(100, 132, dtype=np.uint32)
    by = np.random.default_rng(0).integers(0, 64, 32).astype(np.uint32)
    got = lanes("shfl.sync.idx.b32", [x, by], np.dtype(np.uint32), more=", 31, -1")
    assert got.tolist() == manual_shuffle("idx", x.tolist(), by.tolist(), 31)


@pytest.mark.parametrize(("name", "function"), [("add", np.sum), ("min", np.min), ("max", np.max)])
def test_reductions_of_each_warp(name, function):
    x = np.random.default_rng(0).integers(-50, 50, 64).astype(np.int32)
    out = np.zeros(64, np.int32)
    body = at(0, 4) + "\tld.global.b32 %r1, [%rd80];\n\tmov.b32 %r2, -1;\n"
    body += f"\tredux.sync.{name}.s32 %r3, %r1, %r2;\n" + at(1, 4) + "\tst.global.b32 [%rd80], %r3;\n"
    assert not run(body, x, out, threads=64)
    assert out.tolist() == [function(x[:32])] * 32 + [function(x[32:])] * 32


@pytest.mark.parametrize(("name", "function"), [("min", np.min), ("max", np.max)])
def test_reductions_of_floats_leave_nan_out(name, function):
    x = np.random.default_rng(0).normal(size=64).astype(np.float32)
    x[5], out = np.nan, np.zeros(64, np.float32)
    body = at(0, 4) + "\tld.global.b32 %r1, [%rd80];\n\tmov.b32 %r2, -1;\n"
    body += f"\tredux.sync.{name}.f32 %r3, %r1, %r2;\n" + at(1, 4) + "\tst.global.b32 [%rd80], %r3;\n"
    assert not run(body, x, out, threads=64)
    assert out.tolist() == [function(np.delete(x[:32], 5))] * 32 + [function(x[32:])] * 32


def test_ballot():
    p = np.arange(32) % 3 == 0
    got = lanes("vote.sync.ballot.b32", [p], np.dtype(np.uint32), more=", -1")
    assert (got == sum(1 << i for i in range(0, 32, 3))).all()


def test_a_shuffle_of_half_a_warp_is_reported():
    body = "\tsetp.lt.u32 %p1, %r90, 16;\n\t@%p1 bra $PART;\n\tbra.uni $END;\n"
    body += "$PART:\n\tshfl.sync.bfly.b32 %r1, %r90, 1, 31, -1;\n$END:\n"
    (finding,) = run(body)
    assert finding.kind == "warp_divergence"
    assert "shfl" in finding.instruction
