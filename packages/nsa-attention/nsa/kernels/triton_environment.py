"""What Triton needs of a machine before it can launch a kernel: its package, a cache folder, a C compiler with Python's
headers, the driver's library, ptxas.

What is missing says nothing about the kernels: it is probed before they are checked and kept in no record. Triton's
cache moves to the kernel cache where its default folder cannot be used.
"""

import importlib.metadata
import logging
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import NamedTuple

import torch

from nsa.files import temporary_cache_folder
from nsa.kernels.cpu.build import cache_folder

_log = logging.getLogger(__name__)

_PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
_TESTED = "3.7.1"
_TRIAL_BYTES = 1 << 20
"""Written to see whether a folder has room."""
_MOST_CHARACTERS = 300
_INSTALL_COMPILER = "apt-get install -y gcc libc6-dev, or dnf install -y gcc, or conda install gcc"
_MODULE = """
#include <Python.h>
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "nsa_probe"};
PyMODINIT_FUNC PyInit_nsa_probe(void) { return PyModule_Create(&module); }
"""
"""Compiled where there is no GPU, in place of Triton's own module."""


class EnvironmentFault(NamedTuple):
    """One thing that keeps Triton from running on this machine, whatever the kernels are."""

    subject: str
    """package, cache, compiler, headers, driver, ptxas or build."""
    problem: str
    fix: str

    def __str__(self) -> str:
        return f"{self.problem}; {self.fix}"


@cache
def triton_faults(device_type: str) -> tuple[EnvironmentFault, ...]:
    """Everything that keeps Triton from compiling and launching kernels here; empty if it can.

    Takes the steps of a first launch. On a GPU the C module that is built is the one that launches, and Triton keeps
    it; without one a module of the same kind is built and loaded.
    """
    try:
        from triton import knobs
        from triton.runtime.build import compile_module_from_src
    except (ImportError, OSError) as error:
        return (package_fault(error),)
    if fault := _cache_fault():
        return (fault,)
    faults = []
    try:
        if device_type == "cuda":
            from triton.runtime import driver

            _ = driver.active.utils
        else:
            with tempfile.TemporaryDirectory(dir=knobs.cache.dir) as folder, knobs.cache.scope():
                knobs.cache.dir = folder
                compile_module_from_src(_MODULE, "nsa_probe")
    except (OSError, RuntimeError, AssertionError, ImportError, subprocess.SubprocessError) as error:
        faults += _build_faults(device_type, error)
    if torch.version.hip is None and (fault := _ptxas_fault()):
        faults.append(fault)
    return tuple(faults)


def package_fault(error: Exception | None = None) -> EnvironmentFault:
    """The fault of a package that is not there, or fails with this error."""
    if find_spec("triton") is None:
        problem = "the package triton is not installed (it comes with torch's GPU builds)"
    else:
        problem = f"the package triton cannot be imported ({error})"
    return EnvironmentFault("package", problem, _install_triton())


def version_warning() -> str | None:
    """Warn of another Triton than the one that this build of torch pins; None without a pin or a Triton."""
    version, pin = triton_facts().get("version"), _pinned_triton()
    if version is None or pin is None or version.partition("+")[0] == pin[1].partition("+")[0]:
        return None
    return (
        f"triton {version} is installed and torch {torch.__version__} was built for {pin[1]}: torch.compile may fail, "
        f"and the kernels are tested with {_TESTED}. Run: {_install_triton()}"
    )


def triton_facts() -> dict[str, str]:
    """Version, cache folder, C compiler and Python headers that Triton uses here; empty where it cannot be imported."""
    try:
        from triton import __version__, knobs
    except (ImportError, OSError):
        return {}
    compiler, headers = _compiler(knobs.build.cc) or "none", str(_header()) if _header().is_file() else "none"
    return {"version": __version__, "cache": knobs.cache.dir, "compiler": compiler, "headers": headers}


def _pinned_triton() -> tuple[str, str] | None:
    """Package and version of Triton that torch's metadata name; builds without GPU support name none."""
    for requirement in importlib.metadata.requires("torch") or ():
        if pin := re.match(r"((?:pytorch-)?triton[\w-]*)\s*\(?==\s*([\w.+]+)", requirement):
            return pin[1], pin[2]
    return None


def _install_triton() -> str:
    package, version = _pinned_triton() or ("triton", _TESTED)
    return f"pip install --force-reinstall --no-deps {package}=={version}"


def _cache_fault() -> EnvironmentFault | None:
    """Let Triton keep kernels in a folder that can be used: its own, or one of ours unless the user named that."""
    from triton import knobs

    own, ours = Path(knobs.cache.dir), cache_folder() / "triton"
    named = str(own) != knobs.cache.get_triton_dir("cache")
    if (why := _why_unusable(own)) is None:
        return None
    for folder in () if named else (ours, temporary_cache_folder("triton")):
        if _why_unusable(folder) is None:
            _log.warning("Triton cannot keep kernels in %s (%s): they go to %s", own, why, folder)
            knobs.cache.dir = str(folder)  # and TRITON_CACHE_DIR, for child processes
            return None
    problem = f"compiled kernels cannot be kept in {own} ({why})"
    fix = "export TRITON_CACHE_DIR=… with a folder that can be written, has room and is not mounted noexec"
    return EnvironmentFault("cache", problem, f"unset TRITON_CACHE_DIR, or {fix}" if named else fix)


def _why_unusable(folder: Path) -> str | None:
    """Why a cache cannot be kept in a folder, and loaded from there; None if it can. Creates the folder."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.statvfs(folder).f_flag & os.ST_NOEXEC:
            return "its file system is mounted noexec"
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_TRIAL_BYTES))
    except OSError as error:
        return error.strerror or str(error)
    return None


def _build_faults(device_type: str, error: Exception) -> list[EnvironmentFault]:
    """Why Triton's C module could not be built or loaded: everything that is missing, else the error itself."""
    from triton import knobs

    faults, named = [], knobs.build.cc
    compiler = _compiler(named)
    if compiler is None:
        problem = f"CC is {named!r}, which is no program" if named else "there is no C compiler (gcc or clang) on PATH"
        fix = "unset CC, or name one that exists" if named else _INSTALL_COMPILER
        faults.append(EnvironmentFault("compiler", problem, fix))
    if not _header().is_file():
        problem = f"the headers of this Python are not installed ({_header()} is missing)"
        fix = f"apt-get install -y {_PYTHON}-dev, or dnf install -y {_PYTHON}-devel, or a Python of uv or conda"
        faults.append(EnvironmentFault("headers", problem, fix))
    if device_type == "cuda" and torch.version.hip is None and not _finds_libcuda():
        problem = "Triton does not find the driver's libcuda.so.1 (ldconfig does not list it)"
        faults.append(EnvironmentFault("driver", problem, f"export TRITON_LIBCUDA_PATH={_libcuda_folder()}"))
    if compiler is not None and not faults:
        why = _compiler_error(compiler) or f"{type(error).__name__}: {error}"
        problem = f"Triton cannot build or load its C module with {compiler} ({why[:_MOST_CHARACTERS]})"
        fix = f"mend it ({_INSTALL_COMPILER}), or free space in {tempfile.gettempdir()}"
        faults.append(EnvironmentFault("build", problem, fix))
    return faults


def _compiler(named: str | None) -> str | None:
    """The program that Triton would start. `named`: by CC."""
    return which(named) if named is not None else which("gcc") or which("clang")


def _header() -> Path:
    scheme = sysconfig.get_default_scheme()
    return Path(sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"], "Python.h")


def _compiler_error(compiler: str) -> str | None:
    """The first error that the compiler prints for a C module of Python; None if it builds one."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            words = [compiler, "-x", "c", "-", "-shared", "-fPIC", f"-I{_header().parent}", "-o", f"{folder}/probe.so"]
            done = subprocess.run(words, input=_MODULE, capture_output=True, text=True, check=False)
    except OSError as error:
        return str(error)
    lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
    return (lines or [f"it ended with code {done.returncode}"])[0] if done.returncode else None


def _finds_libcuda() -> bool:
    from triton.backends.nvidia.driver import libcuda_dirs

    try:
        return any(Path(folder, "libcuda.so.1").exists() for folder in libcuda_dirs())
    except (AssertionError, OSError, subprocess.SubprocessError):
        return False


def _libcuda_folder() -> str:
    """The folder of the library that torch has loaded."""
    loaded = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/libcuda.so" in line]
    return str(Path(loaded[0]).parent) if loaded else "… with the folder of libcuda.so.1"


def _ptxas_fault() -> EnvironmentFault | None:
    from triton import knobs

    try:
        _ = knobs.nvidia.ptxas, knobs.nvidia.ptxas_blackwell
    except (RuntimeError, OSError) as error:
        return EnvironmentFault("ptxas", f"Triton's assembler ptxas cannot be run ({error})", _install_triton())
    return None
