"""Compiling on first use: once, whoever asks, and with a reason where it cannot be."""

import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from nsa.errors import KernelUnavailable
from nsa.geometry import Geometry
from nsa.kernels import registry
from nsa.kernels.cpu import build, library, why_not
from nsa.kernels.registry import BackendRequest, KernelShape, plan

DEVICE, SHAPE = torch.device("cpu"), KernelShape(2, 6, 64, 64, Geometry(l=32, d=16, l_sel=64, n_sel=16, w=512))

BUILD_IN_A_PROCESS = """
import importlib.util, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("build", sys.argv[4])  # without torch, which takes its time
build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)
build.COMPILERS = (sys.argv[1],)
build.SOURCES = Path(sys.argv[2])
build.X86_FLAGS = {}
build.set_cache_folder(Path(sys.argv[3]))
print(build.library())
"""


@pytest.fixture
def unloaded():
    """The library and the plans made with it forgotten for a test, and loaded again from the usual place after it."""
    library.load.cache_clear()
    registry._plan_once.cache_clear()
    yield
    build.set_cache_folder(None)
    library.load.cache_clear()
    registry._plan_once.cache_clear()


@pytest.fixture
def small_sources(tmp_path):
    """Two units that compile in no time."""
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "entry.cpp").write_text('extern "C" int answer() { return 42; }\n')
    (folder / "isa_plain.cpp").write_text("int other() { return 0; }\n")
    return folder


def test_without_a_compiler_auto_takes_portable_and_says_why(monkeypatch, unloaded, tmp_path):
    monkeypatch.setattr(build, "COMPILERS", ("no-such-compiler",))
    build.set_cache_folder(tmp_path)
    choice = plan(BackendRequest(), DEVICE, torch.float32, SHAPE).choices[0]
    assert choice.backend == "portable"
    assert choice.reason.startswith("cpu: no C++ compiler (no-such-compiler) on PATH; install one")


def test_the_last_output_of_a_failing_compiler_is_shown(monkeypatch, unloaded, small_sources, tmp_path):
    (small_sources / "entry.cpp").write_text("#error the moon is missing\n")
    monkeypatch.setattr(build, "SOURCES", small_sources)
    monkeypatch.setattr(build, "X86_FLAGS", {})
    build.set_cache_folder(tmp_path / "cache")
    reason = why_not("sliding", DEVICE, torch.float32, SHAPE)
    assert "failed with code 1 on the CPU kernels" in reason
    assert "the moon is missing" in reason
    assert not list((tmp_path / "cache").glob("*.so"))


def test_a_folder_that_cannot_be_written_is_a_reason(unloaded, tmp_path):
    (tmp_path / "file").write_text("")
    build.set_cache_folder(tmp_path / "file" / "below")
    assert "set runtime.kernel_cache" in why_not("sliding", DEVICE, torch.float32, SHAPE)


def test_processes_that_start_together_compile_once(small_sources, tmp_path):
    log = tmp_path / "compiled"
    compiler = tmp_path / "compiler"
    compiler.write_text(
        f'#!/bin/sh\ncase "$*" in *--version*) ;; *) echo run >> {log}; sleep 0.2 ;; esac\nexec g++ "$@"\n'
    )
    compiler.chmod(0o755)
    command = [sys.executable, "-c", BUILD_IN_A_PROCESS, str(compiler), str(small_sources), str(tmp_path / "cache")]
    command.append(build.__file__)
    with ThreadPoolExecutor(3) as pool:
        paths = list(
            pool.map(lambda _: subprocess.run(command, capture_output=True, text=True, check=True).stdout, "123")
        )
    assert len(set(paths)) == 1
    assert log.read_text().split() == ["run"] * 3  # two units and the linker
    assert [p.suffix for p in (tmp_path / "cache").glob("*.so")] == [".so"]


def test_another_source_flag_or_compiler_is_another_file(small_sources, monkeypatch):
    monkeypatch.setattr(build, "SOURCES", small_sources)
    units = {"entry": ("-O1",)}
    names = [build._fingerprint("g++", units), build._fingerprint("g++", {"entry": ("-O2",)})]
    names.append(build._fingerprint("cc", units))
    (small_sources / "entry.cpp").write_text("int changed;\n")
    names.append(build._fingerprint("g++", units))
    assert len(set(names)) == 4


@pytest.mark.parametrize(
    ("device", "dtype", "reason"),
    [("cuda", torch.float32, "it runs on a CPU, not on cuda"), ("cpu", torch.float64, "not torch.float64")],
)
def test_what_it_cannot_compute_has_a_reason(device, dtype, reason):
    assert reason in why_not("sliding", torch.device(device), dtype, SHAPE)


def test_an_instruction_set_the_machine_lacks_is_refused(monkeypatch):
    monkeypatch.setattr(library, "best_isa", lambda: "avx2")
    with pytest.raises(KernelUnavailable):
        library.force_isa("amx")


ANOTHER_USER = 65534


@pytest.fixture
def built(monkeypatch, unloaded, small_sources, tmp_path):
    """A small library in a cache of its own, built as users build it, whatever their umask."""
    monkeypatch.setattr(build, "SOURCES", small_sources)
    monkeypatch.setattr(build, "X86_FLAGS", {})
    folder = tmp_path / "cache"
    build.set_cache_folder(folder)
    umask = os.umask(0o002)
    yield folder, build.library()
    os.umask(umask)


def test_the_cache_is_private_to_its_user(built):
    folder, path = built
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) & 0o022 == 0
    assert build.library() == path


def _give_away(path):
    os.chown(path, ANOTHER_USER, ANOTHER_USER)


def _link_to_another(path):
    elsewhere = path.parent.parent / "planted.so"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


TAMPERED = {
    "library of another user": lambda folder, path: _give_away(path),
    "library that a group may write": lambda folder, path: path.chmod(0o775),
    "library that anyone may write": lambda folder, path: path.chmod(0o757),
    "library behind a symbolic link": lambda folder, path: _link_to_another(path),
    "folder that anyone may write": lambda folder, path: folder.chmod(0o777),
    "folder that a group may write": lambda folder, path: folder.chmod(0o770),
    "folder of another user": lambda folder, path: _give_away(folder),
}


@pytest.mark.parametrize("how", TAMPERED)
def test_a_library_that_others_can_change_is_not_loaded(built, how, monkeypatch):
    folder, path = built
    if "another user" in how and os.geteuid() != 0:  # only root can give a file away: be another user instead
        monkeypatch.setattr(os, "geteuid", lambda: ANOTHER_USER)
    else:
        TAMPERED[how](folder, path)
    with pytest.raises(build.BuildError):
        build.library()


def test_auto_does_not_load_it_either_and_says_why(built):
    _, path = built
    path.chmod(0o777)
    other = SHAPE._replace(geometry=replace(SHAPE.geometry, w=511))
    choice = plan(BackendRequest(), DEVICE, torch.float32, other).choices[0]
    assert choice.backend == "portable"
    assert "not loaded" in choice.reason


def test_a_folder_that_all_share_is_safe_where_nobody_can_replace_a_file(built):
    folder, path = built
    folder.chmod(0o1777)  # as /tmp
    assert build.library() == path
    path.chmod(0o775)
    with pytest.raises(build.BuildError):
        build.library()


def test_a_lock_file_that_is_a_link_is_not_written_through(built):
    folder, path = built
    folder.chmod(0o1777)
    path.unlink()
    victim = folder.parent / "victim"
    victim.write_text("keep")
    lock = path.with_suffix(".lock")
    lock.unlink()
    lock.symlink_to(victim)
    with pytest.raises(build.BuildError):
        build.library()
    assert victim.read_text() == "keep"
