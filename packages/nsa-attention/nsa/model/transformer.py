"""A causal language model of NSA blocks. Parameter names are OLMo-core's: one state dict loads in both.

B batch · S tokens · D model dim · V vocabulary
"""

from collections.abc import Sequence
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from nsa.core.attention_config import AttentionConfig, attention_config
from nsa.core.init import init_weights
from nsa.core.kv_cache import LayerCache
from nsa.core.layer_pattern import broken_pattern_rules, layer_config, repeated
from nsa.core.model_layers import NSACache, embedded, empty_layer, layer_of_kind, locate_layers, take_values
from nsa.core.positions import PositionOptions, SequenceOptions
from nsa.core.selector_loss_sampling import LossLabels, average_over_layers
from nsa.errors import ConfigError, require_rules
from nsa.kernels.registry import RequestedKernels
from nsa.model.llama_block_nsa import LlamaBlockNSA
from nsa.model.loss import IGNORE, linear_cross_entropy, linear_token_scores
from nsa.options import AttentionKind, RopeLayer


def run_blocks(
    x_BSD: Tensor,
    blocks: Sequence[LlamaBlockNSA],
    caches: Sequence[LayerCache | None],
    *,
    new_lens_B: Tensor | None = None,
    cu_doc_lens: Tensor | Sequence[int] | None = None,
    hidden: list[Tensor] | None = None,
    labels: LossLabels | None = None,
    **positions: Unpack[PositionOptions],
) -> Tensor:
    """The residual stream after all blocks; with `hidden`, what each block returns is appended to that list."""
    if not blocks:
        return x_BSD
    layers = [block.attention for block in blocks]
    layers[0].require_width(x_BSD)  # before the norm of the first block
    located = locate_layers(layers, x_BSD, cache=caches[0], cu_doc_lens=cu_doc_lens, labels=labels, **positions)
    padding = located[0].padding
    if padding is not None:
        x_BSD, located = padding.to_front(x_BSD), [where.replaced(padding=None) for where in located]
        new_lens_B = padding.lengths_for(caches[0], new_lens_B)
    for block, cache, where in zip(blocks, caches, located, strict=True):
        x_BSD = block(x_BSD, cache=cache, new_lens_B=new_lens_B, cu_doc_lens=cu_doc_lens, where=where)
        if hidden is not None:
            hidden.append(x_BSD if padding is None else padding.back(x_BSD))
    return x_BSD if padding is None else padding.back(x_BSD)


class LMHead(nn.Module):
    def __init__(self, dim: int, vocab_size: int, norm_eps: float) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dim, eps=norm_eps)
        self.w_out = nn.Linear(dim, vocab_size, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.w_out(self.norm(x_BSD))


class NSATransformer(nn.Module):
    """A causal language model in Llama's architecture, with NSA in place of dense attention.

    vocab_size, n_layers, ffn_dim: sizes; the feed-forward width defaults to 8/3 of dim.
    config or attention: an `AttentionConfig`, or dim in its place and options by name, as `NSAAttention` takes them.
        Its init_std is that of every part.
    ffn_bias, post_norm: as for `LlamaBlockNSA`.
    tie_embeddings: one matrix for the embedding and the output.
    layers: kinds of attention (`nsa.options.AttentionKind`), repeated over the layers. Parameters that two kinds share
        start from the same values for the same random state; those of an NSA model do not depend on this argument.
    rope_layers: the option rope (`scaled`, `plain` or `none`), repeated over the layers.
    window: w of layers of kind `window`; default that of all layers.
    kernels: as for `NSAAttention`.
    """

    def __init__(
        self,
        vocab_size: int,
        config: AttentionConfig | int | None = None,
        n_layers: int | None = None,
        *,
        ffn_dim: int | None = None,
        ffn_bias: bool = False,
        post_norm: bool = False,
        tie_embeddings: bool = False,
        norm_eps: float = 1e-5,
        layers: Sequence[AttentionKind] = ("nsa",),
        rope_layers: Sequence[RopeLayer] = ("scaled",),
        window: int | None = None,
        kernels: RequestedKernels = "auto",
        **attention: Any,
    ) -> None:
        super().__init__()
        if n_layers is None:
            raise TypeError("n_layers is missing: give it by name, or after the width")
        require_rules(broken_pattern_rules(layers, rope_layers, window, n_layers))
        config = attention_config(config, **attention)
        dim = config.dim
        kinds = repeated(layers, n_layers)
        pairs = zip(kinds, repeated(rope_layers, n_layers), strict=True)
        self.tie_embeddings = tie_embeddings
        self._attention_configs = [layer_config(config, kind, rope, window) for kind, rope in pairs]
        self.embeddings = nn.Embedding(vocab_size, dim)
        self.blocks = nn.ModuleList(
            LlamaBlockNSA(
                attention,
                ffn_dim=ffn_dim,
                ffn_bias=ffn_bias,
                post_norm=post_norm,
                norm_eps=norm_eps,
                kernels=kernels,
            )
            for attention in self._attention_configs
        )
        self.lm_head = LMHead(dim, vocab_size, norm_eps)
        self.reset_parameters()
        for block, kind in zip(self._blocks(), kinds, strict=True):
            block.attention = layer_of_kind(kind, block.attention)
        average_over_layers(self)

    def reset_parameters(self) -> None:
        """Draw initial values, as `NSAAttention.reset_parameters`. A layer of another kind takes its own from an NSA
        layer."""
        if self.tie_embeddings and self.lm_head.w_out.weight is not self.embeddings.weight:  # `to_empty` separates them
            self.lm_head.w_out.weight = self.embeddings.weight
        blocks = self._blocks()
        layers = [block.attention for block in blocks]
        wholes = [
            layer if layer.kind == "nsa" else empty_layer(config, "nsa", layer)
            for layer, config in zip(layers, self._attention_configs, strict=True)
        ]
        drawn = [
            nn.ModuleDict({**dict(block.named_children()), "attention": whole})
            for block, whole in zip(blocks, wholes, strict=True)
        ]
        parts = {"embeddings": self.embeddings, "blocks": nn.ModuleList(drawn), "lm_head": self.lm_head}
        init_weights(nn.ModuleDict(parts), len(blocks), self._attention_configs[0].init_std)
        for layer, whole in zip(layers, wholes, strict=True):
            if layer is not whole:
                take_values(layer, whole)

    def forward(
        self, tokens_BS: Tensor, *, cache: NSACache | None = None, **options: Unpack[SequenceOptions]
    ) -> Tensor:
        """Logits [B, S, V]. `options` are those of `NSAAttention.forward`: cu_doc_lens, attention_mask, …"""
        return self.lm_head(self._hidden(tokens_BS, cache, options))

    def loss(self, tokens_BS: Tensor, labels_BS: Tensor, **options: Unpack[SequenceOptions]) -> Tensor:
        """Mean cross-entropy in fp32 over the labels that are not −100; the full logits never exist. The selector loss,
        if there is one, is averaged over the same labels, and scaled as the gradient of this loss is."""
        labels = LossLabels.counted(labels_BS != IGNORE)
        x_BSD = self.lm_head.norm(self._hidden(tokens_BS, None, options, labels))
        loss = linear_cross_entropy(x_BSD.flatten(0, 1), self.lm_head.w_out.weight, labels_BS.flatten())
        return labels.follow(loss)

    @torch.no_grad()
    def token_losses(self, tokens_BS: Tensor, labels_BS: Tensor, **options: Unpack[SequenceOptions]) -> Tensor:
        """Cross-entropy [B, S] of each label in fp32, 0 where it is −100; no gradient, the full logits never exist."""
        x_BSD = self.lm_head.norm(self._hidden(tokens_BS, None, options))
        scores = linear_token_scores(x_BSD.flatten(0, 1), self.lm_head.w_out.weight, labels_BS.flatten())
        return scores.losses.view(labels_BS.shape)

    def new_cache(self, batch: int, max_len: int, rewind: int = 0, pages: int | None = None) -> NSACache:
        """An empty cache for `batch` rows of at most `max_len` tokens; arguments as for `NSAAttention.new_cache`, pages
        in every layer."""
        like = self.embeddings.weight  # not quantised where linear layers are
        return NSACache([block.attention.new_cache(batch, max_len, rewind, pages, like) for block in self._blocks()])

    def num_params(self) -> int:
        """Parameters, tied ones once."""
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self, seq_len: int) -> float:
        """FLOPs to train on one token, averaged over a sequence: backward costs twice forward; selection has none."""
        total = 6.0 * self.lm_head.w_out.weight.numel()
        for block in self._blocks():
            feed_forward = 2.0 * sum(p.numel() for p in block.feed_forward.parameters())
            attention = block.attention.flops(seq_len)
            total += 3 * (feed_forward + sum(attention.values())) - 2 * attention["select"]
        return total

    def _hidden(
        self, tokens_BS: Tensor, cache: NSACache | None, options: SequenceOptions, labels: LossLabels | None = None
    ) -> Tensor:
        x_BSD, blocks = embedded(self.embeddings, tokens_BS), self._blocks()
        if cache is None:
            return run_blocks(x_BSD, blocks, [None] * len(blocks), labels=labels, **options)
        if len(cache.layers) != len(self.blocks):
            raise ConfigError(
                f"the cache has {len(cache.layers)} layers and the model {len(self.blocks)}: it is of another model. "
                f"Make it with this model's new_cache."
            )
        if torch.compiler.is_compiling():  # torch.compile cannot trace a lock
            return run_blocks(x_BSD, blocks, cache.layers, **options)
        with cache.exclusive:
            return run_blocks(x_BSD, blocks, cache.layers, **options)

    def _blocks(self) -> list[LlamaBlockNSA]:
        return list(self.blocks)  # type: ignore[arg-type]
