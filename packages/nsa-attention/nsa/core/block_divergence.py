"""KL divergence from the attention mass of blocks to the scores that choose them, as the selector losses sum it.

Both selector losses are operators with three results: the weighted sum of divergences, averaged over groups; their
plain mean over queries that have two blocks to compare; and the gradient of the first for the compressed keys, the only
input that gets one.

c queries of a chunk · G kv groups · N blocks · K key dim
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nsa.kernels.transforms import ReverseModeFunction, with_gradient


class SelectorLossFunction(ReverseModeFunction):
    subject = "the selector loss"
    instead = "Train without it (selector_loss=0), or call eval() first."


class DivergenceSums:
    """Divergences of queries, summed in fp32 or wider, and the gradient of the compressed keys if it is needed."""

    def __init__(self, q: Tensor, k_cmp: Tensor, need_grad: bool) -> None:
        self.wide = torch.promote_types(q.dtype, torch.float32)
        self._sums, self._dtype, self._groups = q.new_zeros(3, dtype=self.wide), k_cmp.dtype, max(1, k_cmp.shape[2])
        self._no_gradient = k_cmp.new_empty(0)
        self.dk_cmp = k_cmp.new_zeros(k_cmp.shape, dtype=self.wide) if need_grad else None

    def add(
        self, log_score_cGN: Tensor, log_target_cGN: Tensor, complete_cGN: Tensor, weight_c: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Add the queries with two comparable blocks or more, each renormalised over these; returns which blocks they
        are and the gradient of `log_score`.

        log_target_cGN: logarithms of the attention mass. complete_cGN: whether a block ends at or before the query.
        """
        compared_cGN = complete_cGN & (log_score_cGN > -torch.inf)
        counted_cG1 = compared_cGN.sum(-1, keepdim=True) > 1
        compared_cGN = compared_cGN & counted_cG1
        lowest = torch.finfo(log_score_cGN.dtype).min
        log_p_cGN = log_score_cGN.masked_fill(~compared_cGN, lowest).log_softmax(-1)
        log_target_cGN = log_target_cGN.masked_fill(~compared_cGN, lowest).log_softmax(-1)
        target_cGN = log_target_cGN.exp()
        divergence_cG = (target_cGN * (log_target_cGN - log_p_cGN)).where(compared_cGN, 0).sum(-1)
        weight_c1 = weight_c.to(self.wide)[:, None]
        weighted = (divergence_cG * weight_c1).sum()
        self._sums += torch.stack([weighted, divergence_cG.sum(), counted_cG1.sum().to(self.wide)])
        return compared_cGN, (log_p_cGN.exp() - target_cGN).where(compared_cGN, 0) * weight_c1[..., None]

    def results(self) -> tuple[Tensor, Tensor, Tensor]:
        """Results of the operator; an empty gradient if it is not needed."""
        weighted, total, counted = self._sums
        loss, mean = weighted / self._groups, total / counted.clamp(min=1)
        if self.dk_cmp is None:
            return loss, mean, self._no_gradient
        return loss, mean, (self.dk_cmp / self._groups).to(self._dtype)


def fake_results(k_cmp: Tensor, q: Tensor, need_grad: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Empty tensors of the shapes and types of `DivergenceSums.results`."""
    wide = torch.promote_types(q.dtype, torch.float32)
    loss, mean = q.new_empty((), dtype=wide), q.new_empty((), dtype=wide)
    return loss, mean, k_cmp.new_empty(k_cmp.shape if need_grad else 0)


def register_gradient(operator: Any, n_inputs: int) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """Make the operator's third result the gradient of its first input, the only one that has any; returns the operator
    as a function to call in its place."""

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output[2])

    def differentiate(
        ctx: Any, dloss: Tensor | None, _: Tensor | None, of_gradient: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        SelectorLossFunction.refuse_second(of_gradient)
        (dk_cmp,) = ctx.saved_tensors
        return None if dloss is None else (dk_cmp * dloss).to(dk_cmp.dtype), *[None] * (n_inputs - 1)

    return with_gradient(operator, save, differentiate, SelectorLossFunction)
