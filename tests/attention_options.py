"""Settings of the attention beyond its sizes, as sections of a config: one at a time, and all together."""

LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=4.0, truncate=False)

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
