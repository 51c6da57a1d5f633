"""Settings of the attention beyond its sizes, as sections of a config: one at a time, and all together."""

from nsa.core.attention_config import CHOICES
from nsa.core.pooling import phis

PHIS, GATES, GATES_PER, KV_PROJECTIONS = (CHOICES[name] for name in ("phi", "gate", "gate_per", "kv"))
SELECTOR_BLOCKS = CHOICES["selector_blocks"]
PHIS_WITH_POS_EMB = phis(lambda operator: operator.takes_pos_emb)
PHIS_OF_UNROTATED_KEYS = phis(lambda operator: operator.needs_unrotated_keys)

LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=4.0, truncate=False)

FAMILIES: dict[str, dict[str, dict]] = {
    "post_norm": {"model": dict(post_norm=True)},
    "qk_norm_per_layer": {"model": dict(qk_norm=True, qk_norm_per="layer")},
    "ffn_bias": {"model": dict(ffn_bias=True)},
    "rotary_dim": {"model": dict(rotary_dim=4)},
    "no_rope": {"model": dict(rope_layers=["scaled", "none"])},
    "plain_rope": {"model": dict(rope_layers=["plain", "scaled"], rope_scaling=YARN)},
    "fp32_angles": {"model": dict(rope_angles="fp32", rope_scaling=LLAMA3)},
    "window": {"model": dict(attention=["window", "nsa"], window=5)},
    "olmo": {
        "model": dict(
            post_norm=True, qk_norm=True, qk_norm_per="layer", attention=["window", "dense"], window=6,
            rope_layers=["plain", "scaled"], rope_scaling=YARN, rope_angles="fp32",
        )
    },
}  # fmt: skip
"""Options that published dense models have and ours by default has not, one at a time and as OLMo 3 has them."""

OPTIONS: dict[str, dict[str, dict]] = {
    "plain": {},
    "per_branch": {"nsa": dict(kv="per_branch", phi="avg")},
    "shared": {"nsa": dict(kv="shared", phi="avg")},
    "shared_keys": {"nsa": dict(kv="shared_keys")},
    "shared_after": {"nsa": dict(kv="shared", phi="mlp")},
    "qk_norm": {"model": dict(qk_norm=True)},
    "qkv_bias": {"model": dict(qkv_bias=True)},
    "out_bias": {"model": dict(attention_out_bias=True)},
    "linear": {"model": dict(rope_scaling=dict(rope_type="linear", factor=2.0))},
    "llama3": {"model": dict(rope_scaling=LLAMA3)},
    "yarn": {"model": dict(rope_scaling=YARN)},
    "all": {
        "model": dict(qk_norm=True, qkv_bias=True, attention_out_bias=True, rope_scaling=YARN),
        "nsa": dict(kv="shared"),
    },
}
