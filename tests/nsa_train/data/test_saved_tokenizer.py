"""tokenizer.json of both kinds of tokenizers is read back as the same tokenizer, or refused."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa.errors import ConfigError, DataError
from nsa_train.data.shards.manifest import ShardManifest, read_from_set, save_with_set
from nsa_train.data.tokenizer import (
    END_OF_TEXT,
    ByteTokenizer,
    choose_tokenizer,
    load_tokenizer,
    parse_saved,
    parse_tokenizer,
    tokenizer_record,
    train_bpe,
)
from nsa_train.storage import StorageFolder

TEXTS = ["Attention is a weighted average.", "naïve Größe 漢字 🙂\n\ttabs and\r\nlines\x00end", f"a {END_OF_TEXT} b"]
PIECES = st.one_of(st.text(max_size=40), st.sampled_from([END_OF_TEXT, "<|end", " ", "\n\n", "é", "\x00"]))
WHERE = Path("somewhere/tokenizer.json")


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    path = tmp_path_factory.mktemp("bpe") / "small.json"
    train_bpe(TEXTS * 20, 400, path)
    described = json.loads(path.read_text())
    described["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(described))
    return load_tokenizer(str(path))


@pytest.fixture(params=["byte", "bpe"], scope="module")
def tokenizer(request, bpe):
    return ByteTokenizer() if request.param == "byte" else bpe


def again(tokenizer):
    return parse_saved(tokenizer.to_json().encode(), WHERE, tokenizer_record(tokenizer))


def test_it_is_the_same_tokenizer_again(tokenizer):
    copy = again(tokenizer)
    assert type(copy) is type(tokenizer)
    assert tokenizer_record(copy) == tokenizer_record(tokenizer)
    assert copy.to_json() == tokenizer.to_json()
    assert pickle.loads(pickle.dumps(copy)).fingerprint == tokenizer.fingerprint


@settings(max_examples=60, deadline=None)
@given(st.lists(PIECES, max_size=6).map("".join))
def test_the_library_reads_the_bytes_file_as_bytes(text):
    from tokenizers import Tokenizer

    engine = Tokenizer.from_str(ByteTokenizer().to_json())
    engine.encode_special_tokens = True
    ids = engine.encode(text, add_special_tokens=False).ids
    assert ids == list(text.encode())
    assert engine.decode(ids) == text


def test_the_library_would_write_the_same_file():
    from tokenizers import Tokenizer

    text = ByteTokenizer().to_json()
    assert json.loads(Tokenizer.from_str(text).to_str()) == json.loads(text)


def test_parts_that_other_readers_would_apply_are_not_saved(bpe):
    described = json.loads(bpe.to_json())
    assert [described[part] for part in ("truncation", "padding", "post_processor")] == [None] * 3
    for ours, theirs in zip(bpe.encode_batch(TEXTS), again(bpe).encode_batch(TEXTS), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_folder_with_a_saved_byte_tokenizer_is_the_byte_tokenizer(tmp_path):
    (tmp_path / "tokenizer.json").write_text(ByteTokenizer().to_json())
    assert load_tokenizer(str(tmp_path)).fingerprint == ByteTokenizer.fingerprint


def test_other_ids_in_a_byte_file_are_another_tokenizer():
    described = json.loads(ByteTokenizer().to_json())
    vocabulary = described["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    assert parse_tokenizer(json.dumps(described).encode(), WHERE).fingerprint != ByteTokenizer.fingerprint


def test_another_end_of_document_token_is_kept(bpe):
    record = tokenizer_record(bpe)
    other = parse_tokenizer(bpe.to_json().encode(), WHERE, eos_token=65)
    assert other.eos_id == 65
    assert other.fingerprint != bpe.fingerprint
    assert parse_saved(other.to_json().encode(), WHERE, tokenizer_record(other)).eos_id == 65
    with pytest.raises(DataError, match="fingerprint"):
        parse_saved(bpe.to_json().encode(), WHERE, {**record, "eos_id": 65})


@pytest.mark.parametrize(
    "record",
    [{}, {"vocab_size": "400"}, {"vocab_size": 400, "fingerprint": 1, "eos_id": 0}, {"eos_id": True}],
)
def test_a_record_of_the_wrong_types_is_refused(bpe, record):
    with pytest.raises(DataError, match="record"):
        parse_saved(bpe.to_json().encode(), WHERE, record)


@pytest.mark.parametrize("eos_id", [-1, 10**6, 2**40])
def test_an_end_of_document_id_outside_the_vocabulary_is_refused(bpe, eos_id):
    with pytest.raises(ConfigError, match="end-of-document"):
        parse_tokenizer(bpe.to_json().encode(), WHERE, eos_token=eos_id)


def manifest_of(tokenizer) -> ShardManifest:
    return ShardManifest(tokenizer.vocab_size, tokenizer.fingerprint, tokenizer.eos_id, "uint16", {}, [], {})


def test_a_prepared_set_keeps_its_tokenizer(tokenizer, tmp_path):
    folder = StorageFolder(str(tmp_path))
    assert read_from_set(folder, manifest_of(tokenizer)) is None
    save_with_set(folder, tokenizer, tokenizer.vocab_size, tokenizer.fingerprint)
    saved = read_from_set(folder, manifest_of(tokenizer))
    assert saved is not None
    assert saved.fingerprint == tokenizer.fingerprint


def test_a_set_does_not_keep_or_read_another_tokenizer(bpe, tmp_path):
    folder = StorageFolder(str(tmp_path))
    with pytest.raises(DataError):
        save_with_set(folder, bpe, 257, ByteTokenizer.fingerprint)
    assert not folder.exists("tokenizer.json")
    save_with_set(folder, bpe, bpe.vocab_size, bpe.fingerprint)
    with pytest.raises(DataError):
        read_from_set(folder, manifest_of(ByteTokenizer()))


def test_a_given_tokenizer_stands_in_for_none_and_must_else_be_the_kept_one(tokenizer, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer.to_json())
    assert choose_tokenizer(None, None) is None
    assert choose_tokenizer(None, tokenizer) is tokenizer
    same = "byte" if isinstance(tokenizer, ByteTokenizer) else path
    for saved in (None, tokenizer):
        assert choose_tokenizer(same, saved).fingerprint == tokenizer.fingerprint
    other = ByteTokenizer() if same is path else train_bpe(TEXTS * 20, 400, path)
    with pytest.raises(DataError, match="fingerprint"):
        choose_tokenizer(same, other)
