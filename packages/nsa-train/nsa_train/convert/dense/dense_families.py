"""Dense architectures of Transformers that `nsa convert` reads, and their config.json as arguments of `NSAConfig`.

An architecture is read if it is in the table below, and never by the names of its tensors: models with the same names
compute different things. A config is parsed by Transformers' own class, which knows the forms of earlier versions;
every key of it must be one whose effect is known here.
"""

from collections.abc import Iterator, Mapping, Sequence
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
            f"{', '.join(FAMILIES)}."
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
