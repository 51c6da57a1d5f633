"""Work of the sliding, compressed and selection kernels, from launchers' grids and loops: batch 1, one document."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from nsa.kernels.triton.selection import select_sizes
from nsa.kernels.triton.tuning import TileSizes, choose
from proofs.perf_model.bounds import key_tile_trips, query_tile_trips
from proofs.perf_model.work import KernelWork, LaunchSizes

INDEX = 4  # bytes of an index, a bound, a mask


def tiles_of(kernel: str, sizes: LaunchSizes) -> TileSizes:
    s = sizes.shape
    return choose(kernel, s.d_k if kernel == "select" else max(s.d_k, s.d_v), sizes.code)


def forward(sizes: LaunchSizes) -> Iterator[KernelWork]:
    yield range_forward(sizes, "compressed")
    yield select(sizes)
    yield range_forward(sizes, "sliding")


def backward(sizes: LaunchSizes) -> Iterator[KernelWork]:
    for branch in ("compressed", "sliding"):
        yield range_dq(sizes, branch)
        yield range_dkv(sizes, branch)
    yield from add_parts(sizes)


def range_forward(sizes: LaunchSizes, branch: str) -> KernelWork:
    k, v = sizes.padded()
    own = sizes.queries_bytes() + sizes.outputs_bytes() + sizes.level_bytes()
    # One exponential more per row rescales what came before.
    return _query_tiles("range_forward", sizes, branch, False, k + v, own, exponentials_per_row=1)


def range_dq(sizes: LaunchSizes, branch: str) -> KernelWork:
    k, v = sizes.padded()
    own = 2 * (sizes.queries_bytes() + sizes.outputs_bytes() + sizes.level_bytes())
    return _query_tiles("range_dq", sizes, branch, True, 2 * k + v, own)


def _query_tiles(
    kernel: str,
    sizes: LaunchSizes,
    branch: str,
    backward: bool,
    columns: int,
    own_bytes: float,
    exponentials_per_row: int = 0,
) -> KernelWork:
    """A kernel whose programs each take a tile of queries and loop over tiles of keys.

    `columns`: of the products of one score; `own_bytes`: tensors that each program reads or writes once.
    """
    tiles, groups, n_keys = tiles_of(kernel, sizes), sizes.shape.n_kv_groups, _axis(sizes, branch)
    steps, inner = query_tile_trips(sizes, branch, tiles)
    trips, inner = int(steps.sum()) * groups, inner * groups
    own = own_bytes + sizes.length * groups * 2 * INDEX
    axis = n_keys * sizes.key_bytes()
    return KernelWork(
        f"{kernel} {branch}", backward, trips, inner,
        flops=trips * 2.0 * tiles.m * tiles.n * columns,
        exponentials=trips * float(tiles.m * tiles.n + exponentials_per_row * tiles.m),
        l2_bytes=trips * tiles.n * sizes.key_bytes() + own,
        hbm_bytes=axis * groups + own,
        shared_bytes=axis * (branch != "sliding"),  # a window's keys are near each other
        programs=steps.repeat(groups),
    )  # fmt: skip


def _axis(sizes: LaunchSizes, branch: str) -> int:
    return sizes.length if branch == "sliding" else sizes.n_compressed


def range_dkv(sizes: LaunchSizes, branch: str) -> KernelWork:
    tiles, groups, n_keys = tiles_of("range_dkv", sizes), sizes.shape.n_kv_groups, _axis(sizes, branch)
    steps, inner, parts = key_tile_trips(sizes, branch, tiles)
    trips = int(steps.sum())
    sums = parts * n_keys * groups * sizes.key_bytes() * (4 / sizes.element if parts > 1 else 1)
    work = _dkv(f"range_dkv {branch}", sizes, trips * groups, tiles.m, tiles.n, n_keys, n_keys * groups * parts, sums)
    work = replace(work, inner_trips=inner * groups, programs=steps.T.flatten().repeat(groups))
    return replace(work, shared_bytes=0.0) if branch == "sliding" else work


def add_parts(sizes: LaunchSizes) -> Iterator[KernelWork]:
    """Sums of the parts of dK and dV, in the branches that have several."""
    moved = 0.0
    for branch in ("compressed", "sliding"):
        _, _, parts = key_tile_trips(sizes, branch, tiles_of("range_dkv", sizes))
        if parts > 1:
            keys = _axis(sizes, branch) * sizes.shape.n_kv_groups * sizes.key_bytes()
            moved += keys * (parts * 4 / sizes.element + 1)
    if moved:
        yield KernelWork("add_parts", True, l2_bytes=moved, hbm_bytes=moved)


def _dkv(
    name: str, sizes: LaunchSizes, trips: int, m: int, n: int, n_keys: int, keys_loaded: float, sums: float
) -> KernelWork:
    """Keys stay in registers; every trip loads m rows: query, dout, log-sum-exp, delta and two bounds."""
    k, v = sizes.padded()
    per_row = sizes.key_bytes() + 2 * 4 + 2 * INDEX
    rows = sizes.queries_bytes() + sizes.outputs_bytes() + 2 * sizes.level_bytes()
    return KernelWork(
        name, True, trips,
        flops=trips * 4.0 * m * n * (k + v),
        exponentials=trips * float(m * n),
        l2_bytes=trips * m * per_row + keys_loaded * sizes.key_bytes() + sums,
        hbm_bytes=rows + n_keys * sizes.shape.n_kv_groups * sizes.key_bytes() + sums,
        shared_bytes=rows / sizes.shape.n_kv_groups,
    )  # fmt: skip


def select(sizes: LaunchSizes) -> KernelWork:
    """Per step KEEP blocks; their keys stay in registers while every head's queries are loaded in turn."""
    s, g, (tile, _) = sizes.shape, sizes.shape.geometry, select_tile(sizes)
    programs, loaded, keys = select_steps(sizes)
    steps, loaded, keys = (count * s.n_kv_groups for count in (int(programs.sum()), loaded, keys))
    k, _ = sizes.padded()
    scores = steps * s.heads_per_group * tile["BLOCK_Q"] * tile["SPAN"] * tile["KEEP"]
    queries = loaded * s.heads_per_group * (sizes.key_bytes(values=False) + 4)
    axis = sizes.n_compressed * sizes.key_bytes(values=False)
    idx = sizes.length * s.n_kv_groups * g.n_sel * INDEX
    own = sizes.queries_bytes() + sizes.level_bytes() + idx + sizes.length * s.n_kv_groups * 3 * INDEX
    return KernelWork(
        "select", False, steps,
        flops=scores * 2.0 * k,
        exponentials=float(scores),
        l2_bytes=keys * sizes.key_bytes(values=False) + queries + idx,
        hbm_bytes=axis * s.n_kv_groups + own,
        shared_bytes=axis,
        programs=programs.repeat(s.n_kv_groups),
    )  # fmt: skip


def select_tile(sizes: LaunchSizes) -> tuple[dict[str, int], int]:
    """The kernel's constants, and the steps that a tile takes only for what its columns' first blocks are due."""
    g = sizes.shape.geometry
    tile = select_sizes(g, tiles_of("select", sizes))
    return tile, -(-(g.l // g.d - 1) // (g.l_sel // g.d))


def select_steps(sizes: LaunchSizes) -> tuple[Tensor, int, int]:
    """Count for one group the steps of its programs, in their order, the last tile first, up to the block of a tile's
    last query; queries and keys that all of them load."""
    g, (tile, ahead) = sizes.shape.geometry, select_tile(sizes)
    per_step = tile["KEEP"] * tile["PER_SEL"]
    steps, loaded, keys = [], 0, 0
    for first in range(0, sizes.length, tile["BLOCK_Q"]):
        end = min(first + tile["BLOCK_Q"], sizes.length)
        mine = -(-((end - 1) // g.l_sel + 1) // tile["KEEP"])
        steps.append(mine + ahead)
        loaded += steps[-1] * (end - first)
        keys += min(mine * per_step, sizes.n_compressed)
        keys += ahead * min(per_step - tile["PER_SEL"], sizes.n_compressed)  # a row begins with no block before it
    return torch.tensor(steps[::-1]), loaded, keys
