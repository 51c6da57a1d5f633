"""Failures are classified by their code; records without a code by their message."""

import json
import signal
from pathlib import Path

import pytest

from nsa_train import names
from nsa_train.record.events import EventKind, LauncherAction, add_event, read_events
from nsa_train.record.failure_codes import FailureCode
from nsa_train.record.heartbeat_record import beat_fields, beat_of_fields
from nsa_train.watch.conditions import HealthLimits
from nsa_train.watch.health import examine
from nsa_train.watch.history import RunHistory
from nsa_train.watch.run_reader import RunReader

OLD = Path(__file__).parent / "fixtures" / "failures_without_code.jsonl"


def conditions(beat: dict) -> list[str]:
    values, damaged = beat_fields()(json.dumps(beat))
    assert values is not None
    assert not damaged
    history = RunHistory()
    history.add(beat_of_fields(values), 0.0)
    return [finding.name for finding in examine(history, now=1.0, limits=HealthLimits())]


@pytest.mark.parametrize("line", OLD.read_text(encoding="utf-8").splitlines())
def test_records_without_a_code_are_classified_by_their_text(line):
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


def test_an_end_that_only_an_event_tells_of_is_named_by_its_code_and_a_signal_is_no_damage(tmp_path):
    """The launcher's record of a killed rank has a negative code."""
    add_event(tmp_path, EventKind.START, ts=1.0, step=0)
    details = {"launcher": LauncherAction.GAVE_UP, "why": "reworded", "code": -signal.SIGKILL, "rank": 1}
    add_event(tmp_path, EventKind.ERROR, ts=2.0, step=3, **details, failure_code=FailureCode.OUT_OF_MEMORY)
    details = read_events(tmp_path)[-1].details
    assert (details["code"], details["rank"]) == (-9, 1)
    reader = RunReader(tmp_path)
    history = reader.update()
    reader.close()
    assert [f.name for f in examine(history, now=reader.now.steady, limits=HealthLimits())] == ["out_of_memory"]
    assert history.unreadable[names.EVENTS] == 0
