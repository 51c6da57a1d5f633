"""Initial weights: what is drawn, with which standard deviation, and what does not depend on it."""

import math
from functools import partial

import pytest
import torch
from torch import nn

from nsa.core.init import init_weights
from nsa.core.layer_kinds import LAYER_KINDS
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


def layer(kind="nsa", **options) -> NSAAttention:
    return NSAAttention(**attention_args("tiny", **options), kind=kind)


MODULES = {
    **{kind: partial(layer, kind) for kind in LAYER_KINDS},
    **{str(options): partial(layer, **options) for options in (*LEARNED, dict(gate="tanh", qk_norm=True))},
    "block": partial(LlamaBlockNSA, **attention_args("tiny", init_std=0.05), ffn_bias=True),
    "model": partial(transformer, init_std=0.05),
    "tied model": partial(transformer, tie_embeddings=True),
    "model of kinds": partial(transformer, layers=["dense", "merged"]),
}


def reset(module: nn.Module, seed: int = 7) -> dict[str, torch.Tensor]:
    for parameter in module.parameters():
        nn.init.constant_(parameter, math.nan)
    torch.manual_seed(seed)
    module.reset_parameters()
    return module.state_dict()


@pytest.mark.parametrize("name", MODULES)
def test_a_module_made_on_the_meta_device_gets_the_values_of_one_made_with_values(name):
    torch.manual_seed(1)
    drawn, values = MODULES[name](), reset(MODULES[name]())
    with torch.device("meta"):
        empty = MODULES[name]()
    filled = reset(empty.to_empty(device="cpu"))
    assert filled.keys() == values.keys() == drawn.state_dict().keys()
    for key, value in values.items():
        assert torch.equal(filled[key], value), key
        own = drawn.state_dict()[key]
        assert value.isfinite().all(), key
        spread, expected = (x.double().std(correction=0).item() for x in (value, own))
        assert spread == pytest.approx(expected, rel=0.3, abs=1e-9), key
    assert len(list(empty.parameters())) == len(list(drawn.parameters()))


def test_a_reset_model_shares_the_start_of_its_kinds_with_one_of_nsa_alone():
    values, of_nsa = reset(transformer(layers=["dense", "window"])), reset(transformer())
    for key in ("embeddings.weight", "blocks.0.attention.w_q.weight", "blocks.1.attention.w_out.weight"):
        assert torch.equal(values[key], of_nsa[key]), key


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
