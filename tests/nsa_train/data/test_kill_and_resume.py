"""SIGKILL in the middle, three times, on one and two ranks: what was read is what an undisturbed run reads."""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.covering_cases import each_value
from tests.nsa_train.data.row_child import GLOBAL_ROWS, MIXTURE, cursor_path, data_of, newest_common_step
from tests.nsa_train.data.shard_sets import documents, write_set

STEPS = 60
KINDS = ["prepared", "direct", "direct_best_fit", "mixture"]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    base = tmp_path_factory.mktemp("sources")
    write_set(base / "prepared", documents(150))
    for seed, name in enumerate(MIXTURE):  # of several epochs, and of less than one
        write_set(base / "mixture" / name, documents(20 + 150 * seed, seed))
    rng = random.Random(1)
    (base / "direct").mkdir()
    for f in range(4):
        lines = [{"id": f"{f}/{i}", "text": "".join(rng.choices("abcde ", k=rng.randint(1, 150)))} for i in range(40)]
        (base / "direct" / f"{f}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    direct = dict.fromkeys(("direct", "direct_best_fit", "direct_divided"), str(base / "direct"))
    return {"prepared": str(base / "prepared"), "mixture": str(base / "mixture"), **direct}


def _calm(kind: str, source: str) -> list[tuple[object, object]]:
    """Rows of the global sequence, read in this process without a BatchPrefetcher, from one rank."""
    stream = data_of(kind, source).open()
    rows: list[tuple[object, object]] = []
    for _ in range(STEPS):
        batch = stream.next_batch(GLOBAL_ROWS)
        for segments, tokens in zip(batch.provenance or (), batch.tokens, strict=True):
            rows.append(([[s.doc_id, s.offset, s.length] for s in segments], tokens.tolist()))
    return rows


def _seen(folder: Path, world: int) -> list[tuple[object, object]]:
    """Joined records of the ranks; a step done twice after a kill must have been the same twice."""
    rows: dict[int, tuple[object, object]] = {}
    for rank in range(world):
        for line in (folder / f"rank{rank}.jsonl").read_text().splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue  # torn by a kill; the step was redone
            for row, segments, tokens in zip(record["rows"], record["segments"], record["tokens"], strict=True):
                assert rows.setdefault(row, (segments, tokens)) == (segments, tokens)
    assert sorted(rows) == list(range(STEPS * GLOBAL_ROWS))
    return [rows[row] for row in sorted(rows)]


def _start(
    kind: str, source: str, folder: Path, world: int, attempt: int, hold_at: int = STEPS
) -> list[subprocess.Popen[bytes]]:
    exchange = folder / f"exchange{attempt}"  # a new one for every start, as the trainer makes it
    exchange.mkdir()
    words = [sys.executable, "-m", "tests.nsa_train.data.row_child", kind, source, str(folder)]
    numbers = [[str(n) for n in (rank, world, STEPS, hold_at)] for rank in range(world)]
    return [subprocess.Popen([*words, *each, str(exchange)], start_new_session=True) for each in numbers]


@pytest.mark.parametrize(("kind", "world"), [*each_value(KINDS, [1, 2]), ("direct_divided", 2)])
def test_three_kills_do_not_change_the_run(kind: str, world: int, sources: dict[str, str], tmp_path: Path) -> None:
    rng = random.Random(f"{kind}{world}")
    for kill in range(3):
        goal = 12 * (kill + 1)
        # However late it is killed, the run is not over: it waits some steps later.
        ranks = _start(kind, sources[kind], tmp_path, world, kill, hold_at=goal + 8)
        while any(_lines(tmp_path, rank) < goal for rank in range(world)):
            assert all(child.poll() is None for child in ranks)
            time.sleep(0.005)
        time.sleep(rng.random() * 0.05)
        for child in ranks:
            child.kill()  # the prefetch process must notice by itself
        assert {child.wait() for child in ranks} == {-signal.SIGKILL}
    for child in _start(kind, sources[kind], tmp_path, world, 3):
        assert child.wait(timeout=60) == 0
    assert _seen(tmp_path, world) == _calm(kind, sources[kind])


@pytest.mark.nightly  # ten processes, each of which starts an interpreter and a prefetcher
def test_a_mixture_killed_and_resumed_with_1_2_and_4_ranks_reads_the_same_rows(
    sources: dict[str, str], tmp_path: Path
) -> None:
    for kill, world in enumerate((1, 2, 4)):
        goal = 12 * (kill + 1)
        ranks = _start("mixture", sources["mixture"], tmp_path, world, kill, hold_at=goal + 8)
        while any(newest_common_step(tmp_path, rank + 1) < goal for rank in range(world)):
            assert all(child.poll() is None for child in ranks)
            time.sleep(0.005)
        for child in ranks:
            child.kill()
        assert {child.wait() for child in ranks} == {-signal.SIGKILL}
        _continue_with(tmp_path, world, 4)
    for child in _start("mixture", sources["mixture"], tmp_path, 2, 3):
        assert child.wait(timeout=60) == 0
    assert _seen(tmp_path, 4) == _calm("mixture", sources["mixture"])


def _continue_with(folder: Path, before: int, ranks: int) -> None:
    """Give so many ranks the cursor of the newest step that all ranks have done: it is the same for every rank."""
    step = newest_common_step(folder, before)
    cursor = cursor_path(folder, 0, step).read_bytes()
    for path in folder.glob("cursor*.json"):
        path.unlink()
    for rank in range(ranks):
        cursor_path(folder, rank, step).write_bytes(cursor)


def _lines(folder: Path, rank: int) -> int:
    path = folder / f"rank{rank}.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.parametrize("kind", KINDS)
def test_one_two_one_four_ranks_read_one_sequence(kind: str, sources: dict[str, str]) -> None:
    expected = _calm(kind, sources[kind])
    got: list[tuple[object, object]] = []
    state = None
    for world, steps in ((1, 10), (2, 20), (1, 5), (4, STEPS - 35)):
        streams = [data_of(kind, sources[kind]).open() for _ in range(world)]
        for stream in streams:
            if state is not None:
                stream.load_state_dict(json.loads(json.dumps(state)))
        for _ in range(steps):
            for rank, stream in enumerate(streams):
                batch = stream.next_batch(GLOBAL_ROWS, rank, world)
                for segments, tokens in zip(batch.provenance or (), batch.tokens, strict=True):
                    got.append(([[s.doc_id, s.offset, s.length] for s in segments], tokens.tolist()))
        states = [stream.state_dict() for stream in streams]
        assert all(s == states[0] for s in states)
        state = states[0]
        assert len(json.dumps(state)) < 1500
    assert got == expected
