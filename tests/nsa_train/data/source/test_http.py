"""Reading over HTTP: identical tokens from a server that misbehaves, and an error in time if it is gone."""

import pytest

from nsa.errors import DataError
from nsa_train.data.document_stream import DocumentStream
from nsa_train.data.source.http import RetryPolicy
from nsa_train.data.source.resolve import open_source
from nsa_train.data.tokenizer import ByteTokenizer
from tests.nsa_train.data.corpora import make_records, write_parquet
from tests.nsa_train.data.faulty_server import Faults, FaultyServer

QUICK = RetryPolicy(
    connect_timeout_s=2.0, read_timeout_s=0.5, attempts=30, backoff_s=0.005, backoff_max_s=0.05, deadline_s=60.0
)
ALL = Faults(error_500=0.2, cut_body=0.3, reset=0.05, hang_every=50, bytes_per_s=64 * 1024)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("http")
    content = {}
    for i in range(2):
        write_parquet(folder / f"{i}.parquet", make_records(300, seed=i, words=60), rows=25)
        content[f"/set/{i}.parquet"] = (folder / f"{i}.parquet").read_bytes()
    return content


def addresses(server):
    return [server.url(path) for path in server.files]


def tokens(source):
    stream = DocumentStream(source, ByteTokenizer(), seed=3, at_end="stop")
    return [(doc.doc_id, doc.tokens.tobytes()) for doc in stream], stream.state_dict()["quarantined"]


@pytest.fixture(scope="module")
def calm(files):
    with FaultyServer(files) as server:
        source = open_source(addresses(server), retry_policy=QUICK)
        sequence, _ = tokens(source)
    assert len(sequence) == 600
    return sequence, source.fingerprint, server.requests


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param(Faults(error_500=0.2), id="500"),
        pytest.param(Faults(cut_body=0.3), id="cut"),
        pytest.param(Faults(reset=0.3), id="reset"),
        pytest.param(Faults(hang_every=20), id="hang"),
        pytest.param(Faults(wrong_range=0.3), id="wrong-range"),
        pytest.param(Faults(bytes_per_s=64 * 1024), id="64KBps"),
        pytest.param(ALL, id="all"),
    ],
)
def test_a_misbehaving_server_gives_identical_tokens(files, calm, faults):
    with FaultyServer(files, faults) as server:
        source = open_source(addresses(server), retry_policy=QUICK)
        sequence, quarantined = tokens(source)
    assert sequence == calm[0]
    assert source.fingerprint == calm[1], "another port is the same data"
    assert quarantined == []
    if faults != Faults(bytes_per_s=64 * 1024):
        assert server.requests > calm[2], "the faults did not reach the client: this test shows nothing"


def test_bytes_damaged_on_the_way_are_fetched_again(files, calm):
    with FaultyServer(files) as server:
        source = open_source(addresses(server), retry_policy=QUICK)
        server.faults = Faults(flip_byte=0.05)
        sequence, quarantined = tokens(source)
    assert server.flips > 0
    assert sequence == calm[0]
    assert quarantined == []


def test_a_cut_body_continues_where_it_was_cut(files):
    with FaultyServer(files) as server:
        source = open_source(addresses(server)[0], retry_policy=QUICK)
        server.ranges.clear()
        server.faults = Faults(cut_body=0.7)
        source.read(0)
    starts = [int(asked.removeprefix("bytes=").split("-")[0]) for _, asked in server.ranges]
    assert len(starts) > 4
    assert starts == sorted(starts)


@pytest.mark.timeout(60)  # a million attempts would take a day
def test_a_server_gone_for_good_ends_with_the_data_error_in_time(files):
    policy = RetryPolicy(
        connect_timeout_s=0.2, read_timeout_s=0.2, attempts=10**6, backoff_s=0.01, backoff_max_s=0.1, deadline_s=1.5
    )
    with FaultyServer(files) as server:
        source = open_source(addresses(server), retry_policy=policy)
        stream = DocumentStream(source, ByteTokenizer(), seed=3)
        before = [next(stream).doc_id for _ in range(40)]
        server.stop()
        with pytest.raises(DataError) as caught:
            list(stream)
    assert "row group" in str(caught.value)
    assert ".parquet" in str(caught.value)
    assert len(before) == 40
    assert stream.state_dict()["quarantined"] == [], "a lost server is not a corrupt unit"
    with pytest.raises(DataError):
        next(stream)  # and asking again does not look like the end of the data


@pytest.mark.timeout(60)  # as above
@pytest.mark.parametrize(
    "faults", [Faults(hang_every=1), Faults(bytes_per_s=40), Faults(status=503), Faults(reset=1.0)], ids=str
)
def test_no_fault_outlasts_the_deadline(files, faults):
    policy = RetryPolicy(
        connect_timeout_s=0.2, read_timeout_s=0.2, attempts=10**6, backoff_s=0.01, backoff_max_s=0.1, deadline_s=1.2
    )
    with FaultyServer(files) as server:
        source = open_source(addresses(server), retry_policy=policy)
        server.faults = faults
        with pytest.raises(DataError, match="row group 3"):
            source.read(3)


def test_attempts_are_bounded_too(files):
    with FaultyServer(files) as server:
        source = open_source(addresses(server), retry_policy=QUICK)
        server.faults, before = Faults(status=500), server.requests
        with pytest.raises(DataError, match="500"):
            source.read(0)
        assert server.requests - before == QUICK.attempts


@pytest.mark.parametrize("status", [401, 403, 404, 410])
def test_a_refusal_is_not_asked_again(files, status):
    with FaultyServer(files) as server:
        source = open_source(addresses(server), retry_policy=QUICK)
        server.faults, before = Faults(status=status), server.requests
        with pytest.raises(DataError, match=str(status)):
            source.read(0)
        assert server.requests - before == 1


def test_a_server_without_ranges_is_named_as_such(files):
    with (
        FaultyServer(files, Faults(ignore_range=True)) as server,
        pytest.raises(DataError),
    ):
        open_source(addresses(server), retry_policy=QUICK)


def test_a_file_changed_on_the_server_is_noticed(files):
    with FaultyServer(dict(files)) as server:
        source = open_source(addresses(server), retry_policy=QUICK)
        server.files["/set/0.parquet"] = server.files["/set/1.parquet"]
        with pytest.raises(DataError, match="ETag"):
            source.read(0)


def test_the_order_of_addresses_does_not_matter(files, calm):
    with FaultyServer(files) as server:
        source = open_source(addresses(server)[::-1], retry_policy=QUICK)
        assert source.fingerprint == calm[1]
        assert tokens(source)[0] == calm[0]


def test_retry_policy_stays_below_the_loaders_timeout():
    for loader_timeout_s in (1.0, 10.0, 60.0, 120.0, 600.0):
        policy = RetryPolicy.below(loader_timeout_s)
        assert policy.deadline_s < loader_timeout_s
        assert policy.read_timeout_s <= policy.deadline_s / 4
