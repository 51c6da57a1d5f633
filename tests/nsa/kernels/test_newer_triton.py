"""The Triton backend with a newer Triton than the pinned one, which is what torch's GPU wheel requires."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from proofs import import_path

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[3]
NEWER = ("3.8.0",)

# Every kernel of the base shape, compiled for one GPU. A report's faults are spills, shared memory above the limit and
# loops that wait for their tiles; a newer compiler may spill a few registers more or less than the pinned one.
_COMPILE = """
import sys, triton
from proofs.compile_report.report import GPUS, MODELS, inspect, jobs
assert triton.__version__ == sys.argv[2], triton.__version__
for job in jobs(MODELS["base"], sys.argv[1]):
    code = inspect(job, "base", sys.argv[1]).code
    assert code.shared_bytes <= GPUS[sys.argv[1]].shared_limit, (job.kernel, code)
    assert code.spilled_bytes <= 64 and not code.loops_not_pipelined, (job.kernel, code)
    print(job.kernel)
"""


@pytest.fixture(scope="module", params=NEWER)
def newer_triton(request, tmp_path_factory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("triton")
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder)]
    subprocess.run([*install, f"triton=={request.param}"], check=True, env={**os.environ, "PIP_CONSTRAINT": ""})
    return request.param, folder


def run_with(triton: tuple[str, Path], *arguments: str, **environ: str) -> str:
    path = os.pathsep.join([str(triton[1]), import_path()])
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, **environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def test_kernels_are_right_in_its_interpreter(newer_triton):
    version = "import triton; print(triton.__version__)"
    assert run_with(newer_triton, "-c", version).strip() == newer_triton[0]
    tests = [
        "tests/nsa/kernels/test_triton.py",
        "tests/nsa/kernels/test_triton_decode.py",
        "tests/nsa/kernels/test_mix.py",
    ]
    run_with(newer_triton, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests, TRITON_INTERPRET="1")


@pytest.mark.parametrize("gpu", ["sm_80", "sm_90"])
def test_kernels_compile(newer_triton, gpu):
    compiled = run_with(newer_triton, "-c", _COMPILE, gpu, newer_triton[0], TRITON_INTERPRET="0").split()
    assert {"range_forward", "range_dkv", "selected_backward", "select", "decode_raw"} <= set(compiled)
