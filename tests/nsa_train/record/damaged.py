"""Damaged run folders: seeded mutations of a recorded run, for tests of everything that reads run folders.

`damage(folder, seed)` changes a copy of `fixtures/run` in one to three places and returns what it did.
"""

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).parent / "fixtures" / "run"
"""A run of 24 steps on two ranks, as `nsa launch` wrote it."""
JSON_LINES = ("heartbeat_rank0.jsonl", "heartbeat_rank1.jsonl", "events.jsonl")
CSV_FILES = ("training.csv", "val.csv")
JSON_FILES = ("env.json", "metrics.json")
OTHER_FILES = (".HALT", ".anomaly_type", "health_check.log")

STRANGE: list[Any] = [
    None, True, False, "", "x", "NaN", "Infinity", "-Infinity", "1e5", "\u001b[31mred", "[red]x[/]", "\ud800", "٣",
    [], {}, [[]], [None], [1, "x"], [[1], 2], {"a": 1}, 0, -1, 1.5, -1.5, 10**30, 10**400,
    -(10**400), 2**63, 2**64, 1e308, -1e308, 5e-324,
    float("nan"), float("inf"), float("-inf"), 4_000_000_000_000, -1e12, "9" * 5000, "²",
]  # fmt: skip
"""Values that no field of ours has, or only few have."""


def copy_run(folder: Path) -> Path:
    shutil.copytree(RECORDED, folder)
    return folder


def damage(folder: Path, seed: int) -> list[str]:
    rng = random.Random(seed)
    done = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        mutate = rng.choices([each for each, _ in _MUTATIONS], [weight for _, weight in _MUTATIONS])[0]
        done.append(mutate(folder, rng))
    return done


def _file(path: Path) -> Path:
    """Reading a pipe or a device that an earlier mutation left here would not end."""
    if os.path.lexists(path) and not path.is_file():
        raise OSError(f"{path} is no file")
    return path


def _lines(path: Path) -> list[bytes]:
    return _file(path).read_bytes().splitlines(keepends=True)


def _json_line(folder: Path, rng: random.Random) -> tuple[Path, list[bytes], int]:
    """A file of records and a place in it, more often near the end: readers look at the newest."""
    path = folder / rng.choice(JSON_LINES)
    lines = _lines(path)
    place = rng.randrange(len(lines)) if rng.random() < 0.5 else len(lines) - 1 - rng.randrange(min(3, len(lines)))
    return path, lines, place


def _guarded(mutate: Callable[[Path, random.Random], str]) -> Callable[[Path, random.Random], str]:
    """A second mutation may find that the first took its file away or made it unreadable as JSON."""

    def tried(folder: Path, rng: random.Random) -> str:
        try:
            return mutate(folder, rng)
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return f"{mutate.__name__}: nothing left to change"

    tried.__name__ = mutate.__name__
    return tried


def _json_field(folder: Path, rng: random.Random) -> tuple[Path, list[bytes], int, dict[str, Any], str]:
    """A file, its lines, one of them, the record in it, and one of its fields."""
    path, lines, place = _json_line(folder, rng)
    record = json.loads(lines[place])
    return path, lines, place, record, rng.choice(sorted(record))


@_guarded
def strange_value(folder: Path, rng: random.Random) -> str:
    """Another type or size in one field, of one record or of all from there on."""
    path, lines, place, _, field = _json_field(folder, rng)
    value = rng.choice(STRANGE)
    for at in range(place, len(lines) if rng.random() < 0.3 else place + 1):
        changed = json.loads(lines[at])
        changed[field] = value
        lines[at] = json.dumps(changed).encode() + b"\n"
    path.write_bytes(b"".join(lines))
    return f"{path.name}[{place}].{field} = {value!r:.40}"


@_guarded
def missing_field(folder: Path, rng: random.Random) -> str:
    path, lines, place, record, field = _json_field(folder, rng)
    del record[field]
    lines[place] = json.dumps(record).encode() + b"\n"
    path.write_bytes(b"".join(lines))
    return f"{path.name}[{place}] without {field}"


@_guarded
def strange_line(folder: Path, rng: random.Random) -> str:
    path, lines, place = _json_line(folder, rng)
    line, what = rng.choice(
        [
            (b"[" * 100_000, "deep nesting"),
            (b'{"a":' * 50_000, "deep objects"),
            (b"x" * (3 << 20), "a huge line"),
            (b'{"ts":1,"text":"' + b"y" * (2 << 20) + b'"}', "a huge record"),
            (bytes(rng.randrange(256) for _ in range(200)), "binary"),
            (b"\0" * 500, "zeros"),
            (b"null", "null"),
            (b"[]", "a list"),
            (b"{}", "an empty record"),
            (b'{"ts":"x","event":"save","step":3}', "a save without a time"),
            (b'{"ts":1700000000,"event":"of a later version","step":3}', "an unknown kind"),
            (b'{"ts":1700000000,"event":["save"],"step":3}', "a kind that is a list"),
            (b'{"ts":1700000000,"iso":"","pid":7,"rank":0,"step":1,"msg":"of a later version"}', "an unknown msg"),
            (b'{"ts":1e400,"iso":"","pid":7,"rank":0,"step":1,"msg":"alive"}', "a time that is infinite"),
            (b'{"ts":9e15,"iso":"","pid":7,"rank":0,"step":1,"msg":"alive"}', "a time beyond all calendars"),
            (b'{"ts":4102444800,"iso":"","pid":7,"rank":0,"step":1,"msg":"alive"}', "a beat of the year 2100"),
            (b'{"ts":1,"iso":"","pid":-1,"rank":-5,"step":-9,"msg":"progress"}', "negative numbers"),
        ]
    )
    lines.insert(place, line + b"\n")
    path.write_bytes(b"".join(lines))
    return f"{path.name}[{place}]: {what}"


@_guarded
def disorder(folder: Path, rng: random.Random) -> str:
    path, lines, place = _json_line(folder, rng)
    how = rng.choice(("shuffled", "repeated", "cut", "flipped", "emptied", "alone"))
    if how == "shuffled":
        rng.shuffle(lines)
    elif how == "repeated":
        lines += lines[place:]
    elif how == "alone":
        lines = [lines[place]]
    data = bytearray(b"".join(lines))
    if how == "cut":
        del data[rng.randrange(len(data)) :]
    elif how == "flipped":
        for _ in range(rng.randrange(1, 30)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif how == "emptied":
        data.clear()
    path.write_bytes(bytes(data))
    return f"{path.name} {how}"


@_guarded
def no_file(folder: Path, rng: random.Random) -> str:
    """A directory, a loop, a dangling link, a named pipe or nothing where a file should be."""
    path = folder / rng.choice((*JSON_LINES, *CSV_FILES, *JSON_FILES, *OTHER_FILES))
    how = rng.choice(("a folder", "a loop", "dangling", "absent", "a pipe", "a device"))
    path.unlink(missing_ok=True)
    if how == "a folder":
        path.mkdir()
    elif how == "a loop":
        path.symlink_to(path.name)
    elif how == "dangling":
        path.symlink_to("nowhere")
    elif how == "a pipe":
        os.mkfifo(path)
    elif how == "a device":
        path.symlink_to("/dev/zero")
    return f"{path.name} is {how}"


def _leaves(content: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of everything in a JSON document."""
    pairs = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in list(pairs):
        yield content, key
        yield from _leaves(value)


@_guarded
def strange_document(folder: Path, rng: random.Random) -> str:
    path = _file(folder / rng.choice(("env.json", "env.json", "metrics.json")))
    whole = rng.choice((None, None, None, b"[]", b"null", b"3", b'"x"', b"", b"{", b"\xff\xfe", b"[" * 100_000))
    if whole is not None:
        path.write_bytes(whole)
        return f"{path.name} = {whole[:20]!r}"
    content = json.loads(path.read_text())
    sections = ["host", "world_size", "local_world_size", "packages", "origins", "notices", "config"]
    if rng.random() < 0.4:
        container, key = content, rng.choice([name for name in sections if name in content] or sorted(content))
    elif rng.random() < 0.5:
        container, key = content["config"], rng.choice(("train", "data", "nsa", "runtime"))
    else:
        container, key = rng.choice(list(_leaves(content)))
    container[key] = rng.choice(STRANGE)
    path.write_text(json.dumps(content))
    return f"{path.name}: {key} = {container[key]!r:.40}"


@_guarded
def strange_table(folder: Path, rng: random.Random) -> str:
    path = _file(folder / rng.choice(CSV_FILES))
    rows = path.read_text().splitlines()
    place = rng.randrange(len(rows))
    how = rng.choice(("cell", "cell", "short", "long", "binary", "header", "huge"))
    cells = rows[place].split(",")
    if how == "cell":
        cells[rng.randrange(len(cells))] = str(rng.choice(STRANGE))
    elif how == "short":
        del cells[rng.randrange(len(cells)) :]
    elif how == "long":
        cells += ["1", "2"]
    elif how == "huge":
        cells[0] = "z" * 300_000
    rows[place] = ",".join(cells)
    if how == "header":
        del rows[0]
    data = "\n".join(rows).encode("utf-8", "surrogatepass") + b"\n"
    path.write_bytes(data if how != "binary" else data[:40] + b"\0\xff\r\x00" * 9 + data[40:])
    return f"{path.name}[{place}] {how}"


@_guarded
def strange_text(folder: Path, rng: random.Random) -> str:
    path = _file(folder / rng.choice(OTHER_FILES))
    path.write_bytes(
        rng.choice((b"", b"\0" * 50, b"\xff\xfe", b"halt: \x1b]52;c;eA==\x07\nby: \x1b[2J", b"q" * (5 << 20)))
    )
    return f"{path.name} holds something else"


@_guarded
def other_files(folder: Path, rng: random.Random) -> str:
    name = rng.choice(
        ("heartbeat_rank².jsonl", "heartbeat_rank-1.jsonl", "heartbeat_rank007.jsonl",
         "heartbeat_rank99999999999999999999.jsonl", "heartbeat_rankx.jsonl")
    )  # fmt: skip
    (folder / name).write_bytes(_file(folder / "heartbeat_rank1.jsonl").read_bytes())
    latest = folder / "checkpoints" / "latest"
    latest.unlink(missing_ok=True)
    latest.parent.mkdir(exist_ok=True)
    latest.symlink_to(rng.choice(("step²", "step" + "9" * 250, "step-3", "latest", "../..", "step")))
    return f"{name}, latest → {latest.readlink()}"


_MUTATIONS = (
    (strange_value, 10), (missing_field, 3), (strange_line, 5), (disorder, 4), (no_file, 2), (strange_document, 5),
    (strange_table, 2), (strange_text, 1), (other_files, 1),
)  # fmt: skip
