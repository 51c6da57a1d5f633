"""`AttentionConfig`: every option of an attention layer with its default, description and rules, in one place.

The module takes it; the engine's mixer, the settings of a run, config.json of exported models, conversion and the
comparison of models are derived from its fields (`nsa.option_fields`). Needs no torch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from typing import Any, ClassVar, Literal

from nsa.core.pooling import OPERATORS, PoolingOperator, phis
from nsa.errors import BrokenRule, require_rules
from nsa.geometry import CoarseConfig, Geometry
from nsa.option_fields import (
    ARGUMENT_NAMES,
    OptionNames,
    broken_limits,
    from_options,
    option,
    option_values,
    options_of,
)
from nsa.options import RopeLayer

Gate = Literal["softmax", "sigmoid", "tanh"]
_GatePer = Literal["head", "group"]
RopeCompressed = Literal["auto", "before", "after"]
_KVProjections = Literal["per_branch", "shared_keys", "shared"]
SelectorBlocks = Literal["chosen", "all"]
RopeType = Literal["default", "linear", "llama3", "yarn"]
_RopeAngles = Literal["fp64", "fp32"]
_QKNormPer = Literal["head", "layer"]

_BRANCHES = 3
_LARGEST_SUGGESTION = 1024
_WITH_POS_EMB = phis(lambda operator: operator.takes_pos_emb)
_OF_ROTATED_KEYS = phis(lambda operator: not operator.needs_unrotated_keys)


@dataclass(frozen=True, kw_only=True)
class CompressionConfig:
    """How blocks are pooled (φ), and where RoPE is applied to compressed keys."""

    phi: str = option(
        "softmax",
        "Compression operator that pools a block into one token: the mean, a sum with a learned weight per place in "
        "the block, a sum with softmax weights of learned token scores, one learned map, or two with a GELU between.",
        choices=tuple(OPERATORS),
    )  # fmt: skip
    phi_pos_emb: bool = option(
        False, f"Learned intra-block position embedding, added before phi ({', '.join(_WITH_POS_EMB)})."
    )
    rope_compressed: RopeCompressed = option(
        "auto", "Rotate keys before compression or compressed keys after it; auto: before for "
        f"{' and '.join(_OF_ROTATED_KEYS)}, else after.",
    )  # fmt: skip

    @property
    def operator(self) -> PoolingOperator:
        return OPERATORS[self.phi]

    @property
    def rotated(self) -> str:
        """`before` or `after`: where keys are rotated, with `auto` decided by φ."""
        if self.rope_compressed != "auto":
            return self.rope_compressed
        return "after" if self.operator.needs_unrotated_keys else "before"

    def broken_rules(self, names: OptionNames = ARGUMENT_NAMES) -> Iterator[BrokenRule]:
        """A φ that reads channels cannot compress keys that are rotated already: its result would depend on where in
        the document they stand. A sum over tokens with fixed weights commutes with the rotation."""
        if self.phi_pos_emb and not self.operator.takes_pos_emb:
            yield BrokenRule(
                (names.phi_pos_emb, names.phi),
                f"{names.phi_pos_emb} (true) does not fit {names.phi} ({self.phi}): in a mean or a weighted sum of "
                f"tokens a position only adds a constant. Set {names.phi}="
                f"{' or '.join(_WITH_POS_EMB)}, or {names.phi_pos_emb}=false.",
            )
        if self.rope_compressed == "before" and self.operator.needs_unrotated_keys:
            yield BrokenRule(
                (names.rope_compressed, names.phi),
                f"{names.rope_compressed} (before) does not fit {names.phi} ({self.phi}): {self.phi} reads the keys' "
                f"channels, which does not commute with the rotation, so scores would depend on absolute positions. "
                f"Set {names.rope_compressed}=after or auto.",
            )


@dataclass(frozen=True, kw_only=True)
class GateConfig:
    """The learned gates that mix the branches."""

    kind: Gate = option(
        "softmax",
        "softmax: branch weights sum to 1 (the health limits assume it); sigmoid: as in the paper; tanh: starts as the "
        "selected branch alone, with kv shared equal to dense attention for the first n_sel · l_sel tokens (2 · "
        "sigmoid for that branch, tanh for the others; no entropy is recorded).", name="gate",
    )  # fmt: skip
    per: _GatePer = option("head", "One gate per query head or per group of heads.", name="gate_per")
    temperature: float = option(
        1.0, "Gate logits are divided by this; a value above 1 makes the branch weights more equal.",
        name="gate_temperature", above=0, because="gates are divided by it",
    )  # fmt: skip
    sliding_init: float = option(
        -3.0,
        "Initial bias of the sliding branch's gate. -3: the window starts with 2 % of the weights (softmax), so that "
        "its gradients do not hide those of far tokens; 0: all branches start with equal weights. Without effect with "
        "gate tanh.", name="sliding_gate_init", because="it is the initial bias of a gate", may_change=True,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SelectorConfig:
    """What trains the choice of blocks (`nsa.core.selector_loss`)."""

    loss: float = option(
        0.0,
        "Weight of an auxiliary loss that trains the compressed keys to score blocks by the attention mass that the "
        "selected branch gives them; if kv is not per_branch, it trains phi alone. Not part of the logged loss; 0: "
        "none.", name="selector_loss", at_least=0, because="it is a weight", may_change=True,
    )  # fmt: skip
    loss_share: float = option(
        0.0625, "Share of the queries that the selector loss samples at each step.", name="selector_loss_share",
        above=0, at_most=1, because="it is a share of the queries", may_change=True,
    )  # fmt: skip
    blocks: SelectorBlocks = option(
        "chosen",
        "Blocks that the selector loss compares: chosen, by the mass that the selected branch gives each; all, by the "
        "mass that dense attention over the same keys gives each, as in a warm-up after a conversion. all costs the "
        "scores of dense attention for the sampled queries.", name="selector_blocks", may_change=True,
    )  # fmt: skip

    def broken_rules(
        self, kv: str, compression: CompressionConfig, names: OptionNames = ARGUMENT_NAMES
    ) -> Iterator[BrokenRule]:
        if self.loss > 0 and kv != "per_branch" and not compression.operator.has_weights:
            yield BrokenRule(
                (names.selector_loss, names.kv, names.phi),
                f"{names.selector_loss} ({self.loss}) has nothing to train with {names.kv} ({kv}) and {names.phi} "
                f"({compression.phi}): where branches share keys it trains phi alone, which has no weights. Set "
                f"{names.phi}={CompressionConfig.phi} or {names.selector_loss}=0.",
            )


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """RoPE scaling for a longer context, with the keys of `rope_scaling` in a Hugging Face config."""

    rope_type: RopeType = option("default", "Kind of scaling; default is none.")
    factor: float | None = option(
        None, "Divisor of the scaled frequencies: how much longer the context becomes.", above=0
    )
    original_max_position_embeddings: int | None = option(
        None, "Context length before scaling (llama3, yarn).", unit="tokens", at_least=1
    )
    low_freq_factor: float | None = option(
        None, "Pairs with fewer turns than this within the original context are divided by factor (llama3).", above=0
    )
    high_freq_factor: float | None = option(
        None, "Pairs with more turns than this within the original context keep their frequency (llama3).", above=0
    )
    beta_fast: float | None = option(
        None, "As high_freq_factor, for yarn; null means 32. Between the two, a linear ramp.", above=0
    )
    beta_slow: float | None = option(None, "As low_freq_factor, for yarn; null means 1.", above=0)
    truncate: bool | None = option(None, "Round the ends of yarn's ramp to whole pairs; null means true.")
    attention_factor: float | None = option(
        None, "Multiplier of cosines and sines (yarn); null means 0.1 · ln(factor) + 1.", above=0
    )
    mscale: float | None = option(
        None, "With mscale_all_dim, replaces the 0.1 of attention_factor by a ratio of two such terms (yarn).", above=0
    )
    mscale_all_dim: float | None = option(None, "Divisor of that ratio; see mscale.", above=0)


_REQUIRED_BY_ROPE_TYPE: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
_OPTIONAL_BY_ROPE_TYPE: dict[str, tuple[str, ...]] = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
}


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding of queries and keys (`nsa.core.rope`)."""

    SECTION: ClassVar[str] = "model"

    base: float = option(500_000.0, "Base of the rotary frequencies.", name="rope_base", exported="rope_theta", above=0)
    scale: float = option(
        1.0, "Positions are divided by this before rotation (linear RoPE scaling).", name="rope_scale", above=0
    )
    scaling: Mapping[str, Any] | None = option(None, RopeScaling.__doc__ or "", name="rope_scaling")
    layer: RopeLayer = option(
        "scaled", "scaled: with rope_scale and rope_scaling; plain: without them; none: no position embedding.",
        name="rope", key="rope_layers", exported="rope_layers", per_layer=True,
    )  # fmt: skip
    rotary_dim: int | None = option(
        None, "Channels of each query and key that RoPE rotates, the first ones; even; null means all d_k.", at_least=1
    )
    angles: _RopeAngles = option(
        "fp64",
        "Precision of RoPE's frequencies and angles. fp32: the cosines and sines that Transformers computes, for "
        "models trained with them; they are less exact far from the start.", name="rope_angles",
    )  # fmt: skip

    @property
    def checked_scaling(self) -> dict[str, Any]:
        """The scaling with its type as `rope_type`, without keys that are null and without `rope_theta`."""
        scaling = {key: value for key, value in (self.scaling or {}).items() if value is not None}
        kind = scaling.pop("type", None)
        kind = scaling.pop("rope_type", kind) or "default"
        scaling.pop("rope_theta", None)
        return {"rope_type": kind, **scaling}

    def broken_rules(self, d_k: int, names: OptionNames = ARGUMENT_NAMES) -> Iterator[BrokenRule]:
        if (theta := (self.scaling or {}).get("rope_theta") or self.base) != self.base:
            yield BrokenRule(
                (names.rope_scaling, names.rope_base),
                f"{names.rope_scaling} has a rope_theta ({theta}) other than {names.rope_base} ({self.base}). Set "
                f"{names.rope_base} to it.",
            )
        yield from self._broken_scaling_rules(names)
        if (size := self.rotary_dim) is not None and (size < 2 or size % 2 or size > d_k):
            fix = max(2, min(size + size % 2, d_k - d_k % 2))
            yield BrokenRule(
                (names.rotary_dim, names.d_k),
                f"{names.rotary_dim} ({size}) must be even, at least 2 and at most {names.d_k} ({d_k}): RoPE rotates "
                f"pairs of a key's first channels. Set e.g. {names.rotary_dim}={fix}, or null for all; for layers "
                f"without RoPE set {names.rope}=none.",
            )

    def _broken_scaling_rules(self, names: OptionNames) -> Iterator[BrokenRule]:
        scaling, section = self.checked_scaling, names.rope_scaling
        kind, kind_key = scaling["rope_type"], f"{section}.rope_type"
        if kind not in _REQUIRED_BY_ROPE_TYPE:
            options = ", ".join(_REQUIRED_BY_ROPE_TYPE)
            yield BrokenRule((kind_key,), f"{kind_key} is {kind!r}: there is no such option. Use one of: {options}.")
            return
        required = _REQUIRED_BY_ROPE_TYPE[kind]
        known = (*required, *_OPTIONAL_BY_ROPE_TYPE.get(kind, ()))
        unknown = [key for key in scaling if key not in known and key != "rope_type"]
        missing = [key for key in required if key not in scaling]
        for key in unknown:
            yield BrokenRule(
                (f"{section}.{key}", kind_key),
                f"{section}.{key} has no meaning for {kind_key} ({kind}), whose keys are: "
                f"{', '.join(known) or 'none'}. Set {section}.{key}=null, or another rope_type.",
            )
        for key in missing:
            yield BrokenRule(
                (f"{section}.{key}", kind_key),
                f"{section}.{key} (null) is required for {kind_key} ({kind}). Set it as in the model's config.",
            )
        if not unknown and not missing and kind != "default":
            yield from self._broken_scaling_values(kind, scaling, names)

    def _broken_scaling_values(self, kind: str, scaling: Mapping[str, Any], names: OptionNames) -> Iterator[BrokenRule]:
        section = names.rope_scaling
        if self.scale != 1:
            yield BrokenRule(
                (names.rope_scale, f"{section}.rope_type"),
                f"{names.rope_scale} ({self.scale}) and {section}.rope_type ({kind}) both scale positions: only one of "
                f"them may. Set {names.rope_scale}=1.",
            )
        if scaling["factor"] <= 0:
            yield BrokenRule(
                (f"{section}.factor",),
                f"{section}.factor ({scaling['factor']}) must be above 0: frequencies are divided by it. Set e.g. "
                f"{section}.factor=8.",
            )
        if kind == "llama3" and not 0 < (low := scaling["low_freq_factor"]) < (high := scaling["high_freq_factor"]):
            yield BrokenRule(
                (f"{section}.low_freq_factor", f"{section}.high_freq_factor"),
                f"{section}.low_freq_factor ({low}) must be above 0 and below {section}.high_freq_factor ({high}): the "
                f"range between them is interpolated. Set them as in the model's config, e.g. 1 and 4.",
            )
        if kind == "yarn" and (betas := yarn_betas(scaling))[0] <= betas[1]:
            yield BrokenRule(
                (f"{section}.beta_fast", f"{section}.beta_slow"),
                f"{section}.beta_fast ({betas[0]}) must be above {section}.beta_slow ({betas[1]}): the range between "
                f"them is interpolated. Set them as in the model's config, e.g. 32 and 1.",
            )


def yarn_betas(scaling: Mapping[str, Any]) -> tuple[float, float]:
    """Turns within the original context above which a frequency is kept, and below which it is divided by `factor`."""
    return scaling.get("beta_fast") or 32.0, scaling.get("beta_slow") or 1.0


@dataclass(frozen=True, kw_only=True)
class QKNormConfig:
    """RMSNorm over queries and keys."""

    SECTION: ClassVar[str] = "model"

    used: bool = option(False, "RMSNorm over queries and keys before RoPE (with norm_eps).", name="qk_norm")
    eps: float = option(
        1e-6, "Epsilon inside the norm of queries and keys.", name="qk_norm_eps", key="norm_eps", above=0
    )
    per: _QKNormPer = option(
        "head",
        "qk_norm over the channels of each head, with one weight for all heads, or over those of all heads of the "
        "layer together (as in OLMo 2); layer needs one set of keys (nsa.kv other than per_branch).",
        name="qk_norm_per",
    )  # fmt: skip

    def broken_rules(self, kv: str, names: OptionNames = ARGUMENT_NAMES) -> Iterator[BrokenRule]:
        """A norm over the keys of all groups together has one weight per channel of one set of keys."""
        if self.per != "layer":
            return
        if not self.used:
            yield BrokenRule(
                (names.qk_norm_per, names.qk_norm),
                f"{names.qk_norm_per} ({self.per}) has no meaning with {names.qk_norm} (false): there is no norm. Set "
                f"{names.qk_norm}=true or {names.qk_norm_per}=head.",
            )
        if kv == "per_branch":
            yield BrokenRule(
                (names.qk_norm_per, names.kv),
                f"{names.qk_norm_per} ({self.per}) needs one set of keys and {names.kv} ({kv}) has one per branch: the "
                f"norm would couple the branches. Set {names.kv}=shared or {names.qk_norm_per}=head.",
            )


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """One attention layer. The owner of every option, its default and its rules.

    `NSAAttention` takes one, or the options by name, and `attention_config` builds one from those.
    """

    SECTION: ClassVar[str] = "model"

    dim: int = option(about="Width of the residual stream.", exported="hidden_size", at_least=1, usual=768)
    n_heads: int = option(about="Query heads per block.", exported="num_attention_heads", at_least=1, usual=12)
    n_kv_groups: int = option(
        about="Key/value groups; the heads of a group share keys, values and selected blocks.",
        exported="num_key_value_heads", at_least=1, usual=2,
    )  # fmt: skip
    d_k: int = option(
        about="Query and key width per head; even, because RoPE rotates pairs.", exported="head_dim", at_least=1,
        usual=64,
    )  # fmt: skip
    d_v: int = option(about="Value width per head.", exported="v_head_dim", at_least=1, usual=64)
    geometry: Geometry = Geometry()
    coarse: CoarseConfig = CoarseConfig()
    compression: CompressionConfig = CompressionConfig()
    gate: GateConfig = GateConfig()
    kv: _KVProjections = option(
        "shared",
        "Keys and values: one projection per branch as in the paper, shared keys with a value per branch, or one of "
        "both shared by the three branches, as always in layers of kind merged.", section="nsa",
    )  # fmt: skip
    selector: SelectorConfig = SelectorConfig()
    rope: RopeConfig = RopeConfig()
    qk_norm: QKNormConfig = QKNormConfig()
    bias: bool = option(False, "Biases of the query, key and value projections.", key="qkv_bias")
    out_bias: bool = option(
        False, "Bias of the attention's output projection; both are attention_bias in a Hugging Face config.",
        key="attention_out_bias",
    )  # fmt: skip
    init_std: float = option(
        0.02,
        "Standard deviation of the initial weights, divided by sqrt(2 · n_layers) for those that write to the residual "
        "stream. A model with a small dim may need more, e.g. 0.08 at dim 64.", exported="initializer_range", above=0,
        because="it is the standard deviation of the initial weights",
    )  # fmt: skip

    def __post_init__(self) -> None:
        require_rules(self.broken_rules())

    def broken_rules(self, names: OptionNames = ARGUMENT_NAMES) -> Iterator[BrokenRule]:
        """Every rule that does not hold, with options spelled by `names`; relations only between possible values."""
        if limits := list(broken_limits(self, names)):
            yield from limits
            return
        if self.n_heads % self.n_kv_groups:
            yield BrokenRule(
                (names.n_heads, names.n_kv_groups),
                f"{names.n_kv_groups} ({self.n_kv_groups}) must divide {names.n_heads} ({self.n_heads}): every group "
                f"has the same number of heads. Set e.g. "
                f"{names.n_kv_groups}={_divisor_up_to(self.n_kv_groups, self.n_heads)}.",
            )
        if self.d_k % 2:
            yield BrokenRule(
                (names.d_k,),
                f"{names.d_k} ({self.d_k}) must be even: RoPE rotates pairs. Set e.g. {names.d_k}={self.d_k + 1}.",
            )
        yield from self.geometry.broken_rules(names)
        yield from self.coarse.broken_rules(self.geometry, names)
        yield from self.compression.broken_rules(names)
        yield from self.selector.broken_rules(self.kv, self.compression, names)
        yield from self.rope.broken_rules(self.d_k, names)
        yield from self.qk_norm.broken_rules(self.kv, names)

    @property
    def kv_streams(self) -> tuple[int, int]:
        """How many projections of the keys, and of the values, each kv group has for the three branches."""
        return (_BRANCHES if self.kv == "per_branch" else 1), (1 if self.kv == "shared" else _BRANCHES)

    def options(self) -> dict[str, Any]:
        """Every option by its name as an argument."""
        return option_values(self)

    def changed(self, **options: Any) -> "AttentionConfig":
        """This layer with other values of some options, named as arguments."""
        return _checked(self.options() | _known(options)) if options else self


OPTIONS = options_of(AttentionConfig)
"""Every option of a layer, in the order of the fields."""
_OPTION_NAMES = tuple(each.name for each in OPTIONS)
_SIZES = _OPTION_NAMES[: _OPTION_NAMES.index("d_v") + 1 + len(fields(Geometry))]
"""Options that may be given by position."""
CHOICES = {each.name: each.choices for each in OPTIONS if each.choices}
"""The values of each enumerated option."""
INIT_STD: float = AttentionConfig.init_std
SLIDING_GATE_INIT: float = GateConfig.sliding_init
SETTING_NAMES = OptionNames({each.name: each.setting for each in OPTIONS})
EXPORTED_NAMES = OptionNames({each.name: each.exported for each in OPTIONS})

AttentionConfig.__doc__ = f"{AttentionConfig.__doc__}\n    Options by name as arguments:\n" + "".join(
    f"\n    {each.name}: {each.about}" for each in OPTIONS
)


def attention_config(config: AttentionConfig | int | None = None, *sizes: int, **options: Any) -> AttentionConfig:
    """A config from options by name, sizes also by position; or the config given, with these options changed."""
    if isinstance(config, AttentionConfig):
        if sizes:
            raise TypeError("sizes were given beside a config, which has them: change them by name")
        return config.changed(**options)
    positional = () if config is None else (config, *sizes)
    if len(positional) > len(_SIZES):
        raise TypeError(f"{len(positional)} values were given by position, for {', '.join(_SIZES)}: name the rest")
    if twice := [name for name in _SIZES[: len(positional)] if name in options]:
        raise TypeError(f"{', '.join(twice)} was given by position and by name")
    values = dict(zip(_SIZES, positional, strict=False)) | _known(options)
    if missing := [each.name for each in OPTIONS if each.default is MISSING and each.name not in values]:
        raise TypeError(f"missing options of the attention: {', '.join(missing)}")
    return _checked(values)


def _checked(values: Mapping[str, Any]) -> AttentionConfig:
    config = from_options(AttentionConfig, values)
    require_rules(config.broken_rules())
    return config


def _known(options: dict[str, Any]) -> dict[str, Any]:
    for name in sorted(options.keys() - {*_OPTION_NAMES}):
        like = get_close_matches(name, _OPTION_NAMES, n=1)
        hint = f" Did you mean {like[0]}?" if like else ""
        raise TypeError(f"{name!r} is no option of the attention.{hint}")
    return options


def _divisor_up_to(limit: int, number: int) -> int:
    """The largest divisor worth suggesting, found in bounded time for numbers of any size."""
    return next(divisor for divisor in range(min(limit, _LARGEST_SUGGESTION), 0, -1) if number % divisor == 0)
