"""A cache whose rows take pages from a small pool equals one with all pages in order, bit for bit.

Random schedules of appends, crops, reordered rows and ended rows. Pages that no row has are NaN throughout: whoever
read one would have a NaN in its output.
"""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa.core.nsa_attention import NSAAttention
from nsa.errors import ConfigError
from tests.shapes import attention_args

BATCH, MAX_LEN, REWIND = 3, 64, 5
VARIANTS = [
    dict(),
    dict(phi="mlp"),
    dict(kv="shared"),
    dict(kv="shared", phi="linear"),
    dict(kv="shared", phi="weighted"),
    dict(kv="shared", phi="softmax"),
]


def make(backend="auto", **changes) -> NSAAttention:
    torch.manual_seed(0)
    module = NSAAttention(**attention_args("tiny", **changes), kernels=backend)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.3)
    return module.eval()


def poison(cache) -> None:
    """NaN in every page that no row has, and where padding is written to."""
    free = torch.tensor([*cache.page_table._free, cache.page_table.spare])
    for stream in (cache.selected, cache.compressed):
        for slots in stream.both:
            slots.data[:, free] = torch.nan


def n_pages_used(cache) -> int:
    return cache.page_table.n_pages - cache.page_table.n_free


steps = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.lists(st.integers(0, 9), min_size=BATCH, max_size=BATCH)),
        st.tuples(st.just("token"), st.just(None)),
        st.tuples(st.just("token"), st.just(None)),
        st.tuples(st.just("crop"), st.lists(st.integers(0, REWIND), min_size=BATCH, max_size=BATCH)),
        st.tuples(st.just("reorder"), st.lists(st.integers(0, BATCH - 1), min_size=BATCH, max_size=BATCH)),
        st.tuples(st.just("reset"), st.integers(0, BATCH - 1)),
    ),
    min_size=4,
    max_size=25,
)


def same_outputs(module, schedule, pages) -> None:
    """Two caches: a small pool, and one that has all pages in order and copies whole rows where they are reordered."""
    paged, whole = module.new_cache(BATCH, MAX_LEN, REWIND, pages), module.new_cache(BATCH, MAX_LEN, REWIND)
    generator = torch.Generator().manual_seed(0)
    removable = [0] * BATCH
    for what, given_ in schedule:
        lengths = whole.length_B.tolist()
        if what in ("append", "token"):
            new = [1] * BATCH if what == "token" else given_
            new = [min(n, MAX_LEN - had) for n, had in zip(new, lengths, strict=True)]
            if not max(new) or (what == "token" and not min(new)):
                continue
            x = torch.randn(BATCH, max(new), 24, generator=generator)
            new_lens = None if what == "token" else torch.tensor(new)
            poison(paged)
            got = unless_refused(module, x, paged, new_lens)
            if got is None:
                assert paged.length_B.tolist() == lengths
                continue
            want = module(x, cache=whole, new_lens_B=new_lens)
            for row, n in enumerate(new):
                assert torch.equal(got[row, :n], want[row, :n])
            removable = [min(REWIND, m + n) for m, n in zip(removable, new, strict=True)]
        elif what == "crop":
            n = [min(a, b) for a, b in zip(given_, removable, strict=True)]
            keep = [had - k for had, k in zip(lengths, n, strict=True)]
            for cache in (paged, whole):
                cache.crop(keep)
            removable = [m - k for m, k in zip(removable, n, strict=True)]
        elif what == "reorder":
            paged.reorder(given_)
            whole = rows_copied(module, whole, given_)
            removable = [removable[row] for row in given_]
        else:
            for cache in (paged, whole):
                cache.reset([given_])
            removable[given_] = 0
        assert torch.equal(paged.length_B, whole.length_B)
        assert torch.equal(paged.n_compressed_B, whole.n_compressed_B)
    paged.reset()
    assert n_pages_used(paged) == 0


def unless_refused(module, x, cache, new_lens):
    try:
        return module(x, cache=cache, new_lens_B=new_lens)
    except ConfigError as error:
        if "pages" in str(error):
            return None
        raise


def rows_copied(module, cache, order):
    """A cache with all pages in order whose row i is that cache's row order[i]."""
    copied = module.new_cache(BATCH, MAX_LEN, REWIND)
    assert cache.page_table.in_order
    for new, old in zip(copied._all_slots(), cache._all_slots(), strict=True):
        new.in_place().copy_(old.in_place()[order])
    for name in ("length_B", "n_compressed_B", "_highest_B"):
        getattr(copied, name).copy_(getattr(cache, name)[order])
    copied._longest = cache._longest
    return copied


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
@pytest.mark.parametrize("backend", ["auto", "portable"])
@settings(max_examples=12, deadline=None, derandomize=True)
@given(schedule=steps, pages=st.sampled_from([8, 14, 24]))
def test_random_schedules_equal_a_cache_with_all_pages_in_order(changes, backend, schedule, pages):
    with torch.no_grad():
        same_outputs(make(backend, **changes), schedule, pages)


def test_a_pool_that_has_run_out_refuses_and_nothing_changes():
    module = make()
    cache = module.new_cache(3, 64, pages=6)  # of 8 tokens
    x = torch.randn(3, 60, 24)
    with torch.no_grad():
        module(x[:, :15], cache=cache)  # two pages each
        before = copy.deepcopy(cache)
        with pytest.raises(ConfigError, match="pages"):
            module(x[:, 15:17], cache=cache)
        assert cache.length_B.tolist() == [15, 15, 15]
        for a, b in zip(cache._all_slots(), before._all_slots(), strict=True):
            assert torch.equal(a.data, b.data)
        cache.reset([1])  # its pages serve the others
        got = module(x[:, 15:17], cache=cache, new_lens_B=torch.tensor([2, 0, 2]))
        want = module(x)[:, 15:17]
        torch.testing.assert_close(got[[0, 2]], want[[0, 2]], atol=1e-5, rtol=1e-5)


def test_a_page_that_a_row_takes_holds_nothing_of_the_row_before():
    module, x = make(), torch.randn(1, 9, 24)
    cache = module.new_cache(1, 64, pages=3)  # of 8 tokens
    poison(cache)
    with torch.no_grad():
        module(x, cache=cache)
    pages = cache.page_table.table_BP[0, :2]
    for stream in (cache.selected, cache.compressed):
        for slots in stream.both:
            assert slots.data[:, pages].isfinite().all()


@pytest.mark.parametrize("pages", [None, 40])
def test_forked_rows_share_their_pages_until_they_diverge(pages):
    module = make()
    cache = module.new_cache(4, 80, pages=pages)
    x = torch.randn(1, 60, 24).expand(4, -1, -1).clone()
    x[:, 43:] = torch.randn(4, 17, 24)  # they complete a compressed block that began in a page they share
    with torch.no_grad():
        module(x[:, :43], cache=cache, new_lens_B=torch.tensor([43, 0, 0, 0]))
        cache.reorder([0, 0, 0, 0])
        assert len({tuple(row[:6]) for row in cache.page_table.table_BP.tolist()}) == 1
        got = torch.cat([module(x[:, t : t + 1], cache=cache) for t in range(43, 60)], 1)
        torch.testing.assert_close(got, module(x)[:, 43:], atol=1e-5, rtol=1e-5)
        tables = cache.page_table.table_BP.T.tolist()
        assert all(len(set(pages)) == 1 for pages in tables[:5])  # 40 tokens: never written again, never copied
        assert all(len(set(pages)) == 4 for pages in tables[5:7])


@pytest.mark.parametrize("pages", [None, 30])
def test_grown_and_picked_caches_of_reordered_rows_continue(pages):
    """Pages of such rows are in any order and shared; a cache with a pool keeps its pool."""
    module = make()
    x = torch.randn(3, 60, 24)
    with torch.no_grad():
        cache = module.new_cache(3, 40, pages=pages)
        module(x[:, :21], cache=cache, new_lens_B=torch.tensor([21, 9, 14]))
        cache.reorder([2, 0, 0])
        rows = torch.cat((x[2:, :14], x[2:, :7]), 1), x[:1, :21], x[:1, :21]
        new = torch.randn(4, 20, 24)
        for new_cache, order in ((cache.grown(max_len=60), [0, 1, 2]), (cache.picked([1, 0, 1, 2]), [1, 0, 1, 2])):
            got = torch.cat(
                [module(part, cache=new_cache) for part in new[: len(order), :15].split([6, *[1] * 9], 1)], 1
            )
            for i, row in enumerate(order):
                n = 14 if row == 0 else 21
                want = module(torch.cat((rows[row][:, :n], new[i : i + 1, :15]), 1))[0, n:]
                torch.testing.assert_close(got[i], want, atol=1e-5, rtol=1e-5)
            new_cache.reset()
            assert new_cache.page_table.n_free == (pages or 0)
        assert cache.length_B.tolist() == [14, 21, 21]


@pytest.mark.parametrize(("requests", "pages"), [(200, 12), pytest.param(2000, 16, marks=pytest.mark.nightly)])
def test_ended_requests_return_their_pages(requests, pages):
    """Requests of random lengths go through 4 rows and a pool that holds about half of what they could need."""
    module = make()
    cache = module.new_cache(4, 64, pages=pages)
    generator = torch.Generator().manual_seed(0)
    left, ended, refused = [0] * 4, 0, 0
    with torch.no_grad():
        while ended < requests:
            new = torch.randint(1, 9, (4,), generator=generator).clamp(max=64 - cache.length_B)
            try:
                module(torch.randn(4, int(new.max()), 24), cache=cache, new_lens_B=new)
                left = [n - 1 for n in left]
            except ConfigError:
                refused += 1
                left[int(cache.length_B.argmax())] = 0
            over = [row for row in range(4) if left[row] <= 0 or cache.length_B[row] >= 60]
            cache.reset(over)
            for row in over:
                left[row] = int(torch.randint(1, 8, (), generator=generator))
            ended += len(over)
        assert refused
        cache.reset(range(4))
    assert cache.page_table.n_free == pages


def test_a_page_number_outside_the_pool_is_refused_by_the_kernel():
    module = make("cpu")
    cache = module.new_cache(2, 64)
    with torch.no_grad():
        module(torch.randn(2, 40, 24), cache=cache)
        module(torch.randn(2, 1, 24), cache=cache)
        for page in (-1, 18, 2**30):
            original = cache.page_table.table_BP.clone()
            cache.page_table.table_BP[1, 2] = page
            with pytest.raises(ConfigError, match="page"):
                module(torch.randn(2, 1, 24), cache=cache)
            cache.page_table.table_BP.copy_(original)


@pytest.mark.parametrize("pages", [0, -1])
def test_a_pool_without_pages_is_refused(pages):
    with pytest.raises(ConfigError, match="pages"):
        make().new_cache(1, 8, pages=pages)


def test_invalid_rows_cannot_be_reset():
    with pytest.raises(ConfigError, match="reset"):
        make().new_cache(2, 8).reset([2])
