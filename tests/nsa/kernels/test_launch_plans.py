"""Launch plans: repeated launches are those of the launcher's Python, for the inputs at hand."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="it is in the dev extra")
import triton

from nsa.kernels.triton import selected
from nsa.kernels.triton.launch import unplanned
from nsa.kernels.triton.mix import mix_forward
from proofs.ptx_emulator.driver import emulated
from tools.bench_host_time import CountingKernel, layer_calls, uncompiled_kernels

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="nothing is compiled, so nothing is planned")
GPU = "sm_80"
Launches = list[tuple[Any, ...]]


class LaunchLog(CountingKernel):
    """Keeps what kernels were launched with, so that no two tensors of a call have the same address."""

    def __init__(self, name: str, log: Launches) -> None:
        super().__init__(name)
        self.log = log

    def _count(self, *arguments: Any) -> None:
        self.log.append((self.name, arguments[:3], arguments[9:]))


def launches_of(call: Any, log: Launches) -> Launches:
    """Kernel, grid and arguments of each launch of a call."""
    log.clear()
    call()
    return list(log)


def compare(launches: Launches, plain: Launches) -> None:
    """Require equal kernels, grids and values, and equal addresses up to their names. Two tensors have one address only
    if the last launch with one is before the first launch with the other."""
    names: dict[int, int] = {}
    ranges: dict[int, list[int]] = {}
    assert [x[:2] for x in launches] == [x[:2] for x in plain]
    for number, ((_, _, values), (_, _, expected)) in enumerate(zip(launches, plain, strict=True)):
        for x, y in zip(values, expected, strict=True):
            if not isinstance(y, Tensor):
                assert x == y
                continue
            address = x.data_ptr() if isinstance(x, Tensor) else x
            assert names.setdefault(y.data_ptr(), address) == address
            _, _, first, _ = ranges.setdefault(y.data_ptr(), [0, 0, number, number])
            ranges[y.data_ptr()] = [address, address + (0 if isinstance(x, Tensor) else y.nbytes), first, number]
    for (begin, end, first, last), other in itertools.combinations(ranges.values(), 2):
        if begin < other[1] and other[0] < end:
            assert last < other[2] or other[3] < first


@pytest.mark.parametrize("n_spans", [1, 2])
def test_repeated_launches_are_those_of_the_python(n_spans, monkeypatch):
    if n_spans > 1:
        monkeypatch.setattr(selected, "SLOT_BYTES", 1)
        monkeypatch.setattr(selected, "QUERIES_OF_SLOTS", 0)
    log: Launches = []
    with uncompiled_kernels(GPU, lambda name: LaunchLog(name, log)):
        calls = layer_calls()
        with unplanned():
            forward = len(launches_of(calls["forward"], log))
            plain = launches_of(calls["forward + backward"], log)
        every = [launches_of(calls["forward + backward"], log) for _ in range(4)]
    assert len(plain) >= 2 * forward > 10
    assert [name for name, *_ in plain].count("merge_slots_kernel") == n_spans
    for launches in every:  # addresses of a pass that is over are used again
        compare(launches[:forward], plain[:forward])
        compare(launches[forward:], plain[forward:])


def test_inputs_of_another_form_have_a_plan_of_their_own():
    log: Launches = []
    with uncompiled_kernels(GPU, lambda name: LaunchLog(name, log)):
        for length in (32, 48, 32, 48, 32, 48):
            rows = [torch.zeros(1, length, 2, 3, 64, dtype=torch.bfloat16) for _ in range(3)]
            out = mix_forward(torch.zeros(1, length, 2, 3, 3), *rows)
            assert out.shape == rows[0].shape
            mixed = log[-1][2][4]
            assert (mixed.data_ptr(), mixed.shape) == (out.data_ptr(), out.shape)
        aliased = mix_forward(torch.zeros(1, 32, 2, 3, 3), rows[0][:, :32], rows[0][:, :32], rows[1][:, :32])
        assert aliased.shape == (1, 32, 2, 3, 64)
        assert log[-1][2][1].data_ptr() == log[-1][2][2].data_ptr()


@pytest.mark.nightly  # compiles two kernels and emulates them: a minute
def test_a_plan_computes_what_the_launcher_computes():
    generator = torch.Generator().manual_seed(0)
    with emulated(GPU):
        results = []
        for _ in range(2):
            gates = torch.rand(1, 5, 2, 3, 3, generator=generator)
            rows = [torch.randn(1, 5, 2, 3, 64, generator=generator).half() for _ in range(3)]
            results.append((gates, rows, [mix_forward(gates, *rows) for _ in range(4)]))
    for gates, rows, outs in results:
        expected = sum(gates[..., i, None] * rows[i].float() for i in range(3)).half()
        assert all(torch.equal(out, outs[0]) for out in outs)
        torch.testing.assert_close(outs[0], expected)
