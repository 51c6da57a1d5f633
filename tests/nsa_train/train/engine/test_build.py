"""Parameters with weight decay: matrices, and nothing that is a bias, a norm or an embedding."""

import itertools

import pytest
import torch

from nsa_train.config.model_sections import ModelConfig, SparseAttentionConfig
from nsa_train.config.schema import RunConfig, TrainConfig
from nsa_train.train.distributed import RankInfo
from nsa_train.train.engine.build import build_train_module
from tests.attention_options import GATES, GATES_PER, PHIS, PHIS_WITH_POS_EMB

BLOCK = {
    "attention_norm.weight": False,
    "attention.w_q.weight": True,
    "attention.w_k.weight": True,
    "attention.w_v.weight": True,
    "attention.gates.proj.weight": True,
    "attention.gates.proj.bias": False,
    "attention.w_out.weight": True,
    "feed_forward_norm.weight": False,
    "feed_forward.w1.weight": True,
    "feed_forward.w2.weight": True,
    "feed_forward.w3.weight": True,
}
MODEL = {"embeddings.weight": False, "lm_head.norm.weight": False, "lm_head.w_out.weight": True}
PHI = {
    "avg": {},
    "weighted": {"w_place": False},
    "softmax": {"w_score": False, "w_square": False},
    "linear": {"w_block": True},
    "mlp": {"w_in": True, "b_in": False, "w_out": True},
}
VARIANTS = [
    dict(phi=phi, phi_pos_emb=pos_emb, gate=gate, gate_per=per)
    for phi, pos_emb, gate, per in itertools.product(PHI, (False, True), GATES, GATES_PER)
    if not pos_emb or phi in PHIS_WITH_POS_EMB
]


OPTIONAL = {
    "qk_norm": ("q_norm.weight", "k_norm.weight"),
    "qkv_bias": ("w_q.bias", "w_k.bias", "w_v.bias"),
    "attention_out_bias": ("w_out.bias",),
}


def expected(phi: str, pos_emb: bool, options: tuple[str, ...] = ()) -> dict[str, bool]:
    of_phi = PHI[phi] | ({"pos_emb": False} if pos_emb else {})
    block = BLOCK | {f"attention.phi_{s}.{name}": decayed for s in "kv" for name, decayed in of_phi.items()}
    block |= {f"attention.{name}": False for option in options for name in OPTIONAL[option]}
    return MODEL | {f"blocks.{i}.{name}": decayed for i in range(2) for name, decayed in block.items()}


def test_every_operator_is_listed():
    assert tuple(PHI) == PHIS


@pytest.mark.parametrize("nsa", VARIANTS, ids=lambda nsa: "-".join(map(str, nsa.values())))
def test_every_parameter_is_in_its_group(nsa):
    assert groups(nsa) == expected(nsa["phi"], nsa["phi_pos_emb"])


@pytest.mark.parametrize("options", [(option,) for option in OPTIONAL] + [tuple(OPTIONAL)], ids="-".join)
def test_optional_norms_and_biases_are_not_decayed(options):
    assert groups({"kv": "shared"}, **dict.fromkeys(options, True)) == expected("softmax", False, options)


def groups(nsa: dict, **model) -> dict[str, bool]:
    """Parameter name → whether weight decay reaches it."""
    config = RunConfig(
        model=ModelConfig(dim=16, n_layers=2, n_heads=2, n_kv_groups=1, d_k=4, d_v=4, ffn_dim=16, **model),
        nsa=SparseAttentionConfig(l=4, d=2, l_sel=4, n_sel=3, w=4, **nsa),
        train=TrainConfig(seq_len=16, weight_decay=0.1),
    )
    module = build_train_module(config, 32, RankInfo(), torch.device("cpu"))
    decay = {id(p): group["weight_decay"] for group in module.optim.param_groups for p in group["params"]}
    assert set(decay.values()) <= {0.0, 0.1}
    return {name: decay[id(p)] == 0.1 for name, p in module.model.named_parameters()}
