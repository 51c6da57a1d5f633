"""Output of a run when it starts."""

import errno
import json

import pytest

from nsa.errors import CheckpointError
from nsa.kernels import registry
from nsa.kernels.cpu import build, library
from nsa_train import names
from nsa_train.checkpoint.lock import RunLock
from nsa_train.config import load
from nsa_train.record.heartbeat_record import read_beats
from nsa_train.record.run_folder import RunFolder
from nsa_train.train.run import train
from nsa_train.train.run_outputs import RunReport, SilentReporter
from tests.nsa_train.train.runs import write_config


class Lines(SilentReporter):
    def __init__(self):
        self.said = []

    def line(self, text):
        self.said.append(text)


@pytest.fixture
def run(tmp_path, monkeypatch):
    def start(*changes):
        monkeypatch.setattr(registry, "_plan_once", registry._plan)
        config = load(write_config(tmp_path), overrides=["train.steps=1", f"train.out_dir={tmp_path}/run", *changes])
        lines = Lines()
        assert train(config, reporter=lines) == 0
        (beat,) = [beat for beat in read_beats(tmp_path / "run" / names.heartbeat(0)) if beat.msg == names.PROGRESS]
        return lines.said, beat, json.loads((tmp_path / "run" / names.ENV).read_text())

    return start


def test_the_kernels_are_printed(run):
    said, beat, _ = run()
    assert "kernels: cpu (C++), all branches" in said
    assert not any("WARNING" in line for line in said)
    assert (beat.kernel_select, beat.kernels_reason) == ("cpu", "first choice")


def test_a_requested_backend_is_printed_with_that_reason(run):
    said, _, env = run("kernels.selected=reference")
    assert any("selected reference (requested by name)" in line for line in said)
    assert env["kernels"]["selected"] == {"backend": "reference", "reason": "requested by name"}


def test_without_a_compiler_the_slow_backend_is_warned_about(run, monkeypatch):
    monkeypatch.setattr(build, "COMPILERS", ("no-such-compiler",))
    library.load.cache_clear()
    try:
        said, beat, env = run()
    finally:
        library.load.cache_clear()
    (warning,) = [line for line in said if line.startswith("WARNING: slow kernels")]
    assert "no C++ compiler (no-such-compiler) on PATH; install one, e.g. apt-get install g++" in warning
    assert "times slower" in warning
    assert beat.kernel_sliding == "portable"
    assert "no C++ compiler" in beat.kernels_reason
    assert "no C++ compiler" in env["kernels"]["sliding"]["reason"]


def test_a_disk_that_is_full_when_a_run_closes_its_files_is_told_with_its_folder(tmp_path, monkeypatch):
    def close(report):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RunReport, "close", close)
    config = load(write_config(tmp_path), overrides=["train.steps=1", f"train.out_dir={tmp_path}/run"])
    with pytest.raises(CheckpointError) as refused:
        train(config, reporter=Lines())
    assert f"{tmp_path}/run" in str(refused.value)
    assert "--resume" in str(refused.value)


def test_a_refused_start_leaves_a_new_folder_that_another_start_has_taken(tmp_path, monkeypatch):
    """Two starts at once: this one creates the folder, the other one locks it first."""
    make, locks = RunFolder.make, []

    def make_and_lose(folder):
        new = make(folder)
        locks.append(RunLock(folder.path).acquire())
        return new

    monkeypatch.setattr(RunFolder, "make", make_and_lose)
    config = load(write_config(tmp_path), overrides=["train.steps=1", f"train.out_dir={tmp_path}/run"])
    with pytest.raises(CheckpointError, match="in use by"):
        train(config, reporter=Lines())
    assert (tmp_path / "run" / ".lock").exists()
    locks[0].release()
