"""Cuts the tensors of a checkpoint into pieces, divides those of replicas among ranks, checks that none is missing.

A piece is what a reader has to fetch as a whole. Shards are cut along dimension 0 into pieces of about 1 MiB, and a
rank writes the first pieces of all its tensors, then the second ones, and so on. A rank of a larger world, which needs
the same fraction of every tensor, then finds what it needs side by side instead of reading every shard whole.
Pure functions: no file, no collective, no tensor.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from nsa.errors import CheckpointError

SMALLEST_PIECE_BYTES = 1 << 20
_MOST_PIECES = 1 << 17
"""Limit for all tensors together, beyond one per tensor and rank: bounds the index and the time to plan."""

Numbers = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    name: str
    size: Numbers
    """Shape of the whole tensor."""
    properties: TensorProperties


Piece = tuple[int, Numbers, Numbers]
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
    pieces: list[Piece]

    def bytes_of(self, piece: Piece) -> int:
        return math.prod(piece[2]) * self.table.tensors[piece[0]].properties.dtype.itemsize


def piece_bytes(total_bytes: int) -> int:
    """Size of a piece in a checkpoint of so many bytes."""
    return max(SMALLEST_PIECE_BYTES, total_bytes // _MOST_PIECES)


def cut(offsets: Numbers, sizes: Numbers, itemsize: int, wanted_bytes: int) -> list[tuple[float, Numbers, Numbers]]:
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
    owners: dict[str, dict[Numbers, list[tuple[int, int]]]] = {}
    interned: dict[Numbers, torch.Size] = {}  # pickle writes an object once, however many pieces have it

    def size_of(numbers: Numbers) -> torch.Size:
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
    ranks: Sequence[RankPieces], owners: dict[str, dict[Numbers, list[tuple[int, int]]]]
) -> list[set[int]]:
    """Give every piece that several ranks offer to one of them, so that all write about as much."""
    dropped: list[set[int]] = [set() for _ in ranks]
    copies: dict[Numbers, list[list[tuple[int, int]]]] = {}
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
    columns: dict[tuple[Numbers, Numbers], list[tuple[int, int]]] = {}
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


def _overlap(columns: dict[tuple[Numbers, Numbers], list[tuple[int, int]]]) -> bool:
    for rows in columns.values():
        rows.sort()
        if any(stop > start for (_, stop), (start, _) in pairwise(rows)):
            return True
    boxes = list(columns)
    return any(_meet(one, other) for number, one in enumerate(boxes) for other in boxes[:number])


def _meet(one: tuple[Numbers, Numbers], other: tuple[Numbers, Numbers]) -> bool:
    """Whether two boxes of the dimensions after the first share a value."""
    extents: Iterable[Numbers] = zip(*one, *other, strict=True)
    return all(a < b + length_b and b < a + length_a for a, length_a, b, length_b in extents)
