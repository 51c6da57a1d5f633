"""Names the file system that is full, for errors that do not: the run folder's, shared memory or the temporary one."""

import errno
import os
import tempfile
from pathlib import Path

from nsa.errors import CheckpointError

SHARED_MEMORY = Path("/dev/shm")
_ROOM_BYTES = 1 << 16


def no_room_error(error: OSError, run_folder: Path) -> CheckpointError:
    """The error for the user, with what to do about the file system that is full."""
    full = _full_place(error, run_folder)
    if full == SHARED_MEMORY:
        return CheckpointError(
            f"shared memory ({SHARED_MEMORY}) is full ({error.strerror}): processes that prefetch data or exchange "
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
    """Where the error says; where it says nothing (semaphores, for one), the first place that has no room."""
    temporary = Path(tempfile.gettempdir())
    places = (run_folder, SHARED_MEMORY, temporary)
    if error.filename is not None:
        named = Path(os.fsdecode(error.filename)).absolute()
        return next((place for place in places if named.is_relative_to(place.absolute())), named)
    if error.errno != errno.ENOSPC:
        return run_folder  # a quota, or a limit of the size of files
    return next((place for place in places if _is_full(place)), run_folder)


def _is_full(place: Path) -> bool:
    try:
        found = os.statvfs(place)
    except OSError:
        return False
    no_names_left = found.f_files > 0 and found.f_favail == 0
    return found.f_bavail * found.f_frsize < _ROOM_BYTES or no_names_left
