"""Sampling, labels and gradient of the selector loss: an auxiliary loss that trains block selection on attention mass.

For a sample of the queries, the KL divergence from the attention mass per block to the block scores by which blocks are
chosen (`nsa.core.selector_loss`).

The loss is averaged over labels, as the cross-entropy is: divergences are summed, each sampled query standing for as
many tokens, and divided by the labels of the optimizer step. Queries that have fewer than two blocks to compare add
nothing. So it does not depend on how a step is divided into passes, ranks and documents, and the number of labels is
the one number that every trainer knows before its first backward pass.

B batch · S tokens · Q sampled queries
"""

from collections.abc import Iterable
from typing import Any, Self

import torch
from torch import Tensor, nn

from nsa.core.positions import Positions, QuerySample
from nsa.core.probe import attention_layers
from nsa.core.selector_loss import SelectorLossFunction
from nsa.kernels.custom_operator import custom_operator, value_of
from nsa.kernels.interface import constant_when_traced
from nsa.kernels.precision import widest_float

_GOLDEN_RATIO = 0.6180339887498949


def _sampled_queries(n_tokens: int, share: float, step: int, device: torch.device) -> Tensor:
    """Indices [Q] of this share of the tokens, evenly spaced; the first one moves with the step, so that over the steps
    every token is sampled, and a resumed run samples as an uninterrupted one does."""
    count = _sample_size(n_tokens, share)
    offset = step * _GOLDEN_RATIO % 1
    on = device if widest_float(device) == torch.float64 else "cpu"
    places = (torch.arange(count, dtype=torch.float64, device=on) + offset) * (n_tokens / count)
    return places.long().clamp(max=n_tokens - 1).to(device)


def _sample_size(n_tokens: int, share: float) -> int:
    return min(n_tokens, max(1, round(share * n_tokens)))


class LossLabels:
    """The labels of a forward pass: the selector loss is averaged over the tokens that the model's own loss counts.

    Neither a tuple nor a dataclass, as `Positions`: `gradient` must stay the tensor that `follow` writes to.

    labelled_BS: whether each query has a label.
    count: what a sum over this pass's labels is divided by: the labels of the pass, or, where several passes make a
        step, those of the step divided by the number of ranks whose gradients are averaged.
    gradient: of the model's loss: 1 until its backward pass begins, where `follow` writes it.
    """

    def __init__(self, labelled_BS: Tensor, count: Tensor | float, gradient: Tensor) -> None:
        self.labelled_BS, self.count, self.gradient = labelled_BS, count, gradient

    @classmethod
    def counted(cls, labelled_BS: Tensor, count: Tensor | float | None = None) -> Self:
        """Set the labels of this pass alone as the default of `count`."""
        count = labelled_BS.sum().clamp(min=1) if count is None else count
        device = labelled_BS.device
        # In one compiled graph with its loss a tensor of the graph's own cannot be written by the backward pass.
        compiling = torch.compiler.is_compiling()
        return cls(labelled_BS, count, _traced_gradient(device) if compiling else torch.ones((), device=device))

    @classmethod
    def of_all(cls, x_BSD: Tensor) -> Self:
        """Every token counts: for a layer that knows no labels."""
        batch, length = x_BSD.shape[:2]
        one = torch.ones((), device=x_BSD.device)
        return cls(one.bool().expand(batch, length), max(1, batch * length), one)

    def follow(self, loss: Tensor) -> Tensor:
        """The loss unchanged. Whatever its gradient is multiplied by (1 / passes of a step, a gradient scaler's factor,
        the number of ranks), the selector loss is multiplied by too."""
        followed: Tensor = _FollowedLoss.apply(loss, self.gradient)
        return followed


_traced_gradients: dict[torch.device, Tensor] = {}


@constant_when_traced
def _traced_gradient(device: torch.device) -> Tensor:
    """One tensor for all compiled graphs: each backward pass writes it before its layers read it."""
    return _traced_gradients.setdefault(device, torch.ones((), device=device))


def weighted_sample(queries_Q: Tensor, labels: LossLabels, tokens_per_query: float) -> QuerySample:
    """Weights with which the sum over the sampled queries estimates the mean over all labels."""
    labelled_BQ = labels.labelled_BS.index_select(1, queries_Q)
    return QuerySample(queries_Q, labelled_BQ * (tokens_per_query / labels.count), labels.gradient)


def row_sample(layer: Any, rows: int, n_tokens: int, device: torch.device, *, packed: bool) -> Tensor | None:
    """Queries of rows of n_tokens in this pass; None outside of training and of a layer without the loss.

    All rows of a step have the same sample, however they are divided among passes and ranks. packed: the rows are laid
    end to end.
    """
    if not layer.selector_loss or not layer.training or not torch.is_grad_enabled():
        return None
    sampled_Q = _sampled_queries(n_tokens, layer.selector_loss_share, layer.selector_step, device)
    return (torch.arange(rows, device=device)[:, None] * n_tokens + sampled_Q).flatten() if packed else sampled_Q


def tokens_per_query(layer: Any, n_tokens: int) -> float:
    return n_tokens / _sample_size(n_tokens, layer.selector_loss_share)


def with_sampled_queries(where: Positions, layer: Any, x_BSD: Tensor, labels: LossLabels | None) -> Positions:
    """Add the sampled queries of a training pass; unchanged in evaluation, with a cache, and for padded rows."""
    if where.layout is None or where.padding is not None:
        return where
    rows, n_tokens = x_BSD.shape[:2]
    packed = len(where.layout.pos_BS) != rows or where.layout.pos_BS.shape[1] != n_tokens
    sampled_Q = row_sample(layer, rows, n_tokens, x_BSD.device, packed=packed)
    if sampled_Q is None:
        return where
    labels = LossLabels.of_all(x_BSD) if labels is None else labels
    if packed:
        labels = LossLabels(labels.labelled_BS.flatten()[None], labels.count, labels.gradient)
    return where.replaced(sample=weighted_sample(sampled_Q, labels, tokens_per_query(layer, n_tokens)))


def selector_layers(model: nn.Module) -> list[Any]:
    """The layers of a model that have a selector loss."""
    return [layer for layer in attention_layers(model).values() if layer.selector_loss]


def average_over_layers(model: nn.Module) -> None:
    """Divide the weight of the loss among a model's layers, so that they add their mean to the gradient."""
    layers = [layer for layer in selector_layers(model) if layer.selects]
    for layer in layers:
        layer.selector_weight = layer.selector_loss / len(layers)


def set_sampling_step(layers: Iterable[Any], step: int) -> None:
    """The training step from which the next forward pass derives its sample."""
    for layer in layers:
        layer.selector_step = step


def attach_loss(x: Tensor, loss: Tensor, gradient: Tensor) -> Tensor:
    """x unchanged; the backward pass through it also starts at `loss`, with the `gradient` that this tensor has then.
    The value of the model's own loss stays what it is, and recomputation, compilation and sharding see one more node of
    a layer's graph."""
    run = _AttachedLoss if torch.compiler.is_compiling() else _ReverseModeAttachedLoss
    attached: Tensor = run.apply(x, loss, gradient)
    return attached


class _AttachedLoss(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, loss: Tensor, gradient: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        # Not saved by torch, which allows no change of a saved tensor.
        ctx.of_loss, ctx.gradient = inputs[1].dtype, inputs[2]

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, Tensor, None]:
        gradient = _read(ctx.gradient, dx) if torch.compiler.is_compiling() else ctx.gradient.clone()
        return dx, gradient.to(ctx.of_loss), None


class _ReverseModeAttachedLoss(SelectorLossFunction, _AttachedLoss):
    """Adds refusals of other transforms; torch.compile traces no function that has them."""


@custom_operator("nsa::read_loss_gradient", mutates_args=())
def _read(gradient: Tensor, dx: Tensor) -> Tensor:
    """The present value. dx keeps a compiler from reading it in the forward pass already."""
    return gradient.clone()


@_read.register_fake
def _(gradient: Tensor, dx: Tensor) -> Tensor:
    return torch.empty_like(gradient)


class _FollowedLoss(torch.autograd.Function):
    """Loss whose backward pass comes before that of every layer."""

    @staticmethod
    def forward(loss: Tensor, gradient: Tensor) -> Tensor:
        return loss.clone()  # which may be changed in place, as a view may not

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.gradient = inputs[1]

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, None]:
        if torch.compiler.is_compiling():
            ctx.gradient.copy_(dloss)
        else:
            # Compiled layers have it saved, and refuse saved tensors whose version has changed.
            with torch.autograd._unsafe_preserve_version_counter(ctx.gradient):
                ctx.gradient.copy_(value_of(dloss))
        return dloss, None
