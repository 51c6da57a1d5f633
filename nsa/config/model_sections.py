"""Settings of the model and of how it is computed: `model`, `nsa`, `runtime`, `kernels`."""

from typing import Annotated, Any, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from nsa.attention_rules import INIT_STD, SLIDING_GATE_INIT, resolve_rope_compressed
from nsa.config import rules
from nsa.config.setting_types import (
    OFF_OR_FULL,
    OFF_OR_ON,
    TEXT_OR_LIST,
    Changeable,
    ConfigSection,
    Count,
    Positive,
    SettingUnit,
    Text,
    Tokens,
    ValueDescription,
)
from nsa.geometry import N_COARSE, Geometry, default_ffn_dim
from nsa.options import (
    AttentionKind,
    Checkpointing,
    Compilation,
    Gate,
    GatePer,
    KVProjections,
    Phi,
    Precision,
    Preset,
    QKNormPer,
    RopeAngles,
    RopeCompressed,
    RopeLayer,
    RopeType,
    SelectorBlocks,
)

PRESETS: dict[str, dict[str, Any]] = {
    "base": {},
    "paper": {
        "phi": "mlp",
        "phi_pos_emb": True,
        "gate": "sigmoid",
        "kv": "per_branch",
        "selector_loss": 0.0,
        "sliding_gate_init": 0.0,
    },
    # The last query of 262,144 tokens reads 11k keys instead of 18k, of 1,048,576 tokens 21k instead of 67k.
    "long_256k": {"l": 64, "d": 32, "n_sel": 32},
    "long_1m": {"l": 128, "d": 64, "l_sel": 128, "n_sel": 32},
}
"""Values of settings in `nsa` that differ from their defaults, by `nsa.preset`."""


class RopeScalingConfig(ConfigSection):
    """RoPE scaling for a longer context, with the keys of `rope_scaling` in a Hugging Face config."""

    rope_type: RopeType = Field(default="default", description="Kind of scaling; default is none.")
    factor: Positive | None = Field(
        default=None, description="Divisor of the scaled frequencies: how much longer the context becomes."
    )
    original_max_position_embeddings: Tokens | None = Field(
        default=None, description="Context length before scaling (llama3, yarn)."
    )
    low_freq_factor: Positive | None = Field(
        default=None,
        description="Pairs with fewer turns than this within the original context are divided by factor (llama3).",
    )
    high_freq_factor: Positive | None = Field(
        default=None,
        description="Pairs with more turns than this within the original context keep their frequency (llama3).",
    )
    beta_fast: Positive | None = Field(
        default=None, description="As high_freq_factor, for yarn; null means 32. Between the two, a linear ramp."
    )
    beta_slow: Positive | None = Field(default=None, description="As low_freq_factor, for yarn; null means 1.")
    truncate: bool | None = Field(
        default=None, description="Round the ends of yarn's ramp to whole pairs; null means true."
    )
    attention_factor: Positive | None = Field(
        default=None, description="Multiplier of cosines and sines (yarn); null means 0.1 · ln(factor) + 1."
    )
    mscale: Positive | None = Field(
        default=None,
        description="With mscale_all_dim, replaces the 0.1 of attention_factor by a ratio of two such terms (yarn).",
    )
    mscale_all_dim: Positive | None = Field(default=None, description="Divisor of that ratio; see mscale.")

    @property
    def given(self) -> dict[str, Any]:
        """The keys that are set, as `NSAAttention` takes them."""
        return self.model_dump(exclude_none=True)


class ModelConfig(ConfigSection):
    """Sizes and options of the transformer."""

    dim: Count = Field(default=768, description="Width of the residual stream.")
    n_layers: Count = Field(default=12, description="Number of transformer blocks.")
    attention: Annotated[
        tuple[AttentionKind, ...], TEXT_OR_LIST, ValueDescription("nsa, dense, window, global or merged, or a list")
    ] = Field(
        default=("nsa",),
        description="Kind of attention, or a list that is repeated over the layers, e.g. [dense, nsa, nsa, nsa]. "
        "dense: all tokens; window: the last model.window; global: compressed and selected branch without the window; "
        "merged: one softmax over selected blocks and window, equal to dense for the first n_sel · l_sel + w tokens.",
    )
    window: Tokens | None = Field(
        default=None,
        description="Length of the window of layers of kind window, including the query's own token; null means nsa.w.",
    )
    n_heads: Count = Field(default=12, description="Query heads per block.")
    n_kv_groups: Count = Field(
        default=2, description="Key/value groups; the heads of a group share keys, values and selected blocks."
    )
    d_k: Count = Field(default=64, description="Query and key width per head; even, because RoPE rotates pairs.")
    d_v: Count = Field(default=64, description="Value width per head.")
    vocab_size: Count | None = Field(
        default=None, description="Rows of the embedding; null uses the tokenizer's vocabulary size."
    )
    ffn_dim: Count | None = Field(
        default=None, description="Hidden width of the SwiGLU; null means 8/3 of dim, rounded up to a multiple of 64."
    )
    ffn_bias: bool = Field(default=False, description="Biases of the feed-forward's three projections.")
    tie_embeddings: bool = Field(default=False, description="Share the input embedding with the output projection.")
    norm_eps: Positive = Field(default=1e-5, description="Epsilon inside RMSNorm.")
    post_norm: bool = Field(
        default=False,
        description="RMSNorm on the outputs of attention and feed-forward, before they are added to the residual "
        "stream, instead of on their inputs (as in OLMo 2).",
    )
    init_std: Positive = Field(
        default=INIT_STD,
        description="Standard deviation of the initial weights, divided by sqrt(2 · n_layers) for those that write to "
        "the residual stream. A model with a small dim may need more, e.g. 0.08 at dim 64.",
    )
    rope_base: Positive = Field(default=500_000.0, description="Base of the rotary frequencies.")
    rope_scale: Positive = Field(
        default=1.0, description="Positions are divided by this before rotation (linear RoPE scaling)."
    )
    rotary_dim: Count | None = Field(
        default=None,
        description="Channels of each query and key that RoPE rotates, the first ones; even; null means all d_k.",
    )
    rope_layers: Annotated[
        tuple[RopeLayer, ...], TEXT_OR_LIST, ValueDescription("scaled, plain or none, or a list of them")
    ] = Field(
        default=("scaled",),
        description="RoPE of the layers, or a list that is repeated over them, e.g. [scaled, scaled, scaled, none]. "
        "scaled: with rope_scale and rope_scaling; plain: without them; none: no position embedding.",
    )
    rope_angles: RopeAngles = Field(
        default="fp64",
        description="Precision of RoPE's frequencies and angles. fp32: the cosines and sines that Transformers "
        "computes, for models trained with them; they are less exact far from the start.",
    )
    qk_norm: bool = Field(default=False, description="RMSNorm over queries and keys before RoPE (with norm_eps).")
    qk_norm_per: QKNormPer = Field(
        default="head",
        description="qk_norm over the channels of each head, with one weight for all heads, or over those of all "
        "heads of the layer together (as in OLMo 2); layer needs one set of keys (nsa.kv other than per_branch).",
    )
    qkv_bias: bool = Field(default=False, description="Biases of the query, key and value projections.")
    attention_out_bias: bool = Field(
        default=False,
        description="Bias of the attention's output projection; both are attention_bias in a Hugging Face config.",
    )
    rope_scaling: RopeScalingConfig = RopeScalingConfig()

    @property
    def ffn_size(self) -> int:
        """Hidden width of the SwiGLU; the default if `ffn_dim` is null."""
        return self.ffn_dim if self.ffn_dim is not None else default_ffn_dim(self.dim)

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        heads, scaling = (self.n_heads, self.n_kv_groups, self.d_k), (self.rope_scaling.given, self.rope_scale)
        rotation, patterns = (self.rotary_dim, self.rope_angles), (self.attention, self.rope_layers)
        return rules.enforce(self, rules.check_model(*heads, *scaling, *rotation, *patterns, self.n_layers))


class SparseAttentionConfig(ConfigSection):
    """Native Sparse Attention: the three branches and the gate that mixes them."""

    preset: Changeable[Preset] = Field(
        default="base",
        description="Defaults of the settings below. paper: phi mlp with phi_pos_emb, gate sigmoid, kv per_branch "
        "and sliding_gate_init 0, as published. long_256k, long_1m: larger strides for rows of 256k tokens and more, "
        "where compressed keys are most of what a query reads; selection is coarser, and its effect on quality was not "
        "measured. A setting that is given wins over it.",
    )
    l: Tokens = Field(default=Geometry.l, description="Length of a compression block.")
    d: Tokens = Field(default=Geometry.d, description="Stride between compression blocks; divides l and l_sel.")
    l_sel: Tokens = Field(default=Geometry.l_sel, description="Length of a selection block.")
    n_sel: Annotated[int, Field(ge=1), SettingUnit("blocks")] = Field(
        default=Geometry.n_sel, description="Selected blocks per query, including the first block and two local ones."
    )
    w: Tokens = Field(default=Geometry.w, description="Length of the sliding window, including the query's own token.")
    coarse_block: Annotated[int, Field(ge=0), SettingUnit("entries, 0 = off")] = Field(
        default=0,
        description="Second level of the compressed branch, for 256k tokens and more: compressed entries per coarse "
        "block. A query scores coarse blocks and reads the entries of the best n_coarse instead of all.",
    )
    n_coarse: Annotated[int, Field(ge=1), SettingUnit("blocks")] = Field(
        default=N_COARSE, description="Coarse blocks that a query reads, including the first and two local ones."
    )
    phi: Phi = Field(
        default="softmax",
        description="Compression operator that pools a block into one token: the mean, a sum with a learned weight "
        "per place in the block, a sum with softmax weights of learned token scores, one learned map, or two with a "
        "GELU between.",
    )
    phi_pos_emb: bool = Field(
        default=False, description="Learned intra-block position embedding, added before phi (linear, mlp)."
    )
    gate: Gate = Field(
        default="softmax",
        description="softmax: branch weights sum to 1 (the health limits assume it); sigmoid: as in the paper; tanh: "
        "starts as the selected branch alone, with kv shared equal to dense attention for the first n_sel · l_sel "
        "tokens (2 · sigmoid for that branch, tanh for the others; no entropy is recorded).",
    )
    gate_per: GatePer = Field(default="head", description="One gate per query head or per group of heads.")
    gate_temperature: Positive = Field(
        default=1.0, description="Gate logits are divided by this; a value above 1 makes the branch weights more equal."
    )
    sliding_gate_init: Changeable[float] = Field(
        default=SLIDING_GATE_INIT,
        description="Initial bias of the sliding branch's gate. -3: the window starts with 2 % of the weights "
        "(softmax), so that its gradients do not hide those of far tokens; 0: all branches start with equal weights. "
        "Without effect with gate tanh.",
    )
    rope_compressed: RopeCompressed = Field(
        default="auto",
        description="Rotate keys before compression or compressed keys after it; auto: before for avg and "
        "weighted, else after.",
    )
    kv: KVProjections = Field(
        default="shared",
        description="Keys and values: one projection per branch as in the paper, shared keys with a value per branch, "
        "or one of both shared by the three branches, as always in layers of kind merged.",
    )
    selector_loss: Changeable[Annotated[float, Field(ge=0)]] = Field(
        default=0.0,
        description="Weight of an auxiliary loss that trains the compressed keys to score blocks by the attention mass "
        "that the selected branch gives them; if kv is not per_branch, it trains phi alone. Not part of the logged "
        "loss; 0: none.",
    )
    selector_loss_share: Changeable[Annotated[float, Field(gt=0, le=1)]] = Field(
        default=0.0625, description="Share of the queries that the selector loss samples at each step."
    )
    selector_blocks: Changeable[SelectorBlocks] = Field(
        default="chosen",
        description="Blocks that the selector loss compares: chosen, by the mass that the selected branch gives each; "
        "all, by the mass that dense attention over the same keys gives each, as in a warm-up after a conversion. "
        "all costs the scores of dense attention for the sampled queries.",
    )

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        name = given.get("preset")
        return {**PRESETS[name], **given} if isinstance(name, str) and name in PRESETS else given

    @property
    def arguments(self) -> dict[str, Any]:
        """As `NSAAttention` takes them."""
        return self.model_dump(exclude={"preset"})

    @property
    def geometry(self) -> Geometry:
        """The block sizes, for everything that computes with them."""
        return Geometry(self.l, self.d, self.l_sel, self.n_sel, self.w)

    @field_validator("rope_compressed")
    @classmethod
    def _resolve_auto(cls, value: str, info: ValidationInfo) -> str:
        """Resolve `auto`, so that everything that reads or records the settings sees the result."""
        return resolve_rope_compressed(info.data["phi"], value) if "phi" in info.data else value

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        sizes = {name: getattr(self, name) for name in Geometry.__dataclass_fields__}
        of_loss = self.kv, self.selector_loss, self.selector_loss_share
        of_phi = self.phi, self.phi_pos_emb, self.rope_compressed
        return rules.enforce(self, rules.check_nsa(sizes, *of_phi, *of_loss, self.coarse_block, self.n_coarse))


class RuntimeConfig(ConfigSection):
    """Device, precision and memory options."""

    device: Changeable[
        Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$"), ValueDescription("auto, cpu, cuda or cuda:N")]
    ] = Field(default="auto", description="cpu, cuda, cuda:N, or auto: a GPU if there is one, chosen once and logged.")
    precision: Changeable[Precision] = Field(
        default="bf16",
        description="Compute precision; the loss is always fp32. Long runs need bf16; fp16 cannot train.",
    )
    gradient_checkpointing: Changeable[Annotated[Checkpointing, OFF_OR_FULL]] = Field(
        default="off",
        description="Recompute activations in the backward pass: less memory, more time. selective keeps the results "
        "of the attention kernels and recomputes the rest; true means full, false means off.",
    )
    compile: Changeable[Annotated[Compilation, OFF_OR_ON]] = Field(
        default="auto",
        description="Compile each block with torch.compile; auto: on a GPU. Compiled and uncompiled losses differ by "
        "rounding.",
    )
    use_flash: Changeable[bool] = Field(
        default=True, description="Let kernels=auto select fused kernels; false restricts it to the portable backend."
    )
    prefill_chunk: Changeable[Tokens] = Field(
        default=2048, description="Prompt tokens per forward pass of `nsa generate` and `nsa serve`."
    )
    threads: Changeable[Count | None] = Field(
        default=None,
        description="CPU threads of torch; null keeps torch's default. Bitwise resume needs the same number.",
    )
    kernel_cache: Changeable[Text | None] = Field(
        default=None,
        description="Folder for compiled CPU kernels and tuned tiles; null: the user's cache or a temporary folder.",
    )
    tune_kernels: Changeable[bool] = Field(
        default=False,
        description="Time tile sizes on the GPU at first use and keep the fastest; if false, GPUs of one model give "
        "bitwise equal results.",
    )


class KernelsConfig(ConfigSection):
    """Kernel backend of each branch. A backend requested by name that cannot run is an error, never replaced.

    The command line wins over NSA_KERNEL_<BRANCH>, that over NSA_KERNEL, that over the config file and the profile.
    """

    compressed: Changeable[Text] = Field(
        default="auto", description="Backend of compressed attention; auto selects one and logs the reason."
    )
    select: Changeable[Text] = Field(default="auto", description="Backend of top-n block selection.")
    selected: Changeable[Text] = Field(default="auto", description="Backend of attention over the selected blocks.")
    sliding: Changeable[Text] = Field(default="auto", description="Backend of sliding-window attention.")
