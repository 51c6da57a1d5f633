"""Sparse attention in any model of Transformers: `use_sparse_attention`, and `attn_implementation="nsa"`.

Importing this module registers an attention and a mask function with Transformers. A layer of full attention then reads
a window and selected blocks of its own keys in one softmax, as a layer of kind `merged` does; no weights are added or
changed. Up to the covered length, n_sel · l_sel + w tokens, that is what dense attention computes. Layers with a window
of their own, and full layers that are not listed, compute what they did, with the kernels of this package.

The mask that layers get is one number per key, the first key of its document (see `nsa_mask`): no mask of queries times
keys exists. What the branches cannot compute (sinks, soft-capped scores, masks of other forms …) is refused by name.

B batch · S queries · T keys · H heads · G kv groups · R heads per group · K key dim · V value dim
C compressed entries
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import causal_mask_function

from nsa.core.branches import AttendedKeys, BranchKeys
from nsa.core.compression import mean_of_blocks
from nsa.core.layer_kinds import AllTokens, AttentionStrategy, MergedSoftmax, SlidingWindow
from nsa.core.positions import DocumentLayout, packed_layout, plain_layout
from nsa.errors import ConfigError
from nsa.geometry import Geometry
from nsa.kernels.interface import KernelShape
from nsa.kernels.registry import KernelPlan, backend_request

IMPLEMENTATION = "nsa"
"""The name for `attn_implementation`."""
CONFIG_KEY = "sparse_attention"
"""The entry of a model's config (config.json) that holds `SparseOptions`."""
_FULL, _SLIDING = "full_attention", "sliding_attention"
_UNWRITTEN = -1
"""In a mask: a key that a static cache has not written yet."""
_REFUSED = {
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "softcap": "soft-capped scores (attn_logit_softcapping)",
    "position_bias": "a bias added to the scores",
    "alibi": "a bias added to the scores (ALiBi)",
    "head_mask": "a mask over heads",
    "indices": "keys chosen by an indexer of the model",
    "block_indices": "blocks chosen by the model itself",
    "cache": "the paged cache of continuous batching",
}
"""Arguments of an attention function of Transformers that change its result."""


@dataclass(frozen=True)
class SparseOptions:
    """Which layers of a model are sparse, and with what block sizes; kept in the model's config.

    layers: indices of sparse layers; None: all layers of full attention.
    """

    geometry: Geometry = Geometry()
    layers: tuple[int, ...] | None = None

    @classmethod
    def of_config(cls, config: PreTrainedConfig) -> Self:
        """Read the options; the defaults if the config has none."""
        stored = getattr(config, CONFIG_KEY, None)
        if stored is None:
            return cls()
        sizes, layers = stored["geometry"], stored["layers"]
        return cls(
            Geometry.from_ints([sizes[name] for name in ("l", "d", "l_sel", "n_sel", "w")]),
            None if layers is None else tuple(layers),
        )

    def write(self, config: PreTrainedConfig) -> None:
        layers = None if self.layers is None else list(self.layers)
        setattr(config, CONFIG_KEY, {"geometry": asdict(self.geometry), "layers": layers})


class SelectionPolicy(Protocol):
    """How a sparse layer chooses the blocks that its queries read before their window. A layer takes the policy that
    its attention module has as `selection_policy`, else `MeanKeySelection`."""

    def blocks(
        self, merged: MergedSoftmax, run: KernelPlan, q_BSGRK: Tensor, k_BTGK: Tensor, far: DocumentLayout
    ) -> Tensor:
        """Return int32 [B, S, G, n_sel], ascending, −1 past the last. far: the layout of keys and queries, with queries
        where the selected branch sees them: w tokens earlier."""


class MeanKeySelection:
    """Scores blocks by the mean of each compression block's keys, which needs no weights."""

    @torch.no_grad()
    def blocks(
        self, merged: MergedSoftmax, run: KernelPlan, q_BSGRK: Tensor, k_BTGK: Tensor, far: DocumentLayout
    ) -> Tensor:
        g = merged.shape.geometry
        k_BCGK = mean_of_blocks(k_BTGK, far.begin_BC, g.l, g.d)
        return run.functions.select(q_BSGRK, k_BCGK, far.pos_BS, far.first_BS, **merged.options)


_MEAN_KEYS = MeanKeySelection()


def use_sparse_attention(
    model: PreTrainedModel, geometry: Geometry = SparseOptions.geometry, layers: Sequence[int] | None = None
) -> list[int]:
    """Make the full-attention layers of a causal model sparse, in place; return their indices.

    geometry: block sizes and window. The model computes what it did for the first n_sel · l_sel + w tokens of a text.
    layers: which layers; default all with full attention. Layers with a window of their own stay as they are.

    Block sizes and layers are kept in the model's config: `save_pretrained` writes them, and
    `from_pretrained(folder, attn_implementation="nsa")` loads the model with them.
    """
    config = model.config.get_text_config(decoder=True)
    _require_causal_decoder(model, config)
    full = [index for index in range(config.num_hidden_layers) if _kind_of_layer(config, index) == _FULL]
    if unknown := sorted(set(layers or ()) - set(full)):
        raise ConfigError(
            f"layers names {unknown}, which are no layers of full attention ({full} are): other layers attend to a "
            f"window of their own, or not at all. Leave them out."
        )
    if not full:
        raise ConfigError(f"{type(model).__name__} has no layer of full attention: there is nothing to make sparse.")
    SparseOptions(geometry, None if layers is None else tuple(layers)).write(config)
    names = [name for name in model.config.sub_configs if getattr(model.config, name) is config]
    model.set_attn_implementation({names[0]: IMPLEMENTATION} if names else IMPLEMENTATION)
    return full if layers is None else sorted(layers)


def nsa_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend, as Transformers calls every attention function: query [B, H, S, K], key and value [B, G, T, K or V], with
    the queries of the last S tokens; returns [B, S, H, V]. attention_mask: of `nsa_mask`."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    _check_call(query, key, attention_mask, dropout, causal, options)
    groups, length = key.shape[1], query.shape[2]
    q_BSGRK = query.transpose(1, 2).unflatten(2, (groups, -1))
    k_BTGK, v_BTGV = key.transpose(1, 2), value.transpose(1, 2)
    index: int | None = getattr(module, "layer_idx", None)
    config: Any = module.config
    sparse = SparseOptions.of_config(config)
    kind = _SLIDING if sliding_window else _kind_of_layer(config, index)
    is_sparse = kind == _FULL and (sparse.layers is None or index in sparse.layers)
    geometry = sparse.geometry
    if kind == _SLIDING:
        g, window = geometry, sliding_window or config.sliding_window
        geometry = Geometry.from_ints([g.l, g.d, g.l_sel, g.n_sel, window])
    shape = KernelShape(groups, q_BSGRK.shape[3], q_BSGRK.shape[4], v_BTGV.shape[3], geometry)
    strategy_type = MergedSoftmax if is_sparse else SlidingWindow if kind == _SLIDING else AllTokens
    scale = shape.d_k**-0.5 if scaling is None else float(scaling)
    strategy: AttentionStrategy = strategy_type(shape, backend_request("auto"), scale)
    layout = _layout(attention_mask, cu_seq_lens_q, k_BTGK, length, geometry)
    run = strategy.plan(query.device, query.dtype)
    tokens = BranchKeys(k_BTGK, v_BTGV, layout.pos_BS, layout.start_BS)
    keys: AttendedKeys = (tokens, tokens, tokens)
    if isinstance(strategy, MergedSoftmax):
        keys = strategy.visible(keys)
        far = layout._replace(pos_BS=keys[0].pos_BS)
        policy: SelectionPolicy = getattr(module, "selection_policy", _MEAN_KEYS)
        blocks = policy.blocks(strategy, run, q_BSGRK, k_BTGK, far)
        output = strategy.attend(run, q_BSGRK, None, keys, blocks)
    else:
        output = strategy.attend(run, q_BSGRK, None, keys)
    return output.out.flatten(2, 3), None


def nsa_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Tensor] = causal_mask_function,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | None = None,
    **_: Any,
) -> Tensor | None:
    """Build the mask of layers with this attention, as Transformers calls every mask function.

    Returns None if every row is one document from the first key on. Otherwise int32 [B, 1, 1, T]: for each key the
    first key of its document; padding is its own document, and keys past the newest query are `_UNWRITTEN`.
    """
    if use_vmap:
        raise _refusal("a mask function of its own (or_mask_function, and_mask_function)")
    key_T = torch.arange(kv_length, device=device)
    at_T = key_T + kv_offset
    begins_BT = (key_T == 0).expand(batch_size, -1)
    packed = mask_function is not causal_mask_function
    if packed and kv_length > 1:
        begins_BT = begins_BT | ~_sees_previous(mask_function, batch_size, at_T)
    padded = attention_mask is not None and not bool(attention_mask.all())
    if padded:
        assert attention_mask is not None
        reach = kv_offset + kv_length
        mask_BT = nn.functional.pad(attention_mask, (0, max(0, reach - attention_mask.shape[-1])))[:, kv_offset:reach]
        real_BT = mask_BT.bool()
        after_BT = nn.functional.pad(real_BT[:, :-1], (1, 0))
        _refuse_holes(real_BT, after_BT)
        begins_BT = begins_BT | ~real_BT | (real_BT & ~after_BT)
    end = q_offset + q_length - kv_offset
    if not padded and not isinstance(end, Tensor) and end == kv_length and not bool(begins_BT[:, 1:].any()):
        return None
    start_BT = torch.where(begins_BT, key_T, 0).cummax(1).values
    return start_BT.masked_fill(key_T >= end, _UNWRITTEN).to(torch.int32)[:, None, None]


def _sees_previous(mask_function: Callable[..., Tensor], batch: int, at_T: Tensor) -> Tensor:
    """Whether each token sees the one before it, that is, belongs to its document: [B, T]. A window or chunks of the
    layer itself are no reason to see less than that."""
    row_B1, head = torch.arange(batch, device=at_T.device)[:, None], at_T.new_zeros(())
    sooner_1T, later_1T = at_T[None, :-1], at_T[None, 1:]
    if bool(mask_function(row_B1, head, sooner_1T, later_1T).any()):
        raise _refusal("a mask that lets tokens see later ones (bidirectional attention)")
    sees_BT = mask_function(row_B1, head, later_1T, sooner_1T).expand(batch, -1)
    return nn.functional.pad(sees_BT, (1, 0), value=True)


def _refuse_holes(real_BT: Tensor, after_BT: Tensor) -> None:
    """Refuse padding between the tokens of a row: a token that comes after it sees those before it."""
    if bool(((real_BT & ~after_BT).sum(1) > 1).any()):
        raise _refusal("padding between the tokens of a row, e.g. prompts padded on the right in generate", "Pad left.")


def _layout(
    mask: Tensor | None, cu_seq_lens: Tensor | None, k_BTGK: Tensor, n_queries: int, geometry: Geometry
) -> DocumentLayout:
    """Where queries and compressed entries stand among the keys."""
    batch, length = k_BTGK.shape[:2]
    if mask is not None:
        return _document_layout(mask[:, 0, 0].long(), n_queries, geometry)
    if cu_seq_lens is not None and cu_seq_lens.numel() > 2 and (batch, n_queries) == (1, length):
        return packed_layout(cu_seq_lens, length, geometry, "cu_seq_lens_q")
    return plain_layout(batch, length, geometry, k_BTGK.device, n_queries)


def _document_layout(start_BT: Tensor, n_queries: int, geometry: Geometry) -> DocumentLayout:
    """Lay out documents that begin anywhere in their rows. A document's compressed entries count from its first key."""
    (batch, length), device, g = start_BT.shape, start_BT.device, geometry
    written_B1 = (start_BT != _UNWRITTEN).sum(1, keepdim=True)
    at_BS = written_B1 - n_queries + torch.arange(n_queries, device=device)
    start_BS = start_BT.gather(1, at_BS)
    pos_BS, n_entries = at_BS - start_BS, g.n_compressed(length)
    if n_queries == 1:  # entries of other documents are seen by nobody
        block_pos_BC = torch.arange(n_entries, device=device).mul(g.d).expand(batch, -1)
        begin_BC, first_BS = start_BS + block_pos_BC, torch.zeros_like(start_BS)
    else:
        ripe_BT = torch.arange(length, device=device) - start_BT + 1 - g.l  # tokens since a first block was complete
        ends_BT = (ripe_BT >= 0) & (ripe_BT % g.d == 0) & (start_BT != _UNWRITTEN)
        last_BC = torch.argsort(ends_BT.int(), dim=1, descending=True, stable=True)[:, :n_entries]
        begin_BC = last_BC - g.l + 1
        before_BT = ends_BT.cumsum(1) - ends_BT.int()
        first_BS = before_BT.gather(1, start_BS)
        block_pos_BC = begin_BC - start_BT.gather(1, last_BC)
    begin_BC = begin_BC.clamp(0, max(0, length - g.l))
    return DocumentLayout(pos_BS, start_BS, first_BS, begin_BC, block_pos_BC)


def _kind_of_layer(config: PreTrainedConfig, index: int | None) -> str:
    """What the model's own attention sees in a layer, in the words of `config.layer_types`."""
    kinds = getattr(config, "layer_types", None)
    if kinds is None or index is None:
        return _SLIDING if getattr(config, "sliding_window", None) else _FULL
    return kinds[index]


def _require_causal_decoder(model: PreTrainedModel, config: PreTrainedConfig) -> None:
    """Refuse what can be seen without a forward pass; `nsa_attention_forward` refuses the rest."""
    reason = None
    if model.config.is_encoder_decoder:
        reason = "an encoder and a decoder with cross attention"
    elif not model._can_set_attn_implementation():
        reason = "attention code that does not use Transformers' AttentionInterface"
    elif getattr(config, "attn_logit_softcapping", None) is not None:
        reason = _REFUSED["softcap"]
    for name, module in model.named_modules():
        if getattr(module, "config", None) is not config or not hasattr(module, "layer_idx"):
            continue
        if getattr(module, "is_causal", True) is False:
            reason = f"bidirectional or cross attention ({name})"
        elif isinstance(getattr(module, "sinks", None), Tensor):
            reason = f"{_REFUSED['sinks']} ({name}.sinks)"
        elif getattr(module, "indexer", None) is not None:
            reason = f"{_REFUSED['indices']} ({name}.indexer)"
    if reason is not None:
        raise ConfigError(f"{type(model).__name__} has {reason}: the branches of sparse attention cannot compute it.")


def _check_call(
    query: Tensor, key: Tensor, mask: Tensor | None, dropout: float, causal: bool, options: Mapping[str, Any]
) -> None:
    """Refuse what the branches would compute wrongly."""
    for name, meaning in _REFUSED.items():
        if options.get(name) is not None:
            raise _refusal(f"{meaning} (`{name}`)")
    if options.get("output_attentions"):
        raise _refusal("output_attentions", "Attention weights never exist.")
    if not causal:
        raise _refusal("bidirectional or cross attention (is_causal=False)")
    if dropout:
        raise _refusal(f"dropout of attention weights ({dropout})", "Set attention_dropout=0 in the model's config.")
    if query.shape[1] % key.shape[1] or query.shape[2] > key.shape[2]:
        raise _refusal(f"queries of shape {list(query.shape)} with keys of shape {list(key.shape)}")
    if mask is not None and (mask.dtype, mask.shape[1:]) != (torch.int32, (1, 1, key.shape[2])):
        raise _refusal(f"a mask of {mask.dtype} and shape {list(mask.shape)}", "Pass a padding mask [batch, tokens].")


def _refusal(what: str, instead: str = "") -> ConfigError:
    return ConfigError(
        f"this model asks attn_implementation='{IMPLEMENTATION}' for {what}: the branches define what a query sees, "
        f"and cannot compute it. {instead or 'Load the model without attn_implementation.'}"
    )


AttentionInterface.register(IMPLEMENTATION, nsa_attention_forward)
AttentionMaskInterface.register(IMPLEMENTATION, nsa_mask)
