"""Kinds and RoPE of a model's layers: patterns that repeat over the layers, their rules, and each layer's config."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar, get_args

from nsa.core.attention_config import AttentionConfig
from nsa.errors import BrokenRule
from nsa.option_fields import ARGUMENT_NAMES, OptionNames
from nsa.options import ATTENTION_KINDS, AttentionKind, RopeLayer

_T = TypeVar("_T")
_OPTIONS: Mapping[str, tuple[str, ...]] = {"layers": ATTENTION_KINDS, "rope_layers": get_args(RopeLayer)}


def broken_pattern_rules(
    layers: Sequence[str],
    rope_layers: Sequence[str],
    window: int | None,
    n_layers: int,
    names: OptionNames = ARGUMENT_NAMES,
) -> Iterator[BrokenRule]:
    """Rules of the kinds of attention and of RoPE, repeated over the layers, and of the window of kind `window`."""
    for name, pattern in (("layers", layers), ("rope_layers", rope_layers)):
        key, options = names[name], _OPTIONS[name]
        if not pattern:
            yield BrokenRule(
                (key,), f"{key} is an empty list: every layer needs an entry. Set e.g. {key}={options[0]}."
            )
        for entry in dict.fromkeys(pattern):
            if entry not in options:
                yield BrokenRule(
                    (key,), f"{key} is {entry!r}: there is no such option. Use one of: {', '.join(options)}."
                )
        if len(pattern) > n_layers >= 1:
            yield BrokenRule(
                (key, names.n_layers),
                f"{key} lists {len(pattern)} layers ([{', '.join(pattern)}]) and {names.n_layers} is {n_layers}: the "
                f"last {len(pattern) - n_layers} would not exist. Set {names.n_layers}={len(pattern)} or shorten the "
                f"list.",
            )
    if window is not None and window < 1:
        yield BrokenRule(
            (names.window,),
            f"{names.window} ({window}) must be at least 1: it counts tokens, with the query's own. Set e.g. "
            f"{names.window}=512, or null for {names.w}.",
        )


def broken_merged_rules(
    layers: Sequence[str], attention: AttentionConfig, names: OptionNames = ARGUMENT_NAMES
) -> Iterator[BrokenRule]:
    """Rules of layers of kind `merged`, whose φ is trained by the selector loss alone."""
    keys, loss = (names.layers, names.phi, names.selector_loss), attention.selector.loss
    phi, learned = attention.compression.phi, attention.compression.operator.has_weights
    if "merged" in layers and learned and not loss > 0:
        yield BrokenRule(
            keys,
            f"{names.layers} ({', '.join(layers)}) has layers of kind merged, where nothing but {names.selector_loss} "
            f"({loss}) trains {names.phi} ({phi}): it would keep its initial weights. Set {names.selector_loss}=1.0, "
            f"or {names.phi}=avg, which has none.",
        )
    if {*layers} == {"merged"} and not learned and loss > 0:
        yield BrokenRule(
            keys,
            f"{names.selector_loss} ({loss}) has nothing to train with {names.layers} (merged) and {names.phi} "
            f"({phi}): there it trains phi alone, which has no weights. Set {names.phi}=softmax or "
            f"{names.selector_loss}=0.",
        )


def repeated(pattern: Sequence[_T], n_layers: int) -> list[_T]:
    """The entry of every layer: the pattern, repeated and cut."""
    return [pattern[layer % len(pattern)] for layer in range(n_layers)]


def kind_counts(pattern: Sequence[AttentionKind], n_layers: int) -> Counter[AttentionKind]:
    """Count the layers of each kind; the number of layers may be any."""
    whole, rest = divmod(n_layers, len(pattern))
    counts: Counter[AttentionKind] = Counter()
    for place, kind in enumerate(pattern):
        counts[kind] += whole + (place < rest)
    return +counts


def layer_config(
    attention: AttentionConfig, kind: AttentionKind, rope: RopeLayer = "scaled", window: int | None = None
) -> AttentionConfig:
    """The config of one layer of a model, from that which all layers share. `window`: of layers of kind `window`, in
    place of w."""
    of_window = {"w": window} if kind == "window" and window is not None else {}
    return attention.changed(rope=rope, **of_window)
