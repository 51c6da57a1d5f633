"""Pairs of fp32, three-way maximum and mixed precision, as newer GPUs have them."""

import numpy as np
import torch

from tests.proofs.ptx_emulator.ptx_snippets import lanes

rng = np.random.default_rng(0)


def pairs():
    x = rng.standard_normal((32, 2)).astype(np.float32)
    return x, x.view(np.uint64)[:, 0].copy()


def test_pairs_are_computed_element_by_element():
    (a, a_bits), (b, b_bits), (c, c_bits) = pairs(), pairs(), pairs()
    uint64 = np.dtype(np.uint64)
    for name, want in (("add", a + b), ("sub", a - b), ("mul", a * b)):
        got = lanes(f"{name}.f32x2", [a_bits, b_bits], uint64)
        assert np.array_equal(got[:, None].view(np.float32), want)
    got = lanes("fma.rn.f32x2", [a_bits, b_bits, c_bits], uint64)[:, None].view(np.float32)
    assert np.array_equal(got, (a.astype(np.float64) * b + c).astype(np.float32))


def test_maximum_of_three():
    a, b, c = (rng.standard_normal(32).astype(np.float32) for _ in range(3))
    a[0], b[1] = np.nan, np.nan
    float32 = np.dtype(np.float32)
    assert np.array_equal(lanes("max.f32", [a, b, c], float32), np.fmax(np.fmax(a, b), c))
    assert np.array_equal(lanes("min.f32", [a, b], float32), np.fmin(a, b))
    with_nan = lanes("max.NaN.f32", [a, b, c], float32)
    assert np.isnan(with_nan[:2]).all()
    assert not np.isnan(with_nan[2:]).any()


def test_halves_added_to_fp32():
    a, b = (torch.randn(32, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(2))
    c = rng.standard_normal(32).astype(np.float32)
    bits = [x.view(torch.int16).numpy().view(np.uint16) for x in (a, b)]
    want = (a.double() * b.double()).numpy() + c
    assert np.array_equal(lanes("fma.rn.f32.bf16", [*bits, c], np.dtype(np.float32)), want.astype(np.float32))
