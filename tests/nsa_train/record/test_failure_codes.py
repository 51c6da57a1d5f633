"""Failures are classified by code, not by their message; records without a code are still read."""

import errno
import inspect

import pytest

from nsa import errors
from nsa_train.record.failure_codes import FailureCode, code_of_exception, code_of_exit_status, recorded_code

_KINDS = [
    kind for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, errors.NSAError) and kind is not errors.NSAError
]  # fmt: skip


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("message", ["", "out of memory: MemoryError, exit code -9", "did not come within 3 s"])
def test_every_error_class_has_a_code_whatever_its_message(kind, message):
    code = code_of_exception(kind(message))
    assert code == code_of_exception(kind("reworded"))
    assert code != FailureCode.UNEXPECTED


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (MemoryError(), FailureCode.OUT_OF_MEMORY),
        (OSError(errno.ENOMEM, "reworded"), FailureCode.OUT_OF_MEMORY),
        (OSError(errno.ENOSPC, "reworded"), FailureCode.DISK_FULL),
        (OSError(errno.EDQUOT, "reworded"), FailureCode.DISK_FULL),
        (OSError(errno.EIO, "reworded"), FailureCode.UNEXPECTED),
        (errors.DataTimeout("reworded"), FailureCode.DATA_TIMEOUT),
        (errors.DataProcessKilled("reworded"), FailureCode.DATA_PROCESS_KILLED),
        (errors.DataError("reworded"), FailureCode.DATA),
        (errors.KernelUnavailable("reworded"), FailureCode.CONFIG),
        (RuntimeError("reworded"), FailureCode.UNEXPECTED),
        (KeyboardInterrupt(), FailureCode.UNEXPECTED),
        (raised(RuntimeError("in a thread"), errors.DataTimeout("reworded")), FailureCode.DATA_TIMEOUT),
        (raised(errors.CheckpointError("save"), OSError(errno.ENOSPC, "reworded")), FailureCode.DISK_FULL),
        (raised(errors.DataTimeout("late"), OSError(errno.EIO, "reworded")), FailureCode.DATA_TIMEOUT),
    ],
)
def test_an_exception_has_the_most_specific_code_of_its_chain(error, code):
    assert code_of_exception(error) == code


def test_memory_that_torch_cannot_allocate_is_out_of_memory():
    torch = pytest.importorskip("torch")
    with pytest.raises(RuntimeError) as seen:
        torch.empty(1 << 48)
    assert code_of_exception(seen.value) == FailureCode.OUT_OF_MEMORY
    assert code_of_exception(torch.OutOfMemoryError("reworded")) == FailureCode.OUT_OF_MEMORY


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (2, FailureCode.PREFLIGHT),
        (16, FailureCode.REPLICAS_DIFFER),
        (20, FailureCode.CONFIG),
        (21, FailureCode.DATA),
        (22, FailureCode.CHECKPOINT),
        (23, FailureCode.NONFINITE),
        (24, FailureCode.HUNG),
        (-9, FailureCode.KILLED_BY_SIGNAL),
        (1, FailureCode.UNEXPECTED),
    ],
)
def test_an_exit_status_has_a_code(status, code):
    assert code_of_exit_status(status) == code


def test_with_a_code_of_a_later_version_the_text_decides():
    assert recorded_code("invented_later", "MemoryError") == FailureCode.OUT_OF_MEMORY
    assert recorded_code("invented_later", "reworded") == FailureCode.UNEXPECTED
