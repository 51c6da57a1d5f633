"""Append of one new token per row to the KV cache, inside a decode step: norm, rotation, slots, compressed entry.

Device functions of `nsa.kernels.triton.decode`. A token is what the projections gave; what is stored has been rounded
where PyTorch's operations would round it: after the norm, after the rotation, after φ.
"""

import triton
import triton.language as tl

from nsa.kernels.triton.tile import load_both, load_rows, narrowed, store_rows

MEAN, PLACED, SOFTMAX = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""How the tokens of a block are weighed in its entry: alike, by a weight per place, by the softmax of a score."""
POOLED_AT_ONCE = tl.constexpr(4)  # tokens; more would spill


@triton.jit
def as_stored(x, dtype: tl.constexpr):
    """fp32 numbers as a tensor of that dtype would hold them."""
    return narrowed(x, dtype).to(tl.float32)


@triton.jit
def row_norm(base, at, ok, eps, N: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, NORMED: tl.constexpr):
    """What RMSNorm multiplies rows by, before its weight."""
    factor = at.to(tl.float32)
    if NORMED:
        first, second = load_both(base, at, ok, N, N1, N2, True)
        total = tl.sum(first.to(tl.float32) * first.to(tl.float32), 1)
        if N2 > 0:
            total += tl.sum(second.to(tl.float32) * second.to(tl.float32), 1)
        factor = 1 / tl.sqrt(total / N + eps)
    return factor


@triton.jit
def normed_columns(base, at, ok, column, factor, weight, N: tl.constexpr, NORMED: tl.constexpr):
    x = tl.load(base + at[:, None] + column[None, :], mask=ok[:, None] & (column[None, :] < N), other=0.0)
    x = x.to(tl.float32)
    if NORMED:
        w = tl.load(weight + column, mask=column < N, other=0.0).to(tl.float32)
        x = as_stored(x * factor[:, None] * w[None, :], base.dtype.element_ty)
    return x


@triton.jit
def partner(column, HALF: tl.constexpr):
    """The other channel of each one's pair; that of a channel that is not rotated is itself."""
    return tl.where(column < HALF, column + HALF, tl.where(column < 2 * HALF, column - HALF, column))


@triton.jit
def turned(x, y, column, cos, sin, HALF: tl.constexpr):
    """Rows of channels x, rotated with their partners y."""
    angle, rotates = tl.where(column < HALF, column, column - HALF), column < 2 * HALF
    c = tl.load(cos + angle, mask=rotates, other=1.0).to(tl.float32)
    s = tl.load(sin + angle, mask=rotates, other=0.0).to(tl.float32)
    return x * c[None, :] + y * tl.where(column < HALF, -s, s)[None, :]


@triton.jit
def rotated_columns(
    base, at, ok, cos, sin, factor, weight, N: tl.constexpr, BEGIN: tl.constexpr, WIDTH: tl.constexpr,
    HALF: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """[rows, WIDTH] of columns BEGIN and after, normed and rotated, in fp32. HALF: pairs that are rotated."""
    column = BEGIN + tl.arange(0, WIDTH)
    x = normed_columns(base, at, ok, column, factor, weight, N, NORMED)
    if HALF > 0:
        y = normed_columns(base, at, ok, partner(column, HALF), factor, weight, N, NORMED)
        x = turned(x, y, column, cos, sin, HALF)
    return x


@triton.jit
def place_of(table, slot, PAGE: tl.constexpr):
    """The page of a row's slot, and where in it that lies."""
    number = slot // PAGE
    return tl.load(table + number).to(tl.int64), (slot - number * PAGE).to(tl.int64)


@triton.jit
def write_token(
    new_k, k_from, new_v, v_from, cos, sin, factor, weight, k, v, table, slot, k_p, k_t, v_p, v_t,
    K: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, V: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
    PAGE: tl.constexpr, HALF: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """Store a projected key, normed and rotated, and its value in a slot of a stream."""
    page, state = place_of(table, slot, PAGE)
    row = tl.zeros([1], tl.int64)
    ok, k_from, v_from = row == 0, row + k_from, row + v_from
    k_to, v_to = row + page * k_p + state * k_t, row + page * v_p + state * v_t
    x = rotated_columns(new_k, k_from, ok, cos, sin, factor, weight, K, 0, K1, HALF, NORMED)
    store_rows(k, k_to, ok, x, K, 0, K1)
    store_rows(v, v_to, ok, load_rows(new_v, v_from, ok, V, 0, V1, False).to(tl.float32), V, 0, V1)
    if K2 > 0:
        x = rotated_columns(new_k, k_from, ok, cos, sin, factor, weight, K, K1, K2, HALF, NORMED)
        store_rows(k, k_to, ok, x, K, K1, K2)
    if V2 > 0:
        store_rows(v, v_to, ok, load_rows(new_v, v_from, ok, V, V1, V2, False).to(tl.float32), V, V1, V2)


@triton.jit
def tokens_of_block(table, first, n, n_slots, x_p, x_t, L: tl.constexpr, PAGE: tl.constexpr):
    """Where the next tokens of a block lie whose first token is `first`: n of them are behind."""
    place = n + tl.arange(0, POOLED_AT_ONCE)
    ok = place < L
    slot = tl.where(ok, first + place, 0) % n_slots
    number = slot // PAGE
    page = tl.load(table + number, mask=ok, other=0).to(tl.int64)
    return place, ok, page * x_p + (slot - number * PAGE).to(tl.int64) * x_t


@triton.jit
def score_columns(x, at, ok, w_score, w_square, N: tl.constexpr, BEGIN: tl.constexpr, WIDTH: tl.constexpr):
    column = BEGIN + tl.arange(0, WIDTH)
    row = load_rows(x, at, ok, N, BEGIN, WIDTH, False).to(tl.float32)
    linear = tl.load(w_score + column, mask=column < N, other=0.0).to(tl.float32)
    square = tl.load(w_square + column, mask=column < N, other=0.0).to(tl.float32)
    return tl.sum(row * (linear[None, :] + row * (square / N)[None, :]), 1)


@triton.jit
def token_scores(x, at, ok, w_score, w_square, N: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr):
    """Learned scores of tokens, as in `nsa.core.pooling`; −inf where there is none."""
    score = score_columns(x, at, ok, w_score, w_square, N, 0, N1)
    if N2 > 0:
        score += score_columns(x, at, ok, w_score, w_square, N, N1, N2)
    return tl.where(ok, score, float("-inf"))


@triton.jit
def softmax_range(
    x, table, first, n_slots, x_p, x_t, w_score, w_square, N: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr,
    L: tl.constexpr, PAGE: tl.constexpr, POOLING: tl.constexpr,
):  # fmt: skip
    """The highest score of a block's tokens and the sum of their exponentials; not used but for SOFTMAX."""
    top, total = float("-inf"), 0.0
    if POOLING == SOFTMAX:
        for n in tl.range(0, L, POOLED_AT_ONCE):
            _, ok, at = tokens_of_block(table, first, n, n_slots, x_p, x_t, L, PAGE)
            score = token_scores(x, at, ok, w_score, w_square, N, N1, N2)
            new = tl.maximum(top, tl.max(score, 0))
            total = total * tl.exp(top - new) + tl.sum(tl.exp(score - new), 0)
            top = new
    return top, total


@triton.jit
def pooled_columns(
    x, table, first, n_slots, x_p, x_t, weight, w_square, top, total, column,
    N: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, L: tl.constexpr, PAGE: tl.constexpr, POOLING: tl.constexpr,
):  # fmt: skip
    """Columns of the sum of a block's tokens, weighed by φ, in fp32: one row."""
    pooled = column.to(tl.float32)[None, :] * 0
    for n in tl.range(0, L, POOLED_AT_ONCE):
        place, ok, at = tokens_of_block(table, first, n, n_slots, x_p, x_t, L, PAGE)
        row = tl.load(x + at[:, None] + column[None, :], mask=ok[:, None] & (column[None, :] < N), other=0.0)
        row = row.to(tl.float32)
        if POOLING == MEAN:
            pooled += tl.sum(row, 0)[None, :]
        else:
            if POOLING == PLACED:
                share = tl.load(weight + place, mask=ok, other=0.0).to(tl.float32)
            else:
                share = tl.exp(token_scores(x, at, ok, weight, w_square, N, N1, N2) - top) / total
            pooled += tl.sum(as_stored(share, x.dtype.element_ty)[:, None] * row, 0)[None, :]
    if POOLING == MEAN:
        pooled = pooled / L
    return as_stored(pooled, x.dtype.element_ty)


@triton.jit
def emit_columns(
    x, table, first, n_slots, x_p, x_t, weight, w_square, cos, sin, entry, to,
    N: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, BEGIN: tl.constexpr, WIDTH: tl.constexpr, L: tl.constexpr,
    PAGE: tl.constexpr, POOLING: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Columns BEGIN and after of `emit_entry`."""
    column = BEGIN + tl.arange(0, WIDTH)
    row = tl.zeros([1], tl.int64)
    top, total = softmax_range(x, table, first, n_slots, x_p, x_t, weight, w_square, N, N1, N2, L, PAGE, POOLING)
    pooled = pooled_columns(
        x, table, first, n_slots, x_p, x_t, weight, w_square, top, total, column, N, N1, N2, L, PAGE, POOLING
    )
    if HALF > 0:
        other = pooled_columns(
            x, table, first, n_slots, x_p, x_t, weight, w_square, top, total, partner(column, HALF),
            N, N1, N2, L, PAGE, POOLING,
        )  # fmt: skip
        pooled = turned(pooled, other, column, cos, sin, HALF)
    store_rows(entry, row + to, row == 0, pooled, N, BEGIN, WIDTH)


@triton.jit
def emit_entry(
    x, table, first, n_slots, x_p, x_t, weight, w_square, cos, sin, entry, to,
    N: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, L: tl.constexpr, PAGE: tl.constexpr, POOLING: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    """Pool the block of a stream that begins with token `first` into its entry. HALF: pairs that are rotated after
    that; 0: none."""
    emit_columns(
        x, table, first, n_slots, x_p, x_t, weight, w_square, cos, sin, entry, to,
        N, N1, N2, 0, N1, L, PAGE, POOLING, HALF,
    )  # fmt: skip
    if N2 > 0:
        emit_columns(
            x, table, first, n_slots, x_p, x_t, weight, w_square, cos, sin, entry, to,
            N, N1, N2, N1, N2, L, PAGE, POOLING, HALF,
        )  # fmt: skip
