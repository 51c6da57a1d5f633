"""Launches and host time of a layer's attention on a GPU, without one. A trivial launch is the unit of time."""

import pytest

pytest.importorskip("triton", reason="it is in the dev extra")
import triton

from tools.bench_host_time import CountingKernel, layer_calls, measure, uncompiled_kernels

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="kernels are interpreted, not launched")

LAUNCHES = {"trivial launch": 1, "forward": 13, "forward + backward": 33}
MOST_TRIVIAL_LAUNCHES = {"forward": 70, "forward + backward": 280}
"""More than twice what is measured: both are minima of CPU time, whose ratio a busy machine hardly changes."""


def test_launches_and_host_time_of_a_layer():
    counting = CountingKernel()
    with uncompiled_kernels("sm_80", lambda name: counting):
        results = {result.name: result for result in measure(counting, layer_calls(), 100)}
    assert {name: result.launches for name, result in results.items()} == LAUNCHES
    slow = [str(results[name]) for name, most in MOST_TRIVIAL_LAUNCHES.items() if results[name].trivial_launches > most]
    assert slow == []
