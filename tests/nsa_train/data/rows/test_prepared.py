from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa.errors import ConfigError, DataError
from nsa_train.data.rows.batch import EndOfData
from nsa_train.data.rows.prepared import PreparedRows
from nsa_train.data.rows.row_stream import IndexedRowStream
from nsa_train.data.shards.reader import ShardReader
from nsa_train.storage import StorageFolder
from tests.nsa_train.data.shard_sets import EOS, documents, write_set

DOCS = documents(150)
JOINED = np.concatenate([np.append(tokens, EOS) for _, tokens in DOCS])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> StorageFolder:
    path = tmp_path_factory.mktemp("prepared")
    write_set(path, DOCS)
    return StorageFolder(str(path))


def _rows(folder: StorageFolder, seq_len: int = 64, **settings_) -> PreparedRows:
    settings_ = {"shuffle_seed": 3, "with_provenance": True} | settings_
    return PreparedRows(ShardReader(folder), seq_len, **settings_)


@given(seq_len=st.integers(1, 300))
@settings(max_examples=40, deadline=None)
def test_unshuffled_rows_are_the_shards_joined(folder: StorageFolder, seq_len: int) -> None:
    rows = _rows(folder, seq_len, shuffle_seed=None)
    batch = rows.rows(np.arange(rows.rows_per_epoch))
    flat = batch.tokens.reshape(-1)
    assert np.array_equal(flat[: len(JOINED)], JOINED)
    assert (flat[len(JOINED) :] == EOS).all()
    assert len(flat) - len(JOINED) < seq_len
    assert batch.valid_tokens == len(JOINED)
    assert batch.documents == len(DOCS)


@given(seq_len=st.integers(1, 200), seed=st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_an_epoch_serves_every_token_once_with_its_document(folder: StorageFolder, seq_len: int, seed: int) -> None:
    rows = _rows(folder, seq_len, shuffle_seed=seed)
    batch = rows.rows(np.arange(rows.rows_per_epoch))
    seen: dict[tuple[str, int], int] = {}
    for tokens, cu, segments in zip(batch.tokens, batch.cu_doc_lens, batch.provenance or (), strict=True):
        edges = np.cumsum([0, *(s.length for s in segments)])
        assert cu.tolist() == sorted({*edges.tolist(), seq_len})
        for segment, start in zip(segments, edges, strict=False):
            for i in range(segment.length):
                place = (segment.doc_id, segment.offset + i)
                assert place not in seen
                seen[place] = int(tokens[start + i])
    assert seen == {(doc, i): int(t) for doc, toks in DOCS for i, t in enumerate([*toks, EOS])}


def test_a_batch_depends_on_nothing_that_was_asked_before(folder: StorageFolder) -> None:
    first, second = _rows(folder), _rows(folder)
    for step in range(20):
        first.rows(np.arange(8 * step, 8 * step + 8))
    assert np.array_equal(first.rows(np.arange(56, 64)).tokens, second.rows(np.arange(56, 64)).tokens)


def test_any_number_of_ranks_reads_the_same_sequence(folder: StorageFolder) -> None:
    for world in (2, 4, 8):
        alone, ranks = IndexedRowStream(_rows(folder)), [IndexedRowStream(_rows(folder)) for _ in range(world)]
        for _ in range(25):  # beyond one epoch
            whole = alone.next_batch(8)
            parts = [stream.next_batch(8, rank, world) for rank, stream in enumerate(ranks)]
            assert np.array_equal(np.concatenate([p.tokens for p in parts]), whole.tokens)
            assert sum((p.provenance or () for p in parts), ()) == whole.provenance


def test_epochs_are_counted_and_differ(folder: StorageFolder) -> None:
    rows = _rows(folder)
    n = rows.rows_per_epoch
    one, two = rows.stored_rows(np.arange(n)), rows.stored_rows(np.arange(n, 2 * n))
    assert sorted(one) == sorted(two) == list(range(n))
    assert (one == two).mean() < 0.2
    assert rows.rows(np.arange(n - 4, n)).epoch == 0
    assert rows.rows(np.arange(n - 4, n + 1)).epoch == 1


def test_the_end_of_data_is_an_error_for_the_whole_batch(folder: StorageFolder) -> None:
    ranks = [IndexedRowStream(_rows(folder, max_epochs=1)) for _ in range(2)]
    for rank, stream in enumerate(ranks):  # also for the rank whose own rows would still exist
        for _ in range(_rows(folder).rows_per_epoch // 8):
            stream.next_batch(8, rank, 2)
        with pytest.raises(EndOfData):
            stream.next_batch(8, rank, 2)


def test_a_cursor_moves_between_world_sizes_and_batch_sizes(folder: StorageFolder) -> None:
    calm = IndexedRowStream(_rows(folder))
    expected = [t for _ in range(12) for t in calm.next_batch(8).tokens.tolist()]
    got: list[list[int]] = []
    state = None
    for world, steps, global_rows in ((1, 3, 8), (2, 4, 8), (1, 2, 8), (4, 3, 8)):
        streams = [IndexedRowStream(_rows(folder)) for _ in range(world)]
        for stream in streams:
            if state:
                stream.load_state_dict(state)
        for _ in range(steps):
            for rank, stream in enumerate(streams):
                got += stream.next_batch(global_rows, rank, world).tokens.tolist()
        states = [stream.state_dict() for stream in streams]
        assert all(s == states[0] for s in states)
        state = states[0]
    assert got == expected


def test_a_cursor_of_other_settings_is_refused_by_name(folder: StorageFolder) -> None:
    state = IndexedRowStream(_rows(folder)).state_dict()
    with pytest.raises(ConfigError, match="seq_len"):
        IndexedRowStream(_rows(folder, 32)).load_state_dict(state)


@pytest.mark.parametrize(("rows", "rank", "world"), [(8, 0, 3), (8, 2, 2), (0, 0, 1)])
def test_uneven_shares_are_refused(folder: StorageFolder, rows: int, rank: int, world: int) -> None:
    with pytest.raises(ConfigError):
        IndexedRowStream(_rows(folder)).next_batch(rows, rank, world)


def test_an_empty_split_is_refused(folder: StorageFolder) -> None:
    with pytest.raises(DataError):
        PreparedRows(ShardReader(folder, "validation"), 8, shuffle_seed=None)


def test_wide_tokens_survive(tmp_path: Path) -> None:
    docs = [("a", np.asarray([70_000, 5, 2**31], dtype=np.uint32))]
    write_set(tmp_path, docs, dtype="uint32")
    batch = _rows(StorageFolder(str(tmp_path)), 4).rows(np.arange(1))
    assert batch.tokens.tolist() == [[70_000, 5, 2**31, EOS]]
