"""Numbers of tokens in options: plain, or in units of 1,024."""

import pytest

from nsa.errors import ConfigError
from nsa.token_counts import parse_count, parse_lengths, spell


@pytest.mark.parametrize(("text", "lengths"), [("2k, 100,64K", [2048, 100, 65_536]), ("1k 2k", [1024, 2048])])
def test_lengths_are_read(text, lengths):
    assert parse_lengths(text) == lengths
    assert parse_lengths(",".join(map(spell, lengths))) == lengths


@pytest.mark.parametrize("word", ["", "k", "0", "-1", "1.5k", "4x", "²", "4kk"])
def test_what_is_no_number_of_tokens_is_refused_with_the_option(word):
    with pytest.raises(ConfigError, match="--seq-len"):
        parse_count(word, "--seq-len")


@pytest.mark.parametrize("text", ["", " , ", "2k,long"])
def test_lengths_without_a_length_are_refused(text):
    with pytest.raises(ConfigError, match="--lengths"):
        parse_lengths(text)


def test_a_length_is_spelled_as_it_is_read():
    assert [spell(n) for n in (2048, 100)] == ["2k", "100"]
