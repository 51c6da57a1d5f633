"""Outputs that cannot be written end in one message and exit code 21, before any work where that can be known."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from nsa.errors import DataError


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "src"
    folder.mkdir()
    lines = [json.dumps({"id": str(i), "text": "some words of a document " * 4}) for i in range(1500)]
    (folder / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "file").write_text("x")
    return folder


def run(*words: str, file_limit: int | None = None) -> subprocess.CompletedProcess[str]:
    def limit() -> None:
        if file_limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))

    command = [sys.executable, "-m", "nsa_train.cli", "data", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, preexec_fn=limit)


def assert_message(done: subprocess.CompletedProcess[str], named: Path) -> None:
    assert done.returncode == DataError.exit_code, done.stderr
    assert "Traceback" not in done.stderr
    assert str(named) in done.stderr


@pytest.mark.parametrize("below", ["", "/set"])
def test_prepare_into_a_file(source: Path, tmp_path: Path, below: str) -> None:
    out = f"{tmp_path}/file{below}"
    assert_message(run("prepare", str(source), out, "--tokenizer", "byte", "--workers", "1"), Path(out))


@pytest.mark.parametrize("kib", [4, 336])
def test_prepare_on_a_full_disk(source: Path, tmp_path: Path, kib: int) -> None:
    """Too small for the logs of the work, and for what comes after the shards."""
    disk = tmp_path / "disk"
    disk.mkdir()
    words = ("prepare", str(source), str(disk / "set"), "--tokenizer", "byte", "--workers", "1")
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "nsa-test", str(disk)]
    mounted = subprocess.run(mount, capture_output=True).returncode == 0
    try:
        done = run(*words, file_limit=None if mounted else 9_000)  # not root: files that may not grow
    finally:
        if mounted:
            subprocess.run(["umount", str(disk)], check=True)
    assert_message(done, disk)


def test_a_preparation_that_ran_out_of_disk_continues_when_there_is_room(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "set"
    words = ("prepare", str(source), str(out), "--tokenizer", "byte", "--workers", "1")
    assert_message(run(*words, file_limit=100_000), out)
    done = run(*words)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["file/t.json", "src"])
def test_tokenizer_training_says_so_before_it_trains(source: Path, tmp_path: Path, name: str) -> None:
    assert_message(run("tokenizer", "train", str(source), str(tmp_path / name), "--vocab-size", "300"), tmp_path / name)


def test_a_tokenizer_that_does_not_fit_on_the_disk_leaves_nothing(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "new" / "t.json"
    assert_message(run("tokenizer", "train", str(source), str(path), "--vocab-size", "300", file_limit=3000), path)
    assert list(path.parent.iterdir()) == []
