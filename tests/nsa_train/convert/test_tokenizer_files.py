"""Transformers reads our tokenizers with the same ids, and we read its files as the same tokenizer."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa.errors import NSAError
from nsa_train.data.tokenizer import END_OF_TEXT, ByteTokenizer, JsonTokenizer, load_tokenizer, train_bpe

pytest.importorskip("transformers", reason="Transformers is in the hf extra")
from transformers import AutoTokenizer

from nsa_train.convert.tokenizer_files import read_tokenizer_files, tokenizer_files, transformers_tokenizer

TEXTS = ["Attention is a weighted average.", "naïve Größe 漢字 🙂\n\ttabs and\r\nlines\x00end", f"a {END_OF_TEXT} b"]
PIECES = st.one_of(
    st.text(max_size=40), st.sampled_from([END_OF_TEXT, END_OF_TEXT[:-1], "<s>", " ", "  \n", "é", "e\u0301", "\x00"])
)
KINDS = ("byte", "bpe", "other_end", "decorated")


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bpe")
    bpe = train_bpe(TEXTS * 20, 400, folder / "small.json")
    described = json.loads((folder / "small.json").read_text())
    # A published tokenizer: adds a token at the front, cuts and pads.
    described["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": END_OF_TEXT, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {END_OF_TEXT: {"id": END_OF_TEXT, "ids": [0], "tokens": [END_OF_TEXT]}},
    }
    described["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    (folder / "decorated.json").write_text(json.dumps(described))
    return {
        "byte": ByteTokenizer(),
        "bpe": bpe,
        "other_end": JsonTokenizer(folder / "small.json", eos_token="e"),
        "decorated": load_tokenizer(str(folder / "decorated.json")),
    }


@pytest.fixture(scope="module")
def folders(ours, tmp_path_factory):
    folder_of = {}
    for kind, tokenizer in ours.items():
        folder_of[kind] = tmp_path_factory.mktemp(kind)
        for name, text in tokenizer_files(tokenizer, 128).items():
            (folder_of[kind] / name).write_text(text, encoding="utf-8")
    return folder_of


@pytest.fixture(scope="module")
def theirs(folders):
    return {kind: AutoTokenizer.from_pretrained(folder) for kind, folder in folders.items()}


@settings(max_examples=80, deadline=None)
@given(text=st.lists(PIECES, max_size=8).map("".join))
def test_every_text_has_the_same_ids_and_comes_back(ours, theirs, text):
    for kind in KINDS:
        ids = theirs[kind](text)["input_ids"]
        assert ids == ours[kind].encode_batch([text])[0].tolist(), kind
        assert theirs[kind].decode(ids) == ours[kind].decode(ids) or ours[kind].eos_id in ids, kind
        assert theirs[kind].decode(ids) == text, kind


@pytest.mark.parametrize("kind", KINDS)
def test_a_tokenizer_without_files_is_the_one_with_files(ours, theirs, kind):
    direct = transformers_tokenizer(ours[kind], 128)
    for text in TEXTS:
        assert direct(text)["input_ids"] == theirs[kind](text)["input_ids"]
    assert (direct.eos_token_id, direct.pad_token_id) == (ours[kind].eos_id,) * 2
    assert (direct.padding_side, direct.model_max_length) == ("left", 128)


@pytest.mark.parametrize("kind", KINDS)
def test_the_files_are_read_back_as_the_same_tokenizer(ours, folders, kind):
    again = read_tokenizer_files(folders[kind])
    assert again is not None
    assert again.fingerprint == ours[kind].fingerprint
    assert tokenizer_files(again, 128) == tokenizer_files(ours[kind], 128)


@pytest.mark.parametrize("kind", KINDS)
def test_what_transformers_saves_is_the_same_tokenizer(ours, theirs, kind, tmp_path):
    theirs[kind].save_pretrained(tmp_path)
    saved = AutoTokenizer.from_pretrained(tmp_path)
    assert all(saved(text)["input_ids"] == theirs[kind](text)["input_ids"] for text in TEXTS)
    again = read_tokenizer_files(tmp_path)
    assert again is not None
    assert again.eos_id == ours[kind].eos_id
    assert all((a == b).all() for a, b in zip(again.encode_batch(TEXTS), ours[kind].encode_batch(TEXTS), strict=True))


def test_a_special_token_is_read_as_one_on_request(ours, theirs):
    for kind in ("byte", "bpe"):
        assert ours[kind].eos_id in theirs[kind](END_OF_TEXT, split_special_tokens=False)["input_ids"]
        assert ours[kind].eos_id not in theirs[kind](END_OF_TEXT)["input_ids"]


def test_a_folder_without_a_tokenizer_has_none(tmp_path):
    assert read_tokenizer_files(tmp_path) is None


DEEP = "[" * 100_000
HOSTILE = {
    "no config": lambda folder: (folder / "tokenizer_config.json").unlink(),
    "end is a number": lambda folder: (folder / "tokenizer_config.json").write_text('{"eos_token": 256}'),
    "no end": lambda folder: (folder / "tokenizer_config.json").write_text("{}"),
    "unknown end": lambda folder: (folder / "tokenizer_config.json").write_text('{"eos_token": "<|nothing|>"}'),
    "config of NaN": lambda folder: (folder / "tokenizer_config.json").write_text('{"eos_token": NaN}'),
    "config is a list": lambda folder: (folder / "tokenizer_config.json").write_text("[]"),
    "deep config": lambda folder: (folder / "tokenizer_config.json").write_text(DEEP),
    "deep tokenizer": lambda folder: (folder / "tokenizer.json").write_text(DEEP),
    "tokenizer of a list": lambda folder: (folder / "tokenizer.json").write_text("[]"),
    "tokenizer of bytes": lambda folder: (folder / "tokenizer.json").write_bytes(b"\xff\xfe\x00"),
    "no model": lambda folder: (folder / "tokenizer.json").write_text('{"added_tokens": []}'),
    "unknown model": lambda folder: (folder / "tokenizer.json").write_text('{"model": {"type": "Pickle"}}'),
    "empty vocabulary": lambda folder: (folder / "tokenizer.json").write_text(
        '{"model": {"type": "BPE", "vocab": {}, "merges": []}}'
    ),
    "merge of unknown tokens": lambda folder: (folder / "tokenizer.json").write_text(
        '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}}'
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused(ours, case, tmp_path):
    for name, text in tokenizer_files(ours["bpe"], 128).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    HOSTILE[case](tmp_path)
    with pytest.raises(NSAError):
        read_tokenizer_files(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_links_pipes_and_huge_files_are_refused(ours, name, tmp_path, monkeypatch):
    import os

    for file, text in tokenizer_files(ours["bpe"], 128).items():
        (tmp_path / file).write_text(text, encoding="utf-8")
    os.rename(tmp_path / name, tmp_path / "elsewhere")
    (tmp_path / name).symlink_to("elsewhere")
    with pytest.raises(NSAError, match="link"):
        read_tokenizer_files(tmp_path)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(NSAError):
        read_tokenizer_files(tmp_path)
    (tmp_path / name).unlink()
    with (tmp_path / name).open("wb") as file:
        file.truncate(1 << 40)  # sparse
    monkeypatch.setattr("nsa_train.convert.tokenizer_files.LARGEST_TOKENIZER_BYTES", 1 << 20)
    with pytest.raises(NSAError, match="bytes"):
        read_tokenizer_files(tmp_path)
