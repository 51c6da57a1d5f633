"""Fuzz targets: heartbeat files, event files, and whole run folders through every command that reads them.

Oracles: the good records among the damaged ones, and a fresh read of what was read while it grew.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from nsa_train import names
from nsa_train.record import value_checks
from nsa_train.record.events import parse_event, read_events
from nsa_train.record.heartbeat_record import beat_fields, beat_of_fields, last_beat, read_beats
from nsa_train.record.record_files import _LONGEST_LINE, JsonLines, RecordTail
from tests.fuzz.campaign import FuzzCampaign
from tests.fuzz.mutations import json_bytes, mutated_bytes, mutated_json
from tests.nsa_train.record.damaged import RECORDED, copy_run, damage
from tests.nsa_train.watch.test_damaged_run_folders import read_everywhere

BEATS = (RECORDED / names.heartbeat(0)).read_bytes().splitlines()
EVENTS = (RECORDED / names.EVENTS).read_bytes().splitlines()
GIANT = "giant"
"""Stands for a line that is longer than readers keep, which no corpus should hold."""


def lines_of(good: list[bytes]) -> st.SearchStrategy[list[Any]]:
    """Numbers of good lines, and damaged lines as Latin-1 text."""
    documents = [json.loads(line) for line in good]
    strange = st.one_of(
        st.sampled_from(documents).flatmap(mutated_json).map(json_bytes),
        st.sampled_from(documents).flatmap(mutated_json).map(json_bytes),
        mutated_bytes(*good),
        st.binary(max_size=40),
    )
    damaged = strange.map(lambda raw: raw.decode("latin-1"))
    one = st.one_of(st.integers(0, len(good) - 1), damaged, damaged, st.just(GIANT))
    return st.lists(one, min_size=1, max_size=8)


def content_of(case: list[Any], good: list[bytes]) -> bytes:
    giant = b"y" * (_LONGEST_LINE + 7)
    lines = [
        good[line] if isinstance(line, int) else giant if line == GIANT else line.encode("latin-1").replace(b"\n", b" ")
        for line in case
    ]
    return b"\n".join([*lines, b""])


def check_reading(
    path: Path, case: list[Any], good: list[bytes], parse: Callable[[str], value_checks.Parsed[Any]]
) -> list[Any]:
    """Every good record is found, in order; a reader that follows the growing file finds the same as a fresh one."""
    content = content_of(case, good)
    path.write_bytes(content)
    fresh = RecordTail(path, parse)
    read = list(fresh.whole_file())
    wanted = [repr(parse(good[line].decode())[0]) for line in case if isinstance(line, int)]
    left = iter(map(repr, read))
    assert all(any(record == each for each in left) for record in wanted), "a good record is missing"
    assert len(read) <= len(case)
    path.write_bytes(b"")
    tail = RecordTail(path, parse)
    followed = []
    for start in range(0, len(content), step := max(1, len(content) // 3)):
        with path.open("ab") as file:
            file.write(content[start : start + step])
        followed += tail.read()
    tail.close()
    assert list(map(repr, followed)) == list(map(repr, read)), "a reader that follows sees something else"  # NaN != NaN
    assert tail.unreadable == fresh.unreadable <= len(case)
    return read


def check_appending(path: Path, content: bytes, line: bytes, parse: Callable[[str], value_checks.Parsed[Any]]) -> None:
    """A record that is appended after a torn line, while another process appends too, is read."""
    path.write_bytes(content.removesuffix(b"\n"))
    before = len(list(RecordTail(path, parse).whole_file()))
    first, second = JsonLines(path), JsonLines(path)
    for lines in (first, second, first):
        lines.append(line.decode())
    first.close()
    second.close()
    assert len(list(RecordTail(path, parse).whole_file())) == before + 3


def test_heartbeats(fuzz: FuzzCampaign, tmp_path: Path) -> None:
    path = tmp_path / names.heartbeat(0)

    def check(case: list[Any]) -> None:
        read = check_reading(path, case, BEATS, beat_fields())
        path.write_bytes(content_of(case, BEATS))
        beats = list(read_beats(path))
        assert len(beats) == len(read)
        newest = last_beat(path)
        assert (newest is None) == (not beats)
        assert newest is None or newest.to_line() == beats[-1].to_line()
        assert all(0 < beat.pid < 2**31 and beat.step >= 0 for beat in beats)
        for beat in beats:
            again, damaged = beat_fields()(beat.to_line())
            assert again is not None
            assert beat_of_fields(again).to_line() == beat.to_line()
            assert not damaged
        check_appending(path, content_of(case, BEATS), BEATS[1], beat_fields())

    fuzz.run(lines_of(BEATS), check, examples=400, read_seed=json.loads)


def test_events(fuzz: FuzzCampaign, tmp_path: Path) -> None:
    path = tmp_path / names.EVENTS

    def check(case: list[Any]) -> None:
        read = check_reading(path, case, EVENTS, parse_event)
        path.write_bytes(content_of(case, EVENTS))
        assert len(read_events(tmp_path)) == len(read)
        check_appending(path, content_of(case, EVENTS), EVENTS[0], parse_event)

    fuzz.run(lines_of(EVENTS), check, examples=400, read_seed=json.loads)


def test_run_folders(fuzz: FuzzCampaign, tmp_path: Path) -> None:
    """status, smoke, monitor, report, compare, exporter and watch give an answer; other runs are unaffected."""

    def check(seed: int) -> None:
        good, bad = copy_run(tmp_path / "good"), copy_run(tmp_path / "bad")
        try:
            done = damage(bad, seed)
            said = read_everywhere(good, bad)
            assert 'nsa_step{rank="1",run="good"} 24.0' in said["exporter"], done
            assert f"{'steps':31} 24 " in said["compare"], done
            assert all(said.values()), done
        finally:
            for folder in (good, bad):
                shutil.rmtree(folder)

    fuzz.run(st.integers(0, 2**32), check, examples=70, read_seed=int)
