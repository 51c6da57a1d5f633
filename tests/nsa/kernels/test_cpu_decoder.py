"""The CPU decoder over pages in any order, laid out as another engine has them: the same bits as over whole rows."""

import pytest
import torch

from nsa.core.nsa_attention import NSAAttention
from nsa.errors import ConfigError
from nsa.kernels.cpu import CpuDecoder
from nsa.kernels.interface import CachedKeys, CacheView, KeyPages, one_page_per_row
from tests.nsa.kernels.paged_keys import scattered
from tests.shapes import attention_args

LENGTHS, CAPACITY, STEPS = (7, 300, 64, 151), 340, 20


class Streams:
    """Random raw keys and values of the three branches, and the decoder's cache of the first tokens of each row."""

    def __init__(self, geometry="showcase", dtype=torch.float32, K=32, V=16):
        generator = torch.Generator().manual_seed(0)
        self.module = NSAAttention(**attention_args(geometry, (6, 2), d_k=K, d_v=V))
        self.g, self.widths, self.dtype = self.module.geometry, (K, V) * 3, dtype

        def tensor(*shape):
            return torch.randn(*shape, generator=generator).to(dtype)

        self.raw = [tensor(4, CAPACITY, 2, x) for x in self.widths]
        self.q = [tensor(4, 1, 2, 3, K) for _ in range(STEPS)]
        self.gates = torch.rand(4, 1, 2, 3, 3, generator=generator)

    def filled(self, x, begin=0):
        """The rows' first tokens; NaN after them, and before `begin` tokens to their end."""
        rows = torch.full_like(x, torch.nan)
        for row, n in enumerate(LENGTHS):
            rows[row, max(0, n - begin if begin else 0) : n] = x[row, max(0, n - begin if begin else 0) : n]
        return rows

    def entries(self, first):
        """Compressed entries, entry 0 at slot `first`, NaN where there is none yet."""
        g, arrays = self.g, []
        for x in self.raw[:2]:
            y = torch.full((4, CAPACITY // g.d + 2, *x.shape[2:]), torch.nan, dtype=self.dtype)
            for row, n in enumerate(LENGTHS):
                for i in range(g.n_compressed(n)):
                    y[row, first + i] = x[row, i * g.d : i * g.d + g.l].float().mean(0).to(self.dtype)
            arrays.append(y)
        return arrays

    def ring(self, x, n):
        slots = torch.full((4, n, *x.shape[2:]), torch.nan, dtype=self.dtype)
        for row, length in enumerate(LENGTHS):
            tokens = torch.arange(max(0, length - n), length)
            slots[row, tokens % n] = x[row, tokens]
        return slots

    def view(self, paged: bool, ours: bool = False) -> CacheView:
        """Paged: each stream in blocks of its own, tokens at their positions. Else whole rows, and the tail's ring."""
        g = self.g
        length = torch.tensor(LENGTHS)
        pos, zero = length[:, None] - 1, torch.zeros(4, 1, dtype=torch.int64)
        done = torch.tensor([g.n_compressed(n) for n in LENGTHS])
        if paged:
            first, page = g.l // g.d - 1, 2 * g.l_sel
            tail, window = ([self.filled(x, n) for x in self.raw[i : i + 2]] for i, n in ((0, g.l), (4, g.w)))
            places = [scattered(states, seed, ours) for seed, states in enumerate((page, page // g.d, page, page))]
            places[1] = same_table(places[1], page // g.d)
        else:
            first = 0
            tail, window = [self.ring(x, g.l) for x in self.raw[:2]], [self.filled(x, g.w) for x in self.raw[4:]]
            places = [one_page_per_row] * 4
        selected = [self.filled(x) for x in self.raw[2:4]]
        return CacheView(
            places[0](*tail),
            CachedKeys(places[1](*self.entries(first)), pos, zero + first),
            CachedKeys(places[2](*selected), pos.clone(), zero),
            CachedKeys(places[3](*window), pos.clone(), zero),
            length,
            done,
        )

    def outputs(self, paged: bool, ours: bool = False):
        view = self.view(paged, ours)
        sizes = dict(heads_per_group=3, geometry=self.g, scale=0.2)
        decoder = CpuDecoder(view._replace(compressed=view.compressed._replace(pos_B1=view.selected.pos_B1)),
                             means=True, **sizes)  # fmt: skip
        results = []
        for q in self.q:
            at = torch.arange(4), view.length_B.clone()
            assert not decoder.append(tuple(x[at][:, None] for x in self.raw))
            out, idx = decoder.attend(q, self.gates)
            results.append((out.clone(), idx.clone()))
        assert view.n_compressed_B.tolist() == [self.g.n_compressed(n + STEPS) for n in LENGTHS]
        return results


def same_table(place, states):
    """Tables have a fixed number of columns; of the compressed stream too."""

    def placed(k, v):
        n = -(-k.shape[1] // states) * states
        pad = (0, 0, 0, 0, 0, n - k.shape[1])
        return place(*(torch.nn.functional.pad(x, pad, value=torch.nan) for x in (k, v)))

    return placed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("geometry", "K", "V"), [("showcase", 32, 16), ("odd", 24, 40), ("seed", 64, 64)])
@pytest.mark.parametrize("ours", [False, True], ids=["another engine's pages", "our pages"])
def test_pages_in_any_order_give_the_same_bits(geometry, K, V, dtype, ours):
    streams = Streams(geometry, dtype, K, V)
    for (got, blocks), (want, same_blocks) in zip(streams.outputs(True, ours), streams.outputs(False), strict=True):
        assert got.isfinite().all()
        assert torch.equal(blocks, same_blocks)
        assert torch.equal(got, want)


def decoder_of(**changes: KeyPages):
    streams = Streams()
    view = streams.view(True)
    for name, pages in changes.items():
        view = view._replace(**{name: getattr(view, name)._replace(pages=pages(getattr(view, name).pages))})
    return CpuDecoder(view, heads_per_group=3, means=True, geometry=streams.g, scale=0.2)


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p._replace(table_BP=p.table_BP.long()),
        lambda p: p._replace(table_BP=p.table_BP[:2]),
        lambda p: p._replace(table_BP=p.table_BP.T.contiguous().T),
        lambda p: p._replace(k=p.k[:, :1]),
        lambda p: p._replace(k=p.k[:3]),
        lambda p: p._replace(v=p.v.bfloat16()),
        lambda p: p._replace(k=p.k.transpose(2, 3).contiguous().transpose(2, 3)),
    ],
)
@pytest.mark.parametrize("stream", ["compressed", "selected", "window"])
def test_pages_that_do_not_fit_are_refused(stream, change):
    with pytest.raises(ConfigError, match=r"page|table"):
        decoder_of(**{stream: change})


def test_an_entry_of_tokens_without_pages_is_refused():
    """The mean of a block reads tokens of earlier pages, not only the one that is written."""
    streams = Streams()
    view = streams.view(True)
    view.tail.table_BP[2, 0] = -1  # its 64 tokens fill the first page: the next token lies in the second
    decoder = CpuDecoder(view, heads_per_group=3, means=True, geometry=streams.g, scale=0.2)
    new = tuple(x[:, :1] for x in streams.raw)
    for _ in range(streams.g.d - 1):
        decoder.append(new)
    with pytest.raises(ConfigError):
        decoder.append(new)
