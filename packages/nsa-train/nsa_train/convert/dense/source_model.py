"""A model of other software in our terms: arguments of `NSAConfig`, kinds of layers, tensor names."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from nsa.hf.configuration import NSAConfig
from nsa.options import AttentionKind
from nsa_train.convert.dense.source_tensors import SourceNames

_T = TypeVar("_T")


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
