"""The engine's transformer for NSA: positions once per forward pass, chunked loss, initial weights, checkpointing.

The engine's own class hands every block the cumulative document lengths, from which each layer would make the same
layout and the same RoPE tables again, and whose varying number makes torch.compile specialise. Here all of that is made
once, outside of the compiled blocks, in tensors whose shapes depend on the batch's shape alone.

The engine's own head makes the logits of every token, in the compute dtype and in fp32, which is the largest part of
memory at long context. Here the loss, and scores for evaluation, come from `nsa.model.loss`, a chunk of tokens at a
time. Parameters and their names are those of the engine.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from olmo_core.data.utils import get_cumulative_document_lengths
from olmo_core.nn.feed_forward import FeedForwardConfig
from olmo_core.nn.layer_norm import LayerNormConfig, LayerNormType
from olmo_core.nn.lm_head import LMHead, LMHeadConfig, LMOutputWithLoss
from olmo_core.nn.transformer import Transformer, TransformerBlockConfig, TransformerBlockType, TransformerConfig
from olmo_core.utils import move_to_device
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import DeviceMesh
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from nsa.core.init import InitSkipped
from nsa.core.initial_values import fill
from nsa.core.layer_pattern import repeated
from nsa.core.model_layers import locate_layers
from nsa.core.probe import attention_layers
from nsa.core.selector_loss_sampling import LossLabels, average_over_layers
from nsa.kernels.checkpoint_policy import keep_operators
from nsa.model.loss import IGNORE, ScoreSums, linear_cross_entropy, linear_score_sums
from nsa_train.config.schema import RunConfig
from nsa_train.run_model import freeze_others
from nsa_train.train.engine.mixer import NSAMixer, NSAMixerConfig
from nsa_train.train.parallel.context_parallel import ContextGroup, own_layer_positions, own_tokens

SCORE_SUMS = "score_sums"
"""A `loss_reduction` of `ChunkedHead` alone: return `ScoreSums` of the tokens of this rank."""


class ChunkedHead(LMHead):
    """The engine's head for losses that are summed or averaged; it returns logits as the engine's does."""

    def forward(self, x: Tensor, **options: Any) -> Tensor | LMOutputWithLoss | ScoreSums:
        """Options as those of `LMHead.forward`; what the chunked loss does not cover is left to the engine's.

        With tensor parallelism every rank computes the loss of its own part of each row with the whole matrix, which is
        gathered for it; `loss` is that of the whole row and `ce_loss` this rank's share. With context parallelism the
        input is a part of the row already.
        """
        labels, reduction = options.get("labels"), options.get("loss_reduction", "mean")
        if reduction == SCORE_SUMS:
            assert labels is not None
            return linear_score_sums(*self._loss_inputs(x, labels))
        if labels is None or self._needs_logits(reduction, **options):
            out: Tensor | LMOutputWithLoss = super().forward(x, **options)
            return out
        own = linear_cross_entropy(*self._loss_inputs(x, labels), reduction)
        loss, ranks = own, 1
        if isinstance(weight := self.w_out.weight, DTensor):  # by tensor parallelism: fsdp has gathered its shards
            ranks = weight.device_mesh.size()
            parts = DTensor.from_local(own[None], weight.device_mesh, (Shard(0),)).redistribute(
                placements=(Replicate(),)
            )
            loss = parts.sum() if reduction == "sum" else parts.mean()
        share = own.detach() * ranks if reduction == "sum" else own.detach()
        return LMOutputWithLoss(logits=None, loss=loss, ce_loss=share, z_loss=None)

    def _needs_logits(
        self,
        reduction: str,
        return_logits: bool | None = None,
        ignore_index: int = IGNORE,
        z_loss_multiplier: float | None = None,
        loss_div_factor: Tensor | float | None = None,
        logits_to_keep: int | Tensor = 0,
        **_: Any,
    ) -> bool:
        keeps_some = not isinstance(logits_to_keep, int) or logits_to_keep != 0
        asked = return_logits is not False or z_loss_multiplier is not None or loss_div_factor is not None or keeps_some
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
class _ChunkedHeadConfig(LMHeadConfig):
    """The engine's config of a head, which builds a `ChunkedHead`."""

    def build(self, *, d_model: int, vocab_size: int, init_device: str = "cpu") -> ChunkedHead:
        options = self.as_dict(exclude_none=True, recurse=False)
        del options["name"]
        options["dtype"] = options["dtype"].as_pt()
        return ChunkedHead(**options, d_model=d_model, vocab_size=vocab_size, init_device=init_device)


class EngineTransformer(Transformer):
    """Makes positions once per forward pass, and initial weights that are the same for every number of ranks."""

    compiled = False
    without_values: FakeTensorMode | None = None
    """Set for a model whose weights are fake tensors."""

    def forward(
        self,
        input_ids: Tensor,
        *,
        labels: Tensor | None = None,
        doc_lens: Tensor | None = None,
        max_doc_lens: list[int] | None = None,
        loss_div_factor: Tensor | None = None,
        averaged_ranks: int = 1,
        **for_head: Any,
    ) -> Any:
        """Arguments as those of `Transformer.forward`: ids and labels are of whole rows, however ranks share them.

        `loss_div_factor`: labels of the global batch, as an integer, which fsdp does not cast to bf16, for
        `averaged_ranks` ranks whose gradients are averaged.
        """
        input_ids, labels = move_to_device(input_ids, self.device), move_to_device(labels, self.device)
        cu_doc_lens = None
        if doc_lens is not None:
            cu_doc_lens = move_to_device(get_cumulative_document_lengths(doc_lens), self.device)
        layers, context, shape = list(attention_layers(self).values()), self.context, input_ids.shape
        if context is not None:
            input_ids = self.own_tokens(input_ids, packed=cu_doc_lens is not None)
            labels = None if labels is None else self.own_tokens(labels, packed=cu_doc_lens is not None)
            averaged_ranks *= context.split.ranks  # those that share a row, too
        if loss_div_factor is not None:
            loss_div_factor = loss_div_factor.clamp(min=1) / averaged_ranks
        counted = None if labels is None else LossLabels.counted(labels != IGNORE, loss_div_factor)
        if context is not None:
            located = own_layer_positions(context, layers, shape, cu_doc_lens, input_ids, counted)
        else:
            located = locate_layers(layers, input_ids[..., None], cu_doc_lens=cu_doc_lens, labels=counted)
        h = self.embeddings(input_ids)
        for block, where in zip(self.blocks.values(), located, strict=True):
            h = block(h, positions=where)
        if labels is not None:  # with tensor parallelism the head does not take None
            for_head["labels"] = labels
        output = self.lm_head(h, **for_head)
        if loss_div_factor is None:
            return output
        # Not by the head, whose arguments fsdp casts too.
        loss, ce_loss, z_loss = (None if x is None else x / loss_div_factor for x in output[1:])
        return LMOutputWithLoss(output.logits, loss, ce_loss, z_loss)

    @property
    def context(self) -> ContextGroup | None:
        """The ranks that share a row with this one."""
        return next(module.context for module in self.modules() if isinstance(module, NSAMixer))

    def own_tokens(self, x_BS: Tensor, packed: bool) -> Tensor:
        """The part of a batch's rows that this rank computes: all without context parallelism. Packed rows are divided
        as one row, laid end to end, because their documents are."""
        if self.context is None:
            return x_BS
        return own_tokens(self.context.split, x_BS.flatten()[None] if packed else x_BS)

    @torch.no_grad()
    def init_weights(self, *, device: torch.device | None = None, **_: Any) -> torch.Generator:
        """The engine's `InitMethod.normal`, but nothing is sent: every rank draws all values and keeps its part."""
        device = device or self.device
        generator = torch.Generator(device).manual_seed(self.init_seed)
        if self.without_values is not None:
            with self.without_values:
                self.to_empty(device=device)
            return generator
        self.to_empty(device=device)
        if self.tie_word_embeddings:
            self.lm_head.w_out.weight = self.embeddings.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                fill(parameter, torch.full(parameter.shape, float("norm" in name), device=device))

        def draw(weight: Tensor) -> None:
            whole = torch.empty(weight.shape, device=device)
            std = self.init_std
            fill(weight, nn.init.trunc_normal_(whole, std=std, a=-3 * std, b=3 * std, generator=generator))

        draw(self.embeddings.weight)
        for block in self.blocks.values():
            block.attention.init_weights(num_blocks=self.n_layers, generator=generator)
            for linear in (block.feed_forward.w1, block.feed_forward.w3, block.feed_forward.w2):
                draw(linear.weight)
            block.feed_forward.w2.weight.mul_((2 * self.n_layers) ** -0.5)  # as `nsa.core.init`, in every deeper model
        if not self.tie_word_embeddings:
            draw(self.lm_head.w_out.weight)
        return generator

    def compile_blocks(self) -> None:
        """`apply_compile` without the engine's marks for varying sizes: here all batches of a run have one shape."""
        for block in self.blocks.values():
            block.apply_compile()
        self.lm_head.compile(fullgraph=False)
        self.compiled = True


def transformer_config(config: RunConfig, vocab_size: int) -> TransformerConfig:
    """The run's model as the engine builds it: the same parameters, names and logits as `nsa.run_model_model`."""
    model = config.model
    norm = LayerNormConfig(name=LayerNormType.rms, eps=model.norm_eps, bias=False)
    kinds, ropes = repeated(model.attention, model.n_layers), repeated(model.rope_layers, model.n_layers)
    layers = list(zip(kinds, ropes, strict=True))
    blocks = {
        (kind, rope): TransformerBlockConfig(
            name=TransformerBlockType.reordered_norm if model.post_norm else TransformerBlockType.default,
            sequence_mixer=NSAMixerConfig.of_run(config, kind, rope),
            feed_forward=FeedForwardConfig(hidden_size=model.ffn_size, bias=model.ffn_bias),
            layer_norm=norm,
        )
        for kind, rope in layers
    }
    return TransformerConfig(
        d_model=model.dim,
        vocab_size=model.vocab_size or vocab_size,
        n_layers=model.n_layers,
        block=blocks[layers[0]],
        block_overrides={place: blocks[layer] for place, layer in enumerate(layers) if layer != layers[0]} or None,
        lm_head=_ChunkedHeadConfig(layer_norm=replace(norm), bias=False),
        tie_word_embeddings=model.tie_embeddings,
        init_seed=config.train.seed,
        init_std=model.init_std,
    )


class _SelectiveCheckpoint(CheckpointWrapper):
    """A block whose backward pass recomputes everything except the results of our operators."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__(block, context_fn=keep_operators, preserve_rng_state=False)

    def apply_compile(self) -> None:
        """Compile with the recomputation inside of the graph: the compiler follows the same policy.

        The only side effect of a block is the probe's record, which the backward pass need not repeat; without the
        option a block that was once probed is never compiled.
        """
        torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
        self.compile(fullgraph=False)

    def apply_fsdp(self, dp_mesh: DeviceMesh | None = None, *_: object, **options: Any) -> None:
        """Gather weights outside of the recomputation, where it does not break the compiled graph."""
        for of_the_engine in ("prefetch_factor", "wrapping_strategy"):
            options.pop(of_the_engine, None)
        fully_shard(self, mesh=dp_mesh, **options)


def build_transformer(
    config: RunConfig, vocab_size: int, without_values: FakeTensorMode | None = None
) -> EngineTransformer:
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
    model.without_values = without_values
    average_over_layers(model)
    freeze_others(model, config.train.trainable)
    if config.runtime.gradient_checkpointing == "selective":
        for name, block in list(model.blocks.items()):
            model.blocks.register_module(name, _SelectiveCheckpoint(block))
    return model
