"""Whole, in chunks, token by token, rows of different lengths: the same output, and a cache no larger than promised."""

import copy

import pytest
import torch

from nsa.core.kv_cache import _CacheSlots
from nsa.core.nsa_attention import NSAAttention
from nsa.errors import ConfigError
from tests.shapes import GEOMETRIES, attention_args


def in_chunks(module, x_BSD, sizes):
    cache = module.new_cache(x_BSD.shape[0], x_BSD.shape[1])
    parts, at = [], 0
    while at < x_BSD.shape[1]:
        size = sizes[len(parts) % len(sizes)]
        parts.append(module(x_BSD[:, at : at + size], cache=cache))
        at += size
    return torch.cat(parts, 1), cache


def make(**args) -> NSAAttention:
    torch.manual_seed(0)
    module = NSAAttention(**args)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.3)
    return module.eval()


@pytest.mark.parametrize("sizes", [[1], [7], [64], [1000], [3, 1, 50, 1, 1, 9]], ids=str)
@pytest.mark.parametrize("geometry", ["tiny", "no_overlap", "long_blocks", "odd", "showcase"])
@pytest.mark.parametrize(
    "changes", [dict(), dict(phi="mlp", phi_pos_emb=True), dict(phi="linear", rope_compressed="after")], ids=str
)
def test_chunks_equal_the_whole(geometry, sizes, changes):
    module = make(**attention_args(geometry, **changes))
    x = torch.randn(2, 211, 24)
    with torch.no_grad():
        got, cache = in_chunks(module, x, sizes)
        torch.testing.assert_close(got, module(x), atol=1e-5, rtol=1e-5)
    assert cache.length_B.tolist() == [211, 211]


@pytest.mark.parametrize("sizes", [[1], [7], [64], [1000]], ids=str)
@pytest.mark.parametrize("length", [2050, 2047])
def test_chunks_equal_the_whole_at_the_seed_sizes(length, sizes):
    module = make(**attention_args("seed", (12, 2)))
    x = torch.randn(1, length, 24)
    with torch.no_grad():
        got, _ = in_chunks(module, x, sizes)
        want = module(x)
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.parametrize("geometry", ["tiny", "odd", "long_blocks"])
def test_rows_of_different_lengths_equal_each_row_alone(geometry):
    """Every row takes what it has of each chunk, the rest is padding; rows end early, and rows pause and go on."""
    module = make(**attention_args(geometry, phi="mlp"))
    lengths = torch.tensor([7, 150, 64, 1, 120])
    x = torch.randn(5, 150, 24)
    with torch.no_grad():
        cache = module.new_cache(5, 150)
        got = [[] for _ in lengths]
        at = torch.zeros(5, dtype=torch.int64)
        for step, size in enumerate((40, 1, 30, 1, 1, 50, 27, 20, 9, 1, 60, 60)):
            new = (lengths - at).clamp(0, size)
            new[4] = new[4] * (step + 1) // 4 % (size + 1) if step < 6 else new[4]  # padding, then more of the row
            chunk = torch.full((5, size, 24), 1e3)  # padding that would be seen if it were read
            for b in range(5):
                chunk[b, : new[b]] = x[b, at[b] : at[b] + new[b]]
            out = module(chunk, cache=cache, new_lens_B=new)
            for b in range(5):
                got[b].append(out[b, : new[b]])
            at += new
        assert torch.equal(cache.length_B, lengths)
        for b, n in enumerate(lengths.tolist()):
            torch.testing.assert_close(torch.cat(got[b]), module(x[b : b + 1, :n])[0], atol=1e-5, rtol=1e-5)


def test_a_copied_cache_goes_its_own_way():
    """As in beam search. What was prepared for the first cache's tensors must not be used for the copy's."""
    module = make(**attention_args("tiny"))
    x = torch.randn(2, 60, 24)
    cache = module.new_cache(2, 60)
    with torch.no_grad():
        module(x[:, :40], cache=cache)
        module(x[:, 40:41], cache=cache)
        twin = copy.deepcopy(cache)
        for _ in range(10):
            module(torch.randn(2, 1, 24), cache=cache)
        got = torch.cat([module(x[:, t : t + 1], cache=twin) for t in range(41, 60)], 1)
        torch.testing.assert_close(got, module(x)[:, 41:], atol=1e-5, rtol=1e-5)


def test_a_cache_computes_in_its_own_dtype_under_autocast():
    module = make(**attention_args("tiny"))
    x = torch.randn(2, 60, 24)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        got, cache = in_chunks(module, x, [40, 1, 1, 18])
    assert cache.dtype == torch.float32
    with torch.no_grad():
        torch.testing.assert_close(got.float(), module(x), atol=0.05, rtol=0.05)


def test_no_slot_is_written_twice_by_one_chunk(monkeypatch):
    """A device may write in any order; only a slot that is addressed once is defined."""
    written = []
    write = _CacheSlots.write

    def spy(self, slot_BS, keep_BS, x_BSGX):
        written.extend((slot_BS[b][keep_BS[b]], self.n) for b in range(len(slot_BS)))
        write(self, slot_BS, keep_BS, x_BSGX)

    monkeypatch.setattr(_CacheSlots, "write", spy)
    module = make(**attention_args("tiny"))
    cache = module.new_cache(2, 100)
    for size in (60, 1, 20):
        module(torch.randn(2, size, 24), cache=cache, new_lens_B=torch.tensor([size, size // 2]))
    assert written
    for slot, n in written:
        assert len(slot) == len(slot.unique())
        assert (slot < n).all()


def test_a_full_cache_refuses_more_and_padding_does_not_count():
    module = make(**attention_args("tiny"))
    cache = module.new_cache(2, 10)
    module(torch.randn(2, 8, 24), cache=cache, new_lens_B=torch.tensor([3, 5]))
    module(torch.randn(2, 5, 24), cache=cache)
    with pytest.raises(ConfigError, match=r"the cache holds 10 tokens and 11 are needed"):
        module(torch.randn(2, 1, 24), cache=cache)


def test_cache_and_documents_exclude_each_other():
    module = make(**attention_args("tiny"))
    with pytest.raises(ConfigError, match="either cache or cu_doc_lens"):
        module(torch.randn(1, 8, 24), cache=module.new_cache(1, 8), cu_doc_lens=torch.tensor([0, 8]))


def test_cache_is_barely_larger_than_a_dense_one():
    module = NSAAttention(64, 12, 2, 64, 64, **GEOMETRIES["seed"])
    length = 65_536
    dense = 2 * length * 2 * 64 * 4
    assert module.new_cache(1, length).n_bytes() / dense < 1.08


def test_cached_forward_keeps_no_graph():
    module = make(**attention_args("tiny"))
    assert not module(torch.randn(1, 8, 24, requires_grad=True), cache=module.new_cache(1, 8)).requires_grad
