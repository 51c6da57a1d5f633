"""Launches of a layer's attention on a GPU, and the Python around them, without a GPU."""

import pytest

pytest.importorskip("triton", reason="it is in the dev extra")
import triton

from tools.bench_host_time import CountingKernel, layer_calls, measure, uncompiled_kernels

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="kernels are interpreted, not launched")

LAUNCHES = {"trivial launch": 1, "forward": 10, "forward + backward": 20}
MOST_CALLS = {"forward": 450, "forward + backward": 1090}
"""Functions called, of Python and of C: a tenth more than now. Unlike times they are the same on a busy machine."""


def test_launches_and_function_calls_of_a_layer():
    counting = CountingKernel()
    with uncompiled_kernels("sm_80", lambda name: counting):
        results = {result.name: result for result in measure(counting, layer_calls(), 10)}
    assert {name: result.launches for name, result in results.items()} == LAUNCHES
    assert {name: results[name].calls for name, most in MOST_CALLS.items() if results[name].calls > most} == {}
