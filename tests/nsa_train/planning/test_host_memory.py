"""The memory of a machine is what the kernel and the control groups of a container leave of it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nsa_train.planning.hardware import GIB, HostMemory, host_memory, process_memory

MEMINFO = "MemTotal:       16777216 kB\nMemFree:  1 kB\nMemAvailable:    8388608 kB\nHugePages_Total: 0\n"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def machine(tmp_path):
    """/proc and /sys/fs/cgroup of a machine with 16 GiB, half of them available."""
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    write(proc / "meminfo", MEMINFO)

    def look(cgroup: str = "", **files: str) -> HostMemory:
        write(proc / "self" / "cgroup", cgroup)
        for name, text in files.items():
            write(cgroups / name.replace("__", "/").replace("_DOT_", "."), text)
        return host_memory(proc, cgroups)

    return look


def test_without_a_limit_it_is_the_machines(machine):
    assert machine() == HostMemory(16 * GIB, 8 * GIB)
    assert machine("0::/job\n", job__memory_DOT_max="max\n", job__memory_DOT_current="5\n").available == 8 * GIB


def test_a_limit_of_the_group_or_of_one_above_it_counts(machine):
    files = {
        "job__memory_DOT_max": f"{4 * GIB}\n",
        "job__memory_DOT_current": f"{2 * GIB}\n",
        "job__memory_DOT_stat": f"anon 7\ninactive_file {GIB}\n",
        "job__step__memory_DOT_max": "max\n",
        "job__step__memory_DOT_current": "1\n",
    }
    assert machine("0::/job/step\n", **files) == HostMemory(4 * GIB, 3 * GIB)


def test_version_one_counts_too(machine):
    files = {
        "memory__job__memory_DOT_limit_in_bytes": f"{2 * GIB}\n",
        "memory__job__memory_DOT_usage_in_bytes": f"{GIB}\n",
        "memory__memory_DOT_limit_in_bytes": "9223372036854771712\n",
    }
    assert machine("3:cpu:/\n4:memory:/job\n", **files) == HostMemory(2 * GIB, GIB)


def test_a_process_counts_with_its_children():
    code = "import subprocess, sys; x = bytearray(64 << 20); subprocess.run([sys.executable, '-c', sys.argv[1]])"
    inner = "x = bytearray(64 << 20); print('ready', flush=True); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, inner], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout.readline() == "ready\n"
        assert 128 << 20 < process_memory(process.pid) < 192 << 20
        process.stdin.close()
    assert process_memory(process.pid) == 0
    assert host_memory().available <= host_memory().total <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_without_proc_it_is_what_is_installed(tmp_path):
    memory = host_memory(tmp_path, tmp_path)
    assert memory.total == memory.available > 0
