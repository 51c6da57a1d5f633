"""The engine's transformer for NSA: positions once per forward pass, compiled blocks, activation checkpointing.

The engine's own class hands every block the cumulative document lengths, from which each layer would make the same
layout and the same RoPE tables again, and whose varying number makes torch.compile specialise. Here all of that is made
once, outside of the compiled blocks, in tensors whose shapes depend on the batch's shape alone.
"""

import warnings
from typing import Any

import torch
from olmo_core.nn.transformer import Transformer
from olmo_core.nn.transformer import init as engine_init
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import fully_shard

from nsa.core.init import InitSkipped
from nsa.core.model_layers import locate_layers
from nsa.core.probe import attention_layers
from nsa.core.selector_loss import LossLabels, average_over_layers
from nsa.kernels.checkpoint_policy import keep_operators
from nsa.model.loss import IGNORE
from nsa_train.config.schema import RunConfig
from nsa_train.run_model import freeze_others
from nsa_train.train.engine.deferred_imports import without_expert_blocks
from nsa_train.train.engine.mixer import SharedPositions, own_part, transformer_config
from nsa_train.train.parallel.context_exchange import ContextGroup, context_group
from nsa_train.train.parallel.context_layout import own_layer_positions, own_tokens


class EngineTransformer(Transformer):
    """Makes positions once per forward pass."""

    compiled = False
    context: ContextGroup | None = None

    def _prepare_inputs(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        input_ids, labels, for_blocks, per_block, for_head = super()._prepare_inputs(input_ids, *args, **kwargs)
        layers = list(attention_layers(self).values())
        cu_doc_lens, loss_divisor = (for_blocks.pop(name, None) for name in ("cu_doc_lens", "loss_div_factor"))
        for_blocks.pop("max_doc_len", None)
        if self.context is None:
            counted = None if labels is None else LossLabels.counted(labels != IGNORE, loss_divisor)
            located = locate_layers(layers, input_ids[..., None], cu_doc_lens=cu_doc_lens, labels=counted)
        else:
            packed, whole = cu_doc_lens is not None, input_ids
            input_ids = self.own_tokens(input_ids, packed)
            labels = None if labels is None else self.own_tokens(labels, packed)
            # As the engine's head divides the sums of ranks that share a row: their gradients are averaged.
            share = None if loss_divisor is None else loss_divisor / self.context.split.ranks
            counted = None if labels is None else LossLabels.counted(labels != IGNORE, share)
            located = own_layer_positions(self.context, layers, whole.shape, cu_doc_lens, input_ids, counted)
        per_block = {
            place: {**per_block.get(place, {}), "positions": SharedPositions(where)}
            for place, where in enumerate(located)
        }
        return input_ids, labels, for_blocks, per_block, for_head

    def own_tokens(self, x_BS: Tensor, packed: bool) -> Tensor:
        """The part of a batch's rows that this rank computes: all without context parallelism. Packed rows are divided
        as one row, laid end to end, because their documents are."""
        if self.context is None:
            return x_BS
        return own_tokens(self.context.split, x_BS.flatten()[None] if packed else x_BS)

    def apply_cp(self, cp_mesh: DeviceMesh, ring: Any = None, uly: Any = None) -> None:
        """As the engine does it, without its load balancer: rows are divided here, where their positions are made."""
        for block in self.blocks.values():
            block.apply_cp(cp_mesh, ring=ring, uly=uly)
        self.lm_head.apply_cp(cp_mesh)
        self.context = context_group(cp_mesh, zigzag=ring is not None)

    def init_weights(self, **options: Any) -> torch.Generator:
        """As the engine does it, but nothing is sent: every rank makes all values and keeps its part. torch cannot
        scatter a tensor whose axis is sharded by two kinds of parallelism into parts of different sizes."""
        engines = engine_init.distribute_like
        engine_init.distribute_like = own_part
        try:
            with without_expert_blocks(), warnings.catch_warnings():
                # About values that are replaced: those of every module's `reset_parameters`.
                warnings.filterwarnings("ignore", "DTensor random operators")
                generator: torch.Generator = super().init_weights(**options)
        finally:
            engine_init.distribute_like = engines
        return generator

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
    """The run's model without weights, with checkpointed blocks where the config asks for selective ones. Parameters
    that are not trained are frozen as by the engine's `freeze_params`, which takes patterns of what is frozen."""
    described = transformer_config(config, vocab_size)
    with InitSkipped():
        # The engine's config builds its own class, with these arguments.
        model = EngineTransformer(
            d_model=described.d_model,
            vocab_size=described.vocab_size,
            n_layers=described.n_layers,
            block=described.block,
            block_overrides=described.block_overrides,
            lm_head=described.lm_head,
            dtype=described.dtype.as_pt(),
            init_method=described.init_method,
            init_device="meta",
            init_seed=described.init_seed,
            init_std=described.init_std,
            tie_word_embeddings=described.tie_word_embeddings,
        )
    average_over_layers(model)
    freeze_others(model, config.train.trainable)
    if config.runtime.gradient_checkpointing == "selective":
        for name, block in list(model.blocks.items()):
            model.blocks.register_module(name, SelectiveCheckpoint(block))
    return model
