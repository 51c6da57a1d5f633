"""The archive of the GPU check: valid whenever the check ends, never overwritten, without names of the machine."""

import os
import shlex
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from nsa.check import gpu_check_report as records
from nsa.check.__main__ import main as nsa_check
from nsa.check.gpu_check import GpuCheckRequest, run_gpu_check
from nsa.check.gpu_check_report import read_report
from nsa.errors import ConfigError
from proofs import import_path
from tests.nsa.check.test_gpu_check import finished, page_of, planted, wait_for_a_row
from tests.ops.needs import root

pytest.importorskip("triton", reason="it is in the dev extra")

MARKERS = ("markerhost", "markeruser", "marker_home", "marker_work", "10.98.76.54", "markermail@example.org")


def without_interpreter(**variables: str) -> dict[str, str]:
    environ = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    return environ | {"OMP_NUM_THREADS": "1"} | variables


def test_a_check_that_is_killed_leaves_a_valid_archive(tmp_path):
    words = [sys.executable, "-m", "nsa.check", "--rehearse", "--only", "parity", "--bundle", "out.zip"]
    running = subprocess.Popen(
        words, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=without_interpreter()
    )
    wait_for_a_row(running)
    (child,) = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
    running.kill()
    running.wait(60)
    with zipfile.ZipFile(tmp_path / "out.zip") as files:
        assert files.testzip() is None
        assert set(files.namelist()) == {records.REPORT, records.PAGE}
    record = read_report(tmp_path / "out.zip")
    assert record["rows"]
    assert not record["complete"]
    assert "cut short" in page_of(tmp_path / "out.zip")
    deadline = time.monotonic() + 120
    while Path(f"/proc/{child}").exists():  # it notices that its parent has gone
        assert time.monotonic() < deadline, "the child outlives its parent"
        time.sleep(0.1)


def test_an_archive_names_no_machine_no_user_and_no_folder(tmp_path):
    """Under a host, user, home and folder of its own, a check that crashes with all of them in its message."""
    root()
    home, work = tmp_path / "marker_home", tmp_path / "marker_work"
    home.mkdir()
    work.mkdir()
    copy = planted(
        home,
        layer="""
            import getpass, os, socket

            def layer_forward(*args):
                names = [socket.gethostname(), getpass.getuser(), os.environ["HOSTNAME"], os.getcwd()]
                home = os.environ["HOME"]
                raise RuntimeError(f"{names} 10.98.76.54 markermail@example.org '{home}/x y/z.py'\\n{home}/first.py")
        """,
    )
    words = [sys.executable, "-m", "nsa.check", "--rehearse", "--only", "environment", "--only", "causality",
             "--bundle", f"{home}/markeruser.zip"]  # fmt: skip
    environ = without_interpreter(
        HOME=str(home), USER="markeruser", LOGNAME="markeruser", HOSTNAME="markerhost.example.net",
        PYTHONPATH=f"{import_path(copy)}:{import_path()}",
    )  # fmt: skip
    done = subprocess.run(
        ["unshare", "-u", "sh", "-c", f"hostname markerhost && exec {shlex.join(words)}"], cwd=work, env=environ,
        text=True, capture_output=True, timeout=580,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "markerhost" in done.stdout, "the planted message was not shown"
    with zipfile.ZipFile(home / "markeruser.zip") as files:
        for name in files.namelist():
            text = files.read(name).decode()
            assert "RuntimeError" in text
            assert [marker for marker in (*MARKERS, str(tmp_path), sys.prefix) if marker in text] == [], name
    raw = (home / "markeruser.zip").read_bytes()
    assert not any(marker.encode() in raw for marker in MARKERS)


@pytest.mark.parametrize(
    ("told", "left"),
    [
        ("at /home/alice, in '/home/alice/my runs/a.log' and 'x'", "at …, in '…/a.log' and 'x'"),
        ("a line\n/srv/data/secret/b.py:3: warning", "a line\n…/b.py:3: warning"),
        ("~/.cache/nsa/kernels/self_check.json", "…/self_check.json"),
        ('File "/opt/venv/lib/python3.11/site-packages/torch/nn/x.py", line 3', 'File "…/torch/nn/x.py", line 3'),
        ("node17.cluster.example:29500 alice's alice_run", "…:29500 …'s …_run"),
        ("GPU-8f3a1c22-1111-2222-3333-444455556666 at 192.168.0.7", "GPU-… at …"),
        ("fe80:0:0:0:202:b3ff:fe1e:8329, 00:1b:44:11:3a:b7, bob@example.org", "…, …, …"),
    ],
)
def test_names_are_removed(told, left):
    assert records.NameRemover(("/home/alice",), ("node17", "alice")).remove(told) == left


@pytest.mark.parametrize(
    "text",
    [
        "NVIDIA A100-SXM4-80GB, driver 570.86.15, torch 2.13.0+cu130, triton 3.7.1",
        "2026-11-19T20:35:48+00:00",
        "6 heads/group, 64/64, 601 tokens, 3.2 / 1.4",
        "malice alicekins",
        "https://arxiv.org/abs/2502.11089",
        '{"seconds": 0.25, "a": [1, 2]}',
    ],
)
def test_what_is_measured_stays(text):
    assert records.NameRemover(("/home/alice",), ("node17", "alice")).remove(text) == text


def test_names_come_from_the_machine_and_the_environment(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "gpu17.example.net")
    environ = {"USER": "alice", "SLURMD_NODENAME": "rack3", "HOME": "/users/alice", "LOGNAME": "root", "HOST": "triton"}
    names = records.NameRemover.of_machine(environ)
    assert {"alice", "rack3", "gpu17", "gpu17.example.net"} <= set(names.names)
    assert not {"root", "triton", ""} & set(names.names)  # a report is of Triton's kernels
    assert "/users/alice" in names.folders


def test_what_is_no_archive_is_refused(tmp_path):
    (tmp_path / "text.zip").write_text("text")
    for name in ("text.zip", "absent.zip"):
        with pytest.raises(ConfigError, match="--bundle"):
            read_report(tmp_path / name)


def test_an_archive_is_not_overwritten_and_options_of_the_check_need_one(tmp_path):
    finished().write(tmp_path / "out.zip")
    before = (tmp_path / "out.zip").read_bytes()
    with pytest.raises(ConfigError, match="exists"):
        run_gpu_check(GpuCheckRequest(rehearse=True, only=("environment",)), tmp_path / "out.zip")
    assert (tmp_path / "out.zip").read_bytes() == before
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        run_gpu_check(GpuCheckRequest(rehearse=True, only=("environment",)), tmp_path / "file" / "out.zip")
    assert nsa_check(["--full"]) == ConfigError.exit_code
