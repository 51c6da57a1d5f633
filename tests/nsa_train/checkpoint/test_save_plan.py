"""The save planner, for ranks of worlds that exist as a fake process group only."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.testing._internal.distributed.fake_pg import FakeStore

from nsa_train.checkpoint import save_plan
from nsa_train.checkpoint.save_plan import RankPieces, SavePlanCache, SharedSavePlanner, _offer, merge

SIZES = {"embeddings": (50, 16), "w1": (64, 16), "w2": (16, 64), "norm": (16,), "odd": (5, 3)}


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(save_plan, "SMALLEST_PIECE_BYTES", 256)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def state_of(rank: int, mesh_shape: tuple[int, ...], placements: tuple[object, ...]) -> dict[str, object]:
    """The state dict of one rank of a world, in which every tensor is placed alike, and two plain values."""
    if dist.is_initialized():
        dist.destroy_process_group()
    world = 1
    for size in mesh_shape:
        world *= size
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    mesh = init_device_mesh("cpu", mesh_shape)
    state: dict[str, object] = {"step": torch.tensor(3.0), "lr": 0.1}
    for name, size in SIZES.items():
        placed = tuple(Replicate() if place == Shard(1) and len(size) == 1 else place for place in placements)
        local, _ = compute_local_shape_and_global_offset(size, mesh, placed)
        whole = torch.empty(size)
        state[name] = DTensor.from_local(
            torch.zeros(local), mesh, placed, run_check=False, shape=whole.shape, stride=whole.stride()
        )
    return state


def offers(mesh_shape: tuple[int, ...], placements: tuple[object, ...]) -> list[RankPieces]:
    world = 1
    for size in mesh_shape:
        world *= size
    return [_offer(state_of(rank, mesh_shape, placements), {}) for rank in range(world)]


def written(ranks: list[RankPieces]) -> list[int]:
    _, dropped = merge(ranks)
    return [
        sum(rank.bytes_of(piece) for number, piece in enumerate(rank.pieces) if number not in numbers)
        for rank, numbers in zip(ranks, dropped, strict=True)
    ]


TOTAL = 4 * sum(torch.Size(size).numel() for size in SIZES.values()) + 4


@pytest.mark.parametrize("shape", [(4, 2), (2, 4), (8, 1), (1, 8)])
def test_replicas_share_the_writing(shape):
    ranks = offers(shape, (Replicate(), Shard(0)))
    sizes = written(ranks)
    assert sum(sizes) == TOTAL
    assert max(sizes) < 1.6 * TOTAL / 8


def test_a_rank_offers_only_its_share_of_what_its_mesh_replicates():
    ranks = offers((4, 2), (Replicate(), Shard(0)))
    assert sum(rank.bytes_of(piece) for rank in ranks for piece in rank.pieces) == TOTAL + 7 * 4  # a plain scalar


def test_tensor_parallel_norms_are_written_once():
    ranks = offers((2, 4), (Shard(0), Replicate()))
    assert sum(written(ranks)) == TOTAL
    assert sum(written(offers((2, 2), (Shard(0), Shard(1))))) == TOTAL


def test_pieces_are_ordered_by_their_place_in_the_shard():
    rank = offers((2,), (Shard(0),))[1]
    first = {}
    places = []
    for number, offsets, _ in rank.pieces:
        if offsets:
            start = first.setdefault(number, offsets[0])
            places.append((offsets[0] - start) / rank.table.tensors[number].size[0])
    assert places == sorted(places)
    assert places[-1] > 0.2


def test_plain_tensors_of_all_ranks_are_divided_by_rank_0():
    state = {name: torch.zeros(size) for name, size in SIZES.items()}
    ranks = [_offer(state, {}) for _ in range(4)]
    sizes = written(ranks)
    assert sum(sizes) == TOTAL - 4
    assert max(sizes) < 1.3 * min(sizes)


def plan(planners: list[SharedSavePlanner], states: list[dict[str, object]]):
    for planner, state in zip(planners, states, strict=True):
        planner.set_up_planner(state)
    local = [planner.create_local_plan() for planner in planners]
    plans, index = planners[0].create_global_plan(local)
    final = [planner.finish_plan(plan) for planner, plan in zip(planners, plans, strict=True)]
    return local, index, final


def test_an_unchanged_plan_is_not_sent_again_and_a_changed_one_is():
    caches = [SavePlanCache() for _ in range(3)]
    state = {"model": {name: torch.zeros(size) for name, size in SIZES.items()}, "lr": 0.5}

    def once(states):
        return plan([SharedSavePlanner(cache) for cache in caches], states)

    first, index, final = once([state] * 3)
    assert all(plan.usable for plan in first)
    index.state_dict_metadata = {}  # as the writer does
    again, index_again, final_again = once([state] * 3)
    assert not any(plan.usable for plan in again)
    assert final_again == final
    assert set(index_again.state_dict_metadata) == {f"model.{name}" for name in SIZES} | {"lr"}
    less = {"model": {**state["model"], "w1": torch.zeros(32, 16)}, "lr": 0.5}
    changed, index_changed, final_changed = once([less] * 3)
    assert all(plan.usable for plan in changed)
    assert index_changed.state_dict_metadata["model.w1"].size == (32, 16)
    half = {"model": {name: tensor.half() for name, tensor in less["model"].items()}, "lr": 0.5}
    _, index_half, _ = once([half] * 3)
    assert index_half.state_dict_metadata["model.w1"].properties.dtype == torch.float16
    assert sum(len(plan.items) for plan in final_changed) == sum(
        len(getattr(entry, "chunks", [0])) for entry in index_changed.state_dict_metadata.values()
    )


def test_data_of_a_piece_is_the_part_of_the_tensor_that_it_names():
    whole = torch.arange(64 * 16.0).reshape(64, 16)
    planner = SharedSavePlanner()
    _, _, (final,) = plan([planner], [{"w": whole}])
    assert len(final.items) > 4
    for item in final.items:
        start, rows = item.tensor_data.chunk.offsets[0], item.tensor_data.chunk.sizes[0]
        assert torch.equal(planner.resolve_data(item), whole[start : start + rows])
