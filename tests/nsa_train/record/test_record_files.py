"""A file that grows, is cut, moved away and torn, read piece by piece: every whole record once."""

import json
import os
import random

import pytest

from nsa_train.record.record_files import RecordTail, parse_record


def line(step: int) -> bytes:
    return json.dumps({"step": step, "text": "x" * (step % 7)}).encode() + b"\n"


def steps(tail: RecordTail) -> list[int]:
    return [record["step"] for record in tail.read()]


def append(path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "h.jsonl"


def test_only_what_is_new_is_read(path):
    tail = RecordTail(path, parse_record)
    assert steps(tail) == []
    append(path, line(1) + line(2))
    assert steps(tail) == [1, 2]
    assert steps(tail) == []
    append(path, line(3))
    assert steps(tail) == [3]


def test_a_half_written_line_waits_for_its_end(path):
    tail = RecordTail(path, parse_record)
    for cut in range(1, len(line(5))):
        append(path, line(5)[:cut])
        assert steps(tail) == []
        append(path, line(5)[cut:])
        assert steps(tail) == [5]


def test_a_torn_line_costs_itself_alone(path):
    tail = RecordTail(path, parse_record)
    append(path, line(1) + line(2)[:9] + b"\n" + line(3) + b"\xff\xfe\n[1]\nnull\n" + line(4))
    assert steps(tail) == [1, 3, 4]


def test_a_truncated_file_is_read_anew_and_its_half_line_forgotten(path):
    tail = RecordTail(path, parse_record)
    append(path, line(1) + line(2) + line(3)[:5])
    assert steps(tail) == [1, 2]
    path.write_bytes(line(4))
    assert steps(tail) == [4]


def test_rotation_loses_nothing_on_either_side(path):
    tail = RecordTail(path, parse_record)
    append(path, line(1))
    assert steps(tail) == [1]
    append(path, line(2))
    path.rename(path.with_suffix(".1"))
    append(path.with_suffix(".1"), line(3))  # the writer still has it open
    append(path, line(4))
    assert steps(tail) == [2, 3, 4]
    path.rename(path.with_suffix(".2"))
    assert steps(tail) == []
    append(path.with_suffix(".2"), line(5))
    assert steps(tail) == [5]
    append(path, line(6))
    assert steps(tail) == [6]


def test_what_is_written_to_the_old_file_in_the_moment_of_rotation_is_read(path, monkeypatch):
    tail, replaced = RecordTail(path, parse_record), RecordTail._replaced
    append(path, line(1))

    def at_that_moment(self) -> bool:
        append(path, line(2))
        path.rename(path.with_suffix(".1"))
        append(path, line(3))
        return replaced(self)

    monkeypatch.setattr(RecordTail, "_replaced", at_that_moment)
    assert steps(tail) == [1, 2, 3]


def test_only_the_end_of_a_long_file_is_read(path):
    append(path, b"".join(line(step) for step in range(1000)))
    tail = RecordTail(path, parse_record, last_bytes=200)
    steps_read = steps(tail)
    assert steps_read == list(range(steps_read[0], 1000))
    assert 3 <= len(steps_read) < 12
    append(path, line(1000))
    assert steps(tail) == [1000]


def test_a_line_without_end_is_not_kept_in_memory(path):
    tail = RecordTail(path, parse_record)
    append(path, line(1))
    for _ in range(4):
        append(path, b"x" * 700_000)
        tail.read()
        assert len(tail._half) <= 1 << 20
    append(path, b"\n" + line(2))
    assert steps(tail) == [1, 2][1:]


def test_any_sequence_of_writes_and_looks_gives_every_record_once(path):
    rng = random.Random(0)
    for _ in range(30):
        path.unlink(missing_ok=True)
        data, tail, seen = b"".join(line(step) for step in range(200)), RecordTail(path, parse_record), []
        while data:
            cut = rng.randrange(1, 300)
            append(path, data[:cut])
            data = data[cut:]
            if rng.random() < 0.5:
                seen += steps(tail)
            if rng.random() < 0.05 and path.read_bytes().endswith(b"\n"):
                os.replace(path, path.with_suffix(".old"))
                append(path, b"")
        seen += steps(tail)
        tail.close()
        # Two rotations between two looks lose the file between them; no record comes twice or out of order.
        assert seen == sorted(set(seen))
        assert len(seen) > 150
