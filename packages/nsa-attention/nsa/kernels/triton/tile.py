"""Shared by kernels: tiles of rows, columns of any width, dot products in the inputs' precision.

A row is one query head. The R heads of a group of S queries are S·R rows, query-major, so that any number of heads per
group fills a tile. A width that is no power of two comes in two parts (`nsa.kernels.triton.tuning`).

Under the interpreter (Triton 3.7, 3.8) two things are wrong in bf16. `tl.dot` is: WIDE operands are converted to fp32
right before it, after having been rounded as the hardware would see them. Narrowing fp32 cuts where hardware rounds to
the nearest: `narrowed` rounds first. Neither leaves a trace in what is compiled for a GPU.
"""

from collections.abc import Sequence
from itertools import accumulate

import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # fixed on import, like the kernels
VARYING = (
    "S", "T", "n_keys", "n_window_keys", "n_queries", "n_rows", "n_gates", "n_groups_all", "n_tiles", "n_chunks",
    "n_runs", "run_length", "runs_per_span", "n_windows", "n_sides", "n_counted", "n_places", "n_pieces", "n_parts",
    "n_compressed", "n_span", "first_query", "first_place", "steps", "more", "position", "origin", "window_position",
    "window_origin", "position_b", "position_s", "origin_b", "origin_s", "window_position_b", "window_position_s",
    "window_origin_b", "window_origin_s", "n_window_rows", "n_window_parts", "table_b", "window_table_b",
    "tail_table_b", "token_table_b", "n_tail_keys", "n_token_keys", "gates_b",
)  # fmt: skip
"""Arguments of kernels that vary from batch to batch. The compiler assumes nothing of them (neither 1 nor a multiple of
16), or each new length would be compiled again. Addresses and strides of rows are not among them: loads are vectorized
because those are multiples of 16."""


@triton.jit
def operand(x, WIDE: tl.constexpr):
    if WIDE:
        x = x.to(tl.float32)
    return x


@triton.jit
def load_rows(base, offset, ok, N: tl.constexpr, BEGIN: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr):
    """[rows, WIDTH] of columns BEGIN and after; rows that are not ok, and columns past N, are zero. ok None: all rows
    exist."""
    column = BEGIN + tl.arange(0, WIDTH)
    at = base + offset[:, None] + column[None, :]
    if ok is None:
        x = tl.load(at, mask=column[None, :] < N, other=0.0) if BEGIN + WIDTH > N else tl.load(at)
    else:
        mask = ok[:, None]
        if BEGIN + WIDTH > N:
            mask = mask & (column[None, :] < N)
        x = tl.load(at, mask=mask, other=0.0)
    return operand(x, WIDE)


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
def load_both(base, offset, ok, N: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, WIDE: tl.constexpr):
    """Both parts of rows of N columns. N2 = 0: there is one part, and the second result is not to be used."""
    first = load_rows(base, offset, ok, N, 0, N1, WIDE)
    second = first
    if N2 > 0:
        second = load_rows(base, offset, ok, N, N1, N2, WIDE)
    return first, second


@triton.jit
def store_both(base, offset, ok, first, second, N: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr):
    store_rows(base, offset, ok, first, N, 0, N1)
    if N2 > 0:
        store_rows(base, offset, ok, second, N, N1, N2)


@triton.jit
def zeros_both(ROWS: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr):
    """Accumulators for both parts."""
    first = tl.zeros([ROWS, N1], tl.float32)
    second = first
    if N2 > 0:
        second = tl.zeros([ROWS, N2], tl.float32)
    return first, second


@triton.jit
def add_partial_rows(
    part, total, to, row, n_rows, ok, before, first, end,
    X: tl.constexpr, X1: tl.constexpr, X2: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rows `to` of `total` get the sum of rows i · n_rows + row of `part`, first ≤ i < end, in order, after what those
    `before` already hold."""
    sum1, sum2 = zeros_both(ROWS, X1, X2)
    sum1 += load_rows(total, to * X, before, X, 0, X1, False)
    if X2 > 0:
        sum2 += load_rows(total, to * X, before, X, X1, X2, False)
    for i in tl.range(first, end):
        at = (tl.cast(i, tl.int64) * n_rows + row) * X
        sum1 += load_rows(part, at, ok, X, 0, X1, False)
        if X2 > 0:
            sum2 += load_rows(part, at, ok, X, X1, X2, False)
    store_both(total, to * X, ok, sum1, sum2, X, X1, X2)


@triton.jit
def dot(a, b):
    """In full fp32 for fp32 operands; half-precision ones are exact in the tensor cores anyway."""
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def dot_rows(
    a1, a2, base, offset, ok, N: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """a · bᵀ over both parts of their rows, and b's parts, loaded one at a time: both at once would cost registers."""
    b1 = load_rows(base, offset, ok, N, 0, N1, WIDE)
    b2 = b1
    s = dot(a1, tl.trans(b1))
    if N2 > 0:
        b2 = load_rows(base, offset, ok, N, N1, N2, WIDE)
        s += dot(a2, tl.trans(b2))
    return s, b1, b2


@triton.jit
def group_at(b, g, stride_b, stride_g):
    """Offset of a group of a batch row. In 64 bits, as every product with a stride: of 16 groups with 2M keys each, 128
    wide, the last one begins at 2^32."""
    return b.to(tl.int64) * stride_b + g.to(tl.int64) * stride_g


@triton.jit
def heads_at(query, head, stride_s, stride_r):
    """Offsets of query heads within their group; queries are int64."""
    return query * stride_s + head.to(tl.int64) * stride_r


@triton.jit
def heads_of(S, G: tl.constexpr, R: tl.constexpr, BLOCK_M: tl.constexpr):
    """This program's batch, group, and query heads: query, head, and which of them exist."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    b, g = (tl.program_id(1) // G).to(tl.int64), tl.program_id(1) % G
    return b, g, (row // R).to(tl.int64), row % R, row < S * R


@triton.jit
def longest_first():
    """The tile of queries of this program, the last one first: it sees the most keys, and programs start in order."""
    return tl.num_programs(0) - 1 - tl.program_id(0)


@triton.jit
def heads_with_range(lo, hi, S, T, G: tl.constexpr, R: tl.constexpr, BLOCK_M: tl.constexpr):
    """Like `heads_of`, with the range of keys [lo, hi) that each query head sees; the last queries first.

    The batch is an int32 here, widened where it is multiplied: as an int64 it cost registers in every range kernel.
    """
    row = longest_first() * BLOCK_M + tl.arange(0, BLOCK_M)
    b, g = tl.program_id(1) // G, tl.program_id(1) % G
    query, head, ok = (row // R).to(tl.int64), row % R, row < S * R
    bounds = b.to(tl.int64) * S + query
    lo_M = tl.load(lo + bounds, mask=ok, other=T)
    hi_M = tl.load(hi + bounds, mask=ok, other=0)
    return b, g, query, head, ok, lo_M, hi_M


@triton.jit
def tiles_of_range(lo_M, hi_M, ok, BLOCK_N: tl.constexpr):
    """Where tiles of keys begin and end, and the tiles that every row sees completely: from `first`, `length` keys.

    Rows that do not exist see nothing, but need no mask; a row that exists and sees nothing leaves no tile without one.
    """
    begin = tl.min(lo_M) // BLOCK_N * BLOCK_N
    first = tl.cdiv(tl.max(tl.where(ok, lo_M, 0)), BLOCK_N) * BLOCK_N
    length = tl.min(tl.where(ok, hi_M, 2147483647)) // BLOCK_N * BLOCK_N - first
    return begin, tl.max(hi_M), first, tl.maximum(length, 0)


@triton.jit
def edge_tile(n, first, length):
    """The n-th key of a range without the `length` keys from `first`, on the key axis."""
    return tl.where(n < first, n, n + length)


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


@triton.jit
def weigh(acc1, acc2, decay, e, v, v_at, ok, V: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, WIDE: tl.constexpr):
    """The step's values, weighted by its exponentials, added to what is left of the past's."""
    p = rounded(e, WIDE, v.dtype.element_ty)
    acc1 = acc1 * decay[:, None] + dot(p, load_rows(v, v_at, ok, V, 0, V1, WIDE))
    if V2 > 0:
        acc2 = acc2 * decay[:, None] + dot(p, load_rows(v, v_at, ok, V, V1, V2, WIDE))
    return acc1, acc2


@triton.jit
def divisor(total):
    """Divisor of a whole row's weighted values; 1 if it saw nothing."""
    return tl.where(total == 0, 1.0, total)[:, None]


@triton.jit
def log_sum(top, total):
    """Log-sum-exp of a whole row in base 2; −inf if it saw nothing."""
    return tl.where(total == 0, float("-inf"), top + tl.log2(tl.where(total == 0, 1.0, total)))


def rows_contiguous(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Views of fused projections pass as they are; only rows with gaps are copied."""
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in tensors)


def row_strides(*tensors: Tensor) -> list[int]:
    """Strides of every axis but the last; 0 where an axis has one element, whose stride may be any number that the
    compiler would specialize on."""
    return [s if n > 1 else 0 for x in tensors for n, s in zip(x.shape[:-1], x.stride()[:-1], strict=True)]


def parts_of(memory: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """Pieces of these lengths, of memory of `length_of`; each is aligned like the first."""
    begins = accumulate(map(_aligned, lengths), initial=0)
    return [memory[begin : begin + n] for begin, n in zip(begins, lengths, strict=False)]


def length_of(lengths: Sequence[int]) -> int:
    return sum(map(_aligned, lengths))


def _aligned(n: int) -> int:
    return ceil_div(n, 32) * 32


def ceil_div(n: int, by: int) -> int:
    """`triton.cdiv`, also while torch traces sizes as symbols."""
    return -(-n // by)
