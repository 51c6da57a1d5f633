"""Compiles the C++ kernels on first use, once per machine; a failed build gives a reason.

The library has a plain C interface and no torch headers: it depends on the compiler and the sources alone, and builds
in seconds. Its file name is a hash of everything that goes into it. Several processes may start at once: one builds,
the others wait for it, and the finished file appears by one rename. Loading a library runs its code, so one that
another user could have put there or changed is refused.
"""

import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

from nsa.files import file_lock, replace_file, user_cache_folder

SOURCES = Path(__file__).parent / "src"
COMPILERS = ("g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi")
# One file per instruction set: only what is in it may use that set, so the rest runs anywhere.
X86_FLAGS: dict[str, tuple[str, ...]] = {
    "isa_avx2": ("-mavx2", "-mfma", "-mf16c"),
    "isa_avx512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-mf16c"),
    "isa_amx": (
        *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-mf16c"),
        *("-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
    ),
}

PLAIN_ONLY = "-DNSA_PLAIN_ONLY"
"""As an extra flag: only the plain instruction set is compiled, which takes a fraction of the time."""

_folder: Path | None = None
_extra_flags: tuple[str, ...] = ()


class BuildError(RuntimeError):
    """The compiler is missing or failed; the message is a reason that `why_not` can give."""


def set_cache_folder(folder: Path | None) -> None:
    """Set the folder of compiled kernels; None for the user's cache folder, or a temporary one if home is read-only."""
    global _folder
    _folder = folder


def set_extra_flags(flags: tuple[str, ...]) -> None:
    """Flags after the usual ones for every source file and the linker, such as a sanitizer's; () for none."""
    global _extra_flags
    _extra_flags = flags


def cache_folder() -> Path:
    return _folder or user_cache_folder("kernels")


def is_built() -> bool:
    """Whether the next use compiles nothing: nothing is left to do, or it cannot be done."""
    try:
        return _path(_compiler(), _units()).exists()
    except BuildError:
        return True


def library() -> Path:
    """The compiled kernels, built if they are not there yet."""
    compiler, units = _compiler(), _units()
    path = _path(compiler, units)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _require_trusted(path.parent, path.parent.stat())
        if not os.path.lexists(path):
            with file_lock(path.with_suffix(".lock"), mode=0o600):
                if not os.path.lexists(path):
                    _build(compiler, units, path)
        _require_trusted(path, path.lstat())
    except OSError as error:
        raise BuildError(
            f"the compiled kernels cannot be kept in {path.parent} ({error}); set runtime.kernel_cache"
        ) from error
    return path


def _require_trusted(path: Path, status: os.stat_result) -> None:
    """Refuse a folder or a library that anyone but this user and root can change."""
    shared = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX:
        shared = 0  # as in /tmp: others may add files, which are checked by their owner, and replace none of ours
    if not stat.S_ISDIR(status.st_mode) and not stat.S_ISREG(status.st_mode):
        reason, fix = "is no regular file", "Remove it"
    elif status.st_uid not in (os.geteuid(), 0):
        reason, fix = f"belongs to user {status.st_uid}, not to {os.geteuid()}", "Remove it"
    elif shared:
        reason, fix = f"can be written by others (mode {stat.S_IMODE(status.st_mode):04o})", f"Run chmod go-w {path}"
    else:
        return
    raise BuildError(
        f"the compiled kernels are not loaded: {path} {reason}, and loading a library runs its code. {fix}, or set "
        f"runtime.kernel_cache to a folder of your own"
    )


def _compiler() -> str:
    for name in COMPILERS:
        if path := shutil.which(name):
            return path
    raise BuildError(f"no C++ compiler ({' or '.join(COMPILERS)}) on PATH; install one, e.g. apt-get install g++")


def _units() -> dict[str, tuple[str, ...]]:
    """Source file (without suffix) → the flags it is compiled with."""
    units: dict[str, tuple[str, ...]] = {"entry": FLAGS, "isa_plain": FLAGS}
    if platform.machine() in ("x86_64", "AMD64") and PLAIN_ONLY not in _extra_flags:
        units |= {name: (*FLAGS, *flags) for name, flags in X86_FLAGS.items()}
    return {name: (*flags, *_extra_flags) for name, flags in units.items()}


def _path(compiler: str, units: dict[str, tuple[str, ...]]) -> Path:
    return cache_folder() / f"nsa_cpu_{_fingerprint(compiler, units)}.so"


def _fingerprint(compiler: str, units: dict[str, tuple[str, ...]]) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    digest = hashlib.sha256(f"{compiler}\n{version}\n{platform.machine()}\n{sorted(units.items())}\n".encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:20]


def _build(compiler: str, units: dict[str, tuple[str, ...]], path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as work:
        jobs = [
            _start([compiler, *flags, "-c", str(SOURCES / f"{unit}.cpp"), "-o", f"{work}/{unit}.o"])
            for unit, flags in units.items()
        ]
        for job in jobs:
            _finish(job)
        linked = f"{work}/{path.name}"
        objects = [f"{work}/{unit}.o" for unit in units]
        _finish(_start([compiler, "-shared", "-pthread", *_extra_flags, *objects, "-o", linked]))
        os.chmod(linked, 0o755)  # whatever the umask: a library that others can write is not loaded
        replace_file(Path(linked), path)


def _start(command: list[str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _finish(job: "subprocess.Popen[str]") -> None:
    output, _ = job.communicate()
    if job.returncode:
        assert isinstance(job.args, list)
        tail = " / ".join(output.strip().splitlines()[-3:])
        raise BuildError(f"{Path(job.args[0]).name} failed with code {job.returncode} on the CPU kernels ({tail})")
