import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import pytest

from nsa.errors import DataError
from nsa_train.data.document import is_held_out
from nsa_train.data.document_stream import DocumentStream
from nsa_train.data.source.resolve import open_source
from nsa_train.data.tokenizer import ByteTokenizer
from proofs import import_path
from tests.nsa_train.data.corpora import make_records, write_corpus, write_parquet


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("stream")
    write_corpus(path)
    return path


def make_stream(folder, **options):
    return DocumentStream(open_source(str(folder)), ByteTokenizer(), **{"seed": 11, **options})


def take(stream, count):
    return [(doc.doc_id, doc.position, doc.tokens.tobytes()) for doc in islice(stream, count)]


ALL_IDS = {r["id"] for i in range(3) for r in make_records(100, seed=i)}


def test_an_epoch_is_every_document_once_in_a_seeded_order(folder):
    first, second = (take(make_stream(folder, seed=seed, at_end="stop"), 10**6) for seed in (1, 2))
    assert len(first) == 300
    assert {id for id, _, _ in first} == ALL_IDS
    assert [id for id, _, _ in first] != [id for id, _, _ in second]
    assert first == take(make_stream(folder, seed=1, at_end="stop"), 10**6)


def test_epochs_differ_and_are_counted(folder):
    stream = make_stream(folder)
    epochs = [take(stream, 300) for _ in range(3)]
    assert [{p.epoch for _, p, _ in epoch} for epoch in epochs] == [{0}, {1}, {2}]
    orders = [[id for id, _, _ in epoch] for epoch in epochs]
    assert orders[0] != orders[1] != orders[2]
    assert set(orders[1]) == ALL_IDS
    assert stream.state_dict()["documents"] == 900
    first_unit = set(orders[0][:20])
    inside = [[id for id in order if id in first_unit] for order in orders]
    assert inside[0] != inside[1] != inside[2], "rows inside a unit are permuted anew too"


def test_documents_of_a_unit_stay_together_but_not_in_file_order(folder):
    ids = [id for id, _, _ in take(make_stream(folder), 20)]
    assert ids != sorted(ids)
    assert len({id[:14] for id in ids}) == 1, "one file"


def test_positions_count_documents_and_tokens(folder):
    documents = tokens = 0
    for doc in islice(make_stream(folder), 350):
        assert (doc.position.documents, doc.position.tokens) == (documents, tokens)
        documents, tokens = documents + 1, tokens + len(doc.tokens)


def test_the_splits_share_no_document_and_lose_none(folder):
    train, validation = (
        {id for id, _, _ in take(make_stream(folder, split=split, held_out_fraction=0.1, at_end="stop"), 10**6)}
        for split in ("train", "validation")
    )
    assert train | validation == ALL_IDS
    assert not train & validation
    assert validation == {id for id in ALL_IDS if is_held_out(id, 0.1)}
    assert 10 < len(validation) < 60


@pytest.mark.parametrize("batch", [1, 7, 64])
@pytest.mark.parametrize("split", ["train", "validation"])
def test_resuming_anywhere_gives_the_same_rest(folder, batch, split):
    options = {"split": split, "held_out_fraction": 0.2, "tokenize_batch": batch}
    wanted = take(make_stream(folder, **options), 400)
    for at in [0, 1, 15, 16, 17, 40, 239, 240, 241, 399]:
        stream = make_stream(folder, **options)
        assert take(stream, at) == wanted[:at]
        state = json.loads(json.dumps(stream.state_dict()))
        resumed = make_stream(folder, **{**options, "tokenize_batch": 5})
        resumed.load_state_dict(state)
        assert take(resumed, 400 - at) == wanted[at:]


def test_state_as_of_a_document_that_went_by_long_ago(folder):
    stream = make_stream(folder)
    docs = [next(stream) for _ in range(200)]
    for at in (0, 19, 20, 123):
        before = make_stream(folder)
        before.load_state_dict(stream.state_before(docs[at]))
        assert next(before).doc_id == docs[at].doc_id
        assert next(before).position == docs[at + 1].position
    assert len(json.dumps(stream.state_before(docs[7]))) < 600


@pytest.mark.parametrize(("setting", "value"), [("seed", 12), ("held_out_fraction", 0.1), ("split", "validation")])
def test_a_cursor_of_another_stream_is_refused(folder, setting, value):
    state = make_stream(folder).state_dict()
    with pytest.raises(DataError, match=setting):
        make_stream(folder, **{setting: value}).load_state_dict(state)


def test_a_cursor_for_other_files_is_refused(folder, tmp_path):
    write_corpus(tmp_path, files=4)
    with pytest.raises(DataError, match="fingerprint"):
        make_stream(tmp_path).load_state_dict(make_stream(folder).state_dict())


def corrupt(path, row_group):
    """Damage one row group of a 5-group file, in the middle of its pages."""
    content = bytearray(path.read_bytes())
    footer = int.from_bytes(content[-8:-4], "little") + 8
    content[int((len(content) - footer) * (row_group + 0.4) / 5)] ^= 0xFF
    path.write_bytes(content)


def test_a_corrupt_unit_is_skipped_and_the_order_of_the_rest_unchanged(tmp_path, caplog):
    write_corpus(tmp_path)
    calm = take(make_stream(tmp_path), 600)
    corrupt(tmp_path / "part-001.parquet", 2)
    lost = {r["id"] for r in make_records(100, seed=1)[40:60]}
    stream = make_stream(tmp_path)
    with caplog.at_level(logging.WARNING):
        shaken = take(stream, 560)
    assert [id for id, _, _ in shaken] == [id for id, _, _ in calm if id not in lost]
    assert len(stream.state_dict()["quarantined"]) == 1
    told = [record for record in caplog.records if "part-001.parquet, row group 2" in record.getMessage()]
    assert len(told) == 1, "said once, although two epochs passed it"


def test_the_quarantine_survives_a_restart_even_if_the_file_recovers(tmp_path):
    write_corpus(tmp_path)
    good = (tmp_path / "part-001.parquet").read_bytes()
    corrupt(tmp_path / "part-001.parquet", 2)
    stream = make_stream(tmp_path)
    shaken = take(stream, 560)
    again = make_stream(tmp_path)
    take(again, 281)
    state = json.loads(json.dumps(again.state_dict()))
    (tmp_path / "part-001.parquet").write_bytes(good)
    resumed = make_stream(tmp_path)
    resumed.load_state_dict(state)
    assert take(resumed, 279) == shaken[281:]
    assert len(resumed.state_dict()["quarantined"]) == 1


def test_too_many_corrupt_units_stop_the_stream_and_it_stays_stopped(tmp_path):
    write_corpus(tmp_path)
    for i, group in enumerate((0, 2, 4)):
        corrupt(tmp_path / f"part-{i:03d}.parquet", group)
    assert len(take(make_stream(tmp_path, at_end="stop", max_bad_units=3), 10**6)) == 240
    stream = make_stream(tmp_path, max_bad_units=2)
    for _ in range(2):
        with pytest.raises(DataError, match="max_bad_units") as caught:
            take(stream, 10**6)
    for i, group in enumerate((0, 2, 4)):
        assert f"part-{i:03d}.parquet, row group {group}" in str(caught.value)


def test_the_end_of_the_data_is_an_error_where_repeating_is_not_allowed(folder):
    stream = make_stream(folder, at_end="error")
    assert len(take(stream, 300)) == 300
    for _ in range(2):
        with pytest.raises(DataError, match=r"data\.on_end"):
            next(stream)


def test_a_split_without_documents_is_an_error_and_no_endless_loop(folder):
    with pytest.raises(DataError, match="held_out_fraction"):
        next(make_stream(folder, split="validation", held_out_fraction=0.0))


def test_empty_documents_are_never_handed_out(tmp_path):
    records = [{**r, "text": "" if i % 3 == 0 else r["text"]} for i, r in enumerate(make_records(60))]
    write_parquet(tmp_path / "p.parquet", [*records, {"id": "none", "text": None, "dump": ""}])
    stream = make_stream(tmp_path, at_end="stop")
    assert all(tokens for _, _, tokens in take(stream, 10**6))
    assert stream.state_dict()["documents"] == 40


def test_tokens_cannot_be_changed_by_whoever_receives_them(folder):
    with pytest.raises(ValueError, match="read-only"):
        next(make_stream(folder)).tokens[0] = 0


# Killed and started again, as real processes


def consume(folder: str, log: str, state: str, total: int) -> None:
    """A trainer in small: take a document, write down (document, offset), save the cursor every ten."""
    stream = make_stream(folder, held_out_fraction=0.05)
    if os.path.exists(state):
        saved = json.loads(Path(state).read_text())
        stream.load_state_dict(saved["stream"])
        os.truncate(log, saved["log_bytes"])
    with open(log, "a") as out:
        while stream.state_dict()["documents"] < total:
            doc = next(stream)
            print(doc.doc_id, doc.position.tokens, file=out)
            time.sleep(0.001)
            if stream.state_dict()["documents"] % 10 == 0:
                out.flush()
                unfinished = Path(f"{state}.tmp")
                unfinished.write_text(json.dumps({"stream": stream.state_dict(), "log_bytes": out.tell()}))
                os.replace(unfinished, state)


def start(folder, log, state, total):
    code = (
        "import sys; from tests.nsa_train.data.test_document_stream import consume; "
        "consume(*sys.argv[1:4], int(sys.argv[4]))"
    )
    root = Path(__file__).parents[3]
    return subprocess.Popen(
        [sys.executable, "-c", code, str(folder), str(log), str(state), str(total)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": import_path()},
    )


def test_killed_three_times_in_a_row_the_sequence_is_identical(folder, tmp_path):
    total = 900
    calm, shaken, state = tmp_path / "calm", tmp_path / "shaken", tmp_path / "state"
    assert start(folder, calm, tmp_path / "calm-state", total).wait(60) == 0
    rng, killed_at = random.Random(1), []
    for part in (1, 2, 3):
        process = start(folder, shaken, state, total)
        goal = part * 0.25 * calm.stat().st_size
        while process.poll() is None and (not shaken.exists() or shaken.stat().st_size < goal):
            time.sleep(0.002)
        time.sleep(rng.random() * 0.02)
        assert process.poll() is None, "finished before it could be killed"
        process.send_signal(signal.SIGKILL)
        assert process.wait(120) == -signal.SIGKILL
        killed_at.append(json.loads(state.read_text())["stream"]["documents"])
    assert start(folder, shaken, state, total).wait(60) == 0
    assert shaken.read_text() == calm.read_text()
    assert len(calm.read_text().splitlines()) == total
    assert 0 < killed_at[0] < killed_at[1] < killed_at[2] < total
