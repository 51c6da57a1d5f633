"""What the kernels share: tiles of rows, columns of any width, dot products in the inputs' precision.

A row is one query head. The R heads of a group of S queries are S·R rows, query-major, so that any number of heads per
group fills a tile. A width that is no power of two comes in two parts (`nsa.kernels.triton.head_dims`).

Under the interpreter of Triton 3.8 two things are wrong in bf16. `tl.dot` is: WIDE operands are converted to fp32 right
before it, after having been rounded as the hardware would see them. Narrowing fp32 cuts where hardware rounds to the
nearest: `narrowed` rounds first. Neither leaves a trace in what is compiled for a GPU.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # settled, like the kernels themselves, on import


@triton.jit
def operand(x, WIDE: tl.constexpr):
    if WIDE:
        x = x.to(tl.float32)
    return x


@triton.jit
def load_rows(base, offset, ok, N: tl.constexpr, BEGIN: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr):
    """[rows, WIDTH] of columns BEGIN and after; rows that are not ok, and columns past N, are zero."""
    column = BEGIN + tl.arange(0, WIDTH)
    mask = ok[:, None]
    if BEGIN + WIDTH > N:
        mask = mask & (column[None, :] < N)
    return operand(tl.load(base + offset[:, None] + column[None, :], mask=mask, other=0.0), WIDE)


@triton.jit
def narrowed(x, dtype: tl.constexpr):
    """x in the dtype, rounded to the nearest, ties to even."""
    if INTERPRETED and x.dtype == tl.float32 and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        x = tl.where(x == x, nearest.to(tl.float32, bitcast=True), float("nan"))
    return x.to(dtype)


@triton.jit
def store_rows(base, offset, ok, x, N: tl.constexpr, BEGIN: tl.constexpr, WIDTH: tl.constexpr):
    column = BEGIN + tl.arange(0, WIDTH)
    mask = ok[:, None]
    if BEGIN + WIDTH > N:
        mask = mask & (column[None, :] < N)
    tl.store(base + offset[:, None] + column[None, :], narrowed(x, base.dtype.element_ty), mask=mask)


@triton.jit
def dot(a, b):
    """In full fp32 for fp32 operands; half-precision ones are exact in the tensor cores anyway."""
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def rounded(x, WIDE: tl.constexpr, dtype: tl.constexpr):
    """An intermediate as an operand: rounded to the inputs' dtype."""
    return operand(narrowed(x, dtype), WIDE)


@triton.jit
def soften(s, top, total):
    """One step of the online softmax in base 2: exponentials, new top, new total, and what to scale the past by."""
    new = tl.maximum(top, tl.max(s, 1))
    safe = tl.where(new == float("-inf"), 0.0, new)
    e = tl.exp2(s - safe[:, None])
    decay = tl.exp2(top - safe)
    return e, new, total * decay + tl.sum(e, 1), decay
