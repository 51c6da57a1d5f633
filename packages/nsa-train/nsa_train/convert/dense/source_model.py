"""A model of other software in our terms: arguments of `NSAConfig`, kinds of layers, and its tensors by our names."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from nsa.hf.configuration import NSAConfig
from nsa.options import AttentionKind

_T = TypeVar("_T")
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


@dataclass(frozen=True)
class SourceModel:
    """Description with which `NSAForCausalLM` computes the same as the source."""

    architecture: str
    """Architecture as its config.json names it."""
    names: SourceNames
    arguments: dict[str, Any]
    """Arguments of `NSAConfig`, without `attention`."""
    kinds: tuple[AttentionKind, ...]
    """Kind of every layer: dense, window where the source's attention slides, or nsa."""

    @property
    def is_sparse(self) -> bool:
        """Whether the source has NSA already; its block sizes and gates are then among the arguments."""
        return "nsa" in self.kinds

    @property
    def config(self) -> NSAConfig:
        """Config of the source itself."""
        return self.changed(self.kinds)

    def changed(self, kinds: Sequence[AttentionKind], **changes: Any) -> NSAConfig:
        """Config of the source with other kinds of layers, and other arguments."""
        return NSAConfig(**{**self.arguments, "attention": shortest_pattern(kinds), **changes})


def shortest_pattern(values: Sequence[_T]) -> _T | list[_T]:
    """The shortest beginning that gives all values when it is repeated and cut; of one value, that value."""
    for length in range(1, len(values) + 1):
        if all(value == values[place % length] for place, value in enumerate(values)):
            return values[0] if length == 1 else list(values[:length])
    return list(values)


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
