"""Ranks that divide the reading see the same rows as one that reads everything, and each reads its part only."""

import json
import threading
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nsa.errors import CheckpointError, DataError, DataTimeout, NSAError
from nsa_train.data.rows.batch import EndOfData
from nsa_train.data.rows.specs import DirectData
from nsa_train.data.unit_exchange import ExchangeSettings, TokenUnit, UnitExchange
from tests.nsa_train.data.corpora import make_records, write_corpus, write_parquet
from tests.nsa_train.data.faulty_server import FaultyServer

GLOBAL_ROWS = 4
UNITS, ROWS_PER_UNIT = 15, 20  # of `write_corpus`


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder)
    return folder


def direct(source: Any, **options: Any) -> DirectData:
    defaults: dict[str, Any] = {"seed": 5, "held_out_fraction": 0.1, "buffer_rows": 8, "loader_timeout_s": 30.0}
    return DirectData(source if isinstance(source, list) else str(source), "byte", 64, **{**defaults, **options})


class Ranks:
    """Several ranks in this process, one thread each."""

    def __init__(self, of_rank: Callable[[int], DirectData], world: int, folder: Path, state: Any = None) -> None:
        shared = folder / uuid.uuid4().hex
        shared.mkdir(parents=True)
        self.shared, self.world = shared, world
        exchanges = [ExchangeSettings(str(shared), rank, world, timeout_s=30.0) for rank in range(world)]
        self.streams = [
            replace(of_rank(rank), exchange=exchange if world > 1 else None).open()
            for rank, exchange in enumerate(exchanges)
        ]
        for stream in self.streams:
            if state is not None:
                stream.load_state_dict(json.loads(json.dumps(state)))

    def read(self, steps: int) -> list[object]:
        """Rows of `steps` global batches in order; raises what any rank met."""
        parts: dict[tuple[int, int], object] = {}
        errors: list[NSAError] = []

        def one(rank: int) -> None:
            try:
                for step in range(steps):
                    batch = self.streams[rank].next_batch(GLOBAL_ROWS, rank, self.world)
                    assert batch.provenance is not None
                    parts[step, rank] = [
                        (row, segments, tokens.tolist())
                        for row, segments, tokens in zip(
                            batch.row_ids.tolist(), batch.provenance, batch.tokens, strict=True
                        )
                    ]
            except NSAError as error:
                errors.append(error)

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.errors = errors
        if errors:
            raise errors[0]
        return [row for key in sorted(parts) for row in parts[key]]  # type: ignore[attr-defined]

    def state(self) -> dict[str, Any]:
        states = [stream.state_dict() for stream in self.streams]
        assert all(state == states[0] for state in states)
        return states[0]

    def count_tokenized(self) -> list[int]:
        """Count the documents that each stream tokenizes from now on, in the list that is returned."""
        counts = [0] * self.world
        for rank, stream in enumerate(self.streams):
            tokenizer = stream._documents._tokenizer  # type: ignore[attr-defined]
            encode = tokenizer.encode_batch

            def counted(texts: list[str], rank: int = rank, encode: Any = encode) -> Any:
                counts[rank] += len(texts)
                return encode(texts)

            tokenizer.encode_batch = counted
        return counts

    def close(self) -> None:
        for stream in self.streams:
            stream.close()


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_the_rows_are_those_of_a_single_reader_for_any_number_and_change_of_ranks(
    corpus: Path, tmp_path: Path, packing: str
) -> None:
    data = direct(corpus, packing=packing)
    alone = Ranks(lambda rank: data, 1, tmp_path)
    wanted = alone.read(800)
    assert alone.state()["documents"]["epoch"] >= 1
    for plan in ([(2, 800)], [(4, 800)], [(1, 90), (2, 333), (4, 7), (2, 170), (1, 200)]):
        got: list[object] = []
        state = None
        for world, steps in plan:
            ranks = Ranks(lambda rank: data, world, tmp_path, state)
            got += ranks.read(steps)
            state = ranks.state()
            ranks.close()
        assert got == wanted
        assert state == alone.state()


def test_each_rank_reads_and_tokenizes_its_part_only(corpus: Path, tmp_path: Path) -> None:
    """Measured where the bytes are served: one server per rank, the same files behind all of them."""
    served: dict[int, list[int]] = {}
    tokenized: dict[int, list[int]] = {}
    for world in (1, 2, 4):
        with ExitStack() as open_servers:
            servers = [open_servers.enter_context(FaultyServer(served_files(corpus))) for _ in range(world)]
            data = [direct(urls(server), held_out_fraction=0.0, at_end="stop") for server in servers]
            ranks = Ranks(data.__getitem__, world, tmp_path)
            for server in servers:
                server.ranges.clear()  # the listing
            tokenized[world] = ranks.count_tokenized()
            with pytest.raises(EndOfData):
                ranks.read(10**6)
            served[world] = [sum(_length(asked) for _, asked in server.ranges) for server in servers]
            ranks.close()
    assert tokenized[1] == [UNITS * ROWS_PER_UNIT]
    for world in (2, 4):
        assert sum(served[world]) == served[1][0], "one epoch, every byte once"
        assert max(served[world]) < 1.25 * served[1][0] / world
        assert sum(tokenized[world]) == tokenized[1][0]
        assert max(tokenized[world]) == -(-UNITS // world) * ROWS_PER_UNIT


def served_files(corpus: Path) -> dict[str, object]:
    return {f"/{path.name}": path.read_bytes() for path in sorted(corpus.iterdir())}


def urls(server: FaultyServer) -> list[str]:
    return [server.url(name) for name in server.files]


def _length(asked: str) -> int:
    first, last = asked.removeprefix("bytes=").split("-")
    return int(last) - int(first) + 1


def test_a_corrupt_unit_is_left_out_by_all_ranks_alike(tmp_path: Path) -> None:
    write_parquet(tmp_path / "src" / "a.parquet", make_records(200), rows=20)
    content = bytearray((tmp_path / "src" / "a.parquet").read_bytes())
    content[len(content) // 3] ^= 0xFF
    (tmp_path / "src" / "a.parquet").write_bytes(content)
    data = direct(tmp_path / "src")
    alone, both = (Ranks(lambda rank: data, world, tmp_path / "x") for world in (1, 2))
    assert both.read(400) == alone.read(400)
    assert both.state() == alone.state()
    assert len(both.state()["documents"]["quarantined"]) == 1
    both.close()


def test_a_rank_that_cannot_read_ends_all_of_them_with_its_reason(corpus: Path, tmp_path: Path) -> None:
    with FaultyServer(served_files(corpus)) as good, FaultyServer(served_files(corpus)) as bad:
        data = [direct(urls(server)) for server in (good, bad)]
        ranks = Ranks(data.__getitem__, 2, tmp_path)
        bad.faults.status = 403
        with pytest.raises(DataError, match="403"):
            ranks.read(100)
        assert len(ranks.errors) == 2
        assert all("403" in str(error) for error in ranks.errors)
        ranks.close()


def test_a_rank_that_is_gone_is_named(corpus: Path, tmp_path: Path) -> None:
    exchange = ExchangeSettings(str(tmp_path), reader=0, readers=2, timeout_s=0.5)
    stream = replace(direct(corpus), exchange=exchange).open()
    with pytest.raises(DataTimeout, match="rank 1"):
        stream.next_batch(100 * GLOBAL_ROWS, 0, 2)
    stream.close()


@pytest.mark.parametrize(("starts", "reader", "number"), [((5, 7), 0, 5), ((7, 5), 1, 6), ((5, 6), 1, 6)])
def test_readers_that_start_at_different_units_are_refused_at_once(
    tmp_path: Path, starts: tuple[int, int], reader: int, number: int
) -> None:
    """Where the unit is never published, and where it is and the rows of the ranks would not belong together."""
    with ExitStack() as cleanup:
        exchanges = [
            UnitExchange(ExchangeSettings(str(tmp_path), r, 2, timeout_s=20.0), lambda number: TokenUnit([], []))
            for r in range(2)
        ]
        for exchange, first in zip(exchanges, starts, strict=True):
            cleanup.callback(exchange.close)
            exchange.start(first, None)
        with pytest.raises(DataError) as raised:
            exchanges[reader].take(number)
    assert not isinstance(raised.value, DataTimeout)
    assert f"rank {1 - reader} starts at unit {starts[1 - reader]}" in str(raised.value)
    assert f"this rank at unit {starts[reader]}" in str(raised.value)


def test_a_rank_with_another_cursor_ends_all_of_them(corpus: Path, tmp_path: Path) -> None:
    alone = Ranks(lambda rank: direct(corpus), 1, tmp_path)
    alone.read(60)
    state = alone.state()
    assert state["documents"]["unit"] > 0
    ranks = Ranks(lambda rank: direct(corpus), 2, tmp_path)
    ranks.streams[1].load_state_dict(state)
    with pytest.raises(DataError):
        ranks.read(60)
    assert [type(error) for error in ranks.errors] == [DataError, DataError]
    ranks.close()


def test_the_shared_folder_stays_small_and_damage_in_it_is_found(corpus: Path, tmp_path: Path) -> None:
    ranks = Ranks(lambda rank: direct(corpus), 2, tmp_path)
    most = 0
    for _ in range(20):
        ranks.read(20)
        most = max(most, len(list(ranks.shared.glob("unit-*"))))
    assert most <= 8
    for path in ranks.shared.glob("unit-*"):
        content = path.read_bytes()
        path.write_bytes(content[:-40] + bytes([content[-40] ^ 1]) + content[-39:])
    with pytest.raises(DataError, match="SHA-256"):
        ranks.read(200)
    ranks.close()


def test_a_folder_that_is_gone_ends_with_a_message(corpus: Path, tmp_path: Path) -> None:
    ranks = Ranks(lambda rank: direct(corpus), 2, tmp_path)
    ranks.shared.rmdir()
    with pytest.raises((DataError, CheckpointError), match=str(ranks.shared)):
        ranks.read(10)
    ranks.close()
