"""`NSAConfig`: the model's description as Transformers reads and writes it (config.json, model_type "nsa").

Imports no modeling code, so that a server can read a config before it builds anything.
"""

import types
from dataclasses import fields
from typing import Any, ClassVar, Literal

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from nsa.core.attention_config import EXPORTED_NAMES, OPTIONS, AttentionConfig
from nsa.core.layer_pattern import broken_pattern_rules, repeated
from nsa.errors import BrokenRule, ConfigError, require_rules
from nsa.geometry import default_ffn_dim
from nsa.option_fields import OptionNames, from_options
from nsa.options import AttentionKind, RopeLayer

LAYER_TYPE = "nsa_attention"
MOST_LAYERS = 10_000
"""Transformers makes lists with an entry per layer before anything else is checked."""

_COUNTS = ("vocab_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings")
_NAMES = OptionNames({**EXPORTED_NAMES, "layers": "attention", "n_layers": "num_hidden_layers"})
LAYER_OPTIONS = tuple(each for each in OPTIONS if not each.per_layer)


def _add_options(namespace: dict[str, Any]) -> None:
    """The options of the attention as fields of a config; a whole number serves as a real one."""
    namespace["__annotations__"] = {
        each.exported: float | int if each.type is float else Literal[each.choices] if each.choices else each.type
        for each in LAYER_OPTIONS
    }
    namespace |= {each.exported: each.usual for each in LAYER_OPTIONS} | {"__module__": __name__}


def _listed(pattern: Any) -> list[Any]:
    return pattern if isinstance(pattern, list) else [pattern]


_OptionFields: Any = types.new_class("_OptionFields", (PreTrainedConfig,), exec_body=_add_options)


@strict
class NSAConfig(_OptionFields):
    """Sizes and options of `NSAForCausalLM`: those of the attention (`AttentionConfig`), and these of the model.

    Named as in Transformers where it has a name (head_dim and v_head_dim are d_k and d_v, initializer_range is
    init_std), else as the arguments of `NSAAttention`. Types and rules are checked when a config is made or loaded.
    """

    model_type: ClassVar[str] = "nsa"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    auto_map = dict[str, str]()  # noqa: RUF012 (an annotation would make it a setting)
    """TRL reads it of every model whose class is not one of Transformers'."""

    vocab_size: int = 257
    intermediate_size: int | None = None
    num_hidden_layers: int = 12
    v_head_dim: int | None = None
    max_position_embeddings: int = 2048
    rms_norm_eps: float | int = 1e-5
    rope_scaling: dict[str, Any] | None = None
    tie_word_embeddings: bool = False
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    attention: AttentionKind | list[AttentionKind] = "nsa"
    window: int | None = None
    rope_layers: RopeLayer | list[RopeLayer] = "scaled"
    post_norm: bool = False
    ffn_bias: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        if __name__.startswith("nsa."):
            # The installed class does not use modelling code of a folder, and would save a reference without the code.
            kwargs.pop("auto_map", None)
        if (parameters := kwargs.pop("rope_parameters", None)) is not None:
            self._take_rope_parameters(dict(parameters))
        if self.intermediate_size is None:
            self.intermediate_size = default_ffn_dim(self.hidden_size)
        if self.v_head_dim is None:
            self.v_head_dim = self.head_dim
        if isinstance(self.num_hidden_layers, int) and self.num_hidden_layers > MOST_LAYERS:
            raise ConfigError(
                f"num_hidden_layers is {self.num_hidden_layers:.3g}: a config may have up to {MOST_LAYERS:,}. Correct "
                f"config.json."
            )
        super().__post_init__(**kwargs)

    def _take_rope_parameters(self, parameters: dict[str, Any]) -> None:
        """Read the name that Transformers 5 has for rope_theta and rope_scaling together."""
        if (theta := parameters.pop("rope_theta", None)) is not None:
            self.rope_theta = theta
        scaling = None if parameters.get("rope_type", "default") == "default" else parameters
        if self.rope_scaling not in (None, scaling) or (scaling is None and parameters.keys() - {"rope_type"}):
            raise ConfigError(
                f"rope_parameters ({parameters}) contradict rope_scaling ({self.rope_scaling}), or scale with "
                f"rope_type 'default'. Pass rope_parameters alone, e.g. {{'rope_theta': 5e5, 'rope_type': 'linear', "
                f"'factor': 2}}."
            )
        self.rope_scaling = scaling

    def layer_kinds(self) -> list[AttentionKind]:
        """The kind of attention of every layer."""
        return repeated(_listed(self.attention), self.num_hidden_layers)

    def layer_ropes(self) -> list[RopeLayer]:
        """The RoPE of every layer."""
        return repeated(_listed(self.rope_layers), self.num_hidden_layers)

    @property
    def layer_types(self) -> list[str]:
        """Names by which Transformers finds the class of each layer's cache; `layer_kinds` says how a layer attends."""
        return [LAYER_TYPE] * self.num_hidden_layers

    def validate_layer_type(self) -> None:
        """Transformers' list of layer types is closed; `nsa.hf.cache` registers ours."""

    def validate_architecture(self) -> None:
        """Check the rules that the settings of a run have."""
        require_rules(
            BrokenRule((name,), f"{name} ({getattr(self, name)}) must be at least 1.")
            for name in _COUNTS
            if getattr(self, name) < 1
        )
        require_rules(
            (
                *self._unchecked_attention().broken_rules(_NAMES),
                *broken_pattern_rules(
                    _listed(self.attention), _listed(self.rope_layers), self.window, self.num_hidden_layers, _NAMES
                ),
            )
        )

    def attention_config(self) -> AttentionConfig:
        """Options that all attention layers share; `layer_kinds` and `layer_ropes` say how they differ."""
        return self._unchecked_attention().changed()

    def _unchecked_attention(self) -> AttentionConfig:
        return from_options(AttentionConfig, {each.name: getattr(self, each.exported) for each in LAYER_OPTIONS})

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The keys that describe a model, without those that every config of Transformers has."""
        inherited = {field.name for field in fields(PreTrainedConfig)}
        return tuple(field.name for field in fields(cls) if field.name not in inherited)
