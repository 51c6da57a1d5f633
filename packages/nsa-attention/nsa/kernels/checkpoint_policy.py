"""Policy of selective activation checkpointing: results of attention operators are kept, the rest is recomputed."""

from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

NAMESPACE = "nsa"
"""Namespace of our custom operators."""
_TORCH_ATTENTION = "scaled_dot_product"
"""In the names of PyTorch's own attention operators, which a dense layer may use."""


def operator_policy(_: object, operator: Any, *args: object, **kwargs: object) -> CheckpointPolicy:
    """Attention and selection are the expensive part of a block, and their results its smallest activations."""
    attends = getattr(operator, "namespace", None) == NAMESPACE or _TORCH_ATTENTION in str(operator)
    return CheckpointPolicy.MUST_SAVE if attends else CheckpointPolicy.PREFER_RECOMPUTE


def keep_operators() -> tuple[Any, Any]:
    """The `context_fn` of `torch.utils.checkpoint.checkpoint`."""
    return create_selective_checkpoint_contexts(operator_policy)
