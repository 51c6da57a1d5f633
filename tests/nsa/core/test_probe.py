"""Figures of a probe; and reads: counted from kernel arguments, predicted by a formula, observed through gradients."""

import math

import pytest
import torch

from nsa.core.branches import BRANCH_ORDER, BranchKeys
from nsa.core.nsa_attention import NSAAttention
from nsa.core.probe import Probe, _gate_figures, probing
from nsa.geometry import Geometry
from nsa.model.transformer import NSATransformer
from tests.shapes import GEOMETRIES, attention_args


def figures(module, x):
    with probing(module) as probes:
        module(x)
    return probes[""].figures


def test_uniform_gates_have_entropy_ln_3_and_even_shares():
    module = NSAAttention(**attention_args("tiny"))
    torch.nn.init.zeros_(module.gates.proj.weight)
    f = figures(module, torch.randn(1, 50, 24))
    assert f["gate_entropy_mean"].item() == pytest.approx(math.log(3), abs=1e-6)
    assert f["gate_branch_shares"].tolist() == pytest.approx([1 / 3] * 3, abs=1e-6)
    assert f["gate_collapse_frac"] == 0


def test_collapsed_gates_are_reported_with_the_dominant_branch():
    module = NSAAttention(**attention_args("tiny", gate="softmax"))
    with torch.no_grad():
        module.gates.proj.bias.view(-1, 3)[:, 2] = 20.0
    f = figures(module, torch.randn(1, 50, 24))
    assert f["gate_collapse_frac"] == 1
    assert f["gate_entropy_mean"] < 0.01
    assert f["gate_max_mean"] > 0.99
    assert f["gate_branch_shares"].argmax() == 2


def test_a_gate_that_is_decided_for_half_of_the_tokens_has_not_collapsed():
    gates = torch.full((1, 40, 2, 2, 3), 1 / 3)
    gates[:, ::2, 0] = torch.tensor([1.0, 0.0, 0.0])  # both gates of group 0 decide for every other token
    gates[:, :, 1, 1] = torch.tensor([0.0, 0.0, 1.0])  # one gate of group 1 takes the window always
    assert _gate_figures(gates)["gate_collapse_frac"] == pytest.approx(1 / 4)


def test_sigmoid_gates_collapse_by_their_shares():
    module = NSAAttention(**attention_args("tiny", gate="sigmoid"))
    with torch.no_grad():
        module.gates.proj.weight.zero_()
        module.gates.proj.bias.fill_(-30.0)  # all shut, evenly
    assert figures(module, torch.randn(1, 20, 24))["gate_entropy_mean"].item() == pytest.approx(math.log(3), abs=1e-5)


def test_selection_figures_count_keys_and_unions():
    geometry = NSAAttention(**attention_args("tiny")).geometry  # l_sel 8, n_sel 4
    pos = torch.arange(32)[None]
    idx = torch.full((1, 32, 1, 4), -1, dtype=torch.int32)
    idx[0, :, 0, 0] = 0
    idx[0, 8:, 0, 1] = 1
    idx[0, 31, 0] = torch.tensor([0, 1, 2, 3])
    probe = Probe()
    keys = [BranchKeys(torch.zeros(1, 32, 1, 8), torch.zeros(1, 32, 1, 8), pos, torch.zeros_like(pos))] * 3
    probe.record(torch.full((1, 32, 1, 1, 3), 1 / 3), "softmax", idx, keys, geometry, BRANCH_ORDER, None)
    f = probe.figures
    expected = [min(t + 1, 8) + (min(t - 7, 8) if t >= 8 else 0) for t in range(31)] + [32]
    assert f["sel_k_mean"].item() == pytest.approx(sum(expected) / 32)
    assert f["sel_k_max"] == 32
    assert f["sel_pct_at_max"].item() == pytest.approx(1 / 32)
    assert f["sel_union_max"] == 4  # blocks 0..3 in the second tile of 16
    assert f["sel_union_mean"] == 3  # and blocks 0, 1 in the first


def test_figures_cost_nothing_unless_asked_for():
    module = NSAAttention(**attention_args("tiny"))
    x = torch.randn(1, 30, 24)
    assert module.probe is None
    with torch.profiler.profile() as without:
        module(x)
    with probing(module), torch.profiler.profile() as with_probe:
        module(x)
    assert module.probe is None
    count = {len(p.events()) for p in (without,)}.pop()
    module(x)
    assert len(with_probe.events()) > count


def test_every_layer_of_a_model_is_probed_and_figures_stay_on_the_device():
    model = NSATransformer(50, n_layers=3, **attention_args("tiny"))
    with probing(model) as probes:
        model(torch.randint(50, (1, 40)))
    assert list(probes) == [f"blocks.{i}.attention" for i in range(3)]
    for probe in probes.values():
        assert all(isinstance(value, torch.Tensor) and not value.requires_grad for value in probe.figures.values())


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
    """Observes what a query reads: the tokens of each branch's stream that its output depends on."""
    module = NSAAttention(**attention_args("tiny", (1, 1), d_k=4, d_v=4))
    g = module.geometry
    for t in (0, 3, 7, 20, 47, 99):
        x = torch.randn(1, t + 1, 24)
        streams = {}
        lay_out = module._lay_out

        def spy(*args, lay_out=lay_out, streams=streams):
            keys = lay_out(*args)
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
