"""Atomic file writes, fsync, advisory locks (flock), cache and scratch folders, messages for full or read-only disks;
git commit of the code.

An atomic write goes to a temporary file in the same folder, which then replaces the target by one rename: readers see
the old content or the new one, never a part. `durable` adds fsync of the file and of its folder, so that the new
content also survives a power cut.
"""

import errno
import fcntl
import functools
import hashlib
import os
import select
import shutil
import stat
import subprocess
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO

from nsa.errors import CheckpointError, DataError, NSAError

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of an `OSError` for a full file system, quota or file-size limit."""
SHARED_MEMORY = Path("/dev/shm")
_ROOM_BYTES = 1 << 16
_GIT_TIMEOUT_S = 10.0


# Atomic writes.


def write_atomic(
    path: Path, content: str | bytes, *, durable: bool = False, many_writers: bool = False, mode: int = 0o666
) -> None:
    """Write a small file so that it is absent, old or complete at any moment.

    The temporary file is `{name}.new`; with `many_writers`, when several processes may write the same file at once,
    it is a unique hidden one. `mode` is subject to the umask.
    """
    temporary = temporary_path(path) if many_writers else path.with_name(f"{path.name}.new")
    raw = content.encode() if isinstance(content, str) else content
    temporary.unlink(missing_ok=True)  # opening a pipe in its place would block
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode), "wb") as file:
            file.write(raw)
        replace_file(temporary, path, durable=durable)
    except Exception:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def create_atomic(path: Path, content: str) -> bool:
    """Create a file with all of its content at once; False, and nothing changed, if there is one already."""
    temporary = path.with_name(f"{path.name}.new-{os.getpid()}")
    temporary.write_text(content, encoding="utf-8")
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink()
    return True


def temporary_path(path: Path) -> Path:
    """A unique hidden name beside `path` for a file that `replace_file` moves there when it is complete."""
    return path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:16]}.tmp")


def replace_file(source: Path, target: Path, *, durable: bool = False) -> None:
    """Rename a complete file to `target`, replacing what is there."""
    if durable:
        fsync_path(source)
    os.replace(source, target)
    if durable:
        fsync_path(target.parent)  # otherwise the rename itself can be lost in a power cut


# fsync.


def fsync_path(path: Path) -> None:
    """fsync a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_data(file: BinaryIO) -> None:
    """Bring what was written to an open file to the disk."""
    file.flush()
    os.fdatasync(file.fileno())


def fsync_tree(root: Path) -> None:
    """fsync every file and folder below `root`, and `root` itself."""
    for folder, _, names in os.walk(root, topdown=False):
        for name in names:
            fsync_path(Path(folder) / name)
        fsync_path(Path(folder))


# Opening and locking.


def open_regular(path: Path, *, follow_links: bool = True) -> BinaryIO:
    """Open a regular file for reading. A folder, pipe or device in its place is an OSError, and nothing blocks."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags if follow_links else flags | os.O_NOFOLLOW)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


@contextmanager
def file_lock(path: Path, *, wait: bool = True, mode: int = 0o666) -> Iterator[int]:
    """Hold an exclusive flock on a file, created if missing, and yield its descriptor.

    The kernel releases the lock when the process dies. A symbolic link in its place is not followed. Without `wait`, a
    lock held by another process raises BlockingIOError.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        if wait:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        elif not try_lock(descriptor):
            raise BlockingIOError(errno.EWOULDBLOCK, "locked by another process", str(path))
        yield descriptor
    finally:
        os.close(descriptor)


def try_lock(descriptor: int) -> bool:
    """Take an exclusive flock without waiting; False if another process holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(descriptor: int) -> None:
    """Release a flock for every process that inherited the descriptor; closing it does so only in the last one."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)


# Cache folders.


@functools.cache
def user_cache_folder(name: str) -> Path:
    """Folder of a cache of this user: in the home folder, or a temporary one where home cannot be written."""
    with suppress(RuntimeError):  # HOME is not set and the user has no entry in the user database
        wanted = Path.home() / ".cache" / "nsa" / name
        if os.access(_existing_parent(wanted), os.W_OK | os.X_OK):
            return wanted
    return temporary_cache_folder(name)


def temporary_cache_folder(name: str) -> Path:
    """Folder among the temporary files that only this user can write, the same one every time.

    If another user has put something in its place, a new one for this process: what lies in a cache may be executed.
    """
    folder = Path(tempfile.gettempdir()) / f"nsa-{name}-{os.geteuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022:
        return folder
    return Path(tempfile.mkdtemp(prefix=f"{folder.name}-"))


# Scratch folders.


@contextmanager
def scratch_folder(near: Path) -> Iterator[Path]:
    """A temporary folder on the same disk: in `near`, or in its nearest existing parent."""
    scratch = Path(tempfile.mkdtemp(prefix=_scratch_prefix(os.getpid()), dir=_existing_parent(near)))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def remove_scratch_of(pid: int, near: Path) -> None:
    """Scratch folders that a killed process could not remove itself."""
    for left in _existing_parent(near).glob(f"{_scratch_prefix(pid)}*"):
        shutil.rmtree(left, ignore_errors=True)


def _existing_parent(path: Path) -> Path:
    return next(place for place in (path, *path.absolute().parents) if os.path.isdir(place))


def _scratch_prefix(pid: int) -> str:
    return f".preflight-{pid}-"


# Error messages.


@contextmanager
def storage_errors(problem: str, *, fix: str, if_full: tuple[type[NSAError], str] | None = None) -> Iterator[None]:
    """Turn an `OSError` inside into `DataError("problem (reason). fix")`.

    `if_full` is the exception class and the fix for a disk without room.
    """
    try:
        yield
    except OSError as error:
        kind: type[NSAError] = DataError
        if error.errno in NO_ROOM:
            kind, fix = if_full or (DataError, "Free disk space and run the same command again.")
        reason = error.strerror or str(error)
        where = f": {error.filename}" if error.filename and str(error.filename) not in problem else ""
        raise kind(f"{problem} ({reason}{where}). {fix}") from error


def no_room_error(error: OSError, run_folder: Path) -> CheckpointError:
    """The exception for a run that met a full file system: names which one (run folder, /dev/shm, temporary files)."""
    full = _full_place(error, run_folder)
    if full == SHARED_MEMORY:
        return CheckpointError(
            f"shared memory ({SHARED_MEMORY}) is full ({error.strerror}): processes that prepare data or exchange "
            f"gradients need it. The disk of {run_folder} is not at fault. Remove what dead processes left in "
            f"{SHARED_MEMORY}, or give the container more (--shm-size), and add --resume."
        )
    if full != run_folder:
        return CheckpointError(
            f"{full} is full ({error.strerror}): what is saved in {run_folder} is untouched. Free space there and add "
            f"--resume."
        )
    return CheckpointError(
        f"{run_folder} could not be written ({error.strerror}): what is saved there is untouched. Free disk space and "
        f"add --resume."
    )


def _full_place(error: OSError, run_folder: Path) -> Path:
    """The place the error names; if it names none (semaphores do not), the first one without room."""
    temporary = Path(tempfile.gettempdir())
    places = (run_folder, SHARED_MEMORY, temporary)
    if error.filename is not None:
        named = Path(os.fsdecode(error.filename)).absolute()
        return next((place for place in places if named.is_relative_to(place.absolute())), named)
    if error.errno != errno.ENOSPC:
        return run_folder  # a quota, or a limit on the size of files
    return next((place for place in places if _is_full(place)), run_folder)


def _is_full(place: Path) -> bool:
    try:
        space = os.statvfs(place)
    except OSError:
        return False
    no_inodes_left = space.f_files > 0 and space.f_favail == 0
    return space.f_bavail * space.f_frsize < _ROOM_BYTES or no_inodes_left


def hash_of_files(files: Iterable[Path], folder: Path) -> str:
    """20 hex digits that change with the name or content of any of these files below `folder`."""
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:20]


def git_commit(file: Path) -> tuple[str, bool] | None:
    """The commit of the checkout that this file belongs to, and whether any file differs from it.

    None without git, and where git does not track the file: a package may be installed inside another checkout.
    """

    def git(*words: str) -> str:
        command = ["git", "-C", str(file.parent), *words]
        run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_GIT_TIMEOUT_S)
        return run.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", file.name)
        return git("rev-parse", "HEAD"), bool(git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):  # git is missing, or refuses another user's checkout
        return None


def readable(file: int | IO[Any], timeout_s: float) -> bool:
    """Whether a pipe has something to read, or has ended, within this time. `select.select` refuses file numbers above
    1,023, which a process with many open files has."""
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))
