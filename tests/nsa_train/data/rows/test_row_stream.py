"""The direct stream's rows: cursors, waste, ends, held-out documents."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from nsa.errors import ConfigError, DataError
from nsa_train.data.document import is_held_out
from nsa_train.data.rows.batch import Batch, EndOfData
from nsa_train.data.rows.packing import make_packer
from nsa_train.data.rows.row_stream import DirectRowStream, RowStream
from nsa_train.data.rows.specs import DirectData
from tests.nsa_train.data.shard_sets import EOS, MemoryStream, documents


def _stream(packing: str = "concat", *, seq_len: int = 32, epochs: int = 3, seed: int = 0) -> DirectRowStream:
    packer = make_packer(packing, seq_len=seq_len, eos_id=EOS, dtype=np.dtype(np.uint16), buffer_rows=4)
    return DirectRowStream(
        MemoryStream(documents(60), seed=seed, epochs=epochs), packer, seq_len=seq_len, packing=packing
    )


def _until_end(stream: RowStream, rows: int) -> Iterator[Batch]:
    for _ in range(10_000):
        try:
            yield stream.next_batch(rows)
        except EndOfData:
            return
    pytest.fail("the documents never ended")


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_a_cursor_at_every_batch_continues_exactly(packing: str) -> None:
    calm = _stream(packing)
    batches, states = [], []
    for _ in range(30):
        states.append(json.dumps(calm.state_dict()))
        batches.append(calm.next_batch(4).tokens)
    for i in range(30):
        stream = _stream(packing)
        stream.load_state_dict(json.loads(states[i]))
        assert json.dumps(stream.state_dict()) == states[i]
        for expected in batches[i : i + 3]:
            assert np.array_equal(stream.next_batch(4).tokens, expected)


def test_batches_of_another_size_cut_the_same_sequence() -> None:
    one, other = _stream(), _stream()
    rows = np.concatenate([one.next_batch(6).tokens for _ in range(4)])
    assert np.array_equal(np.concatenate([other.next_batch(n).tokens for n in (1, 11, 4, 8)]), rows)


def test_waste_is_in_the_cursor() -> None:
    stream = _stream("best_fit")
    padded = 0
    for _ in range(20):
        batch = stream.next_batch(4)
        padded += batch.tokens.size - batch.valid_tokens
    assert stream.state_dict()["padding_tokens"] == padded
    assert 0 < padded < 0.25 * 20 * 4 * 32


def test_the_end_of_the_documents_is_an_error_and_never_other_tokens() -> None:
    docs = documents(60)
    stream = _stream(epochs=1)
    real = {t for _, tokens in docs for t in tokens.tolist()} | {EOS}
    served = 0
    for batch in _until_end(stream, 1):
        served += batch.valid_tokens
        assert set(batch.tokens.reshape(-1).tolist()) <= real
    assert served == sum(len(tokens) + 1 for _, tokens in docs)


def test_an_end_inside_a_batch_leaves_the_cursor_at_the_last_whole_one() -> None:
    stream = _stream(epochs=1)
    states = [stream.state_dict() for _ in _until_end(stream, 7)]
    assert stream.state_dict() == states[-1]


def test_another_packing_refuses_the_cursor() -> None:
    with pytest.raises(ConfigError, match="packing"):
        _stream("best_fit").load_state_dict(_stream().state_dict())


def _corpus(path: Path) -> str:
    lines = [json.dumps({"id": f"doc {i}", "text": f"text of document {i}. " * (i % 7)}) for i in range(200)]
    path.write_text("\n".join(lines))
    return str(path)


def test_held_out_documents_are_in_no_training_row(tmp_path: Path) -> None:
    source = _corpus(tmp_path / "a.jsonl")
    ids_of: dict[str, set[str]] = {"train": set(), "validation": set()}
    for split, seen in ids_of.items():
        data = DirectData(source, "byte", seq_len=64, split=split, held_out_fraction=0.2, at_end="stop")  # type: ignore[arg-type]
        stream = data.open()
        for batch in _until_end(stream, 1):
            seen |= {s.doc_id for row in batch.provenance or () for s in row}
    assert not ids_of["train"] & ids_of["validation"]
    assert all(is_held_out(doc, 0.2) for doc in ids_of["validation"])
    assert len(ids_of["train"]) + len(ids_of["validation"]) == 200 - len(range(0, 200, 7))  # every seventh is empty


def test_another_seed_refuses_the_cursor(tmp_path: Path) -> None:
    source = _corpus(tmp_path / "a.jsonl")
    first = DirectData(source, "byte", seq_len=64, seed=1).open()
    first.next_batch(2)
    with pytest.raises(DataError, match="seed"):
        DirectData(source, "byte", seq_len=64, seed=2).open().load_state_dict(first.state_dict())
