"""Gates of kind `tanh`: the layer starts as its selected branch alone, and all gates learn."""

import pytest
import torch
import torch.nn.functional as F

from nsa.core.nsa_attention import NSAAttention
from nsa.core.probe import probing
from nsa.model.transformer import NSATransformer
from tests.attention_options import GATES_PER

SIZES = dict(n_heads=4, n_kv_groups=2, d_k=8, d_v=6, l=8, d=4, l_sel=8, n_sel=4, w=12)
COVERED, DIM = 4 * 8, 24


def layer(kind="nsa", gate="tanh", dtype=torch.float32, **changes):
    torch.manual_seed(1)
    return NSAAttention(DIM, **SIZES, gate=gate, **{"kv": "shared", **changes}, init_std=0.3, kind=kind).to(dtype)


def inputs(length=COVERED, dtype=torch.float32):
    return torch.randn(2, length, DIM, generator=torch.Generator().manual_seed(2)).to(dtype)


def dense(module, x):
    q, streams = module.project(x, module.locate(x).tables)
    k, v = (each.transpose(1, 2).repeat_interleave(2, 1) for each in (streams.k_sel, streams.v_sel))
    out = F.scaled_dot_product_attention(q.flatten(2, 3).transpose(1, 2), k, v, is_causal=True, scale=module.scale)
    return module.w_out(out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("kind", ["nsa", "global"])
@pytest.mark.parametrize("per", GATES_PER)
def test_starts_as_dense_attention_up_to_the_blocks_it_can_choose(kind, per):
    module, x = layer(kind, gate_per=per), inputs(COVERED + 4)
    wrong_S = (module(x) - dense(module, x)).abs().amax((0, 2)) > 1e-5
    assert wrong_S.nonzero()[0].item() == COVERED
    cache = module.new_cache(2, COVERED)
    cached = torch.cat([module(x[:, t : t + 1], cache=cache) for t in range(COVERED)], 1)
    torch.testing.assert_close(cached, dense(module, x)[:, :COVERED], atol=1e-5, rtol=1e-5)


def test_gates_are_exactly_zero_one_zero_at_the_start_whatever_the_sliding_gates_bias():
    module = layer(sliding_gate_init=-3.0)
    assert not module.gates.proj.weight.any()
    assert not module.gates.proj.bias.any()
    gates = module.gates(inputs())
    assert torch.equal(gates, torch.tensor([0.0, 1.0, 0.0]).expand_as(gates))


def test_the_gates_gradient_is_no_smaller_than_that_of_equal_softmax_gates():
    def gradient(gate):
        module = layer(gate=gate, sliding_gate_init=0.0)
        module(inputs(COVERED * 3)).square().sum().backward()
        return module.gates.proj.weight.grad.unflatten(0, (-1, 3)).norm(dim=(0, 2))

    tanh, softmax = gradient("tanh"), gradient("softmax")
    assert (tanh > 0.5 * softmax).all()


def test_every_branch_takes_part_after_some_steps():
    torch.manual_seed(0)
    model = NSATransformer(64, 32, 2, **SIZES, gate="tanh", kv="shared")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.randint(64, (2, 96))
    losses = []
    for _ in range(20):
        losses.append(model.loss(ids, ids.roll(-1, 1)))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0] - 1
    for block in model.blocks:
        gates = block.attention.gates(torch.randn(1, 50, 32))
        assert (gates[..., [0, 2]].abs().mean((0, 1, 2, 3)) > 0.01).all()


def test_probes_record_shares_of_magnitudes_and_no_entropy():
    module = layer()
    with probing(module) as probes:
        module(inputs())
    (figures,) = (probe.figures for probe in probes.values())
    assert figures["gate_branch_shares"].tolist() == [0.0, 1.0, 0.0]
    assert not {"gate_entropy_mean", "gate_max_mean", "gate_collapse_frac"} & figures.keys()
    with torch.no_grad():
        module.gates.proj.bias.view(-1, 3).copy_(torch.tensor([-20.0, 0.0, 0.0]))
    with probing(module) as probes:
        module(inputs())
    (figures,) = (probe.figures for probe in probes.values())
    torch.testing.assert_close(figures["gate_branch_shares"], torch.tensor([0.5, 0.5, 0.0]))
