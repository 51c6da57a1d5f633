"""Triton's step for one new token per row: equal to the reference, and the same bits however the programs are run.

Interpreted, except for what the host does: that is shown to look at shapes only.
"""

import pytest
import torch

from nsa.core.nsa_attention import NSAAttention
from nsa.errors import ConfigError
from nsa.geometry import Geometry
from nsa.kernels.interface import CachedKeys, CacheView, one_page_per_row
from nsa.kernels.registry import BACKENDS, BackendRequest
from tests.backends import RUN_HERE
from tests.nsa.kernels.grid_order import ORDERS, programs_run
from tests.nsa.kernels.paged_keys import scattered
from tests.shapes import GEOMETRIES, attention_args

pytest.importorskip("triton", reason="it is in the dev extra")
from nsa.kernels.triton import decode
from nsa.kernels.triton.tuning import choose

interpreted = pytest.mark.skipif("triton" not in RUN_HERE, reason="runs under TRITON_INTERPRET=1")
REFERENCE = BACKENDS["reference"].functions
TINY = Geometry(**GEOMETRIES["tiny"])
PAPER = Geometry(l=32, d=16, l_sel=64, n_sel=3, w=80)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Sizes at which a hundred tokens are several parts, stretches and rounds, and an interpreter takes seconds."""
    monkeypatch.setattr(decode, "PROGRAMS", 4)
    monkeypatch.setattr(decode, "WINDOW_PART", 16)
    monkeypatch.setattr(decode, "STRETCHES", 2)
    monkeypatch.setattr(decode, "BLOCKS_AT_ONCE", 16)
    monkeypatch.setattr(decode, "MERGED_AT_ONCE", 2)


class Step:
    """A cache of rows of these lengths, the last token of each being the query."""

    def __init__(self, lengths, g=TINY, groups=1, heads=3, K=8, V=6, dtype=torch.float32, room=3, seed=0):
        self.g, self.scale = g, K**-0.5
        generator = torch.Generator().manual_seed(seed)

        def tensor(*shape):
            return torch.randn(len(lengths), *shape, generator=generator).to(dtype)

        capacity = max(lengths) + room
        n_compressed, n_raw = g.n_compressed(capacity), g.n_blocks(capacity) * g.l_sel
        self.q = tensor(1, groups, heads, K)
        pos = torch.tensor(lengths)[:, None] - 1
        zero = torch.zeros_like(pos)
        self.compressed = tensor(n_compressed, groups, K), tensor(n_compressed, groups, V), pos, zero
        self.selected = tensor(n_raw, groups, K), tensor(n_raw, groups, V), pos, zero
        self.window = tensor(g.w, groups, K), tensor(g.w, groups, V), pos.clamp(max=g.w - 1), zero

    @property
    def keys(self):
        return self.compressed, self.selected, self.window

    def decode(self, pages=one_page_per_row, window_pages=None):
        """The output of each branch, by gates that are 1 for it alone, and the chosen blocks."""
        streams = zip((pages, pages, window_pages or pages), self.keys, strict=True)
        cached = [CachedKeys(place(k, v), pos, start) for place, (k, v, pos, start) in streams]
        sizes = dict(geometry=self.g, scale=self.scale, merged=False)
        parts = decode.attend_parts(self.q, *cached, **sizes)
        view = CacheView(cached[1].pages, *cached, cached[1].pos_B1, cached[1].pos_B1)
        alone = [gates.expand(*self.q.shape[:4], 3) for gates in torch.eye(3)]
        return [decode.merge(self.q, parts, gates, view, **sizes) for gates in alone], parts.idx_B1GN

    def exact(self):
        """The reference's branches and choice, in fp64."""
        g, scale, q = self.g, self.scale, self.q.double()
        compressed, selected, window = ((k.double(), v.double(), *where) for k, v, *where in self.keys)
        idx = REFERENCE.select(q, compressed[0], *compressed[2:], geometry=g,
                               scale=scale)  # fmt: skip
        return (
            REFERENCE.compressed(q, *compressed, geometry=g, scale=scale),
            REFERENCE.selected(q, *selected[:2], idx, *selected[2:], geometry=g, scale=scale),
            REFERENCE.sliding(q, *window, geometry=g, scale=scale),
        ), idx


def check(step, limit=1e-5):
    (outputs, idx), (exact, exact_idx) = step.decode(), step.exact()
    assert idx.dtype == torch.int32
    assert torch.equal(idx, exact_idx)
    for got, want in zip(outputs, exact, strict=True):
        assert got.dtype == step.q.dtype
        assert got.shape == want.shape
        for row, want_row in zip(got, want, strict=True):
            assert (row - want_row).norm() <= limit * want_row.norm()  # of a row that sees nothing: exactly 0


# No compressed block yet, the first one, the second; a page full, begun; a tile of compressed keys full, begun.
EDGES = [1, 7, 8, 12, 9, 68, 71, 72]


@interpreted
@pytest.mark.parametrize(
    ("lengths", "sizes"),
    [
        (EDGES, dict(heads=1)),
        ([8, 140], dict(groups=2, heads=3)),
        ([141], dict(groups=2, heads=6)),
        ([73], dict(heads=16)),
        ([3, 6], dict(room=0)),  # a cache with no room for a compressed block
        ([300], dict(heads=2)),  # several rounds of blocks and of keys in each program
    ],
    ids=str,
)
def test_equals_the_reference(lengths, sizes):
    check(Step(lengths, **sizes))


@interpreted
def test_every_head_and_every_part_counts_in_the_choice():
    """Heads that do not care but for the last four, which stand past a tile; heads that each want something else."""
    step = Step([140, 140], Geometry(l=8, d=4, l_sel=8, n_sel=7, w=12), heads=20)
    step.q[0, ..., :16, :] = 0.0
    step.q[0, ..., 16:, :] *= 5
    step.q[1] *= torch.tensor([5.0, 1.0]).repeat(10)[:, None]
    check(step)


@interpreted
@pytest.mark.parametrize("geometry", ["no_overlap", "long_blocks", "odd"])
def test_equals_the_reference_for_other_block_sizes(geometry):
    check(Step([150], Geometry(**GEOMETRIES[geometry]), heads=2))


@interpreted
@pytest.mark.parametrize(("K", "V"), [(64, 64), (192, 128), (24, 40)])
def test_equals_the_reference_for_wide_rows(K, V):
    check(Step([190], PAPER, heads=6, K=K, V=V))


@interpreted
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_error_is_at_most_twice_plain_pytorchs(dtype):
    """Plain PyTorch here is softmax attention over the same keys with every intermediate rounded to that dtype."""
    step = Step([190], PAPER, heads=6, K=64, V=64, dtype=dtype)
    (outputs, idx), (exact, exact_idx) = step.decode(), step.exact()
    assert torch.equal(idx, exact_idx)
    at = torch.arange(step.selected[0].shape[1])
    chosen = torch.isin(at // PAPER.l_sel, idx.flatten()) & (at < 190)
    visible = slice(0, PAPER.n_compressed(190)), chosen, slice(0, PAPER.w)
    for got, want, keys, seen in zip(outputs, exact, step.keys, visible, strict=True):
        k, v = keys[0][:, seen], keys[1][:, seen]
        p = (torch.einsum("bsgrk,btgk->bsgrt", step.q, k) * step.scale).softmax(-1)
        plain = torch.einsum("bsgrt,btgv->bsgrv", p, v)
        assert (got - want).norm() <= 2 * (plain - want).norm()


@interpreted
def test_ties_go_to_the_lower_index_and_a_score_that_underflows_beats_no_block():
    g = Geometry(l=8, d=4, l_sel=8, n_sel=6, w=12)
    step = Step([118, 118, 30], g)
    k = step.compressed[0]
    k[0] = 1.0  # equal keys: blocks score by their overlap alone
    k[1:], step.q[1:] = 0.0, 1.0
    k[1:, 1] = 300.0  # all probability on one compressed block
    assert step.decode()[1][:, 0, 0].tolist() == [[0, 1, 2, 3, 13, 14], [0, 1, 2, 3, 13, 14], [0, 1, 2, 3, -1, -1]]


@interpreted
def test_same_bits_in_any_order_of_programs():
    step = Step([140, 33])
    want = step.decode()
    for order in ORDERS.values():
        with programs_run(order) as ran:
            got = step.decode()
        assert ran != sorted(ran)
        assert_same(got, want)


@interpreted
def test_same_bits_alone_in_a_batch_and_in_a_larger_cache():
    """Also for any content of memory that must not be read: unwritten slots, and buffers before they are written."""
    step = Step([20, 140])
    want = step.decode()
    alone = Step([140], room=200)
    alone.q = step.q[1:]
    for ours, theirs, n in zip(alone.keys, step.keys, (TINY.n_compressed(140), 140, TINY.w), strict=True):
        for x, y in zip(ours[:2], theirs[:2], strict=True):
            x.fill_(torch.nan)
            x[:, :n] = y[1:, :n]
    torch.use_deterministic_algorithms(True)  # torch.empty then returns NaN
    try:
        (outputs, idx) = alone.decode()
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same((outputs, idx), (tuple(out[1:] for out in want[0]), want[1][1:]))


@interpreted
@pytest.mark.parametrize("states", [1, 2, 8, 24])
def test_same_bits_from_pages_in_any_order(states):
    """Lays pages out as vLLM does: every stream in blocks of its own table, which hold tokens at their positions, no
    rings."""
    step = Step([20, 140, 3])
    want = step.decode()
    assert_same(step.decode(scattered(states)), want)
    # The window as pages of all tokens, of another size: the newest token's position is its own, and what lies before
    # the window is not read.
    lengths, w = [20, 140, 3], TINY.w
    k, v = (torch.full((3, 143, *x.shape[2:]), torch.nan) for x in step.window[:2])
    for row, n in enumerate(lengths):
        for ring, tokens in zip(step.window[:2], (k, v), strict=True):
            tokens[row, max(0, n - w) : n] = ring[row, : min(n, w)]
    pos = torch.tensor(lengths)[:, None] - 1
    step.window = k, v, pos, torch.zeros_like(pos)
    assert_same(step.decode(scattered(states, seed=1), scattered(states // 2 + 1)), want)


@interpreted
def test_large_logits_stay_finite():
    step = Step([75])
    step.q = step.q * 1e4
    assert all(out.isfinite().all() for out in step.decode()[0])


@interpreted
def test_token_by_token_over_a_cache_equals_the_whole():
    """Rows of different lengths, a ring that wraps, blocks that fill up on the way."""
    args = attention_args("tiny", (3, 1))
    torch.manual_seed(0)
    whole = NSAAttention(**args, kernels=BackendRequest(*["reference"] * 4))
    module = NSAAttention(**args, kernels=BackendRequest(*["triton"] * 4))
    assert module.plan(torch.device("cpu"), torch.float32).decoder is BACKENDS["triton"].decoder
    for parameter in whole.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    module.load_state_dict(whole.state_dict())
    lengths, x = torch.tensor([2, 59]), torch.randn(2, 65, 24)
    cache = module.new_cache(2, 65)
    whole(x[:, :59], cache=cache, new_lens_B=lengths)  # prefill
    with torch.no_grad():
        want = [whole(x[b : b + 1])[0] for b in range(2)]
        for step in range(6):
            at = lengths + step
            out = module(x[torch.arange(2), at][:, None], cache=cache)
            for b in range(2):
                torch.testing.assert_close(out[b, 0], want[b][at[b]], atol=1e-5, rtol=1e-5)


class Recorded:
    """Stands in for a kernel: keeps the grid and the arguments of each launch."""

    def __init__(self, launches):
        self.launches = launches

    def __getitem__(self, grid):
        return lambda *args, **constants: self.launches.append((grid, args, constants))


def test_the_host_looks_at_shapes_only_and_copies_no_key(monkeypatch):
    """Checks what a CUDA graph needs: on tensors without data nothing can be read back, and every launch is decided
    anyway."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            operations.add(function.overloadpacket.__name__)
            return function(*args, **(kwargs or {}))

    operations, launches = set(), []
    kernels = [name for name in vars(decode) if name.endswith("_kernel")]
    for name in kernels:
        monkeypatch.setattr(decode, name, Recorded(launches))
    with torch.device("meta"):
        k_slots, v_slots = torch.empty(2, 2001, 4, 192), torch.empty(2, 2001, 4, 128)
        pos = torch.empty(2, 1, dtype=torch.int64)
        q = torch.empty(2, 1, 4, 16, 192)
        compressed, selected, window = (
            CachedKeys(one_page_per_row(k_slots[:, :n], v_slots[:, :n]), pos, pos)
            for n in (TINY.n_compressed(2000), 2000, TINY.w)
        )
        gates = torch.empty(2, 1, 4, 16, 3)
    view = CacheView(selected.pages, compressed, selected, window, pos, pos)
    decoder = decode.TritonDecoder(view, heads_per_group=16, means=False, geometry=TINY, scale=1.0)
    with Operations():
        out, idx = decoder.attend(q, gates)
    assert len(launches) == 4
    assert operations <= {"new_empty", "select", "view"}
    assert all(isinstance(n, int) and n > 0 for grid, _, _ in launches for n in grid)
    passed = [x for _, args, _ in launches for x in args if isinstance(x, torch.Tensor)]
    every = [x for keys in (compressed, selected, window) for x in (*keys.pages, keys.pos_B1, keys.start_B1)]
    assert all(any(x is y for y in passed) for x in every)
    assert tuple(out.shape) == (2, 1, 4, 16, 128)
    assert (tuple(idx.shape), idx.dtype) == ((2, 1, 4, TINY.n_sel), torch.int32)


def test_a_single_row_of_64k_tokens_fills_a_gpu(monkeypatch):
    monkeypatch.undo()  # the sizes that users have
    seed = Geometry(**GEOMETRIES["seed"])
    for groups in (1, 2, 4, 8):
        fixed = decode.constants(groups, 6, 64, 64, seed, choose("decode", 64), wide=False)
        keys = seed.n_compressed(65_536)
        assert 108 <= groups * min(fixed.compressed["PARTS"], keys // fixed.compressed["BLOCK_N"]) <= 148


def assert_same(got, want):
    for a, b in zip((*got[0], got[1]), (*want[0], want[1]), strict=True):
        assert torch.equal(a, b)


@interpreted
@pytest.mark.parametrize(("paged", "heads"), [(False, 3), (True, 17)])
def test_a_merged_step_is_one_softmax_over_blocks_before_the_window_and_the_window(paged, heads):
    step = Step([1, TINY.w, TINY.w + 1, 44, 45, 101], heads=heads)
    keys, values, pos, start = step.selected
    place = scattered(TINY.l_sel, 1) if paged else one_page_per_row
    tokens = CachedKeys(place(keys, values), pos, start)
    k_cmp, _, _, first = step.compressed
    entries = CachedKeys(one_page_per_row(k_cmp, k_cmp[..., :0]), pos, first)
    view = CacheView(tokens.pages, entries, tokens, tokens, pos, pos)
    sizes = dict(heads_per_group=heads, means=False, geometry=TINY, scale=step.scale)
    got, blocks = decode.TritonDecoder(view, **sizes, merged=True).attend(step.q, None)
    options = dict(geometry=TINY, scale=step.scale)
    far = (pos - TINY.w).clamp(min=-1)
    want_blocks = REFERENCE.select(step.q, k_cmp, far, first, **options)
    assert torch.equal(blocks, want_blocks)
    both = [
        REFERENCE.selected(step.q, keys, values, want_blocks, far, start, **options, return_lse=True),
        REFERENCE.sliding(step.q, keys, values, pos, start, **options, return_lse=True),
    ]
    outs, lses = (torch.stack(each) for each in zip(*both, strict=True))
    want = (lses.softmax(0)[..., None] * outs).sum(0)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@interpreted
def test_a_merged_layer_decodes_through_it_from_its_cache():

    args = {name: value for name, value in attention_args("tiny", (3, 1)).items() if name != "kv"}
    module = NSAAttention(**args, kind="merged", kernels=BackendRequest(*["triton"] * 4))
    x = torch.randn(2, 60, args["dim"])
    cache = module.new_cache(2, 60)
    parts = [module(x[:, :55], cache=cache), *(module(one, cache=cache) for one in x[:, 55:].split(1, 1))]
    assert isinstance(cache.prepared[1], decode.TritonDecoder)
    with pytest.raises(ConfigError, match="merged"):
        cache.prepared[1].attend(torch.randn(2, 1, 1, 3, 8), torch.rand(2, 1, 1, 3, 3))
    torch.testing.assert_close(torch.cat(parts, 1), module(x), atol=1e-5, rtol=1e-5)
