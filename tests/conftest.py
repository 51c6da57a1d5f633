"""Settings of the test processes: one thread each, SIGINT as in a terminal; the longest files first under xdist."""

import functools
import gc
import os
import signal
from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer.testing

from tests.wheel_install import BuiltWheels, WheelInstall, build_wheels

# Three test processes share two cores: with more threads they spin against each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell starts background jobs with SIGINT ignored, which their children inherit: tests that send it would wait.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# CliRunner would build all commands from their annotations for every call.
typer.testing._get_command = functools.cache(typer.testing._get_command)
# More than half a minute each. The scheduler hands out files in order: one of these at the end would run alone.
LONGEST = (
    "tests/proofs/drill/chaos/test_chaos.py",  # this and the next eight: at night
    "tests/experiments/test_miniature.py",
    "tests/nsa/kernels/test_sanitizers.py",
    "tests/ops/test_slurm.py",
    "tests/ops/test_ssh.py",
    "tests/ops/test_alerts_live.py",
    "tests/nsa/kernels/test_triton_drill.py",
    "tests/docs/test_site.py",  # builds what the other tests of the pages wait for
    "tests/docs/test_user_pages.py",
    "tests/proofs/drill/test_drill.py",
    "tests/examples/test_examples.py",
    "tests/nsa_train/planning/test_activations.py",
    "tests/nsa_train/train/engine/test_contract.py",
    "tests/nsa_train/train/engine/test_nan_guard_runs.py",
    "tests/fuzz/test_commands.py",
    "tests/test_memory_and_time_bombs.py",
    "tests/nsa_train/train/launch/test_launcher.py",
    "tests/nsa/core/test_kv_cache.py",
    "tests/nsa/kernels/test_portable_on_gpu.py",
    "tests/nsa/kernels/test_backends.py",
    "tests/nsa/hf/test_generation.py",
    "tests/nsa/check/test_gpu_check.py",
    "tests/test_wheel.py",
    "tests/nsa_train/train/engine/test_checkpointer.py",
    "tests/nsa_train/train/engine/test_transformer.py",
    "tests/nsa_train/train/test_signal_handlers.py",
    "tests/nsa_train/train/test_resume.py",
    "tests/nsa_train/train/test_layer_patterns.py",
    "tests/nsa_train/train/launch/test_rendezvous.py",
    "tests/test_one_definition.py",
)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import the tests without garbage collection, a quarter of the time: what they import stays until the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        place = {name: number for number, name in enumerate(LONGEST)}
        items.sort(key=lambda item: place.get(item.nodeid.partition("::")[0], len(LONGEST)))


@pytest.fixture(scope="session")
def session_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for what is built once per test session, also with several pytest workers."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def wheels(session_folder: Path) -> BuiltWheels:
    from nsa.files import file_lock

    folder = session_folder / "wheels"
    with file_lock(session_folder / "wheels.lock"):
        built = len(list(folder.glob("*.whl"))) == 2
        return BuiltWheels.in_folder(folder) if built else build_wheels(folder)


@pytest.fixture(scope="session")
def installed(wheels: BuiltWheels, session_folder: Path) -> WheelInstall:
    from nsa.files import file_lock

    venv = session_folder / "installed" / "venv"
    with file_lock(session_folder / "installed.lock"):
        exists = any(venv.glob("lib/python*/site-packages/borrowed.pth"))
        return WheelInstall(venv) if exists else WheelInstall.make(wheels, venv)


pytest_plugins = [
    "proofs.ptx_emulator.pytest_plugin",  # active if NSA_EMULATE names a GPU
    "tests.fuzz.campaign",
    "tools.gate_times",  # --times=FILE
]
# vLLM has an environment of its own (.ci/install-vllm), in which CI runs these.
collect_ignore = [] if find_spec("vllm") else ["nsa/vllm"]
