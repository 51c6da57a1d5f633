"""Whole, in chunks, token by token, rows of different lengths: the same output, and a cache no larger than promised."""

import copy

import pytest
import torch

from nsa.core.cache_pages import KeySlots
from nsa.core.nsa_attention import NSAAttention
from nsa.errors import ConfigError
from tests.attention_options import PHIS
from tests.covering_cases import each_pair, each_value
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


VARIANTS = [
    dict(),
    dict(phi="mlp", phi_pos_emb=True),
    dict(kv="shared"),
    dict(kv="shared_keys", phi="linear"),
    dict(kv="shared", phi="weighted"),
    dict(kv="shared", phi="softmax"),
    dict(kv="shared", phi="linear", qk_norm=True, bias=True, out_bias=True),
]


@pytest.mark.parametrize(
    ("changes", "geometry", "sizes"),
    each_pair(
        [*VARIANTS, dict(phi="linear", rope_compressed="after")],
        ["tiny", "no_overlap", "long_blocks", "odd", "showcase"],
        [[1], [7], [64], [1000], [3, 1, 50, 1, 1, 9]],
    ),
    ids=str,
)
def test_chunks_equal_the_whole(geometry, sizes, changes):
    module = make(**attention_args(geometry, **changes))
    x = torch.randn(2, 211, 24)
    with torch.no_grad():
        got, cache = in_chunks(module, x, sizes)
        torch.testing.assert_close(got, module(x), atol=2e-5, rtol=1e-5)
    assert cache.length_B.tolist() == [211, 211]


@pytest.mark.parametrize(
    ("length", "sizes"),
    [  # token by token for every change where more blocks are there than are selected, from the first one on at night
        *each_value([2050, 2047], [[7], [64], [1000], [1980, *[1] * 32]]),
        *(pytest.param(length, [1], marks=pytest.mark.nightly) for length in (2050, 2047)),
    ],
    ids=lambda value: str(value)[:20],
)
def test_chunks_equal_the_whole_at_the_base_sizes(length, sizes):
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


def test_a_copied_cache_is_independent():
    """Copies as beam search does: preparations for the tensors of the first cache must not be used for the copy."""
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
    write = KeySlots.write

    def spy(self, slot_BS, keep_BS, new):
        written.extend((slot_BS[b][keep_BS[b]], self.n) for b in range(len(slot_BS)))
        write(self, slot_BS, keep_BS, new)

    monkeypatch.setattr(KeySlots, "write", spy)
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
    with pytest.raises(ConfigError, match="max_len=11"):
        module(torch.randn(2, 1, 24), cache=cache)


def test_cache_and_documents_exclude_each_other():
    module = make(**attention_args("tiny"))
    with pytest.raises(ConfigError, match="cu_doc_lens"):
        module(torch.randn(1, 8, 24), cache=module.new_cache(1, 8), cu_doc_lens=torch.tensor([0, 8]))


def test_cache_is_barely_larger_than_a_dense_one():
    module = NSAAttention(64, 12, 2, 64, 64, **GEOMETRIES["seed"])
    length = 65_536
    dense = 2 * length * 2 * 64 * 4
    assert module.new_cache(1, length).n_bytes() / dense < 1.08


def test_cached_forward_keeps_no_graph():
    module = make(**attention_args("tiny"))
    assert not module(torch.randn(1, 8, 24, requires_grad=True), cache=module.new_cache(1, 8)).requires_grad


def test_shared_keys_are_stored_once():
    kinds = (attention_args("seed", (12, 2), kv=kv) for kv in ("per_branch", "shared"))
    apart, together = (make(**args).new_cache(1, 2048).n_bytes() for args in kinds)
    per_token = 2 * (8 + 6) * 4
    saved = apart - together
    assert saved == (512 + 32 + 2) * per_token  # window, tail, and their spare slots


def test_a_cache_of_the_other_kind_is_refused():
    shared, apart = (make(**attention_args("tiny", kv=kv)) for kv in ("shared", "per_branch"))
    for module, other in ((shared, apart), (apart, shared)):
        with pytest.raises(ConfigError, match="shared streams"):
            module(torch.randn(1, 1, 24), cache=other.new_cache(1, 8))


# Reset, reorder, crop


def follow(module, cache, x_BSD, begin: list[int], n: int) -> torch.Tensor:
    """Outputs of the next n tokens of every row, in a chunk and then one by one."""
    rows = [x_BSD[b, at : at + n] for b, at in enumerate(begin)]
    new = torch.stack(rows)
    parts = [module(part, cache=cache) for part in new.split([n // 2, *[1] * (n - n // 2)], 1)]
    return torch.cat(parts, 1)


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
@pytest.mark.parametrize("backend", ["auto", "portable"])
def test_a_reset_cache_equals_a_new_one(changes, backend):
    module = make(**attention_args("tiny", **changes), kernels=backend)
    cache = module.new_cache(2, 80, rewind=3)
    with torch.no_grad():
        for length in (70, 33):
            x = torch.randn(2, 60, 24)
            module(torch.randn(2, length, 24), cache=cache)
            module(torch.randn(2, 1, 24), cache=cache)
            cache.reset()
            assert cache.length_B.tolist() == [0, 0]
            torch.testing.assert_close(follow(module, cache, x, [0, 0], 40), module(x)[:, :40], atol=1e-5, rtol=1e-5)
            cache.reset()


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
@pytest.mark.parametrize("backend", ["auto", "portable"])
def test_reordered_rows_continue_their_sequences(changes, backend):
    """Reorders as beam search does: rows of different lengths, one of them twice, between steps of a prepared
    decoder."""
    module = make(**attention_args("tiny", **changes), kernels=backend)
    lengths, order = torch.tensor([50, 9, 31]), [2, 0, 2]
    x = torch.randn(3, 90, 24)
    cache = module.new_cache(3, 90, rewind=5)
    with torch.no_grad():
        module(x[:, :50], cache=cache, new_lens_B=lengths)
        before = [int(n) + 1 for n in lengths]
        module(torch.stack([x[b, n - 1] for b, n in enumerate(before)])[:, None], cache=cache)
        cache.reorder(order)
        x, begin = x[order], [before[row] for row in order]
        x[2, begin[2] :] += 1  # the twins part
        got = follow(module, cache, x, begin, 20)
        assert cache.length_B.tolist() == [n + 20 for n in begin]
        for b, at in enumerate(begin):
            want = module(x[b : b + 1, : at + 20])[0, at:]
            torch.testing.assert_close(got[b], want, atol=1e-5, rtol=1e-5)
        cache.crop(-5)
        begin = [at + 15 for at in begin]
        got = follow(module, cache, x, begin, 5)
        for b, at in enumerate(begin):
            torch.testing.assert_close(got[b], module(x[b : b + 1, : at + 5])[0, at:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rows", [[0], [0, 1, 2], [0, 2], [-1, 0], [0.0, 1.0]], ids=str)
def test_invalid_row_numbers_are_refused(rows):
    with pytest.raises(ConfigError, match="reorder"):
        make(**attention_args("tiny")).new_cache(2, 8).reorder(rows)


@pytest.mark.parametrize(
    ("backend", "geometry", "changes"),
    each_value(["auto", "portable"], ["tiny", "no_overlap", "long_blocks", "odd"], VARIANTS),
    ids=str,
)
def test_speculative_decoding_removes_rejected_tokens(backend, geometry, changes):
    """Drafts are appended, some rejected, per row, again and again: what follows equals the whole."""
    module = make(**attention_args(geometry, **changes), kernels=backend)
    x = torch.randn(2, 330, 24)
    cache = module.new_cache(2, 330, rewind=9)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        want = module(x)
        module(x[:, :180], cache=cache)
        at = [180, 180]
        for step in range(12):
            n = int(torch.randint(1, 10, (), generator=generator))
            drafts = torch.stack(
                [torch.cat((x[b, t : t + n - n // 2], torch.randn(n // 2, 24))) for b, t in enumerate(at)]
            )
            parts = drafts.split(1, 1) if step % 2 else (drafts,)
            out = torch.cat([module(part, cache=cache) for part in parts], 1)
            good = [int(torch.randint(0, n - n // 2 + 1, (), generator=generator)) for _ in at]
            for b, t in enumerate(at):
                torch.testing.assert_close(out[b, : n - n // 2], want[b, t : t + n - n // 2], atol=2e-5, rtol=1e-5)
            at = [t + accepted for t, accepted in zip(at, good, strict=True)]
            cache.crop(at)
            assert cache.length_B.tolist() == at
        got = follow(module, cache, x, at, 30)
        for b, t in enumerate(at):
            torch.testing.assert_close(got[b], want[b, t : t + 30], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("length", [0, 5, 100, 159])
@pytest.mark.parametrize("phi", PHIS)
def test_shared_keys_can_be_cropped_to_any_length_without_copies(length, phi):
    """Uses rope_compressed=before; after it, the compressed branch's keys are in a ring of their own."""
    module = make(**attention_args("tiny", kv="shared", phi=phi))
    x = torch.randn(1, 200, 24)
    cache = module.new_cache(1, 200)
    with torch.no_grad():
        module(x[:, :160], cache=cache)
        if module.rope_compressed == "after" and length not in (0, 159):
            with pytest.raises(ConfigError, match="rewind"):
                cache.crop(length)
            return
        cache.crop(length)
        torch.testing.assert_close(
            follow(module, cache, x, [length], 30), module(x)[:, length : length + 30], atol=1e-5, rtol=1e-5
        )


def test_what_a_ring_has_overwritten_cannot_be_cropped_and_nothing_changes():
    module = make(**attention_args("tiny"))  # w = 12, l = 8, d = 4
    x = torch.randn(2, 60, 24)
    cache = module.new_cache(2, 60)
    with torch.no_grad():
        want = module(x)
        module(x[:, :11], cache=cache)
        cache.crop(9)  # the rings have lost nothing that is needed: the tail's last 8 tokens begin at 3
        torch.testing.assert_close(follow(module, cache, x, [9, 9], 20), want[:, 9:29], atol=1e-5, rtol=1e-5)
        with pytest.raises(ConfigError, match="rewind=0"):
            cache.crop([29, 28])
        assert cache.length_B.tolist() == [29, 29]
        cache.crop(40)  # nothing to remove
        torch.testing.assert_close(follow(module, cache, x, [29, 29], 9), want[:, 29:38], atol=1e-5, rtol=1e-5)
        cache.crop([38, 0])
        assert cache.length_B.tolist() == [38, 0]
        got = follow(module, cache, x, [38, 0], 10)
        torch.testing.assert_close(got[0], want[0, 38:48], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(got[1], want[1, :10], atol=1e-5, rtol=1e-5)


def test_rewinding_twice_does_not_exceed_the_limit():
    module = make(**attention_args("tiny"))
    x = torch.randn(1, 60, 24)
    cache = module.new_cache(1, 60, rewind=4)
    with torch.no_grad():
        module(x[:, :40], cache=cache)
        cache.crop(-3)
        with pytest.raises(ConfigError, match="rewind=4"):
            cache.crop(-2)
        cache.crop(-1)
        module(x[:, 36:40], cache=cache)
        module(x[:, 40:44], cache=cache)
        cache.crop(-4)
        torch.testing.assert_close(follow(module, cache, x, [40], 10), module(x)[:, 40:50], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("length", [[1], [1, 2, 3], 1.5, "3"], ids=str)
def test_invalid_lengths_are_refused(length):
    with pytest.raises(ConfigError, match="crop"):
        make(**attention_args("tiny")).new_cache(2, 8).crop(length)


def test_a_cache_cannot_be_made_with_a_negative_rewind():
    with pytest.raises(ConfigError, match="rewind"):
        make(**attention_args("tiny")).new_cache(2, 8, rewind=-1)


@pytest.mark.parametrize("backend", ["portable", "auto"])
@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_a_grown_cache_continues_its_sequences(changes, backend):
    """Longer, with a longer rewind, or both; at lengths before and after the rings are full, with a decoder too."""
    module = make(**attention_args("tiny", **changes), kernels=backend)
    x = torch.randn(2, 90, 24)
    with torch.no_grad():
        want = module(x)
        cache, at = module.new_cache(2, 8), 0
        for n_new, grow in ((7, dict(max_len=30)), (1, dict(rewind=3)), (20, dict(max_len=90, rewind=6)), (1, {})):
            got = module(x[:, at : at + n_new], cache=cache)
            torch.testing.assert_close(got, want[:, at : at + n_new], atol=1e-5, rtol=1e-5)
            at, cache = at + n_new, cache.grown(**grow)
        assert (cache.max_len, cache.rewind) == (90, 6)
        for _ in range(at, 90):
            module(torch.randn(2, 4, 24), cache=cache)  # rejected
            cache.crop(-4)
            got = module(x[:, at : at + 1], cache=cache)
            torch.testing.assert_close(got, want[:, at : at + 1], atol=1e-5, rtol=1e-5)
            at += 1
            if at > 86:
                break


def test_a_grown_rewind_does_not_reach_what_was_overwritten_before():
    module = make(**attention_args("tiny"))
    x = torch.randn(1, 60, 24)
    with torch.no_grad():
        small = module.new_cache(1, 60)
        module(x[:, :40], cache=small)
        cache = small.grown(rewind=8)
        with pytest.raises(ConfigError, match="cannot be cropped"):
            cache.crop(-3)
        module(x[:, 40:45], cache=cache)
        with pytest.raises(ConfigError, match="cannot be cropped"):
            cache.crop(-6)
        cache.crop(-5)
        torch.testing.assert_close(module(x[:, 40:], cache=cache), module(x)[:, 40:], atol=1e-5, rtol=1e-5)
        assert small.length_B.tolist() == [40]


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_picked_rows_continue_their_sequences(changes):
    module = make(**attention_args("tiny", **changes))
    x, lengths, rows = torch.randn(3, 60, 24), torch.tensor([40, 7, 23]), [2, 0, 0, 1, 2]
    with torch.no_grad():
        cache = module.new_cache(3, 60, rewind=2)
        module(x[:, :40], cache=cache, new_lens_B=lengths)
        cache = cache.picked(rows)
        assert cache.length_B.tolist() == lengths[rows].tolist()
        new = torch.randn(5, 9, 24)
        got = torch.cat([module(new[:, :8], cache=cache), module(new[:, 8:], cache=cache)], 1)
        for i, row in enumerate(rows):
            whole = torch.cat([x[row, : lengths[row]], new[i]])[None]
            torch.testing.assert_close(got[i], module(whole)[0, lengths[row] :], atol=1e-5, rtol=1e-5)


def test_rows_to_pick_are_numbers_of_rows():
    cache = make(**attention_args("tiny")).new_cache(2, 8)
    for rows in ([[0]], [0.0], [2], [-3]):
        with pytest.raises(ConfigError, match="picked"):
            cache.picked(rows)
