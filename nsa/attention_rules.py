"""Validation of the attention's arguments, shared by the settings of a run and `NSAAttention`.

Needs no torch. A rule that does not hold is a `BrokenRule` with the settings concerned and a message.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from nsa.errors import BrokenRule
from nsa.options import ROPE_TYPES

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
