"""Verdicts of real child processes, with Triton's interpreter as the device: bugs, crashes, hangs, records, locks."""

import dataclasses
import json
import logging
import shutil
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from nsa.check.kernel_checks import TIMED
from nsa.geometry import Geometry
from nsa.kernels.interface import KernelShape
from nsa.kernels.self_check import (
    CheckKey,
    CheckRecord,
    CheckRequest,
    KernelError,
    KernelVerdict,
    RecordStore,
    _source_hash,
    _warning_text,
    clean_environment,
    key_for,
    recorded,
    triton_verdict,
    verify,
)
from proofs.planting.source_tree import SourceTree
from tests.mutations import load_table

pytest.importorskip("triton", reason="it is in the dev extra")

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")
SHAPE = KernelShape(1, 3, 24, 24, Geometry(l=4, d=2, l_sel=4, n_sel=3, w=6))
MIX = "mix, 3 gates per group in float32"  # the part that is fastest when interpreted
PROGRAM = """
import sys
from pathlib import Path
from nsa.kernels.self_check import verify
from tests.nsa.kernels.test_self_check import request
print(verify(request(Path(sys.argv[1]), *sys.argv[2:])))
"""


def request(folder: Path, *parts: str, root: Path = ROOT, silence_s: float = 300.0) -> CheckRequest:
    return CheckRequest(CPU, key_for(CPU, torch.float32, SHAPE, parts=parts), folder, silence_s, root / "nsa")


def checked(folder: Path, *parts: str, root: Path = ROOT, silence_s: float = 300.0) -> CheckRecord:
    """The record of a check of these parts, with the package below `root` in the child."""
    asked = request(folder, *parts, root=root, silence_s=silence_s)
    verdict = verify(asked)
    (file,) = folder.glob("*.json")
    assert verdict.evidence == str(file)
    record = CheckRecord.from_json(json.loads(file.read_text()))
    assert (record.passed, record.reason, record.slower) == (verdict.passed, verdict.reason, verdict.slower)
    assert verdict.checked == (not record.transient) == file.name.startswith("self_check_")
    return record


def copied(tmp_path: Path) -> Path:
    shutil.copytree(
        ROOT / "packages/nsa-attention/nsa", tmp_path / "copy" / "nsa", ignore=shutil.ignore_patterns("__pycache__")
    )
    return tmp_path / "copy"


def planted(tmp_path: Path, module: str, code: str) -> Path:
    """A copy of the package in which a launcher is followed by another definition of it."""
    root = copied(tmp_path)
    with (root / "nsa" / "kernels" / "triton" / f"{module}.py").open("a") as file:
        file.write(textwrap.dedent(code))
    return root


def wrong(record: CheckRecord) -> set[str]:
    return {figure.name for figure in record.figures if not figure.holds}


FORWARD = """
import os, time
_right = mix_forward

def mix_forward(*args):
    {line}
    return _right(*args)
"""


def test_right_kernels_pass_and_the_record_is_read_afterwards(tmp_path, caplog):
    record = checked(tmp_path, MIX)
    assert record.passed
    assert record.reason == ""
    assert {f"{MIX} out", f"{MIX} dgates", f"{MIX} dsliding"} <= {figure.name for figure in record.figures}
    assert record.seconds["all"] > 0
    assert "checking Triton kernels on interpreter" in caplog.text
    caplog.clear()
    assert checked(tmp_path, MIX) == record
    assert caplog.text == ""


def test_a_kernel_that_kills_its_process_is_a_failed_verdict(tmp_path):
    root = planted(tmp_path, "mix", FORWARD.format(line="os.kill(os.getpid(), 11)"))
    record = checked(tmp_path / "cache", MIX, root=root)
    assert not record.passed
    assert record.reason == f"{MIX}: the process was killed by SIGSEGV"


WORKER = """
import json, os, sys, time

def main():
    given = json.loads(sys.stdin.readline())

    def write(text):
        os.write(1, text.encode())

    def message(**fields):
        write(json.dumps(fields) + "\\n")

    message(kind="begin", part="sliding")
    {line}
"""
PASS = 'message(kind="figures", figures=[dict(name="a", error=0.0, limit=1.0)]); message(kind="done")'


def with_worker(tmp_path: Path, line: str) -> Path:
    """A package whose worker needs no torch and does this."""
    folder = tmp_path / "other" / "nsa" / "check"
    folder.mkdir(parents=True)
    for package in (folder, folder.parent):
        (package / "__init__.py").write_text("")
    (folder / "kernel_checks.py").write_text(WORKER.format(line=line))
    return tmp_path / "other"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("os.abort()", "sliding: the process was killed by SIGABRT"),
        ("raise RuntimeError('an illegal memory access was encountered')", "illegal memory access"),
        ("pass", "ended too early"),
        ("sys.exit(3)", "it printed no reason"),
        ("message(kind='done')", "nothing was compared"),
        ("write('not JSON\\n')", "output not read"),
        ("write('{\"kind\": ')", "ended too early"),
        ("message(kind='figures', figures=[dict(name='a')])", "output not read"),
        ("message(kind='figures', figures=[dict(name='dk', error=float('nan'), limit=1.0)])", "dk: nan (at most 1)"),
    ],
    ids=range(9),
)
def test_every_failure_of_the_child_becomes_a_verdict(tmp_path, line, why):
    record = checked(tmp_path / "cache", root=with_worker(tmp_path, line))
    assert not record.passed
    assert why in record.reason
    assert not record.transient
    if line.startswith("raise"):
        assert any("Traceback" in text for text in record.output)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("time.sleep(1000)", "sliding: the process sent no message for 2 s. This says nothing about the kernels"),
        ("os.kill(os.getpid(), 9)", "sliding: the process was killed by SIGKILL"),
        ("message(kind='environment'); raise OSError(28, 'No space left on device')", "No space left on device"),
        ("raise RuntimeError('all CUDA-capable devices are busy or unavailable')", "EXCLUSIVE_PROCESS"),
        ("raise RuntimeError('CUDA out of memory')", "too little free memory"),
    ],
    ids=["hangs", "killed", "disk", "busy", "memory"],
)
def test_a_check_that_the_machine_does_not_let_finish_is_no_verdict(tmp_path, line, why):
    cache = tmp_path / "cache"
    record = checked(cache, root=with_worker(tmp_path, line), silence_s=2.0)
    assert not record.passed
    assert why in record.reason
    assert "gpu-check --only self-check" in record.reason
    assert not list(cache.glob("self_check_*.json"))
    verdict = verify(request(cache, root=with_worker(tmp_path / "later", PASS)))
    assert verdict.usable_in("selected"), "the next process checks again, and what it says is kept"
    assert verify(request(cache, root=with_worker(tmp_path / "last", "os.abort()"))) == verdict


def test_figures_that_are_wrong_before_the_machine_ends_a_check_are_a_verdict(tmp_path):
    line = "message(kind='figures', figures=[dict(name='dk', error=2.0, limit=1.0)]); os.kill(os.getpid(), 9)"
    assert checked(tmp_path / "cache", root=with_worker(tmp_path, line)).reason == "dk: 2 (at most 1)"


def test_a_full_disk_in_the_child_is_not_blamed_on_the_kernels(tmp_path):
    root = planted(tmp_path, "mix", FORWARD.format(line="raise OSError(28, 'No space left on device')"))
    record = checked(tmp_path / "cache", MIX, root=root)
    assert record.transient
    assert f"{MIX}: the process ended with exit code 1: OSError: [Errno 28] No space left" in record.reason


def test_those_who_waited_for_a_check_that_could_not_finish_do_not_repeat_it(tmp_path, caplog):
    go, starts = tmp_path / "go", tmp_path / "starts"
    line = (
        f"open({str(starts)!r}, 'a').write('x')\n"
        f"    while not os.path.exists({str(go)!r}):\n        time.sleep(0.01)\n"
        "    raise RuntimeError('CUDA out of memory')"
    )
    asked = request(tmp_path / "cache", root=with_worker(tmp_path, line))
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(verify, asked)
        while not (starts.exists() or first.done()):
            time.sleep(0.01)
        second = pool.submit(verify, asked)
        while not ("waiting for its verdict" in caplog.text or second.done()):
            time.sleep(0.01)
        go.touch()
        assert first.result() == second.result()
    assert starts.read_text() == "x"
    assert not first.result().checked


def test_a_layer_is_timed_beside_the_portable_backend_and_the_slower_one_is_not_used(tmp_path):
    """Interpreted kernels take much longer; the record holds both times."""
    record = checked(tmp_path, MIX, TIMED)
    assert record.passed
    assert record.times["triton"] > 2 * record.times["portable"] > 0
    assert f"{1e3 * record.times['portable']:.3g} ms" in record.slower
    verdict = verify(request(tmp_path, MIX, TIMED))
    assert verdict.passed
    assert not verdict.usable_in("selected")
    assert "right, but slower on this GPU" in verdict.summary


@pytest.mark.parametrize(("ours", "others", "slower"), [(1.0, 2.0, False), (1.05, 1.0, False), (1.5, 1.0, True)])
def test_only_a_clear_difference_decides(ours, others, slower):
    assert bool(dataclasses.replace(RIGHT, times=dict(triton=ours, portable=others)).slower) == slower
    assert not dataclasses.replace(RIGHT, times=dict(triton=ours)).slower, "the portable backend had no memory"


def test_a_kernel_that_adds_something_random_fails_by_its_bits_alone(tmp_path):
    line = "out = _right(*args); return out * (1 + 1e-6 * torch.rand(out.shape))"
    root = planted(tmp_path, "mix", FORWARD.format(line=line))
    record = checked(tmp_path / "cache", MIX, root=root)
    assert not record.passed
    assert wrong(record)
    assert all("values that differ" in name for name in wrong(record))


@pytest.mark.nightly
def test_of_two_processes_one_checks_and_the_other_waits(tmp_path):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), MIX]
    both = [
        subprocess.Popen(command, text=True, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)
    ]
    outputs = [process.communicate(timeout=300) for process in both]
    assert all("passed=True" in out for out, _ in outputs), outputs
    assert sorted("checking Triton kernels on" in log for _, log in outputs) == [False, True]


# Bugs of tests/mutations/triton.toml, and the part of the check that finds each.
FAST_BUGS = {"triton: window of w + 1 tokens": "sliding"}
SLOW_BUGS = {
    "triton: compressed block visible one block early": "compressed",
    "triton: second half of the values not normalised": "sliding",
    "triton: second half of the keys forgotten": "sliding",
    "triton: past not rescaled": "sliding",
    "triton: log-sum-exp without its sum": "sliding",
    "triton: rows that see nothing are NaN": "compressed",
    "triton: query does not see itself": "selected",
    "triton: block's second window takes the first one's slot": "selected",
    "triton: first query of the next piece counts twice": "selected",
    "triton: last query of a piece is skipped": "selected",
    "triton: dq without scale": "sliding",
    "triton: dk without its row correction": "sliding",
    "triton: gradient of the log-sum-exp dropped": "sliding",
    "triton: bounds of the batch's first row": "sliding",
    "triton: slots are added without their share": "selected",
    "triton: last piece of a window is not added": "selected",
    "triton: later spans of queries replace the sums of earlier ones": "selected in spans",
    "triton: invalid block scores 0": "select",
    "triton: decode: compressed block visible one token early": "decode",
    "triton: decode: page read past the row's length": "decode",
    "triton: decode: query does not see itself": "decode",
    "triton: decode: parts merged without their weight in the whole": "decode",
    "triton: decode: every row reads the first row's compressed pages": "decode",
    "triton: merged: a token of the window is in the blocks too": "merged decode",
}


def found_bug(tmp_path: Path, name: str, part: str) -> None:
    (bug,) = (row for row in load_table(ROOT / "tests/mutations/triton.toml").mutations if row.name == name)
    root = copied(tmp_path)
    bugged = SourceTree(root).plant(bug.function, bug.find, bug.replace, bug.which)
    (root / bugged.path).write_text(bugged.text)
    record = checked(tmp_path / "cache", part, root=root)
    assert not record.passed
    assert wrong(record)
    assert all(figure.startswith(part) for figure in wrong(record))
    assert record.reason.startswith(part)


@pytest.mark.parametrize(("name", "part"), FAST_BUGS.items())
def test_a_planted_bug_fails_in_its_part(tmp_path, name, part):
    found_bug(tmp_path, name, part)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "part"), SLOW_BUGS.items())
def test_every_planted_bug_fails_in_its_part(tmp_path, name, part):
    found_bug(tmp_path, name, part)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_right_kernels_pass_in_every_part(tmp_path):
    record = checked(tmp_path)
    assert record.passed, record.reason
    assert len(record.figures) > 50


def test_the_child_has_no_launcher_variables_and_no_settings(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "NSA_KERNEL", "CUDA_HOME"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    environment = clean_environment(interpret=False)
    assert environment["CUDA_VISIBLE_DEVICES"] == "3"
    assert environment["CUDA_HOME"] == "1"
    assert not environment.keys() & {
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "MASTER_ADDR",
        "TORCHELASTIC_RUN_ID",
        "NSA_KERNEL",
    }
    assert "TRITON_INTERPRET" not in environment
    assert clean_environment(interpret=True)["TRITON_INTERPRET"] == "1"


KEY = CheckKey("NVIDIA A100", "sm_80", "535.1", "CUDA 13.0", "2.13.0", "3.7.1", "abc", [2, 6, 64, 64], [32, 16], "bf16")
RIGHT = CheckRecord(KEY, True, "", [KernelError("sliding out", 1e-7, 1e-5)], {"all": 1.0})


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(CheckKey)])
def test_a_record_is_not_used_when_any_part_of_the_key_differs(tmp_path, name):
    value = getattr(KEY, name)
    other = dataclasses.replace(KEY, **{name: not value if isinstance(value, bool) else [*value, 1] if isinstance(
        value, list) else value + "x"})  # fmt: skip
    RecordStore(tmp_path, KEY).write(RIGHT)
    assert RecordStore(tmp_path, KEY).read() == RIGHT
    assert RecordStore(tmp_path, other).path != RecordStore(tmp_path, KEY).path
    assert RecordStore(tmp_path, other).read() is None


def test_the_key_holds_the_shape_the_dtype_and_the_sources(monkeypatch):
    key = key_for(CPU, torch.bfloat16, SHAPE)
    assert (key.shape, key.geometry, key.dtype) == ([1, 3, 24, 24], [4, 2, 4, 3, 6], "bfloat16")
    assert key.sources == _source_hash()


@pytest.mark.parametrize(
    "file", ["kernels/triton/tile.py", "kernels/triton/selected.py", "kernels/ops.py", "check/cases.py"]
)
def test_the_hash_changes_with_any_source(tmp_path, file):
    package = copied(tmp_path) / "nsa"
    assert _source_hash(package) == _source_hash()
    with (package / file).open("a") as source:
        source.write("# changed\n")
    _source_hash.cache_clear()
    assert _source_hash(package) != _source_hash()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"key": 3}', json.dumps({**dataclasses.asdict(RIGHT), "passed": "yes"})], ids=range(5)
)
def test_an_unreadable_record_is_ignored_with_a_warning(tmp_path, text, caplog):
    store = RecordStore(tmp_path, KEY)
    store.path.write_text(text)
    assert store.read() is None
    assert str(store.path) in caplog.text


def test_a_record_that_says_passed_with_figures_that_do_not_hold_is_ignored(tmp_path):
    store = RecordStore(tmp_path, KEY)
    store.write(dataclasses.replace(RIGHT, figures=[KernelError("sliding out", float("nan"), 1e-5)]))
    assert store.read() is None
    store.write(dataclasses.replace(RIGHT, figures=[]))
    assert store.read() is None


def test_a_foreign_record_is_ignored(tmp_path, caplog):
    store = RecordStore(tmp_path, KEY)
    other = RecordStore(tmp_path, dataclasses.replace(KEY, gpu="NVIDIA H100"))
    other.write(dataclasses.replace(RIGHT, key=other.key))
    other.path.rename(store.path)
    assert store.read() is None
    assert "another check" in caplog.text


def test_a_note_is_for_those_who_waited_and_replaces_no_verdict(tmp_path):
    store = RecordStore(tmp_path, KEY)
    note = dataclasses.replace(RIGHT, passed=False, reason="no", transient=True, time=100.0)
    store.write(note)
    assert store.read() is None
    assert store.read(notes_since=99.0) == note
    assert store.read(notes_since=101.0) is None
    store.write(RIGHT)
    store.write(note)
    assert store.read() == store.read(notes_since=99.0) == RIGHT


def test_what_was_checked_on_a_gpu_is_listed(tmp_path):
    key = dataclasses.replace(KEY, dtype="bfloat16", geometry=[4, 2, 4, 3, 6])
    for other in (key, dataclasses.replace(key, gpu="NVIDIA H100"), dataclasses.replace(key, parts=["sliding"])):
        RecordStore(tmp_path, other).write(dataclasses.replace(RIGHT, key=other))
    (tmp_path / "self_check_x.json").write_text("{}")
    shape = KernelShape(2, 6, 64, 64, Geometry(l=4, d=2, l_sel=4, n_sel=3, w=6))
    assert recorded(tmp_path, "NVIDIA A100") == [(torch.bfloat16, shape, False)]


def test_a_failed_record_is_read_and_a_rerun_replaces_it(tmp_path):
    asked = request(tmp_path, root=with_worker(tmp_path, PASS))
    store = RecordStore(tmp_path, asked.key)
    store.write(dataclasses.replace(RIGHT, key=asked.key, passed=False, reason="sliding dk: 1"))
    verdict = verify(asked)
    assert verdict == KernelVerdict(False, "sliding dk: 1", str(store.path))
    assert verify(asked, rerun=True).passed
    assert verify(asked).passed


def test_without_a_writable_folder_the_check_runs_and_warns(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    verdict = verify(request(tmp_path / "file" / "cache", root=with_worker(tmp_path, PASS)))
    assert verdict == KernelVerdict(True, "")
    assert "runtime.kernel_cache" in caplog.text


def test_without_a_gpu_there_is_nothing_to_check(caplog):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    verdict = triton_verdict(torch.device("cuda", 1), torch.bfloat16, SHAPE)
    assert not verdict.passed
    assert not verdict.checked
    assert "no GPU" in verdict.summary
    assert caplog.records == []


def test_the_warning_names_the_gpu_the_reason_the_evidence_and_the_fix():
    text = _warning_text(KEY, KernelVerdict(False, "sliding dk: 0.3", "/cache/record.json"))
    assert len(text.splitlines()) >= 6
    for words in ("NVIDIA A100", "sliding dk: 0.3", "/cache/record.json", "gpu-check --only self-check", "portable"):
        assert words in text


def test_logging_of_this_module_is_seen_without_configuration():
    """Warnings reach stderr where nobody configured logging."""
    assert logging.getLogger("nsa.kernels.self_check").getEffectiveLevel() <= logging.WARNING
