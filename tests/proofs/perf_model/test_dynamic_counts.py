"""Modelled iterations with and without masks are those that the compiled kernels execute in the emulator."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="it is in the dev extra")
import triton

from nsa.bench.case import SHAPES
from nsa.check.cases import KernelCase
from proofs.perf_model import range_kernels, selected_kernels
from proofs.perf_model.selection_overlap import SelectionOverlap
from proofs.perf_model.work import KernelWork, LaunchSizes
from proofs.ptx_emulator.counts import LoopCounts, loops_executed
from proofs.ptx_emulator.driver import EmulatorDriver, emulated

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="kernels are interpreted, not compiled")
BASE = SHAPES["base"]
SHAPE = replace(BASE, n_heads=6, n_kv_groups=1, geometry=replace(BASE.geometry, w=150, n_sel=4))
SIZES = LaunchSizes(SHAPE, 230, "bf16", "sm_80")
CPU = torch.device("cpu")


def main_loops(driver: EmulatorDriver, kernel: str) -> list[LoopCounts]:
    (machine,) = (machine for (name, _), machine in driver.machines.items() if name == f"{kernel}_kernel")
    return [loop for loop in loops_executed(machine) if loop.opcodes["ex2.approx.ftz.f32"] > 2]


def check(driver: EmulatorDriver, *modelled: KernelWork) -> None:
    for work in modelled:
        loops = main_loops(driver, work.name.split()[0])
        if len(loops) == 1:
            assert loops[0].trips == work.trips
            continue
        masked, inner = loops
        assert (masked.trips, inner.trips) == (work.trips - work.inner_trips, work.inner_trips)
        assert masked.trips > 0
        assert inner.trips > 0
        assert inner.opcodes.total() < 0.9 * masked.opcodes.total()
        products = [n for opcode, n in inner.opcodes.items() if opcode.startswith("mma.sync")]
        assert sum(products) * 16 * 8 * 16 * 2 * work.trips == work.flops


def test_range_kernels():
    call = KernelCase(SHAPE.kernel, ((0, SIZES.length),)).call(torch.bfloat16)
    with emulated("sm_80") as driver:
        call.by_kernel("triton", "sliding", CPU)
        modelled = (range_kernels.range_forward, range_kernels.range_dq, range_kernels.range_dkv)
        check(driver, *(work(SIZES, "sliding") for work in modelled))


@pytest.mark.nightly  # the emulator takes twice as long as for the kernels above
def test_selected_kernels():
    call = KernelCase(SHAPE.kernel, ((0, SIZES.length),)).call(torch.bfloat16)
    overlap = SelectionOverlap(SHAPE, SIZES.length, "random", call.idx_BSGN[:, :, 0])
    with emulated("sm_80") as driver:
        call.by_kernel("triton", "selected", CPU)
        check(
            driver,
            selected_kernels.selected_forward(SIZES, overlap),
            selected_kernels.selected_backward(SIZES, overlap),
        )
