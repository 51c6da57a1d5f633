"""Rows of integers in registers: sorted, and what follows from neighbours being equal."""

import triton
import triton.language as tl

NONE = tl.constexpr(2147483647)
"""Sorts last."""


@triton.jit
def half(BIT: tl.constexpr, LOG: tl.constexpr):
    """1 in the upper halves of runs of 2^(BIT + 1) elements, for rows as `sort_rows` holds them."""
    return tl.reshape(tl.arange(0, 2), [1] * (LOG - BIT) + [2] + [1] * BIT)


@triton.jit
def sort_rows(x, LOG: tl.constexpr):
    """Each row of 2^LOG ascending: the bitonic network of `tl.sort`, which the interpreter takes minutes for."""
    cube = tl.reshape(x, [x.shape[0]] + [2] * LOG)
    for stage in tl.static_range(1, LOG + 1):
        for i in tl.static_range(0, stage):
            other = tl.sum(cube, LOG + 1 - stage + i, keep_dims=True) - cube  # of two: the compiler sees the other one
            wants_larger = half(stage - 1 - i, LOG)
            if stage < LOG:
                wants_larger = wants_larger ^ half(stage, LOG)
            cube = tl.where((cube > other) != (wants_larger == 1), other, cube)
    return tl.reshape(cube, x.shape)


@triton.jit
def following(x, LOG: tl.constexpr):
    """Each element's next one in its row; the last one's is itself."""
    at = tl.arange(0, 2**LOG)[None, :] + tl.zeros_like(x)
    return tl.gather(x, tl.minimum(at + 1, 2**LOG - 1), 1)
