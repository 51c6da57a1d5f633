"""Text comes out of tokens piece by piece: no piece is ever wrong, and together they are the text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa_train.convert.tokenizer_files import transformers_tokenizer
from nsa_train.data.tokenizer import ByteTokenizer, train_bpe
from nsa_train.infer.generate import TextStream

BYTES = transformers_tokenizer(ByteTokenizer(), 64)


def streamed(tokens, tokenizer=BYTES, stop=()):
    stream = TextStream(tokenizer, stop)
    pieces = [stream.push(token) for token in tokens]
    return stream, [*pieces, stream.finish()]


def test_a_character_is_held_back_until_its_last_byte():
    _, pieces = streamed("a€😀b".encode())
    assert pieces == ["a", "", "", "€", "", "", "", "😀", "b", ""]


def test_an_incomplete_last_character_is_shown_as_such_at_the_end():
    assert streamed("a€".encode()[:-1])[1] == ["a", "", "", "�"]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 256), max_size=90), st.lists(st.integers(0, 256), max_size=90))
def test_pieces_of_any_bytes_are_the_decoded_text(first, second):
    tokens = first + list("é€".encode()) + second
    stream, pieces = streamed(tokens)
    assert "".join(pieces) == stream.text == BYTES.decode(tokens, skip_special_tokens=True)


def test_a_long_text_without_spaces_is_decoded_with_a_bounded_window():
    class Counting:
        longest = 0

        def decode(self, ids, **options):
            self.longest = max(self.longest, len(ids))
            return BYTES.decode(ids, **options)

    tokenizer = Counting()
    text = "äx" * 2000
    assert "".join(streamed(text.encode(), tokenizer)[1]) == text
    assert tokenizer.longest < 80


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    text = "the quick brown fox jumps over the lazy dog, wörtlich: 12 €. "
    return transformers_tokenizer(train_bpe([text] * 4, 330, tmp_path_factory.mktemp("bpe") / "bpe.json"), 64)


def test_words_of_a_bpe_keep_their_spaces(bpe):
    text = "the fox jumps  over 7 lazy € dogs\n and sleeps" * 5
    ids = bpe(text)["input_ids"]
    assert len(ids) < len(text.encode())
    assert "".join(streamed(ids, bpe)[1]) == text


@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        ("one two three", ("two",), "one "),
        ("one two three", ("three", "two"), "one "),
        ("aaab", ("aab",), "a"),
        ("ababac", ("abac",), "ab"),
        ("one two", ("twox",), "one two"),
        ("ein € zwei", ("€ z",), "ein "),
        ("stop", ("stop",), ""),
        ("xab", ("b", "ab"), "x"),
    ],
)
def test_text_ends_before_a_stop_string_and_none_of_it_is_ever_shown(text, stop, shown):
    stream, pieces = streamed([*text.encode(), *b" more"], stop=stop)
    assert "".join(pieces).removesuffix(" more") == stream.text.removesuffix(" more") == shown
    assert (stream.stopped_by in stop) == (stream.text == shown)


def test_the_beginning_of_a_stop_string_is_text_if_nothing_follows():
    stream, pieces = streamed(b"one tw", stop=["two"])
    assert "".join(pieces) == stream.text == "one tw"
    assert stream.stopped_by is None


def test_text_that_cannot_become_a_stop_string_is_not_held_back():
    stream = TextStream(BYTES, ["END"])
    assert [stream.push(token) for token in b"aENx"] == ["a", "", "", "ENx"]
