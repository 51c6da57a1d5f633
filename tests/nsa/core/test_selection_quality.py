"""Selection quality: mass of dense attention per block, hits and chance, against loops over single queries."""

import pytest
import torch

from nsa.core.branches import BranchKeys
from nsa.core.nsa_attention import NSAAttention
from nsa.core.probe import probing
from nsa.core.selection_quality import SelectionProbe, _block_mass, chance_of_block
from nsa.geometry import Geometry
from nsa.options import SELECTING_KINDS

GEOMETRY = Geometry(l=4, d=2, l_sel=4, n_sel=5, w=8)


def test_block_mass_is_that_of_dense_attention_within_the_document():
    torch.manual_seed(0)
    q, k = torch.randn(3, 2, 2, 8), torch.randn(20, 2, 8)
    pos, start = torch.tensor([0, 6, 9]), torch.tensor([0, 3, 10])
    mass = _block_mass(q, pos, start, k, 4, 0.5)
    for row in range(3):
        keys = k[start[row] : start[row] + pos[row] + 1]
        for group in range(2):
            share = (0.5 * q[row, group] @ keys[:, group].T).softmax(-1).sum(0)
            blocks = [float(part.sum()) for part in share.split(4)]
            torch.testing.assert_close(mass[row, group, : len(blocks)], torch.tensor(blocks))
            assert mass[row, group, len(blocks) :].abs().max() == 0


def probe_of(chosen: list[int], favourite: int, length: int = 40) -> SelectionProbe:
    """One query at the end of a row whose attention lies in one block, and which chose these blocks."""
    q = torch.zeros(1, length, 1, 1, 2)
    q[..., 0] = 1
    k = torch.zeros(1, length, 1, 2)
    k[0, favourite * 4 : favourite * 4 + 4, 0, 0] = 20
    idx = torch.tensor(chosen, dtype=torch.int32).expand(1, length, 1, -1)
    pos, zero = torch.arange(length)[None], torch.zeros(1, length, dtype=torch.int64)
    probe = SelectionProbe(every=length)
    probe.record_selection(q, idx, [BranchKeys(k, k, pos, zero)] * 3, GEOMETRY, 1.0, window=0)
    return probe


def test_a_chosen_block_with_the_largest_mass_is_a_hit():
    counts = probe_of([0, 3, 5, 8, 9], favourite=5).counts
    assert (counts.queries, counts.hits) == (1, 1)
    assert counts.mass_caught == pytest.approx(1, abs=1e-3)
    # Blocks 1 to 7 are free, two of them are taken.
    assert counts.expected_hits == pytest.approx(2 / 7)


def test_a_block_that_was_not_chosen_is_a_miss():
    counts = probe_of([0, 3, 4, 8, 9], favourite=5).counts
    assert (counts.queries, counts.hits) == (1, 0)
    assert counts.mass_caught == pytest.approx(0, abs=1e-3)


def test_blocks_that_are_always_chosen_do_not_count_as_hits():
    """The largest mass is in a forced block: the best of the others, here the first of equals, was not chosen."""
    counts = probe_of([0, 3, 4, 8, 9], favourite=9).counts
    assert counts.hits == 0
    assert counts.mass_caught == pytest.approx(1, abs=1e-3)


def test_queries_that_take_every_block_are_not_counted():
    assert probe_of([0, 1, 2, 3, 4], favourite=2, length=20).counts.queries == 0


@pytest.mark.parametrize("packed", [False, True])
def test_a_layer_reports_its_own_choices(packed):
    torch.manual_seed(0)
    layer = NSAAttention(32, 4, 2, 8, 8, l=4, d=2, l_sel=4, n_sel=5, w=8).eval()
    x = torch.randn(1, 96, 32)
    with torch.no_grad(), probing(layer, SelectionProbe) as probes:
        layer(x, cu_doc_lens=[0, 16, 96] if packed else None)
    (probe,) = probes.values()
    # Every 16th token, two groups; a query needs more than four blocks before its own to have a choice.
    first = [pos - 16 if packed and pos >= 16 else pos for pos in range(15, 96, 16)]
    assert probe.counts.queries == 2 * sum(pos // 4 - 2 > 2 for pos in first)
    assert 0 <= probe.counts.hits <= probe.counts.queries
    assert 0 < probe.counts.mass_caught < probe.counts.queries
    assert probe.chosen_BQGN.shape == (1, 1, 2, 5)


def test_choices_of_the_kept_queries_are_those_of_the_layer():
    idx = torch.randint(0, 9, (2, 40, 3, 5), dtype=torch.int32)
    q, k = torch.zeros(2, 40, 3, 1, 2), torch.zeros(2, 40, 3, 2)
    pos, zero = torch.arange(40).expand(2, 40), torch.zeros(2, 40, dtype=torch.int64)
    for keep in ([7, 39, 8], []):
        probe = SelectionProbe(every=40, keep=keep)
        probe.record_selection(q, idx, [BranchKeys(k, k, pos, zero)] * 3, GEOMETRY, 1.0, window=0)
        assert torch.equal(probe.chosen_BQGN, idx[:, keep])


def test_chance_of_a_block_is_that_of_a_random_choice_among_the_free_ones():
    for query in range(64):
        own = query // 4
        free = [block for block in range(own + 1) if block not in (0, own - 1, own)]
        for block in range(own + 1):
            counts = block in free and len(free) > 2  # five blocks, three of which are always chosen
            assert chance_of_block(query, block, 4, 5) == (pytest.approx(2 / len(free)) if counts else None)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", SELECTING_KINDS)
def test_the_whole_mass_is_divided_among_window_blocks_and_what_is_not_read(kind, packed):
    """Against loops over queries, groups and keys, from the layer's own projections."""
    torch.manual_seed(0)
    layer = NSAAttention(32, 4, 2, 8, 8, l=4, d=2, l_sel=4, n_sel=5, w=8, kv="shared", kind=kind).eval()
    x, ends = torch.randn(1, 96, 32) * 3, [0, 20, 96] if packed else [0, 96]
    with torch.no_grad(), probing(layer, lambda: SelectionProbe(every=16, keep=range(96))) as probes:
        layer(x, cu_doc_lens=ends if packed else None)
        q_BSGRK, streams = layer.project(x, layer.locate(x, cu_doc_lens=ends if packed else None).tables)
    (probe,) = probes.values()
    w, before = (0 if kind == "global" else 8), (8 if kind == "merged" else 0)
    sums, queries = dict.fromkeys(("window", "forced", "scored", "missed"), 0.0), 0
    for token in range(15, 96, 16):
        start = max(end for end in ends if end <= token)
        own = token - start
        last_block = (own - before) // 4  # of what may be chosen
        if last_block - 2 <= 2:
            continue
        for group in range(2):
            queries += 1
            chosen = set(probe.chosen_BQGN[0, token, group].tolist())
            scores = layer.scale * q_BSGRK[0, token, group] @ streams.k_sel[0, start : token + 1, group].T
            for place, mass in enumerate(scores.softmax(-1).mean(0).tolist()):
                block = place // 4
                forced = block == 0 or block > last_block - 2
                part = "window" if place > own - w else "missed" if block not in chosen else "scored"
                sums["forced" if part == "scored" and forced else part] += mass
    assert probe.counts.queries == queries
    for part in ("window", "forced", "scored"):
        assert getattr(probe.counts, f"{part}_mass") == pytest.approx(sums[part], rel=1e-4), part
    assert min(sums["scored"], sums["missed"]) > 0
    assert sum(sums.values()) == pytest.approx(queries, rel=1e-4)
