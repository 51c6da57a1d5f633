"""Reads are counted from what kernels were given, predicted by a formula, and observed through gradients."""

import pytest
import torch

from nsa.core.nsa_attention import NSAAttention
from nsa.core.probe import probing
from nsa.geometry import Geometry
from tests.shapes import GEOMETRIES, attention_args


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_formula_counts_what_a_loop_counts(geometry):
    g = Geometry(**GEOMETRIES[geometry])
    total = dict(sliding=0, compressed=0, selected=0)
    for t in range(1500):
        blocks = sorted({0, t // g.l_sel, max(0, t // g.l_sel - 1)} | set(range(t // g.l_sel + 1)))
        local = {0, t // g.l_sel, max(0, t // g.l_sel - 1)}
        chosen = sorted(local | set([j for j in blocks if j not in local][: g.n_sel - len(local)]))
        reads = dict(
            sliding=len([i for i in range(t + 1) if t - i < g.w]),
            compressed=len([c for c in range(t + 1) if c * g.d + g.l <= t + 1]),
            selected=len([i for i in range(t + 1) if i // g.l_sel in chosen]),
        )
        assert g.reads(t + 1) == sum(reads.values()), t
        total = {branch: total[branch] + reads[branch] for branch in total}
        if t in (0, g.l, 777, 1499):
            assert g.total_reads(t + 1) == total, t


def test_a_token_at_64k_reads_about_5600_keys():
    assert Geometry(**GEOMETRIES["seed"]).reads(64_000) == 512 + 3999 + 1024


@pytest.mark.parametrize("geometry", ["tiny", "odd", "showcase"])
def test_predicted_and_counted_reads_agree_whole_packed_and_cached(geometry):
    module = NSAAttention(**attention_args(geometry))
    g = module.geometry
    x = torch.randn(2, 150, 24)
    cu = torch.tensor([0, 20, 150, 300], dtype=torch.int32)

    def figures(**kwargs):
        with probing(module) as probes:
            module(kwargs.pop("x", x), **kwargs)
        return probes[""].figures

    whole = 2 * sum(g.reads(t + 1) for t in range(150))
    packed = sum(g.reads(t + 1) for n in (20, 130, 150) for t in range(n))
    assert figures()["reads_pred"] == figures()["reads_act_total"] == whole
    assert figures(cu_doc_lens=cu)["reads_pred"] == figures(cu_doc_lens=cu)["reads_act_total"] == packed
    cache = module.new_cache(2, 150)
    total = 0
    for part in x.split([100, 30, *[1] * 20], 1):
        f = figures(x=part, cache=cache)
        assert f["reads_pred"] == f["reads_act_total"]
        total += int(f["reads_pred"])
    assert total == whole


def test_keys_that_get_gradient_are_the_keys_counted():
    """What a query really reads, observed: the tokens of each branch's stream that its output moves with."""
    module = NSAAttention(**attention_args("tiny", (1, 1), d_k=4, d_v=4))
    g = module.geometry
    for t in (0, 3, 7, 20, 47, 99):
        x = torch.randn(1, t + 1, 24)
        streams = {}
        lay_out = module._lay_out

        def spy(new, layout, lay_out=lay_out, streams=streams):
            keys = lay_out(new, layout)
            for name, key in zip(("compressed", "selected", "sliding"), keys, strict=True):
                key.v.retain_grad() if key.v.requires_grad else None
                streams[name] = key.v
            return keys

        module._lay_out = spy
        module(x)[0, t].sum().backward()
        module._lay_out = lay_out
        # unbind makes the raw values views; their gradients are kept all the same
        read = sum(int((v.grad.abs().sum(-1) > 0).sum()) for v in streams.values() if v.grad is not None)
        assert read == g.reads(t + 1), t
