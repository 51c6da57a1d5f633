"""One layer, forward and backward: memory above its inputs, measured in a process of its own."""

import subprocess
import sys

import pytest

MEASURE = """
import resource, sys, torch
from nsa.core.nsa_attention import NSAAttention

def peak_gib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20

torch.manual_seed(0)
length = int(sys.argv[1])
module = NSAAttention(768, 12, 2, 64, 64)
warm = torch.randn(1, 256, 768, requires_grad=True)
module(warm).sum().backward()
x = torch.randn(1, length, 768, requires_grad=True)
before = peak_gib()
module(x).sum().backward()
print(peak_gib() - before)
"""


def peak_gib(length: int) -> float:
    done = subprocess.run([sys.executable, "-c", MEASURE, str(length)], capture_output=True, text=True, check=True)
    return float(done.stdout)


def test_memory_is_linear_and_small_at_4k():
    """All scores of 4,096 tokens would take 0.75 GiB in fp32; a layer stays far below that and grows with length."""
    assert peak_gib(4096) < 0.5


@pytest.mark.nightly
def test_32k_tokens_need_less_than_4_gib():
    assert peak_gib(32_768) < 4
