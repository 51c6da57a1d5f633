"""Settings of the model and of how it is computed: `model`, `nsa`, `runtime`, `kernels`."""

from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import Field, ValidationInfo, create_model, field_validator, model_validator

from nsa.core.attention_config import AttentionConfig, CompressionConfig, RopeCompressed, RopeScaling
from nsa.geometry import Geometry, default_ffn_dim
from nsa.option_fields import LayerOption, options_of
from nsa.options import AttentionKind, Checkpointing, Compilation, Precision, Preset, RopeLayer
from nsa_train.config import rules
from nsa_train.config.setting_types import (
    OFF_OR_FULL,
    OFF_OR_ON,
    TEXT_OR_LIST,
    Changeable,
    ConfigSection,
    Count,
    MayChangeOnResume,
    Positive,
    SettingUnit,
    Text,
    Tokens,
    ValueDescription,
)


def _option_section(
    cls: type, section: str, *, without: tuple[str, ...] = (), base: type[ConfigSection] = ConfigSection
) -> Any:
    """Make a section of settings from a dataclass of options: those that belong to `section`, after those of `base`."""
    settings = {
        each.setting.removeprefix(f"{section}."): each
        for each in options_of(cls)
        if each.setting.rpartition(".")[0] == section
    }
    definitions: dict[str, Any] = {
        key: (_setting_type(each), Field(default=each.usual, description=each.about))
        for key, each in settings.items()
        if key not in without
    }
    return create_model(f"{cls.__name__}Section", __base__=base, **definitions)


def _setting_type(option: LayerOption) -> Any:
    """The type of a setting with the limits and the unit of its option."""
    optional = type(None) in get_args(option.type)
    inner: Any = next(part for part in get_args(option.type) if part is not type(None)) if optional else option.type
    if option.choices and inner is str:
        inner = Literal[option.choices]
    limits: dict[str, Any] = dict(ge=option.at_least, gt=option.above, le=option.at_most)
    if bounds := {name: limit for name, limit in limits.items() if limit is not None}:
        inner = Annotated[inner, Field(**bounds)]
    if option.unit:
        inner = Annotated[inner, SettingUnit(option.unit)]
    if optional:
        inner = inner | None
    return Annotated[inner, MayChangeOnResume()] if option.may_change else inner


_OF_MODEL = ("norm_eps", "rope_layers", "rope_scaling")
"""Settings of `model` that are more than an option of the attention: other parts have them too, or they are lists."""

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


class RopeScalingConfig(_option_section(RopeScaling, "nsa")):  # type: ignore[misc]
    __doc__ = RopeScaling.__doc__

    @property
    def as_mapping(self) -> dict[str, Any] | None:
        """The keys that are set, as an attention layer takes them; None without scaling."""
        keys: dict[str, Any] = self.model_dump(exclude_none=True)
        return None if keys == {"rope_type": "default"} else keys


class ModelConfig(_option_section(AttentionConfig, "model", without=_OF_MODEL)):  # type: ignore[misc]
    """Sizes and options of the transformer."""

    NAME: ClassVar[str] = "model"

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
    rope_layers: Annotated[
        tuple[RopeLayer, ...], TEXT_OR_LIST, ValueDescription("scaled, plain or none, or a list of them")
    ] = Field(
        default=("scaled",),
        description="RoPE of the layers, or a list that is repeated over them, e.g. [scaled, scaled, scaled, none]. "
        "scaled: with rope_scale and rope_scaling; plain: without them; none: no position embedding.",
    )
    rope_scaling: RopeScalingConfig = RopeScalingConfig()

    @property
    def ffn_size(self) -> int:
        """Hidden width of the SwiGLU; the default if `ffn_dim` is null."""
        return self.ffn_dim if self.ffn_dim is not None else default_ffn_dim(self.dim)

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        of_layers = rules.check_layers(self.attention, self.rope_layers, self.window, self.n_layers)
        return rules.enforce(self, [*rules.check_section(self), *of_layers])


class _PresetSection(ConfigSection):
    preset: Changeable[Preset] = Field(
        default="base",
        description="Defaults of the settings below. paper: phi mlp with phi_pos_emb, gate sigmoid, kv per_branch "
        "and sliding_gate_init 0, as published. long_256k, long_1m: larger strides for rows of 256k tokens and more, "
        "where compressed keys are most of what a query reads; selection is coarser, and its effect on quality was not "
        "measured. A setting that is given wins over it.",
    )


class SparseAttentionConfig(_option_section(AttentionConfig, "nsa", base=_PresetSection)):  # type: ignore[misc]
    """Native Sparse Attention: the three branches and the gate that mixes them."""

    NAME: ClassVar[str] = "nsa"

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        name = values.get("preset")
        return {**PRESETS[name], **values} if isinstance(name, str) and name in PRESETS else values

    @property
    def geometry(self) -> Geometry:
        """The block sizes, for everything that computes with them."""
        return Geometry(self.l, self.d, self.l_sel, self.n_sel, self.w)

    @field_validator("rope_compressed")
    @classmethod
    def _resolve_auto(cls, value: RopeCompressed, info: ValidationInfo) -> str:
        """Resolve `auto`, so that everything that reads or records the settings sees the result."""
        return CompressionConfig(phi=info.data["phi"], rope_compressed=value).rotated if "phi" in info.data else value

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        return rules.enforce(self, rules.check_section(self))


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
    peak_tflops: Changeable[Annotated[Positive, SettingUnit("TFLOP/s")] | None] = Field(
        default=None,
        description="Peak of one device, for the model FLOPs utilization (MFU); null: that of a known GPU in the run's "
        "precision, else no MFU is recorded.",
    )
    usd_per_hour: Changeable[Annotated[Positive, SettingUnit("USD")] | None] = Field(
        default=None, description="Price of one device for an hour; null: no tokens per dollar are recorded."
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
