"""Initial weights: what is drawn, with which standard deviation, and what does not depend on it."""

import math

import pytest
import torch
from torch import nn

from nsa.core.init import init_weights
from nsa.core.nsa_attention import NSAAttention
from nsa.errors import ConfigError
from nsa.model.llama_block_nsa import LlamaBlockNSA
from nsa.model.transformer import NSATransformer
from tests.attention_options import GATES_PER
from tests.initial_weights import RAISED, require_raised
from tests.shapes import attention_args

LEARNED = [
    dict(phi="avg"),
    dict(phi="weighted"),
    dict(phi="softmax"),
    dict(phi="linear", phi_pos_emb=True, bias=True),
    dict(phi="mlp", phi_pos_emb=True),
]


def transformer(**changes) -> NSATransformer:
    torch.manual_seed(3)
    return NSATransformer(50, n_layers=2, **attention_args("tiny", **changes))


def test_the_default_draws_normal_weights_of_0_02_module_by_module():
    model = transformer()
    torch.manual_seed(5)
    init_weights(model, 2)
    torch.manual_seed(5)
    drawn = 0
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            std = 0.02 / 2 if name.endswith(("attention.w_out", "feed_forward.w2")) else 0.02
            std = 0.001 if name.endswith("gates.proj") else std
            assert torch.equal(module.weight, torch.empty_like(module.weight).normal_(std=std)), name
            drawn += 1
    assert drawn == 2 + 2 * 8


@pytest.mark.parametrize("options", LEARNED, ids=str)
def test_the_standard_deviation_reaches_every_drawn_weight(options):
    require_raised(transformer(**options), transformer(**options, init_std=RAISED))
    for part in (LlamaBlockNSA, NSAAttention):
        modules = []
        for change in ({}, {"init_std": RAISED}):
            torch.manual_seed(4)
            modules.append(nn.ModuleDict({"attention": part(**attention_args("tiny", **options, **change))}))
        require_raised(*modules)


@pytest.mark.parametrize("std", [0, 0.0, -0.02, math.nan, math.inf])
@pytest.mark.parametrize("constructor", [NSAAttention, LlamaBlockNSA, transformer])
def test_an_impossible_standard_deviation_is_refused(constructor, std):
    args = dict(init_std=std) if constructor is transformer else attention_args("tiny", init_std=std)
    with pytest.raises(ConfigError, match=rf"init_std \({std}\)"):
        constructor(**args)


@pytest.mark.parametrize("per", GATES_PER)
def test_the_sliding_gate_starts_at_its_option(per):
    attention = NSAAttention(**attention_args("tiny", gate_per=per, sliding_gate_init=-3.0))
    biases = attention.gates.proj.bias.unflatten(0, (-1, 3))
    assert (biases == torch.tensor([0.0, 0.0, -3.0])).all()
    weights = attention.gates(torch.randn(2, 5, attention.dim)).mean((0, 1, 2, 3))
    share = math.exp(-3) / (2 + math.exp(-3))
    assert weights.tolist() == pytest.approx([(1 - share) / 2, (1 - share) / 2, share], abs=2e-3)


@pytest.mark.parametrize("gate_init", [math.nan, math.inf])
def test_a_start_of_the_sliding_gate_that_is_not_finite_is_refused(gate_init):
    with pytest.raises(ConfigError, match="sliding_gate_init"):
        NSAAttention(**attention_args("tiny", sliding_gate_init=gate_init))


def test_a_layer_without_a_window_has_no_gate_for_it():
    layer = NSAAttention(**attention_args("tiny", sliding_gate_init=-3.0), kind="global")
    assert not layer.gates.proj.bias.any()
