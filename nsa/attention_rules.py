"""Validation of the attention's arguments (heads, φ, RoPE, …), shared by the settings of a run and `NSAAttention`.

Needs no torch. A rule that does not hold is a `BrokenRule` with the settings concerned and a message.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from nsa.errors import BrokenRule
from nsa.options import (
    ATTENTION_KINDS,
    PHIS,
    QK_NORMS_PER,
    ROPE_ANGLES,
    ROPE_COMPRESSED,
    ROPE_LAYERS,
    ROPE_TYPES,
    AttentionKind,
)

T = TypeVar("T")

PHIS_WITH_POS_EMB = ("linear", "mlp")
PHIS_OF_UNROTATED_KEYS = ("softmax", *PHIS_WITH_POS_EMB)
"""φ whose result depends on the channels of each key; the others sum keys with fixed weights."""
INIT_STD = 0.02
"""Default of `model.init_std`."""
SLIDING_GATE_INIT = -3.0
"""Default of `nsa.sliding_gate_init`."""

_BRANCHES = 3
_LARGEST_SUGGESTION = 1024
_ROPE_SCALING = "model.rope_scaling"
_REQUIRED_BY_ROPE_TYPE: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
_OPTIONAL_BY_ROPE_TYPE: dict[str, tuple[str, ...]] = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
}


def broken_option(key: str, value: object, options: tuple[str, ...]) -> Iterator[BrokenRule]:
    """Rule of an enumerated setting."""
    if value not in options:
        yield BrokenRule((key,), f"{key} is {value!r}: there is no such option. Use one of: {', '.join(options)}.")


def broken_head_rules(n_heads: int, n_kv_groups: int, d_k: int) -> Iterator[BrokenRule]:
    sizes = {"model.n_heads": n_heads, "model.n_kv_groups": n_kv_groups, "model.d_k": d_k}
    if too_small := {key: size for key, size in sizes.items() if size < 1}:
        for key, size in too_small.items():
            yield BrokenRule((key,), f"{key} ({size}) must be at least 1. Set e.g. {key}=2.")
        return
    if n_heads % n_kv_groups:
        yield BrokenRule(
            ("model.n_heads", "model.n_kv_groups"),
            f"model.n_kv_groups ({n_kv_groups}) must divide model.n_heads ({n_heads}): every group has the same number "
            f"of heads. Set e.g. model.n_kv_groups={_divisor_up_to(n_kv_groups, n_heads)}.",
        )
    if d_k % 2:
        yield BrokenRule(
            ("model.d_k",), f"model.d_k ({d_k}) must be even: RoPE rotates pairs. Set e.g. model.d_k={d_k + 1}."
        )


def broken_rotary_rules(rotary_dim: int | None, d_k: int, rope_angles: str) -> Iterator[BrokenRule]:
    """Rules of the channels that RoPE rotates, and of the precision of its angles."""
    yield from broken_option("model.rope_angles", rope_angles, ROPE_ANGLES)
    if rotary_dim is not None and (rotary_dim < 2 or rotary_dim % 2 or rotary_dim > d_k):
        fix = max(2, min(rotary_dim + rotary_dim % 2, d_k - d_k % 2))
        yield BrokenRule(
            ("model.rotary_dim", "model.d_k"),
            f"model.rotary_dim ({rotary_dim}) must be even, at least 2 and at most model.d_k ({d_k}): RoPE rotates "
            f"pairs of a key's first channels. Set e.g. model.rotary_dim={fix}, or null for all; for layers without "
            f"RoPE set model.rope_layers=none.",
        )


def broken_window_rules(window: int | None) -> Iterator[BrokenRule]:
    if window is not None and window < 1:
        yield BrokenRule(
            ("model.window",),
            f"model.window ({window}) must be at least 1: it counts tokens, with the query's own. Set e.g. "
            f"model.window=512, or null for nsa.w.",
        )


def broken_qk_norm_rules(qk_norm: bool, qk_norm_per: str, kv: str) -> Iterator[BrokenRule]:
    """A norm over the keys of all groups together has one weight per channel of one set of keys."""
    yield from broken_option("model.qk_norm_per", qk_norm_per, QK_NORMS_PER)
    if qk_norm_per != "layer":
        return
    if not qk_norm:
        yield BrokenRule(
            ("model.qk_norm_per", "model.qk_norm"),
            f"model.qk_norm_per ({qk_norm_per}) has no meaning with model.qk_norm (false): there is no norm. Set "
            f"model.qk_norm=true or model.qk_norm_per=head.",
        )
    if kv == "per_branch":
        yield BrokenRule(
            ("model.qk_norm_per", "nsa.kv"),
            f"model.qk_norm_per ({qk_norm_per}) needs one set of keys and nsa.kv ({kv}) has one per branch: the norm "
            f"would couple the branches. Set nsa.kv=shared or model.qk_norm_per=head.",
        )


def _divisor_up_to(limit: int, number: int) -> int:
    """The largest divisor worth suggesting, found in bounded time for numbers of any size."""
    return next(divisor for divisor in range(min(limit, _LARGEST_SUGGESTION), 0, -1) if number % divisor == 0)


def broken_pattern_rules(pattern: Sequence[str], n_layers: int) -> Iterator[BrokenRule]:
    """Rules of `model.attention`: kinds of attention, repeated over the layers."""
    yield from _broken_list_rules("model.attention", pattern, ATTENTION_KINDS, n_layers)


def broken_rope_layer_rules(pattern: Sequence[str], n_layers: int) -> Iterator[BrokenRule]:
    """Rules of `model.rope_layers`: which rotation a layer has, repeated over the layers."""
    yield from _broken_list_rules("model.rope_layers", pattern, ROPE_LAYERS, n_layers)


def _broken_list_rules(
    key: str, pattern: Sequence[str], options: tuple[str, ...], n_layers: int
) -> Iterator[BrokenRule]:
    """Of a list of options that is repeated over the layers."""
    if not pattern:
        yield BrokenRule((key,), f"{key} is an empty list: every layer needs an entry. Set e.g. {key}={options[0]}.")
    for entry in dict.fromkeys(pattern):
        yield from broken_option(key, entry, options)
    if len(pattern) > n_layers >= 1:
        yield BrokenRule(
            (key, "model.n_layers"),
            f"{key} lists {len(pattern)} layers ([{', '.join(pattern)}]) and model.n_layers is {n_layers}: the last "
            f"{len(pattern) - n_layers} would not exist. Set model.n_layers={len(pattern)} or shorten the list.",
        )


def repeated(pattern: Sequence[T], n_layers: int) -> list[T]:
    """The entry of every layer: the pattern, repeated and cut."""
    return [pattern[layer % len(pattern)] for layer in range(n_layers)]


def layer_kinds(pattern: Sequence[AttentionKind], n_layers: int) -> list[AttentionKind]:
    """The kind of attention of every layer."""
    return repeated(pattern, n_layers)


def kind_counts(pattern: Sequence[AttentionKind], n_layers: int) -> Counter[AttentionKind]:
    """How many layers of each kind there are; the number of layers may be any."""
    whole, rest = divmod(n_layers, len(pattern))
    counts: Counter[AttentionKind] = Counter()
    for place, kind in enumerate(pattern):
        counts[kind] += whole + (place < rest)
    return +counts


def broken_phi_rules(phi: str, phi_pos_emb: bool) -> Iterator[BrokenRule]:
    yield from broken_option("nsa.phi", phi, PHIS)
    if phi_pos_emb and phi in PHIS and phi not in PHIS_WITH_POS_EMB:
        yield BrokenRule(
            ("nsa.phi_pos_emb", "nsa.phi"),
            f"nsa.phi_pos_emb (true) does not fit nsa.phi ({phi}): in a mean or a weighted sum of tokens a position "
            f"only adds a constant. Set nsa.phi=linear or mlp, or nsa.phi_pos_emb=false.",
        )


def broken_init_std_rules(std: float, key: str = "model.init_std") -> Iterator[BrokenRule]:
    if not 0 < std < math.inf:
        yield BrokenRule(
            (key,),
            f"{key} ({std}) must be above 0 and finite: it is the standard deviation of the initial weights. Set e.g. "
            f"{key}={INIT_STD}.",
        )


def broken_sliding_gate_rules(initial: float) -> Iterator[BrokenRule]:
    if not math.isfinite(initial):
        yield BrokenRule(
            ("nsa.sliding_gate_init",),
            f"nsa.sliding_gate_init ({initial}) must be finite: it is the initial bias of a gate. Set e.g. -3.",
        )


def broken_selector_loss_rules(weight: float, share: float, kv: str, phi: str) -> Iterator[BrokenRule]:
    if not weight >= 0:
        yield BrokenRule(
            ("nsa.selector_loss",), f"nsa.selector_loss ({weight}) must be at least 0: it is a weight. Set e.g. 1.0."
        )
    if not 0 < share <= 1:
        yield BrokenRule(
            ("nsa.selector_loss_share",),
            f"nsa.selector_loss_share ({share}) must be above 0 and at most 1: it is a share of the queries. Set e.g. "
            f"nsa.selector_loss_share=0.0625.",
        )
    if weight > 0 and kv != "per_branch" and phi == "avg":
        yield BrokenRule(
            ("nsa.selector_loss", "nsa.kv", "nsa.phi"),
            f"nsa.selector_loss ({weight}) has nothing to train with nsa.kv ({kv}) and nsa.phi ({phi}): where branches "
            f"share keys it trains phi alone, and a mean has no weights. Set nsa.phi=softmax or nsa.selector_loss=0.",
        )


def broken_merged_rules(pattern: Sequence[str], phi: str, selector_loss: float) -> Iterator[BrokenRule]:
    """Rules of layers of kind `merged`, whose φ is trained by the selector loss alone."""
    keys = ("model.attention", "nsa.phi", "nsa.selector_loss")
    if "merged" in pattern and phi != "avg" and not selector_loss > 0:
        yield BrokenRule(
            keys,
            f"model.attention ({', '.join(pattern)}) has layers of kind merged, where nothing but nsa.selector_loss "
            f"({selector_loss}) trains nsa.phi ({phi}): it would keep its initial weights. Set nsa.selector_loss=1.0, "
            f"or nsa.phi=avg, which has none.",
        )
    if {*pattern} == {"merged"} and phi == "avg" and selector_loss > 0:
        yield BrokenRule(
            keys,
            f"nsa.selector_loss ({selector_loss}) has nothing to train with model.attention (merged) and nsa.phi "
            f"({phi}): there it trains phi alone, and a mean has no weights. Set nsa.phi=softmax or "
            f"nsa.selector_loss=0.",
        )


def kv_streams(kv: str) -> tuple[int, int]:
    """How many projections of the keys, and of the values, each kv group has for the three branches."""
    return (_BRANCHES if kv == "per_branch" else 1), (1 if kv == "shared" else _BRANCHES)


def resolve_rope_compressed(phi: str, rope_compressed: str) -> str:
    """`auto` as `before` or `after`; anything else unchanged."""
    if rope_compressed != "auto":
        return rope_compressed
    return "after" if phi in PHIS_OF_UNROTATED_KEYS else "before"


def broken_rope_compressed_rules(phi: str, rope_compressed: str) -> Iterator[BrokenRule]:
    """A φ that reads channels cannot compress keys that are rotated already.

    A sum over tokens commutes with the rotation, also with a learned weight per place. A map across channels, or
    weights that depend on the keys, do not: what they make of rotated keys depends on where in the document those
    stand.
    """
    yield from broken_option("nsa.rope_compressed", rope_compressed, ROPE_COMPRESSED)
    if rope_compressed == "before" and phi in PHIS_OF_UNROTATED_KEYS:
        yield BrokenRule(
            ("nsa.rope_compressed", "nsa.phi"),
            f"nsa.rope_compressed (before) does not fit nsa.phi ({phi}): {phi} reads the keys' channels, which does "
            f"not commute with the rotation, so scores would depend on absolute positions. Set "
            f"nsa.rope_compressed=after or auto.",
        )


def broken_rope_scaling_rules(scaling: Mapping[str, Any], rope_scale: float) -> Iterator[BrokenRule]:
    """`scaling`: as in a Hugging Face config, with its type as `rope_type` and without null values."""
    kind, kind_key = scaling["rope_type"], f"{_ROPE_SCALING}.rope_type"
    if broken := [*broken_option(kind_key, kind, ROPE_TYPES)]:
        yield from broken
        return
    required = _REQUIRED_BY_ROPE_TYPE[kind]
    known = (*required, *_OPTIONAL_BY_ROPE_TYPE.get(kind, ()))
    unknown = [key for key in scaling if key not in known and key != "rope_type"]
    missing = [key for key in required if key not in scaling]
    for key in unknown:
        yield BrokenRule(
            (f"{_ROPE_SCALING}.{key}", kind_key),
            f"{_ROPE_SCALING}.{key} has no meaning for {kind_key} ({kind}), whose keys are: "
            f"{', '.join(known) or 'none'}. Set {_ROPE_SCALING}.{key}=null, or another rope_type.",
        )
    for key in missing:
        yield BrokenRule(
            (f"{_ROPE_SCALING}.{key}", kind_key),
            f"{_ROPE_SCALING}.{key} (null) is required for {kind_key} ({kind}). Set it as in the model's config.",
        )
    if not unknown and not missing and kind != "default":
        yield from _broken_rope_values(kind, scaling, rope_scale)


def _broken_rope_values(kind: str, scaling: Mapping[str, Any], rope_scale: float) -> Iterator[BrokenRule]:
    if rope_scale != 1:
        yield BrokenRule(
            ("model.rope_scale", f"{_ROPE_SCALING}.rope_type"),
            f"model.rope_scale ({rope_scale}) and {_ROPE_SCALING}.rope_type ({kind}) both scale positions: only one of "
            f"them may. Set model.rope_scale=1.",
        )
    if scaling["factor"] <= 0:
        yield BrokenRule(
            (f"{_ROPE_SCALING}.factor",),
            f"{_ROPE_SCALING}.factor ({scaling['factor']}) must be above 0: frequencies are divided by it. Set e.g. "
            f"{_ROPE_SCALING}.factor=8.",
        )
    if kind == "llama3" and not 0 < (low := scaling["low_freq_factor"]) < (high := scaling["high_freq_factor"]):
        yield BrokenRule(
            (f"{_ROPE_SCALING}.low_freq_factor", f"{_ROPE_SCALING}.high_freq_factor"),
            f"{_ROPE_SCALING}.low_freq_factor ({low}) must be above 0 and below {_ROPE_SCALING}.high_freq_factor "
            f"({high}): the range between them is interpolated. Set them as in the model's config, e.g. 1 and 4.",
        )
    if kind == "yarn" and (betas := yarn_betas(scaling))[0] <= betas[1]:
        yield BrokenRule(
            (f"{_ROPE_SCALING}.beta_fast", f"{_ROPE_SCALING}.beta_slow"),
            f"{_ROPE_SCALING}.beta_fast ({betas[0]}) must be above {_ROPE_SCALING}.beta_slow ({betas[1]}): the range "
            f"between them is interpolated. Set them as in the model's config, e.g. 32 and 1.",
        )


def yarn_betas(scaling: Mapping[str, Any]) -> tuple[float, float]:
    """Turns within the original context above which a frequency is kept, and below which it is divided by `factor`."""
    return scaling.get("beta_fast") or 32.0, scaling.get("beta_slow") or 1.0
