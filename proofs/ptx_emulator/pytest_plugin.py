"""pytest plugin: with NSA_EMULATE=sm_80 set, tests run Triton kernels compiled for that GPU, in the emulator.

A test during which the emulator reports a finding fails. tests/conftest.py loads it.
"""

import os
from collections.abc import Generator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from proofs.ptx_emulator.driver import EmulatorDriver

VARIABLE = "NSA_EMULATE"
_active: list["EmulatorDriver"] = []


def emulator() -> "EmulatorDriver | None":
    """The driver that tests run on, if any."""
    return _active[-1] if _active else None


def pytest_configure(config: pytest.Config) -> None:
    gpu = os.environ.get(VARIABLE)
    if not gpu:
        return
    from proofs.ptx_emulator.driver import emulated

    stack = ExitStack()
    _active.append(stack.enter_context(emulated(gpu)))
    config.add_cleanup(stack.close)


def pytest_report_header() -> str:
    driver = emulator()
    return "" if driver is None else f"Triton kernels are emulated, compiled for {driver.gpu}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, Any, Any]:
    result = yield
    driver = emulator()
    if driver is not None and (findings := driver.log.take()):
        pytest.fail("\n".join(map(str, findings)), pytrace=False)
    return result
