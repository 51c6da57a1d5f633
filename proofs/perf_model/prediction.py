"""Predicted time of an attention layer: each kernel takes its slowest bound, and kernels run one after the other."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from heapq import heapreplace
from typing import Any

from nsa.bench.case import SHAPES, BenchShape
from nsa.errors import ConfigError
from proofs.perf_model import index_kernels, range_kernels, selected_kernels, torch_ops
from proofs.perf_model.dense import dense_s, serial_s, stretch
from proofs.perf_model.gpus import (
    EXPONENTIALS_PER_CLOCK,
    LAUNCH_S,
    SCAN_S,
    SCHEDULERS,
    SORT_CLOCKS,
    GpuModel,
    MeasuredTerms,
    gpu_named,
)
from proofs.perf_model.group_centric import group_centric_forward
from proofs.perf_model.instruction_counts import InstructionCounts, count_instructions
from proofs.perf_model.selection_overlap import SelectionOverlap, measure_overlap
from proofs.perf_model.work import KernelWork, LaunchSizes

SELECTED = ("selected_forward", "merge_slots", "sort_chunks", "place_chunks", "place_windows", "fill")
MODELLED = "modelled"
"""Label of every output: nothing was run on a GPU."""
HOST_TIME = "host time not included"
"""Beside every ratio, unless an archive of the GPU check says what the host takes."""


@dataclass(frozen=True)
class KernelPrediction:
    """One kernel, or one group of torch operations, with the time of each of its bounds."""

    name: str
    backward: bool
    seconds: float
    bound: str
    flops: float
    hbm_bytes: float
    l2_bytes: float
    exponentials: float
    launches: int
    bounds_s: dict[str, float]
    tail: float = 1.0
    """What arithmetic and instructions were multiplied by: see `tail_of`."""


@dataclass(frozen=True)
class LayerPrediction:
    """Modelled times of one attention layer, batch 1, without projections, as `nsa bench attention` would time it."""

    gpu: str
    shape: BenchShape
    length: int
    dtype: str
    backward: bool
    """Whether backward is in it, after forward."""
    data: str
    triton_slowdown: float
    kernels: list[KernelPrediction]
    dense_seconds: float
    group_centric: KernelPrediction
    host_seconds: float = 0.0
    """Measured on the host of this GPU; the device waits where it is the longer. 0: not included."""
    label: str = MODELLED

    @property
    def seconds(self) -> float:
        return max(self.host_seconds, sum(kernel.seconds for kernel in self.kernels))

    @property
    def ratio(self) -> float:
        """Speed-up over dense."""
        return self.dense_seconds / self.seconds

    def ratio_with_host(self, host_s: float) -> float:
        """Speed-up over dense if the host needs so long to launch a layer: the device waits where that is longer."""
        return self.dense_seconds / max(host_s, self.seconds)

    @property
    def selected_seconds(self) -> float:
        """Our selected forward with the index it needs."""
        return sum(kernel.seconds for kernel in self.kernels if kernel.name in SELECTED and not kernel.backward)

    @property
    def selected_ratio(self) -> float:
        """Speed-up over the paper's loop."""
        return self.group_centric.seconds / self.selected_seconds

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {
            "seconds": self.seconds, "ratio": self.ratio, "selected_ratio": self.selected_ratio,
        }  # fmt: skip


def launch_name(kernel: str) -> str:
    """The name under which a profiler shows a kernel of the model; `torch` for operations of PyTorch."""
    return "torch" if kernel.endswith(", torch") else kernel.split()[0]


def by_launch_name(prediction: LayerPrediction, rounded: Callable[[float], float] = float) -> dict[str, float]:
    """Seconds of all kernels that a profiler shows under one name."""
    seconds: dict[str, float] = {}
    for kernel in prediction.kernels:
        name = launch_name(kernel.name)
        seconds[name] = seconds.get(name, 0.0) + kernel.seconds
    return {name: rounded(took) for name, took in seconds.items()}


Instructions = Callable[[str, BenchShape, str], InstructionCounts | None]


def predict(
    gpu: str | GpuModel,
    shape: BenchShape,
    length: int,
    dtype: str = "bf16",
    backward: bool = False,
    overlap: SelectionOverlap | None = None,
    data: str = "random",
    as_triton: bool = False,
    launch_s: float = LAUNCH_S,
    instructions: Instructions = count_instructions,
    measured: MeasuredTerms | None = None,
) -> LayerPrediction:
    """Seconds of our Triton kernels and of dense attention, modelled from the kernels' own loops.

    `overlap`: result of `measure_overlap`; None: measured here, on `data`. `as_triton`: scale our arithmetic by how
    much slower Triton attention was than published dense attention on that GPU; otherwise it is assumed equal.
    `measured` replaces it and `launch_s`, and adds tails and host time.
    """
    machine = gpu_named(gpu) if isinstance(gpu, str) else gpu
    sizes = LaunchSizes(shape, length, dtype, machine.device.architecture)
    overlap = overlap or measure_overlap(shape, length, data)
    if (overlap.shape, overlap.length) != (shape, length):
        raise ConfigError(
            f"the selection was measured at {overlap.length} tokens, {overlap.shape.describe()}, and the "
            f"prediction is for {length}, {shape.describe()}: it depends on both. Measure it for this case."
        )
    slowdown = machine.published.triton_slowdown if as_triton else 1.0
    if measured is not None:
        slowdown, launch_s = measured.triton_share, 0.0

    def timed(work: KernelWork) -> KernelPrediction:
        kind = work.name.split()[0]
        counted = instructions(kind, shape, machine.device.architecture) if work.trips and dtype == "bf16" else None
        return time_of(machine, dtype, work, counted, slowdown, launch_s)

    work = [*range_kernels.forward(sizes), *selected_kernels.forward(sizes, overlap),
            *index_kernels.forward(sizes, overlap)]  # fmt: skip
    dense = dense_s(machine, sizes, False)
    if backward:
        work += [*range_kernels.backward(sizes), *selected_kernels.backward(sizes, overlap),
                 *index_kernels.backward(sizes, overlap), *torch_ops.backward(sizes)]  # fmt: skip
        dense += dense_s(machine, sizes, True)
    parts = [timed(part) for part in work]
    baseline = time_of(machine, dtype, group_centric_forward(sizes), None, slowdown, launch_s)
    host_s, layer = 0.0, layer_name(shape)
    if measured is not None:
        parts = with_tails(parts, measured, layer, length)
        dense *= measured.dense_share.get(backward, 1.0)
        host_s = measured.host_s.get((layer, backward), 0.0)
    return LayerPrediction(
        machine.name, shape, length, dtype, backward, overlap.data, slowdown, parts, dense, baseline, host_s
    )


def layer_name(shape: BenchShape) -> str:
    return next((name for name, each in SHAPES.items() if each == shape), "base")


def with_tails(
    kernels: list[KernelPrediction], measured: MeasuredTerms, layer: str, length: int
) -> list[KernelPrediction]:
    """Each kernel with its share of the tail measured under its launch name, and the gaps after its launches."""
    counts = Counter(launch_name(kernel.name) for kernel in kernels)
    return [
        replace(kernel, seconds=kernel.seconds + kernel.launches * measured.gap_s
                + measured.tail_s(layer, name, length) / counts[name])
        for kernel in kernels for name in [launch_name(kernel.name)]
    ]  # fmt: skip


def time_of(
    gpu: GpuModel,
    dtype: str,
    work: KernelWork,
    counted: InstructionCounts | None,
    slowdown: float = 1.0,
    launch_s: float = LAUNCH_S,
) -> KernelPrediction:
    """The slowest of: arithmetic and instructions, with the tail of the grid, memory, cache, launches, and torch's
    sorts and scans."""
    tail = 1.0 if work.programs is None else tail_of(work.programs.tolist(), gpu.clock.units)
    hmma_flops = counted.hmma_flops * work.trips if counted else 0
    flops = max(work.flops, float(hmma_flops))
    missed = max(0.0, 1 - gpu.clock.l2_bytes / work.shared_bytes) if work.shared_bytes else 0.0
    hbm_bytes = work.hbm_bytes + missed * max(0.0, work.l2_bytes - work.hbm_bytes)
    arithmetic = tail * slowdown * stretch(gpu, work.backward) * serial_s(gpu, dtype, flops, work.exponentials)
    products_lead = flops / gpu.flops_per_s(dtype) >= work.exponentials / (
        EXPONENTIALS_PER_CLOCK * gpu.unit_clocks_per_s
    )
    bounds = {
        "tensor cores" if products_lead else "exponentials": arithmetic,
        "instructions": tail * counted.of(work) / (SCHEDULERS * gpu.unit_clocks_per_s) if counted else 0.0,
        "memory": hbm_bytes / gpu.memory_bytes_per_s,
        "L2": work.l2_bytes / gpu.cache_bytes_per_s,
        "launch": work.launches * launch_s,
        "sort": work.sorted_keys * SORT_CLOCKS / gpu.unit_clocks_per_s,
        "scan": work.scanned * SCAN_S,
    }
    bound = max(bounds, key=lambda name: bounds[name])
    return KernelPrediction(
        work.name, work.backward, bounds[bound], bound, flops, hbm_bytes, work.l2_bytes, work.exponentials,
        work.launches, bounds, tail,
    )  # fmt: skip


def tail_of(programs: Sequence[float], units: int) -> float:
    """Time of programs that start in this order, each where a unit is free first, over the time of as many units that
    share all work evenly. One program at a time keeps a unit busy."""
    free = [0.0] * units
    for work in programs:
        heapreplace(free, free[0] + work)
    return max(free) * units / sum(programs) if sum(programs) else 1.0
