"""Positions of a forward pass: layout of packed documents, RoPE tables, position ids, padding masks.

B batch · S tokens · C compressed blocks · D model dim
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, TypedDict

import torch
from torch import Tensor

from nsa.core.branches import AttendedKeys, BranchStreams
from nsa.core.kv_cache import LayerCache
from nsa.core.rope import RotaryEmbedding, Tables, given_tables
from nsa.errors import ConfigError
from nsa.geometry import Geometry
from nsa.kernels.registry import KernelPlan


class DocumentLayout(NamedTuple):
    pos_BS: Tensor
    """Position of each token in its own document."""
    start_BS: Tensor
    """Index of that document's position 0 on the axis of raw keys. Where all tokens of a row have one, it is repeated
    by a stride of 0: a kernel knows it then without reading values."""
    first_BS: Tensor
    """Index of that document's compressed block 0 on the axis of compressed keys."""
    begin_BC: Tensor
    """Index on the raw axis of each compressed block's first token."""
    block_pos_BC: Tensor
    """Position of that token in its own document."""


def plain_layout(
    batch: int, length: int, geometry: Geometry, device: torch.device, n_queries: int | None = None
) -> DocumentLayout:
    """Every row is one document; queries are its last n_queries tokens, or all."""
    n_queries = length if n_queries is None else n_queries
    pos_BS = torch.arange(length - n_queries, length, device=device).expand(batch, -1)
    zero_BS = torch.zeros(1, 1, dtype=torch.int64, device=device).expand(batch, n_queries)  # one start, stored once
    begin_BC = torch.arange(geometry.n_compressed(length), device=device).mul(geometry.d).expand(batch, -1)
    return DocumentLayout(pos_BS, zero_BS, zero_BS, begin_BC, begin_BC)


def packed_layout(cu_doc_lens: Tensor, length: int, geometry: Geometry, name: str = "cu_doc_lens") -> DocumentLayout:
    """One row holding documents end to end, each with block grids of its own.

    The number of compressed slots depends on the length alone, so that shapes stay static whatever is packed; slots
    that no document fills come last and no query sees them. `name`: the argument, as the caller spells it.
    """
    _check_documents(cu_doc_lens, length, name)
    cu = cu_doc_lens.long()
    cu_blocks = torch.nn.functional.pad(((cu.diff() - geometry.l) // geometry.d + 1).clamp(min=0).cumsum(0), (1, 0))
    token_S = torch.arange(length, device=cu.device)
    doc_S = torch.searchsorted(cu[1:], token_S, right=True)
    block_C = torch.arange(geometry.n_compressed(length), device=cu.device)
    doc_C = torch.searchsorted(cu_blocks[1:], block_C, right=True).clamp(max=cu.numel() - 2)
    block_pos_C = (block_C - cu_blocks[doc_C]) * geometry.d
    begin_C = (cu[doc_C] + block_pos_C).clamp(0, max(0, length - geometry.l))
    start_S = cu[doc_S]
    rows = (token_S - start_S, start_S, cu_blocks[doc_S], begin_C, block_pos_C)
    return DocumentLayout(*(row[None] for row in rows))


def _check_documents(cu_doc_lens: Tensor, length: int, name: str) -> None:
    if cu_doc_lens.dim() != 1 or cu_doc_lens.numel() < 2 or cu_doc_lens.dtype not in (torch.int32, torch.int64):
        raise ConfigError(
            f"{name} must be a 1-d int32 tensor of cumulative document lengths, 0 first; it is "
            f"{cu_doc_lens.dtype} of shape {tuple(cu_doc_lens.shape)}. For documents of 3 and 5 tokens pass [0, 3, 8]."
        )
    # On an accelerator reading the values would stall it at every step; in a compiled graph it would break the graph.
    if cu_doc_lens.device.type == "cpu" and not torch.compiler.is_compiling():
        values = cu_doc_lens.tolist()
        if values[0] != 0 or values[-1] != length or any(b < a for a, b in pairwise(values)):
            raise ConfigError(
                f"{name} must rise from 0 to the number of tokens ({length}), and is {values[:4]} … {values[-1]}. "
                f"Pass the cumulative lengths of the documents packed into the batch, rows end to end."
            )


class _RowPadding:
    """A padding mask [B, S] of 0 and 1: moves each row's real tokens to its front, and back.

    Causal attention over real tokens that come first needs no mask: what follows them changes nothing. A token that is
    masked out does not exist: it has no position and no key, wherever it lies in the row.
    """

    def __init__(self, attention_mask: Tensor, batch: int, length: int, cached: bool) -> None:
        """Read positions and padding; with a cache the mask may also cover earlier tokens: its last S columns count."""
        shape, kind = list(attention_mask.shape), attention_mask.dtype
        long_enough = len(shape) == 2 and (shape[1] >= length if cached else shape[1] == length)
        if not long_enough or shape[0] != batch or kind.is_floating_point or kind.is_complex:
            raise ConfigError(
                f"attention_mask is {kind} of shape {shape} for {batch} rows of {length} tokens: only a padding mask "
                f"of 0 and 1 is possible, int or bool [batch, tokens]. The branches define what a query sees. Pass "
                f"the padding mask; for documents packed into rows pass cu_doc_lens."
            )
        mask_BS = attention_mask[:, shape[1] - length :]
        if mask_BS.is_cpu and not torch.compiler.is_compiling() and not bool(((mask_BS == 0) | (mask_BS == 1)).all()):
            raise ConfigError("attention_mask has values other than 0 (padding) and 1 (token). Pass those alone.")
        self.real_BS = mask_BS != 0
        self.new_lens_B = self.real_BS.sum(1)
        self._order_BS = torch.argsort(self.real_BS.int(), dim=1, descending=True, stable=True)
        self._back_BS = torch.argsort(self._order_BS, dim=1)

    def lengths_for(self, cache: LayerCache | None, new_lens_B: Tensor | None) -> Tensor | None:
        """Lengths that a cache needs to know of the padding; None without one."""
        if new_lens_B is not None:
            raise ConfigError("new_lens_B and attention_mask were both given: each marks padding. Pass one of them.")
        return None if cache is None else self.new_lens_B

    def to_front(self, x: Tensor) -> Tensor:
        """[B, S, …] with each row's real tokens first."""
        return x.gather(1, self._order_BS.view(*self._order_BS.shape, *[1] * (x.dim() - 2)).expand_as(x))

    def back(self, x_BSD: Tensor) -> Tensor:
        """The way back; zeros where the mask is 0."""
        return x_BSD.gather(1, self._back_BS[..., None].expand_as(x_BSD)).masked_fill(~self.real_BS[..., None], 0)


@dataclass(frozen=True)
class QuerySample:
    """Queries whose selector loss a forward pass computes."""

    queries_Q: Tensor
    """Indices of tokens of a row."""
    weight_BQ: Tensor
    """What the divergence of each query is multiplied by; 0 without a label."""
    gradient: Tensor
    """Gradient of the model's loss, written when its backward pass begins."""


class KeyExchange(Protocol):
    """Brings a process the keys of a row that it shares with others. `layer`: an `NSAAttention`; `layout`: of this
    process's tokens."""

    def keys(self, layer: Any, new: BranchStreams, layout: DocumentLayout) -> AttendedKeys:
        """Build the keys of the branches for this process's queries."""

    def compressed_keys(self, layer: Any, k_BSGK: Tensor, layout: DocumentLayout) -> Tensor:
        """All compressed keys of the row, of this process's raw keys."""

    def plan(self, layer: Any, run: KernelPlan) -> KernelPlan:
        """The layer's backends for keys that `keys` returned."""


class Positions:
    """Positions of a forward pass and their rotations; the same for all layers, so a model makes it once.

    Neither a tuple nor a dataclass: FSDP2 casts, and so copies, floating-point tensors in those among the arguments of
    a block. Tables stay in fp32, and a sample's gradient the tensor to which the model's loss writes.

    layout: None with a cache, which has its own.
    padding: made from an attention mask: `layout` and `tables` are for rows whose real tokens come first.
    sample: queries of the selector loss; None: there is no such loss in this pass.
    exchange: where a row is divided among processes. `layout` and `tables` are then of this process's tokens, on the
        key axes of the whole row.
    """

    def __init__(
        self,
        layout: DocumentLayout | None,
        tables: Tables,
        padding: _RowPadding | None = None,
        sample: QuerySample | None = None,
        exchange: KeyExchange | None = None,
    ) -> None:
        self.layout, self.tables, self.padding, self.sample, self.exchange = layout, tables, padding, sample, exchange

    def replaced(self, **changes: Any) -> "Positions":
        """Replace some of these arguments."""
        return Positions(**{**vars(self), **changes})

    def layout_for(self, x_BSD: Tensor, geometry: Geometry) -> DocumentLayout:
        """The layout, which must be of this input's tokens."""
        if self.layout is not None:
            batch, length = x_BSD.shape[:2]
            per_token, per_block = (batch, length), (batch, geometry.n_compressed(length))
            if self.exchange is not None:
                per_block = batch, self.layout.begin_BC.shape[1]
            if [part.shape for part in self.layout] == [per_token] * 3 + [per_block] * 2:
                return self.layout
        raise ConfigError(
            f"`where` was made for other tokens, a cache or another geometry than this input of shape "
            f"{list(x_BSD.shape)}. Pass what this module's locate gives for this input."
        )


class PositionOptions(TypedDict, total=False):
    """Arguments of `NSAAttention.forward` that say where tokens stand, if not one after the other."""

    attention_mask: Tensor | None
    position_ids: Tensor | None
    position_embeddings: Sequence[Tensor] | None


class SequenceOptions(PositionOptions, total=False):
    """`PositionOptions`, and which tokens of a batch belong together; also arguments of the models around it."""

    new_lens_B: Tensor | None
    cu_doc_lens: Tensor | Sequence[int] | None


class ForwardOptions(SequenceOptions, total=False):
    """The keyword arguments of `NSAAttention.forward`."""

    cache: LayerCache | None
    where: Positions | None


def locate(
    x_BSD: Tensor,
    rotary: RotaryEmbedding,
    geometry: Geometry,
    rope_compressed: str,
    cache: LayerCache | None,
    cu_doc_lens: Tensor | Sequence[int] | None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    position_embeddings: Sequence[Tensor] | None = None,
) -> Positions:
    """The positions of these tokens. Arguments as for `NSAAttention` and its `forward`."""
    if x_BSD.dim() != 3:
        raise ConfigError(f"the input has shape {list(x_BSD.shape)}: it must be [batch, tokens, dim].")
    batch, length = x_BSD.shape[:2]
    padding = padding_of(attention_mask, batch, length, cache is not None, cu_doc_lens is not None)
    layout, limit = None, batch * length
    dtype = torch.promote_types(x_BSD.dtype, torch.float32)  # in which keys and queries are rotated
    if cache is not None:
        pos_BS = cache.length_B[:, None] if length == 1 else cache.positions(length)
        limit = cache.max_len + length  # padding may stand past the end
    elif cu_doc_lens is not None:
        layout = packed_layout(torch.as_tensor(cu_doc_lens, device=x_BSD.device), batch * length, geometry)
        pos_BS = layout.pos_BS
    else:
        layout = plain_layout(batch, length, geometry, x_BSD.device)
        pos_BS = layout.pos_BS
    if position_ids is None and position_embeddings is None:
        return Positions(layout, rotary.tables(pos_BS, dtype, limit), padding)

    def as_rows(x: Tensor) -> Tensor:
        x = x if padding is None else padding.to_front(x)
        return x if cu_doc_lens is None else x.flatten(0, 1)[None]

    rotates_later = cache is not None and rope_compressed == "after"
    if position_embeddings is not None:
        if rotates_later:
            raise _foreign_positions("position_embeddings")
        cos, sin = given_tables(position_embeddings, batch, length, rotary.rotary_dim)
        return Positions(layout, (as_rows(cos), as_rows(sin)), padding)
    assert position_ids is not None
    given_BS = as_rows(checked_position_ids(position_ids, batch, length))
    if rotates_later:
        differs_BS = given_BS != pos_BS
        if padding is not None:
            differs_BS = differs_BS & padding.to_front(padding.real_BS)
        refusal = _foreign_positions("position_ids")
        if torch.compiler.is_compiling() or (differs_BS.is_cpu and bool(differs_BS.any())):
            raise refusal
        if not differs_BS.is_cpu:  # reading the answer would stall an accelerator at every step
            torch._assert_async(~differs_BS.any(), str(refusal))
    return Positions(layout, rotary.tables(given_BS, dtype), padding)


def _foreign_positions(name: str) -> ConfigError:
    return ConfigError(
        f"{name} that are not the cache's own were given with rope_compressed 'after': the cache rotates compressed "
        f"keys later, by its own positions. Leave {name} out, or use phi='avg' or 'weighted' with "
        f"rope_compressed='before'."
    )


def padding_of(
    attention_mask: Tensor | None, batch: int, length: int, cached: bool, packed: bool
) -> _RowPadding | None:
    """None if nothing is known to be padding. On an accelerator reading the mask would stall it at every step."""
    if attention_mask is None:
        return None
    if packed:
        raise ConfigError(
            "attention_mask and cu_doc_lens were both given: packed rows have no padding. Pass one of them."
        )
    padding = _RowPadding(attention_mask, batch, length, cached)
    if attention_mask.is_cpu and not torch.compiler.is_compiling() and bool(padding.real_BS.all()):
        return None
    return padding


def checked_position_ids(position_ids: Tensor, batch: int, length: int) -> Tensor:
    """[B, S]; a row for all is enough."""
    shape = position_ids.shape
    if shape not in ((length,), (1, length), (batch, length)) or position_ids.is_floating_point():
        raise ConfigError(
            f"position_ids are {position_ids.dtype} of shape {list(shape)} for {batch} rows of {length} tokens. Pass "
            f"int64 of shape [{batch}, {length}]."
        )
    return position_ids.expand(batch, length)
