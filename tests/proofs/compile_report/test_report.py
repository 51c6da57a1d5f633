"""Compile reports: the Triton kernels compiled for GPUs that are not present must not get worse than the table."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="it is in the dev extra")

from nsa.gpus import ARCHITECTURES as GPUS
from nsa.kernels.triton.tuning import choose
from proofs.compile_report.report import FP32_MODELS, MODELS, CompileReport, jobs
from proofs.compile_report.table import MORE_REGISTERS, TABLE, parse, regressions, render

ROOT = Path(__file__).parents[3]
WRITTEN = parse(TABLE.read_text(encoding="utf-8"))

# Compiling and interpreting exclude each other in one process.
_INSPECT = """
import json, sys
from dataclasses import asdict
from proofs.compile_report.report import FP32_MODELS, MODELS, inspect, jobs
from nsa.kernels.triton.tuning import TileSizes
models = {"bf16": MODELS, "fp32": FP32_MODELS}[sys.argv[2]]
for model, gpu, kernel, tiles in json.loads(sys.argv[1]):
    for job in jobs(models[model], gpu, {kernel: TileSizes(*tiles)} if tiles else None):
        if kernel in ("", job.kernel):
            print(json.dumps(asdict(inspect(job, model, gpu))))
"""

Selection = tuple[str, str, str, tuple[int, ...]]
"""Model, GPU, kernel (empty for all), tiles (empty for the table's)."""


def in_a_process(source: str, *arguments: str) -> str:
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", source, *arguments],
        cwd=ROOT, env=environ, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def inspected(*wanted: Selection, dtype: str = "bf16") -> list[CompileReport]:
    lines = in_a_process(_INSPECT, json.dumps(wanted), dtype).splitlines()
    return [CompileReport.from_json(json.loads(line)) for line in lines]


def test_every_kernel_has_a_row_for_every_gpu_and_model():
    wanted = [(job.kernel, gpu, model) for gpu in GPUS for model in MODELS for job in jobs(MODELS[model], gpu)]
    assert sorted((p.kernel, p.gpu, p.model) for p in WRITTEN) == sorted(wanted)


def test_the_table_is_read_back_as_it_was_written():
    assert render(WRITTEN) == TABLE.read_text(encoding="utf-8")
    odd = replace(WRITTEN[0].code, spilled_bytes=8, vector_spills=3, scalar_spills=2, loops=2, loops_not_pipelined=1)
    report = replace(WRITTEN[0], code=replace(odd, matrix={"HMMA": 4, "HGMMA": 6}))
    assert parse(render([report])) == [report]


@pytest.mark.parametrize(
    "worse",
    [dict(shared_bytes=10**6), dict(registers=512), dict(matrix={"FFMA": 1}), dict(spilled_bytes=8),
     dict(loops_not_pipelined=1)],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_a_build_that_became_worse_is_found(worse):
    same = WRITTEN[0]
    assert regressions(same, WRITTEN) == []
    more = replace(same.code, registers=same.code.registers + MORE_REGISTERS)
    assert regressions(replace(same, code=more), WRITTEN) == []
    assert regressions(replace(same, code=replace(same.code, **worse)), WRITTEN)
    assert regressions(replace(same, kernel="unknown"), WRITTEN)


ON_THE_STACK = {("decode_append", "paper", "gfx942"): 36}
"""Bytes, of scalar registers: it takes the addresses and strides of 30 tensors. Neither tiles nor warps change it."""


@pytest.mark.parametrize("gpu", GPUS)
def test_the_recorded_table_has_no_fault(gpu):
    """Covers the shapes that tiles are chosen for; on AMD scalar registers may move to vector ones. In other shapes a
    few bytes may spill, no more."""
    for p in WRITTEN:
        if p.gpu == gpu and p.faults():
            assert all("spilled" in fault for fault in p.faults()), (p.kernel, p.model, p.faults())
            assert p.code.vector_spills == 0, p
            room = ON_THE_STACK.get((p.kernel, p.model, gpu), 32 if p.model in ("width128", "n_sel32") else 0)
            assert p.code.spilled_bytes <= room, p


def test_a_recorded_spill_is_accepted_and_a_larger_one_is_not():
    spills, more = (replace(WRITTEN[0], code=replace(WRITTEN[0].code, spilled_bytes=n)) for n in (8, 16))
    assert regressions(spills, [spills]) == []
    assert regressions(more, [spills]) == ["16 bytes spilled"]


_WIDE = ("paper", "width128")


def test_hopper_and_blackwell_multiply_with_their_own_units():
    """Covers all but those that have 16 rows or columns to multiply at a time, where the units want 64; in wide rows,
    one of five products in selected_backward has 32."""
    for p in WRITTEN:
        native = {"sm_90": "HGMMA", "sm_100": "UTCHMMA"}.get(p.gpu)
        if native and p.code.loops and not (p.kernel == "select" or p.kernel.startswith("decode")):
            older = {"HMMA"} if p.kernel == "selected_backward" and p.model in _WIDE else set()
            assert set(p.code.matrix) == {native} | older, p


def test_the_machine_code_of_a_sample_is_as_good_as_written():
    for report in inspected(("paper", "sm_90", "range_dkv", ())):  # CI compares sm_80 in a step of its own
        assert regressions(report, WRITTEN) == [], f"{report}: if it is meant, python -m proofs.compile_report.write"


@pytest.mark.nightly
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("gpu", GPUS)
def test_the_machine_code_is_as_good_as_written(model, gpu):
    for report in inspected((model, gpu, "", ())):
        assert regressions(report, WRITTEN) == [], f"{report}: if it is meant, python -m proofs.compile_report.write"


def assert_fits(report: CompileReport) -> None:
    """Require that an fp32 kernel can be launched and spills next to nothing."""
    assert report.code.shared_bytes <= GPUS[report.gpu].shared_limit, report
    assert report.code.spilled_bytes <= 64, report


@pytest.mark.nightly  # with all others of fp32
def test_fp32_fits():
    """The kernels that take the most shared memory, at the widest rows."""
    sample = [
        ("paper", "sm_80", "selected_backward", ()),
        ("128", "sm_86", "selected_forward", ()),
        ("paper", "gfx942", "range_dkv", ()),
    ]
    for report in inspected(*sample, dtype="fp32"):
        assert_fits(report)


@pytest.mark.nightly
def test_tiles_of_half_precision_do_not_fit_in_fp32():
    """Shows why `choose` asks for the size of an element."""
    tiles = choose("selected_forward", 128, "sm_80")
    (report,) = inspected(("128", "sm_80", "selected_forward", tiles), dtype="fp32")
    with pytest.raises(AssertionError, match="spilled_bytes"):
        assert_fits(report)


@pytest.mark.nightly
@pytest.mark.parametrize("model", FP32_MODELS)
@pytest.mark.parametrize("gpu", GPUS)
def test_fp32_fits_everywhere(model, gpu):
    for report in inspected((model, gpu, "", ()), dtype="fp32"):
        assert_fits(report)


@pytest.mark.nightly  # compiles two kernels; a kernel with another fault is compiled for every change
def test_a_tile_too_large_is_a_fault():
    spills, too_much = inspected(
        ("base", "sm_90", "range_forward", (256, 64, 4, 3)), ("base", "sm_86", "range_forward", (16, 256, 4, 3))
    )
    assert any("bytes spilled" in fault for fault in spills.faults())
    assert any("bytes of shared memory, the limit is 101376" in fault for fault in too_much.faults())


# The loop over keys of range_forward with a branch around the load of the keys.
_BRANCH = """
import sys
from dataclasses import replace
from pathlib import Path
import importlib.util
from nsa.kernels.triton import range_attention
from proofs.compile_report.report import GPUS, MODELS, compile_for, jobs
from proofs.compile_report.machine_code import read
source = Path(range_attention.__file__).read_text()
load = "s, _, _ = dot_rows(q1, q2, k, k_at, inside, K, K1, K2, WIDE)"
assert source.count(load) == 1
branch = f"s = tl.zeros([q1.shape[0], BLOCK_N], tl.float32)\\n    if n != 7:\\n        {load}"
file = Path(sys.argv[1])
file.write_text(source.replace(load, branch))
spec = importlib.util.spec_from_file_location("mutated", file)
mutated = importlib.util.module_from_spec(spec)
spec.loader.exec_module(mutated)
(job,) = (job for job in jobs(MODELS["base"], "sm_80") if job.kernel == "range_forward")
job = replace(job, function=mutated.range_forward_kernel)
print(*read(compile_for(job, GPUS["sm_80"]), GPUS["sm_80"]).faults(GPUS["sm_80"]), sep="\\n")
"""


def test_a_branch_around_the_load_of_keys_is_a_fault(tmp_path):
    faults = in_a_process(_BRANCH, str(tmp_path / "mutated.py"))
    assert "2 of 2 loops wait for their tiles" in faults
