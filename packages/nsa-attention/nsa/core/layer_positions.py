"""Positions of the layers of a model: made once for all layers that rotate alike."""

from collections.abc import Sequence
from typing import Unpack

from torch import Tensor

from nsa.core.kv_cache import LayerCache
from nsa.core.nsa_attention import NSAAttention
from nsa.core.positions import PositionOptions, Positions
from nsa.core.selector_loss import LossLabels
from nsa.errors import ConfigError


def locate_layers(
    layers: Sequence[NSAAttention],
    x_BSD: Tensor,
    *,
    cache: LayerCache | None = None,
    cu_doc_lens: Tensor | Sequence[int] | None = None,
    labels: LossLabels | None = None,
    **given: Unpack[PositionOptions],
) -> list[Positions]:
    """Positions of every layer. They share layout and padding, and layers with the same RoPE the tables too. Arguments
    as for `NSAAttention.locate`; `cache`: of the first layer, whose positions are those of all."""
    if given.get("position_embeddings") is not None:
        _require_one_rotation(layers)
    first = layers[0].locate(x_BSD, cache=cache, cu_doc_lens=cu_doc_lens, labels=labels, **given)
    positions = {layers[0].rotary.key: first}
    for layer in layers:
        if layer.rotary.key in positions:
            continue
        tables = layer.locate(x_BSD, cache=cache, cu_doc_lens=cu_doc_lens, **given).tables
        positions[layer.rotary.key] = first._replace(tables=tables)
    return [positions[layer.rotary.key] for layer in layers]


def _require_one_rotation(layers: Sequence[NSAAttention]) -> None:
    if len({layer.rotary.key for layer in layers if layer.rotary.rotary_dim}) > 1:
        raise ConfigError(
            "position_embeddings were given to a model whose layers rotate in different ways (rope_layers): one table "
            "cannot serve them all. Pass position_ids, or nothing."
        )
