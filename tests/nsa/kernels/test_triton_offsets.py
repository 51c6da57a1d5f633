"""Offsets of rows of two million tokens: no 32-bit product of any kernel overflows.

Kernels are recorded on fake CUDA tensors with those rows' own sizes, strides and grids, and their intermediate
representation is searched for products that could take more than 31 bits.
"""

import pytest

pytest.importorskip("triton", reason="it is in the dev extra")
import torch
import triton
import triton.language as tl

from tests.nsa.kernels.launch_recorder import RecordedLaunch
from tests.nsa.kernels.test_triton_launches import GEOMETRY, AttentionLayer, FakeGpu, decoded, fake_tensors, stepped
from tests.nsa.kernels.ttir_bounds import IntegerBounds

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="kernels are interpreted, not compiled")

LENGTH, HEADS, GROUPS, WIDTH = 2**21, 64, 16, 128
ENTRIES = LENGTH * GROUPS * 4  # of a span's block index, and more
BOUNDS = ("lo", "hi", "reach", "ahead", "window_lo", "window_hi", "window_reach", "window_ahead")
KEYS = dict.fromkeys((*BOUNDS, "last", "begins", "position", "origin"), LENGTH)
QUERIES = dict.fromkeys(("seen_first", "seen_end", "window_seen_first", "window_seen_end"), LENGTH)
LOADED = {
    **KEYS, **QUERIES, "length": LENGTH,
    "window_position": LENGTH, "window_origin": LENGTH, "idx": LENGTH // GEOMETRY.l_sel,
    "pairs": LENGTH * GEOMETRY.n_sel, "offsets": ENTRIES, "piece_first": ENTRIES // 1024 + 2**19, "piece_window": 2**19,
    "entries": 2**31 - 1, "ranks": 2**31 - 1, "counts": 2**31 - 1, "before": ENTRIES, "totals": ENTRIES,
    "best": 2**31 - 1,
}  # fmt: skip

N_WINDOWS = LENGTH // GEOMETRY.l_sel
FACTS = {
    "selected_forward_kernel": {"first": ENTRIES},  # entries of the index, not pieces × PIECE
    "selected_backward_kernel": {"first": ENTRIES},
    "sort_chunks_kernel": {"window": N_WINDOWS + 1},  # the upper bits of a sorted integer
    "seen_by_kernel": {"early": LENGTH // 1024, "late": LENGTH // 1024},  # chunks
    "decode_raw_kernel": {"page": N_WINDOWS, "size": LENGTH},
}


@pytest.fixture(scope="module")
def launches() -> dict[str, RecordedLaunch]:
    """One launch of each kernel, with groups and heads outermost in memory, where strides are largest."""
    with fake_tensors():
        sizes, gpu = dict(heads=HEADS, groups=GROUPS, width=WIDTH), FakeGpu()
        layer = AttentionLayer.fake(LENGTH, packed=False, heads_first=True, **sizes)
        with gpu.run():
            layer.backward(layer.forward())
    by_kernel = {x.kernel: x for x in gpu.launches}
    decoding = decoded(1, LENGTH, **sizes).launches, stepped(1, LENGTH, **sizes).launches
    return by_kernel | {x.kernel: x for launches in decoding for x in launches}


def test_no_32_bit_product_overflows(launches):
    assert launches.keys() > FACTS.keys()
    overflowing = [
        (kernel, product)
        for kernel, launch in launches.items()
        for product in IntegerBounds(launch, LOADED, ENTRIES, FACTS.get(kernel)).overflowing_products()
    ]
    assert overflowing == []


@triton.jit
def _planted_kernel(k, lo, k_g, T, WIDE: tl.constexpr, WIDTH: tl.constexpr):
    g, at = tl.program_id(1), tl.program_id(0) * 64 + tl.arange(0, 64)
    key = tl.load(lo + at, mask=at < T)
    if WIDE:
        g, key = g.to(tl.int64), key.to(tl.int64)
    begin = g * k_g + key * WIDTH
    tl.store(k + begin, 0.0, mask=at < T)


def test_planted_32_bit_products_are_found():
    """Plants the product of a group and its stride, and of a loaded position and the width."""
    with fake_tensors():
        k, gpu = torch.empty(2**32, dtype=torch.bfloat16, device="cuda"), FakeGpu()
        lo = torch.empty(LENGTH, dtype=torch.int32, device="cuda")
        with gpu.run():
            for wide in (True, False):
                _planted_kernel[(LENGTH // 64, GROUPS)](k, lo, LENGTH * WIDTH, LENGTH, WIDE=wide, WIDTH=2048)
    right, wrong = (IntegerBounds(x, {"lo": LENGTH}, 0).overflowing_products() for x in gpu.launches)
    assert right == []
    assert len(wrong) == 2
