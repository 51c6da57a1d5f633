"""Top-n block selection, alone or after the compressed branch, whose log-sum-exp it then reuses.

Probabilities of the compressed branch are mapped by overlap and summed over heads. Shapes as in
`nsa.kernels.reference`.

No matrix of scores is ever stored. A first pass finds each row's log-sum-exp; the second forms the probabilities again,
each once, adds up the heads, then each block's keys, and keeps the best blocks in registers.

A step's KEEP blocks lie one `steps` apart, so that what a key gives to the block after its own is due one step later in
the same column: it waits in a register, and nothing moves between lanes. The keys of a step are laid out with a block's
m-th key in the m-th run of KEEP columns: a block's keys are added up within a lane too. All heads see the same keys, so
what is not visible is masked once, in the sum.

Blocks are ranked by one integer: the bits of the score, which is ≥ 0 or +inf, above the block's index turned round. No
two are equal, so the choice is exact, and ties go to the lower index.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.geometry import Geometry
from nsa.kernels.interface import BranchInputs
from nsa.kernels.triton.autotune import Work, tuned
from nsa.kernels.triton.bounds import key_bounds
from nsa.kernels.triton.launch import Launch, launch_all, planned
from nsa.kernels.triton.range_attention import forward_work, range_forward
from nsa.kernels.triton.tile import (
    LOG2E,
    VARYING,
    dot,
    group_at,
    load_rows,
    longest_first,
    row_strides,
    rows_contiguous,
)
from nsa.kernels.triton.tuning import TileSizes, is_wide, split_width


@triton.constexpr_function
def shared_strides(m, per_l, per_sel):
    """Strides of selection block j that lie in compressed block j·per_sel + m − (per_l − 1)."""
    return min(m + 1, per_l, per_sel, per_sel + per_l - 1 - m)


@triton.jit
def own_block(position, L_SEL: tl.constexpr):
    """The block a position lies in; below 0 before the document, where division alone would round up to block 0."""
    return (position + L_SEL) // L_SEL - 1


@triton.jit
def ranked(mass, j, own):
    """Blocks j of a query in block `own` as integers in order of preference; −1 for a block after the query's."""
    forced = (j == 0) | (j == own) | (j == own - 1)
    score = tl.where(forced, float("inf"), tl.where(mass == mass, mass, 0.0))  # NaN ranks lowest
    key = (score.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (2147483647 - j).to(tl.int64)
    return tl.where(j <= own, key, -1)


@triton.jit
def ascending(best, wanted):
    """The blocks of ranked integers: those wanted, in order of index, then −1."""
    block = tl.where((best >= 0) & wanted, 2147483647 - (best & 2147483647), 2147483647)
    block = tl.sort(block.to(tl.int32))
    return tl.where(block == 2147483647, -1, block)


@triton.jit
def overlap(m, PER_L: tl.constexpr, PER_SEL: tl.constexpr):
    """Strides that a block shares with the compressed key that begins m strides after it."""
    return tl.maximum(tl.minimum(m + PER_L, PER_SEL) - tl.maximum(m, 0), 0)


@triton.jit(do_not_specialize=VARYING)
def select_kernel(
    q, k, position, origin, hi, lse, idx, scale, S, T, R, position_b, position_s, origin_b, origin_s,
    q_b, q_s, q_g, q_r, k_b, k_t, k_g,
    G: tl.constexpr, K: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr,
    PER_L: tl.constexpr, PER_SEL: tl.constexpr, L_SEL: tl.constexpr, N_SEL: tl.constexpr, KEEP: tl.constexpr,
    SPAN: tl.constexpr, BLOCK_Q: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Powers of two: KEEP ≥ N_SEL, the blocks that are kept and those of a step; SPAN ≥ PER_SEL, the keys of a block.

    R is no constant: six heads unrolled need more registers than there are.
    """
    tile, b, g = longest_first(), tl.program_id(1) // G, tl.program_id(1) % G
    query = (tile * BLOCK_Q + tl.arange(0, BLOCK_Q)).to(tl.int64)
    ok = query < S
    bounds = b.to(tl.int64) * S + query
    first_Q = tl.load(origin + b.to(tl.int64) * origin_b + query * origin_s, mask=ok, other=0).to(tl.int32)
    pos_Q = tl.load(position + b.to(tl.int64) * position_b + query * position_s, mask=ok, other=-1).to(tl.int32)
    own_Q = own_block(pos_Q, L_SEL)
    hi_Q = tl.load(hi + bounds, mask=ok, other=0)
    q_at = group_at(b, g, q_b, q_g) + query * q_s
    flat = ((b.to(tl.int64) * S + query) * G + g) * R
    k += group_at(b, g, k_b, k_g)
    column, m = tl.arange(0, KEEP), tl.arange(0, SPAN)[None, :, None]
    row = tl.arange(0, SPAN * KEEP)
    SPILLS: tl.constexpr = (PER_L + PER_SEL - 2) // PER_SEL  # blocks after its own that a key may reach into

    best = tl.full([BLOCK_Q, KEEP], -1, tl.int64)  # ascending
    # Queries of one document share its first key; a tile across documents takes them in turn.
    document = tl.min(tl.where(ok, first_Q, 2147483647))
    while document < 2147483647:
        mine = ok & (first_Q == document)
        last_Q, seen_Q = tl.where(mine, own_Q, -1), tl.where(mine, hi_Q - document, 0)
        steps = tl.max(last_Q) // KEEP + 1
        due = (tl.zeros([BLOCK_Q, KEEP], tl.float32),) * SPILLS
        for step in tl.range(-SPILLS, steps):  # the first ones only for what reaches into the columns' first blocks
            block, run = row % KEEP * steps + step, row // KEEP
            at = document + block * PER_SEL + run
            real = (block >= 0) & (run < PER_SEL) & (at < T)
            k_at = at.to(tl.int64) * k_t
            k1 = tl.trans(load_rows(k, k_at, real, K, 0, K1, WIDE))
            if K2 > 0:
                k2 = tl.trans(load_rows(k, k_at, real, K, K1, K2, WIDE))
            p = tl.zeros([BLOCK_Q, SPAN * KEEP], tl.float32)
            for r in tl.range(0, R):
                s = dot(load_rows(q, q_at + tl.cast(r, tl.int64) * q_r, mine, K, 0, K1, WIDE), k1)
                if K2 > 0:
                    s += dot(load_rows(q, q_at + tl.cast(r, tl.int64) * q_r, mine, K, K1, K2, WIDE), k2)
                level = tl.load(lse + flat + r, mask=mine, other=0.0)
                p += tl.exp2(s * (scale * LOG2E) - level[:, None] * LOG2E)
            j = column * steps + step
            seen = tl.where(j[None, :] >= 0, tl.minimum(seen_Q[:, None] - j[None, :] * PER_SEL, PER_SEL), 0)
            p = tl.where(m < seen[:, None, :], tl.reshape(p, [BLOCK_Q, SPAN, KEEP]), 0.0)
            mass = tl.sum(p * overlap(m, PER_L, PER_SEL), 1)
            if SPILLS > 0:
                mass += due[0]
            later = ()
            for n in tl.static_range(1, SPILLS + 1):
                reached = tl.sum(p * overlap(m - n * PER_SEL, PER_L, PER_SEL), 1)
                if n < SPILLS:
                    reached += due[n]
                later += (reached,)  # type: ignore[assignment]
            due = later
            key = tl.where(step >= 0, ranked(mass, j[None, :], last_Q[:, None]), -1)
            best = tl.bitonic_merge(tl.maximum(best, tl.sort(key, descending=True)))
        document = tl.min(tl.where(ok & (first_Q > document), first_Q, 2147483647))
    block = ascending(best, column[None, :] >= KEEP - N_SEL)
    at = ((b.to(tl.int64) * S + query) * G + g) * N_SEL
    tl.store(idx + at[:, None] + column[None, :], block, mask=ok[:, None] & (column[None, :] < N_SEL))


@planned
def select_blocks(
    q_BSGRK: Tensor, k_BCGK: Tensor, pos_BS: Tensor, first_BS: Tensor, geometry: Geometry, scale: float
) -> Tensor:
    q, k = rows_contiguous(q_BSGRK, k_BCGK)
    lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
    (bounds,) = key_bounds(BranchInputs("compressed", q, k, k, None, pos_BS, first_BS, geometry, scale))
    launch_all(forward_work(q, k, k, bounds, scale, lse, None).launches)
    return choose_blocks(q, k, pos_BS, first_BS, bounds.hi_BS, lse, geometry, scale)


@planned
def compressed_and_select(x: BranchInputs) -> tuple[Tensor, Tensor, Tensor]:
    (bounds,) = key_bounds(x)
    out, lse = range_forward(x, bounds)
    return out, lse, choose_blocks(x.q_BSGRK, x.k_BTGK, x.pos_BS, x.start_BS, bounds.hi_BS, lse, x.geometry, x.scale)


def choose_blocks(
    q_BSGRK: Tensor, k_BCGK: Tensor, pos_BS: Tensor, first_BS: Tensor, hi_BS: Tensor, lse_BSGR: Tensor,
    geometry: Geometry, scale: float, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The choice from the compressed branch's bounds and log-sum-exps. `out`: where to put it."""
    q, k = rows_contiguous(q_BSGRK, k_BCGK)
    B, S, G, R, K = q.shape
    idx = torch.empty((B, S, G, geometry.n_sel), dtype=torch.int32, device=q.device) if out is None else out

    def prepare(tiles: TileSizes) -> Work:
        sizes = select_sizes(geometry, tiles)
        places = (*pos_BS.stride(), *first_BS.stride(), *row_strides(q, k))
        arguments = (q, k, pos_BS, first_BS, hi_BS, lse_BSGR, idx, scale, S, k.shape[1], R, *places)
        constants = dict(G=G, **_keys(K), **sizes, WIDE=is_wide(q.dtype), **tiles.options)
        return Work([Launch(select_kernel, (triton.cdiv(S, sizes["BLOCK_Q"]), B * G), arguments, constants)])

    g = geometry
    launch_all(tuned("select", q, 0, prepare, l=g.l, d=g.d, l_sel=g.l_sel, n_sel=g.n_sel).launches)
    return idx


def select_sizes(geometry: Geometry, tiles: TileSizes) -> dict[str, int]:
    """The kernel's constants; where a step has more keys than the tile, its queries are fewer."""
    l, d, l_sel, n_sel = geometry.l, geometry.d, geometry.l_sel, geometry.n_sel
    keep, span = max(16, triton.next_power_of_2(n_sel)), triton.next_power_of_2(l_sel // d)
    queries = max(16, min(tiles.m, tiles.m * tiles.n // (span * keep)))
    return dict(PER_L=l // d, PER_SEL=l_sel // d, L_SEL=l_sel, N_SEL=n_sel, KEEP=keep, SPAN=span, BLOCK_Q=queries)


def _keys(n: int) -> dict[str, int]:
    width = split_width(n)
    return dict(K=n, K1=width.main, K2=width.rest)
