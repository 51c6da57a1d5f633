"""Number of Python functions between a layer and its kernels."""

import os
import subprocess
import sys

import pytest

from tools.call_depth import ROOT, c_calls, measure

MOST_TO_C, MOST_TO_TRITON = 6, 8
ATTENTION_KERNELS = ("range_forward", "select", "selected_forward", "merge_slots", "mix_forward", "decode")
"""The others prepare indices for these."""


def test_calls_into_the_library_have_few_functions_before_them():
    passes = measure("cpu", c_calls)
    assert {name: set(calls) for name, calls in passes.items()} == {
        "no cache": {"nsa_choose", "nsa_forward", "nsa_mix"},
        "prompt": {"nsa_choose", "nsa_forward", "nsa_mix"},
        "decode step": {"nsa_append", "nsa_decode"},
    }
    long = [functions for calls in passes.values() for functions in calls.values() if len(functions) > MOST_TO_C]
    assert long == []


@pytest.mark.nightly
def test_launches_of_attention_kernels_have_few_functions_before_them():
    pytest.importorskip("triton", reason="it is in the dev extra")
    done = subprocess.run(
        [sys.executable, "-m", "tools.call_depth"],
        cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    launches = {line[21:].split()[0]: line.count("→") + 1 for line in done.stdout.splitlines() if line[:6] == "triton"}
    attention = {kernel: depth for kernel, depth in launches.items() if kernel.startswith(ATTENTION_KERNELS)}
    assert len(attention) >= 8
    assert {kernel: depth for kernel, depth in attention.items() if depth > MOST_TO_TRITON} == {}
