"""Policy of selective activation checkpointing: results of our operators are kept, everything else is recomputed."""

from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

NAMESPACE = "nsa"
"""Of our custom operators."""


def operator_policy(_: object, operator: Any, *args: object, **kwargs: object) -> CheckpointPolicy:
    """Attention and selection are the expensive part of a block, and their results its smallest activations."""
    ours = getattr(operator, "namespace", None) == NAMESPACE
    return CheckpointPolicy.MUST_SAVE if ours else CheckpointPolicy.PREFER_RECOMPUTE


def keep_operators() -> tuple[Any, Any]:
    """The `context_fn` of `torch.utils.checkpoint.checkpoint`."""
    return create_selective_checkpoint_contexts(operator_policy)
