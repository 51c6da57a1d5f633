"""Context parallelism: positions of a rank's tokens, and where its keys and compressed blocks lie on the key axes.

Queries stay with their rank. The selected branch reads the raw keys of the whole row and the compressed branch the
compressed keys of the whole row, so that `start` and `first` are those of one rank. The window reads a rank's own
pieces, each with the w − 1 tokens before it (its halo). A compressed block is made by the rank that has its last token,
from that piece and the l − 1 tokens before it.

B batch · S own tokens · T tokens of the row · P tokens of a piece · C compressed blocks of the row
n slots for compressed blocks of a piece: as many as can end in it, whatever documents are packed
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from nsa.core.nsa_attention import NSAAttention
from nsa.core.positions import DocumentLayout, Positions, packed_layout, plain_layout
from nsa.core.selector_loss import LossLabels, row_sample, tokens_per_query, weighted_sample
from nsa.geometry import Geometry
from nsa_train.train.parallel.context_parallel import ContextGroup, RowExchange, RowSplit


def own_tokens(split: RowSplit, x_BT: Tensor) -> Tensor:
    """Columns of this rank's tokens: [B, S], its pieces side by side."""
    return torch.cat(_parts(split, x_BT), 1)


def own_layer_positions(
    context: ContextGroup,
    layers: Sequence[NSAAttention],
    shape: Sequence[int],
    cu_doc_lens: Tensor | None,
    own_BS: Tensor,
    labels: LossLabels | None = None,
) -> list[Positions]:
    """`own_positions` of every layer, made once for all that rotate alike and have the same window."""
    positions: dict[Any, Positions] = {}
    keys = [(layer.rotary.key, layer.geometry.w) for layer in layers]
    for key, layer in zip(keys, layers, strict=True):
        if key not in positions:
            positions[key] = own_positions(context, layer, shape, cu_doc_lens, own_BS, labels=labels)
    return [positions[key] for key in keys]


def own_positions(
    context: ContextGroup,
    layer: NSAAttention,
    shape: Sequence[int],
    cu_doc_lens: Tensor | None,
    own_BS: Tensor,
    dtype: torch.dtype = torch.float32,
    labels: LossLabels | None = None,
) -> Positions:
    """Positions of this rank's tokens in rows of this shape, [batch, tokens]; with documents, of rows laid end to end.

    own_BS: this rank's tokens, or anything of their shape [B, S, …]. dtype: of the rotations. labels: of these tokens.
    """
    split, geometry, device, (batch, length) = context.split, layer.geometry, own_BS.device, shape
    own_Q = _own_sample(split, layer, batch, length, device, packed=cu_doc_lens is not None)
    sample = None
    if own_Q is not None:
        sample = weighted_sample(own_Q, labels or LossLabels.of_all(own_BS), tokens_per_query(layer, length))
    if cu_doc_lens is None:
        whole = plain_layout(batch, length, geometry, device)
    else:
        batch, length = 1, batch * length
        whole = packed_layout(cu_doc_lens, length, geometry)
    pos_BS, start_BS, first_BS = (own_tokens(split, x_BT) for x_BT in whole[:3])
    if cu_doc_lens is None:  # each row is one document, which a stride of 0 says
        start_BS, first_BS = (x_BT[:, : pos_BS.shape[1]] for x_BT in whole[1:3])
    piece = split.piece_length(length)
    begins = [_axis_begin(slot, piece, geometry.w - 1) - at * piece for slot, at in enumerate(split.pieces())]
    starts = zip(_parts(split, whole.start_BS), begins, strict=True)
    begin_BC, block_pos_BC, source_C = _own_blocks(split, whole, length, geometry)
    last_BC = (block_pos_BC + geometry.l - 1).clamp(max=length - 1)
    exchange = RowExchange(
        context,
        window_start_BS=torch.cat([part + begin for part, begin in starts], 1),
        order=_places(split, torch.arange(split.n_pieces, device=device)),
        source_C=source_C,
        block_tables=layer.rotary.tables(last_BC, dtype, length),
    )
    layout = DocumentLayout(pos_BS, start_BS, first_BS, begin_BC, block_pos_BC)
    tables = layer.rotary.tables(pos_BS, dtype, length)
    return Positions(layout, tables, sample=sample, exchange=exchange)


def _axis_begin(slot: int, piece: int, reach: int) -> int:
    """Where a rank's piece begins on the axis of its pieces, each with `reach` tokens before it."""
    return slot * (reach + piece) + reach


def _parts(split: RowSplit, x_BT: Tensor) -> list[Tensor]:
    piece = split.piece_length(x_BT.shape[1])
    return [x_BT[:, at * piece : (at + 1) * piece] for at in split.pieces()]


def _places(split: RowSplit, piece: Tensor) -> Tensor:
    """`RowSplit.place` of each."""
    if not split.zigzag:
        return piece
    return torch.where(piece < split.ranks, 2 * piece, 2 * (split.n_pieces - 1 - piece) + 1)


def _own_blocks(
    split: RowSplit, whole: DocumentLayout, length: int, geometry: Geometry
) -> tuple[Tensor, Tensor, Tensor]:
    """`begin_BC` and `block_pos_BC` of own slots, and `source_C`.

    The blocks of a row are in the order of their last tokens, so those that end in a piece follow one another. Slots
    that no block fills pool other tokens, and no query sees them.
    """
    g, piece, reach = geometry, split.piece_length(length), geometry.l - 1
    batch, (begin_C, block_pos_C) = len(whole.pos_BS), (whole.begin_BC[0], whole.block_pos_BC[0])
    n_slots, device = -(-piece // g.d), begin_C.device
    last_C = begin_C + g.l - 1
    borders = torch.arange(split.n_pieces, device=device) * piece
    first_block = torch.searchsorted(last_C, borders)  # of each piece
    own_begin, own_pos = [], []
    for slot, at in enumerate(split.pieces()):
        block_n = (first_block[at] + torch.arange(n_slots, device=device)).clamp(max=len(begin_C) - 1)
        inside_n = (begin_C[block_n] - (at * piece - reach)).clamp(0, piece - 1)
        own_begin.append(inside_n + _axis_begin(slot, piece, reach) - reach)
        own_pos.append(block_pos_C[block_n])
    piece_C = last_C // piece
    slot_C = torch.arange(len(begin_C), device=device) - first_block[piece_C]
    source_C = _places(split, piece_C) * n_slots + slot_C.clamp(max=n_slots - 1)
    return torch.cat(own_begin).expand(batch, -1), torch.cat(own_pos).expand(batch, -1), source_C


def _own_sample(
    split: RowSplit, layer: NSAAttention, rows: int, n_tokens: int, device: torch.device, *, packed: bool
) -> Tensor | None:
    """This rank's share of the sampled queries, as indices of its own tokens; of a fake row, an average share."""
    # Its size depends on values: the host has them.
    sampled_Q = row_sample(layer, rows, n_tokens, torch.device("cpu"), packed=packed)
    if sampled_Q is None:
        return None
    if isinstance(sampled_Q, FakeTensor):
        return sampled_Q[: -(-len(sampled_Q) // split.ranks)]
    piece = split.piece_length(rows * n_tokens if packed else n_tokens)
    own = [sampled_Q[sampled_Q // piece == at] + (slot - at) * piece for slot, at in enumerate(split.pieces())]
    return torch.cat(own).to(device, non_blocking=True)
