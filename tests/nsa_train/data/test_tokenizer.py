import json
import pickle
import re

import numpy as np
import pytest

from nsa.errors import ConfigError, DataError
from nsa_train.data.document import is_held_out
from nsa_train.data.tokenizer import (
    END_OF_TEXT,
    ByteTokenizer,
    JsonTokenizer,
    check_same,
    load_tokenizer,
    token_dtype,
    train_bpe,
)

TEXTS = [
    "Attention is a weighted average of values.",
    "",
    "naïve Größe 漢字 🙂\n\ttabs and\r\nlines\x00end",
    "ends itself <|endoftext|> or not",
]


@pytest.fixture(scope="module")
def bpe_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("bpe") / "small.json"
    train_bpe(TEXTS * 20, 400, path)
    return path


@pytest.fixture(params=["byte", "bpe"])
def tokenizer(request, bpe_path):
    return load_tokenizer("byte" if request.param == "byte" else str(bpe_path))


def test_text_survives_encoding_exactly(tokenizer):
    encoded = tokenizer.encode_batch(TEXTS)
    assert [tokenizer.decode(ids) for ids in encoded] == TEXTS
    assert all(ids.dtype == token_dtype(tokenizer.vocab_size) for ids in encoded)


def test_no_text_can_produce_the_end_of_document_id(tokenizer):
    encoded = tokenizer.encode_batch([*TEXTS, END_OF_TEXT, f"{END_OF_TEXT}{END_OF_TEXT}"])
    assert all(tokenizer.eos_id not in ids for ids in encoded)
    assert all(ids.size == 0 or ids.max() < tokenizer.vocab_size for ids in encoded)


def test_a_worker_process_gets_the_same_tokenizer(tokenizer):
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.fingerprint == tokenizer.fingerprint
    for ours, theirs in zip(tokenizer.encode_batch(TEXTS), copy.encode_batch(TEXTS), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_the_width_of_an_id_changes_at_65536():
    assert token_dtype(65_536) == np.uint16
    assert token_dtype(65_537) == np.uint32


def test_training_twice_gives_the_same_ids(bpe_path, tmp_path):
    again = train_bpe(TEXTS * 20, 400, tmp_path / "again.json")
    assert again.fingerprint == JsonTokenizer(bpe_path).fingerprint


def test_fingerprint_follows_ids_and_not_layout(bpe_path, tmp_path):
    described = json.loads(bpe_path.read_text())
    original = JsonTokenizer(bpe_path).fingerprint

    moved = tmp_path / "moved.json"
    described["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    moved.write_text(json.dumps(described, indent=3))
    truncating = JsonTokenizer(moved)
    assert truncating.fingerprint == original
    assert len(truncating.encode_batch(TEXTS)[0]) > 2

    described["model"]["merges"] = described["model"]["merges"][:-1]
    other = tmp_path / "other.json"
    other.write_text(json.dumps(described))
    assert JsonTokenizer(other).fingerprint != original


def test_eos_is_found_named_or_asked_for(bpe_path, tmp_path):
    described = json.loads(bpe_path.read_text())
    described["model"]["vocab"] |= {"<a>": 900, "<b>": 901}
    described["added_tokens"] = [
        {**described["added_tokens"][0], "content": name, "id": 900 + i} for i, name in enumerate(["<a>", "<b>"])
    ]
    path = tmp_path / "two.json"
    path.write_text(json.dumps(described))
    with pytest.raises(ConfigError, match="eos_token"):
        JsonTokenizer(path)
    named = JsonTokenizer(path, eos_token="<b>")
    assert named.eos_id == 901
    assert named.vocab_size == 902, "ids with gaps: the largest one decides"
    with pytest.raises(ConfigError, match="<c>"):
        JsonTokenizer(path, eos_token="<c>")


@pytest.mark.parametrize("content", [None, "{", "{}"])
def test_a_bad_file_is_refused_by_name(tmp_path, content):
    path = tmp_path / "bad.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=str(path)):
        load_tokenizer(str(path))


def test_one_that_encodes_a_text_differently_each_time_is_refused(bpe_path, tmp_path):
    described = json.loads(bpe_path.read_text())
    described["model"]["dropout"] = 0.1
    path = tmp_path / "random.json"
    path.write_text(json.dumps(described))
    with pytest.raises(ConfigError, match=r"model\.dropout 0\.1.*Set it to null"):
        load_tokenizer(str(path))


def test_too_small_a_vocabulary_is_refused(tmp_path):
    with pytest.raises(ConfigError):
        train_bpe(TEXTS, 256, tmp_path / "t.json")


def test_an_artefact_of_another_tokenizer_is_refused(bpe_path):
    byte, bpe = ByteTokenizer(), JsonTokenizer(bpe_path)
    check_same(byte.vocab_size, byte.fingerprint, byte)
    with pytest.raises(DataError) as caught:
        check_same(bpe.vocab_size, bpe.fingerprint, byte)
    for value in (bpe.vocab_size, bpe.fingerprint, byte.vocab_size, byte.fingerprint):
        assert str(value) in str(caught.value)
    with pytest.raises(DataError):
        check_same(byte.vocab_size, bpe.fingerprint, byte)


def test_held_out_is_a_stable_share_that_only_grows():
    ids = [f"<urn:uuid:{i:08x}>" for i in range(20_000)]
    one, five = ({i for i in ids if is_held_out(i, share)} for share in (0.01, 0.05))
    assert one < five
    assert 140 < len(one) < 260
    assert 880 < len(five) < 1120
    assert not any(is_held_out(i, 0.0) for i in ids)
    assert all(is_held_out(i, 1.0) for i in ids)
    held_out = [i for i in range(10) if is_held_out(f"document-{i}", 0.5)]
    assert held_out == [6, 8, 9], "a changed hash would move documents between the splits of runs that exist"


@pytest.mark.parametrize(
    ("spec", "command"),
    [
        ("gpt2", "hf download gpt2 tokenizer.json --local-dir gpt2"),
        ("openai-community/gpt2", "hf download openai-community/gpt2 tokenizer.json --local-dir gpt2"),
        ("bpe.json", None),
        ("folder/below/bpe", None),
        ("../gpt2", None),
    ],
)
def test_the_name_of_a_model_is_answered_with_the_command_that_downloads_its_tokenizer(
    spec, command, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refusal:
        load_tokenizer(spec)
    assert re.findall(r"hf download [^`]*", str(refusal.value)) == ([command] if command else [])
