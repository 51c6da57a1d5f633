"""Checkpoints at size, measured and simulated: `python -m tools.checkpoint_scale WHAT`; times in CPU seconds.

save   four gloo ranks write a checkpoint: bytes by rank, time that rank 0 needs to hash
load   two ranks save, eight load: bytes read by all ranks, over the bytes they need
reads  no tensors: bytes that larger worlds read of a model saved on 8 shards, over the bytes they need
plan   no tensors: index and planning time of 7B and 70B models on 1,024 ranks
"""

import argparse
import json
import math
import multiprocessing as mp
import pickle
import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dist_cp
from torch.distributed.checkpoint import SavePlan
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from nsa_train import names
from nsa_train.checkpoint.folder import CheckpointFolder
from nsa_train.checkpoint.load import VerifiedReader, open_checkpoint, read_index
from nsa_train.checkpoint.manifest import BLOCK_BYTES, LocalFiles, build_manifest
from nsa_train.checkpoint.save import HashingWriter
from nsa_train.checkpoint.save_plan import (
    PackedPieces,
    PlannedTensor,
    RankPieces,
    SharedSavePlanner,
    TensorTable,
    cut,
    merge,
    piece_bytes,
    share,
)
from nsa_train.checkpoint.tensor_index import PieceWritten, parse_index, write_index

FP32 = TensorProperties(dtype=torch.float32)
LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[Any, ...]]] = {
    "fsdp 4": ((4,), (Shard(0),)),
    "hsdp 2x2": ((2, 2), (Replicate(), Shard(0))),
    "ddp 2": ((2,), ()),
}


# Real ranks.


def in_ranks(world: int, act: Callable[..., object], *arguments: object) -> list[Any]:
    """Call `act(rank, world, folder, *arguments)` in processes that form a gloo group; their answers by rank."""
    with tempfile.TemporaryDirectory() as meeting:
        context = mp.get_context("fork")
        queue: Any = context.Queue()
        ranks = [
            context.Process(target=_rank, args=(rank, world, meeting, queue, act, arguments)) for rank in range(world)
        ]
        for process in ranks:
            process.start()
        answers = dict(queue.get() for _ in ranks)
        for process in ranks:
            process.join()
    return [answers[rank] for rank in range(world)]


def _rank(rank: int, world: int, meeting: str, queue: Any, act: Callable[..., object], arguments: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}/store", rank=rank, world_size=world)
    queue.put((rank, act(rank, world, *arguments)))
    dist.destroy_process_group()


def _state(world: int, layout: tuple[tuple[int, ...], tuple[Any, ...]], megabytes: int) -> dict[str, Any]:
    """Matrices of 16 MiB, and a norm for each, placed alike."""
    shape, placements = layout
    state: dict[str, Any] = {}
    for number in range(megabytes // 16):
        for name, size in ((f"w{number}", (4096, 1024)), (f"norm{number}", (1024,))):
            whole = torch.full(size, float(number))
            if placements:
                mesh = init_device_mesh("cpu", shape)
                state[name] = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            else:
                state[name] = whole
    return {"model": state}


def _save(rank: int, world: int, folder: Path, layout: Any, megabytes: int) -> dict[str, Any]:
    staging = CheckpointFolder(folder).staging(1)
    state = _state(world, layout, megabytes)
    writer = HashingWriter(staging)
    started = time.process_time()
    dist_cp.save(state, storage_writer=writer, planner=SharedSavePlanner())
    written_s = time.process_time() - started
    answer: dict[str, Any] = {"write_s": written_s}
    if rank == 0:
        started = time.process_time()
        build_manifest(LocalFiles(staging), 1, "now", hashed=writer.hashes)
        answer["hash_s"] = time.process_time() - started
        CheckpointFolder(folder).commit(1, hashed=writer.hashes)
    return answer


def save(megabytes: int) -> None:
    print(f"{'layout':<10} {'MB written by each rank':<34} {'write':>8} {'hash on rank 0':>16}")
    for name, layout in LAYOUTS.items():
        world = math.prod(layout[0])
        with tempfile.TemporaryDirectory() as folder:
            answers = in_ranks(world, _save, Path(folder), layout, megabytes)
            sizes = _bytes_by_rank(Path(folder) / names.step_name(1), world)
        written = "  ".join(f"{size / 1e6:6.1f}" for size in sizes)
        seconds = max(answer["write_s"] for answer in answers)
        print(f"{name:<10} {written:<34} {seconds:>6.2f} s {answers[0]['hash_s'] * 1000:>12.1f} ms")


def _bytes_by_rank(checkpoint: Path, world: int) -> list[int]:
    tensors = names.tensors_of(checkpoint)
    return [
        sum(file.stat().st_size for file in tensors.glob(f"__{rank}_*{names.TENSOR_FILES}")) for rank in range(world)
    ]


def _load(rank: int, world: int, folder: Path, megabytes: int) -> tuple[int, int]:
    files = open_checkpoint(folder / names.step_name(1))
    index = read_index(files)
    state = _state(world, ((world,), (Shard(0),)), megabytes)
    before = files.bytes_read
    dist_cp.load(state, storage_reader=VerifiedReader(files, index, 4))
    needed = sum(tensor.to_local().nbytes for tensor in state["model"].values())
    assert all(bool((t.to_local() == float(name.lstrip("wnorm"))).all()) for name, t in state["model"].items())
    return files.bytes_read - before, needed


def load(megabytes: int, saved_on: int, loaded_on: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        in_ranks(saved_on, _save, Path(folder), ((saved_on,), (Shard(0),)), megabytes)
        answers = in_ranks(loaded_on, _load, Path(folder), megabytes)
    read, needed = (sum(answer[part] for answer in answers) for part in (0, 1))
    print(
        f"saved on {saved_on}, loaded on {loaded_on}: read {read / 1e6:.0f} MB for {needed / 1e6:.0f} MB of tensors, "
        f"{read / needed:.2f} times"
    )


# Simulated worlds.

MODELS = {"7B": (4096, 32, 11008, 32, 2, 50_304), "70B": (8192, 80, 28_672, 64, 8, 128_256)}
"""Width, layers, feed-forward width, heads, key/value groups, vocabulary."""


def parameters(model: str) -> dict[str, tuple[int, ...]]:
    """Shapes of an NSA model's parameters: keys and values of three branches in one matrix each."""
    dim, layers, hidden, heads, groups, vocabulary = MODELS[model]
    head = dim // heads
    shapes: dict[str, tuple[int, ...]] = {"embeddings.weight": (vocabulary, dim)}
    for layer in range(layers):
        block = f"blocks.{layer}"
        shapes |= {
            f"{block}.attention_norm.weight": (dim,),
            f"{block}.feed_forward_norm.weight": (dim,),
            f"{block}.attention.w_q.weight": (dim, dim),
            f"{block}.attention.w_k.weight": (3 * groups * head, dim),
            f"{block}.attention.w_v.weight": (3 * groups * head, dim),
            f"{block}.attention.w_out.weight": (dim, dim),
            f"{block}.attention.w_gate.weight": (3 * heads, dim),
            f"{block}.feed_forward.w1.weight": (hidden, dim),
            f"{block}.feed_forward.w2.weight": (dim, hidden),
            f"{block}.feed_forward.w3.weight": (hidden, dim),
        }
    return shapes | {"lm_head.norm.weight": (dim,), "lm_head.w_out.weight": (vocabulary, dim)}


def state_shapes(model: str) -> dict[str, tuple[int, ...]]:
    """Parameters and the two moments of AdamW."""
    shapes = parameters(model)
    return {
        f"{kind}.{name}": shape
        for kind in ("model", "optim.state.exp_avg", "optim.state.exp_avg_sq")
        for name, shape in shapes.items()
    }


def _shard(shape: tuple[int, ...], rank: int, shards: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offsets and sizes of a shard along dimension 0, as torch.chunk makes them."""
    rows = -(-shape[0] // shards)
    start = min(rank * rows, shape[0])
    return (start, *(0 for _ in shape[1:])), (min(rows, shape[0] - start), *shape[1:])


def simulate(shapes: dict[str, tuple[int, ...]], shards: int, replicas: int) -> dict[str, float]:
    """Plan, merge and index a save on `shards` times `replicas` ranks."""
    table = TensorTable(
        [PlannedTensor(name, shape, FP32) for name, shape in shapes.items()], [], {n: (n,) for n in shapes}
    )
    wanted = piece_bytes(sum(4 * math.prod(shape) for shape in shapes.values()))
    sent, own = [], []
    for shard in range(shards):
        chunks = sorted(
            (position, number, offsets, sizes)
            for number, shape in enumerate(shapes.values())
            for position, offsets, sizes in cut(*_shard(shape, shard, shards), 4, wanted)
        )
        whole = RankPieces(table, [(number, offsets, sizes) for _, number, offsets, sizes in chunks])
        owners = share([whole.bytes_of(piece) for piece in whole.pieces], replicas)
        for replica in range(replicas):
            pieces = [piece for piece, owner in zip(whole.pieces, owners, strict=True) if owner == replica]
            own.append(sum(map(whole.bytes_of, pieces)))
            sent.append(pickle.dumps(SavePlan([], planner_data=PackedPieces.pack(replace(whole, pieces=pieces)))))
    started = time.process_time()
    tables: dict[bytes, TensorTable] = {}
    ranks = [pickle.loads(plan).planner_data.unpack(tables) for plan in sent]
    unpickled = time.process_time()
    index, _ = merge(ranks)
    merged = time.process_time()
    written: list[PieceWritten] = []
    for rank, offered in enumerate(ranks):
        at = 0
        for number, offsets, sizes in offered.pieces:
            length = 4 * math.prod(sizes) + 1200
            written.append((table.tensors[number].name, offsets, f"__{rank}_0{names.TENSOR_FILES}", at, length))
            at += length
    return _index_figures(
        lambda folder: write_index(folder, index, written),
        items=sum(len(rank.pieces) for rank in ranks),
        sent_mb=sum(map(len, sent)) / 1e6,
        unpickle_s=unpickled - started,
        plan_s=merged - unpickled,
        largest_mb=max(own) / 1e6,
    )


def _index_figures(write: Callable[[Path], object], **figures: float) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        started = time.process_time()
        write(Path(folder))
        written = time.process_time()
        path = max(Path(folder).iterdir())  # the JSON, if there is one
        raw = path.read_bytes()
        parse_index(raw, {f"__{rank}_0{names.TENSOR_FILES}": 1 << 60 for rank in range(2048)}, path)
        read = time.process_time()
    return {**figures, "index_mb": len(raw) / 1e6, "write_s": written - started, "read_s": read - written}


def _layout(shapes: dict[str, tuple[int, ...]], shard: int, shards: int) -> list[list[tuple[int, int, int]]]:
    """First row, one past the last and first byte in the file of the pieces of each tensor, in one file of a shard."""
    wanted = piece_bytes(sum(4 * math.prod(shape) for shape in shapes.values()))
    chunks = sorted(
        (position, number, offsets[0], sizes)
        for number, shape in enumerate(shapes.values())
        for position, offsets, sizes in cut(*_shard(shape, shard, shards), 4, wanted)
    )
    tensors: list[list[tuple[int, int, int]]] = [[] for _ in shapes]
    at = 0
    for _, number, start, sizes in chunks:
        tensors[number].append((start, start + sizes[0], at))
        at += 4 * math.prod(sizes)
    return tensors


def _read_bytes(shapes: dict[str, tuple[int, ...]], files: list[Any], rank: int, world: int) -> tuple[int, int]:
    """Bytes of the blocks that a rank reads, and of the tensors it needs."""
    blocks: set[tuple[int, int]] = set()
    needed = 0
    for number, shape in enumerate(shapes.values()):
        (start, *_), (rows, *_) = _shard(shape, rank, world)
        row_bytes = 4 * math.prod(shape[1:])
        needed += rows * row_bytes
        for file, tensors in enumerate(files):
            for first, stop, at in tensors[number]:
                if first < start + rows and start < stop:
                    last = at + (stop - first) * row_bytes - 1
                    blocks.update((file, block) for block in range(at // BLOCK_BYTES, last // BLOCK_BYTES + 1))
    return len(blocks) * BLOCK_BYTES, needed


def reads(models: list[str], saved_on: int, worlds: tuple[int, ...] = (8, 64, 512, 1024), sample: int = 16) -> None:
    print(f"{'model':<6} {'saved on':>8} {'loaded on':>9} {'read':>8} times the bytes needed")
    for model in models:
        shapes = state_shapes(model)
        files = [_layout(shapes, shard, saved_on) for shard in range(saved_on)]
        for world in worlds:
            ranks = range(0, world, max(1, world // sample))
            read, needed = (
                sum(part) for part in zip(*(_read_bytes(shapes, files, rank, world) for rank in ranks), strict=True)
            )
            print(f"{model:<6} {saved_on:>8} {world:>9} {read / needed:>8.2f}", flush=True)


COLUMNS = ("items", "sent_mb", "unpickle_s", "plan_s", "index_mb", "write_s", "read_s", "largest_mb")


def plan(models: list[str], layouts: list[str], as_json: bool) -> None:
    print(f"{'model':<6} {'layout':<12}" + "".join(f"{name:>12}" for name in COLUMNS))
    for model in models:
        shapes = state_shapes(model)
        for layout in layouts:
            shards, replicas = (int(number) for number in layout.split("x"))
            figures = mp.get_context("fork").Pool(1).apply(simulate, (shapes, shards, replicas))
            row = "".join(f"{figures[column]:>12,.{0 if column == 'items' else 1}f}" for column in COLUMNS)
            print(f"{model:<6} {layout:<12}{row}", flush=True)
            if as_json:
                print(json.dumps({"model": model, "layout": layout, **figures}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("save", "load", "reads", "plan"))
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--saved-on", type=int, default=2)
    parser.add_argument("--loaded-on", type=int, default=8)
    parser.add_argument("--models", nargs="+", default=["7B"], choices=sorted(MODELS))
    parser.add_argument("--layouts", nargs="+", default=["8x1", "1024x1", "8x128"], help="shards x replicas")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.what == "save":
        save(arguments.megabytes)
    elif arguments.what == "load":
        load(arguments.megabytes, arguments.saved_on, arguments.loaded_on)
    elif arguments.what == "reads":
        reads(arguments.models, 8)
    else:
        plan(arguments.models, arguments.layouts, arguments.json)
    print(f"peak memory of a process: {resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024:.0f} MiB")


if __name__ == "__main__":
    main()
