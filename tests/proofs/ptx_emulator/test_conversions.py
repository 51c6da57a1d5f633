"""Conversions against torch: rounding of bf16, fp16 and tf32, packed pairs, integers of other widths."""

import numpy as np
import pytest
import torch

from proofs.ptx_emulator.instructions.conversions import bf16_bits, f16_bits, tf32_bits
from tests.proofs.ptx_emulator.ptx_snippets import at, lanes, run

VALUES = np.concatenate(
    [
        np.random.default_rng(0).standard_normal(20).astype(np.float32) * 100,
        # ties of bf16 and fp16, overflow, infinities, subnormal numbers, zeros
        np.array([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11, 3.4e38, 7e4], np.float32),
        np.array([np.inf, -np.inf, 1e-41, 3e-8, -0.0, 0.0], np.float32),
    ]
)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_halves_round_to_the_nearest_even(name, dtype):
    want = torch.from_numpy(VALUES).to(dtype).view(torch.int16).numpy().view(np.uint16)
    got = lanes(f"cvt.rn.{name}.f32", [VALUES], np.dtype(np.uint16))
    assert np.array_equal(got, want)
    back = lanes(f"cvt.f32.{name}", [got], np.dtype(np.float32))
    assert np.array_equal(back, torch.from_numpy(VALUES).to(dtype).float().numpy())
    pair = lanes(f"cvt.rn.{name}x2.f32", [VALUES, VALUES[::-1].copy()], np.dtype(np.uint32))
    assert np.array_equal(pair & 0xFFFF, want[::-1])  # the second operand is the lower half
    assert np.array_equal(pair >> 16, want)


def test_nan_becomes_the_canonical_one():
    nan = np.array([np.nan], np.float32)
    assert bf16_bits(nan) == f16_bits(nan) == 0x7FFF


def test_tf32_keeps_ten_bits_and_rounds_ties_away():
    x = np.array([1 + 2**-11, -(1 + 2**-11), 1 + 2**-12, np.inf], np.float32)
    assert tf32_bits(x).view(np.float32).tolist() == [1 + 2**-10, -(1 + 2**-10), 1.0, np.inf]


def test_integers_of_other_widths():
    a = np.array([-1, 5, -(2**31), 2**31 - 1] * 8, np.int32)
    assert np.array_equal(lanes("cvt.s64.s32", [a], np.dtype(np.int64)), a.astype(np.int64))
    assert np.array_equal(lanes("cvt.u64.u32", [a], np.dtype(np.uint64)), a.view(np.uint32).astype(np.uint64))
    wide = np.array([2**33 + 5, -3] * 16, np.int64)
    assert np.array_equal(lanes("cvt.u32.u64", [wide], np.dtype(np.uint32)), (wide & 0xFFFFFFFF).astype(np.uint32))
    assert np.array_equal(lanes("cvt.rn.f32.s32", [a], np.dtype(np.float32)), a.astype(np.float32))


def test_a_wider_register_gives_its_low_bits():
    wide = np.array([2**33 - 5, 7] * 16, np.int64)
    assert lanes("cvt.s64.s32", [wide], np.dtype(np.int64)).tolist() == [-5, 7] * 16
    bytes_ = np.array([0x1FB, 0x107] * 16, np.uint32)
    assert lanes("cvt.s32.s8", [bytes_], np.dtype(np.int32)).tolist() == [-5, 7] * 16
    assert lanes("cvt.u32.u8", [bytes_], np.dtype(np.uint32)).tolist() == [251, 7] * 16


def test_signed_loads_fill_a_wider_register_with_the_sign():
    a, out = np.array([-5, 7] * 16, np.int32), np.zeros(32, np.int64)
    run(at(0, 4) + "\tld.global.s32 %rd1, [%rd80];\n" + at(1, 8) + "\tst.global.b64 [%rd80], %rd1;\n", a, out)
    assert out.tolist() == a.tolist()


def test_moves_unpack_and_pack():
    a = np.arange(32, dtype=np.uint32) * 65537 + 3
    out = np.zeros(32, np.uint32)
    run(
        at(0, 4)
        + "\tld.global.b32 %r1, [%rd80];\n\tmov.b32 {%rs1, %rs2}, %r1;\n\tmov.b32 %r2, {%rs2, %rs1};\n"
        + at(1, 4)
        + "\tst.global.b32 [%rd80], %r2;\n",
        a,
        out,
    )
    assert np.array_equal(out, a << 16 | a >> 16)
