"""Cutting tensors into pieces and dividing them among ranks: nothing missing, nothing twice, equal shares."""

import math
import random

import pytest
import torch
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

from nsa.errors import CheckpointError
from nsa_train.checkpoint.save_plan import (
    _MOST_PIECES,
    SMALLEST_PIECE_BYTES,
    PlannedTensor,
    RankPieces,
    TensorTable,
    _Piece,
    cut,
    merge,
    piece_bytes,
    share,
)

FP32 = TensorProperties(dtype=torch.float32)


def offered(pieces: list[_Piece], size: tuple[int, ...] = (8, 6), values: tuple[str, ...] = ()) -> RankPieces:
    return RankPieces(TensorTable([PlannedTensor("w", size, FP32)], list(values), {"w": ("model", "w")}), pieces)


@pytest.mark.parametrize(
    ("rows", "wanted", "starts"),
    [
        (16, 64, [0]),
        (16, 32, [0, 8]),
        (16, 20, [0, 8]),
        (16, 1, list(range(16))),
        (10, 10, [0, 3, 6, 9]),
        (3, 1, [0, 2]),
    ],
)
def test_a_shard_is_cut_into_a_power_of_two_of_pieces(rows, wanted, starts):
    pieces = cut((100, 7), (rows, 1), 4, wanted)
    assert [offsets for _, offsets, _ in pieces] == [(100 + start, 7) for start in starts]
    assert [place for place, _, _ in pieces] == ([start / rows for start in starts] if len(starts) > 1 else [-1.0])
    assert sum(sizes[0] for _, _, sizes in pieces) == rows


def test_borders_are_those_of_shards_of_larger_worlds():
    shard = cut((0, 0), (512, 4096), 4, SMALLEST_PIECE_BYTES)
    for ranks in (2, 4, 8):
        assert {rank * 512 // ranks for rank in range(ranks)} <= {offsets[0] for _, offsets, _ in shard}


def test_scalars_are_one_piece_and_empty_shards_none():
    assert cut((), (), 4, 1) == [(-1.0, (), ())]
    assert cut((8, 0), (0, 6), 4, 1) == []


def test_the_number_of_pieces_is_bounded():
    assert piece_bytes(80 << 30) == SMALLEST_PIECE_BYTES
    assert (900 << 30) / piece_bytes(900 << 30) <= _MOST_PIECES + 1


def test_shares_are_contiguous_and_of_like_size():
    dice = random.Random(0)
    sizes = [dice.randrange(1, 100) for _ in range(1000)]
    owners = share(sizes, 7)
    assert owners == sorted(owners)
    parts = [sum(size for size, of in zip(sizes, owners, strict=True) if of == number) for number in range(7)]
    assert max(parts) - min(parts) <= 200
    assert share([0, 0], 3) == [0, 0]


def test_pieces_of_all_ranks_make_up_the_index():
    index, dropped = merge([offered([(0, (0, 0), (4, 6))]), offered([(0, (4, 0), (4, 6))])])
    described = index.state_dict_metadata["w"]
    assert isinstance(described, TensorStorageMetadata)
    assert [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in described.chunks] == [
        ((0, 0), (4, 6)),
        ((4, 0), (4, 6)),
    ]
    assert dropped == [frozenset(), frozenset()]
    assert index.planner_data == {"w": ("model", "w")}


def test_copies_are_divided_and_each_has_one_writer():
    pieces: list[_Piece] = [(0, (row, 0), (1, 6)) for row in range(8)]
    _, dropped = merge([offered(pieces) for _ in range(4)])
    written = [set(range(8)) - numbers for numbers in dropped]
    assert written == [{0, 1}, {2, 3}, {4, 5}, {6, 7}]


def test_values_are_written_by_the_first_rank_that_has_them():
    whole: list[_Piece] = [(0, (0, 0), (8, 6))]
    index, dropped = merge([offered(whole, values=("lr",)), offered([], values=("lr", "more"))])
    assert dropped == [frozenset(), frozenset({0})]
    assert set(index.state_dict_metadata) == {"w", "lr", "more"}


def test_columns_of_tensor_parallelism_are_accepted():
    merge([offered([(0, (0, 0), (8, 3))]), offered([(0, (0, 3), (4, 3)), (0, (4, 3), (4, 3))])])


@pytest.mark.parametrize(
    "pieces",
    [
        [(0, (0, 0), (7, 6))],
        [(0, (0, 0), (4, 6)), (0, (5, 0), (3, 6))],
        [(0, (0, 0), (5, 6)), (0, (4, 0), (3, 6))],
        [(0, (1, 0), (8, 6))],
        [(0, (0, 0), (8, 3)), (0, (0, 2), (8, 3))],
        [(0, (0, 1), (8, 6))],
        [],
    ],
)
def test_a_gap_an_overlap_or_a_piece_outside_is_refused(pieces):
    with pytest.raises(CheckpointError, match="w"):
        merge([offered(pieces)])


def test_ranks_that_disagree_about_a_tensor_are_refused():
    with pytest.raises(CheckpointError, match="rank 1"):
        merge([offered([(0, (0, 0), (8, 6))]), offered([], size=(9, 6))])


def test_equal_offsets_are_one_object():
    """Pickle writes an object once: the index of a large run would be twice as large."""
    table = TensorTable([PlannedTensor(name, (8, 6), FP32) for name in "ab"], [], {})
    index, _ = merge([RankPieces(table, [(0, (0, 0), (8, 6)), (1, (0, 0), (8, 6))])])
    first, second = (index.state_dict_metadata[name].chunks[0] for name in "ab")
    assert first.offsets is second.offsets
    assert first.sizes is second.sizes


def test_a_tensor_without_values_is_kept_in_the_index():
    index, _ = merge([offered([], size=(0, 6))])
    assert math.prod(index.state_dict_metadata["w"].size) == 0
