"""mma, ldmatrix and stmatrix against numpy, with fragments laid out element by element as the PTX manual does."""

import numpy as np
import pytest
import torch

from tests.proofs.ptx_emulator.ptx_snippets import at, run

rng = np.random.default_rng(0)
HALVES = {"bf16": torch.bfloat16, "f16": torch.float16}


def halves(dtype, *shape):
    """Random numbers as fp32 values and as 16-bit patterns."""
    x = torch.from_numpy(rng.standard_normal(shape).astype(np.float32)).to(HALVES[dtype])
    return x.float().numpy(), x.view(torch.int16).numpy().view(np.uint16)


def fragments_of_a(bits, k):
    """[lanes, registers] of uint32: row = lane / 4 (+ 8 in odd registers), column = 2 · (lane % 4) + i (+ 8)."""
    out = np.zeros((32, k // 4, 2), np.uint16)
    for lane in range(32):
        for i in range(k // 2):
            register, element = divmod(i, 2)
            row = lane // 4 + 8 * (register % 2)
            column = lane % 4 * 2 + element + 8 * (register // 2)
            out[lane, register, element] = bits[row, column]
    return out.view(np.uint32)[..., 0]


def fragments_of_b(bits, k):
    out = np.zeros((32, k // 8, 2), np.uint16)
    for lane in range(32):
        for i in range(k // 4):
            register, element = divmod(i, 2)
            out[lane, register, element] = bits[lane % 4 * 2 + element + 8 * register, lane // 4]
    return out.view(np.uint32)[..., 0]


def product_of(fragments):
    """[16, 8] from four fp32 registers per lane."""
    out = np.zeros((16, 8), np.float32)
    for lane in range(32):
        for i in range(4):
            out[lane // 4 + 8 * (i // 2), lane % 4 * 2 + i % 2] = fragments[lane, i]
    return out


def registers(first, n):
    return "{" + ", ".join(f"%r{first + i}" for i in range(n)) + "}"


def multiply(dtype, k, a, b, c):
    n_a, n_b = a.shape[1], b.shape[1]
    body = ""
    for array, first, n in ((0, 1, n_a), (1, 11, n_b), (2, 21, 4)):
        body += at(array, 4 * n) + "".join(f"\tld.global.b32 %r{first + i}, [%rd80+{4 * i}];\n" for i in range(n))
    operands = [registers(31, 4), registers(1, n_a), registers(11, n_b), registers(21, 4)]
    body += f"\tmma.sync.aligned.m16n8k{k}.row.col.f32.{dtype}.{dtype}.f32 {', '.join(operands)};\n"
    body += at(3, 16) + f"\tst.global.v4.b32 [%rd80], {registers(31, 4)};\n"
    out = np.zeros((32, 4), np.float32)
    assert not run(body, np.ascontiguousarray(a), np.ascontiguousarray(b), c, out)
    return out


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("k", [8, 16])
def test_mma_of_halves(dtype, k):
    (a, a_bits), (b, b_bits) = halves(dtype, 16, k), halves(dtype, k, 8)
    c = rng.standard_normal((32, 4)).astype(np.float32)
    out = multiply(dtype, k, fragments_of_a(a_bits, k), fragments_of_b(b_bits, k), c)
    np.testing.assert_allclose(product_of(out), a @ b + product_of(c), rtol=1e-5, atol=1e-5)


def test_batches_of_different_sizes_add_to_the_same_constant():
    body = "".join(f"\tmov.b32 %r{i}, 0;\n" for i in range(1, 7)) + "\tmov.b32 %r7, 0f40000000;\n"
    zeros, two = "{%r1, %r2, %r3, %r4}, {%r5, %r6}", "{%r7, %r7, %r7, %r7}"
    body += f"\tmma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {registers(31, 4)}, {zeros}, {two};\n"
    body += "\tmad.lo.s32 %r8, %r92, 32, %r90;\n\tmul.wide.u32 %rd1, %r8, 4;\n\tadd.s64 %rd1, %rd1, %rd90;\n"
    out = np.zeros(300 * 32, np.float32)
    assert not run(body + "\tst.global.b32 [%rd1], %r31;\n", out, programs=300)
    assert (out == 2).all()


def test_mma_of_tf32_ignores_the_low_bits():
    a, b = rng.standard_normal((16, 8)).astype(np.float32), rng.standard_normal((8, 8)).astype(np.float32)
    cut = [(x.view(np.uint32) & 0xFFFFE000).view(np.float32) for x in (a, b)]
    lane = np.arange(32)
    g, t = lane // 4, lane % 4
    in_a = np.stack([a[g, t], a[g + 8, t], a[g, t + 4], a[g + 8, t + 4]], 1)
    in_b = np.stack([b[t, g], b[t + 4, g]], 1)
    out = multiply("tf32", 8, in_a.view(np.uint32), in_b.view(np.uint32), np.zeros((32, 4), np.float32))
    np.testing.assert_allclose(product_of(out), cut[0] @ cut[1], rtol=1e-5, atol=1e-6)


FILL = (
    at(0, 16)
    + """
	ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd80];
	shl.b32 %r5, %r90, 4;
	st.shared.v4.b32 [%r5], {%r1, %r2, %r3, %r4};
	bar.sync 0;
"""
)  # each lane stores one row of 16 bytes


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("trans", ["", ".trans"])
def test_ldmatrix(n, trans):
    """Lane l gets row l / 4, elements 2 · (l % 4) and the next, of each matrix; transposed: column l / 4."""
    data = rng.integers(0, 2**16, (4, 8, 8)).astype(np.uint16)
    out = np.zeros((32, n), np.uint32)
    body = FILL + f"\tldmatrix.sync.aligned.m8n8.x{n}{trans}.shared.b16 {registers(11, n)}, [%r5];\n" + at(1, 4 * n)
    body += "".join(f"\tst.global.b32 [%rd80+{4 * i}], %r{11 + i};\n" for i in range(n))
    assert not run(body, data, out, shared=512)
    for lane in range(32):
        for i in range(n):
            matrix = data[i].T if trans else data[i]
            want = matrix[lane // 4, lane % 4 * 2 : lane % 4 * 2 + 2]
            assert out[lane, i : i + 1].view(np.uint16).tolist() == want.tolist()


@pytest.mark.parametrize("trans", ["", ".trans"])
def test_stmatrix_is_the_inverse_of_ldmatrix(trans):
    data, out = rng.integers(0, 2**16, (4, 8, 8)).astype(np.uint16), np.zeros((4, 8, 8), np.uint16)
    body = FILL + f"\tldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {registers(11, 4)}, [%r5];\n"
    body += "\tadd.s32 %r6, %r5, 512;\n"
    body += f"\tstmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [%r6], {registers(11, 4)};\n\tbar.sync 0;\n"
    body += "\tld.shared.v4.b32 {%r1, %r2, %r3, %r4}, [%r6];\n"
    body += at(1, 16) + "\tst.global.v4.b32 [%rd80], {%r1, %r2, %r3, %r4};\n"
    assert not run(body, data, out, shared=1024)
    assert np.array_equal(out, data)
