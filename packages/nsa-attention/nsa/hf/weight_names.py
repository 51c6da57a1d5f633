"""Parameter names of `NSATransformer` (those of a checkpoint) and of `NSAForCausalLM`, in both directions."""

from collections.abc import Iterable, Mapping
from typing import TypeVar

from nsa.errors import CheckpointError

_T = TypeVar("_T")

# How a name begins in a checkpoint, and in an exported folder. The rest of it is the same.
_RENAMES = (
    ("embeddings.", "model.embed_tokens."),
    ("blocks.", "model.layers."),
    ("lm_head.norm.", "model.norm."),
    ("lm_head.w_out.", "lm_head."),
)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""One tensor if the embeddings are tied; an exported folder then has the first only."""


def to_transformers(tensors: Mapping[str, _T]) -> dict[str, _T]:
    """Values by the names of `NSAForCausalLM`, from those of a checkpoint."""
    return _renamed(tensors, _RENAMES)


def from_transformers(tensors: Mapping[str, _T]) -> dict[str, _T]:
    """Values by the names of a checkpoint, from those of `NSAForCausalLM`."""
    return _renamed(tensors, [(theirs, ours) for ours, theirs in _RENAMES])


def _renamed(tensors: Mapping[str, _T], renames: Iterable[tuple[str, str]]) -> dict[str, _T]:
    exported = {}
    for name, value in tensors.items():
        new = next((f"{there}{name.removeprefix(here)}" for here, there in renames if name.startswith(here)), None)
        if new is None:
            known = ", ".join(f"{here}*" for here, _ in renames)
            raise CheckpointError(f"{name!r} is not a parameter of this model: its names are {known}.")
        exported[new] = value
    return exported
