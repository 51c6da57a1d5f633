"""GPU check, rehearsed on a CPU: correct kernels hold, planted bugs fail exactly their rows."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import zipfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nsa.bench import machine as devices
from nsa.bench.case import SHAPES, BenchTask
from nsa.check import kernel_checks
from nsa.check.cases import on_gpu, rehearsal
from nsa.check.comparison import CheckResult, CheckStatus, blocks_error, bounded
from nsa.check.gpu_check import SUBJECTS, GpuCheckRequest, GpuCheckRunner
from nsa.check.gpu_check_report import PAGE, GpuCheck, GpuCheckReport, MeasuredTable, read_report
from nsa.check.timing_checks import modelled
from nsa.errors import ConfigError
from nsa.kernels import flash, ops, portable
from nsa.kernels.gpu_versions import device_named
from nsa.kernels.precision import autocast_off
from proofs import import_path

ROOT = Path(__file__).parents[3]
SIZES = on_gpu(torch.device("cuda"), full=True)

pytest.importorskip("triton", reason="it is in the dev extra")


def command(*words: str, root: Path = ROOT) -> subprocess.Popen[str]:
    environ = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    environ |= {"PYTHONPATH": f"{import_path(root)}:{import_path()}", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "nsa_train.cli", "gpu-check", *words], cwd=root, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, env=environ,
    )  # fmt: skip


def rehearsed(out: Path, *words: str, root: Path = ROOT) -> tuple[int, dict, str]:
    """Exit code, record and what was printed."""
    out.mkdir(exist_ok=True)
    running = command("--rehearse", "--bundle", str(out / "rehearsal.zip"), *words, root=root)
    output, _ = running.communicate(timeout=580)
    assert (out / "rehearsal.zip").exists(), output
    return running.returncode, read_report(out / "rehearsal.zip"), output


def page_of(archive: Path) -> str:
    with zipfile.ZipFile(archive) as files:
        return files.read(PAGE).decode()


def claims(record: dict, verdict: CheckStatus) -> set[str]:
    return {f"{row['subject']}: {row['claim']}" for row in record["rows"] if row["verdict"] == verdict}


def planted(tmp_path: Path, **bugs: str) -> Path:
    """A copy of the package whose launchers (module name → code) are followed by other ones."""
    shutil.copytree(
        ROOT / "packages/nsa-attention/nsa", tmp_path / "copy" / "nsa", ignore=shutil.ignore_patterns("__pycache__")
    )
    for module, code in bugs.items():
        with (tmp_path / "copy" / "nsa" / "kernels" / "triton" / f"{module}.py").open("a") as file:
            file.write(textwrap.dedent(code))
    return tmp_path / "copy"


@pytest.mark.nightly  # parts of it run in the tests below
@pytest.mark.timeout(600)
def test_every_row_holds_in_the_rehearsal_and_what_needs_a_gpu_says_so(tmp_path):
    code, record, output = rehearsed(tmp_path, "--full")
    assert claims(record, CheckStatus.FAILS) == set(), output
    assert code == 0
    assert {row["subject"] for row in record["rows"]} == set(SUBJECTS)
    waiting = claims(record, CheckStatus.NEEDS_GPU)
    for what in ("GPU, capability", "second stream", "second device", "make the host wait", "replayed step"):
        assert any(what in claim for claim in waiting), what
        assert not any(what in claim for claim in claims(record, CheckStatus.HOLDS)), what
    for row in record["rows"]:
        if row["verdict"] == CheckStatus.HOLDS and row["limit"] is not None:
            assert row["measured"] <= row["limit"]
    page = page_of(tmp_path / "rehearsal.zip")
    assert page.startswith("# REHEARSAL")
    assert "nsa gpu-check --full --rehearse" in page
    for table in ("| triton |", "| trivial launch |", "| layer rehearsal, fwd+bwd", "| nsa model of "):
        assert table in page, table


def test_autocast_inside_a_kernel_turns_its_rows_red(monkeypatch):
    (check,) = (c for c in GpuCheckRequest(rehearse=True, only=("autocast",)).checks() if "portable" in c.name)
    assert {row.verdict for row in check.run()} == {CheckStatus.HOLDS}

    def backward(x, *rest):  # where the dtypes that autocast makes would not even fit together
        with nullcontext() if x.branch != "selected" else autocast_off(x.q_BSGRK):
            return right(x, *rest)

    right = portable.attend_backward
    monkeypatch.setattr(portable, "attend_backward", backward)
    monkeypatch.setattr(ops, "autocast_off", lambda x: nullcontext())
    assert next(iter(check.run())).verdict is CheckStatus.FAILS


def test_sizes_that_do_not_fit_are_a_row_of_their_own(monkeypatch):
    from triton.runtime.errors import OutOfResources

    def too_large(*arguments, **options):
        raise OutOfResources(2, 1, "shared memory")

    (check,) = (c for c in GpuCheckRequest(rehearse=True, only=("parity",)).checks() if c.name == "selected, bf16")
    monkeypatch.setattr(kernel_checks, "parts", too_large)
    *unchecked, row = check.run()
    assert {each.verdict for each in (*unchecked, row)} == {CheckStatus.FAILS}
    assert "out of resource: shared memory" in row.note


# For every change the test above; wrong windows are in test_kernel_checks.py, dying children in test_child_process.py.
@pytest.mark.nightly
def test_a_wrong_window_a_crash_and_a_kernel_that_does_not_fit_turn_their_rows_red_and_the_rest_goes_on(tmp_path):
    root = planted(
        tmp_path,
        range_attention="""
            from dataclasses import replace
            _right = key_bounds

            def key_bounds(*every):
                return _right(*(x._replace(geometry=replace(x.geometry, w=x.geometry.w + 1)) for x in every))
        """,
        selected="""
            from triton.runtime.errors import OutOfResources
            _selected = selected_forward

            def selected_forward(x):
                if x.q_BSGRK.dtype == torch.bfloat16:
                    raise OutOfResources(2, 1, "shared memory")
                return _selected(x)
        """,
        selection="""
            import os
            _both = compressed_and_select

            def compressed_and_select(x):
                if x.q_BSGRK.dtype == torch.float16:
                    os.abort()
                return _both(x)
        """,
    )
    code, record, output = rehearsed(tmp_path / "out", "--only", "parity", root=root)
    wrong = [claim.removeprefix("parity: ") for claim in claims(record, CheckStatus.FAILS)]
    assert sorted(", ".join(claim.split(", ")[:2]) for claim in wrong) == sorted([
        *(f"sliding {what}, {dtype}" for what in ("output", "gradients") for dtype in ("fp32", "fp16", "bf16")),
        "selected output, bf16", "selected gradients, bf16", "selected, bf16", "compressed and select, fp16",
    ]), output  # fmt: skip
    notes = {row["claim"]: row["note"] for row in record["rows"]}
    assert "SIGABRT" in notes["compressed and select, fp16"]
    assert "out of resource: shared memory" in notes["selected, bf16, sizes that do not fit on the GPU"]
    assert any("compressed gradients, bf16" in claim for claim in claims(record, CheckStatus.HOLDS)), "nothing after it"
    assert code == 1


@pytest.mark.nightly
def test_a_look_ahead_and_a_random_gradient_turn_their_rows_red(tmp_path):
    root = planted(
        tmp_path,
        selected="""
            _right = selected_forward

            def selected_forward(x):
                return _right(x._replace(pos_BS=x.pos_BS + 1))
        """,
        range_attention="""
            _right_backward = range_backward

            def range_backward(x, *args):
                dq, dk, dv = _right_backward(x, *args)
                noise = 1e-3 * torch.rand(()) if x.branch == "sliding" else 0
                return dq * (1 + noise), dk, dv
        """,
    )
    code, record, output = rehearsed(tmp_path / "out", "--only", "causality", "--only", "determinism", root=root)
    assert claims(record, CheckStatus.FAILS) == {
        "causality: values before a changed token that change, fp32",
        "determinism: values that differ between two runs, fp32",
        "determinism: values that differ in memory that held NaN, fp32",
    }, output
    assert code == 1


def test_without_a_gpu_the_runbooks_script_ends_at_once_and_says_what_to_do(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    (tmp_path / "nsa").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m nsa_train.cli "$@"\n')
    (tmp_path / "nsa").chmod(0o755)
    done = subprocess.run(
        ["bash", ROOT / "scripts" / "run_gpu_causality_test.sh", "--full"], text=True, capture_output=True, timeout=120,
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": import_path()},
    )  # fmt: skip
    assert done.returncode == ConfigError.exit_code
    assert "nsa gpu-check needs a GPU" in done.stderr
    assert "--rehearse" in done.stderr


def wait_for_a_row(running: subprocess.Popen[str]) -> None:
    assert running.stdout is not None
    printed = []
    while not printed or not printed[-1].startswith("holds"):
        printed.append(running.stdout.readline())
        assert printed[-1], "".join(printed)


def test_an_interrupt_keeps_finished_rows_and_leaves_no_process(tmp_path):
    running = command("--rehearse", "--only", "parity", "--bundle", str(tmp_path / "out.zip"))
    wait_for_a_row(running)
    children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
    running.send_signal(signal.SIGINT)
    output, _ = running.communicate(timeout=60)
    assert running.returncode == 130, output
    record = read_report(tmp_path / "out.zip")
    assert record["rows"]
    assert not record["complete"]
    assert children
    assert not any(Path(f"/proc/{child}").exists() for child in children)


def finished(**changes) -> GpuCheckReport:
    machine = dict(cpu="a CPU", cores=2, isa=[], memory_gib=1, torch="2", commit=None, uncommitted_changes=None,
                   load_average=[0.0], time="now")  # fmt: skip
    record = GpuCheckReport("nsa gpu-check --full", machine, complete=True, rows=[bounded("a claim", 0, 0)])
    record.add(MeasuredTable(dict(name="NVIDIA A100-SXM4-80GB", capability="sm_80", units=108, memory_gib=79.2,
    driver="1",
                              runtime="CUDA 13", triton="3.7.1"), [], [], "gpu"))  # fmt: skip
    for name, value in changes.items():
        setattr(record, name, value)
    return record


def test_a_whole_run_on_a_gpu_is_a_result(tmp_path):
    finished().write(tmp_path / "out.zip")
    assert read_report(tmp_path / "out.zip")["holds"]
    assert not finished().flaws()
    page = page_of(tmp_path / "out.zip")
    assert page.startswith("# GPU check: NVIDIA A100-SXM4-80GB\n\n`nsa gpu-check --full`\n")


@pytest.mark.parametrize("flaw", [dict(rehearsal=True), dict(only=("parity",)), dict(complete=False)], ids=str)
def test_an_incomplete_run_is_no_result(flaw, tmp_path):
    finished(**flaw).write(tmp_path / "out.zip")
    assert finished(**flaw).flaws()
    assert "no result" in page_of(tmp_path / "out.zip").splitlines()[0]
    assert "no result" in read_report(tmp_path / "out.zip")["title"]


@pytest.mark.parametrize(
    ("rows", "complete", "holds"),
    [
        ([bounded("c", 1, 1)], True, True),
        ([bounded("c", 1, 1), CheckResult("c", CheckStatus.NEEDS_GPU)], True, True),
        ([bounded("c", 1, 1), bounded("c", float("nan"), 1)], True, False),
        ([bounded("c", 1, 1)], False, False),
        ([CheckResult("c", CheckStatus.FACT)], True, False),
    ],
)
def test_a_run_holds_only_if_every_row_does_and_something_was_checked(rows, complete, holds):
    assert finished(rows=rows, complete=complete).holds is holds


def test_a_child_that_is_silent_too_long_is_killed_and_the_row_says_so():
    request = GpuCheckRequest(rehearse=True, only=("environment",))
    runner = GpuCheckRunner(request, silence_s=0.01)
    (row,) = runner.run()
    assert isinstance(row, CheckResult)
    assert (row.verdict, row.subject) == (CheckStatus.FAILS, "environment")
    assert "no message" in row.note


def test_the_program_on_a_gpu_covers_what_users_have():
    """Built here, run there."""
    scope = on_gpu(torch.device("cuda"), full=True)
    sizes = [case for case in scope.kernels if set(case.dtypes) == {"fp32", "fp16", "bf16"}]
    assert {size.shape.heads_per_group for size in sizes} == {1, 3, 5, 6, 16}
    assert {(size.shape.d_k, size.shape.d_v) for size in sizes} == {(64, 64), (128, 128), (192, 128)}
    assert all(size.length % 2 for size in sizes)
    assert any(len(row) > 2 for size in sizes for row in size.documents)
    checks = GpuCheckRequest(full=True).checks()
    assert [subject for subject in SUBJECTS if any(check.subject == subject for check in checks)] == list(SUBJECTS)
    names = {check.name for check in checks if check.subject == "speed"}
    assert {"attention fwd+bwd, bf16, 64k", "attention, fp16, 2k", "decode, bf16, 64k"} <= names
    assert "attention, width 128 fwd+bwd, bf16, 8k" in names
    for branch in flash.SERVED:
        assert f"attention {branch}, 12 heads, 2 groups fwd+bwd, bf16, 64k" in names
    assert len({(check.subject, check.name) for check in checks}) == len(checks)
    assert all(isinstance(check, GpuCheck) for check in checks)


def test_the_cheapest_and_most_telling_checks_come_first():
    checks = GpuCheckRequest(full=True).checks()
    subjects = list(dict.fromkeys(check.subject for check in checks))
    assert subjects[:4] == ["environment", "self-check", "host", "kernels"]
    assert subjects[-1] == "speed"
    first = [check.name for check in checks if check.subject == "speed"][:12]
    assert all("bf16" in name and "16k" not in name for name in first)
    assert {"base", "wide"} == {check.name.split()[1].rstrip(",") for check in checks if check.subject == "kernels"}


def test_unknown_subjects_and_speed_without_full_are_refused():
    with pytest.raises(ConfigError, match="--only"):
        GpuCheckRequest(rehearse=True, only=("party",)).checks()
    with pytest.raises(ConfigError, match="--full"):
        GpuCheckRequest(rehearse=True, only=("host",)).checks()


def test_exchanged_blocks_are_checked_in_packed_documents_too():
    size = next(case for case in rehearsal(full=False).kernels if len(case.documents[0]) > 2)
    call = size.call(torch.float32)
    args = (call.q_BSGRK, call.compressed[0], call.layout.pos_BS, call.layout.first_BS)
    right = call.idx_BSGN
    assert blocks_error(*args, right, size.shape.geometry, call.scale).max() == 0
    wrong = right.clone()
    at = int((right[0, :, 0, -1] >= 0).nonzero()[-1])  # the last query chose as many as it could
    own = int(call.layout.pos_BS[0, at]) // size.shape.geometry.l_sel
    free = next(j for j in range(1, own - 1) if j not in right[0, at, 0])
    wrong[0, at, 0] = torch.tensor(sorted([free, *right[0, at, 0].tolist()[:1], *right[0, at, 0].tolist()[2:]]))
    error = blocks_error(*args, wrong, size.shape.geometry, call.scale)
    assert error[0, at, 0] > 1e-3
    assert (error > 0).sum() == 1


def test_predictions_are_found_by_the_words_of_the_gpus_name():
    task = BenchTask("attention", SHAPES["base"], 8192, "bf16", device="cuda")
    prediction = modelled(SIZES, task, "NVIDIA A100-SXM4-80GB")
    assert prediction is not None
    assert prediction["ratio"] == prediction["dense_seconds"] / prediction["seconds"] > 1
    assert prediction != modelled(SIZES, task, "NVIDIA H100 80GB HBM3")
    assert modelled(SIZES, task, "AMD Instinct MI300X") is not None
    assert modelled(SIZES, task, "NVIDIA T4") is None
    assert modelled(SIZES, replace(task, shape=SHAPES["paper"]), "NVIDIA A100-SXM4-80GB") is None
    assert modelled(SIZES, replace(task, op="decode"), "NVIDIA A100-SXM4-80GB") is None


def test_a_missing_device_is_refused_with_a_fix():
    with pytest.raises(ConfigError, match="cpu"):
        device_named("tpu")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="Use cpu"):
            device_named("cuda")


def test_a_gpus_clock_waits_for_the_gpu(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    devices.clock_of(torch.device("cuda"))()
    assert waited == [torch.device("cuda")]
    devices.clock_of(torch.device("cpu"))()
    assert len(waited) == 1
