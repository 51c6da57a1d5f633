"""The Triton backend's indices and bounds against plain loops. Runs under TRITON_INTERPRET=1."""

from itertools import pairwise

import pytest
import torch

from nsa.core.positions import packed_layout
from nsa.geometry import Geometry
from nsa.kernels.interface import BranchInputs, is_one_document
from nsa.kernels.portable import range_attention
from tests.backends import RUN_HERE

pytestmark = pytest.mark.skipif("triton" not in RUN_HERE, reason="needs TRITON_INTERPRET=1")

L, GROUPS = 8, 2


def layout(name: str) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Positions, where each document begins, and the number of keys."""
    if name == "packed":
        cu, n = torch.tensor([0, 1, 30, 30, 43, 90]), 90
        pos, start, *_ = packed_layout(cu, n, Geometry(l=8, d=4, l_sel=L, n_sel=4, w=16))
        return pos, start, n
    if name.startswith("dropped"):  # a cache without its oldest keys: blocks begin before the axis, or across its edge
        pos = torch.stack((torch.arange(60, 100), torch.arange(40)))
        start = torch.tensor([[-29], [3]]).expand(-1, 40)
        return pos, start if name == "dropped" else start.contiguous(), 71
    return torch.arange(75).expand(2, -1), torch.zeros(1, 1, dtype=torch.int64).expand(2, 75), 75


def choices(pos: torch.Tensor, n_sel: int, seed: int = 0) -> torch.Tensor:
    """Ascending, distinct, not after the query; −1 where there are too few."""
    generator = torch.Generator().manual_seed(seed)
    idx = torch.full((*pos.shape, GROUPS, n_sel), -1, dtype=torch.int32)
    for b, s, g in torch.cartesian_prod(*(torch.arange(n) for n in idx.shape[:3])).tolist():
        own = int(pos[b, s]) // L
        blocks = torch.randperm(own + 1, generator=generator)[:n_sel].sort().values
        idx[b, s, g, : len(blocks)] = blocks
    return idx


def readers(idx: torch.Tensor, pos: torch.Tensor, start: torch.Tensor, n_keys: int, span: int) -> list[list[tuple]]:
    """Return for each (span, batch, group, window): (pair, first key of its block), across entries first, then by
    query. Rows of one document have an axis that begins before the first key, where a block would begin."""
    B, S, G, N = idx.shape
    one_document = start.stride(1) == 0
    n_windows, n_spans = -(-n_keys // L) + one_document, -(-S // span)
    entries_by_window: list[list[tuple[bool, int, int]]] = [[] for _ in range(n_spans * B * G * n_windows)]
    for b, s, g in torch.cartesian_prod(torch.arange(B), torch.arange(S), torch.arange(G)).tolist():
        shift = int(-start[b, s] % L) if one_document else 0
        for n, block in enumerate(idx[b, s, g].tolist()):
            begin, last = int(start[b, s]) + block * L + shift, int(start[b, s] + pos[b, s]) + shift
            windows = {key // L for key in range(begin, begin + L) if 0 <= key <= last} if block >= 0 else ()
            for window in windows:
                if window < n_windows:
                    place = ((s // span * B + b) * G + g) * n_windows + window
                    first = max(begin, shift) if one_document else begin
                    entries_by_window[place].append((begin // L == window, s * N + n, first))
    return [[(pair, begin) for _, pair, begin in sorted(entries)] for entries in entries_by_window]


def chunks_of_8(n_sel: int, l_sel: int) -> dict[str, int]:
    """Short ones, of which a run has several; four runs per program, as interpreted."""
    return dict(N=n_sel, L=l_sel, CHUNK=8, SHIFT=5, BITS=2, LOG=5, ROWS=4)


@pytest.mark.parametrize("windows_per_chunk", [2048, 5, 2])  # runs of 1 chunk, of 2 to 3, of 5 to 7
@pytest.mark.parametrize(
    ("name", "n_sel", "most_queries"),
    [("plain", 4, 35), ("packed", 3, None), ("packed", 4, 50), ("dropped", 4, None), ("dropped, packed", 4, 20)],
)
def test_every_window_has_its_readers_in_order(name, n_sel, most_queries, windows_per_chunk, monkeypatch):
    from nsa.kernels.triton import block_index

    monkeypatch.setattr(block_index, "PIECE", 16)
    monkeypatch.setattr(block_index, "RUNS", 2)
    monkeypatch.setattr(block_index, "PLACES", 8)
    monkeypatch.setattr(block_index, "WINDOWS_PER_CHUNK", windows_per_chunk)
    if windows_per_chunk < 2048:
        monkeypatch.setattr(block_index, "chunk_sizes", chunks_of_8)
    pos, start, n_keys = layout(name)
    idx = choices(pos, n_sel)
    sizes = block_index.index_sizes(idx.shape, 1 if is_one_document(start) else 2, L, n_keys, most_queries)
    if windows_per_chunk == 2048:  # longer runs may be longer than a span should be
        assert (sizes.n_spans > 1) == (most_queries is not None)
    got = block_index.build_block_index(idx, pos, start, sizes)
    shift = -start % L if sizes.n_sides == 1 else 0
    assert torch.equal(got.last.view_as(pos), (pos + start + shift).int())
    want = readers(idx, pos, start, n_keys, sizes.span)
    offset = got.offset.tolist()
    entries = list(zip(got.pair.tolist(), got.begin.tolist(), strict=True))
    assert [entries[a:b] for a, b in pairwise(offset)] == want
    pieces = [-(-len(w) // 16) for w in want]
    first = got.piece_first.tolist()
    assert first == [sum(pieces[:i]) for i in range(len(pieces) + 1)]
    of_each = [place for place, n in enumerate(pieces) for _ in range(n)]
    assert got.piece_window.tolist() == of_each + [len(want)] * (got.piece_window.numel() - len(of_each))


@pytest.mark.parametrize("name", ["plain", "packed", "dropped", "shuffled"])
@pytest.mark.parametrize(("branch", "l", "d"), [("window", 8, 4), ("compressed", 8, 4), ("compressed", 6, 3)])
def test_bounds_are_the_portable_ones_and_every_tile_of_keys_has_its_queries(name, branch, l, d, monkeypatch):
    from nsa.kernels.triton import bounds

    monkeypatch.setattr(bounds, "CHUNK", 16)
    monkeypatch.setattr(bounds, "CHUNKS", 2)
    pos, start, n_keys = layout(name)
    if name == "shuffled":  # exact bounds, whatever the order of the queries
        order = torch.randperm(pos.shape[1], generator=torch.Generator().manual_seed(1))
        pos, start = pos[:, order], start[:, order]
    n_keys, geometry = n_keys if branch == "window" else n_keys // d, Geometry(l=l, d=d, l_sel=l * d, n_sel=4, w=16)
    k = torch.empty(pos.shape[0], n_keys, 1, 1)
    x = BranchInputs("sliding" if branch == "window" else branch, k, k, k, None, pos, start, geometry, 1.0)
    (ranges,) = bounds.key_bounds(x)
    lo, hi = getattr(range_attention, f"{branch}_bounds")(pos, start, geometry, n_keys)
    assert torch.equal(ranges.lo_BS, lo.int())
    assert torch.equal(ranges.hi_BS, hi.int())
    n, n_tiles = 8, -(-n_keys // 8)
    ((first, end),) = bounds.seen_by(n, (ranges, n_tiles))
    for b in range(pos.shape[0]):
        for tile in range(n_tiles):
            past = [s for s, x in enumerate(hi[b].tolist()) if x > tile * n]
            before = [s for s, x in enumerate(lo[b].tolist()) if x < (tile + 1) * n]
            assert int(first[b, tile]) == min(past, default=pos.shape[1])
            assert int(end[b, tile]) == max(before, default=-1) + 1


def test_two_branches_in_one_launch_have_the_bounds_of_each(monkeypatch):
    from nsa.kernels.triton import bounds

    monkeypatch.setattr(bounds, "CHUNK", 16)
    pos, start, n_keys = layout("packed")
    geometry, q = Geometry(l=8, d=4, l_sel=L, n_sel=4, w=16), torch.empty(1)
    branches = []
    for branch, n in (("compressed", n_keys // 4), ("sliding", n_keys)):
        k = torch.empty(1, n, 1, 1)
        branches.append(BranchInputs(branch, q, k, k, None, pos, start, geometry, 1.0))
    together, apart = bounds.key_bounds(*branches), [bounds.key_bounds(x)[0] for x in branches]
    n_tiles = [-(-x.k_BTGK.shape[1] // 8) for x in branches]
    seen = bounds.seen_by(8, *zip(together, n_tiles, strict=True))
    for one, alone, tiles, queries in zip(together, apart, n_tiles, seen, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, alone, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(queries, bounds.seen_by(8, (alone, tiles))[0], strict=True))
