"""Options of `nsa convert`, the config of the model they lead to, and what that model reads."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nsa.core.attention_config import CompressionConfig
from nsa.core.pooling import OPERATORS, phis
from nsa.errors import ConfigError
from nsa.geometry import Geometry
from nsa.hf.configuration import NSAConfig
from nsa.options import CONVERSION_MIXES, AttentionKind
from nsa_train.convert.dense.source_model import SourceModel

_PHIS_OF_CONVERSION = phis(lambda operator: operator.starts_near_mean)
"""φ that start as the mean or close to it, and keep scores relative to positions when they are trained."""
_KIND_OF_MIX: dict[str, AttentionKind] = {"merged": "merged", "gated": "nsa"}


@dataclass(frozen=True)
class ConversionOptions:
    """Options by which the layers of a dense model become sparse. Block sizes as in `Geometry`.

    mix: `merged` is one softmax over the selected blocks and the window, without gates; `gated` are the three branches
        of NSA, whose gates (`tanh`) start at the selected branch alone.
    phi: how keys are pooled for the selection: `avg`, the mean; `weighted`, which starts as the mean and can be
        trained; `softmax`, which weighs the tokens of a block by learned scores of their keys before rotation.
    keep_dense: layers that stay dense. keep_window: layers that become a sliding window.
    """

    mix: str = "merged"
    phi: str = "avg"
    l: int = Geometry.l
    d: int = Geometry.d
    l_sel: int = Geometry.l_sel
    n_sel: int = Geometry.n_sel
    w: int = Geometry.w
    keep_dense: tuple[int, ...] = ()
    keep_window: tuple[int, ...] = ()


@dataclass(frozen=True)
class LayerReads:
    """Keys that a token reads in a layer of one kind, and the length up to which the layer equals the source's."""

    layers: int
    """How many layers of this kind there are."""
    keys: int
    """Keys that the last token of the context attends to."""
    scored: int
    """Compressed keys that it scores to choose blocks."""
    covered: int | None
    """Longest text on which the layer computes what the source's computes; None: any."""


def converted_config(model: SourceModel, options: ConversionOptions | None) -> NSAConfig:
    """The config of the converted model; `options` are None for a source that is sparse already."""
    if model.is_sparse:
        if options is not None:
            raise ConfigError(
                f"options of the conversion were given for a model that is sparse already ({model.architecture} of "
                f"flash-linear-attention): its block sizes and gates are its own. Leave them out."
            )
        return model.config
    options = options or ConversionOptions()
    if options.mix not in CONVERSION_MIXES:
        raise ConfigError(f"--mix is {options.mix!r:.40}. Use one of: {', '.join(CONVERSION_MIXES)}.")
    if options.phi not in _PHIS_OF_CONVERSION:
        raise ConfigError(
            f"--phi is {options.phi!r:.40}: a conversion starts with a φ close to the mean of the keys. Use one of: "
            f"{', '.join(_PHIS_OF_CONVERSION)}."
        )
    more: dict[str, Any] = {"gate": "tanh", "sliding_gate_init": 0.0} if options.mix == "gated" else {}
    if options.mix == "merged" and OPERATORS[options.phi].has_weights:
        more["selector_loss"] = 1.0  # nothing else trains φ there
    sizes = {name: getattr(options, name) for name in Geometry.__dataclass_fields__}
    kinds = _converted_kinds(model, options)
    more["rope_compressed"] = CompressionConfig(phi=options.phi).rotated
    return model.changed(kinds, phi=options.phi, kv="shared", **more, **sizes)


def _converted_kinds(model: SourceModel, options: ConversionOptions) -> list[AttentionKind]:
    sparse = _KIND_OF_MIX[options.mix]
    kinds: list[AttentionKind] = [sparse if kind == "dense" else kind for kind in model.kinds]
    if both := set(options.keep_dense) & set(options.keep_window):
        raise ConfigError(f"layers {sorted(both)} are in --keep-dense and in --keep-window. Name each in one of them.")
    for layer in (*options.keep_dense, *options.keep_window):
        if not 0 <= layer < len(kinds):
            raise ConfigError(
                f"--keep-dense or --keep-window names layer {layer}, and the model has layers 0 to {len(kinds) - 1}. "
                f"Name one of them."
            )
        kind: AttentionKind = "dense" if layer in options.keep_dense else "window"
        if model.kinds[layer] == "window" and kind == "dense":
            raise ConfigError(
                f"--keep-dense names layer {layer}, whose attention slides in the source and stays so. Leave it out."
            )
        kinds[layer] = kind
    return kinds


def layer_reads(config: NSAConfig, source: Sequence[AttentionKind]) -> dict[AttentionKind, LayerReads]:
    """Keys that each kind of layer reads. `source`: the kinds of the source's layers."""
    g = Geometry(config.l, config.d, config.l_sel, config.n_sel, config.w)
    n, window, kinds = config.max_position_embeddings, config.window or config.w, config.layer_kinds()
    far = max(0, n - g.w)  # tokens before the window, of which merged attention selects
    changed = {now for now, before in zip(kinds, source, strict=True) if now != before}
    reads: dict[AttentionKind, tuple[int, int, int | None]] = {
        "dense": (n, 0, None),
        "window": (min(window, n), 0, window if "window" in changed else None),
        "merged": (
            min(g.w, n) + (g.n_selected_tokens(far) if far else 0),
            g.n_compressed(far),
            g.n_sel * g.l_sel + g.w,
        ),
        "nsa": (g.reads(n), g.n_compressed(n), g.n_sel * g.l_sel if "nsa" in changed else None),
    }
    return {kind: LayerReads(layers, *reads[kind]) for kind, layers in Counter(kinds).items()}


def covered_tokens(reads: Mapping[AttentionKind, LayerReads]) -> int | None:
    """Length up to which the whole model computes what the source computes; None: any."""
    return min((each.covered for each in reads.values() if each.covered is not None), default=None)
