"""The blocks that a tile of queries chose together, each once and ascending, with a bit per query that chose it.

A program sorts what each of its tiles chose, as integers (block's first key, query), in registers; what is equal
becomes one. Slots past the union's size are not written.
"""

import triton
import triton.language as tl

from nsa.kernels.triton.device.order import NONE, following, sort_rows


@triton.jit
def add_runs(a_key, a_count, b_key, b_count):
    """For a scan: counts add up as long as the key stays the same."""
    return b_key, tl.where(a_key == b_key, a_count, 0) + b_count


@triton.jit
def union_kernel(
    idx, position, origin, begins, bits, counts, last, S, n_tiles,
    position_b, position_s, origin_b, origin_s,
    G: tl.constexpr, N: tl.constexpr, L: tl.constexpr,
    QUERIES: tl.constexpr, SHIFT: tl.constexpr, LOG: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """2^LOG ≥ QUERIES·N, 2^SHIFT ≥ QUERIES; ROWS tiles. `last` is the last key that each query may see."""
    b, g = (tl.program_id(1) // G).to(tl.int64), tl.program_id(1) % G
    tile = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    entry = tl.arange(0, 2**LOG)[None, :]
    turn, rank = entry // N, entry % N
    query = (tile * QUERIES + turn).to(tl.int64)
    ok = (turn < QUERIES) & (query < S)
    block = tl.load(idx + ((b * S + query) * G + g) * N + rank, mask=ok, other=-1)
    start = tl.load(origin + b * origin_b + query * origin_s, mask=ok, other=0).to(tl.int32)
    once = ok & (rank == 0) & (g == 0)
    pos = tl.load(position + b * position_b + query * position_s, mask=once, other=0).to(tl.int32)
    tl.store(last + b * S + query, start + pos, mask=once)

    low = tl.min(tl.where(ok, start, NONE), 1)[:, None]  # keys are counted from here, which leaves bits for the query
    key = sort_rows(tl.where(block >= 0, ((start - low + block * L) << SHIFT) | turn, NONE), LOG)
    real = key != NONE
    begin = key >> SHIFT
    bit = tl.where(real, 1 << (key & ((1 << SHIFT) - 1)), 0)
    _, chosen_by = tl.associative_scan((begin, bit), 1, add_runs)  # a query has a block once: the sum is the union
    whole = real & ((following(begin, LOG) != begin) | (entry == 2**LOG - 1))
    slot = tl.cumsum(whole.to(tl.int32), 1) - 1
    here = (b * n_tiles + tile) * G + g
    at = here * (QUERIES * N) + slot
    tl.store(begins + at, begin + low, mask=whole)
    tl.store(bits + at, chosen_by, mask=whole)
    tl.store(counts + here, tl.sum(whole.to(tl.int32), 1)[:, None], mask=tile < n_tiles)
