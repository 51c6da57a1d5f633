"""The CPU kernels under the address, undefined behaviour and thread sanitizers: a short set, and the whole.

That the sanitizers see anything is tested with a library that is wrong on purpose, built and run in the same way.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from nsa.kernels.cpu import build
from proofs.sanitize_cpu import sanitizers

pytestmark = pytest.mark.nightly
ROOT = Path(__file__).parents[3]
# One function per sanitizer that does what it exists to find.
WRONG = """
#include <cstdint>
#include <cstdlib>
#include <thread>
#pragma GCC visibility push(default)
extern "C" {
int address(int n) { char* room = static_cast<char*>(std::malloc(8)); int x = room[n + 8]; std::free(room); return x; }
int undefined(int n) { return INT32_MAX - 1 + 2 * n; }
int thread(int n) {
  int total = 0;
  auto add = [&] { for (int i = 0; i < n * 1000; ++i) ++total; };
  std::thread a(add), b(add);
  a.join(), b.join();
  return total;
}
int right(int n) { return n; }
}
"""
CALL = "import ctypes, sys; getattr(ctypes.CDLL(sys.argv[1]), sys.argv[2])(1)"


@pytest.fixture
def wrong_library(tmp_path, monkeypatch):
    """Builds `WRONG` as the kernels are built."""

    def library(name: str) -> Path:
        sources = tmp_path / "src"
        sources.mkdir()
        (sources / "entry.cpp").write_text(WRONG)
        (sources / "isa_plain.cpp").write_text("")
        monkeypatch.setattr(build, "SOURCES", sources)
        sanitizers.use(name, short=True, folder=tmp_path / "built")
        return build.library()

    yield library
    build.set_extra_flags(())
    build.set_cache_folder(None)


@pytest.mark.parametrize("name", sanitizers.SANITIZERS)
def test_a_wrong_function_is_reported_and_a_right_one_is_not(wrong_library, name):
    library = wrong_library(name)
    assert sanitizers.is_instrumented(name, library)
    command = [sys.executable, "-c", CALL, str(library)]
    assert sanitizers.run(name, [*command, "right"]) == sanitizers.SanitizedRun(0, ())
    wrong = sanitizers.run(name, [*command, name])
    assert not wrong.clean
    assert "entry.cpp" in wrong.reports[0]


def test_a_library_without_instrumentation_is_recognised():
    usual = build.library()
    assert not any(sanitizers.is_instrumented(name, usual) for name in sanitizers.SANITIZERS)


def run(name: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "proofs.sanitize_cpu", name, *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", sanitizers.SANITIZERS)
def test_random_arguments_and_threads(name):
    ended = run(name, "--short")
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]
    assert f"{name}: 0 reports" in ended.stdout


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", sanitizers.SANITIZERS)
def test_all_kernel_tests_on_every_instruction_set(name):
    ended = run(name)
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]
