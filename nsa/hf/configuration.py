"""`NSAConfig`: the model's description as Transformers reads and writes it (config.json, model_type "nsa").

Imports no modeling code, so that a server can read a config before it builds anything.
"""

from typing import TYPE_CHECKING, Any, ClassVar, Self

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from nsa.attention_rules import (
    INIT_STD,
    SLIDING_GATE_INIT,
    broken_head_rules,
    broken_init_std_rules,
    broken_pattern_rules,
    broken_phi_rules,
    broken_qk_norm_rules,
    broken_rope_compressed_rules,
    broken_rope_layer_rules,
    broken_rope_scaling_rules,
    broken_rotary_rules,
    broken_selector_loss_rules,
    broken_sliding_gate_rules,
    broken_window_rules,
    layer_kinds,
    repeated,
)
from nsa.errors import BrokenRule, ConfigError, require_rules
from nsa.geometry import N_COARSE, Geometry, broken_coarse_rules, broken_rules, default_ffn_dim
from nsa.options import (
    AttentionKind,
    Gate,
    GatePer,
    KVProjections,
    Phi,
    QKNormPer,
    RopeAngles,
    RopeCompressed,
    RopeLayer,
    SelectorBlocks,
)

if TYPE_CHECKING:  # pydantic is not needed to load a model
    from nsa.config.schema import RunConfig

LAYER_TYPE = "nsa_attention"
MOST_LAYERS = 10_000
"""Transformers makes lists with an entry per layer before anything else is checked."""

_COUNTS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "v_head_dim",
    "max_position_embeddings",
)
_SAME_NAMES = (
    *("l", "d", "l_sel", "n_sel", "w", "phi", "phi_pos_emb", "gate", "gate_per", "gate_temperature"),
    *("rope_scale", "rope_compressed", "rope_scaling", "kv", "qk_norm", "qk_norm_eps", "bias", "out_bias"),
    *("qk_norm_per", "rotary_dim", "rope_angles"),
    *("selector_loss", "selector_loss_share", "selector_blocks", "sliding_gate_init", "coarse_block", "n_coarse"),
)


@strict
class NSAConfig(PreTrainedConfig):
    """Sizes and options of `NSAForCausalLM`.

    Named as in Transformers where it has a name (head_dim and v_head_dim are d_k and d_v, initializer_range is
    init_std), else as the arguments of `NSAAttention`. Types and rules are checked when a config is made or loaded.
    """

    model_type: ClassVar[str] = "nsa"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]

    vocab_size: int = 257
    hidden_size: int = 768
    intermediate_size: int | None = None
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_key_value_heads: int = 2
    head_dim: int = 64
    v_head_dim: int | None = None
    max_position_embeddings: int = 2048
    rms_norm_eps: float | int = 1e-5
    initializer_range: float | int = INIT_STD
    rope_theta: float | int = 500_000.0
    rope_scaling: dict[str, Any] | None = None
    tie_word_embeddings: bool = False
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    attention: AttentionKind | list[AttentionKind] = "nsa"
    window: int | None = None
    post_norm: bool = False
    ffn_bias: bool = False
    l: int = Geometry.l
    d: int = Geometry.d
    l_sel: int = Geometry.l_sel
    n_sel: int = Geometry.n_sel
    w: int = Geometry.w
    coarse_block: int = 0
    n_coarse: int = N_COARSE
    phi: Phi = "softmax"
    phi_pos_emb: bool = False
    gate: Gate = "softmax"
    gate_per: GatePer = "head"
    gate_temperature: float | int = 1.0
    sliding_gate_init: float | int = SLIDING_GATE_INIT
    rope_scale: float | int = 1.0
    rope_compressed: RopeCompressed = "auto"
    rope_layers: RopeLayer | list[RopeLayer] = "scaled"
    rope_angles: RopeAngles = "fp64"
    rotary_dim: int | None = None
    kv: KVProjections = "shared"
    selector_loss: float | int = 0.0
    selector_loss_share: float | int = 0.0625
    selector_blocks: SelectorBlocks = "chosen"
    qk_norm: bool = False
    qk_norm_eps: float | int = 1e-6
    qk_norm_per: QKNormPer = "head"
    bias: bool = False
    out_bias: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        if __name__.startswith("nsa."):
            # The installed class does not use modelling code of a folder, and would save a reference without the code.
            kwargs.pop("auto_map", None)
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

    def layer_kinds(self) -> list[AttentionKind]:
        """The kind of attention of every layer."""
        return layer_kinds(self._attention_pattern, self.num_hidden_layers)

    @property
    def _attention_pattern(self) -> list[AttentionKind]:
        return [self.attention] if isinstance(self.attention, str) else self.attention

    def layer_ropes(self) -> list[RopeLayer]:
        """The RoPE of every layer."""
        return repeated(self._rope_pattern, self.num_hidden_layers)

    @property
    def _rope_pattern(self) -> list[RopeLayer]:
        return [self.rope_layers] if isinstance(self.rope_layers, str) else self.rope_layers

    @property
    def layer_types(self) -> list[str]:
        """What Transformers looks up the class of each layer's cache by; `layer_kinds` says how a layer attends."""
        return [LAYER_TYPE] * self.num_hidden_layers

    def validate_layer_type(self) -> None:
        """Transformers' list of layer types is closed; `nsa.hf.cache` registers ours."""

    def validate_architecture(self) -> None:
        """The same rules as for the settings of a run."""
        require_rules(
            BrokenRule((name,), f"{name} ({getattr(self, name)}) must be at least 1.")
            for name in _COUNTS
            if getattr(self, name) < 1
        )
        heads = self.num_attention_heads, self.num_key_value_heads, self.head_dim
        scaling = {"rope_type": "default", **(self.rope_scaling or {})}
        require_rules(
            (
                *broken_head_rules(*heads),
                *broken_init_std_rules(self.initializer_range, "initializer_range"),
                *broken_pattern_rules(self._attention_pattern, self.num_hidden_layers),
                *broken_rope_layer_rules(self._rope_pattern, self.num_hidden_layers),
                *broken_rope_scaling_rules(scaling, self.rope_scale),
                *broken_rotary_rules(self.rotary_dim, self.head_dim, self.rope_angles),
                *broken_qk_norm_rules(self.qk_norm, self.qk_norm_per, self.kv),
                *broken_window_rules(self.window),
                *broken_rules(**{name: getattr(self, name) for name in Geometry.__dataclass_fields__}),
                *broken_coarse_rules(self.coarse_block, self.n_coarse, self.l, self.d, self.l_sel, self.n_sel),
                *broken_phi_rules(self.phi, self.phi_pos_emb),
                *broken_sliding_gate_rules(self.sliding_gate_init),
                *broken_selector_loss_rules(self.selector_loss, self.selector_loss_share, self.kv, self.phi),
                *broken_rope_compressed_rules(self.phi, self.rope_compressed),
            )
        )

    def attention_arguments(self) -> dict[str, Any]:
        """The arguments of `NSAAttention`, without the model's width and the kernels."""
        return dict(
            n_heads=self.num_attention_heads,
            n_kv_groups=self.num_key_value_heads,
            d_k=self.head_dim,
            d_v=self.v_head_dim,
            rope_base=self.rope_theta,
            init_std=self.initializer_range,
            **{name: getattr(self, name) for name in _SAME_NAMES},
        )

    @classmethod
    def from_run(cls, config: "RunConfig", vocab_size: int, eos_token_id: int | None) -> Self:
        """The config of a run's model; `model.vocab_size`, if set, wins over the tokenizer's."""
        model = config.model
        scaling = model.rope_scaling.given
        return cls(
            vocab_size=model.vocab_size or vocab_size,
            hidden_size=model.dim,
            intermediate_size=model.ffn_size,
            num_hidden_layers=model.n_layers,
            num_attention_heads=model.n_heads,
            num_key_value_heads=model.n_kv_groups,
            head_dim=model.d_k,
            v_head_dim=model.d_v,
            max_position_embeddings=config.train.seq_len,
            rms_norm_eps=model.norm_eps,
            initializer_range=model.init_std,
            rope_theta=model.rope_base,
            rope_scale=model.rope_scale,
            rope_scaling=None if scaling["rope_type"] == "default" else scaling,
            tie_word_embeddings=model.tie_embeddings,
            eos_token_id=eos_token_id,
            qk_norm=model.qk_norm,
            qk_norm_eps=model.norm_eps,
            bias=model.qkv_bias,
            out_bias=model.attention_out_bias,
            qk_norm_per=model.qk_norm_per,
            rotary_dim=model.rotary_dim,
            rope_angles=model.rope_angles,
            rope_layers=model.rope_layers[0] if len(model.rope_layers) == 1 else list(model.rope_layers),
            post_norm=model.post_norm,
            ffn_bias=model.ffn_bias,
            window=model.window,
            attention=model.attention[0] if len(model.attention) == 1 else list(model.attention),
            **config.nsa.arguments,
        )
