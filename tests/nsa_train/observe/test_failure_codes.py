"""Failures are classified by code: a reworded message changes no finding, and records without a code are still read."""

import errno
import inspect
import json
import signal
from pathlib import Path

import pytest

from nsa import errors
from nsa_train import names
from nsa_train.observe.events import EventKind, LauncherAction, add_event, read_events_and_damage
from nsa_train.observe.failure_codes import FailureCode, code_of_exception, code_of_exit_status, recorded_code
from nsa_train.observe.heartbeat_file import beat_parser
from nsa_train.observe.watch.conditions import HealthLimits
from nsa_train.observe.watch.health import examine
from nsa_train.observe.watch.history import HistoryReader, RunHistory

OLD = Path(__file__).parent / "fixtures" / "failures_without_code.jsonl"
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


def conditions(beat: dict) -> list[str]:
    record, damaged = beat_parser()(json.dumps(beat))
    assert record is not None
    assert not damaged
    history = RunHistory()
    history.add(record, 0.0)
    return [finding.name for finding in examine(history, now=1.0, limits=HealthLimits())]


@pytest.mark.parametrize("line", OLD.read_text(encoding="utf-8").splitlines())
def test_records_of_runs_before_the_code_are_judged_by_their_text_as_they_were(line):
    old = json.loads(line)
    assert "failure_code" not in old["beat"]
    assert conditions(old["beat"]) == [old["condition"]]


@pytest.mark.parametrize("line", OLD.read_text(encoding="utf-8").splitlines())
@pytest.mark.parametrize("code", FailureCode)
def test_the_code_decides_where_there_is_one_whatever_the_text_says(line, code):
    known = {
        FailureCode.OUT_OF_MEMORY: "out_of_memory",
        FailureCode.DATA_PROCESS_KILLED: "out_of_memory",
        FailureCode.DATA_TIMEOUT: "loader_timeout",
    }
    beat = json.loads(line)["beat"] | {"failure_code": code}
    assert conditions(beat) == [known.get(code, "run_failed")]
    assert conditions(beat | {"detail": "reworded"}) == [known.get(code, "run_failed")]


def test_a_code_of_a_later_version_leaves_the_text_to_judge_by():
    assert recorded_code("invented_later", "MemoryError") == FailureCode.OUT_OF_MEMORY
    assert recorded_code("invented_later", "reworded") == FailureCode.UNEXPECTED


def test_an_end_that_only_an_event_tells_of_is_named_by_its_code_and_a_signal_is_no_damage(tmp_path):
    """The launcher's record of a killed rank has a negative code."""
    add_event(tmp_path, EventKind.START, ts=1.0, step=0)
    details = {"launcher": LauncherAction.GAVE_UP, "why": "reworded", "code": -signal.SIGKILL, "rank": 1}
    add_event(tmp_path, EventKind.ERROR, ts=2.0, step=3, **details, failure_code=FailureCode.OUT_OF_MEMORY)
    events, unreadable = read_events_and_damage(tmp_path)
    assert (events[-1].details["code"], events[-1].details["rank"], unreadable) == (-9, 1, 0)
    reader = HistoryReader(tmp_path)
    history = reader.update()
    reader.close()
    assert [f.name for f in examine(history, now=reader.now.steady, limits=HealthLimits())] == ["out_of_memory"]
    assert history.unreadable[names.EVENTS] == 0
