"""Context parallelism: positions of a rank's tokens, and collectives that bring it the keys its queries read.

Queries stay with their rank. The selected branch reads the raw keys of the whole row and the compressed branch the
compressed keys of the whole row, so that `start` and `first` are those of one rank. The window reads a rank's own
pieces, each with the w − 1 tokens before it (its halo). A compressed block is made by the rank that has its last token,
from that piece and the l − 1 tokens before it.

Functional collectives, which autograd differentiates and torch.compile traces. Every rank must run every one of them,
forward and backward: a rank whose result has no part in its graph would leave the others waiting in the backward pass.

B batch · S own tokens · P tokens of a piece · T tokens of the row · C compressed blocks of the row
G kv groups · X width of a key or value
n slots for compressed blocks of a piece: as many as can end in it, whatever documents are packed
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import DeviceMesh
from torch.distributed import _functional_collectives as collectives
from torch.distributed.distributed_c10d import GroupName

from nsa.core.branches import AttendedKeys, BranchKeys, BranchStreams
from nsa.core.nsa_attention import NSAAttention
from nsa.core.positions import DocumentLayout, Positions, packed_layout, plain_layout
from nsa.core.rope import Tables, rotate
from nsa.core.selector_loss_sampling import LossLabels, row_sample, tokens_per_query, weighted_sample
from nsa.geometry import Geometry
from nsa.kernels.registry import KernelPlan


class _HaloPlan(NamedTuple):
    """One exchange in which every piece gets the last tokens of the piece before it. A rank's slots hold its pieces."""

    sent_slots: tuple[int, ...]
    """Slots whose last tokens are sent, in the order of their destinations."""
    sent: tuple[int, ...]
    """How many are sent to each rank."""
    received: tuple[int, ...]
    """How many come from each rank. In the order of their sources they belong to the last slots of this rank: to all of
    them, or to all but the first where that is the first piece of the row, which nothing precedes."""


@dataclass(frozen=True)
class RowSplit:
    """The pieces of a row, as one of the ranks that share it sees them."""

    ranks: int
    rank: int
    zigzag: bool = False

    @property
    def slots(self) -> int:
        """Pieces of each rank."""
        return 2 if self.zigzag else 1

    @property
    def n_pieces(self) -> int:
        return self.ranks * self.slots

    def piece_length(self, n_tokens: int) -> int:
        assert n_tokens % self.n_pieces == 0, f"{n_tokens} tokens in {self.n_pieces} pieces"
        return n_tokens // self.n_pieces

    def pieces(self, rank: int | None = None) -> tuple[int, ...]:
        """The pieces of a rank, in the order of the row; default this rank."""
        rank = self.rank if rank is None else rank
        return (rank, self.n_pieces - 1 - rank) if self.zigzag else (rank,)

    def place(self, piece: int) -> int:
        """Place of a piece after a gather, which puts rank after rank: owner times slots, plus the owner's slot."""
        if not self.zigzag:
            return piece
        return 2 * piece if piece < self.ranks else 2 * (self.n_pieces - 1 - piece) + 1

    def owner(self, piece: int) -> int:
        return self.place(piece) // self.slots

    def halo_plan(self) -> _HaloPlan:
        sent, received = [0] * self.ranks, [0] * self.ranks
        destinations = []
        for slot, piece in enumerate(self.pieces()):
            if piece + 1 < self.n_pieces:
                destinations.append((self.owner(piece + 1), slot))
                sent[self.owner(piece + 1)] += 1
            if piece > 0:
                received[self.owner(piece - 1)] += 1
        return _HaloPlan(tuple(slot for _, slot in sorted(destinations)), tuple(sent), tuple(received))

    def keys_read(self, n_tokens: int, geometry: Geometry) -> list[int]:
        """Keys that the queries of each rank read in a row of one document, per kv group: the work of attention."""
        length = self.piece_length(n_tokens)
        until = [sum(geometry.total_reads(piece * length).values()) for piece in range(self.n_pieces + 1)]
        return [sum(until[piece + 1] - until[piece] for piece in self.pieces(rank)) for rank in range(self.ranks)]


@dataclass(frozen=True)
class ContextGroup:
    """The ranks that share a row."""

    split: RowSplit
    group: GroupName
    """Name of the process group."""


def context_group(mesh: DeviceMesh, *, zigzag: bool) -> ContextGroup:
    """The group of a 1-d mesh of the ranks that share a row."""
    return ContextGroup(RowSplit(mesh.size(), mesh.get_local_rank(), zigzag), mesh.get_group().group_name)


@dataclass(frozen=True)
class _RowExchange:
    """`nsa.core.positions.KeyExchange` among the ranks that share a row; made once per pass for all layers.

    In the layout of own tokens `begin_BC` and `block_pos_BC` are of this rank's own slots: places on the axis of its
    pieces, each with a halo of l − 1 tokens.
    """

    context: ContextGroup
    window_start_BS: Tensor
    """Where position 0 of each query's document lies on the axis of this rank's pieces with halos of w − 1 tokens."""
    order: Tensor
    """Where each piece of the row is after a gather: [pieces]."""
    source_C: Tensor
    """Where each compressed block of the row is after a gather: [C]."""
    block_tables: Tables
    """Rotations of the last token of each own block."""

    def keys(self, layer: NSAAttention, new: BranchStreams, layout: DocumentLayout) -> AttendedKeys:
        """Build the keys of the branches for this rank's queries. The largest exchange starts first."""
        pos, start, first = layout[:3]
        geometry, context = layer.geometry, self.context
        if layer.kind == "window":
            k_win, v_win = _with_halos(context, [(new.k_win, geometry.w - 1), (new.v_win, geometry.w - 1)])
            window = BranchKeys(k_win, v_win, pos, self.window_start_BS)
            return window, window, window
        k_sel, v_sel = (_gathered_pieces(context, x) for x in (new.k_sel, new.v_sel))
        if layer.kind == "dense":
            tokens = BranchKeys(self._in_row_order(k_sel), self._in_row_order(v_sel), pos, start)
            return tokens, tokens, tokens
        of_values = geometry.l - 1 if "compressed" in layer.branches else 0
        reaches = [(new.k_cmp, geometry.l - 1), (new.v_cmp, of_values)]
        if "sliding" in layer.branches:
            reaches += [(x, geometry.w - 1) for x in (new.k_win, new.v_win)]
        k_cmp, v_cmp, *windows = _with_halos(context, reaches)
        pooled = self._pooled_keys(layer, k_cmp, layout), layer.compress_values(v_cmp, layout.begin_BC)
        widths = [x.shape[-1] for x in pooled]
        k_cmp, v_cmp = self._gathered_entries(torch.cat(pooled, -1)).split(widths, -1)
        selected = BranchKeys(self._in_row_order(k_sel), self._in_row_order(v_sel), pos, start)
        window = BranchKeys(windows[0], windows[1], pos, self.window_start_BS) if windows else selected
        return BranchKeys(k_cmp, v_cmp, pos, first), selected, window

    def compressed_keys(self, layer: NSAAttention, k_BSGK: Tensor, layout: DocumentLayout) -> Tensor:
        """All compressed keys of the row, of this rank's raw keys."""
        (k_cmp,) = _with_halos(self.context, [(k_BSGK, layer.geometry.l - 1)])
        return self._gathered_entries(self._pooled_keys(layer, k_cmp, layout))

    def plan(self, layer: NSAAttention, run: KernelPlan) -> KernelPlan:
        """The layer's backends, with sliding attention piece by piece where a rank has several."""
        slots = self.context.split.slots
        if slots == 1 or layer.kind == "dense":
            return run
        sliding = partial(_slide_by_piece, run.functions.sliding, slots)
        return run._replace(functions=run.functions._replace(sliding=sliding), layer=None)

    def _in_row_order(self, pieces: Tensor) -> Tensor:
        """`_gathered_pieces` as [B, T, G, X]."""
        if self.context.split.zigzag:
            pieces = pieces.index_select(0, self.order)
        return pieces.transpose(0, 1).flatten(1, 2)

    def _gathered_entries(self, entries: Tensor) -> Tensor:
        """Entries of own slots as the compressed blocks of the row: [B, C, G, X]."""
        slots = _gathered_pieces(self.context, entries)
        return slots.transpose(0, 1).flatten(1, 2).index_select(1, self.source_C)

    def _pooled_keys(self, layer: NSAAttention, k_cmp: Tensor, layout: DocumentLayout) -> Tensor:
        k_BCGK = layer.phi_k(k_cmp, layout.begin_BC)
        return rotate(k_BCGK, self.block_tables) if layer.rope_compressed == "after" else k_BCGK


def _with_halos(context: ContextGroup, streams: Sequence[tuple[Tensor, int]]) -> list[Tensor]:
    """Streams [B, S, G, X], each with how many tokens of the piece before it every piece needs: its axis becomes this
    rank's pieces, each with those tokens before it; zeros before the first piece of the row. One exchange for all."""
    split, plan = context.split, context.split.halo_plan()
    pieces = [x.unflatten(1, (split.slots, -1)).transpose(0, 1) for x, _ in streams]  # [slots, B, P, G, X]
    tails = [x[:, :, x.shape[2] - reach :] for x, (_, reach) in zip(pieces, streams, strict=True)]
    packed = torch.cat([tail.flatten(1) for tail in tails], 1)
    width = packed.shape[1]
    if width == 0:
        return [x for x, _ in streams]
    sent = torch.cat([packed[:0], *(packed[slot : slot + 1] for slot in plan.sent_slots)])
    received = collectives.all_to_all_single(
        sent.flatten(), [width * n for n in plan.received], [width * n for n in plan.sent], context.group
    )
    n_received = sum(plan.received)
    # Also where nothing was received: the exchange must stay in the graph.
    halos = torch.cat([packed.new_zeros(split.slots - n_received, width), received.view(n_received, width)])
    extended = []
    for halo, tail, x in zip(halos.split([tail[0].numel() for tail in tails], 1), tails, pieces, strict=True):
        extended.append(torch.cat([halo.view(tail.shape), x], 2).transpose(0, 1).flatten(1, 2))
    return extended


def _gathered_pieces(context: ContextGroup, x_BSGX: Tensor) -> Tensor:
    """All pieces of the row, rank after rank: [pieces, B, P, G, X]. Returns at once; its first use waits for it."""
    pieces = x_BSGX.unflatten(1, (context.split.slots, -1)).transpose(0, 1).contiguous()
    return collectives.all_gather_single(pieces, 0, context.group)


def _slide_by_piece(sliding: Callable[..., Any], slots: int, q: Tensor, k: Tensor, v: Tensor, pos: Tensor,
                   start: Tensor, **options: Any) -> Any:  # fmt: skip
    """Sliding attention with every piece as a row of the batch: kernels expect the queries of a row to follow one
    another on the key axis."""
    n_keys = k.shape[1] // slots

    def as_rows(x: Tensor) -> Tensor:
        return x.unflatten(1, (slots, -1)).flatten(0, 1)

    def as_pieces(x: Tensor) -> Tensor:
        return x.unflatten(0, (-1, slots)).flatten(1, 2)

    begins = torch.arange(slots, device=k.device)[:, None] * n_keys
    start = (start.unflatten(1, (slots, -1)) - begins).flatten(0, 1)
    output = sliding(as_rows(q), as_rows(k), as_rows(v), as_rows(pos), start, **options)
    return tuple(as_pieces(x) for x in output) if isinstance(output, tuple) else as_pieces(output)


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
    """`_own_positions` of every layer, made once for all that rotate alike and have the same window."""
    positions: dict[Any, Positions] = {}
    keys = [(layer.rotary.key, layer.geometry.w) for layer in layers]
    for key, layer in zip(keys, layers, strict=True):
        if key not in positions:
            positions[key] = _own_positions(context, layer, shape, cu_doc_lens, own_BS, labels=labels)
    return [positions[key] for key in keys]


def _own_positions(
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
    exchange = _RowExchange(
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
