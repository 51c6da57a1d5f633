"""Division of a row among ranks: own tokens, exchange of borders, and balance of the keys that queries read."""

import pytest
import torch

from nsa.geometry import Geometry
from nsa_train.train.parallel.context_parallel import RowSplit, own_tokens

WAYS = [(ranks, zigzag) for ranks in (2, 3, 4, 7) for zigzag in (False, True)]


def splits(ranks: int, zigzag: bool) -> list[RowSplit]:
    return [RowSplit(ranks, rank, zigzag) for rank in range(ranks)]


@pytest.mark.parametrize(("ranks", "zigzag"), WAYS)
def test_every_token_has_one_rank_and_every_rank_as_many(ranks, zigzag):
    row = torch.arange(6 * ranks * 2)[None]
    parts = [own_tokens(split, row)[0] for split in splits(ranks, zigzag)]
    assert {len(part) for part in parts} == {12}
    assert torch.equal(torch.cat(parts).sort().values, row[0])


def test_zigzag_pairs_early_with_late_pieces():
    assert [split.pieces() for split in splits(3, True)] == [(0, 5), (1, 4), (2, 3)]
    assert [split.pieces() for split in splits(3, False)] == [(0,), (1,), (2,)]


@pytest.mark.parametrize(("ranks", "zigzag"), WAYS)
def test_a_gather_has_every_piece_at_its_place(ranks, zigzag):
    gathered = [piece for split in splits(ranks, zigzag) for piece in split.pieces()]
    places = [splits(ranks, zigzag)[0].place(piece) for piece in range(len(gathered))]
    assert [gathered[place] for place in places] == list(range(len(gathered)))


@pytest.mark.parametrize(("ranks", "zigzag"), WAYS)
def test_borders_reach_the_next_piece(ranks, zigzag):
    all_splits = splits(ranks, zigzag)
    plans = [split.halo_plan() for split in all_splits]
    mailbox: dict[tuple[int, int], list[int]] = {}
    for sender, (split, plan) in enumerate(zip(all_splits, plans, strict=True)):
        slots = iter(plan.sent_slots)
        for receiver, count in enumerate(plan.sent):
            mailbox[sender, receiver] = [split.pieces()[next(slots)] for _ in range(count)]
    for receiver, (split, plan) in enumerate(zip(all_splits, plans, strict=True)):
        received = [piece for sender in range(ranks) for piece in mailbox[sender, receiver]]
        assert [len(mailbox[sender, receiver]) for sender in range(ranks)] == list(plan.received)
        wanted = [piece - 1 for piece in split.pieces() if piece]
        assert received == wanted


@pytest.mark.parametrize("ranks", [4, 8, 64])
def test_zigzag_divides_the_work_evenly(ranks):
    geometry, length = Geometry(), 2**20
    contiguous, zigzag = (RowSplit(ranks, 0, way).keys_read(length, geometry) for way in (False, True))
    assert sum(contiguous) == sum(zigzag) == sum(geometry.total_reads(length).values())
    assert max(zigzag) * ranks / sum(zigzag) < 1.01
    assert max(contiguous) * ranks / sum(contiguous) > 1.6
