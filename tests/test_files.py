"""Atomic writes, fsync order, file locks, and errors that name the file system that is full."""

import errno
import fcntl
import os
import re
import resource
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from nsa.files import (
    SHARED_MEMORY,
    create_atomic,
    file_lock,
    no_room_error,
    open_regular,
    readable,
    temporary_cache_folder,
    try_lock,
    unlock,
    user_cache_folder,
    write_atomic,
)
from tests.ops.needs import root

CHILD = """
import multiprocessing
import sys
from pathlib import Path
from nsa_train.data.prefetcher import BatchPrefetcher
from nsa_train.data.rows.specs import SyntheticData
from nsa.files import no_room_error

def fill(path):
    with open(path, "wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError as error:
            return error

if __name__ == "__main__":
    fill("/dev/shm/ballast")
    with BatchPrefetcher(SyntheticData("uniform", vocab_size=9, seq_len=8, seed=1), global_rows=1) as prefetcher:
        next(prefetcher)  # prefetching needs no shared memory
    try:
        multiprocessing.get_context("spawn").Lock()
    except OSError as error:
        print("shm:", no_room_error(error, Path(sys.argv[1])))
    print("disk:", no_room_error(fill(sys.argv[1] + "/ballast"), Path(sys.argv[1])))
"""


def test_full_shared_memory_and_a_full_disk_are_told_apart(tmp_path):
    """Fills both, in a mount namespace of their own."""
    root()
    run, child = tmp_path / "run", tmp_path / "child.py"
    run.mkdir()
    child.write_text(CHILD)
    mounts = f"mount -t tmpfs -o size=64k none /dev/shm && mount -t tmpfs -o size=64k none {run}"
    command = ["unshare", "--mount", "sh", "-c", f"{mounts} && {sys.executable} {child} {run}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2])
    told = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert "/dev/shm" in told["shm"], done.stderr
    assert "not at fault" in told["shm"]
    assert "/dev/shm" not in told["disk"]
    assert str(run) in told["disk"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_an_error_with_a_file_is_about_its_file_system(tmp_path, number):
    here = OSError(number, "no room", str(tmp_path / "checkpoints" / "x"))
    shared = OSError(number, "no room", str(SHARED_MEMORY / "x"))
    assert "/dev/shm" not in str(no_room_error(here, tmp_path))
    assert str(no_room_error(shared, tmp_path)).startswith("shared memory (/dev/shm)")
    assert no_room_error(shared, tmp_path).exit_code == 22


def test_a_quota_is_the_run_folders(tmp_path):
    assert str(no_room_error(OSError(errno.EDQUOT, "over quota"), tmp_path)).startswith(str(tmp_path))


@pytest.mark.parametrize("many_writers", [False, True])
@pytest.mark.parametrize("content", ["grün\n", b"\x00\xff"])
def test_an_atomic_write_replaces_the_content_and_leaves_no_other_file(tmp_path, content, many_writers):
    path = tmp_path / "file"
    for _ in range(2):
        write_atomic(path, content, many_writers=many_writers)
    assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("many_writers", [False, True])
def test_a_write_that_fails_keeps_the_old_content_and_leaves_no_other_file(tmp_path, monkeypatch, many_writers):
    path = tmp_path / "file"
    path.write_text("old")

    def refuse(source: object, target: object) -> None:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="no room"):
        write_atomic(path, "new", many_writers=many_writers)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_pipe_or_a_link_in_place_of_the_temporary_file_is_not_written_to(tmp_path):
    path, elsewhere = tmp_path / "file", tmp_path / "elsewhere"
    os.mkfifo(tmp_path / "file.new")
    write_atomic(path, "first")
    elsewhere.write_text("mine")
    (tmp_path / "file.new").symlink_to(elsewhere)
    write_atomic(path, "second")
    assert (path.read_text(), elsewhere.read_text()) == ("second", "mine")


def test_permissions_follow_the_umask_or_the_given_mode(tmp_path):
    before = os.umask(0o022)
    try:
        write_atomic(tmp_path / "open", "")
        write_atomic(tmp_path / "private", "", mode=0o600)
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("open", "private")]
    assert modes == [0o644, 0o600]


def test_a_durable_write_syncs_the_file_before_the_rename_and_the_folder_after(tmp_path, monkeypatch):
    calls: list[str] = []
    sync, replace = os.fsync, os.replace

    def noted_sync(descriptor: int) -> None:
        calls.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        sync(descriptor)

    def noted_replace(source: Path, target: Path) -> None:
        calls.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(os, "replace", noted_replace)
    write_atomic(tmp_path / "file", "x", durable=True)
    assert calls == ["file", "rename", "folder"]
    calls.clear()
    write_atomic(tmp_path / "file", "x")
    assert calls == ["rename"]


def test_a_file_is_created_once(tmp_path):
    assert create_atomic(tmp_path / "file", "first")
    assert not create_atomic(tmp_path / "file", "second")
    assert (tmp_path / "file").read_text() == "first"
    assert os.listdir(tmp_path) == ["file"]


def test_only_regular_files_are_opened_and_nothing_blocks(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_text("text")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for name in ("pipe", "."):
        with pytest.raises(OSError, match=name) as refused:
            open_regular(tmp_path / name)
        assert refused.value.errno == errno.EINVAL
    with open_regular(tmp_path / "link") as file:
        assert file.read() == b"text"
    with pytest.raises(OSError, match="symbolic links") as refused:
        open_regular(tmp_path / "link", follow_links=False)
    assert refused.value.errno == errno.ELOOP


def test_a_lock_excludes_another_holder_until_it_is_released(tmp_path):
    path = tmp_path / "lock"
    other = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    with file_lock(path) as descriptor:
        assert not try_lock(other)
        with pytest.raises(BlockingIOError), file_lock(path, wait=False):
            pass
        unlock(descriptor)
        assert try_lock(other)
    os.close(other)
    with file_lock(path, wait=False):
        pass


def test_no_other_module_writes_atomically_or_locks_by_itself():
    root = Path(__file__).parents[1] / "packages"
    own = re.compile(r"\bos\.(replace|fsync|fdatasync|link)\(|\bflock\(|\bNamedTemporaryFile\(.*delete=False")
    modules = [
        str(path.relative_to(root)) for path in sorted(root.rglob("*.py")) if own.search(path.read_text("utf-8"))
    ]
    assert modules == ["nsa-attention/nsa/files.py"]


def test_a_cache_lies_in_the_home_folder_or_where_home_is_read_only_among_temporary_files(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    user_cache_folder.cache_clear()
    assert user_cache_folder("kernels") == tmp_path / "home" / ".cache" / "nsa" / "kernels"
    user_cache_folder.cache_clear()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert user_cache_folder("kernels") == tmp_path / f"nsa-kernels-{os.geteuid()}"
    user_cache_folder.cache_clear()


@pytest.mark.parametrize("squat", ["link", "writable", "file"])
def test_a_temporary_cache_that_others_could_have_written_is_not_used(squat, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    first = temporary_cache_folder("kernels")
    assert temporary_cache_folder("kernels") == first
    assert first.stat().st_mode & 0o777 == 0o700
    first.rmdir()
    if squat == "link":
        (tmp_path / "elsewhere").mkdir()
        first.symlink_to(tmp_path / "elsewhere")
    elif squat == "writable":
        first.mkdir()
        first.chmod(0o777)
    else:
        first.write_text("")
    second = temporary_cache_folder("kernels")
    assert second != first
    assert second.stat().st_mode & 0o777 == 0o700


def test_a_pipe_is_waited_for_whatever_its_number(tmp_path):
    reading, writing = os.pipe()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, most[1]), most[1]))
    high = fcntl.fcntl(reading, fcntl.F_DUPFD, 2000)
    try:
        assert not readable(high, 0)
        os.write(writing, b"x")
        assert readable(high, 0)
        os.read(high, 1)
        os.close(writing)
        assert readable(high, 0)  # it has ended
    finally:
        os.close(high)
        os.close(reading)
        resource.setrlimit(resource.RLIMIT_NOFILE, most)
