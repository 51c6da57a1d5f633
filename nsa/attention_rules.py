"""Validation of the attention's arguments (heads, φ, RoPE, …), shared by the settings of a run and `NSAAttention`.

Needs no torch. A rule that does not hold is a `BrokenRule` with the settings concerned and a message.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nsa.errors import BrokenRule
from nsa.options import ATTENTION_KINDS, PHIS, ROPE_COMPRESSED, ROPE_TYPES, AttentionKind

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


def _divisor_up_to(limit: int, number: int) -> int:
    """The largest divisor worth suggesting, found in bounded time for numbers of any size."""
    return next(divisor for divisor in range(min(limit, _LARGEST_SUGGESTION), 0, -1) if number % divisor == 0)


def broken_pattern_rules(pattern: Sequence[str], n_layers: int) -> Iterator[BrokenRule]:
    """Rules of `model.attention`: kinds of attention, repeated over the layers."""
    key = "model.attention"
    if not pattern:
        yield BrokenRule((key,), f"{key} is an empty list: every layer needs a kind of attention. Set e.g. {key}=nsa.")
    for kind in dict.fromkeys(pattern):
        yield from broken_option(key, kind, ATTENTION_KINDS)
    if len(pattern) > n_layers >= 1:
        yield BrokenRule(
            (key, "model.n_layers"),
            f"{key} lists {len(pattern)} layers ([{', '.join(pattern)}]) and model.n_layers is {n_layers}: the last "
            f"{len(pattern) - n_layers} would not exist. Set model.n_layers={len(pattern)} or shorten the list.",
        )


def layer_kinds(pattern: Sequence[AttentionKind], n_layers: int) -> list[AttentionKind]:
    """The kind of attention of every layer: the pattern, repeated and cut."""
    return [pattern[layer % len(pattern)] for layer in range(n_layers)]


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
