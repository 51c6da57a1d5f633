"""Attention layers of a model: one held in an engine's class, several kinds from the same values, positions, KV cache.

B batch
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Unpack

import torch
from torch import Tensor, nn

from nsa.core.attention_config import AttentionConfig
from nsa.core.branches import BRANCH_ORDER
from nsa.core.cache_pages import ExclusiveUse
from nsa.core.initial_values import fill
from nsa.core.kv_cache import LayerCache
from nsa.core.nsa_attention import NSAAttention
from nsa.core.positions import PositionOptions, Positions
from nsa.core.selector_loss_sampling import LossLabels
from nsa.errors import ConfigError
from nsa.options import AttentionKind


class AttentionHolder(nn.Module):
    """Holds a layer as `layer`. The layer's parts are registered here under their own names, so that parameters are
    called as in the layer itself and one state dict fits both; the layer is none of the modules of this one."""

    def __init__(self, layer: NSAAttention) -> None:
        super().__init__()
        self._held = (layer,)  # a tuple: nn.Module registers none of its members
        for name, part in layer.named_children():
            self.add_module(name, part)

    @property
    def layer(self) -> NSAAttention:
        return self._held[0]

    attention_layer = layer
    """For `nsa.core.probe.attention_layers`."""

    def train(self, mode: bool = True) -> "AttentionHolder":
        self.layer.training = mode
        return super().train(mode)


def embedded(embeddings: nn.Embedding, tokens_BS: Tensor) -> Tensor:
    """Embed token ids; on a CPU, ids that the vocabulary does not have are refused."""
    if torch.compiler.is_compiling():
        return embeddings(tokens_BS)
    try:
        return embeddings(tokens_BS)
    except IndexError as error:
        raise ConfigError(
            f"token ids reach from {tokens_BS.min()} to {tokens_BS.max()} and the vocabulary has "
            f"{embeddings.num_embeddings}: they must be 0 to {embeddings.num_embeddings - 1}. Use the model's own "
            f"tokenizer, or make the model with a larger vocab_size."
        ) from error


def _layer_parameters(layer: NSAAttention, of_nsa: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters of a layer as parts of an NSA layer's: what kinds share starts from the same values.

    Queries, output and norms are the same. Keys and values are those of the layer's own branches, `dense` as `window`;
    of `merged`, which has one set of them, those of the selected branch.
    """
    own = [BRANCH_ORDER.index(branch) for branch in layer.branches]
    parameters = {}
    for name, parameter in layer.named_parameters():
        whole = of_nsa[name]
        if whole.shape != parameter.shape:
            # w_k and w_v are ordered (group, branch, width), gates (group, head, branch).
            outer, inner = (-1, 1) if name.startswith("gates.") else (layer.n_kv_groups, -1)
            by_branch = whole.unflatten(0, (outer, len(BRANCH_ORDER), inner))
            branches = own[: len(BRANCH_ORDER) * parameter.shape[0] // whole.shape[0]]
            whole = by_branch[:, torch.tensor(branches, device=whole.device)].flatten(0, 2)
        parameters[name] = whole
    return parameters


def layer_of_kind(kind: AttentionKind, whole: NSAAttention) -> NSAAttention:
    """A layer of the same config, with the values that `whole`, an NSA layer, has for its parameters."""
    if kind == whole.kind:
        return whole
    layer = empty_layer(whole.config, kind, whole)
    take_values(layer, whole)
    return layer


def empty_layer(config: AttentionConfig, kind: AttentionKind, like: NSAAttention) -> NSAAttention:
    """A layer whose values are not set, on the device and in the dtype of another one, with its backends."""
    with torch.device("meta"):
        layer = NSAAttention(config, kind=kind, kernels=like.kernels)
    weight = like.w_q.weight
    return layer.to_empty(device=weight.device).to(weight.dtype)


def take_values(layer: NSAAttention, whole: NSAAttention) -> None:
    """Set the parameters of a layer to those of an NSA layer, in place."""
    parameters = dict(layer.named_parameters())
    for name, values in _layer_parameters(layer, whole.state_dict()).items():
        fill(parameters[name], values)


def locate_layers(
    layers: Sequence[NSAAttention],
    x_BSD: Tensor,
    *,
    cache: LayerCache | None = None,
    cu_doc_lens: Tensor | Sequence[int] | None = None,
    labels: LossLabels | None = None,
    **position_options: Unpack[PositionOptions],
) -> list[Positions]:
    """Positions of every layer. They share layout and padding, and layers with the same RoPE the tables too. Arguments
    as for `NSAAttention.locate`; `cache`: of the first layer, whose positions are those of all."""
    if position_options.get("position_embeddings") is not None:
        _require_one_rotation(layers)
    first = layers[0].locate(x_BSD, cache=cache, cu_doc_lens=cu_doc_lens, labels=labels, **position_options)
    positions = {layers[0].rotary.key: first}
    for layer in layers:
        if layer.rotary.key in positions:
            continue
        tables = layer.locate(x_BSD, cache=cache, cu_doc_lens=cu_doc_lens, **position_options).tables
        positions[layer.rotary.key] = first.replaced(tables=tables)
    return [positions[layer.rotary.key] for layer in layers]


def _require_one_rotation(layers: Sequence[NSAAttention]) -> None:
    if len({layer.rotary.key for layer in layers if layer.rotary.rotary_dim}) > 1:
        raise ConfigError(
            "position_embeddings were given to a model whose layers rotate in different ways (rope_layers): one table "
            "cannot serve them all. Pass position_ids, or nothing."
        )


class NSACache:
    """KV cache of a model: one `LayerCache` per layer. Made by `NSATransformer.new_cache`."""

    def __init__(self, layers: list[LayerCache]) -> None:
        self.layers = layers
        self.exclusive = ExclusiveUse()

    @property
    def length_B(self) -> Tensor:
        """Tokens in each row."""
        return self.layers[0].length_B

    def n_bytes(self) -> int:
        """Memory of all layers."""
        return sum(layer.n_bytes() for layer in self.layers)

    def reset(self, rows: Sequence[int] | None = None) -> None:
        """Empty every row, or these; their pages become free."""
        self._each(lambda layer: layer.reset(rows))

    def crop(self, length: int | Sequence[int] | Tensor) -> None:
        """Keep the first `length` tokens of each row; see `LayerCache.crop`."""
        with self.exclusive:
            for layer in self.layers:  # layers of several kinds refuse different lengths
                layer.check_crop(length)
            self._each(lambda layer: layer.crop(length))

    def reorder(self, rows: Sequence[int] | Tensor) -> None:
        """Replace row i by row rows[i], as beam search needs it."""
        self._each(lambda layer: layer.reorder(rows))

    def _each(self, change: Callable[[LayerCache], None]) -> None:
        """All layers have the same lengths: what one refuses, the first refuses before anything changed."""
        with self.exclusive:
            for layer in self.layers:
                change(layer)
