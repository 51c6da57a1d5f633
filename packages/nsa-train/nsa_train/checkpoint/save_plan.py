"""DCP save planner: cuts tensors into pieces, divides those of replicas among ranks, checks that none is missing.

DCP's own planner lets one replica of each shard write everything, stores a shard as one piece that a reader must fetch
whole, and sends full plans to rank 0 and back. Here each rank takes its share of replicated tensors by its place in
their mesh, rank 0 gets names and numbers only, and an unchanged plan is not sent again.

A piece is what a reader has to fetch as a whole. Shards are cut along dimension 0 into pieces of about 1 MiB, and a
rank writes the first pieces of all its tensors, then the second ones, and so on. A rank of a larger world, which needs
the same fraction of every tensor, then finds what it needs side by side instead of reading every shard whole.
"""

import math
import pickle
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, Metadata, SavePlan
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from nsa.errors import CheckpointError

SMALLEST_PIECE_BYTES = 1 << 20
_MOST_PIECES = 1 << 17
"""Limit for all tensors together, beyond one per tensor and rank: bounds the index and the time to plan."""

_Numbers = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    name: str
    size: _Numbers
    """Shape of the whole tensor."""
    properties: TensorProperties


_Piece = tuple[int, _Numbers, _Numbers]
"""Number of the tensor in its table, offsets in the whole tensor, sizes. A plain tuple: a large run has a million."""


@dataclass(frozen=True, slots=True)
class TensorTable:
    """Names of a state dict. The ranks of a run usually have equal ones."""

    tensors: list[PlannedTensor]
    values: list[str]
    """Names of what is not a tensor."""
    paths: dict[str, tuple[str | int, ...]]
    """Position of every name in the nested state dict."""


@dataclass(frozen=True, slots=True)
class RankPieces:
    """Pieces and values that one rank can write, in the order in which it would write them; values last."""

    table: TensorTable
    pieces: list[_Piece]

    def bytes_of(self, piece: _Piece) -> int:
        return math.prod(piece[2]) * self.table.tensors[piece[0]].properties.dtype.itemsize


def piece_bytes(total_bytes: int) -> int:
    """Size of a piece in a checkpoint of so many bytes."""
    return max(SMALLEST_PIECE_BYTES, total_bytes // _MOST_PIECES)


def cut(offsets: _Numbers, sizes: _Numbers, itemsize: int, wanted_bytes: int) -> list[tuple[float, _Numbers, _Numbers]]:
    """Place in the file, offsets and sizes of the pieces of a shard; none for an empty one.

    The place is the position within the shard, 0 to 1. Shards of one piece come before all others: every rank of a
    larger world reads them, and would otherwise read the blocks of their neighbours too.

    The number of pieces is a power of two, so that their borders are those of shards of a larger world wherever the
    rows can be divided evenly.
    """
    shard_bytes = math.prod(sizes) * itemsize
    if shard_bytes == 0:
        return []
    rows = sizes[0] if sizes else 1
    count = 1 << (min(rows, max(1, shard_bytes // wanted_bytes)).bit_length() - 1)
    if count == 1:
        return [(-1.0, offsets, sizes)]
    step = -(-rows // count)
    return [
        (start / rows, (offsets[0] + start, *offsets[1:]), (min(step, rows - start), *sizes[1:]))
        for start in range(0, rows, step)
    ]


def share(sizes: Sequence[int], shares: int) -> list[int]:
    """The share of each of these consecutive items: contiguous, of about equal bytes."""
    total, before, numbers = max(1, sum(sizes)), 0, []
    for size in sizes:
        numbers.append(min(shares - 1, (2 * before + size) * shares // (2 * total)))
        before += size
    return numbers


def merge(ranks: Sequence[RankPieces]) -> tuple[Metadata, list[frozenset[int]]]:
    """The index of the checkpoint, and for each rank the numbers of those of its pieces that another rank writes.

    Numbers beyond the pieces are those of the values. Raises CheckpointError if the pieces do not make up the tensors.
    """
    tensors: dict[str, TensorStorageMetadata] = {}
    owners: dict[str, dict[_Numbers, list[tuple[int, int]]]] = {}
    interned: dict[_Numbers, torch.Size] = {}  # pickle writes an object once, however many pieces have it

    def size_of(numbers: _Numbers) -> torch.Size:
        size = interned.get(numbers)
        if size is None:
            size = interned[numbers] = torch.Size(numbers)
        return size

    for rank, offered in enumerate(ranks):
        known = []
        for tensor in offered.table.tensors:
            described = tensors.get(tensor.name)
            if described is None:
                described = TensorStorageMetadata(tensor.properties, size_of(tensor.size), [])
                tensors[tensor.name], owners[tensor.name] = described, {}
            elif described.size != tensor.size or described.properties.dtype != tensor.properties.dtype:
                raise CheckpointError(
                    f"{tensor.name} is {described.properties.dtype} {tuple(described.size)} on one rank and "
                    f"{tensor.properties.dtype} {tensor.size} on rank {rank}: it cannot be saved as one tensor."
                )
            known.append((described.chunks, owners[tensor.name]))
        for number, (tensor_number, offsets, sizes) in enumerate(offered.pieces):
            chunks, owners_of = known[tensor_number]
            if (holders := owners_of.get(offsets)) is None:
                owners_of[offsets] = [(rank, number)]
                chunks.append(ChunkStorageMetadata(size_of(offsets), size_of(sizes)))
            else:
                holders.append((rank, number))
    for name, described in tensors.items():
        _require_covered(name, described)
    dropped = _divide_copies(ranks, owners)
    values: set[str] = set()
    for rank, offered in enumerate(ranks):
        for number, name in enumerate(offered.table.values, len(offered.pieces)):
            if name in values:
                dropped[rank].add(number)
            values.add(name)
    tables = {id(offered.table): offered.table for offered in ranks}
    paths = {name: path for table in tables.values() for name, path in table.paths.items()}
    index = Metadata({**tensors, **{name: BytesStorageMetadata() for name in values}}, planner_data=paths)
    return index, [frozenset(numbers) for numbers in dropped]


def _divide_copies(
    ranks: Sequence[RankPieces], owners: dict[str, dict[_Numbers, list[tuple[int, int]]]]
) -> list[set[int]]:
    """Give every piece that several ranks offer to one of them, so that all write about as much."""
    dropped: list[set[int]] = [set() for _ in ranks]
    copies: dict[_Numbers, list[list[tuple[int, int]]]] = {}
    for of_tensor in owners.values():
        for holders in of_tensor.values():
            if len(holders) > 1:
                copies.setdefault(tuple(rank for rank, _ in holders), []).append(holders)
    for holding_ranks, shared in copies.items():
        shared.sort(key=lambda holders: holders[0][1])  # in the order in which the first of them would write
        first = ranks[holding_ranks[0]]
        sizes = [first.bytes_of(first.pieces[holders[0][1]]) for holders in shared]
        for holders, writer in zip(shared, share(sizes, len(holding_ranks)), strict=True):
            for place, (rank, number) in enumerate(holders):
                if place != writer:
                    dropped[rank].add(number)
    return dropped


def _require_covered(name: str, tensor: TensorStorageMetadata) -> None:
    """The pieces of a tensor fill it without a gap and without an overlap."""
    columns: dict[tuple[_Numbers, _Numbers], list[tuple[int, int]]] = {}
    covered = 0
    for chunk in tensor.chunks:
        covered += math.prod(chunk.sizes)
        start, rows = (chunk.offsets[0], chunk.sizes[0]) if chunk.sizes else (0, 1)
        columns.setdefault((tuple(chunk.offsets[1:]), tuple(chunk.sizes[1:])), []).append((start, start + rows))
    inside = all(
        len(offsets) == len(sizes) == max(0, len(tensor.size) - 1)
        and all(a + n <= whole for a, n, whole in zip(offsets, sizes, tensor.size[1:], strict=True))
        and max(stop for _, stop in rows) <= (tensor.size[0] if tensor.size else 1)
        for (offsets, sizes), rows in columns.items()
    )
    if covered != math.prod(tensor.size) or not inside or _overlap(columns):
        raise CheckpointError(
            f"the pieces of {name} that the ranks would save have {covered} values, the tensor has "
            f"{math.prod(tensor.size)}, or they overlap: nothing was saved. This is a defect of the layout of the run."
        )


def _overlap(columns: dict[tuple[_Numbers, _Numbers], list[tuple[int, int]]]) -> bool:
    for rows in columns.values():
        rows.sort()
        if any(stop > start for (_, stop), (start, _) in pairwise(rows)):
            return True
    boxes = list(columns)
    pairs = (zip(*one, *other, strict=True) for number, one in enumerate(boxes) for other in boxes[:number])
    return any(all(a < b + length_b and b < a + length_a for a, length_a, b, length_b in extents) for extents in pairs)


# The planner.

_UNCHANGED = SavePlan([], usable=False)


@dataclass(frozen=True)
class PackedPieces:
    """A rank's pieces on their way to rank 0, which unpacks equal tables once."""

    table: bytes
    pieces: list[_Piece]

    @classmethod
    def pack(cls, offered: RankPieces) -> Self:
        return cls(zlib.compress(pickle.dumps(offered.table), 1), offered.pieces)

    def unpack(self, tables: dict[bytes, TensorTable]) -> RankPieces:
        if self.table not in tables:
            tables[self.table] = pickle.loads(zlib.decompress(self.table))
        return RankPieces(tables[self.table], self.pieces)


@dataclass
class SavePlanCache:
    """Plans of the last save of this process. Kept by who saves again: planning a large run takes long."""

    sent: RankPieces | None = None
    final: SavePlan = field(default_factory=lambda: SavePlan([]))
    ranks: list[RankPieces] = field(default_factory=list)
    """Pieces that every rank offered; on rank 0 alone."""
    index: Metadata | None = None
    """The index of the checkpoint; on rank 0 alone."""


class SharedSavePlanner(DefaultSavePlanner):
    """One object per save."""

    def __init__(self, cache: SavePlanCache | None = None) -> None:
        super().__init__()
        self._cache = cache or SavePlanCache()
        self._offered: RankPieces | None = None

    def create_local_plan(self) -> SavePlan:
        self._offered = _offer(self.state_dict, self.mappings)
        if self._offered == self._cache.sent:
            return _UNCHANGED
        return SavePlan([], planner_data=PackedPieces.pack(self._offered))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        cache = self._cache
        if cache.index is not None and not any(plan.usable for plan in all_plans):
            return [_UNCHANGED] * len(all_plans), replace(cache.index)
        tables: dict[bytes, TensorTable] = {}
        ranks = [
            plan.planner_data.unpack(tables) if plan.usable else cache.ranks[rank]
            for rank, plan in enumerate(all_plans)
        ]
        index, dropped = merge(ranks)
        cache.ranks, cache.index = ranks, index
        return [SavePlan([], planner_data=numbers) for numbers in dropped], replace(index)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        assert self._offered is not None
        if new_plan.usable:
            self._cache.final = SavePlan(_write_items(self._offered, new_plan.planner_data))
            self._cache.sent = self._offered
        self.plan = self._cache.final
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.type == WriteItemType.BYTE_IO:
            return super().resolve_data(write_item)
        data = write_item.tensor_data
        assert data is not None
        local, offsets = _local_part(self.state_dict[write_item.index.fqn])
        for dim, (at, start, length) in enumerate(zip(data.chunk.offsets, offsets, data.chunk.sizes, strict=True)):
            local = local.narrow(dim, at - start, length)
        return local


def _offer(state: dict[str, Any], paths: dict[str, Any]) -> RankPieces:
    """List what this rank can write of a flat state dict; of tensors replicated over a mesh, its share."""
    tensors: list[PlannedTensor] = []
    values: list[str] = []
    properties: dict[object, TensorProperties] = {}  # equal ones as one object, which pickle writes once
    candidates: list[tuple[float, _Piece, object]] = []
    whole = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    wanted = piece_bytes(sum(value.numel() * value.element_size() for value in whole.values()))
    for name, value in state.items():
        if not isinstance(value, Tensor):
            values.append(name)
            continue
        if isinstance(value, DTensor) and value.device_mesh.get_coordinate() is None:
            continue
        local, offsets = _local_part(value)
        number = len(tensors)
        described = TensorProperties.create_from_tensor(local)
        equal = properties.setdefault((described.dtype, described.requires_grad, described.pin_memory), described)
        tensors.append(PlannedTensor(name, tuple(value.shape), equal))
        pieces = cut(offsets, tuple(local.shape), local.element_size(), wanted)
        candidates += [(position, (number, at, sizes), _replicas(value)) for position, at, sizes in pieces]
    candidates.sort(key=lambda each: each[0])
    offered = RankPieces(TensorTable(tensors, values, paths), [piece for _, piece, _ in candidates])
    return replace(offered, pieces=_own_share(offered, [group for _, _, group in candidates]))


def _own_share(offered: RankPieces, groups: list[Any]) -> list[_Piece]:
    """The pieces that no other replica of the same mesh writes."""
    owners: list[int] = [0] * len(groups)
    for group in set(groups):
        numbers = [number for number, of in enumerate(groups) if of == group]
        sizes = [offered.bytes_of(offered.pieces[number]) for number in numbers]
        for number, owner in zip(numbers, share(sizes, group[2]), strict=True):
            owners[number] = owner
    return [piece for piece, owner, group in zip(offered.pieces, owners, groups, strict=True) if owner == group[1]]


def _replicas(value: Tensor) -> tuple[object, int, int]:
    """Ranks that have the same values as far as the tensor knows, the place of this rank among them, their number."""
    place, count, dims = 0, 1, []
    if not isinstance(value, DTensor):
        return None, place, count
    coordinate = value.device_mesh.get_coordinate()
    assert coordinate is not None
    for dim, placement in enumerate(value.placements):
        if placement.is_replicate():
            place = place * value.device_mesh.size(dim) + coordinate[dim]
            count *= value.device_mesh.size(dim)
            dims.append(dim)
    return (value.device_mesh, tuple(dims)), place, count


def _local_part(value: Tensor) -> tuple[Tensor, _Numbers]:
    """The tensor on this rank, and where it begins in the whole one."""
    if not isinstance(value, DTensor):
        return value, (0,) * value.dim()
    _, offsets = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    return value.to_local(), tuple(offsets)


def _write_items(offered: RankPieces, dropped: frozenset[int]) -> list[WriteItem]:
    items = []
    for number, (tensor_number, offsets, sizes) in enumerate(offered.pieces):
        if number in dropped:
            continue
        tensor = offered.table.tensors[tensor_number]
        chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        data = TensorWriteData(chunk, tensor.properties, torch.Size(tensor.size))
        items.append(WriteItem(MetadataIndex(tensor.name, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
    values = enumerate(offered.table.values, len(offered.pieces))
    items += [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for number, name in values if number not in dropped]
    return items
