"""Chunked cross-entropy of a linear head in fp32: the full logits never exist.

N tokens · n tokens of one chunk · D model dim · V vocabulary
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa.kernels.transforms import ReverseModeFunction, with_gradient

IGNORE = -100
_CHUNK_ELEMENTS = 1 << 22  # logits that exist at once


class _CrossEntropyFunction(ReverseModeFunction):
    subject = "the chunked cross-entropy"
    instead = "torch.nn.functional.cross_entropy of the logits supports every transform."


class TokenScores(NamedTuple):
    """How well each token was predicted, in any shape; no gradient."""

    losses: Tensor
    """Cross-entropy in nats; 0 where there is no label."""
    hits: Tensor
    """Whether the label is the most likely token; False where there is no label."""


class AgreementScores(NamedTuple):
    """Two models' predictions of the same tokens [N]; no gradient. Losses and hits are 0 and False without a label."""

    own: TokenScores
    reference: TokenScores
    same_top: Tensor
    """Whether both models have the same most likely token."""
    divergence: Tensor
    """KL(reference ‖ own) of the two distributions over the vocabulary, in nats."""


class ScoreSums(NamedTuple):
    """Sums over the tokens that have a label, as scalar tensors; no gradient."""

    nats: Tensor
    """Of their cross-entropies."""
    tokens: Tensor
    """How many there are."""
    hits: Tensor
    """How many of the labels are the most likely token."""


def linear_cross_entropy(x_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy of x·Wᵀ against labels (−100: no label), without ever holding all logits.

    Gradients are computed in the forward pass, where each chunk's logits exist anyway, if any input requires them.
    """
    assert reduction in ("mean", "sum")
    need_grad = torch.is_grad_enabled() and (x_ND.requires_grad or weight_VD.requires_grad)
    loss: Tensor = _differentiable_cross_entropy(x_ND, weight_VD, labels_N, reduction == "mean", need_grad)[0]
    return loss


@torch.no_grad()
def linear_token_scores(x_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> TokenScores:
    """The same cross-entropy of every token [N], and whether its label has the largest of the logits x·Wᵀ."""
    return TokenScores(*_linear_token_scores(x_ND, weight_VD, labels_N))


@torch.no_grad()
def linear_agreement(
    x_ND: Tensor, weight_VD: Tensor, reference_ND: Tensor, reference_VD: Tensor, labels_N: Tensor
) -> AgreementScores:
    """Compare the distributions of x·Wᵀ and of the reference's, whose widths D may differ, a chunk of tokens at a
    time."""
    scores = _score_buffers(x_ND, labels_N), _score_buffers(reference_ND, labels_N)
    same_top_N, divergence_N = scores[0][1].clone(), scores[0][0].clone()
    for at in _chunks(x_ND, weight_VD):
        labels_n, log_shares, tops = labels_N[at], [], []
        models = (x_ND[at], weight_VD), (reference_ND[at], reference_VD)
        for (losses_N, hits_N), (x_nD, head_VD) in zip(scores, models, strict=True):
            losses_N[at], logits_nV, lse_n1 = _chunk_losses(x_nD, head_VD, labels_n)
            tops.append(logits_nV.max(-1).indices)
            hits_N[at] = tops[-1] == labels_n
            log_shares.append(logits_nV.sub_(lse_n1))
        same_top_N[at] = tops[0] == tops[1]
        own_nV, reference_nV = log_shares
        # Rounding alone can make it negative.
        divergence_N[at] = own_nV.neg_().add_(reference_nV).mul_(reference_nV.exp_()).sum(-1).clamp(min=0)
    return AgreementScores(TokenScores(*scores[0]), TokenScores(*scores[1]), same_top_N, divergence_N)


def linear_score_sums(x_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> ScoreSums:
    """Sums of the token scores in fp64: those of parts of a batch add up to those of the whole."""
    scores, counted_N = linear_token_scores(x_ND, weight_VD, labels_N), labels_N != IGNORE
    return ScoreSums(scores.losses.sum(dtype=torch.float64), counted_N.sum(), (scores.hits & counted_N).sum())


@torch.library.custom_op("nsa::linear_token_scores", mutates_args=())
def _linear_token_scores(x_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
    losses_N, hits_N = _score_buffers(x_ND, labels_N)
    for at in _chunks(x_ND, weight_VD):
        losses_N[at], logits_nV, _ = _chunk_losses(x_ND[at], weight_VD, labels_N[at])
        hits_N[at] = logits_nV.argmax(-1) == labels_N[at]
    return losses_N, hits_N


@_linear_token_scores.register_fake
def _(x_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
    return _score_buffers(x_ND, labels_N)


def _score_buffers(x_ND: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
    losses_N = x_ND.new_empty(len(labels_N), dtype=torch.promote_types(x_ND.dtype, torch.float32))
    return losses_N, torch.empty_like(labels_N, dtype=torch.bool)


def chunk_tokens(vocab_size: int) -> int:
    """Tokens whose logits exist at once."""
    return max(1, _CHUNK_ELEMENTS // vocab_size)


def _chunks(x_ND: Tensor, weight_VD: Tensor) -> Iterator[slice]:
    rows = chunk_tokens(weight_VD.shape[0])
    return (slice(begin, begin + rows) for begin in range(0, x_ND.shape[0], rows))


def _chunk_losses(x_nD: Tensor, weight_VD: Tensor, labels_n: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Negative log-likelihood of each label (0 without one), the logits and their log-sum-exp [n, 1]."""
    logits_nV = (x_nD @ weight_VD.T).to(torch.promote_types(x_nD.dtype, torch.float32))
    lse_n1 = logits_nV.logsumexp(-1, keepdim=True)
    nll_n = (lse_n1 - logits_nV.gather(1, labels_n.clamp(min=0)[:, None])).squeeze(1)
    return nll_n.masked_fill(labels_n == IGNORE, 0), logits_nV, lse_n1


@torch.library.custom_op("nsa::linear_cross_entropy", mutates_args=())
def _linear_cross_entropy(
    x_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, mean: bool, need_grad: bool
) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(x_ND.dtype, torch.float32)
    loss = torch.zeros((), dtype=wide, device=x_ND.device)
    dx_ND, dweight_VD = _gradient_buffers(x_ND, weight_VD, need_grad)
    real_N = labels_N != IGNORE
    share = 1.0 / real_N.sum().clamp(min=1).to(wide) if mean else torch.ones((), dtype=wide, device=x_ND.device)
    for at in _chunks(x_ND, weight_VD):
        nll_n, logits_nV, lse_n1 = _chunk_losses(x_ND[at], weight_VD, labels_N[at])
        loss += nll_n.sum() * share
        if need_grad:
            label_n1 = labels_N[at].clamp(min=0)[:, None]
            dlogits_nV = logits_nV.sub_(lse_n1).exp_()
            dlogits_nV.scatter_add_(1, label_n1, dlogits_nV.new_full((1, 1), -1).expand_as(label_n1))
            dlogits_nV = dlogits_nV.mul_(real_N[at][:, None] * share).to(x_ND.dtype)
            dx_ND[at] = dlogits_nV @ weight_VD
            dweight_VD += dlogits_nV.T @ x_ND[at]
    return loss, dx_ND, dweight_VD


@_linear_cross_entropy.register_fake
def _(x_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, mean: bool, need_grad: bool) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(x_ND.dtype, torch.float32)
    return (x_ND.new_empty((), dtype=wide), *_gradient_buffers(x_ND, weight_VD, need_grad))


def _gradient_buffers(x_ND: Tensor, weight_VD: Tensor, need_grad: bool) -> tuple[Tensor, Tensor]:
    if not need_grad:
        return x_ND.new_empty(0), x_ND.new_empty(0)
    wide = torch.promote_types(x_ND.dtype, torch.float32)
    return torch.empty_like(x_ND), torch.zeros(weight_VD.shape, dtype=wide, device=x_ND.device)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1], output[2])
    ctx.weight_dtype = inputs[1].dtype


def _differentiate(ctx: Any, dloss: Tensor | None, *of_gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    _CrossEntropyFunction.refuse_second(*of_gradients)
    if dloss is None:
        return (None,) * 5
    dx_ND, dweight_VD = ctx.saved_tensors
    return (dx_ND * dloss).to(dx_ND.dtype), (dweight_VD * dloss).to(ctx.weight_dtype), None, None, None


_differentiable_cross_entropy = with_gradient(_linear_cross_entropy, _save, _differentiate, _CrossEntropyFunction)
