"""Machines on which Triton cannot launch, built for real: what is said, with its fix, and which backend runs instead.

The processes have a PATH, a home, a cache or a package of their own. One query is replaced, whether there is a GPU;
Triton's C module is compiled for it against a libcuda.so.1 without content.
"""

import ctypes
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from shutil import which

import pytest

SPEC = find_spec("triton")
if SPEC is None:
    pytest.skip("triton is in the dev extra", allow_module_level=True)
ROOT = Path(__file__).parents[3]
TRITON = Path(SPEC.origin).parent  # not imported here: each process imports its own


def ask(log: str, variables: dict[str, str], before: str, libcuda: str, kernel_cache: str | None) -> None:
    """Print what is said in a process with these variables."""
    for number in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    assert "triton" not in sys.modules
    os.environ.clear()
    os.environ.update(variables)
    tempfile.tempdir = None
    exec(before)
    ctypes.CDLL(libcuda, ctypes.RTLD_GLOBAL)  # as torch loads it
    import torch

    torch.cuda.is_available = lambda: True

    from nsa.geometry import Geometry
    from nsa.kernels.choice_text import slow_kernels_warning
    from nsa.kernels.cpu.build import set_cache_folder
    from nsa.kernels.interface import KernelShape
    from nsa.kernels.registry import BACKENDS, BackendRequest, plan
    from nsa.kernels.triton_environment import triton_facts, triton_faults

    set_cache_folder(Path(kernel_cache) if kernel_cache else None)
    where = torch.device("cuda"), torch.bfloat16, KernelShape(2, 6, 64, 64, Geometry())
    why = BACKENDS["triton"].why_not("selected", *where)
    warning = slow_kernels_warning(plan(BackendRequest(), *where).choices, "cuda") if why else None
    faults = [fault._asdict() for fault in triton_faults("cuda")]
    answer = json.dumps(dict(why=why, warning=warning, faults=faults, facts=triton_facts()))
    os.write(1, f"\n{answer}\n".encode())


@pytest.fixture(scope="module")
def libcuda(tmp_path_factory):
    """A library of the driver's name, with every function of its that Triton's C module calls."""
    folder = tmp_path_factory.mktemp("driver")
    calls = set(re.findall(r"\bcu[A-Z]\w+", (TRITON / "backends/nvidia/driver.c").read_text()))
    source = "".join(f"void {name}(void) {{}}\n" for name in sorted(calls))
    library = folder / "libcuda.so.1"
    command = ["gcc", "-x", "c", "-", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library)]
    subprocess.run(command, input=source, text=True, check=True)
    return library


class Machine:
    """A process on a machine with these variables; home and temporary files are the test's own."""

    def __init__(self, folder: Path, libcuda: Path) -> None:
        self.folder, self.libcuda, self.before, self.kernel_cache, self.prefix = folder, libcuda, "", None, []
        for name in ("home", "tmp"):
            (folder / name).mkdir()
        self.variables = {
            name: text
            for name, text in os.environ.items()
            if not name.startswith(("TRITON_", "NSA_")) and name not in ("CC", "CPATH")
        }
        self.variables |= dict(
            HOME=str(folder / "home"), TMPDIR=str(folder / "tmp"), TRITON_LIBCUDA_PATH=str(libcuda.parent)
        )

    def asked(self) -> dict:
        log = self.folder / f"log{len(list(self.folder.glob('log*')))}"
        arguments = str(log), self.variables, self.before, str(self.libcuda), self.kernel_cache
        if self.prefix:
            program = f"from {ask.__module__} import ask; ask(*{arguments!r})"
            code = subprocess.run(
                [*self.prefix, sys.executable, "-c", program], cwd=ROOT, env=self.variables
            ).returncode
        else:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["torch", "nsa.kernels.registry"])
            process = context.Process(target=ask, args=arguments)
            process.start()
            process.join()
            code = process.exitcode
        text = log.read_text()
        assert code == 0, text
        return {**json.loads(text.splitlines()[-1]), "log": text}


@pytest.fixture
def machine(tmp_path, libcuda):
    return Machine(tmp_path, libcuda)


def without_compiler(machine):
    programs = machine.folder / "programs"
    programs.mkdir()
    if file := which("file"):  # Triton's names of what it keeps depend on it
        (programs / "file").symlink_to(file)
    machine.variables["PATH"] = str(programs)


def with_a_compiler_that_is_not_there(machine):
    machine.variables["CC"] = "gcc-nowhere"


def with_a_compiler_that_fails(machine):
    cc = machine.folder / "cc"
    cc.write_text("#!/bin/sh\necho 'fatal error: stdio.h: No such file or directory' >&2\nexit 1\n")
    cc.chmod(0o755)
    machine.variables["CC"] = str(cc)


def without_headers(machine):
    machine.before = (
        "import sysconfig\n"
        "for scheme in sysconfig._INSTALL_SCHEMES.values():\n"
        f"    scheme['include'] = {str(machine.folder / 'include')!r}"
    )


def with_a_cache_that_is_a_file(machine):
    (machine.folder / "file").write_text("")
    machine.variables["TRITON_CACHE_DIR"] = str(machine.folder / "file" / "cache")


def without_room(machine):
    """A limit on the size of files, as a full quota."""
    machine.variables["TRITON_CACHE_DIR"] = str(machine.folder / "cache")
    machine.before = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, 1 << 19))"


def with_a_broken_package(machine):
    package = machine.folder / "packages" / "triton"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('libtriton.so: version `GLIBC_2.99 not found')")
    machine.before = f"sys.path.insert(0, {str(package.parent)!r})"


def with_half_a_package(machine):
    with_a_broken_package(machine)
    (machine.folder / "packages/triton/__init__.py").write_text("")


def without_ptxas(machine):
    """Triton as it is installed, but for its folder of programs."""
    copy, inner = machine.folder / "packages" / "triton", ("backends", "backends/nvidia")
    for folder in ("", *inner):
        (copy / folder).mkdir(parents=True)
        for child in (TRITON / folder).iterdir():
            if f"{folder}/{child.name}".lstrip("/") not in (*inner, "backends/nvidia/bin"):
                (copy / folder / child.name).symlink_to(child)
    machine.before = f"sys.path.insert(0, {str(copy.parent)!r})"


def without_libcuda(machine):
    machine.variables["TRITON_LIBCUDA_PATH"] = str(machine.folder / "home")


FAULTS = [
    (without_compiler, "compiler", "no C compiler", "apt-get install -y gcc"),
    (with_a_compiler_that_is_not_there, "compiler", "CC is 'gcc-nowhere'", "unset CC"),
    (with_a_compiler_that_fails, "build", "fatal error: stdio.h", "libc6-dev"),
    (without_headers, "headers", "Python.h is missing", f"apt-get install -y python3.{sys.version_info.minor}-dev"),
    (with_a_cache_that_is_a_file, "cache", "Not a directory", "unset TRITON_CACHE_DIR"),
    (without_room, "cache", "File too large", "unset TRITON_CACHE_DIR"),
    (with_a_broken_package, "package", "GLIBC_2.99", "pip install --force-reinstall --no-deps triton=="),
    (with_half_a_package, "package", "cannot import name 'knobs'", "pip install --force-reinstall"),
    (without_ptxas, "ptxas", "Cannot find ptxas", "pip install --force-reinstall --no-deps triton=="),
    (without_libcuda, "driver", "libcuda.so.1", "export TRITON_LIBCUDA_PATH="),
]


@pytest.mark.parametrize(("build", "subject", "problem", "fix"), FAULTS, ids=[row[0].__name__ for row in FAULTS])
def test_a_machine_on_which_triton_cannot_launch_says_why_and_what_mends_it(machine, build, subject, problem, fix):
    build(machine)
    answer = machine.asked()
    (fault,) = answer["faults"]
    assert fault["subject"] == subject
    assert problem in fault["problem"]
    assert fix in fault["fix"]
    assert fault["problem"] in answer["why"]
    assert fix in answer["why"]
    assert answer["warning"].startswith("slow kernels: all branches run on the portable backend, not on triton: Triton")
    assert answer["why"] in answer["warning"]
    assert not list(machine.folder.rglob("self_check_*.json")), "nothing of this is a verdict of the kernels"


def test_a_sound_machine_has_no_fault_and_needs_its_compiler_once(machine):
    answer = machine.asked()
    assert (answer["why"], answer["faults"]) == (None, [])
    assert answer["facts"]["cache"] == str(machine.folder / "home/.triton/cache")
    assert list(machine.folder.glob("home/.triton/cache/*/cuda_utils*.so"))
    without_compiler(machine)
    assert machine.asked()["faults"] == [], "Triton keeps what it compiled"


def test_everything_that_is_missing_is_said_at_once(machine):
    without_compiler(machine)
    without_headers(machine)
    without_libcuda(machine)
    assert [fault["subject"] for fault in machine.asked()["faults"]] == ["compiler", "headers", "driver"]


@pytest.mark.parametrize("kernel_cache", [True, False], ids=["kernel cache", "temporary files"])
def test_where_home_cannot_be_written_triton_keeps_kernels_in_a_folder_of_ours(machine, kernel_cache):
    (machine.folder / "file").write_text("")
    machine.variables["HOME"] = str(machine.folder / "file")  # root cannot write below a file either
    machine.kernel_cache = str(machine.folder / "kernels") if kernel_cache else None
    answer = machine.asked()
    assert answer["faults"] == []
    folder = machine.folder / "kernels/triton" if kernel_cache else machine.folder / f"tmp/nsa-triton-{os.geteuid()}"
    assert answer["facts"]["cache"] == str(folder)
    assert list(folder.glob("*/cuda_utils*.so"))
    assert f"they go to {folder}" in answer["log"]


@pytest.mark.parametrize(
    ("requirement", "command"),
    [
        ("triton==9.9.9; platform_system == 'Linux'", "triton==9.9.9"),
        ("pytorch-triton-rocm (==9.9.9+git1)", "pytorch-triton-rocm==9.9.9+git1"),
        ("numpy>=1", None),
    ],
)
def test_another_triton_than_torch_was_built_for_is_warned_about(tmp_path, monkeypatch, requirement, command):
    from nsa.kernels.triton_environment import triton_facts, version_warning

    (tmp_path / "torch-2.13.0.dist-info").mkdir()
    metadata = f"Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\nRequires-Dist: {requirement}\n"
    (tmp_path / "torch-2.13.0.dist-info" / "METADATA").write_text(metadata)
    monkeypatch.syspath_prepend(tmp_path)
    warning = version_warning()
    assert (warning is None) == (command is None)
    if command is not None:
        assert f"triton {triton_facts()['version']} is installed" in warning
        assert f"pip install --force-reinstall --no-deps {command}" in warning


@pytest.mark.skipif(which("unshare") is None, reason="it mounts a file system of its own")
def test_libraries_are_not_kept_where_none_can_be_loaded(machine):
    home, script = machine.folder / "home", 'mount -t tmpfs -o noexec,size=16m none "$HOME" && exec "$@"'
    machine.prefix = ["unshare", "--mount", "--map-root-user", "sh", "-c", script, "sh"]
    answer = machine.asked()
    assert answer["faults"] == []
    assert not list(home.iterdir()), "the mount ended with the process"
    assert answer["facts"]["cache"] == str(machine.folder / f"tmp/nsa-triton-{os.geteuid()}")
    assert "mounted noexec" in answer["log"]
