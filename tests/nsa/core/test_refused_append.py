"""A refused append leaves the cache as it was, bit for bit, whatever came before it; what fits is never refused."""

import random

import pytest
import torch

from nsa.core.cache_pages import PagedSlots
from nsa.core.nsa_attention import NSAAttention
from nsa.errors import ConfigError, KernelUnavailable, NSAError
from tests.backends import RUN_HERE
from tests.shapes import attention_args

MAX_LEN, BATCH, DIM = 45, 3, 24
KINDS = {"nsa": {}, "nsa in two levels": dict(coarse_block=4, n_coarse=3), "merged": {}, "dense": {}, "window": {}}


def module_of(kind, kv, backend):
    torch.manual_seed(0)
    args = attention_args("tiny", (6, 2), dim=DIM, kv=kv, kernels=backend, **KINDS[kind])
    return NSAAttention(**args, kind=kind.split()[0]).requires_grad_(False)


def state(cache):
    """Content of a cache without the spare slots, which are never read."""
    table = cache.page_table
    slots = []
    for x in cache._all_slots():
        contents = x.data.clone()
        (contents[:, table.spare] if isinstance(x, PagedSlots) else contents[:, :, x.n]).zero_()
        slots.append(contents)
    counters = cache.length_B, cache.n_compressed_B, cache._highest_B, table.table_BP
    return [x.clone() for x in (*slots, *counters)], (
        [list(row) for row in table._rows], list(table._users), list(table._free), table.in_order,
        cache._longest, cache._headroom,
    )  # fmt: skip


def same(before, after):
    return before[1] == after[1] and all(torch.equal(a, b) for a, b in zip(before[0], after[0], strict=True))


@pytest.mark.parametrize("backend", RUN_HERE)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kv", ["shared", "per_branch"])
@pytest.mark.parametrize("pages", [None, 11])
def test_a_refused_append_changes_nothing(kind, kv, backend, pages):
    module, choice = module_of(kind, kv, backend), random.Random(0)
    cache = module.new_cache(BATCH, MAX_LEN, rewind=4, pages=pages)
    n_refused = n_padded = 0
    for _ in range(60):
        lengths = cache.length_B.tolist()
        step = choice.choice(["append"] * 6 + ["crop", "reorder", "reset", "shape", "device", "lengths"])
        n = choice.choice([1, 1, 2, 5, 9, 20])
        x = torch.randn(BATCH, n, DIM)
        real = [choice.randint(0, n) for _ in range(BATCH)] if choice.random() < 0.6 else [n] * BATCH
        real = [min(r, max(0, MAX_LEN - had)) for r, had in zip(real, lengths, strict=True)] if n % 2 else real
        before = state(cache)
        try:
            if step == "append":
                padded = None if real == [n] * BATCH else torch.tensor(real)
                n_padded += padded is not None and max(had + n for had in lengths) > MAX_LEN
                out = module(x, cache=cache, new_lens_B=padded)
                assert cache.length_B.tolist() == [had + r for had, r in zip(lengths, real, strict=True)]
                assert all(out[row, :r].isfinite().all() for row, r in enumerate(real))
            elif step == "crop":
                cache.crop([max(0, had - choice.randint(0, 6)) for had in lengths])
            elif step == "reorder":
                cache.reorder([choice.randrange(BATCH) for _ in range(BATCH)])
            elif step == "reset":
                cache.reset([choice.randrange(BATCH)])
            else:
                new = module.project(x, module.rotary.tables(cache.positions(n)))[1]
                bad, lens = new, None
                if step == "shape":
                    bad = new._replace(v_win=new.v_win[..., 1:])
                elif step == "device":
                    bad = new._replace(k_win=new.k_win.to("meta"))
                else:
                    lens = torch.tensor([n + 1, 0, 0])
                q = torch.randn(BATCH, n, 2, 3, 8)
                with pytest.raises(ConfigError):
                    cache.append(
                        bad, lens, module.compress, module._decoder(cache, q) if kind in ("nsa", "merged") else None
                    )
                assert same(before, state(cache))
        except NSAError:
            n_refused += step == "append"
            assert same(before, state(cache)), step
            if step == "append":  # for a reason
                over = max(had + r for had, r in zip(lengths, real, strict=True)) > MAX_LEN
                assert over or pages is not None
    assert n_refused
    assert n_padded


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.skipif("triton" in RUN_HERE, reason="Triton's backend can run")
def test_a_backend_that_cannot_run_appends_nothing(kind):
    module = module_of(kind, "shared", "triton")
    cache = module.new_cache(1, MAX_LEN)
    before = state(cache)
    for n in (1, 5):
        with pytest.raises(KernelUnavailable):
            module(torch.randn(1, n, DIM), cache=cache)
        assert same(before, state(cache))


@pytest.mark.parametrize("backend", RUN_HERE)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pages", [None, 60])
def test_padding_far_past_the_tokens_is_taken(kind, backend, pages):
    """Reads only the pages of real tokens of a reordered or paged cache: padding stands past them."""
    module, x = module_of(kind, "shared", backend), torch.randn(BATCH, 90, DIM)
    rows, lengths = [2, 0, 2], torch.tensor([1, 4, 0])
    cache = module.new_cache(BATCH, 96, pages=pages)
    module(x[:, :7], cache=cache)
    cache.reorder(rows)
    got = module(x, cache=cache, new_lens_B=lengths)
    assert cache.length_B.tolist() == [8, 11, 7]
    for row, (old, n) in enumerate(zip(rows, lengths.tolist(), strict=True)):
        whole = torch.cat([x[old : old + 1, :7], x[row : row + 1, :n]], 1)
        torch.testing.assert_close(got[row : row + 1, :n], module(whole)[:, 7:], atol=1e-5, rtol=1e-5)
