"""The three sanitizers: compiler flags, and processes in which what they report is kept in files."""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nsa.errors import ConfigError
from nsa.files import user_cache_folder
from nsa.kernels.cpu import build

# -g1: line numbers in reports, in half the time that the compiler takes for all of -g.
_FLAGS = ("-O1", "-g1", "-fno-omit-frame-pointer")
_INTERPRETER = re.compile(r"^ +#\d+ .*( Python/| Objects/| Modules/| Include/|libffi|libpython|_ctypes|bin/python)")
_AVX2_FLAGS = ("-mavx2", "-mfma", "-mf16c")


@dataclass(frozen=True)
class SanitizerKind:
    runtime: str
    """Library that must be loaded before all others: Python itself is not instrumented."""
    variable: str
    options: str
    flags: tuple[str, ...]
    symbol: bytes
    """Occurs in every library that was compiled with it."""


SANITIZERS = {
    "address": SanitizerKind(
        "libasan.so", "ASAN_OPTIONS",
        "detect_leaks=0:detect_stack_use_after_return=1:allocator_may_return_null=1:halt_on_error=1",
        ("-fsanitize=address",), b"__asan_report_",
    ),
    "undefined": SanitizerKind(
        "libubsan.so", "UBSAN_OPTIONS", "print_stacktrace=1:halt_on_error=1",
        ("-fsanitize=undefined", "-fno-sanitize-recover=undefined"), b"__ubsan_handle_",
    ),
    # Interceptors stay silent in libraries without instrumentation (torch, its OpenMP): nothing else is suppressed.
    "thread": SanitizerKind(
        "libtsan.so", "TSAN_OPTIONS", "ignore_noninstrumented_modules=1:halt_on_error=0",
        ("-fsanitize=thread",), b"__tsan_func_entry",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class SanitizedRun:
    code: int
    reports: tuple[str, ...]

    @property
    def clean(self) -> bool:
        return self.code == 0 and not self.reports


def use(name: str, *, short: bool, folder: Path | None = None) -> None:
    """From now on this process builds and loads kernels with the sanitizer.

    short: one instruction set; for addresses with the vectors of AVX2, whose loads are wider than the plain ones.
    """
    flags = (*_FLAGS, *SANITIZERS[name].flags)
    if short:
        flags += (build.PLAIN_ONLY, *(_AVX2_FLAGS if name == "address" and _has_avx2() else ()))
    build.set_extra_flags(flags)
    build.set_cache_folder(folder or user_cache_folder(f"kernels-{name}-sanitizer"))


def is_instrumented(name: str, library: Path) -> bool:
    return SANITIZERS[name].symbol in library.read_bytes()


def run(name: str, command: Sequence[str]) -> SanitizedRun:
    """Run a command with the sanitizer's runtime loaded; its output goes where this process's goes."""
    kind = SANITIZERS[name]
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            # The C++ library too: a runtime that finds no __cxa_throw when it starts ends the process at the first one.
            "LD_PRELOAD": f"{_found(kind.runtime)} {_found('libstdc++.so.6')}",
            kind.variable: f"{kind.options}:log_path={folder}/report",
        }
        code = subprocess.run(command, env=environment, check=False).returncode
        reports = tuple(_without_interpreter(path) for path in sorted(Path(folder).iterdir()))
    return SanitizedRun(code, reports)


def _without_interpreter(report: Path) -> str:
    """The report without the frames of Python and ctypes, of which there are a hundred below each call."""
    lines = report.read_text(errors="replace").splitlines()
    return "\n".join(line for line in lines if not _INTERPRETER.search(line))


def _found(library: str) -> Path:
    compiler = shutil.which(build.COMPILERS[0])
    path = "" if compiler is None else _output([compiler, f"-print-file-name={library}"])
    if not Path(path).is_absolute():
        raise ConfigError(
            f"{library} was not found: the sanitizers need {build.COMPILERS[0]} and its runtime libraries. "
            f"Install it, e.g. apt-get install g++."
        )
    return Path(path)


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _has_avx2() -> bool:
    cpu_info = Path("/proc/cpuinfo")
    return cpu_info.exists() and " avx2 " in cpu_info.read_text()
