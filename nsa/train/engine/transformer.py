"""The engine's transformer for NSA: positions once per forward pass, compiled blocks, activation checkpointing.

The engine's own class hands every block the cumulative document lengths, from which each layer would make the same
layout and the same RoPE tables again, and whose varying number makes torch.compile specialise. Here all of that is made
once, outside of the compiled blocks, in tensors whose shapes depend on the batch's shape alone.
"""

from typing import Any

import torch
from olmo_core.nn.transformer import Transformer
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import fully_shard

from nsa.config.schema import RunConfig
from nsa.core.nsa_attention import NSAAttention
from nsa.core.selector_loss import average_over_layers
from nsa.kernels.checkpoint_policy import keep_operators
from nsa.train.engine.mixer import SharedPositions, transformer_config


class EngineTransformer(Transformer):
    """Makes positions once per forward pass."""

    compiled = False

    def _prepare_inputs(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        input_ids, labels, for_blocks, per_block, for_head = super()._prepare_inputs(input_ids, *args, **kwargs)
        layer = next(module for module in self.modules() if isinstance(module, NSAAttention))
        where = layer.locate(input_ids[..., None], cu_doc_lens=for_blocks.pop("cu_doc_lens", None))
        for unused in ("max_doc_len", "loss_div_factor"):
            for_blocks.pop(unused, None)
        return input_ids, labels, {**for_blocks, "positions": SharedPositions(where)}, per_block, for_head

    def apply_compile(self) -> None:
        """As the engine does it, without its marks for varying sizes: here all batches of a run have one shape."""
        for block in self.blocks.values():
            block.apply_compile()
        self.lm_head.compile(fullgraph=False)
        self.compiled = True


class SelectiveCheckpoint(CheckpointWrapper):
    """A block whose backward pass recomputes everything except the results of our operators."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__(block, context_fn=keep_operators, preserve_rng_state=False)

    def apply_compile(self) -> None:
        """With the recomputation inside of the compiled graph: the compiler follows the same policy.

        The only side effect of a block is the probe's record, which the backward pass need not repeat; without the
        option a block that was once probed is never compiled.
        """
        torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
        self.compile(fullgraph=False)

    def apply_fsdp(self, dp_mesh: DeviceMesh | None = None, *_: object, **options: Any) -> None:
        """With the gathering of weights outside of the recomputation, where it does not break the compiled graph."""
        for of_the_engine in ("prefetch_factor", "wrapping_strategy"):
            options.pop(of_the_engine, None)
        fully_shard(self, mesh=dp_mesh, **options)


def build_transformer(config: RunConfig, vocab_size: int) -> EngineTransformer:
    """The run's model without weights, with checkpointed blocks where the config asks for selective ones."""
    model = transformer_config(config, vocab_size).build(init_device="meta")
    model.__class__ = EngineTransformer  # the engine's config builds no subclass
    assert isinstance(model, EngineTransformer)
    average_over_layers(model)
    if config.runtime.gradient_checkpointing == "selective":
        for name, block in list(model.blocks.items()):
            model.blocks.register_module(name, SelectiveCheckpoint(block))
    return model
