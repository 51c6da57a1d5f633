"""Tensor names of another software's model and of `NSAForCausalLM`: renames, splits and joins tensors, bit by bit."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

_PARTS = ("weight", "bias")
_OWN_MODEL = {"model.embed_tokens": "model.embed_tokens", "model.norm": "model.norm", "lm_head": "lm_head"}


@dataclass(frozen=True)
class SourceNames:
    """Modules of the source, and ours that hold the same weights.

    A source module with several of ours has their rows one after another, as a fused projection does.
    """

    block: Mapping[str, tuple[str, ...]]
    """Inside `model.layers.N`."""
    model: Mapping[str, str] = field(default_factory=lambda: _OWN_MODEL)
    """Outside the layers."""
    without_source: tuple[str, ...] = ()
    """Tensors of ours inside a layer that the source does not have."""

    def pairs(self, ours: Iterable[str], n_layers: int) -> dict[str, tuple[str, ...]]:
        """Source tensor → our tensors, for those of ours that exist. What has no source is not among them."""
        own = set(ours)
        modules: dict[str, tuple[str, ...]] = {source: (name,) for source, name in self.model.items()}
        for layer in range(n_layers):
            for source, names in self.block.items():
                modules[_in_layer(layer, source)] = tuple(_in_layer(layer, name) for name in names)
        tensors = {
            f"{source}.{part}": tuple(f"{name}.{part}" for name in names)
            for source, names in modules.items()
            for part in _PARTS
        }
        new = tuple(f".{name}" for name in self.without_source)
        return {
            source: names for source, names in tensors.items() if own.issuperset(names) and not names[0].endswith(new)
        }


def source_shapes(
    pairs: Mapping[str, tuple[str, ...]], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Shapes of the source's tensors, from those of ours."""
    return {source: (sum(shapes[name][0] for name in names), *shapes[names[0]][1:]) for source, names in pairs.items()}


def split_tensors(
    pairs: Mapping[str, tuple[str, ...]], tensors: dict[str, Tensor], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    """Our tensors from the source's, which are removed from `tensors` one by one."""
    own_tensors = {}
    for source, names in pairs.items():
        tensor = tensors.pop(source)
        if len(names) == 1:
            own_tensors[names[0]] = tensor
        else:
            parts = tensor.split([shapes[name][0] for name in names])
            own_tensors |= {name: part.clone() for name, part in zip(names, parts, strict=True)}
    return own_tensors


def join_tensors(pairs: Mapping[str, tuple[str, ...]], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The source's tensors from ours, which are removed from `tensors` one by one."""
    source_tensors = {}
    for source, names in pairs.items():
        parts = [tensors.pop(name) for name in names]
        source_tensors[source] = parts[0] if len(parts) == 1 else torch.cat(parts)
    return source_tensors


def _in_layer(layer: int, name: str) -> str:
    return f"model.layers.{layer}.{name}"
