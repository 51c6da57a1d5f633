import subprocess
import sys

import pytest

from nsa.gpus import ARCHITECTURES, GPUS, find_gpu


def test_every_gpu_has_an_architecture_that_kernels_are_compiled_for():
    assert {gpu.architecture for gpu in GPUS.values()} == set(ARCHITECTURES)
    for name, architecture in ARCHITECTURES.items():
        assert name == (architecture.arch if architecture.backend == "hip" else f"sm_{architecture.arch}")
        assert architecture.shared_limit <= architecture.shared_per_unit


@pytest.mark.parametrize(
    ("driver_name", "memory_gib", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", 79.2, "a100-80gb"),
        ("NVIDIA A10", 22.1, "a10"),
        ("NVIDIA A10G", 22.1, "a10"),
        ("NVIDIA L40S", 44.4, "l40s"),
        ("NVIDIA L4", 22.0, "l4"),
        ("NVIDIA RTX A6000", 47.5, "rtxa6000"),
        ("NVIDIA GeForce RTX 4090", 23.6, "rtx4090"),
        ("NVIDIA GB200", 184.0, "b200"),
        ("AMD Instinct MI300X", 191.5, "mi300x"),
    ],
)
def test_a_driver_s_name_finds_the_gpu(driver_name, memory_gib, name):
    gpu = find_gpu(driver_name, memory_gib)
    assert gpu is not None
    assert gpu.name == name


def test_an_unknown_gpu_is_not_guessed():
    assert find_gpu("Tesla T4", 15.0) is None


def test_it_needs_no_torch():
    code = "import sys, nsa.gpus; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
