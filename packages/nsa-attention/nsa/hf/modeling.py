"""`NSAForCausalLM`: the blocks and the attention of `nsa.model` and `nsa.core` as a Transformers model.

Nothing of the attention is written again here: this module names the parameters as Transformers does, hands each layer
its cache, and follows Transformers' conventions for padding, losses and generation.

B batch · S tokens · D model dim
"""

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_layers import (
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from nsa.core.init import init_module
from nsa.core.kv_cache import LayerCache
from nsa.core.layer_pattern import layer_config
from nsa.core.model_layers import embedded
from nsa.core.positions import checked_position_ids, padding_of
from nsa.core.selector_loss_sampling import LossLabels, average_over_layers
from nsa.errors import ConfigError
from nsa.hf.cache import GRAPH_DEVICES, OFFLOADING_REFUSED, NSACacheLayer, cache_layers
from nsa.hf.configuration import NSAConfig
from nsa.model.llama_block_nsa import LlamaBlockNSA
from nsa.model.loss import IGNORE, require_labels
from nsa.model.transformer import run_blocks
from nsa.options import AttentionKind, RopeLayer


class NSADecoderLayer(GradientCheckpointingLayer, LlamaBlockNSA):
    """A block of `nsa.model` that Transformers can checkpoint."""

    def __init__(self, config: NSAConfig, kind: AttentionKind = "nsa", rope: RopeLayer = "scaled") -> None:
        # By name: Transformers loads the config's remote code apart from the model's, with classes of its own.
        super().__init__(
            **layer_config(config.attention_config(), kind, rope, config.window).options(),
            ffn_dim=config.intermediate_size,
            ffn_bias=config.ffn_bias,
            post_norm=config.post_norm,
            norm_eps=config.rms_norm_eps,
            kind=kind,
        )


class NSAPreTrainedModel(PreTrainedModel):
    config_class = NSAConfig
    config: NSAConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["NSADecoderLayer"]  # noqa: RUF012 (Transformers' own form)
    _skip_keys_device_placement = ["past_key_values", "cache"]  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialize as `nsa.core.init`, which knows a module by its name; loaded tensors keep their values."""
        name = next((name for name, part in self.named_modules() if part is module), "")
        own = list(module.parameters(recurse=False))
        loaded = [(p, p.clone()) for p in own if getattr(p, "_is_hf_initialized", False)]
        init_module(name, module, self.config.num_hidden_layers, self.config.initializer_range)
        for parameter, value in loaded:
            parameter.copy_(value)


class NSAModel(NSAPreTrainedModel):
    """Embedding, blocks and final norm."""

    def __init__(self, config: NSAConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        of_layers = zip(config.layer_kinds(), config.layer_ropes(), strict=True)
        self.layers = nn.ModuleList(NSADecoderLayer(config, kind, rope) for kind, rope in of_layers)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        average_over_layers(self)
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cu_seq_lens_q: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        loss_labels: LossLabels | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """attention_mask: padding mask of 0 and 1, [batch, tokens so far]; padding may be left or right.
        position_ids: accepted if they are the tokens' own positions, which the model knows without them.
        cu_seq_lens_q: cumulative lengths of documents packed into the batch, as DataCollatorWithFlattening gives them.
        loss_labels: labels of the loss, over which the selector loss is averaged.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ConfigError("the model needs either input_ids or inputs_embeds, and was given both or neither.")
        if output_attentions or (output_attentions is None and self.config.output_attentions):
            raise ConfigError(
                "output_attentions was requested: NSA never holds attention weights. `NSAAttention.probe` records the "
                "gates and the chosen blocks."
            )
        if inputs_embeds is None:
            assert input_ids is not None
            inputs_embeds = embedded(self.embed_tokens, input_ids)
        x_BSD = inputs_embeds
        batch, length = x_BSD.shape[:2]
        use_cache = self.config.use_cache if use_cache is None else use_cache
        # A cache would cut the gradients off, so none is made while they are computed.
        if use_cache and past_key_values is None and cu_seq_lens_q is None and not torch.is_grad_enabled():
            past_key_values = DynamicCache(config=self.config)
        n_layers = self.config.num_hidden_layers  # fewer while the first layers draft (assistant_early_exit)
        blocks: list[NSADecoderLayer] = list(self.layers)[:n_layers]  # type: ignore[assignment]
        layers = None if past_key_values is None else cache_layers(past_key_values, len(blocks))
        caches: list[LayerCache | None] = [None] * len(blocks)
        if layers is not None:
            caches = [
                layer.open(block.attention, batch, length, x_BSD) for layer, block in zip(layers, blocks, strict=True)
            ]
        attention_mask = _needed_mask(attention_mask, length, layers)
        padding = padding_of(attention_mask, batch, length, layers is not None, cu_seq_lens_q is not None)
        real_BS = None if padding is None else padding.real_BS
        if position_ids is not None:
            before_B = None if caches[0] is None else caches[0].length_B
            _check_positions(checked_position_ids(position_ids, batch, length), real_BS, before_B, cu_seq_lens_q)

        hidden: list[Tensor] | None = None
        if output_hidden_states or (output_hidden_states is None and self.config.output_hidden_states):
            hidden = [x_BSD]
        # torch.compile cannot trace a lock.
        one_thread = nullcontext() if caches[0] is None or torch.compiler.is_compiling() else caches[0].exclusive
        with one_thread, nullcontext() if layers is None else torch.no_grad():
            run = partial(
                run_blocks,
                cu_doc_lens=cu_seq_lens_q,
                blocks=blocks,
                caches=caches,
                attention_mask=None if padding is None else attention_mask,
                hidden=hidden,
                labels=loss_labels,
            )
            x_BSD = run(x_BSD) if layers is None else self._run_cached(run, x_BSD, layers, caches, padding is None)
            for layer in layers or ():
                layer.advance(length, real_BS)
            x_BSD = self.norm(x_BSD)
        return BaseModelOutputWithPast(
            last_hidden_state=x_BSD,
            past_key_values=past_key_values,
            hidden_states=None if hidden is None else (*hidden[:-1], x_BSD),  # the last one after the norm
        )

    def _run_cached(
        self, run: "partial[Tensor]", x_BSD: Tensor, layers: list[NSACacheLayer], caches: list[Any], whole: bool
    ) -> Tensor:
        """Run the blocks; on a GPU one token after another from a CUDA graph. whole: there is no padding."""
        if x_BSD.shape[1] > 1:
            layers[0].forget_graph()
        asked = run.keywords["hidden"] is not None or run.keywords["labels"] is not None
        fits = x_BSD.shape[1] == 1 and whole and not asked and x_BSD.device.type in GRAPH_DEVICES
        if not fits or torch.compiler.is_compiling():
            return run(x_BSD)

        def repeats() -> bool:
            devices = {parameter.device for parameter in self.parameters()}
            moved = any(hasattr(module, "_hf_hook") for module in self.modules())  # by accelerate, from host to device
            blocks: list[NSADecoderLayer] = list(self.layers)  # type: ignore[arg-type]
            steps = zip(blocks, caches, strict=True)
            here = devices == {x_BSD.device} and not moved
            return here and all(block.attention.repeats_steps(x_BSD, cache) for block, cache in steps)

        return layers[0].run_token(run, x_BSD, caches, repeats)


class NSAForCausalLM(NSAPreTrainedModel, GenerationMixin):
    """The language model, with Transformers' `generate`."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: NSAConfig) -> None:
        super().__init__(config)
        self.model = NSAModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Arguments as for `NSAModel.forward`. labels: the tokens themselves, −100 where none counts; they are shifted
        here. logits_to_keep: how many of the last positions, or which ones, get logits; 0 means all."""
        if labels is not None and past_key_values is not None and torch.is_grad_enabled():
            raise ConfigError(
                "labels and past_key_values were given while gradients are computed: a cache cuts gradients off. "
                "Leave past_key_values out, or compute the loss under torch.no_grad()."
            )
        loss_labels = None if labels is None else _loss_labels(labels, self.config.vocab_size, **kwargs)
        output = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            loss_labels=loss_labels,
            **kwargs,
        )
        positions = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        with nullcontext() if output.past_key_values is None else torch.no_grad():
            logits = self.lm_head(output.last_hidden_state[:, positions])
        loss = None
        if loss_labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
            loss = loss_labels.follow(loss)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=output.past_key_values, hidden_states=output.hidden_states
        )

    def _prepare_cache_for_generation(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        """Allocate what the request needs at once; refuse what Transformers would let pass and get wrong."""
        wanted = generation_config.cache_implementation
        if wanted is not None and "offloaded" in wanted:
            raise ConfigError(OFFLOADING_REFUSED)
        mask = model_kwargs.get("attention_mask")
        if mask is not None and mask.dim() == 2 and not bool(mask[:, -1].all()):
            raise ConfigError(
                "a prompt ends with padding: the next token would be drawn after the padding, not after the prompt. "
                "Pad on the left (tokenizer.padding_side='left')."
            )
        super()._prepare_cache_for_generation(
            generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )
        cache = model_kwargs.get("past_key_values")
        for layer in () if cache is None else cache_layers(cache, self.config.num_hidden_layers):
            layer.reserve(max_cache_length)

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        raise ConfigError(
            "continuous batching of Transformers was requested: its paged cache has only full and sliding attention. "
            "Use generate with a batch of prompts, or serve the model with vLLM."
        )

    generate_batch = init_continuous_batching


class NSAForSequenceClassification(GenericForSequenceClassification, NSAPreTrainedModel):
    """One answer per row, at its last token that is not padding: classes, or with one label a reward."""


class NSAForTokenClassification(GenericForTokenClassification, NSAPreTrainedModel):
    """One answer per token."""


def _loss_labels(
    labels_BS: Tensor,
    vocab_size: int,
    *,
    shift_labels: Tensor | None = None,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = IGNORE,
    **_: Any,
) -> LossLabels:
    """Return the labels that Transformers' loss counts, and what it divides their sum by: `num_items_in_batch`, the
    labels of all passes of a step, or those of this pass."""
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels_BS[:, 1:], (0, 1), value=ignore_index)
    require_labels(shift_labels, vocab_size, ignore_index)
    return LossLabels.counted(shift_labels != ignore_index, num_items_in_batch)


def _needed_mask(attention_mask: Tensor | None, length: int, layers: list[NSACacheLayer] | None) -> Tensor | None:
    """The mask, or None if it says that the one new token of every row is real, as it does when decoding."""
    if attention_mask is None or attention_mask.dim() != 2 or length > 1 or not layers:
        return attention_mask
    real = attention_mask[:, -1].all()
    if not real.is_cpu and layers[0].get_seq_length():  # reading the answer would stall an accelerator at every step
        torch._assert_async(real, "a single new column with padding in some rows needs its prompt in one pass")
        return None
    return None if real else attention_mask


def _check_positions(
    position_ids_BS: Tensor, real_BS: Tensor | None, before_B: Tensor | None, cu_doc_lens: Tensor | None
) -> None:
    """Refuse position_ids other than the tokens' own positions: the cache and φ know no others."""
    length, device = position_ids_BS.shape[1], position_ids_BS.device
    own_BS = torch.arange(length, device=device)[None] if real_BS is None else real_BS.cumsum(1) - 1
    if before_B is not None:
        own_BS = own_BS + before_B[:, None]
    if cu_doc_lens is not None:
        token_N = torch.arange(position_ids_BS.numel(), device=device)
        cu_doc_lens = cu_doc_lens.to(device)
        begin_N = cu_doc_lens[torch.searchsorted(cu_doc_lens, token_N, right=True) - 1]
        own_BS = (token_N - begin_N).view(position_ids_BS.shape)
    same_BS = position_ids_BS == own_BS
    same = (same_BS if real_BS is None else same_BS | ~real_BS).all()
    refusal = ConfigError(
        "position_ids other than the tokens' own positions (0, 1, 2, … in every row, past padding) were given: NSA's "
        "cache and compression rotate by those. Leave position_ids out; for documents packed into rows pass "
        "cu_seq_lens_q, e.g. by DataCollatorWithFlattening(return_flash_attn_kwargs=True)."
    )
    if not same.is_cpu:
        torch._assert_async(same, str(refusal))
    elif not torch.compiler.is_compiling() and not same:
        raise refusal
