"""DCP save planner: replicas share the writing, shards are cut into pieces, and little is sent to rank 0.

DCP's own planner lets one replica of each shard write everything, stores a shard as one piece that a reader must fetch
whole, and sends full plans to rank 0 and back. Here each rank takes its share of replicated tensors by its place in
their mesh, rank 0 gets names and numbers only, and an unchanged plan is not sent again.
"""

import pickle
import zlib
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, Metadata, SavePlan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from nsa_train.checkpoint.pieces import (
    Numbers,
    Piece,
    PlannedTensor,
    RankPieces,
    TensorTable,
    cut,
    merge,
    piece_bytes,
    share,
)

_UNCHANGED = SavePlan([], usable=False)


@dataclass(frozen=True)
class PackedPieces:
    """A rank's pieces on their way to rank 0, which unpacks equal tables once."""

    table: bytes
    pieces: list[Piece]

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
    candidates: list[tuple[float, Piece, object]] = []
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


def _own_share(offered: RankPieces, groups: list[Any]) -> list[Piece]:
    """The pieces that no other replica of the same mesh writes."""
    owners: list[int] = [0] * len(groups)
    for group in set(groups):
        numbers = [number for number, of in enumerate(groups) if of == group]
        sizes = [offered.bytes_of(offered.pieces[number]) for number in numbers]
        for number, owner in zip(numbers, share(sizes, group[2]), strict=True):
            owners[number] = owner
    return [piece for piece, owner, group in zip(offered.pieces, owners, groups, strict=True) if owner == group[1]]


def _replicas(value: Tensor) -> tuple[object, int, int]:
    """Which ranks have the same values as far as the tensor knows, the place of this rank among them, their number."""
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


def _local_part(value: Tensor) -> tuple[Tensor, Numbers]:
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
