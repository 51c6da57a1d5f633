"""Architectures that `nsa convert` reads, and their config.json as arguments of `NSAConfig`.

An architecture is read if it is in the table below, and never by the names of its tensors: models with the same names
compute different things. A config is parsed by Transformers' own class, which knows the forms of earlier versions;
every key of it must be one whose effect is known here.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from huggingface_hub.errors import StrictDataclassError
from transformers import (
    GenerationConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from nsa.errors import CheckpointError, ConfigError
from nsa.hf.configuration import MOST_LAYERS
from nsa.options import AttentionKind
from nsa_train.convert.dense.source_model import SourceModel, SourceNames, shortest_pattern
from nsa_train.convert.folder_files import require_plausible_numbers

_PROJECTIONS = {
    "self_attn.q_proj": ("attention.w_q",),
    "self_attn.k_proj": ("attention.w_k",),
    "self_attn.v_proj": ("attention.w_v",),
    "self_attn.o_proj": ("attention.w_out",),
    "mlp.gate_proj": ("feed_forward.w1",),
    "mlp.up_proj": ("feed_forward.w3",),
    "mlp.down_proj": ("feed_forward.w2",),
}
_FUSED_PROJECTIONS = {
    "self_attn.qkv_proj": ("attention.w_q", "attention.w_k", "attention.w_v"),
    "self_attn.o_proj": ("attention.w_out",),
    "mlp.gate_up_proj": ("feed_forward.w1", "feed_forward.w3"),
    "mlp.down_proj": ("feed_forward.w2",),
}
_NORMS_OF_INPUTS = {
    "input_layernorm": ("attention_norm",),
    "post_attention_layernorm": ("feed_forward_norm",),
}
_NORMS_OF_OUTPUTS = {
    "post_attention_layernorm": ("attention_norm",),
    "post_feedforward_layernorm": ("feed_forward_norm",),
}
_QK_NORMS = {"self_attn.q_norm": ("attention.q_norm",), "self_attn.k_norm": ("attention.k_norm",)}

_LLAMA_NAMES = SourceNames({**_PROJECTIONS, **_NORMS_OF_INPUTS})
_QWEN3_NAMES = SourceNames({**_PROJECTIONS, **_NORMS_OF_INPUTS, **_QK_NORMS})
_PHI3_NAMES = SourceNames({**_FUSED_PROJECTIONS, **_NORMS_OF_INPUTS})
_OLMO_NAMES = SourceNames({**_PROJECTIONS, **_NORMS_OF_OUTPUTS, **_QK_NORMS})


@dataclass(frozen=True)
class _DenseFamily:
    """An architecture: its config class, its tensor names, and in what it differs from a Llama without biases."""

    architecture: str
    config_class: type[PreTrainedConfig]
    names: SourceNames = _LLAMA_NAMES
    qkv_bias: bool | str = False
    """Whether w_q, w_k, w_v have biases, or the setting of config.json that says so."""
    out_bias: bool | str = False
    ffn_bias: bool | str = False
    qk_norm: Literal["head", "layer"] | None = None
    post_norm: bool = False
    partial_rotary: bool = False
    """Whether `partial_rotary_factor` has an effect."""

    @property
    def settings(self) -> set[str]:
        """Keys of config.json that its class reads, with those of earlier versions."""
        of_any_model = {each.name for each in fields(PreTrainedConfig)}
        return {each.name for each in fields(self.config_class)} - of_any_model | _READ_BESIDE_CLASS


_BIASED_ATTENTION: Any = dict(qkv_bias="attention_bias", out_bias="attention_bias")
_BIASED: Any = dict(**_BIASED_ATTENTION, ffn_bias="mlp_bias")
_OLMO: Any = dict(names=_OLMO_NAMES, qk_norm="layer", post_norm=True, **_BIASED_ATTENTION)
FAMILIES = {
    family.architecture: family
    for family in (
        _DenseFamily("LlamaForCausalLM", LlamaConfig, **_BIASED),
        _DenseFamily("Qwen2ForCausalLM", Qwen2Config, qkv_bias=True),
        _DenseFamily("Qwen3ForCausalLM", Qwen3Config, _QWEN3_NAMES, qk_norm="head", **_BIASED_ATTENTION),
        _DenseFamily("MistralForCausalLM", MistralConfig),
        _DenseFamily("Olmo2ForCausalLM", Olmo2Config, **_OLMO),
        _DenseFamily("Olmo3ForCausalLM", Olmo3Config, **_OLMO),
        _DenseFamily("SmolLM3ForCausalLM", SmolLM3Config, **_BIASED),
        _DenseFamily("Phi3ForCausalLM", Phi3Config, _PHI3_NAMES, partial_rotary=True),
    )
}

_REASONS_BY_WORD = (
    ("moe", "its feed-forward layers are mixtures of experts"),
    ("mixtral", "its feed-forward layers are mixtures of experts"),
    ("gptoss", "its attention has sinks and its feed-forward layers are mixtures of experts"),
    ("gemma2", "it caps attention scores (attn_logit_softcapping), which no kernel here does"),
    ("gemma", "its norms, embedding and activation are not Llama's"),
    ("deepseekv", "its attention compresses keys and values (MLA)"),
    ("mamba", "it has layers without attention"),
    ("hybrid", "it has layers without attention"),
    ("next", "it has layers without attention"),
)
"""Why an architecture is not in the table, by a part of its name."""
_REASONS_BY_KEY = {
    "quantization_config": "its weights are quantised",
    "attn_logit_softcapping": "it caps attention scores, which no kernel here does",
    "final_logit_softcapping": "it caps the logits",
    "num_experts": "its feed-forward layers are mixtures of experts",
    "num_local_experts": "its feed-forward layers are mixtures of experts",
    "attention_multiplier": "attention has its own scale",
    "query_pre_attn_scalar": "attention has its own scale",
    "residual_multiplier": "what a layer adds is scaled",
    "layer_types": "this architecture has one kind of attention for all layers",
    "sliding_window": "this architecture has no sliding window",
    "per_layer_config": "layers have sizes of their own",
}
_WITHOUT_EFFECT = frozenset(
    (
        *("model_type", "auto_map", "torch_dtype", "_name_or_path", "name_or_path", "tokenizer_class"),
        *("_attn_implementation", "_attn_implementation_autoset", "attn_implementation", "is_llama_config"),
        *("torchscript", "use_bfloat16", "is_decoder", "unsloth_fixed", "unsloth_version", "transformers.js_config"),
        *("max_window_layers", "pretraining_tp"),  # of other architectures, in configs made from theirs
        *(each.name for each in fields(PreTrainedConfig)),
        *GenerationConfig().to_dict(),
    )
)
"""Keys of any config.json that say nothing about what the model computes."""
_READ_BESIDE_CLASS = {"rope_theta", "rope_scaling", "partial_rotary_factor", "head_dim"}
_ROPE_TYPES = {
    "dynamic": "its frequencies change with the length of the text",
    "longrope": "its frequencies change with the length of the text",
    "proportional": "it rotates another part of each head than the first channels",
}
_LAYER_KINDS: dict[str, AttentionKind] = {"full_attention": "dense", "sliding_attention": "window"}


def parse_dense_config(values: Mapping[str, Any], where: Path) -> SourceModel:
    """The model in the values of a config.json; raises CheckpointError for one that cannot be converted exactly."""
    family = _family(values, where)
    require_plausible_numbers(values, where)
    if isinstance(layers := values.get("num_hidden_layers"), int) and layers > MOST_LAYERS:
        raise CheckpointError(f"{where} has num_hidden_layers={layers}: up to {MOST_LAYERS:,} are read.")
    _require_known(values, family, where)
    settings = {key: value for key, value in values.items() if key in family.settings}
    try:
        parsed = family.config_class(**deepcopy(settings))  # it adds to the RoPE it is given
        arguments, kinds = _arguments(family, parsed, where)
        model = SourceModel(family.architecture, family.names, arguments, kinds)
        _ = model.config  # checks types and rules
    except (
        *(StrictDataclassError, ConfigError, TypeError, ValueError, KeyError, IndexError, AttributeError),
        *(ArithmeticError, RecursionError),
    ) as error:
        raise CheckpointError(f"{where} does not describe a {family.architecture} ({error}).") from error
    return model


def _family(values: Mapping[str, Any], where: Path) -> _DenseFamily:
    architectures = values.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and len(architectures) == 1 else architectures
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        plain = f"{name}".lower()
        reason = next((why for word, why in _REASONS_BY_WORD if word in plain), "what it computes is not known here")
        raise CheckpointError(
            f"{where} has architectures={architectures!r:.80}, which is not converted: {reason}. Convert one of "
            f"{', '.join(FAMILIES)}; or run it in Transformers with nsa.hf.use_sparse_attention, which refuses less."
        )
    if values.get("model_type") != family.config_class.model_type:
        raise CheckpointError(
            f"{where} has model_type={values.get('model_type')!r:.60} and architectures={architectures!r:.60}: an "
            f"{family.architecture} has model_type {family.config_class.model_type!r}. Correct config.json."
        )
    return family


def _require_known(values: Mapping[str, Any], family: _DenseFamily, where: Path) -> None:
    """Refuse a key whose effect is not known, unless its value turns it off."""
    known = family.settings | _WITHOUT_EFFECT
    for key, value in values.items():
        if key in known or not value:
            continue
        reason = _REASONS_BY_KEY.get(key, "what it changes is not known here")
        raise CheckpointError(
            f"{where} has {key!r:.60}={value!r:.60}, which {family.architecture} does not have: {reason}. Convert a "
            f"model without it; if it changes nothing, remove the key from a copy of config.json."
        )
    if (act := values.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise CheckpointError(f"{where} has hidden_act={act!r:.40}: only silu is converted (SwiGLU feed-forward).")


def _arguments(family: _DenseFamily, parsed: Any, where: Path) -> tuple[dict[str, Any], tuple[AttentionKind, ...]]:
    """Arguments of `NSAConfig` without the kinds of the layers, and these."""
    head_dim = getattr(parsed, "head_dim", None) or parsed.hidden_size // parsed.num_attention_heads
    types = _layer_types(parsed)
    window = getattr(parsed, "sliding_window", None) if "sliding_attention" in types else None
    if "sliding_attention" in types and window is None:
        raise CheckpointError(f"{where} has layers of sliding attention and no sliding_window. Set it in config.json.")

    def flag(setting: bool | str) -> bool:
        return bool(getattr(parsed, setting)) if isinstance(setting, str) else setting

    arguments = dict(
        vocab_size=parsed.vocab_size,
        hidden_size=parsed.hidden_size,
        intermediate_size=parsed.intermediate_size,
        num_hidden_layers=parsed.num_hidden_layers,
        num_attention_heads=parsed.num_attention_heads,
        num_key_value_heads=parsed.num_key_value_heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        max_position_embeddings=parsed.max_position_embeddings,
        rms_norm_eps=parsed.rms_norm_eps,
        tie_word_embeddings=parsed.tie_word_embeddings,
        bos_token_id=parsed.bos_token_id,
        eos_token_id=parsed.eos_token_id,
        pad_token_id=parsed.pad_token_id,
        qk_norm=family.qk_norm is not None,
        qk_norm_per=family.qk_norm or "head",
        qk_norm_eps=parsed.rms_norm_eps,
        bias=flag(family.qkv_bias),
        out_bias=flag(family.out_bias),
        ffn_bias=flag(family.ffn_bias),
        post_norm=family.post_norm,
        rope_angles="fp32",
        window=window,
        **_rope_arguments(family, parsed, types, head_dim, where),
    )
    if parsed.initializer_range > 0:
        arguments["initializer_range"] = parsed.initializer_range
    return arguments, tuple(_LAYER_KINDS[each] for each in types)


def _layer_types(parsed: Any) -> list[str]:
    """full_attention or sliding_attention of every layer."""
    if (types := getattr(parsed, "layer_types", None)) is not None:
        if unknown := set(types) - _LAYER_KINDS.keys():
            raise ValueError(f"layer_types has {sorted(unknown)!r:.80}, and {list(_LAYER_KINDS)} are known")
        return list(types[: parsed.num_hidden_layers])
    slides = getattr(parsed, "sliding_window", None) is not None
    return ["sliding_attention" if slides else "full_attention"] * parsed.num_hidden_layers


@dataclass(frozen=True)
class _LayerRope:
    """RoPE of one layer, in the terms of `rope_parameters`."""

    theta: float
    factor: float
    """partial_rotary_factor."""
    scaling: dict[str, Any] = field(default_factory=dict)
    """Empty for rope_type default."""

    def __str__(self) -> str:
        return f"(rope_theta {self.theta}, partial_rotary_factor {self.factor}, {self.scaling or 'not scaled'})"


def _rope_arguments(
    family: _DenseFamily, parsed: Any, types: Sequence[str], head_dim: int, where: Path
) -> dict[str, Any]:
    """rope_theta, rope_scaling, rope_layers and rotary_dim."""
    layers = list(_layer_ropes(parsed, types, where))
    rotated = [rope for rope in layers if rope is not None]
    if not rotated:
        return {"rope_layers": "none"}
    scaled = next((rope for rope in rotated if rope.scaling), rotated[0])
    plain = _LayerRope(scaled.theta, scaled.factor)
    if other := next((rope for rope in rotated if rope not in (scaled, plain)), None):
        raise CheckpointError(
            f"{where} has layers with two kinds of RoPE, {scaled} and {other}: layers may differ in having the scaling "
            f"or not, and in nothing else. Convert a model with one."
        )
    if scaled.factor != 1 and not family.partial_rotary:
        raise CheckpointError(
            f"{where} has partial_rotary_factor={scaled.factor}: {family.architecture} rotates all channels of a head. "
            f"Remove the key if it has no effect."
        )
    kinds = ["none" if rope is None else "scaled" if rope == scaled else "plain" for rope in layers]
    return {
        "rope_theta": scaled.theta,
        "rope_scaling": scaled.scaling or None,
        "rope_layers": shortest_pattern(kinds),
        "rotary_dim": None if scaled.factor == 1 else int(head_dim * scaled.factor),
    }


def _layer_ropes(parsed: Any, types: Sequence[str], where: Path) -> Iterator[_LayerRope | None]:
    ropes = parsed.rope_parameters
    nested = any(key in ropes for key in _LAYER_KINDS)
    without = getattr(parsed, "no_rope_layers", None) or [1] * len(types)
    for layer_type, rotates in zip(types, without[: len(types)], strict=True):
        values = ropes[layer_type] if nested else ropes
        if nested and not values.get("truncate", True):
            raise CheckpointError(
                f"{where} has truncate=false in the RoPE of {layer_type}: Transformers reads it only outside of layer "
                f"types, so the model has no one meaning. Remove it, or convert a model without it."
            )
        yield _layer_rope(values, where) if rotates else None


def _layer_rope(values: Mapping[str, Any], where: Path) -> _LayerRope:
    scaling = {key: value for key, value in values.items() if value is not None and key != "type"}
    kind = scaling["rope_type"]
    if kind in _ROPE_TYPES:
        raise CheckpointError(
            f"{where} has RoPE of type {kind!r}: {_ROPE_TYPES[kind]}. Convert a model with rope_type default, linear, "
            f"llama3 or yarn."
        )
    theta, factor = scaling.pop("rope_theta"), scaling.pop("partial_rotary_factor", 1)
    return _LayerRope(theta, factor, {} if kind == "default" and len(scaling) == 1 else scaling)


# flash-linear-attention's NSA (also `NSAForCausalLM`, model_type nsa).
#
# That package pools with the mean over blocks that are also the selection blocks, has one set of keys and values for
# the three branches, and one sigmoid gate per head and branch, without bias. Its selection (commit 012a873 of its
# repository) scores a block by the compressed branch's probability summed over the heads of a group and always takes
# the first block, the query's own and the one before it: the same rule as here. Where its kernel and its own reference
# differ (a number of blocks that is not a power of two), a model is refused.

_FLA_ARCHITECTURE = "NSAForCausalLM"
FLA_QUERY = "model.layers.0.attn.q_proj.weight"
_FLA_NAMES = SourceNames(
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
_FLA_DEFAULTS: dict[str, Any] = dict(
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
    settings = {key: values.get(key, default) for key, default in _FLA_DEFAULTS.items()}
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
        model = SourceModel(_FLA_ARCHITECTURE, _FLA_NAMES, _fla_arguments(settings, rows // heads), (kind,) * layers)
        _ = model.config  # checks types and rules
    except (StrictDataclassError, ConfigError, TypeError, ValueError, ArithmeticError) as error:
        raise CheckpointError(f"{where} does not describe a model ({error}).") from error
    return model


_FLA_SETTINGS = {
    "vocab_size": "vocab_size", "hidden_size": "hidden_size", "num_hidden_layers": "num_hidden_layers",
    "num_attention_heads": "num_heads", "max_position_embeddings": "max_position_embeddings",
    "rms_norm_eps": "norm_eps", "initializer_range": "initializer_range", "rope_theta": "rope_theta",
    "tie_word_embeddings": "tie_word_embeddings", "bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id",
    "pad_token_id": "pad_token_id", "bias": "qkv_bias", "l": "block_size", "d": "block_size", "l_sel": "block_size",
    "n_sel": "block_counts", "w": "window_size",
}  # fmt: skip
"""Arguments of `NSAConfig` by the names of that package."""
_FLA_FIXED: dict[str, Any] = dict(
    rope_angles="fp32", phi="avg", rope_compressed="before", kv="shared", gate="sigmoid", gate_per="head",
    sliding_gate_init=0.0,
)  # fmt: skip


def _fla_arguments(settings: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    ffn_dim = settings["intermediate_size"]
    if ffn_dim is None:
        ratio = 4 if settings["hidden_ratio"] is None else settings["hidden_ratio"]
        ffn_dim = -(-int(settings["hidden_size"] * ratio * 2 / 3) // _FFN_MULTIPLE) * _FFN_MULTIPLE
    groups = settings["num_heads"] if settings["num_kv_heads"] is None else settings["num_kv_heads"]
    sizes = dict(intermediate_size=ffn_dim, num_key_value_heads=groups, head_dim=head_dim, v_head_dim=head_dim)
    return {name: settings[theirs] for name, theirs in _FLA_SETTINGS.items()} | sizes | _FLA_FIXED
