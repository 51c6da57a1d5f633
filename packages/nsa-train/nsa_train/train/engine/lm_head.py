"""The engine's language-model head with a chunked loss: all logits of a batch never exist at once.

The engine's own head makes the logits of every token, in the compute dtype and in fp32, which is the largest part of
memory at long context. Here the loss, and scores for evaluation, come from `nsa.model.loss`, a chunk of tokens at a
time. Parameters and their names are those of the engine.

With tensor parallelism every rank computes the loss of its own part of each row with the whole matrix, which is
gathered for it; with context parallelism the input is a part of the row already.
"""

from dataclasses import dataclass
from typing import Any

import torch
from olmo_core.nn.lm_head import LMHead, LMHeadConfig, LMOutputWithLoss
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from nsa.model.loss import IGNORE, ScoreSums, linear_cross_entropy, linear_score_sums

SCORE_SUMS = "score_sums"
"""A `loss_reduction` of `ChunkedHead` alone: return `ScoreSums` of the tokens of this rank."""


class ChunkedHead(LMHead):
    """The engine's head for losses that are summed or averaged; it returns logits as the engine's does."""

    def forward(self, x: Tensor, **options: Any) -> Tensor | LMOutputWithLoss | ScoreSums:
        """Options as those of `LMHead.forward`; what the chunked loss does not cover is left to the engine's."""
        labels, reduction = options.get("labels"), options.get("loss_reduction", "mean")
        if reduction == SCORE_SUMS:
            assert labels is not None
            return linear_score_sums(*self._loss_inputs(x, labels))
        if labels is None or self._needs_logits(reduction, **options):
            out: Tensor | LMOutputWithLoss = super().forward(x, **options)
            return out
        loss = linear_cross_entropy(*self._loss_inputs(x, labels), reduction)
        share = dict(loss_reduction=reduction, loss_div_factor=options.get("loss_div_factor"))
        return LMOutputWithLoss(
            logits=None,
            loss=self._finalize_loss(loss, len(x), **share),
            ce_loss=self._finalize_loss(loss.detach(), len(x), **share, reduce_across_tp_group=False),
            z_loss=None,
        )

    def _needs_logits(
        self,
        reduction: str,
        return_logits: bool | None = None,
        ignore_index: int = IGNORE,
        z_loss_multiplier: float | None = None,
        logits_to_keep: int | Tensor = 0,
        **_: Any,
    ) -> bool:
        keeps_some = not isinstance(logits_to_keep, int) or logits_to_keep != 0
        asked = return_logits is not False or z_loss_multiplier is not None or keeps_some
        return asked or reduction == "none" or ignore_index != IGNORE or self.w_out.bias is not None

    def _loss_inputs(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states [N, D] of this rank's tokens, the weight [V, D] in the same dtype, and labels [N]."""
        hidden = self.norm(x) if self.norm is not None else x
        weight, device = self.w_out.weight, hidden.device.type
        if torch.is_autocast_enabled(device):  # operators of ours are not cast by it
            dtype = torch.get_autocast_dtype(device)
            hidden, weight = hidden.to(dtype), weight.to(dtype)
        if isinstance(weight, DTensor):
            # Every rank adds to the gradient of the whole matrix, of which it keeps the rows of its shard.
            whole = weight.redistribute(placements=[Replicate()])
            weight = whole.to_local(grad_placements=[Partial()])
        hidden_ND = _local(hidden).flatten(0, 1)
        return hidden_ND, weight, _local(labels).flatten().to(hidden_ND.device)


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


@dataclass
class ChunkedHeadConfig(LMHeadConfig):
    """The engine's config of a head, which builds a `ChunkedHead`."""

    def build(self, *, d_model: int, vocab_size: int, init_device: str = "cpu") -> ChunkedHead:
        options = self.as_dict(exclude_none=True, recurse=False)
        del options["name"]
        options["dtype"] = options["dtype"].as_pt()
        return ChunkedHead(**options, d_model=d_model, vocab_size=vocab_size, init_device=init_device)
