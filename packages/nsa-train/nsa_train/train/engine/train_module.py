"""The engine's train module with a step of our own: loss weights and gradient clipping."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from olmo_core.data.utils import split_batch
from olmo_core.distributed.parallel import DataParallelType
from olmo_core.nn.lm_head import LMOutputWithLoss
from olmo_core.train.train_module import TransformerTrainModule
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from nsa.core.selector_loss_sampling import selector_layers, set_sampling_step
from nsa.model.loss import ScoreSums
from nsa_train.train.engine.nan_guard import step_unless_bad
from nsa_train.train.engine.transformer import SCORE_SUMS


class StepSkippingTrainModule(TransformerTrainModule):
    """Trains on batches as the engine does, except that every label of the global batch weighs as much, however labels
    are divided among ranks, and that `check_step` may leave out the optimizer's step.
    """

    check_step: Callable[[Tensor, Tensor], Tensor | bool] | None = None
    """Called with this rank's loss and the gradient norm; returns what `step_unless_bad` takes."""
    step_loss: Tensor | None = None
    """This rank's share of the loss of the last batch: the mean over all ranks is the loss."""
    step_grad_norm: Tensor | None = None

    def train_batch(self, batch: dict[str, Any], dry_run: bool = False) -> None:
        """The selector loss samples its queries by the step, so that a resumed run samples the same ones."""
        self._set_training(True)
        set_sampling_step(selector_layers(self.model), self.trainer.global_step)
        options = dict(loss_reduction="sum", **self._loss_divisor(batch["labels"]))
        parts = split_batch(batch, self.rank_microbatch_size // batch["input_ids"].shape[1])
        losses = [self._backward(part, place == len(parts) - 1, **options) for place, part in enumerate(parts)]
        self.step_loss = torch.stack(losses).sum()

    def optim_step(self) -> None:
        assert self.max_grad_norm is not None
        assert self.step_loss is not None
        self.step_grad_norm = self.clip_gradients(self.max_grad_norm)
        bad = self.check_step(self.step_loss, self.step_grad_norm) if self.check_step is not None else False
        step_unless_bad(self.optim, bad, self._set_learning_rates)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The fused optimizer counts steps on the device; a checkpoint of another one has them on the host."""
        super().load_state_dict(state_dict)
        if self.optim.defaults["fused"]:
            for state in self.optim.state.values():
                state["step"] = state["step"].to(self.device)

    def _set_learning_rates(self) -> None:
        for group in self.optim.param_groups:
            self.scheduler.set_lr(group, self.trainer)

    def clip_gradients(self, limit: float) -> Tensor:
        """Clip the gradients and return their norm before that, over all ranks."""
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters])
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        return norm

    def forward_backward(self, batch: dict[str, Any]) -> float:
        """Loss of one forward and backward pass, without a trainer (for the dry run)."""
        return float(self._backward(batch, True, loss_reduction="mean"))

    def step_without_trainer(self, batches: Sequence[dict[str, Any]], max_norm: float) -> None:
        """A step of these micro-batches that reads no value, so that it also runs on fake tensors."""
        for place, batch in enumerate(batches):
            self._backward(batch, place == len(batches) - 1, loss_reduction="mean")
        self.clip_gradients(max_norm)
        self.optim.step()
        self.zero_grads()

    @torch.no_grad()
    def score_batch(self, batch: dict[str, Any]) -> ScoreSums:
        """Evaluate on one batch: sums over the tokens that this rank computes."""
        self._set_training(False)
        sums = self._forward(batch, loss_reduction=SCORE_SUMS)
        assert isinstance(sums, ScoreSums)
        return sums

    def _backward(self, batch: dict[str, Any], is_last: bool, **options: Any) -> Tensor:
        """Loss of a micro-batch on this rank; fsdp finishes the reduction of gradients in the last one of a step, ddp
        and hsdp sum those of their replicas only there."""
        if isinstance(self.model, FSDPModule):
            self.model.set_is_last_backward(is_last)
            if self.dp_config is not None and self.dp_config.name == DataParallelType.hsdp:
                self.model.set_requires_all_reduce(is_last)
        elif self.dp_config is not None:
            self.model.set_requires_gradient_sync(is_last)
        output = self._forward(batch, **options)
        assert isinstance(output, LMOutputWithLoss)
        assert output.ce_loss is not None
        output.loss.backward()
        return output.ce_loss

    def _forward(self, batch: dict[str, Any], **options: Any) -> LMOutputWithLoss | ScoreSums:
        return self.model_forward(**batch, ignore_index=self.label_ignore_index, return_logits=False, **options)

    def _loss_divisor(self, labels_BS: Tensor) -> dict[str, Any]:
        """Labels of the global batch, and the number of ranks whose gradients are averaged."""
        count = (labels_BS != self.label_ignore_index).sum().to(self.device, non_blocking=True)
        ranks = 1
        if (group := self.dp_process_group) is not None:
            dist.all_reduce(count, group=group)
            ranks = dist.get_world_size(group)
        return dict(loss_div_factor=count, averaged_ranks=ranks)

    def _set_training(self, training: bool) -> None:
        if self.model.training != training:
            self.model.train(training)
