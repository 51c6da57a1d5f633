"""Selector loss: an auxiliary loss that trains block selection on the attention mass of the blocks it chose.

For a sample of the queries, the KL divergence from the selected branch's attention mass per chosen block to the block
scores by which they were chosen, both summed over the heads of a group and renormalised over the chosen blocks that end
at or before the query. Only the compressed keys get a gradient. The log-sum-exps that normalise each head's scores come
from the attention kernels and are constants, so nothing outside the chosen blocks is read: time and memory are linear
in the queries, whatever the backend.

The loss is averaged over labels, as the cross-entropy is: divergences are summed, each sampled query standing for as
many tokens, and divided by the labels of the optimizer step. Queries that have fewer than two blocks to compare add
nothing. So it does not depend on how a step is divided into passes, ranks and documents, and the number of labels is
the one number that every trainer knows before its first backward pass.

B batch · S tokens · Q sampled queries · M = B·Q · c queries of a chunk · T raw keys · C compressed keys · N chosen
blocks · t tokens of a block · m compressed entries that overlap a block · G kv groups · R heads per group · K key dim
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from nsa.core.block_divergence import DivergenceSums, SelectorLossFunction, fake_results, register_gradient
from nsa.core.branches import BranchesOutput, BranchKeys
from nsa.core.keys_at_places import add_rows, keys_at, row_numbers
from nsa.core.model_layers import attention_layers
from nsa.core.positions import Positions, QuerySample
from nsa.geometry import Geometry
from nsa.kernels.custom_operator import custom_operator
from nsa.kernels.interface import constant_when_traced
from nsa.kernels.portable.chunk import budget
from nsa.kernels.precision import without_autocast
from nsa.kernels.transforms import value_of

_GOLDEN_RATIO = 0.6180339887498949


def sampled_queries(n_tokens: int, share: float, step: int, device: torch.device) -> Tensor:
    """Indices [Q] of this share of the tokens, evenly spaced; the first one moves with the step, so that over the steps
    every token is sampled, and a resumed run samples as an uninterrupted one does."""
    count = _sample_size(n_tokens, share)
    offset = step * _GOLDEN_RATIO % 1
    places = (torch.arange(count, dtype=torch.float64, device=device) + offset) * (n_tokens / count)
    return places.long().clamp(max=n_tokens - 1)


def _sample_size(n_tokens: int, share: float) -> int:
    return min(n_tokens, max(1, round(share * n_tokens)))


@dataclass(frozen=True)
class LossLabels:
    """The labels of a forward pass: the selector loss is averaged over the tokens that the model's own loss counts.

    Not a tuple, because FSDP casts, and so copies, tensors in the containers among a layer's arguments: `gradient` must
    stay the tensor that `follow` writes to.
    """

    labelled_BS: Tensor
    """Whether each query has a label."""
    count: Tensor | float
    """What a sum over this pass's labels is divided by: the labels of the pass, or, where several passes make a step,
    those of the step divided by the number of ranks whose gradients are averaged."""
    gradient: Tensor
    """Gradient of the model's loss: 1 until its backward pass begins, where `follow` writes it."""

    @classmethod
    def counted(cls, labelled_BS: Tensor, count: Tensor | float | None = None) -> Self:
        """With the labels of this pass alone as the default of `count`."""
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
    sampled_Q = sampled_queries(n_tokens, layer.selector_loss_share, layer.selector_step, device)
    return (torch.arange(rows, device=device)[:, None] * n_tokens + sampled_Q).flatten() if packed else sampled_Q


def tokens_per_query(layer: Any, n_tokens: int) -> float:
    return n_tokens / _sample_size(n_tokens, layer.selector_loss_share)


def with_sampled_queries(where: Positions, layer: Any, x_BSD: Tensor, labels: LossLabels | None) -> Positions:
    """With the queries of a training pass; unchanged in evaluation, with a cache, and for padded rows."""
    if where.layout is None or where.padding is not None:
        return where
    rows, n_tokens = x_BSD.shape[:2]
    packed = len(where.layout.pos_BS) != rows or where.layout.pos_BS.shape[1] != n_tokens
    sampled_Q = row_sample(layer, rows, n_tokens, x_BSD.device, packed=packed)
    if sampled_Q is None:
        return where
    labels = LossLabels.of_all(x_BSD) if labels is None else labels
    if packed:
        labels = replace(labels, labelled_BS=labels.labelled_BS.flatten()[None])
    return where._replace(sample=weighted_sample(sampled_Q, labels, tokens_per_query(layer, n_tokens)))


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
    """With refusals of other transforms; torch.compile traces no function that has them."""


@custom_operator("nsa::read_loss_gradient", mutates_args=())
def _read(gradient: Tensor, dx: Tensor) -> Tensor:
    """The present value. dx keeps a compiler from reading it in the forward pass already."""
    return gradient.clone()


@_read.register_fake
def _(gradient: Tensor, dx: Tensor) -> Tensor:
    return torch.empty_like(gradient)


class _FollowedLoss(torch.autograd.Function):
    """Its backward pass comes before that of every layer."""

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


def selector_loss(
    sample: QuerySample, q_BSGRK: Tensor, k_BCGK: Tensor, made: BranchesOutput, compressed: BranchKeys,
    selected: BranchKeys, *, geometry: Geometry, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The weighted sum over sampled queries with two comparable blocks or more, averaged over groups, which has a
    gradient in k_BCGK alone; and the plain mean over these queries and groups, for the record.

    k_BCGK: the compressed keys once more, made of detached hidden states.
    """
    assert made.blocks is not None
    lse_compressed, lse_selected, *_ = made.lse
    per_query = (q_BSGRK, made.blocks, lse_compressed, lse_selected, selected.pos_BS, selected.start_BS)
    sampled = [x.detach().index_select(1, sample.queries_Q) for x in (*per_query, compressed.start_BS)]
    need_grad = torch.is_grad_enabled() and k_BCGK.requires_grad
    sampled.append(sample.weight_BQ)
    loss, mean, _ = _differentiable_loss(k_BCGK, selected.k.detach(), *sampled, geometry.ints, scale, need_grad)
    return loss, mean


class _Chunk(NamedTuple):
    """Some of the sampled queries, in fp32 or wider; rows of the batch one after the other."""

    q_cGRK: Tensor
    """Times the scale of the scores."""
    blocks_cGN: Tensor
    lse_cmp_cGR: Tensor
    lse_sel_cGR: Tensor
    pos_c: Tensor
    start_c: Tensor
    """Index of the document's position 0 among the raw keys of all rows of the batch."""
    first_c: Tensor
    """Index of the document's block 0 among the compressed keys of all rows of the batch."""
    weight_c: Tensor

    def log_mass_read(self, k_sel_TGK: Tensor, geometry: Geometry) -> Tensor:
        """Log of the selected branch's mass per chosen block [c, G, N]; anything where the block is not complete."""
        token_t = torch.arange(geometry.l_sel, device=self.pos_c.device)
        at_cGNt = self.start_c[:, None, None, None] + self.blocks_cGN[..., None] * geometry.l_sel + token_t
        scores_cGRNt = self._scores(keys_at(k_sel_TGK, at_cGNt), self.lse_sel_cGR)
        return scores_cGRNt.logsumexp((2, 4))

    def selector_scores(self, k_cmp_CGK: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
        """Logarithms of what the entries add to the scores of the chosen blocks, [c, G, R, N, m], −inf where an entry
        is not visible to the query; and where those entries lie, [c, G, N, m]."""
        g = geometry
        entry_m = torch.arange((g.l + g.l_sel) // g.d - 1, device=self.pos_c.device)
        begin_m = (entry_m + 1) * g.d - g.l  # relative to the block
        overlap_m = ((begin_m + g.l).clamp(max=g.l_sel) - begin_m.clamp(min=0)) // g.d  # as `reference.overlap`
        log_overlap_m = overlap_m.to(self.q_cGRK.dtype).log()
        number_cGNm = self.blocks_cGN[..., None] * (g.l_sel // g.d) + begin_m // g.d
        hidden_cGNm = (number_cGNm < 0) | (number_cGNm * g.d + g.l - 1 > self.pos_c[:, None, None, None])
        at_cGNm = self.first_c[:, None, None, None] + number_cGNm
        scores_cGRNm = self._scores(keys_at(k_cmp_CGK, at_cGNm), self.lse_cmp_cGR) + log_overlap_m
        return scores_cGRNm.masked_fill_(hidden_cGNm[:, :, None], -torch.inf), at_cGNm

    def complete_cGN(self, geometry: Geometry) -> Tensor:
        """Whether a chosen block ends at or before the query."""
        ends_cGN = (self.blocks_cGN + 1) * geometry.l_sel
        return (self.blocks_cGN >= 0) & (ends_cGN <= self.pos_c[:, None, None] + 1)

    def _scores(self, k_cGNxK: Tensor, lse_cGR: Tensor) -> Tensor:
        scores = torch.einsum("cgrk,cgnxk->cgrnx", self.q_cGRK, k_cGNxK.to(self.q_cGRK.dtype))
        return scores.sub_(lse_cGR[..., None, None])


def _add_chunk(chunk: _Chunk, k_cmp: Tensor, k_sel: Tensor, g: Geometry, sums: DivergenceSums) -> None:
    scores_cGRNm, at_cGNm = chunk.selector_scores(k_cmp, g)
    log_score_cGN = scores_cGRNm.logsumexp((2, 4))
    complete_cGN = chunk.complete_cGN(g)
    compared_cGN, dlog_cGN = sums.add(log_score_cGN, chunk.log_mass_read(k_sel, g), complete_cGN, chunk.weight_c)
    if sums.dk_cmp is None:
        return
    # Of a block's score, divided among its entries and heads by what each adds to it.
    parts_cGRNm = (scores_cGRNm - log_score_cGN.where(compared_cGN, 0)[:, :, None, :, None]).exp_()
    dscores_cGRNm = parts_cGRNm.mul_(dlog_cGN[:, :, None, :, None]).where(compared_cGN[:, :, None, :, None], 0)
    dk_cGNmK = torch.einsum("cgrnm,cgrk->cgnmk", dscores_cGRNm, chunk.q_cGRK)
    rows = row_numbers(at_cGNm, *k_cmp.shape[:2])
    add_rows(sums.dk_cmp.view(-1, sums.dk_cmp.shape[-1]), rows.flatten(), dk_cGNmK.flatten(0, -2))


@custom_operator("nsa::selector_loss", mutates_args=())
def _selector_loss(
    k_cmp: Tensor, k_sel: Tensor, q: Tensor, blocks: Tensor, lse_cmp: Tensor, lse_sel: Tensor, pos: Tensor,
    start: Tensor, first: Tensor, weight: Tensor, sizes: list[int], scale: float, need_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return without_autocast(
        q, _compute, k_cmp, k_sel, (q, blocks, lse_cmp, lse_sel, pos, start, first, weight), Geometry.from_ints(sizes),
        scale, need_grad,
    )  # fmt: skip


def _compute(
    k_cmp: Tensor, k_sel: Tensor, per_query: tuple[Tensor, ...], g: Geometry, scale: float, need_grad: bool
) -> tuple[Tensor, Tensor, Tensor]:
    q, blocks, lse_cmp, lse_sel, pos, start, first, weight = per_query
    row_B1 = torch.arange(len(q), device=q.device)[:, None]
    start, first = start + row_B1 * k_sel.shape[1], first + row_B1 * k_cmp.shape[1]
    k_cmp_rows, k_sel_rows = k_cmp.flatten(0, 1), k_sel.flatten(0, 1)
    sums = DivergenceSums(q, k_cmp, need_grad)
    if len(k_cmp_rows):
        chunk = max(1, budget(q) // max(1, blocks.shape[2] * blocks.shape[3] * g.l_sel * q.shape[-1]))
        parts = (q, blocks.long(), lse_cmp, lse_sel, pos, start, first, weight)
        for q_c, *rest in zip(*(x.flatten(0, 1).split(chunk) for x in parts), strict=True):
            _add_chunk(_Chunk(q_c.to(sums.wide) * scale, *rest), k_cmp_rows, k_sel_rows, g, sums)
    return sums.results()


@_selector_loss.register_fake
def _(
    k_cmp: Tensor, k_sel: Tensor, q: Tensor, blocks: Tensor, lse_cmp: Tensor, lse_sel: Tensor, pos: Tensor,
    start: Tensor, first: Tensor, weight: Tensor, sizes: list[int], scale: float, need_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return fake_results(k_cmp, q, need_grad)


_differentiable_loss = register_gradient(_selector_loss, n_inputs=13)
