"""Run under TRITON_INTERPRET=1: the real kernels are executed, what their loops do is counted.

One JSON line: for the model as it is, and with each planted mistake, kernel → counted and modelled FLOPs, exponentials,
bytes, tiles without masks, and the tail that the order of programs leaves.
"""

import json
from collections import Counter, defaultdict
from unittest.mock import patch

import torch
from triton.runtime import interpreter

from nsa.bench.case import BenchCase, BenchShape
from nsa.geometry import Geometry
from nsa.kernels import triton
from nsa.kernels.interface import LayerInputs
from nsa.kernels.triton import range_attention, selected, selected_backward
from proofs.perf_model import index_kernels, range_kernels, selected_kernels
from proofs.perf_model.prediction import tail_of
from proofs.perf_model.selection_overlap import SelectionOverlap
from proofs.perf_model.work import LaunchSizes

counted: defaultdict[str, Counter] = defaultdict(Counter)
by_program: defaultdict[str, Counter] = defaultdict(Counter)
"""FLOPs of each program of a kernel."""
branch, kernel, program = "", "", (0, 0, 0)
LENGTH, UNITS = 250, 5


def wrap(owner, name, note):
    original = getattr(owner, name)

    def wrapped(self, *args, **kwargs):
        note(self, *args)
        return original(self, *args, **kwargs)

    setattr(owner, name, wrapped)


def add(what: str, amount: float) -> None:
    counted[f"{kernel} {branch}".strip()][what] += int(amount)


def enter(self, *args) -> None:
    """Range kernels run for two branches: the window's keys are more than the compressed ones."""
    global branch, kernel
    kernel = self.fn.__name__.removesuffix("_kernel")
    branch = ""
    if kernel.startswith("range_"):
        branch = "sliding" if args[self.arg_names.index("k")].shape[1] == LENGTH else "compressed"


def begin(self, *place) -> None:
    global program
    program = place[::-1]  # a GPU starts programs by their last number, then the one before it


def multiply(self, a, b, *_) -> None:
    flops = 2 * a.data.shape[0] * b.data.shape[0] * b.data.shape[1]
    add("flops", flops)
    by_program[f"{kernel} {branch}".strip()][program] += flops


Builder = interpreter.InterpreterBuilder
wrap(interpreter.GridExecutor, "__call__", enter)
wrap(Builder, "set_grid_idx", begin)
wrap(Builder, "create_dot", multiply)
wrap(Builder, "create_exp2", lambda self, x: add("exponentials", x.data.size))
wrap(
    Builder, "create_masked_load",
    lambda self, ptrs, mask, *_: add("bytes", mask.data.sum() * ptrs.get_element_ty().primitive_bitwidth // 8),
)  # fmt: skip
wrap(
    Builder, "create_masked_store",
    lambda self, ptrs, value, mask, *_: add("bytes", mask.data.sum() * value.dtype.primitive_bitwidth // 8),
)  # fmt: skip


TILE_STEPS = (
    (range_attention, "attend_tile"),
    (range_attention, "dq_tile"),
    (range_attention, "dkv_tile"),
    (selected, "window_tile"),
    (selected_backward, "window_gradients"),
)
"""One call per iteration of a loop over tiles; the last argument says if it has masks."""


def count_tiles(module, name: str) -> None:
    step = getattr(module, name)

    def counting(*args):
        add("inner_trips", not args[-1])
        return step(*args)

    setattr(module, name, counting)


for about in TILE_STEPS:
    count_tiles(*about)


def main() -> None:
    shape = BenchShape(3, 1, 16, 16, Geometry(l=8, d=4, l_sel=16, n_sel=4, w=90))
    g, case = shape.geometry, BenchCase(shape, LENGTH, torch.float32)
    pos, zero = torch.arange(LENGTH)[None], torch.zeros(1, 1, dtype=torch.long).expand(1, LENGTH)
    keys = ((case.k_BCGK, case.v_BCGV), (case.raw.k_sel, case.raw.v_sel), (case.raw.k_win, case.raw.v_win))
    gates = torch.rand(*case.q_BSGRK.shape[:4], 3)
    x = LayerInputs(case.q_BSGRK, gates, *(y for one in keys for y in (*one, pos, zero)), g, case.scale, True)
    y = triton.layer_forward(x)
    triton.layer_backward(x, y._replace(mixed_BSGRV=case.dout_BSGRV), None, None, None)

    overlap, sizes = SelectionOverlap(shape, LENGTH, "random", y.idx_BSGN[:, :, 0]), LaunchSizes(shape, LENGTH, "fp32")
    comparisons = {"right": compared(sizes, overlap)}
    for name, (owner, attribute, wrong) in PLANTED.items():
        with patch.object(owner, attribute, wrong):
            comparisons[name] = compared(sizes, overlap)
    print(json.dumps(comparisons))


def compared(sizes: LaunchSizes, overlap: SelectionOverlap) -> dict[str, dict[str, list[float]]]:
    modelled: defaultdict[str, Counter] = defaultdict(Counter)
    for module, about in (
        (range_kernels, (sizes,)),
        (selected_kernels, (sizes, overlap)),
        (index_kernels, (sizes, overlap)),
    ):
        for work in (*module.forward(*about), *module.backward(*about)):
            modelled[work.name].update(
                flops=work.flops, exponentials=work.exponentials, bytes=work.l2_bytes, inner_trips=work.inner_trips,
                tail=0.0 if work.programs is None else tail_of(work.programs.tolist(), UNITS),
            )  # fmt: skip
    assert counted.keys() >= modelled.keys(), (sorted(counted), sorted(modelled))
    figures = "flops", "exponentials", "bytes", "inner_trips", "tail"
    for name, flops in by_program.items():
        counted[name]["tail"] = tail_of([flops[place] for place in sorted(flops)], UNITS)
    return {  # a kernel that is not modelled has no operations and no bytes
        name: {what: [counts[what], modelled[name][what]] for what in figures} for name, counts in counted.items()
    }


entries, trips, query_trips, key_trips, select_tile = (
    SelectionOverlap.entries,
    SelectionOverlap.trips,
    range_kernels.query_tile_trips,
    range_kernels.key_tile_trips,
    range_kernels.select_tile,
)
PLANTED = {
    "values have no columns": (LaunchSizes, "padded", lambda self: (16, 0)),
    "half of the slots are forgotten": (SelectionOverlap, "entries", lambda self: entries(self) // 2),
    "tiles of keys are cut off": (
        range_kernels,
        "query_tile_trips",
        lambda sizes, branch, tiles: (torch.tensor([sizes.rows // tiles.m]), 0),
    ),
    "queries that see a tile are forgotten": (
        range_kernels,
        "key_tile_trips",
        lambda *a: (key_trips(*a)[0] - 1, *key_trips(*a)[1:]),
    ),
    "every tile of keys has masks": (range_kernels, "query_tile_trips", lambda *a: (query_trips(*a)[0], 0)),
    "every tile of queries has masks": (
        range_kernels,
        "key_tile_trips",
        lambda *a: (key_trips(*a)[0], 0, key_trips(*a)[2]),
    ),
    "every tile of readers has masks": (
        SelectionOverlap,
        "masked_trips",
        lambda self, piece, m, *_: trips(self, piece, m)[0],
    ),
    "the first queries start first": (
        range_kernels,
        "query_tile_trips",
        lambda *a: (query_trips(*a)[0].flip(0), query_trips(*a)[1]),
    ),
    "the last keys start first": (
        range_kernels,
        "key_tile_trips",
        lambda *a: (key_trips(*a)[0].flip(1), *key_trips(*a)[1:]),
    ),
    "no step for what earlier blocks give": (range_kernels, "select_tile", lambda sizes: (select_tile(sizes)[0], 0)),
    "readers of a block are rows already": (
        SelectionOverlap,
        "trips",
        lambda self, piece, m, n: trips(self, piece, 3 * m, n),
    ),
    "outputs are mixed without their gates": (
        index_kernels,
        "mix_backward",
        lambda sizes: index_kernels.moves("mix_backward", True, 5 * sizes.outputs_bytes()),
    ),
    "a chunk has half its queries": (index_kernels, "chunk_sizes", lambda n_sel, l_sel: dict(CHUNK=16, LOG=6)),
    "a group's heads are one": (BenchShape, "heads_per_group", 1),
}


if __name__ == "__main__":
    main()
