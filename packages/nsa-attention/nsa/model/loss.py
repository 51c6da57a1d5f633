"""Chunked cross-entropy of a linear head in fp32: the full logits never exist.

Logits of bf16 and fp16 inputs are accumulated and kept in fp32: rounded to bf16 they are off by up to 0.2 %, which is
0.06 nats for a token whose logit is 20. A GPU multiplies the inputs as they are (tensor cores) and returns fp32; other
devices have no such product and convert a block of the weight at a time.

A label must be a token id or −100. Others are refused: on the CPU by a ConfigError, on a GPU by a device-side
assertion, because waiting for the answer would stall every step.

N tokens · n tokens of one chunk · D model dim · V vocabulary
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa.errors import ConfigError
from nsa.kernels.custom_operator import ReverseModeFunction, custom_operator, with_gradient
from nsa.kernels.precision import multiplies_wide, widest_float

IGNORE = -100
_CHUNK_ELEMENTS = 1 << 22  # logits, or elements of the weight in fp32, that exist at once


class _CrossEntropyFunction(ReverseModeFunction):
    subject = "the chunked cross-entropy"
    instead = "torch.nn.functional.cross_entropy of the logits supports every transform."


class TokenScores(NamedTuple):
    """Loss and correctness of each token's prediction, in any shape; no gradient."""

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
    """Sum of their cross-entropies."""
    tokens: Tensor
    """How many there are."""
    hits: Tensor
    """How many of the labels are the most likely token."""


def linear_cross_entropy(x_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy of x·Wᵀ against labels (−100: no label), without ever holding all logits.

    Gradients are computed in the forward pass, where each chunk's logits exist anyway, if any input requires them.
    Under autocast the inputs are cast as those of a linear layer.
    """
    assert reduction in ("mean", "sum")
    x_ND, weight_VD = _autocast(x_ND, weight_VD)
    need_grad = torch.is_grad_enabled() and (x_ND.requires_grad or weight_VD.requires_grad)
    loss: Tensor = _differentiable_cross_entropy(x_ND, weight_VD, labels_N, reduction == "mean", need_grad)[0]
    return loss


@torch.no_grad()
def linear_token_scores(x_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> TokenScores:
    """Return the cross-entropy of every token [N], and whether its label has the largest of the logits x·Wᵀ."""
    return TokenScores(*_linear_token_scores(*_autocast(x_ND, weight_VD), labels_N))


@torch.no_grad()
def linear_agreement(
    x_ND: Tensor, weight_VD: Tensor, reference_ND: Tensor, reference_VD: Tensor, labels_N: Tensor
) -> AgreementScores:
    """Compare the distributions of x·Wᵀ and of the reference's, whose widths D may differ, a chunk of tokens at a
    time."""
    require_labels(labels_N, len(weight_VD))
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
    """Sums of the token scores, in fp64 where there is one: those of parts of a batch add up to those of the whole."""
    scores, counted_N = linear_token_scores(x_ND, weight_VD, labels_N), labels_N != IGNORE
    nats = scores.losses.sum(dtype=widest_float(x_ND.device))
    return ScoreSums(nats, counted_N.sum(), (scores.hits & counted_N).sum())


def require_labels(labels: Tensor, vocab_size: int, ignore_index: int = IGNORE) -> None:
    """Raise ConfigError unless every label is a token id or `ignore_index`; a GPU and compiled code fail an assertion
    instead."""
    valid = ((labels >= 0) & (labels < vocab_size)) | (labels == ignore_index)
    if labels.is_cuda or torch.compiler.is_compiling():
        torch._assert_async(valid.all(), "a label is neither a token id nor the index that is ignored")
    elif not valid.all():
        label = int(labels[~valid].flatten()[0])
        raise ConfigError(
            f"a label must be a token id (0 to {vocab_size - 1}) or {ignore_index} (label {label}): no other token can "
            f"be predicted. Set labels that do not count to {ignore_index}."
        )


def _autocast(x_ND: Tensor, weight_VD: Tensor) -> tuple[Tensor, Tensor]:
    device = x_ND.device.type
    if not torch.is_autocast_enabled(device):
        return x_ND, weight_VD
    dtype = torch.get_autocast_dtype(device)
    return x_ND.to(dtype), weight_VD.to(dtype)


@custom_operator("nsa::linear_token_scores", mutates_args=())
def _linear_token_scores(x_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
    require_labels(labels_N, len(weight_VD))
    losses_N, hits_N = _score_buffers(x_ND, labels_N)
    for at in _chunks(x_ND, weight_VD):
        losses_N[at], logits_nV, _ = _chunk_losses(x_ND[at], weight_VD, labels_N[at])
        hits_N[at] = logits_nV.argmax(-1) == labels_N[at]
    return losses_N, hits_N


@_linear_token_scores.register_fake
def _(x_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
    return _score_buffers(x_ND, labels_N)


def _score_buffers(x_ND: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
    losses_N = x_ND.new_empty(len(labels_N), dtype=_wide(x_ND))
    return losses_N, torch.empty_like(labels_N, dtype=torch.bool)


def chunk_rows(width: int) -> int:
    """Rows of fp32 that exist at once: tokens whose logits are this wide, or rows of a weight."""
    return max(1, _CHUNK_ELEMENTS // width)


def _chunks(x_ND: Tensor, weight_VD: Tensor) -> Iterator[slice]:
    rows = chunk_rows(weight_VD.shape[0])
    return (slice(begin, begin + rows) for begin in range(0, x_ND.shape[0], rows))


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _weight_blocks(weight_VD: Tensor) -> Iterator[slice]:
    """Rows of the weight that are converted, or whose gradients are held twice, at once."""
    rows = chunk_rows(weight_VD.shape[1])
    return (slice(begin, begin + rows) for begin in range(0, weight_VD.shape[0], rows))


def _logits(x_nD: Tensor, weight_VD: Tensor) -> Tensor:
    """x·Wᵀ, accumulated and returned in at least fp32."""
    wide = _wide(x_nD)
    if multiplies_wide(x_nD):
        return torch.mm(x_nD, weight_VD.T, out_dtype=wide)
    if x_nD.dtype == wide:
        return x_nD @ weight_VD.T
    logits_nV, x_nD = x_nD.new_empty(len(x_nD), len(weight_VD), dtype=wide), x_nD.to(wide)
    for at in _weight_blocks(weight_VD):
        logits_nV[:, at] = x_nD @ weight_VD[at].to(wide).T
    return logits_nV


def _add_gradients(dlogits_nV: Tensor, x_nD: Tensor, weight_VD: Tensor, dx_nD: Tensor, dweight_VD: Tensor) -> None:
    """Write the gradient of a chunk's x, and add its part of the gradient of the weight, which is at least fp32."""
    wide = _wide(x_nD)
    if x_nD.dtype == wide:
        torch.mm(dlogits_nV, weight_VD, out=dx_nD)
        dweight_VD.addmm_(dlogits_nV.T, x_nD)
    elif multiplies_wide(x_nD):
        dlogits_nV = dlogits_nV.to(x_nD.dtype)
        torch.mm(dlogits_nV, weight_VD, out=dx_nD)
        for at in _weight_blocks(weight_VD):
            dweight_VD[at] += torch.mm(dlogits_nV[:, at].T, x_nD, out_dtype=wide)
    else:
        sum_nD = torch.zeros_like(x_nD, dtype=wide)
        for at in _weight_blocks(weight_VD):
            sum_nD.addmm_(dlogits_nV[:, at], weight_VD[at].to(wide))
        dx_nD.copy_(sum_nD)
        dweight_VD.addmm_(dlogits_nV.T, x_nD.to(wide))


def _chunk_losses(x_nD: Tensor, weight_VD: Tensor, labels_n: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Negative log-likelihood of each label (0 without one), the logits and their log-sum-exp [n, 1]."""
    with torch.autocast(x_nD.device.type, enabled=False):
        logits_nV = _logits(x_nD, weight_VD)
    lse_n1 = logits_nV.logsumexp(-1, keepdim=True)
    nll_n = (lse_n1 - logits_nV.gather(1, labels_n.clamp(min=0)[:, None])).squeeze(1)
    return nll_n.masked_fill(labels_n == IGNORE, 0), logits_nV, lse_n1


@custom_operator("nsa::linear_cross_entropy", mutates_args=())
def _linear_cross_entropy(
    x_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, mean: bool, need_grad: bool
) -> tuple[Tensor, Tensor, Tensor]:
    require_labels(labels_N, len(weight_VD))
    wide = _wide(x_ND)
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
            dlogits_nV.mul_(real_N[at][:, None] * share)
            with torch.autocast(x_ND.device.type, enabled=False):
                _add_gradients(dlogits_nV, x_ND[at], weight_VD, dx_ND[at], dweight_VD)
    return loss, dx_ND, dweight_VD


@_linear_cross_entropy.register_fake
def _(x_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, mean: bool, need_grad: bool) -> tuple[Tensor, Tensor, Tensor]:
    return (x_ND.new_empty((), dtype=_wide(x_ND)), *_gradient_buffers(x_ND, weight_VD, need_grad))


def _gradient_buffers(x_ND: Tensor, weight_VD: Tensor, need_grad: bool) -> tuple[Tensor, Tensor]:
    if not need_grad:
        return x_ND.new_empty(0), x_ND.new_empty(0)
    return torch.empty_like(x_ND), torch.zeros(weight_VD.shape, dtype=_wide(x_ND), device=x_ND.device)


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
