"""Decode step, one new token per row over the KV cache, in four kernels: two read keys, one ranks blocks, one merges.

Each row's keys are cut into parts, one program each, so that a single row fills a GPU. How many parts there are follows
from the model alone and how long each is from the row's own length, read here: a row has the same bits alone, in any
batch and in a cache of any size. Parts are merged by their log-sum-exp (base 2 throughout) in order, without atomics.

    compressed   parts of the compressed branch; leaves every score, which is less to read again than the keys
    score        the best blocks of each stretch of blocks, ranked as in `select`
    raw          the choice among those, then a page of l_sel keys per program; beside them the window's parts
    merge        a branch's parts, one head per program

A merged layer has one branch of blocks and window, whose compressed keys have no values.

The host reads shapes only, so the step may be captured in a CUDA graph and replayed as the cache fills up. Shapes as
in `nsa.kernels.reference`; a row's keys must hold its position 0 (start ≥ 0), as a cache's do.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.errors import ConfigError
from nsa.geometry import Geometry
from nsa.kernels.interface import CachedKeys, CacheView, KeyPages, device_of
from nsa.kernels.triton.mix import mix_forward
from nsa.kernels.triton.selection import ascending, own_block, ranked, shared_strides
from nsa.kernels.triton.tile import (
    LOG2E,
    VARYING,
    divisor,
    dot_rows,
    group_at,
    load_both,
    load_rows,
    log_sum,
    row_strides,
    rows_contiguous,
    soften,
    store_both,
    store_rows,
    weigh,
    zeros_both,
)
from nsa.kernels.triton.tuning import TileSizes, choose, is_wide, split_width, widths


@triton.jit
def complete_blocks(position, origin, n_keys, L: tl.constexpr, D: tl.constexpr):
    """Where the compressed blocks that this row may see begin and end on the key axis."""
    complete = tl.where(position + 1 >= L, (position + 1 - L) // D + 1, 0)
    return tl.maximum(origin, 0), tl.minimum(tl.maximum(origin + complete, 0), n_keys)


@triton.jit
def share(lo, hi, part, PARTS: tl.constexpr, BLOCK_N: tl.constexpr):
    """The keys of one of PARTS parts: whole tiles, the same number for all, so that only the last ones may be empty."""
    size = tl.cdiv(tl.cdiv(tl.maximum(hi - lo, 0), PARTS), BLOCK_N) * BLOCK_N
    begin = lo + part * size
    return begin, tl.minimum(begin + size, hi)


@triton.jit
def state_at(table, at, inside, first_size, PAGE: tl.constexpr, OTHER_PAGE: tl.constexpr):
    """The page of these entries of a row, and where in it they lie: pages have PAGE entries if `first_size`, else
    OTHER_PAGE, constants because of the division. Nothing is read where there is no entry."""
    number = tl.where(first_size, at // PAGE, at // OTHER_PAGE)
    page = tl.load(table + number, mask=inside, other=0)
    return page.to(tl.int64), (at - number * tl.where(first_size, PAGE, OTHER_PAGE)).to(tl.int64)


@triton.jit
def attend_range(
    q, q_at, ok, k, v, table, k_p, k_t, v_p, v_t, first_size, begin, end,
    part, part_lse, part_at, scores, scores_at, scale,
    K: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, V: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
    PAGE: tl.constexpr, OTHER_PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    KEEP_SCORES: tl.constexpr, VALUES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Rows of heads over the keys begin ≤ t < end, all visible: writes one part, and the scores if asked; without
    values, only the part's log-sum-exp."""
    q1, q2 = load_both(q, q_at, ok, K, K1, K2, WIDE)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc1, acc2 = zeros_both(BLOCK_M, V1, V2)
    for n in tl.range(begin, end, BLOCK_N):
        at = n + tl.arange(0, BLOCK_N)
        inside = at < end
        page, state = state_at(table, at, inside, first_size, PAGE, OTHER_PAGE)
        k_at, v_at = page * k_p + state * k_t, page * v_p + state * v_t
        s, _, _ = dot_rows(q1, q2, k, k_at, inside, K, K1, K2, WIDE)
        s = tl.where(inside[None, :], s * (scale * LOG2E), float("-inf"))
        if KEEP_SCORES:
            tl.store(scores + scores_at[:, None] + at[None, :], s, mask=ok[:, None] & inside[None, :])
        e, top, total, decay = soften(s, top, total)
        if VALUES:
            acc1, acc2 = weigh(acc1, acc2, decay, e, v, v_at, inside, V, V1, V2, WIDE)
    if VALUES:
        store_both(part, part_at * V, ok, acc1 / divisor(total), acc2 / divisor(total), V, V1, V2)
    tl.store(part_lse + part_at, log_sum(top, total), mask=ok)


@triton.jit(do_not_specialize=VARYING)
def decode_compressed_kernel(
    q, k, v, table, position, origin, scores, part, part_lse, scale, n_keys, n_parts, table_b,
    q_b, q_g, q_r, k_p, k_g, k_t, v_p, v_g, v_t, G: tl.constexpr, R: tl.constexpr, PAGE: tl.constexpr,
    K: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, V: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
    L: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    VALUES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    bg = tl.program_id(1).to(tl.int64)
    b, g = bg // G, bg % G
    head = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    pos, first = tl.load(position + b).to(tl.int32), tl.load(origin + b).to(tl.int32)
    lo, hi = complete_blocks(pos, first, n_keys, L, D)
    begin, end = share(lo, hi, tl.program_id(0), PARTS, BLOCK_N)
    attend_range(
        q, group_at(b, g, q_b, q_g) + head.to(tl.int64) * q_r, head < R,
        k + g * k_g, v + g * v_g, table + b * table_b, k_p, k_t, v_p, v_t, True,
        begin, end, part, part_lse, (bg * n_parts + tl.program_id(0)) * R + head,
        scores, (bg * R + head) * n_keys, scale, K, K1, K2, V, V1, V2, PAGE, PAGE, BLOCK_M, BLOCK_N, True,
        VALUES, WIDE,
    )  # fmt: skip


@triton.jit(do_not_specialize=VARYING)
def decode_score_kernel(
    scores, part_lse, position, origin, best, n_keys, n_compressed, n_parts,
    G: tl.constexpr, R: tl.constexpr, L: tl.constexpr, D: tl.constexpr, L_SEL: tl.constexpr, KEEP: tl.constexpr,
    PARTS: tl.constexpr, STRETCHES: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """The KEEP best blocks of one of STRETCHES stretches, ranked; PARTS ≥ n_compressed, how many parts there are."""
    stretch, bg = tl.program_id(0), tl.program_id(1).to(tl.int64)
    pos, first = tl.load(position + bg // G).to(tl.int32), tl.load(origin + bg // G).to(tl.int32)
    lo, hi = complete_blocks(pos, first, n_keys, L, D)
    own = own_block(pos, L_SEL)
    piece = tl.arange(0, PARTS)
    ranking = tl.full([KEEP], -1, tl.int64)
    begin, end = share(0, own + 1, stretch, STRETCHES, BLOCK_J)
    for j0 in tl.range(begin, end, BLOCK_J):
        j = j0 + tl.arange(0, BLOCK_J)
        mass = tl.zeros([BLOCK_J], tl.float32)
        for r in tl.range(0, R, BLOCK_R):
            head = r + tl.arange(0, BLOCK_R)
            lse_at = (bg * n_parts + piece[None, :]) * R + head[:, None]
            there = (head < R)[:, None] & (piece < n_compressed)[None, :]
            lse = tl.load(part_lse + lse_at, mask=there, other=float("-inf"))
            top = tl.max(lse, 1)
            top = tl.where(top == float("-inf"), 0.0, top)
            total = tl.sum(tl.exp2(lse - top[:, None]), 1)
            level = top + tl.log2(tl.where(total == 0, 1.0, total))
            for m in tl.static_range(0, L_SEL // D + L // D - 1):
                c = j * (L_SEL // D) + m - (L // D - 1)
                at = first + c
                seen = (c >= 0) & (at >= lo) & (at < hi)
                s_at = (bg * R + head)[:, None] * n_keys + at[None, :]
                s = tl.load(scores + s_at, mask=(head < R)[:, None] & seen[None, :], other=float("-inf"))
                mass += tl.sum(tl.exp2(s - level[:, None]), 0) * shared_strides(m, L // D, L_SEL // D)
        key = tl.topk(ranked(mass, j, own), KEEP)
        ranking = tl.topk(tl.reshape(tl.join(ranking, key), [2 * KEEP]), KEEP)
    tl.store(best + (bg * STRETCHES + stretch) * KEEP + tl.arange(0, KEEP), ranking)


@triton.jit(do_not_specialize=VARYING)
def decode_raw_kernel(
    q, k, v, table, position, origin, window_k, window_v, window_table, window_position, window_origin,
    best, idx, part, part_lse, scale, n_keys, n_window_keys, n_compressed, n_parts, table_b, window_table_b,
    q_b, q_g, q_r, k_p, k_g, k_t, v_p, v_g, v_t, wk_p, wk_g, wk_t, wv_p, wv_g, wv_t,
    G: tl.constexpr, R: tl.constexpr, PAGE: tl.constexpr, WINDOW_PAGE: tl.constexpr,
    K: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, V: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
    L_SEL: tl.constexpr, N_SEL: tl.constexpr, KEEP: tl.constexpr, STRETCHES: tl.constexpr, W: tl.constexpr,
    WINDOW_PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Programs below N_SEL take one chosen block each, the others the window's parts, all through the same loop."""
    program, bg = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, g = bg // G, bg % G
    head = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_page = program < N_SEL
    pos = tl.load(tl.where(is_page, position, window_position) + b).to(tl.int32)
    start = tl.load(tl.where(is_page, origin, window_origin) + b).to(tl.int32)

    # No loop here: the compiler pipelines no loop over keys whose bounds come out of another loop.
    key = tl.load(best + bg * STRETCHES * KEEP + tl.arange(0, STRETCHES * KEEP))
    ranking = tl.topk(key, KEEP)
    rank = tl.arange(0, KEEP)
    block = ascending(ranking, rank < N_SEL)
    tl.store(idx + bg * N_SEL + rank, block, mask=(rank < N_SEL) & (program + tl.program_id(2) == 0))
    page = tl.sum(tl.where(rank == program, block, 0))

    seen = start + pos + 1
    page_begin = start + page * L_SEL
    page_end = tl.where(page >= 0, tl.minimum(tl.minimum(page_begin + L_SEL, seen), n_keys), page_begin)
    lo, hi = tl.maximum(start + tl.maximum(pos - W + 1, 0), 0), tl.minimum(seen, n_window_keys)
    begin, end = share(lo, hi, program - N_SEL, WINDOW_PARTS, BLOCK_N)
    attend_range(
        q, group_at(b, g, q_b, q_g) + head.to(tl.int64) * q_r, head < R,
        tl.where(is_page, k + g * k_g, window_k + g * wk_g), tl.where(is_page, v + g * v_g, window_v + g * wv_g),
        tl.where(is_page, table + b * table_b, window_table + b * window_table_b),
        tl.where(is_page, k_p, wk_p), tl.where(is_page, k_t, wk_t),
        tl.where(is_page, v_p, wv_p), tl.where(is_page, v_t, wv_t), is_page,
        tl.where(is_page, tl.maximum(page_begin, 0), begin), tl.where(is_page, page_end, end),
        part, part_lse, (bg * n_parts + n_compressed + program) * R + head, part, head,
        scale, K, K1, K2, V, V1, V2, PAGE, WINDOW_PAGE, BLOCK_M, BLOCK_N, False, True, WIDE,
    )  # fmt: skip


@triton.jit(do_not_specialize=VARYING)
def decode_merge_kernel(
    part, part_lse, out, n_compressed, n_parts, n_rows,
    R: tl.constexpr, V: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, N_SEL: tl.constexpr,
    PARTS: tl.constexpr, AT_ONCE: tl.constexpr, ONE_BRANCH: tl.constexpr,
):  # fmt: skip
    """PARTS is a power of two not below any branch's number of parts. A part that saw nothing is never read.
    ONE_BRANCH: all parts but the compressed ones are one branch, the only one."""
    branch, head, bg = tl.program_id(0) // R, tl.program_id(0) % R, tl.program_id(1).to(tl.int64)
    first = tl.where(branch == 0, 0, tl.where(branch == 1, n_compressed, n_compressed + N_SEL))
    end = tl.where(branch == 0, n_compressed, tl.where(branch == 1, n_compressed + N_SEL, n_parts))
    if ONE_BRANCH:
        first, end = n_compressed, n_parts
    every = first + tl.arange(0, PARTS)
    lse = tl.load(part_lse + (bg * n_parts + every) * R + head, mask=every < end, other=float("-inf"))
    top = tl.max(lse, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(lse - top), 0)
    total = tl.where(total == 0, 1.0, total)
    sum1 = tl.zeros([V1], tl.float32)
    if V2 > 0:
        sum2 = tl.zeros([V2], tl.float32)
    for p in tl.range(first, end, AT_ONCE):
        piece = p + tl.arange(0, AT_ONCE)
        row = (bg * n_parts + piece) * R + head
        weight = tl.exp2(tl.load(part_lse + row, mask=piece < end, other=float("-inf")) - top) / total
        sum1 += tl.sum(weight[:, None] * load_rows(part, row * V, weight > 0, V, 0, V1, False), 0)
        if V2 > 0:
            sum2 += tl.sum(weight[:, None] * load_rows(part, row * V, weight > 0, V, V1, V2, False), 0)
    row = (branch.to(tl.int64) * n_rows + bg * R + head) * V + tl.zeros([1], tl.int64)
    store_rows(out, row, row >= 0, sum1[None, :], V, 0, V1)
    if V2 > 0:
        store_rows(out, row, row >= 0, sum2[None, :], V, V1, V2)


PROGRAMS = 128
"""Programs per row: GPUs have 108 to 148 SMs. Not more, because each leaves a part to be merged."""
WINDOW_PART = 64  # keys
STRETCHES = 16  # of blocks, each ranked by one program; a power of two
BLOCKS_AT_ONCE = 64
_HEADS_AT_ONCE = 16
MERGED_AT_ONCE = 16  # parts


class _DecodeConstants(NamedTuple):
    """Compile-time constants of each kernel."""

    compressed: dict[str, Any]
    score: dict[str, Any]
    raw: dict[str, Any]
    merge: dict[str, Any]


class TritonDecoder:
    """`nsa.kernels.interface.TokenDecoder`; the cache appends tokens by itself.

    merged: one softmax over selected blocks and window, whose compressed keys have no values, without gates.
    """

    append = None

    def __init__(
        self,
        cache: CacheView,
        *,
        heads_per_group: int,
        means: bool,
        geometry: Geometry,
        scale: float,
        merged: bool = False,
    ) -> None:
        self._keys = (cache.compressed, cache.selected, cache.window)
        self._geometry, self._scale, self._merged = geometry, scale, merged

    def attend(self, q_B1GRK: Tensor, gates_B1GR3: Tensor | None) -> tuple[Tensor, Tensor]:
        if (gates_B1GR3 is None) != self._merged:
            raise ConfigError(
                f"gates are {'missing' if gates_B1GR3 is None else 'given'}: they mix the branches, and a merged layer "
                f"has none. Pass them to a decoder that was made with merged=False, and only to that."
            )
        with device_of(q_B1GRK):
            out, idx_B1GN = decode(
                q_B1GRK, *self._keys, geometry=self._geometry, scale=self._scale, merged=self._merged
            )
            return (out[0] if gates_B1GR3 is None else mix_forward(gates_B1GR3, *out.unbind())), idx_B1GN


def decode(
    q_B1GRK: Tensor, compressed: CachedKeys, selected: CachedKeys, window: CachedKeys, *, geometry: Geometry,
    scale: float, merged: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Outputs of the compressed, selected and sliding branch, [3, B, 1, G, R, V], and the chosen blocks; the cache is
    read in place. merged: the output, [1, …], of one softmax over the window and blocks of the tokens before it."""
    if merged:
        far_B1 = (selected.pos_B1 - geometry.w).clamp(min=-1)
        k, _, table_BP = compressed.pages
        compressed = compressed._replace(pages=KeyPages(k, k, table_BP), pos_B1=far_B1)  # values are not read
        selected = selected._replace(pos_B1=far_B1)
    B, _, G, R, K = q_B1GRK.shape
    V = selected.pages.v.shape[-1]
    (q,) = rows_contiguous(q_B1GRK)
    in_cmp, in_sel, in_win = (_laid_out(keys) for keys in (compressed, selected, window))
    pos_cmp, first_cmp = in_cmp[3:]
    C, T = compressed.pages.n_entries, selected.pages.n_entries

    tiles = choose("decode", max(K, V), element_size=q.dtype.itemsize)
    fixed = constants(G, R, K, V, geometry, tiles, wide=is_wide(q.dtype), merged=merged)
    keep, block_m = fixed.score["KEEP"], fixed.compressed["BLOCK_M"]
    n_cmp = min(fixed.compressed["PARTS"], max(1, triton.cdiv(C, tiles.n)))  # any further would always be empty
    n_raw = geometry.n_sel + fixed.raw["WINDOW_PARTS"]
    n_parts = n_cmp + n_raw
    row_tiles = triton.cdiv(R, block_m)

    part = q.new_empty((B, G, n_parts, R, V), dtype=torch.float32)
    part_lse = q.new_empty((B, G, n_parts, R), dtype=torch.float32)
    scores = q.new_empty((B, G, R, C), dtype=torch.float32)
    best = q.new_empty((B, G, STRETCHES, keep), dtype=torch.int64)
    idx = q.new_empty((B, 1, G, geometry.n_sel), dtype=torch.int32)
    out = q.new_empty((1 if merged else 3, B, 1, G, R, V))
    q_strides = row_strides(q[:, 0])

    decode_compressed_kernel[(n_cmp, B * G, row_tiles)](
        q, *in_cmp, scores, part, part_lse, scale, C, n_parts, in_cmp[2].stride(0),
        *q_strides, *row_strides(*in_cmp[:2]), PAGE=_page(compressed), **fixed.compressed, **tiles.options,
    )  # fmt: skip
    decode_score_kernel[(STRETCHES, B * G)](
        scores, part_lse, pos_cmp, first_cmp, best, C, n_cmp, n_parts, **fixed.score
    )
    decode_raw_kernel[(n_raw, B * G, row_tiles)](
        q, *in_sel, *in_win, best, idx, part, part_lse,
        scale, T, window.pages.n_entries, n_cmp, n_parts, in_sel[2].stride(0), in_win[2].stride(0),
        *q_strides, *row_strides(*in_sel[:2], *in_win[:2]), PAGE=_page(selected), WINDOW_PAGE=_page(window),
        **fixed.raw, **tiles.options,
    )  # fmt: skip
    decode_merge_kernel[(len(out) * R, B * G)](part, part_lse, out, n_cmp, n_parts, B * G * R, **fixed.merge)
    return out, idx


def constants(
    G: int, R: int, K: int, V: int, geometry: Geometry, tiles: TileSizes, *, wide: bool, merged: bool = False
) -> _DecodeConstants:
    """They depend on the model alone, so that a row has the same bits in any batch and any cache."""
    l, d, l_sel, n_sel, w = geometry.ints
    parts = triton.next_power_of_2(triton.cdiv(PROGRAMS, G))
    window_parts = min(parts, triton.cdiv(w, WINDOW_PART))
    block_m = min(tiles.m, max(16, triton.next_power_of_2(R)))
    keep = triton.next_power_of_2(n_sel)
    heads = dict(G=G, R=R)
    attend = dict(**heads, **widths(K, V), BLOCK_M=block_m, BLOCK_N=tiles.n, WIDE=wide)
    blocks = dict(L_SEL=l_sel, KEEP=keep, STRETCHES=STRETCHES)
    v_width = split_width(V)
    return _DecodeConstants(
        compressed=dict(**attend, L=l, D=d, PARTS=parts, VALUES=not merged),
        score=dict(**heads, **blocks, L=l, D=d, PARTS=parts, BLOCK_R=_HEADS_AT_ONCE, BLOCK_J=max(BLOCKS_AT_ONCE, keep)),
        raw=dict(
            **attend, **blocks, N_SEL=n_sel, W=w, WINDOW_PARTS=window_parts
        ),
        merge=dict(
            R=R, V=V, V1=v_width.main, V2=v_width.rest, N_SEL=n_sel,
            PARTS=triton.next_power_of_2(n_sel + window_parts if merged else max(parts, n_sel)),
            AT_ONCE=MERGED_AT_ONCE, ONE_BRANCH=merged,
        ),
    )  # fmt: skip


def _laid_out(keys: CachedKeys) -> tuple[Tensor, ...]:
    """Keys, values, block table, positions, starts."""
    k, v, table_BP = keys.pages
    return (*rows_contiguous(k, v, table_BP), keys.pos_B1.contiguous(), keys.start_B1.contiguous())


def _page(keys: CachedKeys) -> int:
    return keys.pages.k.shape[2]
