"""Models of flash-linear-attention's NSA (also `NSAForCausalLM`, model_type nsa) as arguments of `NSAConfig`.

That package pools with the mean over blocks that are also the selection blocks, has one set of keys and values for the
three branches, and one sigmoid gate per head and branch, without bias. Its selection (commit 012a873 of its repository)
scores a block by the compressed branch's probability summed over the heads of a group and always takes the first block,
the query's own and the one before it: the same rule as here. Where its kernel and its own reference differ (a number of
blocks that is not a power of two), a model is refused.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError

from nsa.errors import CheckpointError, ConfigError
from nsa.hf.configuration import MOST_LAYERS
from nsa.options import AttentionKind
from nsa_train.convert.dense.source_model import SourceModel, SourceNames
from nsa_train.convert.folder_files import require_plausible_numbers

_FLA_ARCHITECTURE = "NSAForCausalLM"
FLA_QUERY = "model.layers.0.attn.q_proj.weight"
_NAMES = SourceNames(
    block={
        "attn_norm": ("attention_norm",),
        "attn.q_proj": ("attention.w_q",),
        "attn.k_proj": ("attention.w_k",),
        "attn.v_proj": ("attention.w_v",),
        "attn.g_proj": ("attention.gates.proj",),
        "attn.o_proj": ("attention.w_out",),
        "mlp_norm": ("feed_forward_norm",),
        "mlp.gate_proj": ("feed_forward.w1",),
        "mlp.up_proj": ("feed_forward.w3",),
        "mlp.down_proj": ("feed_forward.w2",),
    },
    model={"model.embeddings": "model.embed_tokens", "model.norm": "model.norm", "lm_head": "lm_head"},
    without_source=("attention.gates.proj.bias",),
)
_DEFAULTS: dict[str, Any] = dict(
    hidden_size=2048, num_hidden_layers=24, num_heads=64, num_kv_heads=4, qkv_bias=False, block_size=64,
    block_counts=16, window_size=512, rope_theta=10_000.0, max_position_embeddings=2048, hidden_ratio=4,
    intermediate_size=None, hidden_act="swish", initializer_range=0.02, norm_eps=1e-6, pad_token_id=None,
    bos_token_id=1, eos_token_id=2, tie_word_embeddings=False, vocab_size=32_000,
)  # fmt: skip
"""Defaults of that package's config class; config.json may leave them out."""
_FFN_MULTIPLE = 256


def is_fla_config(values: Mapping[str, Any]) -> bool:
    """Whether a config.json is of that package: it names blocks and heads in its own way."""
    return values.get("model_type") == "nsa" and {"block_size", "block_counts"} <= values.keys()


def parse_fla_config(values: Mapping[str, Any], where: Path, query_rows: Callable[[], int]) -> SourceModel:
    """The model in a config.json; raises CheckpointError for one that would compute something else here.

    query_rows: of the first layer's query projection. The width of a head follows from it: that package's model leaves
    `head_dim` of its config unused.
    """
    if values.get("architectures") not in (None, [_FLA_ARCHITECTURE]):
        raise CheckpointError(
            f"{where} has architectures={values.get('architectures')!r:.60}: {_FLA_ARCHITECTURE} is read."
        )
    require_plausible_numbers(values, where)
    settings = {key: values.get(key, default) for key, default in _DEFAULTS.items()}
    n_blocks, window = settings["block_counts"], settings["window_size"]
    heads, layers = settings["num_heads"], settings["num_hidden_layers"]
    if type(n_blocks) is not int or n_blocks < 4 or n_blocks & (n_blocks - 1):
        raise CheckpointError(
            f"{where} has block_counts={n_blocks!r:.40}: it must be a power of two and at least 4. For other numbers "
            f"the kernel of flash-linear-attention reads more blocks than its reference, and below 3 not the first and "
            f"the two local ones, which are always read here."
        )
    if type(window) is not int or window < 1:
        raise CheckpointError(
            f"{where} has window_size={window!r:.40}: a model without the sliding branch has no gate for it here. "
            f"Only models with window_size of 1 and more are read."
        )
    if settings["hidden_act"] != "swish":
        raise CheckpointError(f"{where} has hidden_act={settings['hidden_act']!r:.40}: only swish is read.")
    if type(heads) is not int or heads < 1 or (rows := query_rows()) % heads or not rows:
        raise CheckpointError(f"{where} has num_heads={heads!r:.40}, which does not divide the rows of {FLA_QUERY}.")
    if type(layers) is not int or layers > MOST_LAYERS:
        raise CheckpointError(f"{where} has num_hidden_layers={layers!r:.40}: up to {MOST_LAYERS:,} are read.")
    kind: AttentionKind = "nsa"
    try:
        model = SourceModel(_FLA_ARCHITECTURE, _NAMES, _arguments(settings, rows // heads), (kind,) * layers)
        _ = model.config  # checks types and rules
    except (StrictDataclassError, ConfigError, TypeError, ValueError, ArithmeticError) as error:
        raise CheckpointError(f"{where} does not describe a model ({error}).") from error
    return model


_RENAMED = {
    "vocab_size": "vocab_size", "hidden_size": "hidden_size", "num_hidden_layers": "num_hidden_layers",
    "num_attention_heads": "num_heads", "max_position_embeddings": "max_position_embeddings",
    "rms_norm_eps": "norm_eps", "initializer_range": "initializer_range", "rope_theta": "rope_theta",
    "tie_word_embeddings": "tie_word_embeddings", "bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id",
    "pad_token_id": "pad_token_id", "bias": "qkv_bias", "l": "block_size", "d": "block_size", "l_sel": "block_size",
    "n_sel": "block_counts", "w": "window_size",
}  # fmt: skip
"""Arguments of `NSAConfig` by the names of that package."""
_FIXED: dict[str, Any] = dict(
    rope_angles="fp32", phi="avg", rope_compressed="before", kv="shared", gate="sigmoid", gate_per="head",
    sliding_gate_init=0.0,
)  # fmt: skip


def _arguments(settings: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    ffn_dim = settings["intermediate_size"]
    if ffn_dim is None:
        ratio = 4 if settings["hidden_ratio"] is None else settings["hidden_ratio"]
        ffn_dim = -(-int(settings["hidden_size"] * ratio * 2 / 3) // _FFN_MULTIPLE) * _FFN_MULTIPLE
    groups = settings["num_heads"] if settings["num_kv_heads"] is None else settings["num_kv_heads"]
    sizes = dict(intermediate_size=ffn_dim, num_key_value_heads=groups, head_dim=head_dim, v_head_dim=head_dim)
    return {name: settings[theirs] for name, theirs in _RENAMED.items()} | sizes | _FIXED
